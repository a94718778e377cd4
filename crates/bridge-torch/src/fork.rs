//! What happens to this crate's locks at a fork: a child must not begin with one that a thread of its parent holds.

use crate::memory::{Exported, exported};
#[cfg(feature = "python")]
use crate::watched::{Views, views};
use std::cell::RefCell;
use std::sync::{MutexGuard, Once};

/// The locks, while this thread forks.
struct Held {
    _exported: MutexGuard<'static, Exported>,
    #[cfg(feature = "python")]
    _views: MutexGuard<'static, Views>,
}

thread_local! {
    static FORKING: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Sees to the locks at each fork from now on.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    // SAFETY: the functions lock and unlock, which a thread that forks may do.
    WATCHED.call_once(|| unsafe {
        libc::pthread_atfork(Some(before), Some(after), Some(after));
    });
}

unsafe extern "C" fn before() {
    let held = || Held {
        _exported: exported(),
        #[cfg(feature = "python")]
        _views: views(),
    };
    let _ = FORKING.try_with(|guards| guards.replace(Some(held())));
}

unsafe extern "C" fn after() {
    let _ = FORKING.try_with(RefCell::take);
}
