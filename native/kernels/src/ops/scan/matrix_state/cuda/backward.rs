//! The gradient on CUDA: in chunks on tensor cores, or step by step. The recurrence and that of its cotangents need sums
//! over keys, `dq` and `dk` sums over values; so each of four passes goes through time with the layout that keeps its sums
//! in a few lanes:
//!
//! ```text
//! columns, forwards     e                                  from S
//! columns, backwards    de                                 from G, the cotangent of S
//! rows, forwards        S dy and -a S[t-1] (beta de)       from S, as its inputs beta e are known
//! rows, backwards       G (beta e)                         from G, as its inputs beta de are known
//! ```
//!
//! Only the states after chunks of [`CHUNK`](super::CHUNK) steps are kept: there `dg` is the inner product of a state
//! and its cotangent. Within a chunk
//!
//! ```text
//! dg[t] = dg[t+1] + y[t] . dy[t] - dv[t] . v[t]            dg[L+1] = sum dlast_state S[L]
//! ```
//!
//! since the two sides of a step give `sum G'[t] (a S[t-1]) = sum G[t] S[t] - dv . v`. So the error of `dg` is relative
//! to the largest terms of its chunk, also where decays leave little of `dg` itself.
//!
//! Without the delta rule the inputs of states and cotangents are `v` and `dy`: three passes do, without the first one, and
//! the second gives `dv` itself. As `sum G S` over values is known for each key there, so is `dg`:
//!
//! ```text
//! dg[t] = dg[t+1] + q[t] * dq[t] - k[t] * dk[t]            dg[L+1] = sum dlast_state * S[L]
//! ```

use super::{Call, Chunked, Params, Wanted};
use crate::cuda::{Buffer, Lane, Source, launch_each};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::matrix_state::{Form, Problem};
use crate::ops::scan::sequences::Sequences;
use crate::tensor::{DType, Spec};
use std::ops::Range;

const ROWS: Source<Params> =
    Source::new("matrix_state_rows", concat!(include_str!("../staged.cu"), include_str!("../rows.cu")));
const FINISH: Source<Params> = Source::new("matrix_state_finish", include_str!("../finish.cu"));
const GATES: Source<Params> = Source::new("matrix_state_gates", include_str!("../gates.cu"));
const KEY_GATES: Source<Params> = Source::new("matrix_state_key_gates", include_str!("../key_gates.cu"));

/// The most lanes that share a row.
const MOST_PARTS: usize = 4;

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call::new(problem, inputs, outputs, lane)?;
    if let Some(chunked) = Chunked::of(call, call.of_batch()) {
        return chunked?.backward();
    }
    let mut call = call.with_first_states()?;
    let rows = Rows::new(problem);
    let temporary = Temporary::new(&call, &rows)?;
    temporary.show(&mut call, &rows)?;
    if problem.form == Form::Delta {
        call.columns(Wanted::Errors)?;
    }
    call.columns(Wanted::Cotangents)?;
    call.rows(&rows, 0)?;
    call.rows(&rows, 1)?;
    call.finish(true)?;
    call.gates()
}

/// Queues the gradient of a packed call, if it runs in chunks.
pub fn backward_packed(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: &[Range<usize>],
    lane: &Lane,
) -> Result<bool> {
    let call = Call::new(problem, inputs, outputs, lane)?;
    Chunked::of(call, Sequences::Packed(steps)).map_or(Ok(false), |chunked| chunked?.backward().map(|()| true))
}

impl Call<'_> {
    /// Queues `rows.cu`.
    fn rows(&self, rows: &Rows, backward: u32) -> Result<()> {
        let Rows { rows, columns, parts, slices } = *rows;
        let Problem { batch, heads, keys, dtype, form, .. } = *self.problem;
        let options = format!("-DROWS={rows} -DCOLUMNS={columns} -DPARTS={parts} -DBACKWARD={backward}");
        let apart = columns + 16 / dtype.wide().size();
        let sequences = if form == Form::Delta { 3 } else { 2 };
        let decays = if form == Form::ByKey { rows } else { 1 };
        let of_step = sequences * parts * apart + 2 * rows + decays;
        self.staged(&ROWS, &options, batch * heads * slices * keys.div_ceil(rows), [rows * parts / 32, of_step])
    }

    /// Queues the kernel that adds up partial sums of the gradients of `q` and `k`: with `values` those of the passes over
    /// steps, from whose errors it also computes `dv`, `dbeta` and what `dg` changes by.
    pub fn finish(&self, values: bool) -> Result<()> {
        let Problem { batch, length, groups, keys, .. } = *self.problem;
        let each = keys.div_ceil(32).next_power_of_two();
        let options = format!("{} -DEACH={each} -DVALUES={}", self.options(), u32::from(values));
        let kernel = self.lane.device().kernel(&FINISH, &options)?;
        // SAFETY: the op's checks prove the sizes of its tensors, and temporary buffers are allocated for them.
        unsafe { launch_each(self.lane, &kernel, 32 * batch * length * groups, &self.params) }
    }

    /// Queues the kernel that computes `dg` from its changes.
    fn gates(&self) -> Result<()> {
        if self.params.g == 0 {
            return Ok(());
        }
        let by_key = self.problem.form == Form::ByKey;
        let (source, each) = if by_key { (&KEY_GATES, self.problem.keys) } else { (&GATES, 32) };
        let kernel = self.lane.device().kernel(source, &self.options())?;
        let chunks = self.problem.batch * self.problem.heads * self.params.chunks as usize;
        // SAFETY: as above.
        unsafe { launch_each(self.lane, &kernel, each * chunks, &self.params) }
    }
}

/// How the rows of states are spread over lanes.
struct Rows {
    /// Rows of a block.
    rows: usize,
    /// Columns of a lane, lanes of a row, and slices of a row, each with its own partial sums.
    columns: usize,
    parts: usize,
    slices: usize,
}

impl Rows {
    fn new(problem: &Problem) -> Rows {
        let most = if problem.dtype == DType::F64 { 32 } else { 64 };
        let columns = problem.values.next_power_of_two().clamp(4, most);
        let parts = problem.values.div_ceil(columns).next_power_of_two().clamp(1, MOST_PARTS);
        let rows = if problem.keys <= 32 { 32 } else { 64 };
        Rows { rows, columns, parts, slices: problem.values.div_ceil(columns * parts) }
    }
}

/// Buffers that the kernels pass on to each other.
struct Temporary {
    errors: [Buffer; 2],
    factors: [Buffer; 2],
    sums: [Buffer; 3],
    ends: Buffer,
    products: Buffer,
    changes: Buffer,
}

impl Temporary {
    fn new(call: &Call, rows: &Rows) -> Result<Temporary> {
        let Problem { batch, length, heads, groups, keys, values, form, .. } = *call.problem;
        let Params { g, chunks, products_each, .. } = call.params;
        let delta = form == Form::Delta;
        let numbers = |dims: &[usize]| call.lane.temporary(Spec::new(call.problem.dtype.wide(), dims)?);
        let errors = || numbers(&[batch, length, if delta { heads } else { 0 }, values]);
        let of_groups = if call.problem.qk_l2norm { groups } else { 0 };
        let factors = || numbers(&[batch, length, of_groups]);
        let sums = |there: bool| numbers(&[rows.slices, batch, length, if there { heads } else { 0 }, keys]);
        // Without `g` there is no `dg`, and the buffers for it are empty.
        let (gated, chunks) = (if g != 0 { heads } else { 0 }, chunks as usize);
        let products = if delta { products_each as usize } else { rows.slices * keys };
        Ok(Temporary {
            errors: [errors()?, errors()?],
            factors: [factors()?, factors()?],
            sums: [sums(true)?, sums(delta)?, sums(true)?],
            ends: numbers(&[batch, gated, chunks, keys, values])?,
            products: numbers(&[batch, gated, chunks, products])?,
            changes: numbers(&[batch, length, gated, call.problem.decays()])?,
        })
    }

    /// Sets the call's parameters to the addresses of these buffers.
    fn show(&self, call: &mut Call, rows: &Rows) -> Result<()> {
        let at = |buffer: &Buffer| call.lane.address(buffer);
        let params = Params {
            errors: at(&self.errors[0])?,
            derrors: at(&self.errors[1])?,
            q_factors: at(&self.factors[0])?,
            k_factors: at(&self.factors[1])?,
            sums: [at(&self.sums[0])?, at(&self.sums[1])?, at(&self.sums[2])?],
            ends: at(&self.ends)?,
            products: at(&self.products)?,
            changes: at(&self.changes)?,
            slices: rows.slices as i32,
            ..call.params
        };
        call.params = params;
        Ok(())
    }
}
