//! Looks for races, for `truebridge.debug`.
//!
//! While it is on, the exports of conversions are wrapped in an [`Owner`]. At the export it asks the driver for streams
//! with work that the export is not ordered after. When the memory is returned it asks for streams of the consumer
//! that its owner does not wait for, and overwrites the memory if it has no other owner. Off, that costs nothing
//! besides the flag that traces have as well.

mod last;
mod streams;

use crate::ordering::ordering;
use crate::trace::{DEBUGGING, set};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, Device, DeviceKind, Export, Keep, Memory, Result, Reuse, Stream, poison,
};
use bridge_pyo3::{PyTensor, drop_guarded, framework_error, probe, with_gil};
use last::KeepAlive;
use pyo3::prelude::*;
use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use std::{ptr, slice};

/// A tensor of a source, whose memory may be held until the end.
pub(crate) trait Owned {
    /// Whether the memory was opened for the call, or made for other processes. It is not freed yet, but may be before
    /// a framework's tensor over it is converted.
    const IS_SHARED: bool = false;

    /// Returns a keep-alive on its memory, if its framework can say whether that is the last.
    fn keep_alive(&self, framework: &str) -> PyResult<Option<KeepAlive>> {
        let _ = framework;
        Ok(None)
    }
}

impl Owned for PyTensor<'_> {
    fn keep_alive(&self, framework: &str) -> PyResult<Option<KeepAlive>> {
        KeepAlive::of(framework, self)
    }
}

impl Owned for bridge_ipc::IpcTensor {
    const IS_SHARED: bool = true;
}

impl Owned for bridge_tensorflow::External {}

/// The frameworks of a transfer, and the line of the program that called for it.
struct Place {
    from: String,
    to: String,
    file: String,
    line: u32,
}

/// The owner of an exported tensor, until its last view is dropped.
struct Owner(Option<Ending>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|ending| drop_guarded(Box::new(ending)));
    }
}

/// What happens when the memory is returned. It is dropped with the GIL, on a thread that Python knows.
struct Ending {
    /// `None` only while it is being dropped; so with `keep_alive`.
    exported: Option<Export>,
    keep_alive: Option<KeepAlive>,
    place: Place,
    memory: Allocation,
    /// What a view must leave as it is, and its hash at the export.
    constant: Option<u64>,
    /// Keeps the stream, in which the memory is overwritten after `exported` is dropped.
    keep: Option<Keep>,
}

/// Looks at an export: asks the driver about streams, and returns the same tensor in an [`Owner`].
#[cold]
pub(crate) fn exported<T: Owned>(
    from: &dyn Adapter<Tensor = T>,
    tensor: &T,
    exported: Export,
    to: &str,
) -> Result<Export> {
    let framework = &from.profile().name;
    let ask = |py: Python<'_>| -> PyResult<_> {
        Ok((probe(py, site(py))?.unwrap_or_default(), tensor.keep_alive(framework)?))
    };
    let asked = Python::attach(|py| ask(py).map_err(|error| framework_error(py, framework, error)));
    let ((file, line), keep_alive) = asked?;
    let place = Place { from: framework.clone(), to: to.into(), file, line };
    let buffer = exported.buffer();
    let bytes = buffer.address()..buffer.address() + buffer.len();
    let (device, stream) = (buffer.device(), buffer.stream());
    let memory = Allocation::new(bytes, device, buffer.access(), stream, buffer.reuse());
    let consumer = from.consumer();
    let keep = stream.and_then(|stream| consumer.keep(device, stream));
    if let Some(stream) = stream {
        streams::saw(&place.from, &*consumer, device, stream);
        report(Moment::Export, &place, device, stream, None);
    }
    let (data, dtype, layout) = (exported.data(), exported.dtype(), exported.layout().clone());
    let pending = exported.pending();
    let constant = constant(&exported);
    let owner =
        Owner(Some(Ending { exported: Some(exported), keep_alive, place, memory: memory.clone(), constant, keep }));
    // SAFETY: these are the properties of the buffer inside, whose producer has made the promises. The owner drops it
    // where it would be dropped itself, and then only what it holds besides, in the same stream order.
    Ok(Export::at(data, dtype, layout, unsafe { Memory::new(memory, owner) })?.with_pending(pending))
}

/// Remembers the stream that a consumer has now.
pub(crate) fn saw(name: &str, consumer: &dyn Consumer, device: Option<Device>) {
    if let Some(device) = device
        && let Ok(Some(stream)) = consumer.current_stream(device)
    {
        streams::saw(name, consumer, device, stream);
    }
}

/// Remembers a stream that the program has named.
pub(crate) fn named(device: Device, stream: Stream, framework: &str, keep: Option<Keep>) {
    if keep.is_some() && stream != Stream::PER_THREAD {
        streams::remember(framework, device, stream, keep);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let (exported, keep_alive, place, keep) =
            (self.exported.take(), self.keep_alive.take(), &self.place, self.keep.take());
        let Allocation { bytes, device, stream, reuse, .. } = self.memory.clone();
        // This thread may be another one.
        let stream = stream.map(Stream::on_any_thread);
        let (constant, lived) = (self.constant, exported.as_ref().and_then(constant));
        // Once the interpreter shuts down, both are dropped with the closure.
        with_gil(move |py| {
            if let Some(stream) = stream {
                report(Moment::Return, place, device, stream, Some(&place.to));
            }
            if constant != lived {
                found(py, "write", (device, 0, 0), place);
            }
            // What the framework itself has kept for the tensor goes first, so that the keep-alive can be the last.
            drop(exported);
            let is_freed =
                |keep_alive: &KeepAlive| poison::is_on() && !bytes.is_empty() && keep_alive.is_last(py, &bytes);
            if let Some(keep_alive) = keep_alive.filter(is_freed) {
                overwrite((keep_alive, keep), bytes, device, stream, reuse);
            }
        });
    }
}

/// Returns a hash of the elements, where they lie in memory of the host without gaps and no view may write to them.
fn constant(exported: &Export) -> Option<u64> {
    let (layout, buffer) = (exported.layout(), exported.buffer());
    let is_constant = buffer.access().forbids_writes() && buffer.device() == Device::CPU && layout.is_compact();
    if !is_constant || layout.numel() == 0 {
        return None;
    }
    let mut hash = DefaultHasher::new();
    // SAFETY: the export keeps the elements. Its users promise not to write to them; where one does so all the same, on
    // another thread, the hash is that of some of the bytes.
    hash.write(unsafe { slice::from_raw_parts(exported.as_ptr::<u8>(), layout.nbytes()) });
    Some(hash.finish())
}

/// Overwrites memory that only this keep-alive owns, and releases it. The second keep-alive is the stream's.
fn overwrite(
    keep_alive: (KeepAlive, Option<Keep>),
    bytes: Range<usize>,
    device: Device,
    stream: Option<Stream>,
    reuse: Reuse,
) {
    match (device.kind, stream) {
        (DeviceKind::CPU, None) => {
            // SAFETY: the memory is the keep-alive's, which has the only reference, and as host memory without a stream
            // no device uses it.
            unsafe { ptr::with_exposed_provenance_mut::<u8>(bytes.start).write_bytes(poison::BYTE, bytes.len()) };
            poison::filled();
        }
        (DeviceKind::CUDA, Some(stream)) => {
            let Ok(link) = bridge_cuda::link() else { return };
            // SAFETY: the memory is the keep-alive's, which has the only reference. It is dropped below, after this
            // work in the order of its allocator or after the device has done it.
            let filled = unsafe { link.poison(device, bytes.start, bytes.len(), stream) };
            if filled.is_ok() && reuse == Reuse::Unknown {
                let access = Access::ReadWrite;
                let allocation = Allocation::new(bytes, device, access, Some(stream), reuse);
                // SAFETY: the keep-alive keeps the memory, on this device, and may be dropped on any thread.
                let memory = unsafe { Memory::new(allocation, keep_alive) };
                // SAFETY: the memory keeps its stream, next to the keep-alive.
                unsafe { ordering().release_later(device, stream, Box::new(memory)) };
            }
        }
        _ => (),
    }
}

/// When the driver was queried.
#[derive(Clone, Copy)]
enum Moment {
    Export,
    Return,
}

/// Reports streams with work that `stream` does not wait for: those of one framework, or of all.
fn report(moment: Moment, place: &Place, device: Device, stream: Stream, framework: Option<&str>) {
    let others = streams::on(device, framework);
    // SAFETY: the streams are alive: what was seen is kept, and the memory's own lives as long as the memory.
    let Ok(busy) = (unsafe { bridge_cuda::unordered(device, stream, &others) }) else { return };
    if busy.is_empty() {
        return;
    }
    let moment = match moment {
        Moment::Export => "export",
        Moment::Return => "return",
    };
    with_gil(|py| busy.iter().for_each(|other| found(py, moment, (device, stream.handle(), other.handle()), place)));
}

/// Enters a finding: what was found, the device, the stream of the owner and the busy one.
fn found(py: Python<'_>, kind: &str, (device, stream, busy): (Device, u64, u64), place: &Place) {
    let tell = || -> PyResult<()> {
        let place = (&place.from, &place.to, &place.file, place.line);
        let streams = (device.to_string(), stream, busy);
        py.import("truebridge.diagnostics.debug")?.call_method1("_found", (kind, streams, place)).map(drop)
    };
    // An error here must not change what the program does.
    tell().unwrap_or_else(|error| error.write_unraisable(py, None));
}

/// Returns the file and the line outside this package that made the call.
fn site(py: Python<'_>) -> PyResult<(String, u32)> {
    py.import("truebridge.diagnostics.debug")?.call_method0("_site")?.extract()
}

/// Turns the mode on or off. Off, the streams that were seen are forgotten.
#[pyfunction]
fn debug_set(on: bool) {
    set(DEBUGGING, on);
    poison::set(on);
    if !on {
        streams::forget();
    }
}

/// Returns how many pieces of memory this process has overwritten.
#[pyfunction]
fn debug_poisoned() -> u64 {
    poison::count()
}

/// Enters the functions into the module.
pub(crate) fn enter(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(debug_set, module)?)?;
    module.add_function(wrap_pyfunction!(debug_poisoned, module)?)
}
