//! The buffers of a recorded step.

use super::few;
use super::layout::InputLayout;
use super::queue::Step;
use crate::mamba::layers::States;
use crate::mamba::model::Input;
use crate::mamba::sample::Draw;
use crate::mamba::{Config, Heads, Mixer, State, Weights};
use sidewinder_kernels::cuda::{Buffer, Device, Lane, Pinned};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::{DType, Described, Spec};

/// The buffers that a recorded step reads and writes. They are allocated once, because the graph holds their addresses.
pub struct Plan {
    pub config: Config,
    pub dtype: DType,
    pub batch: usize,
    pub weights: Weights<Buffer>,
    pub layout: InputLayout,
    pub input: Buffer,
    pub sum: Buffer,
    /// Outputs of `in_proj`.
    pub xz: Buffer,
    /// Outputs of `x_proj`. Mamba-2 has none.
    pub projected: Buffer,
    pub y: Buffer,
    pub out: Buffer,
    pub tokens: Buffer,
    /// Additional buffers of steps that [`few`] does not fit.
    pub many: Option<Many>,
    /// Pinned host memory: the contents of `input`, then those of `out`, then those of `tokens`.
    pub pinned: Pinned,
    /// The states of the sequences that pad the batch, updated in place. Their values are not used.
    pub padding: State<Buffer>,
}

/// Additional buffers of larger batches.
pub struct Many {
    /// Normed rows.
    pub h: Buffer,
    /// Outputs of the convolution; in Mamba-2 those of the gated norm.
    pub c: Buffer,
    /// The output of a layer, which is added to the residual stream.
    pub last: Buffer,
}

/// The requested result of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Rows = 0,
    Tokens = 1,
}

impl Plan {
    pub fn new(config: &Config, dtype: DType, weights: Weights<Buffer>, batch: usize, device: &Device) -> Result<Plan> {
        let Config { width, inner, rank, state, vocabulary, .. } = *config;
        let rows = |dtype, columns| Buffer::new(device, Spec::new(dtype, &[batch, columns])?);
        let out = if vocabulary > 0 { vocabulary } else { width };
        let layout = InputLayout::new(config, dtype, batch);
        let input = Spec::new(DType::U8, &[layout.bytes])?;
        let out_bytes = (batch * out * dtype.size()).next_multiple_of(8);
        let many = || Ok(Many { h: rows(dtype, width)?, c: rows(dtype, inner)?, last: rows(dtype, width)? });
        let many = (!few::fits(config, &weights, batch)).then(many).transpose()?;
        let between = if many.is_some() { dtype } else { DType::F32 };
        // Before its norm, the output of Mamba-2's scan is not rounded.
        let y = if matches!(config.mixer, Mixer::Mamba2(_)) { DType::F32 } else { between };
        Ok(Plan {
            config: *config,
            dtype,
            batch,
            layout,
            weights,
            pinned: Pinned::new(device, input.bytes() + out_bytes + 4 * batch)?,
            padding: State::specs(config, dtype)?.try_map(|spec| Buffer::new(device, *spec))?,
            input: Buffer::new(device, input)?,
            sum: rows(DType::F32, width)?,
            xz: rows(between, config.projected())?,
            projected: rows(between, rank + 2 * state)?,
            y: rows(y, inner)?,
            out: rows(dtype, out)?,
            tokens: Buffer::new(device, Spec::new(DType::U8, &[4 * batch])?)?,
            many,
        })
    }

    /// The heads of a model that is Mamba-2.
    pub fn heads(&self) -> &Heads {
        match &self.config.mixer {
            Mixer::Mamba2(heads) => heads,
            _ => unreachable!("layers are of the kind that the configuration says"),
        }
    }

    /// Writes the inputs of a step to pinned memory. The padding of the batch gets zeros, and the states in `padding`.
    pub fn fill(
        &mut self,
        input: Option<Input>,
        sequences: &[States<Buffer>],
        draws: &[Draw],
        lane: &Lane,
    ) -> Result<()> {
        let given = match &input {
            Some(Input::Tokens(tokens)) => bytemuck::cast_slice(tokens),
            Some(Input::Features(features)) => features.bytes(),
            None => &[],
        };
        let [rows, addresses, choices] = self.layout.split(self.pinned.bytes_mut());
        write(rows, given);
        write(choices, bytemuck::cast_slice(draws));
        let sequences = sequences.iter().map(|states| [states.before, &*states.after]);
        let padded = sequences.chain(std::iter::repeat([&self.padding; 2]));
        for (i, [now, next]) in (0..self.batch).zip(padded) {
            let buffers = [&now.conv, &now.ssm, &next.conv, &next.ssm];
            for (addresses, buffer) in addresses.chunks_exact_mut(8 * self.batch).zip(buffers) {
                addresses[8 * i..8 * (i + 1)].copy_from_slice(&lane.address(buffer)?.to_ne_bytes());
            }
        }
        Ok(())
    }

    /// The offset of the output rows, or of the tokens, in pinned memory.
    fn offset(&self, wanted: Wanted) -> usize {
        let rows = self.input.spec().bytes();
        match wanted {
            Wanted::Rows => rows,
            Wanted::Tokens => rows + self.out.spec().bytes().next_multiple_of(8),
        }
    }

    pub fn result(&self, wanted: Wanted) -> &[u8] {
        &self.pinned.bytes()[self.offset(wanted)..]
    }

    /// Queues a step.
    pub fn queue(&self, lane: &Lane, wanted: Wanted) -> Result<()> {
        let step = Step { plan: self, lane };
        lane.from_pinned(&self.pinned, 0, &self.input)?;
        step.embed()?;
        match &self.many {
            None => step.of_few()?,
            Some(many) => step.of_many(many)?,
        }
        if wanted == Wanted::Tokens {
            step.choose()?;
        }
        let from = if wanted == Wanted::Tokens { &self.tokens } else { &self.out };
        lane.to_pinned(from, &self.pinned, self.offset(wanted))
    }
}

/// Copies `from` to the start of `to`, and zeroes the rest.
fn write(to: &mut [u8], from: &[u8]) {
    let (first, rest) = to.split_at_mut(from.len());
    first.copy_from_slice(from);
    rest.fill(0);
}
