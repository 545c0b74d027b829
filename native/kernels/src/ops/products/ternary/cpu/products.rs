//! Sums of products with ternary weights.
//!
//! Bytes: a cell becomes its code, value + 1, in two bits of a byte, and `sum W q = sum code q - sum q`. Codes are
//! moved to the low end of separate bytes, shared by all rows of activations, or stay where they are. Signs: counts the
//! bits where both are not 0, and those where their signs differ. Floats: they are added and subtracted by masks.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::quantize::{by_bits, bytes, in_f32, signs, store, vector};
use super::wide::{Task, WORD, Wide, dispatch};
use crate::base::activation::Activation;
use crate::cpu::activation::{GeluErf, GeluTanh, Relu, Sigmoid, Silu, Softplus, Unary};
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Storage};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::ternary::plane_bytes;
use crate::ops::products::ternary::products::{Form, Pairs, Problem};
use crate::ops::products::ternary::sums::Weights;
use crate::tensor::{DType, View, ViewMut};
use half::{bf16, f16};
use std::ops::Range;

/// Rows of weights per task: their planes stay in the cache while they meet all rows of activations.
const ROWS: usize = 32;

/// From this number of cells on, waking another thread pays off.
const WORTH_SHARING: usize = 1 << 22;

/// Bytes of a plane whose products are summed before a reduction, half of what [`Wide::add_pairs`] can bear.
const PART: usize = 1 << 19;

/// The codes, value + 1, of cells: the even cells of each byte, then the odd ones. A sentinel gets the code of 0.
#[inline(always)]
fn pairs<V: Wide>(plane0: V, plane1: V) -> [V; 2] {
    let (even, odd) = (V::splat(0x55), V::splat(0xaa));
    // The low and the high bit of bit0 + (1 - bit1).
    let low = plane0.xor(plane1).xor(V::splat(0xff));
    let high = plane0.and_not(plane1);
    [low.and(even).or(high.and(even).left()), low.and(odd).right::<1>().or(high.and(odd))]
}

/// Activations in the order in which they meet the weights, each row padded with zeros to whole vectors.
enum Activations<'a> {
    /// In the order of [`by_bits`], with the sum of each row.
    Bytes { x: &'a [i8], sums: &'a [i32] },
    /// Planes.
    Signs { planes: [&'a [u8]; 2] },
    /// Floats.
    Floats { x: &'a [f32] },
}

/// Consumes the sums of one row of activations by adjacent rows of weights.
trait End: Sync {
    fn integers(&self, row: usize, outs: Range<usize>, sums: &[i32]);
    fn floats(&self, row: usize, outs: Range<usize>, sums: &mut [f32]);
}

/// A vector of a row, the last one padded with zeros.
#[inline(always)]
fn vector_of<V: Wide>(row: &[u8], block: usize) -> V {
    let start = block * V::BYTES;
    if start + V::BYTES <= row.len() {
        return V::load(&row[start..]);
    }
    let mut end = [0u8; 64];
    end[..row.len() - start].copy_from_slice(&row[start..]);
    V::load(&end)
}

struct Call<'a> {
    n: usize,
    /// Elements of a row of activations, including its padding.
    stride: usize,
    rows: usize,
    planes: [&'a [u8]; 2],
    x: Activations<'a>,
}

impl Call<'_> {
    #[inline(always)]
    fn row(&self, out: usize) -> [&[u8]; 2] {
        let bytes = plane_bytes(self.n);
        let [plane0, plane1] = self.planes;
        [&plane0[out * bytes..][..bytes], &plane1[out * bytes..][..bytes]]
    }

    #[inline(always)]
    fn bytes<V: Wide, const R: usize>(&self, out: usize, x: &[i8]) -> [i32; R] {
        let mut sums = [V::no_sums(); R];
        let [plane0, plane1] = self.row(out);
        let whole = plane0.len() / V::BYTES;
        for block in 0..whole {
            let at = block * V::BYTES;
            self.add_codes(&mut sums, V::load(&plane0[at..]), V::load(&plane1[at..]), &x[8 * at..]);
        }
        if whole * V::BYTES < plane0.len() {
            let (plane0, plane1): (V, V) = (vector_of(plane0, whole), vector_of(plane1, whole));
            self.add_codes(&mut sums, plane0, plane1, &x[8 * whole * V::BYTES..]);
        }
        let mut totals = [0; R];
        for r in 0..R {
            totals[r] = V::sum(sums[r]);
        }
        totals
    }

    #[inline(always)]
    fn add_codes<V: Wide, const R: usize>(&self, sums: &mut [V::Sums; R], plane0: V, plane1: V, x: &[i8]) {
        let codes = V::codes(pairs(plane0, plane1));
        for r in 0..R {
            sums[r] = V::add_products(sums[r], &codes, &x[r * self.stride..][..8 * V::BYTES]);
        }
    }

    /// The sum of an output for a single row of activations.
    #[inline(always)]
    fn bytes_of_one<V: Wide>(&self, out: usize, x: &[i8]) -> i32 {
        let [plane0, plane1] = self.row(out);
        let mut sum = 0i32;
        for start in (0..plane0.len()).step_by(PART) {
            let end = plane0.len().min(start + PART);
            sum = sum.wrapping_add(sum_of_part::<V>(&plane0[start..end], &plane1[start..end], &x[8 * start..]));
        }
        sum
    }

    #[inline(always)]
    fn signs<V: Wide, const R: usize>(&self, out: usize, x: [&[u8]; 2]) -> [i32; R] {
        let (mut all, mut negative) = ([V::no_counts(); R], [V::no_counts(); R]);
        let [plane0, plane1] = self.row(out);
        for block in 0..plane0.len().div_ceil(V::BYTES) {
            let (plane0, plane1): (V, V) = (vector_of(plane0, block), vector_of(plane1, block));
            let there = plane0.xor(plane1);
            for r in 0..R {
                let at = r * self.stride + block * V::BYTES;
                let (x0, x1) = (V::load(&x[0][at..]), V::load(&x[1][at..]));
                let both = there.and(x0.xor(x1));
                all[r] = V::add_count(all[r], both);
                negative[r] = V::add_count(negative[r], both.and(plane1.xor(x1)));
            }
        }
        let mut totals = [0; R];
        for r in 0..R {
            totals[r] = V::count(all[r], negative[r]) as i32;
        }
        totals
    }

    #[inline(always)]
    fn floats<V: Wide, const R: usize>(&self, out: usize, x: &[f32]) -> [f32; R] {
        let mut sums = [V::no_floats(); R];
        let [plane0, plane1] = self.row(out);
        let words = plane0.chunks(8).zip(plane1.chunks(8)).enumerate();
        for (word, (plane0, plane1)) in words {
            let (mut a, mut b) = ([0; 8], [0; 8]);
            a[..plane0.len()].copy_from_slice(plane0);
            b[..plane1.len()].copy_from_slice(plane1);
            let [a, b] = [u64::from_le_bytes(a), u64::from_le_bytes(b)];
            // A sentinel counts as 0, and cells past the end may hold anything.
            let inside = if self.n - word * WORD >= WORD { u64::MAX } else { (1 << (self.n - word * WORD)) - 1 };
            let planes = [a & !b & inside, b & !a & inside];
            for r in 0..R {
                sums[r] = V::add_floats(sums[r], planes, &x[r * self.stride + word * WORD..][..WORD]);
            }
        }
        let mut totals = [0.0; R];
        for r in 0..R {
            totals[r] = V::sum_floats(sums[r]);
        }
        totals
    }

    /// `R` rows of activations by at most [`ROWS`] rows of weights.
    #[inline(always)]
    fn tile<V: Wide, const R: usize>(&self, first: usize, outs: Range<usize>, end: &impl End) {
        let (at, count) = (first * self.stride, outs.len());
        match &self.x {
            Activations::Bytes { x, sums } => {
                let mut totals = [[0; ROWS]; R];
                for (i, out) in outs.clone().enumerate() {
                    let products = if R == 1 {
                        [self.bytes_of_one::<V>(out, &x[at..]); R]
                    } else {
                        self.bytes::<V, R>(out, &x[at..])
                    };
                    for r in 0..R {
                        totals[r][i] = products[r].wrapping_sub(sums[first + r]);
                    }
                }
                (0..R).for_each(|r| end.integers(first + r, outs.clone(), &totals[r][..count]));
            }
            Activations::Signs { planes: [plane0, plane1] } => {
                let mut totals = [[0; ROWS]; R];
                for (i, out) in outs.clone().enumerate() {
                    let sums = self.signs::<V, R>(out, [&plane0[at..], &plane1[at..]]);
                    for r in 0..R {
                        totals[r][i] = sums[r];
                    }
                }
                (0..R).for_each(|r| end.integers(first + r, outs.clone(), &totals[r][..count]));
            }
            Activations::Floats { x } => {
                let mut totals = [[0.0; ROWS]; R];
                for (i, out) in outs.clone().enumerate() {
                    let sums = self.floats::<V, R>(out, &x[at..]);
                    for r in 0..R {
                        totals[r][i] = sums[r];
                    }
                }
                (0..R).for_each(|r| end.floats(first + r, outs.clone(), &mut totals[r][..count]));
            }
        }
    }
}

#[inline(always)]
fn sum_of_part<V: Wide>(plane0: &[u8], plane1: &[u8], x: &[i8]) -> i32 {
    let mut sums = [V::no_sums(); 4];
    let whole = plane0.len() / V::BYTES;
    for block in 0..whole {
        let at = block * V::BYTES;
        let pairs = pairs(V::load(&plane0[at..]), V::load(&plane1[at..]));
        V::add_pairs(&mut sums, pairs, &x[8 * at..][..8 * V::BYTES]);
    }
    if whole * V::BYTES < plane0.len() {
        let pairs = pairs::<V>(vector_of(plane0, whole), vector_of(plane1, whole));
        V::add_pairs(&mut sums, pairs, &x[8 * whole * V::BYTES..][..8 * V::BYTES]);
    }
    V::sum_of_pairs(sums)
}

struct Block<'a, 'c, E> {
    call: &'a Call<'c>,
    outs: Range<usize>,
    end: &'a E,
}

impl<E: End> Task for Block<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Wide>(self) {
        let Block { call, outs, end } = self;
        let mut row = 0;
        while V::TILE == 8 && row + 8 <= call.rows {
            call.tile::<V, 8>(row, outs.clone(), end);
            row += 8;
        }
        while row + 4 <= call.rows {
            call.tile::<V, 4>(row, outs.clone(), end);
            row += 4;
        }
        for row in row..call.rows {
            call.tile::<V, 1>(row, outs.clone(), end);
        }
    }
}

/// The inputs and outputs that turn sums into y.
struct Ends<'a, S> {
    x_scale: Option<&'a [f32]>,
    w_scale: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    activation: Option<Activation>,
    outs: usize,
    acc: Option<Shared<'a, i32>>,
    y: Option<Shared<'a, S>>,
}

/// Applies an activation to one float.
fn activate(activation: Option<Activation>, v: f32) -> f32 {
    match activation {
        None => v,
        Some(Activation::Sigmoid) => Sigmoid::value(v),
        Some(Activation::Silu) => Silu::value(v),
        Some(Activation::GeluTanh) => GeluTanh::value(v),
        Some(Activation::GeluErf) => GeluErf::value(v),
        Some(Activation::Softplus) => Softplus::value(v),
        Some(Activation::Relu) => Relu::value(v),
    }
}

impl<S: Storage<Wide = f32>> End for Ends<'_, S> {
    fn integers(&self, row: usize, outs: Range<usize>, sums: &[i32]) {
        if let Some(acc) = &self.acc {
            // SAFETY: each sum is written once.
            unsafe { acc.part(row * self.outs + outs.start, outs.len()) }.copy_from_slice(sums);
        }
        if self.y.is_some() {
            let mut floats = [0.0; ROWS];
            let floats = &mut floats[..sums.len()];
            floats.iter_mut().zip(sums).for_each(|(float, &sum)| *float = sum as f32);
            self.floats(row, outs, floats);
        }
    }

    fn floats(&self, row: usize, outs: Range<usize>, sums: &mut [f32]) {
        if let Some(scales) = self.x_scale {
            sums.iter_mut().for_each(|sum| *sum *= scales[row]);
        }
        match self.w_scale {
            Some(&[scale]) => sums.iter_mut().for_each(|sum| *sum *= scale),
            Some(scales) => sums.iter_mut().zip(&scales[outs.clone()]).for_each(|(sum, scale)| *sum *= scale),
            None => (),
        }
        if let Some(bias) = self.bias {
            sums.iter_mut().zip(&bias[outs.clone()]).for_each(|(sum, bias)| *sum += bias);
        }
        if self.activation.is_some() {
            sums.iter_mut().for_each(|sum| *sum = activate(self.activation, *sum));
        }
        if let Some(y) = &self.y {
            // SAFETY: each sum is written once.
            let to = unsafe { y.part(row * self.outs + outs.start, outs.len()) };
            to.iter_mut().zip(sums).for_each(|(to, sum)| store(*sum, to));
        }
    }
}

fn run<E: End>(call: &Call, outs: usize, end: &E, exec: &Exec) -> Result<()> {
    let work = call.rows * call.n * outs;
    let rows = if outs < 4 * ROWS { outs.div_ceil(4).max(1) } else { ROWS };
    pool::for_each(pool::worth(exec.threads, work, WORTH_SHARING), outs.div_ceil(rows), |task| {
        let outs = task * rows..outs.min((task + 1) * rows);
        dispatch(exec.level, Block { call, outs, end });
    })
}

/// Multiplies on the CPU.
pub fn matmul(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let y = outputs.take("y");
    match problem.dtype {
        DType::Bf16 => matmul_to::<bf16>(problem, inputs, y, outputs, exec),
        DType::F16 => matmul_to::<f16>(problem, inputs, y, outputs, exec),
        _ => matmul_to::<f32>(problem, inputs, y, outputs, exec),
    }
}

fn matmul_to<S: Storage<Wide = f32>>(
    problem: &Problem,
    inputs: &Named<View>,
    y: Option<ViewMut>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let of = |name: &str| inputs.find(name).map(View::slice::<f32>).transpose();
    let acc = outputs.take("acc").map(ViewMut::slice::<i32>).transpose()?.map(Shared::new);
    let mut ends = Ends::<S> {
        x_scale: None,
        w_scale: of("w_scale")?,
        bias: of("bias")?,
        activation: problem.options.activation,
        outs: problem.outs,
        acc,
        y: y.map(ViewMut::slice::<S>).transpose()?.map(Shared::new),
    };
    let planes = [inputs.get("plane0")?.bytes(), inputs.get("plane1")?.bytes()];
    let call = |stride, x| Call { n: problem.n, stride, rows: problem.rows, planes, x };
    match problem.form {
        Form::I8 => {
            let bytes = Bytes::new(problem, inputs, outputs, exec)?;
            ends.x_scale = Some(&bytes.scales);
            #[cfg(target_arch = "x86_64")]
            if exec.level == crate::cpu::Level::Amx && problem.rows >= amx::ROWS {
                return by_tiles(problem, &bytes.q, planes, &ends, exec);
            }
            let (stride, x, sums) = bytes.by_bits(problem, exec)?;
            run(&call(stride, Activations::Bytes { x: &x, sums: &sums }), problem.outs, &ends, exec)
        }
        Form::Ternary => {
            let (stride, planes) = padded_signs(problem, inputs, exec)?;
            let x = Activations::Signs { planes: [&planes[0], &planes[1]] };
            run(&call(stride, x), problem.outs, &ends, exec)
        }
        Form::F32 => {
            let x = in_f32(inputs.get("x")?, exec)?;
            let stride = problem.n.next_multiple_of(WORD);
            if stride == problem.n {
                return run(&call(stride, Activations::Floats { x: &x }), problem.outs, &ends, exec);
            }
            let mut padded = vec![0f32; problem.rows * stride];
            for row in 0..problem.rows {
                padded[row * stride..][..problem.n].copy_from_slice(&x[row * problem.n..][..problem.n]);
            }
            run(&call(stride, Activations::Floats { x: &padded }), problem.outs, &ends, exec)
        }
    }
}

/// Activations quantized to bytes, and the scale of each row.
struct Bytes {
    q: Vec<i8>,
    scales: Vec<f32>,
}

impl Bytes {
    fn new(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<Bytes> {
        let Problem { rows, n, .. } = *problem;
        let (mut q, mut scales) = (vec![0i8; rows * n], vec![0f32; rows]);
        bytes(&problem.activations(), &in_f32(inputs.get("x")?, exec)?, &mut q, &mut scales, exec)?;
        if let Some(xq) = outputs.take("xq") {
            xq.slice()?.copy_from_slice(&q);
            outputs.expect("x_scale")?.slice()?.copy_from_slice(&scales);
        }
        Ok(Bytes { q, scales })
    }

    /// The rows in the order of [`by_bits`], how long one of them is, and their sums.
    fn by_bits(&self, problem: &Problem, exec: &Exec) -> Result<(usize, Vec<i8>, Vec<i32>)> {
        let Problem { rows, n, .. } = *problem;
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
fn by_tiles(problem: &Problem, q: &[i8], planes: [&[u8]; 2], end: &impl End, exec: &Exec) -> Result<()> {
    let Problem { rows, n, outs, .. } = *problem;
    let threads = pool::worth(exec.threads, rows * n * outs, WORTH_SHARING);
    let (x, bytes, each) =
        (amx::Prepared::new(q, rows, n, threads)?, plane_bytes(n), amx::outputs_per_task(outs, threads));
    pool::for_each(threads, outs.div_ceil(each), |task| {
        let mut scratch = amx::Scratch::new(&x);
        for outs in amx::tiles_of(task * each..outs.min((task + 1) * each)) {
            let planes = planes.map(|plane| &plane[outs.start * bytes..outs.end * bytes]);
            let end = |row: usize, sums: &[i32]| end.integers(row, outs.clone(), sums);
            // SAFETY: this level exists only where the CPU has AMX.
            unsafe { amx::strip(&x, planes, outs.len(), &mut scratch, &end) };
        }
    })
}

/// The planes of the signs, computed or given, with rows padded to whole vectors.
fn padded_signs(problem: &Problem, inputs: &Named<View>, exec: &Exec) -> Result<(usize, [Vec<u8>; 2])> {
    let (rows, bytes) = (problem.rows, problem.bytes());
    let mut made = [Vec::new(), Vec::new()];
    let given = if problem.planes {
        [inputs.get("x_plane0")?.bytes(), inputs.get("x_plane1")?.bytes()]
    } else {
        let x = in_f32(inputs.get("x")?, exec)?;
        made = [vec![0; rows * bytes], vec![0; rows * bytes]];
        let [plane0, plane1] = &mut made;
        signs(&x, rows, problem.n, &[0.0], [plane0, plane1], exec)?;
        [&made[0][..], &made[1]]
    };
    let stride = bytes.next_multiple_of(vector(exec.level));
    if stride == bytes && !problem.planes {
        return Ok((stride, made));
    }
    let padded = given.map(|plane| {
        let mut padded = vec![0; rows * stride];
        for row in 0..rows {
            padded[row * stride..][..bytes].copy_from_slice(&plane[row * bytes..][..bytes]);
        }
        padded
    });
    Ok((stride, padded))
}

/// Products of rows of planes on the CPU.
pub fn dot(problem: &Pairs, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let of = |name: &str| Ok(inputs.get(name)?.bytes());
    let planes = [of("a0")?, of("a1")?, of("b0")?, of("b1")?];
    let (bytes, to) = (problem.bytes, Shared::new(outputs.expect("dot")?.slice::<i32>()?));
    pool::for_each(pool::worth(exec.threads, problem.rows * bytes * 8, WORTH_SHARING), problem.rows, |row| {
        let rows = planes.map(|plane| &plane[row * bytes..][..bytes]);
        // SAFETY: rows share no sum.
        let to = unsafe { to.part(row, 1) };
        to[0] = dispatch(exec.level, Dot(rows));
    })
}

struct Dot<'a>([&'a [u8]; 4]);

impl Task for Dot<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<V: Wide>(self) -> i32 {
        let [a0, a1, b0, b1] = self.0;
        let (mut all, mut negative) = (V::no_counts(), V::no_counts());
        for block in 0..a0.len().div_ceil(V::BYTES) {
            let (a0, a1): (V, V) = (vector_of(a0, block), vector_of(a1, block));
            let (b0, b1): (V, V) = (vector_of(b0, block), vector_of(b1, block));
            let both = a0.xor(a1).and(b0.xor(b1));
            all = V::add_count(all, both);
            negative = V::add_count(negative, both.and(a1.xor(b1)));
        }
        V::count(all, negative) as i32
    }
}

/// Columns per task.
const COLUMNS: usize = 4096;

/// Sums of columns on the CPU.
pub fn column_sums(problem: &Weights, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let Weights { rows, n } = *problem;
    let planes = [inputs.get("plane0")?.bytes(), inputs.get("plane1")?.bytes()];
    let (bytes, to) = (plane_bytes(n), Shared::new(outputs.expect("column_sums")?.slice::<i32>()?));
    pool::for_each(pool::worth(exec.threads, rows * n, WORTH_SHARING), n.div_ceil(COLUMNS), |task| {
        let (start, end) = (task * COLUMNS, n.min((task + 1) * COLUMNS));
        // SAFETY: tasks share no column.
        let sums = unsafe { to.part(start, end - start) };
        sums.fill(0);
        let mut values = vec![0i8; end - start];
        for row in 0..rows {
            let part = planes.map(|plane| &plane[row * bytes..][..bytes][start / 8..]);
            super::cells::values_of_row(part, 0, end - start, exec.level, &mut values);
            sums.iter_mut().zip(&values).for_each(|(sum, &value)| *sum += i32::from(value));
        }
    })
}
