//! Memory with an owner.

use crate::planted::is_planted;
use crate::{DType, Device, Dims, Error, ErrorKind, Layout, Pending, Permutation, Result, Stream};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::ptr;

/// What a view may do with the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Access {
    /// The memory is protected: the view must not be written to, and what would allow that is refused.
    ReadOnly,
    /// No code writes to the memory while a view of it exists, and users of a view promise that too: tensors of the
    /// owner's framework do not change (TensorFlow, JAX, `ArcArray`), or the caller has promised it
    /// ([`Options::with_read_only`](crate::Options::with_read_only)). A consumer that keeps read-only memory makes the
    /// view read-only; the others take it as it is.
    Immutable,
    /// Not stated by the producer, as in an unversioned DLPack capsule. A consumer that keeps read-only memory may
    /// treat it as read-only, as NumPy does; the others treat it as writable.
    Unstated,
    /// The view may be read and written.
    ReadWrite,
}

impl Access {
    /// Returns whether a view must not be written to.
    pub const fn forbids_writes(self) -> bool {
        matches!(self, Self::ReadOnly | Self::Immutable)
    }
}

/// When the owner's allocator may reuse the memory, once the buffer has been dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reuse {
    /// Only after the work that [`DeviceBuffer::stream`] holds at the time of the drop. Core drops the buffer at once.
    InStreamOrder,
    /// Unknown. Core keeps the buffer until the device has done that work.
    Unknown,
}

/// Memory on a device, kept alive by a value that owns it.
///
/// A buffer makes four promises: *what* it is (an address and a length in bytes), *where* it is (a device), *when* it
/// may be touched (after the work that its stream holds), and *until when* (as long as the value lives; the owner
/// reuses it in the order of the stream).
///
/// # Safety
///
/// An implementer promises the following; core and every other adapter rely on it:
///
/// - The bytes `address .. address + len` belong to one allocation on [`device`](Self::device), and stay allocated and
///   mapped until the value is dropped. `len` may be 0, and then `address` has no meaning.
/// - An address in memory that the host can access is one that a pointer has exposed
///   (`expose_provenance`, not `addr`), because readers make a pointer of it again.
/// - Every method returns the same value throughout the life of the buffer.
/// - With [`Access::ReadWrite`] the owner tolerates external writes in the order of the stream.
/// - Work put after everything that [`stream`](Self::stream) holds when the value is made sees the bytes as the
///   owner's user last wrote them. `None` means that the bytes are there already, as on the host.
/// - The stream is not destroyed before the value is dropped.
/// - Dropping the value is allowed on any thread, with or without Python's GIL, also while the interpreter or the
///   driver shuts down, and happens once. It neither blocks on the device nor panics.
/// - With [`Reuse::InStreamOrder`], the memory is reused only after the work that `stream` holds when the value is
///   dropped, even if the allocator ties the memory to another stream than the one that it was last written on.
///
/// In return, core drops the value only after it has made the owner's stream wait for every stream on which a view is
/// known to have been used. If it cannot do that, it never drops the value.
pub unsafe trait DeviceBuffer: Send + Sync {
    /// Returns the lowest address.
    fn address(&self) -> usize;
    /// Returns the length in bytes.
    fn len(&self) -> usize;
    /// Returns whether the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the device that the bytes are on.
    fn device(&self) -> Device;
    /// Returns what a view may do with the memory.
    fn access(&self) -> Access;
    /// Returns the stream on which the owner writes; `None` for memory that is ready at any time.
    fn stream(&self) -> Option<Stream>;
    /// Returns when the allocator may reuse the memory.
    fn reuse(&self) -> Reuse;
}

// SAFETY: every method is that of the buffer in the box, whose implementer has made the promises.
unsafe impl<B: DeviceBuffer + ?Sized> DeviceBuffer for Box<B> {
    fn address(&self) -> usize {
        (**self).address()
    }
    fn len(&self) -> usize {
        (**self).len()
    }
    fn device(&self) -> Device {
        (**self).device()
    }
    fn access(&self) -> Access {
        (**self).access()
    }
    fn stream(&self) -> Option<Stream> {
        (**self).stream()
    }
    fn reuse(&self) -> Reuse {
        (**self).reuse()
    }
}

/// What the owner knows about the memory that it exports: a [`DeviceBuffer`]'s properties as plain values.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Allocation {
    /// Addresses of the exported bytes, exposed as [`DeviceBuffer`] says.
    pub bytes: Range<usize>,
    /// As [`DeviceBuffer::device`].
    pub device: Device,
    /// As [`DeviceBuffer::access`].
    pub access: Access,
    /// As [`DeviceBuffer::stream`].
    pub stream: Option<Stream>,
    /// As [`DeviceBuffer::reuse`].
    pub reuse: Reuse,
}

impl Allocation {
    /// Returns memory whose owner writes in `stream`. [`Reuse::Unknown`] is always right.
    pub const fn new(
        bytes: Range<usize>,
        device: Device,
        access: Access,
        stream: Option<Stream>,
        reuse: Reuse,
    ) -> Self {
        Self { bytes, device, access, stream, reuse }
    }

    /// Returns host memory, which is ready at any time and has no stream.
    pub const fn host(bytes: Range<usize>, access: Access) -> Self {
        Self::new(bytes, Device::CPU, access, None, Reuse::InStreamOrder)
    }
}

/// An [`Allocation`] as a buffer, kept alive by `O`.
#[must_use = "dropping a buffer drops the owner of its memory"]
pub struct Memory<O> {
    allocation: Allocation,
    _owner: O,
}

crate::debug_fields!(impl[O] Memory<O>: allocation);

impl<O: Send + Sync> Memory<O> {
    /// Makes a buffer that keeps `owner` until it is dropped.
    ///
    /// # Safety
    ///
    /// The caller makes the promises of [`DeviceBuffer`] for this allocation, with `owner` as the value that is
    /// dropped.
    pub unsafe fn new(allocation: Allocation, owner: O) -> Self {
        Self { allocation, _owner: owner }
    }
}

// SAFETY: the caller of the unsafe `new` has made the promises.
unsafe impl<O: Send + Sync> DeviceBuffer for Memory<O> {
    fn address(&self) -> usize {
        self.allocation.bytes.start
    }
    fn len(&self) -> usize {
        self.allocation.bytes.len()
    }
    fn device(&self) -> Device {
        self.allocation.device
    }
    fn access(&self) -> Access {
        self.allocation.access
    }
    fn stream(&self) -> Option<Stream> {
        self.allocation.stream
    }
    fn reuse(&self) -> Reuse {
        self.allocation.reuse
    }
}

/// An exported tensor: a buffer, a dtype and a layout, in one box.
#[must_use = "dropping an exported tensor ends the export"]
pub struct Export(Box<dyn Tensor>);

/// What is known of the tensor besides its memory.
struct Facts {
    dtype: DType,
    pending: Option<Pending>,
    device: Device,
    access: Access,
    /// Whether the consumer should watch its view for writes.
    is_watched: bool,
    layout: Layout,
}

/// A buffer with the facts next to it, so that both take one allocation and move as one pointer.
trait Tensor: DeviceBuffer {
    fn facts(&self) -> &Facts;
    fn facts_mut(&mut self) -> &mut Facts;
}

struct Whole<B> {
    facts: Facts,
    buffer: B,
}

impl<B: DeviceBuffer> Tensor for Whole<B> {
    fn facts(&self) -> &Facts {
        &self.facts
    }
    fn facts_mut(&mut self) -> &mut Facts {
        &mut self.facts
    }
}

// SAFETY: every method is that of the buffer inside, whose implementer has made the promises, but for the access, which is
// that of the buffer, or what a copy or the caller's promise makes of it. The facts next to it are plain values.
unsafe impl<B: DeviceBuffer> DeviceBuffer for Whole<B> {
    fn address(&self) -> usize {
        self.buffer.address()
    }
    fn len(&self) -> usize {
        self.buffer.len()
    }
    fn device(&self) -> Device {
        self.buffer.device()
    }
    fn access(&self) -> Access {
        self.facts.access
    }
    fn stream(&self) -> Option<Stream> {
        self.buffer.stream()
    }
    fn reuse(&self) -> Reuse {
        self.buffer.reuse()
    }
}

impl Export {
    /// Combines a buffer and a layout.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`] when the view reaches outside the buffer, or `dtype` is not the one that the layout was
    /// made for.
    pub fn new(dtype: DType, layout: Layout, buffer: impl DeviceBuffer + 'static) -> Result<Self> {
        let inside = layout.extent().is_some_and(|extent| extent.end <= buffer.len());
        if !inside || buffer.address().checked_add(buffer.len()).is_none() {
            let text = format!("a view with {layout} reaches outside its buffer of {} bytes", buffer.len());
            return Err(Error::new(ErrorKind::Layout, text));
        }
        if dtype.itemsize() != Some(layout.itemsize()) {
            return Err(Error::new(ErrorKind::Layout, format!("the layout was not made for dtype {dtype}")));
        }
        let (device, access) = (buffer.device().of_one_host(), buffer.access());
        let facts = Facts { dtype, pending: None, device, access, is_watched: false, layout };
        Ok(Self(Box::new(Whole { facts, buffer })))
    }

    /// As [`new`](Self::new), for a view known by the address of its first element, whatever offset its layout has.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn at(data: usize, dtype: DType, layout: Layout, buffer: impl DeviceBuffer + 'static) -> Result<Self> {
        // Below the buffer this is an offset after its end, which `new` refuses.
        let offset = data.wrapping_sub(buffer.address());
        Self::new(dtype, layout.at(offset), buffer)
    }

    /// Records a deferred operation.
    pub fn with_pending(mut self, pending: Option<Pending>) -> Self {
        self.0.facts_mut().pending = pending;
        self
    }

    /// Returns the same tensor with another dtype of the same width, for a producer whose protocol names the wrong one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`] where the widths differ.
    pub fn relabelled(mut self, dtype: DType) -> Result<Self> {
        if dtype.itemsize() != Some(self.layout().itemsize()) {
            return Err(Error::new(ErrorKind::Layout, format!("the layout was not made for dtype {dtype}")));
        }
        self.0.facts_mut().dtype = dtype;
        Ok(self)
    }

    /// Returns the same tensor with permuted dimensions.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::permuted`].
    pub fn permuted(mut self, permutation: Option<&Permutation>) -> Result<Self> {
        if let Some(permutation) = permutation {
            self.0.facts_mut().layout = self.layout().permuted(permutation)?;
        }
        Ok(self)
    }

    /// Returns the same tensor repeated to `shape`: dimensions of length 1, and those that it lacks at the front. Those of
    /// length 1 that `shape` lacks at the front are dropped.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`] where another length differs, and those of [`Layout::new`].
    pub(crate) fn broadcast_to(mut self, shape: &[i64]) -> Result<Self> {
        if self.layout().shape() == shape {
            return Ok(self);
        }
        let own = || self.layout().shape().iter().zip(self.layout().strides()).rev();
        let fits = |(length, (own, _)): (&i64, (&i64, &i64))| length == own || *own == 1;
        let mut dropped = own().skip(shape.len());
        if dropped.any(|(length, _)| *length != 1) || !shape.iter().rev().zip(own()).all(fits) {
            let text = format!(
                "a tensor of shape {:?} cannot be copied into one of shape {shape:?}: reshape or slice one side first",
                self.layout().shape()
            );
            return Err(Error::new(ErrorKind::Layout, text));
        }
        let mut strides = Dims::from_elem(0, shape.len());
        for ((stride, length), (own, step)) in strides.iter_mut().zip(shape).rev().zip(own()) {
            *stride = if own == length { *step } else { 0 };
        }
        if is_planted("core_broadcast_transposed") && shape.len() > 1 && shape[0] == shape[1] {
            strides.swap(0, 1);
        }
        self.0.facts_mut().layout = Layout::new(self.dtype(), shape, Some(&strides), self.layout().offset())?;
        Ok(self)
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.0.facts().dtype
    }

    /// Returns the shape, the strides and the offset.
    pub fn layout(&self) -> &Layout {
        &self.0.facts().layout
    }

    /// Returns the deferred operation, if there is one.
    pub fn pending(&self) -> Option<Pending> {
        self.0.facts().pending
    }

    /// Returns the memory.
    pub fn buffer(&self) -> &dyn DeviceBuffer {
        &*self.0
    }

    /// Returns the device that the memory is on, as the consumer sees it.
    pub fn device(&self) -> Device {
        self.0.facts().device
    }

    /// Returns the same tensor, seen as memory of `device`.
    pub(crate) fn seen_on(mut self, device: Device) -> Self {
        self.0.facts_mut().device = device;
        self
    }

    /// Returns the same tensor with an access that forbids writes, where its own does not forbid more.
    ///
    /// # Safety
    ///
    /// With [`Access::Immutable`] no code writes to the memory while a view of it exists.
    pub unsafe fn restricted(mut self, access: Access) -> Self {
        if access.forbids_writes() && self.buffer().access() != Access::ReadOnly {
            self.0.facts_mut().access = access;
        }
        self
    }

    /// Returns the same tensor for a caller who promises not to write to its views.
    pub(crate) fn promised(mut self) -> Self {
        self.0.facts_mut().access = Access::Immutable;
        self
    }

    /// Returns the same tensor for a consumer that should watch its view for writes.
    #[cold]
    pub(crate) fn watched(mut self) -> Self {
        self.0.facts_mut().is_watched = true;
        self
    }

    /// Returns the address of the box, if the consumer should watch its view.
    pub(crate) fn watch(&self) -> Option<usize> {
        self.0.facts().is_watched.then(|| ptr::from_ref(&*self.0).cast::<()>().addr())
    }

    /// Returns the same tensor as a copy that no other code has: its framework would not write to it, its views may.
    pub(crate) fn fresh(mut self) -> Self {
        if self.buffer().access() == Access::Immutable {
            self.0.facts_mut().access = Access::ReadWrite;
        }
        self
    }

    /// Returns the address of the first element.
    pub fn data(&self) -> usize {
        // In range: `new` checked it.
        self.0.address() + self.layout().offset()
    }

    /// Returns [`data`](Self::data) as a pointer. Where it may be read and written, and when: see [`DeviceBuffer`].
    pub fn as_ptr<T>(&self) -> *mut T {
        ptr::with_exposed_provenance_mut(self.data())
    }

    pub(crate) fn into_buffer(self) -> Box<dyn DeviceBuffer> {
        self.0
    }
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Export({} at {:#x} on {}, {})", self.dtype(), self.data(), self.device(), self.layout())
    }
}
