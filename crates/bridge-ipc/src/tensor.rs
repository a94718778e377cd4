//! The tensor: elements in memory that processes share, and the adapters for it.

use crate::device::{self, DeviceMemory, Expected, Role};
use crate::memory::{self, Mapping};
use bridge_core::{
    Access, Adapter, Allocation, COPY_ALIGNMENT, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout,
    Lease, Memory, Offer, Order, Profile, Result, Reuse, Stream, Strides, Views,
};
use rustix::fd::OwnedFd;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor in memory that another process shares, or that this one is about to share. A clone is another reference to
/// it.
#[derive(Clone)]
pub struct IpcTensor {
    /// Address of the first element. Meaningless without elements.
    data: usize,
    dtype: DType,
    layout: Layout,
    device: Device,
    access: Access,
    /// The stream of this process in which its memory is written; `None` on the host.
    stream: Option<Stream>,
    /// What keeps the memory: the lease of an import, an [`Arena`] or [`DeviceMemory`] before it is shared, or the
    /// [`Lease`] of a framework of this process on memory that can be shared as it is.
    owner: Arc<dyn Keeps>,
}

bridge_core::debug_fields!(impl[] IpcTensor: data, dtype, layout, device, access);

impl IpcTensor {
    pub(crate) fn imported(
        (data, dtype, layout): (usize, DType, Layout),
        (device, access, stream): (Device, Access, Option<Stream>),
        import: Arc<dyn Keeps>,
    ) -> Self {
        Self { data, dtype, layout, device, access, stream, owner: import }
    }

    /// Returns the device that the elements are on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the stream in which the memory is written.
    pub(crate) fn stream(&self) -> Option<Stream> {
        self.stream
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape and the strides, in elements.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the address of the first element.
    pub fn data(&self) -> usize {
        self.data
    }

    /// Returns what this process may do with the elements.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns an error if the memory is no longer shared: the other process has ended, or has revoked the share. The
    /// elements can still be read then, but no process keeps them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`].
    pub fn check(&self) -> Result<()> {
        self.owner.check()
    }

    /// Returns what keeps the memory of its share mapped.
    pub(crate) fn expected(&self) -> Vec<Expected> {
        self.owner.expected()
    }
}

/// The owner of the memory of a tensor.
pub(crate) trait Keeps: Send + Sync {
    /// Returns an error if the memory is no longer shared.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns what keeps its memory mapped.
    fn expected(&self) -> Vec<Expected> {
        Vec::new()
    }
}

impl Keeps for Arena {}
impl Keeps for DeviceMemory {}
impl Keeps for Lease {}

/// Tensors that processes share, as a framework: they are exported in place. Other memory is imported by a copy, as
/// part of a [`Message`](crate::Message).
#[derive(Clone)]
pub struct Ipc {
    profile: Arc<Profile>,
    consumer: Arc<InStream>,
    /// The memory for copies.
    allocation: Option<Arc<Arena>>,
    /// Whether tensors were opened just now, and need not be checked.
    just_opened: bool,
}

bridge_core::debug_fields!(impl[] Ipc);

/// The consumer: other processes read what it holds, in their order.
#[derive(Default)]
struct InStream {
    views: Views,
}

// SAFETY: copies of opened tensors are made in the stream that this names, which lives as long as the process.
unsafe impl Consumer for InStream {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device::in_streams(device) { device::stream(device, Role::Exporter).map(Some) } else { Ok(None) }
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

impl Ipc {
    /// Makes the adapter for tensors that were opened.
    ///
    /// # Safety
    ///
    /// The elements of a tensor can be read and written by safe code: through its clones, through tensors of other
    /// frameworks, with [`Writing::Shared`](crate::Writing) also in other processes. No code writes to them (also by
    /// [`copy_into`](bridge_core::copy_into)) while another thread or another process reads or writes them.
    pub unsafe fn new() -> Self {
        Self::with(None)
    }

    /// Makes the adapter for tensors that [`open`](crate::open) has just returned: their processes have just answered.
    ///
    /// # Safety
    ///
    /// As for [`new`](Self::new).
    pub unsafe fn of_opened() -> Self {
        Self { just_opened: true, ..Self::with(None) }
    }

    /// Makes the adapter for memory that is passed on in place. Nothing is read or written through it.
    pub(crate) fn passing() -> Self {
        Self::with(None)
    }

    /// Makes the adapter that copies into this memory.
    pub(crate) fn into(allocation: Arc<Arena>) -> Self {
        Self::with(Some(allocation))
    }

    fn with(allocation: Option<Arc<Arena>>) -> Self {
        let devices: &[DeviceKind] = match &allocation {
            Some(arena) if !device::in_streams(arena.device()) => &[DeviceKind::CPU],
            _ if cfg!(feature = "cuda") => &[DeviceKind::CPU, DeviceKind::CUDA],
            _ => &[DeviceKind::CPU],
        };
        let profile = Profile::export_only("ipc")
            .with_dtypes(DType::NAMED.iter().map(|(dtype, _)| *dtype).collect())
            .with_strides(Strides::Any)
            .with_alignment(0)
            .with_devices(devices.into())
            .with_owns_memory(allocation.is_some());
        Self { profile: Arc::new(profile), consumer: Arc::default(), allocation, just_opened: false }
    }
}

// SAFETY: a tensor keeps its lease, and is written to only where it may be. Streams and writes of other processes are
// what the contracts of the constructors say.
unsafe impl Adapter for Ipc {
    type Tensor = IpcTensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, tensor: &IpcTensor) -> Result<Export> {
        if !self.just_opened {
            tensor.check()?;
        }
        let (bytes, device, access) = (tensor.layout.extent_at(tensor.data, None)?, tensor.device, tensor.access);
        let allocation = Allocation::new(bytes, device, access, tensor.stream, Reuse::InStreamOrder);
        // SAFETY: a segment or an arena stays mapped, at least this long and for this access, as long as the tensor
        // keeps it; its file cannot be shortened. It is unmapped on any thread, memory of a device after the work in
        // its stream, which waits for the writers of other processes. `open` or `empty` has checked that the layout
        // stays inside.
        let memory = unsafe { Memory::new(allocation, Arc::clone(&tensor.owner)) };
        Export::at(tensor.data, tensor.dtype, tensor.layout.clone(), memory)
    }

    fn import(&self, offer: Offer) -> Result<IpcTensor> {
        let lease = offer.accept(&self.profile, &self.consumer)?;
        let (data, dtype, layout) = (lease.data(), lease.dtype(), lease.layout().clone());
        let (device, access) = (lease.device(), lease.access());
        let stream = self.consumer.current_stream(device)?;
        Ok(IpcTensor { data, dtype, layout, device, access, stream, owner: Arc::new(lease) })
    }

    fn overwritten(&self, tensor: &IpcTensor) -> Result<()> {
        if tensor.access.forbids_writes() {
            return Err(Error::new(ErrorKind::ReadOnly, "the tensor was shared for reading: copy it first"));
        }
        Ok(())
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<IpcTensor> {
        let layout = Layout::new(dtype, shape, Some(&order.strides(shape)), 0)?;
        let (data, owner): (usize, Arc<dyn Keeps>) = match &self.allocation {
            Some(arena) if device == arena.device() => (arena.take(layout.nbytes())?, arena.clone()),
            // A copy of an opened tensor, if the consumer allocates no memory.
            None if device::in_streams(device) => {
                // A driver does not allocate 0 bytes.
                let memory = DeviceMemory::new(device, layout.nbytes().max(1), false)?;
                (memory.address(), Arc::new(memory))
            }
            _ => return Err(Error::new(ErrorKind::CopyNeeded, "memory to share is taken by a message")),
        };
        let stream = self.consumer.current_stream(device)?;
        Ok(IpcTensor { data, dtype, layout, device, access: Access::ReadWrite, stream, owner })
    }
}

/// Memory that is about to be shared, and filled with tensors one after the other.
pub(crate) struct Arena {
    bytes: Bytes,
    used: Mutex<usize>,
}

enum Bytes {
    Host(OwnedFd, Mapping),
    /// Memory of a device, and its length.
    Device(DeviceMemory, usize),
}

impl Arena {
    /// Allocates memory on a device for tensors of these sizes in bytes, each rounded up by [`Arena::capacity_for`]. If
    /// it
    /// `outlives` this process, a store can take it over; memory of the host always can be.
    pub(crate) fn new(device: Device, nbytes: usize, outlives: bool) -> Result<Self> {
        let bytes = match device::in_streams(device) {
            true => Bytes::Device(DeviceMemory::new(device, nbytes, outlives)?, nbytes),
            false => memory::create(nbytes).map(|(file, mapping)| Bytes::Host(file, mapping))?,
        };
        Ok(Self { bytes, used: Mutex::new(0) })
    }

    /// Returns the bytes that a tensor of this size takes on a device. Even without elements, its address says which
    /// device it is on; a driver does not allocate 0 bytes.
    pub(crate) fn capacity_for(device: Device, nbytes: usize) -> usize {
        let nbytes = if device::in_streams(device) { nbytes.max(1) } else { nbytes };
        nbytes.checked_next_multiple_of(COPY_ALIGNMENT).unwrap_or(usize::MAX)
    }

    /// Returns whether this many bytes are left.
    pub(crate) fn has(&self, nbytes: usize) -> bool {
        let used = *self.used.lock().unwrap_or_else(PoisonError::into_inner);
        Self::capacity_for(self.device(), nbytes) <= self.bytes().len() - used
    }

    /// Returns the address of the next bytes, and takes them.
    fn take(&self, nbytes: usize) -> Result<usize> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let allocation = Self::capacity_for(self.device(), nbytes);
        if allocation > self.bytes().len() - *used {
            return Err(Error::new(ErrorKind::OutOfMemory, "the shared memory is full: share the tensors in parts"));
        }
        let address = self.bytes().start + *used;
        *used += allocation;
        Ok(address)
    }

    pub(crate) fn device(&self) -> Device {
        match &self.bytes {
            Bytes::Host(..) => Device::CPU,
            Bytes::Device(memory, _) => memory.device(),
        }
    }

    pub(crate) fn bytes(&self) -> Range<usize> {
        match &self.bytes {
            Bytes::Host(_, mapping) => mapping.bytes(),
            Bytes::Device(memory, nbytes) => memory.address()..memory.address() + nbytes,
        }
    }

    /// Returns its file; `None` on a device.
    pub(crate) fn file(&self) -> Option<&OwnedFd> {
        match &self.bytes {
            Bytes::Host(file, _) => Some(file),
            Bytes::Device(..) => None,
        }
    }

    /// Returns another descriptor of its file; `None` on a device.
    pub(crate) fn another_file(&self) -> Result<Option<Arc<OwnedFd>>> {
        let file = self.file().map(OwnedFd::try_clone).transpose();
        file.map(|file| file.map(Arc::new)).map_err(|error| {
            let text = "too many files are open: raise the limit (ulimit -n)";
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })
    }

    /// Unmaps the memory, and returns its file; `None` on a device.
    pub(crate) fn into_file(self) -> Option<OwnedFd> {
        match self.bytes {
            Bytes::Host(file, _) => Some(file),
            Bytes::Device(..) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_until_it_is_full() {
        let arena = Arena::new(Device::CPU, 3 * COPY_ALIGNMENT, false).unwrap();
        let start = arena.bytes().start;
        assert_eq!(arena.take(COPY_ALIGNMENT + 1).unwrap(), start);
        assert!(arena.has(COPY_ALIGNMENT) && !arena.has(COPY_ALIGNMENT + 1));
        assert_eq!(arena.take(COPY_ALIGNMENT + 1).unwrap_err().kind(), ErrorKind::OutOfMemory);
        assert_eq!(arena.take(1).unwrap(), start + 2 * COPY_ALIGNMENT);
        assert!(arena.has(0) && !arena.has(1));
    }
}
