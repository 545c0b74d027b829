//! Attention (Vaswani et al. 2017) with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022),
//! and its gradient. For a query `i` and a key `j` of a head:
//!
//! ```text
//! S[i,j] = scale q[i].k[j] + bias[i,j]
//! j is visible to i where the mask says so and, if causal, j <= i + q_offset
//! m[i] = max S[i,j]          P[i,j] = exp(S[i,j] - m[i]) / sum exp(S[i,j] - m[i])      over visible j
//! y[i] = sum P[i,j] v[j]     lse[i] = m[i] + ln sum exp(S[i,j] - m[i])
//! ```
//!
//! A query without visible keys has `y = 0`, `lse = -inf` and no gradient. Query head `h` reads key head
//! `h / (heads / key_heads)`. Given the cotangents `dy` and `dlse`:
//!
//! ```text
//! P[i,j] = exp(S[i,j] - lse[i])           delta[i] = dy[i].y[i] - dlse[i]
//! dP[i,j] = dy[i].v[j]                    dS = P (dP - delta)
//! dq[i] = scale sum_j dS[i,j] k[j]        dk[j] = scale sum_i dS[i,j] q[i]
//! dv[j] = sum_i P[i,j] dy[i]              dbias = dS, summed over the axes it is repeated on
//! ```
//!
//! `dk` and `dv` are summed over the query heads that share a key head. Storage is f32, f64, bf16 or f16; `bias`,
//! `lse`, scores and sums are f32 (f64 for f64 storage), and results are rounded once. The matrix `S` is never
//! materialised. The order of all sums depends on the sizes alone.

mod cpu;
mod cuda;
pub mod decode;
mod reference;

use crate::base::heads::{self, Strides, sizes_of};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Slot};
use crate::options;
use crate::tensor::{DType, Spec};

pub use crate::base::heads::Layout;

options! {
    /// The options of attention.
    pub struct Options {
        /// scale of the scores; 1 / sqrt(W) by default
        scale: Option<f64> = None;
        /// mask keys after the query's position
        causal: bool = false;
        /// position of the first query among the keys; M - L by default
        q_offset: Option<i64> = None;
        /// order of axes: (B, H, L, W) or (B, L, H, W)
        layout: Layout = Layout::HeadsFirst;
        internal {
            /// If keys and values are a cache, which is heads-first whatever the layout: how many of its rows are filled.
            cache: Option<usize> = None;
        }
    }
}

/// Strides in elements along batch, heads, queries and keys. An axis of size 1 is broadcast and has stride 0.
pub type Repeated = [usize; 4];

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Heads of queries, `H`.
    pub heads: usize,
    /// Heads of keys and values, `K`; a divisor of `heads`.
    pub key_heads: usize,
    /// Queries per head, `L`.
    pub queries: usize,
    /// Keys per head, `M`.
    pub keys: usize,
    /// Width of queries and keys, `W`.
    pub width: usize,
    /// Width of values, `V`.
    pub value_width: usize,
    /// The scale of the scores.
    pub scale: f64,
    /// With a causal mask, the position of the first query among the keys.
    pub causal: Option<i64>,
    /// Strides of `q`.
    pub q: Strides,
    /// Strides of `k`.
    pub k: Strides,
    /// Strides of `v`.
    pub v: Strides,
    /// Strides of `y` and `dy`.
    pub y: Strides,
    /// Strides of the mask, if given.
    pub mask: Option<Repeated>,
    /// Strides of the bias, if given.
    pub bias: Option<Repeated>,
    /// The order of the axes of `q` and `y`.
    pub layout: Layout,
    /// The order of the axes of keys and values.
    pub key_layout: Layout,
    /// The storage type.
    pub dtype: DType,
}

/// Batch, heads, rows and width of a tensor of rank 4.
fn sizes(inputs: &Named<Spec>, name: &str, layout: Layout) -> Result<[usize; 4]> {
    let spec = inputs.get(name)?;
    match (layout, spec.shape.len()) {
        (_, 4) => Ok(sizes_of(layout, &spec.shape)),
        (Layout::HeadsFirst, _) => Err(op::wrong_shape(name, "(batch, heads, length, width)", spec).hint("")),
        (Layout::HeadsLast, _) => Err(op::wrong_shape(name, "(batch, length, heads, width)", spec).hint("")),
    }
}

impl Problem {
    fn new(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let layout = options.layout;
        let key_layout = if options.cache.is_some() { Layout::HeadsFirst } else { layout };
        let [batch, heads, queries, width] = sizes(inputs, "q", layout)?;
        let [_, key_heads, room, _] = sizes(inputs, "k", key_layout)?;
        let [_, _, _, value_width] = sizes(inputs, "v", key_layout)?;
        let keys = options.cache.unwrap_or(room);
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return Err(Error::new(Kind::Shape, "k")
                .expected(format_args!("heads that divide the {heads} of q"))
                .got(key_heads));
        }
        op::same_shape(inputs, "k", &shape(key_layout, [batch, key_heads, room, width])).map_err(of_heads)?;
        op::same_shape(inputs, "v", &shape(key_layout, [batch, key_heads, room, value_width])).map_err(of_heads)?;
        assert!(keys <= room, "a cache has the rows that are said to be there");
        let scores = [batch, heads, queries, keys];
        let strides = |width| Strides::new(layout, heads, queries, width);
        let key_strides = |width| Strides::new(key_layout, key_heads, room, width);
        Ok(Problem {
            batch,
            heads,
            key_heads,
            queries,
            keys,
            width,
            value_width,
            scale: scale(options.scale, width)?,
            causal: options.causal.then(|| options.q_offset.unwrap_or(keys as i64 - queries as i64)),
            q: strides(width),
            k: key_strides(width),
            v: key_strides(value_width),
            y: strides(value_width),
            mask: repeated(inputs, "mask", scores)?,
            bias: repeated(inputs, "bias", scores)?,
            layout,
            key_layout,
            dtype: inputs.get("q")?.dtype,
        })
    }

    /// The number of keys that are visible to a query by causality; they are the first ones.
    #[inline]
    pub fn visible(&self, query: usize) -> usize {
        match self.causal {
            Some(offset) => (query as i64).saturating_add(offset).saturating_add(1).clamp(0, self.keys as i64) as usize,
            None => self.keys,
        }
    }

    /// The key head that a head of queries reads.
    #[inline]
    pub fn key_head(&self, head: usize) -> usize {
        head / (self.heads / self.key_heads)
    }
}

fn of_heads(error: Error) -> Error {
    error.hint("Keys and values have batch, heads and length in common, keys and queries batch and width")
}

fn shape(layout: Layout, [batch, heads, rows, width]: [usize; 4]) -> [usize; 4] {
    match layout {
        Layout::HeadsFirst => [batch, heads, rows, width],
        Layout::HeadsLast => [batch, rows, heads, width],
    }
}

/// The factor of scores: `1 / sqrt(width)` unless it is given.
pub(in crate::ops) fn scale(given: Option<f64>, width: usize) -> Result<f64> {
    let scale = given.unwrap_or(1.0 / (width.max(1) as f64).sqrt());
    if scale.is_finite() {
        return Ok(scale);
    }
    Err(Error::new(Kind::Option, "scale").expected("a finite number").got(scale))
}

/// The strides of an input that is broadcast along axes of size 1, and along leading axes that it lacks.
pub fn repeated(inputs: &Named<Spec>, name: &str, scores: [usize; 4]) -> Result<Option<Repeated>> {
    let Some(spec) = inputs.find(name) else { return Ok(None) };
    let missing = scores.len().checked_sub(spec.shape.len());
    let fits = |skip: usize| spec.shape.iter().zip(&scores[skip..]).all(|(&size, &full)| size == 1 || size == full);
    let Some(skip) = missing.filter(|&skip| fits(skip)) else {
        let [b, h, l, m] = scores;
        return Err(Error::new(Kind::Shape, name)
            .expected(format_args!("what can be repeated to ({b}, {h}, {l}, {m})"))
            .got(spec.shape)
            .hint("Its axes are batch, heads, queries and keys, whatever the layout; each has its size or 1"));
    };
    let (mut strides, mut step) = ([0; 4], 1);
    for (axis, &size) in spec.shape.iter().enumerate().rev() {
        if size != 1 {
            strides[skip + axis] = step;
        }
        step *= size;
    }
    Ok(Some(strides))
}

/// Attention.
pub struct Attention;

impl Op for Attention {
    const NAME: &'static str = "attention";
    const ABOUT: &'static str = "Softmax attention over keys and values";
    const INPUTS: &'static [Slot] = &[
        // The layout determines which axes these are, and mask and bias may lack leading ones, so the patterns are not
        // binding.
        Slot::new("q", "(B, H, L, W)").loose(),
        Slot::new("k", "(B, K, M, W)").loose(),
        Slot::new("v", "(B, K, M, V)").loose(),
        Slot::new("mask", "(B|1, H|1, L|1, M|1)").mask().optional().loose(),
        Slot::new("bias", "(B|1, H|1, L|1, M|1)").wide().optional().loose(),
    ];
    const RESULTS: &'static [Slot] =
        &[Slot::new("y", "(B, H, L, V)").loose(), Slot::new("lse", "(B, H, L)").wide().loose()];
    const HINT: &'static str = heads::HINT;
    const COTANGENTS: &'static [&'static str] = &["dy", "dlse"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Problem::new(call.inputs, call.options)
    }

    fn axis_of_steps(options: &Options, rank: usize, declared: usize) -> usize {
        if rank == 4 && options.layout == Layout::HeadsLast { 1 } else { declared }
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        let Problem { batch, heads, queries, keys, width, value_width, .. } = *problem;
        op::product(&[batch, heads, queries, keys, width.max(value_width)])
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let Problem { batch, heads, queries, value_width, layout, dtype, .. } = *problem;
        let y = Spec::new(dtype, &shape(layout, [batch, heads, queries, value_width]))?;
        let lse = Spec::new(dtype.wide(), &[batch, heads, queries])?;
        Ok([("y", y), ("lse", lse)].into_iter().collect())
    }

    crate::forward_by_kernels!();
    crate::packed_by_kernels!(cuda_packed(problem, inputs, outputs, steps, lane) {
        cuda::forward_of(problem, inputs, outputs, Some(steps), lane).map(|()| true)
    });
}

/// The gradient of [`Attention`].
pub type AttentionBackward = Backward<Attention>;

impl Differentiable for Attention {
    const BACKWARD: &'static str = "attention_backward";
    const GIVEN: &'static [Slot] = &op::slots::<9>(
        &op::slots::<7>(Self::INPUTS, Self::RESULTS),
        &[Slot::new("dy", "(B, H, L, V)").loose(), Slot::new("dlse", "(B, H, L)").wide().optional().loose()],
    );

    crate::backward_by_kernels!();
    crate::packed_by_kernels!(cuda_backward_packed(problem, inputs, outputs, steps, lane) {
        cuda::backward_of(problem, inputs, outputs, Some(steps), lane).map(|()| true)
    });
}
