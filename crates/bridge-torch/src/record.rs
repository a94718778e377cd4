//! The stream that uses a block of the caching allocator, recorded without Python.

use crate::library::{AtTensor, function};
use bridge_core::{Device, Stream};
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

/// `c10::Stream`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamByValue {
    device_type: i8,
    device_index: i8,
    /// 0 for the default stream; the handle for an external stream (`c10/cuda/CUDAStream.cpp`, `StreamId`).
    id: i64,
}

/// `c10::DeviceType::CUDA`
const CUDA: i8 = 1;

/// Returns the stream to record for work in `stream`: for the per-thread stream the legacy one, which waits for it. The
/// allocator fields a recorded stream on the thread that frees the block, where the handle would name another one.
pub(crate) fn lasting(stream: Stream) -> Stream {
    stream.on_any_thread()
}

impl StreamByValue {
    fn of(device: Device, stream: Stream) -> Option<Self> {
        let id = if stream == Stream::LEGACY { 0 } else { stream.handle() as i64 };
        Some(Self { device_type: CUDA, device_index: device.index.try_into().ok()?, id })
    }
}

/// `at::native::record_stream_cuda`, and the C functions that show the layout of its second argument. It bypasses the
/// dispatcher, which throws for conj and neg bits and runs the user's modes.
pub(crate) struct RecordStream {
    pub(crate) record: unsafe extern "C" fn(AtTensor, StreamByValue),
    current: unsafe extern "C" fn(i32, *mut *mut c_void) -> c_int,
    id: unsafe extern "C" fn(*mut c_void, *mut i64) -> c_int,
    delete: unsafe extern "C" fn(*mut c_void) -> c_int,
    /// Whether the layout was confirmed with a default stream, and with another one, whose id is not 0.
    confirmed: [OnceLock<bool>; 2],
}

impl RecordStream {
    pub(crate) fn find() -> Option<Self> {
        const CPU: &str = "libtorch_cpu.so";
        // SAFETY: the signatures are those of `torch/csrc/inductor/aoti_torch/c/shim.h`, and what the mangled name says:
        // a tensor by reference and a stream by value, whose layout is confirmed before the first call.
        unsafe {
            Some(Self {
                record: function("libtorch_cuda.so", "_ZN2at6native18record_stream_cudaERNS_6TensorEN3c106StreamE")?,
                current: function(CPU, "aoti_torch_get_current_stream")?,
                id: function(CPU, "aoti_torch_stream_id")?,
                delete: function(CPU, "aoti_torch_delete_stream")?,
                confirmed: Default::default(),
            })
        }
    }

    /// Returns what is recorded for `stream`, the current one of the device; `None` where streams have another layout in
    /// this version.
    pub(crate) fn lasting(&self, device: Device, stream: Stream) -> Option<StreamByValue> {
        let current = StreamByValue::of(device, stream)?;
        if self.takes(current) { StreamByValue::of(device, lasting(stream)) } else { None }
    }

    /// Returns whether a stream has the layout of [`StreamByValue`] in this version, judged by the current stream of
    /// the device, once for default streams and once for others.
    fn takes(&self, stream: StreamByValue) -> bool {
        *self.confirmed[usize::from(stream.id != 0)].get_or_init(|| self.confirms(stream))
    }

    /// Returns whether PyTorch's own object for the current stream reads as one of ours does.
    fn confirms(&self, expected: StreamByValue) -> bool {
        let (mut object, mut id) = (ptr::null_mut(), 0);
        // SAFETY: the outputs are writable; the functions catch what C++ throws. The object is a `c10::Stream` on the
        // heap, where no block is smaller than the 16 bytes read; it is ours, and deleted once.
        unsafe {
            if (self.current)(expected.device_index.into(), &mut object) != 0 {
                return false;
            }
            let Some(object) = NonNull::new(object) else { return false };
            let known = (self.id)(object.as_ptr(), &mut id) == 0;
            let read = object.cast::<StreamByValue>().read();
            (self.delete)(object.as_ptr());
            known && read == StreamByValue { id, ..expected } && (id != 0) == (expected.id != 0)
        }
    }
}
