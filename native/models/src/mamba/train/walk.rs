//! The forward and backward pass through a model.

use super::learn::Learn;
use super::{Part, Sequences};
use crate::mamba::block::{Block, norms};
use crate::mamba::checkpoint::{EMBEDDING, HEAD, LAST_NORM, NORM, in_backbone, in_layer, of_block, squeezed};
use crate::mamba::mamba2::{self, Mamba2};
use crate::mamba::{Config, Mixer};
use crate::watch::Tally;
use sidewinder_kernels::base::elementwise::Map;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{Named, gradient_of, named};
use sidewinder_kernels::ops::layers::mamba_block::steps::{self, Sequences as Whole};
use sidewinder_kernels::ops::layers::mamba_block::{MambaBlock, Norms, Problem, Weights};
use sidewinder_kernels::ops::norm::{RmsNorm, RmsNormBackward, RmsOptions};
use sidewinder_kernels::ops::products::linear;
use sidewinder_kernels::ops::products::matrices::Matrix;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::collections::HashMap;

/// A model during a gradient computation.
pub struct Walk<'p, P: Learn> {
    place: &'p P,
    config: &'p Config,
    numbers: &'p Numbers,
    dtype: DType,
    parts: &'p [Part],
    weights: Vec<P::View<'p>>,
    /// FalconMamba's norms.
    norms: Option<Norms<P::Owned>>,
}

/// The indices of a model's weights in `parts`.
pub struct Numbers {
    embedding: usize,
    /// The norm before each layer, and the final norm.
    norms: Vec<usize>,
    blocks: Vec<Block<usize>>,
    /// The head; with tied embeddings, the embedding.
    head: usize,
}

impl Numbers {
    pub fn new(parts: &[Part], Config { layers, mixer, .. }: &Config) -> Result<Numbers> {
        let all: HashMap<&str, usize> = parts.iter().enumerate().map(|(i, part)| (part.name.as_str(), i)).collect();
        let block = |layer| {
            let find = |name| all.get(in_layer(layer, of_block(mixer, name).file).as_str());
            Block::new(mixer, |name| find(name).copied().map(Matrix::Float))
        };
        let embedding = all[in_backbone(EMBEDDING).as_str()];
        let norms = (0..*layers).map(|layer| in_layer(layer, NORM)).chain([in_backbone(LAST_NORM)]);
        Ok(Numbers {
            embedding,
            norms: norms.map(|name| all[name.as_str()]).collect(),
            blocks: (0..*layers).map(block).collect::<Result<_>>()?,
            head: all.get(HEAD).copied().unwrap_or(embedding),
        })
    }
}

/// The activations kept for the backward pass: the residual stream before each layer and after the last one, and its
/// normed rows.
struct Trace<T> {
    sums: Vec<T>,
    normed: Vec<T>,
}

/// The memory of gradients that are not written yet, by part index.
struct Gradients<T>(Vec<Option<T>>);

impl<T> Gradients<T> {
    fn take(&mut self, part: usize) -> T {
        self.0[part].take().expect("a gradient is written once")
    }
}

impl<'p, P: Learn> Walk<'p, P> {
    pub fn new(
        place: &'p P,
        (config, numbers, dtype): (&'p Config, &'p Numbers, DType),
        parts: &'p [Part],
        weights: &'p P::Owned,
    ) -> Result<Walk<'p, P>> {
        let view = |part: &Part| P::reshape(&P::rows(&P::view(weights), part.range.clone())?, &squeezed(&part.dims));
        let weights = parts.iter().map(view).collect::<Result<_>>()?;
        let norms = norms(config, dtype).map(|norms: Norms<Owned>| norms.try_map(|w| place.bring(w.view())));
        Ok(Walk { place, config, numbers, dtype, parts, weights, norms: norms.transpose()? })
    }

    /// Writes the gradient of the mean loss, or of the part that these sequences have in it, and returns that part. The layers of each pass and the head are the parts of
    /// `tally`.
    pub fn learn(&self, sequences: &Sequences, gradient: &mut P::Owned, tally: &Tally) -> Result<f64> {
        let mut gradients = self.split(P::view_mut(gradient))?;
        let trace = self.forward(sequences, tally)?;
        let Numbers { embedding, head, .. } = *self.numbers;
        let (loss, dlast, mut of_table) = self.through_head(&trace.normed[self.config.layers], head, sequences)?;
        tally.add_at(self.place)?;
        let dx = self.backward(sequences.batch, &trace, dlast, &mut gradients, tally)?;
        // Tied embeddings have one gradient, which sums those of the head and of the embedding.
        if head != embedding {
            self.place.map(Map::Sum, &[P::view(&of_table)], gradients.take(head))?;
            of_table = self.place.zeros(self.weights[embedding].spec())?;
        }
        self.place.scatter(&P::view(&dx), &sequences.read, P::view_mut(&mut of_table))?;
        self.place.map(Map::Sum, &[P::view(&of_table)], gradients.take(embedding))?;
        Ok(loss / sequences.predicted as f64)
    }

    /// The forward and backward pass of the head: the sum of losses, and the gradients of the last normed rows and of
    /// the head.
    fn through_head(&self, h: &P::Owned, head: usize, sequences: &Sequences) -> Result<(f64, P::Owned, P::Owned)> {
        let rows = sequences.read.len();
        let w = &self.weights[head];
        let mut logits = self.empty(&[rows, self.config.vocabulary])?;
        linear::at(self.place, [P::view(h), P::briefly(w)], None, P::view_mut(&mut logits))?;
        let loss = self.place.cross_entropy(
            P::view_mut(&mut logits),
            &sequences.next,
            Some(1.0 / sequences.predicted as f64),
        )?;
        let (mut dh, mut dw) = (self.like(h)?, self.place.empty(w.spec())?);
        let to = [P::view_mut(&mut dh), P::view_mut(&mut dw)];
        linear::backward_at(self.place, [P::view(h), P::briefly(w), P::view(&logits)], None, to, None)?;
        Ok((loss, dh, dw))
    }

    fn forward(&self, sequences: &Sequences, tally: &Tally) -> Result<Trace<P::Owned>> {
        let Config { layers, width, .. } = *self.config;
        let rows = sequences.read.len();
        let mut x = self.empty(&[rows, width])?;
        self.place.gather(&self.weights[self.numbers.embedding], &sequences.read, P::view_mut(&mut x))?;
        let mut trace = Trace { sums: vec![x], normed: Vec::new() };
        for layer in 0..layers {
            let h = self.norm(&trace.sums[layer], self.numbers.norms[layer])?;
            let mut y = self.empty(&[rows, width])?;
            self.block_forward(layer, sequences.batch, &h, P::view_mut(&mut y))?;
            let mut sum = self.empty(&[rows, width])?;
            self.place.map(Map::Sum, &[P::view(&trace.sums[layer]), P::view(&y)], P::view_mut(&mut sum))?;
            trace.sums.push(sum);
            trace.normed.push(h);
            tally.add_at(self.place)?;
        }
        trace.normed.push(self.norm(&trace.sums[layers], self.numbers.norms[layers])?);
        Ok(trace)
    }

    /// The backward pass of the layers: from the gradient of the last normed rows to that of the embedded rows.
    fn backward(
        &self,
        batch: usize,
        trace: &Trace<P::Owned>,
        dlast: P::Owned,
        gradients: &mut Gradients<P::ViewMut<'_>>,
        tally: &Tally,
    ) -> Result<P::Owned> {
        let layers = self.config.layers;
        let mut dx = self.norm_backward(&trace.sums[layers], self.numbers.norms[layers], &dlast, gradients)?;
        for layer in (0..layers).rev() {
            let dh = self.block_backward(layer, batch, &trace.normed[layer], &dx, gradients)?;
            let through = self.norm_backward(&trace.sums[layer], self.numbers.norms[layer], &dh, gradients)?;
            let mut sum = self.like(&dx)?;
            self.place.map(Map::Sum, &[P::view(&dx), P::view(&through)], P::view_mut(&mut sum))?;
            dx = sum;
            tally.add_at(self.place)?;
        }
        Ok(dx)
    }

    fn block_forward(&self, layer: usize, batch: usize, h: &P::Owned, y: P::ViewMut<'_>) -> Result<()> {
        let (h, dims) = (P::view(h), self.dims(batch, P::view(h).spec().shape[0]));
        match &self.numbers.blocks[layer] {
            Block::Mamba2(parts) => {
                let states = [vec![Default::default()], vec![Default::default()]];
                self.mamba2(parts, |block| block.run(&h, [dims[0], dims[1]], states, y))
            }
            Block::Mamba(parts) => {
                let weights = parts.try_map(|&part| Ok(P::briefly(&self.weights[part])))?;
                let block = steps::Block { place: self.place, weights: &Weights { norms: self.norms()?, ..weights } };
                let mut sequences = Whole::new(&block, Default::default())?;
                block.run(&P::reshape(&h, &dims)?, &mut sequences, P::reshape_mut(y, &dims)?)
            }
        }
    }

    /// FalconMamba's norms, to read.
    fn norms(&self) -> Result<Option<Norms<P::View<'_>>>> {
        self.norms.as_ref().map(|norms| norms.try_map(|w| Ok(P::view(w)))).transpose()
    }

    /// Calls `f` with the Mamba-2 layer whose weights have these part indices.
    fn mamba2<T>(&self, parts: &mamba2::Weights<usize>, f: impl FnOnce(&Mamba2<P>) -> Result<T>) -> Result<T> {
        let Mixer::Mamba2(heads) = &self.config.mixer else {
            unreachable!("layers are of the kind that the configuration says")
        };
        let a_log = &self.weights[parts.a_log];
        let mut a = self.place.empty(a_log.spec())?;
        self.place.map(Map::NegExp, &[P::briefly(a_log)], P::view_mut(&mut a))?;
        let weights = parts.try_map(|&part| Ok(P::briefly(&self.weights[part])))?;
        f(&Mamba2 { place: self.place, config: self.config, heads, weights: &weights, a: &P::view(&a) })
    }

    fn block_backward(
        &self,
        layer: usize,
        batch: usize,
        h: &P::Owned,
        dy: &P::Owned,
        gradients: &mut Gradients<P::ViewMut<'_>>,
    ) -> Result<P::Owned> {
        let mut dh = self.like(h)?;
        let dims = self.dims(batch, P::view(h).spec().shape[0]);
        if let Block::Mamba2(parts) = &self.numbers.blocks[layer] {
            let to = self.parts_of(layer).map(|(name, part)| (name, P::briefly_mut(gradients.take(part)))).collect();
            let of = [&P::view(h), &P::view(dy)];
            self.mamba2(parts, |block| block.backward(of, [dims[0], dims[1]], to, P::view_mut(&mut dh)))?;
            return Ok(dh);
        }
        self.mamba_backward(layer, [h, dy], dims, gradients, P::view_mut(&mut dh))?;
        Ok(dh)
    }

    /// The gradient of a layer of the first Mamba, with rows of these sizes.
    fn mamba_backward(
        &self,
        layer: usize,
        [h, dy]: [&P::Owned; 2],
        dims: [usize; 3],
        gradients: &mut Gradients<P::ViewMut<'_>>,
        dh: P::ViewMut<'_>,
    ) -> Result<()> {
        let mut inputs = self.block(layer, P::reshape(&P::view(h), &dims)?);
        inputs.push("dy", P::reshape(&P::view(dy), &dims)?);
        let mut outputs = named([("dx", Some(P::reshape_mut(dh, &dims)?))]);
        for (name, part) in self.parts_of(layer) {
            outputs.push(gradient_of::<MambaBlock>(name), P::briefly_mut(gradients.take(part)));
        }
        let problem = Problem { batch: dims[0], length: dims[1] };
        steps::backward_with(self.place, &problem, &inputs, outputs, self.norms()?)
    }

    fn norm(&self, x: &P::Owned, part: usize) -> Result<P::Owned> {
        let mut h = self.like(x)?;
        let inputs = named([("x", Some(P::view(x))), ("w", Some(P::briefly(&self.weights[part])))]);
        self.place.call::<RmsNorm>(&self.norm_options(), inputs, named([("y", Some(P::view_mut(&mut h)))]))?;
        Ok(h)
    }

    fn norm_backward(
        &self,
        x: &P::Owned,
        part: usize,
        dh: &P::Owned,
        gradients: &mut Gradients<P::ViewMut<'_>>,
    ) -> Result<P::Owned> {
        let mut dx = self.like(x)?;
        let inputs =
            named([("x", Some(P::view(x))), ("w", Some(P::briefly(&self.weights[part]))), ("dy", Some(P::view(dh)))]);
        let outputs = named([("dx", Some(P::view_mut(&mut dx))), ("dw", Some(P::briefly_mut(gradients.take(part))))]);
        self.place.call::<RmsNormBackward>(&self.norm_options(), inputs, outputs)?;
        Ok(dx)
    }

    fn norm_options(&self) -> RmsOptions {
        RmsOptions { eps: self.config.eps, ..Default::default() }
    }

    /// The inputs of the block of a layer.
    fn block<'s>(&self, layer: usize, x: P::View<'s>) -> Named<P::View<'s>>
    where
        'p: 's,
    {
        let mut inputs = named([("x", Some(x))]);
        for (name, part) in self.parts_of(layer) {
            inputs.push(name, P::briefly(&self.weights[part]));
        }
        inputs
    }

    /// The part indices of a layer's weights, with their slot names.
    fn parts_of(&self, layer: usize) -> impl Iterator<Item = (&'static str, usize)> {
        self.numbers.blocks[layer].named().into_iter().filter_map(|(name, part)| Some((name, *part.float()?)))
    }

    fn dims(&self, batch: usize, rows: usize) -> [usize; 3] {
        [batch, rows / batch, self.config.width]
    }

    fn empty(&self, dims: &[usize]) -> Result<P::Owned> {
        self.place.empty(Spec::new(self.dtype, dims)?)
    }

    fn like(&self, x: &P::Owned) -> Result<P::Owned> {
        self.place.empty(P::view(x).spec())
    }

    /// Splits the memory of the gradient into that of each part.
    fn split<'g>(&self, mut all: P::ViewMut<'g>) -> Result<Gradients<P::ViewMut<'g>>> {
        let (mut at, mut gradients) = (0, Vec::new());
        for part in self.parts {
            let (_, own) = P::split_rows(all, part.range.start - at)?;
            let (own, rest) = P::split_rows(own, part.range.len())?;
            gradients.push(Some(P::reshape_mut(own, &squeezed(&part.dims))?));
            (all, at) = (rest, part.range.end);
        }
        Ok(Gradients(gradients))
    }
}
