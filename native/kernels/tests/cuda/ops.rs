//! Various ops on CUDA: against their f64 references, and with equal bits in repeated runs. Without a GPU each test
//! says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::check::{backward_inputs, noise};
use crate::common::on_device::{agrees, both, named, off};
use crate::common::{cast, gpu, reference, worst};
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::activations::{self, Activation as Function, Activations, ActivationsBackward};
use sidewinder_kernels::ops::attention::Layout;
use sidewinder_kernels::ops::causal_conv1d::update::{self, CausalConv1dUpdate};
use sidewinder_kernels::ops::causal_conv1d::{self, Activation, CausalConv1d, CausalConv1dBackward};
use sidewinder_kernels::ops::layers::mamba_block::{self, MambaBlock, MambaBlockBackward};
use sidewinder_kernels::ops::layers::swiglu_mlp::{self, SwigluMlp, SwigluMlpBackward};
use sidewinder_kernels::ops::layers::transformer_block::{self, TransformerBlock, TransformerBlockBackward};
use sidewinder_kernels::ops::norm;
use sidewinder_kernels::ops::norm::gated::{self as gated_rms_norm, GatedRmsNorm, GatedRmsNormBackward};
use sidewinder_kernels::ops::positions::rope;
use sidewinder_kernels::ops::positions::sinusoidal_positions::{
    self, SinusoidalPositions, SinusoidalPositionsBackward,
};
use sidewinder_kernels::ops::products::linear::{self, Linear, LinearBackward};
use sidewinder_kernels::ops::products::matmul::{self, Matmul};
use sidewinder_kernels::ops::scan::linear_scan::{self, LinearScan, LinearScanBackward};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

#[test]
fn the_recurrence_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    let options = linear_scan::Options { return_state: true };
    for [b, l, k] in
        [[1, 1, 1], [2, 3, 5], [3, 33, 31], [2, 70, 257], [1, 5000, 3], [40, 100, 33], [0, 3, 4], [2, 0, 5], [2, 3, 0]]
    {
        let mut inputs = named([("a", &[b, l, k], -1.1, 1.0), ("b", &[b, l, k], -1.0, 1.0)]);
        both::<LinearScan, LinearScanBackward>(&device, (&options, &options), &inputs, 0.0);
        inputs.push("initial_state", noise(9, &[b, k], -2.0, 2.0));
        both::<LinearScan, LinearScanBackward>(&device, (&options, &options), &inputs, 0.0);
    }
}

#[test]
fn long_recurrences_near_one_agree() {
    let Some(device) = gpu() else { return };
    let options = linear_scan::Options { return_state: true };
    let shape = [1, 65536, 3];
    let inputs = named([("a", &shape, 0.9999, 1.0), ("b", &shape, -1.0, 1.0)]);
    let backward = backward_inputs::<LinearScan, LinearScanBackward>(&options, &inputs);
    let got = common::run_cuda::<LinearScan>(&options, &inputs, &device).unwrap();
    common::assert_close(&got, &reference::<LinearScan>(&options, &inputs), "65536 steps");
    let got = common::run_cuda::<LinearScanBackward>(&options, &backward, &device).unwrap();
    // Both factors of `da` are sums of about ten thousand terms in f32.
    for (name, expected) in reference::<LinearScanBackward>(&options, &backward).iter() {
        let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
        let off = worst(got.get(name).unwrap(), expected, 2e-5, 2e-5 * largest);
        assert!(off <= 1.0, "{name} is off by {off} times the tolerance after 65536 steps back");
    }
}

#[test]
fn the_convolution_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    let sizes = [
        [1, 1, 1, 1],
        [2, 1, 3, 4],
        [1, 2, 17, 4],
        [2, 7, 31, 3],
        [1, 63, 16, 2],
        [2, 300, 65, 4],
        [3, 5, 19, 7],
        [1, 3, 8, 70],
        [1, 130, 3, 20],
        [0, 3, 4, 4],
        [2, 0, 5, 4],
        [2, 0, 5, 1],
        [2, 3, 0, 4],
    ];
    for (i, [b, l, d, w]) in sizes.into_iter().enumerate() {
        let activation = (i % 3 != 0).then_some(Activation::Silu);
        let options = causal_conv1d::Options { activation, return_state: true };
        let mut inputs = named([("x", &[b, l, d], -1.0, 1.0), ("w", &[d, w], -1.0, 1.0)]);
        both::<CausalConv1d, CausalConv1dBackward>(&device, (&options, &options), &inputs, 0.0);
        inputs.push("bias", noise(8, &[d], -1.0, 1.0));
        inputs.push("initial_state", noise(9, &[b, w - 1, d], -1.0, 1.0));
        both::<CausalConv1d, CausalConv1dBackward>(&device, (&options, &options), &inputs, 0.0);
        let step =
            named([("x", &[b, d], -1.0, 1.0), ("initial_state", &[b, w - 1, d], -1.0, 1.0), ("w", &[d, w], -1.0, 1.0)]);
        agrees::<CausalConv1dUpdate>(&device, &update::Options { activation }, &step, 0.0);
    }
}

#[test]
fn the_dense_layer_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    let options = linear::Options::default();
    let shapes: &[(&[usize], usize)] = &[
        (&[1], 1),
        (&[1, 200], 67),
        (&[13, 19], 23),
        (&[2, 65, 33], 31),
        (&[300, 64], 48),
        (&[0, 4], 3),
        (&[4, 0], 3),
        (&[4, 3], 0),
    ];
    for &(x, outputs) in shapes {
        let inner = *x.last().unwrap();
        let mut inputs = named([("x", x, -1.0, 1.0), ("w", &[outputs, inner], -1.0, 1.0)]);
        both::<Linear, LinearBackward>(&device, (&options, &options), &inputs, 0.0);
        inputs.push("b", noise(9, &[outputs], -1.0, 1.0));
        both::<Linear, LinearBackward>(&device, (&options, &options), &inputs, 0.0);
    }
}

#[test]
fn the_block_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    let options = mamba_block::Options { return_state: true, ..Default::default() };
    for [b, l, m, d, n, r, w] in
        [[2, 5, 6, 12, 4, 1, 4], [1, 33, 8, 17, 16, 3, 3], [2, 64, 16, 32, 16, 1, 4], [2, 0, 4, 8, 4, 1, 4]]
    {
        let root = |size: usize| 1.0 / (size as f64).sqrt();
        let mut inputs = named([
            ("x", &[b, l, m], -2.0, 2.0),
            ("in_proj", &[2 * d, m], -root(m), root(m)),
            ("conv_w", &[d, w], -root(w), root(w)),
            ("x_proj", &[r + 2 * n, d], -root(d), root(d)),
            ("dt_w", &[d, r], -root(r), root(r)),
            ("dt_b", &[d], -4.0, 0.0),
            ("A_log", &[d, n], 0.0, 2.0),
            ("D", &[d], 0.5, 1.5),
            ("out_proj", &[m, d], -root(d), root(d)),
        ]);
        both::<MambaBlock, MambaBlockBackward>(&device, (&options, &options), &inputs, 15.0);
        for (name, dims) in [
            ("conv_b", &[d][..]),
            ("in_proj_b", &[2 * d]),
            ("out_proj_b", &[m]),
            ("conv_state", &[b, w - 1, d]),
            ("ssm_state", &[b, d, n]),
        ] {
            inputs.push(name, noise(name.len() as u64, dims, -0.5, 0.5));
        }
        both::<MambaBlock, MambaBlockBackward>(&device, (&options, &options), &inputs, 15.0);
    }
}

#[test]
fn activations_and_their_gradients_agree() {
    let Some(device) = gpu() else { return };
    for function in Function::ALL {
        let options = activations::Options { function: Some(function), return_derivative: true };
        for dims in [&[1][..], &[7], &[33], &[3, 5, 7], &[2, 0, 3], &[70001]] {
            // The first value is large, because tolerances are relative to the largest value: small values of GELU are
            // no more accurate than that.
            let mut large = noise(1, dims, -9.0, 9.0).view().to_f64().into_iter().enumerate();
            let value = |_| large.next().map_or(0.0, |(i, v)| if i == 0 { 9.0 } else { v });
            let x = Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), value);
            let mut inputs: Named<Owned> = [("x", x)].into_iter().collect();
            agrees::<Activations>(&device, &options, &inputs, 0.0);
            inputs.push("dy", noise(2, dims, -1.0, 1.0));
            agrees::<ActivationsBackward>(&device, &options, &inputs, 0.0);
        }
    }
}

#[test]
fn extreme_arguments_of_activations_stay_finite() {
    let Some(device) = gpu() else { return };
    let powers = (-45..=18).map(|e| 10f64.powi(e));
    let x: Vec<f64> = powers.flat_map(|v| [v, -v]).chain([88.0, -88.0, 104.0, -104.0, 3.4e38, -3.4e38, 0.0]).collect();
    let inputs: Named<Owned> =
        [("x", Owned::from_fn(Spec::new(DType::F32, &[x.len()]).unwrap(), |i| x[i]))].into_iter().collect();
    for function in Function::ALL {
        let options = activations::Options { function: Some(function), return_derivative: true };
        let truth = reference::<Activations>(&options, &inputs);
        let got = common::run_cuda::<Activations>(&options, &inputs, &device).unwrap();
        for (name, truth) in truth.iter() {
            let off = worst(got.get(name).unwrap(), truth, 2e-6, 1e-6);
            assert!(off <= 1.0, "{function:?} {name} is off by {off} times the tolerance");
        }
    }
}

#[test]
fn norms_and_their_gradients_agree() {
    let Some(device) = gpu() else { return };
    let shapes: &[&[usize]] = &[
        &[3, 3],
        &[5, 7],
        &[2, 3, 33],
        &[67, 127],
        &[300, 64],
        &[3, 512],
        &[2, 1000],
        &[9, 4096],
        &[2, 6000],
        &[2, 9001],
        &[3, 12000],
        &[2, 20000],
        &[2, 70001],
        // More rows than blocks, and rows too long for registers, so that sums are accumulated in memory.
        &[300, 20000],
        &[5000, 8],
        &[0, 4],
        &[4, 0],
    ];
    for &dims in shapes {
        let width = dims[dims.len() - 1];
        let mut inputs = named([("x", dims, -2.0, 2.0), ("w", &[width], -2.0, 2.0)]);
        for eps_mode in [norm::EpsMode::Inside, norm::EpsMode::Outside] {
            let options = norm::RmsOptions { eps_mode, ..Default::default() };
            both::<norm::RmsNorm, norm::RmsNormBackward>(&device, (&options, &options), &inputs, 0.0);
        }
        inputs.push("b", noise(3, &[width], -1.0, 1.0));
        let options = norm::LayerOptions::default();
        both::<norm::LayerNorm, norm::LayerNormBackward>(&device, (&options, &options), &inputs, 0.0);
        for gelu in [norm::Gelu::Tanh, norm::Gelu::Erf] {
            let options = norm::LayerGeluOptions { gelu, ..Default::default() };
            both::<norm::LayerNormGelu, norm::LayerNormGeluBackward>(&device, (&options, &options), &inputs, 0.0);
        }
    }
}

#[test]
fn gated_norms_and_their_gradients_agree() {
    let Some(device) = gpu() else { return };
    for (rows, width, groups) in [
        (3, 3, 1),
        (5, 64, 2),
        (7, 65, 5),
        (2, 257, 1),
        (67, 1536, 1),
        (300, 1536, 8),
        (5, 1536, 512),
        (9, 4096, 1),
        (9, 12288, 4),
        (3, 7000, 1),
        (3, 16384, 1),
        (2, 9001, 1),
        (2, 70001, 1),
        (2, 60000, 3),
        (300, 20000, 1),
        (100, 60000, 3),
        (5000, 16, 2),
        (0, 6, 3),
        (4, 0, 1),
    ] {
        let dims = [rows, width];
        let inputs = named([("x", &dims, -2.0, 2.0), ("z", &dims, -4.0, 4.0), ("w", &[width], -2.0, 2.0)]);
        for norm_before_gate in [false, true] {
            let options = gated_rms_norm::Options { groups, norm_before_gate, ..Default::default() };
            both::<GatedRmsNorm, GatedRmsNormBackward>(&device, (&options, &options), &inputs, 0.0);
        }
    }
}

/// Runs an op on buffers that begin `skipped` elements after an aligned address.
fn run_behind<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>, skipped: usize) -> Named<Owned> {
    let lane = device.lane().unwrap();
    let poisoned = |spec: Spec| {
        let count = spec.shape.iter().product::<usize>();
        let whole = Buffer::new(device, Spec::new(spec.dtype, &[skipped + count]).unwrap()).unwrap();
        lane.poison(&whole).unwrap();
        whole.rows(skipped..skipped + count).unwrap().reshape(&spec.shape).unwrap()
    };
    let given = inputs.map(|tensor| {
        let buffer = poisoned(tensor.spec());
        lane.upload(tensor.view().bytes(), &buffer).unwrap();
        buffer
    });
    let call = ops::call::<O>(op::specs(inputs), options).unwrap();
    let outputs = call.outputs().map(|&spec| poisoned(spec));
    call.cuda(&given.as_ref(), &outputs.as_ref(), &lane).unwrap();
    outputs.map(|buffer| {
        let mut got = Owned::poisoned(buffer.spec());
        lane.download(buffer, got.view_mut().bytes()).unwrap();
        got
    })
}

#[test]
fn addresses_that_are_no_multiples_of_a_vector_agree() {
    let Some(device) = gpu() else { return };
    let options = norm::RmsOptions::default();
    let inputs = named([("x", &[39, 20], -2.0, 2.0), ("w", &[20], -1.0, 1.0)]);
    for skipped in [1, 3] {
        let got = run_behind::<norm::RmsNorm>(&device, &options, &inputs, skipped);
        let expected = reference::<norm::RmsNorm>(&options, &inputs);
        let off = off(got.get("y").unwrap(), expected.get("y").unwrap(), DType::F32, 0.0);
        assert!(off <= 1.0, "off by {off} times the tolerance");
    }
}

/// Bias and activation are applied in the epilogue of the product or after it, depending on type, sizes and addresses.
#[test]
fn whatever_is_done_with_the_sums_of_products_agrees() {
    let Some(device) = gpu() else { return };
    let functions = [None, Some(Function::Silu), Some(Function::Relu), Some(Function::GeluTanh)];
    let sizes =
        [[1, 1, 1], [1, 33, 17], [3, 17, 33], [17, 3, 1], [33, 1, 3], [17, 33, 17], [33, 64, 128], [130, 512, 72]];
    for (activation, [rows, inner, columns]) in functions.into_iter().flat_map(|f| sizes.map(|size| (f, size))) {
        let options = linear::Options { activation };
        let mut inputs = named([("x", &[rows, inner], -1.0, 1.0), ("w", &[columns, inner], -1.0, 1.0)]);
        for bias in [false, true] {
            if bias {
                inputs.push("b", noise(9, &[columns], -1.0, 1.0));
            }
            for (dtype, skipped) in
                DType::FLOATS.into_iter().flat_map(|dtype| [0, 1, 2].map(|skipped| (dtype, skipped)))
            {
                let inputs = cast(op::about::<Linear>(), &inputs, dtype);
                let got = run_behind::<Linear>(&device, &options, &inputs, skipped);
                let again = run_behind::<Linear>(&device, &options, &inputs, skipped);
                assert_eq!(common::bits(&got), common::bits(&again));
                let expected = reference::<Linear>(&options, &inputs);
                let off = off(got.get("y").unwrap(), expected.get("y").unwrap(), dtype, 0.0);
                let call = format!("{activation:?} {dtype} {rows} {inner} {columns} bias {bias} behind {skipped}");
                assert!(off <= 1.0, "off by {off} times the tolerance: {call}");
            }
        }
    }
}

#[test]
fn sums_that_are_no_numbers_stay_so_whatever_is_done_with_them() {
    let Some(device) = gpu() else { return };
    for activation in [None].into_iter().chain(Function::ALL.map(Some)) {
        let mut inputs = named([("x", &[64, 64], -1.0, 1.0), ("w", &[64, 64], -1.0, 1.0), ("b", &[64], -1.0, 1.0)]);
        let x = inputs
            .take("x")
            .unwrap()
            .view()
            .to_f64()
            .into_iter()
            .enumerate()
            .map(|(i, v)| if i == 0 { f64::NAN } else { v });
        let x: Vec<f64> = x.collect();
        inputs.push("x", Owned::from_fn(Spec::new(DType::F32, &[64, 64]).unwrap(), |i| x[i]));
        for dtype in DType::FLOATS {
            let inputs = cast(op::about::<Linear>(), &inputs, dtype);
            let got = common::run_cuda::<Linear>(&linear::Options { activation }, &inputs, &device).unwrap();
            let y = got.get("y").unwrap().view().to_f64();
            assert!(y.iter().take(64).all(|v| v.is_nan()), "{activation:?} {dtype}: a number of NaN");
            assert!(y.iter().skip(64).all(|v| v.is_finite()), "{activation:?} {dtype}: NaN of numbers");
        }
    }
}

#[test]
fn products_and_layers_with_activations_agree() {
    let Some(device) = gpu() else { return };
    let options = matmul::Options {};
    for [m, k, n] in [[1, 1, 1], [13, 19, 23], [127, 97, 73], [1, 4096, 2], [0, 3, 4], [3, 0, 4], [3, 4, 0]] {
        let inputs = named([("a", &[m, k], -1.0, 1.0), ("b", &[k, n], -1.0, 1.0)]);
        both::<matmul::Matmul, matmul::MatmulBackward>(&device, (&options, &options), &inputs, 0.0);
    }
    for activation in Function::ALL {
        let options = linear::Options { activation: Some(activation) };
        let mut inputs = named([("x", &[2, 65, 33], -1.0, 1.0), ("w", &[31, 33], -1.0, 1.0)]);
        both::<Linear, LinearBackward>(&device, (&options, &options), &inputs, 2.0);
        inputs.push("b", noise(9, &[31], -1.0, 1.0));
        both::<Linear, LinearBackward>(&device, (&options, &options), &inputs, 2.0);
    }
}

#[test]
fn rotation_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    for dims in [[2, 3, 5, 2], [1, 2, 300, 64], [3, 1, 1, 128], [2, 3, 17, 6], [1, 0, 2, 4], [1, 2, 0, 4], [1, 2, 3, 0]]
    {
        for pairing in [rope::Pairing::Half, rope::Pairing::Interleaved] {
            for layout in [Layout::HeadsFirst, Layout::HeadsLast] {
                let options = rope::Options { pairing, layout, first_position: 100_003, ..Default::default() };
                let inputs = named([("x", &dims, -1.0, 1.0)]);
                both::<rope::Rope, rope::RopeBackward>(&device, (&options, &options), &inputs, 0.0);
            }
        }
    }
}

#[test]
fn sinusoidal_positions_and_their_gradient_agree() {
    let Some(device) = gpu() else { return };
    for dims in [
        [1, 1, 1],
        [2, 5, 2],
        [3, 7, 3],
        [2, 300, 64],
        [1, 513, 127],
        [70, 33, 33],
        [2, 4000, 300],
        [0, 2, 4],
        [2, 0, 4],
        [2, 3, 0],
    ] {
        for first_position in [0, 100_003, i64::MIN, i64::MAX] {
            let options = sinusoidal_positions::Options { first_position, ..Default::default() };
            let inputs = named([("x", &dims, -1.0, 1.0)]);
            both::<SinusoidalPositions, SinusoidalPositionsBackward>(&device, (&options, &options), &inputs, 0.0);
        }
    }
}

#[test]
fn transformer_layers_and_their_gradients_agree() {
    let Some(device) = gpu() else { return };
    let root = |size: usize| 1.0 / (size as f64).sqrt();
    for [b, l, d, f] in [[2, 5, 8, 12], [1, 33, 16, 31], [2, 0, 4, 8]] {
        let mut inputs = named([
            ("x", &[b, l, d], -1.0, 1.0),
            ("wg", &[f, d], -root(d), root(d)),
            ("wu", &[f, d], -root(d), root(d)),
            ("wd", &[d, f], -root(f), root(f)),
        ]);
        let options = swiglu_mlp::Options::default();
        both::<SwigluMlp, SwigluMlpBackward>(&device, (&options, &options), &inputs, 6.0);
        for (name, dims) in [
            ("wqkv", &[3 * d, d][..]),
            ("wo", &[d, d]),
            ("bo", &[d]),
            ("ln1_w", &[d]),
            ("ln1_b", &[d]),
            ("ln2_w", &[d]),
            ("ln2_b", &[d]),
        ] {
            inputs.push(name, noise(name.len() as u64, dims, -root(d), root(d)));
        }
        let options =
            transformer_block::Options { heads: 2, causal: true, rope_theta: Some(1e4), ..Default::default() };
        both::<TransformerBlock, TransformerBlockBackward>(&device, (&options, &options), &inputs, 15.0);
    }
}

#[test]
fn parts_of_a_buffer_share_its_memory_and_keep_it() {
    let Some(device) = gpu() else { return };
    let before = device.live_bytes();
    let whole = noise(1, &[6, 5], -1.0, 1.0);
    let lane = device.lane().unwrap();
    let buffer = Buffer::new(&device, whole.spec()).unwrap();
    lane.upload(whole.view().bytes(), &buffer).unwrap();
    let part = buffer.rows(2..5).unwrap();
    drop(buffer);
    assert_eq!(part.spec(), Spec::new(DType::F32, &[3, 5]).unwrap());
    let mut got = Owned::poisoned(part.spec());
    lane.download(&part, got.view_mut().bytes()).unwrap();
    assert_eq!(got.view().bytes(), whole.view().rows(2..5).unwrap().bytes());
    assert!(part.rows(2..4).is_err());
    assert!(device.live_bytes() > before);
}

#[test]
fn a_table_is_uploaded_once_while_it_is_kept() {
    let Some(device) = gpu() else { return };
    let values = [0.1, -2.0, 3e300];
    let table = device.table(&values).unwrap();
    assert!(std::sync::Arc::ptr_eq(&table, &device.table(&values).unwrap()));
    for other in 0..20 {
        device.table(&[other as f64]).unwrap();
    }
    for table in [table, device.table(&values).unwrap()] {
        let mut got = Owned::poisoned(table.spec());
        device.lane().unwrap().download(&table, got.view_mut().bytes()).unwrap();
        assert_eq!(got.view().slice::<f64>().unwrap(), values);
    }
}

/// f32 products have the accuracy of f32 unless the caller allows TF32. Other types are not affected.
#[test]
fn factors_are_rounded_to_tf32_only_where_that_is_allowed() {
    let Some(device) = gpu() else { return };
    let inputs = named([("a", &[128, 256], -1.0, 1.0), ("b", &[256, 64], -1.0, 1.0)]);
    for dtype in DType::FLOATS {
        let inputs = cast(op::about::<Matmul>(), &inputs, dtype);
        let run = |lane: Lane| common::run_on::<Matmul>(&matmul::Options::default(), &inputs, &lane).unwrap();
        let exact = run(device.lane().unwrap());
        let allowed = run(device.lane().unwrap().allow_tf32(true));
        let off = worst(allowed.get("c").unwrap(), exact.get("c").unwrap(), 0.0, 1.0);
        if dtype == DType::F32 && device.facts().capability.0 >= 8 {
            assert!((1e-5..2e-2).contains(&off), "{off}");
        } else {
            assert_eq!(off, 0.0, "{dtype}");
        }
        let next = run(device.lane().unwrap());
        assert_eq!(common::bits(&next), common::bits(&exact), "a lane that comes back has forgotten it: {dtype}");
    }
}
