//! Times the scan and its one-token form on the CPU: `cargo run --release -p sidewinder_bench -- --bench`, with a filter
//! such as `reference/avx512` after it.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sidewinder_kernels::cpu::{Exec, Level, pool};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::scan::selective_scan::SelectiveScan;
use sidewinder_kernels::ops::scan::selective_state_update::SelectiveStateUpdate;
use sidewinder_kernels::tensor::{DType, Owned, Spec};

/// Batch, length, channels, state: the window of a game agent, and a layer of mamba-130m.
const WORKLOADS: [(&str, [usize; 4]); 2] = [("reference", [32, 60, 512, 16]), ("mamba-130m", [1, 2048, 1536, 16])];

/// Values between two bounds, the same each time.
fn tensor(shape: &[usize], low: f64, high: f64) -> Owned {
    let spread = |i: usize| (i * 7919 % 10007) as f64 / 10007.0;
    Owned::from_fn(Spec::new(DType::F32, shape).unwrap(), |i| low + (high - low) * spread(i))
}

fn scan_inputs([batch, length, channels, state]: [usize; 4]) -> Named<Owned> {
    [
        ("x", tensor(&[batch, length, channels], -1.0, 1.0)),
        ("dt", tensor(&[batch, length, channels], 0.001, 0.1)),
        ("A", tensor(&[channels, state], -16.0, -1.0)),
        ("B", tensor(&[batch, length, state], -1.0, 1.0)),
        ("C", tensor(&[batch, length, state], -1.0, 1.0)),
    ]
    .into_iter()
    .collect()
}

fn step_inputs(batch: usize, channels: usize, state: usize) -> Named<Owned> {
    [
        ("x", tensor(&[batch, channels], -1.0, 1.0)),
        ("initial_state", tensor(&[batch, channels, state], -1.0, 1.0)),
        ("dt", tensor(&[batch, channels], 0.001, 0.1)),
        ("A", tensor(&[channels, state], -16.0, -1.0)),
        ("B", tensor(&[batch, state], -1.0, 1.0)),
        ("C", tensor(&[batch, state], -1.0, 1.0)),
    ]
    .into_iter()
    .collect()
}

/// Times an op into outputs that are allocated once.
fn time<O: Op>(bencher: &mut criterion::Bencher, inputs: &Named<Owned>, exec: Exec) {
    let options = O::Options::default();
    let call = ops::call::<O>(op::specs(inputs), &options).unwrap();
    let mut outputs = call.outputs().map(|spec| Owned::poisoned(*spec));
    let views = inputs.map(Owned::view);
    bencher.iter(|| {
        let to = outputs.iter_mut().map(|(name, tensor)| (name.clone(), tensor.view_mut())).collect();
        op::run_cpu::<O>(&options, &views, to, &exec).unwrap();
    });
}

fn scan(criterion: &mut Criterion) {
    for (name, sizes) in WORKLOADS {
        let inputs = scan_inputs(sizes);
        let mut group = criterion.benchmark_group(name);
        group.sample_size(20).throughput(Throughput::Elements(sizes.iter().product::<usize>() as u64));
        for &level in Level::available().iter().filter(|&&level| level != Level::Reference) {
            for threads in [1, pool::default_threads()] {
                let exec = Exec { level, threads };
                group.bench_function(BenchmarkId::new(level.name(), threads), |b| {
                    time::<SelectiveScan>(b, &inputs, exec)
                });
            }
        }
    }
}

fn step(criterion: &mut Criterion) {
    let inputs = step_inputs(1, 1536, 16);
    let mut group = criterion.benchmark_group("one token");
    for &level in Level::available().iter().filter(|&&level| level != Level::Reference) {
        let exec = Exec { level, threads: 1 };
        group.bench_function(level.name(), |b| time::<SelectiveStateUpdate>(b, &inputs, exec));
    }
}

criterion_group!(benches, scan, step);
criterion_main!(benches);
