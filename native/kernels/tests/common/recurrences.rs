//! Inputs of the recurrence of the MM-Rec block.

use super::check::noise;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::mm_rec::block_recurrence::Options;
use sidewinder_kernels::tensor::Owned;

/// Inputs with decays for which the state neither grows nor vanishes, and with weights whose sums are about as large as
/// the state.
pub fn inputs([batch, length, width]: [usize; 3], mixed: bool, initial: bool) -> Named<Owned> {
    let scale = 1.0 / (width as f64).sqrt().max(1.0);
    let mut inputs: Named<Owned> = [
        ("z", noise(1, &[batch, length, width], -1.0, 1.0)),
        ("gamma", noise(2, &[batch, length, width], 0.0, 0.5)),
        ("w_gate", noise(3, &[width, width], -scale, scale)),
        ("b_gate", noise(4, &[width], -1.0, 1.0)),
    ]
    .into_iter()
    .collect();
    if mixed {
        inputs.push("w_mix", noise(5, &[width, 2 * width], -scale, scale));
        inputs.push("b_mix", noise(6, &[width], -1.0, 1.0));
    }
    if initial {
        inputs.push("initial_state", noise(7, &[batch, width], -1.0, 1.0));
    }
    inputs
}

/// The options for these inputs.
pub fn options(mixed: bool) -> Options {
    Options { mix: Some(if mixed { 0.1 } else { 0.0 }), ..Default::default() }
}

/// Options with a bound that some elements exceed.
pub fn guarded(state_norm: bool) -> Options {
    Options { mix: Some(0.3), state_clip: Some(if state_norm { 1.2 } else { 0.4 }), state_norm }
}
