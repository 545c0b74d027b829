//! Floats to planes and to bytes.

use super::wide::{Task, WORD, Wide, dispatch};
use crate::chunks::Chunks;
use crate::cpu::convert::{Widened, widened};
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Level};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::ternary::problem::{
    Activations, LEAST_SCALE, Quantization, Rule, RuleOptions, TWN, plane_bytes,
};
use crate::ops::products::with_type_in_f32;
use crate::tensor::{Described, View, ViewMut};

use std::sync::atomic::{AtomicUsize, Ordering};

/// From this number of floats on, waking another thread pays off.
const WORTH_SHARING: usize = 1 << 17;

/// Partial sums of a row, of equal number on every level so that results are equal.
const LANES: usize = 16;

/// The values of a tensor in f32, copied only if its storage type differs.
pub fn in_f32<'a>(view: &View<'a>, exec: &Exec) -> Result<Widened<'a, f32>> {
    with_type_in_f32!(view.spec().dtype, S => widened::<S>(view.slice()?, exec))
}

/// The sum and the number of the magnitudes above `above`.
struct Sizes<'a> {
    row: &'a [f32],
    above: f32,
}

impl Task for Sizes<'_> {
    type Output = (f64, usize);

    #[inline(always)]
    fn run<V: Wide>(self) -> (f64, usize) {
        let (mut sums, mut counts) = ([0f64; LANES], [0u32; LANES]);
        let mut count = 0;
        for strip in self.row.chunks(1 << 20) {
            for values in strip.chunks(LANES) {
                for ((sum, count), &value) in sums.iter_mut().zip(&mut counts).zip(values) {
                    let size = value.abs();
                    // NaN is never above a threshold, but must propagate to the mean.
                    let counts = size > self.above || size.is_nan();
                    *sum += if counts { f64::from(size) } else { 0.0 };
                    *count += u32::from(counts);
                }
            }
            count += std::mem::take(&mut counts).iter().map(|&count| count as usize).sum::<usize>();
        }
        (sums.iter().sum(), count)
    }
}

/// The mean magnitude of the floats above `above`, in f64; 0 if there are none.
fn mean(w: &[f32], rows: usize, above: f32, exec: &Exec, chunks: Chunks) -> Result<f64> {
    let n = w.len() / rows.max(1);
    let mut sums = vec![(0f64, 0usize); rows];
    let to = Shared::new(&mut sums);
    each_row(rows, n, exec, chunks, |row| {
        // SAFETY: rows share no sum.
        let to = unsafe { to.part(row, 1) };
        to[0] = dispatch(exec.level, Sizes { row: &w[row * n..][..n], above });
    })?;
    let (sum, count) = sums.iter().fold((0.0, 0), |(sum, count), row| (sum + row.0, count + row.1));
    Ok(if count == 0 { 0.0 } else { sum / count as f64 })
}

/// Calls `work` for each of some rows of `n` floats.
fn each_row(rows: usize, n: usize, exec: &Exec, chunks: Chunks, work: impl Fn(usize) + Send + Sync) -> Result<()> {
    let threads = pool::worth(exec.threads, rows * n, WORTH_SHARING);
    chunks.each(rows, n, |range| pool::for_each(threads, range.len(), |row| work(range.start + row)))
}

/// A threshold that every magnitude exceeds.
const ALL: f32 = -1.0;

/// Threshold and scale of some rows.
fn threshold(options: &RuleOptions, w: &[f32], rows: usize, exec: &Exec, chunks: Chunks) -> Result<(f32, f32)> {
    let mean = |above| mean(w, rows, above, exec, chunks);
    match options.rule {
        Rule::Threshold => Ok((options.threshold.unwrap_or_default() as f32, 1.0)),
        Rule::Absmean => {
            let mean = mean(ALL)?;
            // Not `max`, which would drop NaN.
            let scale = if mean < LEAST_SCALE { LEAST_SCALE } else { mean } as f32;
            Ok((scale / 2.0, scale))
        }
        Rule::Twn => {
            let threshold = TWN * mean(ALL)? as f32;
            Ok((threshold, mean(threshold)? as f32))
        }
    }
}

/// The planes of a row by a threshold.
struct Cut<'a> {
    row: &'a [f32],
    threshold: f32,
    planes: [&'a mut [u8]; 2],
}

impl Task for Cut<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Wide>(self) {
        let [plane0, plane1] = self.planes;
        let bytes = plane0.chunks_mut(8).zip(plane1.chunks_mut(8));
        for (values, (plane0, plane1)) in self.row.chunks(WORD).zip(bytes) {
            let planes = cut::<V>(values, self.threshold);
            plane0.copy_from_slice(&planes[0].to_le_bytes()[..plane0.len()]);
            plane1.copy_from_slice(&planes[1].to_le_bytes()[..plane1.len()]);
        }
    }
}

/// The planes of up to 64 floats by a threshold.
#[inline(always)]
fn cut<V: Wide>(values: &[f32], threshold: f32) -> [u64; 2] {
    let mut cells = [0u8; WORD];
    for (cell, &value) in cells.iter_mut().zip(values) {
        *cell = u8::from(value > threshold).wrapping_sub(u8::from(value < -threshold));
    }
    V::compress(&cells)
}

/// Quantizes by a rule on the CPU.
pub fn planes(
    problem: &Quantization,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
    chunks: Chunks,
) -> Result<()> {
    let Quantization { rows, n, ref options, .. } = *problem;
    let w = in_f32(inputs.get("w")?, exec)?;
    let scales = outputs.expect("scale")?.slice::<f32>()?;
    let mut thresholds = vec![0.0; scales.len()];
    if options.per_row {
        chunks.each(rows, n, |range| {
            for row in range {
                let w = &w[row * n..][..n];
                (thresholds[row], scales[row]) = threshold(options, w, 1, exec, Chunks::WHOLE)?;
            }
            Ok(())
        })?;
    } else {
        (thresholds[0], scales[0]) = threshold(options, &w, rows, exec, chunks)?;
    }
    let planes = [outputs.expect("plane0")?.bytes(), outputs.expect("plane1")?.bytes()];
    signs(&w, rows, n, &thresholds, planes, exec, chunks)
}

/// The planes of rows, by one threshold for all or one per row.
pub fn signs(
    w: &[f32],
    rows: usize,
    n: usize,
    thresholds: &[f32],
    to: [&mut [u8]; 2],
    exec: &Exec,
    chunks: Chunks,
) -> Result<()> {
    let bytes = plane_bytes(n);
    let to = to.map(Shared::new);
    each_row(rows, n, exec, chunks, |row| {
        // SAFETY: rows share no byte.
        let planes = unsafe { [to[0].part(row * bytes, bytes), to[1].part(row * bytes, bytes)] };
        let threshold = if thresholds.len() == 1 { thresholds[0] } else { thresholds[row] };
        dispatch(exec.level, Cut { row: &w[row * n..][..n], threshold, planes });
    })
}

/// Quantizes a row to bytes. Returns its scale, or the position of a value that is not finite.
struct Bytes<'a> {
    row: &'a [f32],
    floor: f32,
    to: &'a mut [i8],
}

/// The sum of a float and this number has the nearest integer in its low bits, for floats up to half of it.
const MAGIC: f32 = 12_582_912.0;

impl Task for Bytes<'_> {
    type Output = std::result::Result<f32, usize>;

    #[inline(always)]
    fn run<V: Wide>(self) -> Self::Output {
        const SIZE: u32 = 0x7fff_ffff;
        let largest = self.row.iter().fold(0u32, |most, value| most.max(value.to_bits() & SIZE));
        let largest = f32::from_bits(largest);
        if !largest.is_finite() {
            return Err(self.row.iter().position(|value| !value.is_finite()).unwrap_or_default());
        }
        let largest = if largest > self.floor { largest } else { self.floor };
        let inverse = 127.0 / largest;
        for (to, &value) in self.to.iter_mut().zip(self.row) {
            let nearest = (value * inverse + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as i32;
            *to = nearest.clamp(-127, 127) as i8;
        }
        Ok(largest / 127.0)
    }
}

/// Quantizes rows to bytes and scales on the CPU.
pub fn bytes(problem: &Activations, x: &[f32], q: &mut [i8], scales: &mut [f32], exec: &Exec) -> Result<()> {
    let (n, floor, level) = (problem.n, problem.floor, exec.level);
    let (q, scales) = (Shared::new(q), Shared::new(scales));
    let bad = AtomicUsize::new(usize::MAX);
    pool::for_each(pool::worth(exec.threads, x.len(), WORTH_SHARING), problem.rows, |row| {
        // SAFETY: rows share no element.
        let (to, scale) = unsafe { (q.part(row * n, n), scales.part(row, 1)) };
        match dispatch(level, Bytes { row: &x[row * n..][..n], floor, to }) {
            Ok(of_row) => scale[0] = of_row,
            Err(at) => _ = bad.fetch_min(row * n + at, Ordering::Relaxed),
        }
    })?;
    match bad.into_inner() {
        usize::MAX => Ok(()),
        at => Err(problem.refuse(at, x[at])),
    }
}

/// Quantizes activations on the CPU.
pub fn activations(
    problem: &Activations,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let x = in_f32(inputs.get("x")?, exec)?;
    bytes(problem, &x, outputs.expect("q")?.slice()?, outputs.expect("scale")?.slice()?, exec)
}

/// Reorders bytes for [`Wide::add_products`]. Vector `b` of a block of 8 vectors gets every eighth byte from `b` on;
/// zeros follow the end. Returns the sum of the bytes.
pub fn by_bits(q: &[i8], vector: usize, level: Level, to: &mut [i8]) -> i32 {
    dispatch(level, ByBits { q, vector, to })
}

struct ByBits<'a> {
    q: &'a [i8],
    vector: usize,
    to: &'a mut [i8],
}

impl Task for ByBits<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<V: Wide>(self) -> i32 {
        let block = 8 * self.vector;
        for (to, from) in self.to.chunks_exact_mut(block).zip(self.q.chunks(block)) {
            if from.len() < block {
                to.fill(0);
            }
            for (j, eight) in from.chunks(8).enumerate() {
                for (b, &value) in eight.iter().enumerate() {
                    to[b * self.vector + j] = value;
                }
            }
        }
        self.q.iter().fold(0i32, |sum, &value| sum.wrapping_add(i32::from(value)))
    }
}

/// Bytes of a vector on this level.
pub fn vector(level: Level) -> usize {
    struct Ask;
    impl Task for Ask {
        type Output = usize;
        #[inline(always)]
        fn run<V: Wide>(self) -> usize {
            V::BYTES
        }
    }
    dispatch(level, Ask)
}
