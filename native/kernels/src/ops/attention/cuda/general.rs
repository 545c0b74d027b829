//! Attention by plain multiply-adds: any type, width, mask and bias.

use super::super::Problem;
use super::{Call, Launch, Own, Params, Real, grid};
use crate::cuda::{Source, columns};
use crate::error::Result;
use crate::tensor::{DType, Described, Spec};

const FORWARD: Source<Params<()>> = Source::new(
    "attention_general",
    concat!(
        include_str!("../common.cu"),
        include_str!("../score.cu"),
        include_str!("../general.cu"),
        include_str!("../general_forward.cu")
    ),
);
const BACKWARD_TEXT: &str = concat!(
    include_str!("../common.cu"),
    include_str!("../score.cu"),
    include_str!("../general.cu"),
    include_str!("../general_backward.cu")
);
const BACKWARD: Source<Params<()>> = Source::new("attention_general_backward", BACKWARD_TEXT);
const DBIAS: Source<Params<()>> = Source::new("attention_dbias", BACKWARD_TEXT);

const THREADS: usize = 128;

/// Blocks per multiprocessor that keep it busy in the sum for `dbias`.
const BUSY: usize = 4;

/// The output of a launch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Forward,
    Dq,
    Dk,
    Dv,
    Dbias,
}

/// The sizes of a block's tiles; the names are those of the macros in `general.cu`.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    cols: usize,
    chunk: usize,
    slice: usize,
    whole: bool,
}

impl Tile {
    /// The largest tiles that fit in the device's shared memory.
    fn choose(problem: &Problem, role: Role, shared: usize) -> Tile {
        let unit = 16 / problem.dtype.wide().size();
        let widest = if problem.dtype == DType::F64 { 64 } else { 128 };
        let chunks = [widest, widest / 2, widest / 4].map(|most| Tile::of(problem, role, most, unit));
        let fits = |tile: &Tile| tile.shared(problem, role) <= shared;
        chunks.into_iter().find(fits).unwrap_or(chunks[2])
    }

    fn of(problem: &Problem, role: Role, most: usize, unit: usize) -> Tile {
        let Problem { queries, keys, width, value_width, .. } = *problem;
        let summed = if matches!(role, Role::Forward | Role::Dv) { value_width } else { width };
        let inner = if role == Role::Forward { width } else { width.max(value_width) };
        let own = if matches!(role, Role::Dk | Role::Dv) { keys } else { queries };
        let slice = summed.clamp(1, most).next_multiple_of(8 * unit);
        // Tiles that are also multiplied by weights must consist of whole runs of columns.
        let chunk = inner.clamp(1, most).next_multiple_of(8 * unit);
        let most_rows = if role == Role::Forward && unit == 4 && slice <= 64 { 8 } else { 4 };
        let rows = own.div_ceil(16).next_power_of_two().min(most_rows);
        Tile { rows, cols: 4, chunk, slice, whole: inner <= chunk && role != Role::Dbias }
    }

    fn own(&self) -> usize {
        16 * self.rows
    }

    fn other(&self) -> usize {
        8 * self.cols
    }

    /// Bytes of shared memory, as the kernel computes them.
    fn shared(&self, problem: &Problem, role: Role) -> usize {
        let size = problem.dtype.wide().size();
        let leading = |width: usize| width + 16 / size;
        let pair = (self.own() + self.other()) * leading(self.chunk);
        let (weighted, x) = (self.other() * leading(self.slice), self.own() * leading(self.other()));
        let elements = match role {
            Role::Dbias => pair,
            Role::Dq | Role::Dk | Role::Dv if self.whole => 2 * pair + x,
            _ => pair + weighted + x,
        };
        elements * size
    }

    fn options<R: Real>(&self, call: &Call<R>, role: Role) -> String {
        let Tile { rows, cols, chunk, slice, whole } = *self;
        let Problem { mask, bias, dtype, .. } = call.problem;
        // Values that are widened on the way into shared memory cannot be copied asynchronously.
        let copy = if *dtype == dtype.wide() { call.copy } else { 0 };
        let yes = |flag: bool| u32::from(flag);
        let role = match role {
            Role::Forward => "",
            Role::Dq => "-DROLE=DQ",
            Role::Dk => "-DROLE=DK",
            Role::Dv => "-DROLE=DV",
            Role::Dbias => "-DROLE=DBIAS",
        };
        format!(
            "{} -DCOPY={copy} -DROWS={rows} -DCOLS={cols} -DCHUNK={chunk} -DSLICE={slice} -DWHOLE={} \
             -DTHREADS={THREADS} -DHAS_MASK={} -DHAS_BIAS={} {role}",
            call.options(),
            yes(whole),
            yes(mask.is_some()),
            yes(bias.is_some()),
        )
    }
}

/// Queues attention.
pub(super) fn forward<R: Real>(call: &Call<R>) -> Result<()> {
    launch(call, Role::Forward)
}

/// Queues the gradient.
pub(super) fn backward<R: Real>(call: &Call<R>) -> Result<()> {
    [Role::Dq, Role::Dk, Role::Dv].into_iter().try_for_each(|role| launch(call, role))?;
    dbias(call)
}

fn tile<R: Real>(call: &Call<R>, role: Role) -> Tile {
    Tile::choose(call.problem, role, call.lane.device().facts().shared as usize)
}

fn launch<R: Real>(call: &Call<R>, role: Role) -> Result<()> {
    let tile = tile(call, role);
    let summed = if matches!(role, Role::Forward | Role::Dv) { call.problem.value_width } else { call.problem.width };
    if summed == 0 && role != Role::Forward {
        return Ok(());
    }
    call.launch(&Launch {
        source: if role == Role::Forward { &FORWARD } else { &BACKWARD },
        options: tile.options(call, role),
        threads: THREADS,
        shared: tile.shared(call.problem, role),
        own: if matches!(role, Role::Dk | Role::Dv) { Own::Keys } else { Own::Queries },
        rows: tile.own(),
        slices: summed.div_ceil(tile.slice).max(1),
        most: u32::MAX,
    })
}

/// Queues the gradient of the bias: each block sums over the axes along which its elements are broadcast. Where that
/// makes too few blocks, the sum is divided into parts, which are added up in order.
fn dbias<R: Real>(call: &Call<R>) -> Result<()> {
    let (Some(strides), Some(dbias)) = (call.problem.bias, call.dbias) else { return Ok(()) };
    let elements = dbias.spec().shape.elements();
    if elements == 0 {
        return Ok(());
    }
    let tile = tile(call, Role::Dbias);
    let Problem { batch, heads, queries, keys, .. } = *call.problem;
    let axes = [batch, heads, queries.div_ceil(tile.own()), keys.div_ceil(tile.other())];
    let product = |own: bool| axes.iter().zip(strides).filter(|(_, s)| (*s > 0) == own).map(|(n, _)| n).product();
    let (places, items): (usize, usize) = (product(true), product(false));
    let busy = BUSY * call.lane.device().facts().multiprocessors as usize;
    let parts = (busy / places.max(1)).clamp(1, items.max(1));
    let sums = call.lane.temporary(Spec::new(dbias.spec().dtype, &[if parts > 1 { parts } else { 0 }, elements])?)?;
    let to = if parts > 1 { call.lane.address(&sums)? } else { call.params.dbias };
    let params = Params { dbias: to, parts: parts as i32, ..call.params };
    let kernel = call.lane.device().kernel(&DBIAS, &tile.options(call, Role::Dbias))?;
    let (grid, shared) = ([grid(places * parts)?, 1, 1], tile.shared(call.problem, Role::Dbias) as u32);
    // SAFETY: as for all launches; each part has the size of the gradient, and every element of it is written.
    unsafe { call.lane.launch_with(&kernel, grid, THREADS as u32, shared, &params)? };
    if parts > 1 { columns(&sums, parts, dbias, call.lane) } else { Ok(()) }
}
