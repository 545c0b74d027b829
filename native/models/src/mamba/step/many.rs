//! Decode steps of larger batches, and of models with ternary matrices: dense layers as in the forward pass over whole
//! sequences.

use super::plan::{Many, Plan};
use super::queue::{Step, THREADS};
use crate::mamba::block::Block;
use crate::mamba::{Layer, mamba2};
use sidewinder_kernels::cuda::{Buffer, EARLY, Source, grid_size, params};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::ops::layers::mamba_block;
use sidewinder_kernels::ops::products::matrices::{self, Dense};
use sidewinder_kernels::place::Cuda;

const CONV: Source<Conv> =
    Source::new("step_conv", concat!(include_str!("convolve.cu"), include_str!("conv.cu"))).after(&[EARLY]);

params! {
    struct Conv {
        u: u64 as "const STORAGE*", // (batch, channels), rows apart by stride
        w: u64 as "const REAL*", // (channels, WIDTH)
        b: u64 as "const REAL*", // (channels), or none
        samples: u64 as "const STORAGE* const*", // addresses of conv_state, each (layers, WIDTH - 1, channels)
        next_samples: u64 as "STORAGE* const*", // those of conv_state after the step
        y: u64 as "STORAGE*", // (batch, channels)
        layer: i64,
        channels: i64,
        stride: i64,
    }
}

impl Step<'_> {
    /// Queues the layers and the head.
    pub fn of_many(&self, many: &Many) -> Result<()> {
        let Plan { weights, out, .. } = self.plan;
        let Many { h, last, .. } = many;
        let last_rows = self.lane.address(last)?;
        self.lane.fill(last, 0)?;
        for (i, layer) in weights.layers.iter().enumerate() {
            self.norm(last_rows, &layer.norm, h)?;
            match &layer.block {
                Block::Mamba(weights) => self.mamba_of_many(i, layer, weights, many)?,
                Block::Mamba2(weights) => self.mamba2_of_many(i, layer, weights, many)?,
            }
        }
        self.norm(last_rows, &weights.norm, h)?;
        match &weights.head {
            Some(head) => self.linear(h, head, out),
            None => self.lane.copy(h, out),
        }
    }

    fn mamba_of_many(
        &self,
        i: usize,
        layer: &Layer<Buffer>,
        weights: &mamba_block::Weights<Buffer>,
        Many { h, c, last }: &Many,
    ) -> Result<()> {
        let Plan { config, dtype, xz, projected, y, .. } = self.plan;
        let at = |buffer| self.lane.address(buffer);
        self.linear(h, &weights.in_proj, xz)?;
        self.conv(i, weights, c)?;
        self.linear(c, &weights.x_proj, projected)?;
        let (inner, z) = (config.inner as i64, at(xz)? + (config.inner * dtype.size()) as u64);
        self.scan(i, layer, weights, [at(c)?, z], [inner, 2 * inner])?;
        self.linear(y, &weights.out_proj, last)
    }

    fn mamba2_of_many(
        &self,
        i: usize,
        layer: &Layer<Buffer>,
        weights: &mamba2::Weights<Buffer>,
        Many { h, c, last }: &Many,
    ) -> Result<()> {
        let heads = self.plan.heads();
        self.linear(h, &weights.in_proj, &self.plan.xz)?;
        self.heads(i, heads, weights, &layer.a)?;
        self.norm_heads(heads.groups, &weights.norm, c)?;
        self.linear(c, &weights.out_proj, last)
    }

    fn linear(&self, x: &Buffer, of: &Dense<Buffer>, y: &Buffer) -> Result<()> {
        matrices::multiply(&Cuda(self.lane), x.clone(), of, y.clone())
    }

    fn conv(&self, i: usize, block: &mamba_block::Weights<Buffer>, y: &Buffer) -> Result<()> {
        let channels = self.plan.config.inner as i64;
        let at = |buffer| self.lane.address(buffer);
        let params = Conv {
            u: at(&self.plan.xz)?,
            w: at(&block.conv_w)?,
            b: self.address_of(&block.conv_b)?,
            samples: self.input(self.plan.layout.now.conv)?,
            next_samples: self.input(self.plan.layout.next.conv)?,
            y: at(y)?,
            layer: i as i64,
            channels,
            stride: 2 * channels,
        };
        let kernel = self.kernel(&CONV, THREADS, &format!("-DWIDTH={}", self.plan.config.conv))?;
        let blocks = grid_size(self.plan.config.inner.div_ceil(THREADS as usize))?;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [blocks, self.plan.batch as u32, 1], THREADS, 0, &params) }
    }
}
