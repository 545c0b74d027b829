//! Ops whose kernels are in modules of their own.

/// The kernels of an op: `forward` of its modules `cpu`, `reference` and `cuda`.
#[macro_export]
macro_rules! forward_by_kernels {
    () => {
        fn cpu(
            problem: &Self::Problem,
            inputs: &$crate::op::Named<$crate::tensor::View>,
            outputs: $crate::op::Named<$crate::tensor::ViewMut>,
            exec: &$crate::cpu::Exec,
        ) -> $crate::error::Result<()> {
            cpu::forward(problem, inputs, outputs, exec)
        }

        fn reference(
            problem: &Self::Problem,
            inputs: &$crate::op::Named<ndarray::ArrayD<f64>>,
            _: &$crate::op::Named<$crate::tensor::Spec>,
        ) -> $crate::error::Result<$crate::op::Named<ndarray::ArrayD<f64>>> {
            reference::forward(problem, inputs)
        }

        fn cuda(
            problem: &Self::Problem,
            inputs: &$crate::op::Named<&$crate::cuda::Buffer>,
            outputs: &$crate::op::Named<&$crate::cuda::Buffer>,
            lane: &$crate::cuda::Lane,
        ) -> $crate::error::Result<()> {
            cuda::forward(problem, inputs, outputs, lane)
        }
    };
}

/// The kernels of an op's gradient: `backward` of the same modules.
#[macro_export]
macro_rules! backward_by_kernels {
    () => {
        fn cpu_backward(
            call: &$crate::op::Gradient<Self::Problem>,
            inputs: &$crate::op::Named<$crate::tensor::View>,
            outputs: $crate::op::Named<$crate::tensor::ViewMut>,
            exec: &$crate::cpu::Exec,
        ) -> $crate::error::Result<()> {
            cpu::backward(&call.of, inputs, outputs, exec)
        }

        fn reference_backward(
            call: &$crate::op::Gradient<Self::Problem>,
            inputs: &$crate::op::Named<ndarray::ArrayD<f64>>,
        ) -> $crate::error::Result<$crate::op::Named<ndarray::ArrayD<f64>>> {
            reference::backward(&call.of, inputs)
        }

        fn cuda_backward(
            call: &$crate::op::Gradient<Self::Problem>,
            inputs: &$crate::op::Named<&$crate::cuda::Buffer>,
            outputs: &$crate::op::Named<&$crate::cuda::Buffer>,
            lane: &$crate::cuda::Lane,
        ) -> $crate::error::Result<()> {
            cuda::backward(&call.of, inputs, outputs, lane)
        }
    };
}
