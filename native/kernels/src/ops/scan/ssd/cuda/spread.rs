//! The scan as a selective scan of `H P` channels, to which each head's step size and decay are broadcast, for any type
//! and sizes. Sums of gradients over the channels of a head are done in the type of the arithmetic, so the gradient of
//! 16-bit tensors runs on copies in f32.

use super::super::{Problem, Ssd};
use crate::cuda::{Buffer, Lane, Source, launch_each, params, type_names};
use crate::error::{Error, Kind, Result};
use crate::op::{Differentiable, Named, Op, run_cuda};
use crate::ops::scan::selective_scan::backward::SelectiveScanBackward;
use crate::ops::scan::selective_scan::{self, SelectiveScan};
use crate::tensor::{DType, Described, Spec};

const SPREAD: Source<Params> = Source::new("spread", include_str!("../spread.cu"));
const FOLD: Source<Params> = Source::new("fold", include_str!("../spread.cu"));

params! {
    /// The kernels' parameters.
    struct Params {
        from: u64 as "const IN*",
        to: u64 as "OUT*",
        count: i64, // elements before they are repeated
        times: i64,
    }
}

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let scan = Scan { problem, dtype: problem.dtype, lane };
    let inputs = scan.inputs(inputs)?;
    let outputs = scan.shaped(outputs)?;
    run_cuda::<SelectiveScan>(
        &scan.options(outputs.find("last_state").is_some()),
        &inputs.as_ref(),
        &outputs.as_ref(),
        lane,
    )
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let scan = Scan { problem, dtype: problem.dtype.wide(), lane };
    let inputs = scan.inputs(inputs)?;
    let gradients = SelectiveScan::gradients(&inputs.map(|of| of.spec()));
    let gradients = gradients.try_map(|&spec| lane.temporary(spec))?;
    let options = scan.options(false);
    run_cuda::<SelectiveScanBackward>(&options, &inputs.as_ref(), &gradients.as_ref(), lane)?;
    outputs.iter().try_for_each(|(name, to)| fold(gradients.get(name)?, to, lane))
}

/// A call as a selective scan with this storage type.
struct Scan<'a> {
    problem: &'a Problem,
    dtype: DType,
    lane: &'a Lane,
}

impl Scan<'_> {
    fn options(&self, return_state: bool) -> selective_scan::Options {
        let step_size = self.problem.step_size;
        selective_scan::Options {
            dt_softplus: step_size.softplus,
            dt_clamp: step_size.clamp,
            clamp_grad: step_size.clamp_grad,
            return_state,
            ..Default::default()
        }
    }

    /// The shape of a tensor of the op for the selective scan, whose channels are the rows of all heads. Values of
    /// heads are repeated for their channels, and `A` also for all states.
    fn shape(&self, name: &str) -> Vec<usize> {
        let Problem { batch, length, heads, width, groups, state, .. } = *self.problem;
        let channels = heads * width;
        match name {
            "A" => vec![channels, state],
            "D" | "dt_bias" => vec![channels],
            "B" | "C" => vec![batch, length, groups, state],
            "initial_state" | "last_state" | "dlast_state" => vec![batch, channels, state],
            _ => vec![batch, length, channels],
        }
    }

    /// Tensors reshaped for the selective scan, without a copy.
    fn shaped(&self, tensors: &Named<&Buffer>) -> Result<Named<Buffer>> {
        tensors.iter().map(|(name, of)| Ok((name.clone(), of.reshape(&self.shape(name))?))).collect()
    }

    /// The inputs of the scan, or of its gradient.
    fn inputs(&self, inputs: &Named<&Buffer>) -> Result<Named<Buffer>> {
        inputs.iter().map(|(name, of)| Ok((name.clone(), self.spread(name, of)?))).collect()
    }

    /// A tensor with the shape and the type that the scan takes.
    fn spread(&self, name: &str, of: &Buffer) -> Result<Buffer> {
        let precision = Ssd::INPUTS.iter().find(|slot| slot.name == name).map(|slot| slot.precision);
        let dtype = match name {
            "dlast_state" => self.dtype.wide(),
            _ => precision.map_or(self.dtype, |precision| precision.dtype(self.dtype)),
        };
        spread(of, Spec::new(dtype, &self.shape(name))?, self.lane)
    }
}

/// The tensor as `spec`, each element repeated as often as it has more; a copy unless its size and type are the same.
pub fn spread(of: &Buffer, spec: Spec, lane: &Lane) -> Result<Buffer> {
    if spec.bytes() == of.spec().bytes() && spec.dtype == of.spec().dtype {
        return of.reshape(&spec.shape);
    }
    let to = lane.temporary(spec)?;
    let count = of.spec().shape.elements();
    let kernel = lane.device().kernel(&SPREAD, &types([of, &to]))?;
    let params = params([of, &to], [count, spec.shape.elements()], lane)?;
    // SAFETY: `params` has the sizes of both buffers, that of `to` a multiple of that of `of`.
    unsafe { launch_each(lane, &kernel, spec.shape.elements(), &params) }?;
    Ok(to)
}

/// Sums the gradient of a tensor over its repeated elements: the transpose of [`spread`].
pub fn fold(from: &Buffer, to: &Buffer, lane: &Lane) -> Result<()> {
    let count = to.spec().shape.elements();
    let kernel = lane.device().kernel(&FOLD, &types([from, to]))?;
    let params = params([from, to], [count, from.spec().shape.elements()], lane)?;
    // SAFETY: `params` has the sizes of both buffers, that of `from` a multiple of that of `to`; each sum has a warp.
    unsafe { launch_each(lane, &kernel, 32 * count, &params) }
}

/// The parameters for `count` elements on one side and `all` on the other, which must be a multiple.
fn params([from, to]: [&Buffer; 2], [count, all]: [usize; 2], lane: &Lane) -> Result<Params> {
    if !all.is_multiple_of(count.max(1)) {
        let error = Error::new(Kind::Shape, "heads").expected(format_args!("a multiple of {count} elements"));
        return Err(error.got(all));
    }
    let (from, to) = (lane.address(from)?, lane.address(to)?);
    Ok(Params { from, to, count: count as i64, times: (all / count.max(1)) as i64 })
}

/// The types of a kernel's tensors and of its arithmetic.
fn types(tensors: [&Buffer; 2]) -> String {
    let [from, to] = tensors.map(|of| type_names(of.spec().dtype));
    format!("-DIN={} -DOUT={} -DREAL={}", from.0, to.0, from.1)
}
