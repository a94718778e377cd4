//! Makes tensors of `tch`: over memory, and fresh ones to copy into.

use super::libtorch::{Deleter, Libtorch, adopt, failed};
use super::numbers::Numbers;
use ::tch::Tensor;
use bridge_core::{COPY_ALIGNMENT, DType, Device, DeviceKind, Error, ErrorKind, Layout, Order, Result};
use std::ffi::c_void;
use std::ptr::{self, NonNull};

/// Strided memory that libtorch is to see as a tensor.
pub(super) struct Memory<'a> {
    pub(super) data: usize,
    pub(super) dtype: DType,
    pub(super) device: Device,
    pub(super) shape: &'a [i64],
    pub(super) strides: &'a [i64],
}

impl Memory<'_> {
    /// Returns a tensor of this shape without elements, which keeps nothing.
    pub(super) fn without_elements(self, libtorch: &Libtorch, numbers: &Numbers) -> Result<Tensor> {
        // SAFETY: for a null address libtorch allocates the tensor itself, and calls no deleter.
        unsafe { Self { data: 0, ..self }.wrap(libtorch, numbers, None, ptr::null_mut()) }
    }

    /// # Safety
    ///
    /// The memory stays valid until the deleter is called, which takes `context`.
    pub(super) unsafe fn wrap(
        &self,
        libtorch: &Libtorch,
        numbers: &Numbers,
        deleter: Option<Deleter>,
        context: *mut c_void,
    ) -> Result<Tensor> {
        let (kind, index) = numbers.place(self.device)?;
        let number = numbers.number(self.dtype)?;
        let mut tensor = ptr::null_mut();
        // SAFETY: shape and strides have as many lengths as stated; the result is writable. The caller guarantees the
        // memory. The deleter catches panics.
        let code = unsafe {
            (libtorch.from_blob)(
                ptr::with_exposed_provenance_mut(self.data),
                self.shape.len() as i64,
                self.shape.as_ptr(),
                self.strides.as_ptr(),
                0,
                number,
                kind,
                index,
                &mut tensor,
                (libtorch.layout_strided)(),
                ptr::null(),
                0,
                deleter,
                context,
            )
        };
        let tensor = NonNull::new(tensor).filter(|_| code == 0).ok_or_else(|| failed("does not take the memory"))?;
        // SAFETY: the function has returned a new tensor.
        Ok(unsafe { adopt(tensor) })
    }
}

/// Returns a tensor of this dtype without elements.
pub(super) fn none_of(libtorch: &Libtorch, numbers: &Numbers, dtype: DType) -> Result<Tensor> {
    // For a null address libtorch would allocate the tensor, and warn that some dtypes are experimental.
    let data = COPY_ALIGNMENT;
    let memory = Memory { data, dtype, device: Device::CPU, shape: &[0], strides: &[1] };
    // SAFETY: there are no elements.
    unsafe { memory.wrap(libtorch, numbers, None, ptr::null_mut()) }
}

/// Calls `empty_strided`, which aligns to 64 bytes on the host and to 512 on a device.
pub(super) fn empty(
    libtorch: &Libtorch,
    numbers: &Numbers,
    device: Device,
    dtype: DType,
    shape: &[i64],
    order: Order,
) -> Result<Tensor> {
    let (kind, index) = numbers.place(device)?;
    let number = numbers.number(dtype)?;
    let strides = order.strides(shape);
    let mut tensor = ptr::null_mut();
    // SAFETY: shape and strides have as many lengths as stated; the result is writable.
    let code = unsafe {
        let ndim = shape.len() as i64;
        (libtorch.empty_strided)(ndim, shape.as_ptr(), strides.as_ptr(), number, kind, index, &mut tensor)
    };
    let tensor = NonNull::new(tensor).filter(|_| code == 0).ok_or_else(|| match device.kind {
        DeviceKind::CPU => match Layout::new(dtype, shape, None, 0) {
            // Of a tensor that there can be, only the memory is missing.
            Ok(layout) => {
                let text = format!("libtorch: out of memory allocating {} bytes", layout.nbytes());
                Error::new(ErrorKind::OutOfMemory, text)
            }
            Err(error) => error,
        },
        _ => failed("allocates no such tensor"),
    })?;
    // SAFETY: the function has returned a new tensor.
    Ok(unsafe { adopt(tensor) })
}
