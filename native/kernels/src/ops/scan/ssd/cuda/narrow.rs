//! Heads of a multiple of [`WIDTH`] rows for the kernels over chunks: as several heads of that width, with the same step
//! sizes and decays, in the same group. Only tensors that have no rows differ: their elements are repeated, and their
//! gradients summed.

use super::super::{Problem, Ssd};
use super::chunks::{WIDTH, fits};
use super::spread::{fold, spread};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{Differentiable, Named};
use crate::tensor::{Described, Spec};

/// A call with more heads.
pub struct Narrow<'a> {
    pub problem: Problem,
    pub inputs: Named<Buffer>,
    pub outputs: Named<Buffer>,
    /// The outputs of the call with wide heads.
    wide: &'a Named<&'a Buffer>,
}

impl<'a> Narrow<'a> {
    /// The call; `None` where its heads are not wider, or the kernels do not support it.
    pub fn new(
        problem: &Problem,
        inputs: &Named<&Buffer>,
        outputs: &'a Named<&'a Buffer>,
        lane: &Lane,
    ) -> Result<Option<Narrow<'a>>> {
        let times = problem.width / WIDTH;
        let problem = Problem { heads: problem.heads * times, width: problem.width / times.max(1), ..*problem };
        if times < 2 || !fits(&problem, lane) {
            return Ok(None);
        }
        let inputs: Named<Buffer> = inputs
            .iter()
            .map(|(name, of)| Ok((name.clone(), spread(of, narrow(&problem, name, of.spec())?, lane)?)))
            .collect::<Result<_>>()?;
        let gradients = Ssd::gradients(&inputs.map(|of| of.spec()));
        let output = |name: &str, of: &Buffer| {
            let spec = gradients.find(name).copied().map_or_else(|| narrow(&problem, name, of.spec()), Ok)?;
            if spec.shape.elements() == of.spec().shape.elements() {
                return of.reshape(&spec.shape);
            }
            // Sums are rounded once.
            lane.temporary(Spec { dtype: spec.dtype.wide(), ..spec })
        };
        let narrowed = outputs.iter().map(|(name, of)| Ok((name.clone(), output(name, of)?)));
        Ok(Some(Narrow { problem, outputs: narrowed.collect::<Result<_>>()?, inputs, wide: outputs }))
    }

    /// Queues what is left once the call with more heads is queued: the sums of gradients.
    pub fn finish(&self, lane: &Lane) -> Result<()> {
        for (name, to) in self.wide.iter() {
            let from = self.outputs.get(name)?;
            if from.spec().shape.elements() != to.spec().shape.elements() {
                fold(from, to, lane)?;
            }
        }
        Ok(())
    }
}

/// The spec of a tensor in a call of these sizes.
fn narrow(problem: &Problem, name: &str, spec: Spec) -> Result<Spec> {
    let Problem { batch, length, heads, width, groups, state, wide_skip, .. } = *problem;
    let dims = match name {
        "A" | "dt_bias" => vec![heads],
        "D" if !wide_skip => vec![heads],
        "D" => vec![heads, width],
        "dt" => vec![batch, length, heads],
        "B" | "C" => vec![batch, length, groups, state],
        "initial_state" | "last_state" | "dlast_state" => vec![batch, heads, width, state],
        _ => vec![batch, length, heads, width],
    };
    Spec::new(spec.dtype, &dims)
}
