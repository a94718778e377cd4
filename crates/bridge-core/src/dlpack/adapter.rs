//! DLPack as its own framework: managed tensors that transfers take and return.

use super::{DlpackFlags, Managed, ManagedTensorBase, Origin, export, legacy, managed, prepare, versioned};
use crate::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout, Lease, Memory,
    Offer, Order, Profile, Result, Reuse, Stream, Strides, Views, host,
};
use std::sync::Arc;

/// A tensor of DLPack, which clones share: a managed tensor of any producer, memory of the host, or a view that a
/// transfer has returned.
///
/// ```
/// use bridge_core::dlpack::{DLPack, Tensor};
/// use bridge_core::*;
/// use std::sync::Arc;
///
/// // SAFETY: the program uses the memory of a tensor on one thread at a time.
/// let (dlpack, ordering) = (unsafe { DLPack::host() }, Arc::new(HostOnly) as Arc<dyn Ordering>);
/// // SAFETY: the elements are numbers, of any bits.
/// let images = unsafe { dlpack.empty(Device::CPU, DType::UINT8, &[8, 3, 32, 32], Order::RowMajor) }?;
///
/// let options = Options::default().with_permute(Permutation::new(&[0, 2, 3, 1])?);
/// let (view, done) = transfer(&dlpack, &dlpack, &images, &ordering, &options)?;
/// assert_eq!((view.layout().shape(), view.data(), done.bytes_copied), (&[8, 32, 32, 3][..], images.data(), 0));
///
/// // To a consumer outside Rust, and back.
/// let managed = view.into_managed();
/// // SAFETY: the tensor was made here, and its memory is that of the host.
/// let back = unsafe { Tensor::new(managed, |_, _| Ok(dlpack::Origin::host())) }?;
/// assert_eq!(back.data(), images.data());
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tensor(Arc<Held>);

#[derive(Debug)]
enum Held {
    /// A managed tensor.
    Own(Export),
    /// Memory that the adapter has allocated.
    Fresh(Export),
    View(Lease),
}

impl Tensor {
    /// Takes a managed tensor. `origin` is as for [`export`].
    ///
    /// # Errors
    ///
    /// Those of [`export`]. The deleter has been called.
    ///
    /// # Safety
    ///
    /// As for [`export`].
    pub unsafe fn new<M: ManagedTensorBase>(
        managed: Managed<M>,
        origin: impl FnOnce(Device, usize) -> Result<Origin>,
    ) -> Result<Self> {
        // SAFETY: the caller's obligation is the same.
        unsafe { export(managed, origin) }.map(|exported| Self(Arc::new(Held::Own(exported))))
    }

    /// Returns a managed tensor that shares the memory, with its strides. It says whether the memory is read-only. A copy,
    /// and memory that the adapter has allocated, are marked as owned only by the consumer (`IS_COPIED`) where no other
    /// tensor shares them.
    pub fn into_managed(self) -> versioned::Dlpack {
        self.managed()
    }

    /// Returns a managed tensor without a version, for consumers that know no other.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::ReadOnly`] for memory that must not be written to, which such a tensor cannot say.
    pub fn into_legacy(self) -> Result<legacy::Dlpack> {
        if self.access().forbids_writes() {
            let text = "the memory is read-only, which an unversioned managed tensor cannot say: pass the versioned one, or a copy";
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        Ok(self.managed())
    }

    /// Returns a managed tensor without a version, also of memory that must not be written to.
    ///
    /// # Safety
    ///
    /// No consumer writes to such memory.
    pub unsafe fn into_legacy_unchecked(self) -> legacy::Dlpack {
        self.managed()
    }

    fn managed<M: ManagedTensorBase>(self) -> Managed<M> {
        let mut flags = DlpackFlags::empty();
        flags.set(DlpackFlags::READ_ONLY, self.access().forbids_writes());
        // A copy that other tensors share does not belong only to the consumer.
        let copied = match &*self.0 {
            Held::Own(_) => false,
            Held::Fresh(_) => true,
            Held::View(lease) => lease.is_copy(),
        };
        flags.set(DlpackFlags::IS_COPIED, copied && Arc::strong_count(&self.0) == 1);
        let (prepared, dtype, device, data) = (prepare(self.layout()), self.dtype(), self.device(), self.data());
        // SAFETY: all of it is of this tensor, which the context keeps.
        unsafe { managed(prepared, dtype, device, data, flags, self.0) }
    }

    /// Returns the address of the first element. It may be null for a tensor without elements.
    pub fn data(&self) -> usize {
        match &*self.0 {
            Held::Own(exported) | Held::Fresh(exported) => exported.data(),
            Held::View(lease) => lease.data(),
        }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match &*self.0 {
            Held::Own(exported) | Held::Fresh(exported) => exported.dtype(),
            Held::View(lease) => lease.dtype(),
        }
    }

    /// Returns the shape and the strides, in elements.
    pub fn layout(&self) -> &Layout {
        match &*self.0 {
            Held::Own(exported) | Held::Fresh(exported) => exported.layout(),
            Held::View(lease) => lease.layout(),
        }
    }

    /// Returns the device that the memory is on.
    pub fn device(&self) -> Device {
        match &*self.0 {
            Held::Own(exported) | Held::Fresh(exported) => exported.device(),
            Held::View(lease) => lease.device(),
        }
    }

    /// Returns what the memory may be used for.
    pub fn access(&self) -> Access {
        match &*self.0 {
            Held::Own(exported) | Held::Fresh(exported) => exported.buffer().access(),
            Held::View(lease) => lease.access(),
        }
    }
}

/// Makes a view of what an import has accepted, for [`into_managed`](Tensor::into_managed).
impl From<Lease> for Tensor {
    fn from(lease: Lease) -> Self {
        Self(Arc::new(Held::View(lease)))
    }
}

/// Takes memory of a program's own, on the host, without a struct of C.
///
/// ```
/// use bridge_core::dlpack::Tensor;
/// use bridge_core::{Access, Allocation, DType, Layout, Export, Memory};
///
/// let numbers = vec![1.0f32, 2.0, 3.0];
/// let data = numbers.as_ptr().expose_provenance();
/// let layout = Layout::new(DType::FLOAT32, &[3], None, 0)?;
/// let allocation = Allocation::host(layout.extent_at(data, None)?, Access::ReadWrite);
/// // SAFETY: the vector keeps the numbers in place, and nothing else uses them.
/// let memory = unsafe { Memory::new(allocation, numbers) };
/// let tensor = Tensor::try_from(Export::at(data, DType::FLOAT32, layout, memory)?)?;
/// assert_eq!((tensor.data(), tensor.layout().shape()), (data, &[3][..]));
/// let managed = tensor.into_managed();
/// # drop(managed);
/// # Ok::<(), bridge_core::Error>(())
/// ```
///
/// # Errors
///
/// [`ErrorKind::Argument`] for memory of a device, whose streams only a [`transfer`](crate::transfer()) to a [`DLPack`]
/// orders, and [`ErrorKind::CopyNeeded`] for an operation that is pending.
impl TryFrom<Export> for Tensor {
    type Error = Error;

    fn try_from(exported: Export) -> Result<Self> {
        if exported.buffer().stream().is_some() {
            let text = "memory of a device needs a stream: transfer the tensor to DLPack::in_stream";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        if let Some(pending) = exported.pending() {
            let text =
                format!("a managed tensor has no {pending:?}: transfer the tensor to DLPack::host, which copies");
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        Ok(Self(Arc::new(Held::Own(exported))))
    }
}

/// The adapter of DLPack's tensors.
///
/// It takes any strides, and keeps memory read-only. DLPack cannot copy: those of host memory are core's, those on
/// a device need an ordering with [`Copies`](crate::Copies) and a framework with an allocator on the other side.
pub struct DLPack {
    profile: Profile,
    consumer: Arc<Current>,
}

crate::debug_fields!(impl[] DLPack);

/// Where the consumer of the managed tensors works.
#[derive(Default)]
struct Current {
    stream: Option<(Device, Stream)>,
    views: Views,
}

impl DLPack {
    /// Returns the adapter for consumers that read on the host.
    ///
    /// # Safety
    ///
    /// Memory that frameworks share can be read and written through each of them by safe code, and no framework waits
    /// for another on the host. While a tensor of another framework, or of another process, shares the memory of a tensor
    /// of this adapter, no code writes to it through the one (also by [`copy_into`](crate::copy_into)) while another thread
    /// reads or writes it through the other. The clones of a tensor share its memory too.
    pub unsafe fn host() -> Self {
        Self::with(Current::default())
    }

    /// Returns the adapter for consumers that use host memory, and memory of `device` in `stream`.
    ///
    /// # Safety
    ///
    /// That of [`host`](Self::host). `stream` belongs to `device`, and is not destroyed before the adapter and all tensors
    /// that it has returned have been dropped. A tensor of DLPack on `device` is used through adapters in one stream, or
    /// its caller orders them.
    pub unsafe fn in_stream(device: Device, stream: Stream) -> Self {
        Self::with(Current { stream: Some((device, stream)), views: Views::default() })
    }

    fn with(consumer: Current) -> Self {
        let device = consumer.stream.map(|(device, _)| device.kind);
        let profile = Profile {
            dtypes: DType::NAMED.iter().map(|(dtype, _)| *dtype).collect(),
            strides: Strides::Any,
            devices: [DeviceKind::CPU].into_iter().chain(device).collect(),
            ..Profile::export_only("dlpack")
        };
        Self { profile, consumer: Arc::new(consumer) }
    }
}

// SAFETY: the contracts of the constructors name the streams.
unsafe impl Consumer for Current {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        match self.stream {
            _ if device.kind == DeviceKind::CPU => Ok(None),
            Some((own, stream)) if own == device => Ok(Some(stream)),
            _ => {
                let text = format!("no stream of {device} is known: make the adapter with DLPack::in_stream");
                Err(Error::new(ErrorKind::Device, text))
            }
        }
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

// SAFETY: a tensor keeps its lease. Streams and writes are what the contract of `new` says.
unsafe impl Adapter for DLPack {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, tensor: &Tensor) -> Result<Export> {
        let (device, access) = (tensor.device(), tensor.access());
        let allocation = match &*tensor.0 {
            Held::Own(exported) | Held::Fresh(exported) => {
                let buffer = exported.buffer();
                let bytes = buffer.address()..buffer.address() + buffer.len();
                Allocation::new(bytes, device, access, buffer.stream(), buffer.reuse())
            }
            Held::View(lease) => {
                let (start, len) = lease.buffer();
                // Another view of the same memory may be used elsewhere.
                let reuse = if device.kind == DeviceKind::CPU { Reuse::InStreamOrder } else { Reuse::Unknown };
                let stream = self.consumer.current_stream(device)?;
                Allocation::new(start..start + len, device, access, stream, reuse)
            }
        };
        // SAFETY: the clone keeps the buffer, or the lease on one, whose promises these are; a lease may be dropped on
        // any thread. The view was last used in the stream of the adapter.
        let memory = unsafe { Memory::new(allocation, tensor.clone()) };
        Export::at(tensor.data(), tensor.dtype(), tensor.layout().clone(), memory)
    }

    fn import(&self, offer: Offer) -> Result<Tensor> {
        Ok(offer.accept(&self.profile, &self.consumer)?.into())
    }

    fn compact(&self, _: &Tensor) -> Result<Tensor> {
        Err(Error::new(ErrorKind::CopyNeeded, "DLPack cannot copy: copy the tensor with its own framework first"))
    }

    fn overwritten(&self, _: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Allocates host memory of zeros, which safe code may read before it is written.
    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Tensor> {
        match device.kind {
            DeviceKind::CPU => host::zeros(dtype, shape, order).map(|exported| Tensor(Arc::new(Held::Fresh(exported)))),
            _ => Err(Error::new(ErrorKind::CopyNeeded, "DLPack cannot allocate memory on a device")),
        }
    }
}
