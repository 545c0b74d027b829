//! Quantized models: against the dequantized matrices in f64, on every level and GPU against the reference, and whole
//! sequences against the same sequences cut into prefills and decode steps.

#[path = "../../kernels/tests/common/mod.rs"]
mod common;
#[path = "common/models.rs"]
mod models;

use common::{gpu, levels};
use sidewinder_files::safetensors::{self, Reader};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::ops::products::matrices::{self, Quantization};
use sidewinder_kernels::place::Cpu;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};
use sidewinder_models::mamba::train::Trainer;
use sidewinder_models::mamba::{Checkpoint, Config, Description, Heads, Input, Mixer, Model, Session, Weight, Where};
use std::collections::BTreeMap;
use std::sync::Arc;

const LENGTH: usize = 5;
const REFERENCE: Exec = Exec { level: Level::Reference, threads: 1 };

/// Sizes for which all, most and some matrices have rows of whole quantization blocks, rows of more blocks than a warp
/// has lanes, and the other kinds of layers.
fn configs() -> [Config; 8] {
    let heads = |groups| Mixer::Mamba2(Heads { count: 6, groups, limit: (0.0, f64::INFINITY) });
    let whole = Config {
        width: 64,
        layers: 2,
        vocabulary: 37,
        inner: 96,
        state: 16,
        rank: 4,
        conv: 4,
        eps: 1e-5,
        mixer: Mixer::Mamba,
    };
    let only_x_proj = Config { width: 48, ..whole };
    [
        whole,
        Config { inner: 72, ..whole },
        only_x_proj,
        Config { width: 48, inner: 41, state: 5, rank: 3, conv: 3, ..whole },
        Config { layers: 1, inner: 2080, rank: 128, ..whole },
        Config { mixer: Mixer::FalconMamba(1e-3), ..whole },
        Config { mixer: heads(2), rank: 0, ..whole },
        Config { mixer: heads(1), rank: 0, ..whole },
    ]
}

fn quantizations() -> impl Iterator<Item = Quantization> {
    ["q8_0", "q4_0", "ternary"].into_iter().map(|name| Quantization::from_name(name).unwrap())
}

fn checkpoint(config: &Config) -> Checkpoint {
    Checkpoint::new("random", Some(*config), models::tensors(config, true))
}

fn quantized(config: &Config, dtype: DType, how: Quantization, place: Where) -> Arc<Model> {
    Arc::new(Model::quantized(checkpoint(config), Some(dtype), false, how, place).unwrap())
}

fn tokens(config: &Config) -> Vec<u32> {
    (0..2 * LENGTH).map(|i| (i * 7 % config.vocabulary) as u32).collect()
}

fn forward(model: &Model, tokens: &[u32]) -> Owned {
    let mut logits = Owned::poisoned(model.output(&[2, LENGTH]).unwrap());
    model.forward(Input::Tokens(tokens), 2, logits.view_mut()).unwrap();
    logits
}

/// Every device, with a label.
fn places() -> Vec<(Where, String)> {
    let on_cpu = levels()
        .flat_map(|level| [1, 2].map(|threads| (Where::Cpu(Exec { level, threads }), format!("{level:?} {threads}"))));
    on_cpu.chain(gpu().map(|device| (Where::Cuda(device, false), "a GPU".to_string()))).collect()
}

fn near(got: &Owned, expected: &Owned, relative: f64, what: &str) {
    let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
    let off = common::worst(got, expected, 0.0, relative * largest);
    assert!(off <= 1.0, "{off} times the tolerance: {what}");
}

/// A quantized weight as floats, from products with the unit vectors.
fn there_and_back(name: &str, weight: &Weight, how: Quantization) -> Weight {
    let large = ["in_proj.weight", "x_proj.weight", "out_proj.weight", "lm_head.weight"];
    if !large.iter().any(|end| name.ends_with(end)) || !how.fits(&weight.spec()) {
        return weight.cast(DType::F64);
    }
    let quantized = how.of(&weight.view(), &REFERENCE).unwrap();
    let [rows, columns] = weight.spec().shape[..] else { panic!("a matrix") };
    let unit = Owned::from_fn(Spec::new(DType::F32, &[columns, columns]).unwrap(), |i| {
        if i / columns == i % columns { 1.0 } else { 0.0 }
    });
    let mut product = Owned::poisoned(Spec::new(DType::F32, &[columns, rows]).unwrap());
    let w = quantized.as_ref().try_map(|part| Ok(part.view())).unwrap();
    matrices::multiply(&Cpu(&REFERENCE), unit.view(), &w.into(), product.view_mut()).unwrap();
    let values = product.view().to_f64();
    Owned::from_fn(Spec::new(DType::F64, &[rows, columns]).unwrap(), |i| values[[i % columns, i / columns]]).into()
}

#[test]
fn they_are_near_the_same_matrices_as_floats() {
    for (config, how) in configs().into_iter().flat_map(|config| quantizations().map(move |how| (config, how))) {
        let tensors = models::tensors(&config, true).into_iter();
        let floats = tensors.map(|(name, weight)| (name.clone(), there_and_back(&name, &weight, how)));
        let floats = Checkpoint::new("floats", Some(config), floats.collect::<Vec<_>>());
        let floats = Model::new(floats, Some(DType::F64), false, Where::Cpu(REFERENCE)).unwrap();
        let model = quantized(&config, DType::F32, how, Where::Cpu(REFERENCE));
        let tokens = tokens(&config);
        // The error of activations rounded to 8 bits before each product; norms over four elements amplify it.
        let relative = if let Mixer::FalconMamba(_) = config.mixer { 0.08 } else { 0.04 };
        near(&forward(&model, &tokens), &forward(&floats, &tokens), relative, &format!("{how:?} {config:?}"));
    }
}

#[test]
fn they_are_the_same_everywhere() {
    for (config, how) in configs().into_iter().flat_map(|config| quantizations().map(move |how| (config, how))) {
        let tokens = tokens(&config);
        let expected = forward(&quantized(&config, DType::F32, how, Where::Cpu(REFERENCE)), &tokens);
        for (place, what) in places() {
            let got = forward(&quantized(&config, DType::F32, how, place), &tokens);
            // An activation halfway between two integers may be rounded to the other one.
            near(&got, &expected, 0.01, &format!("{how:?} {config:?} on {what}"));
        }
    }
}

#[test]
fn steps_are_those_of_whole_sequences() {
    for (config, how) in configs().into_iter().flat_map(|config| quantizations().map(move |how| (config, how))) {
        // Products of few and of many rows round activations to 8 bits in different ways, which norms amplify, those over
        // four elements most.
        let of_f32 = match config.mixer {
            Mixer::Mamba => 0.01,
            Mixer::Mamba2(_) => 0.02,
            Mixer::FalconMamba(_) => 0.04,
        };
        for (dtype, relative) in [(DType::F32, of_f32), (DType::Bf16, 0.1)] {
            let places = places().into_iter().chain([(Where::Cpu(REFERENCE), "the reference".to_string())]);
            for (place, what) in places {
                let model = quantized(&config, dtype, how, place);
                let tokens = tokens(&config);
                let whole = forward(&model, &tokens).view().to_f64();
                // The two sequences in turn.
                for count in [1, 2, 4, 5, 9] {
                    let mut sessions: Vec<Session> = (0..count).map(|_| Session::new(&model).unwrap()).collect();
                    for t in 0..LENGTH {
                        let next: Vec<u32> = (0..count).map(|i| tokens[i % 2 * LENGTH + t]).collect();
                        let mut logits = Owned::poisoned(model.output(&[count]).unwrap());
                        let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
                        Session::step(&mut all, Input::Tokens(&next), logits.view_mut()).unwrap();
                        let rows = Spec::new(dtype, &[count, config.vocabulary]).unwrap();
                        let expected =
                            Owned::from_fn(rows, |i| whole[[i / config.vocabulary % 2, t, i % config.vocabulary]]);
                        let what = format!("{how:?} {config:?} {dtype} step {t} of {count} on {what}");
                        near(&logits, &expected, relative, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn what_they_cannot_do_is_refused() {
    let [config, ..] = configs();
    let [q8, ..] = [Quantization::from_name("q8_0").unwrap()];
    let place = || Where::Cpu(Exec::default());
    let error = Model::quantized(checkpoint(&config), Some(DType::F64), false, q8, place()).map(|_| ()).unwrap_err();
    assert_eq!((error.kind, &*error.argument), (Kind::Option, "type"), "{error}");
    let model = quantized(&config, DType::F32, q8, place());
    let error = model.tensors().map(|_| ()).unwrap_err();
    assert_eq!((error.kind, &*error.argument), (Kind::Argument, "model"), "{error}");
    assert_eq!(Quantization::from_name("q5_0"), None);
}

/// The model of a checkpoint's tensors, in their own type.
fn of_file(config: Option<Config>, tensors: impl IntoIterator<Item = (String, Weight)>) -> Result<Model> {
    Model::new(Checkpoint::new("file", config, tensors), None, false, Where::Cpu(Exec::default()))
}

fn bytes(tensors: &[(String, Weight)]) -> BTreeMap<&str, (Spec, &[u8])> {
    tensors.iter().map(|(name, weight)| (name.as_str(), (weight.spec(), weight.view().bytes()))).collect()
}

#[test]
fn what_is_stored_is_the_same_model_again() {
    for (config, how) in configs().into_iter().flat_map(|config| quantizations().map(move |how| (config, how))) {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for (whole, backbone) in [(true, false), (false, false), (true, true)] {
                let checkpoint = Checkpoint::new("random", Some(config), models::tensors(&config, whole));
                let place = || Where::Cpu(Exec::default());
                let model = Model::quantized(checkpoint, Some(dtype), backbone, how, place()).unwrap();
                let stored = model.stored().unwrap();
                // Without a configuration, tensors are taken for those of the first Mamba.
                let nothing = (config.mixer == Mixer::Mamba).then_some(None);
                for sizes in [Some(Some(*model.config())), nothing].into_iter().flatten() {
                    let again = Checkpoint::new("again", sizes, stored.clone());
                    // A quantized backbone of Mamba-2 has no float tensor that tells its type.
                    let unknown = backbone && matches!(config.mixer, Mixer::Mamba2(_));
                    let again = Model::new(again, unknown.then_some(dtype), backbone, place()).unwrap();
                    assert_eq!((again.dtype(), again.config()), (model.dtype(), model.config()));
                    assert_eq!(again.formats(), model.formats());
                    assert_eq!(bytes(&again.stored().unwrap()), bytes(&stored));
                    if !backbone {
                        let tokens = tokens(&config);
                        let logits = [&model, &again].map(|model| forward(model, &tokens));
                        assert_eq!(logits[0].view().bytes(), logits[1].view().bytes(), "{how:?} {config:?} {dtype}");
                    }
                }
            }
        }
    }
}

#[test]
fn any_matrix_may_be_quantized_and_the_others_are_read_as_floats() {
    let config = Config { rank: 32, state: 32, ..configs()[0] };
    for how in quantizations() {
        let (mut parts, mut floats) = (BTreeMap::new(), BTreeMap::new());
        for (name, weight) in models::tensors(&config, false) {
            let weight = weight.cast(DType::F32);
            let [rows, columns] = weight.spec().shape[..] else {
                parts.insert(name.clone(), weight.clone());
                floats.insert(name, weight);
                continue;
            };
            let own = how.of(&weight.view(), &REFERENCE).unwrap();
            let views = own.as_ref().try_map(|part| Ok(part.view())).unwrap();
            floats.insert(name.clone(), matrices::floats(&views, columns).unwrap().into());
            parts.extend(own.parts(&name).into_iter().map(|(name, part)| (name, part.into())));
            if how == Quantization::Ternary {
                let sizes = [rows, columns];
                let shape = Owned::from_fn(Spec::new(DType::I64, &[2]).unwrap(), |i| sizes[i] as f64);
                parts.insert(format!("{name}.shape"), shape.into());
            }
        }
        let model = of_file(None, parts.clone()).unwrap();
        assert_eq!(model.config(), &config);
        // The projections and the head are quantized; all other weights are dequantized on loading.
        let matrix = |name: &String| ["in_proj", "x_proj", "out_proj"].iter().any(|part| name.contains(part));
        let large = parts.iter().filter(|(name, _)| matrix(name)).map(|(name, part)| (name.clone(), part.clone()));
        let small = floats.iter().filter(|(name, _)| !matrix(name)).map(|(name, part)| (name.clone(), part.clone()));
        let table = "backbone.embeddings.weight";
        let head = parts
            .iter()
            .filter_map(|(name, part)| Some((format!("lm_head.weight{}", name.strip_prefix(table)?), part.clone())));
        let expected = of_file(None, large.chain(small).chain(head)).unwrap();
        let tokens = tokens(&config);
        let logits = [&model, &expected].map(|model| forward(model, &tokens));
        assert_eq!(logits[0].view().bytes(), logits[1].view().bytes(), "{how:?}");
        let floats = Model::new(Checkpoint::new("floats", None, floats), None, false, Where::Cpu(REFERENCE)).unwrap();
        near(&logits[0], &forward(&floats, &tokens), 0.04, &format!("{how:?}"));
    }
}

#[test]
fn a_scale_may_stand_for_all_rows() {
    let [config, ..] = configs();
    let model = quantized(&config, DType::F32, Quantization::Ternary, Where::Cpu(Exec::default()));
    let of = |scale: &dyn Fn(usize) -> Vec<f32>| {
        let scaled = |(name, weight): (String, Weight)| {
            let rows = weight.spec().shape[0];
            let scales = scale(rows);
            let spec = Spec::new(DType::F32, &[scales.len()]).unwrap();
            let all = || Owned::from_fn(spec, |i| f64::from(scales[i])).into();
            let weight = if name.ends_with(".scale") { all() } else { weight };
            (name, weight)
        };
        let model = of_file(None, model.stored().unwrap().into_iter().map(scaled)).unwrap();
        forward(&model, &tokens(&config))
    };
    let (one, each) = (of(&|_| vec![0.125]), of(&|rows| vec![0.125; rows]));
    assert_eq!(one.view().bytes(), each.view().bytes());
}

#[test]
fn stored_matrices_that_contradict_are_refused() {
    let [config, ..] = configs();
    let name = "backbone.layers.1.mixer.out_proj.weight";
    let stored = |how: &str| {
        let how = Quantization::from_name(how).unwrap();
        let model = quantized(&config, DType::F32, how, Where::Cpu(Exec::default()));
        model.stored().unwrap().into_iter().collect::<BTreeMap<String, Weight>>()
    };
    let zeros = |dtype, dims: &[usize]| Weight::from(Owned::zeros(Spec::new(dtype, dims).unwrap()));
    let filled = |dims: &[usize], byte: u8| {
        Weight::copied(Spec::new(DType::U8, dims).unwrap(), &vec![byte; dims.iter().product()]).unwrap()
    };
    let sizes = |sizes: [i64; 2]| {
        let spec = Spec::new(DType::I64, &[2]).unwrap();
        Weight::copied(spec, &sizes.map(i64::to_ne_bytes).concat()).unwrap()
    };
    for (how, end, with, part) in [
        ("q8_0", "", Some(zeros(DType::F32, &[64, 96])), "as floats and in q8_0"),
        ("q8_0", ".q4_0", Some(zeros(DType::U8, &[64, 54])), "in q4_0 and in q8_0"),
        ("q8_0", ".plane0", Some(zeros(DType::U8, &[64, 12])), "out_proj.weight.plane1`"),
        ("q8_0", ".scale", Some(zeros(DType::F32, &[64])), "out_proj.weight.plane0`"),
        ("q8_0", ".shape", Some(sizes([64, 96])), "out_proj.weight.shape`, which no Mamba model has"),
        ("q8_0", ".q8_0", None, "no `backbone.layers.1.mixer.out_proj.weight`"),
        ("q8_0", ".q8_0", Some(zeros(DType::U8, &[64, 101])), "no multiple of 34 bytes"),
        ("q8_0", ".q8_0", Some(zeros(DType::U8, &[64, 68])), "of shape (64, 64) where it should be (64, 96)"),
        ("q8_0", ".q8_0", Some(zeros(DType::U8, &[63, 102])), "of shape (63, 96)"),
        ("q8_0", ".q8_0", Some(zeros(DType::I8, &[64, 102])), "should be u8"),
        ("q8_0", ".q8_0", Some(zeros(DType::U8, &[64 * 102])), "out_proj.weight.q8_0` of u8"),
        ("ternary", ".plane1", None, "no `backbone.layers.1.mixer.out_proj.weight.plane1`"),
        ("ternary", ".shape", None, "no `backbone.layers.1.mixer.out_proj.weight.shape`"),
        ("ternary", ".shape", Some(zeros(DType::F32, &[2])), "no shape of a matrix"),
        ("ternary", ".shape", Some(sizes([64, -1])), "no shape of a matrix"),
        ("ternary", ".shape", Some(sizes([1 << 40, 0])), "no shape of a matrix"),
        ("ternary", ".shape", Some(sizes([64, 97])), "no room for (64, 97)"),
        ("ternary", ".shape", Some(sizes([64, 95])), "none of -1, 0 and 1"),
        ("ternary", ".scale", Some(zeros(DType::F32, &[3])), "one for all or each of 64 rows"),
        ("ternary", ".scale", Some(zeros(DType::F64, &[64])), "should be f32"),
        ("ternary", ".plane0", Some(zeros(DType::I8, &[64, 12])), "should be u8"),
        ("ternary", ".plane0", Some(filled(&[64, 12], 0xff)), "none of -1, 0 and 1"),
    ] {
        let mut tensors = stored(how);
        tensors.remove(&format!("{name}{end}"));
        tensors.extend(with.map(|weight| (format!("{name}{end}"), weight)));
        let error = of_file(Some(config), tensors).map(|_| ()).expect_err(part);
        assert!(error.kind == Kind::File && error.got.contains(part), "{part}: {error}");
    }
}

#[test]
fn options_that_contradict_what_is_stored_are_refused() {
    let [config, ..] = configs();
    let [q8, q4, ternary] = ["q8_0", "q4_0", "ternary"].map(|name| Quantization::from_name(name).unwrap());
    let place = || Where::Cpu(Exec::default());
    let model = quantized(&config, DType::F32, q8, place());
    let again = || Checkpoint::new("again", Some(config), model.stored().unwrap());
    for other in [q4, ternary] {
        let error = Model::quantized(again(), None, false, other, place()).map(|_| ()).unwrap_err();
        assert_eq!((error.kind, &*error.argument), (Kind::Option, "quantize"), "{error}");
    }
    let same = Model::quantized(again(), None, false, q8, place()).unwrap();
    assert_eq!(bytes(&same.stored().unwrap()), bytes(&model.stored().unwrap()));
    let error = Model::new(again(), Some(DType::F64), false, place()).map(|_| ()).unwrap_err();
    assert_eq!((error.kind, &*error.argument), (Kind::Option, "type"), "{error}");
    assert!(Trainer::new(&model).is_err());
}

#[test]
fn what_is_said_of_formats_must_be_so() {
    let [config, ..] = configs();
    let model =
        |how: &str| quantized(&config, DType::F32, Quantization::from_name(how).unwrap(), Where::Cpu(Exec::default()));
    let of = |json: &str, model: &Model| {
        let said = Description::parse("config", json.as_bytes())?;
        let checkpoint = Checkpoint::described("told", Some(said), model.stored().unwrap());
        Model::new(checkpoint, None, false, Where::Cpu(Exec::default()))
    };
    let told = model("q8_0").described(&[]).unwrap();
    assert!(of(&told, &model("q8_0")).is_ok());
    assert!(of(&told, &model("q4_0")).is_err_and(|e| e.expected.contains("q8_0") && e.got.contains("q4_0")));
    let floats = of_file(Some(config), models::tensors(&config, true)).unwrap();
    assert!(of(&told, &floats).is_err_and(|e| e.got.contains("none")));
    let plain = floats.described(&[told.as_bytes()]).unwrap();
    assert!(!plain.contains("quantization_config"), "{plain}");
    assert!(of(&plain, &model("q4_0")).is_ok());
    for (other, part) in [
        (r#"{"quant_method": "gptq", "bits": 4}"#, "gptq"),
        (r#"{"quant_method": "sidewinder"}"#, "sidewinder"),
        (r#"{"quant_method": "sidewinder", "formats": "q8_0"}"#, "q8_0"),
        ("[1]", "[1]"),
    ] {
        let json = plain.replacen('{', &format!("{{\"quantization_config\": {other}, "), 1);
        let error = of(&json, &model("q8_0")).map(|_| ()).expect_err(part);
        assert!(error.got.contains("quantization_config") && error.got.contains(part), "{error}");
    }
    for nothing in ["null", "{}"] {
        let json = plain.replacen('{', &format!("{{\"quantization_config\": {nothing}, "), 1);
        assert!(of(&json, &model("q8_0")).is_ok());
    }
}

#[test]
fn a_file_tells_its_formats_and_they_must_be_so() {
    let [config, ..] = configs();
    let path = std::env::temp_dir().join(format!("sidewinder-{}-told-formats.safetensors", std::process::id()));
    let [q8, q4] = ["q8_0", "q4_0"].map(|name| Quantization::from_name(name).unwrap());
    let [q8, q4] = [q8, q4].map(|how| quantized(&config, DType::F32, how, Where::Cpu(Exec::default())));
    q8.save(&path).unwrap();
    let reader = Reader::open(&path).unwrap();
    assert_eq!((&*reader.metadata()["format"], &*reader.metadata()["sidewinder.quantized"]), ("pt", "q8_0"));
    let open = || Model::new(Checkpoint::open(&path, false)?, None, false, Where::Cpu(Exec::default()));
    assert_eq!(bytes(&open().unwrap().stored().unwrap()), bytes(&q8.stored().unwrap()));
    let tensors = q4.stored().unwrap();
    let views: Vec<(&str, View)> = tensors.iter().map(|(name, weight)| (name.as_str(), weight.view())).collect();
    safetensors::write_told(&path, &views, reader.metadata()).unwrap();
    let error = open().map(|_| ()).unwrap_err();
    assert!(error.expected.contains("q8_0") && error.got.contains("q4_0"), "{error}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_matrix_that_is_not_finite_is_refused() {
    let [config, ..] = configs();
    let tensors = models::tensors(&config, true).into_iter().map(|(name, weight)| {
        let bad = name.ends_with("layers.1.mixer.out_proj.weight");
        let mut values = weight.view().to_f64().into_iter();
        let value = |i: usize| if bad && i == 70 { f64::NAN } else { values.next().unwrap() };
        let weight = if bad { Owned::from_fn(weight.spec(), value).into() } else { weight };
        (name, weight)
    });
    let checkpoint = Checkpoint::new("bad", Some(config), tensors.collect::<Vec<_>>());
    let q4 = Quantization::from_name("q4_0").unwrap();
    let error =
        Model::quantized(checkpoint, Some(DType::F32), false, q4, Where::Cpu(Exec::default())).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("NaN"), "{error}");
    assert!(error.to_string().contains("out_proj"), "{error}");
}
