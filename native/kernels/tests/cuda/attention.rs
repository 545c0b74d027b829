//! Attention and its gradient on CUDA: against the f64 reference or, where that is too slow, against the general
//! kernels in f64; repeated runs have equal bits; every element is written. Without a GPU each test says so and passes,
//! unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::check::noise;
use crate::common::{bits, cast, gpu, part, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::attention::decode::{self, Decode};
use sidewinder_kernels::ops::attention::{Attention, AttentionBackward, Layout, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// Sizes, options and extra inputs of a call.
#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    heads: [usize; 2],
    rows: [usize; 2],
    widths: [usize; 2],
    options: Options,
    mask: Option<Vec<usize>>,
    bias: Option<Vec<usize>>,
    /// The factor of the queries.
    size: f64,
    dlse: bool,
}

fn case(batch: usize, heads: [usize; 2], rows: [usize; 2], widths: [usize; 2]) -> Case {
    let options = Options::default();
    Case { batch, heads, rows, widths, options, mask: None, bias: None, size: 2.0, dlse: true }
}

impl Case {
    fn causal(mut self) -> Case {
        self.options.causal = true;
        self
    }

    fn offset(mut self, offset: i64) -> Case {
        self.options.q_offset = Some(offset);
        self.causal()
    }

    fn heads_last(mut self) -> Case {
        self.options.layout = Layout::HeadsLast;
        self
    }

    fn scale(mut self, scale: f64) -> Case {
        self.options.scale = Some(scale);
        self
    }

    fn mask(mut self, dims: &[usize]) -> Case {
        self.mask = Some(dims.to_vec());
        self
    }

    fn bias(mut self, dims: &[usize]) -> Case {
        self.bias = Some(dims.to_vec());
        self
    }

    fn size(mut self, size: f64) -> Case {
        self.size = size;
        self
    }

    fn without_dlse(mut self) -> Case {
        self.dlse = false;
        self
    }

    fn dims(&self, heads: usize, rows: usize, width: usize) -> Vec<usize> {
        match self.options.layout {
            Layout::HeadsFirst => vec![self.batch, heads, rows, width],
            Layout::HeadsLast => vec![self.batch, rows, heads, width],
        }
    }

    fn inputs(&self) -> Named<Owned> {
        let Case { heads: [h, kh], rows: [l, m], widths: [w, vw], .. } = *self;
        let mut inputs = Named::default();
        inputs.push("q", noise(1, &self.dims(h, l, w), -self.size, self.size));
        inputs.push("k", noise(2, &self.dims(kh, m, w), -2.0, 2.0));
        inputs.push("v", noise(3, &self.dims(kh, m, vw), -1.0, 1.0));
        if let Some(dims) = &self.mask {
            inputs.push("mask", noise(4, dims, -0.49, 1.49).cast(DType::U8));
        }
        if let Some(dims) = &self.bias {
            inputs.push("bias", noise(5, dims, -2.0, 2.0));
        }
        inputs
    }

    /// The cotangents that the gradient takes in addition to the inputs.
    fn cotangents(&self, storage: DType) -> Named<Owned> {
        let Case { heads: [h, _], rows: [l, _], widths: [_, vw], .. } = *self;
        let mut cotangents = Named::default();
        cotangents.push("dy", noise(6, &self.dims(h, l, vw), -1.0, 1.0).cast(storage));
        if self.dlse {
            cotangents.push("dlse", noise(7, &[self.batch, h, l], -1.0, 1.0).cast(storage.wide()));
        }
        cotangents
    }
}

/// Runs an op on the device, into poisoned outputs.
fn run<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>) -> Named<Owned> {
    let lane = device.lane().unwrap();
    let call = ops::call::<O>(op::specs(inputs), options).unwrap();
    let sources = common::uploaded(&lane, inputs).unwrap();
    let results = call.outputs().map(|spec| {
        let buffer = Buffer::new(device, *spec).unwrap();
        lane.poison(&buffer).unwrap();
        buffer
    });
    call.cuda(&sources.as_ref(), &results.as_ref(), &lane).unwrap();
    results.map(|buffer| {
        let mut tensor = Owned::poisoned(buffer.spec());
        lane.download(buffer, tensor.view_mut().bytes()).unwrap();
        tensor
    })
}

/// The reference's results, in f64.
fn in_f64<O: Op>(options: &O::Options, inputs: &Named<Owned>) -> Named<Owned> {
    let exec = Exec { level: Level::Reference, threads: 1 };
    common::run::<O>(options, &cast(op::about::<O>(), inputs, DType::F64), &exec).unwrap()
}

fn joined(lists: [&Named<Owned>; 3]) -> Named<Owned> {
    lists.iter().flat_map(|list| list.iter()).map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
}

/// The tolerance of results, relative to themselves and to the largest value of their tensor. Scores and sums are
/// rounded to the type of the arithmetic; weights, for 16-bit storage, to storage. The sums for `lse` are never rounded
/// to storage; gradients depend on a `y` that was.
fn tolerance(storage: DType, name: &str) -> (f64, f64) {
    match (storage, name) {
        (DType::F64, _) => (1e-10, 1e-11),
        (DType::F32, _) | (_, "lse") => (2e-5, 1e-5),
        (DType::Bf16, _) => (8e-3, 1.5e-2),
        (_, _) => (1e-3, 2e-3),
    }
}

fn compare(got: &Named<Owned>, expected: &Named<Owned>, storage: DType, slack: f64, what: &str) {
    for (name, expected) in expected.iter() {
        let got = got.get(name).unwrap();
        let (relative, of_largest) = tolerance(storage, name);
        let finite = |v: &f64| v.is_finite();
        let largest = expected.view().to_f64().into_iter().filter(finite).fold(0.0f64, |m, v| m.max(v.abs()));
        let off = worst(got, expected, slack * relative, slack * of_largest * largest + 1e-12);
        assert!(off <= 1.0, "{name} is off by {off} times the tolerance: {storage} {what}");
    }
}

/// Checks forward and backward in one type, against expected values from `truth`.
fn agrees_as(device: &Device, case: &Case, storage: DType, truth: Truth, slack: f64) {
    let what = format!("{case:?}");
    let inputs = cast(op::about::<Attention>(), &case.inputs(), storage);
    let forward = || run::<Attention>(device, &case.options, &inputs);
    let got = forward();
    assert_eq!(bits(&got), bits(&forward()), "forward {storage} {what}");
    let cotangents = case.cotangents(storage);
    let given = joined([&inputs, &got, &cotangents]);
    let backward = || run::<AttentionBackward>(device, &case.options, &given);
    let gradients = backward();
    assert_eq!(bits(&gradients), bits(&backward()), "backward {storage} {what}");
    let (expected, expected_gradients) = match truth {
        Truth::Reference => {
            (in_f64::<Attention>(&case.options, &inputs), in_f64::<AttentionBackward>(&case.options, &given))
        }
        Truth::General => {
            let wide = |tensors: &Named<Owned>| cast(op::about::<AttentionBackward>(), tensors, DType::F64);
            let inputs = wide(&inputs);
            let expected = run::<Attention>(device, &case.options, &inputs);
            let given = joined([&inputs, &expected, &wide(&cotangents)]);
            (expected, run::<AttentionBackward>(device, &case.options, &given))
        }
    };
    compare(&got, &expected, storage, slack, &what);
    compare(&gradients, &expected_gradients, storage, slack, &what);
}

/// The source of the expected values.
#[derive(Clone, Copy)]
enum Truth {
    /// The reference in f64.
    Reference,
    /// The general kernels in f64, which are themselves checked against the reference.
    General,
}

fn agrees(case: Case) {
    let Some(device) = gpu() else { return };
    for storage in DType::FLOATS {
        agrees_as(&device, &case, storage, Truth::Reference, 1.0);
    }
}

/// Checks forward in 16-bit storage against the general kernels in f64.
fn forward_agrees(case: Case) {
    let Some(device) = gpu() else { return };
    for storage in [DType::Bf16, DType::F16] {
        let what = format!("{case:?}");
        let inputs = cast(op::about::<Attention>(), &case.inputs(), storage);
        let forward = || run::<Attention>(&device, &case.options, &inputs);
        let got = forward();
        assert_eq!(bits(&got), bits(&forward()), "forward {storage} {what}");
        let inputs = cast(op::about::<Attention>(), &inputs, DType::F64);
        compare(&got, &run::<Attention>(&device, &case.options, &inputs), storage, 1.0, &what);
    }
}

#[test]
fn plain_calls_agree() {
    for (rows, widths) in [
        ([1, 1], [1, 1]),
        ([3, 5], [4, 4]),
        ([17, 63], [8, 8]),
        ([64, 64], [16, 16]),
        ([65, 70], [32, 32]),
        ([130, 129], [64, 64]),
        ([100, 200], [128, 128]),
        ([40, 33], [256, 256]),
    ] {
        agrees(case(2, [2, 2], rows, widths));
        agrees(case(1, [2, 1], rows, widths).causal());
    }
}

#[test]
fn odd_widths_agree() {
    for widths in [[130, 250], [300, 270]] {
        agrees(case(1, [2, 1], [17, 21], widths).causal());
    }
    for widths in [[3, 3], [6, 2], [7, 5], [1, 9], [20, 12], [33, 63], [63, 65], [96, 80]] {
        agrees(case(1, [2, 2], [37, 45], widths));
        agrees(case(1, [4, 2], [70, 66], widths).causal().heads_last());
    }
}

#[test]
fn offsets_agree() {
    for offset in [-1000, -70, -5, -1, 0, 1, 7, 64, 1000, i64::MIN, i64::MAX] {
        agrees(case(1, [2, 1], [70, 75], [16, 16]).offset(offset));
        agrees(case(1, [2, 1], [70, 75], [80, 48]).offset(offset));
        agrees(case(1, [2, 1], [70, 75], [16, 16]).offset(offset).mask(&[70, 75]));
    }
    agrees(case(2, [4, 2], [1, 300], [64, 64]).causal());
    agrees(case(2, [4, 2], [3, 130], [128, 128]).causal());
    agrees(case(1, [1, 1], [130, 3], [64, 64]).causal());
}

#[test]
fn heads_that_share_keys_agree() {
    for heads in [[4, 2], [6, 1], [3, 3]] {
        agrees(case(2, heads, [66, 70], [64, 64]));
        agrees(case(2, heads, [66, 70], [64, 64]).causal().heads_last());
        agrees(case(2, heads, [66, 70], [24, 16]).causal().heads_last().bias(&[heads[0], 1, 1]));
    }
}

#[test]
fn masks_agree() {
    let plain = || case(2, [4, 2], [67, 70], [16, 24]);
    for dims in [&[2, 4, 67, 70][..], &[2, 1, 67, 70], &[1, 1, 1, 70], &[2, 1, 1, 70], &[4, 67, 1], &[70], &[1], &[]] {
        agrees(plain().mask(dims));
        agrees(plain().mask(dims).causal().heads_last());
    }
}

#[test]
fn biases_agree() {
    let plain = || case(2, [4, 2], [67, 70], [16, 24]);
    for dims in [
        &[2, 4, 67, 70][..],
        &[2, 1, 67, 70],
        &[1, 4, 67, 70],
        &[1, 1, 1, 70],
        &[2, 1, 1, 70],
        &[4, 67, 1],
        &[1, 4, 1, 1],
        &[2, 1, 1, 1],
        &[70],
        &[1],
        &[],
    ] {
        agrees(plain().bias(dims));
        agrees(plain().bias(dims).causal().heads_last().mask(&[2, 1, 67, 70]));
    }
    agrees(case(3, [2, 2], [300, 40], [8, 8]).bias(&[2, 1, 40]));
}

#[test]
fn nothing_agrees_with_nothing() {
    for (batch, heads, rows, widths) in [
        (0, [2, 1], [3, 4], [8, 8]),
        (2, [0, 1], [3, 4], [8, 8]),
        (2, [2, 1], [0, 4], [8, 8]),
        (2, [2, 1], [3, 0], [8, 8]),
        (2, [2, 1], [3, 4], [0, 8]),
        (2, [2, 1], [3, 4], [8, 0]),
        (2, [2, 1], [0, 0], [8, 8]),
    ] {
        agrees(case(batch, heads, rows, widths));
        agrees(case(batch, heads, rows, widths).causal().bias(&[1, 1, 1, rows[1]]));
        agrees(case(batch, heads, rows, widths).bias(&[1]).mask(&[rows[0], 1]));
    }
}

fn few_queries_agree(heads: [usize; 2], rows: [usize; 2], widths: [usize; 2]) {
    agrees(case(2, heads, rows, widths));
    agrees(case(2, heads, rows, widths).causal().heads_last());
    agrees(case(1, heads, rows, widths).mask(&[1, rows[1]]).bias(&[heads[0], 1, rows[1]]).causal());
}

test_each! { few_queries_agree, super::few_queries_agree:
    of_width_1: [2, 2], [1, 1], [1, 1];
    of_width_64: [8, 2], [1, 5000], [64, 64];
    of_two_queries: [5, 1], [2, 257], [128, 128];
    of_four_queries: [2, 2], [4, 700], [80, 96];
    of_width_7: [3, 1], [3, 1000], [7, 5];
    of_width_250: [2, 2], [1, 130], [250, 127];
    of_many_heads: [40, 2], [1, 333], [72, 64];
    of_few_keys: [4, 1], [1, 63], [16, 128];
    of_wide_values: [6, 2], [3, 100], [160, 256];
    joined_in_a_cluster: [16, 16], [1, 2048], [64, 64];
    joined_in_a_cluster_of_two_queries: [32, 16], [2, 1111], [64, 128];
}

#[test]
fn few_queries_agree_with_offsets() {
    agrees(case(1, [2, 1], [4, 300], [16, 16]).offset(-2));
    agrees(case(1, [4, 1], [1, 300], [64, 32]).offset(170));
    agrees(case(1, [4, 1], [1, 300], [64, 32]).offset(-1));
    agrees(case(1, [2, 1], [2, 0], [16, 16]));
}

/// Steps over a cache on the device, whose unfilled rows are NaN, equal one causal pass on the CPU.
fn decoding_agrees(width: usize, types: &[DType]) {
    let Some(device) = gpu() else { return };
    let (length, heads, key_heads) = (150, 4, 2);
    for &storage in types {
        for layout in [Layout::HeadsFirst, Layout::HeadsLast] {
            let options = Options { causal: true, layout, ..Default::default() };
            let whole = Case { options, ..case(2, [heads, key_heads], [length, length], [width, width]) };
            let inputs = cast(op::about::<Attention>(), &whole.inputs(), storage);
            let expected = in_f64::<Attention>(&whole.options, &inputs);
            let lane = device.lane().unwrap();
            let held = || {
                let buffer =
                    Buffer::new(&device, Spec::new(storage, &[2, key_heads, length + 9, width]).unwrap()).unwrap();
                lane.poison(&buffer).unwrap();
                buffer
            };
            let (keys, values) = (held(), held());
            let axis = if layout == Layout::HeadsFirst { 2 } else { 1 };
            for range in [0..90, 90..91, 91..92, 92..96, 96..149, 149..150] {
                let given = inputs.map(|tensor| part(tensor, axis, range.clone()));
                let sources = given.map(|tensor| {
                    let buffer = Buffer::new(&device, tensor.spec()).unwrap();
                    lane.upload(tensor.view().bytes(), &buffer).unwrap();
                    buffer
                });
                let y = Buffer::new(&device, given.get("q").unwrap().spec()).unwrap();
                lane.poison(&y).unwrap();
                let options = decode::Options { cached: range.start, layout, ..Default::default() };
                let outputs = [("y", &y), ("keys", &keys), ("values", &values)].into_iter().collect();
                op::run_cuda::<Decode>(&options, &sources.as_ref(), &outputs, &lane).unwrap();
                let mut got = Owned::poisoned(y.spec());
                lane.download(&y, got.view_mut().bytes()).unwrap();
                let expected = part(expected.get("y").unwrap(), axis, range.clone());
                let named = |tensor| [("y", tensor)].into_iter().collect();
                compare(&named(got), &named(expected), storage, 1.0, &format!("{layout:?} {range:?}"));
                // A call from host to host copies the cache to the device and back.
                let mut with_cache = given.clone();
                for (name, buffer) in [("keys", &keys), ("values", &values)] {
                    let mut tensor = Owned::poisoned(buffer.spec());
                    lane.download(buffer, tensor.view_mut().bytes()).unwrap();
                    with_cache.push(name, tensor);
                }
                let again = common::run_cuda::<Decode>(&options, &with_cache, &device).unwrap();
                let mut got = Owned::poisoned(y.spec());
                lane.download(&y, got.view_mut().bytes()).unwrap();
                assert_eq!(again.get("y").unwrap().view().bytes(), got.view().bytes());
                assert_eq!(again.get("keys").unwrap().view().bytes(), with_cache.get("keys").unwrap().view().bytes());
            }
        }
    }
}

#[test]
fn decoding_equals_one_causal_pass() {
    decoding_agrees(64, &DType::FLOATS);
}

#[test]
fn wide_decoding_equals_one_causal_pass() {
    decoding_agrees(128, &[DType::Bf16, DType::F16]);
}

#[test]
fn scales_and_missing_cotangents_agree() {
    for scale in [1.0, 0.0, -0.3, 1e-3, 1e-42] {
        agrees(case(1, [2, 2], [40, 45], [16, 16]).scale(scale).without_dlse());
        agrees(case(1, [2, 2], [40, 45], [16, 16]).scale(scale).causal());
    }
}

#[test]
fn scores_of_thousands_agree() {
    let Some(device) = gpu() else { return };
    for size in [50.0, 1000.0] {
        let plain = case(1, [2, 2], [70, 75], [64, 64]).size(size).without_dlse();
        for storage in DType::FLOATS {
            // A score of a thousand has an error of 1e-4 in f32, and its weight has a relative error of that size.
            let slack = if storage == DType::F64 { 1e3 } else { 0.5 * size };
            for case in [plain.clone(), plain.clone().causal(), plain.clone().bias(&[70, 75])] {
                agrees_as(&device, &case, storage, Truth::Reference, slack);
            }
        }
    }
}

#[test]
fn queries_that_see_nothing_have_no_gradient() {
    let Some(device) = gpu() else { return };
    let blind = case(1, [2, 2], [40, 45], [16, 16]).offset(-20);
    for storage in DType::FLOATS {
        for with_mask in [false, true] {
            let mut inputs = cast(op::about::<Attention>(), &blind.inputs(), storage);
            if with_mask {
                inputs.push("mask", noise(1, &[40, 45], 1.0, 1.0).cast(DType::U8));
            }
            let outputs = run::<Attention>(&device, &blind.options, &inputs);
            let lse = outputs.get("lse").unwrap().view().to_f64();
            assert!(lse.iter().zip(0..).all(|(lse, i)| (*lse == f64::NEG_INFINITY) == (i % 40 < 20)));
            let y = outputs.get("y").unwrap().view().to_f64();
            assert!(y.iter().zip(0..).all(|(y, i)| (*y == 0.0) == (i / 16 % 40 < 20)));
            let mut cotangents = blind.cotangents(storage);
            // The derivative of a result of -inf is often NaN.
            cotangents.take("dlse");
            let at = |i: usize| if i % 40 < 20 { f64::NAN } else { 1.0 };
            let mut all = (0..80).map(at);
            let dlse = outputs.get("lse").unwrap().spec();
            cotangents.push("dlse", Owned::from_fn(dlse, |_| all.next().unwrap()));
            let given = joined([&inputs, &outputs, &cotangents]);
            let gradients = run::<AttentionBackward>(&device, &blind.options, &given);
            for (name, gradient) in gradients.iter() {
                assert!(gradient.view().to_f64().iter().all(|v| v.is_finite()), "{name} {storage}");
            }
            let dq = gradients.get("dq").unwrap().view().to_f64();
            assert!(dq.iter().zip(0..).all(|(d, i)| i / 16 % 40 >= 20 || *d == 0.0), "{storage}");
        }
    }
}

#[test]
fn long_calls_agree_with_the_general_kernels_in_f64() {
    let Some(device) = gpu() else { return };
    for widths in [[64, 64], [128, 128], [80, 96], [192, 128], [256, 256]] {
        for storage in [DType::F32, DType::Bf16, DType::F16] {
            let plain = case(2, [6, 2], [1000, 1100], widths).size(1.0);
            agrees_as(&device, &plain, storage, Truth::General, 1.0);
            agrees_as(&device, &plain.clone().causal().heads_last(), storage, Truth::General, 1.0);
            agrees_as(&device, &plain.clone().offset(-300), storage, Truth::General, 1.0);
        }
    }
}

/// Tiles of Hopper's kernels at odd sizes: rows and keys that end within a tile or a warpgroup.
fn odd_tiles_agree(widths: [usize; 2]) {
    for rows in [[65, 512], [200, 313], [129, 700], [385, 641]] {
        forward_agrees(case(2, [4, 2], rows, widths).size(1.0));
        forward_agrees(case(2, [3, 1], rows, widths).size(1.0).causal().heads_last());
    }
}

test_each! { odd_tiles_agree, super::odd_tiles_agree:
    of_width_40: [40, 40];
    of_width_64: [64, 64];
    of_width_96: [96, 96];
    of_width_128: [128, 128];
    of_wide_keys: [128, 56];
    of_wide_values: [64, 104];
}

/// Few keys, down to a single one.
#[test]
fn odd_tiles_of_few_keys_agree() {
    for keys in [1, 2, 127, 128, 129, 257] {
        for widths in [[64, 64], [128, 128]] {
            forward_agrees(case(1, [2, 2], [130, keys], widths));
            forward_agrees(case(1, [2, 2], [130, keys], widths).causal());
        }
    }
}

/// More tiles of queries than multiprocessors: blocks go on to further tiles, and those of causal calls do not.
#[test]
fn many_tiles_agree() {
    for widths in [[64, 64], [128, 128]] {
        forward_agrees(case(6, [12, 4], [390, 200], widths).size(1.0));
        forward_agrees(case(6, [12, 4], [390, 200], widths).size(1.0).offset(-100));
        forward_agrees(case(2, [4, 4], [1300, 1200], widths).size(1.0).causal());
    }
}

/// Causal tiles that see no key, all keys, or end where a warpgroup or a tile begins.
#[test]
fn odd_tiles_at_offsets_agree() {
    for offset in [-1000, -260, -193, -130, -64, -1, 0, 63, 64, 127, 300, 511, 1000] {
        forward_agrees(case(1, [2, 1], [260, 520], [64, 64]).offset(offset));
        forward_agrees(case(1, [2, 1], [260, 300], [128, 128]).offset(offset).heads_last());
    }
}

/// Checks forward and backward in 16-bit storage against the general kernels in f64.
fn gradients_agree(case: Case) {
    let Some(device) = gpu() else { return };
    for storage in [DType::Bf16, DType::F16] {
        agrees_as(&device, &case, storage, Truth::General, 1.0);
    }
}

/// Tiles of Hopper's gradients at odd sizes: queries and keys that end within a tile or a warpgroup.
fn odd_tiles_have_gradients(widths: [usize; 2]) {
    for rows in [[65, 66], [129, 450], [200, 313], [700, 129], [385, 641]] {
        gradients_agree(case(2, [4, 2], rows, widths).size(1.0));
        gradients_agree(case(2, [3, 1], rows, widths).size(1.0).causal().heads_last());
    }
}

test_each! { odd_tiles_have_gradients, super::odd_tiles_have_gradients:
    of_width_40: [40, 40];
    of_width_64: [64, 64];
    of_width_96: [96, 96];
    of_width_128: [128, 128];
    of_wide_keys: [128, 56];
    of_wide_values: [64, 104];
}

/// Causal tiles of keys that no query sees, that all see, or that begin with a tile of queries.
#[test]
fn gradients_at_offsets_agree() {
    for offset in [-1000, -260, -193, -130, -64, -1, 0, 63, 64, 127, 300, 511, 1000] {
        gradients_agree(case(1, [2, 1], [260, 520], [64, 64]).offset(offset));
        gradients_agree(case(1, [2, 1], [260, 300], [128, 128]).offset(offset).heads_last());
    }
}

/// More tiles of keys than multiprocessors, so that blocks go on to further ones, with more heads than are interleaved.
#[test]
fn gradients_of_many_tiles_agree() {
    for widths in [[64, 64], [128, 128]] {
        gradients_agree(case(6, [12, 12], [300, 290], widths).size(1.0));
        gradients_agree(case(6, [12, 12], [300, 290], widths).size(1.0).causal());
        gradients_agree(case(8, [12, 6], [390, 500], widths).size(1.0).offset(-100));
    }
}

#[test]
fn parts_of_buffers_agree_at_any_address() {
    let Some(device) = gpu() else { return };
    let part = case(1, [1, 1], [5, 7], [5, 3]);
    for storage in DType::FLOATS {
        let inputs = cast(op::about::<Attention>(), &part.inputs(), storage);
        let expected = run::<Attention>(&device, &part.options, &inputs);
        let lane = device.lane().unwrap();
        let moved = |tensor: &Owned| {
            let spec = tensor.spec();
            let dims = [&[2], &spec.shape[1..]].concat();
            let whole = Buffer::new(&device, Spec::new(spec.dtype, &dims).unwrap()).unwrap();
            lane.poison(&whole).unwrap();
            whole.rows(1..2).unwrap()
        };
        let sources = inputs.map(moved);
        for (name, tensor) in inputs.iter() {
            lane.upload(tensor.view().bytes(), sources.get(name).unwrap()).unwrap();
        }
        let results = expected.map(moved);
        op::run_cuda::<Attention>(&part.options, &sources.as_ref(), &results.as_ref(), &lane).unwrap();
        for (name, expected) in expected.iter() {
            let mut got = Owned::poisoned(expected.spec());
            lane.download(results.get(name).unwrap(), got.view_mut().bytes()).unwrap();
            assert_eq!(got.view().bytes(), expected.view().bytes(), "{name} {storage}");
        }
    }
}
