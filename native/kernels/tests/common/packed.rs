//! Packed calls of the ops over sequences, and the calls of each sequence that they stand for.

use super::check::{backward_inputs, inputs, noise};
use super::{gated_delta_rule, linear_attention, part, ssd, transposed, with, without};
use ndarray::ArrayD;
use sidewinder_kernels::op::{CU_SEQLENS, Differentiable, Named, Packed};
use sidewinder_kernels::ops::attention;
use sidewinder_kernels::ops::causal_conv1d::CausalConv1d;
use sidewinder_kernels::ops::scan::gated_delta_rule::GatedDeltaRule;
use sidewinder_kernels::ops::scan::linear_attention::{LinearAttention, Options as LinearOptions};
use sidewinder_kernels::ops::scan::linear_scan::LinearScan;
use sidewinder_kernels::ops::scan::selective_scan::SelectiveScan;
use sidewinder_kernels::ops::scan::ssd::Ssd;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::borrow::Borrow;

/// Lengths of the packed sequences: empty ones, and those at the ends of blocks of kernels.
pub const LENGTHS: [usize; 8] = [0, 3, 1, 63, 64, 0, 65, 0];

/// Lengths at the ends of chunks of 64 steps, and some of several segments of chunks.
pub const OF_CHUNKS: [usize; 11] = [0, 15, 1000, 1, 16, 63, 0, 64, 65, 700, 0];

/// The tensor `cu_seqlens` of these lengths.
pub fn ends(lengths: &[usize]) -> Owned {
    let ends: Vec<usize> = (0..=lengths.len()).map(|count| lengths[..count].iter().sum()).collect();
    Owned::from_fn(Spec::new(DType::I32, &[ends.len()]).unwrap(), |i| ends[i] as f64)
}

/// What is done with each op.
pub trait Visit {
    fn visit<O: Differentiable>(&self, options: &O::Options, inputs: &Named<Owned>, shared: &[&str]);
}

/// Visits each op with packed inputs, and the names of those that all sequences share: with and without the optional
/// ones.
pub fn every_op(visit: &impl Visit) {
    let (t, s) = (LENGTHS.iter().sum::<usize>(), LENGTHS.len());
    both::<LinearScan>(visit, &[], &[("a", &[1, t, 5]), ("b", &[1, t, 5]), ("initial_state", &[s, 5])], &[]);
    let conv: &[(_, &[usize])] = &[("x", &[1, t, 7]), ("w", &[7, 4]), ("bias", &[7]), ("initial_state", &[s, 3, 7])];
    both::<CausalConv1d>(visit, &["w", "bias"], conv, &["bias"]);
    let scan: &[(_, &[usize])] = &[
        ("x", &[1, t, 6]),
        ("dt", &[1, t, 6]),
        ("A", &[6, 4]),
        ("B", &[1, t, 2, 4]),
        ("C", &[6, 4]),
        ("D", &[6]),
        ("z", &[1, t, 6]),
        ("dt_bias", &[6]),
        ("initial_state", &[s, 6, 4]),
    ];
    both::<SelectiveScan>(visit, &["A", "C", "D", "dt_bias"], scan, &["D", "z", "dt_bias"]);
    let ssd: &[(_, &[usize])] = &[
        ("x", &[1, t, 4, 8]),
        ("dt", &[1, t, 4]),
        ("A", &[4]),
        ("B", &[1, t, 2, 5]),
        ("C", &[1, t, 2, 5]),
        ("D", &[4]),
        ("z", &[1, t, 4, 8]),
        ("dt_bias", &[4]),
        ("initial_state", &[s, 4, 8, 5]),
    ];
    both::<Ssd>(visit, &["A", "D", "dt_bias"], ssd, &["D", "z", "dt_bias"]);
    let delta: &[(_, &[usize])] = &[
        ("q", &[1, t, 2, 8]),
        ("k", &[1, t, 2, 8]),
        ("v", &[1, t, 4, 6]),
        ("beta", &[1, t, 4]),
        ("g", &[1, t, 4]),
        ("initial_state", &[s, 4, 8, 6]),
    ];
    both::<GatedDeltaRule>(visit, &[], delta, &["g"]);
    for decay in [&[1, t, 4][..], &[1, t, 4, 8]] {
        let attention: &[(_, &[usize])] = &[
            ("q", &[1, t, 2, 8]),
            ("k", &[1, t, 2, 8]),
            ("v", &[1, t, 4, 6]),
            ("g", decay),
            ("initial_state", &[s, 4, 8, 6]),
        ];
        both::<LinearAttention>(visit, &[], attention, &["g"]);
    }
}

/// The options of attention with heads last.
pub fn heads_last(causal: bool) -> attention::Options {
    attention::Options { causal, layout: attention::Layout::HeadsLast, ..Default::default() }
}

/// Inputs of attention over packed sequences of these lengths: of some heads, key heads and widths of keys and values,
/// with heads last.
pub fn of_attention(lengths: &[usize], [heads, key_heads, width, value_width]: [usize; 4]) -> Named<Owned> {
    let t = lengths.iter().sum();
    let all = inputs(&[
        ("q", &[1, t, heads, width]),
        ("k", &[1, t, key_heads, width]),
        ("v", &[1, t, key_heads, value_width]),
    ]);
    with(&all, CU_SEQLENS, ends(lengths))
}

/// Tensors of attention, with heads before steps.
pub fn heads_first(inputs: &Named<Owned>) -> Named<Owned> {
    inputs.map(|tensor| if tensor.spec().shape.len() == 4 { transposed(tensor, [0, 2, 1, 3]) } else { tensor.clone() })
}

/// What an op may be called without.
const OPTIONAL: [&str; 5] = ["D", "z", "dt_bias", "g", "initial_state"];

/// Inputs of one sequence of all steps of [`OF_CHUNKS`], as packed ones with a state for each sequence.
fn in_chunks(one: Named<Owned>, state: &[usize]) -> Named<Owned> {
    packed(one, &OF_CHUNKS, state)
}

/// Inputs of one sequence of all steps, as packed ones of these lengths with a state for each.
fn packed(one: Named<Owned>, lengths: &[usize], state: &[usize]) -> Named<Owned> {
    let states = noise(9, &[&[lengths.len()], state].concat(), -1.0, 1.0);
    with(&with(&one, "initial_state", states), CU_SEQLENS, ends(lengths))
}

/// Visits `ssd`, which takes all sequences at once in 16-bit types, with and without the optional inputs.
pub fn ssd_in_chunks(visit: &impl Visit, [heads, width, groups, state]: [usize; 4]) {
    let all = in_chunks(ssd::inputs([1, OF_CHUNKS.iter().sum(), heads, width, groups, state]), &[heads, width, state]);
    visit.visit::<Ssd>(&ssd::options(), &all, &["A", "D", "dt_bias"]);
    let options = ssd::Options { return_state: false, ..ssd::options() };
    visit.visit::<Ssd>(&options, &without(&all, &OPTIONAL), &["A"]);
}

/// Visits `selective_scan`, which takes all sequences at once in every type, with and without the optional inputs.
pub fn selective_scan_at_once(visit: &impl Visit, [channels, groups, state]: [usize; 3]) {
    let t = OF_CHUNKS.iter().sum();
    let one = moderate(&[
        ("x", &[1, t, channels]),
        ("dt", &[1, t, channels]),
        ("A", &[channels, state]),
        ("B", &[1, t, groups, state]),
        ("C", &[1, t, groups, state]),
        ("D", &[channels]),
        ("z", &[1, t, channels]),
        ("dt_bias", &[channels]),
    ]);
    let all = in_chunks(one, &[channels, state]);
    let options = |json| serde_json::from_value(json).unwrap();
    let shared = ["A", "D", "dt_bias"];
    visit.visit::<SelectiveScan>(&options(serde_json::json!({"return_state": true})), &all, &shared);
    let states = serde_json::json!({"dt_softplus": true, "return_states": true});
    visit.visit::<SelectiveScan>(&options(states), &without(&all, &OPTIONAL), &["A"]);
}

/// Visits `gated_delta_rule`, which takes all sequences at once in 16-bit types, with and without the optional inputs.
pub fn gated_delta_rule_in_chunks(visit: &impl Visit, sizes: [usize; 4]) {
    gated_delta_rule_of(visit, &OF_CHUNKS, sizes);
}

/// Visits `gated_delta_rule` on sequences of which some are long enough for several segments.
pub fn gated_delta_rule_in_segments(visit: &impl Visit, sizes: [usize; 4]) {
    gated_delta_rule_of(visit, &[70, 3137, 0, 1100], sizes);
}

fn gated_delta_rule_of(visit: &impl Visit, lengths: &[usize], [groups, heads, keys, values]: [usize; 4]) {
    let one = gated_delta_rule::inputs([1, lengths.iter().sum(), groups, heads, keys, values]);
    let all = packed(one, lengths, &[heads, keys, values]);
    let options = gated_delta_rule::Options { qk_l2norm: true, ..gated_delta_rule::options() };
    visit.visit::<GatedDeltaRule>(&options, &all, &[]);
    visit.visit::<GatedDeltaRule>(&gated_delta_rule::Options::default(), &without(&all, &OPTIONAL), &[]);
}

/// Visits `linear_attention`, which takes all sequences at once in 16-bit types, with and without the optional inputs.
pub fn linear_attention_in_chunks(visit: &impl Visit, [groups, heads, keys, values]: [usize; 4]) {
    let sizes = [1, OF_CHUNKS.iter().sum(), groups, heads, keys, values];
    let state = LinearOptions { return_state: true, ..Default::default() };
    for one in [linear_attention::inputs(sizes), linear_attention::by_key(sizes)] {
        let all = in_chunks(without(&one, &["initial_z"]), &[heads, keys, values]);
        visit.visit::<LinearAttention>(&state, &all, &[]);
        visit.visit::<LinearAttention>(&LinearOptions::default(), &without(&all, &["initial_state"]), &[]);
    }
    let plain = in_chunks(without(&linear_attention::inputs(sizes), &["initial_z"]), &[heads, keys, values]);
    visit.visit::<LinearAttention>(&LinearOptions::default(), &without(&plain, &OPTIONAL), &[]);
}

fn both<O: Differentiable>(
    visit: &impl Visit,
    shared: &[&str],
    shapes: &[(&'static str, &[usize])],
    optional: &[&str],
) {
    let all = with(&moderate(shapes), CU_SEQLENS, ends(&LENGTHS));
    let options = |json| serde_json::from_value::<O::Options>(json).unwrap();
    let fewer = without(&without(&all, optional), &["initial_state"]);
    visit.visit::<O>(&options(serde_json::json!({"return_state": true})), &all, shared);
    visit.visit::<O>(&O::Options::default(), &fewer, shared);
}

/// Inputs of these shapes: steps are positive, and decays and products of keys below 1, so that states stay small.
fn moderate(shapes: &[(&'static str, &[usize])]) -> Named<Owned> {
    let mut all = inputs(shapes);
    for name in ["A", "g", "k", "beta", "dt", "dt_bias"] {
        if let Some(tensor) = all.take(name) {
            let (values, sign) = (tensor.view().to_f64(), if matches!(name, "A" | "g") { -1.0 } else { 1.0 });
            let mut values = values.iter();
            all.push(name, Owned::from_fn(tensor.spec(), |_| sign * 0.3 * values.next().unwrap().abs()));
        }
    }
    all
}

/// The inputs of a selective scan with a new C at every step.
pub fn with_c_per_step(inputs: &Named<Owned>) -> Named<Owned> {
    let [batch, length, _] = inputs.get("x").unwrap().spec().shape[..] else { panic!("an x of three axes") };
    with(inputs, "C", noise(7, &[batch, length, 4], -1.0, 1.0))
}

/// The inputs of the packed gradient.
pub fn of_gradient<O: Differentiable>(options: &O::Options, inputs: &Named<Owned>) -> Named<Owned> {
    backward_inputs::<Packed<O>, Packed<sidewinder_kernels::op::Backward<O>>>(options, inputs)
}

/// The results of one call for each sequence, put together: steps and states in order, and the sums of gradients of
/// shared inputs.
pub fn separately(
    inputs: &Named<Owned>,
    shared: &[&str],
    run: impl Fn(&Named<Owned>) -> Named<Owned>,
) -> Named<Vec<Owned>> {
    let mut results: Named<Vec<Owned>> = Named::default();
    let mut start = 0;
    for (at, length) in LENGTHS.into_iter().enumerate() {
        let of_one = without(inputs, &[CU_SEQLENS]);
        let of_one = of_one.iter().map(|(name, tensor)| {
            let range = |axis| if axis == 0 { at..at + 1 } else { start..start + length };
            let own = axis(name, shared).map(|axis| part(tensor, axis, range(axis)));
            (name.clone(), own.unwrap_or_else(|| tensor.clone()))
        });
        for (name, result) in run(&of_one.collect()) {
            match results.find(&name) {
                Some(_) => results.get_mut(&name).unwrap().push(result),
                None => results.push(name, vec![result]),
            }
        }
        start += length;
    }
    results
}

/// The results of all sequences, from those of each: one after the other along their axis, or their sum.
pub fn joint<T: Borrow<Owned>>(name: &str, parts: &[T], spec: Spec, shared: &[&str]) -> Owned {
    let parts: Vec<ArrayD<f64>> = parts.iter().map(|part| part.borrow().view().to_f64()).collect();
    let joint = match axis(name, shared) {
        Some(axis) => {
            let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
            ndarray::concatenate(ndarray::Axis(axis), &views).unwrap()
        }
        None => parts.into_iter().reduce(|sum, part| sum + part).unwrap(),
    };
    assert_eq!(joint.shape(), &spec.shape[..], "{name}");
    let mut values = joint.iter();
    Owned::from_fn(spec, |_| *values.next().unwrap())
}

/// The axis of sequences of a tensor: 0 of states, 1 or 2 of steps, none of what sequences share.
pub fn axis(name: &str, shared: &[&str]) -> Option<usize> {
    match name {
        _ if shared.iter().any(|one| name == *one || name.strip_prefix('d') == Some(one)) => None,
        _ if name.ends_with("state") || name.ends_with("_z") => Some(0),
        "lse" | "dlse" => Some(2),
        _ => Some(1),
    }
}

/// `cu_seqlens` that are refused for sequences of 5 steps in all, with a part of the error.
pub const WRONG: [(&[f64], &str); 5] = [
    (&[1.0, 5.0], "0 as its first element"),
    (&[0.0, 4.0], "the length 5 as its last element"),
    (&[0.0, 6.0], "the length 5 as its last element"),
    (&[0.0, 3.0, 2.0, 5.0], "at least 3 after 3"),
    (&[0.0, -1.0, 5.0], "at least 0 after 0"),
];

/// Inputs of a packed linear scan of 5 steps.
pub fn five_steps(ends: &[f64]) -> Named<Owned> {
    let ends = Owned::from_fn(Spec::new(DType::I32, &[ends.len()]).unwrap(), |i| ends[i]);
    with(&inputs(&[("a", &[1, 5, 3]), ("b", &[1, 5, 3])]), CU_SEQLENS, ends)
}
