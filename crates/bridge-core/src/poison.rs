//! Overwrites memory that is freed, so that a reader that comes too late finds it out.
//!
//! Off by default. While it is on, memory that this library allocated itself is filled with [`BYTE`] before it is
//! freed, on a device in stream order. Memory of frameworks is not touched here: an adapter does not know who else owns
//! it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

static ON: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);

/// What freed memory is filled with. Floats of any width are then NaN, signed integers -1, and a `bool` is invalid.
pub const BYTE: u8 = 0xff;

/// Turns it on or off, for the whole process.
pub fn set(on: bool) {
    ON.store(on, Relaxed);
}

/// Returns whether it is on.
pub fn is_on() -> bool {
    ON.load(Relaxed)
}

/// Counts one piece of memory that was filled.
pub fn filled() {
    COUNT.fetch_add(1, Relaxed);
}

/// Returns how many pieces of memory this process has filled.
pub fn count() -> u64 {
    COUNT.load(Relaxed)
}
