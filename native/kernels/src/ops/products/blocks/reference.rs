//! The reference: one value at a time, in the form of the formulas. Steps that the formats define in f32 are
//! done in f32, everything else in f64.

use super::format::{BLOCK, Format, SCALE};
use super::problem::{Conversion, Problem};
use crate::error::Result;
use crate::ops::activations;
use half::f16;
use ndarray::ArrayD;

/// Rounds halves away from zero.
fn rounded(v: f32) -> f32 {
    v.trunc() + if v.fract().abs() >= 0.5 { v.signum() } else { 0.0 }
}

/// The scale of a block before it is stored, and its integers: nibbles for Q4_0.
fn quantized(format: Format, x: &[f32]) -> (f32, Vec<i32>) {
    let mut most = 0.0f32;
    for &v in x {
        if v.is_nan() || v.abs() > most.abs() {
            most = v;
        }
        if most.is_nan() {
            break;
        }
    }
    let d = match format {
        Format::Q8 => most.abs() / 127.0,
        Format::Q4 => most / -8.0,
    };
    let id = if d == 0.0 { 0.0 } else { 1.0 / d };
    let integer = |&v: &f32| match format {
        Format::Q8 => rounded(v * id).clamp(-127.0, 127.0) as i32,
        Format::Q4 => (v * id + 8.5).trunc().clamp(0.0, 15.0) as i32,
    };
    (d, x.iter().map(integer).collect())
}

fn stored(d: f32) -> f16 {
    if d.is_nan() { f16::NAN } else { f16::from_f32(d) }
}

fn bytes(format: Format, x: &[f32]) -> Vec<u8> {
    let (d, q) = quantized(format, x);
    let mut bytes = stored(d).to_le_bytes().to_vec();
    match format {
        Format::Q8 => bytes.extend(q.iter().map(|&q| q as i8 as u8)),
        Format::Q4 => bytes.extend((0..BLOCK / 2).map(|j| (q[j] | q[j + BLOCK / 2] << 4) as u8)),
    }
    bytes
}

/// The bytes of rows of floats.
pub fn quantize(problem: &Conversion, x: &ArrayD<f64>) -> Result<ArrayD<f64>> {
    let x: Vec<f32> = x.iter().map(|&v| v as f32).collect();
    let limit = problem.format.limit();
    if let Some(at) = x.iter().position(|v| v.is_nan() || v.abs() >= limit).filter(|_| !problem.unchecked) {
        return Err(problem.format.refused(at, x[at]));
    }
    let bytes = x.chunks_exact(BLOCK).flat_map(|x| bytes(problem.format, x)).map(f64::from).collect();
    Ok(ArrayD::from_shape_vec(&problem.q.shape[..], bytes).expect("as many bytes as the shape says"))
}

/// The scale and the integers of a block.
fn block(format: Format, block: &[u8]) -> (f64, Vec<i32>) {
    let q = |j: usize| match format {
        Format::Q8 => i32::from(block[SCALE + j] as i8),
        Format::Q4 => i32::from(block[SCALE + j % 16] >> (j / 16 * 4) & 15) - 8,
    };
    (f16::from_le_bytes([block[0], block[1]]).to_f64(), (0..BLOCK).map(q).collect())
}

fn values(format: Format, q: &ArrayD<f64>) -> Vec<f32> {
    let bytes: Vec<u8> = q.iter().map(|&byte| byte as u8).collect();
    let blocks = bytes.chunks_exact(format.bytes()).map(|bytes| block(format, bytes));
    blocks.flat_map(|(d, q)| q.into_iter().map(move |q| d as f32 * q as f32)).collect()
}

/// The values of rows of blocks.
pub fn dequantize(problem: &Conversion, q: &ArrayD<f64>) -> ArrayD<f64> {
    let values = values(problem.format, q).into_iter().map(f64::from).collect();
    ArrayD::from_shape_vec(&problem.x.shape[..], values).expect("as many values as the shape says")
}

/// The product.
pub fn multiply(problem: &Problem, [x, w]: [&ArrayD<f64>; 2], b: Option<&ArrayD<f64>>) -> Result<ArrayD<f64>> {
    let Problem { rows, inputs, outputs, factors, activation, .. } = *problem;
    let bytes: Vec<u8> = w.iter().map(|&byte| byte as u8).collect();
    let weights: Vec<_> =
        bytes.chunks_exact(factors.weights.bytes()).map(|bytes| block(factors.weights, bytes)).collect();
    let x: Vec<f32> = x.iter().map(|&v| v as f32).collect();
    let blocks = inputs / BLOCK;
    let mut y = Vec::with_capacity(rows * outputs);
    for row in 0..rows {
        let x: Vec<_> =
            x[row * inputs..][..inputs].chunks_exact(BLOCK).map(|x| (x, quantized(Format::Q8, x))).collect();
        for o in 0..outputs {
            let mut z = 0.0;
            for ((x, (d, q)), (dw, w)) in x.iter().zip(&weights[o * blocks..]) {
                z += if factors.quantized {
                    let sum: i32 = q.iter().zip(w).map(|(q, w)| q * w).sum();
                    stored(*d).to_f64() * dw * f64::from(sum)
                } else {
                    x.iter().zip(w).map(|(&x, &w)| f64::from(x) * (*dw as f32 * w as f32) as f64).sum()
                };
            }
            z += b.map_or(0.0, |b| b[o]);
            y.push(activation.map_or(z, |f| activations::value(f, z)));
        }
    }
    Ok(ArrayD::from_shape_vec(&problem.y()?[..], y).expect("as many values as the shape says"))
}
