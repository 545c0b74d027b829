//! Linear attention on CUDA: the recurrence is that of [`matrix_state`]. Calls that need `z` go over `v`, `y` and the
//! states once more before and after it: `z.cu`.

use super::z::{self, Columns, Pass};
use super::{EPS, Problem};
use crate::cuda::{Buffer, Lane, Source, launch_each, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::matrix_state;
use crate::place::Cuda;
use crate::tensor::{DType, Described};

const TEXT: &str = include_str!("z.cu");
const APPEND: Source<Params> = Source::new("linear_attention_append", TEXT);
const SPLIT: Source<Params> = Source::new("linear_attention_split", TEXT);
const COTANGENTS: Source<Params> = Source::new("linear_attention_cotangents", TEXT);

params! {
    /// The parameters of passes over rows.
    #[derive(Default)]
    struct Params {
        rows: i64,
        width: i32, // without the number more
        more: i32,
        wide_from: u64 as "const REAL*",
        last_from: u64 as "const REAL*",
        from: u64 as "const STORAGE*",
        wide_to: u64 as "REAL*",
        last_to: u64 as "REAL*",
        to: u64 as "STORAGE*",
        otherwise: f64,
    }
}

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    if problem.needs_z(inputs, outputs) {
        return z::forward(&Cuda(lane), problem, &owned(inputs), owned(outputs));
    }
    matrix_state::cuda::forward(&problem.of_values, inputs, outputs, lane)
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    if problem.needs_z(inputs, outputs) {
        return z::backward(&Cuda(lane), problem, &owned(inputs), owned(outputs));
    }
    matrix_state::cuda::backward(&problem.of_values, inputs, outputs, lane)
}

fn owned(buffers: &Named<&Buffer>) -> Named<Buffer> {
    buffers.map(|buffer| (*buffer).clone())
}

impl Columns for Cuda<'_> {
    fn recurrence(
        &self,
        problem: &matrix_state::Problem,
        inputs: &Named<Buffer>,
        outputs: Named<Buffer>,
    ) -> Result<()> {
        matrix_state::cuda::forward(problem, &inputs.as_ref(), &outputs.as_ref(), self.0)
    }

    fn gradient(&self, problem: &matrix_state::Problem, inputs: &Named<Buffer>, outputs: Named<Buffer>) -> Result<()> {
        matrix_state::cuda::backward(problem, &inputs.as_ref(), &outputs.as_ref(), self.0)
    }

    fn append(&self, from: Option<&Buffer>, last: Option<&Buffer>, otherwise: f64, to: Buffer) -> Result<()> {
        let pass = Pass::new(to.spec(), from.map(Described::spec));
        let addresses = Params {
            from: self.at(from)?,
            last_from: self.at(last)?,
            wide_to: self.at(Some(&to))?,
            ..Params::default()
        };
        let params = Params { otherwise, ..addresses };
        let storage = from.unwrap_or(&to).spec().dtype;
        self.pass(&APPEND, storage, false, pass, pass.rows * pass.wide(), params)
    }

    fn split(&self, from: &Buffer, divide: bool, to: Option<Buffer>, last: Option<Buffer>) -> Result<()> {
        let (to, last) = (to.as_ref(), last.as_ref());
        let pass = Pass::new(from.spec(), to.map(Described::spec));
        let params =
            Params { wide_from: self.at(Some(from))?, to: self.at(to)?, last_to: self.at(last)?, ..Params::default() };
        let storage = to.unwrap_or(from).spec().dtype;
        self.pass(&SPLIT, storage, divide, pass, pass.rows * pass.wide(), params)
    }

    fn cotangents(&self, products: &Buffer, dy: &Buffer, divide: bool, to: Buffer) -> Result<()> {
        let pass = Pass::new(products.spec(), Some(dy.spec()));
        let params = Params {
            wide_from: self.at(Some(products))?,
            from: self.at(Some(dy))?,
            wide_to: self.at(Some(&to))?,
            ..Params::default()
        };
        self.pass(&COTANGENTS, dy.spec().dtype, divide, pass, 32 * pass.rows, params)
    }
}

impl Cuda<'_> {
    /// The address of a buffer; 0 without one.
    fn at(&self, buffer: Option<&Buffer>) -> Result<u64> {
        buffer.map_or(Ok(0), |buffer| self.0.address(buffer))
    }

    /// Queues a pass over rows with `threads` threads.
    fn pass(
        &self,
        source: &Source<Params>,
        storage: DType,
        divide: bool,
        Pass { rows, width, more }: Pass,
        threads: usize,
        params: Params,
    ) -> Result<()> {
        let params = Params { rows: rows as i64, width: width as i32, more: i32::from(more), ..params };
        let options = format!("{} -DEPS={EPS:e} -DDIVIDE={}", types(storage), u32::from(divide));
        let kernel = self.0.device().kernel(source, &options)?;
        // SAFETY: the tensors have the rows of the pass, and rows have the widths that it states.
        unsafe { launch_each(self.0, &kernel, threads, &params) }
    }
}
