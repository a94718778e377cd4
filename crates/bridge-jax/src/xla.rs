//! The C interface of XLA's foreign functions, as far as the handlers use it.
//!
//! Each structure starts with its size in bytes, and grows only at its end, as `xla/ffi/api/c_api.h` in jaxlib says; so
//! what is declared here is the start of it.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `XLA_FFI_API_MAJOR`, and the least `XLA_FFI_API_MINOR` among the supported versions of JAX: 0.10.
pub(crate) const VERSION: (c_int, c_int) = (0, 3);

/// `XLA_FFI_Extension_Metadata`
pub(crate) const METADATA: c_int = 1;

/// `XLA_FFI_ExecutionStage_EXECUTE`
pub(crate) const EXECUTE: c_int = 3;

/// `XLA_FFI_ArgType_BUFFER` and `XLA_FFI_RetType_BUFFER`
pub(crate) const BUFFER: c_int = 1;

/// `XLA_FFI_AttrType_SCALAR`
pub(crate) const SCALAR: c_int = 3;

/// `XLA_FFI_DataType_S64`
pub(crate) const S64: c_int = 5;

/// `XLA_FFI_Error_Code`: what the exception's text starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    InvalidArgument = 3,
    NotFound = 5,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Internal = 13,
}

/// `XLA_FFI_Extension_Base`
#[repr(C)]
pub(crate) struct Extension {
    pub(crate) struct_size: usize,
    pub(crate) kind: c_int,
    pub(crate) next: *mut Extension,
}

/// `XLA_FFI_Api_Version`
#[repr(C)]
pub(crate) struct Version {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) major: c_int,
    pub(crate) minor: c_int,
}

/// `XLA_FFI_Metadata`
#[repr(C)]
pub(crate) struct Metadata {
    pub(crate) struct_size: usize,
    pub(crate) version: Version,
    pub(crate) traits: u32,
}

/// `XLA_FFI_Metadata_Extension`
#[repr(C)]
pub(crate) struct MetadataExtension {
    pub(crate) base: Extension,
    pub(crate) metadata: *mut Metadata,
}

/// `XLA_FFI_Error_Create_Args`
#[repr(C)]
pub(crate) struct ErrorCreate {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) message: *const c_char,
    pub(crate) code: c_int,
}

/// `XLA_FFI_Error_Destroy_Args`
#[repr(C)]
pub(crate) struct ErrorDestroy {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) error: *mut c_void,
}

/// `XLA_FFI_Stream_Get_Args`
#[repr(C)]
pub(crate) struct StreamGet {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) context: *mut c_void,
    pub(crate) stream: *mut c_void,
}

/// `XLA_FFI_Api`
#[repr(C)]
pub(crate) struct Api {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) version: Version,
    pub(crate) internal: *const c_void,
    pub(crate) error_create: unsafe extern "C" fn(*mut ErrorCreate) -> *mut c_void,
    pub(crate) error_get_message: *const c_void,
    pub(crate) error_destroy: unsafe extern "C" fn(*mut ErrorDestroy),
    pub(crate) handler_register: *const c_void,
    pub(crate) stream_get: unsafe extern "C" fn(*mut StreamGet) -> *mut c_void,
}

/// `XLA_FFI_Buffer`
#[repr(C)]
pub(crate) struct Buffer {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) dtype: c_int,
    pub(crate) data: *mut c_void,
    pub(crate) rank: i64,
    pub(crate) dims: *const i64,
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`
#[repr(C)]
pub(crate) struct Buffers {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) size: i64,
    pub(crate) types: *const c_int,
    pub(crate) buffers: *const *const Buffer,
}

/// `XLA_FFI_ByteSpan`
#[repr(C)]
pub(crate) struct Bytes {
    pub(crate) start: *const u8,
    pub(crate) len: usize,
}

/// `XLA_FFI_Scalar`
#[repr(C)]
pub(crate) struct Scalar {
    pub(crate) dtype: c_int,
    pub(crate) value: *const c_void,
}

/// `XLA_FFI_Attrs`
#[repr(C)]
pub(crate) struct Attributes {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) size: i64,
    pub(crate) types: *const c_int,
    pub(crate) names: *const *const Bytes,
    pub(crate) values: *const *const c_void,
}

/// `XLA_FFI_CallFrame`
#[repr(C)]
pub(crate) struct CallFrame {
    pub(crate) struct_size: usize,
    pub(crate) extension: *mut Extension,
    pub(crate) api: *const Api,
    pub(crate) context: *mut c_void,
    pub(crate) stage: c_int,
    pub(crate) args: Buffers,
    pub(crate) results: Buffers,
    pub(crate) attributes: Attributes,
}

// The header's sizes leave the padding at the end out.
impl ErrorCreate {
    pub(crate) const SIZE: usize = offset_of!(Self, code) + size_of::<c_int>();
}

impl ErrorDestroy {
    pub(crate) const SIZE: usize = offset_of!(Self, error) + size_of::<*mut c_void>();
}

impl StreamGet {
    pub(crate) const SIZE: usize = offset_of!(Self, stream) + size_of::<*mut c_void>();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes are the header's `*_STRUCT_SIZE`, without padding at the end, of jaxlib 0.10.2, 0.11.2 and 0.12.0.1,
    /// which agree.
    #[test]
    fn the_structures_are_laid_out_as_in_the_header() {
        let ends = [
            (offset_of!(Version, minor) + 4, 24),
            (ErrorCreate::SIZE, 28),
            (ErrorDestroy::SIZE, 24),
            (StreamGet::SIZE, 32),
            (offset_of!(Buffer, dims) + 8, 48),
            (offset_of!(Buffers, buffers) + 8, 40),
            (offset_of!(Attributes, values) + 8, 48),
            (offset_of!(CallFrame, attributes) + 48, 168),
            (offset_of!(Metadata, traits) + 4, 36),
            (offset_of!(MetadataExtension, metadata) + 8, 32),
        ];
        for (own, header) in ends {
            assert_eq!(own, header, "{ends:?}");
        }
        let fields = [
            (offset_of!(Api, error_create), 48),
            (offset_of!(Api, error_destroy), 64),
            (offset_of!(Api, stream_get), 80),
            (offset_of!(CallFrame, stage), 32),
            (offset_of!(CallFrame, args), 40),
            (offset_of!(CallFrame, results), 80),
            (offset_of!(CallFrame, attributes), 120),
            (size_of::<Scalar>(), 16),
        ];
        for (own, header) in fields {
            assert_eq!(own, header, "{fields:?}");
        }
    }
}
