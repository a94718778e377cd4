//! Locks, atomics, threads, waits and time: those of the standard library and the system, or of shuttle where it
//! explores the models (`models.rs`).

#[cfg(shuttle)]
mod world;

use std::sync::PoisonError;

#[cfg(not(shuttle))]
pub(crate) use real::*;

#[cfg(shuttle)]
pub(crate) use world::*;

/// Locks, even if a thread panicked with the lock.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(not(shuttle))]
mod real {
    use rustix::event::{PollFd, Timespec};
    pub(crate) use std::process::id as process;
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    use std::time::{Duration, Instant};
    pub(crate) use std::{thread, thread_local};

    /// Returns the time.
    pub(crate) fn now() -> Instant {
        Instant::now()
    }

    /// Waits until one of these descriptors is ready, or for this time; without a time, for ever. Returns how many are
    /// ready.
    pub(crate) fn poll(descriptors: &mut [PollFd<'_>], time: Option<Duration>) -> rustix::io::Result<usize> {
        let time = time.map(|time| Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        rustix::event::poll(descriptors, time.as_ref())
    }
}
