//! Heads of a multiple of [`WIDTH`] rows for the kernels over chunks: as several heads of that width, with the same step
//! sizes and decays, in the same group. Only tensors that have no rows differ: their elements are repeated, and their
//! gradients summed.

use super::super::Problem;
use super::chunks::{WIDTH, fits};
use super::spread::{fold, spread};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::Named;
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
        let whole = problem.width.is_multiple_of(WIDTH);
        let problem = Problem { heads: problem.heads * times, width: WIDTH, ..*problem };
        if times < 2 || !whole || !fits(&problem, lane) {
            return Ok(None);
        }
        let input = |name: &str, of: &Buffer| spread(of, narrow(&problem, name, of.spec())?, lane);
        let output = |name: &str, of: &Buffer| {
            let spec = narrow(&problem, name, of.spec())?;
            if spec.shape.elements() == of.spec().shape.elements() {
                return of.reshape(&spec.shape);
            }
            // Sums are rounded once.
            lane.temporary(Spec { dtype: spec.dtype.wide(), ..spec })
        };
        let inputs = inputs.iter().map(|(name, of)| Ok((name.clone(), input(name, of)?))).collect::<Result<_>>()?;
        let narrowed = outputs.iter().map(|(name, of)| Ok((name.clone(), output(name, of)?)));
        Ok(Some(Narrow { problem, inputs, outputs: narrowed.collect::<Result<_>>()?, wide: outputs }))
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

/// The spec of an input or output in a call of these sizes.
fn narrow(problem: &Problem, name: &str, spec: Spec) -> Result<Spec> {
    let Problem { batch, length, heads, width, state, wide_skip, .. } = *problem;
    let dims = match name {
        "A" | "dA" | "dt_bias" | "ddt_bias" => vec![heads],
        "D" | "dD" if !wide_skip => vec![heads],
        "D" | "dD" => vec![heads, width],
        "dt" | "ddt" => vec![batch, length, heads],
        "x" | "dx" | "z" | "dz" | "y" | "dy" => vec![batch, length, heads, width],
        // Packed sequences have a state each.
        _ if name.ends_with("_state") => vec![spec.shape[0], heads, width, state],
        // B, C and their gradients, and the ends of packed sequences.
        _ => return Ok(spec),
    };
    Spec::new(spec.dtype, &dims)
}
