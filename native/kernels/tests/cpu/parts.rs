//! Sequences in parts, on the CPU: against the f64 reference of the whole sequence, and bad inputs.

use crate::common::packed::{self, Visit};
use crate::common::parts::{agree, checked, of_linear_scan};
use crate::common::{levels, sizes, with, worst};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{Backward, CU_SEQLENS, Differentiable, Named, Packed, Parts};
use sidewinder_kernels::ops::norm::RmsNorm;
use sidewinder_kernels::ops::scan::linear_scan::{LinearScan, Options};
use sidewinder_kernels::tensor::{DType, Owned};

fn run(parts: &Parts, inputs: &[Named<Owned>], exec: &Exec) -> Vec<Named<Owned>> {
    let mut outputs: Vec<_> =
        parts.outputs().unwrap().iter().map(|part| part.map(|spec| Owned::poisoned(*spec))).collect();
    let views: Vec<_> = inputs.iter().map(|part| part.map(Owned::view)).collect();
    let written =
        outputs.iter_mut().map(|part| part.iter_mut().map(|(name, t)| (name.clone(), t.view_mut())).collect());
    parts.cpu(&views, written.collect(), exec).unwrap();
    outputs
}

struct OnCpu(Exec);

impl Visit for OnCpu {
    fn visit<O: Differentiable>(&self, options: &O::Options, inputs: &Named<Owned>, shared: &[&str]) {
        let run = |parts: &Parts, inputs: &[Named<Owned>]| run(parts, inputs, &self.0);
        agree::<O>(options, inputs, shared, &run, |name, got, expected, dtype| {
            // Gradients of what parts share are rounded in each.
            let relative = match dtype {
                DType::F64 => 1e-10,
                DType::F32 => 5e-5,
                DType::F16 => 4e-3,
                _ => 3e-2,
            };
            let named: Named<Owned> = [(name.to_string(), expected.clone())].into_iter().collect();
            let off = worst(got, expected, 0.0, relative * sizes(&named).get(name).unwrap());
            assert!(off <= 1.0, "{name} of {} is off by {off} times the tolerance: {dtype}", O::NAME);
        });
    }
}

#[test]
fn parts_agree_with_the_whole() {
    for level in levels() {
        packed::every_op(&OnCpu(Exec { level, threads: 2 }));
    }
}

#[test]
fn a_part_may_be_all() {
    let [first, _] = of_linear_scan();
    let parts = checked::<Packed<LinearScan>>(&Options { return_state: true }, std::slice::from_ref(&first));
    let names: Vec<_> = parts.unwrap().outputs().unwrap()[0].iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(names, ["h", "last_state"]);
}

#[test]
fn bad_parts_are_refused() {
    let [first, second] = of_linear_scan();
    let options = Options { return_state: true };
    let error = |inputs: &[Named<Owned>]| checked::<Packed<LinearScan>>(&options, inputs).err().unwrap();
    let state = first.get("initial_state").unwrap().clone();
    let twice = error(&[first.clone(), with(&second, "initial_state", state)]);
    assert_eq!((twice.kind, &*twice.argument), (Kind::Argument, "initial_state of part 1"));
    let ends = packed::ends(&[1, 2]);
    let packed = error(&[with(&first, CU_SEQLENS, ends)]);
    assert_eq!((packed.kind, &*packed.argument), (Kind::Argument, "cu_seqlens of part 0"));
    let narrow = crate::common::check::inputs(&[("a", &[1, 3, 5]), ("b", &[1, 3, 5])]);
    assert_eq!(error(&[first.clone(), narrow]).kind, Kind::Shape);

    let of_gradient = crate::common::check::inputs(&[("a", &[1, 3, 2]), ("h", &[1, 3, 2]), ("dh", &[1, 3, 2])]);
    let stateless =
        checked::<Packed<Backward<LinearScan>>>(&options, &[of_gradient.clone(), of_gradient]).err().unwrap();
    assert_eq!((stateless.kind, &*stateless.argument), (Kind::Argument, "initial_state of part 1"));
    assert!(stateless.to_string().contains("started from"), "{stateless}");

    let norm = crate::common::check::inputs(&[("x", &[2, 4]), ("gamma", &[4])]);
    let other = checked::<RmsNorm>(&Default::default(), &[norm]).err().unwrap();
    assert_eq!((other.kind, &*other.argument), (Kind::Argument, "op"));
    assert!(other.to_string().contains("selective_scan"), "{other}");
}
