//! A lock with a deadline for the threads that wait for it.

use super::program::{SLICE, goes_on};
use crate::sync::{Condvar, Mutex, MutexGuard, locked, now};
use bridge_core::Result;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Instant;

/// State that one thread uses at a time, for as long as it waits for another process.
pub(super) struct Turn<T> {
    is_taken: Mutex<bool>,
    free: Condvar,
    /// Locked by the thread whose turn it is, so that none waits for this lock.
    state: Mutex<T>,
}

/// The state, in the hands of one thread.
pub(super) struct Taken<'a, T> {
    state: MutexGuard<'a, T>,
    /// Dropped after the lock.
    _turn: Ends<'a>,
}

/// The drop makes it the turn of another thread.
struct Ends<'a> {
    is_taken: &'a Mutex<bool>,
    free: &'a Condvar,
}

impl<T> Turn<T> {
    pub(super) fn new(state: T) -> Self {
        Self { is_taken: Mutex::new(false), free: Condvar::new(), state: Mutex::new(state) }
    }

    /// Waits until `until`; `None` where other threads use the state until then.
    ///
    /// # Errors
    ///
    /// Those of the program's hook, which decides whether the wait goes on.
    pub(super) fn wait(&self, until: Instant) -> Result<Option<Taken<'_, T>>> {
        let mut is_taken = locked(&self.is_taken);
        while *is_taken {
            let left = until.saturating_duration_since(now());
            if left.is_zero() {
                return Ok(None);
            }
            let waited = self.free.wait_timeout(is_taken, left.min(SLICE)).unwrap_or_else(PoisonError::into_inner);
            is_taken = waited.0;
            if waited.1.timed_out() {
                // The program may need the state now, or the lock of its turns.
                drop(is_taken);
                goes_on()?;
                is_taken = locked(&self.is_taken);
            }
        }
        Ok(Some(self.taken(is_taken)))
    }

    /// Waits for as long as other threads use the state. The program is not asked.
    pub(super) fn lock(&self) -> Taken<'_, T> {
        let is_taken = locked(&self.is_taken);
        self.taken(self.free.wait_while(is_taken, |is_taken| *is_taken).unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns `None` while another thread uses the state.
    pub(super) fn try_lock(&self) -> Option<Taken<'_, T>> {
        let is_taken = locked(&self.is_taken);
        (!*is_taken).then(|| self.taken(is_taken))
    }

    fn taken(&self, mut is_taken: MutexGuard<'_, bool>) -> Taken<'_, T> {
        *is_taken = true;
        drop(is_taken);
        let _turn = Ends { is_taken: &self.is_taken, free: &self.free };
        Taken { state: locked(&self.state), _turn }
    }
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        *locked(self.is_taken) = false;
        self.free.notify_one();
    }
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.state
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.state
    }
}
