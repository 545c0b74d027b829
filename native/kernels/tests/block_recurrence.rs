//! The recurrence of the MM-Rec block and its gradient against their f64 references and finite differences.

mod common;

use common::check::{self, noise};
use sidewinder_kernels::block_recurrence::{BlockRecurrence, BlockRecurrenceBackward, Options};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::Named;
use sidewinder_kernels::tensor::{Described, Owned};

/// Decays that let the state neither grow nor vanish, and weights whose sums are about as large as the state.
fn inputs(batch: usize, length: usize, width: usize, mixed: bool, initial: bool) -> Named<Owned> {
    let scale = 1.0 / (width as f64).sqrt().max(1.0);
    let mut inputs: Named<Owned> = [
        ("z", noise(1, &[batch, length, width], -1.0, 1.0)),
        ("gamma", noise(2, &[batch, length, width], 0.0, 0.5)),
        ("Wg", noise(3, &[width, width], -scale, scale)),
        ("bg", noise(4, &[width], -1.0, 1.0)),
    ]
    .into_iter()
    .collect();
    if mixed {
        inputs.push("Wm", noise(5, &[width, 2 * width], -scale, scale));
        inputs.push("bm", noise(6, &[width], -1.0, 1.0));
    }
    if initial {
        inputs.push("h0", noise(7, &[batch, width], -1.0, 1.0));
    }
    inputs
}

fn options(mixed: bool) -> Options {
    Options { mix: if mixed { 0.1 } else { 0.0 }, ..Default::default() }
}

/// With a bound that some of the elements are beyond.
fn guarded(state_norm: bool) -> Options {
    Options { mix: 0.3, state_clip: Some(if state_norm { 1.2 } else { 0.4 }), state_norm }
}

fn agrees(options: &Options, inputs: &Named<Owned>) {
    check::agrees_everywhere::<BlockRecurrence>(options, inputs);
    let backward = check::backward_inputs::<BlockRecurrence, BlockRecurrenceBackward>(options, inputs);
    check::agrees_everywhere::<BlockRecurrenceBackward>(options, &backward);
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    let sizes = [(1, 1, 1), (2, 3, 5), (1, 17, 16), (3, 9, 31), (5, 12, 67), (2, 9, 130), (17, 2, 3), (1, 20, 3)];
    for (batch, length, width) in sizes.into_iter().chain([(0, 3, 4), (2, 0, 5), (2, 3, 0)]) {
        for (mixed, initial) in [(true, true), (true, false), (false, true)] {
            agrees(&options(mixed), &inputs(batch, length, width, mixed, initial));
        }
    }
}

#[test]
fn guards_agree_with_the_reference() {
    for (batch, length, width) in [(2, 3, 5), (3, 11, 67), (1, 0, 2)] {
        for state_norm in [false, true] {
            agrees(&guarded(state_norm), &inputs(batch, length, width, true, true));
            let norm = Options { mix: 0.0, state_clip: None, state_norm };
            agrees(&norm, &inputs(batch, length, width, false, true));
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let cases = [(options(true), true), (options(false), false), (guarded(false), true), (guarded(true), true)];
    for (options, mixed) in cases {
        for (batch, length, width) in [(1, 1, 1), (2, 4, 3)] {
            let inputs = inputs(batch, length, width, mixed, true);
            check::gradients_agree_with_differences::<BlockRecurrence, BlockRecurrenceBackward>(&options, &inputs);
        }
    }
}
