//! Devices, lanes, memory and kernels on CUDA, and their behaviour after errors. Without a GPU each test says so and
//! passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::gpu;
use crate::common::scan_on_device::{Call, in_child, noise, on_device};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::{self, Buffer, Declared, Device, Source};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{self, Named};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::activations::{self, Activation, Activations};
use sidewinder_kernels::ops::products::matmul::{self, Matmul};
use sidewinder_kernels::ops::scan::selective_scan::cuda::Plan;
use sidewinder_kernels::ops::scan::selective_scan::{Options, SelectiveScan};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

/// The parameters of kernels that write to one address.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params(u64);

// SAFETY: both declarations are a single address.
unsafe impl Declared for Params {
    type Any = Params;
    const TEXT: &'static str = "struct Params { float* to; };";
}

/// In a process of its own, so that other tests' buffers do not count.
#[test]
fn memory_comes_back() {
    in_child(module_path!(), "memory_comes_back_child", &[]);
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
    let lane = device.lane().unwrap();
    drop(lane.temporary(Spec::new(DType::F32, &[1000]).unwrap()).unwrap());
    lane.synchronize().unwrap();
    assert!(device.kept_bytes().unwrap() > 0, "what one call frees is there for the next");
    device.trim().unwrap();
    assert_eq!(device.kept_bytes().unwrap(), 0);
    let huge = Buffer::new(&device, Spec::new(DType::F32, &[1 << 50]).unwrap()).unwrap_err();
    assert_eq!(huge.kind, Kind::Memory, "{huge}");
    println!("{huge}");
    on_device(&device, &call.options, &inputs, None).unwrap();
}

/// Work of both devices on the same buffers, from several threads at once.
#[test]
fn devices_copy_from_each_other() {
    let Some(first) = gpu() else { return };
    let Ok(second) = Device::get(1) else { return println!("SKIPPED for want of a second CUDA device") };
    let spec = Spec::new(DType::F32, &[1 << 20]).unwrap();
    let data = noise(1, DType::F32, &spec.shape, -1.0, 1.0);
    let buffer = Buffer::new(&first, spec).unwrap();
    first.lane().unwrap().upload(data.view().bytes(), &buffer).unwrap();
    let go = |device: &Device| {
        for _ in 0..20 {
            let lane = device.lane().unwrap();
            let pulled = lane.pulled(&buffer).unwrap();
            let own = Buffer::new(device, spec).unwrap();
            lane.copy(&pulled, &own).unwrap();
            let other = if *device == first { &second } else { &first };
            let lane_there = other.lane().unwrap();
            let there = lane_there.downloaded(&lane_there.pulled(&own).unwrap()).unwrap();
            assert!(there.view().bytes() == data.view().bytes(), "there and back");
            assert!(lane.downloaded(&own).unwrap().view().bytes() == data.view().bytes());
        }
    };
    std::thread::scope(|scope| [&first, &second, &first, &second].map(|device| scope.spawn(|| go(device))).map(|_| ()));
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
        // The buffer is dropped with work in flight; the next buffer in its memory must not be affected by that work.
        one.upload(data.view().bytes(), &buffer).unwrap();
        drop(buffer);
    }
}

/// Memory that goes waits for its lanes. Where that happens between a note of other memory and the work there, the work
/// must not count as done.
#[test]
fn waits_of_others_end_only_what_is_queued() {
    const LATE: Source<Params> = Source::new(
        "write_late",
        "extern \"C\" __global__ void write_late(const __grid_constant__ Params p) {
            for (long long from = clock64(); clock64() - from < 20000000;);
            *p.to = 7;
        }",
    );
    let Some(device) = gpu() else { return };
    let spec = Spec::new(DType::F32, &[1]).unwrap();
    let [late, gone] = [(); 2].map(|()| Buffer::new(&device, spec).unwrap());
    let (lane, other) = (device.lane().unwrap(), device.lane().unwrap());
    let kernel = device.kernel(&LATE, "").unwrap();
    lane.fill(&gone, 0).unwrap();
    lane.fill(&late, 0).unwrap();
    let address = lane.address(&late).unwrap();
    std::thread::spawn(move || drop(gone)).join().unwrap();
    // SAFETY: the kernel writes the one element of the buffer, whose address comes from this lane.
    unsafe { lane.launch(&kernel, [1, 1, 1], 1, &Params(address)).unwrap() };
    assert_eq!(other.downloaded(&late).unwrap().view().to_f64().sum(), 7.0);
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

#[test]
fn a_lost_device_says_so() {
    in_child(module_path!(), "a_lost_device_says_so_child", &[]);
}

#[test]
#[ignore = "run by a_lost_device_says_so"]
fn a_lost_device_says_so_child() {
    const BAD: Source<Params> = Source::new(
        "write_to_nowhere",
        "extern \"C\" __global__ void write_to_nowhere(const __grid_constant__ Params p) { *p.to = 1; }",
    );
    let device = gpu().unwrap();
    let buffer = Buffer::new(&device, Spec::new(DType::F32, &[10]).unwrap()).unwrap();
    let lane = device.lane().unwrap();
    let kernel = device.kernel(&BAD, "").unwrap();
    // SAFETY: none. This is the illegal access that the test is about.
    unsafe { lane.launch(&kernel, [1, 1, 1], 1, &Params(64)).unwrap() };
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
fn a_trial_tells_what_graphs_of_others_hold() {
    let Some(device) = gpu() else { return };
    let spec = Spec::new(DType::F32, &[4, 64]).unwrap();
    let options = activations::Options { function: Some(Activation::Relu), ..Default::default() };
    let call = ops::call::<Activations>(Named::from_iter([(op::Name::from("x"), spec)]), &options).unwrap();
    let fits = device.fits_graph(|lane| {
        // SAFETY: no work is queued that reads or writes there.
        let [x, y] = [4096, 8192].map(|address| unsafe { lane.lent(spec, address) });
        call.cuda(&Named::from_iter([(op::Name::from("x"), &x)]), &Named::from_iter([(op::Name::from("y"), &y)]), &lane)
    });
    assert_eq!(fits, Ok(true));
    assert_eq!(device.fits_graph(|lane| lane.scratch(0).map(drop)), Ok(true));
    assert_eq!(device.fits_graph(|lane| lane.scratch(16).map(drop)), Ok(false));
    assert_eq!(device.fits_graph(|lane| lane.temporary(spec).map(drop)), Ok(false));
    let lane = device.lane().unwrap();
    lane.scratch(16).expect("lanes after a trial are as before");
    lane.synchronize().unwrap();
}

#[test]
fn a_device_marked_lost_says_so() {
    in_child(module_path!(), "a_device_marked_lost_says_so_child", &[]);
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
    in_child(module_path!(), "a_missing_compiler_is_named_child", &[("SIDEWINDER_NVRTC", "/nowhere/libnvrtc.so")]);
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
fn a_missing_library_of_products_is_named() {
    in_child(
        module_path!(),
        "a_missing_library_of_products_is_named_child",
        &[("SIDEWINDER_CUBLASLT", "/nowhere/libcublasLt.so")],
    );
}

#[test]
#[ignore = "run by a_missing_library_of_products_is_named"]
fn a_missing_library_of_products_is_named_child() {
    let device = gpu().unwrap();
    let inputs = common::check::inputs(&[("a", &[2, 3]), ("b", &[3, 4])]);
    let error = common::run_cuda::<Matmul>(&matmul::Options {}, &inputs, &device).map(drop).unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable);
    assert!(error.to_string().contains("/nowhere/libcublasLt.so"), "{error}");
    println!("{error}");
}

#[test]
fn a_wrong_kernel_brings_the_compilers_words() {
    let Some(device) = gpu() else { return };
    const WRONG: Source<()> = Source::new("wrong", "extern \"C\" __global__ void wrong() { undeclared(); }");
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
    in_child(module_path!(), "a_damaged_cache_is_mended_child", &environment);
    let whole = files();
    for (path, content) in &whole {
        let mut damaged = content.clone();
        damaged.truncate(content.len() - 100);
        std::fs::write(path, damaged).unwrap();
    }
    in_child(module_path!(), "a_damaged_cache_is_mended_child", &environment);
    assert!(files() == whole, "the cache was not mended");
    assert!(gpu().is_none() || !whole.is_empty());
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
#[ignore = "run by a_damaged_cache_is_mended"]
fn a_damaged_cache_is_mended_child() {
    Call::full([1, 20, 3, 16]).check(&gpu().unwrap(), DType::F32, None);
}
