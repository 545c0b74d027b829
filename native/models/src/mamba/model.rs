//! A model with its weights in the memory of its device.

use super::layers::Layers;
use super::step::Stepper;
use super::stored;
use super::{Checkpoint, Config, Layer, Weight, Weights};
use crate::watch::{Stage, Tally, Unwatched, Watch};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cpu::matrix::SEVERAL;
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::ops::products::matrices::{Matrix, Quantization};
use sidewinder_kernels::place::Place;
use sidewinder_kernels::tensor::{DType, Described, Spec, View, ViewMut};
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

/// Where a model runs.
#[derive(Clone)]
pub enum Where {
    /// On the CPU.
    Cpu(Exec),
    /// On a CUDA device; the flag allows TF32.
    Cuda(Device, bool),
}

/// A model with its weights in the memory of its device. It is immutable, so threads may share it.
pub struct Model {
    config: Config,
    dtype: DType,
    pub(super) home: Home,
    /// Recorded decode steps by their padded batch size.
    steppers: Mutex<HashMap<usize, Arc<Mutex<Stepper>>>>,
}

/// The weights in the memory of their device.
pub(super) enum Home {
    Cpu(Weights<Weight>, Exec),
    Cuda(Weights<Buffer>, Device, bool),
}

/// The input of a model.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// Concatenated sequences of tokens, all of equal length.
    Tokens(&'a [u32]),
    /// Rows of features, (..., M), on the host.
    Features(View<'a>),
}

/// The destination of results: memory of the device, or the host.
pub(super) enum Target<'a, P: Place> {
    There(P::ViewMut<'a>),
    Host(ViewMut<'a>),
}

/// Binds `$layers` to the model on its device, runs the expression for that device, and waits for it to finish.
macro_rules! at_home {
    ($model:expr, $layers:ident => cpu $cpu:expr, cuda $cuda:expr) => {
        match &$model.home {
            $crate::mamba::model::Home::Cpu(weights, exec) => {
                let (place, weights) =
                    (::sidewinder_kernels::place::Cpu(exec), weights.map($crate::mamba::Weight::view));
                let $layers = $model.layers(&place, &weights);
                $cpu
            }
            $crate::mamba::model::Home::Cuda(weights, device, tf32) => {
                let lane = device.lane()?.allow_tf32(*tf32);
                let (place, weights) = (::sidewinder_kernels::place::Cuda(&lane), weights.map(Clone::clone));
                let $layers = $model.layers(&place, &weights);
                $cuda?;
                lane.synchronize()
            }
        }
    };
}
pub(super) use at_home;

impl Model {
    /// The model of a checkpoint, in `dtype` or by default in the type of its matrices.
    pub fn new(checkpoint: Checkpoint, dtype: Option<DType>, backbone: bool, place: Where) -> Result<Model> {
        Model::watched(checkpoint, dtype, backbone, None, place, &Unwatched)
    }

    /// Like [`Model::new`], with the large matrices quantized. Activations between layers have the requested type,
    /// which must not be f64.
    pub fn quantized(
        checkpoint: Checkpoint,
        dtype: Option<DType>,
        backbone: bool,
        how: Quantization,
        place: Where,
    ) -> Result<Model> {
        Model::watched(checkpoint, dtype, backbone, Some(how), place, &Unwatched)
    }

    /// Like [`Model::new`] or [`Model::quantized`], with reports to `watch`.
    pub fn watched(
        checkpoint: Checkpoint,
        dtype: Option<DType>,
        backbone: bool,
        how: Option<Quantization>,
        place: Where,
        watch: &dyn Watch,
    ) -> Result<Model> {
        let (config, dtype, weights) = checkpoint.model_watched(dtype, backbone, watch)?;
        let weights = match how {
            None => weights,
            Some(how) => quantized(weights, dtype, how, &place, watch)?,
        };
        let home = match place {
            Where::Cpu(exec) => Home::Cpu(weights, exec),
            Where::Cuda(device, tf32) => Home::Cuda(upload(&weights, &device, watch)?, device, tf32),
        };
        Ok(Model { config, dtype, home, steppers: Mutex::default() })
    }

    /// The model's sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The type of the matrices, and of the activations between layers.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The largest batch of a decode step in which each sequence gets the same bits as alone. On CPUs, larger batches
    /// are summed in another order, after which quantizing an activation may give other integers. GPUs do not guarantee
    /// equal bits, so they set no limit.
    pub fn alike(&self) -> usize {
        match &self.home {
            Home::Cpu(weights, _) if weights.is_quantized() => 1,
            Home::Cpu(..) => SEVERAL - 1,
            Home::Cuda(..) => usize::MAX,
        }
    }

    /// The quantization formats of its matrices; empty for a model of floats.
    pub fn formats(&self) -> BTreeSet<&'static str> {
        match &self.home {
            Home::Cpu(weights, _) => weights.formats(),
            Home::Cuda(weights, ..) => weights.formats(),
        }
    }

    /// Where it runs.
    pub fn place(&self) -> Where {
        match &self.home {
            Home::Cpu(_, exec) => Where::Cpu(*exec),
            Home::Cuda(_, device, tf32) => Where::Cuda(device.clone(), *tf32),
        }
    }

    /// The CUDA device of the weights; `None` on the CPU.
    pub fn device(&self) -> Option<&Device> {
        match &self.home {
            Home::Cpu(..) => None,
            Home::Cuda(_, device, _) => Some(device),
        }
    }

    /// The weights on the host, with the names and shapes of Hugging Face's files, which [`Checkpoint`] reads back.
    /// Tied embeddings are listed once. Weights that are on the host already are not copied. Fails for a quantized
    /// model.
    pub fn tensors(&self) -> Result<Vec<(String, Weight)>> {
        if !self.formats().is_empty() {
            return Err(Error::new(Kind::Argument, "model")
                .expected("a model whose weights are floats")
                .got("a quantized one")
                .hint("Load it without `quantize`"));
        }
        self.stored()
    }

    /// Like [`Model::tensors`], including the parts of quantized matrices, with the names that [`Checkpoint`] reads.
    pub fn stored(&self) -> Result<Vec<(String, Weight)>> {
        match &self.home {
            Home::Cpu(weights, _) => filed(&self.config, weights, same_weight, |weight| Ok(weight.clone())),
            Home::Cuda(weights, device, _) => {
                let lane = device.lane()?;
                filed(&self.config, weights, Buffer::same, |buffer| Ok(lane.downloaded(buffer)?.into()))
            }
        }
    }

    /// The spec of the output for input with these leading axes: logits, or normed features of a backbone.
    pub fn output(&self, leading: &[usize]) -> Result<Spec> {
        let Config { width, vocabulary, .. } = self.config;
        let width = if vocabulary > 0 { vocabulary } else { width };
        Spec::new(self.dtype, &[leading, &[width]].concat())
    }

    /// The forward pass over `batch` whole sequences, with the output on the host.
    pub fn forward(&self, input: Input, batch: usize, to: ViewMut) -> Result<()> {
        self.forward_watched(input, batch, to, &Unwatched)
    }

    /// Like [`Model::forward`], with reports to `watch`.
    pub fn forward_watched(&self, input: Input, batch: usize, to: ViewMut, watch: &dyn Watch) -> Result<()> {
        self.check(input)?;
        let tally = Tally::begin(watch, Stage::Forward, self.parts())?;
        at_home!(self, layers =>
            cpu whole(&layers, input, batch, Target::There(to), &tally),
            cuda whole(&layers, input, batch, Target::Host(to), &tally))
    }

    /// Like [`Model::forward_watched`], with the output in memory of the model's device.
    pub fn forward_there(&self, input: Input, batch: usize, to: &Buffer, watch: &dyn Watch) -> Result<()> {
        self.check(input)?;
        let tally = Tally::begin(watch, Stage::Forward, self.parts())?;
        at_home!(self, layers =>
            cpu Err(layers.elsewhere(to)),
            cuda whole(&layers, input, batch, Target::There(to.clone()), &tally))
    }

    /// The number of parts of a pass in reports: the layers, and the head.
    pub(super) fn parts(&self) -> usize {
        self.config.layers + 1
    }

    /// The recorded step for `batch` sequences, padded; `None` if the model has none. Created on first use.
    pub(super) fn stepper(&self, batch: usize) -> Result<Option<Arc<Mutex<Stepper>>>> {
        let Home::Cuda(weights, device, tf32) = &self.home else {
            return Ok(None);
        };
        let Some(size) = Stepper::size(&self.config, self.dtype, batch, device) else {
            return Ok(None);
        };
        let mut steppers = self.steppers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stepper) = steppers.get(&size) {
            return Ok(Some(stepper.clone()));
        }
        let stepper = Stepper::new(&self.config, self.dtype, weights.map(Clone::clone), size, (device, *tf32))?;
        let stepper = Arc::new(Mutex::new(stepper));
        steppers.insert(size, stepper.clone());
        Ok(Some(stepper))
    }

    pub(super) fn layers<'p, 'w, P: Place>(
        &'p self,
        place: &'p P,
        weights: &'p Weights<P::View<'w>>,
    ) -> Layers<'p, 'w, P> {
        Layers { place, config: &self.config, dtype: self.dtype, weights }
    }

    /// The number of rows of an input. Refuses tokens and features that do not match the weights.
    pub(super) fn check(&self, input: Input) -> Result<usize> {
        let Config { width, vocabulary, .. } = self.config;
        match input {
            Input::Tokens(_) if vocabulary == 0 => Err(Error::new(Kind::Argument, "input")
                .expected(format_args!("features of width {width}"))
                .got("tokens")
                .hint("This model is a backbone: it has no embedding")),
            Input::Tokens(tokens) => check_tokens(tokens, vocabulary).map(|()| tokens.len()),
            Input::Features(_) if vocabulary > 0 => Err(Error::new(Kind::Argument, "input")
                .expected(format_args!("numbers from 0 to {}", vocabulary - 1))
                .got("features")
                .hint("This model is one of tokens; loaded as a backbone it takes features")),
            Input::Features(features) => {
                let spec = features.spec();
                let rows = spec.shape.split_last().filter(|(last, _)| **last == width && spec.dtype == self.dtype);
                rows.map(|(_, rows)| rows.iter().product()).ok_or_else(|| {
                    Error::new(Kind::Shape, "features")
                        .expected(format_args!("{} (..., {width})", self.dtype))
                        .got(spec)
                })
            }
        }
    }
}

/// Refuses tokens outside the vocabulary.
pub(super) fn check_tokens(tokens: &[u32], vocabulary: usize) -> Result<()> {
    match tokens.iter().find(|&&token| token as usize >= vocabulary) {
        None => Ok(()),
        Some(token) => Err(Error::new(Kind::Argument, "tokens")
            .expected(format_args!("numbers from 0 to {}", vocabulary - 1))
            .got(token)),
    }
}

/// The weights with their large matrices quantized; those of a checkpoint may be so already.
fn quantized(
    weights: Weights<Weight>,
    dtype: DType,
    how: Quantization,
    place: &Where,
    watch: &dyn Watch,
) -> Result<Weights<Weight>> {
    if dtype == DType::F64 {
        let expected = format_args!("f32, bf16 or f16 for a model in {}", how.name()).to_string();
        return Err(Error::new(Kind::Option, "type").expected(expected).got(dtype));
    }
    if let Some(other) = weights.formats().into_iter().find(|format| *format != how.name()) {
        return Err(Error::new(Kind::Option, "quantize")
            .expected(format_args!("{other}, as the checkpoint has it"))
            .got(how.name())
            .hint("Load it without `quantize`, or quantize the checkpoint that it was made of"));
    }
    let exec = match place {
        Where::Cpu(exec) => *exec,
        Where::Cuda(..) => Exec::default(),
    };
    weights.quantized(how, &exec, watch)
}

fn upload(weights: &Weights<Weight>, device: &Device, watch: &dyn Watch) -> Result<Weights<Buffer>> {
    let lane = device.lane()?;
    // Tied embeddings share one buffer on the device.
    let tied = weights.tied(same_weight);
    let own = Weights { head: weights.head.clone().filter(|_| !tied), ..weights.map(Weight::clone) };
    let total = Cell::new(0);
    own.map(|weight| total.set(total.get() + weight.view().bytes().len()));
    let tally = Tally::begin(watch, Stage::Upload, total.get())?;
    let uploaded = own.try_map(|weight| {
        let buffer = Buffer::new(device, weight.spec())?;
        lane.upload(weight.view().bytes(), &buffer)?;
        tally.add(weight.view().bytes().len())?;
        Ok(buffer)
    })?;
    lane.synchronize()?;
    let embedding = uploaded.embedding.clone().filter(|_| tied);
    let head = uploaded.head.or(embedding.map(|embedding| Matrix::Float(embedding).into()));
    Ok(Weights { head, ..uploaded })
}

/// Whether two weights are the same memory.
pub(super) fn same_weight(a: &Weight, b: &Weight) -> bool {
    std::ptr::eq(a.view().bytes(), b.view().bytes())
}

fn filed<T>(
    config: &Config,
    weights: &Weights<T>,
    same: fn(&T, &T) -> bool,
    to_host: impl Fn(&T) -> Result<Weight>,
) -> Result<Vec<(String, Weight)>> {
    let mut all = Vec::new();
    for (name, dims, weight) in weights.filed(config, weights.tied(same)) {
        let weight = to_host(weight)?;
        all.extend(stored::shape_of(&name).map(|shape| (shape, stored::told_shape(&dims))));
        all.push(if stored::is_part(&name) { (name, weight) } else { (name, weight.reshape(&dims)?) });
    }
    Ok(all)
}

fn whole<P: Place>(layers: &Layers<P>, input: Input, batch: usize, to: Target<P>, tally: &Tally) -> Result<()> {
    let x = layers.take(input)?;
    let h = layers.run(x, batch, None, tally)?;
    layers.finish(&P::view(&h), to)?;
    tally.add_at(layers.place)
}

impl<P: Place> Layers<'_, '_, P> {
    /// The input rows of the first layer, `(rows, M)`.
    pub(super) fn take(&self, input: Input) -> Result<P::Owned> {
        match input {
            Input::Tokens(tokens) => self.embed(tokens),
            Input::Features(features) => {
                let width = self.config.width;
                self.place.bring(features.reshape(&[features.spec().shape.elements() / width, width])?)
            }
        }
    }

    /// Writes the logits of normed rows `h`, or for a backbone the rows, to their destination.
    pub(super) fn finish(&self, h: &P::View<'_>, to: Target<P>) -> Result<()> {
        let rows = h.spec().shape[0];
        match to {
            Target::There(to) => {
                let width = to.spec().shape.last().copied().unwrap_or(0);
                self.head(h, P::reshape_mut(to, &[rows, width])?)
            }
            Target::Host(to) if self.weights.head.is_none() => self.place.fetch(h, to),
            Target::Host(to) => {
                let mut logits = self.logits(rows)?;
                self.head(h, P::view_mut(&mut logits))?;
                self.place.fetch(&P::view(&logits), to)
            }
        }
    }

    fn elsewhere(&self, to: &Buffer) -> Error {
        Error::new(Kind::Argument, "output")
            .expected("memory on the host, where the model is")
            .got(format_args!("{to:?}"))
    }
}

impl<T> Weights<T> {
    /// Whether the embeddings are tied: the head and the embedding share memory, as `same` tells.
    pub(super) fn tied(&self, same: fn(&T, &T) -> bool) -> bool {
        let head = self.head.as_ref().and_then(|head| head.w.as_ref().float());
        self.embedding.as_ref().zip(head).is_some_and(|(embedding, head)| same(embedding, head))
    }

    /// Like `try_map`, for functions that cannot fail.
    pub(super) fn map<'a, U>(&'a self, f: impl Fn(&'a T) -> U + Copy) -> Weights<U> {
        self.try_map(|weight| Ok(f(weight))).expect("nothing fails")
    }

    fn try_map<'a, U>(&'a self, f: impl Fn(&'a T) -> Result<U> + Copy) -> Result<Weights<U>> {
        let layer =
            |layer: &'a Layer<T>| Ok(Layer { norm: f(&layer.norm)?, block: layer.block.try_map(f)?, a: f(&layer.a)? });
        Ok(Weights {
            embedding: self.embedding.as_ref().map(f).transpose()?,
            layers: self.layers.iter().map(layer).collect::<Result<_>>()?,
            norm: f(&self.norm)?,
            head: self.head.as_ref().map(|head| head.as_ref().try_map(f)).transpose()?,
        })
    }
}
