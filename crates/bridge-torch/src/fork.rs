//! What happens to this crate's locks at a fork: a child must not begin with one that a thread of its parent holds.

use std::any::Any;
use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// Takes a lock, and returns its guard.
pub(crate) type Lock = fn() -> Box<dyn Any>;

static LOCKS: Mutex<Vec<Lock>> = Mutex::new(Vec::new());

/// The guards of the locks, and that of the list.
type Guards = (Vec<Box<dyn Any>>, MutexGuard<'static, Vec<Lock>>);

thread_local! {
    /// What this thread holds while it forks.
    static FORKING: RefCell<Option<Guards>> = const { RefCell::new(None) };
}

fn locks() -> MutexGuard<'static, Vec<Lock>> {
    LOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes this lock at each fork from now on. Call it once for each.
pub(crate) fn watch(lock: Lock) {
    static WATCHED: Once = Once::new();
    locks().push(lock);
    // SAFETY: the functions lock and unlock, which a thread that forks may do.
    WATCHED.call_once(|| unsafe {
        libc::pthread_atfork(Some(before), Some(after), Some(after));
    });
}

unsafe extern "C" fn before() {
    let known = locks();
    let held = (known.iter().map(|lock| lock()).collect(), known);
    let _ = FORKING.try_with(|guards| guards.replace(Some(held)));
}

unsafe extern "C" fn after() {
    let _ = FORKING.try_with(RefCell::take);
}
