//! Converts results and panics to terms.

use rustler::{Encoder, Env, Term};
use sidewinder_kernels::error::{Error, Result};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

mod atoms {
    rustler::atoms! { ok, error, kind, op, argument, expected, got, hint }
}

thread_local! {
    /// The source location of this thread's last panic, which the panic's payload does not contain.
    static PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Records the location of panics instead of printing them.
pub fn keep_panics_quiet() {
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        PLACE.with(|cell| *cell.borrow_mut() = place);
    }));
}

/// Runs `work` and encodes its result, error or panic.
pub fn answer<'a, T: Encoder>(env: Env<'a>, work: impl FnOnce() -> Result<T>) -> Term<'a> {
    let encoded = || work().map(|value| (atoms::ok(), value).encode(env));
    let caught = catch_unwind(AssertUnwindSafe(encoded)).unwrap_or_else(|payload| {
        let place = PLACE.with(RefCell::take);
        Err(Error::panicked(&*payload, &place))
    });
    caught.unwrap_or_else(|error| (atoms::error(), fields(env, &error)).encode(env))
}

fn fields<'a>(env: Env<'a>, error: &Error) -> Term<'a> {
    let kind = rustler::Atom::from_str(env, error.kind.name()).expect("a short name");
    let pairs = [
        (atoms::kind(), kind.encode(env)),
        (atoms::op(), (*error.op).encode(env)),
        (atoms::argument(), (*error.argument).encode(env)),
        (atoms::expected(), (*error.expected).encode(env)),
        (atoms::got(), (*error.got).encode(env)),
        (atoms::hint(), (*error.hint).encode(env)),
    ];
    Term::map_from_pairs(env, &pairs).expect("distinct keys")
}
