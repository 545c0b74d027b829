//! The walk over time that all scans share: each lane is a channel of a row.
//!
//! Few rows of few channels do not keep all threads busy, so their time is cut into chunks. A first pass computes the
//! total of each chunk, and a second one scans the chunk from the composed totals of the chunks before it. Whether and
//! where time is cut depends on the sizes alone, so results do not depend on the number of threads.

use super::steps::Steps;
use crate::cpu::pool::{self, Shared};
use crate::cpu::strips::{self, Strips};
use crate::cpu::{Exec, Real, Storage, Vector, Work, line, prefetch, prefetch_to_write};
use crate::error::Result;
use std::ops::Range;

/// Distance of prefetches of inputs and outputs: in bytes, and in rows at least.
const AHEAD: usize = 4096;
const ROWS_AHEAD: usize = 4;

/// The most channels of a strip, whose states should stay in the first-level cache.
const WIDEST: usize = 2048;

/// Channels of all rows from which on time is not split, as they keep any number of threads busy.
const MANY: usize = 2048;

/// Elements of a chunk of time, which should stay in the second-level cache between the two passes.
const CHUNK: usize = 1 << 14;

/// A tensor to read: in the storage type, in that of the arithmetic, or all zeros.
#[derive(Clone, Copy)]
pub enum Read<'a, S: Storage> {
    Narrow(&'a [S]),
    Wide(&'a [S::Wide]),
    Zero,
}

impl<S: Storage> Read<'_, S> {
    #[inline(always)]
    fn load<V: Vector<Element = S::Wide>>(&self, at: Range<usize>) -> V {
        match self {
            Read::Narrow(values) => S::load(&values[at]),
            Read::Wide(values) => V::load_partial(&values[at]),
            Read::Zero => V::zero(),
        }
    }

    #[inline(always)]
    fn ask(&self, at: usize) {
        match self {
            Read::Narrow(values) => prefetch(values.as_ptr(), at),
            Read::Wide(values) => prefetch(values.as_ptr(), at),
            Read::Zero => (),
        }
    }
}

/// A tensor to write: in the storage type, or in that of the arithmetic.
pub enum Write<'a, S: Storage> {
    Narrow(Shared<'a, S>),
    Wide(Shared<'a, S::Wide>),
}

impl<S: Storage> Write<'_, S> {
    /// # Safety
    /// No other thread accesses these elements meanwhile.
    #[inline(always)]
    unsafe fn store<V: Vector<Element = S::Wide>>(&self, at: Range<usize>, vector: V) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Write::Narrow(values) => S::store(vector, values.part(at.start, at.len())),
                Write::Wide(values) => vector.store_partial(values.part(at.start, at.len())),
            }
        }
    }

    #[inline(always)]
    fn ask(&self, at: usize) {
        match self {
            Write::Narrow(values) => prefetch_to_write(values.as_ptr(), at),
            Write::Wide(values) => prefetch_to_write(values.as_ptr(), at),
        }
    }
}

/// A scan over all rows.
pub struct Walk<'a, S: Storage, K, const IN: usize, const OUT: usize> {
    pub scan: K,
    pub rows: usize,
    pub length: usize,
    pub width: usize,
    /// Whether time runs from the last step to the first.
    pub back: bool,
    /// The initial states, (rows, width).
    pub start: Option<&'a [S::Wide]>,
    pub inputs: [Read<'a, S>; IN],
    /// For a gradient, the results of the scan and its initial state: its values before each step.
    pub before: Read<'a, S>,
    pub first: Option<&'a [S::Wide]>,
    pub outputs: [Write<'a, S>; OUT],
    /// The last state, (rows, width).
    pub last: Option<Shared<'a, S::Wide>>,
}

/// A range of channels of a row over a range of steps.
#[derive(Clone)]
struct Part {
    row: usize,
    channels: Range<usize>,
    steps: Range<usize>,
}

impl<S: Storage, K, const IN: usize, const OUT: usize> Walk<'_, S, K, IN, OUT> {
    /// Runs the scan, in chunks of time where there are too few channels.
    pub fn run<const N: usize, const T: usize>(&self, exec: &Exec) -> Result<()>
    where
        K: Steps<IN, N, T, OUT>,
    {
        let chunk = (CHUNK / self.width.max(1)).max(ROWS_AHEAD);
        if self.rows * self.width.next_multiple_of(32) >= MANY || self.length < 4 * chunk {
            return self.whole::<N, T>(exec);
        }
        self.in_chunks::<N, T>(exec, chunk)
    }

    fn whole<const N: usize, const T: usize>(&self, exec: &Exec) -> Result<()>
    where
        K: Steps<IN, N, T, OUT>,
    {
        let elements = self.rows * self.length.max(1) * self.width;
        Strips::new(exec, self.rows, self.width, elements, WIDEST).for_each(|row, channels| {
            let part = Part { row, channels, steps: 0..self.length };
            S::Wide::dispatch(exec.level, Through { walk: self, part, states: None });
        })
    }

    fn in_chunks<const N: usize, const T: usize>(&self, exec: &Exec, chunk: usize) -> Result<()>
    where
        K: Steps<IN, N, T, OUT>,
    {
        let chunks = self.length.div_ceil(chunk);
        let threads = pool::worth(exec.threads, self.rows * self.length * self.width, 1 << 16);
        let part = |row, c: usize| {
            let steps = c * chunk..self.length.min((c + 1) * chunk);
            Part { row, channels: 0..self.width, steps }
        };
        let zero = <S::Wide as Storage>::widen(bytemuck::Zeroable::zeroed());
        let mut totals = vec![zero; self.rows * chunks * T * self.width];
        let mut states = vec![zero; self.rows * chunks * N * self.width];
        let (all_totals, all_states) = (Shared::new(&mut totals), Shared::new(&mut states));
        // SAFETY: each chunk of each row has a part of its own.
        let totals_of =
            |row: usize, c: usize| unsafe { all_totals.part((row * chunks + c) * T * self.width, T * self.width) };
        // SAFETY: as above.
        let states_of =
            |row: usize, c: usize| unsafe { all_states.part((row * chunks + c) * N * self.width, N * self.width) };
        let total = |row, c| {
            let to = totals_of(row, c);
            S::Wide::dispatch(exec.level, Total { walk: self, part: part(row, c), to });
        };
        let compose = |row, c: usize| {
            let before = (c > 0).then(|| (&*states_of(row, c - 1), &*totals_of(row, c - 1)));
            let to = states_of(row, c);
            S::Wide::dispatch(exec.level, Compose { walk: self, row, before, to });
        };
        let through = |row, c| {
            let states = Some(&*states_of(row, c));
            S::Wide::dispatch(exec.level, Through { walk: self, part: part(row, c), states });
        };
        if threads == 1 {
            // Both passes over a chunk run one after the other, while it is in the caches.
            for (row, c) in (0..self.rows).flat_map(|row| (0..chunks).map(move |c| (row, c))) {
                compose(row, c);
                total(row, c);
                through(row, c);
            }
            return Ok(());
        }
        pool::for_each(threads, self.rows * chunks, |i| total(i / chunks, i % chunks))?;
        (0..self.rows).for_each(|row| (0..chunks).for_each(|c| compose(row, c)));
        pool::for_each(threads, self.rows * chunks, |i| through(i / chunks, i % chunks))
    }

    /// The range of `channels` of a row in a tensor (rows, width).
    fn state(&self, row: usize, channels: &Range<usize>) -> Range<usize> {
        let start = row * self.width;
        start + channels.start..start + channels.end
    }

    /// The offset of a part's channels at a step, counted in the direction of the walk.
    #[inline(always)]
    fn at(&self, part: &Part, step: usize) -> usize {
        let time = if self.back { self.length - 1 - step } else { step };
        (part.row * self.length + time) * self.width + part.channels.start
    }

    /// The scan's result before this step. The gradient walks in reverse, so this is the result of its next step.
    #[inline(always)]
    fn before<V: Vector<Element = S::Wide>>(&self, part: &Part, step: usize, i: usize, first: &[V]) -> V {
        match self.before {
            Read::Zero => V::zero(),
            _ if step + 1 == self.length => first[i],
            _ => self.before.load(self.lanes::<V>(part, self.at(part, step + 1), i)),
        }
    }

    /// The range of vector `i` of a part's channels, which start at offset `row`.
    #[inline(always)]
    fn lanes<V: Vector>(&self, part: &Part, row: usize, i: usize) -> Range<usize> {
        row + i * V::LANES..row + part.channels.len().min((i + 1) * V::LANES)
    }

    #[inline(always)]
    fn read<V: Vector<Element = S::Wide>>(&self, at: &Range<usize>) -> [V; IN] {
        let mut read = [V::zero(); IN];
        let mut k = 0;
        while k < IN {
            read[k] = self.inputs[k].load(at.clone());
            k += 1;
        }
        read
    }

    /// Prefetches inputs, and with `write` outputs, some rows ahead; once for each cache line.
    #[inline(always)]
    fn ask<V: Vector>(&self, at: usize, write: bool) {
        if at % line::<S>() >= V::LANES {
            return;
        }
        let ahead = (ROWS_AHEAD * self.width).max(AHEAD / size_of::<S>());
        let at = if self.back { at.wrapping_sub(ahead) } else { at + ahead };
        self.inputs.iter().for_each(|input| input.ask(at));
        self.before.ask(at);
        if write {
            self.outputs.iter().for_each(|output| output.ask(at));
        }
    }

    #[inline(always)]
    fn first<V: Vector<Element = S::Wide>, const N: usize, const T: usize>(&self, part: &Part) -> Vec<V>
    where
        K: Steps<IN, N, T, OUT>,
    {
        match self.first {
            Some(first) => strips::load(Some(&first[self.state(part.row, &part.channels)]), part.channels.len()),
            None => vec![V::constant(K::FIRST); part.channels.len().div_ceil(V::LANES)],
        }
    }

    #[inline(always)]
    fn start<V: Vector<Element = S::Wide>, const N: usize, const T: usize>(&self, part: &Part) -> Vec<[V; N]>
    where
        K: Steps<IN, N, T, OUT>,
    {
        let mut states = vec![self.scan.neutral::<V>(); part.channels.len().div_ceil(V::LANES)];
        if let Some(start) = self.start {
            let start = strips::load::<V>(Some(&start[self.state(part.row, &part.channels)]), part.channels.len());
            for (state, start) in states.iter_mut().zip(&start) {
                *state = self.scan.start(*start);
            }
        }
        states
    }
}

/// Loads `N` rows of `width` elements, as `N` vectors for each vector of channels.
#[inline(always)]
fn load<V: Vector, const N: usize>(from: &[V::Element], width: usize) -> Vec<[V; N]> {
    let mut states = vec![[V::zero(); N]; width.div_ceil(V::LANES)];
    for (k, row) in from.chunks_exact(width).enumerate() {
        for (state, values) in states.iter_mut().zip(row.chunks(V::LANES)) {
            state[k] = V::load_partial(values);
        }
    }
    states
}

/// Stores such vectors as `N` rows: the inverse of [`load`].
#[inline(always)]
fn store<V: Vector, const N: usize>(states: &[[V; N]], to: &mut [V::Element], width: usize) {
    for (k, row) in to.chunks_exact_mut(width).enumerate() {
        for (state, values) in states.iter().zip(row.chunks_mut(V::LANES)) {
            state[k].store_partial(values);
        }
    }
}

/// Scans a part, from the initial state or from the given states.
struct Through<'w, 'a, S: Storage, K, const IN: usize, const OUT: usize, const N: usize, const T: usize> {
    walk: &'w Walk<'a, S, K, IN, OUT>,
    part: Part,
    states: Option<&'w [S::Wide]>,
}

impl<S: Storage, K: Steps<IN, N, T, OUT>, const IN: usize, const OUT: usize, const N: usize, const T: usize>
    Work<S::Wide> for Through<'_, '_, S, K, IN, OUT, N, T>
{
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (walk, part) = (self.walk, &self.part);
        let first = walk.first::<V, N, T>(part);
        let mut states = match self.states {
            Some(states) => load::<V, N>(states, walk.width),
            None => walk.start::<V, N, T>(part),
        };
        for step in part.steps.clone() {
            let row = walk.at(part, step);
            for (i, state) in states.iter_mut().enumerate() {
                let at = walk.lanes::<V>(part, row, i);
                walk.ask::<V>(at.start, true);
                let before = walk.before(part, step, i, &first);
                let (next, results) = walk.scan.step(*state, walk.read(&at), before);
                *state = next;
                let mut k = 0;
                while k < OUT {
                    // SAFETY: parts share no element of (row, time, channel).
                    unsafe { walk.outputs[k].store(at.clone(), results[k]) };
                    k += 1;
                }
            }
        }
        if let (Some(last), true) = (&walk.last, part.steps.end == walk.length) {
            let mut seen = first;
            for (seen, state) in seen.iter_mut().zip(&states) {
                *seen = walk.scan.last(*state, *seen);
            }
            let at = walk.state(part.row, &part.channels);
            // SAFETY: parts with the last step share no element of (row, channel).
            strips::store(&seen, unsafe { last.part(at.start, at.len()) });
        }
    }
}

/// Computes the total of a part.
struct Total<'w, 'a, S: Storage, K, const IN: usize, const OUT: usize, const N: usize, const T: usize> {
    walk: &'w Walk<'a, S, K, IN, OUT>,
    part: Part,
    to: &'w mut [S::Wide],
}

impl<S: Storage, K: Steps<IN, N, T, OUT>, const IN: usize, const OUT: usize, const N: usize, const T: usize>
    Work<S::Wide> for Total<'_, '_, S, K, IN, OUT, N, T>
{
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (walk, part) = (self.walk, &self.part);
        let first = walk.first::<V, N, T>(part);
        let mut stretches = vec![walk.scan.identity::<V>(); walk.width.div_ceil(V::LANES)];
        for step in part.steps.clone() {
            let row = walk.at(part, step);
            for (i, stretch) in stretches.iter_mut().enumerate() {
                let at = walk.lanes::<V>(part, row, i);
                walk.ask::<V>(at.start, false);
                let before = walk.before(part, step, i, &first);
                *stretch = walk.scan.extend(*stretch, walk.read(&at), before);
            }
        }
        store(&stretches, self.to, walk.width);
    }
}

/// The states before a chunk, and its total.
type Chunk<'w, S> = (&'w [<S as Storage>::Wide], &'w [<S as Storage>::Wide]);

/// Computes the states before a chunk from those before the previous chunk and that chunk's total.
struct Compose<'w, 'a, S: Storage, K, const IN: usize, const OUT: usize, const N: usize, const T: usize> {
    walk: &'w Walk<'a, S, K, IN, OUT>,
    row: usize,
    before: Option<Chunk<'w, S>>,
    to: &'w mut [S::Wide],
}

impl<S: Storage, K: Steps<IN, N, T, OUT>, const IN: usize, const OUT: usize, const N: usize, const T: usize>
    Work<S::Wide> for Compose<'_, '_, S, K, IN, OUT, N, T>
{
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let walk = self.walk;
        let part = Part { row: self.row, channels: 0..walk.width, steps: 0..0 };
        let states = match self.before {
            Some((states, totals)) => {
                let (mut states, totals) = (load::<V, N>(states, walk.width), load::<V, T>(totals, walk.width));
                for (state, total) in states.iter_mut().zip(&totals) {
                    *state = walk.scan.after(*state, *total);
                }
                states
            }
            None => walk.start::<V, N, T>(&part),
        };
        store(&states, self.to, walk.width);
    }
}
