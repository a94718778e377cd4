//! Imports leases as tensors of `tch`.

use super::runtime::Runtime;
use super::tensors::Memory;
use ::tch::Tensor;
use bridge_core::{DeviceKind, Lease, Result};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
    let Runtime { libtorch, numbers, .. } = runtime;
    let layout = lease.layout().clone();
    let (shape, strides) = (layout.shape(), layout.strides());
    let memory = Memory { data: lease.data(), dtype: lease.dtype(), device: lease.device(), shape, strides };
    if layout.numel() == 0 {
        return memory.without_elements(libtorch, numbers);
    }
    let handed = Arc::new(Handed(Mutex::new(Some(lease))));
    let context = Arc::into_raw(Arc::clone(&handed)).cast_mut().cast();
    // SAFETY: the lease keeps the memory until libtorch calls the deleter.
    let made = unsafe { memory.wrap(libtorch, numbers, Some(give_back), context) };
    if made.is_err() {
        // The context is kept: libtorch does not say whether it will still call the deleter.
        drop(handed.take());
    }
    made
}
