//! Adapters: a framework, as core sees it.

use crate::{Consumer, DType, Device, Error, ErrorKind, Export, Failed, Offer, Order, Profile, Result};
use std::sync::Arc;

/// Alignment, in bytes, of copies that adapters make: the largest that a framework requires (TensorFlow).
pub const COPY_ALIGNMENT: usize = 64;

/// A framework, as core sees it. Adapters translate; core checks and plans.
///
/// # For implementers
///
/// An adapter knows its own framework and no other. The conformance suite judges it: write a `Subject` for it and call
/// `certify`.
///
/// A whole adapter, for a toy framework of float32 arrays in host memory:
///
/// ```
/// use bridge_core::*;
/// use std::{slice, sync::Arc};
///
/// /// The framework's tensor: its own numbers, or a view of imported memory.
/// #[derive(Clone)]
/// enum Array {
///     Own(Arc<Vec<f32>>),
///     View(Arc<Lease>),
/// }
///
/// impl Array {
///     fn numbers(&self) -> &[f32] {
///         match self {
///             Array::Own(numbers) => numbers,
///             Array::View(lease) if lease.layout().numel() == 0 => &[],
///             // SAFETY: the profile admits compact, aligned float32 in host memory, which the lease keeps.
///             Array::View(lease) => unsafe {
///                 slice::from_raw_parts(lease.as_ptr(), lease.layout().numel())
///             },
///         }
///     }
/// }
///
/// struct Arrays {
///     profile: Profile,
///     views: Arc<Views>,
/// }
///
/// // SAFETY: a view keeps its lease, is in memory of the host, which has no streams, and is never written to.
/// unsafe impl Adapter for Arrays {
///     type Tensor = Array;
///
///     fn profile(&self) -> &Profile {
///         &self.profile
///     }
///
///     fn consumer(&self) -> Arc<dyn Consumer> {
///         self.views.clone() // Host memory has no streams.
///     }
///
///     fn export(&self, array: &Array) -> Result<Export> {
///         let data = array.numbers().as_ptr().expose_provenance();
///         let layout = Layout::new(DType::FLOAT32, &[array.numbers().len() as i64], None, 0)?;
///         let allocation = Allocation::host(layout.extent_at(data, None)?, Access::ReadOnly);
///         // SAFETY: the array keeps the numbers in place and may be dropped on any thread; it never writes to them.
///         let memory = unsafe { Memory::new(allocation, array.clone()) };
///         Export::at(data, DType::FLOAT32, layout, memory)
///     }
///
///     fn import(&self, offer: Offer) -> Result<Array> {
///         Ok(Array::View(Arc::new(offer.accept(&self.profile, &self.views)?)))
///     }
/// }
///
/// let arrays = Arrays {
///     profile: Profile::export_only("arrays")
///         .with_dtypes(vec![DType::FLOAT32])
///         .with_strides(Strides::Compact)
///         .with_alignment(1)
///         .with_devices(vec![DeviceKind::CPU]),
///     views: Arc::default(),
/// };
/// let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
/// let array = Array::Own(Arc::new(vec![1.0, 2.0, 3.0]));
///
/// let (view, done) = transfer(&arrays, &arrays, &array, &ordering, &Options::default())?;
/// assert_eq!((done.plan, done.bytes_copied), (Plan::ZeroCopy, 0));
/// assert_eq!(view.numbers().as_ptr(), array.numbers().as_ptr());
/// drop(array);
/// assert_eq!(view.numbers(), [1.0, 2.0, 3.0], "the view keeps the memory");
///
/// let (copy, done) = transfer(&arrays, &arrays, &view, &ordering, &Options::copied())?;
/// assert_eq!((done.plan, done.bytes_copied), (Plan::Copy(Reason::Asked), 12));
/// assert_ne!(copy.numbers().as_ptr(), view.numbers().as_ptr());
/// # Ok::<(), Error>(())
/// ```
///
/// # Safety
///
/// Core reads, writes and frees memory by what an adapter says of its framework, so this is true:
/// - [`profile`](Self::profile) says what the framework does: a dtype, a layout, a device or an alignment that it lists is
///   read as that, and a framework that [keeps read-only memory](Profile::keeps_read_only) prevents writes to it.
/// - [`consumer`](Self::consumer) is the part whose streams the framework uses imported tensors in.
/// - A tensor that [`import`](Self::import) returns keeps the lease as long as anything can use the memory.
/// - [`overwritten`](Self::overwritten) is an error for memory that is never writable.
pub unsafe trait Adapter {
    /// A tensor of the framework.
    type Tensor;

    /// Returns what the framework accepts and emits.
    fn profile(&self) -> &Profile;

    /// Returns the part that leases hold.
    fn consumer(&self) -> Arc<dyn Consumer>;

    /// Exports a tensor in place, without a copy and without blocking the host. The buffer's stream is the stream that
    /// is current in the framework now.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotATensor`] for an object without one strided memory (sparse, quantised, meta, …),
    /// [`ErrorKind::RequiresGrad`], [`ErrorKind::Dtype`], [`ErrorKind::Layout`].
    fn export(&self, tensor: &Self::Tensor) -> Result<Export>;

    /// Accepts an offer ([`Offer::accept`]), which checks that the tensor fits [`profile`](Self::profile) and is for
    /// [`consumer`](Self::consumer), and wraps its lease as a tensor that shares the memory and drops the lease with the
    /// last view. Core has ordered the current stream after the owner's.
    ///
    /// # Errors
    ///
    /// Those of [`Offer::accept`], and errors of the framework. The lease is then dropped.
    fn import(&self, offer: Offer<'_>) -> Result<Self::Tensor>;

    /// Makes a compact copy, aligned to [`COPY_ALIGNMENT`], with the framework's own kernels: on the same device, in
    /// the current stream, with deferred operations applied.
    ///
    /// # Errors
    ///
    /// Errors of the framework. [`ErrorKind::CopyNeeded`], which is the default, if it cannot copy: core then copies
    /// host memory, and the consumer copies device memory that it accepts in place.
    fn compact(&self, tensor: &Self::Tensor) -> Result<Self::Tensor> {
        let _ = tensor;
        let name = &self.profile().name;
        let text =
            format!("{name} has no kernels for copies: use the ordering of bridge-cuda, or copy the tensor first");
        Err(Error::new(ErrorKind::CopyNeeded, text))
    }

    /// Reports that the elements of `tensor` are about to be overwritten from outside the framework, in its current
    /// stream. PyTorch counts the writes for autograd, for example.
    ///
    /// # Errors
    ///
    /// Errors of the framework. [`ErrorKind::ReadOnly`] where its tensors must not change, which is the default.
    fn overwritten(&self, tensor: &Self::Tensor) -> Result<()> {
        let _ = tensor;
        let name = &self.profile().name;
        let text = format!("tensors of {name} cannot be overwritten: convert the source to {name}, and use the result");
        Err(Error::new(ErrorKind::ReadOnly, text))
    }

    /// As [`overwritten`](Self::overwritten), for many tensors.
    ///
    /// # Errors
    ///
    /// Those of [`overwritten`](Self::overwritten), with the index of the tensor.
    fn overwritten_all(&self, tensors: &[&Self::Tensor]) -> Result<(), Failed> {
        let each = |(index, tensor): (usize, &&Self::Tensor)| {
            self.overwritten(tensor).map_err(|error| Failed { index, error })
        };
        tensors.iter().enumerate().try_for_each(each)
    }

    /// Returns a fresh tensor with undefined elements: compact in this order, writable, aligned to [`COPY_ALIGNMENT`],
    /// from the framework's own allocator, in its current stream of `device`.
    ///
    /// # Errors
    ///
    /// Errors of the framework. [`ErrorKind::CopyNeeded`] where its memory cannot be written from outside, which is the
    /// default.
    ///
    /// # Safety
    ///
    /// The caller writes every element before other safe code can read it.
    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Self::Tensor> {
        let _ = (device, dtype, shape, order);
        let text = format!("{} cannot allocate memory for others to write to", self.profile().name);
        Err(Error::new(ErrorKind::CopyNeeded, text))
    }
}

// SAFETY: it is the adapter behind the reference.
unsafe impl<A: Adapter + ?Sized> Adapter for &A {
    type Tensor = A::Tensor;

    fn profile(&self) -> &Profile {
        (**self).profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        (**self).consumer()
    }

    fn export(&self, tensor: &A::Tensor) -> Result<Export> {
        (**self).export(tensor)
    }

    fn import(&self, offer: Offer<'_>) -> Result<A::Tensor> {
        (**self).import(offer)
    }

    fn compact(&self, tensor: &A::Tensor) -> Result<A::Tensor> {
        (**self).compact(tensor)
    }

    fn overwritten(&self, tensor: &A::Tensor) -> Result<()> {
        (**self).overwritten(tensor)
    }

    fn overwritten_all(&self, tensors: &[&A::Tensor]) -> Result<(), Failed> {
        (**self).overwritten_all(tensors)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<A::Tensor> {
        // SAFETY: the caller's obligation.
        unsafe { (**self).empty(device, dtype, shape, order) }
    }
}
