//! The CUDA side: the scan against the f64 reference in every form, type and layout, and what must
//! hold when things go wrong. Without a GPU each test says so and passes, unless
//! `SIDEWINDER_REQUIRE_CUDA=1`.

mod common;

use common::{gpu, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::{self, Buffer, Device, Lane, Source};
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::selective_scan::cuda::{Plan, forward_as};
use sidewinder_kernels::selective_scan::{Options, SelectiveScan};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::process::Command;

/// How B or C comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Shared,
    Groups(usize),
    Constant,
}

/// A call to be made up: sizes, forms, and which optional parts it has.
#[derive(Clone, Debug)]
struct Call {
    sizes: [usize; 4],
    b: Form,
    c: Form,
    optional: bool,
    options: Options,
}

impl Call {
    fn new(sizes: [usize; 4]) -> Call {
        let options = Options { return_state: true, ..Options::default() };
        Call { sizes, b: Form::Shared, c: Form::Shared, optional: false, options }
    }

    /// With D, z, dt_bias, h0 and softplus.
    fn full(sizes: [usize; 4]) -> Call {
        let mut call = Call { optional: true, ..Call::new(sizes) };
        call.options.dt_softplus = true;
        call
    }

    fn forms(self, b: Form, c: Form) -> Call {
        Call { b, c, ..self }
    }

    fn clamped(mut self) -> Call {
        self.options.dt_clamp = Some((0.0625, 0.5));
        self
    }

    fn inputs(&self, storage: DType) -> Named<Owned> {
        let [b, l, d, n] = self.sizes;
        let varying = |form| match form {
            Form::Shared => vec![b, l, n],
            Form::Groups(groups) => vec![b, l, groups, n],
            Form::Constant => vec![d, n],
        };
        // Softplus brings steps of any sign into range; without it they are small and positive.
        let (least, most) = if self.options.dt_softplus { (-4.0, 1.0) } else { (0.0, 0.7) };
        let mut inputs = Named::default();
        inputs.push("x", noise(1, storage, &[b, l, d], -1.0, 1.0));
        inputs.push("dt", noise(2, storage, &[b, l, d], least, most));
        inputs.push("A", noise(3, storage.wide(), &[d, n], -4.0, -0.05));
        inputs.push("B", noise(4, storage, &varying(self.b), -1.0, 1.0));
        inputs.push("C", noise(5, storage, &varying(self.c), -1.0, 1.0));
        if self.optional {
            inputs.push("D", noise(6, storage.wide(), &[d], -1.0, 1.0));
            inputs.push("z", noise(7, storage, &[b, l, d], -3.0, 3.0));
            inputs.push("dt_bias", noise(8, storage.wide(), &[d], -0.5, 0.5));
            inputs.push("h0", noise(9, storage.wide(), &[b, d, n], -1.0, 1.0));
        }
        inputs
    }

    /// Runs it on the device, outputs poisoned, and compares with the reference in f64.
    fn check(&self, device: &Device, storage: DType, plan: Option<Plan>) {
        let inputs = self.inputs(storage);
        let got = on_device(device, &self.options, &inputs, plan).unwrap();
        let exact = inputs.map(|tensor| tensor.cast(DType::F64));
        let level = Exec { level: Level::Reference, threads: 1 };
        let expected = common::run::<SelectiveScan>(&self.options, &exact, &level).unwrap();
        for (name, expected) in expected.iter() {
            let rounding = if name == "y" { storage } else { storage.wide() };
            let (rtol, atol) = match rounding {
                DType::F64 => (1e-12, 1e-12),
                DType::F32 => (1e-5, 4e-6),
                DType::F16 => (6e-4, 4e-6),
                DType::Bf16 => (4.1e-3, 4e-6),
            };
            let largest = expected.view().to_f64().fold(1.0f64, |m, v| m.max(v.abs()));
            let worst = worst(got.get(name).unwrap(), expected, rtol, atol * largest);
            assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance: {self:?} {storage} {plan:?}");
        }
    }
}

fn noise(seed: u64, dtype: DType, dims: &[usize], from: f64, to: f64) -> Owned {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Owned::from_fn(Spec::new(dtype, dims).unwrap(), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        from + (to - from) * (state >> 33) as f64 / (1u64 << 31) as f64
    })
}

fn uploaded(lane: &Lane, tensors: &Named<Owned>) -> Result<Named<Buffer>> {
    let buffers = tensors.iter().map(|(name, t)| Ok((name.clone(), Buffer::new(lane.device(), t.spec())?)));
    let buffers = buffers.collect::<Result<Named<_>>>()?;
    for (name, tensor) in tensors.iter() {
        lane.upload(tensor.view().bytes(), buffers.get(name)?)?;
    }
    Ok(buffers)
}

fn refs(buffers: &Named<Buffer>) -> Named<&Buffer> {
    buffers.iter().map(|(name, buffer)| (name.clone(), buffer)).collect()
}

fn on_device(device: &Device, options: &Options, inputs: &Named<Owned>, plan: Option<Plan>) -> Result<Named<Owned>> {
    let problem = op::check::<SelectiveScan>(&op::specs(inputs), options)?;
    let lane = device.lane()?;
    let sources = uploaded(&lane, inputs)?;
    let outputs = SelectiveScan::outputs(&problem)?.into_iter();
    let outputs = outputs.map(|(name, spec)| Ok((name, Buffer::new(device, spec)?))).collect::<Result<Named<_>>>()?;
    for (_, output) in outputs.iter() {
        lane.poison(output)?;
    }
    forward_as(&problem, &refs(&sources), &refs(&outputs), &lane, plan)?;
    let mut results = Named::default();
    for (name, output) in outputs.iter() {
        let mut result = Owned::poisoned(output.spec());
        lane.download(output, result.view_mut().bytes())?;
        results.push(name.clone(), result);
    }
    Ok(results)
}

#[test]
fn every_type_form_and_option() {
    let Some(device) = gpu() else { return };
    let forms = [Form::Shared, Form::Groups(1), Form::Groups(2), Form::Groups(6), Form::Constant];
    for storage in DType::ALL {
        for b in forms {
            for c in forms {
                Call::full([2, 19, 6, 5]).forms(b, c).check(&device, storage, None);
            }
        }
        Call::new([2, 21, 70, 16]).check(&device, storage, None);
        Call::new([2, 21, 70, 16]).clamped().check(&device, storage, None);
        Call::full([1, 33, 40, 16]).clamped().check(&device, storage, None);
        let mut states = Call::full([2, 9, 35, 7]);
        states.options.return_states = true;
        states.check(&device, storage, None);
    }
}

#[test]
fn odd_sizes() {
    let Some(device) = gpu() else { return };
    for state in [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 100, 128, 256, 257, 600] {
        Call::full([2, 9, 5, state]).check(&device, DType::F32, None);
        Call::new([1, 37, 3, state]).check(&device, DType::F64, None);
    }
    for length in [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 100, 127, 1000] {
        Call::full([2, length, 33, 16]).check(&device, DType::F32, None);
        Call::full([1, length, 3, 16]).check(&device, DType::Bf16, None);
    }
    for channels in [1, 2, 31, 32, 33, 127, 129, 500] {
        Call::full([3, 20, channels, 16]).check(&device, DType::F32, None);
        Call::full([1, 1, channels, 16]).check(&device, DType::F16, None);
    }
    Call::full([1, 40, 256, 16]).forms(Form::Groups(2), Form::Groups(8)).check(&device, DType::F32, None);
    Call::full([1, 40, 96, 128]).forms(Form::Groups(3), Form::Shared).check(&device, DType::Bf16, None);
}

#[test]
fn nothing_to_do() {
    let Some(device) = gpu() else { return };
    for sizes in [[0, 5, 4, 3], [2, 0, 4, 3], [2, 5, 0, 3], [2, 5, 4, 0], [2, 0, 4, 0], [0, 0, 0, 0]] {
        Call::new(sizes).check(&device, DType::F32, None);
        Call::full(sizes).check(&device, DType::Bf16, None);
    }
}

#[test]
fn every_layout() {
    let Some(device) = gpu() else { return };
    for lanes in [1, 2, 4, 8, 16, 32] {
        for (owned, warps) in [(1, 1), (2, 4), (4, 2)] {
            for chunks in [1, 2, 5] {
                let plan = Plan { lanes, owned, warps, chunks };
                let tile = 2 * lanes * owned * lanes * (16usize.div_ceil(lanes).div_ceil(2) | 1) * 16;
                if tile <= 32 << 10 {
                    Call::full([2, 150, 37, 16]).check(&device, DType::F32, Some(plan));
                    Call::new([1, 131, 20, 11]).check(&device, DType::Bf16, Some(plan));
                }
            }
        }
    }
}

#[test]
fn chunks_of_slabs() {
    let Some(device) = gpu() else { return };
    for chunks in [1, 3] {
        let plan = Plan { lanes: 8, owned: 1, warps: 2, chunks };
        Call::full([2, 100, 5, 400]).check(&device, DType::F32, Some(plan));
        Call::full([2, 100, 5, 300]).check(&device, DType::Bf16, Some(plan));
    }
}

#[test]
fn long_sums_with_slow_decay() {
    let Some(device) = gpu() else { return };
    for chunks in [1, 8] {
        let mut inputs = Call::new([1, 4096, 3, 16]).inputs(DType::F32);
        inputs.take("A");
        inputs.push("A", noise(3, DType::F32, &[3, 16], -1e-3, -1e-8));
        let options = Options { return_state: true, ..Options::default() };
        let plan = Plan { lanes: 4, owned: 4, warps: 1, chunks };
        let got = on_device(&device, &options, &inputs, Some(plan)).unwrap();
        let level = Exec { level: Level::Reference, threads: 1 };
        let expected = common::run::<SelectiveScan>(&options, &inputs.map(|t| t.cast(DType::F64)), &level).unwrap();
        for (name, expected) in expected.iter() {
            // What 2^v is off near v = 0, a quarter of an ulp, adds up over thousands of steps.
            let largest = expected.view().to_f64().fold(1.0f64, |m, v| m.max(v.abs()));
            let worst = worst(got.get(name).unwrap(), expected, 5e-5, 2e-5 * largest);
            println!("{name} with {chunks} chunks: {worst} of the tolerance");
            assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance with {chunks} chunks");
        }
    }
}

#[test]
fn nan_stays_in_its_channel() {
    let Some(device) = gpu() else { return };
    let call = Call::full([2, 40, 37, 16]).clamped();
    for name in ["x", "dt", "z"] {
        let mut inputs = call.inputs(DType::F32);
        let clean = on_device(&device, &call.options, &inputs, None).unwrap();
        let mut values = inputs.take(name).unwrap();
        values.view_mut().slice::<f32>().unwrap()[20 * 37 + 5] = f32::NAN;
        inputs.push(name, values);
        let got = on_device(&device, &call.options, &inputs, None).unwrap();
        let (clean, got) = (clean.get("y").unwrap().view(), got.get("y").unwrap().view());
        for (i, (got, clean)) in got.slice::<f32>().unwrap().iter().zip(clean.slice::<f32>().unwrap()).enumerate() {
            let (batch, t, channel) = (i / (40 * 37), i / 37 % 40, i % 37);
            let hit = batch == 0 && channel == 5 && if name == "z" { t == 20 } else { t >= 20 };
            assert!(if hit { got.is_nan() } else { got == clean }, "{name}: {got} at {batch}, {t}, {channel}");
        }
    }
}

#[test]
fn host_to_host_from_many_threads() {
    let Some(device) = gpu() else { return };
    let call = Call::full([4, 200, 300, 16]);
    let inputs = call.inputs(DType::F32);
    let run = || {
        let specs = SelectiveScan::outputs(&op::check::<SelectiveScan>(&op::specs(&inputs), &call.options).unwrap());
        let mut results: Vec<_> = specs.unwrap().into_iter().map(|(name, s)| (name, Owned::poisoned(s))).collect();
        let outputs = results.iter_mut().map(|(name, t)| (name.clone(), t.view_mut())).collect();
        cuda::run_host::<SelectiveScan>(&device, &call.options, &inputs.map(Owned::view), outputs).unwrap();
        results.into_iter().map(|(_, t)| t.view().bytes().to_vec()).collect::<Vec<_>>()
    };
    let first = run();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..20).for_each(|_| assert!(run() == first, "a call from another thread differs")));
        }
    });
}

/// In a process of its own, so that other tests' buffers do not count.
#[test]
fn memory_comes_back() {
    in_child("memory_comes_back_child", &[]);
}

#[test]
#[ignore = "run by memory_comes_back"]
fn memory_comes_back_child() {
    let Some(device) = gpu() else { return };
    let call = Call::full([2, 100, 64, 300]);
    let inputs = call.inputs(DType::F32);
    for chunks in [1, 2, 3] {
        let plan = Plan { lanes: 8, owned: 1, warps: 1, chunks };
        on_device(&device, &call.options, &inputs, Some(plan)).unwrap();
        assert_eq!(device.live_bytes(), 0);
    }
    let buffer = Buffer::new(&device, Spec::new(DType::F32, &[1000]).unwrap()).unwrap();
    assert_eq!(device.live_bytes(), 4000);
    std::thread::spawn(move || drop(buffer)).join().unwrap();
    assert_eq!(device.live_bytes(), 0);
    assert!(device.kept_bytes().unwrap() > 0);
    device.trim().unwrap();
    assert_eq!(device.kept_bytes().unwrap(), 0);
    let huge = Buffer::new(&device, Spec::new(DType::F32, &[1 << 50]).unwrap()).unwrap_err();
    assert_eq!(huge.kind, Kind::Memory, "{huge}");
    println!("{huge}");
    on_device(&device, &call.options, &inputs, None).unwrap();
}

#[test]
fn lanes_wait_for_each_other() {
    let Some(device) = gpu() else { return };
    let spec = Spec::new(DType::F32, &[1 << 22]).unwrap();
    for round in 0..20 {
        let data = noise(round, DType::F32, &spec.shape, -1.0, 1.0);
        let (one, two) = (device.lane().unwrap(), device.lane().unwrap());
        let buffer = Buffer::new(&device, spec).unwrap();
        one.poison(&buffer).unwrap();
        one.upload(data.view().bytes(), &buffer).unwrap();
        let mut back = Owned::poisoned(spec);
        two.download(&buffer, back.view_mut().bytes()).unwrap();
        assert!(back.view().bytes() == data.view().bytes(), "a lane did not wait for another");
        // Dropped under work in flight; whoever gets the memory next must not see that work.
        one.upload(data.view().bytes(), &buffer).unwrap();
        drop(buffer);
    }
}

#[test]
fn copies_of_every_size() {
    let Some(device) = gpu() else { return };
    let lane = device.lane().unwrap();
    for bytes in [0, 1, 255, 256, 257, 262143, 262144, 262145, 1 << 20, (5 << 20) + 3, (150 << 20) + 7] {
        let data: Vec<u8> = (0..bytes * 2).map(|i| ((i * 2654435761) >> 13) as u8).collect();
        let spec = Spec::new(DType::F16, &[bytes]).unwrap();
        let buffers = [Buffer::new(&device, spec).unwrap(), Buffer::new(&device, spec).unwrap()];
        lane.upload_all(&[(&data, &buffers[0]), (&data, &buffers[1])]).unwrap();
        let (mut one, mut two) = (vec![0; bytes * 2], vec![0; bytes * 2]);
        lane.download_all(&mut [(&buffers[0], &mut one), (&buffers[1], &mut two)]).unwrap();
        assert!(one == data && two == data, "{bytes}");
    }
    let short = lane.upload(&[0; 3], &Buffer::new(&device, Spec::new(DType::F32, &[1]).unwrap()).unwrap());
    assert_eq!(short.unwrap_err().kind, Kind::Size);
}

/// Runs an ignored test of this file in a process of its own.
fn in_child(test: &str, environment: &[(&str, &str)]) {
    if gpu().is_none() {
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn a_lost_device_says_so() {
    in_child("a_lost_device_says_so_child", &[]);
}

#[test]
#[ignore = "run by a_lost_device_says_so"]
fn a_lost_device_says_so_child() {
    const BAD: Source = Source {
        name: "write_to_nowhere",
        text: "struct Params { float* to; }; \
               extern \"C\" __global__ void write_to_nowhere(const __grid_constant__ Params p) { *p.to = 1; }",
    };
    let device = gpu().unwrap();
    let buffer = Buffer::new(&device, Spec::new(DType::F32, &[10]).unwrap()).unwrap();
    let lane = device.lane().unwrap();
    let kernel = device.kernel(&BAD, "").unwrap();
    // SAFETY: none: this is the illegal access that the test is about.
    unsafe { lane.launch(&kernel, [1, 1, 1], 1, &64u64).unwrap() };
    let error = lane.synchronize().unwrap_err();
    assert_eq!(error.kind, Kind::DeviceLost, "{error}");
    println!("{error}");
    drop(buffer);
    assert_eq!(lane.synchronize().unwrap_err(), error);
    assert_eq!(device.lane().map(drop).unwrap_err(), error);
    assert_eq!(Device::get(0).unwrap_err(), error);
    assert_eq!(Buffer::new(&device, Spec::new(DType::F32, &[1]).unwrap()).unwrap_err(), error);
    assert_eq!(cuda::devices().unwrap()[0].lost, Some(error));
    common::run::<SelectiveScan>(&Options::default(), &Call::new([1, 4, 3, 2]).inputs(DType::F32), &Exec::default())
        .expect("the CPU goes on");
}

#[test]
fn a_device_marked_lost_says_so() {
    in_child("a_device_marked_lost_says_so_child", &[]);
}

#[test]
#[ignore = "run by a_device_marked_lost_says_so"]
fn a_device_marked_lost_says_so_child() {
    let device = gpu().unwrap();
    let lane = device.lane().unwrap();
    device.lose("a test said so");
    assert_eq!(lane.synchronize().unwrap_err().kind, Kind::DeviceLost);
    assert_eq!(Device::get(0).unwrap_err().kind, Kind::DeviceLost);
}

#[test]
fn a_missing_compiler_is_named() {
    in_child("a_missing_compiler_is_named_child", &[("SIDEWINDER_NVRTC", "/nowhere/libnvrtc.so")]);
}

#[test]
#[ignore = "run by a_missing_compiler_is_named"]
fn a_missing_compiler_is_named_child() {
    let device = gpu().unwrap();
    let call = Call::new([1, 4, 3, 2]);
    let error = on_device(&device, &call.options, &call.inputs(DType::F32), None).map(drop).unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable);
    assert!(error.to_string().contains("/nowhere/libnvrtc.so"), "{error}");
    println!("{error}");
    assert_eq!(cuda::devices().unwrap()[0].compiler, Err(error));
}

#[test]
fn a_wrong_kernel_brings_the_compilers_words() {
    let Some(device) = gpu() else { return };
    const WRONG: Source = Source { name: "wrong", text: "extern \"C\" __global__ void wrong() { undeclared(); }" };
    let error = device.kernel(&WRONG, "-DREAL=float").map(drop).unwrap_err();
    assert_eq!(error.kind, Kind::Cuda);
    assert!(error.got.contains("undeclared"), "{error}");
}

#[test]
fn a_damaged_cache_is_mended() {
    let folder = std::env::temp_dir().join(format!("sidewinder-cache-test-{}", std::process::id()));
    let environment = [("SIDEWINDER_CACHE", folder.to_str().unwrap())];
    let files = || {
        let entries = folder.read_dir().into_iter().flatten().flatten();
        entries.map(|entry| (entry.path(), std::fs::read(entry.path()).unwrap())).collect::<Vec<_>>()
    };
    in_child("a_damaged_cache_is_mended_child", &environment);
    let whole = files();
    for (path, content) in &whole {
        let mut damaged = content.clone();
        damaged.truncate(content.len() - 100);
        std::fs::write(path, damaged).unwrap();
    }
    in_child("a_damaged_cache_is_mended_child", &environment);
    assert!(files() == whole, "the cache was not mended");
    assert!(gpu().is_none() || !whole.is_empty());
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
#[ignore = "run by a_damaged_cache_is_mended"]
fn a_damaged_cache_is_mended_child() {
    Call::full([1, 20, 3, 16]).check(&gpu().unwrap(), DType::F32, None);
}

/// More elements than 32 bits count: the last batch must be what it is alone.
#[test]
#[ignore = "takes 20 GB of device memory"]
fn beyond_two_to_the_31() {
    let Some(device) = gpu() else { return };
    let [b, l, d, n] = [2200, 500, 2048, 4];
    let options = Options { return_state: true, ..Options::default() };
    let call = Call { options: options.clone(), ..Call::new([1, l, d, n]) };
    let one = call.inputs(DType::Bf16);
    let mut many = Named::default();
    for (name, tensor) in one.iter() {
        let mut dims = tensor.spec().shape.to_vec();
        if name != "A" {
            dims[0] = b;
        }
        let mut repeated = Owned::poisoned(Spec::new(tensor.spec().dtype, &dims).unwrap());
        let part = tensor.view().bytes();
        repeated.view_mut().bytes().chunks_mut(part.len()).for_each(|chunk| chunk.copy_from_slice(part));
        many.push(name.clone(), repeated);
    }
    let plan = Some(Plan { lanes: 1, owned: 8, warps: 4, chunks: 1 });
    let alone = on_device(&device, &options, &one, plan).unwrap();
    let all = on_device(&device, &options, &many, plan).unwrap();
    for (name, alone) in alone.iter() {
        let part = alone.view().bytes();
        let all = all.get(name).unwrap().view().bytes();
        assert!(all.chunks(part.len()).all(|chunk| chunk == part), "{name} differs among equal batches");
    }
}
