//! Writes into the banks of a memory, against their f64 references.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::mm_rec::memory::write_long::{self, Policy, WriteLong};
use sidewinder_kernels::ops::mm_rec::memory::write_short::{self, Mode, WriteShort};
use sidewinder_kernels::tensor::{DType, Owned};

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

/// Runs an op on a bank that is passed as an output only.
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

/// Successive writes into one memory give the results of separate writes.
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
}
