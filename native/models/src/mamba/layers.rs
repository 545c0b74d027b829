//! The computation of a model between tokens and logits, on any device.

use super::{Config, HEAD, Layer, Weights};
use sidewinder_kernels::base::elementwise::Map;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::named;
use sidewinder_kernels::ops::causal_conv1d::Activation;
use sidewinder_kernels::ops::causal_conv1d::update::{self as conv, CausalConv1dUpdate};
use sidewinder_kernels::ops::layers::mamba_block::{self, MambaBlock};
use sidewinder_kernels::ops::norm::RmsOptions;
use sidewinder_kernels::ops::norm::add::AddRmsNorm;
use sidewinder_kernels::ops::products::matrices;
use sidewinder_kernels::ops::scan::selective_state_update::{self as scan, SelectiveStateUpdate};
use sidewinder_kernels::place::Place;
use sidewinder_kernels::tensor::{DType, Described, Spec};
use std::ops::Range;

/// The state of a sequence: everything that the convolution and the scan of each layer need of the past.
pub struct State<T> {
    /// `(layers, W - 1, D)`, of the storage type.
    pub conv: T,
    /// `(layers, D, N)`, of the type of the arithmetic.
    pub ssm: T,
}

impl State<()> {
    /// The specs of the state of one sequence.
    pub fn specs(config: &Config, dtype: DType) -> Result<State<Spec>> {
        let Config { layers, inner, state, conv, .. } = *config;
        Ok(State {
            conv: Spec::new(dtype, &[layers, conv - 1, inner])?,
            ssm: Spec::new(dtype.wide(), &[layers, inner, state])?,
        })
    }
}

impl<T> State<T> {
    /// Applies `f` to both tensors.
    pub fn try_map<U>(&self, f: impl Fn(&T) -> Result<U>) -> Result<State<U>> {
        Ok(State { conv: f(&self.conv)?, ssm: f(&self.ssm)? })
    }
}

/// A model on a device.
pub struct Layers<'p, 'w, P: Place> {
    pub place: &'p P,
    pub config: &'p Config,
    pub dtype: DType,
    pub weights: &'p Weights<P::View<'w>>,
}

/// The state of a sequence before some tokens, and memory for the state after them.
pub struct States<'s, T> {
    pub before: &'s State<T>,
    pub after: &'s mut State<T>,
}

/// The residual sum up to the previous layer, and the last layer's output, which is still to be added.
struct Stream<T> {
    sum: T,
    last: T,
}

impl<'w, P: Place> Layers<'_, 'w, P> {
    /// The rows of the embedding for these tokens, `(tokens, M)`.
    pub fn embed(&self, tokens: &[u32]) -> Result<P::Owned> {
        let mut x = self.rows(tokens.len(), self.config.width)?;
        if let Some(table) = &self.weights.embedding {
            self.place.gather(table, tokens, P::view_mut(&mut x))?;
        }
        Ok(x)
    }

    /// Sequences, `(B L, M)`, normed for the head. With states there is one sequence.
    pub fn run(&self, x: P::Owned, batch: usize, mut states: Option<States<P::Owned>>) -> Result<P::Owned> {
        let mut stream = self.stream(x)?;
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let h = self.norm(&mut stream, &layer.norm)?;
            self.block(i, layer, P::view(&h), batch, &mut stream.last, states.as_mut())?;
        }
        self.norm(&mut stream, &self.weights.norm)
    }

    /// One token of each sequence, `(B, M)`, normed for the head.
    pub fn step(&self, x: P::Owned, states: &mut [States<P::Owned>]) -> Result<P::Owned> {
        let mut stream = self.stream(x)?;
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let h = self.norm(&mut stream, &layer.norm)?;
            let s = self.step_of_layer(i, layer, P::view(&h), states)?;
            stream.last = self.part(layer, P::view(&s), "out_proj", 0..self.config.width)?;
        }
        self.norm(&mut stream, &self.weights.norm)
    }

    /// The logits of normed rows; without a head, the rows themselves.
    pub fn head(&self, h: &P::View<'_>, to: P::ViewMut<'_>) -> Result<()> {
        if self.weights.head.is_empty() {
            return self.place.map(Map::Sum, &[P::briefly(h)], to);
        }
        let head = matrices::find::<P>(&self.weights.head, HEAD)?;
        matrices::multiply(self.place, P::briefly(h), head, None, P::briefly_mut(to))
    }

    /// Memory for the logits of `rows` rows.
    pub fn logits(&self, rows: usize) -> Result<P::Owned> {
        self.rows(rows, self.config.vocabulary)
    }

    /// Memory for rows of the storage type.
    fn rows(&self, rows: usize, width: usize) -> Result<P::Owned> {
        self.place.empty(Spec::new(self.dtype, &[rows, width])?)
    }

    fn stream(&self, x: P::Owned) -> Result<Stream<P::Owned>> {
        let spec = P::view(&x).spec();
        Ok(Stream { sum: self.place.zeros(Spec { dtype: self.dtype.wide(), ..spec })?, last: x })
    }

    /// Adds the last layer's output to the sum, and norms it.
    fn norm(&self, stream: &mut Stream<P::Owned>, w: &P::View<'w>) -> Result<P::Owned> {
        let mut h = self.place.empty(P::view(&stream.last).spec())?;
        let inputs = named([("x", Some(P::view(&stream.last))), ("w", Some(P::briefly(w)))]);
        let outputs = named([("sum", Some(P::view_mut(&mut stream.sum))), ("y", Some(P::view_mut(&mut h)))]);
        let options = RmsOptions { eps: self.config.eps, ..Default::default() };
        self.place.call::<AddRmsNorm>(&options, inputs, outputs)?;
        Ok(h)
    }

    fn block<'s>(
        &self,
        i: usize,
        layer: &'s Layer<P::View<'w>>,
        h: P::View<'s>,
        batch: usize,
        y: &'s mut P::Owned,
        states: Option<&'s mut States<P::Owned>>,
    ) -> Result<()> {
        let rows = h.spec().shape[0];
        let dims = [batch, rows / batch.max(1), self.config.width];
        let mut inputs = layer.block.map(P::briefly);
        inputs.push("x", P::reshape(&h, &dims)?);
        let mut outputs = named([("y", Some(P::reshape_mut(P::view_mut(y), &dims)?))]);
        let options = mamba_block::Options { return_state: states.is_some(), ..Default::default() };
        if let Some(States { before, after }) = states {
            inputs.push("conv_state", P::rows(&P::view(&before.conv), i..i + 1)?);
            inputs.push("ssm_state", P::rows(&P::view(&before.ssm), i..i + 1)?);
            outputs.push("conv_state", row_mut::<P>(&mut after.conv, i)?);
            outputs.push("ssm_state", row_mut::<P>(&mut after.ssm, i)?);
        }
        if layer.block.iter().any(|(name, _)| matrices::is_quantized(name)) {
            // The op does not take quantized matrices; the sizes were checked when the model was made.
            let problem = self.problem([dims[0], dims[1]]);
            return mamba_block::steps::forward(self.place, &problem, &inputs, outputs);
        }
        self.place.call::<MambaBlock>(&options, inputs, outputs)
    }

    /// The sizes of a block.
    fn problem(&self, [batch, length]: [usize; 2]) -> mamba_block::Problem {
        let Config { width, inner, state, rank, conv, .. } = *self.config;
        let dtype = self.dtype;
        mamba_block::Problem { batch, length, model: width, inner, state, rank, width: conv, dtype }
    }

    /// A block for one token of each sequence, up to its last projection. Dense layers run for all sequences together,
    /// the stateful parts for each one.
    fn step_of_layer(
        &self,
        i: usize,
        layer: &Layer<P::View<'w>>,
        h: P::View<'_>,
        states: &mut [States<P::Owned>],
    ) -> Result<P::Owned> {
        let Config { inner, rank, state, .. } = *self.config;
        let part = |x: &P::Owned, name, rows| self.part(layer, P::view(x), name, rows);
        let (u, z) =
            (self.part(layer, P::briefly(&h), "in_proj", 0..inner)?, self.part(layer, h, "in_proj", inner..2 * inner)?);
        let c = self.conv(i, layer, &u, states)?;
        let b_t = part(&c, "x_proj", rank..rank + state)?;
        let c_t = part(&c, "x_proj", rank + state..rank + 2 * state)?;
        let dt = part(&part(&c, "x_proj", 0..rank)?, "dt_w", 0..inner)?;
        self.scan(i, layer, [&c, &z, &dt, &b_t, &c_t], states)
    }

    /// The convolution of one token of each sequence.
    fn conv(
        &self,
        i: usize,
        layer: &Layer<P::View<'w>>,
        u: &P::Owned,
        states: &mut [States<P::Owned>],
    ) -> Result<P::Owned> {
        let mut c = self.rows(states.len(), self.config.inner)?;
        let (w, b) = (layer.block.get("conv_w")?, layer.block.find("conv_b"));
        let options = conv::Options { activation: Some(Activation::Silu) };
        let rows = each_row::<P>(&mut c, states, |States { before, after }| (&before.conv, &mut after.conv))?;
        self.place.each(rows, |place, Row { number, y, before, after }| {
            let inputs = named([
                ("x", Some(row::<P>(u, number)?)),
                ("initial_state", Some(row::<P>(before, i)?)),
                ("w", Some(P::briefly(w))),
                ("bias", b.map(P::briefly)),
            ]);
            let outputs = named([("y", Some(P::briefly_mut(y))), ("last_state", Some(row_mut::<P>(after, i)?))]);
            place.call::<CausalConv1dUpdate>(&options, inputs, outputs)
        })?;
        Ok(c)
    }

    /// The scan of one token of each sequence.
    fn scan(
        &self,
        i: usize,
        layer: &Layer<P::View<'w>>,
        [c, z, dt, b_t, c_t]: [&P::Owned; 5],
        states: &mut [States<P::Owned>],
    ) -> Result<P::Owned> {
        let mut s = self.rows(states.len(), self.config.inner)?;
        let (d, dt_b) = (layer.block.get("D")?, layer.block.get("dt_b")?);
        let options = scan::Options { dt_softplus: true, dt_clamp: None };
        let rows = each_row::<P>(&mut s, states, |States { before, after }| (&before.ssm, &mut after.ssm))?;
        self.place.each(rows, |place, Row { number, y, before, after }| {
            let inputs = named([
                ("x", Some(row::<P>(c, number)?)),
                ("initial_state", Some(row::<P>(before, i)?)),
                ("dt", Some(row::<P>(dt, number)?)),
                ("A", Some(P::briefly(&layer.a))),
                ("B", Some(row::<P>(b_t, number)?)),
                ("C", Some(row::<P>(c_t, number)?)),
                ("D", Some(P::briefly(d))),
                ("z", Some(row::<P>(z, number)?)),
                ("dt_bias", Some(P::briefly(dt_b))),
            ]);
            let outputs = named([("y", Some(P::briefly_mut(y))), ("last_state", Some(row_mut::<P>(after, i)?))]);
            place.call::<SelectiveStateUpdate>(&options, inputs, outputs)
        })?;
        Ok(s)
    }

    /// Multiplies `x` with some rows of a weight of the block, and adds the bias if there is one.
    fn part(&self, layer: &Layer<P::View<'w>>, x: P::View<'_>, name: &str, rows: Range<usize>) -> Result<P::Owned> {
        let mut y = self.rows(x.spec().shape[0], rows.len())?;
        let w = matrices::rows::<P>(&matrices::find::<P>(&layer.block, name)?, rows.clone())?;
        let b = layer.block.find(&format!("{name}_b")).map(|b| P::rows(b, rows)).transpose()?;
        matrices::multiply(self.place, P::briefly(&x), w, b, P::view_mut(&mut y))?;
        Ok(y)
    }
}

/// One of the sequences that step together: its output, and a state before and after.
struct Row<'s, P: Place> {
    number: usize,
    y: P::ViewMut<'s>,
    before: &'s P::Owned,
    after: &'s mut P::Owned,
}

/// The rows of `y` with their states.
fn each_row<'s, P: Place>(
    y: &'s mut P::Owned,
    states: &'s mut [States<P::Owned>],
    of: impl for<'t> Fn(&'t mut States<P::Owned>) -> (&'t P::Owned, &'t mut P::Owned),
) -> Result<Vec<Row<'s, P>>> {
    let mut rest = P::view_mut(y);
    let mut rows = Vec::with_capacity(states.len());
    for (number, states) in states.iter_mut().enumerate() {
        let (y, others) = P::split_rows(rest, 1)?;
        let (before, after) = of(states);
        rows.push(Row { number, y, before, after });
        rest = others;
    }
    Ok(rows)
}

/// A row of a tensor, with a first axis of length 1.
fn row<P: Place>(of: &P::Owned, row: usize) -> Result<P::View<'_>> {
    P::rows(&P::view(of), row..row + 1)
}

/// A row of a tensor to write, with a first axis of length 1.
fn row_mut<P: Place>(of: &mut P::Owned, row: usize) -> Result<P::ViewMut<'_>> {
    let (_, from) = P::split_rows(P::view_mut(of), row)?;
    Ok(P::split_rows(from, 1)?.0)
}
