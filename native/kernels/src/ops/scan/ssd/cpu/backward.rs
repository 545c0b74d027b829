//! The gradient on the CPU. The heads of a group are divided among a few parts, each with its own partial sums for `dB`
//! and `dC`. For each head a first pass keeps the states at the starts of tiles; then the tiles are processed
//! backwards. In a tile each row is recomputed forwards, with the states of all steps kept, and goes backwards with its
//! cotangents in registers.
//!
//! A vector of states takes ten instructions and seven loads or stores a step, five times as many as the scan.

use super::tile::{Advance, Tile, chunk, held, load, part, store};
use super::{Given, Head, STEPS, WORTH_SHARING};
use crate::cpu::convert::rounded;
use crate::cpu::pool::{self, Shared};
use crate::cpu::sum::write_sums;
use crate::cpu::vector::Loops;
use crate::cpu::{Exec, Real, Storage, Vector, Work, each_vector, math, rows, sum, unrolled};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::ssd::Problem;
use crate::ops::scan::step_size::Lanes;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
use std::ops::Range;

/// The most tiles of a sequence: the states at the start of each are kept.
const MOST_TILES: usize = 128;
/// The most parts of a group.
const MOST_PARTS: usize = 8;
/// The most elements in the partial sums for `dB` of all parts.
const MOST_SUMS: usize = 1 << 26;

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward_as::<S>(problem, inputs, outputs, exec))
}

fn backward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs, exec)?;
    let mut sums = Sums::<S::Wide>::new(problem);
    through_heads(&given, inputs, &mut outputs, &mut sums, exec)?;
    for (name, parts) in [("dB", &sums.db), ("dC", &sums.dc)] {
        rounded::<S>(outputs.expect(name)?.slice()?, exec, |to| sum::columns::<S::Wide>(parts, to, exec))?;
    }
    sum::columns::<S::Wide>(&sums.da, outputs.expect("dA")?.slice()?, exec)?;
    if let Some(to) = outputs.take("dD") {
        of_skips(problem, &sums.dd, to.slice::<S::Wide>()?, exec)?;
    }
    of_steps(&given, &sums.ddelta, outputs, exec)
}

/// Partial gradients, which are added up or turned into those of the inputs once all heads are done.
struct Sums<W> {
    /// Of `B` and `C`: (parts, B, L, G, N)
    db: Vec<W>,
    dc: Vec<W>,
    /// (B, L, H)
    ddelta: Vec<W>,
    /// (B, H)
    da: Vec<W>,
    /// (B, H, P)
    dd: Vec<W>,
}

impl<W: Real> Sums<W> {
    fn new(problem: &Problem) -> Self {
        let Problem { batch, length, heads, width, groups, state, .. } = *problem;
        let zeros = |sizes: &[usize]| vec![W::from_f64(0.0); sizes.iter().product()];
        let of_group = [parts(problem), batch, length, groups, state];
        Sums {
            db: zeros(&of_group),
            dc: zeros(&of_group),
            ddelta: zeros(&[batch, length, heads]),
            da: zeros(&[batch, heads]),
            dd: zeros(&[batch, heads, width]),
        }
    }
}

/// Writes `dx`, `dz` and `dinitial_state`, and the partial gradients.
fn through_heads<S: Storage>(
    given: &Given<S>,
    inputs: &Named<View>,
    outputs: &mut Named<ViewMut>,
    sums: &mut Sums<S::Wide>,
    exec: &Exec,
) -> Result<()> {
    let (problem, parts) = (given.problem, parts(given.problem));
    let dy = inputs.get("dy")?.slice::<S>()?;
    let dlast_state = inputs.find("dlast_state").map(View::slice::<S::Wide>).transpose()?;
    // `dinitial_state` also carries the cotangents of states, so there is a buffer where it is not an output.
    let mut own = Vec::new();
    let carry = match outputs.take("dinitial_state") {
        Some(view) => view.slice::<S::Wide>()?,
        None => {
            own.resize(sums.dd.len() * problem.state, S::Wide::from_f64(0.0));
            &mut own[..]
        }
    };
    let to = Gradients {
        dx: Shared::new(outputs.expect("dx")?.slice::<S>()?),
        dz: outputs.take("dz").map(ViewMut::slice::<S>).transpose()?.map(Shared::new),
        carry: Shared::new(carry),
        db: Shared::new(&mut sums.db),
        dc: Shared::new(&mut sums.dc),
        ddelta: Shared::new(&mut sums.ddelta),
        da: Shared::new(&mut sums.da),
        dd: Shared::new(&mut sums.dd),
    };
    let threads = pool::worth(exec.threads, given.x.len() * problem.state, WORTH_SHARING);
    pool::for_each(threads, problem.batch * problem.groups * parts, |i| {
        let piece = Piece::new(problem, i / parts, i % parts);
        S::Wide::dispatch(exec.level, Reverse { given, dy, dlast_state, piece, to: &to });
    })
}

/// The number of parts of a group. It depends on the sizes alone, so that sums are reproducible.
fn parts(problem: &Problem) -> usize {
    let size = problem.batch * problem.length * problem.groups * problem.state;
    (MOST_SUMS / size.max(1)).clamp(1, MOST_PARTS).min(problem.heads_per_group())
}

/// A part of a group: its heads, and its index.
struct Piece {
    batch: usize,
    heads: Range<usize>,
    part: usize,
}

impl Piece {
    /// Part `part` of a group; `group` counts those of all batches.
    fn new(problem: &Problem, group: usize, part: usize) -> Piece {
        let heads = problem.heads_per_group();
        let each = heads.div_ceil(parts(problem));
        let first = group % problem.groups * heads;
        let end = heads.min((part + 1) * each);
        Piece { batch: group / problem.groups, heads: first + (part * each).min(end)..first + end, part }
    }
}

/// The outputs, and the partial gradients of [`Sums`].
struct Gradients<'a, S: Storage> {
    dx: Shared<'a, S>,
    dz: Option<Shared<'a, S>>,
    /// The cotangents of states, which become `dinitial_state`.
    carry: Shared<'a, S::Wide>,
    db: Shared<'a, S::Wide>,
    dc: Shared<'a, S::Wide>,
    ddelta: Shared<'a, S::Wide>,
    da: Shared<'a, S::Wide>,
    dd: Shared<'a, S::Wide>,
}

struct Reverse<'a, S: Storage> {
    given: &'a Given<'a, S>,
    dy: &'a [S],
    dlast_state: Option<&'a [S::Wide]>,
    piece: Piece,
    to: &'a Gradients<'a, S>,
}

impl<S: Storage> Work<S::Wide> for Reverse<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        for index in self.piece.heads.clone() {
            let head = Head { batch: self.piece.batch, index, rows: 0..self.given.problem.width };
            self.through::<V>(&head);
        }
    }
}

impl<S: Storage> Reverse<'_, S> {
    /// Computes the gradients of a head.
    #[inline(always)]
    fn through<V: Vector<Element = S::Wide>>(&self, head: &Head) {
        let (given, state) = (self.given, self.given.problem.state);
        let steps = STEPS.max(given.problem.length.div_ceil(MOST_TILES));
        let (skips, size) = (given.skips(head), head.rows.len() * state);
        let mut tile = Tile::<V>::new(given.problem, head, steps);
        let starts = self.starts(head, &mut tile, steps);
        let mut back = Back::<V>::new(&tile);
        let (carry, dd) = self.begin(head, size);
        let mut da = S::Wide::from_f64(0.0);
        for (i, time) in given.tiles(steps).enumerate().rev() {
            tile.read(given, head, time.clone());
            back.read(self, head, time.clone());
            let starts = &starts[i * size..(i + 1) * size];
            V::apart(Backwards { back: &mut back, tile: &tile, starts, carry });
            da = da.add(self.write(head, time, &tile, &mut back, (&skips, &mut *dd)));
        }
        // SAFETY: pieces share no head.
        unsafe { put(&self.to.da, head.batch * given.problem.heads + head.index, da) };
    }

    /// The states at the starts of all tiles.
    #[inline(always)]
    fn starts<V: Vector<Element = S::Wide>>(&self, head: &Head, tile: &mut Tile<V>, steps: usize) -> Vec<S::Wide> {
        let (given, state) = (self.given, self.given.problem.state);
        let (tiles, size) = (given.tiles(steps), head.rows.len() * state);
        let mut starts = vec![S::Wide::from_f64(0.0); tiles.len() * size];
        let mut sums = vec![S::Wide::from_f64(0.0); tile.input.len()];
        given.begin(head, &mut starts[..size.min(tiles.len() * size)]);
        for (i, time) in tiles.enumerate().skip(1) {
            let (before, next) = starts[(i - 1) * size..(i + 1) * size].split_at_mut(size);
            next.copy_from_slice(before);
            tile.read(given, head, time.start - steps..time.start);
            V::apart(Advance { tile: &mut *tile, states: next, sums: &mut sums });
        }
        starts
    }

    /// A head's buffers: cotangents of states, which start as `dlast_state` and end as `dinitial_state`, and `dD`.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    fn begin(&self, head: &Head, size: usize) -> (&mut [S::Wide], &mut [S::Wide]) {
        let (given, at) = (self.given, self.given.state_offset(head));
        let of_rows = (head.batch * given.problem.heads + head.index) * given.problem.width;
        // SAFETY: pieces share no head.
        let (carry, dd) = unsafe { (self.to.carry.part(at, size), self.to.dd.part(of_rows, given.problem.width)) };
        match self.dlast_state {
            Some(states) => carry.copy_from_slice(&states[at..at + size]),
            None => carry.fill(S::Wide::from_f64(0.0)),
        }
        (carry, dd)
    }

    /// Writes the gradients of a tile, and adds to those of `B`, `C` and `D`. Returns the tile's part of `dA`.
    #[inline(always)]
    fn write<V: Vector<Element = S::Wide>>(
        &self,
        head: &Head,
        time: Range<usize>,
        tile: &Tile<V>,
        back: &mut Back<V>,
        (skips, dd): (&[S::Wide], &mut [S::Wide]),
    ) -> S::Wide {
        let (given, rows, a) = (self.given, tile.rows, self.given.a[head.index]);
        let mut da = S::Wide::from_f64(0.0);
        for (step, t) in time.enumerate() {
            let in_tile = step * rows..(step + 1) * rows;
            let through_input =
                self.write_rows::<V>(given.offset(head, t), in_tile, tile.delta[step], back, (skips, &mut *dd));
            let through_decay = back.decays[step].sum();
            da = through_decay.mul_add(tile.delta[step], da);
            let ddelta = through_decay.mul_add(a, through_input);
            // SAFETY: pieces share no head.
            unsafe { put(&self.to.ddelta, given.step_offset(head, t), ddelta) };
            self.add_states(given.group_offset(head, t), step * tile.vectors..(step + 1) * tile.vectors, back);
            back.decays[step] = V::zero();
        }
        da
    }

    /// Adds the gradients of `B` and `C` of a step to those of the part, and clears them.
    #[inline(always)]
    fn add_states<V: Vector<Element = S::Wide>>(&self, at: usize, in_tile: Range<usize>, back: &mut Back<V>) {
        let (start, state) = (self.piece.part * self.given.b.len() + at, self.given.problem.state);
        for (shared, sums) in [(&self.to.db, &mut back.db), (&self.to.dc, &mut back.dc)] {
            // SAFETY: pieces share no part of a group.
            let to = unsafe { shared.part(start, state) };
            for (to, sum) in to.chunks_mut(V::LANES).zip(&mut sums[in_tile.clone()]) {
                sum.add(V::load_partial(to)).store_partial(to);
                *sum = V::zero();
            }
        }
    }

    /// Writes `dx` and `dz` of a step and adds to `dD`. Returns the part of `ddelta` that goes through the input.
    #[inline(always)]
    fn write_rows<V: Vector<Element = S::Wide>>(
        &self,
        start: usize,
        in_tile: Range<usize>,
        delta: S::Wide,
        back: &Back<V>,
        (skips, dd): (&[S::Wide], &mut [S::Wide]),
    ) -> S::Wide {
        let (given, count) = (self.given, in_tile.len());
        let [dinput, dy] = [&back.dinput, &back.dy].map(|of| &of[in_tile.clone()]);
        // SAFETY: pieces share no head.
        let dx = unsafe { self.to.dx.part(start, count) };
        let mut sum = V::zero();
        each_vector!(count, |at, end| {
            let x = S::load::<V>(&given.x[start + at..start + end]);
            let (dinput, dy) = (V::load_partial(&dinput[at..end]), V::load_partial(&dy[at..end]));
            sum = dinput.mul_add(x, sum);
            let through_skip = V::load_partial(&skips[at..end]).mul(dy);
            S::store(dinput.mul_add(V::splat(delta), through_skip), &mut dx[at..end]);
            dy.mul_add(x, V::load_partial(&dd[at..end])).store_partial(&mut dd[at..end]);
        });
        if let (Some(z), Some(dz)) = (given.z, &self.to.dz) {
            // SAFETY: as above.
            let dz = unsafe { dz.part(start, count) };
            let y = &back.y[in_tile];
            each_vector!(count, |at, end| {
                let z = S::load::<V>(&z[start + at..start + end]);
                let (x, dy) =
                    (S::load::<V>(&given.x[start + at..start + end]), S::load(&self.dy[start + at..start + end]));
                let y = V::load_partial(&skips[at..end]).mul_add(x, V::load_partial(&y[at..end]));
                S::store(y.mul(dy).mul(math::silu_slope(z)), &mut dz[at..end]);
            });
        }
        sum.sum()
    }
}

/// Writes one element.
///
/// # Safety
/// No other reference to this element may be alive.
unsafe fn put<W>(to: &Shared<W>, at: usize, number: W) {
    // SAFETY: as the caller promises.
    let part = unsafe { to.part(at, 1) };
    part[0] = number;
}

/// The workspace of the backward pass over a tile, laid out as [`Tile`].
struct Back<V: Vector> {
    /// `dy'` of all rows.
    dy: Vec<V::Element>,
    /// `sum_n g B` of all rows.
    dinput: Vec<V::Element>,
    /// `sum_n C S` of all rows.
    y: Vec<V::Element>,
    /// Sums over all rows.
    db: Vec<V>,
    dc: Vec<V>,
    /// `g a S[t-1]` of each step, summed over rows and vectors.
    decays: Vec<V>,
    /// Of one row, summed over vectors: `g B` and `C S`.
    sums: [Vec<V>; 2],
    /// The states that are processed together, before the first step and after each.
    states: Vec<V>,
}

/// Takes all rows backwards over a tile; `starts` are their states at the tile's start.
struct Backwards<'a, V: Vector> {
    back: &'a mut Back<V>,
    tile: &'a Tile<V>,
    starts: &'a [V::Element],
    carry: &'a mut [V::Element],
}

impl<V: Vector> Loops for Backwards<'_, V> {
    #[inline(always)]
    fn run(self) {
        let state = self.carry.len() / self.tile.rows.max(1);
        for row in 0..self.tile.rows {
            let range = row * state..(row + 1) * state;
            self.back.go(self.tile, row, &self.starts[range.clone()], &mut self.carry[range]);
        }
    }
}

/// The most vectors of states that are processed together, in registers.
const HELD: usize = 8;

impl<V: Vector> Back<V> {
    #[inline(always)]
    fn new(tile: &Tile<V>) -> Back<V> {
        let (steps, numbers) = (tile.steps, || vec![V::Element::from_f64(0.0); tile.input.len()]);
        let vectors = |count| vec![V::zero(); count];
        Back {
            dy: numbers(),
            dinput: numbers(),
            y: numbers(),
            db: vectors(steps * tile.vectors),
            dc: vectors(steps * tile.vectors),
            decays: vectors(steps),
            sums: [vectors(steps), vectors(steps)],
            states: vectors((steps + 1) * HELD),
        }
    }

    /// Reads `dy'` of a head over the range `time`.
    #[inline(always)]
    fn read<S: Storage<Wide = V::Element>>(&mut self, of: &Reverse<S>, head: &Head, time: Range<usize>) {
        let rows = head.rows.len();
        for (step, t) in time.enumerate() {
            let (from, to) = (of.given.offset(head, t), &mut self.dy[step * rows..][..rows]);
            each_vector!(rows, |at, end| {
                let mut dy = S::load::<V>(&of.dy[from + at..from + end]);
                if let Some(z) = of.given.z {
                    dy = dy.mul(math::silu(S::load::<V>(&z[from + at..from + end])));
                }
                dy.store_partial(&mut to[at..end]);
            });
        }
    }

    /// Takes a row backwards over the tile; `starts` are its states at the tile's start.
    #[inline(always)]
    fn go(&mut self, tile: &Tile<V>, row: usize, starts: &[V::Element], carry: &mut [V::Element]) {
        for sums in &mut self.sums {
            sums[..tile.steps].fill(V::zero());
        }
        held!(tile.vectors, |first, K| {
            let end = starts.len().min((first + K) * V::LANES);
            self.forwards::<K>(tile, row, first, &starts[first * V::LANES..end]);
            self.backwards::<K>(tile, row, first, part::<V, K>(carry, first));
        });
        write_sums(&self.sums[0][..tile.steps], &mut self.dinput[row..], tile.rows);
        write_sums(&self.sums[1][..tile.steps], &mut self.y[row..], tile.rows);
    }

    /// Recomputes `K` vectors of states over the tile, and keeps them for all steps.
    #[inline(always)]
    fn forwards<const K: usize>(&mut self, tile: &Tile<V>, row: usize, first: usize, starts: &[V::Element]) {
        let mut held = load::<V, K>(starts);
        self.states[..K].copy_from_slice(&held);
        for step in 0..tile.steps {
            let b = chunk::<V, K>(&tile.b, step * tile.vectors + first);
            let (decay, input) = (V::splat(tile.decay[step]), V::splat(tile.input[step * tile.rows + row]));
            unrolled!(k < K, {
                held[k] = input.mul_add(b[k], decay.mul(held[k]));
            });
            self.states[(step + 1) * K..][..K].copy_from_slice(&held);
        }
    }

    #[inline(always)]
    fn backwards<const K: usize>(&mut self, tile: &Tile<V>, row: usize, first: usize, carry: &mut [V::Element]) {
        let mut held = load::<V, K>(carry);
        for step in (0..tile.steps).rev() {
            let at = step * tile.vectors + first;
            let (b, c) = (chunk::<V, K>(&tile.b, at), chunk::<V, K>(&tile.c, at));
            let (before, after) = (chunk::<V, K>(&self.states, step * K), chunk::<V, K>(&self.states, (step + 1) * K));
            let (db, dc) = (&mut self.db[at..][..K], &mut self.dc[at..][..K]);
            let (decay, input) = (V::splat(tile.decay[step]), V::splat(tile.input[step * tile.rows + row]));
            let dy = V::splat(self.dy[step * tile.rows + row]);
            let (mut dinput, mut y, mut decays) = (self.sums[0][step], self.sums[1][step], self.decays[step]);
            unrolled!(k < K, {
                let g = dy.mul_add(c[k], held[k]);
                held[k] = decay.mul(g);
                dinput = g.mul_add(b[k], dinput);
                y = c[k].mul_add(after[k], y);
                decays = held[k].mul_add(before[k], decays);
                db[k] = input.mul_add(g, db[k]);
                dc[k] = dy.mul_add(after[k], dc[k]);
            });
            (self.sums[0][step], self.sums[1][step], self.decays[step]) = (dinput, y, decays);
        }
        store(&held, carry);
    }
}

/// Sums `dD` over batches: for each row, or for all rows of a head.
fn of_skips<W: Real>(problem: &Problem, dd: &[W], to: &mut [W], exec: &Exec) -> Result<()> {
    if problem.wide_skip {
        return sum::columns::<W>(dd, to, exec);
    }
    let of_head = |i: usize| {
        let rows = &dd[i * problem.width..][..problem.width];
        rows.iter().fold(W::from_f64(0.0), |sum, &row| sum.add(row))
    };
    let heads: Vec<W> = (0..problem.batch * problem.heads).map(of_head).collect();
    sum::columns::<W>(&heads, to, exec)
}

/// `ddt` and `ddt_bias`.
fn of_steps<S: Storage>(given: &Given<S>, ddelta: &[S::Wide], mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let ddt = Shared::new(outputs.expect("ddt")?.slice::<S>()?);
    let [rows, heads] = given.steps_and_heads();
    let sums = rows::with_sums([rows, heads], heads, exec, |rows, dbias: &mut [S::Wide]| {
        S::Wide::dispatch(exec.level, OfSteps { given, ddelta, rows, ddt: &ddt, dbias });
    })?;
    if let Some(to) = outputs.take("ddt_bias") {
        to.slice()?.copy_from_slice(&sums);
    }
    Ok(())
}

struct OfSteps<'a, S: Storage> {
    given: &'a Given<'a, S>,
    ddelta: &'a [S::Wide],
    rows: Range<usize>,
    ddt: &'a Shared<'a, S>,
    dbias: &'a mut [S::Wide],
}

impl<S: Storage> Work<S::Wide> for OfSteps<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (given, heads) = (self.given, self.given.problem.heads);
        let sizes = Lanes::<V>::new(&given.problem.step_size);
        for row in self.rows {
            // SAFETY: pieces share no row.
            let ddt = unsafe { self.ddt.part(row * heads, heads) };
            each_vector!(heads, |at, end| {
                let (_, slope) = sizes.delta_and_slope(given.raw(row, at, end));
                let value = V::load_partial(&self.ddelta[row * heads..][at..end]).mul(slope);
                S::store(value, &mut ddt[at..end]);
                value.add(V::load_partial(&self.dbias[at..end])).store_partial(&mut self.dbias[at..end]);
            });
        }
    }
}
