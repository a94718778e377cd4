//! The ordering of the process, with copies.

use crate::Copier;
use bridge_core::{Copies, Deferred, Device, DeviceBuffer, Flush, Ordering, Result, Stream};
use std::sync::{Arc, LazyLock};

/// Returns [`bridge_cuda::ordering`] with the copies of this crate.
pub fn ordering() -> &'static Arc<dyn Ordering> {
    static ORDERING: LazyLock<Arc<dyn Ordering>> = LazyLock::new(|| Arc::new(WithCopies(&Copier)));
    &ORDERING
}

/// Returns [`bridge_cuda::ordering`] with other copies, such as a wrapper of [`Copier`].
pub fn ordering_with(copies: &'static dyn Copies) -> Arc<dyn Ordering> {
    Arc::new(WithCopies(copies))
}

struct WithCopies(&'static dyn Copies);

#[deny(clippy::missing_trait_methods)]
// SAFETY: every method but `copies` is that of the ordering of bridge-cuda, which has made the promises.
unsafe impl Ordering for WithCopies {
    unsafe fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { bridge_cuda::ordering().order(device, earlier, later) }
    }

    unsafe fn order_across(&self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { bridge_cuda::ordering().order_across(earlier, later) }
    }

    unsafe fn release_later(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        // SAFETY: the caller's promise.
        unsafe { bridge_cuda::ordering().release_later(device, stream, buffer) };
    }

    unsafe fn synchronize(&self, device: Device, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { bridge_cuda::ordering().synchronize(device, stream) }
    }

    unsafe fn defer(&self, device: Device, stream: Stream, attempt: Deferred) {
        // SAFETY: the caller's promise.
        unsafe { bridge_cuda::ordering().defer(device, stream, attempt) };
    }

    unsafe fn release_all_later(&self, device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
        // SAFETY: the caller's promise.
        unsafe { bridge_cuda::ordering().release_all_later(device, stream, buffers) };
    }

    unsafe fn release_after_all_work(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        // SAFETY: the caller's promise.
        unsafe { bridge_cuda::ordering().release_after_all_work(device, stream, buffer) };
    }

    unsafe fn is_captured(&self, device: Device, stream: Stream) -> Option<bool> {
        // SAFETY: the caller's promise.
        unsafe { bridge_cuda::ordering().is_captured(device, stream) }
    }

    fn flush_later(&self, flush: Flush) {
        bridge_cuda::ordering().flush_later(flush);
    }

    fn copies(&self) -> Option<&dyn Copies> {
        Some(self.0)
    }
}
