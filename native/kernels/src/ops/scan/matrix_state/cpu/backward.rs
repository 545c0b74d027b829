//! The gradient on the CPU. For each head a first pass keeps the states at the starts of tiles; then the tiles are
//! processed backwards. In a tile each piece is recomputed forwards, with the states of all steps kept, and goes
//! backwards with its cotangents. `dq` and `dk` are summed over columns lane by lane, and over lanes once all pieces of
//! a tile are done.
//!
//! By the delta rule a vector of the state takes fourteen instructions a step, three and a half times as many as the
//! recurrence; without it, ten. Tiles
//! have about as many steps as there are tiles, so memory grows with the square root of the length.

use super::piece::Decay;
use super::tile::{self, Tile};
use super::{FEW_COLUMNS, Given, Head, WORTH_SHARING, piece, with_form, write_state};
use crate::cpu::convert::rounded;
use crate::cpu::pool::{self, Shared};
use crate::cpu::sum::write_sums;
use crate::cpu::vector::Loops;
use crate::cpu::{Exec, Real, Storage, Vector, Work, each_vector, rows, sum, unrolled};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::matrix_state::{Form, Problem};
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
use std::ops::Range;

/// The fewest steps of a tile.
const LEAST_STEPS: usize = 16;
/// The number of heads from which on a head's columns are not divided.
const MANY_HEADS: usize = 32;
/// The most parts into which the heads of a group are divided.
const MOST_PARTS: usize = 8;
/// The most elements in the partial sums for `dq` of all parts.
const MOST_SUMS: usize = 1 << 26;

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => with_form!(problem.form, D, K => backward_as::<S, D, K>(problem, inputs, outputs, exec)))
}

fn backward_as<S: Storage, const DELTA: bool, const BY_KEY: bool>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs)?;
    let mut sums = Sums::<S::Wide>::new(problem);
    through_heads::<S, DELTA, BY_KEY>(&given, inputs, &mut outputs, &mut sums, exec)?;
    for (name, x, parts) in [("dq", given.q, &sums.dq), ("dk", given.k, &sums.dk)] {
        rounded::<S>(outputs.expect(name)?.slice()?, exec, |to| {
            sum::columns::<S::Wide>(parts, to, exec)?;
            through_norms(problem, x, to, exec)
        })?;
    }
    if let Some(to) = outputs.take("dbeta") {
        rounded::<S>(to.slice()?, exec, |to| sum::columns::<S::Wide>(&sums.dbeta, to, exec))?;
    }
    match outputs.take("dg") {
        Some(to) => sum::columns::<S::Wide>(&sums.dg, to.slice()?, exec),
        None => Ok(()),
    }
}

/// How a group is divided: its heads into parts, and each head into blocks of columns. Both depend on the sizes alone,
/// so that sums are reproducible.
#[derive(Clone, Copy)]
struct Parts {
    heads: usize,
    blocks: usize,
}

impl Parts {
    fn new(problem: &Problem) -> Parts {
        let Problem { batch, length, heads, groups, keys, values, .. } = *problem;
        // With a decay for each key `dg` has partial sums like those of `dq`, for each head.
        let rows = if problem.form == Form::ByKey { heads } else { groups };
        let most = MOST_SUMS / (batch * length * rows * keys).max(1);
        let few = batch * heads < MANY_HEADS;
        let blocks = if few { values.div_ceil(FEW_COLUMNS).clamp(1, most.max(1)) } else { 1 };
        Parts { heads: (most / blocks).clamp(1, MOST_PARTS).min(problem.heads_per_group()), blocks }
    }

    fn count(&self) -> usize {
        self.heads * self.blocks
    }
}

/// Partial sums of gradients, added up once all heads are done.
struct Sums<W> {
    /// With respect to `q` and `k` of the formula, before the norm's gradient: (parts, B, L, G, K)
    dq: Vec<W>,
    dk: Vec<W>,
    /// (blocks, B, L, H), and `dg` with a decay for each key (blocks, B, L, H, K)
    dbeta: Vec<W>,
    dg: Vec<W>,
}

impl<W: Real> Sums<W> {
    fn new(problem: &Problem) -> Self {
        let Problem { batch, length, heads, groups, keys, .. } = *problem;
        let parts = Parts::new(problem);
        let zeros = |sizes: &[usize]| vec![W::from_f64(0.0); sizes.iter().product()];
        let of_group = [parts.count(), batch, length, groups, keys];
        let of_steps = [parts.blocks, batch, length, heads];
        let of_decays = [parts.blocks, batch, length, heads, problem.decays()];
        Sums { dq: zeros(&of_group), dk: zeros(&of_group), dbeta: zeros(&of_steps), dg: zeros(&of_decays) }
    }
}

/// Writes `dv` and `dinitial_state`, and the partial sums.
fn through_heads<S: Storage, const DELTA: bool, const BY_KEY: bool>(
    given: &Given<S>,
    inputs: &Named<View>,
    outputs: &mut Named<ViewMut>,
    sums: &mut Sums<S::Wide>,
    exec: &Exec,
) -> Result<()> {
    let (problem, parts) = (given.problem, Parts::new(given.problem));
    let dy = inputs.get("dy")?.slice::<S>()?;
    let dlast_state = inputs.find("dlast_state").map(View::slice::<S::Wide>).transpose()?;
    let dinitial_state = outputs.take("dinitial_state").map(ViewMut::slice::<S::Wide>).transpose()?;
    let to = Gradients {
        dv: Shared::new(outputs.expect("dv")?.slice::<S>()?),
        dinitial_state: dinitial_state.map(Shared::new),
        dq: Shared::new(&mut sums.dq),
        dk: Shared::new(&mut sums.dk),
        dbeta: Shared::new(&mut sums.dbeta),
        dg: Shared::new(&mut sums.dg),
    };
    let threads = pool::worth(exec.threads, given.v.len() * problem.keys, WORTH_SHARING);
    pool::for_each(threads, problem.batch * problem.groups * parts.count(), |i| {
        let piece = Piece::new(problem, i / parts.count(), i % parts.count());
        S::Wide::dispatch(exec.level, Reverse::<S, DELTA, BY_KEY> { given, dy, dlast_state, piece, to: &to });
    })
}

/// A range of columns of a range of heads of a group.
struct Piece {
    batch: usize,
    heads: Range<usize>,
    columns: Range<usize>,
    /// The index of this piece in the group, and that of its block of columns.
    part: usize,
    block: usize,
}

impl Piece {
    /// Piece `part` of a group; `group` counts those of all batches.
    fn new(problem: &Problem, group: usize, part: usize) -> Piece {
        let parts = Parts::new(problem);
        let (heads, block) = (problem.heads_per_group(), part % parts.blocks);
        let share = |all: usize, parts: usize, i: usize| {
            let each = all.div_ceil(parts);
            (i * each).min(all)..all.min((i + 1) * each)
        };
        let first = group % problem.groups * heads;
        let own = share(heads, parts.heads, part / parts.blocks);
        Piece {
            batch: group / problem.groups,
            heads: first + own.start..first + own.end,
            columns: share(problem.values, parts.blocks, block),
            part,
            block,
        }
    }
}

/// The outputs, and the partial sums of [`Sums`].
struct Gradients<'a, S: Storage> {
    dv: Shared<'a, S>,
    dinitial_state: Option<Shared<'a, S::Wide>>,
    dq: Shared<'a, S::Wide>,
    dk: Shared<'a, S::Wide>,
    dbeta: Shared<'a, S::Wide>,
    dg: Shared<'a, S::Wide>,
}

struct Reverse<'a, S: Storage, const DELTA: bool, const BY_KEY: bool> {
    given: &'a Given<'a, S>,
    dy: &'a [S],
    dlast_state: Option<&'a [S::Wide]>,
    piece: Piece,
    to: &'a Gradients<'a, S>,
}

impl<S: Storage, const DELTA: bool, const BY_KEY: bool> Work<S::Wide> for Reverse<'_, S, DELTA, BY_KEY> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        for index in self.piece.heads.clone() {
            let head = Head { batch: self.piece.batch, index, columns: self.piece.columns.clone() };
            self.through::<V>(&head);
        }
    }
}

impl<S: Storage, const DELTA: bool, const BY_KEY: bool> Reverse<'_, S, DELTA, BY_KEY> {
    /// Computes the gradients of a head.
    #[inline(always)]
    fn through<V: Vector<Element = S::Wide>>(&self, head: &Head) {
        let (given, keys) = (self.given, self.given.problem.keys);
        let steps = LEAST_STEPS.max(given.problem.length.isqrt());
        let mut tile = Tile::<S::Wide>::new(given.problem, steps);
        let mut carry = given.pieces::<V>(head, self.dlast_state);
        let mut back = Back::<V>::new(tile.steps, given.problem);
        let mut of_steps = vec![V::zero(); 2 * tile.steps];
        let starts = self.starts(head, &mut tile, &mut back, steps);
        for (i, time) in given.tiles(steps).enumerate().rev() {
            tile.read::<S, V>(given, head, time.clone());
            let starts = &starts[i * carry.len()..][..carry.len()];
            piece::each!(head.columns.len().div_ceil(V::LANES), |first, N| {
                let (rows, columns) = (first * keys..(first + N) * keys, piece::columns::<V, N>(&head.columns, first));
                let (at, of_steps) =
                    (given.at(head, time.start, columns), &mut of_steps.as_chunks_mut::<N>().0[..tile.steps]);
                back.states[..N * keys].copy_from_slice(&starts[rows.clone()]);
                at.read(given.v, of_steps);
                self.forwards::<V, N>(&tile, of_steps, &mut back);
                at.read(self.dy, of_steps);
                let (problem, tile, back, carry) = (given.problem, &tile, &mut back, &mut carry[rows]);
                V::apart(Backwards::<V, N, DELTA, BY_KEY> { problem, tile, rows: of_steps, back, carry });
                // SAFETY: pieces share no column of a head.
                unsafe { at.write(of_steps, &self.to.dv) };
            });
            self.flush(head, time, &tile, &mut back);
        }
        if let Some(to) = &self.to.dinitial_state {
            // SAFETY: pieces share no column of a head.
            unsafe { write_state(given, head, &carry, to) };
        }
    }

    /// The states at the starts of all tiles.
    #[inline(always)]
    fn starts<V: Vector<Element = S::Wide>>(
        &self,
        head: &Head,
        tile: &mut Tile<S::Wide>,
        back: &mut Back<V>,
        steps: usize,
    ) -> Vec<V> {
        let (given, keys) = (self.given, self.given.problem.keys);
        let mut state = given.pieces::<V>(head, given.initial_state);
        let mut of_steps = vec![V::zero(); 2 * tile.steps];
        let mut starts = Vec::with_capacity(state.len() * given.tiles(steps).len());
        for time in given.tiles(steps) {
            starts.extend_from_slice(&state);
            if time.end == given.problem.length {
                break;
            }
            tile.read::<S, V>(given, head, time.clone());
            piece::each!(head.columns.len().div_ceil(V::LANES), |first, N| {
                let (rows, columns) = (first * keys..(first + N) * keys, piece::columns::<V, N>(&head.columns, first));
                let v = &mut of_steps.as_chunks_mut::<N>().0[..tile.steps];
                given.at(head, time.start, columns).read(given.v, v);
                back.states[..N * keys].copy_from_slice(&state[rows.clone()]);
                self.forwards::<V, N>(tile, v, back);
                state[rows].copy_from_slice(&back.states[tile.steps * N * keys..][..N * keys]);
            });
        }
        starts
    }

    #[inline(always)]
    fn forwards<V: Vector<Element = S::Wide>, const N: usize>(
        &self,
        tile: &Tile<S::Wide>,
        v: &[[V; N]],
        back: &mut Back<V>,
    ) {
        V::apart(Forwards::<V, N, DELTA, BY_KEY> { problem: self.given.problem, tile, v, back });
    }

    /// Adds the sums of a tile to the partial sums, and clears them.
    #[inline(always)]
    fn flush<V: Vector<Element = S::Wide>>(
        &self,
        head: &Head,
        time: Range<usize>,
        tile: &Tile<S::Wide>,
        back: &mut Back<V>,
    ) {
        let (given, keys, decays) = (self.given, self.given.problem.keys, self.given.problem.decays());
        let Problem { batch, length, heads, .. } = *given.problem;
        let blocks = self.piece.block * batch * length * heads;
        let mut sums = vec![V::Element::from_f64(0.0); keys];
        for (step, t) in time.enumerate() {
            let of_part = self.piece.part * given.q.len() + given.key_offset(head, t);
            let rows = step * keys..(step + 1) * keys;
            for (shared, of, factor) in
                [(&self.to.dq, &mut back.dq, given.problem.scale), (&self.to.dk, &mut back.dk, 1.0)]
            {
                write_sums(&of[rows.clone()], &mut sums, 1);
                of[rows.clone()].fill(V::zero());
                // SAFETY: pieces share no part of a group.
                add_scaled::<V>(&sums, factor, unsafe { shared.part(of_part, keys) });
            }
            let at = blocks + given.step_offset(head, t);
            // SAFETY: pieces share no block of a head.
            let (dbeta, dg) = unsafe { (self.to.dbeta.part(at, 1), self.to.dg.part(at * decays, decays)) };
            dbeta[0] = back.dbeta[step].sum();
            back.dbeta[step] = V::zero();
            let of_step = &mut back.dg[step * decays..][..decays];
            for (sum, &decay) in of_step.iter_mut().zip(tile.decay(given.problem, step)) {
                *sum = sum.mul(V::splat(decay));
            }
            write_sums(of_step, dg, 1);
            of_step.fill(V::zero());
        }
    }
}

/// Recomputes a piece over a tile, and keeps `e` and the states of all steps.
struct Forwards<'a, V: Vector, const N: usize, const DELTA: bool, const BY_KEY: bool> {
    problem: &'a Problem,
    tile: &'a Tile<V::Element>,
    v: &'a [[V; N]],
    back: &'a mut Back<V>,
}

impl<V: Vector, const N: usize, const DELTA: bool, const BY_KEY: bool> Loops for Forwards<'_, V, N, DELTA, BY_KEY> {
    #[inline(always)]
    fn run(self) {
        let Forwards { problem, tile, v, back } = self;
        let size = N * problem.keys;
        let mut by_k = [V::zero(); N];
        if DELTA {
            by_k = piece::read_out::<V, N>(&back.states[..size], tile.k(0), tile.k(0))[0];
        }
        for (step, v) in v.iter().enumerate() {
            let (decay, beta) = (Decay::<V, BY_KEY>::new(tile.decay(problem, step)), V::splat(tile.beta[step]));
            let mut input = [V::zero(); N];
            for n in 0..N {
                back.errors[step * N + n] = if DELTA { v[n].sub(decay.of(0).mul(by_k[n])) } else { v[n] };
                input[n] = beta.mul(back.errors[step * N + n]);
            }
            let next = tile.k(tile.steps.min(step + 2) - 1);
            let (before, after) = back.states[step * size..(step + 2) * size].split_at_mut(size);
            by_k = step_forwards::<V, N, DELTA, BY_KEY>(before, after, &decay, tile.k(step), &input, next);
        }
    }
}

/// Takes the cotangents of a piece's states backwards over a tile, and turns rows of `dy` into those of `dv`.
struct Backwards<'a, V: Vector, const N: usize, const DELTA: bool, const BY_KEY: bool> {
    problem: &'a Problem,
    tile: &'a Tile<V::Element>,
    rows: &'a mut [[V; N]],
    back: &'a mut Back<V>,
    carry: &'a mut [V],
}

impl<V: Vector, const N: usize, const DELTA: bool, const BY_KEY: bool> Loops for Backwards<'_, V, N, DELTA, BY_KEY> {
    #[inline(always)]
    fn run(self) {
        let Backwards { problem, tile, rows, back, carry } = self;
        let last = tile.steps - 1;
        let mut dy = rows[last];
        piece::add(carry, &Decay::none(), tile.q(last), &dy);
        let mut derrors = piece::read_out::<V, N>(carry, tile.k(last), tile.k(last))[0];
        for step in (0..tile.steps).rev() {
            let (beta, errors) = (V::splat(tile.beta[step]), *piece::row::<V, N>(&back.errors, step));
            let (mut dv, mut input) = ([V::zero(); N], [V::zero(); N]);
            for n in 0..N {
                dv[n] = beta.mul(derrors[n]);
                input[n] = beta.mul(errors[n]);
                back.dbeta[step] = derrors[n].mul_add(errors[n], back.dbeta[step]);
            }
            rows[step] = dv;
            // The first step has none before it; what `step_backwards` returns for it is not used.
            let before = step.saturating_sub(1);
            let dy_before = if step > 0 { rows[before] } else { [V::zero(); N] };
            let decay = Decay::new(tile.decay(problem, step));
            let go = Step::<V, N, BY_KEY> { decay, dv, input, dy, dy_before };
            let keys = [tile.k(step), tile.k(before), tile.q(before)];
            derrors = back.step_backwards::<N, DELTA, BY_KEY>(carry, step, &go, keys);
            dy = dy_before;
        }
    }
}

/// The operands of a step backwards over a piece.
struct Step<'a, V: Vector, const N: usize, const BY_KEY: bool> {
    decay: Decay<'a, V, BY_KEY>,
    /// `beta de` and `beta e`.
    dv: [V; N],
    input: [V; N],
    dy: [V; N],
    /// `dy` of the step before.
    dy_before: [V; N],
}

/// The workspace of the backward pass over a tile.
struct Back<V> {
    /// The states of a piece, before the first step and after each.
    states: Vec<V>,
    /// `e` of a piece.
    errors: Vec<V>,
    /// Sums over the columns of all pieces, lane by lane: `S dy` and `dk` of each step and row, `de . e` of each step,
    /// and `dg / a` of each decay.
    dq: Vec<V>,
    dk: Vec<V>,
    dbeta: Vec<V>,
    dg: Vec<V>,
}

impl<V: Vector> Back<V> {
    fn new(steps: usize, problem: &Problem) -> Back<V> {
        let keys = problem.keys;
        let zeros = |count| vec![V::zero(); count];
        Back {
            states: zeros((steps + 1) * 2 * keys),
            errors: zeros(steps * 2),
            dq: zeros(steps * keys),
            dk: zeros(steps * keys),
            dbeta: zeros(steps),
            dg: zeros(steps * problem.decays()),
        }
    }

    /// Takes `carry` from the cotangent of the state after a step to that of the state before, with the contribution of
    /// `dy` of the step before, and returns `de` of the step before. The rows are `k` of the step, and `k` and `q` of
    /// the step before.
    #[inline(always)]
    fn step_backwards<const N: usize, const DELTA: bool, const BY_KEY: bool>(
        &mut self,
        carry: &mut [V],
        step: usize,
        go: &Step<V, N, BY_KEY>,
        [k, k_before, q_before]: [&[V::Element]; 3],
    ) -> [V; N] {
        let (keys, mut derrors) = (k.len(), [V::zero(); N]);
        let dgs = if BY_KEY { &mut self.dg[step * keys..][..keys] } else { &mut self.dg[step..][..1] };
        let mut dg = if BY_KEY { V::zero() } else { dgs[0] };
        let (before, after) = self.states[step * N * keys..(step + 2) * N * keys].split_at(N * keys);
        let (dq, dk) = (&mut self.dq[step * keys..][..keys], &mut self.dk[step * keys..][..keys]);
        let mut of_before = [V::zero(); N];
        if DELTA {
            unrolled!(n < N, {
                of_before[n] = go.decay.of(0).mul(go.dv[n]);
            });
        }
        for i in 0..keys {
            let (k, k_before, q_before) = (V::splat(k[i]), V::splat(k_before[i]), V::splat(q_before[i]));
            let (before, after) = (piece::row::<V, N>(before, i), piece::row::<V, N>(after, i));
            let decay = go.decay.of(i);
            if BY_KEY {
                dg = dgs[i];
            }
            let carry = &mut carry[i * N..][..N];
            unrolled!(n < N, {
                let (mut g_before, mut dk_of) = (carry[n], carry[n].mul_add(go.input[n], dk[i]));
                if DELTA {
                    g_before = g_before.sub(k.mul(go.dv[n]));
                    dk_of = dk_of.sub(before[n].mul(of_before[n]));
                }
                dk[i] = dk_of;
                dq[i] = after[n].mul_add(go.dy[n], dq[i]);
                dg = g_before.mul_add(before[n], dg);
                carry[n] = q_before.mul_add(go.dy_before[n], decay.mul(g_before));
                derrors[n] = carry[n].mul_add(k_before, derrors[n]);
            });
            if BY_KEY {
                dgs[i] = dg;
            }
        }
        if !BY_KEY {
            dgs[0] = dg;
        }
        derrors
    }
}

/// Computes the state after a step from the state before it; returns for the delta rule its product with the `next` key.
#[inline(always)]
fn step_forwards<V: Vector, const N: usize, const DELTA: bool, const BY_KEY: bool>(
    before: &[V],
    after: &mut [V],
    decay: &Decay<V, BY_KEY>,
    k: &[V::Element],
    input: &[V; N],
    next: &[V::Element],
) -> [V; N] {
    let mut by_k = [V::zero(); N];
    let rows = before.chunks_exact(N).zip(after.chunks_exact_mut(N));
    for (i, (((before, after), &k), &next)) in rows.zip(k).zip(next).enumerate() {
        let (k, next, decay) = (V::splat(k), V::splat(next), decay.of(i));
        unrolled!(n < N, {
            after[n] = k.mul_add(input[n], decay.mul(before[n]));
            if DELTA {
                by_k[n] = after[n].mul_add(next, by_k[n]);
            }
        });
    }
    by_k
}

/// Adds `factor * values`.
#[inline(always)]
fn add_scaled<V: Vector>(values: &[V::Element], factor: f64, to: &mut [V::Element]) {
    let factor = V::constant(factor);
    each_vector!(to.len(), |at, end| {
        let sum = V::load_partial(&values[at..end]).mul_add(factor, V::load_partial(&to[at..end]));
        sum.store_partial(&mut to[at..end]);
    });
}

/// Turns gradients of the normalized `q` or `k` into those of the input `x`.
fn through_norms<S: Storage>(problem: &Problem, x: &[S], gradient: &mut [S::Wide], exec: &Exec) -> Result<()> {
    let keys = problem.keys;
    if !problem.qk_l2norm || x.is_empty() {
        return Ok(());
    }
    let gradient = Shared::new(gradient);
    rows::for_each([x.len() / keys, keys], exec, |rows| {
        let range = rows.start * keys..rows.end * keys;
        // SAFETY: pieces share no row.
        let gradient = unsafe { gradient.part(range.start, range.len()) };
        S::Wide::dispatch(exec.level, ThroughNorms { keys, x: &x[range], gradient });
    })
}

struct ThroughNorms<'a, S: Storage> {
    keys: usize,
    x: &'a [S],
    gradient: &'a mut [S::Wide],
}

impl<S: Storage> Work<S::Wide> for ThroughNorms<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        for (x, gradient) in self.x.chunks_exact(self.keys).zip(self.gradient.chunks_exact_mut(self.keys)) {
            let inverse = V::constant(1.0 / tile::length::<S, V>(x));
            let mut along = V::zero();
            each_vector!(self.keys, |at, end| {
                along = S::load::<V>(&x[at..end]).mul_add(V::load_partial(&gradient[at..end]), along);
            });
            let along = V::splat(along.sum()).mul(inverse).mul(inverse);
            each_vector!(self.keys, |at, end| {
                let rest = V::load_partial(&gradient[at..end]).sub(S::load::<V>(&x[at..end]).mul(along));
                rest.mul(inverse).store_partial(&mut gradient[at..end]);
            });
        }
    }
}
