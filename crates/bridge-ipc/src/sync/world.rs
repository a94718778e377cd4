//! The threads, the time and the processes of a model.
//!
//! Sockets are the system's, and never block. A wait for one gives the other threads a turn, and time passes at random,
//! so that any question may be given up. A fork loses the threads of its parent where they wait.

use rustix::event::{PollFd, Timespec};
use shuttle::rand::{Rng, thread_rng};
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use shuttle::{thread, thread_local};

std::thread_local! {
    /// The number of the process in this run of a model.
    static PROCESS: Cell<u32> = const { Cell::new(0) };
    /// The time since the first run.
    static CLOCK: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Whether the process has forked.
    static HAS_FORKED: Cell<bool> = const { Cell::new(false) };
    /// Threads that are lost.
    static LOST: Cell<u32> = const { Cell::new(0) };
}

thread_local! {
    /// Whether this thread is the one of a fork.
    static IS_FORK: Cell<bool> = const { Cell::new(false) };
}

/// Longer than a process has to answer.
const STOP: Duration = Duration::from_secs(6);

/// The difference between the number of a process and that of its fork.
const FORK: u32 = 1 << 30;

/// Begins a run with a process that no earlier run had.
#[cfg(test)]
pub(crate) fn begin() {
    static LAST: AtomicU32 = AtomicU32::new(0);
    PROCESS.set(LAST.fetch_add(1, Relaxed) + 1);
    HAS_FORKED.set(false);
    LOST.set(0);
}

/// Returns how many threads are lost.
#[cfg(test)]
pub(crate) fn lost() -> u32 {
    LOST.get()
}

/// Runs the thread of a fork. Meanwhile the other threads are lost, with the locks that they hold. Then their process
/// goes on as if nothing had happened.
#[cfg(test)]
pub(crate) fn fork(body: impl FnOnce()) {
    HAS_FORKED.set(true);
    IS_FORK.with(|is_fork| is_fork.set(true));
    body();
    HAS_FORKED.set(false);
}

/// Threads that answer are of other processes.
fn may_be_lost() {
    let is_of_fork = IS_FORK.with(Cell::get) || thread::current().name() == Some("truebridge-ipc");
    if HAS_FORKED.get() && !is_of_fork {
        LOST.set(LOST.get() + 1);
        while HAS_FORKED.get() {
            thread::yield_now();
        }
    }
}

pub(crate) fn process() -> u32 {
    PROCESS.get() + if IS_FORK.with(Cell::get) { FORK } else { 0 }
}

/// Lets some time pass, and returns it.
pub(crate) fn now() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    CLOCK.set(CLOCK.get() + Duration::from_micros(1));
    *START.get_or_init(Instant::now) + CLOCK.get()
}

pub(crate) fn poll(descriptors: &mut [PollFd<'_>], time: Option<Duration>) -> rustix::io::Result<usize> {
    loop {
        thread::yield_now();
        may_be_lost();
        let ready = rustix::event::poll(descriptors, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        let passed = match (time, thread_rng().gen_range(0..32)) {
            (Some(_), 0) => Some(STOP),
            (time, 1..4) => time.map(|time| time.min(STOP)),
            _ => None,
        };
        CLOCK.set(CLOCK.get() + passed.unwrap_or_default());
        if ready > 0 || passed.is_some() {
            return Ok(ready);
        }
    }
}
