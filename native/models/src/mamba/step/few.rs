//! Decode steps of small batches: the norm and the convolution are fused into dense layers, as prologue and epilogue.

use super::FEW;
use super::plan::Plan;
use super::queue::{Step, THREADS};
use crate::mamba::block::Block;
use crate::mamba::{Config, Layer, Weights, mamba2};
use sidewinder_kernels::cuda::{Buffer, EARLY, PACK, Source, grid_size, pack, params};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::ops::layers::mamba_block;
use sidewinder_kernels::ops::products::blocks::{Format, WALK, WalkLayout};
use sidewinder_kernels::ops::products::matrices::{self, Matrix, Quantization};

const LAYER: &str = concat!(include_str!("convolve.cu"), include_str!("layer.cu"));
const DENSE: Source<Dense> = Source::new("step_dense", include_str!("dense.cu")).after(&[EARLY, PACK, LAYER]);
const BLOCKS: Source<Dense> = Source::new("step_blocks", include_str!("blocks.cu")).after(&[EARLY, WALK, LAYER]);
const WARPS: usize = THREADS as usize / 32;
/// Upper limit for the packs of weights that a thread holds in registers.
pub const PACKS: usize = 8;
/// Upper limit for the chunks of blocks that a warp holds in shared memory.
const STAGES: usize = 4;

params! {
    #[derive(Default)]
    struct Dense {
        w: u64 as "const STORAGE*", // (rows, columns), or rows of blocks
        b: u64 as "const void*", // (rows), or none
        x: u64 as "const REAL*", // (BATCH, columns), rows apart by stride
        norm: u64 as "const REAL*", // (columns)
        y: u64 as "REAL*", // (BATCH, rows)
        narrow_y: u64 as "STORAGE*", // (BATCH, rows), in the storage type
        conv_w: u64 as "const REAL*", // (rows / 2, WIDTH)
        conv_b: u64 as "const REAL*", // (rows / 2), or none
        samples: u64 as "const STORAGE* const*", // BATCH addresses of conv_state, each (layers, WIDTH - 1, rows / 2)
        next_samples: u64 as "STORAGE* const*", // those of conv_state after the step
        layer: i64,
        rows: i64,
        columns: i64,
        stride: i64, // elements from row to row of x
        eps: f32,
        to_mean: f32,
    }
}

impl Dense {
    fn new(rows: i64, columns: i64) -> Dense {
        Dense { rows, columns, stride: columns, ..Dense::default() }
    }
}

/// The epilogue of a dense layer.
#[derive(Clone, Copy, Debug)]
enum Epilogue {
    /// `y` is written.
    Write,
    /// The result is added to `y`: the residual connection.
    Add,
    /// `y` is written, with its first half after the convolution.
    Convolve,
    /// `narrow_y` is written, in the storage type.
    Narrow,
}

impl Epilogue {
    /// The kernel's compile options: the number of each epilogue, and the selected one.
    fn options(self) -> String {
        use Epilogue::*;
        let name = |epilogue: Epilogue| format!("{epilogue:?}").to_uppercase();
        let number = |epilogue| format!("-D{}={} ", name(epilogue), epilogue as u32);
        [Write, Add, Convolve, Narrow].map(number).concat() + &format!("-DEPILOGUE={}", name(self))
    }
}

/// Upper limit for the elements of all rows of x that each block of threads quantizes. With more, products in tiles are
/// faster.
const QUANTIZED: usize = 8192;

/// Whether the fused kernels read all matrices, and are the faster ones.
pub fn fits(config: &Config, weights: &Weights<Buffer>, batch: usize) -> bool {
    let quantized = !weights.is_quantized() || batch * config.inner <= QUANTIZED;
    batch <= FEW && quantized && !weights.formats().contains(Quantization::Ternary.name())
}

impl Step<'_> {
    /// Queues the layers and the head.
    pub fn of_few(&self) -> Result<()> {
        for (i, layer) in self.plan.weights.layers.iter().enumerate() {
            match &layer.block {
                Block::Mamba(weights) => self.mamba_of_few(i, layer, weights)?,
                Block::Mamba2(weights) => self.mamba2_of_few(i, layer, weights)?,
            }
        }
        self.head_of_few()
    }

    fn mamba_of_few(&self, i: usize, layer: &Layer<Buffer>, weights: &mamba_block::Weights<Buffer>) -> Result<()> {
        let Plan { config, layout, xz, projected, .. } = self.plan;
        let [inner, rank, state] = [config.inner, config.rank, config.state].map(|n| n as i64);
        let at = |buffer| self.lane.address(buffer);
        let in_proj = Dense {
            conv_w: at(&weights.conv_w)?,
            conv_b: self.address_of(&weights.conv_b)?,
            samples: self.input(layout.now.conv)?,
            next_samples: self.input(layout.next.conv)?,
            layer: i as i64,
            ..self.in_proj(layer)?
        };
        self.dense(Epilogue::Convolve, &weights.in_proj, in_proj)?;
        let x_proj = Dense { x: at(xz)?, y: at(projected)?, ..Dense::new(rank + 2 * state, inner) };
        self.dense(Epilogue::Write, &weights.x_proj, Dense { stride: 2 * inner, ..x_proj })?;
        self.scan(i, layer, weights, [at(xz)?, at(xz)? + 4 * inner as u64], [2 * inner; 2])?;
        self.dense(Epilogue::Add, &weights.out_proj, self.out_proj()?)
    }

    fn mamba2_of_few(&self, i: usize, layer: &Layer<Buffer>, weights: &mamba2::Weights<Buffer>) -> Result<()> {
        let heads = self.plan.heads();
        self.dense(Epilogue::Write, &weights.in_proj, self.in_proj(layer)?)?;
        self.heads(i, heads, weights, &layer.a)?;
        // The prologue of a dense layer norms whole rows.
        let norm = if heads.groups == 1 {
            self.lane.address(&weights.norm)?
        } else {
            self.norm_heads(heads.groups, &weights.norm, &self.plan.y)?;
            0
        };
        self.dense(Epilogue::Add, &weights.out_proj, Dense { norm, ..self.out_proj()? })
    }

    /// `in_proj` of the normed residual stream.
    fn in_proj(&self, layer: &Layer<Buffer>) -> Result<Dense> {
        let Plan { config, sum, xz, .. } = self.plan;
        let (x, norm, y) = (self.lane.address(sum)?, self.lane.address(&layer.norm)?, self.lane.address(xz)?);
        Ok(Dense { x, norm, y, ..Dense::new(config.projected() as i64, config.width as i64) })
    }

    /// `out_proj`, which is added to the residual stream.
    fn out_proj(&self) -> Result<Dense> {
        let Plan { config, sum, y, .. } = self.plan;
        let (x, y) = (self.lane.address(y)?, self.lane.address(sum)?);
        Ok(Dense { x, y, ..Dense::new(config.width as i64, config.inner as i64) })
    }

    /// The logits, or the normed features of a backbone.
    fn head_of_few(&self) -> Result<()> {
        let Plan { config, weights, sum, out, .. } = self.plan;
        let at = |buffer| self.lane.address(buffer);
        let Some(head) = &weights.head else {
            return self.norm(0, &weights.norm, out);
        };
        let (x, norm, narrow_y) = (at(sum)?, at(&weights.norm)?, at(out)?);
        let params = Dense { x, norm, narrow_y, ..Dense::new(config.vocabulary as i64, config.width as i64) };
        self.dense(Epilogue::Narrow, head, params)
    }

    /// Queues a dense layer.
    fn dense(&self, epilogue: Epilogue, of: &matrices::Dense<Buffer>, params: Dense) -> Result<()> {
        let Plan { config, batch, .. } = self.plan;
        let (b, eps, to_mean) = (self.address_of(&of.b)?, config.eps as f32, 1.0 / params.columns as f32);
        let params = Dense { b, eps, to_mean, ..params };
        let options = format!(
            "-DBATCH={batch} -DWIDTH={} -DNORM={} {}",
            config.conv,
            u32::from(params.norm != 0),
            epilogue.options(),
        );
        match &of.w {
            Matrix::Float(w) => self.floats(&options, Dense { w: self.lane.address(w)?, ..params }),
            Matrix::Blocks(format, w) => self.blocks(*format, &options, Dense { w: self.lane.address(w)?, ..params }),
            Matrix::Ternary(..) => unreachable!("models with ternary matrices step as many do"),
        }
    }

    /// Queues a dense layer with weights of floats.
    fn floats(&self, options: &str, params: Dense) -> Result<()> {
        let Plan { dtype, batch, .. } = self.plan;
        let (rows, columns) = (params.rows as usize, params.columns as usize);
        let size = dtype.size();
        let vec = pack(size, &[params.w, (columns * size) as u64]);
        let outputs = self.outputs(rows, 2);
        let packs = columns.div_ceil(32 * vec).clamp(1, PACKS / outputs);
        let options = format!("{options} -DBIAS=STORAGE -DOUTPUTS={outputs} -DPACKS={packs} -DVEC={vec}");
        let kernel = self.kernel(&DENSE, THREADS, &options)?;
        let (blocks, shared) = (self.sharers(rows, outputs), batch * columns.next_multiple_of(32 * vec * packs) * 4);
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [grid_size(blocks)?, 1, 1], THREADS, shared as u32, &params) }
    }

    /// Queues a dense layer with weights in blocks.
    fn blocks(&self, format: Format, options: &str, params: Dense) -> Result<()> {
        let (rows, columns) = (params.rows as usize, params.columns as usize);
        let layout = self.layout(format, rows, columns);
        let held = columns.div_ceil(8 * THREADS as usize);
        let options = format!("{options} -DBIAS=REAL -DHELD={held} {}", layout.options());
        let kernel = self.kernel(&BLOCKS, THREADS, &options)?;
        let (blocks, shared) = (self.sharers(rows, layout.outputs), layout.shared(columns));
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [grid_size(blocks)?, 1, 1], THREADS, shared as u32, &params) }
    }

    /// The walk along rows of weights with the most outputs and stages that are of use and leave room for two blocks of
    /// threads on a multiprocessor.
    fn layout(&self, format: Format, rows: usize, columns: usize) -> WalkLayout {
        let room = self.lane.device().facts().shared as usize / 2;
        let layout = |outputs, stages| {
            let batch = self.plan.batch;
            WalkLayout { format, floats: false, rows: batch, outputs, warps: WARPS, stages }
        };
        // A warp's chunks of weights, of which all but one can be in flight at once.
        let chunks = |outputs| {
            rows.div_ceil(WARPS * outputs).div_ceil(self.sharers(rows, outputs)) * WalkLayout::chunks(columns)
        };
        let most = self.outputs(rows, 4);
        let stages = |outputs| (2..=(chunks(outputs) + 1).clamp(2, STAGES)).rev();
        let outputs = [4, 2, 1].into_iter().filter(|&outputs| outputs <= most);
        let mut layouts = outputs.flat_map(|outputs| stages(outputs).map(move |stages| layout(outputs, stages)));
        layouts.find(|layout| layout.shared(columns) <= room).unwrap_or(layout(1, 2))
    }

    /// The rows of weights that a warp computes for each read of x, at most `most`: several if there are enough of them
    /// to occupy all multiprocessors.
    fn outputs(&self, rows: usize, most: usize) -> usize {
        let enough = |outputs: &usize| *outputs <= most && rows >= outputs * WARPS * self.multiprocessors();
        [4, 2].into_iter().find(enough).unwrap_or(1)
    }

    /// The blocks of threads that share `rows`, each of which loops over them. Registers allow two on a multiprocessor.
    fn sharers(&self, rows: usize, outputs: usize) -> usize {
        rows.div_ceil(WARPS * outputs).min(2 * self.multiprocessors())
    }

    fn multiprocessors(&self) -> usize {
        self.lane.device().facts().multiprocessors as usize
    }
}
