//! The NIF: it decodes, checks, calls and encodes, and does nothing else. The computations are in the other crates.
//!
//! Every function returns `{:ok, value}` or `{:error, map}` with the fields of [`sidewinder_kernels::error::Error`]; a
//! panic becomes such an error too. Nothing is printed.

/// Declares a function as two NIFs: on the schedulers for work of the CPU, and on those that wait for a GPU.
macro_rules! scheduled {
    ($cpu:ident, $io:ident => $run:ident, $([$name:ident: $($type:tt)+])+) => {
        #[rustler::nif(schedule = "DirtyCpu")]
        fn $cpu<'a>(env: Env<'a>, $($name: $($type)+),+) -> Term<'a> {
            $run(env, $($name),+)
        }

        #[rustler::nif(schedule = "DirtyIo")]
        fn $io<'a>(env: Env<'a>, $($name: $($type)+),+) -> Term<'a> {
            $run(env, $($name),+)
        }
    };
}

mod answer;
mod files;
mod gguf;
mod held;
mod info;
mod load;
mod mamba;
mod ops;
mod parts;
mod tensor;
mod tokenizer;
mod watch;
mod xla;
