//! Macros that implement the methods of [`Op`](super::Op) by functions, without repeating their signatures.

/// The three implementations of an op or of its gradient: on the CPU, in f64 and on CUDA.
#[macro_export]
macro_rules! runs {
    (
        $cpu:ident($of_cpu:pat, $from:pat, $to:pat, $exec:pat) $on_cpu:block
        $reference:ident($of_reference:pat, $given:pat, $wanted:pat) $in_f64:block
        $cuda:ident($of_cuda:pat, $read:pat, $written:pat, $lane:pat) $on_cuda:block
    ) => {
        fn $cpu(
            $of_cpu: &Self::Problem,
            $from: &$crate::op::Named<$crate::tensor::View>,
            $to: $crate::op::Named<$crate::tensor::ViewMut>,
            $exec: &$crate::cpu::Exec,
        ) -> $crate::error::Result<()> {
            $on_cpu
        }

        fn $reference(
            $of_reference: &Self::Problem,
            $given: &$crate::op::Named<ndarray::ArrayD<f64>>,
            $wanted: &$crate::op::Named<$crate::tensor::Spec>,
        ) -> $crate::error::Result<$crate::op::Named<ndarray::ArrayD<f64>>> {
            $in_f64
        }

        fn $cuda(
            $of_cuda: &Self::Problem,
            $read: &$crate::op::Named<&$crate::cuda::Buffer>,
            $written: &$crate::op::Named<&$crate::cuda::Buffer>,
            $lane: &$crate::cuda::Lane,
        ) -> $crate::error::Result<()> {
            $on_cuda
        }
    };
}

/// Implements an op by functions: by default `forward` of the modules `cpu`, `reference` and `cuda` in scope.
#[macro_export]
macro_rules! forward_by_kernels {
    () => {
        $crate::forward_by_kernels!(cpu::forward, reference::forward, cuda::forward);
    };
    ($cpu:path, $reference:path, $cuda:path) => {
        $crate::runs! {
            cpu(problem, inputs, outputs, exec) { $cpu(problem, inputs, outputs, exec) }
            reference(problem, inputs, _) { $reference(problem, inputs) }
            cuda(problem, inputs, outputs, lane) { $cuda(problem, inputs, outputs, lane) }
        }
    };
}

/// Implements [`Op::cuda_packed`](crate::op::Op::cuda_packed), or `cuda_backward_packed`, by a function or a block.
#[macro_export]
macro_rules! packed_by_kernels {
    ($method:ident, $function:path) => {
        $crate::packed_by_kernels!($method(problem, inputs, outputs, steps, lane) {
            $function(problem, inputs, outputs, steps, lane)
        });
    };
    ($method:ident($problem:pat, $inputs:pat, $outputs:pat, $steps:pat, $lane:pat) $block:block) => {
        fn $method(
            $problem: &Self::Problem,
            $inputs: &$crate::op::Named<&$crate::cuda::Buffer>,
            $outputs: &$crate::op::Named<&$crate::cuda::Buffer>,
            $steps: &[std::ops::Range<usize>],
            $lane: &$crate::cuda::Lane,
        ) -> $crate::error::Result<bool> {
            $block
        }
    };
}

/// Implements an op's gradient by the functions `backward` of these modules.
#[macro_export]
macro_rules! backward_by_kernels {
    () => {
        $crate::runs! {
            cpu_backward(problem, inputs, outputs, exec) { cpu::backward(problem, inputs, outputs, exec) }
            reference_backward(problem, inputs, _) { reference::backward(problem, inputs) }
            cuda_backward(problem, inputs, outputs, lane) { cuda::backward(problem, inputs, outputs, lane) }
        }
    };
}
