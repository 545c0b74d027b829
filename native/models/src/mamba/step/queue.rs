//! Queues the kernels of a step.

use super::plan::Plan;
use crate::mamba::sample::Draw;
use sidewinder_kernels::cuda::{BLOCK_SUM, Buffer, EARLY, Kernel, Lane, Source, params, type_names, types};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::Described;

const EMBED: Source<Embed> = Source::new("step_embed", include_str!("embed.cu")).after(&[EARLY]);
const NORM: Source<Norm> = Source::new("step_norm", include_str!("norm.cu")).after(&[EARLY, BLOCK_SUM]);
const CHOOSE: Source<Choose> = Source::new("step_choose", include_str!("choose.cu")).after(&[EARLY]);

pub const THREADS: u32 = 256;
/// Threads per block of the sampling kernel, which has one block per sequence.
const CHOOSING: u32 = 1024;

params! {
    struct Embed {
        from: u64 as "const STORAGE*", // (vocabulary, width), or (batch, width) for features
        tokens: u64 as "const unsigned*", // (batch), or none for features
        sum: u64 as "REAL*", // (batch, width)
        width: i64,
    }
}

params! {
    struct Norm {
        x: u64 as "const STORAGE*", // (batch, width), with ADD
        sum: u64 as "REAL*", // (batch, groups, width)
        norm: u64 as "const REAL*", // (groups, width)
        y: u64 as "TO*", // (batch, groups, width)
        width: i64, // of a group
        eps: f32,
        to_mean: f32,
    }
}

params! {
    struct Choose with Draw {
        logits: u64 as "const STORAGE*", // (batch, vocabulary)
        draws: u64 as "const Draw*", // (batch)
        tokens: u64 as "unsigned*", // (batch); ~0 where no logit is a finite number
        vocabulary: i64,
    }
}

/// A step that is being queued on a lane.
pub struct Step<'a> {
    pub plan: &'a Plan,
    pub lane: &'a Lane,
}

impl Step<'_> {
    pub fn kernel<P>(&self, source: &Source<P>, threads: u32, options: &str) -> Result<Kernel<P>> {
        let options = format!("{} -DTHREADS={threads} {options}", types(self.plan.dtype));
        // SAFETY: every kernel of a step waits before it accesses memory that other kernels write; none writes weights.
        Ok(unsafe { self.lane.device().kernel(source, &options)?.early() })
    }

    /// The address of the step's inputs from this offset on.
    pub fn input(&self, offset: usize) -> Result<u64> {
        Ok(self.lane.address(&self.plan.input)? + offset as u64)
    }

    /// The address of a buffer, 0 for none.
    pub fn address_of(&self, buffer: &Option<Buffer>) -> Result<u64> {
        buffer.as_ref().map_or(Ok(0), |buffer| self.lane.address(buffer))
    }

    pub fn embed(&self) -> Result<()> {
        let Plan { config, weights, input, sum, batch, .. } = self.plan;
        let input = self.lane.address(input)?;
        let (from, tokens) = match &weights.embedding {
            Some(table) if config.vocabulary > 0 => (self.lane.address(table)?, input),
            _ => (input, 0),
        };
        let params = Embed { from, tokens, sum: self.lane.address(sum)?, width: config.width as i64 };
        let kernel = self.kernel(&EMBED, THREADS, "")?;
        // SAFETY: tokens were checked to be rows of the embedding.
        unsafe { self.lane.launch_with(&kernel, [*batch as u32, 1, 1], THREADS, 0, &params) }
    }

    /// Norms the residual stream. If `x` is not 0, it is the address of rows that are added to the stream first.
    pub fn norm(&self, x: u64, w: &Buffer, y: &Buffer) -> Result<()> {
        self.norm_groups([x, self.lane.address(&self.plan.sum)?], w, (self.plan.config.width, 1), y)
    }

    /// Norms each group of columns of the output of Mamba-2's scan. `y` may be the same memory.
    pub fn norm_heads(&self, groups: usize, w: &Buffer, y: &Buffer) -> Result<()> {
        self.norm_groups([0, self.lane.address(&self.plan.y)?], w, (self.plan.config.inner, groups), y)
    }

    fn norm_groups(&self, [x, sum]: [u64; 2], w: &Buffer, (width, groups): (usize, usize), y: &Buffer) -> Result<()> {
        let at = |buffer| self.lane.address(buffer);
        let width = width / groups;
        let (eps, to_mean) = (self.plan.config.eps as f32, 1.0 / width as f32);
        let params = Norm { x, sum, norm: at(w)?, y: at(y)?, width: width as i64, eps, to_mean };
        let held = width.div_ceil(THREADS as usize);
        let (to, add) = (type_names(y.spec().dtype).0, u32::from(x != 0));
        let kernel = self.kernel(&NORM, THREADS, &format!("-DADD={add} -DHELD={held} -DTO={to}"))?;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [self.plan.batch as u32, groups as u32, 1], THREADS, 0, &params) }
    }

    pub fn choose(&self) -> Result<()> {
        let Plan { config, batch, layout, out, tokens, .. } = self.plan;
        let (logits, tokens) = (self.lane.address(out)?, self.lane.address(tokens)?);
        let params = Choose { logits, draws: self.input(layout.draws)?, tokens, vocabulary: config.vocabulary as i64 };
        let kernel = self.kernel(&CHOOSE, CHOOSING, "")?;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [*batch as u32, 1, 1], CHOOSING, 0, &params) }
    }
}
