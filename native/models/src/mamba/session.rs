//! Sessions: sequences that a model runs incrementally, by prefill and decode steps.

use super::layers::{Layers, State, States};
use super::model::{Input, Model, Target, at_home};
use super::sample::Sampling;
use super::seen::Seen;
use super::train::Learn;
use crate::watch::{Stage, Tally, Unwatched, Watch};
use sidewinder_files::safetensors;
use sidewinder_kernels::cuda::{Buffer, Lane};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::place::Place;
use sidewinder_kernels::tensor::{DType, Described, Element, Owned, Spec, View, ViewMut};
use sidewinder_kernels::with_type;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

/// A sequence that a model runs incrementally, with states of constant size. A call that fails leaves it unchanged.
pub struct Session {
    model: Arc<Model>,
    memory: Memory,
    /// Number of tokens, or frames, that it has processed.
    length: u64,
    seen: Seen,
}

enum Memory {
    Cpu(Turns<Owned>),
    Cuda(Turns<Buffer>),
}

/// Double-buffered states: a call reads `now` and writes `next`, and swaps them if it succeeds.
struct Turns<T> {
    now: State<T>,
    next: State<T>,
}

impl<T> Turns<T> {
    fn states(&mut self) -> States<'_, T> {
        States { before: &self.now, after: &mut self.next }
    }

    fn turn(&mut self) {
        std::mem::swap(&mut self.now, &mut self.next);
    }
}

/// Tokens per chunk in [`Session::loss`], which limits the memory for logits.
const PIECE: usize = 1024;

/// The tensor names in a dumped session.
const CONV: &str = "conv_state";
const SSM: &str = "ssm_state";
const LENGTH: &str = "length";
const SEEN: &str = "seen";

/// Upper limit for the length of a restored session, so that it cannot overflow later.
const LONGEST: u64 = 1 << 62;

impl Session {
    /// A session at the start of a sequence, with states of zeros.
    pub fn new(model: &Arc<Model>) -> Result<Session> {
        let specs = State::specs(model.config(), model.dtype())?;
        let memory = match model.device() {
            None => {
                let zeros = || specs.try_map(|spec| Owned::try_zeros(*spec));
                Memory::Cpu(Turns { now: zeros()?, next: zeros()? })
            }
            Some(device) => {
                let buffers = || specs.try_map(|spec| Buffer::new(device, *spec));
                Memory::Cuda(Turns { now: buffers()?, next: buffers()? })
            }
        };
        let seen = Seen::new(model.config().vocabulary);
        let mut session = Session { model: model.clone(), memory, length: 0, seen };
        session.reset()?;
        Ok(session)
    }

    /// The model that runs the sequence.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Number of tokens, or frames, that it has processed.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The set of tokens that the session has processed.
    pub fn seen(&self) -> &Seen {
        &self.seen
    }

    /// Returns to the start of a sequence, with states of zeros.
    pub fn reset(&mut self) -> Result<()> {
        match &mut self.memory {
            Memory::Cpu(turns) => {
                for state in [&mut turns.now.conv, &mut turns.now.ssm] {
                    state.view_mut().bytes().fill(0);
                }
            }
            Memory::Cuda(turns) => {
                let lane = self.model.lane()?;
                lane.fill(&turns.now.conv, 0)?;
                lane.fill(&turns.now.ssm, 0)?;
                lane.synchronize()?;
            }
        }
        self.length = 0;
        self.seen.clear();
        Ok(())
    }

    /// A copy of the session, which continues independently.
    pub fn fork(&self) -> Result<Session> {
        let mut fork = Session::new(&self.model)?;
        match (&self.memory, &mut fork.memory) {
            (Memory::Cpu(from), Memory::Cpu(to)) => to.now = from.now.try_map(|state| Ok(state.clone()))?,
            (Memory::Cuda(from), Memory::Cuda(to)) => {
                let lane = self.model.lane()?;
                lane.copy(&from.now.conv, &to.now.conv)?;
                lane.copy(&from.now.ssm, &to.now.ssm)?;
                lane.synchronize()?;
            }
            _ => unreachable!("sessions of one model are at one place"),
        }
        fork.length = self.length;
        fork.seen = self.seen.clone();
        Ok(fork)
    }

    /// Processes a sequence, and writes the output of its last row if `to` is given.
    pub fn prefill(&mut self, input: Input, to: Option<ViewMut>) -> Result<()> {
        self.prefill_watched(input, to, &Unwatched)
    }

    /// Like [`Session::prefill`], with reports to `watch`.
    pub fn prefill_watched(&mut self, input: Input, to: Option<ViewMut>, watch: &dyn Watch) -> Result<()> {
        let rows = lasting(&self.model, input)?;
        if rows == 0 {
            return match to {
                None => Ok(()),
                Some(_) => Err(Error::new(Kind::Argument, "input").expected("at least one token or frame").got("none")),
            };
        }
        let Session { model, memory, .. } = self;
        let tally = Tally::begin(watch, Stage::Prefill, model.parts())?;
        at_home!(model, layers =>
            cpu prefill(&layers, input, memory.cpu(), to.map(Target::There), &tally),
            cuda prefill(&layers, input, memory.cuda(), to.map(Target::Host), &tally))?;
        self.advance(input, 0..rows);
        Ok(())
    }

    /// Processes all tokens but the last. Returns the mean of -ln p over all tokens but the first, in nats, where p is
    /// the probability of a token given those before it. Fails if the loss is not finite.
    pub fn loss(&mut self, tokens: &[u32]) -> Result<f64> {
        self.loss_watched(tokens, &Unwatched)
    }

    /// Like [`Session::loss`], with reports to `watch`.
    pub fn loss_watched(&mut self, tokens: &[u32], watch: &dyn Watch) -> Result<f64> {
        self.model.check(Input::Tokens(tokens))?;
        if tokens.len() < 2 {
            return Err(Error::new(Kind::Size, "tokens").expected("at least two").got(tokens.len()));
        }
        let chunks = (tokens.len() - 1).div_ceil(PIECE);
        let tally = Tally::begin(watch, Stage::Loss, chunks * self.model.parts())?;
        // Runs in a copy, because a chunk may fail after others have succeeded.
        let mut ahead = self.fork()?;
        let sum = ahead.losses(tokens, &tally)?;
        *self = ahead;
        Ok(sum / (tokens.len() - 1) as f64)
    }

    /// The sum of the losses of all tokens but the first. After a failure the session stays where a chunk ends.
    fn losses(&mut self, tokens: &[u32], tally: &Tally) -> Result<f64> {
        let mut sum = 0.0;
        // Adjacent chunks share a token: it is the last target of one and the first input of the next.
        for start in (0..tokens.len() - 1).step_by(PIECE) {
            let piece = &tokens[start..tokens.len().min(start + PIECE + 1)];
            let Session { model, memory, .. } = self;
            at_home!(model, layers =>
                cpu loss(&layers, piece, memory.cpu(), &mut sum, tally),
                cuda loss(&layers, piece, memory.cuda(), &mut sum, tally))?;
            self.advance(Input::Tokens(piece), 0..piece.len() - 1);
        }
        Ok(sum)
    }

    /// Steps sessions of one model by one token or frame each, and writes an output row for each.
    pub fn step(sessions: &mut [&mut Session], input: Input, to: ViewMut) -> Result<()> {
        match together(sessions, input)? {
            Some(model) => Session::step_together(&model, sessions, input, to),
            None => Ok(()),
        }
    }

    /// Like [`Session::step`], for sessions of `model` and an input that is already checked.
    fn step_together(model: &Model, sessions: &mut [&mut Session], input: Input, to: ViewMut) -> Result<()> {
        if let Some(stepper) = model.stepper(sessions.len())? {
            stepper.lock().unwrap_or_else(PoisonError::into_inner).step(input, &states_there(sessions), to)?;
            advance_together(sessions, input);
            return Ok(());
        }
        let memories = sessions.iter_mut().map(|session| &mut session.memory);
        at_home!(model, layers =>
            cpu step(&layers, input, memories.map(Memory::cpu).collect(), Target::There(to)),
            cuda step(&layers, input, memories.map(Memory::cuda).collect(), Target::Host(to)))?;
        advance_together(sessions, input);
        Ok(())
    }

    /// Steps sessions of one language model by one token each, and chooses the next token of each. `choices` holds the
    /// sampling options of each session, and the number of choices made before in its text.
    pub fn next(sessions: &mut [&mut Session], input: Input, choices: &[(Sampling, u64)]) -> Result<Vec<u32>> {
        let Some(model) = together(sessions, input)? else {
            return Ok(Vec::new());
        };
        if choices.len() != sessions.len() || model.config().vocabulary == 0 {
            return Err(Error::new(Kind::Argument, "choices")
                .expected(format_args!("one for each of {} sessions of a language model", sessions.len()))
                .got(choices.len()));
        }
        choices.iter().try_for_each(|(sampling, _)| sampling.check())?;
        let on_device = choices.iter().all(|(sampling, _)| sampling.on_device());
        if let Some(stepper) = model.stepper(sessions.len())?.filter(|_| on_device) {
            let draws: Vec<_> = choices.iter().map(|(sampling, draw)| sampling.draw(*draw)).collect();
            let states = states_there(sessions);
            let chosen = stepper.lock().unwrap_or_else(PoisonError::into_inner).choose(input, &states, &draws)?;
            let none = || Error::new(Kind::Argument, "logits").expected("finite numbers").got("none");
            let chosen = chosen.into_iter().map(|token| token.ok_or_else(none)).collect::<Result<_>>()?;
            advance_together(sessions, input);
            return Ok(chosen);
        }
        let mut logits = Owned::try_any(model.output(&[sessions.len()])?)?;
        Session::step_together(&model, sessions, input, logits.view_mut())?;
        let chosen = choose(&logits, choices, sessions.iter().map(|session| session.seen()));
        if chosen.is_err() {
            sessions.iter_mut().for_each(|session| session.retreat());
        }
        chosen
    }

    /// The states, the length and the set of tokens, in the format of a safetensors file.
    pub fn dump(&self) -> Result<Vec<u8>> {
        let host = match &self.memory {
            Memory::Cpu(turns) => turns.now.try_map(|state| Ok(state.clone()))?,
            Memory::Cuda(turns) => turns.now.try_map(|state| self.model.lane()?.downloaded(state))?,
        };
        let length = Spec::new(DType::U8, &[8])?;
        let bytes = self.length.to_le_bytes();
        let length = View::new(length, &bytes)?;
        let seen = View::new(Spec::new(DType::U8, &[self.seen.bits().len()])?, self.seen.bits())?;
        safetensors::to_bytes(&[(CONV, host.conv.view()), (SSM, host.ssm.view()), (LENGTH, length), (SEEN, seen)])
    }

    /// Restores a dumped session, for a model of the same sizes.
    pub fn restore(model: &Arc<Model>, bytes: &[u8]) -> Result<Session> {
        let mut session = Session::new(model)?;
        let specs = State::specs(model.config(), model.dtype())?;
        let tensors = safetensors::from_bytes("dump", bytes)?;
        let find = |name: &str, spec: Spec| {
            let found = tensors.iter().find(|(found, _)| found == name).map(|(_, tensor)| tensor);
            match found {
                Some(tensor) if tensor.spec() == spec => Ok(tensor.clone()),
                found => Err(Error::new(Kind::Argument, "dump")
                    .expected(format_args!("`{name}`, {spec}, as sessions of this model have it"))
                    .got(found.map_or("none".to_string(), |tensor| tensor.spec().to_string()))),
            }
        };
        let state = State { conv: find(CONV, specs.conv)?, ssm: find(SSM, specs.ssm)? };
        let length = find(LENGTH, Spec::new(DType::U8, &[8])?)?;
        session.length = u64::from_le_bytes(length.view().bytes().try_into().expect("eight bytes"));
        if session.length > LONGEST {
            return Err(Error::new(Kind::Argument, "dump")
                .expected(format_args!("`{LENGTH}`, at most {LONGEST}"))
                .got(session.length));
        }
        let seen = find(SEEN, Spec::new(DType::U8, &[session.seen.bits().len()])?)?;
        session.seen = Seen::from_bits(seen.view().bytes());
        match &mut session.memory {
            Memory::Cpu(turns) => turns.now = state,
            Memory::Cuda(turns) => {
                let lane = model.lane()?;
                lane.upload(state.conv.view().bytes(), &turns.now.conv)?;
                lane.upload(state.ssm.view().bytes(), &turns.now.ssm)?;
                lane.synchronize()?;
            }
        }
        Ok(session)
    }

    /// Takes the states after these rows, which were processed.
    fn advance(&mut self, input: Input, rows: Range<usize>) {
        self.turn();
        self.length += rows.len() as u64;
        if let Input::Tokens(tokens) = input {
            tokens[rows].iter().for_each(|&token| self.seen.insert(token));
        }
    }

    /// Undoes the last step, by swapping the states back.
    fn retreat(&mut self) {
        self.turn();
        self.length -= 1;
        self.seen.retract();
    }

    fn turn(&mut self) {
        match &mut self.memory {
            Memory::Cpu(turns) => turns.turn(),
            Memory::Cuda(turns) => turns.turn(),
        }
    }
}

/// The number of rows of an input. Features must be finite, because a NaN would stay in the state.
fn lasting(model: &Model, input: Input) -> Result<usize> {
    let rows = model.check(input)?;
    if let Input::Features(features) = input {
        // Has no early exit, so that the loop is vectorized.
        let finite = with_type!(model.dtype(), T => {
            features.slice::<T>()?.iter().fold(true, |all, v| all & v.to_f64().is_finite())
        });
        if !finite {
            return Err(Error::new(Kind::Argument, "features").expected("finite numbers").got("NaN or infinity"));
        }
    }
    Ok(rows)
}

/// The common model of sessions that step together, after a check of the input; `None` without sessions.
fn together(sessions: &[&mut Session], input: Input) -> Result<Option<Arc<Model>>> {
    let Some(first) = sessions.first() else {
        return Ok(None);
    };
    let model = first.model.clone();
    if sessions.iter().any(|session| !Arc::ptr_eq(&session.model, &model)) {
        return Err(Error::new(Kind::Argument, "sessions").expected("sessions of one model").got("several models"));
    }
    let rows = lasting(&model, input)?;
    if rows != sessions.len() {
        let expected = format_args!("one for each of {} sessions", sessions.len()).to_string();
        return Err(Error::new(Kind::Argument, "input").expected(expected).got(rows));
    }
    Ok(Some(model))
}

/// The states of each session on CUDA.
fn states_there<'s>(sessions: &'s mut [&mut Session]) -> Vec<States<'s, Buffer>> {
    sessions.iter_mut().map(|session| session.memory.cuda().states()).collect()
}

/// Advances each session by its row of the input.
fn advance_together(sessions: &mut [&mut Session], input: Input) {
    sessions.iter_mut().enumerate().for_each(|(i, session)| session.advance(input, i..i + 1));
}

/// Chooses a token for each row of logits; `seen` holds the tokens of each text, for the repetition penalty.
pub fn choose<'s>(
    logits: &Owned,
    choices: &[(Sampling, u64)],
    seen: impl IntoIterator<Item = &'s Seen>,
) -> Result<Vec<u32>> {
    let mut wide = logits.cast(DType::F32);
    let width = wide.spec().shape.last().copied().unwrap_or(0).max(1);
    let view = wide.view_mut();
    let rows = view.slice::<f32>()?.chunks_exact_mut(width);
    let row = |((row, (sampling, draw)), seen): ((&mut [f32], &(Sampling, u64)), &Seen)| {
        sampling.penalize(row, seen);
        sampling.choose(row, *draw)
    };
    rows.zip(choices).zip(seen).map(row).collect()
}

impl Memory {
    fn cpu(&mut self) -> &mut Turns<Owned> {
        match self {
            Memory::Cpu(turns) => turns,
            Memory::Cuda(_) => unreachable!("sessions are where their model is"),
        }
    }

    fn cuda(&mut self) -> &mut Turns<Buffer> {
        match self {
            Memory::Cuda(turns) => turns,
            Memory::Cpu(_) => unreachable!("sessions are where their model is"),
        }
    }
}

impl Model {
    fn lane(&self) -> Result<Lane> {
        match self.device() {
            Some(device) => device.lane(),
            None => unreachable!("only models on a device are asked"),
        }
    }
}

fn prefill<P: Place>(
    layers: &Layers<P>,
    input: Input,
    turns: &mut Turns<P::Owned>,
    to: Option<Target<P>>,
    tally: &Tally,
) -> Result<()> {
    let x = layers.take(input)?;
    let rows = P::view(&x).spec().shape[0];
    let h = layers.run(x, 1, Some(turns.states()), tally)?;
    to.map_or(Ok(()), |to| layers.finish(&P::rows(&P::view(&h), rows - 1..rows)?, to))?;
    tally.add_at(layers.place)
}

/// Adds the losses of a chunk of tokens to `sum`.
fn loss<P: Learn>(
    layers: &Layers<P>,
    tokens: &[u32],
    turns: &mut Turns<P::Owned>,
    sum: &mut f64,
    tally: &Tally,
) -> Result<()> {
    let (read, next) = (&tokens[..tokens.len() - 1], &tokens[1..]);
    let h = layers.run(layers.embed(read)?, 1, Some(turns.states()), tally)?;
    let mut logits = layers.logits(read.len())?;
    layers.head(&P::view(&h), P::view_mut(&mut logits))?;
    *sum += layers.place.cross_entropy(P::view_mut(&mut logits), next, None)?;
    if sum.is_finite() {
        return tally.add_at(layers.place);
    }
    Err(Error::new(Kind::Argument, "logits").expected("finite numbers").got(format_args!("those of a loss of {sum}")))
}

fn step<P: Place>(layers: &Layers<P>, input: Input, turns: Vec<&mut Turns<P::Owned>>, to: Target<P>) -> Result<()> {
    let x = layers.take(input)?;
    let mut states: Vec<_> = turns.into_iter().map(Turns::states).collect();
    layers.place.of_rows(states.len(), || {
        let h = layers.step(x, &mut states)?;
        layers.finish(&P::view(&h), to)
    })
}
