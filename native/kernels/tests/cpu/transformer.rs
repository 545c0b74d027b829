//! The feed-forward layer, self-attention and the transformer block, with their gradients, against their f64
//! references and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{Backward, Differentiable, Named};
use sidewinder_kernels::ops::activations::Activation;
use sidewinder_kernels::ops::layers::mha::{self, Mha};
use sidewinder_kernels::ops::layers::swiglu_mlp::{self, SwigluMlp};
use sidewinder_kernels::ops::layers::transformer_block::{self, TransformerBlock};
use sidewinder_kernels::ops::positions::rope::Pairing;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// Inputs in f32, with weights as at initialisation.
fn inputs(shapes: &[(&'static str, &[usize])]) -> Named<Owned> {
    let each = shapes.iter().zip(1..).map(|(&(name, dims), seed)| {
        let bound = match (name, dims) {
            ("x", _) | (_, [_]) => 1.0,
            (_, dims) => 1.0 / (dims[dims.len() - 1].max(1) as f64).sqrt(),
        };
        (name, noise(seed, dims, -bound, bound))
    });
    each.collect()
}

fn mlp([batch, length, width, hidden]: [usize; 4]) -> Named<Owned> {
    let x: &[usize] = &[batch, length, width];
    inputs(&[("x", x), ("wg", &[hidden, width]), ("wu", &[hidden, width]), ("wd", &[width, hidden])])
}

fn self_attention([batch, length, width]: [usize; 3], bias: bool, masked: bool) -> Named<Owned> {
    let x: &[usize] = &[batch, length, width];
    let mut inputs = inputs(&[("x", x), ("wqkv", &[3 * width, width]), ("wo", &[width, width])]);
    if bias {
        inputs.push("bo", noise(9, &[width], -1.0, 1.0));
    }
    if masked {
        inputs.push("mask", mask(batch, length));
    }
    inputs
}

/// A mask that hides every third token, and for the second query all tokens.
fn mask(batch: usize, length: usize) -> Owned {
    let spec = Spec::new(DType::U8, &[batch, 1, length, length]).unwrap();
    Owned::from_fn(spec, |i| {
        let (query, key) = (i / length % length, i % length);
        f64::from(query != 1 && key % 3 != 2)
    })
}

fn block([batch, length, width, hidden]: [usize; 4], bias: bool, masked: bool) -> Named<Owned> {
    let mut inputs = self_attention([batch, length, width], bias, masked);
    for (name, tensor) in mlp([batch, length, width, hidden]).into_iter().filter(|(name, _)| name != "x") {
        inputs.push(name, tensor);
    }
    for (seed, name) in ["ln1_w", "ln1_b", "ln2_w", "ln2_b"].into_iter().enumerate() {
        inputs.push(name, noise(20 + seed as u64, &[width], -1.0, 1.0));
    }
    inputs
}

/// Checks a layer and its gradient.
fn agrees<O: Differentiable>(options: &O::Options, inputs: &Named<Owned>) {
    check::steps_agree_everywhere::<O>(options, inputs);
    check::steps_agree_everywhere::<Backward<O>>(options, &check::backward_inputs::<O, Backward<O>>(options, inputs));
}

fn heads(heads: usize, causal: bool, rope_theta: Option<f64>, pairing: Pairing) -> mha::Options {
    mha::Options { heads, causal, rope_theta, pairing, cached: 0 }
}

fn block_options(mha: &mha::Options) -> transformer_block::Options {
    let mha::Options { heads, causal, rope_theta, pairing, cached } = *mha;
    transformer_block::Options { heads, causal, rope_theta, pairing, cached, eps: 1e-5 }
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for sizes in [[2, 3, 5, 7], [1, 1, 4, 16], [1, 19, 33, 17], [0, 2, 3, 4], [2, 0, 3, 4]] {
        agrees::<SwigluMlp>(&Default::default(), &mlp(sizes));
        let gelu = swiglu_mlp::Options { activation: Some(Activation::GeluTanh) };
        agrees::<SwigluMlp>(&gelu, &mlp(sizes));
    }
    for (sizes, options) in [
        ([2, 5, 8, 12], heads(2, true, Some(1e4), Pairing::Half)),
        ([1, 17, 24, 31], heads(4, false, None, Pairing::Half)),
        ([2, 9, 20, 16], heads(5, true, Some(5e5), Pairing::Interleaved)),
        ([0, 3, 4, 8], heads(2, true, None, Pairing::Half)),
        ([2, 0, 4, 8], heads(1, false, Some(1e4), Pairing::Half)),
    ] {
        for (bias, masked) in [(false, false), (true, false), (true, true)] {
            let [batch, length, width, _] = sizes;
            agrees::<Mha>(&options, &self_attention([batch, length, width], bias, masked));
            agrees::<TransformerBlock>(&block_options(&options), &block(sizes, bias, masked));
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    fn differences<O: Differentiable>(options: &O::Options, inputs: &Named<Owned>) {
        check::gradients_agree_with_differences::<O, Backward<O>>(options, inputs);
    }
    differences::<SwigluMlp>(&Default::default(), &mlp([1, 2, 3, 5]));
    let options = heads(2, true, Some(1e4), Pairing::Interleaved);
    differences::<Mha>(&options, &self_attention([1, 3, 4], true, false));
    differences::<TransformerBlock>(&block_options(&options), &block([1, 3, 4, 5], true, false));
}

/// Masked tokens change nothing, and a token without visible ones gives the bias.
#[test]
fn masks_hide_tokens() {
    let options = heads(2, false, None, Pairing::Half);
    let inputs = self_attention([1, 6, 8], true, true);
    let mut other = inputs.clone();
    let x = other.take("x").unwrap().view().to_f64();
    let mut values = x.indexed_iter().map(|(at, v)| if at[1] == 2 { 1e3 } else { *v });
    other.push("x", Owned::from_fn(inputs.get("x").unwrap().spec(), |_| values.next().unwrap()));
    let bias = inputs.get("bo").unwrap().view().slice::<f32>().unwrap().to_vec();
    let [y, changed] = [inputs, other].map(|inputs| {
        let y = common::run::<Mha>(&options, &inputs, &Exec::default()).unwrap();
        y.get("y").unwrap().view().slice::<f32>().unwrap().to_vec()
    });
    assert_eq!(y[8..16], bias);
    for token in [0, 3, 4, 5] {
        assert_eq!(y[token * 8..(token + 1) * 8], changed[token * 8..(token + 1) * 8], "token {token}");
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |options: mha::Options, name: &'static str, dims: &[usize]| {
        let mut inputs = block([2, 3, 8, 5], true, true);
        let dtype = inputs.take(name).unwrap().spec().dtype;
        inputs.push(name, noise(1, dims, 0.0, 1.0).cast(dtype));
        let run = common::run::<TransformerBlock>(&block_options(&options), &inputs, &Exec::default());
        run.err().expect("a refusal")
    };
    let fine = || heads(2, true, None, Pairing::Half);
    for (name, dims) in [
        ("x", &[2, 3][..]),
        ("wqkv", &[8, 8]),
        ("wo", &[8]),
        ("bo", &[9]),
        ("ln2_b", &[7]),
        ("wg", &[5, 7]),
        ("wu", &[4, 8]),
        ("wd", &[5, 8]),
        ("mask", &[3, 1, 1, 3]),
    ] {
        let error = refused(fine(), name, dims);
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "transformer_block"), "{error}");
    }
    for options in [
        heads(0, true, None, Pairing::Half),
        heads(3, true, None, Pairing::Half),
        heads(8, true, Some(1e4), Pairing::Half),
    ] {
        assert_eq!(refused(options, "bo", &[8]).kind, Kind::Option);
    }
}
