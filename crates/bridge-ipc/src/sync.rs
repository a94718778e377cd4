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
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    use std::ptr;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    use std::time::{Duration, Instant};
    pub(crate) use std::{thread, thread_local};

    /// Returns the number of this process. It is kept in a page that the system clears in a fork: to ask the system for
    /// it takes longer than a conversion may, and a share of many tensors asks for each of them.
    pub(crate) fn process() -> u32 {
        /// `None` where the system cannot clear pages in forks, before Linux 4.14.
        static KNOWN: OnceLock<Option<&AtomicU32>> = OnceLock::new();
        let Some(known) = KNOWN.get_or_init(cleared_in_forks) else { return std::process::id() };
        match known.load(Relaxed) {
            0 => {
                let own = std::process::id();
                known.store(own, Relaxed);
                own
            }
            own => own,
        }
    }

    /// Returns a number in its own page, which is 0 here and again in every fork.
    fn cleared_in_forks() -> Option<&'static AtomicU32> {
        // The system rounds it up to a page, whatever that is.
        let length = size_of::<AtomicU32>();
        // SAFETY: a fresh mapping at an address that the system chooses.
        let page = unsafe {
            mmap_anonymous(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).ok()?
        };
        // SAFETY: the page was just mapped and holds nothing yet.
        unsafe { madvise(page, length, Advice::LinuxWipeOnFork).ok()? };
        // SAFETY: the page is mapped, aligned and zero, is never unmapped, and is used only through this atomic.
        Some(unsafe { &*page.cast::<AtomicU32>() })
    }

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
