//! The convolution on the CPU: a channel per lane, and a window of W rows that moves along time.
//!
//! Time is cut into independent stretches of [`STRETCH`] rows; the first rows of a stretch's window are read again.
//! Stretches are short, so that the memory that a strip of channels touches during one stays in the second-level cache
//! while its blocks of lanes are processed one after the other, each entirely in registers. The gradient goes by rows
//! of `xp`: row `r` has all its terms once `du[r]` is known, and a stretch recomputes the W - 1 rows of `du` before its
//! own. Each stretch gives partial sums for `dw` and `dbias`, which are added up in order, so the bits do not depend on
//! the number of threads.

use super::Problem;
use crate::cpu::pool::Shared;
use crate::cpu::strips::Strips;
use crate::cpu::{Exec, Real, Storage, Vector, Work, math, prefetch, sum};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
use std::ops::Range;

/// Rows per stretch.
const STRETCH: usize = 64;

/// Prefetch distance in channels: the lines of the next blocks, as each row is on a page of its own.
const AHEAD: usize = 64;

/// The most channels of a strip: more would push a stretch out of the second-level cache.
const WIDEST: usize = 512;

/// Convolves on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward_as::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward_as::<S>(problem, inputs, outputs, exec))
}

fn forward_as<'a, S: Storage>(
    problem: &'a Problem,
    inputs: &Named<View<'a>>,
    mut outputs: Named<ViewMut<'a>>,
    exec: &Exec,
) -> Result<()> {
    let sums = Sums::<S>::new(problem, inputs)?;
    let y = Shared::new(outputs.expect("y")?.slice::<S>()?);
    let call = Forward { sums: &sums, y: &y };
    each_stretch(problem, problem.length, exec, |piece| S::Wide::dispatch(exec.level, (&call, piece)))?;
    if let Some(state) = outputs.take("last_state") {
        sums.last_state(state.slice::<S>()?);
    }
    Ok(())
}

fn backward_as<'a, S: Storage>(
    problem: &'a Problem,
    inputs: &Named<View<'a>>,
    mut outputs: Named<ViewMut<'a>>,
    exec: &Exec,
) -> Result<()> {
    let Problem { batch, channels, width, .. } = *problem;
    let zero = S::Wide::from_f64(0.0);
    // Partial sums of each stretch: those of the W columns of dw, transposed, then those of dbias.
    let row = (width + 1) * channels;
    let mut partial = vec![zero; batch * problem.rows().div_ceil(STRETCH) * row];
    let sums = Sums::<S>::new(problem, inputs)?;
    let dinitial_state = outputs.take("dinitial_state").map(ViewMut::slice::<S>).transpose()?.map(Shared::new);
    let call = Backward {
        sums: &sums,
        dy: inputs.get("dy")?.slice()?,
        dlast_state: inputs.find("dlast_state").map(View::slice).transpose()?,
        dx: &Shared::new(outputs.expect("dx")?.slice::<S>()?),
        dinitial_state: dinitial_state.as_ref(),
        partial: &Shared::new(&mut partial),
    };
    each_stretch(problem, problem.rows(), exec, |piece| S::Wide::dispatch(exec.level, (&call, piece)))?;
    let mut total = vec![zero; row];
    sum::columns::<S::Wide>(&partial, &mut total, exec)?;
    let (dw, dbias) = total.split_at(width * channels);
    transpose(dw, channels, outputs.expect("dw")?.slice::<S::Wide>()?);
    if let Some(to) = outputs.take("dbias") {
        to.slice::<S::Wide>()?.copy_from_slice(dbias);
    }
    Ok(())
}

/// Transposes a matrix with rows of `columns` values.
fn transpose<T: Copy>(from: &[T], columns: usize, to: &mut [T]) {
    let rows = from.len() / columns.max(1);
    for row in 0..rows {
        for column in 0..columns {
            to[column * rows + row] = from[row * columns + column];
        }
    }
}

/// Some channels of one stretch.
#[derive(Clone)]
struct Piece {
    /// The index of the stretch among those of all batches.
    stretch: usize,
    batch: usize,
    rows: Range<usize>,
    channels: Range<usize>,
}

impl Piece {
    fn blocks<V: Vector>(&self) -> impl Iterator<Item = Range<usize>> + use<V> {
        let Range { start, end } = self.channels;
        (start..end).step_by(V::LANES).map(move |first| first..end.min(first + V::LANES))
    }
}

fn each_stretch(problem: &Problem, rows: usize, exec: &Exec, work: impl Fn(Piece) + Send + Sync) -> Result<()> {
    let Problem { batch, channels, .. } = *problem;
    let each = rows.div_ceil(STRETCH);
    Strips::new(exec, batch * each, channels, batch * rows * channels, WIDEST).for_each(|stretch, channels| {
        let first = stretch % each * STRETCH;
        work(Piece { stretch, batch: stretch / each, rows: first..rows.min(first + STRETCH), channels });
    })
}

/// The inputs of the sums `u`.
struct Sums<'a, S: Storage> {
    problem: &'a Problem,
    x: &'a [S],
    initial_state: Option<&'a [S]>,
    /// The weights, transposed to (W, D).
    w: Vec<S::Wide>,
    bias: Option<&'a [S::Wide]>,
}

impl<'a, S: Storage> Sums<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>) -> Result<Self> {
        let given = inputs.get("w")?.slice::<S::Wide>()?;
        let mut w = given.to_vec();
        transpose(given, problem.width, &mut w);
        Ok(Sums {
            problem,
            x: inputs.get("x")?.slice()?,
            initial_state: inputs.find("initial_state").map(View::slice).transpose()?,
            w,
            bias: inputs.find("bias").map(View::slice).transpose()?,
        })
    }

    /// The values of a block of channels in row `r` of `xp`; `None` stands for zeros.
    #[inline(always)]
    fn padded(&self, batch: usize, r: usize, block: &Range<usize>) -> Option<&'a [S]> {
        let Problem { length, channels, width, .. } = *self.problem;
        let (from, row) = match r.checked_sub(width - 1) {
            Some(t) => (self.x, batch * length + t),
            None => (self.initial_state?, batch * (width - 1) + r),
        };
        Some(&from[row * channels + block.start..][..block.len()])
    }

    /// Like [`Self::padded`], as a vector.
    #[inline(always)]
    fn load<V: Vector<Element = S::Wide>>(&self, batch: usize, r: usize, block: &Range<usize>) -> V {
        match self.padded(batch, r, block) {
            Some(values) => S::load(values),
            None => V::zero(),
        }
    }

    fn last_state(&self, to: &mut [S]) {
        let Problem { batch, length, channels, width, .. } = *self.problem;
        let rows = (0..batch).flat_map(|b| (length..length + width - 1).map(move |r| (b, r)));
        for ((b, r), to) in rows.zip(to.chunks_exact_mut(channels.max(1))) {
            match self.padded(b, r, &(0..channels)) {
                Some(from) => to.copy_from_slice(from),
                None => to.fill(S::from_f64(0.0)),
            }
        }
    }
}

/// The weights, bias and window of a block of lanes. `A` is an array of W vectors, or a `Vec` where W is unusual.
struct Block<'s, 'a, S: Storage, V, A> {
    sums: &'s Sums<'a, S>,
    batch: usize,
    channels: Range<usize>,
    w: A,
    bias: V,
    /// The last W rows of `xp`, oldest first.
    window: A,
}

impl<'s, 'a, S, V, A> Block<'s, 'a, S, V, A>
where
    S: Storage,
    V: Vector<Element = S::Wide>,
    A: AsRef<[V]> + AsMut<[V]> + Clone,
{
    /// A block whose window is about to move to time `t`; `zeros` is a window of zeros.
    #[inline(always)]
    fn new(sums: &'s Sums<'a, S>, batch: usize, channels: Range<usize>, t: usize, zeros: &A) -> Self {
        let (mut w, mut window) = (zeros.clone(), zeros.clone());
        for (j, w) in w.as_mut().iter_mut().enumerate() {
            *w = V::load_partial(&sums.w[j * sums.problem.channels..][channels.clone()]);
        }
        for (r, row) in window.as_mut().iter_mut().skip(1).enumerate() {
            *row = sums.load(batch, t + r, &channels);
        }
        let bias = match sums.bias {
            Some(bias) => V::load_partial(&bias[channels.clone()]),
            None => V::zero(),
        };
        Block { sums, batch, channels, w, bias, window }
    }

    /// Moves the window on by one step, to time `t`, and returns the sum there.
    #[inline(always)]
    fn sum(&mut self, t: usize) -> V {
        let last = self.w.as_ref().len() - 1;
        push(self.window.as_mut(), self.sums.load(self.batch, t + last, &self.channels));
        let mut sum = self.bias;
        for (w, row) in self.w.as_ref().iter().zip(self.window.as_ref()) {
            sum = w.mul_add(*row, sum);
        }
        sum
    }

    /// The offset of the block in a row of channels.
    #[inline(always)]
    fn at(&self, row: usize) -> usize {
        row * self.sums.problem.channels + self.channels.start
    }
}

/// Drops the first element and appends another.
#[inline(always)]
fn push<V: Vector>(window: &mut [V], new: V) {
    for j in 1..window.len() {
        window[j - 1] = window[j];
    }
    if let Some(last) = window.last_mut() {
        *last = new;
    }
}

/// Calls a method with a window of zeros: for the usual W an array, which can live in registers.
macro_rules! for_width {
    ($width:expr, $zeros:ident => $call:expr) => {
        match $width {
            1 => {
                let $zeros = [V::zero(); 1];
                $call
            }
            2 => {
                let $zeros = [V::zero(); 2];
                $call
            }
            3 => {
                let $zeros = [V::zero(); 3];
                $call
            }
            4 => {
                let $zeros = [V::zero(); 4];
                $call
            }
            width => {
                let $zeros = vec![V::zero(); width];
                $call
            }
        }
    };
}

struct Forward<'s, 'a, S: Storage> {
    sums: &'s Sums<'a, S>,
    y: &'s Shared<'a, S>,
}

impl<S: Storage> Work<S::Wide> for (&Forward<'_, '_, S>, Piece) {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (call, piece) = self;
        for_width!(call.sums.problem.width, zeros => call.run::<V, _>(&piece, &zeros));
    }
}

impl<S: Storage> Forward<'_, '_, S> {
    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>, A: AsRef<[V]> + AsMut<[V]> + Clone>(&self, piece: &Piece, zeros: &A) {
        let Problem { length, activation, .. } = *self.sums.problem;
        for channels in piece.blocks::<V>() {
            let mut block = Block::new(self.sums, piece.batch, channels, piece.rows.start, zeros);
            for t in piece.rows.clone() {
                let at = block.at(piece.batch * length + t);
                prefetch(self.sums.x.as_ptr(), at + AHEAD);
                prefetch(self.y.as_ptr(), at + AHEAD);
                let u = block.sum(t);
                // SAFETY: pieces share no element of (batch, time, channel).
                let to = unsafe { self.y.part(at, block.channels.len()) };
                S::store(if activation.is_some() { math::silu(u) } else { u }, to);
            }
        }
    }
}

struct Backward<'s, 'a, S: Storage> {
    sums: &'s Sums<'a, S>,
    dy: &'a [S],
    dlast_state: Option<&'a [S]>,
    dx: &'s Shared<'a, S>,
    dinitial_state: Option<&'s Shared<'a, S>>,
    partial: &'s Shared<'s, S::Wide>,
}

impl<S: Storage> Work<S::Wide> for (&Backward<'_, '_, S>, Piece) {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (call, piece) = self;
        for_width!(call.sums.problem.width, zeros => call.run::<V, _>(&piece, &zeros));
    }
}

impl<S: Storage> Backward<'_, '_, S> {
    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>, A: AsRef<[V]> + AsMut<[V]> + Clone>(&self, piece: &Piece, zeros: &A) {
        let Problem { length, width, .. } = *self.sums.problem;
        for channels in piece.blocks::<V>() {
            let first = piece.rows.start.saturating_sub(width - 1);
            let mut block = Block::new(self.sums, piece.batch, channels, first, zeros);
            // The last W steps of du, oldest first.
            let (mut du, mut dw, mut dbias) = (zeros.clone(), zeros.clone(), V::zero());
            for t in first..piece.rows.start.min(length) {
                push(du.as_mut(), self.du(&mut block, t));
            }
            for _ in length.max(first)..piece.rows.start {
                push(du.as_mut(), V::zero());
            }
            for r in piece.rows.start..piece.rows.end.min(length) {
                let new = self.du(&mut block, r);
                push(du.as_mut(), new);
                for (dw, row) in dw.as_mut().iter_mut().zip(block.window.as_ref()) {
                    *dw = new.mul_add(*row, *dw);
                }
                dbias = dbias.add(new);
                self.write(&block, r, dxp(&block, &du, V::zero()));
            }
            for r in piece.rows.start.max(length)..piece.rows.end {
                push(du.as_mut(), V::zero());
                let from_state = match self.dlast_state {
                    Some(rows) => {
                        S::load(&rows[block.at(piece.batch * (width - 1) + r - length)..][..block.channels.len()])
                    }
                    None => V::zero(),
                };
                self.write(&block, r, dxp(&block, &du, from_state));
            }
            self.keep(piece.stretch, &block, dw.as_ref(), dbias);
        }
    }

    /// Moves the window to time `t` and returns `du` there.
    #[inline(always)]
    fn du<V, A>(&self, block: &mut Block<S, V, A>, t: usize) -> V
    where
        V: Vector<Element = S::Wide>,
        A: AsRef<[V]> + AsMut<[V]> + Clone,
    {
        let Problem { length, activation, .. } = *self.sums.problem;
        let at = block.at(block.batch * length + t);
        prefetch(self.sums.x.as_ptr(), at + AHEAD);
        prefetch(self.dy.as_ptr(), at + AHEAD);
        prefetch(self.dx.as_ptr(), at + AHEAD);
        let u = block.sum(t);
        let dy: V = S::load(&self.dy[at..][..block.channels.len()]);
        if activation.is_some() { dy.mul(math::silu_slope(u)) } else { dy }
    }

    /// Writes row `r` of `dxp`.
    #[inline(always)]
    fn write<V, A>(&self, block: &Block<S, V, A>, r: usize, dxp: V)
    where
        V: Vector<Element = S::Wide>,
        A: AsRef<[V]> + AsMut<[V]> + Clone,
    {
        let Problem { length, width, .. } = *self.sums.problem;
        let (to, row) = match (r.checked_sub(width - 1), self.dinitial_state) {
            (Some(t), _) => (self.dx, block.batch * length + t),
            (None, Some(dinitial_state)) => (dinitial_state, block.batch * (width - 1) + r),
            (None, None) => return,
        };
        // SAFETY: pieces share no element of (batch, row, channel).
        S::store(dxp, unsafe { to.part(block.at(row), block.channels.len()) });
    }

    /// Stores the partial sums of a stretch.
    #[inline(always)]
    fn keep<V, A>(&self, stretch: usize, block: &Block<S, V, A>, dw: &[V], dbias: V)
    where
        V: Vector<Element = S::Wide>,
        A: AsRef<[V]> + AsMut<[V]> + Clone,
    {
        let first = stretch * (dw.len() + 1);
        for (j, sum) in dw.iter().chain([&dbias]).enumerate() {
            // SAFETY: each stretch has a part of its own, and its pieces share no channel.
            sum.store_partial(unsafe { self.partial.part(block.at(first + j), block.channels.len()) });
        }
    }
}

/// The row of `dxp` that the last W rows of `du` complete; `more` is its term from `dlast_state`.
#[inline(always)]
fn dxp<S, V, A>(block: &Block<S, V, A>, du: &A, more: V) -> V
where
    S: Storage,
    V: Vector<Element = S::Wide>,
    A: AsRef<[V]> + AsMut<[V]> + Clone,
{
    let mut sum = more;
    for (w, du) in block.w.as_ref().iter().zip(du.as_ref().iter().rev()) {
        sum = w.mul_add(*du, sum);
    }
    sum
}
