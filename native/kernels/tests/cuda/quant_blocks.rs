//! Block formats on CUDA: bytes equal to the CPU's, products near the f64 reference and with equal bits in repeated
//! runs, and errors. Without a GPU each test says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::check::noise;
use crate::common::composed::f16_convert;
use crate::common::quant::{SIZES, hard_rows, product, weights};
use crate::common::{Place, bits, cast, gpu, run, run_cuda, worst};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::activations::Activation;
use sidewinder_kernels::ops::products::blocks::{
    Dequantize, DequantizeOptions, Format, MatmulF32Q4, MatmulF32Q8, MatmulQ8Q4, MatmulQ8Q8, Options, Quantize,
    QuantizeOptions, STORAGE,
};
use sidewinder_kernels::ops::products::linear;
use sidewinder_kernels::ops::products::matrices::{self, Quantization};
use sidewinder_kernels::place::{Cpu, Cuda};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

fn one(name: &'static str, tensor: Owned) -> Named<Owned> {
    [(name, tensor)].into_iter().collect()
}

/// Checks that CPU and device give equal bytes.
fn same<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>) {
    let expected = run::<O>(options, inputs, &Exec::default()).unwrap();
    let got = run_cuda::<O>(options, inputs, device).unwrap();
    assert_eq!(bits(&got), bits(&expected), "{} {:?}", O::NAME, op::specs(inputs));
}

#[test]
fn bytes_are_those_of_the_cpu() {
    let Some(device) = gpu() else { return };
    let rounded = |place: &Place, x: &Named<Owned>| f16_convert(place, x, &serde_json::Value::Null);
    for (rows, blocks) in [(0, 3), (3, 0), (1, 1), (3, 7), (5, 301), (1, 3000)] {
        for format in Format::ALL {
            for &dtype in STORAGE {
                let inputs = cast(op::about::<Quantize>(), &one("x", hard_rows(1, rows, blocks)), dtype);
                same::<Quantize>(&device, &QuantizeOptions { format, unchecked: true }, &inputs);
            }
            let q = one("q", weights(4, format, rows, blocks * 32));
            same::<Dequantize>(&device, &DequantizeOptions { format }, &q);
        }
        let x = one("x", hard_rows(2, rows, blocks));
        let [here, there] = [Place::Cpu(Exec::default()), Place::Cuda(&device)].map(|place| rounded(&place, &x));
        assert_eq!(bits(&there), bits(&here), "{rows} rows of {blocks} blocks");
    }
}

#[test]
fn what_is_not_finite_is_refused_by_its_place_or_stored_as_on_the_cpu() {
    let Some(device) = gpu() else { return };
    for bad in [f64::NAN, f64::INFINITY, -9e6] {
        let x = Owned::from_fn(Spec::new(DType::F32, &[3, 640]).unwrap(), |i| match i {
            700 => bad,
            1000 => f64::NEG_INFINITY,
            i => (i % 17) as f64,
        });
        for format in Format::ALL {
            let options = |unchecked| QuantizeOptions { format, unchecked };
            same::<Quantize>(&device, &options(true), &one("x", x.clone()));
            let Err(error) = run_cuda::<Quantize>(&options(false), &one("x", x.clone()), &device) else {
                panic!("takes {bad}")
            };
            assert_eq!((error.kind, &*error.argument), (Kind::Argument, "x"));
            assert!(error.got.ends_with("at position 700"), "{error}");
        }
        let fine = one("x", hard_rows(1, 2, 20));
        same::<Quantize>(&device, &QuantizeOptions::default(), &fine);
    }
}

fn agrees<O: Op<Options = Options>>(device: &Device, options: &Options, inputs: &Named<Owned>) {
    for &dtype in O::STORAGE {
        let inputs = cast(op::about::<O>(), inputs, dtype);
        let expected = common::reference::<O>(options, &inputs);
        let got = run_cuda::<O>(options, &inputs, device).unwrap();
        let again = run_cuda::<O>(options, &inputs, device).unwrap();
        assert_eq!(bits(&got), bits(&again), "{} {dtype}", O::NAME);
        common::assert_close(&got, &expected, &format!("{} {dtype} {:?}", O::NAME, op::specs(&inputs)));
    }
}

fn products_agree<O: Op<Options = Options>>(device: &Device, format: Format) {
    // In addition to the sizes of the CPU: many pieces in flight, and tiles side by side in both directions; blocks of
    // threads of each size, which continue with further outputs or share the columns of a tile; rows of x that are too
    // long to be prepared by the product's own kernel; and empty rows.
    let large = [
        (1, 200, 37),
        (4, 97, 70),
        (5, 40, 64),
        (9, 131, 33),
        (17, 64, 96),
        (40, 33, 130),
        (100, 5, 200),
        (1, 40, 9001),
        (3, 33, 5000),
        (33, 70, 2200),
        (9, 20, 1100),
        (8, 257, 2100),
        (32, 64, 4500),
        (1, 6000, 5),
        (6, 0, 3),
        (6, 24, 9001),
        // Teams of warps: one piece, pieces divided among adjacent teams, and more tiles than run at once.
        (13, 8, 70),
        (50, 136, 1000),
        (32, 512, 520),
        (33, 16, 9000),
    ];
    for (at, (rows, blocks, outputs)) in SIZES.into_iter().chain(large).enumerate() {
        let activation = [None, Some(Activation::Relu), Some(Activation::Silu)][at % 3];
        let inputs = product(format, &[rows, blocks * 32], outputs, at % 2 == 0);
        agrees::<O>(device, &Options { activation }, &inputs);
    }
}

#[test]
fn products_with_q8_agree_with_the_reference() {
    let Some(device) = gpu() else { return };
    products_agree::<MatmulQ8Q8>(&device, Format::Q8);
}

#[test]
fn products_with_q4_agree_with_the_reference() {
    let Some(device) = gpu() else { return };
    products_agree::<MatmulQ8Q4>(&device, Format::Q4);
}

#[test]
fn products_of_floats_agree_with_the_reference() {
    let Some(device) = gpu() else { return };
    products_agree::<MatmulF32Q8>(&device, Format::Q8);
    products_agree::<MatmulF32Q4>(&device, Format::Q4);
}

#[test]
fn what_is_not_finite_makes_its_row_not_finite_and_no_other() {
    fn check<O: Op<Options = Options>>(device: &Device, format: Format) {
        let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        let all = [(2, 96), (6, 96), (2, 256), (6, 256)].into_iter().flat_map(|size| bad.map(|bad| (size, bad)));
        for ((rows, columns), bad) in all {
            let mut inputs = product(format, &[rows, columns], 5, false);
            let x = inputs.take("x").unwrap().view().to_f64();
            let spec = Spec::new(DType::F32, &[rows, columns]).unwrap();
            let place = columns + 40;
            inputs.push("x", Owned::from_fn(spec, |at| if at == place { bad } else { x.as_slice().unwrap()[at] }));
            let y = run_cuda::<O>(&Options::default(), &inputs, device).unwrap().take("y").unwrap().view().to_f64();
            for (at, y) in y.iter().enumerate() {
                assert_eq!(y.is_finite(), at / 5 != 1, "{} {bad} row {}", O::NAME, at / 5);
            }
        }
    }
    let Some(device) = gpu() else { return };
    check::<MatmulQ8Q8>(&device, Format::Q8);
    check::<MatmulQ8Q4>(&device, Format::Q4);
    check::<MatmulF32Q8>(&device, Format::Q8);
    check::<MatmulF32Q4>(&device, Format::Q4);
}

/// Rows of weights at every even address, as parts of a larger tensor.
#[test]
fn weights_may_lie_at_any_even_address() {
    let Some(device) = gpu() else { return };
    let lane = device.lane().unwrap();
    for (rows, blocks) in [(1, 3), (3, 35), (8, 7)] {
        let inputs = product(Format::Q4, &[rows, blocks * 32], 50, false);
        let expected = run_cuda::<MatmulQ8Q4>(&Options::default(), &inputs, &device).unwrap();
        let expected = expected.get("y").unwrap().view().to_f64();
        let buffers = inputs.try_map(|tensor| {
            let buffer = Buffer::new(&device, tensor.spec())?;
            lane.upload(tensor.view().bytes(), &buffer).map(|()| buffer)
        });
        let buffers = buffers.unwrap();
        for from in 0..9 {
            let w = buffers.get("w").unwrap().rows(from..50).unwrap();
            let given: Named<&Buffer> = [("x", buffers.get("x").unwrap()), ("w", &w)].into_iter().collect();
            let y = Buffer::new(&device, Spec::new(DType::F32, &[rows, 50 - from]).unwrap()).unwrap();
            lane.poison(&y).unwrap();
            let results = [("y", &y)].into_iter().collect();
            op::run_cuda::<MatmulQ8Q4>(&Options::default(), &given, &results, &lane).unwrap();
            let got = lane.downloaded(&y).unwrap().view().to_f64();
            for ((row, o), got) in ndarray::indices((rows, 50 - from)).into_iter().zip(&got) {
                assert_eq!(*got, expected[[row, from + o]], "row {row}, output {o} from {from}");
            }
        }
    }
}

/// Many rows of 16-bit types meet the values of the blocks, rounded to their type, without being quantized themselves.
#[test]
fn many_rows_of_16_bits_are_multiplied_as_floats() {
    let Some(device) = gpu() else { return };
    let (lane, exec) = (device.lane().unwrap(), Exec::default());
    let [rows, inputs, outputs] = [260, 2048, 2080];
    let up = |tensor: Owned| {
        let buffer = Buffer::new(&device, tensor.spec()).unwrap();
        lane.upload(tensor.view().bytes(), &buffer).map(|()| buffer)
    };
    for (format, dtype) in Format::ALL.into_iter().flat_map(|format| [DType::Bf16, DType::F16].map(|to| (format, to))) {
        let x = noise(1, &[rows, inputs], -1.0, 1.0).cast(dtype);
        let w = Quantization::Blocks(format).of(&noise(2, &[outputs, inputs], -1.0, 1.0).view(), &exec).unwrap();
        let floats = matrices::floats(&w.as_ref().try_map(|part| Ok(part.view())).unwrap(), inputs).unwrap();
        let [wide, floats] = [x.cast(DType::F32), floats.cast(dtype).cast(DType::F32)];
        let mut expected = Owned::poisoned(Spec::new(DType::F32, &[rows, outputs]).unwrap());
        linear::at(&Cpu(&exec), [wide.view(), floats.view()], None, expected.view_mut()).unwrap();
        let y = Buffer::new(&device, Spec::new(dtype, &[rows, outputs]).unwrap()).unwrap();
        lane.poison(&y).unwrap();
        let (x, w) = (up(x).unwrap(), w.try_map(up).unwrap());
        matrices::multiply(&Cuda(&lane), x, &w.into(), y.clone()).unwrap();
        // One rounding of a sum, which is of the size of some products.
        let off = worst(&lane.downloaded(&y).unwrap(), &expected.cast(dtype), 0.01, 0.01);
        assert!(off <= 1.0, "{off} times the tolerance: {format:?} {dtype}");
    }
}

/// Products prefetch weights only if no kernel in flight writes them: weights that the previous op computes must be
/// complete before they are multiplied.
#[test]
fn weights_that_the_op_before_makes_are_multiplied() {
    let Some(device) = gpu() else { return };
    let lane = device.lane().unwrap();
    let (outputs, blocks) = (2000, 128);
    let made = |seed| one("x", noise(seed, &[outputs, blocks * 32], -1.0, 1.0));
    let quantized = QuantizeOptions { format: Format::Q8, unchecked: true };
    for rows in [1, 8, 32] {
        let x = noise(7, &[rows, blocks * 32], -1.0, 1.0);
        let up = |tensor: &Owned| {
            let buffer = Buffer::new(&device, tensor.spec()).unwrap();
            lane.upload(tensor.view().bytes(), &buffer).map(|()| buffer).unwrap()
        };
        let (floats, x_there) = ([1, 2].map(|seed| up(made(seed).get("x").unwrap())), up(&x));
        let w = Buffer::new(&device, Spec::new(DType::U8, &[outputs, blocks * 34]).unwrap()).unwrap();
        let y = [0, 1].map(|_| Buffer::new(&device, Spec::new(DType::F32, &[rows, outputs]).unwrap()).unwrap());
        for (floats, y) in floats.iter().zip(&y) {
            let (from, to) = ([("x", floats)].into_iter().collect(), [("q", &w)].into_iter().collect());
            op::run_cuda::<Quantize>(&quantized, &from, &to, &lane).unwrap();
            let (from, to) = ([("x", &x_there), ("w", &w)].into_iter().collect(), [("y", y)].into_iter().collect());
            op::run_cuda::<MatmulQ8Q8>(&Options::default(), &from, &to, &lane).unwrap();
        }
        for (seed, y) in [1, 2].into_iter().zip(&y) {
            let mut inputs = one("x", x.clone());
            inputs.push("w", run::<Quantize>(&quantized, &made(seed), &Exec::default()).unwrap().take("q").unwrap());
            let expected = run_cuda::<MatmulQ8Q8>(&Options::default(), &inputs, &device).unwrap();
            assert_eq!(
                lane.downloaded(y).unwrap().view().bytes(),
                expected.get("y").unwrap().view().bytes(),
                "{rows} rows"
            );
        }
    }
}
