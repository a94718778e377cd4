//! CCounts of the whole process.

use crate::pointers::write;
use crate::status::{Status, answer};
use bridge_tensorflow::External;

/// `tb_counts`
#[repr(C)]
pub struct CCounts {
    pub(crate) leased: u64,
    pub(crate) released: u64,
    pub(crate) retired: u64,
    pub(crate) leaked: u64,
    pub(crate) untaken: u64,
    pub(crate) reclaimed: u64,
}

/// Returns the counts.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_stats(out: *mut CCounts) -> Status {
    answer(|| {
        let stats = bridge_core::stats();
        let counts = CCounts {
            leased: stats.leased,
            released: stats.released,
            retired: bridge_cuda::retired() as u64,
            leaked: stats.leaked + bridge_cuda::leaked() as u64,
            untaken: External::untaken() as u64,
            reclaimed: External::reclaimed(),
        };
        // SAFETY: the caller's obligation.
        unsafe { write(out, counts, "out") }
    })
}
