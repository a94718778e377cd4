//! Tensors of TensorFlow's C functions.

use crate::runtime::api::{Core, TF_Tensor};
use bridge_core::{Dims, Error, ErrorKind, Result};
use std::ffi::c_int;
use std::ptr::NonNull;

/// A counted reference to a `TF_Tensor`.
pub(crate) struct RuntimeTensor {
    core: &'static Core,
    raw: NonNull<TF_Tensor>,
}

// SAFETY: the reference is counted atomically, and a tensor is written to only where it is made.
unsafe impl Send for RuntimeTensor {}
// SAFETY: as above.
unsafe impl Sync for RuntimeTensor {}

impl RuntimeTensor {
    /// Takes a reference over; `None` for null.
    ///
    /// # Safety
    ///
    /// `raw` is null or a reference of the caller's.
    pub(crate) unsafe fn from_raw(core: &'static Core, raw: *mut TF_Tensor) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { core, raw })
    }

    /// Returns a new tensor in host memory with a copy of these numbers, in one dimension.
    pub(crate) fn of<T: Copy>(core: &'static Core, code: c_int, numbers: &[T]) -> Result<Self> {
        let (shape, bytes) = ([numbers.len() as i64], numbers.as_ptr().cast());
        // SAFETY: the slice has so many bytes.
        unsafe { Self::copied(core, code, &shape, bytes, size_of_val(numbers)) }
    }

    /// Returns a new tensor in host memory with a copy of these bytes.
    ///
    /// # Safety
    ///
    /// `nbytes` can be read from `bytes`, and are what the dtype and the shape need.
    pub(crate) unsafe fn copied(
        core: &'static Core,
        code: c_int,
        shape: &[i64],
        bytes: *const u8,
        nbytes: usize,
    ) -> Result<Self> {
        // SAFETY: the shape has as many lengths as are passed; the result is ours.
        let tensor = unsafe {
            Self::from_raw(core, (core.TF_AllocateTensor)(code, shape.as_ptr(), shape.len() as c_int, nbytes))
        };
        let tensor = tensor.ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, format!("tensorflow: out of memory allocating {nbytes} bytes"))
        })?;
        // SAFETY: the source is the caller's obligation; the tensor is new, and has as many bytes.
        unsafe { bytes.copy_to_nonoverlapping((core.TF_TensorData)(tensor.raw()).cast(), nbytes) };
        Ok(tensor)
    }

    /// Returns the tensor if its memory is exclusive: TensorFlow has allocated it, and this is the only reference to it
    /// and to the buffer that it is a part of. Otherwise it is the memory of a variable, of a constant, of another
    /// result, or of a framework that has fed it, and the tensor is returned as the error.
    pub(crate) fn exclusive(self) -> Result<Self, Self> {
        // An empty tensor has no memory, and may have no buffer, which the function would read.
        if self.nbytes() == 0 {
            return Ok(self);
        }
        // SAFETY: the tensor is alive. The function takes the reference over and returns one, or returns null.
        let moved = unsafe { (self.core.TF_TensorMaybeMove)(self.raw()) };
        match NonNull::new(moved) {
            Some(raw) => Ok(Self { raw, core: std::mem::ManuallyDrop::new(self).core }),
            None => Err(self),
        }
    }

    pub(crate) fn raw(&self) -> *mut TF_Tensor {
        self.raw.as_ptr()
    }

    /// TensorFlow's code of the dtype.
    pub(crate) fn code(&self) -> c_int {
        // SAFETY: the tensor is alive, here and below.
        unsafe { (self.core.TF_TensorType)(self.raw()) }
    }

    /// Lengths, in elements.
    pub(crate) fn shape(&self) -> Dims {
        // SAFETY: see above; the dimensions are in range.
        unsafe { (0..(self.core.TF_NumDims)(self.raw())).map(|i| (self.core.TF_Dim)(self.raw(), i)).collect() }
    }

    pub(crate) fn nbytes(&self) -> usize {
        // SAFETY: see above.
        unsafe { (self.core.TF_TensorByteSize)(self.raw()) }
    }

    /// The address of the first byte, on the host or on a GPU.
    pub(crate) fn address(&self) -> usize {
        // SAFETY: see above.
        unsafe { (self.core.TF_TensorData)(self.raw()) }.expose_provenance()
    }

    /// Returns the contents of a tensor that has exactly this size.
    ///
    /// # Safety
    ///
    /// The tensor is in host memory, and any bytes are a `T`.
    pub(crate) unsafe fn whole<T: Copy>(&self) -> Option<T> {
        // SAFETY: the caller's obligation.
        (self.nbytes() == size_of::<T>()).then(|| unsafe { self.item(0) }).flatten()
    }

    /// Returns one of the items that a tensor consists of, if it has as many.
    ///
    /// # Safety
    ///
    /// As for [`whole`](Self::whole).
    pub(crate) unsafe fn item<T: Copy>(&self, index: usize) -> Option<T> {
        // SAFETY: the memory is the host's (the caller's obligation) and has enough bytes; they need not be aligned.
        (self.nbytes() / size_of::<T>() > index)
            .then(|| unsafe { (self.core.TF_TensorData)(self.raw()).cast::<T>().add(index).read_unaligned() })
    }
}

impl Drop for RuntimeTensor {
    fn drop(&mut self) {
        // SAFETY: the reference is ours.
        unsafe { (self.core.TF_DeleteTensor)(self.raw()) };
    }
}

/// The error for a function that returned no tensor and reported nothing.
pub(crate) fn no_tensor() -> Error {
    Error::new(ErrorKind::Framework, "tensorflow returned no tensor")
}
