//! Work that callers add and a thread of this library does.

use crate::sync::{Condvar, Mutex, MutexGuard};
use std::mem;
use std::sync::PoisonError;

/// Work for one thread, which starts with the first.
#[derive(Default)]
pub(crate) struct Queue<W> {
    state: Mutex<State<W>>,
    changed: Condvar,
}

#[derive(Default)]
struct State<W> {
    work: W,
    /// Whether the thread runs.
    thread: bool,
    /// Whether the thread waits for work.
    sleeps: bool,
    /// Whether the owner of the queue has been dropped.
    closed: bool,
}

impl<W> Queue<W> {
    fn lock(&self) -> MutexGuard<'_, State<W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what `look` finds in the work.
    pub fn with<R>(&self, look: impl FnOnce(&mut W) -> R) -> R {
        look(&mut self.lock().work)
    }

    /// Adds work, and wakes the thread. Where it does not run yet, `start` starts it; `add` receives whether it runs.
    pub fn add<R>(&self, start: impl FnOnce() -> bool, add: impl FnOnce(&mut W, bool) -> R) -> R {
        let (added, wake) = {
            let state = &mut *self.lock();
            // If the thread cannot be started, the next call tries again.
            state.thread = state.thread || start();
            (add(&mut state.work, state.thread), mem::take(&mut state.sleeps))
        };
        // Each notification is a call into the kernel.
        if wake {
            self.changed.notify_one();
        }
        added
    }

    /// Waits for work, and returns what `take` takes of it. `None`: the queue is closed and empty.
    pub fn wait<R>(&self, is_empty: impl Fn(&W) -> bool, take: impl FnOnce(&mut W) -> R) -> Option<R> {
        let mut state = self.lock();
        while is_empty(&state.work) {
            if state.closed {
                return None;
            }
            state.sleeps = true;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.sleeps = false;
        Some(take(&mut state.work))
    }

    /// Lets the thread end once it has done its work.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::fake::eventually;
    use std::sync::Arc;

    #[test]
    fn a_closed_queue_ends_its_thread_after_the_work() {
        let queue = Arc::new(Queue::<Vec<i32>>::default());
        let other = Arc::clone(&queue);
        let thread = std::thread::spawn(move || {
            let take = || other.wait(Vec::is_empty, mem::take);
            std::iter::from_fn(take).flatten().collect::<Vec<_>>()
        });
        queue.add(|| true, |work, _| work.push(1));
        eventually("the thread waits", || queue.with(|work| work.is_empty()) && queue.lock().sleeps);
        queue.close();
        eventually("the thread has ended", || thread.is_finished());
        assert_eq!(thread.join().unwrap(), [1]);
    }
}
