//! Packed calls on CUDA: against calls of each sequence, and against the f64 references.

use crate::common;
use crate::common::check::noise;
use crate::common::gpu;
use crate::common::on_device::{agrees, agrees_by, gradients_agree};
use crate::common::packed::{self, OF_CHUNKS, Visit, WRONG, axis, five_steps};
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{self, Backward, CU_SEQLENS, Differentiable, Named, Op, Packed, specs};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::attention::{self, Attention, AttentionBackward};
use sidewinder_kernels::ops::scan::linear_scan::{LinearScan, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned};

/// Roundings of 16-bit results: kernels of long sequences round between their chunks.
const ROUNDINGS: f64 = 4.0;

struct OnDevice(Device);

impl OnDevice {
    fn compare<O: Op>(&self, options: &O::Options, inputs: &Named<Owned>, shared: &[&str]) {
        let got = common::run_cuda::<Packed<O>>(options, inputs, &self.0).unwrap();
        let run = |one: &Named<Owned>| common::run_cuda::<O>(options, one, &self.0).unwrap();
        for (name, parts) in packed::separately(inputs, shared, run).iter() {
            let Some(axis) = axis(name, shared) else { continue };
            let mut start = 0;
            for part in parts {
                let end = start + part.spec().shape[axis];
                let own = common::part(got.get(name).unwrap(), axis, start..end);
                assert!(same::<O>(&own, part), "{name} of {}, from {start}", O::NAME);
                start = end;
            }
        }
    }
}

/// Whether results are those of a call of their own: bit by bit, or nearly where all sequences share one layout of the
/// work, so that sums have another order.
fn same<O: Op>(own: &Owned, of_one: &Owned) -> bool {
    match O::NAME {
        "selective_scan" | "selective_scan_backward" => common::worst(own, of_one, 2e-5, 5e-6) <= 1.0,
        _ => own.view().bytes() == of_one.view().bytes(),
    }
}

impl Visit for OnDevice {
    fn visit<O: Differentiable>(&self, options: &O::Options, inputs: &Named<Owned>, shared: &[&str]) {
        let backward = packed::of_gradient::<O>(options, inputs);
        agrees::<Packed<O>>(&self.0, options, inputs, ROUNDINGS);
        agrees::<Packed<Backward<O>>>(&self.0, options, &backward, ROUNDINGS);
        self.compare::<O>(options, inputs, shared);
        self.compare::<Backward<O>>(options, &backward, shared);
    }
}

#[test]
fn packed_calls_agree_with_the_reference_and_with_separate_calls() {
    let Some(device) = gpu() else { return };
    packed::every_op(&OnDevice(device));
}

/// Calls that take all sequences at once.
struct InChunks(Device);

impl InChunks {
    /// Checks that the op takes all sequences at once in 16-bit types, and gives what the packed call gives.
    fn takes_all<O: Op>(&self, options: &O::Options, inputs: &Named<Owned>) {
        for dtype in [DType::Bf16, DType::F16] {
            let inputs = common::cast(op::about::<Packed<O>>(), inputs, dtype);
            let one = common::without(&inputs, &[CU_SEQLENS, "initial_state", "dlast_state"]);
            let (problem, _) = op::check::<O>(&specs(&one), options).unwrap();
            let lane = self.0.lane().unwrap();
            let given = common::uploaded(&lane, &inputs).unwrap();
            let call = ops::call::<Packed<O>>(specs(&inputs), options).unwrap();
            let outputs = call.outputs().try_map(|spec| Buffer::new(&self.0, *spec)).unwrap();
            outputs.iter().for_each(|(_, output)| lane.poison(output).unwrap());
            let ends = inputs.get(CU_SEQLENS).unwrap().view().to_f64();
            let ends: Vec<usize> = ends.iter().map(|&end| end as usize).collect();
            let steps: Vec<_> = ends.windows(2).map(|pair| pair[0]..pair[1]).collect();
            assert!(O::cuda_packed(&problem, &given.as_ref(), &outputs.as_ref(), &steps, &lane).unwrap());
            let expected = common::run_cuda::<Packed<O>>(options, &inputs, &self.0).unwrap();
            for (name, output) in outputs.iter() {
                let got = lane.downloaded(output).unwrap();
                assert!(got.view().bytes() == expected.get(name).unwrap().view().bytes(), "{name} of {}", O::NAME);
            }
        }
    }
}

impl Visit for InChunks {
    /// The tolerances are those of the tests of each op.
    fn visit<O: Differentiable>(&self, options: &O::Options, inputs: &Named<Owned>, _: &[&str]) {
        let backward = packed::of_gradient::<O>(options, inputs);
        agrees::<Packed<O>>(&self.0, options, inputs, 2.0);
        agrees_by::<Packed<Backward<O>>>(&self.0, options, &backward, |name| match name {
            "dA" | "ddt_bias" | "dg" => 8.0,
            _ => 2.0,
        });
        self.takes_all::<O>(options, inputs);
        self.takes_all::<Backward<O>>(options, &backward);
    }
}

fn in_chunks<S>(visit: impl Fn(&InChunks, S), sizes: S) {
    let Some(device) = gpu() else { return };
    visit(&InChunks(device), sizes);
}

test_each! { in_chunks, super::in_chunks:
    ssd_with_32_states: super::packed::ssd_in_chunks, [4, 64, 2, 32];
    ssd_with_128_states: super::packed::ssd_in_chunks, [2, 64, 1, 128];
    ssd_with_wide_heads: super::packed::ssd_in_chunks, [2, 128, 1, 48];
    gated_delta_rule_with_keys_of_64: super::packed::gated_delta_rule_in_chunks, [2, 2, 64, 64];
    gated_delta_rule_with_keys_of_128: super::packed::gated_delta_rule_in_chunks, [1, 2, 128, 40];
    gated_delta_rule_in_segments: super::packed::gated_delta_rule_in_segments, [1, 2, 64, 72];
    linear_attention_with_keys_of_64: super::packed::linear_attention_in_chunks, [2, 2, 64, 64];
    linear_attention_with_keys_of_128: super::packed::linear_attention_in_chunks, [1, 2, 128, 40];
    selective_scan_with_few_states: super::packed::selective_scan_at_once, [6, 2, 3];
    selective_scan_of_many_channels: super::packed::selective_scan_at_once, [264, 1, 16];
    selective_scan_with_states_of_several_launches: super::packed::selective_scan_at_once, [4, 1, 300];
}

/// Attention takes all sequences at once in every type.
fn attention_agrees(lengths: &[usize], sizes: [usize; 4]) {
    let Some(device) = gpu() else { return };
    let inputs = packed::of_attention(lengths, sizes);
    let in_chunks = InChunks(device);
    for options in [false, true].map(packed::heads_last) {
        agrees::<Packed<Attention>>(&in_chunks.0, &options, &inputs, 2.0);
        // Gradients are computed from `y` and `lse` as stored, which the reference does not read.
        gradients_agree::<Packed<Attention>, Packed<AttentionBackward>>(&in_chunks.0, &options, &inputs, 6.0);
        in_chunks.takes_all::<Attention>(&options, &inputs);
        in_chunks.takes_all::<AttentionBackward>(&options, &packed::of_gradient::<Attention>(&options, &inputs));
    }
}

#[test]
fn attention_of_few_steps_agrees() {
    attention_agrees(&[0, 3, 65, 0, 130, 1], [2, 1, 64, 64]);
}

#[test]
fn attention_of_width_64_agrees() {
    attention_agrees(&OF_CHUNKS, [4, 2, 64, 64]);
}

#[test]
fn attention_of_width_128_agrees() {
    attention_agrees(&OF_CHUNKS, [2, 2, 128, 72]);
}

#[test]
fn attention_of_width_20_agrees() {
    attention_agrees(&OF_CHUNKS, [2, 1, 20, 24]);
}

#[test]
fn attention_of_width_160_agrees() {
    attention_agrees(&OF_CHUNKS, [2, 1, 160, 160]);
}

#[test]
fn attention_with_heads_first_agrees() {
    let Some(device) = gpu() else { return };
    let first = attention::Options { causal: true, ..Default::default() };
    let inputs = packed::heads_first(&packed::of_attention(&[0, 3, 65, 0, 130, 1], [2, 1, 64, 64]));
    agrees::<Packed<Attention>>(&device, &first, &inputs, 2.0);
    gradients_agree::<Packed<Attention>, Packed<AttentionBackward>>(&device, &first, &inputs, 6.0);
}

#[test]
fn wrong_ends_are_refused_on_the_device() {
    let Some(device) = gpu() else { return };
    for (ends, expected) in WRONG {
        let run = common::run_cuda::<Packed<LinearScan>>(&Options::default(), &five_steps(ends), &device);
        let error = run.err().expect("an error");
        assert_eq!((error.kind, &*error.argument, &*error.expected), (Kind::Argument, CU_SEQLENS, expected));
    }
}

#[test]
fn packed_calls_are_refused_while_a_graph_is_recorded() {
    let Some(device) = gpu() else { return };
    let lane = device.lane().unwrap();
    let inputs = common::with(&five_steps(&[0.0, 2.0, 5.0]), "initial_state", noise(1, &[2, 3], -1.0, 1.0));
    let call = ops::call::<Packed<LinearScan>>(specs(&inputs), &Options::default()).unwrap();
    let given = common::uploaded(&lane, &inputs).unwrap();
    let outputs = call.outputs().try_map(|spec| Buffer::new(&device, *spec)).unwrap();
    let queue = || call.cuda(&given.as_ref(), &outputs.as_ref(), &lane);
    queue().unwrap();
    let error = lane.record(queue).err().expect("an error");
    assert_eq!(error.kind, Kind::Unavailable);
    queue().unwrap();
    let h = lane.downloaded(outputs.get("h").unwrap()).unwrap();
    let expected = common::reference::<Packed<LinearScan>>(&Options::default(), &inputs);
    common::assert_close(&[("h", h)].into_iter().collect(), &expected, "after a refused recording");
    let fits = device.fits_graph(|lane| call.cuda(&given.as_ref(), &outputs.as_ref(), &lane));
    assert!(!fits.unwrap());
}
