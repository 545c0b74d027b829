//! The MM-Rec block and its gradient against their f64 references, finite differences and their steps.

use crate::common;
use crate::common::blocks::{SMALL, Sizes, inputs, sizes};
use crate::common::check::{self, noise};
use crate::common::{cast, levels, part, run, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::{self, Named};
use sidewinder_kernels::ops::mm_rec::block_recurrence::{self, BlockRecurrence};
use sidewinder_kernels::ops::mm_rec::mdi::Mdi;
use sidewinder_kernels::ops::mm_rec::mmrec_block::{MmrecBlock, MmrecBlockBackward, Options};
use sidewinder_kernels::ops::norm::{EpsMode, RmsNorm, RmsOptions};
use sidewinder_kernels::ops::products::linear::{self, Linear};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

const KEPT: [&str; 5] = ["q", "k", "v", "z", "hidden"];

fn options(heads: usize) -> Options {
    Options { heads, ..Options::default() }
}

fn keeping(heads: usize) -> Options {
    Options { checkpoint: false, ..options(heads) }
}

/// The inputs of the gradient, without the block's kept outputs and without the cotangents in `without`.
fn lean(backward: &Named<Owned>, without: &[&str]) -> Named<Owned> {
    let outputs = ["h", "gamma", "context"].into_iter().chain(KEPT);
    let left_out: Vec<&str> = outputs.chain(without.iter().copied()).collect();
    backward.iter().filter(|(name, _)| !left_out.contains(&&***name)).map(|(n, t)| (n.clone(), t.clone())).collect()
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for (sizes, options) in [
        (SMALL, keeping(2)),
        (sizes([1, 1, 1], [1, 1], [1, 1]), options(1)),
        (sizes([3, 17, 20], [5, 31], [1, 37]), options(5)),
        (sizes([1, 33, 8], [2, 32], [1, 5]), Options { levels: 1, v_mix: 0.7, norm: EpsMode::Inside, ..options(4) }),
        (
            sizes([2, 7, 12], [3, 19], [2, 10]),
            Options { levels: 2, ratio: 3, cursor: 4, state_clip: Some(0.7), ..options(3) },
        ),
        (sizes([2, 3, 4], [1, 5], [2, 6]), Options { state_norm: true, eps: 1e-3, ..options(2) }),
        (sizes([0, 3, 4], [1, 5], [1, 6]), options(2)),
        (sizes([2, 0, 4], [1, 5], [2, 6]), keeping(2)),
    ] {
        for initial_state in [false, true] {
            let inputs = inputs(sizes, initial_state);
            check::deep_steps_agree_everywhere::<MmrecBlock>(&options, &inputs, 3.0);
            let all = check::backward_inputs::<MmrecBlock, MmrecBlockBackward>(&options, &inputs);
            check::deep_steps_agree_everywhere::<MmrecBlockBackward>(&options, &lean(&all, &[]), 3.0);
            let without = ["dh", "dlast_state", "dgamma", "dcontext", "dsummary"];
            check::deep_steps_agree_everywhere::<MmrecBlockBackward>(&options, &lean(&all, &without), 3.0);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let sizes = sizes([2, 3, 4], [2, 3], [2, 5]);
    for options in [options(2), Options { levels: 1, mix: Some(0.3), state_norm: true, ..keeping(1) }] {
        check::gradients_agree_with_differences::<MmrecBlock, MmrecBlockBackward>(&options, &inputs(sizes, true));
    }
    let mut core = inputs(sizes, true);
    ["wm", "bm"].into_iter().for_each(|name| drop(core.take(name)));
    let options = Options { mix: Some(0.0), ..options(2) };
    check::gradients_agree_with_differences::<MmrecBlock, MmrecBlockBackward>(&options, &core);
}

/// The gradient has equal bits whether a tensor is given to it or recomputed, for each tensor separately.
#[test]
fn what_is_kept_changes_no_bit() {
    let inputs = inputs(sizes([2, 37, 12], [3, 29], [1, 21]), true);
    for dtype in DType::FLOATS {
        let inputs = cast(op::about::<MmrecBlock>(), &inputs, dtype);
        for level in levels() {
            for threads in [1, 3] {
                let exec = Exec { level, threads };
                let kept = run::<MmrecBlock>(&keeping(3), &inputs, &exec).unwrap();
                let mut outputs = run::<MmrecBlock>(&options(3), &inputs, &exec).unwrap();
                for name in ["y", "h", "last_state", "gamma", "context", "summary"] {
                    let bytes = |of: &Named<Owned>| of.get(name).unwrap().view().bytes().to_vec();
                    assert_eq!(bytes(&outputs), bytes(&kept), "{name} {dtype} {exec:?}");
                }
                KEPT.into_iter().for_each(|name| outputs.push(name, kept.get(name).unwrap().clone()));
                let full = check::backward_inputs::<MmrecBlock, MmrecBlockBackward>(&keeping(3), &inputs);
                let base = lean(&full, &[]);
                let expected = run::<MmrecBlockBackward>(&options(3), &base, &exec).unwrap();
                let mut given = base.clone();
                for name in ["h", "gamma", "context"].into_iter().chain(KEPT) {
                    given.push(name, outputs.get(name).unwrap().clone());
                    let got = run::<MmrecBlockBackward>(&keeping(3), &given, &exec).unwrap();
                    assert_eq!(common::bits(&got), common::bits(&expected), "with {name} {dtype} {exec:?}");
                }
            }
        }
    }
}

fn replaced(inputs: &Named<Owned>, with: impl IntoIterator<Item = (&'static str, Owned)>) -> Named<Owned> {
    let mut inputs = inputs.clone();
    for (name, tensor) in with {
        inputs.take(name);
        inputs.push(name, tensor);
    }
    inputs
}

fn near(got: &Owned, expected: &Owned, what: &str) {
    let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
    let off = worst(got, expected, 0.0, 2e-5 * largest);
    assert!(off <= 1.0, "{what} is off by {off} times the tolerance");
}

/// A sequence in parts that pass on their states gives the results of the sequence at once.
#[test]
fn a_sequence_may_be_cut_anywhere() {
    let sizes = sizes([2, 11, 8], [2, 16], [2, 9]);
    let whole_inputs = inputs(sizes, true);
    let whole = run::<MmrecBlock>(&options(2), &whole_inputs, &Exec::default()).unwrap();
    for cut in 0..=11 {
        let of = |range, initial_state| {
            let x = part(whole_inputs.get("x").unwrap(), 1, range);
            run::<MmrecBlock>(
                &options(2),
                &replaced(&whole_inputs, [("x", x), ("initial_state", initial_state)]),
                &Exec::default(),
            )
            .unwrap()
        };
        let first = of(0..cut, whole_inputs.get("initial_state").unwrap().clone());
        let second = of(cut..11, first.get("last_state").unwrap().clone());
        for name in ["y", "h", "gamma", "context"] {
            let expected = whole.get(name).unwrap();
            near(first.get(name).unwrap(), &part(expected, 1, 0..cut), name);
            near(second.get(name).unwrap(), &part(expected, 1, cut..11), name);
        }
        near(second.get("last_state").unwrap(), whole.get("last_state").unwrap(), "last_state");
    }
}

/// A sequence longer than what is meant to run at once: in chunks the numbers are equal.
#[test]
fn chunks_of_a_long_sequence_agree_with_the_whole() {
    let (length, chunk) = (40_000, 8192);
    let inputs = inputs(sizes([1, length, 4], [1, 8], [1, 16]), true);
    let whole = run::<MmrecBlock>(&options(2), &inputs, &Exec::default()).unwrap();
    let mut initial_state = inputs.get("initial_state").unwrap().clone();
    for from in (0..length).step_by(chunk) {
        let range = from..(from + chunk).min(length);
        let x = part(inputs.get("x").unwrap(), 1, range.clone());
        let got = run::<MmrecBlock>(
            &options(2),
            &replaced(&inputs, [("x", x), ("initial_state", initial_state)]),
            &Exec::default(),
        )
        .unwrap();
        near(got.get("y").unwrap(), &part(whole.get("y").unwrap(), 1, range), "y");
        initial_state = got.get("last_state").unwrap().clone();
    }
    near(&initial_state, whole.get("last_state").unwrap(), "last_state");
}

#[test]
fn sequences_of_a_batch_do_not_meet() {
    let sizes = sizes([3, 7, 8], [2, 16], [3, 9]);
    let all = inputs(sizes, true);
    let together = run::<MmrecBlock>(&options(2), &all, &Exec::default()).unwrap();
    for row in 0..3 {
        let own =
            ["x", "k_mem", "v_mem", "initial_state"].map(|name| (name, part(all.get(name).unwrap(), 0, row..row + 1)));
        let alone = run::<MmrecBlock>(&options(2), &replaced(&all, own), &Exec::default()).unwrap();
        for (name, got) in alone.iter() {
            near(got, &part(together.get(name).unwrap(), 0, row..row + 1), name);
        }
    }
}

/// Later rows change no bit of earlier ones.
#[test]
fn nothing_is_seen_before_it_comes() {
    let inputs = inputs(sizes([1, 9, 8], [2, 16], [1, 37]), false);
    let x = inputs.get("x").unwrap();
    for level in levels() {
        let exec = Exec { level, threads: 2 };
        let base = run::<MmrecBlock>(&options(2), &inputs, &exec).unwrap();
        for at in 0..9 {
            let values = x.view().to_f64();
            let changed =
                Owned::from_fn(x.spec(), |i| values.as_slice().unwrap()[i] + f64::from(u8::from(i / 8 == at)));
            let got = run::<MmrecBlock>(&options(2), &replaced(&inputs, [("x", changed)]), &exec).unwrap();
            for name in ["y", "h", "gamma", "context"] {
                let rows = |of: &Named<Owned>, range| part(of.get(name).unwrap(), 1, range).view().bytes().to_vec();
                assert_eq!(rows(&got, 0..at), rows(&base, 0..at), "{name} before {at} on {}", level.name());
                assert_ne!(rows(&got, at..at + 1), rows(&base, at..at + 1), "{name} at {at} on {}", level.name());
            }
        }
    }
}

/// A sequence of one step equals the core step and a step of integration, computed by hand.
#[test]
fn one_step_is_made_of_its_parts() {
    let inputs = inputs(Sizes { length: 1, ..SMALL }, true);
    let exec = Exec { level: Level::Reference, threads: 1 };
    let inputs = cast(op::about::<MmrecBlock>(), &inputs, DType::F64);
    let [b, d] = [SMALL.batch, SMALL.width];
    let of = |name: &str| inputs.get(name).unwrap().clone();
    let flat = |t: &Owned| {
        Owned::from_fn(Spec::new(DType::F64, &[b, d]).unwrap(), |i| t.view().to_f64().as_slice().unwrap()[i])
    };
    let call = |x: &Owned, w: &str, bias: &str, activation| {
        let given = [("x", x.clone()), ("w", of(w)), ("b", of(bias))].into_iter().collect();
        run::<Linear>(&linear::Options { activation }, &given, &exec).unwrap().take("y").unwrap()
    };
    let rms = RmsOptions { eps: 1e-6, eps_mode: EpsMode::Outside };
    let given = [("x", flat(&of("x"))), ("w", of("n1"))].into_iter().collect();
    let xn = run::<RmsNorm>(&rms, &given, &exec).unwrap().take("y").unwrap();
    let (z, k) = (call(&xn, "wz", "bz", None), call(&xn, "wk", "bk", None));
    let names = ["wg1", "bg1", "wg2", "bg2", "wc1", "bc1", "wc2", "bc2", "wm", "bm"];
    let mut given: Named<Owned> = names.into_iter().map(|name| (name, of(name))).collect();
    for (name, tensor) in [("z", z.clone()), ("context", k), ("h_prev", of("initial_state"))] {
        given.push(name, tensor);
    }
    let integrated = run::<Mdi>(&Default::default(), &given, &exec).unwrap();
    let longer = |t: &Owned| {
        Owned::from_fn(Spec::new(DType::F64, &[b, 1, d]).unwrap(), |i| t.view().to_f64().as_slice().unwrap()[i])
    };
    let core = [
        ("z", longer(&z)),
        ("gamma", longer(integrated.get("gamma").unwrap())),
        ("w_gate", of("wgate")),
        ("b_gate", of("bgate")),
        ("initial_state", of("initial_state")),
    ];
    let core = run::<BlockRecurrence>(
        &block_recurrence::Options { mix: Some(0.0), ..Default::default() },
        &core.into_iter().collect(),
        &exec,
    )
    .unwrap();
    let (core, integrated) =
        (core.get("last_state").unwrap().view().to_f64(), integrated.get("h_new").unwrap().view().to_f64());
    let expected = core + 0.1 * integrated;
    let got = run::<MmrecBlock>(&options(2), &inputs, &exec).unwrap();
    let off = (got.get("last_state").unwrap().view().to_f64() - expected).mapv(f64::abs);
    assert!(off.iter().all(|&off| off < 1e-12), "{off}");
    assert_eq!(got.get("h").unwrap().view().bytes(), got.get("last_state").unwrap().view().bytes());
}

fn refused(options: &Options, inputs: &Named<Owned>) -> Error {
    run::<MmrecBlock>(options, inputs, &Exec::default()).err().expect("a refusal")
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let right = inputs(SMALL, true);
    for (name, dims) in [
        ("x", &[2, 6][..]),
        ("k_mem", &[3, 9, 6]),
        ("k_mem", &[2, 0, 6]),
        ("v_mem", &[2, 8, 6]),
        ("n1", &[5]),
        ("wq", &[6, 5]),
        ("bz", &[7]),
        ("wg2", &[2, 6]),
        ("bc1", &[6]),
        ("wgate", &[12, 6]),
        ("wm", &[6, 6]),
        ("bao", &[1]),
        ("wf1", &[7, 5]),
        ("bf1", &[6]),
        ("wf2", &[7, 6]),
        ("initial_state", &[1, 6]),
    ] {
        let error = refused(&options(2), &replaced(&right, [(name, noise(1, dims, 0.0, 1.0))]));
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "mmrec_block"), "{error}");
    }
    for (name, options) in [
        ("heads", options(4)),
        ("heads", options(0)),
        ("eps", Options { eps: 0.0, ..options(2) }),
        ("levels", Options { levels: 0, ..options(2) }),
        ("ratio", Options { ratio: 1, ..options(2) }),
        ("mix", Options { mix: Some(f64::NAN), ..options(2) }),
        ("state_clip", Options { state_clip: Some(-1.0), ..options(2) }),
    ] {
        let error = refused(&options, &right);
        assert_eq!((error.kind, &*error.argument), (Kind::Option, name), "{error}");
    }
    for name in ["wm", "bm"] {
        let mut half = right.clone();
        half.take(name);
        assert_eq!(&*refused(&options(2), &half).argument, name);
    }
    let mut core = right.clone();
    ["wm", "bm"].into_iter().for_each(|name| drop(core.take(name)));
    let error = refused(&Options { mix: Some(0.1), ..options(2) }, &core);
    assert_eq!((&*error.argument, &*error.expected), ("mix", "0 where there are no wm and bm"));
    assert!(run::<MmrecBlock>(&Options { mix: Some(0.0), ..options(2) }, &core, &Exec::default()).is_ok());
    let mut backward = check::backward_inputs::<MmrecBlock, MmrecBlockBackward>(&keeping(2), &right);
    backward.take("hidden");
    backward.push("hidden", noise(1, &[2, 5, 6], 0.0, 1.0));
    let error = run::<MmrecBlockBackward>(&options(2), &backward, &Exec::default()).err().expect("a refusal");
    assert_eq!((error.kind, &*error.argument), (Kind::Shape, "hidden"), "{error}");
}
