//! One sequence in parts, and the call of the whole sequence that they stand for.

use super::check::backward_inputs;
use super::packed::{axis, joint};
use super::{cast, part, reference, with, without};
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::op::{Backward, CU_SEQLENS, Differentiable, Named, Op, Packed, Parts, about, specs};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::ops::Range;

/// Runs checked parts with their inputs, and gives their outputs.
pub type Run<'r> = dyn Fn(&Parts, &[Named<Owned>]) -> Vec<Named<Owned>> + 'r;

/// Compares an op and its gradient over parts with the reference of the whole sequence: with packed inputs, whose sequences
/// are the parts. `check` gets each result, that of the reference, and the storage type.
pub fn agree<O: Differentiable>(
    options: &O::Options,
    packed: &Named<Owned>,
    shared: &[&str],
    run: &Run,
    check: impl Fn(&str, &Owned, &Owned, DType),
) {
    let parts = parts(packed.get(CU_SEQLENS).unwrap());
    let whole = one(packed, shared);
    for dtype in O::STORAGE.iter().copied() {
        let whole = cast(about::<Packed<O>>(), &whole, dtype);
        let given = cut(&whole, &parts, shared);
        let Ok(calls) = checked::<Packed<O>>(options, &given) else {
            return refused::<Packed<O>>(options, &given);
        };
        let compare = |got: &Named<Owned>, expected: &Named<Owned>| {
            expected.iter().for_each(|(name, expected)| check(name, got.get(name).unwrap(), expected, dtype));
        };
        let outputs = run(&calls, &given);
        let expected = reference::<Packed<O>>(options, &whole);
        compare(&joined(&outputs, &expected, shared), &expected);

        let whole = backward_inputs::<Packed<O>, Packed<Backward<O>>>(options, &whole);
        let mut given = cut(&whole, &parts, shared);
        for (given, outputs) in given.iter_mut().zip(&outputs).skip(1) {
            let states = outputs.iter().filter(|(name, _)| name.starts_with("initial_"));
            states.for_each(|(name, state)| given.push(name.clone(), state.clone()));
        }
        let calls = checked::<Packed<Backward<O>>>(options, &given).unwrap();
        let expected = reference::<Packed<Backward<O>>>(options, &whole);
        compare(&joined(&run(&calls, &given), &expected, shared), &expected);
    }
}

/// The calls of the parts.
pub fn checked<O: Op>(options: &O::Options, inputs: &[Named<Owned>]) -> Result<Parts> {
    let options = options.clone();
    let specs: Vec<_> = inputs.iter().map(specs).collect();
    Parts::new(about::<O>(), &(Box::new(move |specs| ops::call::<O>(specs, &options)) as _), &specs)
}

fn refused<O: Op>(options: &O::Options, inputs: &[Named<Owned>]) {
    let error = checked::<O>(options, inputs).err().unwrap();
    assert_eq!(error.kind, Kind::Option, "{error}");
    assert!(error.to_string().contains("return_state of part 0"), "{error}");
}

/// The steps of each part.
fn parts(ends: &Owned) -> Vec<Range<usize>> {
    let ends: Vec<usize> = ends.view().to_f64().iter().map(|&end| end as usize).collect();
    ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

/// Packed inputs as those of one sequence, which starts from the first state.
fn one(packed: &Named<Owned>, shared: &[&str]) -> Named<Owned> {
    let of_one = |name: &str, tensor: &Owned| match axis(name, shared) {
        Some(0) => part(tensor, 0, 0..1),
        _ => tensor.clone(),
    };
    without(packed, &[CU_SEQLENS]).iter().map(|(name, tensor)| (name.clone(), of_one(name, tensor))).collect()
}

/// The inputs of each part: states are those of the first one, and cotangents of states those of the last one.
fn cut(whole: &Named<Owned>, parts: &[Range<usize>], shared: &[&str]) -> Vec<Named<Owned>> {
    let own = |at: usize, name: &str, tensor: &Owned| match axis(name, shared) {
        None => Some(tensor.clone()),
        Some(0) if name.starts_with("initial_") => (at == 0).then(|| tensor.clone()),
        Some(0) => (at + 1 == parts.len()).then(|| tensor.clone()),
        Some(axis) => Some(part(tensor, axis, parts[at].clone())),
    };
    let inputs = |at| whole.iter().filter_map(|(name, tensor)| Some((name.clone(), own(at, name, tensor)?))).collect();
    (0..parts.len()).map(inputs).collect()
}

/// The results of the whole sequence from those of its parts.
fn joined(parts: &[Named<Owned>], whole: &Named<Owned>, shared: &[&str]) -> Named<Owned> {
    let all = |name: &str, expected: &Owned| {
        let of: Vec<&Owned> = match axis(name, shared) {
            Some(0) if name.starts_with("last_") => vec![parts[parts.len() - 1].get(name).unwrap()],
            Some(0) => vec![parts[0].get(name).unwrap()],
            _ => parts.iter().map(|part| part.get(name).unwrap()).collect(),
        };
        joint(name, &of, Spec { dtype: of[0].spec().dtype, ..expected.spec() }, shared)
    };
    whole.iter().map(|(name, expected)| (name.clone(), all(name, expected))).collect()
}

/// Inputs of two parts of a linear scan of three steps each.
pub fn of_linear_scan() -> [Named<Owned>; 2] {
    [0, 1].map(|at| {
        let all = super::check::inputs(&[("a", &[1, 3, 2]), ("b", &[1, 3, 2])]);
        if at == 0 { with(&all, "initial_state", super::check::noise(3, &[1, 2], -1.0, 1.0)) } else { all }
    })
}
