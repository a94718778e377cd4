//! What watches the transfers of this process: one flag for traces and for `truebridge.debug`.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// What looks at the transfers: some of [`TRACING`] and [`DEBUGGING`].
static ON: AtomicU8 = AtomicU8::new(0);

/// A trace is open.
pub(crate) const TRACING: u8 = 1;
/// `truebridge.debug` is on.
pub(crate) const DEBUGGING: u8 = 2;

/// Turns one of the flags on or off.
pub(crate) fn set(flag: u8, on: bool) {
    if on {
        ON.fetch_or(flag, Relaxed)
    } else {
        ON.fetch_and(!flag, Relaxed)
    };
}

/// Returns whether `truebridge.debug` is on.
pub(crate) fn is_debugging() -> bool {
    ON.load(Relaxed) & DEBUGGING != 0
}

/// Returns whether anything watches. Off, watching costs this one relaxed load.
#[inline(always)]
pub(crate) fn is_on() -> bool {
    ON.load(Relaxed) != 0
}
