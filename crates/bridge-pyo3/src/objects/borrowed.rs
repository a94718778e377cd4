//! Tensors for the length of a call.

use super::PyTensor;
use bridge_core::{Access, DType, Device, Error, ErrorKind, Export, Layout, Pending, Result, Stream};
use std::marker::PhantomData;
use std::ptr;

/// A tensor of a framework for the length of a call, as authors of kernels need it: no owner, no event, and for up to
/// four dimensions no allocation. [`PyAdapter::borrow`](crate::PyAdapter::borrow) makes it.
///
/// # Using the memory
///
/// The reference to the Python object keeps the memory, as long as no code replaces it meanwhile (`t.set_`,
/// `t.resize_`, `t.data = …`, `a.resize`).
///
/// A kernel in [`stream`](Self::stream) is like an operation of the framework itself: it runs after the program's
/// work on the tensor, and the framework's allocator reuses the memory after it. The kernel may still run when the
/// borrow ends. For work in any other stream the caller orders in both directions, and keeps the tensor until that work
/// is done.
///
/// Autograd does not see what a kernel does, so a tensor that requires grad may be borrowed as in kernels of PyTorch's
/// own extensions.
#[derive(Debug)]
#[must_use = "a borrow says where the tensor is, and does nothing else"]
pub struct Borrowed<'a> {
    data: usize,
    dtype: DType,
    layout: Layout,
    device: Device,
    access: Access,
    stream: Option<Stream>,
    /// Keeps the memory where the object does not.
    kept: Option<Box<Export>>,
    tensor: PhantomData<&'a PyTensor<'a>>,
}

impl<'a> Borrowed<'a> {
    /// Makes a borrow of a tensor whose first element is at the address `data`, which on the host has been exposed.
    pub fn new(
        _tensor: &'a PyTensor<'_>,
        data: usize,
        dtype: DType,
        layout: Layout,
        device: Device,
        access: Access,
        stream: Option<Stream>,
    ) -> Self {
        Self { data, dtype, layout, device, access, stream, kept: None, tensor: PhantomData }
    }

    /// Makes a borrow of a tensor that was exported, and keeps the export.
    ///
    /// # Errors
    ///
    /// Those of [`without_pending`].
    pub fn of(_tensor: &'a PyTensor<'_>, exported: Export) -> Result<Self> {
        without_pending(exported.pending())?;
        let (data, dtype, layout, device) =
            (exported.data(), exported.dtype(), exported.layout().clone(), exported.device());
        let (access, stream) = (exported.buffer().access(), exported.buffer().stream());
        Ok(Self { data, dtype, layout, device, access, stream, kept: Some(Box::new(exported)), tensor: PhantomData })
    }

    /// Ends the borrow, and returns what keeps the memory where the object does not.
    pub fn into_kept(self) -> Option<Box<Export>> {
        self.kept
    }

    /// Returns a pointer to the first element, on the [`device`](Self::device). It may be null for a tensor without
    /// elements.
    pub fn as_ptr<T>(&self) -> *mut T {
        ptr::with_exposed_provenance_mut(self.data)
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape, in elements.
    pub fn shape(&self) -> &[i64] {
        self.layout.shape()
    }

    /// Returns the strides, in elements. They may be negative or 0.
    pub fn strides(&self) -> &[i64] {
        self.layout.strides()
    }

    /// Returns shape and strides with what follows from them. Its offset means nothing: use [`as_ptr`](Self::as_ptr).
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the device that the memory is on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns whether the memory must not be written to.
    pub fn is_read_only(&self) -> bool {
        self.access.forbids_writes()
    }

    /// Returns whether this is what was exported: the same memory, shape, strides, dtype and access.
    pub fn is(&self, exported: &Export) -> bool {
        let same = (self.data, self.dtype, self.device, self.access)
            == (exported.data(), exported.dtype(), exported.device(), exported.buffer().access());
        let layout = || (self.shape(), self.strides()) == (exported.layout().shape(), exported.layout().strides());
        same && exported.pending().is_none() && layout()
    }

    /// Returns the framework's current stream of the device on this thread; `None` for host memory, which is ready.
    pub fn stream(&self) -> Option<Stream> {
        self.stream
    }
}

/// Refuses a tensor with a deferred operation: its memory does not hold its values.
///
/// # Errors
///
/// [`ErrorKind::CopyNeeded`].
pub fn without_pending(pending: Option<Pending>) -> Result<()> {
    let advice = match pending {
        None => return Ok(()),
        Some(Pending::Conjugation) => "conjugation is deferred: call .resolve_conj() first",
        Some(Pending::Negation) => "negation is deferred: call .resolve_neg() first",
        Some(Pending::NegatedConjugation) => {
            "conjugation and negation are deferred: call .resolve_conj().resolve_neg() first"
        }
        Some(Pending::Packing) => "strides are not a whole number of elements: make a compact copy first",
        Some(_) => "operation is deferred: make a compact copy first",
    };
    Err(Error::new(ErrorKind::CopyNeeded, format!("the memory does not hold the values of the tensor, whose {advice}")))
}
