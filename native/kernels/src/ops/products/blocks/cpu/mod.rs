//! Blocks on the CPU. Quantizers and float products are loops that the compiler vectorizes. Integer products are
//! written over [`lanes`], for the byte products of each CPU.

#[cfg(target_arch = "x86_64")]
mod amx;
mod floats;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
mod product;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::format::{self, BLOCK, Format};
use super::problem::{Conversion, Problem};
use crate::chunks::Chunks;
use crate::cpu::convert::{Widened, widened};
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Epilogue, Exec, Level, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::ops::products::{outputs_per_task, with_type_in_f32};
use crate::tensor::{View, ViewMut};
use lanes::Lanes;
use product::{Prepared, Quantized, Sums};

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Values per task.
const PIECE: usize = 1 << 13;

/// Below this number of values, waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 16;

/// Below this number of multiplications, waking a second thread costs more than it saves.
const WORTH_SHARING_PRODUCTS: usize = 1 << 20;

/// Least number of outputs per task: whole vectors of them.
const OUTPUTS: usize = 32;

/// Work that can be compiled for the byte products of a CPU.
pub trait With {
    /// Does the work.
    fn with<L: Lanes>(self);
}

/// The kinds of byte products in CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instructions {
    /// One product at a time.
    Plain,
    /// NEON, by products of 16 bits.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with its dot product.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    /// AVX2, by pairs in 16 bits.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with VNNI.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AMX for several rows, AVX-512 with VNNI for few.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Instructions {
    /// The kinds that this CPU supports at a level, slowest first.
    pub fn available(level: Level) -> Vec<Instructions> {
        let mut all = vec![Instructions::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            let more = [
                (Instructions::Avx2, level >= Level::Avx2),
                (Instructions::AvxVnni, level >= Level::Avx2 && is_x86_feature_detected!("avxvnni")),
                (Instructions::Avx512Vnni, level >= Level::Avx512 && is_x86_feature_detected!("avx512vnni")),
                (Instructions::Amx, level >= Level::Amx),
            ];
            all.extend(more.into_iter().filter(|(_, there)| *there).map(|(one, _)| one));
        }
        #[cfg(target_arch = "aarch64")]
        if level >= Level::Neon {
            all.push(Instructions::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                all.push(Instructions::NeonDot);
            }
        }
        let _ = level;
        all
    }

    /// The fastest kind that this CPU supports at a level.
    pub fn best(level: Level) -> Instructions {
        *Instructions::available(level).last().expect("plain ones")
    }

    fn run<W: With>(self, work: W) {
        match self {
            Instructions::Plain => work.with::<plain::Plain>(),
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => work.with::<neon::Neon>(),
            // SAFETY: this kind is only handed out where the CPU supports it.
            #[cfg(target_arch = "aarch64")]
            Instructions::NeonDot => unsafe { neon::neon_dot(work) },
            // SAFETY: this kind is only handed out where the CPU supports it.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { x86::avx2(work) },
            // SAFETY: this kind is only handed out where the CPU supports it.
            #[cfg(target_arch = "x86_64")]
            Instructions::AvxVnni => unsafe { x86::avx_vnni(work) },
            // SAFETY: this kind is only handed out where the CPU supports it.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512Vnni | Instructions::Amx => unsafe { x86::avx512_vnni(work) },
        }
    }
}

/// Writes rows of blocks. A value for which no scale is finite is an error, unless the problem allows it.
pub fn quantize(problem: &Conversion, x: &View, q: ViewMut, exec: &Exec, chunks: Chunks) -> Result<()> {
    with_type_in_f32!(problem.x.dtype, S => quantize_as::<S>(problem, x.slice::<S>()?, q.bytes(), exec, chunks))
}

fn quantize_as<S: Storage<Wide = f32>>(
    problem: &Conversion,
    x: &[S],
    q: &mut [u8],
    exec: &Exec,
    chunks: Chunks,
) -> Result<()> {
    let (format, q, first) = (problem.format, Shared::new(q), AtomicUsize::new(usize::MAX));
    each_piece(x.len(), exec, chunks, |piece| {
        let (start, x) = (piece.start, &x[piece]);
        // SAFETY: pieces share no block.
        let q = unsafe { q.part(format.row_bytes(start), format.row_bytes(x.len())) };
        if let Some(at) = f32::dispatch(exec.level, ToBlocks { format, x, q }) {
            first.fetch_min(start + at, Ordering::Relaxed);
        }
    })?;
    match first.into_inner() {
        at if at < x.len() && !problem.unchecked => Err(format.refused(at, x[at].widen())),
        _ => Ok(()),
    }
}

/// Calls `work` for pieces of `count` values, which are whole blocks.
fn each_piece(count: usize, exec: &Exec, chunks: Chunks, work: impl Fn(Range<usize>) + Send + Sync) -> Result<()> {
    let threads = pool::worth(exec.threads, count, WORTH_SHARING);
    chunks.each(count / BLOCK, BLOCK, |blocks| {
        let (start, end) = (blocks.start * BLOCK, blocks.end * BLOCK);
        pool::for_each(threads, (end - start).div_ceil(PIECE), |piece| {
            let from = start + piece * PIECE;
            work(from..end.min(from + PIECE));
        })
    })
}

/// Quantizes whole blocks. Returns the position of the first value whose scale would not be finite.
struct ToBlocks<'a, S> {
    format: Format,
    x: &'a [S],
    q: &'a mut [u8],
}

impl<S: Storage<Wide = f32>> Work<f32> for ToBlocks<'_, S> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run<V: Vector<Element = f32>>(self) -> Option<usize> {
        match self.format {
            Format::Q8 => to_blocks::<S, V>(Format::Q8, self.x, self.q),
            Format::Q4 => to_blocks::<S, V>(Format::Q4, self.x, self.q),
        }
    }
}

#[inline(always)]
fn to_blocks<S: Storage<Wide = f32>, V: Vector<Element = f32>>(format: Format, x: &[S], q: &mut [u8]) -> Option<usize> {
    let mut first = None;
    for (at, (x, q)) in x.chunks_exact(BLOCK).zip(q.chunks_exact_mut(format.bytes())).enumerate() {
        let largest = format::write(format, &floats::of_block::<S, V>(x), q);
        if first.is_none() && !format.holds(largest) {
            let refused = |v: &S| !format.holds(v.widen().abs());
            first = x.iter().position(refused).map(|within| at * BLOCK + within);
        }
    }
    first
}

/// Reads rows of blocks.
pub fn dequantize(format: Format, q: &View, x: ViewMut, exec: &Exec, chunks: Chunks) -> Result<()> {
    let (q, x) = (q.bytes(), x.slice::<f32>()?);
    let count = x.len();
    let to = Shared::new(x);
    each_piece(count, exec, chunks, |piece| {
        let q = &q[format.row_bytes(piece.start)..format.row_bytes(piece.end)];
        // SAFETY: pieces share no block.
        let x = unsafe { to.part(piece.start, piece.len()) };
        f32::dispatch(exec.level, FromBlocks { format, q, x });
    })
}

struct FromBlocks<'a> {
    format: Format,
    q: &'a [u8],
    x: &'a mut [f32],
}

impl Work<f32> for FromBlocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = f32>>(self) {
        match self.format {
            Format::Q8 => from_blocks(Format::Q8, self.q, self.x),
            Format::Q4 => from_blocks(Format::Q4, self.q, self.x),
        }
    }
}

#[inline(always)]
fn from_blocks(format: Format, q: &[u8], x: &mut [f32]) {
    for (q, x) in q.chunks_exact(format.bytes()).zip(x.chunks_exact_mut(BLOCK)) {
        x.copy_from_slice(&format::read(format, q));
    }
}

/// The product; bias and activation are applied before the single rounding.
pub fn multiply(problem: &Problem, given: [&View; 2], b: Option<&View>, y: ViewMut, exec: &Exec) -> Result<()> {
    multiply_by(Instructions::best(exec.level), problem, given, b, y, exec)
}

/// Like `multiply`, with the given instructions.
pub fn multiply_by(
    instructions: Instructions,
    problem: &Problem,
    [x, w]: [&View; 2],
    b: Option<&View>,
    y: ViewMut,
    exec: &Exec,
) -> Result<()> {
    let b = b.map(|b| b.slice::<f32>()).transpose()?;
    with_type_in_f32!(problem.x.dtype, S => {
        let (x, y) = (x.slice::<S>()?, y.slice::<S>()?);
        multiply_as::<S>(instructions, problem, x, w.bytes(), b, y, exec)
    })
}

/// The form of x that all outputs share.
enum Factor<'x> {
    #[cfg(target_arch = "x86_64")]
    Tiles(amx::Prepared),
    Integers(Prepared),
    Floats(Widened<'x, f32>),
}

fn multiply_as<S: Storage<Wide = f32>>(
    instructions: Instructions,
    problem: &Problem,
    x: &[S],
    weights: &[u8],
    b: Option<&[f32]>,
    y: &mut [S],
    exec: &Exec,
) -> Result<()> {
    let Problem { rows, inputs, outputs, factors, .. } = *problem;
    if y.is_empty() {
        return Ok(());
    }
    let threads =
        pool::worth(exec.threads, rows.saturating_mul(inputs).saturating_mul(outputs), WORTH_SHARING_PRODUCTS);
    let x = match factors.quantized {
        true => prepared(instructions, quantized(x, rows, exec)?, factors.weights, threads)?,
        false => Factor::Floats(widened::<S>(x, exec)?),
    };
    let (y, epilogue) = (Shared::new(y), Epilogue { bias: b, activation: problem.activation });
    let at_once = if rows == 1 { outputs_per_task(outputs, threads, OUTPUTS) } else { OUTPUTS };
    pool::for_each(threads, outputs.div_ceil(at_once), |piece| {
        let some = piece * at_once..outputs.min((piece + 1) * at_once);
        let mut sums = vec![0.0f32; rows * some.len()];
        let (format, to) = (factors.weights, &mut sums[..]);
        match &x {
            #[cfg(target_arch = "x86_64")]
            Factor::Tiles(x) => Sums { x, weights, format, outputs: some.clone(), to }.run(),
            Factor::Integers(x) => instructions.run(Sums { x, weights, format, outputs: some.clone(), to }),
            Factor::Floats(x) => {
                let weights = &weights[format.row_bytes(inputs) * some.start..format.row_bytes(inputs) * some.end];
                f32::dispatch(exec.level, floats::Sums { x, weights, format, columns: inputs, to })
            }
        }
        let sums = (&sums[..], some.len());
        // SAFETY: no other piece has these outputs.
        unsafe { epilogue.write(sums, [0..rows, some], (&y, outputs), exec.level) };
    })
}

/// Quantized rows of x in the form that these instructions multiply.
fn prepared(instructions: Instructions, x: Quantized, format: Format, threads: usize) -> Result<Factor<'static>> {
    #[cfg(target_arch = "x86_64")]
    if instructions == Instructions::Amx && x.rows >= amx::ROWS {
        return Ok(Factor::Tiles(amx::Prepared::new(&x, threads)?));
    }
    let _ = threads;
    let mut prepared = None;
    instructions.run(Prepare { x: &x, format, to: &mut prepared });
    Ok(Factor::Integers(prepared.expect("rows of x")))
}

struct Prepare<'a> {
    x: &'a Quantized,
    format: Format,
    to: &'a mut Option<Prepared>,
}

impl With for Prepare<'_> {
    #[inline(always)]
    fn with<L: Lanes>(self) {
        *self.to = Some(Prepared::new::<L>(self.x, self.format));
    }
}

/// Quantizes rows to Q8_0 on all threads.
fn quantized<S: Storage<Wide = f32>>(x: &[S], rows: usize, exec: &Exec) -> Result<Quantized> {
    let blocks = x.len() / BLOCK;
    let mut of_rows = Quantized { q: vec![0; x.len()], d: vec![0.0; blocks], rows, blocks: blocks / rows };
    let (q, d) = (Shared::new(&mut of_rows.q), Shared::new(&mut of_rows.d));
    let threads = pool::worth(exec.threads, x.len(), WORTH_SHARING);
    pool::for_each(threads, x.len().div_ceil(PIECE), |piece| {
        let start = piece * PIECE;
        let x = &x[start..x.len().min(start + PIECE)];
        // SAFETY: pieces share no block.
        let (q, d) = unsafe { (q.part(start, x.len()), d.part(start / BLOCK, x.len() / BLOCK)) };
        f32::dispatch(exec.level, ToIntegers { x, q, d });
    })?;
    Ok(of_rows)
}

struct ToIntegers<'a, S> {
    x: &'a [S],
    q: &'a mut [i8],
    d: &'a mut [f32],
}

impl<S: Storage<Wide = f32>> Work<f32> for ToIntegers<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = f32>>(self) {
        for ((x, q), d) in self.x.chunks_exact(BLOCK).zip(self.q.chunks_exact_mut(BLOCK)).zip(self.d) {
            let q = q.try_into().expect("a block");
            *d = format::to_q8(&floats::of_block::<S, V>(x), q).1.to_f32();
        }
    }
}
