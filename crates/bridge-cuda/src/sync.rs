//! What threads share: of the standard library, and of shuttle where it explores the models (`models.rs`).

#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard, atomic::AtomicUsize},
    thread,
};

#[cfg(not(shuttle))]
pub(crate) use std::thread::sleep as rest;

#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{Condvar, Mutex, MutexGuard, atomic::AtomicUsize},
    thread,
};

/// Lets other threads go on, because a model has no time.
#[cfg(shuttle)]
pub(crate) fn rest(_: std::time::Duration) {
    thread::yield_now();
}
