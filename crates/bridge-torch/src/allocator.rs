//! PyTorch's caching allocator: which memory it owns, and which streams use that memory.

use crate::native::Native;
use crate::record::{RecordStream, lasting};
use bridge_core::{Device, Stream};
use bridge_pyo3::{PyTensor, call};
use pyo3::intern;
use pyo3::prelude::*;
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub(crate) struct Allocator {
    /// The C++ function of `Tensor.record_stream`, where it was found. Elsewhere the method is called, at ten times
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

    /// Returns whether this allocator owns the storage, and reuses its memory after the recorded streams. Storages of
    /// other owners, or of other processes, have another deleter: where that is known, Python is called once for each.
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
    /// allocator then reuses the block only after that stream. The memory must be [the allocator's own](Self::owns).
    pub(crate) fn record_stream(
        &self,
        native: Option<&Native>,
        tensor: &PyTensor<'_>,
        device: Device,
        stream: Stream,
    ) -> PyResult<()> {
        let py = tensor.py();
        if let Some(record) = &self.record_stream
            && let Some(by_value) = record.lasting(device, stream)
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
        call(tensor, intern!(py, "record_stream"), &[&stream_object(py, device.index, lasting(stream))?]).map(drop)
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
