//! Every op, and compositions of ops, against the reference values in `test/golden`, on every level of this CPU and on
//! the first GPU.

mod common;

use common::composed::{COMPOSED, Composed};
use common::{Place, check};
use serde_json::Value;
use sidewinder_files::safetensors::Reader;
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::op::{About, AnyOp, Configured, Named, When};
use sidewinder_kernels::ops::{self, OPS};
use sidewinder_kernels::tensor::{DType, Described, Owned};
use std::path::PathBuf;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../test/golden")
}

/// A case: inputs, options, and expected outputs with their tolerances.
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

fn cases(manifest: &Value, name: &str) -> Vec<Case> {
    let op = &manifest["ops"][name];
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

/// The op with the case's options, and with flags set for all outputs that the case has.
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

/// Compares all outputs that the op gives; returns their number.
fn agrees(op: &str, case: &Case, storage: DType, results: Named<Owned>, place: &Place) -> usize {
    let found = case.outputs.iter().filter_map(|(name, expected, rtol, atol)| {
        let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
        let (rtol, atol) = if storage == DType::F64 { (1e-9, 1e-12 * largest) } else { (*rtol, *atol) };
        let worst = common::worst(results.find(name)?, expected, rtol, atol);
        assert!(worst <= 1.0, "{op} {}: {name} is off by {worst} times the tolerance on {place:?}", case.name);
        Some(())
    });
    found.count()
}

/// The outputs of the op for these tensors.
fn results(op: &dyn AnyOp, case: &Case, storage: DType, given: &Named<Owned>, place: &Place) -> Named<Owned> {
    let inputs = common::cast(op.about(), &check::known(op.about(), given), storage);
    place.call(&configured(op, case), &inputs)
}

/// The tensors of the case; for a gradient, also the outputs of its op, computed here, some of which it may take.
fn given(about: &About, case: &Case, storage: DType, place: &Place) -> Named<Owned> {
    let mut all = case.inputs.clone();
    if let Some(forward) = about.backward_of {
        let op = ops::find(forward).unwrap();
        // An output state may have the name of an input state.
        let goes_in = |name: &str| op.about().inputs.iter().any(|slot| slot.name == name);
        let outputs = results(op, case, storage, &all, place).into_iter();
        outputs.filter(|(name, _)| !goes_in(name)).for_each(|(name, output)| all.push(name, output));
    }
    all
}

fn check(op: &dyn AnyOp, case: &Case, storage: DType, place: &Place) {
    let about = op.about();
    let results = results(op, case, storage, &given(about, case, storage, place), place);
    for (name, ..) in case.outputs.iter().filter(|(name, ..)| results.find(name).is_none()) {
        let gradient = name.starts_with('d');
        assert!(gradient != about.backward_of.is_some(), "{name} of {} was not computed", case.name);
    }
    assert!(agrees(about.name, case, storage, results, place) > 0, "{} compares nothing", case.name);
}

fn check_composed(composed: &Composed, case: &Case, storage: DType, place: &Place) {
    let is_float = |tensor: &Owned| tensor.spec().dtype.is_float();
    let given = case.inputs.map(|tensor| if is_float(tensor) { tensor.cast(storage) } else { tensor.clone() });
    let results = (composed.outputs)(place, &given, &case.options);
    let compared = agrees(composed.name, case, storage, results, place);
    assert_eq!(compared, case.outputs.len(), "{} {} does not give all", composed.name, case.name);
}

/// The name under which the manifest lists the cases.
fn named(about: &About) -> &'static str {
    about.backward_of.unwrap_or(about.name)
}

/// Whether the manifest has cases for the op; for a gradient, whether they include a gradient of any input.
fn has_cases(manifest: &Value, about: &About) -> bool {
    let is_named = !manifest["ops"][named(about)].is_null();
    is_named && (about.backward_of.is_none() || has_gradients(manifest, about))
}

/// Whether the cases include gradients of any of these inputs.
fn has_gradients(manifest: &Value, about: &About) -> bool {
    let cases = manifest["ops"][named(about)]["cases"].as_array().into_iter().flatten();
    let names: Vec<String> = about.inputs.iter().map(|slot| format!("d{}", slot.name)).collect();
    cases.into_iter().any(|case| names.iter().any(|name| case["outputs"].get(name).is_some()))
}

/// Checks the cases on all backends, in f32 and optionally in f64.
fn all_cases(name: &str, cases: &[Case], in_f64: bool, check: impl Fn(&Case, DType, &Place)) {
    let device = common::gpu();
    assert!(!cases.is_empty());
    for case in cases {
        for &level in Level::available() {
            for threads in [1, 2, 8] {
                check(case, DType::F32, &Place::Cpu(Exec { level, threads }));
            }
        }
        if in_f64 {
            check(case, DType::F64, &Place::Cpu(Exec { level: Level::Scalar, threads: 2 }));
        }
        if let Some(device) = &device {
            check(case, DType::F32, &Place::Cuda(device));
            if in_f64 {
                check(case, DType::F64, &Place::Cuda(device));
            }
        }
    }
    println!("{name}: {} cases", cases.len());
}

#[test]
fn every_op_agrees_with_its_golden_values() {
    let manifest = manifest();
    let with_cases: Vec<_> = OPS.iter().filter(|op| has_cases(&manifest, op.about())).collect();
    for &&op in &with_cases {
        let about = op.about();
        let in_f64 = about.storage.contains(&DType::F64);
        let cases = cases(&manifest, named(about));
        all_cases(about.name, &cases, in_f64, |case, storage, place| check(op, case, storage, place));
    }
    for name in manifest["ops"].as_object().expect("ops").keys() {
        if COMPOSED.iter().any(|composed| composed.name == name) {
            continue;
        }
        let op = with_cases.iter().find(|op| op.about().name == name);
        let op = op.unwrap_or_else(|| panic!("values of no op: {name}"));
        let gives_them = with_cases.iter().any(|gradient| gradient.about().backward_of == Some(name));
        assert!(gives_them || !has_gradients(&manifest, op.about()), "gradients that no op gives: {name}");
    }
}

#[test]
fn compositions_agree_with_their_golden_values() {
    let manifest = manifest();
    for composed in COMPOSED {
        let cases = cases(&manifest, composed.name);
        let check = |case: &Case, storage, place: &Place| check_composed(composed, case, storage, place);
        all_cases(composed.name, &cases, composed.in_f64, check);
    }
}
