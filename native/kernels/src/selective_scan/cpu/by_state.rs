//! One state a lane: the rows of `A`, `B`, `C` and the state are read as they lie in memory, and
//! `y` is a sum over lanes.

use super::call::{Block, Call, Segment, State, Step};
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Storage, Vector};
use crate::tensor::Element;

/// Scans a segment from the state in `h`, or from zero, to the state in `h`, and turns `rates` into
/// the sums of its steps' rates. Writes outputs only if told to `emit`.
#[inline(always)]
pub fn scan<V: Vector<Element = S::Wide>, S: Storage>(
    call: &Call<S>,
    segment: &Segment,
    h: State<'_, S::Wide>,
    rates: &mut [S::Wide],
    emit: bool,
) {
    if h.from_zero {
        h.values.fill(S::Wide::from_f64(0.0));
    }
    let mut done = 0;
    for segment in segment.blocks(V::LANES) {
        let channels = segment.channels.len();
        let h = &mut h.values[done * call.problem.state..][..channels * call.problem.state];
        scan_block(&Block::<V, S>::new(call, segment), call, h, emit).store_partial(&mut rates[done..][..channels]);
        done += channels;
    }
}

/// The same for a block; returns the sum of rates.
#[inline(always)]
fn scan_block<V: Vector<Element = S::Wide>, S: Storage>(
    block: &Block<V, S>,
    call: &Call<S>,
    h: &mut [S::Wide],
    emit: bool,
) -> V {
    let segment = &block.segment;
    let a = call.a_rows(&segment.channels);
    let mut total = V::zero();
    for t in segment.time.clone() {
        let step = block.step(t);
        total = total.add(step.rate);
        let sums = update_block::<V, S>(call, segment, t, &step, a, h);
        if emit {
            call.write_states(segment, t, h);
            block.write(t, step.y.add(sums));
        }
    }
    total
}

/// Advances the states of a block by one step; returns each channel's sum weighted by `C`.
///
/// A vector of states at a time for all channels, and all sums over lanes at the end: so the
/// channels' chains of dependent operations overlap.
#[inline(always)]
fn update_block<V: Vector<Element = S::Wide>, S: Storage>(
    call: &Call<S>,
    segment: &Segment,
    t: usize,
    step: &Step<V>,
    a: &[S::Wide],
    h: &mut [S::Wide],
) -> V {
    let (rate, input, n) = (step.rate.lanes(), step.input.lanes(), call.problem.state);
    let (b, c) = (call.rows(&call.b, segment, t), call.rows(&call.c, segment, t));
    let mut sums = [V::zero(); MAX_LANES];
    for first in (0..n).step_by(V::LANES) {
        let states = first..n.min(first + V::LANES);
        let (mut b_lane, mut c_lane) = (S::load(&b.row(0)[states.clone()]), S::load(&c.row(0)[states.clone()]));
        for lane in 0..segment.channels.len() {
            if b.differ {
                b_lane = S::load(&b.row(lane)[states.clone()]);
            }
            if c.differ {
                c_lane = S::load(&c.row(lane)[states.clone()]);
            }
            let row = lane * n + states.start..lane * n + states.end;
            let decay = V::splat(rate[lane]).mul(V::load_partial(&a[row.clone()])).exp2();
            let new = decay.mul_add(V::load_partial(&h[row.clone()]), V::splat(input[lane]).mul(b_lane));
            sums[lane] = new.mul_add(c_lane, sums[lane]);
            new.store_partial(&mut h[row]);
        }
    }
    let mut lanes = [S::Wide::from_f64(0.0); MAX_LANES];
    for (lane, sum) in lanes.iter_mut().zip(sums) {
        *lane = sum.sum();
    }
    V::load(&lanes)
}
