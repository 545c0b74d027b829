//! Mamba models: loading, saving, and passes over whole sequences.

mod session;
mod train;

pub use session::HeldSession;
pub use train::HeldTrainer;

use crate::answer::answer;
use crate::ops::{Target, decode_map};
use crate::tensor::{Output, Tensor, buffer_term};
use crate::watch::Call;
use rustler::{Atom, Binary, Encoder, Env, ResourceArc, Term};
use serde::Deserialize;
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::ops::products::matrices::Quantization;
use sidewinder_kernels::tensor::{DType, Described};
use sidewinder_models::mamba::{
    Checkpoint, Config, Description, Heads, Input, Mixer, Model, Weight, Where, ends, files, merged, names,
    quantized_config, told,
};
use std::path::Path;
use std::sync::Arc;

/// A model as a resource.
pub struct HeldModel(Arc<Model>);

impl rustler::Resource for HeldModel {}

/// Options for loading a model.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Loading {
    /// The storage type by name; `None` is that of the file's matrices.
    dtype: Option<String>,
    /// Whether to load the model without embedding and head.
    backbone: bool,
    /// Whether to copy weights from the file instead of mapping it.
    copied: bool,
    /// The quantization of large matrices by name, if any.
    quantize: Option<String>,
}

impl Loading {
    fn dtype(&self) -> Result<Option<DType>> {
        let named = |name: &String| {
            DType::from_name(name)
                .ok_or_else(|| Error::new(Kind::Option, "type").expected("f64, f32, bf16 or f16").got(name))
        };
        self.dtype.as_ref().map(named).transpose()
    }

    fn quantization(&self) -> Result<Option<Quantization>> {
        let named = |name: &String| {
            Quantization::from_name(name)
                .ok_or_else(|| Error::new(Kind::Option, "quantize").expected("q8_0, q4_0 or ternary").got(name))
        };
        self.quantize.as_ref().map(named).transpose()
    }
}

impl Target {
    fn place(&self) -> Result<Where> {
        Ok(match self.device {
            None => Where::Cpu(self.exec()?),
            Some(ordinal) => Where::Cuda(Device::get(ordinal)?, self.allow_tf32),
        })
    }
}

/// Loads a checkpoint: `{model, sizes, type}`.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_load<'a>(env: Env<'a>, path: String, loading: Term<'a>, target: Term<'a>, watch: Term<'a>) -> Term<'a> {
    answer(env, || {
        let watch = Call::decode(env, watch)?;
        let loading: Loading = decode_map("options", loading)?;
        let checkpoint = Checkpoint::open_watched(Path::new(&path), loading.copied, &watch)?;
        loaded(env, checkpoint, &loading, decode_map::<Target>("target", target)?.place()?, &watch)
    })
}

/// The tokens that end a text according to the files of a checkpoint, or nil.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_ends(env: Env, path: String, vocabulary: usize) -> Term {
    answer(env, || ends::read(Path::new(&path), vocabulary))
}

/// The tokens that end a text according to the text of a `config.json`, or nil.
#[rustler::nif]
fn mamba_ends_in(env: Env, config: String, vocabulary: usize) -> Term {
    answer(env, || ends::parse("config", config.as_bytes(), vocabulary))
}

/// Makes a model of `{name, tensor}` pairs with the names of checkpoints; `config` is the text of a `config.json`, or
/// empty.
#[rustler::nif(schedule = "DirtyCpu")]
fn mamba_new<'a>(
    env: Env<'a>,
    config: String,
    tensors: Vec<(String, Term<'a>)>,
    loading: Term<'a>,
    target: Term<'a>,
    watch: Term<'a>,
) -> Term<'a> {
    answer(env, || {
        let watch = Call::decode(env, watch)?;
        let config = (!config.is_empty()).then(|| Description::parse("config", config.as_bytes())).transpose()?;
        let weight = |(name, term): (String, Term<'a>)| {
            let tensor = Tensor::decode(&name, term)?;
            let view = tensor.view().map_err(|e| Error { argument: name.as_str().into(), ..e })?;
            Ok((name, Weight::copied(view.spec(), view.bytes())?))
        };
        let tensors = tensors.into_iter().map(weight).collect::<Result<Vec<_>>>()?;
        let checkpoint = Checkpoint::described("tensors", config, tensors);
        let place = decode_map::<Target>("target", target)?.place()?;
        loaded(env, checkpoint, &decode_map("options", loading)?, place, &watch)
    })
}

fn loaded<'a>(env: Env<'a>, checkpoint: Checkpoint, loading: &Loading, place: Where, watch: &Call) -> Result<Term<'a>> {
    let (dtype, how) = (loading.dtype()?, loading.quantization()?);
    let model = Model::watched(checkpoint, dtype, loading.backbone, how, place, watch)?;
    let Config { width, layers, vocabulary, inner, state, rank, conv, eps, mixer } = *model.config();
    let sizes = [
        ("width", width),
        ("layers", layers),
        ("vocabulary", vocabulary),
        ("inner", inner),
        ("state", state),
        ("rank", rank),
        ("conv", conv),
    ];
    let atom = |name: &str| Atom::from_str(env, name).expect("a short name").encode(env);
    let mut pairs: Vec<(Term, Term)> = sizes.iter().map(|(name, size)| (atom(name), size.encode(env))).collect();
    pairs.extend([(atom("eps"), eps.encode(env)), (atom("mixer"), atom(mixer.model_type()))]);
    if let Mixer::Mamba2(Heads { count, groups, limit: (low, high) }) = mixer {
        let high = if high.is_finite() { high.encode(env) } else { atom("infinity") };
        pairs.extend([(atom("heads"), count.encode(env)), (atom("groups"), groups.encode(env))]);
        pairs.push((atom("dt_limit"), (low, high).encode(env)));
    }
    let config = Term::map_from_pairs(env, &pairs).expect("distinct names");
    let dtype = atom(model.dtype().name());
    Ok((ResourceArc::new(HeldModel(Arc::new(model))), config, dtype).encode(env))
}

/// The weights of a model on the host: `{name, tensor}` pairs that [`mamba_new`] takes.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_tensors<'a>(env: Env<'a>, model: ResourceArc<HeldModel>) -> Term<'a> {
    answer(env, || {
        let term = |(name, weight): (String, Weight)| Ok((name, Output::copied(weight.view())?.into_term(env)));
        model.0.tensors()?.into_iter().map(term).collect::<Result<Vec<_>>>()
    })
}

/// Writes the weights of a model to a file.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_save<'a>(env: Env<'a>, model: ResourceArc<HeldModel>, path: String, watch: Term<'a>) -> Term<'a> {
    answer(env, || model.0.save_watched(Path::new(&path), &Call::decode(env, watch)?))
}

/// The `config.json` of a model, with all entries of the given ones kept.
#[rustler::nif]
fn mamba_described<'a>(env: Env<'a>, model: ResourceArc<HeldModel>, configs: Vec<String>) -> Term<'a> {
    answer(env, || model.0.described(&configs.iter().map(String::as_bytes).collect::<Vec<_>>()))
}

/// A `config.json` that says how matrices are quantized, derived from the names of all tensors.
#[rustler::nif]
fn mamba_quantized_config(env: Env, config: String, names: Vec<String>) -> Term {
    answer(env, || quantized_config(config.as_bytes(), names.iter().map(String::as_str)))
}

/// The safetensors files that belong to a path.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_files(env: Env, path: String) -> Term {
    answer(env, || {
        let files = files(Path::new(&path))?;
        Ok(files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>())
    })
}

/// Merges configurations; later ones take precedence.
#[rustler::nif]
fn json_merged(env: Env, configs: Vec<String>) -> Term {
    answer(env, || merged(&configs.iter().map(String::as_bytes).collect::<Vec<_>>()))
}

/// The metadata of a file with tensors of these names: `{key, text}` pairs.
#[rustler::nif]
fn mamba_told<'a>(env: Env<'a>, names: Vec<String>) -> Term<'a> {
    answer(env, || Ok(told(names.iter().map(String::as_str)).into_iter().collect::<Vec<_>>()))
}

/// The weights of a block of this `model_type`: `{name, name within a layer of a file}`.
#[rustler::nif]
fn mamba_names<'a>(env: Env<'a>, model_type: String) -> Term<'a> {
    answer(env, || names(&model_type))
}

/// The input of a model: `{tokens, sizes}` with tokens as 32-bit numbers, or a tensor of features.
enum Fed<'a> {
    Tokens(Vec<u32>, Vec<usize>),
    Features(Tensor<'a>),
}

impl<'a> Fed<'a> {
    fn decode(term: Term<'a>) -> Result<Fed<'a>> {
        if let Ok((tokens, sizes)) = term.decode::<(Binary, Vec<usize>)>() {
            let (numbers, rest) = tokens.as_chunks::<4>();
            let count = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
            return match rest.is_empty() && count == Some(numbers.len()) {
                true => Ok(Fed::Tokens(numbers.iter().map(|&bytes| u32::from_ne_bytes(bytes)).collect(), sizes)),
                false => Err(Error::new(Kind::Size, "tokens")
                    .expected(format_args!("32-bit numbers of shape {sizes:?}"))
                    .got(format_args!("{} bytes", tokens.len()))),
            };
        }
        Tensor::decode("features", term).map(Fed::Features)
    }

    fn input(&self) -> Result<Input<'_>> {
        Ok(match self {
            Fed::Tokens(tokens, _) => Input::Tokens(tokens),
            Fed::Features(tensor) => Input::Features(tensor.view()?),
        })
    }

    fn tokens(&self) -> Result<&[u32]> {
        match self {
            Fed::Tokens(tokens, _) => Ok(tokens),
            Fed::Features(tensor) => {
                Err(Error::new(Kind::Argument, "input").expected("tokens").got(tensor.spec().to_string()))
            }
        }
    }

    /// Batch and length.
    fn sizes(&self) -> Result<[usize; 2]> {
        let sizes = match self {
            Fed::Tokens(_, sizes) => sizes.clone(),
            Fed::Features(tensor) => {
                tensor.spec().shape.split_last().map(|(_, rows)| rows.to_vec()).unwrap_or_default()
            }
        };
        sizes[..].try_into().map_err(|_| {
            Error::new(Kind::Shape, "input")
                .expected("a batch of sequences of one length")
                .got(format_args!("{sizes:?}"))
        })
    }
}

scheduled!(mamba_forward_cpu, mamba_forward_io => forward,
    [model: ResourceArc<HeldModel>] [input: Term<'a>] [watch: Term<'a>]);

/// Runs whole sequences; the result is on the model's device.
fn forward<'a>(env: Env<'a>, model: ResourceArc<HeldModel>, input: Term<'a>, watch: Term<'a>) -> Term<'a> {
    answer(env, || {
        let model = &model.0;
        let watch = Call::decode(env, watch)?;
        let fed = Fed::decode(input)?;
        let [batch, length] = fed.sizes()?;
        let spec = model.output(&[batch, length])?;
        match model.device() {
            Some(device) => {
                let to = Buffer::new(device, spec)?;
                model.forward_there(fed.input()?, batch, &to, &watch)?;
                Ok(buffer_term(env, to))
            }
            None => {
                let mut to = Output::new(spec)?;
                model.forward_watched(fed.input()?, batch, to.view_mut()?, &watch)?;
                Ok(to.into_term(env))
            }
        }
    })
}
