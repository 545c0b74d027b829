//! Packed calls against calls of each sequence, and against the f64 references.

use crate::attention::gradients_agree;
use crate::common;
use crate::common::check;
use crate::common::packed::{self, Visit, WRONG, five_steps};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::{Backward, CU_SEQLENS, Differentiable, Named, Op, Packed, about, specs};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::attention::{self, Attention, AttentionBackward};
use sidewinder_kernels::ops::scan::linear_scan::{LinearScan, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

struct Separately;

impl Separately {
    fn compare<O: Op>(options: &O::Options, inputs: &Named<Owned>, shared: &[&str]) {
        for (dtype, level) in
            [DType::F32, DType::Bf16].into_iter().flat_map(|dtype| common::levels().map(move |l| (dtype, l)))
        {
            let inputs = common::cast(about::<Packed<O>>(), inputs, dtype);
            let exec = Exec { level, threads: 2 };
            let got = common::run::<Packed<O>>(options, &inputs, &exec).unwrap();
            let expected = packed::separately(&inputs, shared, |one| common::run::<O>(options, one, &exec).unwrap());
            for (name, parts) in expected.iter() {
                let joint = packed::joint(name, parts, got.get(name).unwrap().spec(), shared);
                let bits = [got.get(name).unwrap(), &joint].map(|tensor| tensor.view().bytes().to_vec());
                assert!(bits[0] == bits[1], "{name} of {} {dtype} {}", O::NAME, level.name());
            }
        }
    }
}

impl Visit for Separately {
    fn visit<O: Differentiable>(&self, options: &O::Options, inputs: &Named<Owned>, shared: &[&str]) {
        Self::compare::<O>(options, inputs, shared);
        Self::compare::<Backward<O>>(options, &packed::of_gradient::<O>(options, inputs), shared);
    }
}

#[test]
fn every_sequence_has_the_bits_of_a_call_of_its_own() {
    packed::every_op(&Separately);
}

struct Reference;

impl Visit for Reference {
    fn visit<O: Differentiable>(&self, options: &O::Options, inputs: &Named<Owned>, shared: &[&str]) {
        check::agrees_everywhere::<Packed<O>>(options, inputs);
        // The gradient of a constant C in 16 bits is rounded for each sequence, so it is only near in wider types.
        let per_step = shared.contains(&"C").then(|| packed::with_c_per_step(inputs));
        let backward = packed::of_gradient::<O>(options, per_step.as_ref().unwrap_or(inputs));
        check::agrees_everywhere::<Packed<Backward<O>>>(options, &backward);
    }
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    packed::every_op(&Reference);
}

#[test]
fn attention_agrees_with_the_reference_and_with_each_sequence() {
    for options in [false, true].map(packed::heads_last) {
        let inputs = packed::of_attention(&packed::LENGTHS, [4, 2, 8, 6]);
        Separately::compare::<Attention>(&options, &inputs, &[]);
        Separately::compare::<AttentionBackward>(&options, &packed::of_gradient::<Attention>(&options, &inputs), &[]);
        check::agrees_everywhere::<Packed<Attention>>(&options, &inputs);
        gradients_agree::<Packed<Attention>, Packed<AttentionBackward>>(&options, &inputs);
    }
}

#[test]
fn attention_has_the_same_bits_in_both_orders_of_axes() {
    let exec = Exec { level: Level::best(), threads: 2 };
    let last = packed::heads_last(true);
    let first = attention::Options { causal: true, ..Default::default() };
    let inputs = packed::of_attention(&packed::LENGTHS, [4, 2, 8, 6]);
    let backward = packed::of_gradient::<Attention>(&last, &inputs);
    let forward = [(&last, inputs.clone()), (&first, packed::heads_first(&inputs))]
        .map(|(options, inputs)| common::run::<Packed<Attention>>(options, &inputs, &exec).unwrap());
    let gradients = [(&last, backward.clone()), (&first, packed::heads_first(&backward))]
        .map(|(options, inputs)| common::run::<Packed<Backward<Attention>>>(options, &inputs, &exec).unwrap());
    for [last, first] in [forward, gradients] {
        for (name, tensor) in packed::heads_first(&last).iter() {
            assert!(tensor.view().bytes() == first.get(name).unwrap().view().bytes(), "{name}");
        }
    }
}

#[test]
fn attention_takes_no_mask_and_as_many_keys_as_queries() {
    let inputs = packed::of_attention(&packed::LENGTHS, [4, 2, 8, 6]);
    let options = packed::heads_last(false);
    let refused = |name: &'static str, tensor: Owned| {
        let call = ops::call::<Packed<Attention>>(specs(&common::with(&inputs, name, tensor)), &options);
        call.err().map(|error| (error.kind, error.argument.to_string()))
    };
    let mask = Owned::zeros(Spec::new(DType::U8, &[1, 1, 196, 196]).unwrap());
    assert_eq!(refused("mask", mask), Some((Kind::Argument, "mask".to_string())));
    assert_eq!(refused("bias", check::noise(1, &[1, 4, 1, 1], 0.0, 1.0)), Some((Kind::Argument, "bias".to_string())));
    let shorter =
        ["k", "v"].map(|name| (name, check::noise(1, &[1, 195, 2, if name == "k" { 8 } else { 6 }], 0.0, 1.0)));
    let both = shorter.iter().fold(inputs.clone(), |all, (name, tensor)| common::with(&all, name, tensor.clone()));
    let error = ops::call::<Packed<Attention>>(specs(&both), &options).err().expect("an error");
    assert_eq!((error.kind, &*error.argument), (Kind::Shape, "k"));
}

fn run(inputs: &Named<Owned>) -> Result<Named<Owned>, Error> {
    let exec = Exec { level: Level::best(), threads: 1 };
    common::run::<Packed<LinearScan>>(&Options { return_state: true }, inputs, &exec)
}

#[test]
fn wrong_ends_are_refused() {
    for (ends, expected) in WRONG {
        let error = run(&five_steps(ends)).err().expect("an error");
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Argument, CU_SEQLENS, "linear_scan"));
        assert_eq!(&*error.expected, expected);
        let inputs = five_steps(ends);
        let call = ops::call::<Packed<LinearScan>>(specs(&inputs), &Options::default()).unwrap();
        assert!(call.reference(&inputs.map(|tensor| tensor.view().to_f64())).is_err());
    }
    assert!(run(&five_steps(&[0.0, 2.0, 2.0, 5.0])).is_ok());
}

#[test]
fn wrong_shapes_and_types_are_refused() {
    let refused = |name: &'static str, tensor: Owned| {
        let error = run(&common::with(&five_steps(&[0.0, 2.0, 5.0]), name, tensor)).err().expect("an error");
        (error.kind, error.argument.to_string())
    };
    let shape = |name: &str| (Kind::Shape, name.to_string());
    assert_eq!(refused("a", check::noise(1, &[2, 5, 3], 0.0, 1.0)), shape("a"));
    assert_eq!(refused("b", check::noise(1, &[1, 4, 3], 0.0, 1.0)), shape("b"));
    assert_eq!(refused("initial_state", check::noise(1, &[1, 3], 0.0, 1.0)), shape("initial_state"));
    assert_eq!(refused(CU_SEQLENS, Owned::zeros(Spec::new(DType::I32, &[1, 3]).unwrap())), shape(CU_SEQLENS));
    assert_eq!(refused(CU_SEQLENS, Owned::zeros(Spec::new(DType::I32, &[0]).unwrap())), shape(CU_SEQLENS));
    let floats = check::noise(1, &[3], 0.0, 1.0);
    assert_eq!(refused(CU_SEQLENS, floats), (Kind::DType, CU_SEQLENS.to_string()));
}

#[test]
fn states_have_the_number_of_sequences() {
    let inputs = common::with(&five_steps(&[0.0, 5.0, 5.0]), "initial_state", check::noise(1, &[2, 3], 0.0, 1.0));
    let call = ops::call::<Packed<LinearScan>>(specs(&inputs), &Options { return_state: true }).unwrap();
    assert_eq!(call.outputs().get("last_state").unwrap().shape[..], [2, 3]);
    let results = run(&inputs).unwrap();
    let last = common::part(results.get("last_state").unwrap(), 0, 1..2);
    let initial = common::part(inputs.get("initial_state").unwrap(), 0, 1..2);
    assert_eq!(last.view().bytes(), initial.view().bytes(), "an empty sequence keeps its state");
}
