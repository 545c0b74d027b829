//! Products with ternary weights: activations are made ready, and sums become results.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::products::{Activations, Call, Results, WORTH_SHARING, run};
use super::quantize::{by_bits, bytes, in_f32, signs, vector};
use super::wide::WORD;
use crate::base::scratch::Scratch;
use crate::chunks::Chunks;
use crate::cpu::convert::Widened;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Epilogue, Exec, Level, Scaled, Storage};
use crate::error::Result;
use crate::op::Named;
#[cfg(target_arch = "x86_64")]
use crate::ops::products::outputs_per_task;
#[cfg(target_arch = "x86_64")]
use crate::ops::products::ternary::problem::plane_bytes;
use crate::ops::products::ternary::problem::{Form, Product};
use crate::ops::products::with_type_in_f32;
use crate::tensor::{Element, View, ViewMut};

/// Multiplies on the CPU.
pub fn matmul(problem: &Product, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let y = outputs.take("y");
    with_type_in_f32!(problem.dtype, S => matmul_to::<S>(problem, inputs, y, outputs, exec))
}

fn matmul_to<S: Storage<Wide = f32>>(
    problem: &Product,
    inputs: &Named<View>,
    y: Option<ViewMut>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let of = |name: &str| inputs.find(name).map(View::slice::<f32>).transpose();
    let acc = outputs.take("acc").map(ViewMut::slice::<i32>).transpose()?.map(Shared::new);
    let activation = problem.options.activation;
    let then = Epilogue { bias: of("bias")?, activation };
    let mut results = Results::<S> {
        epilogue: Scaled { rows: None, columns: of("w_scale")?, then },
        // Functions of vectors differ in their last bits between levels, but results do not.
        level: if activation.is_none() { exec.level } else { Level::Scalar },
        outs: problem.outs,
        acc,
        y: y.map(ViewMut::slice::<S>).transpose()?.map(Shared::new),
    };
    let planes = [inputs.get("plane0")?.bytes(), inputs.get("plane1")?.bytes()];
    let call = |stride, x| Call { n: problem.n, stride, rows: problem.rows, planes, x };
    match problem.form {
        Form::I8 => {
            let bytes = Bytes::new(problem, inputs, outputs, exec)?;
            results.epilogue.rows = Some(&bytes.scales);
            #[cfg(target_arch = "x86_64")]
            if exec.level == Level::Amx && problem.rows >= amx::ROWS {
                return by_tiles(problem, &bytes.q, planes, &results, exec);
            }
            let (stride, x, sums) = bytes.by_bits(problem, exec)?;
            run(&call(stride, Activations::Bytes { x: &x, sums: &sums }), &results, exec)
        }
        Form::Ternary => {
            let (stride, planes) = padded_signs(problem, inputs, exec)?;
            run(&call(stride, Activations::Signs { planes: [&planes[0], &planes[1]] }), &results, exec)
        }
        Form::F32 => {
            let (stride, x) = padded_floats(problem, inputs, exec)?;
            run(&call(stride, Activations::Floats { x: &x }), &results, exec)
        }
    }
}

/// Copies rows of `width` elements to rows of `stride`, padded with zeros.
fn padded<T: Element + Default>(from: &[T], rows: usize, width: usize, stride: usize) -> Result<Scratch<T>> {
    let mut padded = Scratch::any(rows * stride)?;
    for row in 0..rows {
        let (values, padding) = padded[row * stride..][..stride].split_at_mut(width);
        values.copy_from_slice(&from[row * width..][..width]);
        padding.fill(T::default());
    }
    Ok(padded)
}

/// The floats, with rows padded to whole words.
fn padded_floats<'a>(problem: &Product, inputs: &Named<View<'a>>, exec: &Exec) -> Result<(usize, Widened<'a, f32>)> {
    let (x, stride) = (in_f32(inputs.get("x")?, exec)?, problem.n.next_multiple_of(WORD));
    let fits = stride == problem.n;
    Ok((stride, if fits { x } else { Widened::Copied(padded(&x, problem.rows, problem.n, stride)?) }))
}

/// Activations quantized to bytes, and the scale of each row.
struct Bytes {
    q: Vec<i8>,
    scales: Vec<f32>,
}

impl Bytes {
    fn new(problem: &Product, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<Bytes> {
        let Product { rows, n, .. } = *problem;
        let (mut q, mut scales) = (vec![0i8; rows * n], vec![0f32; rows]);
        bytes(&problem.activations(), &in_f32(inputs.get("x")?, exec)?, &mut q, &mut scales, exec)?;
        if let Some(xq) = outputs.take("xq") {
            xq.slice()?.copy_from_slice(&q);
            outputs.expect("x_scale")?.slice()?.copy_from_slice(&scales);
        }
        Ok(Bytes { q, scales })
    }

    /// The rows in the order of [`by_bits`], how long one of them is, and their sums.
    fn by_bits(&self, problem: &Product, exec: &Exec) -> Result<(usize, Vec<i8>, Vec<i32>)> {
        let Product { rows, n, .. } = *problem;
        let vector = vector(exec.level);
        let stride = n.next_multiple_of(8 * vector);
        let (mut x, mut sums) = (vec![0i8; rows * stride], vec![0i32; rows]);
        {
            let (x, sums) = (Shared::new(&mut x), Shared::new(&mut sums));
            pool::for_each(pool::worth(exec.threads, rows * n, WORTH_SHARING / 32), rows, |row| {
                // SAFETY: rows share no element.
                let (to, sum) = unsafe { (x.part(row * stride, stride), sums.part(row, 1)) };
                sum[0] = by_bits(&self.q[row * n..][..n], vector, exec.level, to);
            })?;
        }
        Ok((stride, x, sums))
    }
}

/// The products of rows of bytes by AMX.
#[cfg(target_arch = "x86_64")]
fn by_tiles<S: Storage<Wide = f32>>(
    problem: &Product,
    q: &[i8],
    planes: [&[u8]; 2],
    results: &Results<S>,
    exec: &Exec,
) -> Result<()> {
    let Product { rows, n, outs, .. } = *problem;
    let threads = pool::worth(exec.threads, rows * n * outs, WORTH_SHARING);
    let (bytes, each) = (plane_bytes(n), outputs_per_task(outs, threads, amx::OUTPUTS));
    let x = amx::Prepared::new(q, rows, n, threads)?;
    pool::for_each(threads, outs.div_ceil(each), |task| {
        let mut scratch = amx::Scratch::new(&x);
        for outs in amx::tiles_of(task * each..outs.min((task + 1) * each)) {
            let planes = planes.map(|plane| &plane[outs.start * bytes..outs.end * bytes]);
            // SAFETY: this level exists only where the CPU has AMX.
            unsafe {
                amx::strip(&x, planes, outs.len(), &mut scratch, |rows, sums| {
                    results.integers((sums, amx::OUTPUTS), [rows, outs.clone()])
                })
            };
        }
    })
}

/// The planes of the signs, computed or given, with rows padded to whole vectors.
fn padded_signs(problem: &Product, inputs: &Named<View>, exec: &Exec) -> Result<(usize, [Scratch<u8>; 2])> {
    let (rows, bytes) = (problem.rows, problem.bytes());
    let stride = bytes.next_multiple_of(vector(exec.level));
    let padded = |plane: &[u8]| padded(plane, rows, bytes, stride);
    if problem.planes {
        let [plane0, plane1] = [inputs.get("x_plane0")?.bytes(), inputs.get("x_plane1")?.bytes()];
        return Ok((stride, [padded(plane0)?, padded(plane1)?]));
    }
    let x = in_f32(inputs.get("x")?, exec)?;
    let [mut plane0, mut plane1] = [Scratch::any(rows * bytes)?, Scratch::any(rows * bytes)?];
    signs(&x, rows, problem.n, &[0.0], [&mut plane0, &mut plane1], exec, Chunks::WHOLE)?;
    if stride == bytes {
        return Ok((stride, [plane0, plane1]));
    }
    Ok((stride, [padded(&plane0)?, padded(&plane1)?]))
}
