//! The recurrence on the CPU: each lane is a channel, time is the loop, and batches and strips of channels are shared
//! among threads.
//!
//! The recurrence is bound by memory, so a strip is as wide as the number of threads allows and goes row by row, in
//! memory order; its states stay in the first-level cache. A narrow strip jumps from page to page, which hardware
//! prefetchers do not predict, so rows are prefetched. Time is not split: with fewer strips than threads some threads
//! stay idle. Every strip computes a channel in the same way, so results do not depend on the number of threads.

use super::Problem;
use crate::cpu::pool::Shared;
use crate::cpu::strips::{self, Strips};
use crate::cpu::{Exec, Real, Storage, Vector, Work, prefetch};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{View, ViewMut};
use crate::with_type;
use std::ops::Range;

/// Distance of prefetches in rows.
const AHEAD: usize = 4;

/// The most channels of a strip, whose states should stay in the first-level cache.
const WIDEST: usize = 4096;

/// Computes the recurrence on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => {
        let call = Forward::<S>::new(problem, inputs, outputs)?;
        strips(problem, exec).for_each(|batch, channels| {
            <S as Storage>::Wide::dispatch(exec.level, Strip { call: &call, batch, channels });
        })
    })
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => {
        let call = Backward::<S>::new(problem, inputs, outputs)?;
        strips(problem, exec).for_each(|batch, channels| {
            <S as Storage>::Wide::dispatch(exec.level, Strip { call: &call, batch, channels });
        })
    })
}

fn strips(problem: &Problem, exec: &Exec) -> Strips {
    let Problem { batch, length, channels, .. } = *problem;
    Strips::new(exec, batch, channels, batch * length * channels, WIDEST)
}

/// A range of channels of one batch.
struct Strip<'c, C> {
    call: &'c C,
    batch: usize,
    channels: Range<usize>,
}

impl<C> Strip<'_, C> {
    /// The range of the strip in a tensor (B, K), such as a state.
    fn state(&self, problem: &Problem) -> Range<usize> {
        let start = self.batch * problem.channels + self.channels.start;
        start..start + self.channels.len()
    }

    /// The range of the strip at time `t` in a tensor (B, L, K).
    fn row(&self, problem: &Problem, t: usize) -> Range<usize> {
        let start = (self.batch * problem.length + t) * problem.channels + self.channels.start;
        start..start + self.channels.len()
    }
}

struct Forward<'a, S: Storage> {
    problem: &'a Problem,
    a: &'a [S],
    b: &'a [S],
    initial_state: Option<&'a [S::Wide]>,
    h: Shared<'a, S>,
    last_state: Option<Shared<'a, S::Wide>>,
}

impl<'a, S: Storage> Forward<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>, mut outputs: Named<ViewMut<'a>>) -> Result<Self> {
        Ok(Forward {
            problem,
            a: inputs.get("a")?.slice()?,
            b: inputs.get("b")?.slice()?,
            initial_state: inputs.find("initial_state").map(View::slice).transpose()?,
            h: Shared::new(outputs.expect("h")?.slice()?),
            last_state: outputs.take("last_state").map(ViewMut::slice).transpose()?.map(Shared::new),
        })
    }
}

impl<S: Storage> Work<S::Wide> for Strip<'_, Forward<'_, S>> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (call, width) = (self.call, self.channels.len());
        let state_row = self.state(call.problem);
        let mut state = strips::load::<V>(call.initial_state.map(|row| &row[state_row.clone()]), width);
        for t in 0..call.problem.length {
            let row = self.row(call.problem, t);
            let (a, b) = (&call.a[row.clone()], &call.b[row.clone()]);
            // SAFETY: strips share no element of (batch, time, channel).
            let h = unsafe { call.h.part(row.start, width) };
            for (i, state) in state.iter_mut().enumerate() {
                let at = i * V::LANES;
                let ahead = row.start + at + AHEAD * call.problem.channels;
                prefetch(call.a.as_ptr(), ahead);
                prefetch(call.b.as_ptr(), ahead);
                prefetch(call.h.as_ptr(), ahead);
                *state = S::load::<V>(&a[at..]).mul_add(*state, S::load(&b[at..]));
                S::store(*state, &mut h[at..]);
            }
        }
        if let Some(last_state) = &call.last_state {
            // SAFETY: strips share no element of (batch, channel).
            strips::store(&state, unsafe { last_state.part(state_row.start, width) });
        }
    }
}

struct Backward<'a, S: Storage> {
    problem: &'a Problem,
    a: &'a [S],
    h: &'a [S],
    initial_state: Option<&'a [S::Wide]>,
    dh: &'a [S],
    dlast_state: Option<&'a [S::Wide]>,
    da: Shared<'a, S>,
    db: Shared<'a, S>,
    dinitial_state: Option<Shared<'a, S::Wide>>,
}

impl<'a, S: Storage> Backward<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>, mut outputs: Named<ViewMut<'a>>) -> Result<Self> {
        Ok(Backward {
            problem,
            a: inputs.get("a")?.slice()?,
            h: inputs.get("h")?.slice()?,
            initial_state: inputs.find("initial_state").map(View::slice).transpose()?,
            dh: inputs.get("dh")?.slice()?,
            dlast_state: inputs.find("dlast_state").map(View::slice).transpose()?,
            da: Shared::new(outputs.expect("da")?.slice()?),
            db: Shared::new(outputs.expect("db")?.slice()?),
            dinitial_state: outputs.take("dinitial_state").map(ViewMut::slice).transpose()?.map(Shared::new),
        })
    }
}

impl<S: Storage> Work<S::Wide> for Strip<'_, Backward<'_, S>> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (call, width) = (self.call, self.channels.len());
        let state_row = self.state(call.problem);
        let mut carry = strips::load::<V>(call.dlast_state.map(|row| &row[state_row.clone()]), width);
        let initial_state = strips::load::<V>(call.initial_state.map(|row| &row[state_row.clone()]), width);
        for t in (0..call.problem.length).rev() {
            let row = self.row(call.problem, t);
            let before = if t > 0 { Some(&call.h[self.row(call.problem, t - 1)]) } else { None };
            let (a, dh) = (&call.a[row.clone()], &call.dh[row.clone()]);
            // SAFETY: strips share no element of (batch, time, channel).
            let (da, db) = unsafe { (call.da.part(row.start, width), call.db.part(row.start, width)) };
            for (i, carry) in carry.iter_mut().enumerate() {
                let at = i * V::LANES;
                let ahead = (row.start + at).wrapping_sub(AHEAD * call.problem.channels);
                prefetch(call.a.as_ptr(), ahead);
                prefetch(call.h.as_ptr(), ahead);
                prefetch(call.dh.as_ptr(), ahead);
                prefetch(call.da.as_ptr(), ahead);
                prefetch(call.db.as_ptr(), ahead);
                let g = S::load::<V>(&dh[at..]).add(*carry);
                let h = match before {
                    Some(before) => S::load::<V>(&before[at..]),
                    None => initial_state[i],
                };
                S::store(g, &mut db[at..]);
                S::store(g.mul(h), &mut da[at..]);
                *carry = S::load::<V>(&a[at..]).mul(g);
            }
        }
        if let Some(dinitial_state) = &call.dinitial_state {
            // SAFETY: strips share no element of (batch, channel).
            strips::store(&carry, unsafe { dinitial_state.part(state_row.start, width) });
        }
    }
}
