//! Tensors of other frameworks that compiled functions read or fill, and the numbers that stand for them.
//!
//! A function is compiled once and called many times, so it holds a number. The handlers of [`targets`](crate::targets)
//! look up the tensor of a number, and copy between it and a buffer of XLA's: in stream order, by core's
//! [`copy_into`], for which [`Side`] makes an adapter of each side.

use crate::runtime::Runtime;
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, Error, ErrorKind, Export, Layout, Lease, Memory, Offer,
    Ordering, Profile, Result, Reuse, Stream, Strides, Views, copy_into,
};
use pyo3::Python;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// Reports to the framework of a tensor that its elements are about to be overwritten ([`Adapter::overwritten`]), on any
/// thread.
pub type Overwritten = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// A tensor of another framework that compiled functions read or fill, as long as this value lives.
#[derive(Debug)]
pub struct Feed {
    number: i64,
    tensor: Arc<Fed>,
}

/// The tensor of a [`Feed`]. A call under way keeps it as well.
pub(crate) struct Fed {
    lease: Lease,
    overwritten: Overwritten,
}

bridge_core::debug_fields!(impl[] Fed: lease);

static FED: LazyLock<Mutex<HashMap<i64, Arc<Fed>>>> = LazyLock::new(Mutex::default);
/// Never reused, so that an old number never means a new tensor. Not random: compiled functions hold numbers, and JAX
/// keeps those between processes by their text.
static NEXT: AtomicI64 = AtomicI64::new(1);

fn table() -> MutexGuard<'static, HashMap<i64, Arc<Fed>>> {
    FED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the tensor of a number.
pub(crate) fn fed(number: i64) -> Option<Arc<Fed>> {
    table().get(&number).cloned()
}

impl Feed {
    pub(crate) fn new(lease: Lease, overwritten: Overwritten) -> Self {
        let (number, tensor) = (NEXT.fetch_add(1, Relaxed), Arc::new(Fed { lease, overwritten }));
        table().insert(number, tensor.clone());
        Self { number, tensor }
    }

    /// Returns the number that stands for it in compiled functions.
    pub fn number(&self) -> i64 {
        self.number
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.tensor.lease.dtype()
    }

    /// Returns the lengths, in elements.
    pub fn shape(&self) -> &[i64] {
        self.tensor.lease.layout().shape()
    }

    /// Returns the device that the memory is on.
    pub fn device(&self) -> Device {
        self.tensor.lease.device()
    }

    /// Returns what may be done with the memory.
    pub fn access(&self) -> Access {
        self.tensor.lease.access()
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        // Dropped outside the lock: it may be the last reference to the lease.
        let entry = table().remove(&self.number);
        drop(entry);
    }
}

/// The adapter that imports tensors for compiled functions. It takes any strides, and JAX's dtypes.
pub struct Feeds {
    runtime: &'static Runtime,
    profile: Profile,
    /// Of the one tensor that is imported.
    overwritten: Mutex<Option<Overwritten>>,
}

bridge_core::debug_fields!(impl[] Feeds: profile);

impl Feeds {
    /// Makes the adapter for one tensor, whose framework `overwritten` reports writes to.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] if JAX is not installed.
    pub fn new(py: Python<'_>, overwritten: Overwritten) -> Result<Self> {
        let runtime = Runtime::get(py)?;
        let profile = runtime.profile(py)?.clone();
        let profile = profile.with_strides(Strides::Any).with_alignment(0).with_keeps_read_only(true);
        Ok(Self { runtime, profile, overwritten: Mutex::new(Some(overwritten)) })
    }
}

// SAFETY: the call that is fed ends before its leases do, and works in the stream that the consumer names.
unsafe impl Adapter for Feeds {
    type Tensor = Feed;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.runtime.consumer.clone()
    }

    fn export(&self, feed: &Feed) -> Result<Export> {
        feed.tensor.export()
    }

    fn import(&self, offer: Offer<'_>) -> Result<Feed> {
        let lease = offer.accept(&self.profile, &self.runtime.consumer)?;
        let overwritten = self.overwritten.lock().unwrap_or_else(PoisonError::into_inner).take();
        let overwritten = overwritten.ok_or_else(|| misused("this adapter imports one tensor"))?;
        Ok(Feed::new(lease, overwritten))
    }
}

impl Fed {
    /// Exports the tensor, in the stream that was its framework's when it was imported.
    fn export(self: &Arc<Self>) -> Result<Export> {
        let lease = &self.lease;
        let (start, len) = lease.buffer();
        let memory = allocation(start..start + len, lease.device(), lease.access(), lease.stream());
        // SAFETY: these are the promises of the lease, which the owner keeps, and which is dropped with it. The drop
        // returns the memory after everything that its stream holds.
        let memory = unsafe { Memory::new(memory, Arc::clone(self)) };
        Export::at(lease.data(), lease.dtype(), lease.layout().clone(), memory)
    }

    pub(crate) fn device(&self) -> Device {
        self.lease.device()
    }

    /// Returns an error for a buffer of XLA's that differs from the tensor.
    pub(crate) fn check(&self, buffer: &Buffer<'_>) -> Result<()> {
        let (lease, dtype, shape, device) = (&self.lease, buffer.dtype, buffer.shape, buffer.device);
        if lease.dtype() != dtype {
            let text =
                format!("the tensor is {}, but the function was compiled for {dtype}: trace it again", lease.dtype());
            return Err(Error::new(ErrorKind::Dtype, text));
        }
        if lease.layout().shape() != shape {
            let own = lease.layout().shape();
            let text =
                format!("the tensor has shape {own:?}, but the function was compiled for {shape:?}: trace it again");
            return Err(Error::new(ErrorKind::Layout, text));
        }
        if lease.device() != device {
            let own = lease.device();
            let text = format!(
                "the tensor is on {own}, but the function runs on {device}: run it on the tensor's device, or move the tensor first"
            );
            return Err(Error::new(ErrorKind::Device, text));
        }
        Ok(())
    }

    /// Copies the tensor into a buffer, in the stream of the run.
    ///
    /// # Errors
    ///
    /// Those of [`copy_into`].
    pub(crate) fn read(self: &Arc<Self>, buffer: &Buffer<'_>, ordering: &Arc<dyn Ordering>) -> Result<()> {
        self.copy(buffer, |fed, buffer| copy_into(fed, buffer, &(), &(), ordering).map(drop))
    }

    /// Copies a buffer into the tensor, in the tensor's stream.
    ///
    /// # Errors
    ///
    /// Those of [`copy_into`].
    pub(crate) fn write(self: &Arc<Self>, buffer: &Buffer<'_>, ordering: &Arc<dyn Ordering>) -> Result<()> {
        self.copy(buffer, |fed, buffer| copy_into(buffer, fed, &(), &(), ordering).map(drop))
    }

    fn copy(
        self: &Arc<Self>,
        buffer: &Buffer<'_>,
        copy: impl FnOnce(&Side<'_>, &Side<'_>) -> Result<()>,
    ) -> Result<()> {
        let (fed, own) = (|| self.export(), || buffer.export());
        let fed = Side::new(self.lease.stream(), &fed, &*self.overwritten);
        copy(&fed, &Side::new(buffer.stream, &own, &|| Ok(())))
    }
}

/// A buffer of XLA's in a run, compact in row-major order.
pub(crate) struct Buffer<'a> {
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [i64],
    pub(crate) device: Device,
    pub(crate) address: usize,
    /// The stream of the run; `None` on the host.
    pub(crate) stream: Option<Stream>,
    /// XLA lets a handler use its buffers until it returns, and after that in the order of the stream.
    _exported_by_xla: (),
}

impl<'a> Buffer<'a> {
    /// Describes a buffer.
    ///
    /// # Safety
    ///
    /// The address is that of a buffer with this dtype and shape on this device, which XLA has passed to a handler that
    /// runs. The stream is that of the run, or `None` on the host. The value is dropped before the handler returns.
    pub(crate) unsafe fn new(
        dtype: DType,
        shape: &'a [i64],
        device: Device,
        address: usize,
        stream: Option<Stream>,
    ) -> Self {
        Self { dtype, shape, device, address, stream, _exported_by_xla: () }
    }

    fn export(&self) -> Result<Export> {
        let layout = Layout::new(self.dtype, self.shape, None, 0)?;
        let bytes = self.address..self.address + layout.nbytes();
        let memory = allocation(bytes, self.device, Access::ReadWrite, self.stream);
        // SAFETY: by the contract of `new` the bytes are XLA's buffer, which it keeps until the handler has returned and
        // the stream has done what it holds then.
        let memory = unsafe { Memory::new(memory, ()) };
        Export::new(self.dtype, layout, memory)
    }
}

fn allocation(bytes: Range<usize>, device: Device, access: Access, stream: Option<Stream>) -> Allocation {
    Allocation::new(bytes, device, access, stream, Reuse::InStreamOrder)
}

/// One side of a copy, as an adapter with one tensor.
struct Side<'a> {
    consumer: Arc<InStream>,
    export: &'a dyn Fn() -> Result<Export>,
    overwritten: &'a dyn Fn() -> Result<()>,
}

/// A framework that works in one stream, or on the host.
struct InStream {
    stream: Option<Stream>,
    views: Views,
}

// SAFETY: the call works in the one stream that XLA gave it, and memory of the host has none.
unsafe impl Consumer for InStream {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(self.stream)
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

impl<'a> Side<'a> {
    fn new(
        stream: Option<Stream>,
        export: &'a dyn Fn() -> Result<Export>,
        overwritten: &'a dyn Fn() -> Result<()>,
    ) -> Self {
        Self { consumer: Arc::new(InStream { stream, views: Views::default() }), export, overwritten }
    }
}

// SAFETY: the call that is fed ends before its leases do, and works in the stream that the consumer names.
unsafe impl Adapter for Side<'_> {
    type Tensor = ();

    fn profile(&self) -> &Profile {
        static PROFILE: LazyLock<Profile> = LazyLock::new(|| Profile::export_only("jax"));
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, (): &()) -> Result<Export> {
        (self.export)()
    }

    fn import(&self, _: Offer<'_>) -> Result<()> {
        Err(misused("a side of a copy imports nothing"))
    }

    fn overwritten(&self, (): &()) -> Result<()> {
        (self.overwritten)()
    }
}

#[cold]
fn misused(text: &str) -> Error {
    Error::new(ErrorKind::Argument, text)
}
