//! The forward pass from tokens to logits, on any device.

use super::block::Block;
use super::mamba2::{Mamba2, Through};
use super::{Config, Layer, Mixer, Weights};
use crate::watch::Tally;
use sidewinder_kernels::base::elementwise::Map;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::named;
use sidewinder_kernels::ops::causal_conv1d::Activation;
use sidewinder_kernels::ops::causal_conv1d::update::{self as conv, CausalConv1dUpdate};
use sidewinder_kernels::ops::layers::mamba_block::steps::{self, Between, Recurrence, Sequences};
use sidewinder_kernels::ops::norm::RmsOptions;
use sidewinder_kernels::ops::norm::add::AddRmsNorm;
use sidewinder_kernels::ops::products::matrices;
use sidewinder_kernels::ops::scan::selective_state_update::{self as scan, SelectiveStateUpdate};
use sidewinder_kernels::place::Place;
use sidewinder_kernels::tensor::{DType, Described, Spec};

/// The recurrent state of a sequence, for all layers.
#[derive(Clone, Copy)]
pub struct State<T> {
    /// The last `W - 1` inputs of each convolution, `(layers, W - 1, D)`, in the storage type; in Mamba-2
    /// `(layers, W - 1, D + 2 G N)`.
    pub conv: T,
    /// The state of each scan, `(layers, D, N)`, in the type of the arithmetic.
    pub ssm: T,
}

impl State<()> {
    /// The specs of the state of one sequence.
    pub fn specs(config: &Config, dtype: DType) -> Result<State<Spec>> {
        let Config { layers, inner, state, conv, .. } = *config;
        let channels = config.conv_channels();
        Ok(State {
            conv: Spec::new(dtype, &[layers, conv - 1, channels])?,
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

/// A model on the device of `place`, for one call.
pub struct Layers<'p, 'w, P: Place> {
    pub place: &'p P,
    pub config: &'p Config,
    pub dtype: DType,
    pub weights: &'p Weights<P::View<'w>>,
}

/// The state of a sequence before a call, and memory for the state after it.
pub struct States<'s, T> {
    pub before: &'s State<T>,
    pub after: &'s mut State<T>,
}

impl<'w, P: Place> Layers<'_, 'w, P> {
    /// The embeddings of these tokens, `(tokens, M)`.
    pub fn embed(&self, tokens: &[u32]) -> Result<P::Owned> {
        let mut x = self.rows(tokens.len(), self.config.width)?;
        if let Some(table) = &self.weights.embedding {
            self.place.gather(table, tokens, P::view_mut(&mut x))?;
        }
        Ok(x)
    }

    /// Runs the layers and the final norm over `batch` sequences, `(B L, M)`. With `states`, `batch` is 1. Each layer is
    /// a part of `tally`.
    pub fn run(
        &self,
        x: P::Owned,
        batch: usize,
        mut states: Option<States<P::Owned>>,
        tally: &Tally,
    ) -> Result<P::Owned> {
        let rows = P::view(&x).spec().shape[0];
        let dims = [batch, rows / batch.max(1), self.config.width];
        self.residual(x, |i, layer, h, y| {
            let states = states.as_mut().map(|states| states.of_layer::<P>(i)).transpose()?.unwrap_or_default();
            match &layer.block {
                Block::Mamba(weights) => {
                    let block = steps::Block { place: self.place, weights };
                    let mut sequences = Sequences::new(&block, states)?;
                    block.run(&P::reshape(&h, &dims)?, &mut sequences, P::reshape_mut(y, &dims)?)?;
                }
                Block::Mamba2(_) => {
                    self.mamba2(layer).run(&h, [dims[0], dims[1]], states.map(|state| vec![state]), y)?;
                }
            }
            tally.add_at(self.place)
        })
    }

    /// A decode step: runs the layers and the final norm over one token of each sequence, `(B, M)`.
    pub fn step(&self, x: P::Owned, states: &mut [States<P::Owned>]) -> Result<P::Owned> {
        self.residual(x, |number, layer, h, y| match &layer.block {
            Block::Mamba(weights) => {
                let block = steps::Block { place: self.place, weights };
                block.run(&h, &mut Tokens { number, a: &layer.a, states }, y)
            }
            Block::Mamba2(_) => {
                let states =
                    states.iter_mut().map(|states| states.of_layer::<P>(number)).collect::<Result<Vec<_>>>()?;
                let (conv, ssm) = states.into_iter().map(|[conv, ssm]| (conv, ssm)).unzip();
                self.mamba2(layer).run(&h, [1, 1], [conv, ssm], y)
            }
        })
    }

    fn mamba2<'b>(&'b self, layer: &'b Layer<P::View<'w>>) -> Mamba2<'b, 'w, P> {
        let (Block::Mamba2(weights), Mixer::Mamba2(heads)) = (&layer.block, &self.config.mixer) else {
            unreachable!("layers are of the kind that the configuration says")
        };
        Mamba2 { place: self.place, config: self.config, heads, weights, a: &layer.a }
    }

    /// The residual stream: each layer adds `block` of the normed stream. Returns the stream after the final norm.
    fn residual(
        &self,
        x: P::Owned,
        mut block: impl FnMut(usize, &Layer<P::View<'w>>, P::View<'_>, P::ViewMut<'_>) -> Result<()>,
    ) -> Result<P::Owned> {
        let spec = P::view(&x).spec();
        let mut sum = self.place.zeros(Spec { dtype: self.dtype.wide(), ..spec })?;
        let mut last = x;
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let h = self.add_norm(&mut sum, &last, &layer.norm)?;
            block(i, layer, P::view(&h), P::view_mut(&mut last))?;
        }
        self.add_norm(&mut sum, &last, &self.weights.norm)
    }

    /// Adds the previous layer's output `last` to the residual stream `sum`, and norms it, in one fused op.
    fn add_norm(&self, sum: &mut P::Owned, last: &P::Owned, w: &P::View<'w>) -> Result<P::Owned> {
        let mut h = self.place.empty(P::view(last).spec())?;
        let inputs = named([("x", Some(P::view(last))), ("w", Some(P::briefly(w)))]);
        let outputs = named([("sum", Some(P::view_mut(sum))), ("y", Some(P::view_mut(&mut h)))]);
        let options = RmsOptions { eps: self.config.eps, ..Default::default() };
        self.place.call::<AddRmsNorm>(&options, inputs, outputs)?;
        Ok(h)
    }

    /// Writes the logits of normed rows `h`; a backbone, which has no head, copies the rows.
    pub fn head(&self, h: &P::View<'_>, to: P::ViewMut<'_>) -> Result<()> {
        match &self.weights.head {
            Some(head) => matrices::multiply(self.place, P::briefly(h), head, P::briefly_mut(to)),
            None => self.place.map(Map::Sum, &[P::briefly(h)], to),
        }
    }

    /// Memory for the logits of `rows` rows.
    pub fn logits(&self, rows: usize) -> Result<P::Owned> {
        self.rows(rows, self.config.vocabulary)
    }

    /// Memory for rows of the storage type.
    fn rows(&self, rows: usize, width: usize) -> Result<P::Owned> {
        self.place.empty(Spec::new(self.dtype, &[rows, width])?)
    }
}

impl<T> States<'_, T> {
    /// The slices of layer `i` in the states of one sequence: of the convolution, and of the scan.
    fn of_layer<P: Place<Owned = T>>(&mut self, i: usize) -> Result<[Through<'_, P>; 2]> {
        let State { conv, ssm } = &mut *self.after;
        let of = |before, after| {
            Ok(steps::State { before: Some(row::<P>(before, i)?), after: Some(row_mut::<P>(after, i)?) })
        };
        Ok([of(&self.before.conv, conv)?, of(&self.before.ssm, ssm)?])
    }
}

/// One token of each of several sequences. The convolution and the scan run per sequence, because each sequence has its
/// own state; the projections run once for all.
struct Tokens<'s, 'b, 'w, P: Place> {
    /// The index of the layer.
    number: usize,
    a: &'s P::View<'w>,
    states: &'s mut [States<'b, P::Owned>],
}

impl<P: Place> Recurrence<P> for Tokens<'_, '_, '_, P> {
    fn conv(&mut self, block: &steps::Block<P>, u: &P::Owned, c: &mut P::Owned) -> Result<()> {
        let (i, weights) = (self.number, block.weights);
        let options = conv::Options { activation: Some(Activation::Silu) };
        let rows = each_row::<P>(c, self.states, |States { before, after }| (&before.conv, &mut after.conv))?;
        block.place.each(rows, |place, Row { number, y, before, after }| {
            let inputs = named([
                ("x", Some(row::<P>(u, number)?)),
                ("initial_state", Some(row::<P>(before, i)?)),
                ("w", Some(P::briefly(&weights.conv_w))),
                ("bias", weights.conv_b.as_ref().map(P::briefly)),
            ]);
            let outputs = named([("y", Some(P::briefly_mut(y))), ("last_state", Some(row_mut::<P>(after, i)?))]);
            place.call::<CausalConv1dUpdate>(&options, inputs, outputs)
        })
    }

    fn x_proj(&self, block: &steps::Block<P>, c: &P::Owned) -> Result<[P::Owned; 3]> {
        let [_, state, rank] = block.sizes();
        let part = |rows| block.rows(&P::view(c), &block.weights.x_proj, rows);
        Ok([part(0..rank)?, part(rank..rank + state)?, part(rank + state..rank + 2 * state)?])
    }

    fn scan(&mut self, block: &steps::Block<P>, of: &Between<P::Owned>, s: &mut P::Owned) -> Result<()> {
        let (i, a, weights) = (self.number, self.a, block.weights);
        let options = scan::Options { dt_softplus: true, dt_clamp: None };
        let rows = each_row::<P>(s, self.states, |States { before, after }| (&before.ssm, &mut after.ssm))?;
        block.place.each(rows, |place, Row { number, y, before, after }| {
            let inputs = named([
                ("x", Some(row::<P>(&of.c, number)?)),
                ("initial_state", Some(row::<P>(before, i)?)),
                ("dt", Some(row::<P>(&of.dt, number)?)),
                ("A", Some(P::briefly(a))),
                ("B", Some(row::<P>(&of.b_t, number)?)),
                ("C", Some(row::<P>(&of.c_t, number)?)),
                ("D", Some(P::briefly(&weights.d))),
                ("z", Some(row::<P>(&of.z, number)?)),
                ("dt_bias", Some(P::briefly(&weights.dt_b))),
            ]);
            let outputs = named([("y", Some(P::briefly_mut(y))), ("last_state", Some(row_mut::<P>(after, i)?))]);
            place.call::<SelectiveStateUpdate>(&options, inputs, outputs)
        })
    }
}

/// One sequence of a decode step: its output row, and its state of one op before and after.
struct Row<'s, P: Place> {
    number: usize,
    y: P::ViewMut<'s>,
    before: &'s P::Owned,
    after: &'s mut P::Owned,
}

/// Splits `y` into rows, each with the state of its sequence that `of` selects.
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
