//! The counts of the process, for C.

use crate::pointers::write;
use crate::status::{Status, answer};
use bridge_tensorflow::External;

/// Counts of the whole process.
#[repr(C)]
pub struct CCounts {
    /// views made
    pub(crate) leased: u64,
    /// views returned
    pub(crate) released: u64,
    /// how many of those wait for the device
    pub(crate) pending: u64,
    /// views whose memory is never reused, because the driver could not tell when it may be
    pub(crate) leaked: u64,
    /// results of graphs that were not taken yet
    pub(crate) unclaimed: u64,
    /// results that were dropped with their session before they were taken
    pub(crate) reclaimed: u64,
}

/// Returns the counts of this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_stats(out: *mut CCounts) -> Status {
    answer(|| {
        let stats = bridge_core::stats();
        let counts = CCounts {
            leased: stats.leased,
            released: stats.released,
            pending: bridge_cuda::pending_releases() as u64,
            leaked: stats.leaked + bridge_cuda::leaked() as u64,
            unclaimed: External::unclaimed() as u64,
            reclaimed: External::reclaimed(),
        };
        // SAFETY: the caller's obligation.
        unsafe { write(out, counts, "out") }
    })
}
