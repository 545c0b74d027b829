//! Randomly damaged files and dumps of small models: from seeds in tests, and from the fuzzer's input in fuzzing.

use serde_json::{Map, Value, json};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::{DType, Owned, Spec};
use sidewinder_models::mamba::{Checkpoint, Input, Model, Session, Where};
use std::path::Path;
use std::sync::Arc;

/// A source of random numbers below a limit.
pub type Chance<'c> = dyn FnMut(usize) -> usize + 'c;

/// The files of a checkpoint's folder.
pub struct Files {
    pub config: Option<Vec<u8>>,
    pub tensors: Vec<u8>,
}

/// A tensor in the header of a safetensors file.
#[derive(Clone)]
struct Tensor {
    name: String,
    dtype: &'static str,
    dims: Vec<usize>,
}

const TYPES: [(&str, usize); 8] =
    [("F32", 4), ("BF16", 2), ("F16", 2), ("F64", 8), ("U8", 1), ("BOOL", 1), ("I64", 8), ("F8_E4M3", 1)];

const SIZES: [usize; 12] = [0, 1, 2, 3, 7, 255, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 60, usize::MAX];

fn one_of<'a, T>(of: &'a [T], chance: &mut Chance) -> &'a T {
    &of[chance(of.len())]
}

/// The kinds of models that are damaged.
#[derive(Clone, Copy)]
enum Of {
    Mamba,
    Mamba2,
}

fn config(of: Of) -> Map<String, Value> {
    let mut config = json!({
        "model_type": "mamba", "hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 5, "state_size": 3,
        "intermediate_size": 8, "time_step_rank": 2, "conv_kernel": 3, "layer_norm_epsilon": 1e-5, "hidden_act": "silu",
    });
    let own = match of {
        Of::Mamba => json!({}),
        Of::Mamba2 => json!({
            "model_type": "mamba2", "num_heads": 4, "head_dim": 2, "n_groups": 2, "time_step_limit": [0.0, 10.0],
        }),
    };
    let config = config.as_object_mut().expect("an object");
    config.extend(own.as_object().expect("an object").clone());
    config.clone()
}

/// The tensor names of a layer, with their shapes.
fn layer(of: Of) -> &'static [(&'static str, &'static [usize])] {
    match of {
        Of::Mamba => &[
            ("norm.weight", &[4]),
            ("mixer.in_proj.weight", &[16, 4]),
            ("mixer.conv1d.weight", &[8, 1, 3]),
            ("mixer.conv1d.bias", &[8]),
            ("mixer.x_proj.weight", &[8, 8]),
            ("mixer.dt_proj.weight", &[8, 2]),
            ("mixer.dt_proj.bias", &[8]),
            ("mixer.A_log", &[8, 3]),
            ("mixer.D", &[8]),
            ("mixer.out_proj.weight", &[4, 8]),
        ],
        Of::Mamba2 => &[
            ("norm.weight", &[4]),
            ("mixer.in_proj.weight", &[32, 4]),
            ("mixer.conv1d.weight", &[20, 1, 3]),
            ("mixer.conv1d.bias", &[20]),
            ("mixer.dt_bias", &[4]),
            ("mixer.A_log", &[4]),
            ("mixer.D", &[4]),
            ("mixer.norm.weight", &[8]),
            ("mixer.out_proj.weight", &[4, 8]),
        ],
    }
}

fn tensors(of: Of) -> Vec<Tensor> {
    let tensor =
        |name: &str, dims: &[usize]| Tensor { name: format!("backbone.{name}"), dtype: "F32", dims: dims.to_vec() };
    let mut tensors = vec![tensor("embeddings.weight", &[5, 4]), tensor("norm_f.weight", &[4])];
    for number in 0..2 {
        tensors.extend(layer(of).iter().map(|(name, dims)| tensor(&format!("layers.{number}.{name}"), dims)));
    }
    tensors
}

/// A safetensors file of these tensors; those that would be too large get no data.
fn file(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for Tensor { name, dtype, dims } in tensors {
        let size = TYPES.iter().find(|(name, _)| name == dtype).map_or(1, |(_, size)| *size);
        let bytes = dims.iter().try_fold(size, |n, &d| n.checked_mul(d)).filter(|&n| n <= 1 << 16).unwrap_or(0);
        let start = data.len();
        // Values of about a third, in f32 and in bf16.
        data.extend((0..bytes).map(|i| [0xa8, 0x3e][i % 2]));
        header.insert(name.clone(), json!({"dtype": dtype, "shape": dims, "data_offsets": [start, data.len()]}));
    }
    with_header(header, &data)
}

fn with_header(header: Map<String, Value>, data: &[u8]) -> Vec<u8> {
    let header = Value::Object(header).to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
}

/// The undamaged files of each kind of model.
pub fn whole() -> [Files; 2] {
    [Of::Mamba, Of::Mamba2].map(|of| {
        let config = Value::Object(config(of)).to_string().into_bytes();
        Files { config: Some(config), tensors: file(&tensors(of)) }
    })
}

/// The files of a model with random damage.
pub fn damaged(chance: &mut Chance) -> Files {
    let of = [Of::Mamba, Of::Mamba2][chance(2)];
    let (mut config, mut tensors) = (config(of), tensors(of));
    match chance(3) {
        0 => damage_config(&mut config, chance),
        1 => (0..=chance(2)).for_each(|_| damage_tensors(&mut tensors, chance)),
        _ => {}
    }
    let mut files = Files { config: Some(Value::Object(config).to_string().into_bytes()), tensors: file(&tensors) };
    match chance(4) {
        0 => files.config = None,
        1 => files.config.iter_mut().for_each(|config| damage_bytes(config, chance)),
        2 => damage_file(&mut files.tensors, chance),
        _ => {}
    }
    files
}

fn damage_config(config: &mut Map<String, Value>, chance: &mut Chance) {
    let names: Vec<String> = config.keys().cloned().collect();
    let name = one_of(&names, chance).clone();
    let value = match chance(8) {
        0 => Value::Null,
        1 => json!(-1),
        2 => json!(1e300),
        3 => json!("auto"),
        4 => json!([[]]),
        _ => json!(one_of(&SIZES, chance)),
    };
    config.insert(name, value);
}

fn damage_tensors(tensors: &mut Vec<Tensor>, chance: &mut Chance) {
    let at = chance(tensors.len());
    let tensor = &mut tensors[at];
    match chance(7) {
        0 => drop(tensors.remove(at)),
        1 => tensor.dtype = one_of(&TYPES, chance).0,
        2 => tensor.dims.push(one_of(&SIZES, chance) % 8),
        3 => drop(tensor.dims.pop()),
        4 => tensor.name = tensor.name.replace("layers.1", &format!("layers.{}", one_of(&SIZES, chance))),
        5 => {
            let other = Tensor { name: format!("{}{at}", tensor.name), ..tensor.clone() };
            tensors.push(other);
        }
        // With one type for all tensors, the files still are a model.
        _ => {
            let dtype = one_of(&TYPES, chance).0;
            tensors.iter_mut().for_each(|tensor| tensor.dtype = dtype);
        }
    }
}

/// Damages a safetensors file: any byte, or an entry of its header.
pub fn damage_file(bytes: &mut Vec<u8>, chance: &mut Chance) {
    let Some((mut tensors, data)) = parts(bytes) else { return damage_bytes(bytes, chance) };
    let names: Vec<String> = tensors.keys().cloned().collect();
    let tensor = &mut tensors[one_of(&names, chance)];
    match chance(5) {
        0 => tensor["shape"] = json!([one_of(&SIZES, chance), one_of(&SIZES, chance)]),
        1 => tensor["data_offsets"][chance(2)] = json!(one_of(&SIZES, chance)),
        2 => tensor["dtype"] = json!(one_of(&TYPES, chance).0),
        _ => return damage_bytes(bytes, chance),
    }
    *bytes = with_header(tensors, &data);
}

/// The entries of a header and the data after it; `None` if there are no entries, or some are not tensors.
fn parts(bytes: &[u8]) -> Option<(Map<String, Value>, Vec<u8>)> {
    let length = u64::from_le_bytes(*bytes.first_chunk()?);
    let (header, data) = bytes[8..].split_at_checked(length.try_into().ok()?)?;
    let tensors: Map<String, Value> = serde_json::from_slice(header).ok()?;
    let whole = !tensors.is_empty() && tensors.values().all(|tensor| tensor["data_offsets"][1].is_u64());
    whole.then(|| (tensors, data.to_vec()))
}

fn damage_bytes(bytes: &mut Vec<u8>, chance: &mut Chance) {
    if bytes.is_empty() {
        return bytes.push(0);
    }
    let at = chance(bytes.len());
    match chance(5) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, chance(256) as u8),
        2 => drop(bytes.remove(at)),
        3 => bytes[at] ^= 1 << chance(8),
        _ => bytes[at] = chance(256) as u8,
    }
}

/// Writes files into a folder, loads the model in them, and runs it briefly.
pub fn run(files: &Files, folder: &Path, chance: &mut Chance) -> Result<()> {
    let config = folder.join("config.json");
    // Fails if there is none, which is fine.
    let _ = std::fs::remove_file(&config);
    if let Some(bytes) = &files.config {
        std::fs::write(&config, bytes).expect("a file in a folder of our own");
    }
    // Removed, not overwritten, because other models may still have the old file mapped.
    let file = folder.join("model.safetensors");
    let _ = std::fs::remove_file(&file);
    std::fs::write(file, &files.tensors).expect("a file in a folder of our own");
    let checkpoint = Checkpoint::open(folder, chance(2) == 0)?;
    let dtype = [None, Some(DType::F32), Some(DType::Bf16), Some(DType::F64), Some(DType::U8)][chance(5)];
    let place = Where::Cpu(Exec { threads: 1, ..Exec::default() });
    let model = Arc::new(Model::new(checkpoint, dtype, chance(3) == 0, place)?);
    used(&model)
}

/// Runs a whole sequence, and a session that continues after a dump and a restore.
fn used(model: &Arc<Model>) -> Result<()> {
    let (config, dtype) = (model.config(), model.dtype());
    let features =
        |rows| Owned::from_fn(Spec::new(dtype, &[rows, config.width]).expect("a small model"), |i| i as f64 % 3.0);
    let (many, one) = (features(3), features(1));
    let inputs = match config.vocabulary {
        0 => [Input::Features(many.view()), Input::Features(one.view())],
        _ => [Input::Tokens(&[0; 3]), Input::Tokens(&[0])],
    };
    let output = |rows| model.output(&[rows]).map(Owned::poisoned);
    let (mut whole, mut last) = (Owned::poisoned(model.output(&[1, 3])?), output(1)?);
    model.forward(inputs[0], 1, whole.view_mut())?;
    let mut session = Session::new(model)?;
    session.prefill(inputs[0], None)?;
    let mut restored = Session::restore(model, &session.dump()?)?;
    Session::step(&mut [&mut restored], inputs[1], last.view_mut())?;
    let mut again = output(1)?;
    Session::step(&mut [&mut session], inputs[1], again.view_mut())?;
    assert_eq!(last.view().bytes(), again.view().bytes(), "a restored session goes on as the other does");
    Ok(())
}

/// Restores a dump, and runs a decode step if it is valid.
pub fn restore(model: &Arc<Model>, dump: &[u8]) -> Result<()> {
    let mut session = Session::restore(model, dump)?;
    let before = session.length();
    let mut logits = Owned::poisoned(model.output(&[1])?);
    Session::step(&mut [&mut session], Input::Tokens(&[1]), logits.view_mut())?;
    assert_eq!(session.length(), before + 1);
    Ok(())
}

/// The model of the undamaged files of the first kind.
pub fn model(folder: &Path) -> Arc<Model> {
    let file = folder.join("model.safetensors");
    let [first, _] = whole();
    std::fs::write(file, first.tensors).expect("a file in a folder of our own");
    let place = Where::Cpu(Exec { threads: 1, ..Exec::default() });
    let checkpoint = Checkpoint::open(folder, true).expect("a checkpoint that is whole");
    Arc::new(Model::new(checkpoint, None, false, place).expect("a model that is whole"))
}

/// Whether an error is about the input, names the argument, and is not too long to read.
pub fn is_fair(error: &Error) -> bool {
    let kinds = [Kind::File, Kind::Argument, Kind::Option, Kind::Shape, Kind::Size, Kind::DType];
    kinds.contains(&error.kind) && !error.argument.is_empty() && error.to_string().len() < 100_000
}
