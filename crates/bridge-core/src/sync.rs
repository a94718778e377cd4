//! What threads share: of the standard library, and of shuttle where it explores the models.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test … models` runs them, as `cargo xtask audit` does. `Arc` is the standard
//! library's everywhere, because the interface names it. So are the counts of the process, which order nothing.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic::AtomicUsize};

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicUsize};

/// Explores a model: runs it under many schedules, the same at every call.
///
/// # Panics
///
/// With the schedule of the first run that panics or does not end.
#[cfg(shuttle)]
#[doc(hidden)]
pub fn explore(model: impl Fn() + Send + Sync + 'static) {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use shuttle::{Config, Runner};
    const RUNS: usize = 3_000;
    /// Bytes of the stack of each thread: what reads a socket has buffers on it.
    const STACK: usize = 1 << 18;
    let config = || {
        let mut config = Config::new();
        config.stack_size = STACK;
        config
    };
    let model = std::sync::Arc::new(model);
    let shared = std::sync::Arc::clone(&model);
    Runner::new(RandomScheduler::new_from_seed(1, RUNS), config()).run(move || shared());
    // Priorities, which change at one step less than the depth: they find what takes few changes of the thread.
    for depth in 1..=3 {
        let shared = std::sync::Arc::clone(&model);
        Runner::new(PctScheduler::new_from_seed(1, depth, RUNS), config()).run(move || shared());
    }
}
