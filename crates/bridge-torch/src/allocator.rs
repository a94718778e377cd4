//! PyTorch's caching allocator: which memory it owns, and which streams use that memory.

use bridge_core::{Device, Stream};
use bridge_pyo3::{PyTensor, call};
use libloading::os::unix::{Library, RTLD_NOW};
use pyo3::intern;
use pyo3::prelude::*;
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::OnceLock;

pub(crate) struct Allocator {
    /// The C++ function behind `Tensor.record_stream`, in versions where its layout is known. Elsewhere the method is
    /// called, at three times the cost.
    record_stream: Option<RecordStream>,
    /// `torch._C`
    module: Py<PyAny>,
    /// Whether [`CACHING`] lists the allocator of the process, which cannot change once CUDA is initialised.
    caches: OnceLock<bool>,
}

/// The allocators whose `recordStream` delays the reuse of a block. A pluggable allocator calls a function of the user
/// instead, which need not exist.
const CACHING: [&str; 2] = ["native", "cudaMallocAsync"];

/// `at::native::record_stream_cuda(at::Tensor&, c10::Stream)`. It bypasses the dispatcher, which throws for conj and
/// neg bits and runs the user's modes. A tensor is a pointer to its implementation.
type RecordStream = unsafe extern "C" fn(*mut *mut c_void, StreamByValue);

const SYMBOL: &[u8] = b"_ZN2at6native18record_stream_cudaERNS_6TensorEN3c106StreamE\0";
const LIBRARY: &str = "libtorch_cuda.so";

/// The versions whose headers were checked for the layouts used here (`c10/core/Stream.h`, `c10/core/Device.h`).
const VERSIONS: [&str; 1] = ["2.11."];

/// Finds a library only if it is loaded (`dlfcn.h` of Linux).
const RTLD_NOLOAD: i32 = 4;

/// `c10::Stream`.
#[repr(C)]
struct StreamByValue {
    device_type: i8,
    device_index: i8,
    /// 0 for the default stream; the handle for an external stream (`c10/cuda/CUDAStream.cpp`, `StreamId`).
    id: i64,
}

/// `c10::DeviceType::CUDA`
const CUDA: i8 = 1;

/// Returns whether the headers of this version were checked for the layouts used here.
pub(crate) fn is_known(version: &str) -> bool {
    VERSIONS.iter().any(|known| version.starts_with(known))
}

impl Allocator {
    pub(crate) fn new(torch: &Bound<'_, PyModule>, version: &str) -> PyResult<Self> {
        let record_stream = if is_known(version) { look_up() } else { None };
        Ok(Self { record_stream, module: torch.getattr("_C")?.unbind(), caches: OnceLock::new() })
    }

    /// Returns whether this allocator owns the storage, and reuses its memory behind the recorded streams. Storages of
    /// other owners, or of other processes, have another deleter. CUDA must be initialised.
    ///
    /// # Errors
    ///
    /// Exceptions of PyTorch, for example in versions without the function.
    pub(crate) fn owns(&self, storage: &PyTensor<'_>) -> PyResult<bool> {
        let (py, module) = (storage.py(), self.module.bind(storage.py()));
        let caches = match self.caches.get() {
            Some(caches) => *caches,
            None => {
                let name = module.call_method0(intern!(py, "_cuda_getAllocatorBackend"))?;
                let name: String = name.extract()?;
                *self.caches.get_or_init(|| CACHING.contains(&name.as_str()))
            }
        };
        let implementation = || storage.getattr(intern!(py, "_cdata"));
        Ok(caches && call(module, intern!(py, "_has_Standard_Deleter"), &[&implementation()?])?.is_truthy()?)
    }

    /// Records that `stream` uses the memory, whatever stream it was allocated on: the allocator then reuses the block
    /// only behind that stream. The memory must be [the allocator's own](Self::owns).
    pub(crate) fn record_stream(&self, tensor: &PyTensor<'_>, device: Device, stream: Stream) -> PyResult<()> {
        let py = tensor.py();
        let (Some(record), Ok(device_index)) = (self.record_stream, i8::try_from(device.index)) else {
            return call(tensor, intern!(py, "record_stream"), &[&stream_object(py, device.index, stream)?]).map(drop);
        };
        let mut implementation = tensor.getattr(intern!(py, "_cdata"))?.extract::<usize>()? as *mut c_void;
        let id = if stream == Stream::LEGACY { 0 } else { stream.handle() as i64 };
        // SAFETY: `_cdata` is the address of the implementation, which the object keeps alive, and the pointer to it
        // has the layout of a tensor; the stream has that of the versions above. The function throws only for memory of
        // other allocators, which the caller excludes.
        unsafe { record(&mut implementation, StreamByValue { device_type: CUDA, device_index, id }) };
        Ok(())
    }
}

fn look_up() -> Option<RecordStream> {
    // SAFETY: the library is loaded already or not at all, so no code runs; the symbol has the signature that its
    // mangled name states, and the library stays loaded as long as PyTorch.
    unsafe {
        let library = Library::open(Some(LIBRARY), RTLD_NOW | RTLD_NOLOAD).ok()?;
        library.get::<RecordStream>(SYMBOL).ok().map(|symbol| *symbol)
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
