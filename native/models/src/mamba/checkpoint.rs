//! Checkpoints: models in safetensors files, with the tensor names of Hugging Face's `MambaForCausalLM`,
//! `FalconMambaForCausalLM` and `Mamba2ForCausalLM`, or of the `mamba_ssm` package.

mod taking;

use super::config::{Config, Description, Mixer};
use super::family::Family;
use super::stored::{self, Stored};
use super::weights::Weight;
use super::{Weights, family, layout};
use crate::watch::{Stage, Tally, Unwatched, Watch};
#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::{Mmap, MmapMut};
use sidewinder_files::file;
use sidewinder_files::safetensors::Reader;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::ops::products::matrices::Matrix;
use sidewinder_kernels::tensor::{DType, Described, Shape};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use taking::Taker;

/// The tensors of a model by their names in files, and its configuration if there is one.
pub struct Checkpoint {
    /// The origin of the tensors, for errors.
    name: String,
    description: Option<Description>,
    tensors: BTreeMap<String, Found>,
}

/// A tensor, or the error that makes it unusable, such as an unknown element type.
pub(super) type Found = Result<Weight>;

/// A weight of a layer: its slot name, its name in files, and its shape there.
pub(super) struct Part {
    name: &'static str,
    pub(super) file: &'static str,
    dims: fn(&Config) -> Vec<usize>,
}

/// A weight to be written to a file: its name and shape there, and the weight.
pub(super) type Filed<'w, T> = (String, Vec<usize>, &'w T);

pub(super) const NORM: &str = "norm.weight";

/// The weights of a block, named as in [`MambaBlock`](sidewinder_kernels::ops::layers::mamba_block::MambaBlock).
const MAMBA: [Part; 11] = [
    Part { name: "in_proj", file: "mixer.in_proj.weight", dims: |c| vec![c.projected(), c.width] },
    Part { name: "in_proj_b", file: "mixer.in_proj.bias", dims: |c| vec![c.projected()] },
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

/// The weights of a Mamba-2 layer.
const MAMBA2: [Part; 10] = [
    Part { name: "in_proj", file: "mixer.in_proj.weight", dims: |c| vec![c.projected(), c.width] },
    Part { name: "in_proj_b", file: "mixer.in_proj.bias", dims: |c| vec![c.projected()] },
    Part { name: "conv_w", file: "mixer.conv1d.weight", dims: |c| vec![c.conv_channels(), 1, c.conv] },
    Part { name: "conv_b", file: "mixer.conv1d.bias", dims: |c| vec![c.conv_channels()] },
    Part { name: "dt_b", file: "mixer.dt_bias", dims: |c| vec![c.heads()] },
    Part { name: "A_log", file: "mixer.A_log", dims: |c| vec![c.heads()] },
    Part { name: "D", file: "mixer.D", dims: |c| vec![c.heads()] },
    Part { name: "norm", file: "mixer.norm.weight", dims: |c| vec![c.inner] },
    Part { name: "out_proj", file: "mixer.out_proj.weight", dims: |c| vec![c.width, c.inner] },
    Part { name: "out_proj_b", file: "mixer.out_proj.bias", dims: |c| vec![c.width] },
];

/// The weights of a layer of this family.
fn parts(family: Family) -> &'static [Part] {
    match family {
        Family::Mamba | Family::FalconMamba => &MAMBA,
        Family::Mamba2 => &MAMBA2,
    }
}

/// The weights of a block of this `model_type`: the name of each, with its name in a layer of a file. The first are those
/// of the slots of [`MambaBlock`](sidewinder_kernels::ops::layers::mamba_block::MambaBlock).
pub fn names(model_type: &str) -> Result<Vec<(&'static str, &'static str)>> {
    let family = Family::of_model_type(model_type)?;
    Ok(parts(family).iter().map(|part| (part.name, part.file)).collect())
}

/// The weight with this slot name. Panics if layers of this kind have none.
pub(super) fn of_block(mixer: &Mixer, name: &str) -> &'static Part {
    parts(mixer.family()).iter().find(|part| part.name == name).expect("a name of the block's")
}

/// The prefix of all tensors in checkpoints of programs that wrap the model in a module, such as Codestral Mamba's.
const OUTER: &str = "model.";
/// The prefix of a language model's tensors except the head; checkpoints of a backbone may lack it.
const BACKBONE: &str = "backbone.";
pub(super) const EMBEDDING: &str = "embeddings.weight";
const EMBEDDINGS: [&str; 2] = [EMBEDDING, "embedding.weight"];
const LAYERS: &str = "layers.";
pub(super) const LAST_NORM: &str = "norm_f.weight";
pub(super) const HEAD: &str = "lm_head.weight";

/// The full name of a layer's tensor, with the prefix of the backbone.
pub(super) fn in_layer(layer: usize, name: &str) -> String {
    format!("{}{name}", of_layer(BACKBONE, layer))
}

/// The full name of a tensor outside the layers and the head.
pub(super) fn in_backbone(name: &str) -> String {
    format!("{BACKBONE}{name}")
}

/// The prefix of the names of a layer's weights.
fn of_layer(prefix: &str, layer: usize) -> String {
    format!("{prefix}{LAYERS}{layer}.")
}

fn failure(name: impl Into<Box<str>>, expected: &str, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::File, name).expected(expected).got(got)
}

impl Checkpoint {
    /// Opens a folder with `config.json` and safetensors files, or one such file. Without a `config.json` beside the
    /// tensors, the sizes follow from their shapes.
    ///
    /// The files are mapped into memory, or copied if `copied` is set. While the model lives, mapped files must not be
    /// truncated or written to; replacing them by other files of the same names does no harm.
    pub fn open(path: &Path, copied: bool) -> Result<Checkpoint> {
        Checkpoint::open_watched(path, copied, &Unwatched)
    }

    /// Like [`Checkpoint::open`], with reports to `watch` while files are copied.
    pub fn open_watched(path: &Path, copied: bool, watch: &dyn Watch) -> Result<Checkpoint> {
        let name = path.display().to_string();
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let json = folder.join("config.json");
        let config = file::read_if_there(&json, MAX_DESCRIPTION)?;
        let description = config.map(|bytes| Description::parse(&json.display().to_string(), &bytes)).transpose()?;
        let mut tensors = BTreeMap::new();
        let files = layout::files(path)?;
        let tally = copied.then(|| Tally::begin(watch, Stage::Read, bytes(&files))).transpose()?;
        for file in files {
            read_file(&file, tally.as_ref(), description.as_ref().map(Description::family), &mut tensors)?;
        }
        Ok(Checkpoint { name, description, tensors })
    }

    /// A checkpoint of tensors in memory.
    pub fn new(name: &str, config: Option<Config>, tensors: impl IntoIterator<Item = (String, Weight)>) -> Checkpoint {
        Checkpoint::described(name, config.map(Description::from), tensors)
    }

    /// Like [`Checkpoint::new`], with the quantization formats of a `config.json` beside the sizes.
    pub fn described(
        name: &str,
        description: Option<Description>,
        tensors: impl IntoIterator<Item = (String, Weight)>,
    ) -> Checkpoint {
        let tensors = tensors.into_iter().map(|(name, weight)| (name, Ok(weight))).collect();
        Checkpoint { name: name.to_string(), description, tensors }
    }

    /// The sizes and weights in `dtype`, by default in the type of the matrices. A `backbone` leaves out the embedding
    /// and the head. One error reports all tensors that are missing, unexpected, or of a wrong shape.
    pub fn model(self, dtype: Option<DType>, backbone: bool) -> Result<(Config, DType, Weights<Weight>)> {
        self.model_watched(dtype, backbone, &Unwatched)
    }

    /// Like [`Checkpoint::model`], with reports to `watch`.
    pub fn model_watched(
        mut self,
        dtype: Option<DType>,
        backbone: bool,
        watch: &dyn Watch,
    ) -> Result<(Config, DType, Weights<Weight>)> {
        self.tensors = without_outer(std::mem::take(&mut self.tensors));
        let prefix = if self.tensors.keys().any(|name| name.starts_with(BACKBONE)) { BACKBONE } else { "" };
        self.check_family(prefix)?;
        self.check_formats()?;
        let mut wrong = Vec::new();
        let matrices = stored::take(&mut self.tensors, &mut wrong);
        let mut config = match &self.description {
            Some(description) => description.config.check(&self.name)?,
            None => self.config_of_shapes(prefix, &matrices)?,
        };
        let dtype = dtype.unwrap_or_else(|| self.dtype(prefix, !matrices.is_empty()));
        check_type(dtype, &matrices)?;
        let mut numbers = self.layer_numbers(prefix, &matrices);
        numbers.retain(|&number| number < config.layers);
        let tally = Tally::begin(watch, Stage::Convert, numbers.len() + 1)?;
        let mut taker = Taker { tensors: &mut self.tensors, matrices, dtype, wrong };
        let layers = taker.layers(&config, &format!("{prefix}{LAYERS}"), numbers, &tally)?;
        let norm = taker.take(&format!("{prefix}{LAST_NORM}"), &[config.width], dtype.wide(), false);
        let (mut embedding, mut head) = taker.ends(&config, prefix, backbone);
        tally.add(1)?;
        taker.done(&self.name, &config.mixer)?;
        if backbone {
            (config.vocabulary, embedding, head) = (0, None, None);
        }
        let whole = "nothing is missing";
        let layers = layers.into_iter().map(|layer| layer.expect(whole)).collect();
        Ok((config, dtype, Weights { embedding, layers, norm: norm.expect(whole), head }))
    }

    /// The type of the matrices. If they are quantized, that of the tensors that stay floats, with f32 for f64, which
    /// quantized matrices do not support.
    fn dtype(&self, prefix: &str, quantized: bool) -> DType {
        let of = |part: &str| self.shape_and_type(&format!("{prefix}{LAYERS}0.mixer.{part}.weight"));
        let embedding = || EMBEDDINGS.iter().find_map(|name| self.shape_and_type(&format!("{prefix}{name}")));
        // In a quantized checkpoint, `dt_proj` and the embedding stay floats; Mamba-2 has no `dt_proj`. The convolution
        // comes last, because it may be stored in the type of the arithmetic.
        let found = ["in_proj", "x_proj", "out_proj", "dt_proj"].into_iter().find_map(of);
        let found = found.or_else(embedding).or_else(|| of("conv1d"));
        let dtype = found.map(|(_, dtype)| dtype).filter(|dtype| dtype.is_float()).unwrap_or(DType::F32);
        if quantized && dtype == DType::F64 { DType::F32 } else { dtype }
    }

    /// Refuses a configuration whose quantization formats differ from those of the tensors.
    fn check_formats(&self) -> Result<()> {
        match self.description.as_ref().and_then(|description| description.formats.as_ref()) {
            None => Ok(()),
            Some(told) => same_formats(&self.name, told, self.tensors.keys()),
        }
    }

    /// Refuses tensors of another family. Without a configuration, that includes FalconMamba, which only its vocabulary
    /// size identifies.
    fn check_family(&self, prefix: &str) -> Result<()> {
        let axes = |found: &Found| found.as_ref().map_or(0, |weight| weight.spec().shape.len());
        let tensors = self.tensors.iter().map(|(name, found)| (name.as_str(), axes(found)));
        // The blocks and planes of a quantized embedding have as many rows as the embedding.
        let embedding =
            |name: &String| EMBEDDINGS.iter().any(|own| name.strip_prefix(prefix).is_some_and(|n| n.starts_with(own)));
        let rows = || {
            let found =
                self.tensors.iter().filter(|(name, _)| embedding(name)).find_map(|(_, found)| found.as_ref().ok());
            found.and_then(|weight| weight.spec().shape.first().copied())
        };
        let family = self.description.as_ref().map_or(Family::Mamba, Description::family);
        family::check_tensors(&self.name, tensors, family, self.description.is_none().then(rows).flatten())
    }

    /// The indices of the layers that have tensors.
    fn layer_numbers(&self, prefix: &str, matrices: &Matrices) -> BTreeSet<usize> {
        let start = format!("{prefix}{LAYERS}");
        let number = |name: &String| name.strip_prefix(&start)?.split_once('.')?.0.parse().ok();
        self.tensors.keys().chain(matrices.keys()).filter_map(number).collect()
    }

    fn shape_and_type(&self, name: &str) -> Option<(Shape, DType)> {
        let spec = self.tensors.get(name)?.as_ref().ok()?.spec();
        Some((spec.shape, spec.dtype))
    }

    /// The sizes that follow from the shapes of the tensors. Only the first Mamba does without a configuration.
    fn config_of_shapes(&self, prefix: &str, matrices: &Matrices) -> Result<Config> {
        let size = |name: String, axis: usize| {
            let stored = || Some(matrices.get(&name)?.dims.to_vec());
            let shape = self.shape_and_type(&name).map(|(shape, _)| shape.to_vec()).or_else(stored);
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
            layers: (0..).zip(self.layer_numbers(prefix, matrices)).take_while(|(i, number)| i == number).count(),
            vocabulary: embedding.into_iter().flatten().next().unwrap_or(0),
            inner: of_first("A_log", 0)?,
            state: of_first("A_log", 1)?,
            rank: of_first("dt_proj.weight", 1)?,
            conv: of_first("conv1d.weight", 2)?,
            eps: 1e-5,
            mixer: Mixer::Mamba,
        }
        .check(&self.name)
    }
}

impl<T> Weights<T> {
    /// The weights with their names and shapes in Hugging Face's files. The parts of a quantized matrix have names of
    /// their own, and are listed with the matrix's shape. If the embeddings are `tied`, the head is left out.
    pub(super) fn filed(&self, config: &Config, tied: bool) -> Vec<Filed<'_, T>> {
        let rows = vec![config.vocabulary, config.width];
        let norm = |prefix: &str, name, weight| (format!("{prefix}{name}"), vec![config.width], weight);
        let mut all = Vec::new();
        all.extend(self.embedding.iter().map(|table| (in_backbone(EMBEDDING), rows.clone(), table)));
        for (i, layer) in self.layers.iter().enumerate() {
            let prefix = of_layer(BACKBONE, i);
            all.push(norm(&prefix, NORM, &layer.norm));
            for (name, weight) in layer.block.named() {
                let Part { file, dims, .. } = of_block(&config.mixer, name);
                all.extend(filed_as(weight, &format!("{prefix}{file}"), dims(config)));
            }
        }
        all.push(norm(BACKBONE, LAST_NORM, &self.norm));
        let head = self.head.iter().filter(|_| !tied);
        all.extend(head.flat_map(|head| filed_as(head.w.as_ref(), HEAD, rows.clone())));
        all
    }
}

/// A weight with its name and shape in files, or each part of a quantized matrix with the shape of the matrix.
fn filed_as<'w, T>(weight: Matrix<&'w T>, name: &str, dims: Vec<usize>) -> impl Iterator<Item = Filed<'w, T>> {
    weight.parts(name).into_iter().map(move |(name, part)| (name, dims.clone(), part))
}

/// Refuses tensors whose quantization formats are not exactly those in `told`; `names` are the names of all tensors.
fn same_formats<'n>(name: &str, told: &BTreeSet<String>, names: impl Iterator<Item = &'n String>) -> Result<()> {
    let listed = |formats: Vec<&str>| if formats.is_empty() { "none".to_string() } else { formats.join(", ") };
    let (told, found) = (told.iter().map(String::as_str).collect(), stored::formats(names.map(String::as_str)));
    let (told, found) = (listed(told), listed(found.into_iter().collect()));
    match told == found {
        true => Ok(()),
        false => Err(failure(name, &format!("matrices in {told}, as is said beside them"), format_args!("in {found}"))
            .hint("The configuration and the tensors are of different models, or one was changed alone")),
    }
}

fn check_type(dtype: DType, matrices: &Matrices) -> Result<()> {
    let expected = match matrices.values().next() {
        Some(matrix) if dtype == DType::F64 => format!("f32, bf16 or f16 for a model in {}", matrix.how.name()),
        _ if dtype.is_float() => return Ok(()),
        _ => "f64, f32, bf16 or f16".to_string(),
    };
    Err(Error::new(Kind::Option, "type").expected(expected).got(dtype))
}

/// Quantized matrices by the names that their float versions would have.
type Matrices = BTreeMap<String, Stored>;

/// A shape without the axis of length 1 in PyTorch's depthwise convolutions.
pub(super) fn squeezed(dims: &[usize]) -> Vec<usize> {
    match *dims {
        [channels, 1, width] => vec![channels, width],
        _ => dims.to_vec(),
    }
}

/// The metadata key for the formats of a file's quantized matrices.
pub(super) const TOLD_FORMATS: &str = "sidewinder.quantized";

/// Bytes between two reports while a file is copied.
const CHUNK: usize = 16 << 20;

/// Upper limit for the bytes of a `config.json` or an index.
pub(super) const MAX_DESCRIPTION: u64 = 64 << 20;

/// Strips the prefix of a wrapped model from the names; other tensors are unchanged.
fn without_outer(tensors: BTreeMap<String, Found>) -> BTreeMap<String, Found> {
    let whole = format!("{OUTER}{BACKBONE}");
    if !tensors.keys().any(|name| name.starts_with(&whole)) {
        return tensors;
    }
    let inner = |name: String| name.strip_prefix(OUTER).map(str::to_string).unwrap_or(name);
    tensors.into_iter().map(|(name, found)| (inner(name), found)).collect()
}

/// The bytes of these files.
fn bytes(files: &[PathBuf]) -> usize {
    // What cannot be read is an error later.
    files.iter().map(|path| path.metadata().map_or(0, |about| about.len() as usize)).sum()
}

/// Adds the tensors of a file, which is copied if its bytes are counted. Its metadata must not contradict `family`, that
/// of the configuration.
fn read_file(
    path: &Path,
    copied: Option<&Tally>,
    family: Option<Family>,
    tensors: &mut BTreeMap<String, Found>,
) -> Result<()> {
    let reader = Reader::open(path)?;
    let name = path.display().to_string();
    family::check_metadata(&name, reader.metadata(), family)?;
    if let Some(told) = reader.metadata().get(TOLD_FORMATS) {
        let told = told.split(',').map(|format| format.trim().to_string()).collect();
        same_formats(&name, &told, reader.entries().iter().map(|entry| &entry.name))?;
    }
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

/// A file in memory: mapped, or copied into huge pages where the system has them. Every decode step reads all weights,
/// and huge pages need fewer address translations.
fn memory(path: &Path, copied: Option<&Tally>) -> Result<Mmap> {
    let failed = |e| failure(path.display().to_string(), "a file that can be held in memory", e);
    let (mut file, size) = file::open(path).map_err(failed)?;
    let Some(tally) = copied else {
        // SAFETY: callers of `Checkpoint::open` must not truncate or write to the file while it is mapped.
        return unsafe { Mmap::map(&file) }.map_err(failed);
    };
    let mut copy = MmapMut::map_anon(size as usize).map_err(failed)?;
    #[cfg(target_os = "linux")]
    let _ = copy.advise(Advice::HugePage);
    for chunk in copy.chunks_mut(CHUNK) {
        file.read_exact(chunk).map_err(failed)?;
        tally.add(chunk.len())?;
    }
    copy.make_read_only().map_err(failed)
}
