//! The side of a loan that takes: consumers that are known only by a protocol.

use crate::driver;
use crate::origin::READER;
use bridge_core::{Consumer, Device, DeviceKind, Keep, Result, Stream, Views};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// A stream that the caller names for a loan, and what keeps it alive.
#[derive(Clone)]
pub struct Named {
    stream: Stream,
    keep: Option<Keep>,
}

bridge_core::debug_fields!(impl[] Named: stream);

impl Named {
    /// Names a stream. `keep` is as that of [`Consumer::keep`].
    ///
    /// # Safety
    ///
    /// The stream is not destroyed before `keep` has been dropped; without it, before the loans that it is named for, and
    /// all views of them, have ended.
    pub const unsafe fn new(stream: Stream, keep: Option<Keep>) -> Self {
        Self { stream, keep }
    }

    /// Returns the stream.
    pub const fn stream(&self) -> Stream {
        self.stream
    }
}

/// Consumers that are known only by a protocol, and borrow a tensor of a framework.
pub(crate) struct Borrower {
    pub(crate) framework: Arc<dyn Consumer>,
    pub(crate) named: Option<Named>,
    /// Set once the stream is known to be one that the device can be ordered with.
    checked: OnceLock<()>,
    /// Whether a consumer has named another stream. Nothing keeps that one alive, so no later call may name it.
    elsewhere: AtomicBool,
}

impl Borrower {
    pub(crate) fn new(framework: Arc<dyn Consumer>, named: Option<Named>) -> Self {
        Self { framework, named, checked: OnceLock::new(), elsewhere: AtomicBool::new(false) }
    }

    /// A borrower whose stream is not looked up in the driver.
    #[cfg(test)]
    pub(crate) fn of_no_driver(framework: Arc<dyn Consumer>, named: Option<Named>) -> Self {
        Self { checked: OnceLock::from(()), ..Self::new(framework, named) }
    }

    /// Takes note of a stream that a consumer has named.
    pub(crate) fn used_in(&self, stream: Stream) {
        if self.named() != Some(stream) {
            self.elsewhere.store(true, Relaxed);
        }
    }

    /// Refuses a stream of another device, and to name none where the driver needs one.
    fn check(&self, device: Device) -> Result<()> {
        if self.checked.get().is_none() {
            driver::check(device, self.named())?;
            let _ = self.checked.set(());
        }
        Ok(())
    }

    /// Returns the stream that the caller has named.
    pub(crate) fn named(&self) -> Option<Stream> {
        self.named.as_ref().map(|named| named.stream)
    }

    /// Returns the stream that is current in the framework of the tensor.
    ///
    /// # Errors
    ///
    /// Those of the framework.
    pub(crate) fn framework_stream(&self, device: Device) -> Result<Stream> {
        // A framework without streams has moved a tensor of the host to a device.
        Ok(self.framework.current_stream(device)?.map_or(Stream::LEGACY, Stream::on_any_thread))
    }
}

// SAFETY: the library that borrows uses the stream that the caller has named, and releases wait for the whole device.
unsafe impl Consumer for Borrower {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind == DeviceKind::CPU {
            return Ok(None);
        }
        self.check(device)?;
        match self.named() {
            Some(stream) => Ok(Some(stream)),
            None => self.framework_stream(device).map(Some),
        }
    }

    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        match &self.named {
            Some(named) => named.keep.clone(),
            None => self.framework.keep(device, stream),
        }
    }

    fn uses_other_streams(&self) -> bool {
        self.named.is_none() || self.elsewhere.load(Relaxed)
    }

    fn views(&self) -> &Views {
        READER.views()
    }
}
