//! The C struct of NumPy's array interface (NumPy reference, "The array interface protocol", C-struct access).

use std::ffi::{c_char, c_int, c_void};

/// `PyArrayInterface`, held by a capsule without a name. Strides are in bytes.
#[repr(C)]
pub(crate) struct PyArrayInterface {
    /// Always 2: a sanity check.
    pub(crate) two: c_int,
    pub(crate) nd: c_int,
    /// The kind character of the dtype.
    pub(crate) typekind: c_char,
    pub(crate) itemsize: c_int,
    pub(crate) flags: c_int,
    pub(crate) shape: *mut isize,
    pub(crate) strides: *mut isize,
    pub(crate) data: *mut c_void,
    /// Valid only with a flag that is not used here.
    pub(crate) descr: *mut c_void,
}

/// `NPY_ARRAY_ALIGNED`
pub(crate) const ALIGNED: c_int = 0x100;
/// `NPY_ARRAY_NOTSWAPPED`
pub(crate) const NOTSWAPPED: c_int = 0x200;
/// `NPY_ARRAY_WRITEABLE`
pub(crate) const WRITEABLE: c_int = 0x400;
