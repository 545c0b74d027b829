//! Threads that busy-wait for the calls of [`for_each`](super::pool::for_each). Work that comes in many short calls,
//! such as a step of a model, then does not pay for waking threads in each call. A caller can own a [`Team`]. A
//! [`Crew`] is a shared thread pool: it serves one caller at a time, and sleeps when no call has come for a while.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// A value in cache lines of its own (processors fetch two at a time): what one thread writes often shall not take away
/// what another one reads.
#[derive(Default)]
#[repr(align(128))]
pub struct Apart<T>(pub T);

/// Helper threads and their caller, which gives them one job at a time.
#[derive(Default)]
pub struct Team {
    /// Number of jobs so far.
    jobs: Apart<AtomicUsize>,
    open: AtomicBool,
    /// Helpers that are working on the current job.
    busy: Apart<AtomicUsize>,
    present: Apart<Mutex<Present>>,
    /// The wakers of helpers that may be asleep.
    sleepers: Vec<Sleeper>,
}

type Job<'j> = &'j (dyn Fn(usize) + Sync);

#[derive(Default)]
struct Present {
    job: Option<Job<'static>>,
    /// Threads that the job is for, including the caller.
    threads: usize,
    /// The payload of a helper's panic.
    panic: Option<Box<dyn Any + Send>>,
}

thread_local! {
    /// The team of this thread; empty while the thread works on one of its jobs.
    static MINE: Cell<Option<Arc<Team>>> = const { Cell::new(None) };
}

/// Whether this thread has helpers.
pub fn is_there() -> bool {
    let team = MINE.take();
    let there = team.is_some();
    MINE.set(team);
    there
}

/// Calls `job(i)` for all `i` below `threads` in parallel. Helpers that are late may miss their call, so the calls that
/// run must complete all the work. Returns false where this thread has no helpers.
pub fn run(threads: usize, job: Job) -> bool {
    // Calls within the job find no team.
    let Some(team) = MINE.take() else { return false };
    team.run(threads, job);
    MINE.set(Some(team));
    true
}

/// Makes a new team this thread's team, until it is dropped.
pub(crate) struct Mine(Arc<Team>);

impl Mine {
    /// A team without helpers; a thread becomes one by calling [`serve`](Team::serve).
    pub(crate) fn new() -> Mine {
        let team = Arc::new(Team { open: AtomicBool::new(true), ..Team::default() });
        MINE.set(Some(team.clone()));
        Mine(team)
    }

    /// The team, to be shared with its helpers.
    pub fn team(&self) -> Arc<Team> {
        self.0.clone()
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        MINE.set(None);
        self.0.open.store(false, Ordering::Release);
    }
}

impl Team {
    /// Runs jobs as helper `own` of the team until the team is closed.
    pub fn serve(&self, own: usize) {
        let (mut seen, mut waiting) = (0, Waiting(0));
        while self.open.load(Ordering::Acquire) {
            let jobs = self.jobs.0.load(Ordering::Acquire);
            if jobs == seen {
                waiting.a_little();
                continue;
            }
            (seen, waiting) = (jobs, Waiting(0));
            self.help(own);
        }
    }

    fn help(&self, own: usize) {
        let Some(job) = self.enter(own) else { return };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(own))) {
            self.present().panic = Some(panic);
        }
        self.busy.0.fetch_sub(1, Ordering::Release);
    }

    /// The current job. It does not end before this helper has left it.
    fn enter(&self, own: usize) -> Option<Job<'static>> {
        let present = self.present();
        let job = present.job.filter(|_| own < present.threads)?;
        self.busy.0.fetch_add(1, Ordering::Relaxed);
        Some(job)
    }

    fn run(&self, threads: usize, job: Job) {
        // SAFETY: the job leaves `present` before its borrow ends. `Leaving` removes it and waits for the helpers that
        // hold it on every path out of this function.
        let lasting = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        *self.present() = Present { job: Some(lasting), threads, panic: None };
        self.jobs.0.fetch_add(1, Ordering::SeqCst);
        self.sleepers.iter().take(threads - 1).for_each(Sleeper::wake);
        let leaving = Leaving(self);
        job(0);
        drop(leaving);
        let panic = self.present().panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn present(&self) -> MutexGuard<'_, Present> {
        self.present.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The waker of a helper that may be asleep.
#[derive(Default)]
struct Sleeper {
    thread: OnceLock<Thread>,
    asleep: AtomicBool,
}

impl Sleeper {
    /// Called after a change of what the helper waits for.
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Sleeps while `waits()` is true; only the helper itself calls this.
    fn sleep(&self, waits: impl Fn() -> bool) {
        self.thread.get_or_init(thread::current);
        loop {
            // Set in each round: a late waker may have cleared it for a change that this helper has seen already.
            self.asleep.store(true, Ordering::SeqCst);
            if !waits() {
                break;
            }
            thread::park();
        }
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// How long helpers busy-wait before they sleep. It covers a good part of the cost of waking one, and the gap between
/// two ops of a program that calls them one by one.
const LINGER: Duration = Duration::from_micros(150);

/// A pool of helper threads that serves one caller at a time.
pub struct Crew {
    team: Team,
    taken: Mutex<()>,
    /// How long helpers busy-wait. With more threads than cores they would take cores from working threads.
    linger: Duration,
}

impl Crew {
    /// A pool of `threads` threads, including the caller, on `cores` cores.
    pub fn new(threads: usize, cores: usize) -> std::io::Result<Arc<Crew>> {
        let sleepers = (1..threads).map(|_| Sleeper::default()).collect();
        let linger = if threads <= cores { LINGER } else { Duration::ZERO };
        let crew = Arc::new(Crew { team: Team { sleepers, ..Team::default() }, taken: Mutex::default(), linger });
        for own in 1..threads {
            let crew = crew.clone();
            thread::Builder::new().name(format!("sidewinder-crew-{own}")).spawn(move || crew.serve(own))?;
        }
        Ok(crew)
    }

    /// Calls `job(i)` as [`run`] does. Returns false where another caller is using the pool.
    pub fn run(&self, threads: usize, job: Job) -> bool {
        let _taken = match self.taken.try_lock() {
            Ok(taken) => taken,
            Err(TryLockError::Poisoned(taken)) => taken.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        self.team.run(threads, job);
        true
    }

    fn serve(&self, own: usize) {
        let team = &self.team;
        let mut seen = 0;
        loop {
            let (mut waiting, since) = (Waiting(0), Instant::now());
            while team.jobs.0.load(Ordering::SeqCst) == seen && since.elapsed() < self.linger {
                waiting.a_little();
            }
            team.sleepers[own - 1].sleep(|| team.jobs.0.load(Ordering::SeqCst) == seen);
            seen = team.jobs.0.load(Ordering::SeqCst);
            team.help(own);
        }
    }
}

struct Leaving<'t>(&'t Team);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.present().job = None;
        let mut waiting = Waiting(0);
        while self.0.busy.0.load(Ordering::Acquire) > 0 {
            waiting.a_little();
        }
    }
}

/// Counts the rounds of busy-waiting.
struct Waiting(usize);

impl Waiting {
    /// Spins for one round; after `PATIENT` rounds it yields, as other threads may need this core.
    fn a_little(&mut self) {
        const PATIENT: usize = 200;
        self.0 += 1;
        if self.0 < PATIENT { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}
