//! Ternary numbers cell by cell, written for clarity. Values defined by roundings to f32 are rounded here too.

use super::grid::{Conversion, Grid, Layout, OnSentinel, SLOTS};
use super::problem::{
    Activations, Form, LEAST_SCALE, Pairs, Product, Proof, Quantization, Rule, TWN, Weights, plane_bytes,
};
use crate::error::Result;
use crate::op::Named;
use crate::ops::activations;
use crate::place;
use crate::tensor::{DType, Owned};
use ndarray::ArrayD;

/// The results as named arrays.
fn results<const N: usize>(of: [(&'static str, &[usize], Vec<f64>); N]) -> Named<ArrayD<f64>> {
    let array =
        |dims: &[usize], values| ArrayD::from_shape_vec(dims, values).expect("as many values as the shape says");
    of.into_iter().map(|(name, dims, values)| (name, array(dims, values))).collect()
}

/// The two bits of a cell; both for a sentinel.
fn bits(grid: &Grid, bytes: [&[u8]; 2], row: usize, i: usize) -> [u8; 2] {
    let stride = grid.n.div_ceil(grid.layout.in_byte());
    let byte = |plane: usize| bytes[plane][row * stride + i / grid.layout.in_byte()];
    let of_value = |value: i8| match value {
        0 => [0, 0],
        1 => [1, 0],
        -1 => [0, 1],
        _ => [1, 1],
    };
    match grid.layout {
        Layout::Values => of_value(byte(0) as i8),
        Layout::Planes => [byte(0) >> (i % 8) & 1, byte(1) >> (i % 8) & 1],
        Layout::Packed2 => [byte(0) >> (2 * (i % 4) + 1) & 1, byte(0) >> (2 * (i % 4)) & 1],
        Layout::OffsetRows => {
            let code = bytes[0][row % grid.quarter() * grid.n + i] >> (2 * (row / grid.quarter())) & 3;
            of_value(code as i8 - 1)
        }
        Layout::BytePlanes if byte(0) > 1 || byte(1) > 1 => [1, 1],
        Layout::BytePlanes => [byte(0), byte(1)],
    }
}

/// Sets a cell in zeroed bytes.
fn set(grid: &Grid, to: &mut [Vec<u8>; 2], row: usize, i: usize, [bit0, bit1]: [u8; 2]) {
    let stride = grid.n.div_ceil(grid.layout.in_byte());
    let at = row * stride + i / grid.layout.in_byte();
    match grid.layout {
        Layout::Values => to[0][at] = bit0.wrapping_sub(bit1),
        Layout::Planes => {
            to[0][at] |= bit0 << (i % 8);
            to[1][at] |= bit1 << (i % 8);
        }
        Layout::Packed2 => to[0][at] |= (2 * bit0 + bit1) << (2 * (i % 4)),
        Layout::OffsetRows => {
            let at = row % grid.quarter() * grid.n + i;
            to[0][at] |= (1 + bit0 - bit1) << (2 * (row / grid.quarter()));
        }
        Layout::BytePlanes => (to[0][at], to[1][at]) = (bit0, bit1),
    }
}

/// All cells in row-major order, as row and column.
fn cells(grid: &Grid) -> impl Iterator<Item = (usize, usize)> {
    let n = grid.n;
    (0..grid.rows).flat_map(move |row| (0..n).map(move |i| (row, i)))
}

pub fn convert(problem: &Conversion, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (from, to) = (&problem.from, &problem.to);
    let inputs = place::typed(SLOTS, DType::F32, inputs)?;
    let bytes = from.bytes(&inputs.map(Owned::view))?;
    let specs = to.specs()?;
    let mut written = [Vec::new(), Vec::new()];
    for (written, name) in written.iter_mut().zip(to.layout.tensors()) {
        *written = vec![0u8; specs.get(name)?.bytes()];
    }
    let (mut count, mut first) = (0, None);
    for (row, i) in cells(from) {
        let mut cell = bits(from, bytes, row, i);
        if cell == [1, 1] {
            count += 1;
            first = first.or(Some(row * from.n + i));
            cell = [0, 0];
        }
        set(to, &mut written, row, i, cell);
    }
    if let (Some(first), OnSentinel::Error) = (first, problem.on_sentinel) {
        return Err(from.refuse(count, first));
    }
    let first = first.map_or(-1.0, |first| first as f64);
    let mut all = results([("sentinels", &[1], vec![count as f64]), ("first", &[1], vec![first])]);
    for (written, &name) in written.into_iter().zip(to.layout.tensors()) {
        let signed = |byte: u8| if to.layout == Layout::Values { f64::from(byte as i8) } else { f64::from(byte) };
        let values = written.into_iter().map(signed).collect();
        all.push(name, results([("", &specs.get(name)?.shape, values)]).expect("")?);
    }
    Ok(all)
}

pub fn stats(grid: &Grid, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let inputs = place::typed(SLOTS, DType::F32, inputs)?;
    let bytes = grid.bytes(&inputs.map(Owned::view))?;
    let (mut counts, mut first) = (vec![0.0; 4], -1.0);
    for (row, i) in cells(grid) {
        let [bit0, bit1] = bits(grid, bytes, row, i);
        let which = if [bit0, bit1] == [1, 1] { 3 } else { usize::from(1 + bit0 - bit1) };
        counts[which] += 1.0;
        if which == 3 && first < 0.0 {
            first = (row * grid.n + i) as f64;
        }
    }
    Ok(results([("counts", &[4], counts), ("first", &[1], vec![first])]))
}

/// The values of rows of planes.
fn values(planes: [&[u8]; 2], rows: usize, n: usize) -> Vec<i32> {
    let grid = Grid { layout: Layout::Planes, leading: vec![rows], rows, n };
    let value = |(row, i)| {
        let [bit0, bit1] = bits(&grid, planes, row, i);
        i32::from(bit0) - i32::from(bit1)
    };
    cells(&grid).map(value).collect()
}

/// The bytes of a plane.
fn plane(inputs: &Named<ArrayD<f64>>, name: &str) -> Result<Vec<u8>> {
    Ok(inputs.get(name)?.iter().map(|&byte| byte as u8).collect())
}

/// The values of planes times their scales. A zero stays 0 even where the scale is not finite.
pub fn dequantize(grid: &Grid, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let w = values([&plane(inputs, "plane0")?, &plane(inputs, "plane1")?], grid.rows, grid.n);
    let scale = inputs.get("scale")?;
    let scaled = |(at, &value): (usize, &i32)| match value {
        0 => 0.0,
        value => f64::from(value) * scale[[if scale.len() == 1 { 0 } else { at / grid.n }]],
    };
    let dims = [&grid.leading[..], &[grid.n]].concat();
    Ok(results([("w", &dims, w.iter().enumerate().map(scaled).collect())]))
}

fn mean(sizes: impl Iterator<Item = f32>) -> f64 {
    let (sum, count) = sizes.fold((0.0, 0), |(sum, count), size| (sum + f64::from(size), count + 1));
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}

/// The threshold and scale of some floats.
fn threshold(problem: &Quantization, w: &[f32]) -> (f32, f32) {
    let sizes = || w.iter().map(|v| v.abs());
    match problem.options.rule {
        Rule::Threshold => (problem.options.threshold.unwrap_or_default() as f32, 1.0),
        Rule::Absmean => {
            let mean = mean(sizes());
            let scale = if mean < LEAST_SCALE { LEAST_SCALE } else { mean } as f32;
            (scale / 2.0, scale)
        }
        Rule::Twn => {
            let threshold = TWN * mean(sizes()) as f32;
            (threshold, mean(sizes().filter(|size| *size > threshold || size.is_nan())) as f32)
        }
    }
}

/// The bits of 1, -1 or 0, by a threshold.
fn cut(value: f32, threshold: f32) -> [u8; 2] {
    [u8::from(value > threshold), u8::from(value < -threshold)]
}

pub fn quantize(problem: &Quantization, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let w: Vec<f32> = inputs.get("w")?.iter().map(|&v| v as f32).collect();
    let Quantization { rows, n, .. } = *problem;
    let grid = Grid { layout: Layout::Planes, leading: Vec::new(), rows, n };
    let mut planes = [vec![0u8; rows * plane_bytes(n)], vec![0u8; rows * plane_bytes(n)]];
    let per = if problem.options.per_row { 1 } else { rows };
    let mut scales = Vec::new();
    for part in 0..problem.scales() {
        let (threshold, scale) = threshold(problem, &w[part * per * n..][..per * n]);
        scales.push(f64::from(scale));
        for (row, i) in cells(&grid).filter(|(row, _)| row / per == part) {
            set(&grid, &mut planes, row, i, cut(w[row * n + i], threshold));
        }
    }
    let (plane, count) = (problem.plane()?.shape, scales.len());
    let [plane0, plane1] = planes.map(|plane| plane.into_iter().map(f64::from).collect());
    Ok(results([("plane0", &plane, plane0), ("plane1", &plane, plane1), ("scale", &[count], scales)]))
}

/// Rows as bytes, with their scales.
fn as_bytes(problem: &Activations, x: &[f32]) -> Result<(Vec<i32>, Vec<f32>)> {
    if let Some(at) = x.iter().position(|v| !v.is_finite()) {
        return Err(problem.refuse(at, x[at]));
    }
    let (mut q, mut scales) = (Vec::new(), Vec::new());
    for row in 0..problem.rows {
        let row = &x[row * problem.n..][..problem.n];
        let largest = row.iter().fold(problem.floor, |most, v| most.max(v.abs()));
        let inverse = 127.0 / largest;
        q.extend(row.iter().map(|v| ((v * inverse).round_ties_even() as i32).clamp(-127, 127)));
        scales.push(largest / 127.0);
    }
    Ok((q, scales))
}

fn floats(of: &ArrayD<f64>) -> Vec<f32> {
    of.iter().map(|&v| v as f32).collect()
}

fn wide(of: impl IntoIterator<Item = impl Into<f64>>) -> Vec<f64> {
    of.into_iter().map(Into::into).collect()
}

pub fn activations(problem: &Activations, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let x = inputs.get("x")?;
    let (q, scales) = as_bytes(problem, &floats(x))?;
    Ok(results([("q", x.shape(), wide(q)), ("scale", &problem.leading, wide(scales))]))
}

/// The dot product of each pair of rows.
pub fn dot(problem: &Pairs, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Pairs { rows, bytes, ref leading } = *problem;
    let n = bytes * 8;
    let factor = |plane0, plane1| Ok(values([&plane(inputs, plane0)?, &plane(inputs, plane1)?], rows, n));
    let (a, b) = (factor("a0", "a1")?, factor("b0", "b1")?);
    let dots = (0..rows).map(|row| (row * n..(row + 1) * n).map(|i| a[i] * b[i]).sum::<i32>());
    Ok(results([("dot", leading, wide(dots))]))
}

pub fn matmul(problem: &Product, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Product { rows, n, outs, form, .. } = *problem;
    let w = values([&plane(inputs, "plane0")?, &plane(inputs, "plane1")?], outs, n);
    let x: Vec<f64> = match form {
        Form::Ternary if problem.planes => {
            wide(values([&plane(inputs, "x_plane0")?, &plane(inputs, "x_plane1")?], rows, n))
        }
        _ => inputs.get("x")?.iter().copied().collect(),
    };
    let activations = problem.activations();
    let (q, x_scale) =
        if form == Form::I8 { as_bytes(&activations, &floats(inputs.get("x")?))? } else { Default::default() };
    let sign = |v: f64| {
        if v > 0.0 {
            1.0
        } else if v < 0.0 {
            -1.0
        } else {
            0.0
        }
    };
    let met = |at: usize| match form {
        Form::Ternary => sign(x[at]),
        Form::I8 => f64::from(q[at]),
        Form::F32 => x[at],
    };
    let (mut acc, mut y) = (Vec::new(), Vec::new());
    for (row, out) in (0..rows).flat_map(|row| (0..outs).map(move |out| (row, out))) {
        let there = (0..n).filter(|i| w[out * n + i] != 0);
        let sum: f64 = there.map(|i| f64::from(w[out * n + i]) * met(row * n + i)).sum();
        acc.push(sum);
        let scale = inputs.find("w_scale").map_or(1.0, |s| if s.len() == 1 { s[[0]] } else { s[[out]] });
        let bias = inputs.find("bias").map_or(0.0, |b| b[[out]]);
        let z = sum * x_scale.get(row).map_or(1.0, |&s| f64::from(s)) * scale + bias;
        y.push(problem.options.activation.map_or(z, |f| activations::value(f, z)));
    }
    let of = |last: usize| [&problem.leading[..], &[last]].concat();
    Ok(results([
        ("acc", &of(outs), acc),
        ("y", &of(outs), y),
        ("xq", &if form == Form::I8 { of(n) } else { vec![0] }, wide(q)),
        ("x_scale", if form == Form::I8 { &problem.leading } else { &[0] }, wide(x_scale)),
    ]))
}

/// Sums of columns.
pub fn column_sums(problem: &Weights, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let w = values([&plane(inputs, "plane0")?, &plane(inputs, "plane1")?], problem.rows, problem.n);
    let n = problem.n;
    let sums = (0..n).map(|j| (0..problem.rows).map(|row| w[row * n + j]).sum::<i32>());
    Ok(results([("column_sums", &[n], wide(sums))]))
}

/// The difference between the sums of each row and their prediction.
pub fn verify_sums(problem: &Proof, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let rows = |name: &str, n: usize| -> Result<Vec<f64>> {
        let all: Vec<f64> = inputs.get(name)?.iter().copied().collect();
        Ok((0..problem.rows * n).map(|at| all[at]).collect())
    };
    let (acc, xq) = (rows("acc", problem.outs)?, rows("xq", problem.n)?);
    let columns: Vec<f64> = inputs.get("column_sums")?.iter().copied().collect();
    let difference = |row: usize| {
        let sum: f64 = acc[row * problem.outs..][..problem.outs].iter().sum();
        sum - (0..problem.n).map(|j| xq[row * problem.n + j] * columns[j]).sum::<f64>()
    };
    let differences: Vec<f64> = (0..problem.rows).map(difference).collect();
    match differences.iter().position(|&difference| difference != 0.0) {
        Some(row) => Err(problem.refuse(row, differences[row] as i64)),
        None => Ok(results([("difference", &problem.leading, differences)])),
    }
}
