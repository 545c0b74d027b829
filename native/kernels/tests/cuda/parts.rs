//! Sequences in parts on several devices, or on several lanes of one, against the f64 reference of the whole sequence.

use crate::common::gpu;
use crate::common::on_device::off;
use crate::common::packed::{self, Visit};
use crate::common::parts::agree;
use crate::common::{bits, uploaded};
use sidewinder_kernels::cuda::{self, Buffer, Device};
use sidewinder_kernels::op::{Differentiable, Named, Parts, lanes_of_parts};
use sidewinder_kernels::tensor::Owned;

/// Parts are on each of these devices in turn.
struct OnDevices(Vec<Device>);

impl OnDevices {
    fn run(&self, parts: &Parts, inputs: &[Named<Owned>]) -> Vec<Named<Owned>> {
        let devices = || self.0.iter().cycle().take(inputs.len());
        let lanes = lanes_of_parts(devices()).unwrap();
        let given: Vec<_> =
            devices().zip(inputs).map(|(device, part)| uploaded(&device.lane().unwrap(), part).unwrap()).collect();
        let outputs = parts.outputs().unwrap();
        let buffers = devices().zip(&outputs).zip(&lanes).map(|((device, part), lane)| {
            part.map(|spec| {
                let buffer = Buffer::new(device, *spec).unwrap();
                lane.poison(&buffer).unwrap();
                buffer
            })
        });
        let outputs: Vec<Named<Buffer>> = buffers.collect();
        parts.cuda(&given.iter().map(Named::as_ref).collect::<Vec<_>>(), &outputs, &lanes).unwrap();
        lanes.iter().zip(&outputs).map(|(lane, part)| part.map(|buffer| lane.downloaded(buffer).unwrap())).collect()
    }
}

impl Visit for OnDevices {
    fn visit<O: Differentiable>(&self, options: &O::Options, inputs: &Named<Owned>, shared: &[&str]) {
        let run = |parts: &Parts, inputs: &[Named<Owned>]| {
            let results = self.run(parts, inputs);
            for (part, again) in results.iter().zip(self.run(parts, inputs)) {
                assert_eq!(bits(part), bits(&again), "{}", O::NAME);
            }
            results
        };
        agree::<O>(options, inputs, shared, &run, |name, got, expected, dtype| {
            let off = off(got, expected, dtype, 8.0);
            assert!(off <= 1.0, "{name} of {} is off by {off} times the tolerance: {dtype}", O::NAME);
        });
    }
}

fn agrees<S>(visit: impl Fn(&OnDevices, S), sizes: S) {
    let Some(first) = gpu() else { return };
    let others = (1..cuda::devices().unwrap().len()).map(|ordinal| Device::get(ordinal).unwrap());
    visit(&OnDevices(std::iter::once(first).chain(others).collect()), sizes);
}

test_each! { parts_agree, super::agrees:
    of_every_op: |visit, ()| super::packed::every_op(visit), ();
    of_selective_scan: super::packed::selective_scan_at_once, [264, 1, 16];
    of_selective_scan_in_several_launches: super::packed::selective_scan_at_once, [4, 1, 300];
    of_ssd: super::packed::ssd_in_chunks, [4, 64, 2, 32];
    of_ssd_with_wide_heads: super::packed::ssd_in_chunks, [2, 128, 1, 32];
    of_gated_delta_rule: super::packed::gated_delta_rule_in_segments, [1, 2, 64, 72];
    of_linear_attention: super::packed::linear_attention_in_chunks, [2, 2, 64, 64];
}
