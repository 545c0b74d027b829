//! The scan on the CPU: lanes are states. A row of a head goes through a tile of time with its states in registers,
//! eight vectors of them at a time, while the tile's `B` and `C` stay in the first-level cache for all rows.
//!
//! A vector of states takes three instructions a step (decay, input, output) and two loads. The chunked
//! form of the paper takes two multiplications for these, and further ones for the products within a chunk: with the
//! sizes of Mamba-2 that is no less work.

mod backward;
mod tile;

pub use backward::backward;

use super::Problem;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector, Work, each_vector, math, rows};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::step_size::Lanes;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
use std::ops::Range;
use tile::{Advance, Tile};

/// Steps of a tile: its `B` and `C` of 128 states fit the first-level cache. With 64 steps the scan takes a quarter longer.
const STEPS: usize = 16;
/// Rows of a work item where there are too few heads for all threads.
const FEW_ROWS: usize = 16;
/// Below this many updates of states waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 16;

/// Computes the op on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward_as::<S>(problem, inputs, outputs, exec))
}

fn forward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs, exec)?;
    let y = Shared::new(outputs.expect("y")?.slice::<S>()?);
    let last_state = outputs.take("last_state").map(ViewMut::slice::<S::Wide>).transpose()?.map(Shared::new);
    given.for_each_head(exec, |head| {
        let (y, last_state) = (&y, last_state.as_ref());
        S::Wide::dispatch(exec.level, Forward { given: &given, head, y, last_state });
    })
}

/// A range of rows of a head.
#[derive(Clone)]
struct Head {
    batch: usize,
    index: usize,
    rows: Range<usize>,
}

/// The typed inputs of a scan, and its step sizes.
struct Given<'a, S: Storage> {
    problem: &'a Problem,
    x: &'a [S],
    dt: &'a [S],
    z: Option<&'a [S]>,
    a: &'a [S::Wide],
    b: &'a [S],
    c: &'a [S],
    d: Option<&'a [S::Wide]>,
    dt_bias: Option<&'a [S::Wide]>,
    initial_state: Option<&'a [S::Wide]>,
    /// `delta` (B, L, H).
    delta: Vec<S::Wide>,
    /// `exp(delta A)` (B, L, H).
    decay: Vec<S::Wide>,
}

impl<'a, S: Storage> Given<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>, exec: &Exec) -> Result<Self> {
        let storage = |name| inputs.get(name)?.slice::<S>();
        let wide = |name| inputs.find(name).map(View::slice::<S::Wide>).transpose();
        let mut given = Given {
            problem,
            x: storage("x")?,
            dt: storage("dt")?,
            z: inputs.find("z").map(View::slice::<S>).transpose()?,
            a: inputs.get("A")?.slice()?,
            b: storage("B")?,
            c: storage("C")?,
            d: wide("D")?,
            dt_bias: wide("dt_bias")?,
            initial_state: wide("initial_state")?,
            delta: Vec::new(),
            decay: Vec::new(),
        };
        [given.delta, given.decay] = given.steps(exec)?;
        Ok(given)
    }

    /// `delta` and `exp(delta A)` for all steps.
    fn steps(&self, exec: &Exec) -> Result<[Vec<S::Wide>; 2]> {
        let zeros = || vec![S::Wide::from_f64(0.0); self.dt.len()];
        let (mut delta, mut decay) = (zeros(), zeros());
        let to = [Shared::new(&mut delta), Shared::new(&mut decay)];
        rows::for_each(self.steps_and_heads(), exec, |rows| {
            S::Wide::dispatch(exec.level, Steps { given: self, rows, to: &to });
        })?;
        Ok([delta, decay])
    }

    /// Steps of all sequences, and heads.
    fn steps_and_heads(&self) -> [usize; 2] {
        [self.problem.batch * self.problem.length, self.problem.heads]
    }

    /// Calls `work` with ranges that together cover all rows of all heads.
    fn for_each_head(&self, exec: &Exec, work: impl Fn(Head) + Send + Sync) -> Result<()> {
        let Problem { batch, length, heads, width, state, .. } = *self.problem;
        let threads = pool::worth(exec.threads, batch * length * heads * width * state, WORTH_SHARING);
        let each = if batch * heads < 2 * threads { FEW_ROWS.min(width) } else { width }.max(1);
        let blocks = width.div_ceil(each);
        pool::for_each(threads, batch * heads * blocks, |i| {
            let (of_batch, first) = (i / blocks, i % blocks * each);
            let rows = first..width.min(first + each);
            work(Head { batch: of_batch / heads, index: of_batch % heads, rows });
        })
    }

    /// The offset of a step of a head in `dt`, `delta` and `decay`.
    #[inline(always)]
    fn step_offset(&self, head: &Head, t: usize) -> usize {
        (head.batch * self.problem.length + t) * self.problem.heads + head.index
    }

    /// The offset of a head's rows at a step in sequences like `x`.
    #[inline(always)]
    fn offset(&self, head: &Head, t: usize) -> usize {
        self.step_offset(head, t) * self.problem.width + head.rows.start
    }

    /// The offset of the states of a head's rows.
    fn state_offset(&self, head: &Head) -> usize {
        let Problem { heads, width, state, .. } = *self.problem;
        ((head.batch * heads + head.index) * width + head.rows.start) * state
    }

    /// The offset of a step of a head's group in `B` and `C`.
    #[inline(always)]
    fn group_offset(&self, head: &Head, t: usize) -> usize {
        let Problem { length, groups, state, .. } = *self.problem;
        ((head.batch * length + t) * groups + head.index / self.problem.heads_per_group()) * state
    }

    /// `D` for each row of a head, zeros without it.
    fn skips(&self, head: &Head) -> Vec<S::Wide> {
        let of_row = |p| match self.d {
            Some(d) if self.problem.wide_skip => d[head.index * self.problem.width + p],
            Some(d) => d[head.index],
            None => S::Wide::from_f64(0.0),
        };
        head.rows.clone().map(of_row).collect()
    }

    /// Time in tiles of at most `steps` steps.
    fn tiles(&self, steps: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<S> {
        let length = self.problem.length;
        (0..length.div_ceil(steps)).map(move |i| i * steps..length.min((i + 1) * steps))
    }

    /// Copies the initial states of a head's rows, or zeros.
    fn begin(&self, head: &Head, to: &mut [S::Wide]) {
        match self.initial_state {
            Some(states) => to.copy_from_slice(&states[self.state_offset(head)..][..to.len()]),
            None => to.fill(S::Wide::from_f64(0.0)),
        }
    }
}

struct Steps<'a, S: Storage> {
    given: &'a Given<'a, S>,
    rows: Range<usize>,
    /// `delta` and `exp(delta A)`.
    to: &'a [Shared<'a, S::Wide>; 2],
}

impl<S: Storage> Work<S::Wide> for Steps<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (given, heads) = (self.given, self.given.problem.heads);
        let sizes = Lanes::<V>::new(&given.problem.step_size);
        for row in self.rows {
            // SAFETY: pieces share no row.
            let [delta, decay] = unsafe { [&self.to[0], &self.to[1]].map(|to| to.part(row * heads, heads)) };
            each_vector!(heads, |at, end| {
                let size = sizes.delta(given.raw(row, at, end));
                size.store_partial(&mut delta[at..end]);
                size.mul(V::load_partial(&given.a[at..end])).exp().store_partial(&mut decay[at..end]);
            });
        }
    }
}

impl<S: Storage> Given<'_, S> {
    /// `dt + dt_bias` of the heads from `at` to `end`, in a row of `dt`.
    #[inline(always)]
    fn raw<V: Vector<Element = S::Wide>>(&self, row: usize, at: usize, end: usize) -> V {
        let dt = S::load::<V>(&self.dt[row * self.problem.heads..][at..end]);
        match self.dt_bias {
            Some(bias) => dt.add(V::load_partial(&bias[at..end])),
            None => dt,
        }
    }
}

struct Forward<'a, S: Storage> {
    given: &'a Given<'a, S>,
    head: Head,
    y: &'a Shared<'a, S>,
    last_state: Option<&'a Shared<'a, S::Wide>>,
}

impl<S: Storage> Work<S::Wide> for Forward<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (given, head) = (self.given, &self.head);
        let len = head.rows.len() * given.problem.state;
        let mut own = Vec::new();
        let states: &mut [S::Wide] = match self.last_state {
            // SAFETY: pieces share no row of a head.
            Some(shared) => unsafe { shared.part(given.state_offset(head), len) },
            None => {
                own.resize(len, S::Wide::from_f64(0.0));
                &mut own
            }
        };
        given.begin(head, states);
        let (mut tile, skips) = (Tile::<V>::new(given.problem, head, STEPS), given.skips(head));
        let mut sums = vec![S::Wide::from_f64(0.0); tile.input.len()];
        for time in given.tiles(STEPS) {
            tile.read(given, head, time.clone());
            V::apart(Advance { tile: &mut tile, states, sums: &mut sums });
            for (t, sums) in time.zip(sums.chunks_exact(tile.rows.max(1))) {
                self.write::<V>(t, sums, &skips);
            }
        }
    }
}

impl<S: Storage> Forward<'_, S> {
    /// Writes `y` of a step from its sums over the states.
    #[inline(always)]
    fn write<V: Vector<Element = S::Wide>>(&self, t: usize, sums: &[S::Wide], skips: &[S::Wide]) {
        let (given, start, count) = (self.given, self.given.offset(&self.head, t), sums.len());
        // SAFETY: pieces share no row of a head.
        let to = unsafe { self.y.part(start, count) };
        each_vector!(count, |at, end| {
            let x = S::load::<V>(&given.x[start + at..start + end]);
            let mut y = V::load_partial(&skips[at..end]).mul_add(x, V::load_partial(&sums[at..end]));
            if let Some(z) = given.z {
                y = y.mul(math::silu(S::load::<V>(&z[start + at..start + end])));
            }
            S::store(y, &mut to[at..end]);
        });
    }
}
