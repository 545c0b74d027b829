//! Threads that wait awake for the calls of [`for_each`](super::pool::for_each) of one caller: work that comes in
//! many short calls, such as a step of a model, does not wait for another thread to wake in each of them.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Helpers and their caller, who gives them one job at a time.
pub struct Team {
    /// Jobs that there were.
    jobs: AtomicUsize,
    open: AtomicBool,
    /// Helpers that are at work on the present job.
    busy: AtomicUsize,
    present: Mutex<Present>,
}

type Job<'j> = &'j (dyn Fn(usize) + Sync);

#[derive(Default)]
struct Present {
    job: Option<Job<'static>>,
    /// Threads that it is for, the caller among them.
    threads: usize,
    /// What a helper panicked with.
    panic: Option<Box<dyn Any + Send>>,
}

thread_local! {
    /// The team of this thread, unless it is at work for it.
    static MINE: Cell<Option<Arc<Team>>> = const { Cell::new(None) };
}

/// Whether this thread has helpers that are awake.
pub fn is_there() -> bool {
    let team = MINE.take();
    let there = team.is_some();
    MINE.set(team);
    there
}

/// Calls `job(i)` for all `i` below `threads` at once, or for some of them where helpers are late: others must do
/// with what they find. Returns false where this thread has no helpers.
pub fn run(threads: usize, job: Job) -> bool {
    // Jobs within the job find no team.
    let Some(team) = MINE.take() else { return false };
    team.run(threads, job);
    MINE.set(Some(team));
    true
}

/// What makes a new team that of this thread, until it is dropped.
pub struct Mine(Arc<Team>);

impl Mine {
    /// A team; its helpers are those threads who [`serve`](Team::serve) it.
    pub fn new() -> Mine {
        let team = Arc::new(Team {
            jobs: AtomicUsize::new(0),
            open: AtomicBool::new(true),
            busy: AtomicUsize::new(0),
            present: Mutex::default(),
        });
        MINE.set(Some(team.clone()));
        Mine(team)
    }

    /// The team, for its helpers.
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
    /// Does jobs as number `own` of the team, as long as there may be any.
    pub fn serve(&self, own: usize) {
        let (mut seen, mut waiting) = (0, Waiting(0));
        while self.open.load(Ordering::Acquire) {
            let jobs = self.jobs.load(Ordering::Acquire);
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
        self.busy.fetch_sub(1, Ordering::Release);
    }

    /// The present job, which from now on does not end before this helper has left it.
    fn enter(&self, own: usize) -> Option<Job<'static>> {
        let present = self.present();
        let job = present.job.filter(|_| own < present.threads)?;
        self.busy.fetch_add(1, Ordering::Relaxed);
        Some(job)
    }

    fn run(&self, threads: usize, job: Job) {
        // SAFETY: it is gone before `job` is: `Leaving` takes it away and waits for those who have it, however this
        // function is left.
        let lasting = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        *self.present() = Present { job: Some(lasting), threads, panic: None };
        self.jobs.fetch_add(1, Ordering::Release);
        let leaving = Leaving(self);
        job(0);
        drop(leaving);
        let panic = self.present().panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn present(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Leaving<'t>(&'t Team);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.present().job = None;
        let mut waiting = Waiting(0);
        while self.0.busy.load(Ordering::Acquire) > 0 {
            waiting.a_little();
        }
    }
}

/// How often somebody has waited.
struct Waiting(usize);

impl Waiting {
    /// Waits awake, and soon lets others run whose core this may be.
    fn a_little(&mut self) {
        const PATIENT: usize = 200;
        self.0 += 1;
        if self.0 < PATIENT { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}
