//! Models in safetensors files, with the names that Hugging Face's `MambaForCausalLM` or the `mamba_ssm`
//! package gives their tensors.

use super::config::Config;
use super::weights::Weight;
use super::{Layer, Weights, family, layout};
use crate::cpu::Exec;
use crate::error::{Error, Kind, Result};
use crate::file;
use crate::mamba_block::MambaBlock;
use crate::op::{Named, Op, named};
use crate::place::{Cpu, Map, Place};
use crate::safetensors::Reader;
use crate::tensor::{DType, Described, Owned, Shape};
#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::{Mmap, MmapMut};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Tensors by the names that they have in files.
pub struct Checkpoint {
    /// Where they come from, for errors.
    name: String,
    config: Option<Config>,
    tensors: BTreeMap<String, Found>,
}

/// A tensor, or why it is none that a model can have.
type Found = Result<Weight>;

/// A weight of a layer: our name, that in files, and its shape there.
struct Part {
    name: &'static str,
    file: &'static str,
    dims: fn(&Config) -> Vec<usize>,
}

/// A weight as files have it: its name, its shape there, and itself.
pub(super) type Filed<'w, T> = (String, Vec<usize>, &'w T);

pub(super) const NORM: &str = "norm.weight";

/// The weights of a block, by the names of [`MambaBlock`].
const BLOCK: [Part; 11] = [
    Part { name: "in_proj", file: "mixer.in_proj.weight", dims: |c| vec![2 * c.inner, c.width] },
    Part { name: "in_proj_b", file: "mixer.in_proj.bias", dims: |c| vec![2 * c.inner] },
    Part { name: "conv_w", file: "mixer.conv1d.weight", dims: |c| vec![c.inner, 1, c.conv] },
    Part { name: "conv_b", file: "mixer.conv1d.bias", dims: |c| vec![c.inner] },
    Part { name: "x_proj", file: "mixer.x_proj.weight", dims: |c| vec![c.rank + 2 * c.state, c.inner] },
    Part { name: "dt_w", file: "mixer.dt_proj.weight", dims: |c| vec![c.inner, c.rank] },
    Part { name: "dt_b", file: "mixer.dt_proj.bias", dims: |c| vec![c.inner] },
    Part { name: "A_log", file: "mixer.A_log", dims: |c| vec![c.inner, c.state] },
    Part { name: "D", file: "mixer.D", dims: |c| vec![c.inner] },
    Part { name: "out_proj", file: "mixer.out_proj.weight", dims: |c| vec![c.width, c.inner] },
    Part { name: "out_proj_b", file: "mixer.out_proj.bias", dims: |c| vec![c.width] },
];

/// The weights of a block by the names of [`MambaBlock`], and by those that they have in a layer of a file.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    BLOCK.iter().map(|part| (part.name, part.file))
}

/// What tensors of a whole model begin with; those of a backbone alone may do without.
const BACKBONE: &str = "backbone.";
pub(super) const EMBEDDING: &str = "embeddings.weight";
const EMBEDDINGS: [&str; 2] = [EMBEDDING, "embedding.weight"];
const LAYERS: &str = "layers.";
pub(super) const LAST_NORM: &str = "norm_f.weight";
pub(super) const HEAD: &str = "lm_head.weight";

/// The name of a tensor of a layer in a whole model.
pub(super) fn in_layer(layer: usize, name: &str) -> String {
    format!("{}{name}", of_layer(BACKBONE, layer))
}

/// The name of a tensor beside the layers and the head.
pub(super) fn in_backbone(name: &str) -> String {
    format!("{BACKBONE}{name}")
}

/// What the names of a layer's weights begin with.
fn of_layer(prefix: &str, layer: usize) -> String {
    format!("{prefix}{LAYERS}{layer}.")
}

fn failure(name: impl Into<Box<str>>, expected: &str, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::File, name).expected(expected).got(got)
}

impl Checkpoint {
    /// Opens a folder with `config.json` and safetensors files, or one such file. Where there is no
    /// `config.json` beside the tensors, sizes follow from their shapes.
    ///
    /// The files are mapped into memory unless `copied` asks for a copy: as long as the model lives they must not be
    /// cut short or written to; replacing them by others of their names does no harm.
    pub fn open(path: &Path, copied: bool) -> Result<Checkpoint> {
        let name = path.display().to_string();
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let json = folder.join("config.json");
        let config = file::read_if_there(&json, MAX_DESCRIPTION)?;
        let config = config.map(|bytes| Config::parse(&json.display().to_string(), &bytes)).transpose()?;
        let mut tensors = BTreeMap::new();
        for file in layout::files(path)? {
            read_file(&file, copied, &mut tensors)?;
        }
        Ok(Checkpoint { name, config, tensors })
    }

    /// Tensors that are in memory already.
    pub fn new(name: &str, config: Option<Config>, tensors: impl IntoIterator<Item = (String, Weight)>) -> Checkpoint {
        let tensors = tensors.into_iter().map(|(name, weight)| (name, Ok(weight))).collect();
        Checkpoint { name: name.to_string(), config, tensors }
    }

    /// The model in the type that is asked for, or in that of its matrices. A `backbone` leaves out what has to
    /// do with tokens. What is missing, what is too much and what has another shape than it should is told in
    /// one error.
    pub fn model(mut self, dtype: Option<DType>, backbone: bool) -> Result<(Config, DType, Weights<Weight>)> {
        let prefix = if self.tensors.keys().any(|name| name.starts_with(BACKBONE)) { BACKBONE } else { "" };
        self.check_family(prefix)?;
        let mut config = match self.config {
            Some(config) => config.check(&self.name)?,
            None => self.config_of_shapes(prefix)?,
        };
        let matrix = self.shape_and_type(&format!("{prefix}{LAYERS}0.mixer.in_proj.weight"));
        let dtype = dtype.or(matrix.map(|(_, dtype)| dtype).filter(|dtype| dtype.is_float())).unwrap_or(DType::F32);
        if !dtype.is_float() {
            return Err(Error::new(Kind::Option, "type").expected("f64, f32, bf16 or f16").got(dtype));
        }
        let numbers = self.layer_numbers(prefix);
        let mut taker = Taker { tensors: &mut self.tensors, dtype, wrong: Vec::new() };
        let layers = taker.layers(&config, &format!("{prefix}{LAYERS}"), numbers);
        let norm = taker.take(&format!("{prefix}{LAST_NORM}"), &[config.width], dtype.wide(), false);
        let embedding = EMBEDDINGS.map(|name| format!("{prefix}{name}"));
        let embedding = embedding.iter().find(|name| taker.tensors.contains_key(*name)).unwrap_or(&embedding[0]);
        let rows = [config.vocabulary, config.width];
        let (mut embedding, mut head) = match config.vocabulary {
            0 => (None, None),
            _ => (taker.take(embedding, &rows, dtype, backbone), taker.take(HEAD, &rows, dtype, true)),
        };
        taker.done(&self.name)?;
        if backbone {
            (config.vocabulary, embedding, head) = (0, None, None);
        }
        let whole = "nothing is missing";
        let layers = layers.into_iter().map(|layer| layer.expect(whole)).collect();
        let head = named([(super::HEAD, head.or_else(|| embedding.clone()))]);
        Ok((config, dtype, Weights { embedding, layers, norm: norm.expect(whole), head }))
    }

    /// Refuses tensors of other models, also of one that only its vocabulary tells where no configuration does.
    fn check_family(&self, prefix: &str) -> Result<()> {
        let axes = |found: &Found| found.as_ref().map_or(0, |weight| weight.spec().shape.len());
        let tensors = self.tensors.iter().map(|(name, found)| (name.as_str(), axes(found)));
        let rows = || EMBEDDINGS.iter().find_map(|name| Some(self.shape_and_type(&format!("{prefix}{name}"))?.0[0]));
        family::check_tensors(&self.name, tensors, self.config.is_none().then(rows).flatten())
    }

    /// The numbers of the layers that there are tensors of.
    fn layer_numbers(&self, prefix: &str) -> BTreeSet<usize> {
        let start = format!("{prefix}{LAYERS}");
        let names = self.tensors.range(start.clone()..).map_while(|(name, _)| name.strip_prefix(&start));
        names.filter_map(|name| name.split_once('.')?.0.parse().ok()).collect()
    }

    fn shape_and_type(&self, name: &str) -> Option<(Shape, DType)> {
        let spec = self.tensors.get(name)?.as_ref().ok()?.spec();
        Some((spec.shape, spec.dtype))
    }

    /// The sizes that the tensors have.
    fn config_of_shapes(&self, prefix: &str) -> Result<Config> {
        let size = |name: String, axis: usize| {
            let shape = self.shape_and_type(&name).map(|(shape, _)| shape);
            shape.and_then(|shape| shape.get(axis).copied()).ok_or_else(|| {
                failure(
                    &*self.name,
                    "tensors of a Mamba model, or a config.json beside them",
                    format_args!("no `{name}`"),
                )
            })
        };
        let of_first = |part: &str, axis| size(format!("{prefix}{LAYERS}0.mixer.{part}"), axis);
        let embedding = EMBEDDINGS.map(|name| size(format!("{prefix}{name}"), 0));
        Config {
            width: size(format!("{prefix}{LAST_NORM}"), 0)?,
            layers: (0..).zip(self.layer_numbers(prefix)).take_while(|(i, number)| i == number).count(),
            vocabulary: embedding.into_iter().flatten().next().unwrap_or(0),
            inner: of_first("A_log", 0)?,
            state: of_first("A_log", 1)?,
            rank: of_first("dt_proj.weight", 1)?,
            conv: of_first("conv1d.weight", 2)?,
            eps: 1e-5,
        }
        .check(&self.name)
    }
}

impl<T> Weights<T> {
    /// Its weights by the names that Hugging Face's files have for them. A head that is the embedding, as `tied` says,
    /// has no name of its own.
    pub(super) fn filed(&self, config: &Config, tied: bool) -> Vec<Filed<'_, T>> {
        let rows = vec![config.vocabulary, config.width];
        let norm = |prefix: &str, name, weight| (format!("{prefix}{name}"), vec![config.width], weight);
        let mut all = Vec::new();
        all.extend(self.embedding.iter().map(|table| (in_backbone(EMBEDDING), rows.clone(), table)));
        for (i, layer) in self.layers.iter().enumerate() {
            let prefix = of_layer(BACKBONE, i);
            all.push(norm(&prefix, NORM, &layer.norm));
            let part = |part: &Part| {
                Some((format!("{prefix}{}", part.file), (part.dims)(config), layer.block.find(part.name)?))
            };
            all.extend(BLOCK.iter().filter_map(part));
        }
        all.push(norm(BACKBONE, LAST_NORM, &self.norm));
        all.extend(self.head.iter().filter(|_| !tied).map(|(_, head)| (HEAD.to_string(), rows.clone(), head)));
        all
    }
}

/// Takes tensors out of a checkpoint and notes what is wrong with them.
struct Taker<'c> {
    tensors: &'c mut BTreeMap<String, Found>,
    dtype: DType,
    wrong: Vec<String>,
}

/// So many problems are told; there may be as many as somebody cares to claim.
const TOLD: usize = 1000;

impl Taker<'_> {
    /// The weights of the layers with these numbers, as far as the configuration has them. Those without any
    /// tensor are told together: it may claim billions.
    fn layers(&mut self, config: &Config, prefix: &str, numbers: BTreeSet<usize>) -> Vec<Option<Layer<Weight>>> {
        let mut layers = Vec::new();
        let mut next = 0;
        for number in numbers.into_iter().take_while(|&number| number < config.layers) {
            self.nothing_of(prefix, next..number);
            next = number + 1;
            layers.push(self.layer(config, &format!("{prefix}{number}.")));
        }
        self.nothing_of(prefix, next..config.layers);
        layers
    }

    fn nothing_of(&mut self, prefix: &str, numbers: Range<usize>) {
        match numbers.len() {
            0 => {}
            1 => self.wrong.push(format!("no `{prefix}{}`", numbers.start)),
            _ => self.wrong.push(format!("no `{prefix}{}` to `{prefix}{}`", numbers.start, numbers.end - 1)),
        }
    }

    /// The weights of a layer, unless one is missing.
    fn layer(&mut self, config: &Config, prefix: &str) -> Option<Layer<Weight>> {
        let mut block = Named::default();
        for part in &BLOCK {
            let slot = MambaBlock::INPUTS.iter().find(|slot| slot.name == part.name).expect("a name of the block's");
            let dtype = slot.precision.dtype(self.dtype);
            let name = format!("{prefix}{}", part.file);
            let taken = self.take(&name, &(part.dims)(config), dtype, slot.optional);
            if let Some(weight) = taken {
                let dims = squeezed(&weight.spec().shape);
                block.push(part.name, weight.reshape(&dims).expect("the same elements"));
            }
        }
        let norm = self.take(&format!("{prefix}{NORM}"), &[config.width], self.dtype.wide(), false);
        let a = negative_exp(block.find("A_log")?);
        Some(Layer { norm: norm?, block, a })
    }

    fn take(&mut self, name: &str, dims: &[usize], dtype: DType, optional: bool) -> Option<Weight> {
        let problem = match self.tensors.remove(name) {
            None if optional => return None,
            None => format!("no `{name}`"),
            Some(Err(error)) => format!("`{name}` of {}", error.got),
            Some(Ok(weight)) if !weight.spec().dtype.is_float() => format!("`{name}` of {}", weight.spec().dtype),
            Some(Ok(weight)) if weight.spec().shape[..] == *dims => return Some(weight.cast(dtype)),
            Some(Ok(weight)) => {
                let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
                format!("`{name}` of shape {} where it should be ({})", weight.spec().shape, dims.join(", "))
            }
        };
        self.wrong.push(problem);
        None
    }

    /// The one error about all that is wrong, if anything is.
    fn done(mut self, name: &str) -> Result<()> {
        self.wrong.extend(self.tensors.keys().map(|name| format!("`{name}`, which no Mamba model has")));
        if self.wrong.is_empty() {
            return Ok(());
        }
        if let Some(others) = self.wrong.len().checked_sub(TOLD).filter(|&others| others > 0) {
            self.wrong.truncate(TOLD);
            self.wrong.push(format!("and {others} more"));
        }
        Err(failure(name, "the tensors of a Mamba model of the sizes of its configuration", self.wrong.join("; ")))
    }
}

/// What steps need of `A_log`.
fn negative_exp(a_log: &Weight) -> Weight {
    let mut a = Owned::poisoned(a_log.spec());
    Cpu(&Exec::default()).map(Map::NegExp, &[a_log.view()], a.view_mut()).expect("tensors of one float type");
    a.into()
}

/// A shape without the axis of length 1 that PyTorch's depthwise convolutions have.
pub(super) fn squeezed(dims: &[usize]) -> Vec<usize> {
    match *dims {
        [channels, 1, width] => vec![channels, width],
        _ => dims.to_vec(),
    }
}

/// A description may take this many bytes.
pub(super) const MAX_DESCRIPTION: u64 = 64 << 20;

/// Adds the tensors of a file.
fn read_file(path: &Path, copied: bool, tensors: &mut BTreeMap<String, Found>) -> Result<()> {
    let reader = Reader::open(path)?;
    family::check_metadata(&path.display().to_string(), reader.metadata())?;
    let memory = Arc::new(memory(path, copied)?);
    for entry in reader.entries() {
        let weight = |spec| Weight::mapped(spec, &memory, entry.range());
        let twice = tensors.insert(entry.name.clone(), reader.spec(entry).and_then(weight)).is_some();
        if twice {
            return Err(failure(path.display().to_string(), "each tensor in one file", &*entry.name));
        }
    }
    Ok(())
}

/// A file in memory: mapped, or copied to large pages where the system has them. A step reads all weights once, and
/// addresses of small pages are looked up more often.
fn memory(path: &Path, copied: bool) -> Result<Mmap> {
    let failed = |e| failure(path.display().to_string(), "a file that can be held in memory", e);
    let (mut file, size) = file::open(path).map_err(failed)?;
    if !copied {
        // SAFETY: as far as can be had: `Checkpoint::open` says what must not be done to the file.
        return unsafe { Mmap::map(&file) }.map_err(failed);
    }
    let mut copy = MmapMut::map_anon(size as usize).map_err(failed)?;
    #[cfg(target_os = "linux")]
    let _ = copy.advise(Advice::HugePage);
    file.read_exact(&mut copy).map_err(failed)?;
    copy.make_read_only().map_err(failed)
}
