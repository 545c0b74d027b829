//! Loading and upgrading the library.
//!
//! Erlang loads a module's library again with each new version of the module. An equal library is in memory by then and
//! keeps its state: the resources that Elixir holds are taken over. Another build of the library cannot take them over,
//! since its types may have another layout: it refuses to load, and the old module stays in use. `rustler::init!` has
//! no upgrade, so this file does what that macro does.

use crate::{answer, files, held, mamba, tensor, tokenizer, watch};
use rustler::codegen_runtime::{ErlNifEntry, ErlNifEnv, ErlNifTerm, ResourceRegistration, c_int, c_void};
use rustler::codegen_runtime::{internal_write_symbols, inventory};
use rustler::sys::{ErlNifMonitor, ErlNifPid, ErlNifResourceFlags, ErlNifResourceTypeInit, enif_open_resource_type_x};
use rustler::{Env, LocalPid, Monitor, Resource};
use std::any::type_name;
use std::ffi::CString;
use std::mem::{MaybeUninit, align_of};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// The address of this static identifies the library among others in memory.
static HERE: u8 = 0;

/// Erlang calls this function first, each time it loads the library.
#[unsafe(no_mangle)]
extern "C" fn nif_init() -> *const ErlNifEntry {
    // SAFETY: Erlang calls this before anything else of the library.
    unsafe { internal_write_symbols() };
    let functions: Vec<_> = inventory::iter::<rustler::Nif>().map(rustler::Nif::get_def).collect();
    let mut entry = ErlNifEntry::new(c"Elixir.Sidewinder.Native", functions.leak(), load);
    entry.upgrade = Some(upgrade);
    Box::leak(Box::new(entry))
}

unsafe extern "C" fn load(env: *mut ErlNifEnv, data: *mut *mut c_void, _: ErlNifTerm) -> c_int {
    answer::keep_panics_quiet();
    // SAFETY: `data` is Erlang's memory for the value that an upgrade gets.
    unsafe { *data = here() };
    open(env)
}

unsafe extern "C" fn upgrade(
    env: *mut ErlNifEnv,
    data: *mut *mut c_void,
    old: *mut *mut c_void,
    _: ErlNifTerm,
) -> c_int {
    // SAFETY: both pointers are to Erlang's memory, and `old` holds what the running library has stored.
    let same = unsafe {
        *data = here();
        *old == here()
    };
    if same { open(env) } else { 1 }
}

fn here() -> *mut c_void {
    (&raw const HERE).cast_mut().cast()
}

/// Registers all types of resources; returns zero on success.
fn open(env: *mut ErlNifEnv) -> c_int {
    // SAFETY: `env` is from Erlang's call of `load` or `upgrade`, in which types may be opened.
    let env = unsafe { Env::new_init_env(&env, env) };
    let opened = [
        open_type::<tensor::DeviceBuffer>(env),
        open_type::<held::Held>(env),
        open_type::<files::HeldWriter>(env),
        open_type::<mamba::HeldModel>(env),
        open_type::<mamba::HeldSession>(env),
        open_type::<mamba::HeldTrainer>(env),
        open_type::<tokenizer::HeldTokenizer>(env),
        open_type::<watch::Cancellation>(env),
    ];
    c_int::from(opened.contains(&false))
}

/// Takes a type over from the previous version of the module, or creates it.
fn open_type<T: Resource>(env: Env) -> bool {
    // Types of another build of the library must have other names.
    let name = format!("{} {:p}", type_name::<T>(), here());
    taken_over::<T>(env, &name) || {
        // On the first load the type is created.
        ResourceRegistration::new::<T>().with_name(name.leak()).register(env).is_ok()
    }
}

fn taken_over<T: Resource>(env: Env, name: &str) -> bool {
    let name = CString::new(name).expect("no zero in it");
    let down = if T::IMPLEMENTS_DOWN { down::<T> as *const _ } else { ptr::null() };
    let callbacks = ErlNifResourceTypeInit { dtor: destroy::<T> as *const _, stop: ptr::null(), down };
    let flags = ErlNifResourceFlags::ERL_NIF_RT_TAKEOVER;
    let mut tried = MaybeUninit::uninit();
    // SAFETY: all pointers are valid until the call returns. `destroy` and `down` fit the type, whose name identifies this
    // library. The type's pointer does not change, so rustler's registration stays valid.
    let taken = unsafe {
        enif_open_resource_type_x(env.as_c_arg(), name.as_ptr().cast(), &callbacks, flags, tried.as_mut_ptr())
    };
    !taken.is_null()
}

/// The destructor of a resource, as in rustler, which does not export its own.
unsafe extern "C" fn destroy<T>(_env: *mut ErlNifEnv, place: *mut c_void) {
    // SAFETY: Erlang passes a resource of this type for the last time.
    let value: T = unsafe { ptr::read(value_in(place)) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(value)));
}

/// Tells a resource that a process it monitors has ended, as in rustler.
unsafe extern "C" fn down<T: Resource>(
    env: *mut ErlNifEnv,
    place: *mut c_void,
    pid: *const ErlNifPid,
    monitor: *const ErlNifMonitor,
) {
    // SAFETY: Erlang passes a resource of this type, and an environment, a process and a monitor for this call.
    let (value, env, pid, monitor) = unsafe {
        let (pid, monitor) = (LocalPid::from_c_arg(*pid), Monitor::from_c_arg(*monitor));
        (&*value_in::<T>(place), Env::new(&env, env), pid, monitor)
    };
    let _ = catch_unwind(AssertUnwindSafe(|| value.down(env, pid, monitor)));
}

/// The value of a resource: rustler stores it at the first aligned address after the start.
///
/// # Safety
/// `place` is the start of a resource of this type.
unsafe fn value_in<T>(place: *mut c_void) -> *mut T {
    let align = align_of::<T>();
    // SAFETY: rustler allocates `align` more bytes than the value has.
    unsafe { place.byte_add(align - place.addr() % align).cast() }
}
