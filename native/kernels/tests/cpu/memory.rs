//! Writes into the banks of a memory, against their f64 references.

use crate::common;
use crate::common::check::{self, noise};
use crate::common::worst;
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::mm_rec::memory::state::{self, MemoryState};
use sidewinder_kernels::ops::mm_rec::memory::write_long::{self, Policy, WriteLong};
use sidewinder_kernels::ops::mm_rec::memory::write_short::{self, Mode, WriteShort};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

const SIZES: [[usize; 4]; 8] = [
    [1, 1, 1, 1],
    [2, 4, 6, 5],
    [3, 10, 3, 17],
    [1, 5, 23, 31],
    [2, 1023, 2, 16],
    [0, 3, 2, 4],
    [2, 3, 0, 4],
    [2, 3, 2, 0],
];

/// Runs an op on a bank that is there as an output alone.
fn in_place<O: Op>(options: &O::Options, inputs: &Named<Owned>, bank: &mut Owned, exec: &Exec) -> Result<()> {
    let outputs = [("bank", bank.view_mut())].into_iter().collect();
    op::run_cpu::<O>(options, &inputs.map(Owned::view), outputs, exec)
}

#[test]
fn rows_go_round_and_round() {
    for [batch, slots, rows, width] in SIZES {
        let inputs = check::inputs(&[("bank", &[batch, slots, width]), ("rows", &[batch, rows, width])]);
        for start in [0, 1, slots - 1, 7 * slots + 2, usize::MAX] {
            let options = write_short::Options { start, mode: Mode::Ring };
            check::agrees_everywhere::<WriteShort>(&options, &inputs);
        }
    }
}

#[test]
fn summaries_go_where_the_policy_says() {
    for [batch, slots, _, width] in SIZES {
        let inputs = check::inputs(&[("bank", &[batch, slots, width]), ("summary", &[batch, width])]);
        for policy in [Policy::Ring, Policy::Ema, Policy::Broadcast] {
            for (cursor, decay) in [(0, 0.99), (slots + 1, 0.5), (usize::MAX, 0.0), (2, 1.0)] {
                let options = write_long::Options { policy, cursor, decay };
                check::agrees_everywhere::<WriteLong>(&options, &inputs);
            }
        }
    }
}

/// Write after write into the same memory is what each write alone gives.
#[test]
fn banks_change_in_place() {
    for dtype in DType::FLOATS {
        for &level in Level::available() {
            let exec = Exec { level, threads: 1 };
            let mut bank = noise(1, &[2, 5, 7], -1.0, 1.0).cast(dtype);
            for i in 0..9 {
                let rows = noise(10 + i, &[2, 2, 7], -1.0, 1.0).cast(dtype);
                let summary = noise(30 + i, &[2, 7], -1.0, 1.0).cast(dtype);
                let start = write_short::Options { start: 2 * i as usize, mode: Mode::Ring };
                let policy = [Policy::Ring, Policy::Ema, Policy::Broadcast][i as usize % 3];
                let how = write_long::Options { policy, cursor: i as usize, decay: 0.9 };
                let with = |name: &'static str, tensor: &Owned, bank: &Owned| -> Named<Owned> {
                    [("bank", bank.clone()), (name, tensor.clone())].into_iter().collect()
                };
                let first = common::run::<WriteShort>(&start, &with("rows", &rows, &bank), &exec).unwrap();
                let first = first.get("bank").unwrap();
                let second = common::run::<WriteLong>(&how, &with("summary", &summary, first), &exec).unwrap();
                in_place::<WriteShort>(&start, &[("rows", rows)].into_iter().collect(), &mut bank, &exec).unwrap();
                in_place::<WriteLong>(&how, &[("summary", summary)].into_iter().collect(), &mut bank, &exec).unwrap();
                assert_eq!(bank.view().bytes(), second.get("bank").unwrap().view().bytes());
            }
        }
    }
}

fn state(sizes: [usize; 6]) -> Named<Owned> {
    let [batch, slots, rows, long, summaries, width] = sizes;
    check::inputs(&[
        ("short", &[batch, slots, width]),
        ("h", &[batch, rows, width]),
        ("long_k", &[batch, long, width]),
        ("summaries", &[summaries, batch, width]),
    ])
}

/// An average is rounded with every summary, so that 16-bit results may be off by a rounding for each.
#[test]
fn all_writes_agree_with_the_reference() {
    for (sizes, cursor0) in [([2, 4, 6, 3, 6, 5], 0), ([1, 9, 4, 5, 3, 17], 7), ([2, 3, 0, 2, 0, 4], 0)] {
        let options = state::Options { ema_decay: 0.9, cursor0 };
        for dtype in DType::FLOATS {
            let inputs = common::cast(op::about::<MemoryState>(), &state(sizes), dtype);
            let expected = common::reference::<MemoryState>(&options, &inputs);
            for level in common::levels() {
                let got = common::run::<MemoryState>(&options, &inputs, &Exec { level, threads: 2 }).unwrap();
                for (name, expected) in expected.iter() {
                    let relative = match dtype {
                        DType::F64 => 1e-12,
                        DType::F32 => 1e-6,
                        DType::F16 => 8.0 / 2048.0,
                        _ => 8.0 / 256.0,
                    };
                    let worst = worst(got.get(name).unwrap(), expected, 0.0, relative);
                    assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance: {dtype} {}", level.name());
                }
            }
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let short = |bank: &[usize], rows: &[usize], start, mode| {
        let inputs = check::inputs(&[("bank", bank), ("rows", rows)]);
        let run = common::run::<WriteShort>(&write_short::Options { start, mode }, &inputs, &Exec::default());
        run.map_err(|e| (e.kind, e.argument.to_string())).err()
    };
    let wrong = |kind, name: &str| Some((kind, name.to_string()));
    assert_eq!(short(&[2, 4], &[2, 1, 3], 0, Mode::Ring), wrong(Kind::Shape, "bank"));
    assert_eq!(short(&[2, 0, 3], &[2, 1, 3], 0, Mode::Ring), wrong(Kind::Shape, "bank"));
    assert_eq!(short(&[2, 4, 3], &[1, 1, 3], 0, Mode::Ring), wrong(Kind::Shape, "rows"));
    assert_eq!(short(&[2, 4, 3], &[2, 1, 4], 0, Mode::Ring), wrong(Kind::Shape, "rows"));
    assert_eq!(short(&[2, 4, 3], &[2, 2, 3], 3, Mode::Strict), wrong(Kind::Option, "start"));
    assert_eq!(short(&[2, 4, 3], &[2, 2, 3], usize::MAX, Mode::Strict), wrong(Kind::Option, "start"));
    assert_eq!(short(&[2, 4, 3], &[2, 2, 3], 2, Mode::Strict), None);
    let long = |bank: &[usize], summary: &[usize], decay| {
        let inputs = check::inputs(&[("bank", bank), ("summary", summary)]);
        let options = write_long::Options { policy: Policy::Ema, decay, ..Default::default() };
        let run = common::run::<WriteLong>(&options, &inputs, &Exec::default());
        run.map_err(|e| (e.kind, e.argument.to_string())).err()
    };
    assert_eq!(long(&[2, 0, 3], &[2, 3], 0.5), wrong(Kind::Shape, "bank"));
    assert_eq!(long(&[2, 4, 3], &[3, 3], 0.5), wrong(Kind::Shape, "summary"));
    assert_eq!(long(&[2, 4, 3], &[2, 1, 3], 0.5), wrong(Kind::Shape, "summary"));
    for decay in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        assert_eq!(long(&[2, 4, 3], &[2, 3], decay), wrong(Kind::Option, "decay"));
    }
    for (name, dims) in [("short", &[2, 5][..]), ("h", &[1, 3, 4]), ("long_k", &[2, 0, 4]), ("summaries", &[2, 4])] {
        let mut inputs = state([2, 3, 3, 3, 2, 4]);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        let error = common::run::<MemoryState>(&Default::default(), &inputs, &Exec::default()).err().unwrap();
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "memory_state"), "{error}");
    }
    let mut inputs = state([2, 3, 3, 3, 2, 4]);
    inputs.push("long_v", Owned::zeros(Spec::new(DType::F32, &[2, 4, 4]).unwrap()));
    let error = common::run::<MemoryState>(&Default::default(), &inputs, &Exec::default()).err().unwrap();
    assert_eq!(&*error.argument, "long_v");
    inputs.take("long_v");
    let options = state::Options { ema_decay: 2.0, cursor0: 0 };
    let error = common::run::<MemoryState>(&options, &inputs, &Exec::default()).err().unwrap();
    assert_eq!((error.kind, &*error.argument), (Kind::Option, "ema_decay"));
    assert_eq!(inputs.get("h").unwrap().spec().dtype, DType::F32);
}
