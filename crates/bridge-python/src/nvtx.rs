//! Ranges of NVTX, NVIDIA's annotations for profilers, around the calls that are recorded.

use libloading::Library;
use std::ffi::{CString, c_char, c_int};
use std::sync::OnceLock;

/// `nvtxRangePushA` and `nvtxRangePop` (NVTX 3, `nvToolsExt.h`), of a library that stays loaded.
struct Nvtx {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
}

static NVTX: OnceLock<(Nvtx, String)> = OnceLock::new();

impl Nvtx {
    fn open(path: &str) -> Option<Self> {
        // SAFETY: a library of this name has no initialisers with obligations.
        let library = unsafe { Library::new(path) }.ok()?;
        // SAFETY: NVTX declares the two so, in all versions.
        let nvtx =
            unsafe { Self { push: *library.get(c"nvtxRangePushA").ok()?, pop: *library.get(c"nvtxRangePop").ok()? } };
        std::mem::forget(library);
        Some(nvtx)
    }
}

/// Loads the first of these libraries that is there, once. Returns its path.
pub(crate) fn load(paths: &[String]) -> Option<String> {
    let opened = || paths.iter().find_map(|path| Some((Nvtx::open(path)?, path.clone())));
    let found = NVTX.get().or_else(|| {
        let nvtx = opened()?;
        Some(NVTX.get_or_init(|| nvtx))
    });
    found.map(|(_, path)| path.clone())
}

/// A range of the current thread, until it is dropped.
pub(crate) struct Range(&'static Nvtx);

/// Opens a range, where NVTX is loaded.
pub(crate) fn range(operation: &str) -> Option<Range> {
    let (nvtx, _) = NVTX.get()?;
    let name = CString::new(format!("truebridge.{operation}")).ok()?;
    // SAFETY: the name ends with a null byte, and NVTX copies it.
    unsafe { (nvtx.push)(name.as_ptr()) };
    Some(Range(nvtx))
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: no obligations. Ranges are dropped on their thread, the last first.
        unsafe { (self.0.pop)() };
    }
}
