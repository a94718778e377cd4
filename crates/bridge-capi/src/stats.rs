//! What this process has lent and given back.

use crate::pointers::put;
use crate::status::{Status, answer};
use bridge_tensorflow::External;

/// `tb_counts`
#[repr(C)]
pub struct Counts {
    pub(crate) leased: u64,
    pub(crate) released: u64,
    pub(crate) retired: u64,
    pub(crate) leaked: u64,
    pub(crate) untaken: u64,
    pub(crate) reclaimed: u64,
}

/// Counts of the whole process.
///
/// # Safety
///
/// `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_stats(out: *mut Counts) -> Status {
    answer(|| {
        let stats = bridge_core::stats();
        let counts = Counts {
            leased: stats.leased,
            released: stats.released,
            retired: bridge_cuda::retired() as u64,
            leaked: stats.leaked + bridge_cuda::leaked() as u64,
            untaken: External::untaken() as u64,
            reclaimed: External::reclaimed(),
        };
        // SAFETY: the caller's obligation.
        unsafe { put(out, counts, "out") }
    })
}
