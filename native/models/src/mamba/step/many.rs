//! Decode steps of larger batches, and of models with ternary matrices: dense layers as in the forward pass over whole
//! sequences.

use super::plan::{Many, Plan};
use super::queue::{Step, THREADS};
use sidewinder_kernels::cuda::{Buffer, EARLY, Source, grid_size, params};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::ops::layers::mamba_block::Weights;
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
    pub fn of_many(&self, Many { h, c, last }: &Many) -> Result<()> {
        let Plan { config, weights, xz, projected, y, out, .. } = self.plan;
        let inner = config.inner as i64;
        let at = |buffer| self.lane.address(buffer);
        self.lane.fill(last, 0)?;
        for (i, layer) in weights.layers.iter().enumerate() {
            let block = layer.block.mamba();
            self.norm(at(last)?, &layer.norm, h)?;
            self.linear(h, &block.in_proj, xz)?;
            self.conv(i, block, c)?;
            self.linear(c, &block.x_proj, projected)?;
            let z = at(xz)? + (inner as usize * self.plan.dtype.size()) as u64;
            self.scan(i, layer, [at(c)?, z], [inner, 2 * inner])?;
            self.linear(y, &block.out_proj, last)?;
        }
        self.norm(at(last)?, &weights.norm, h)?;
        match &weights.head {
            Some(head) => self.linear(h, head, out),
            None => self.lane.copy(h, out),
        }
    }

    fn linear(&self, x: &Buffer, of: &Dense<Buffer>, y: &Buffer) -> Result<()> {
        matrices::multiply(&Cuda(self.lane), x.clone(), of, y.clone())
    }

    fn conv(&self, i: usize, block: &Weights<Buffer>, y: &Buffer) -> Result<()> {
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
