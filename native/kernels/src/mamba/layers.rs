//! What a model computes between tokens and logits, wherever it runs.

use super::{Config, Layer, Weights};
use crate::causal_conv1d::Activation;
use crate::causal_conv1d::update::{self as conv, CausalConv1dUpdate};
use crate::error::Result;
use crate::linear;
use crate::mamba_block::{self, MambaBlock};
use crate::norm::RmsOptions;
use crate::norm::add::AddRmsNorm;
use crate::op::named;
use crate::place::{Map, Place};
use crate::selective_state_update::{self as scan, SelectiveStateUpdate};
use crate::tensor::{DType, Described, Spec};

/// Where a sequence stands: for each layer what the convolution and the scan need of all that was before.
pub struct State<T> {
    /// `(layers, W - 1, D)`, of the storage type.
    pub conv: T,
    /// `(layers, D, N)`, of the type of the arithmetic.
    pub ssm: T,
}

impl State<()> {
    /// The specs of the states of a sequence.
    pub fn specs(config: &Config, dtype: DType) -> Result<State<Spec>> {
        let Config { layers, inner, state, conv, .. } = *config;
        Ok(State {
            conv: Spec::new(dtype, &[layers, conv - 1, inner])?,
            ssm: Spec::new(dtype.wide(), &[layers, inner, state])?,
        })
    }
}

impl<T> State<T> {
    /// Both with something done to them.
    pub fn try_map<U>(&self, f: impl Fn(&T) -> Result<U>) -> Result<State<U>> {
        Ok(State { conv: f(&self.conv)?, ssm: f(&self.ssm)? })
    }
}

/// A model at some place.
pub struct Layers<'p, 'w, P: Place> {
    pub place: &'p P,
    pub config: &'p Config,
    pub dtype: DType,
    pub weights: &'p Weights<P::View<'w>>,
}

/// The states of one sequence before some tokens, and memory for those after them.
pub struct States<'s, T> {
    pub before: &'s State<T>,
    pub after: &'s mut State<T>,
}

/// The sum of the layers before, and the output of the last of them, to be added to it.
struct Stream<T> {
    sum: T,
    last: T,
}

impl<'w, P: Place> Layers<'_, 'w, P> {
    /// The rows of the embedding of these tokens, `(tokens, M)`.
    pub fn embed(&self, tokens: &[u32]) -> Result<P::Owned> {
        let mut x = self.rows(tokens.len(), self.config.width)?;
        if let Some(table) = &self.weights.embedding {
            self.place.gather(table, tokens, P::view_mut(&mut x))?;
        }
        Ok(x)
    }

    /// Sequences, `(B L, M)`, normed for the head; with states there is one of them.
    pub fn run(&self, x: P::Owned, batch: usize, mut states: Option<States<P::Owned>>) -> Result<P::Owned> {
        let mut stream = self.stream(x)?;
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let h = self.norm(&mut stream, &layer.norm)?;
            self.block(i, layer, P::view(&h), batch, &mut stream.last, states.as_mut())?;
        }
        self.norm(&mut stream, &self.weights.norm)
    }

    /// One token of each of some sequences, `(B, M)`, normed for the head.
    pub fn step(&self, x: P::Owned, states: &mut [States<P::Owned>]) -> Result<P::Owned> {
        let mut stream = self.stream(x)?;
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let h = self.norm(&mut stream, &layer.norm)?;
            let y = self.step_of_layer(i, layer, P::view(&h), states)?;
            self.linear(layer, P::view(&y), "out_proj", P::view_mut(&mut stream.last))?;
        }
        self.norm(&mut stream, &self.weights.norm)
    }

    /// The logits of normed rows; without a head the rows themselves.
    pub fn head(&self, h: &P::View<'_>, to: P::ViewMut<'_>) -> Result<()> {
        match &self.weights.head {
            Some(head) => linear::at(self.place, [P::briefly(h), P::briefly(head)], None, P::briefly_mut(to)),
            None => self.place.map(Map::Sum, &[P::briefly(h)], to),
        }
    }

    /// Memory for the logits of so many rows.
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

    /// Adds what the last layer gave, and norms the sum.
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
        self.place.call::<MambaBlock>(&options, inputs, outputs)
    }

    /// A block of one token of each sequence, up to its last projection: dense layers for all of them together,
    /// and for each of them what goes through its states.
    fn step_of_layer(
        &self,
        i: usize,
        layer: &Layer<P::View<'w>>,
        h: P::View<'_>,
        states: &mut [States<P::Owned>],
    ) -> Result<P::Owned> {
        let Config { inner, rank, state, .. } = *self.config;
        let batch = states.len();
        let (mut xz, mut c) = (self.rows(batch, 2 * inner)?, self.rows(batch, inner)?);
        let (mut projected, mut dt, mut y) =
            (self.rows(batch, rank + 2 * state)?, self.rows(batch, inner)?, self.rows(batch, inner)?);
        self.linear(layer, P::briefly(&h), "in_proj", P::view_mut(&mut xz))?;
        for (row, States { before, after }) in states.iter_mut().enumerate() {
            let inputs = named([
                ("x", Some(part::<P>(&P::view(&xz), row, 0..inner)?)),
                ("state", Some(P::rows(&P::view(&before.conv), i..i + 1)?)),
                ("w", Some(P::briefly(layer.block.get("conv_w")?))),
                ("bias", layer.block.find("conv_b").map(P::briefly)),
            ]);
            let outputs =
                named([("y", Some(row_mut::<P>(&mut c, row)?)), ("state", Some(row_mut::<P>(&mut after.conv, i)?))]);
            let options = conv::Options { activation: Some(Activation::Silu) };
            self.place.call::<CausalConv1dUpdate>(&options, inputs, outputs)?;
        }
        self.linear(layer, P::view(&c), "x_proj", P::view_mut(&mut projected))?;
        for (row, States { before, after }) in states.iter_mut().enumerate() {
            let of_row = |range| part::<P>(&P::view(&projected), row, range);
            self.linear(layer, of_row(0..rank)?, "dt_w", row_mut::<P>(&mut dt, row)?)?;
            let inputs = named([
                ("x", Some(P::rows(&P::view(&c), row..row + 1)?)),
                ("state", Some(P::rows(&P::view(&before.ssm), i..i + 1)?)),
                ("dt", Some(P::rows(&P::view(&dt), row..row + 1)?)),
                ("A", Some(P::briefly(&layer.a))),
                ("B", Some(of_row(rank..rank + state)?)),
                ("C", Some(of_row(rank + state..rank + 2 * state)?)),
                ("D", Some(P::briefly(layer.block.get("D")?))),
                ("z", Some(part::<P>(&P::view(&xz), row, inner..2 * inner)?)),
                ("dt_bias", Some(P::briefly(layer.block.get("dt_b")?))),
            ]);
            let outputs =
                named([("y", Some(row_mut::<P>(&mut y, row)?)), ("state", Some(row_mut::<P>(&mut after.ssm, i)?))]);
            let options = scan::Options { dt_softplus: true, dt_clamp: None };
            self.place.call::<SelectiveStateUpdate>(&options, inputs, outputs)?;
        }
        Ok(y)
    }

    /// A dense layer of the block, with its bias if it has one.
    fn linear(&self, layer: &Layer<P::View<'w>>, x: P::View<'_>, name: &str, y: P::ViewMut<'_>) -> Result<()> {
        let w = P::briefly(layer.block.get(name)?);
        let b = layer.block.find(&format!("{name}_b")).map(P::briefly);
        linear::at(self.place, [P::briefly(&x), w], b, P::briefly_mut(y))
    }
}

/// A row of a tensor to write, alone on its first axis.
fn row_mut<P: Place>(of: &mut P::Owned, row: usize) -> Result<P::ViewMut<'_>> {
    let (_, from) = P::split_rows(P::view_mut(of), row)?;
    Ok(P::split_rows(from, 1)?.0)
}

/// A part of a row of a matrix, as a matrix of one row.
fn part<'a, P: Place>(of: &P::View<'a>, row: usize, range: std::ops::Range<usize>) -> Result<P::View<'a>> {
    let (columns, width) = (of.spec().shape[1], range.len());
    let row = P::rows(of, row..row + 1)?;
    P::reshape(&P::rows(&P::reshape(&row, &[columns])?, range)?, &[1, width])
}
