//! The dense layer and its gradient against their f64 references and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::activations::Activation;
use sidewinder_kernels::ops::products::linear::{Linear, LinearBackward, Options};
use sidewinder_kernels::tensor::Owned;

fn inputs(x: &[usize], outputs: usize, bias: bool) -> Named<Owned> {
    let mut inputs = check::inputs(&[("x", x), ("w", &[outputs, *x.last().unwrap()])]);
    if bias {
        inputs.push("b", noise(7, &[outputs], -1.0, 1.0));
    }
    inputs
}

#[test]
fn every_type_agrees_with_the_reference() {
    let shapes: &[(&[usize], usize)] = &[
        (&[1], 1),
        (&[7], 3),
        (&[1, 1], 1),
        (&[1, 200], 67),
        (&[13, 19], 23),
        (&[15, 700], 70),
        (&[35, 40], 53),
        (&[2, 65, 33], 31),
        (&[2, 3, 1, 5], 1),
        (&[127, 97], 130),
        (&[300, 64], 48),
        (&[33, 64], 300),
        (&[40, 1088], 40),
        (&[0, 4], 3),
        (&[4, 0], 3),
        (&[4, 3], 0),
        (&[2, 0, 3], 5),
    ];
    for &(x, outputs) in shapes {
        for bias in [false, true] {
            let inputs = inputs(x, outputs, bias);
            check::agrees_everywhere::<Linear>(&Options::default(), &inputs);
            let backward = check::backward_inputs::<Linear, LinearBackward>(&Options::default(), &inputs);
            check::agrees_everywhere::<LinearBackward>(&Options::default(), &backward);
        }
    }
}

#[test]
fn every_activation_agrees_with_the_reference() {
    for activation in Activation::ALL {
        let options = Options { activation: Some(activation) };
        for (x, outputs, bias) in
            [(&[1, 1][..], 1, true), (&[2, 5, 19], 23, true), (&[65, 33], 31, false), (&[4, 0], 3, true)]
        {
            let inputs = inputs(x, outputs, bias);
            check::agrees_everywhere::<Linear>(&options, &inputs);
            let backward = check::backward_inputs::<Linear, LinearBackward>(&options, &inputs);
            check::agrees_everywhere::<LinearBackward>(&options, &backward);
        }
        let inputs = inputs(&[2, 3, 4], 5, true);
        check::gradients_agree_with_differences::<Linear, LinearBackward>(&options, &inputs);
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (x, outputs) in [(&[3][..], 2), (&[2, 3, 4], 5)] {
        check::gradients_agree_with_differences::<Linear, LinearBackward>(
            &Options::default(),
            &inputs(x, outputs, true),
        );
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |name: &'static str, dims: &[usize]| -> Error {
        let mut inputs = inputs(&[2, 3, 4], 5, true);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        common::run::<Linear>(&Options::default(), &inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims, argument) in
        [("x", &[][..], "x"), ("x", &[2, 5], "w"), ("w", &[5], "w"), ("w", &[4, 5], "w"), ("b", &[4], "b")]
    {
        let error = refused(name, dims);
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, argument, "linear"), "{error}");
    }
}
