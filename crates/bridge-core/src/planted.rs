//! Faults that the conformance suite plants into the adapters. Only the feature `planted` compiles them in, and no
//! package that is published enables it.

#[cfg(feature = "planted")]
static PLANTED: std::sync::Mutex<&'static str> = std::sync::Mutex::new("");

/// Plants the fault of this name into this process, instead of the previous one. The empty name plants none.
#[cfg(feature = "planted")]
pub fn plant(name: &'static str) {
    *PLANTED.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = name;
}

/// Returns whether this fault is planted into this process.
#[inline]
pub fn is_planted(name: &str) -> bool {
    #[cfg(feature = "planted")]
    let planted = *PLANTED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    #[cfg(not(feature = "planted"))]
    let planted = "";
    !planted.is_empty() && planted == name
}

#[cfg(feature = "planted")]
static FAILED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Notes that a conversion has failed, for faults that a failure leaves behind.
#[inline]
pub(crate) fn failed() {
    #[cfg(feature = "planted")]
    FAILED.store(true, std::sync::atomic::Ordering::Relaxed);
}

/// Returns whether this fault is planted and a conversion has failed since it returned `true` last.
#[inline]
pub(crate) fn is_left_behind(name: &str) -> bool {
    #[cfg(feature = "planted")]
    return is_planted(name) && FAILED.swap(false, std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(feature = "planted"))]
    is_planted(name)
}
