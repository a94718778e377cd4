//! Imports leases as tensors of `tch`, and makes tensors to copy into.

use super::libtorch::{Deleter, adopt, failed};
use super::runtime::Runtime;
use ::tch::Tensor;
use bridge_core::{COPY_ALIGNMENT, DType, Device, DeviceKind, Error, ErrorKind, Layout, Lease, Order, Result};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

/// The lease while libtorch takes it: a failing call may or may not have called the deleter.
struct Handed(Mutex<Option<Lease>>);

impl Handed {
    fn take(&self) -> Option<Lease> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Drops the lease, on any thread.
unsafe extern "C" fn give_back(_: *mut c_void, context: *mut c_void) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `wrap` made the context by `Arc::into_raw`, and libtorch calls a deleter once.
        drop(unsafe { Arc::from_raw(context.cast_const().cast::<Handed>()) }.take());
    }));
}

pub(crate) fn wrap(runtime: &Runtime, lease: Lease) -> Result<Tensor> {
    if lease.device().kind == DeviceKind::CUDA {
        runtime.start_cuda(lease.device())?;
    }
    let layout = lease.layout().clone();
    let (shape, strides) = (layout.shape(), layout.strides());
    let memory = Memory { data: lease.data(), dtype: lease.dtype(), device: lease.device(), shape, strides };
    if layout.numel() == 0 {
        return memory.without_elements(runtime);
    }
    let handed = Arc::new(Handed(Mutex::new(Some(lease))));
    let context = Arc::into_raw(Arc::clone(&handed)).cast_mut().cast();
    // SAFETY: the lease keeps the memory until libtorch calls the deleter.
    let made = unsafe { memory.wrap(runtime, Some(give_back), context) };
    if made.is_err() {
        // The context is kept: libtorch does not say whether it will still call the deleter.
        drop(handed.take());
    }
    made
}

/// Strided memory that libtorch is to see as a tensor.
struct Memory<'a> {
    data: usize,
    dtype: DType,
    device: Device,
    shape: &'a [i64],
    strides: &'a [i64],
}

impl Memory<'_> {
    /// Returns a tensor of this shape without elements, which keeps nothing.
    fn without_elements(self, runtime: &Runtime) -> Result<Tensor> {
        // SAFETY: for a null address libtorch allocates the tensor itself, and calls no deleter.
        unsafe { Self { data: 0, ..self }.wrap(runtime, None, ptr::null_mut()) }
    }

    /// # Safety
    ///
    /// The memory stays valid until the deleter is called, which takes `context`.
    unsafe fn wrap(&self, runtime: &Runtime, deleter: Option<Deleter>, context: *mut c_void) -> Result<Tensor> {
        let libtorch = &runtime.libtorch;
        let (kind, index) = runtime.place(self.device)?;
        let number = runtime.number(self.dtype)?;
        let mut tensor = ptr::null_mut();
        // SAFETY: shape and strides have as many lengths as stated; the result is writable. The caller guarantees the
        // memory. The deleter lets no panic out.
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
pub(crate) fn none_of(runtime: &Runtime, dtype: DType) -> Result<Tensor> {
    // For a null address libtorch would allocate the tensor, and warn that some dtypes are experimental.
    let data = COPY_ALIGNMENT;
    let memory = Memory { data, dtype, device: Device::CPU, shape: &[0], strides: &[1] };
    // SAFETY: there are no elements.
    unsafe { memory.wrap(runtime, None, ptr::null_mut()) }
}

/// Calls `empty_strided`, which aligns to 64 bytes on the host and to 512 on a device.
pub(crate) fn empty(runtime: &Runtime, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Tensor> {
    let (kind, index) = runtime.place(device)?;
    let number = runtime.number(dtype)?;
    let strides = order.strides(shape);
    let mut tensor = ptr::null_mut();
    // SAFETY: shape and strides have as many lengths as stated; the result is writable.
    let code = unsafe {
        let ndim = shape.len() as i64;
        (runtime.libtorch.empty_strided)(ndim, shape.as_ptr(), strides.as_ptr(), number, kind, index, &mut tensor)
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
