//! Models on quantized matrices: against the same matrices as floats in f64, the same on every level and GPU, and a
//! sequence gives the same however it is cut.

mod common;

use common::{gpu, levels};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::mamba::{Checkpoint, Config, Input, Model, Session, Weight, Where};
use sidewinder_kernels::matrices::{self, Matrix, Quantization};
use sidewinder_kernels::op::Named;
use sidewinder_kernels::place::Cpu;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};
use std::sync::Arc;

const LENGTH: usize = 5;
const REFERENCE: Exec = Exec { level: Level::Reference, threads: 1 };

/// Sizes of which all, most and some rows are whole blocks.
fn configs() -> [Config; 3] {
    let whole = Config { width: 64, layers: 2, vocabulary: 37, inner: 96, state: 16, rank: 4, conv: 4, eps: 1e-5 };
    [whole, Config { inner: 72, ..whole }, Config { width: 48, inner: 41, state: 5, rank: 3, conv: 3, ..whole }]
}

fn quantizations() -> impl Iterator<Item = Quantization> {
    ["q8_0", "q4_0", "ternary"].into_iter().map(|name| Quantization::from_name(name).unwrap())
}

fn checkpoint(config: &Config) -> Checkpoint {
    Checkpoint::new("random", Some(*config), common::models::tensors(config, true))
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

/// Where models run, each with what it is called.
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

/// A weight that was quantized and comes back: the products of its rows with each unit vector would say the same.
fn there_and_back(name: &str, weight: &Weight, how: Quantization) -> Weight {
    let large = ["in_proj.weight", "x_proj.weight", "out_proj.weight", "lm_head.weight"];
    if !large.iter().any(|end| name.ends_with(end)) || !how.fits(&weight.spec()) {
        return weight.cast(DType::F64);
    }
    let parts: Named<Owned> = how.of("w", &weight.view(), &REFERENCE).unwrap().into_iter().collect();
    let [rows, columns] = weight.spec().shape[..] else { panic!("a matrix") };
    let unit = Owned::from_fn(Spec::new(DType::F32, &[columns, columns]).unwrap(), |i| {
        if i / columns == i % columns { 1.0 } else { 0.0 }
    });
    let views = parts.map(Owned::view);
    let mut product = Owned::poisoned(Spec::new(DType::F32, &[columns, rows]).unwrap());
    let w: Matrix<View> = matrices::find::<Cpu>(&views, "w").unwrap();
    let place = Cpu(&REFERENCE);
    matrices::multiply(&place, unit.view(), w, None, product.view_mut()).unwrap();
    let values = product.view().to_f64();
    Owned::from_fn(Spec::new(DType::F64, &[rows, columns]).unwrap(), |i| values[[i % columns, i / columns]]).into()
}

#[test]
fn they_are_near_the_same_matrices_as_floats() {
    for (config, how) in configs().into_iter().flat_map(|config| quantizations().map(move |how| (config, how))) {
        let tensors = common::models::tensors(&config, true).into_iter();
        let floats = tensors.map(|(name, weight)| (name.clone(), there_and_back(&name, &weight, how)));
        let floats = Checkpoint::new("floats", Some(config), floats.collect::<Vec<_>>());
        let floats = Model::new(floats, Some(DType::F64), false, Where::Cpu(REFERENCE)).unwrap();
        let model = quantized(&config, DType::F32, how, Where::Cpu(REFERENCE));
        let tokens = tokens(&config);
        // What rows lose that are rounded to 8 bits before each product.
        near(&forward(&model, &tokens), &forward(&floats, &tokens), 0.04, &format!("{how:?} {config:?}"));
    }
}

#[test]
fn they_are_the_same_everywhere() {
    for (config, how) in configs().into_iter().flat_map(|config| quantizations().map(move |how| (config, how))) {
        let tokens = tokens(&config);
        let expected = forward(&quantized(&config, DType::F32, how, Where::Cpu(REFERENCE)), &tokens);
        for (place, what) in places() {
            let got = forward(&quantized(&config, DType::F32, how, place), &tokens);
            // A number at the edge of two bytes may become the other one.
            near(&got, &expected, 0.01, &format!("{how:?} {config:?} on {what}"));
        }
    }
}

#[test]
fn steps_are_those_of_whole_sequences() {
    for (config, how) in configs().into_iter().flat_map(|config| quantizations().map(move |how| (config, how))) {
        for (dtype, relative) in [(DType::F32, 0.01), (DType::Bf16, 0.1)] {
            let places = places().into_iter().chain([(Where::Cpu(REFERENCE), "the reference".to_string())]);
            for (place, what) in places {
                let model = quantized(&config, dtype, how, place);
                let tokens = tokens(&config);
                let whole = forward(&model, &tokens);
                let mut sessions = [Session::new(&model).unwrap(), Session::new(&model).unwrap()];
                for t in 0..LENGTH {
                    let next = [tokens[t], tokens[LENGTH + t]];
                    let mut logits = Owned::poisoned(model.output(&[2]).unwrap());
                    let [a, b] = &mut sessions;
                    Session::step(&mut [a, b], Input::Tokens(&next), logits.view_mut()).unwrap();
                    let expected = common::part(&whole, 1, t..t + 1);
                    let expected = expected.view().reshape(&[2, config.vocabulary]).unwrap().cast(dtype);
                    near(&logits, &expected, relative, &format!("{how:?} {config:?} {dtype} step {t} on {what}"));
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

#[test]
fn a_matrix_that_is_not_finite_is_refused() {
    let [config, ..] = configs();
    let tensors = common::models::tensors(&config, true).into_iter().map(|(name, weight)| {
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
