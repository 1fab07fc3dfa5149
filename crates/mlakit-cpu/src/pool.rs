//! A thread pool for short parallel sections: `threads - 1` workers and the caller.
//!
//! A section gives task `t` of `n` to worker `w` of `threads` exactly when `w * n / threads <= t <
//! (w + 1) * n / threads`; a single task runs on the caller. Starting one writes a few words and
//! bumps a counter that workers spin on; nothing is allocated and no lock is taken. A worker that
//! sees no section for the spin time parks, and the next section pays one wake-up for it.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// A task function: called with the task's number and the number of the worker that runs it.
pub type Tasks<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// How a pool is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Threads that run tasks, the caller included; 0 means as many as the process may use.
    pub threads: usize,
    /// How long an idle worker, and a caller whose share is done, spins before it parks.
    pub spin: Duration,
}

impl Default for PoolOptions {
    fn default() -> Self {
        PoolOptions { threads: 0, spin: Duration::from_micros(50) }
    }
}

/// A pool of threads. Dropping it joins its workers.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts the workers.
    ///
    /// # Errors
    /// The error of the operating system where a thread cannot be started.
    pub fn new(options: PoolOptions) -> std::io::Result<Pool> {
        let threads = match options.threads {
            0 => thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let seats = (1..threads).map(|_| Seat::default()).collect();
        let shared = Arc::new(Shared {
            epoch: Epoch(AtomicU64::new(0)),
            pending: Pending(AtomicUsize::new(0)),
            section: UnsafeCell::new(None),
            caller: UnsafeCell::new(None),
            caller_parked: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            panic: Mutex::new(None),
            seats,
            threads,
            spin: options.spin,
        });
        let mut pool = Pool { shared, workers: Vec::with_capacity(threads - 1) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let name = format!("mlakit-cpu-{worker}");
            let handle = thread::Builder::new().name(name).spawn(move || shared.work(worker))?;
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    /// Runs `run(task, worker)` for every task below `tasks` and returns when all are done.
    /// `worker < self.threads()`, and no two calls with one worker number overlap.
    ///
    /// Sections of several callers run one after another.
    ///
    /// # Panics
    /// With the payload of a task that panicked, after all tasks were given to their workers and
    /// ended; and when called from inside a task of any pool, which could never end.
    pub fn run(&self, tasks: usize, run: &Tasks<'_>) {
        assert!(!INSIDE.get(), "Pool::run inside a task of a pool");
        if tasks == 0 {
            return;
        }
        let shared = &*self.shared;
        shared.take();
        let _turn = Turn(shared);
        if shared.threads == 1 || tasks == 1 {
            let outcome = shared.run_share(0..tasks, 0, run);
            if let Err(payload) = outcome {
                drop(_turn);
                resume_unwind(payload);
            }
            return;
        }
        shared.publish(tasks, run);
        let own = shared.run_share(share(tasks, 0, shared.threads), 0, run);
        shared.wait_for_workers();
        let outcome = own.err().or_else(|| shared.take_panic());
        drop(_turn);
        if let Some(payload) = outcome {
            resume_unwind(payload);
        }
    }

    /// Threads that run tasks, the caller included.
    pub fn threads(&self) -> usize {
        self.shared.threads
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for handle in self.workers.drain(..) {
            handle.thread().unpark();
            // A worker cannot panic: tasks run under `catch_unwind`.
            let _ = handle.join();
        }
    }
}

thread_local! {
    /// Whether this thread is inside a task.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The tasks of worker `worker`.
fn share(tasks: usize, worker: usize, threads: usize) -> Range<usize> {
    let at = |w: usize| (w as u128 * tasks as u128 / threads as u128) as usize;
    at(worker)..at(worker + 1)
}

/// What workers need of a section. The lifetime of the task function is erased; `Pool::run`
/// outlives every use.
#[derive(Clone, Copy)]
struct Section {
    tasks: usize,
    run: *const Tasks<'static>,
}

/// The number of sections published so far, on its own cache line: workers spin on it.
#[repr(align(128))]
struct Epoch(AtomicU64);

/// Workers that have not finished the current section, on its own cache line.
#[repr(align(128))]
struct Pending(AtomicUsize);

/// One worker's place.
#[derive(Default)]
#[repr(align(128))]
struct Seat {
    parked: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

struct Shared {
    epoch: Epoch,
    pending: Pending,
    /// Written by the caller that holds `taken` while no worker is in a section.
    section: UnsafeCell<Option<Section>>,
    /// The caller to wake, written like `section`.
    caller: UnsafeCell<Option<Thread>>,
    caller_parked: AtomicBool,
    taken: AtomicBool,
    closing: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    seats: Vec<Seat>,
    threads: usize,
    spin: Duration,
}

// SAFETY: `section` and `caller` are written only by the holder of `taken` between sections, that
// is while `pending` is 0, and read by workers after they acquire the epoch that publishes them.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer inside is dereferenced only while the `Pool::run` that made it waits.
unsafe impl Send for Shared {}

/// The right to publish; given back on drop.
struct Turn<'a>(&'a Shared);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

impl Shared {
    /// Waits until no other caller is in a section.
    fn take(&self) {
        while self.taken.swap(true, Ordering::Acquire) {
            thread::yield_now();
        }
    }

    fn publish(&self, tasks: usize, run: &Tasks<'_>) {
        let run: *const Tasks<'_> = run;
        // SAFETY: only the lifetime changes; `Pool::run` does not return before every worker has
        // left the section, so no worker uses it after its end.
        let run = unsafe { std::mem::transmute::<*const Tasks<'_>, *const Tasks<'static>>(run) };
        // SAFETY: this caller holds `taken` and no worker is in a section: nobody reads.
        unsafe { *self.section.get() = Some(Section { tasks, run }) };
        // SAFETY: as above.
        unsafe { *self.caller.get() = Some(thread::current()) };
        self.pending.0.store(self.threads - 1, Ordering::Relaxed);
        self.epoch.0.fetch_add(1, Ordering::SeqCst);
        for seat in &self.seats {
            if seat.parked.load(Ordering::SeqCst)
                && seat.parked.swap(false, Ordering::SeqCst)
                && let Some(thread) = &*seat.thread.lock().unwrap_or_else(|e| e.into_inner())
            {
                thread.unpark();
            }
        }
    }

    /// Runs some tasks; a panic ends the share and is returned.
    fn run_share(
        &self,
        tasks: Range<usize>,
        worker: usize,
        run: &Tasks<'_>,
    ) -> Result<(), Box<dyn Any + Send>> {
        INSIDE.set(true);
        let outcome = catch_unwind(AssertUnwindSafe(|| tasks.for_each(|task| run(task, worker))));
        INSIDE.set(false);
        outcome
    }

    fn wait_for_workers(&self) {
        let done = || self.pending.0.load(Ordering::SeqCst) == 0;
        while !self.spin_until(done) {
            self.caller_parked.store(true, Ordering::SeqCst);
            while !done() && self.caller_parked.load(Ordering::SeqCst) {
                thread::park();
            }
            self.caller_parked.store(false, Ordering::SeqCst);
        }
    }

    fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panic.lock().unwrap_or_else(|e| e.into_inner()).take()
    }

    /// Spins until `done` or the spin time has passed; whether it was done.
    fn spin_until(&self, done: impl Fn() -> bool) -> bool {
        if done() {
            return true;
        }
        let start = Instant::now();
        loop {
            // Reading the clock costs as much as a few dozen spins.
            for _ in 0..64 {
                if done() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.spin {
                return done();
            }
        }
    }

    /// The life of a worker.
    fn work(&self, worker: usize) {
        let seat = &self.seats[worker - 1];
        *seat.thread.lock().unwrap_or_else(|e| e.into_inner()) = Some(thread::current());
        let mut seen = 0;
        loop {
            let moved = || self.epoch.0.load(Ordering::SeqCst) != seen;
            while !self.spin_until(moved) {
                // The flag is set before the epoch is read again, and a caller bumps the epoch
                // before it reads the flag: one of the two sees the other.
                seat.parked.store(true, Ordering::SeqCst);
                while !moved() && seat.parked.load(Ordering::SeqCst) {
                    thread::park();
                }
                seat.parked.store(false, Ordering::SeqCst);
            }
            seen += 1;
            if self.closing.load(Ordering::Relaxed) {
                return;
            }
            self.take_part(worker);
        }
    }

    /// A worker's share of the published section.
    fn take_part(&self, worker: usize) {
        // SAFETY: the acquired epoch published it, and it is not written again before `pending`
        // reaches 0, which needs this worker.
        let Some(section) = (unsafe { *self.section.get() }) else { return };
        // SAFETY: `Pool::run` keeps the function alive until `pending` reaches 0.
        let run = unsafe { &*section.run };
        let tasks = share(section.tasks, worker, self.threads);
        if let Err(payload) = self.run_share(tasks, worker, run) {
            let mut slot = self.panic.lock().unwrap_or_else(|e| e.into_inner());
            slot.get_or_insert(payload);
        }
        // SAFETY: read before the decrement that lets the caller go on and write it again.
        let caller = unsafe { (*self.caller.get()).clone() };
        if self.pending.0.fetch_sub(1, Ordering::SeqCst) == 1
            && self.caller_parked.swap(false, Ordering::SeqCst)
            && let Some(caller) = caller
        {
            caller.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn pool(threads: usize, spin_us: u64) -> Pool {
        Pool::new(PoolOptions { threads, spin: Duration::from_micros(spin_us) }).unwrap()
    }

    #[test]
    fn shares_are_contiguous_and_complete() {
        for threads in 1..9 {
            for tasks in 0..40 {
                let mut next = 0;
                for worker in 0..threads {
                    let range = share(tasks, worker, threads);
                    assert_eq!(range.start, next);
                    next = range.end;
                }
                assert_eq!(next, tasks);
            }
        }
    }

    #[test]
    fn every_task_runs_once_on_its_worker() {
        for threads in [1, 2, 3, 7] {
            let pool = pool(threads, 5);
            for tasks in [0, 1, 2, 5, 64, 1001] {
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                pool.run(tasks, &|task, worker| {
                    let one = tasks == 1 || threads == 1;
                    let expected = if one { 0..tasks } else { share(tasks, worker, threads) };
                    assert!(expected.contains(&task));
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn sections_follow_each_other_at_once_and_after_workers_parked() {
        let pool = pool(3, 1);
        let sum = AtomicUsize::new(0);
        for round in 0..2000 {
            pool.run(3, &|task, _| {
                sum.fetch_add(task + 1, Ordering::Relaxed);
            });
            if round % 100 == 0 {
                thread::sleep(Duration::from_micros(300));
            }
        }
        assert_eq!(sum.into_inner(), 6 * 2000);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_still_works() {
        let pool = pool(2, 20);
        for bad in [0, 1] {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(2, &|task, _| assert!(task != bad, "task {bad} fails"));
            }));
            let payload = outcome.unwrap_err();
            let text = payload.downcast_ref::<String>().unwrap();
            assert_eq!(text, &format!("task {bad} fails"));
            let ran = AtomicUsize::new(0);
            pool.run(8, &|_, _| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.into_inner(), 8);
        }
    }

    #[test]
    fn a_section_inside_a_task_is_refused() {
        let outer = pool(2, 20);
        let inner = pool(1, 20);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            outer.run(2, &|_, _| inner.run(1, &|_, _| {}));
        }));
        assert!(outcome.is_err());
        inner.run(1, &|_, _| {});
    }

    #[test]
    fn several_callers_share_a_pool() {
        let pool = pool(2, 5);
        let busy = [const { AtomicBool::new(false) }; 2];
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(4, &|_, worker| {
                            assert!(!busy[worker].swap(true, Ordering::SeqCst), "overlap");
                            total.fetch_add(1, Ordering::Relaxed);
                            busy[worker].store(false, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 3 * 200 * 4);
    }
}
