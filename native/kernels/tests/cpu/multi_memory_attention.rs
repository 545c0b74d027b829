//! Attention over a memory and its gradient against their f64 reference and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use crate::common::{cast, worst};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::mm_rec::multi_memory_attention::{
    MultiMemoryAttention, MultiMemoryAttentionBackward, Options,
};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

struct Sizes {
    batch: usize,
    length: usize,
    width: usize,
    of_memory: usize,
    slots: usize,
}

fn inputs(sizes: &Sizes, optional: bool) -> Named<Owned> {
    let &Sizes { batch, length, width, of_memory, slots } = sizes;
    let bound = 1.0 / (width.max(1) as f64).sqrt();
    let mut inputs: Named<Owned> = [
        ("h", noise(1, &[batch, length, width], -1.0, 1.0)),
        ("k_mem", noise(2, &[of_memory, slots, width], -1.0, 1.0)),
        ("v_mem", noise(3, &[of_memory, slots, width], -1.0, 1.0)),
        ("waq", noise(4, &[width, width], -bound, bound)),
        ("wao", noise(5, &[width, width], -bound, bound)),
    ]
    .into_iter()
    .collect();
    if optional {
        inputs.push("baq", noise(6, &[width], -1.0, 1.0));
        inputs.push("bao", noise(7, &[width], -1.0, 1.0));
        inputs.push("q_in", noise(8, &[batch, length, width], -1.0, 1.0));
    }
    inputs
}

/// Intermediate tensors are rounded after each step, so 16-bit results may be off by several roundings of the largest
/// value of their tensor, where sums over many rows cancel.
fn near(got: &Named<Owned>, expected: &Named<Owned>, dtype: DType, what: &str) {
    let relative = match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 5e-5,
        DType::F16 => 8e-3,
        _ => 6e-2,
    };
    for (name, expected) in expected.iter() {
        let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
        // With one slot, scores have no gradient: what remains is rounding error.
        let floor = if name.starts_with('d') { 1e-2 * relative } else { 0.0 };
        let worst = worst(got.get(name).unwrap(), expected, 0.0, relative * largest + floor);
        assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance: {what}");
    }
}

fn runs_near<O: Op>(options: &O::Options, inputs: &Named<Owned>) {
    for dtype in DType::FLOATS {
        let inputs = cast(op::about::<O>(), inputs, dtype);
        let expected = common::reference::<O>(options, &inputs);
        for level in common::levels() {
            let runs = [1, 2, 8].map(|threads| {
                let exec = Exec { level, threads };
                let got = common::run::<O>(options, &inputs, &exec).unwrap();
                near(&got, &expected, dtype, &format!("{} {dtype} {exec:?}", O::NAME));
                common::bits(&got)
            });
            assert!(runs.iter().all(|bits| *bits == runs[0]), "{} {dtype} {}", O::NAME, level.name());
        }
    }
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for ([batch, length, width], of_memory, slots, heads) in [
        ([1, 1, 2], 1, 1, 1),
        ([2, 5, 6], 2, 4, 2),
        ([3, 7, 20], 1, 13, 5),
        ([2, 9, 31], 1, 64, 31),
        ([1, 33, 48], 1, 37, 3),
        ([2, 17, 24], 2, 5, 1),
        ([0, 3, 4], 1, 2, 2),
        ([2, 0, 4], 1, 2, 2),
        ([2, 0, 4], 2, 2, 2),
        ([2, 3, 4], 1, 0, 2),
    ] {
        let (sizes, options) = (Sizes { batch, length, width, of_memory, slots }, Options { heads });
        for optional in [false, true] {
            let inputs = inputs(&sizes, optional);
            runs_near::<MultiMemoryAttention>(&options, &inputs);
            let mut backward =
                check::backward_inputs::<MultiMemoryAttention, MultiMemoryAttentionBackward>(&options, &inputs);
            if slots == 0 {
                // lse is -inf whatever the inputs are.
                backward.take("dlse");
            }
            runs_near::<MultiMemoryAttentionBackward>(&options, &backward);
            backward.take("dlse");
            runs_near::<MultiMemoryAttentionBackward>(&options, &backward);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for ([batch, length, width], of_memory, slots, heads) in
        [([1, 2, 4], 1, 3, 2), ([2, 3, 4], 2, 3, 1), ([2, 2, 6], 1, 5, 3)]
    {
        let inputs = inputs(&Sizes { batch, length, width, of_memory, slots }, true);
        check::gradients_agree_with_differences::<MultiMemoryAttention, MultiMemoryAttentionBackward>(
            &Options { heads },
            &inputs,
        );
    }
}

/// One shared memory equals a copy of it for each sequence.
#[test]
fn a_memory_may_be_shared() {
    let sizes = Sizes { batch: 3, length: 5, width: 8, of_memory: 1, slots: 9 };
    let options = Options { heads: 2 };
    let shared = inputs(&sizes, true);
    let mut own = shared.clone();
    for name in ["k_mem", "v_mem"] {
        let one = own.take(name).unwrap().view().to_f64();
        let spec = Spec::new(DType::F32, &[3, 9, 8]).unwrap();
        own.push(name, Owned::from_fn(spec, |i| one.as_slice().unwrap()[i % 72]));
    }
    let run = |inputs| common::run::<MultiMemoryAttention>(&options, inputs, &Exec::default()).unwrap();
    let (got, expected) = (run(&shared), run(&own));
    for name in ["y", "lse"] {
        assert!(worst(got.get(name).unwrap(), expected.get(name).unwrap(), 1e-5, 1e-6) <= 1.0, "{name}");
    }
}

#[test]
fn the_examples_of_the_formula_agree() {
    let tensor =
        |dims: &[usize], values: &'static [f64]| Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |i| values[i]);
    let identity = || tensor(&[2, 2], &[1.0, 0.0, 0.0, 1.0]);
    let mut inputs: Named<Owned> = [
        ("h", tensor(&[1, 1, 2], &[1.0, 0.0])),
        ("k_mem", tensor(&[1, 2, 2], &[1.0, 0.0, 0.0, 1.0])),
        ("v_mem", tensor(&[1, 2, 2], &[10.0, 0.0, 0.0, 20.0])),
        ("waq", identity()),
        ("wao", identity()),
    ]
    .into_iter()
    .collect();
    let check = |inputs: &Named<Owned>, y: [f64; 2], lse: Option<f64>| {
        for level in common::levels() {
            let exec = Exec { level, threads: 1 };
            let got = common::run::<MultiMemoryAttention>(&Options::default(), inputs, &exec).unwrap();
            let value = |name: &str, i: usize| got.get(name).unwrap().view().slice::<f32>().unwrap()[i] as f64;
            assert!((value("y", 0) - y[0]).abs() < 1e-5 && (value("y", 1) - y[1]).abs() < 1e-5, "{y:?}");
            assert!(lse.is_none_or(|lse| (value("lse", 0) - lse).abs() < 1e-6));
        }
    };
    check(&inputs, [6.69761549, 6.60476901], Some(1.10794031));
    inputs.push("q_in", tensor(&[1, 1, 2], &[0.0, 2.0]));
    check(&inputs, [5.0, 10.0], None);
}

/// A memory whose slots are all equal gives every query equal results.
#[test]
fn equal_slots_make_attention_constant() {
    let mut inputs = inputs(&Sizes { batch: 2, length: 21, width: 16, of_memory: 2, slots: 64 }, true);
    for name in ["k_mem", "v_mem"] {
        let bank = inputs.take(name).unwrap().view().to_f64();
        let spec = Spec::new(DType::F32, &[2, 64, 16]).unwrap();
        inputs.push(name, Owned::from_fn(spec, |i| bank.as_slice().unwrap()[i / 1024 * 1024 + i % 16]));
    }
    for level in common::levels() {
        let exec = Exec { level, threads: 2 };
        let got = common::run::<MultiMemoryAttention>(&Options { heads: 4 }, &inputs, &exec).unwrap();
        let y = got.get("y").unwrap().view().to_f64();
        for (at, &value) in y.indexed_iter() {
            let first = y[[at[0], 0, at[2]]];
            assert!((value - first).abs() <= 1e-6 * first.abs().max(1.0), "{at:?}: {value}, {first} before it");
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let sizes = Sizes { batch: 2, length: 3, width: 8, of_memory: 2, slots: 5 };
    let refused = |heads, name: &'static str, dims: &[usize]| {
        let mut inputs = inputs(&sizes, true);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        common::run::<MultiMemoryAttention>(&Options { heads }, &inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims) in [
        ("h", &[2, 3][..]),
        ("k_mem", &[3, 5, 8]),
        ("k_mem", &[2, 5, 7]),
        ("v_mem", &[1, 5, 8]),
        ("v_mem", &[2, 4, 8]),
        ("q_in", &[2, 4, 8]),
        ("waq", &[8, 7]),
        ("baq", &[7]),
        ("wao", &[8]),
        ("bao", &[1, 8]),
    ] {
        let error = refused(2, name, dims);
        assert_eq!(
            (error.kind, &*error.argument, &*error.op),
            (Kind::Shape, name, "multi_memory_attention"),
            "{error}"
        );
    }
    for heads in [0, 3] {
        assert_eq!(refused(heads, "bao", &[8]).kind, Kind::Option);
    }
}
