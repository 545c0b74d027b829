//! Training on CUDA.

use super::Update;
use super::learn::ByRow;
use sidewinder_kernels::cuda::{
    Buffer, Declared, Kernel, Lane, Source, THREADS, grid_size, launch_each, params, types,
};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::{DType, Described, Spec};

/// Blocks of the sum of squares; each writes a partial sum.
const BLOCKS: usize = 512;

/// The kernel of `train.cu` that `define` selects, for the types of a tensor.
fn kernel<P: Declared>(name: &'static str, define: &str, of: &Buffer, lane: &Lane) -> Result<Kernel<P>> {
    let source = Source::new(name, include_str!("train.cu"));
    lane.device().kernel(&source, &format!("{} -D{define}=1 -DTHREADS={THREADS}", types(of.spec().dtype)))
}

fn uploaded(numbers: &[u32], lane: &Lane) -> Result<Buffer> {
    let buffer = lane.temporary(Spec::new(DType::U8, &[size_of_val(numbers)])?)?;
    lane.upload(bytemuck::cast_slice(numbers), &buffer)?;
    Ok(buffer)
}

/// The sum of all elements. Waits for the lane.
fn sum(of: &Buffer, lane: &Lane) -> Result<f64> {
    Ok(lane.downloaded(of)?.view().to_f64().sum())
}

/// Runs `$body` with the type of the arithmetic as `$real`.
macro_rules! reals {
    ($dtype:expr, $real:ident => $body:expr) => {
        match $dtype.wide() {
            DType::F64 => {
                type $real = f64;
                $body
            }
            _ => {
                type $real = f32;
                $body
            }
        }
    };
}

params! {
    struct Entropy<R> {
        logits: u64 as "STORAGE*",
        targets: u64 as "const unsigned*",
        losses: u64 as "REAL*",
        rows: i64,
        width: i64,
        scale: R, // of the gradient that replaces the logits; 0: no gradient
    }
}

pub fn cross_entropy(logits: Buffer, targets: &[u32], scale: Option<f64>, lane: &Lane) -> Result<f64> {
    let (rows, dtype) = (targets.len(), logits.spec().dtype);
    let losses = lane.temporary(Spec::new(dtype.wide(), &[rows])?)?;
    let numbers = uploaded(targets, lane)?;
    let addresses = [&logits, &numbers, &losses].map(|buffer| lane.address(buffer));
    let [logits_at, targets_at, losses_at] = addresses;
    let width = (logits.spec().shape.elements() / rows.max(1)) as i64;
    let kernel = kernel("cross_entropy", "ENTROPY", &logits, lane)?;
    let blocks = grid_size(rows.div_ceil(THREADS as usize / 32))?;
    reals!(dtype, R => {
        let params = Entropy {
            logits: logits_at?,
            targets: targets_at?,
            losses: losses_at?,
            rows: rows as i64,
            width,
            scale: scale.unwrap_or(0.0) as R,
        };
        // SAFETY: targets are columns, as the caller has checked.
        unsafe { lane.launch(&kernel, [blocks, 1, 1], THREADS, &params) }
    })?;
    sum(&losses, lane)
}

params! {
    struct Scatter {
        from: u64 as "const REAL*",
        starts: u64 as "const unsigned*", // of each row of the table in `order`, and the end of the last
        order: u64 as "const unsigned*",
        to: u64 as "REAL*",
        width: i64,
    }
}

pub fn scatter(from: &Buffer, rows: &ByRow, to: Buffer, lane: &Lane) -> Result<()> {
    let (starts, order) = (uploaded(&rows.starts, lane)?, uploaded(&rows.order, lane)?);
    let count = rows.starts.len() - 1;
    let params = Scatter {
        from: lane.address(from)?,
        starts: lane.address(&starts)?,
        order: lane.address(&order)?,
        to: lane.address(&to)?,
        width: (to.spec().shape.elements() / count.max(1)) as i64,
    };
    let kernel = kernel("scatter", "SCATTER", from, lane)?;
    // SAFETY: rows and table have these sizes.
    unsafe { lane.launch(&kernel, [grid_size(count)?, 1, 1], THREADS, &params) }
}

params! {
    struct Squares {
        of: u64 as "const REAL*",
        sums: u64 as "REAL*", // a partial sum of each block
        count: i64,
    }
}

pub fn squares(of: &Buffer, lane: &Lane) -> Result<f64> {
    let sums = lane.temporary(Spec::new(of.spec().dtype, &[BLOCKS])?)?;
    let params =
        Squares { of: lane.address(of)?, sums: lane.address(&sums)?, count: of.spec().shape.elements() as i64 };
    let kernel = kernel("squares", "SQUARES", of, lane)?;
    // SAFETY: each block writes one sum.
    unsafe { lane.launch(&kernel, [BLOCKS as u32, 1, 1], THREADS, &params) }?;
    sum(&sums, lane)
}

params! {
    struct Changing<R> {
        weights: u64 as "REAL*",
        means: u64 as "REAL*",
        squares: u64 as "REAL*",
        gradient: u64 as "const REAL*",
        count: i64,
        decayed: i64,
        scale: R,
        beta1: R,
        beta2: R,
        rate: R,
        correction: R,
        eps: R,
        keep: R,
    }
}

pub fn update(changed: [Buffer; 3], gradient: &Buffer, update: &Update, lane: &Lane) -> Result<()> {
    let Update { scale, beta1, beta2, rate, correction, eps, keep, decayed } = *update;
    let count = gradient.spec().shape.elements();
    let kernel = kernel("update", "UPDATE", gradient, lane)?;
    let [weights, means, squares] = changed.each_ref().map(|buffer| lane.address(buffer));
    reals!(gradient.spec().dtype, R => {
        let params = Changing {
            weights: weights?,
            means: means?,
            squares: squares?,
            gradient: lane.address(gradient)?,
            count: count as i64,
            decayed: decayed as i64,
            scale: scale as R,
            beta1: beta1 as R,
            beta2: beta2 as R,
            rate: rate as R,
            correction: correction as R,
            eps: eps as R,
            keep: keep as R,
        };
        // SAFETY: all tensors have `count` elements.
        unsafe { launch_each(lane, &kernel, count, &params) }
    })
}
