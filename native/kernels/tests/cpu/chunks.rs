//! Calls in chunks: their results are those of whole calls, they tell of all parts, and an error ends them.

use crate::common::check::noise;
use sidewinder_kernels::chunks::Chunks;
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{self, Call, Named, Op, named};
use sidewinder_kernels::ops::products::blocks::{Dequantize, DequantizeOptions, Format, Quantize, QuantizeOptions};
use sidewinder_kernels::ops::products::ternary::dequantize::{self, DequantizeTernary};
use sidewinder_kernels::ops::products::ternary::rules::{Options, QuantizeTernary, Rule};
use sidewinder_kernels::tensor::{DType, Owned};
use std::cell::RefCell;

const ROWS: usize = 7;
const COLUMNS: usize = 96;

/// The outputs of a call in chunks of `size` numbers, and what `done` got of each, until it has got `end` of them.
fn run(call: &Call, inputs: &Named<Owned>, exec: Exec, size: usize, end: usize) -> (Result<Named<Owned>>, Vec<usize>) {
    let heard = RefCell::new(Vec::new());
    let done = |parts| {
        heard.borrow_mut().push(parts);
        if heard.borrow().len() == end { Err(Error::new(Kind::Cancelled, "test")) } else { Ok(()) }
    };
    let mut outputs = call.outputs().map(|&spec| Owned::poisoned(spec));
    let to = outputs.iter_mut().map(|(name, output)| (name.clone(), output.view_mut())).collect();
    let result = call.cpu_in_chunks(&inputs.map(Owned::view), to, &exec, Chunks { size, done: &done });
    (result.map(|()| outputs), heard.into_inner())
}

fn bytes(outputs: &Named<Owned>) -> Vec<Vec<u8>> {
    outputs.iter().map(|(_, output)| output.view().bytes().to_vec()).collect()
}

/// Checks an op that passes `passes` times over all numbers, and returns its outputs.
fn check<O: Op>(options: &O::Options, inputs: &Named<Owned>, passes: usize) -> Named<Owned> {
    let call = Call::new::<O>(op::specs(inputs), options).unwrap();
    assert_eq!(call.parts(), passes * ROWS * COLUMNS);
    let mut whole = None;
    for &level in Level::available() {
        for threads in [1, 2] {
            let exec = Exec { level, threads };
            let (outputs, heard) = run(&call, inputs, exec, usize::MAX, 0);
            assert_eq!(heard.iter().sum::<usize>(), call.parts());
            let outputs = outputs.unwrap();
            for size in [1, COLUMNS, 3 * COLUMNS, ROWS * COLUMNS] {
                let (chunked, heard) = run(&call, inputs, exec, size, 0);
                assert_eq!(bytes(&chunked.unwrap()), bytes(&outputs), "{level:?}, chunks of {size}");
                assert_eq!(heard.iter().sum::<usize>(), call.parts());
                assert!(level == Level::Reference || heard.len() >= passes * ROWS * COLUMNS / size.max(COLUMNS));
                for end in 1..=heard.len() {
                    let (ended, until) = run(&call, inputs, exec, size, end);
                    assert_eq!(ended.err().unwrap().kind, Kind::Cancelled);
                    assert_eq!(until, heard[..end]);
                }
            }
            whole = Some(outputs);
        }
    }
    whole.unwrap()
}

#[test]
fn blocks() {
    for dtype in [DType::F32, DType::Bf16] {
        for format in Format::ALL {
            let x = named([("x", Some(noise(1, &[ROWS, COLUMNS], -2.0, 2.0).cast(dtype)))]);
            let quantized = check::<Quantize>(&QuantizeOptions { format, ..Default::default() }, &x, 1);
            check::<Dequantize>(&DequantizeOptions { format }, &quantized, 1);
        }
    }
}

#[test]
fn a_number_that_is_refused_is_named_where_it_is() {
    let mut x = noise(1, &[ROWS, COLUMNS], -2.0, 2.0);
    x.view_mut().slice::<f32>().unwrap()[5 * COLUMNS + 3] = f32::NAN;
    let x = named([("x", Some(x))]);
    let call = Call::new::<Quantize>(op::specs(&x), &QuantizeOptions::default()).unwrap();
    let refused = |size| run(&call, &x, Exec::default(), size, 0).0.err().unwrap();
    assert_eq!(refused(2 * COLUMNS), refused(usize::MAX));
}

#[test]
fn ternary_numbers() {
    let w = named([("w", Some(noise(2, &[ROWS, COLUMNS], -2.0, 2.0)))]);
    for (rule, threshold, means) in [(Rule::Threshold, Some(0.5), 0), (Rule::Absmean, None, 1), (Rule::Twn, None, 2)] {
        for per_row in [false, true] {
            let passes = 1 + if per_row { 1 } else { means };
            let planes = check::<QuantizeTernary>(&Options { rule, threshold, per_row }, &w, passes);
            check::<DequantizeTernary>(&dequantize::Options { n: Some(COLUMNS) }, &planes, 1);
        }
    }
}
