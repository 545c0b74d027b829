//! Checks that every op's tests make: agreement with the f64 reference on every level and in every type, and gradients
//! against finite differences.

use super::{Random, THREADS, assert_close, bits, cast, levels, reference, run, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::op::{self, About, Named, Op, about};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// Pseudorandom numbers, evenly distributed over a range.
pub fn noise(seed: u64, dims: &[usize], low: f64, high: f64) -> Owned {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |_| low + (high - low) * random.next())
}

/// Named noise of the given shapes, from -1 to 1.
pub fn inputs(shapes: &[(&'static str, &[usize])]) -> Named<Owned> {
    shapes.iter().zip(1..).map(|(&(name, dims), seed)| (name, noise(seed, dims, -1.0, 1.0))).collect()
}

/// Runs `O` in every type, on every level and with several numbers of threads. Results must be near the reference, and
/// their bits independent of the number of threads.
pub fn agrees_everywhere<O: Op>(options: &O::Options, inputs: &Named<Owned>) {
    for &dtype in O::STORAGE {
        let inputs = cast(op::about::<O>(), inputs, dtype);
        let expected = reference::<O>(options, &inputs);
        for level in levels() {
            let run = |threads| run::<O>(options, &inputs, &Exec { level, threads }).unwrap();
            let one = run(1);
            assert_close(&one, &expected, &format!("{} {dtype} {} {:?}", O::NAME, level.name(), op::specs(&inputs)));
            for &threads in THREADS {
                assert_eq!(bits(&run(threads)), bits(&one), "{} {dtype} {} {threads} threads", O::NAME, level.name());
            }
        }
    }
}

/// Intermediate tensors are rounded to the storage type after each step, so 16-bit results may be off by several
/// roundings of the largest value of their tensor.
fn near(got: &Named<Owned>, expected: &Named<Owned>, (dtype, depth): (DType, f64), what: &str) {
    let relative = match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 5e-5,
        DType::F16 => 8e-3 * depth,
        DType::Bf16 => 6e-2 * depth,
        _ => 0.0,
    };
    for (name, expected) in expected.iter() {
        let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
        let worst = worst(got.get(name).unwrap(), expected, 0.0, relative * largest);
        assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance: {what}");
    }
}

/// [`agrees_everywhere`] for an op that is made of others.
pub fn steps_agree_everywhere<O: Op>(options: &O::Options, inputs: &Named<Owned>) {
    deep_steps_agree_everywhere::<O>(options, inputs, 1.0);
}

/// Like [`steps_agree_everywhere`], for ops with `depth` times as many steps that round to 16 bits as a layer has.
pub fn deep_steps_agree_everywhere<O: Op>(options: &O::Options, inputs: &Named<Owned>, depth: f64) {
    for dtype in DType::FLOATS {
        let inputs = cast(op::about::<O>(), inputs, dtype);
        let expected = reference::<O>(options, &inputs);
        for level in levels() {
            let run = |threads| run::<O>(options, &inputs, &Exec { level, threads }).unwrap();
            let one = run(1);
            near(&one, &expected, (dtype, depth), &format!("{} {dtype} {}", O::NAME, level.name()));
            for &threads in THREADS {
                assert_eq!(bits(&run(threads)), bits(&one), "{} {dtype} {} {threads} threads", O::NAME, level.name());
            }
        }
    }
}

/// Those of the tensors that are inputs of the op.
pub fn known(op: &About, tensors: &Named<Owned>) -> Named<Owned> {
    let slots = op.inputs.iter().filter_map(|slot| Some((slot.name, tensors.find(slot.name)?.clone())));
    slots.collect()
}

/// The inputs of the gradient `B` of `F`: those of `F`, its outputs, and a cotangent for each.
pub fn backward_inputs<F: Op, B: Op>(options: &F::Options, inputs: &Named<Owned>) -> Named<Owned> {
    let outputs = run::<F>(options, inputs, &Exec { level: Level::best(), threads: 1 }).unwrap();
    let cotangents: Named<Owned> = outputs
        .iter()
        .zip(101..)
        .map(|((name, output), seed)| (format!("d{name}"), noise(seed, &output.spec().shape, -1.0, 1.0)))
        .collect();
    let mut all = known(about::<B>(), &cotangents);
    // An output state may have the name of an input state; only the input is passed on.
    let new =
        known(about::<B>(), &outputs).into_iter().filter(|(name, _)| F::INPUTS.iter().all(|slot| slot.name != *name));
    for (name, tensor) in known(about::<B>(), inputs).into_iter().chain(new) {
        all.push(name, tensor);
    }
    cast(op::about::<B>(), &all, all.get(B::INPUTS[0].name).unwrap().spec().dtype)
}

/// Checks every gradient that `B` gives of `F` against central differences, in f64.
pub fn gradients_agree_with_differences<F: Op, B: Op<Options = F::Options>>(
    options: &F::Options,
    inputs: &Named<Owned>,
) {
    const STEP: f64 = 1e-5;
    let exec = Exec { level: Level::Reference, threads: 1 };
    let inputs = cast(op::about::<F>(), inputs, DType::F64);
    let of_backward = backward_inputs::<F, B>(options, &inputs);
    let gradients = run::<B>(options, &of_backward, &exec).unwrap();
    let loss = |inputs: &Named<Owned>| -> f64 {
        let outputs = run::<F>(options, inputs, &exec).unwrap();
        let product = |(name, output): (&op::Name, &Owned)| match of_backward.find(&format!("d{name}")) {
            Some(cotangent) => (output.view().to_f64() * cotangent.view().to_f64()).sum(),
            None => 0.0,
        };
        outputs.iter().map(product).sum()
    };
    for (name, input) in inputs.iter() {
        let gradient = gradients.get(&format!("d{name}")).unwrap().view().to_f64();
        let values = input.view().to_f64();
        let largest = gradient.fold(1.0f64, |m, v| m.max(v.abs()));
        for (i, &analytic) in gradient.iter().enumerate() {
            let moved = |by: f64| {
                let mut values = values.iter().enumerate().map(|(j, &v)| if i == j { v + by } else { v });
                let moved = Owned::from_fn(input.spec(), |_| values.next().unwrap());
                let all = inputs.iter().map(|(n, t)| (n.clone(), if n == name { moved.clone() } else { t.clone() }));
                loss(&all.collect())
            };
            let numeric = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let off = (numeric - analytic).abs() / largest;
            assert!(off < 1e-7, "{} d{name}[{i}]: {analytic}, by differences {numeric}", B::NAME);
        }
    }
}
