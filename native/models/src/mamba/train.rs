//! Training to predict the next token: the gradient of a whole language model, and AdamW (Loshchilov and Hutter 2019),
//! on the model's device.
//!
//! ```text
//! loss = mean of -ln softmax(logits[t])[token[t + 1]]
//! g = gradient min(1, clip / |gradient|)
//! m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
//! w = w - rate (m / (1 - beta1^n) / (sqrt(v / (1 - beta2^n)) + eps) + decay w)       of step n
//! ```
//!
//! Weight decay applies to matrices except `A_log`, not to convolutions and vectors. Arithmetic is in f32, or in f64
//! for a model in f64. The order of sums depends on sizes alone, so equal steps give equal weights.

mod cpu;
mod cuda;
mod learn;
mod ranks;
mod walk;

use super::{Checkpoint, Config, Model, Weight, Where};
use crate::watch::{Stage, Tally, Unwatched, Watch};
pub(super) use learn::Learn;
use serde::Deserialize;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::place;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::collections::HashSet;
use std::ops::Range;
use walk::{Numbers, Walk};

/// The parameters of an AdamW step.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW {
    /// The learning rate.
    pub learning_rate: f64,
    /// The decay of the running mean of gradients.
    pub beta1: f64,
    /// The decay of the running mean of their squares.
    pub beta2: f64,
    /// The epsilon that is added to the divisor.
    pub eps: f64,
    /// The fraction of each matrix that a step subtracts, before the factor of the learning rate.
    pub weight_decay: f64,
    /// Upper limit for the norm of the gradient, which is scaled down to it; 0 for no limit.
    pub clip: f64,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, clip: 1.0 }
    }
}

impl AdamW {
    fn check(&self) -> Result<()> {
        let wrong =
            |name: &str, expected: &str, got: f64| Err(Error::new(Kind::Option, name).expected(expected).got(got));
        let AdamW { learning_rate, beta1, beta2, eps, weight_decay, clip } = *self;
        for (name, value) in [("learning_rate", learning_rate), ("weight_decay", weight_decay), ("clip", clip)] {
            if !(value >= 0.0 && value.is_finite()) {
                return wrong(name, "a number that is not negative", value);
            }
        }
        for (name, value) in [("beta1", beta1), ("beta2", beta2)] {
            if !(0.0..1.0).contains(&value) {
                return wrong(name, "a number from 0, below 1", value);
            }
        }
        if eps > 0.0 && eps.is_finite() { Ok(()) } else { wrong("eps", "a positive number", eps) }
    }
}

/// The report of a step.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The loss before the step, in nats.
    pub loss: f64,
    /// The norm of the gradient, before clipping.
    pub norm: f64,
}

/// A language model in training: its weights, their gradient, and the state of AdamW.
pub struct Trainer {
    config: Config,
    dtype: DType,
    parts: Vec<Part>,
    numbers: Numbers,
    /// Number of elements with weight decay, which come first.
    decayed: usize,
    /// The memory of each device, with equal weights.
    ranks: Vec<Memory>,
    steps: u64,
    /// Whether a step failed while it changed the weights: some may have changed, others not.
    torn: bool,
}

/// A weight: its name and shape in checkpoints, and its range in the memory that all weights share.
struct Part {
    name: String,
    dims: Vec<usize>,
    range: Range<usize>,
}

enum Memory {
    Cpu(Kept<Owned>, Exec),
    Cuda(Kept<Buffer>, Device, bool),
}

/// The tensors kept between steps; each holds the elements of all weights.
struct Kept<T> {
    weights: T,
    gradient: T,
    mean: T,
    square: T,
}

/// Parts start at multiples of this number of elements, and so at cache lines.
const LINE: usize = 64;

impl Trainer {
    /// Starts from the weights of a language model, on its device.
    pub fn new(model: &Model) -> Result<Trainer> {
        Trainer::on(model, &[model.place()])
    }

    /// Starts from the weights of a language model on several devices, which share each batch: all GPUs, or all the CPU.
    /// A device may take several shares.
    pub fn on(model: &Model, places: &[Where]) -> Result<Trainer> {
        if model.config().vocabulary == 0 {
            return Err(Error::new(Kind::Argument, "model")
                .expected("a language model")
                .got("a backbone")
                .hint("A backbone is trained with what is around it: see Sidewinder.Axon"));
        }
        let dtype = model.dtype().wide();
        let mut weights = model.tensors()?;
        weights.sort_by_key(|(name, weight)| !decays(name, &weight.spec().shape));
        let (parts, total) = parts(&weights);
        let mut all = Owned::try_zeros(Spec::new(dtype, &[total])?)?;
        for (part, (_, weight)) in parts.iter().zip(&weights) {
            let bytes = part.range.start * dtype.size()..part.range.end * dtype.size();
            all.view_mut().bytes()[bytes].copy_from_slice(weight.cast(dtype).view().bytes());
        }
        let first = parts.iter().zip(&weights).find(|(_, (name, weight))| !decays(name, &weight.spec().shape));
        let decayed = first.map_or(total, |(part, _)| part.range.start);
        let kinds = places.iter().map(std::mem::discriminant).collect::<HashSet<_>>();
        if kinds.len() != 1 {
            return Err(if kinds.is_empty() {
                Error::new(Kind::Argument, "devices").expected("at least one").got("none")
            } else {
                ranks::mixed()
            });
        }
        let ranks = places.iter().map(|place| Memory::new(all.clone(), place)).collect::<Result<_>>()?;
        let numbers = Numbers::new(&parts, model.config())?;
        Ok(Trainer { config: *model.config(), dtype, parts, numbers, decayed, ranks, steps: 0, torn: false })
    }

    /// One step on `batch` concatenated sequences of equal length, in which each token but the last predicts the next
    /// one. If the loss or its gradient is not finite, the step fails and leaves the weights unchanged.
    pub fn step(&mut self, tokens: &[u32], batch: usize, how: &AdamW) -> Result<Progress> {
        self.step_watched(tokens, batch, how, &Unwatched)
    }

    /// Like [`Trainer::step`], with reports to `watch` before the weights are changed.
    pub fn step_watched(&mut self, tokens: &[u32], batch: usize, how: &AdamW, watch: &dyn Watch) -> Result<Progress> {
        how.check()?;
        let loss = self.gradient_watched(tokens, batch, watch)?;
        let norm = self.ranks[0].norm()?;
        if !(loss.is_finite() && norm.is_finite()) {
            return Err(Error::new(Kind::Argument, "learning_rate")
                .expected("one that keeps the loss and its gradient finite")
                .got(format_args!("a loss of {loss} and a gradient of norm {norm}"))
                .hint("The weights are as before the step; go on from those with a lower rate"));
        }
        self.steps += 1;
        let scale = if how.clip > 0.0 && norm > how.clip { how.clip / norm } else { 1.0 };
        let update = Update::new(how, self.steps, scale, self.decayed);
        let step = |rank: &mut Memory| rank.update(&update);
        self.torn = true;
        ranks::at_once(self.ranks.iter_mut(), step, step)?;
        self.torn = false;
        Ok(Progress { loss, norm })
    }

    /// Computes the loss and the gradient, which [`Trainer::gradients`] then returns.
    pub fn gradient(&mut self, tokens: &[u32], batch: usize) -> Result<f64> {
        self.gradient_watched(tokens, batch, &Unwatched)
    }

    fn gradient_watched(&mut self, tokens: &[u32], batch: usize, watch: &dyn Watch) -> Result<f64> {
        self.is_whole()?;
        let sequences = Sequences::new(tokens, batch, self.config.vocabulary)?;
        let shares = sequences.shares(self.ranks.len())?;
        let Trainer { config, dtype, parts, numbers, ranks, .. } = self;
        let model = (&*config, &*numbers, *dtype);
        let learn = |(rank, share): (&mut Memory, Sequences), watch: &dyn Watch| {
            let tally = Tally::begin(watch, Stage::Train, 2 * config.layers + 1)?;
            rank.learn(model, parts, &share, &tally)
        };
        let losses =
            ranks::at_once(ranks.iter_mut().zip(shares), |own| learn(own, watch), |one| learn(one, &Unwatched))?;
        ranks::add_up(ranks)?;
        Ok(losses.iter().sum())
    }

    fn is_whole(&self) -> Result<()> {
        match self.torn {
            false => Ok(()),
            true => Err(Error::new(Kind::Unavailable, "trainer")
                .expected("weights that all took the same steps")
                .got("a step that failed while it changed them")
                .hint("Start a trainer from the checkpoint that was saved last")),
        }
    }

    /// The sizes of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device of the weights, or the first of several.
    pub fn place(&self) -> Where {
        match &self.ranks[0] {
            Memory::Cpu(_, exec) => Where::Cpu(*exec),
            Memory::Cuda(_, device, tf32) => Where::Cuda(device.clone(), *tf32),
        }
    }

    /// The current weights, by their names in checkpoints.
    pub fn tensors(&self) -> Result<Vec<(String, Weight)>> {
        self.is_whole()?;
        self.named(self.ranks[0].weights()?)
    }

    /// The gradient of the last step, or of [`Trainer::gradient`].
    pub fn gradients(&self) -> Result<Vec<(String, Weight)>> {
        self.named(self.ranks[0].gradient()?)
    }

    /// Whether the weights of all devices are equal, bit by bit. For tests.
    #[doc(hidden)]
    pub fn equal_ranks(&self) -> Result<bool> {
        let all = self.ranks.iter().map(Memory::weights).collect::<Result<Vec<_>>>()?;
        Ok(all.iter().all(|one| one.view().bytes() == all[0].view().bytes()))
    }

    /// A checkpoint with the current weights.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        Ok(Checkpoint::new("trainer", Some(self.config), self.tensors()?))
    }

    fn named(&self, all: Owned) -> Result<Vec<(String, Weight)>> {
        let part = |part: &Part| {
            let view = all.view().rows(part.range.clone())?;
            Ok((part.name.clone(), Weight::copied(Spec::new(self.dtype, &part.dims)?, view.bytes())?))
        };
        self.parts.iter().map(part).collect()
    }
}

/// Whether weight decay applies: to matrices, but not to `A_log`. Convolutions have three axes, so they are excluded.
fn decays(name: &str, dims: &[usize]) -> bool {
    dims.len() == 2 && !name.ends_with("A_log")
}

fn parts(weights: &[(String, Weight)]) -> (Vec<Part>, usize) {
    let mut end: usize = 0;
    let part = |(name, weight): &(String, Weight)| {
        let (start, shape) = (end, weight.spec().shape);
        end = (start + shape.elements()).next_multiple_of(LINE);
        Part { name: name.clone(), dims: shape.to_vec(), range: start..start + shape.elements() }
    };
    let parts = weights.iter().map(part).collect();
    (parts, end)
}

impl Memory {
    fn new(weights: Owned, place: &Where) -> Result<Memory> {
        let spec = weights.spec();
        match place {
            Where::Cpu(exec) => {
                let zeros = || Owned::zeros(spec);
                Ok(Memory::Cpu(Kept { weights, gradient: zeros(), mean: zeros(), square: zeros() }, *exec))
            }
            Where::Cuda(device, tf32) => {
                let lane = device.lane()?;
                let zeros = || {
                    let buffer = Buffer::new(device, spec)?;
                    lane.fill(&buffer, 0).map(|()| buffer)
                };
                let kept = Kept { weights: zeros()?, gradient: zeros()?, mean: zeros()?, square: zeros()? };
                lane.upload(weights.view().bytes(), &kept.weights)?;
                lane.synchronize()?;
                Ok(Memory::Cuda(kept, device.clone(), *tf32))
            }
        }
    }

    fn elements(&self) -> usize {
        let spec = match self {
            Memory::Cpu(kept, _) => kept.weights.spec(),
            Memory::Cuda(kept, ..) => kept.weights.spec(),
        };
        spec.shape.elements()
    }

    /// Computes the gradient of the part of the loss that these sequences have, and that part.
    fn learn(
        &mut self,
        model: (&Config, &Numbers, DType),
        parts: &[Part],
        sequences: &Sequences,
        tally: &Tally,
    ) -> Result<f64> {
        match self {
            Memory::Cpu(Kept { weights, gradient, .. }, exec) => {
                Walk::new(&place::Cpu(exec), model, parts, weights)?.learn(sequences, gradient, tally)
            }
            Memory::Cuda(Kept { weights, gradient, .. }, device, tf32) => {
                let lane = device.lane()?.allow_tf32(*tf32);
                let loss = Walk::new(&place::Cuda(&lane), model, parts, weights)?.learn(sequences, gradient, tally)?;
                lane.synchronize()?;
                Ok(loss)
            }
        }
    }

    fn norm(&self) -> Result<f64> {
        let squares = match self {
            Memory::Cpu(kept, exec) => place::Cpu(exec).squares(&kept.gradient.view())?,
            Memory::Cuda(kept, device, _) => place::Cuda(&device.lane()?).squares(&kept.gradient)?,
        };
        Ok(squares.sqrt())
    }

    fn update(&mut self, update: &Update) -> Result<()> {
        match self {
            Memory::Cpu(Kept { weights, gradient, mean, square }, exec) => {
                let changed = [weights.view_mut(), mean.view_mut(), square.view_mut()];
                place::Cpu(exec).update(changed, &gradient.view(), update)
            }
            Memory::Cuda(Kept { weights, gradient, mean, square }, device, _) => {
                let lane = device.lane()?;
                let changed = [&*weights, mean, square].map(Buffer::clone);
                place::Cuda(&lane).update(changed, gradient, update)?;
                lane.synchronize()
            }
        }
    }

    fn weights(&self) -> Result<Owned> {
        match self {
            Memory::Cpu(kept, _) => Ok(kept.weights.clone()),
            Memory::Cuda(kept, device, _) => device.lane()?.downloaded(&kept.weights),
        }
    }

    fn gradient(&self) -> Result<Owned> {
        match self {
            Memory::Cpu(kept, _) => Ok(kept.gradient.clone()),
            Memory::Cuda(kept, device, _) => device.lane()?.downloaded(&kept.gradient),
        }
    }
}

/// The constants of one step of AdamW.
#[derive(Clone, Copy)]
pub struct Update {
    /// The factor of the gradient, for clipping.
    scale: f64,
    beta1: f64,
    beta2: f64,
    /// The learning rate, with the bias correction of the mean of gradients.
    rate: f64,
    /// The bias correction of the mean of squares.
    correction: f64,
    eps: f64,
    /// The factor of weights with weight decay, and the number of their elements.
    keep: f64,
    decayed: usize,
}

impl Update {
    fn new(how: &AdamW, step: u64, scale: f64, decayed: usize) -> Update {
        let AdamW { learning_rate, beta1, beta2, eps, weight_decay, .. } = *how;
        let corrected = |beta: f64| 1.0 - beta.powf(step as f64);
        Update {
            scale,
            beta1,
            beta2,
            rate: learning_rate / corrected(beta1),
            correction: 1.0 / corrected(beta2),
            eps,
            keep: 1.0 - learning_rate * weight_decay,
            decayed,
        }
    }
}

/// Training sequences: the input tokens, and the target that follows each.
struct Sequences {
    batch: usize,
    read: Vec<u32>,
    next: Vec<u32>,
    /// The tokens that are predicted in the whole batch, of which this may be a share.
    predicted: usize,
}

impl Sequences {
    fn new(tokens: &[u32], batch: usize, vocabulary: usize) -> Result<Sequences> {
        let length = tokens.len().checked_div(batch).unwrap_or(0);
        if length < 2 || !tokens.len().is_multiple_of(batch) {
            return Err(Error::new(Kind::Size, "tokens")
                .expected("sequences of one length, of at least two tokens")
                .got(format_args!("{} tokens in {batch} sequences", tokens.len())));
        }
        super::model::check_tokens(tokens, vocabulary)?;
        let sequences = || tokens.chunks_exact(length);
        let read: Vec<u32> = sequences().flat_map(|tokens| &tokens[..length - 1]).copied().collect();
        let next = sequences().flat_map(|tokens| &tokens[1..]).copied().collect();
        Ok(Sequences { batch, predicted: read.len(), read, next })
    }

    /// Splits the batch into a share for each of `count` devices.
    fn shares(&self, count: usize) -> Result<Vec<Sequences>> {
        if self.batch < count {
            return Err(Error::new(Kind::Size, "tokens")
                .expected(format_args!("at least {count} sequences, one for each device"))
                .got(self.batch));
        }
        let length = self.read.len() / self.batch;
        let share = |range: Range<usize>| {
            let tokens = range.start * length..range.end * length;
            let [read, next] = [&self.read, &self.next].map(|all| all[tokens.clone()].to_vec());
            Sequences { batch: range.len(), read, next, predicted: self.predicted }
        };
        Ok(ranks::shares(self.batch, count).map(share).collect())
    }
}
