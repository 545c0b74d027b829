//! Decode steps of small batches: the norm and the convolution are fused into dense layers, as prologue and epilogue.

use super::plan::Plan;
use super::queue::{Step, THREADS};
use sidewinder_kernels::cuda::{Buffer, EARLY, PACK, Source, grid_size, pack, params};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::ops::products::matrices::{self, Matrix};

const DENSE: Source<Dense> =
    Source::new("step_dense", concat!(include_str!("convolve.cu"), include_str!("dense.cu"))).after(&[EARLY, PACK]);

const WARPS: usize = THREADS as usize / 32;
/// Upper limit for the packs of weights that a thread holds in registers.
pub const PACKS: usize = 8;

params! {
    #[derive(Default)]
    struct Dense {
        w: u64 as "const STORAGE*", // (rows, columns)
        b: u64 as "const STORAGE*", // (rows), or none
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

impl Step<'_> {
    /// Queues the layers and the head.
    pub fn of_few(&self) -> Result<()> {
        let Plan { config, weights, layout, sum, xz, projected, y, .. } = self.plan;
        let [width, inner, rank, state] = [config.width, config.inner, config.rank, config.state].map(|n| n as i64);
        let at = |buffer| self.lane.address(buffer);
        for (i, layer) in weights.layers.iter().enumerate() {
            let block = layer.block.mamba();
            let [w, b] = self.floats(&block.in_proj)?;
            let in_proj = Dense {
                w,
                b,
                x: at(sum)?,
                norm: at(&layer.norm)?,
                y: at(xz)?,
                conv_w: at(&block.conv_w)?,
                conv_b: self.address_of(&block.conv_b)?,
                samples: self.input(layout.now.conv)?,
                next_samples: self.input(layout.next.conv)?,
                layer: i as i64,
                ..Dense::new(2 * inner, width)
            };
            self.dense(Epilogue::Convolve, in_proj)?;
            let [w, b] = self.floats(&block.x_proj)?;
            let x_proj = Dense { w, b, x: at(xz)?, y: at(projected)?, ..Dense::new(rank + 2 * state, inner) };
            self.dense(Epilogue::Write, Dense { stride: 2 * inner, ..x_proj })?;
            self.scan(i, layer, [at(xz)?, at(xz)? + 4 * inner as u64], [2 * inner; 2])?;
            let [w, b] = self.floats(&block.out_proj)?;
            self.dense(Epilogue::Add, Dense { w, b, x: at(y)?, y: at(sum)?, ..Dense::new(width, inner) })?;
        }
        self.head_of_few()
    }

    /// The logits, or the normed features of a backbone.
    fn head_of_few(&self) -> Result<()> {
        let Plan { config, weights, sum, out, .. } = self.plan;
        let at = |buffer| self.lane.address(buffer);
        let Some(head) = &weights.head else {
            return self.norm(0, &weights.norm, out);
        };
        let ([w, b], x, norm, narrow_y) = (self.floats(head)?, at(sum)?, at(&weights.norm)?, at(out)?);
        let head = Dense { w, b, x, norm, narrow_y, ..Dense::new(config.vocabulary as i64, config.width as i64) };
        self.dense(Epilogue::Narrow, head)
    }

    /// The addresses of a float matrix and of its bias, which is 0 for none.
    fn floats(&self, of: &matrices::Dense<Buffer>) -> Result<[u64; 2]> {
        let Matrix::Float(w) = &of.w else { unreachable!("models with quantized matrices step as many do") };
        Ok([self.lane.address(w)?, self.address_of(&of.b)?])
    }

    fn dense(&self, epilogue: Epilogue, params: Dense) -> Result<()> {
        let Plan { config, dtype, batch, .. } = self.plan;
        let params = Dense { eps: config.eps as f32, to_mean: 1.0 / params.columns as f32, ..params };
        let (rows, columns) = (params.rows as usize, params.columns as usize);
        let size = dtype.size();
        let vec = pack(size, &[params.w, (columns * size) as u64]);
        let multiprocessors = self.lane.device().facts().multiprocessors as usize;
        // A warp computes two rows for each read of x, if there are enough rows to occupy all warps.
        let each = if rows >= 2 * WARPS * multiprocessors { 2 } else { 1 };
        let packs = columns.div_ceil(32 * vec).clamp(1, PACKS / each);
        let options = format!(
            "-DBATCH={batch} -DROWS={each} -DPACKS={packs} -DVEC={vec} -DWIDTH={} -DNORM={} {}",
            config.conv,
            u32::from(params.norm != 0),
            epilogue.options(),
        );
        let kernel = self.kernel(&DENSE, THREADS, &options)?;
        // Registers allow two blocks per multiprocessor at once; each block loops over rows.
        let blocks = rows.div_ceil(WARPS * each).min(2 * multiprocessors);
        let shared = (batch * columns.next_multiple_of(32 * vec * packs) * 4) as u32;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [grid_size(blocks)?, 1, 1], THREADS, shared, &params) }
    }
}
