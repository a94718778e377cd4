//! State of a process that its forks do not have.

use crate::sync::{self, Mutex, MutexGuard, locked};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// State of this process under a lock. A fork begins with its own state. The state of its parent may be locked for
/// ever, by a thread that the fork does not have, and what it holds is the parent's.
pub(crate) struct Own<T>(AtomicPtr<Of<T>>);

/// The state of one process. It is never freed: a fork leaves that of its parent as it is.
struct Of<T> {
    process: u32,
    state: Mutex<T>,
}

impl<T: Default + Send + 'static> Own<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    pub(crate) fn lock(&'static self) -> MutexGuard<'static, T> {
        locked(&self.of(sync::process()).state)
    }

    /// Returns whether neither this process nor one that it was forked from has locked the state. It asks the system for
    /// nothing: a call of the system costs more than a conversion may.
    pub(crate) fn is_untouched(&self) -> bool {
        self.0.load(Ordering::Acquire).is_null()
    }

    fn of(&'static self, process: u32) -> &'static Of<T> {
        let mut known = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: it is null, or comes from the leaked box below, which is never freed or borrowed mutably.
            if let Some(found) = unsafe { known.as_ref() }.filter(|known| known.process == process) {
                return found;
            }
            // A thread that loses the race below leaves a few bytes.
            let own = Box::into_raw(Box::new(Of { process, state: Mutex::default() }));
            match self.0.compare_exchange(known, own, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => known = own,
                Err(other) => known = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread of the parent holds the lock, and what it guards is half done.
    #[test]
    fn a_fork_waits_for_no_thread_of_its_parent() {
        static STATE: Own<Vec<u8>> = Own::new();
        assert!(STATE.is_untouched());
        let mut held = STATE.lock();
        assert!(!STATE.is_untouched());
        held.push(1);
        // SAFETY: the child takes no lock of another thread, and ends.
        let fork = unsafe { libc::fork() };
        if fork == 0 {
            // SAFETY: it ends a child that waits.
            unsafe { libc::alarm(20) };
            let is_empty = STATE.lock().is_empty();
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(i32::from(!is_empty)) };
        }
        let mut status = 0;
        // SAFETY: the pointer is to the status.
        assert_eq!(unsafe { libc::waitpid(fork, &mut status, 0) }, fork);
        assert_eq!(status, 0);
        drop(held);
        assert_eq!(*STATE.lock(), [1]);
    }
}
