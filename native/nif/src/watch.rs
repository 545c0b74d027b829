//! Calls that report to a process, and that end early: with the process that called, or by a cancellation.

use crate::answer::answer;
use crate::tensor::describe;
use rustler::{Encoder, Env, LocalPid, Monitor, Resource, ResourceArc, Term};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_models::watch::{Stage, Watch};
use std::sync::atomic::{AtomicBool, Ordering};

mod atoms {
    rustler::atoms! { sidewinder_progress, stage, done, total }
}

/// Whether calls are to end. It is cancelled for good, by request or with the process that it monitors.
pub struct Cancellation(AtomicBool);

impl Resource for Cancellation {
    const IMPLEMENTS_DOWN: bool = true;

    fn down(&self, _env: Env, _pid: LocalPid, _monitor: Monitor) {
        self.cancel();
    }
}

impl Cancellation {
    fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Makes a cancellation that monitors a process, unless it is `nil`.
#[rustler::nif]
fn cancellation_new(env: Env, owner: Option<LocalPid>) -> Term {
    answer(env, || {
        let cancellation = ResourceArc::new(Cancellation(AtomicBool::new(false)));
        if owner.is_some_and(|owner| cancellation.monitor(Some(env), &owner).is_none()) {
            cancellation.cancel();
        }
        Ok(cancellation)
    })
}

/// Cancels.
#[rustler::nif]
fn cancellation_cancel(env: Env, cancellation: ResourceArc<Cancellation>) -> Term {
    answer(env, || {
        cancellation.cancel();
        Ok(())
    })
}

/// Whether it is cancelled.
#[rustler::nif]
fn cancellation_cancelled(cancellation: ResourceArc<Cancellation>) -> bool {
    cancellation.is_cancelled()
}

/// A watched call: the process that gets reports, with what it knows them by, and what cancels the call.
pub struct Call<'a> {
    env: Env<'a>,
    caller: LocalPid,
    reader: Option<(LocalPid, Term<'a>)>,
    cancels: Vec<ResourceArc<Cancellation>>,
}

impl<'a> Call<'a> {
    /// Decodes `{pid or nil, tag, cancellations}`.
    pub fn decode(env: Env<'a>, term: Term<'a>) -> Result<Call<'a>> {
        let decoded = term.decode::<(Option<LocalPid>, Term, Vec<ResourceArc<Cancellation>>)>();
        let (pid, tag, cancels) = decoded.map_err(|_| {
            Error::new(Kind::Argument, "watch")
                .expected("a process of this node, a tag and cancellations")
                .got(describe(term))
        })?;
        Ok(Call { env, caller: env.pid(), reader: pid.map(|pid| (pid, tag)), cancels })
    }

    fn is_over(&self) -> bool {
        self.cancels.iter().any(|cancellation| cancellation.is_cancelled()) || !self.caller.is_alive(self.env)
    }
}

impl Watch for Call<'_> {
    fn exact(&self) -> bool {
        self.reader.is_some() || !self.cancels.is_empty()
    }

    fn report(&self, stage: Stage, done: usize, total: usize) -> Result<()> {
        if self.is_over() {
            return Err(Error::new(Kind::Cancelled, stage.name())
                .got(format_args!("a cancellation after {done} of {total} parts"))
                .hint("What the call was to change is as it was before"));
        }
        if let Some((pid, tag)) = &self.reader {
            // A process that has ended needs no reports.
            let _ = self.env.send(pid, self.message(*tag, stage, done, total));
        }
        Ok(())
    }
}

impl<'a> Call<'a> {
    fn message(&self, tag: Term<'a>, stage: Stage, done: usize, total: usize) -> Term<'a> {
        let env = self.env;
        let name = rustler::Atom::from_str(env, stage.name()).expect("a short name");
        let pairs = [
            (atoms::stage(), name.encode(env)),
            (atoms::done(), done.encode(env)),
            (atoms::total(), total.encode(env)),
        ];
        let report = Term::map_from_pairs(env, &pairs).expect("distinct keys");
        (atoms::sidewinder_progress(), tag, report).encode(env)
    }
}
