//! The foreign functions of XLA that copy between its buffers and tensors of other frameworks.
//!
//! XLA calls them on its own threads, without the GIL, and passes the stream in which the run computes. They are
//! not marked as compatible with command buffers, so XLA never captures them into a CUDA graph: that would keep neither
//! the order with the tensor's stream nor the look-up of the tensor.

use crate::driver::locate;
use crate::fed::{Buffer, Fed, fed};
use crate::xla::{self, Api, CallFrame, Code};
use bridge_core::{DType, Device, Error, ErrorKind, Ordering, Stream};
use std::ffi::{CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull, null_mut};
use std::slice;
use std::sync::{Arc, OnceLock};

/// The dtypes of XLA (`XLA_FFI_DataType`) that tensors have.
const DTYPES: &[(DType, c_int)] = &[
    (DType::BOOL, 1),
    (DType::INT8, 2),
    (DType::INT16, 3),
    (DType::INT32, 4),
    (DType::INT64, 5),
    (DType::UINT8, 6),
    (DType::UINT16, 7),
    (DType::UINT32, 8),
    (DType::UINT64, 9),
    (DType::FLOAT16, 10),
    (DType::FLOAT32, 11),
    (DType::FLOAT64, 12),
    (DType::COMPLEX64, 15),
    (DType::BFLOAT16, 16),
    (DType::COMPLEX128, 18),
    (DType::FLOAT8_E5M2, 19),
    (DType::FLOAT8_E4M3FN, 20),
    (DType::FLOAT8_E4M3B11FNUZ, 23),
    (DType::FLOAT8_E5M2FNUZ, 24),
    (DType::FLOAT8_E4M3FNUZ, 25),
    (DType::FLOAT8_E4M3, 28),
    (DType::FLOAT8_E3M4, 29),
    (DType::FLOAT8_E8M0FNU, 33),
];

/// A function that XLA calls.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name by which compiled functions call it.
    pub name: &'static str,
    /// The platform, as `jax.ffi.register_ffi_target` names it.
    pub platform: &'static str,
    /// Its `XLA_FFI_Handler`.
    pub handler: NonNull<c_void>,
}

/// The ordering by which the handlers copy.
static ORDERING: OnceLock<&'static Arc<dyn Ordering>> = OnceLock::new();

/// Returns the functions to register with XLA, which copy by this ordering. Its copies are called without the GIL.
///
/// Both take an attribute `handle`, the number of a [`Feed`](crate::Feed) as an `int64`. `truebridge_input` has one
/// result, which it fills from the tensor. `truebridge_output` has one argument, which it copies into the tensor.
pub fn targets(ordering: &'static Arc<dyn Ordering>) -> [Target; 4] {
    ORDERING.get_or_init(|| ordering);
    let target = |name, platform, handler: extern "C" fn(*mut CallFrame) -> *mut c_void| Target {
        name,
        platform,
        handler: NonNull::new(handler as *mut c_void).expect("functions have addresses"),
    };
    [
        target("truebridge_input", "cpu", handler::<Input, false>),
        target("truebridge_input", "CUDA", handler::<Input, true>),
        target("truebridge_output", "cpu", handler::<Output, false>),
        target("truebridge_output", "CUDA", handler::<Output, true>),
    ]
}

/// What a handler does.
trait Direction {
    /// Returns the buffers, of which there is one.
    fn buffers(frame: &CallFrame) -> &xla::Buffers;

    fn copy(tensor: &Arc<Fed>, buffer: &Buffer<'_>, ordering: &Arc<dyn Ordering>) -> bridge_core::Result<()>;
}

struct Input;

impl Direction for Input {
    fn buffers(frame: &CallFrame) -> &xla::Buffers {
        &frame.results
    }

    fn copy(tensor: &Arc<Fed>, buffer: &Buffer<'_>, ordering: &Arc<dyn Ordering>) -> bridge_core::Result<()> {
        tensor.read(buffer, ordering)
    }
}

struct Output;

impl Direction for Output {
    fn buffers(frame: &CallFrame) -> &xla::Buffers {
        &frame.args
    }

    fn copy(tensor: &Arc<Fed>, buffer: &Buffer<'_>, ordering: &Arc<dyn Ordering>) -> bridge_core::Result<()> {
        tensor.write(buffer, ordering)
    }
}

/// Why a call fails: XLA raises it in JAX.
struct Failure(Code, String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Argument | ErrorKind::Dtype | ErrorKind::Layout | ErrorKind::Device => Code::InvalidArgument,
            ErrorKind::OutOfMemory => Code::ResourceExhausted,
            ErrorKind::Driver | ErrorKind::Framework => Code::Internal,
            _ => Code::FailedPrecondition,
        };
        Self(code, error.worded(bridge_core::python::words))
    }
}

/// `XLA_FFI_Handler`
extern "C" fn handler<D: Direction, const ON_GPU: bool>(frame: *mut CallFrame) -> *mut c_void {
    // SAFETY: XLA passes a call frame that is valid until the handler returns.
    let frame = unsafe { &mut *frame };
    if answered(frame) || frame.stage != xla::EXECUTE {
        return null_mut();
    }
    let done = catch_unwind(AssertUnwindSafe(|| run::<D, ON_GPU>(frame)));
    let done = done.unwrap_or_else(|_| Err(Failure(Code::Internal, "the copy panicked: please report this".into())));
    match done {
        Ok(()) => null_mut(),
        // SAFETY: outside the query for metadata a frame has its functions.
        Err(failure) => raise(unsafe { &*frame.api }, failure),
    }
}

/// Answers XLA's query, when a handler is registered, for the version of the interface that it was written for. Returns
/// whether the frame is one.
fn answered(frame: &mut CallFrame) -> bool {
    // SAFETY: the extension is null or valid until the handler returns.
    let Some(extension) = (unsafe { frame.extension.as_mut() }) else { return false };
    if extension.kind != xla::METADATA {
        return false;
    }
    let extension = ptr::from_mut(extension).cast::<xla::MetadataExtension>();
    // SAFETY: an extension of this kind is one for metadata, whose structure XLA lets the handler fill.
    let metadata = unsafe { &mut *(*extension).metadata };
    (metadata.version.major, metadata.version.minor) = xla::VERSION;
    metadata.traits = 0;
    true
}

/// Makes an error of XLA's.
fn raise(api: &Api, Failure(code, text): Failure) -> *mut c_void {
    let text = CString::new(format!("truebridge: {text}").replace('\0', "")).expect("it has no zero byte");
    let mut arguments = xla::ErrorCreate {
        struct_size: xla::ErrorCreate::SIZE,
        extension: null_mut(),
        message: text.as_ptr(),
        code: code as c_int,
    };
    // SAFETY: the arguments are as the header says, and XLA copies the text.
    unsafe { (api.error_create)(&raw mut arguments) }
}

fn run<D: Direction, const ON_GPU: bool>(frame: &CallFrame) -> Result<(), Failure> {
    let number = handle(frame)?;
    let tensor = fed(number).ok_or_else(|| {
        let text = "no tensor is fed under the handle of this function: keep what feed returned until the results of the last call are ready";
        Failure(Code::NotFound, text.into())
    })?;
    let ordering = ORDERING.get().expect("the targets were made with it");
    // SAFETY: the frame is that of the handler that runs, and the buffer is dropped in this function.
    let buffer = unsafe { buffer::<ON_GPU>(frame, D::buffers(frame), tensor.device()) }?;
    tensor.check(&buffer)?;
    match buffer.shape.contains(&0) {
        true => Ok(()),
        false => Ok(D::copy(&tensor, &buffer, ordering)?),
    }
}

fn malformed(text: &str) -> Failure {
    Failure(Code::InvalidArgument, format!("{text}: call external_input and external_output of truebridge.jax"))
}

/// Returns the attribute `handle`.
fn handle(frame: &CallFrame) -> Result<i64, Failure> {
    let attributes = &frame.attributes;
    for index in 0..usize::try_from(attributes.size).unwrap_or(0) {
        // SAFETY: the arrays have `size` entries, of which each name is valid, and each value is of the type next to
        // it.
        unsafe {
            let name = &**attributes.names.add(index);
            if slice::from_raw_parts(name.start, name.len) == b"handle" && *attributes.types.add(index) == xla::SCALAR {
                let scalar = &*(*attributes.values.add(index)).cast::<xla::Scalar>();
                if scalar.dtype == xla::S64 {
                    return Ok(scalar.value.cast::<i64>().read_unaligned());
                }
            }
        }
    }
    Err(malformed("the call has no handle"))
}

/// Returns the only one of the buffers. One without elements counts as one on the device `own`.
///
/// # Safety
///
/// The frame is that of a handler that runs, the buffers are its arguments or its results, and the value is dropped
/// before the handler returns.
unsafe fn buffer<'a, const ON_GPU: bool>(
    frame: &CallFrame,
    buffers: &'a xla::Buffers,
    own: Device,
) -> Result<Buffer<'a>, Failure> {
    // SAFETY: the arrays have `size` entries.
    if buffers.size != 1 || unsafe { *buffers.types } != xla::BUFFER {
        return Err(malformed("the call has another number of buffers than one"));
    }
    // SAFETY: the entry is a buffer, which is valid until the handler returns.
    let buffer = unsafe { &**buffers.buffers };
    let known = DTYPES.iter().find(|(_, code)| *code == buffer.dtype);
    let (dtype, _) = known.ok_or_else(|| malformed("the buffer has a dtype that tensors lack"))?;
    let shape: &[i64] = match usize::try_from(buffer.rank) {
        Ok(rank) if rank > 0 => {
            // SAFETY: a buffer has as many lengths as its rank says.
            unsafe { slice::from_raw_parts(buffer.dims, rank) }
        }
        _ => &[],
    };
    let address = buffer.data as usize;
    let (device, stream) = match ON_GPU {
        true if shape.contains(&0) => (own, None),
        true => (device_of(address)?, Some(stream(frame)?)),
        false => (Device::CPU, None),
    };
    // SAFETY: the buffer is XLA's, on the device and in the stream of the run.
    Ok(unsafe { Buffer::new(*dtype, shape, device, address, stream) })
}

/// Returns the stream in which a run on a GPU computes.
fn stream(frame: &CallFrame) -> Result<Stream, Failure> {
    // SAFETY: outside the query for metadata a frame has its functions.
    let api = unsafe { &*frame.api };
    let mut arguments = xla::StreamGet {
        struct_size: xla::StreamGet::SIZE,
        extension: null_mut(),
        context: frame.context,
        stream: null_mut(),
    };
    // SAFETY: the arguments are as the header says.
    let error = unsafe { (api.stream_get)(&raw mut arguments) };
    if !error.is_null() {
        let mut arguments = xla::ErrorDestroy { struct_size: xla::ErrorDestroy::SIZE, extension: null_mut(), error };
        // SAFETY: the caller owns the error, and destroys it only here.
        unsafe { (api.error_destroy)(&raw mut arguments) };
        return Err(Failure(Code::Internal, "XLA names no stream of this run: please report this".into()));
    }
    // SAFETY: on CUDA this is a stream of the driver's, which XLA keeps while the run uses it.
    Ok(unsafe { Stream::from_handle(arguments.stream as u64) })
}

/// Returns the device of a buffer. XLA counts its own devices, of which some may be hidden.
fn device_of(address: usize) -> Result<Device, Failure> {
    match locate(address)? {
        Some((device, _)) => Ok(Device::cuda(device.index)),
        None => Err(Failure(Code::Internal, format!("the driver has no memory at {address:#x}: please report this"))),
    }
}

#[cfg(test)]
mod tests;
