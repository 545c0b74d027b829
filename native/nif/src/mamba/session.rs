//! Sessions, and the choice of tokens.

use super::{Fed, HeldModel};
use crate::answer::answer;
use crate::ops::decode_map;
use crate::tensor::{Output, Tensor, binary};
use crate::watch::Call;
use rustler::{Binary, Encoder, Env, ResourceArc, Term};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::Described;
use sidewinder_models::mamba::sample::Sampling;
use sidewinder_models::mamba::{Session, choose};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A session as a resource, used by one call at a time.
pub struct HeldSession(Mutex<Session>);

impl rustler::Resource for HeldSession {}

impl HeldSession {
    fn lock(&self) -> MutexGuard<'_, Session> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a session in the initial state.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_session(env: Env, model: ResourceArc<HeldModel>) -> Term {
    answer(env, || Ok(ResourceArc::new(HeldSession(Mutex::new(Session::new(&model.0)?)))))
}

scheduled!(mamba_prefill_cpu, mamba_prefill_io => prefill,
    [session: ResourceArc<HeldSession>] [input: Term<'a>] [wanted: bool] [watch: Term<'a>]);

/// Processes a sequence; returns the output of its last row if requested, or `nil`.
fn prefill<'a>(
    env: Env<'a>,
    session: ResourceArc<HeldSession>,
    input: Term<'a>,
    wanted: bool,
    watch: Term<'a>,
) -> Term<'a> {
    answer(env, || {
        let watch = Call::decode(env, watch)?;
        let fed = Fed::decode(input)?;
        let mut session = session.lock();
        if !wanted {
            session.prefill_watched(fed.input()?, None, &watch)?;
            return Ok(rustler::types::atom::nil().encode(env));
        }
        let mut to = Output::new(session.model().output(&[1])?)?;
        session.prefill_watched(fed.input()?, Some(to.view_mut()?), &watch)?;
        Ok(to.into_term(env))
    })
}

scheduled!(mamba_loss_cpu, mamba_loss_io => loss,
    [session: ResourceArc<HeldSession>] [input: Term<'a>] [watch: Term<'a>]);

/// Processes all tokens but the last; returns the mean negative log-likelihood of all but the first.
fn loss<'a>(env: Env<'a>, session: ResourceArc<HeldSession>, input: Term<'a>, watch: Term<'a>) -> Term<'a> {
    answer(env, || session.lock().loss_watched(Fed::decode(input)?.tokens()?, &Call::decode(env, watch)?))
}

scheduled!(mamba_step_cpu, mamba_step_io => step, [sessions: Vec<ResourceArc<HeldSession>>] [input: Term<'a>]);

/// Steps sessions of one model by one token or frame each.
fn step<'a>(env: Env<'a>, sessions: Vec<ResourceArc<HeldSession>>, input: Term<'a>) -> Term<'a> {
    answer(env, || {
        let fed = Fed::decode(input)?;
        let mut locked = lock(&sessions)?;
        let Some(first) = locked.first() else {
            return Err(Error::new(Kind::Argument, "sessions").expected("at least one").got("none"));
        };
        let mut to = Output::new(first.model().output(&[sessions.len()])?)?;
        let mut sessions: Vec<&mut Session> = locked.iter_mut().map(|session| &mut **session).collect();
        Session::step(&mut sessions, fed.input()?, to.view_mut()?)?;
        Ok(to.into_term(env))
    })
}

scheduled!(mamba_next_cpu, mamba_next_io => next,
    [sessions: Vec<ResourceArc<HeldSession>>] [input: Term<'a>] [samplings: Vec<Term<'a>>]);

/// Steps sessions of one language model by one token each, and samples the next token of each, by one map of options
/// per session.
fn next<'a>(
    env: Env<'a>,
    sessions: Vec<ResourceArc<HeldSession>>,
    input: Term<'a>,
    samplings: Vec<Term<'a>>,
) -> Term<'a> {
    answer(env, || {
        let fed = Fed::decode(input)?;
        let mut locked = lock(&sessions)?;
        let samplings = decode_samplings(&samplings)?;
        // The random draw of a token depends on its position in the text.
        let places = locked.iter().map(|session| session.length() + 1);
        let choices: Vec<_> = samplings.into_iter().zip(places).collect();
        let mut sessions: Vec<&mut Session> = locked.iter_mut().map(|session| &mut **session).collect();
        Session::next(&mut sessions, fed.input()?, &choices)
    })
}

/// One set of sampling options per map. Neighbours are mostly equal and are decoded once: decoding takes as long as the
/// GPU's work for a session.
fn decode_samplings(terms: &[Term]) -> Result<Vec<Sampling>> {
    let mut samplings: Vec<Sampling> = Vec::with_capacity(terms.len());
    for (i, term) in terms.iter().enumerate() {
        let same = samplings.last().filter(|_| terms[i - 1] == *term).copied();
        samplings.push(same.map_or_else(|| decode_map("sampling", *term), Ok)?);
    }
    Ok(samplings)
}

/// Locks the sessions, and returns them in the given order. They are locked in the order of their addresses, so that
/// calls cannot deadlock.
fn lock(sessions: &[ResourceArc<HeldSession>]) -> Result<Vec<MutexGuard<'_, Session>>> {
    let mut order: Vec<(usize, &HeldSession)> = sessions.iter().map(|session| &**session).enumerate().collect();
    order.sort_by_key(|(_, session)| &raw const **session as usize);
    if order.windows(2).any(|pair| std::ptr::eq(pair[0].1, pair[1].1)) {
        return Err(Error::new(Kind::Argument, "sessions").expected("each of them once").got("one of them twice"));
    }
    let mut locked: Vec<_> = order.into_iter().map(|(at, session)| (at, session.lock())).collect();
    locked.sort_by_key(|(at, _)| *at);
    Ok(locked.into_iter().map(|(_, guard)| guard).collect())
}

/// Copies a session.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_fork(env: Env, session: ResourceArc<HeldSession>) -> Term {
    answer(env, || Ok(ResourceArc::new(HeldSession(Mutex::new(session.lock().fork()?)))))
}

/// The largest number of sessions in one step whose results have the bits that each would have alone.
#[rustler::nif]
fn mamba_alike(model: ResourceArc<HeldModel>) -> usize {
    model.0.alike()
}

/// Resets a session to the initial state.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_reset(env: Env, session: ResourceArc<HeldSession>) -> Term {
    answer(env, || session.lock().reset())
}

/// The number of tokens or frames that a session has processed.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_length(env: Env, session: ResourceArc<HeldSession>) -> Term {
    answer(env, || Ok(session.lock().length()))
}

/// Serialises a session to a binary.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_dump(env: Env, session: ResourceArc<HeldSession>) -> Term {
    answer(env, || binary(env, &session.lock().dump()?))
}

/// Restores a session from such a binary.
#[rustler::nif(schedule = "DirtyIo")]
fn mamba_restore<'a>(env: Env<'a>, model: ResourceArc<HeldModel>, dump: Binary<'a>) -> Term<'a> {
    answer(env, || Ok(ResourceArc::new(HeldSession(Mutex::new(Session::restore(&model.0, &dump)?)))))
}

/// Checks sampling options.
#[rustler::nif]
fn mamba_sampling<'a>(env: Env<'a>, sampling: Term<'a>) -> Term<'a> {
    answer(env, || decode_map::<Sampling>("sampling", sampling)?.check())
}

/// Samples the next token of a session from a row of its logits.
#[rustler::nif(schedule = "DirtyCpu")]
fn mamba_choose<'a>(env: Env<'a>, session: ResourceArc<HeldSession>, logits: Term<'a>, sampling: Term<'a>) -> Term<'a> {
    answer(env, || {
        let sampling: Sampling = decode_map("sampling", sampling)?;
        sampling.check()?;
        let tensor = Tensor::decode("logits", logits)?;
        let view = tensor.view()?;
        let session = session.lock();
        let width = session.model().config().vocabulary;
        if view.spec().shape[..] != [width] {
            let expected = format_args!("a row of {width} logits").to_string();
            return Err(Error::new(Kind::Shape, "logits").expected(expected).got(view.spec()));
        }
        // The random draw of a token depends on its position in the text.
        let choices = [(sampling, session.length())];
        Ok(choose(&view.cast(view.spec().dtype), &choices, [session.seen()])?[0])
    })
}
