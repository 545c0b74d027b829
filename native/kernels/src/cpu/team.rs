//! Threads that wait awake for the calls of [`for_each`](super::pool::for_each): work that comes in many short calls, such as a
//! step of a model, does not wait for another thread to wake in each of them. A caller can have a team of its own; a crew is for
//! one caller after the other, and sleeps when none has come for a while.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Helpers and their caller, who gives them one job at a time.
#[derive(Default)]
pub struct Team {
    /// Jobs that there were.
    jobs: AtomicUsize,
    open: AtomicBool,
    /// Helpers that are at work on the present job.
    busy: AtomicUsize,
    present: Mutex<Present>,
    /// Helpers that may be asleep.
    sleepers: Vec<Sleeper>,
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
        let team = Arc::new(Team { open: AtomicBool::new(true), ..Team::default() });
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
        self.jobs.fetch_add(1, Ordering::SeqCst);
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
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A helper that may be asleep.
#[derive(Default)]
struct Sleeper {
    thread: OnceLock<Thread>,
    asleep: AtomicBool,
}

impl Sleeper {
    /// Called by whoever changed what it waits for.
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Sleeps for as long as it is to wait; called by the helper alone.
    fn sleep(&self, waits: impl Fn() -> bool) {
        self.thread.get_or_init(thread::current);
        loop {
            // Anew each time: somebody may have come late to wake it for what it has seen already.
            self.asleep.store(true, Ordering::SeqCst);
            if !waits() {
                break;
            }
            thread::park();
        }
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// How long a crew waits awake: a good part of what waking it takes, and what lies between an op and the next one of a program
/// that calls them one by one.
const LINGER: Duration = Duration::from_micros(150);

/// Helpers who serve one caller after the other, with threads of their own.
pub struct Crew {
    team: Team,
    taken: Mutex<()>,
    /// How long helpers stay awake. More threads than cores would take these from those who work.
    linger: Duration,
}

impl Crew {
    /// For so many threads, the caller among them, on so many cores.
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

    /// Calls `job(i)` as [`run`] does. Returns false where another caller has the crew.
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
            while team.jobs.load(Ordering::SeqCst) == seen && since.elapsed() < self.linger {
                waiting.a_little();
            }
            team.sleepers[own - 1].sleep(|| team.jobs.load(Ordering::SeqCst) == seen);
            seen = team.jobs.load(Ordering::SeqCst);
            team.help(own);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn a_crew_wakes_for_each_call() {
        for cores in [1, 3] {
            let crew = Crew::new(3, cores).unwrap();
            for pause in [0, 0, 0, 100, 150, 200, 1000].repeat(30) {
                thread::sleep(Duration::from_micros(pause));
                let all = Barrier::new(3);
                assert!(crew.run(3, &|_| _ = all.wait()));
            }
        }
    }

    #[test]
    fn a_crew_has_one_caller_at_a_time() {
        let crew = Crew::new(2, 2).unwrap();
        let within = AtomicUsize::new(0);
        assert!(crew.run(2, &|_| _ = within.fetch_add(usize::from(crew.run(2, &|_| ())), Ordering::Relaxed)));
        assert_eq!(within.into_inner(), 0);
        assert!(std::panic::catch_unwind(|| crew.run(2, &|_| panic!("this one fails"))).is_err());
        assert!(crew.run(2, &|_| ()));
    }
}
