//! The recurrence on the CPU: lanes are columns of the state. A head advances through tiles of time, and in each of
//! them piece by piece: a piece is two vectors of columns, whose rows stay in the first-level cache for all steps of
//! the tile.
//!
//! A step goes over a piece once. By the delta rule it adds the step's outer product, and multiplies the state by the next
//! step's `k` and `q`. So a vector of the state takes a multiplication, three multiply-adds, a load and a store a step,
//! which is twice what one product with the state takes. Without that rule a step does not depend on what the state has
//! for `k`, and multiplies the state by its own `q` only: two multiply-adds.

mod backward;
mod piece;
mod tile;

pub use backward::backward;

use super::{Form, Problem};
use crate::cpu::pool::{self, Shared};
use crate::cpu::vector::Loops;
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{View, ViewMut};
use crate::with_type;
use piece::Decay;
use std::ops::Range;
use tile::Tile;

/// Makes the form a constant of the kernels: whether it is the delta rule, and whether each key has a decay of its own.
macro_rules! with_form {
    ($form:expr, $DELTA:ident, $BY_KEY:ident => $body:expr) => {
        match $form {
            Form::Delta => {
                const $DELTA: bool = true;
                const $BY_KEY: bool = false;
                $body
            }
            Form::ByHead => {
                const $DELTA: bool = false;
                const $BY_KEY: bool = false;
                $body
            }
            Form::ByKey => {
                const $DELTA: bool = false;
                const $BY_KEY: bool = true;
                $body
            }
        }
    };
}
use with_form;

/// Steps of a tile: its `q` and `k` fit the second-level cache for all sizes in use.
const STEPS: usize = 64;
/// Columns of a work item where there are too few heads for all threads.
const FEW_COLUMNS: usize = 32;
/// Below this many updates of states waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 16;

/// Computes the op on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => with_form!(problem.form, D, K => forward_as::<S, D, K>(problem, inputs, outputs, exec)))
}

fn forward_as<S: Storage, const DELTA: bool, const BY_KEY: bool>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs)?;
    let y = Shared::new(outputs.expect("y")?.slice::<S>()?);
    let last_state = outputs.take("last_state").map(ViewMut::slice::<S::Wide>).transpose()?.map(Shared::new);
    given.for_each_head(exec, |head| {
        let (y, last_state) = (&y, last_state.as_ref());
        S::Wide::dispatch(exec.level, Forward::<S, DELTA, BY_KEY> { given: &given, head, y, last_state });
    })
}

/// A range of columns of a head.
#[derive(Clone)]
struct Head {
    batch: usize,
    index: usize,
    columns: Range<usize>,
}

/// The typed inputs.
struct Given<'a, S: Storage> {
    problem: &'a Problem,
    q: &'a [S],
    k: &'a [S],
    v: &'a [S],
    beta: Option<&'a [S]>,
    g: Option<&'a [S::Wide]>,
    initial_state: Option<&'a [S::Wide]>,
}

impl<'a, S: Storage> Given<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>) -> Result<Self> {
        let storage = |name| inputs.get(name)?.slice::<S>();
        let wide = |name| inputs.find(name).map(View::slice::<S::Wide>).transpose();
        Ok(Given {
            problem,
            q: storage("q")?,
            k: storage("k")?,
            v: storage("v")?,
            beta: inputs.find("beta").map(View::slice::<S>).transpose()?,
            g: wide("g")?,
            initial_state: wide("initial_state")?,
        })
    }

    /// Calls `work` with ranges that together cover all columns of all heads.
    fn for_each_head(&self, exec: &Exec, work: impl Fn(Head) + Send + Sync) -> Result<()> {
        let Problem { batch, length, heads, values, .. } = *self.problem;
        let threads = pool::worth(exec.threads, batch * length * heads * self.problem.state(), WORTH_SHARING);
        let each = if batch * heads < 2 * threads { FEW_COLUMNS.min(values) } else { values }.max(1);
        let blocks = values.div_ceil(each);
        pool::for_each(threads, batch * heads * blocks, |i| {
            let (of_batch, first) = (i / blocks, i % blocks * each);
            let columns = first..values.min(first + each);
            work(Head { batch: of_batch / heads, index: of_batch % heads, columns });
        })
    }

    /// The offset of a step of a head in `beta` and `g`.
    #[inline(always)]
    fn step_offset(&self, head: &Head, t: usize) -> usize {
        (head.batch * self.problem.length + t) * self.problem.heads + head.index
    }

    /// The offset of a step of a head's group in `q` and `k`.
    #[inline(always)]
    fn key_offset(&self, head: &Head, t: usize) -> usize {
        let Problem { length, groups, keys, .. } = *self.problem;
        ((head.batch * length + t) * groups + head.index / self.problem.heads_per_group()) * keys
    }

    /// The offset of a head's state.
    fn state_offset(&self, head: &Head) -> usize {
        (head.batch * self.problem.heads + head.index) * self.problem.state()
    }

    /// Time in tiles of at most `steps` steps.
    fn tiles(&self, steps: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<S> {
        let length = self.problem.length;
        (0..length.div_ceil(steps)).map(move |i| i * steps..length.min((i + 1) * steps))
    }

    /// Columns of a head from step `start`.
    #[inline(always)]
    fn at(&self, head: &Head, start: usize, columns: Range<usize>) -> At {
        let Problem { heads, values, .. } = *self.problem;
        At { first: self.step_offset(head, start) * values, stride: heads * values, columns }
    }

    /// A head's columns of `states`, ordered by piece, then row; zeros without `states`.
    #[inline(always)]
    fn pieces<V: Vector<Element = S::Wide>>(&self, head: &Head, states: Option<&[S::Wide]>) -> Vec<V> {
        let Problem { keys, values, .. } = *self.problem;
        let mut pieces = vec![V::zero(); keys * head.columns.len().div_ceil(V::LANES)];
        if let Some(states) = states {
            let state = &states[self.state_offset(head)..][..keys * values];
            piece::each!(head.columns.len().div_ceil(V::LANES), |first, N| {
                let columns = piece::columns::<V, N>(&head.columns, first);
                for (i, row) in pieces[first * keys..][..N * keys].chunks_exact_mut(N).enumerate() {
                    row.copy_from_slice(&piece::load::<S::Wide, V, N>(&state[i * values..], columns.clone()));
                }
            });
        }
        pieces
    }
}

/// The columns of a piece in rows of `v`, or of a sequence like it.
struct At {
    /// The offset of the first step's row, and from each step's row to the next.
    first: usize,
    stride: usize,
    columns: Range<usize>,
}

impl At {
    /// Reads a row for each step.
    #[inline(always)]
    fn read<S: Storage, V: Vector<Element = S::Wide>, const N: usize>(&self, from: &[S], rows: &mut [[V; N]]) {
        for (step, row) in rows.iter_mut().enumerate() {
            *row = piece::load::<S, V, N>(&from[self.first + step * self.stride..], self.columns.clone());
        }
    }

    /// Writes a row for each step.
    ///
    /// # Safety
    /// No other part of these columns may be alive.
    #[inline(always)]
    unsafe fn write<S: Storage, V: Vector<Element = S::Wide>, const N: usize>(&self, rows: &[[V; N]], to: &Shared<S>) {
        for (step, row) in rows.iter().enumerate() {
            let start = self.first + step * self.stride + self.columns.start;
            // SAFETY: as the caller promises.
            piece::store::<S, V, N>(row, unsafe { to.part(start, self.columns.len()) });
        }
    }
}

/// Writes a head's columns, ordered by piece, then row, to the states of all heads.
///
/// # Safety
/// No other part of these columns may be alive.
#[inline(always)]
unsafe fn write_state<S: Storage, V: Vector<Element = S::Wide>>(
    given: &Given<S>,
    head: &Head,
    pieces: &[V],
    to: &Shared<S::Wide>,
) {
    let Problem { keys, values, .. } = *given.problem;
    piece::each!(head.columns.len().div_ceil(V::LANES), |first, N| {
        let columns = piece::columns::<V, N>(&head.columns, first);
        for (i, row) in pieces[first * keys..][..N * keys].chunks_exact(N).enumerate() {
            let start = given.state_offset(head) + i * values + columns.start;
            // SAFETY: as the caller promises.
            let to = unsafe { to.part(start, columns.len()) };
            piece::store::<S::Wide, V, N>(row.first_chunk().expect("a row"), to);
        }
    });
}

struct Forward<'a, S: Storage, const DELTA: bool, const BY_KEY: bool> {
    given: &'a Given<'a, S>,
    head: Head,
    y: &'a Shared<'a, S>,
    last_state: Option<&'a Shared<'a, S::Wide>>,
}

impl<S: Storage, const DELTA: bool, const BY_KEY: bool> Work<S::Wide> for Forward<'_, S, DELTA, BY_KEY> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (given, head, keys) = (self.given, &self.head, self.given.problem.keys);
        let mut pieces = given.pieces::<V>(head, given.initial_state);
        let mut tile = Tile::<S::Wide>::new(given.problem, STEPS);
        let mut rows = vec![V::zero(); 2 * tile.steps];
        for time in given.tiles(STEPS) {
            tile.read::<S, V>(given, head, time.clone());
            piece::each!(head.columns.len().div_ceil(V::LANES), |first, N| {
                let columns = piece::columns::<V, N>(&head.columns, first);
                let (rows, at) = (&mut rows.as_chunks_mut::<N>().0[..tile.steps], given.at(head, time.start, columns));
                let state = &mut pieces[first * keys..][..N * keys];
                at.read(given.v, rows);
                V::apart(Advance::<V, N, DELTA, BY_KEY> { problem: given.problem, tile: &tile, state, rows });
                // SAFETY: heads share no column.
                unsafe { at.write(rows, self.y) };
            });
        }
        if let Some(to) = self.last_state {
            // SAFETY: heads share no column.
            unsafe { write_state(given, head, &pieces, to) };
        }
    }
}

/// Advances a piece over a tile, and turns rows of `v` into those of `y`.
struct Advance<'a, V: Vector, const N: usize, const DELTA: bool, const BY_KEY: bool> {
    problem: &'a Problem,
    tile: &'a Tile<V::Element>,
    state: &'a mut [V],
    rows: &'a mut [[V; N]],
}

impl<V: Vector, const N: usize, const DELTA: bool, const BY_KEY: bool> Loops for Advance<'_, V, N, DELTA, BY_KEY> {
    #[inline(always)]
    fn run(self) {
        if DELTA { self.correct() } else { self.add() }
    }
}

impl<V: Vector, const N: usize, const DELTA: bool, const BY_KEY: bool> Advance<'_, V, N, DELTA, BY_KEY> {
    #[inline(always)]
    fn add(self) {
        let tile = self.tile;
        for (step, row) in self.rows.iter_mut().enumerate() {
            let decay = Decay::<V, BY_KEY>::new(tile.decay(self.problem, step));
            *row = piece::add_and_read(self.state, &decay, tile.k(step), row, tile.q(step));
        }
    }

    /// [`Self::add`] by the delta rule.
    #[inline(always)]
    fn correct(self) {
        let tile = self.tile;
        let [mut by_k, mut by_q] = piece::read_out::<V, N>(self.state, tile.k(0), tile.q(0));
        for (step, row) in self.rows.iter_mut().enumerate() {
            let of_state = Decay::<V, false>::new(tile.decay(self.problem, step));
            let (decay, beta, qk) = (of_state.of(0), V::splat(tile.beta[step]), V::splat(tile.qk[step]));
            let mut input = [V::zero(); N];
            for n in 0..N {
                input[n] = beta.mul(row[n].sub(decay.mul(by_k[n])));
                row[n] = qk.mul_add(input[n], decay.mul(by_q[n]));
            }
            if step + 1 < tile.steps {
                let next = [tile.k(step + 1), tile.q(step + 1)];
                [by_k, by_q] = piece::add_and_read_out(self.state, decay, tile.k(step), &input, next);
            } else {
                piece::add(self.state, &of_state, tile.k(step), &input);
            }
        }
    }
}
