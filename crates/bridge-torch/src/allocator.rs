//! PyTorch's caching allocator: which memory it owns, and which streams use that memory.

use crate::native::{AtTensor, Native, function};
use bridge_core::{Device, Stream};
use bridge_pyo3::{PyTensor, call};
use pyo3::intern;
use pyo3::prelude::*;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub(crate) struct Allocator {
    /// The C++ function behind `Tensor.record_stream`, where it was found. Elsewhere the method is called, at ten times
    /// the cost.
    record_stream: Option<RecordStream>,
    /// `torch._C`
    module: Py<PyAny>,
    /// Whether [`CACHING`] lists the allocator of the process, which cannot change once CUDA is initialised.
    caches: OnceLock<bool>,
    /// Deleters of which Python has said that they are not the allocator's, and that they are; 0 for none yet.
    deleters: [AtomicUsize; 2],
}

/// The allocators whose `recordStream` delays the reuse of a block. A pluggable allocator calls a function of the user
/// instead, which need not exist.
const CACHING: [&str; 2] = ["native", "cudaMallocAsync"];

impl Allocator {
    pub(crate) fn new(torch: &Bound<'_, PyModule>) -> PyResult<Self> {
        Ok(Self {
            record_stream: RecordStream::find(),
            module: torch.getattr("_C")?.unbind(),
            caches: OnceLock::new(),
            deleters: Default::default(),
        })
    }

    /// Returns whether streams are recorded by a function of C++.
    pub(crate) fn calls_cxx(&self) -> bool {
        self.record_stream.is_some()
    }

    /// Returns whether this allocator owns the storage, and reuses its memory behind the recorded streams. Storages of
    /// other owners, or of other processes, have another deleter: where that is known, Python is asked once for each.
    /// CUDA must be initialised.
    ///
    /// # Errors
    ///
    /// Exceptions of PyTorch, for example in versions without the function.
    pub(crate) fn owns<'py>(
        &self,
        py: Python<'py>,
        deleter: Option<usize>,
        storage: impl FnOnce() -> PyResult<PyTensor<'py>>,
    ) -> PyResult<bool> {
        let module = self.module.bind(py);
        let caches = match self.caches.get() {
            Some(caches) => *caches,
            None => {
                let name = module.call_method0(intern!(py, "_cuda_getAllocatorBackend"))?;
                let name: String = name.extract()?;
                *self.caches.get_or_init(|| CACHING.contains(&name.as_str()))
            }
        };
        if !caches {
            return Ok(false);
        }
        let deleter = deleter.filter(|deleter| *deleter != 0);
        let is_known = |known: &AtomicUsize| Some(known.load(Relaxed)) == deleter;
        if let Some(answer) = self.deleters.iter().position(is_known) {
            return Ok(answer == 1);
        }
        let implementation = storage()?.getattr(intern!(py, "_cdata"))?;
        let own = call(module, intern!(py, "_has_Standard_Deleter"), &[&implementation])?.is_truthy()?;
        if let Some(deleter) = deleter {
            self.deleters[usize::from(own)].store(deleter, Relaxed);
        }
        Ok(own)
    }

    /// Records that `stream`, which is PyTorch's current one, uses the memory, whatever stream it was allocated on: the
    /// allocator then reuses the block only behind that stream. The memory must be [the allocator's own](Self::owns).
    pub(crate) fn record_stream(
        &self,
        native: Option<&Native>,
        tensor: &PyTensor<'_>,
        device: Device,
        stream: Stream,
    ) -> PyResult<()> {
        let py = tensor.py();
        if let (Some(record), Some(by_value)) = (&self.record_stream, StreamByValue::of(device, stream))
            && record.takes(by_value)
        {
            let mut implementation;
            let handle = match native {
                Some(native) => native.tensor(tensor),
                None => {
                    implementation = tensor.getattr(intern!(py, "_cdata"))?.extract::<usize>()? as *mut c_void;
                    &raw mut implementation
                }
            };
            // SAFETY: `_cdata` is the address of the implementation, which the object keeps alive, and the pointer to
            // it has the layout of a tensor; that of the stream was compared. The function throws only for memory of
            // other allocators, which the caller excludes.
            unsafe { (record.record)(handle, by_value) };
            return Ok(());
        }
        call(tensor, intern!(py, "record_stream"), &[&stream_object(py, device.index, stream)?]).map(drop)
    }
}

/// `c10::Stream`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct StreamByValue {
    device_type: i8,
    device_index: i8,
    /// 0 for the default stream; the handle for an external stream (`c10/cuda/CUDAStream.cpp`, `StreamId`).
    id: i64,
}

/// `c10::DeviceType::CUDA`
const CUDA: i8 = 1;

impl StreamByValue {
    fn of(device: Device, stream: Stream) -> Option<Self> {
        let id = if stream == Stream::LEGACY { 0 } else { stream.handle() as i64 };
        Some(Self { device_type: CUDA, device_index: device.index.try_into().ok()?, id })
    }
}

/// `at::native::record_stream_cuda`, and the C functions that show the layout of its second argument. It bypasses the
/// dispatcher, which throws for conj and neg bits and runs the user's modes.
struct RecordStream {
    record: unsafe extern "C" fn(AtTensor, StreamByValue),
    current: unsafe extern "C" fn(i32, *mut *mut c_void) -> c_int,
    id: unsafe extern "C" fn(*mut c_void, *mut i64) -> c_int,
    delete: unsafe extern "C" fn(*mut c_void) -> c_int,
    /// Whether the layout was confirmed with a default stream, and with another one, whose id is not 0.
    confirmed: [OnceLock<bool>; 2],
}

impl RecordStream {
    fn find() -> Option<Self> {
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

/// The most stream objects that are kept.
const STREAMS_KEPT: usize = 64;

thread_local! {
    /// `torch.cuda.Stream` objects by device and handle.
    static STREAMS: RefCell<Vec<(i32, Stream, Py<PyAny>)>> = const { RefCell::new(Vec::new()) };
}

fn stream_object(py: Python<'_>, device: i32, stream: Stream) -> PyResult<PyTensor<'_>> {
    let kept = STREAMS.with_borrow(|kept| {
        let found = kept.iter().find(|(on, known, _)| (*on, *known) == (device, stream));
        found.map(|(.., object)| object.bind(py).clone())
    });
    if let Some(object) = kept {
        return Ok(object);
    }
    let cuda = py.import("torch")?.getattr("cuda")?;
    let made = match stream {
        Stream::LEGACY => cuda.call_method1("default_stream", (device,))?,
        _ => cuda.call_method1("ExternalStream", (stream.handle(), device))?,
    };
    STREAMS.with_borrow_mut(|kept| {
        if kept.len() >= STREAMS_KEPT {
            kept.clear();
        }
        kept.push((device, stream, made.clone().unbind()));
    });
    Ok(made)
}
