//! Every op against the reference values in `test/golden`, on every level of this CPU
//! and on the first GPU.

mod common;

use common::check;
use serde_json::Value;
use sidewinder_files::safetensors::Reader;
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::{self, About, AnyOp, Configured, Named, When};
use sidewinder_kernels::ops::{self, OPS};
use sidewinder_kernels::tensor::{DType, Owned};
use std::path::PathBuf;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../test/golden")
}

/// A case's inputs, options and expected outputs as far as the op gives them.
struct Case {
    name: String,
    inputs: Named<Owned>,
    options: Value,
    outputs: Vec<(String, Owned, f64, f64)>,
}

fn manifest() -> Value {
    let text = std::fs::read_to_string(folder().join("manifest.json")).expect("a manifest");
    serde_json::from_str(&text).expect("a manifest in JSON")
}

fn cases(manifest: &Value, about: &About) -> Vec<Case> {
    let op = &manifest["ops"][named(about)];
    let reader = Reader::open(&folder().join(op["file"].as_str().expect("a file"))).unwrap();
    let tensor = |name: String| reader.tensor(reader.entry(&name).expect(&name)).unwrap();
    let cases = op["cases"].as_array().expect("cases");
    cases
        .iter()
        .map(|case| {
            let name = case["name"].as_str().unwrap();
            let of = |what: &str| case[what].as_object().unwrap();
            let given = of("inputs").keys().map(|input| (input.clone(), tensor(format!("{name}.{input}"))));
            let outputs = of("outputs").iter();
            Case {
                name: name.to_string(),
                inputs: given.collect(),
                options: case["attrs"].clone(),
                outputs: outputs
                    .map(|(output, bounds)| {
                        let exact = bounds["exact"] == true;
                        let tolerance = |key: &str| if exact { 0.0 } else { bounds[key].as_f64().unwrap() };
                        let expected = tensor(format!("{name}.out.{output}"));
                        (output.clone(), expected, tolerance("rtol"), tolerance("atol"))
                    })
                    .collect(),
            }
        })
        .collect()
}

/// The op with the case's options, and with every output of the case asked for.
fn configured(op: &dyn AnyOp, case: &Case) -> Configured {
    let mut options = case.options.clone();
    for output in op.about().outputs {
        match output.when {
            When::Asked(option) if case.outputs.iter().any(|(name, ..)| name == output.name) => {
                options[option] = Value::Bool(true);
            }
            _ => (),
        }
    }
    common::configured(op, options).expect("options that the op knows")
}

/// Compares all that the op gives; returns how many outputs that is.
fn agrees(about: &About, case: &Case, storage: DType, results: Named<Owned>, place: &str) -> usize {
    let mut compared = 0;
    for (name, expected, rtol, atol) in &case.outputs {
        let Some(got) = results.find(name) else {
            let gradient = name.starts_with('d');
            assert!(gradient != about.backward_of.is_some(), "{} of {} was not computed", name, case.name);
            continue;
        };
        let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
        let (rtol, atol) = if storage == DType::F64 { (1e-9, 1e-12 * largest) } else { (*rtol, *atol) };
        let worst = common::worst(got, expected, rtol, atol);
        assert!(worst <= 1.0, "{} {}: {name} is off by {worst} times the tolerance on {place}", about.name, case.name);
        compared += 1;
    }
    compared
}

/// Where an op runs.
#[derive(Debug)]
enum Place<'d> {
    Cpu(Exec),
    Cuda(&'d Device),
}

impl Place<'_> {
    fn run(&self, op: &dyn AnyOp, case: &Case, storage: DType, given: &Named<Owned>) -> Named<Owned> {
        let about = op.about();
        let inputs = common::cast(about, &check::known(about, given), storage);
        let call = configured(op, case)(op::specs(&inputs)).unwrap();
        match self {
            Place::Cpu(exec) => common::run_call(&call, &inputs, exec),
            Place::Cuda(device) => common::run_call_on(&call, &inputs, &device.lane().unwrap()),
        }
        .unwrap()
    }

    /// The tensors of the case, and for a gradient what its op gives here, of which it may take some.
    fn given(&self, about: &About, case: &Case, storage: DType) -> Named<Owned> {
        let mut all = case.inputs.clone();
        if let Some(forward) = about.backward_of {
            let op = ops::find(forward).unwrap();
            // A state that comes out may have the name of one that goes in.
            let goes_in = |name: &str| op.about().inputs.iter().any(|slot| slot.name == name);
            let outputs = self.run(op, case, storage, &all).into_iter();
            outputs.filter(|(name, _)| !goes_in(name)).for_each(|(name, output)| all.push(name, output));
        }
        all
    }
}

fn check(op: &dyn AnyOp, case: &Case, storage: DType, place: Place) {
    let results = place.run(op, case, storage, &place.given(op.about(), case, storage));
    assert!(agrees(op.about(), case, storage, results, &format!("{place:?}")) > 0, "{} compares nothing", case.name);
}

/// The op whose cases are those of `about`.
fn named(about: &About) -> &'static str {
    about.backward_of.unwrap_or(about.name)
}

/// Whether the manifest has values of the op, and of a gradient those of any input's gradient.
fn has_cases(manifest: &Value, about: &About) -> bool {
    let is_named = !manifest["ops"][named(about)].is_null();
    is_named && (about.backward_of.is_none() || has_gradients(manifest, about))
}

/// Whether the cases have gradients of any of these inputs.
fn has_gradients(manifest: &Value, about: &About) -> bool {
    let cases = manifest["ops"][named(about)]["cases"].as_array().into_iter().flatten();
    let names: Vec<String> = about.inputs.iter().map(|slot| format!("d{}", slot.name)).collect();
    cases.into_iter().any(|case| names.iter().any(|name| case["outputs"].get(name).is_some()))
}

fn all_cases(manifest: &Value, op: &dyn AnyOp) {
    let about = op.about();
    let cases = cases(manifest, about);
    let device = common::gpu();
    assert!(!cases.is_empty());
    for case in &cases {
        for &level in Level::available() {
            for threads in [1, 2, 8] {
                check(op, case, DType::F32, Place::Cpu(Exec { level, threads }));
            }
        }
        let in_f64 = about.storage.contains(&DType::F64);
        if in_f64 {
            check(op, case, DType::F64, Place::Cpu(Exec { level: Level::Scalar, threads: 2 }));
        }
        if let Some(device) = &device {
            check(op, case, DType::F32, Place::Cuda(device));
            if in_f64 {
                check(op, case, DType::F64, Place::Cuda(device));
            }
        }
    }
    println!("{}: {} cases", about.name, cases.len());
}

#[test]
fn every_op_agrees_with_its_golden_values() {
    let manifest = manifest();
    let with_cases: Vec<_> = OPS.iter().filter(|op| has_cases(&manifest, op.about())).collect();
    with_cases.iter().for_each(|&&op| all_cases(&manifest, op));
    for name in manifest["ops"].as_object().expect("ops").keys() {
        let op = with_cases.iter().find(|op| op.about().name == name);
        let op = op.unwrap_or_else(|| panic!("values of no op: {name}"));
        let gives_them = with_cases.iter().any(|gradient| gradient.about().backward_of == Some(name));
        assert!(gives_them || !has_gradients(&manifest, op.about()), "gradients that no op gives: {name}");
    }
}
