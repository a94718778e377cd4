//! Adapters and orderings of which one call fails.

use bridge_core::{
    Adapter, Cast, Copies, DType, Deferred, Device, DeviceBuffer, Error, ErrorKind, Export, Failed, Flush, Keep, Offer,
    Order, Ordering, Piece, Planned, Result, Stream, Strided,
};
use std::ops::Range;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

/// The words of the error with which the call fails.
pub(super) const WORDS: &str = "the suite made this call fail";

/// The call without which memory is used too early.
pub(super) const WAIT: &str = "a wait for a stream";

/// Counts the calls of both adapters and of the ordering, and makes one of them fail.
#[derive(Clone)]
pub(super) struct Countdown(Arc<(AtomicI64, OnceLock<&'static str>)>);

impl Countdown {
    /// The call after so many fails.
    pub(super) fn new(calls: usize) -> Self {
        Self(Arc::new((AtomicI64::new(calls as i64), OnceLock::new())))
    }

    /// Counts a call.
    fn call(&self, what: &'static str) -> Result<()> {
        let (left, failed) = &*self.0;
        if left.fetch_sub(1, Relaxed) != 0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Framework, format!("{WORDS}: {}", failed.get_or_init(|| what))))
    }

    /// Lets every later call succeed. Returns the call that has failed, if it was made.
    pub(super) fn stop(&self) -> Option<&'static str> {
        let (left, failed) = &*self.0;
        left.store(i64::MAX, Relaxed);
        failed.get().copied()
    }
}

/// An adapter whose calls are counted.
pub(super) struct FailingAdapter<'a, X> {
    pub(super) adapter: &'a dyn Adapter<Tensor = X>,
    pub(super) countdown: Countdown,
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does, or fails.
unsafe impl<X> Adapter for FailingAdapter<'_, X> {
    type Tensor = X;

    forward_adapter!(X, adapter: profile consumer);

    fn export(&self, tensor: &X) -> Result<Export> {
        self.countdown.call("an export")?;
        self.adapter.export(tensor)
    }

    fn import(&self, offer: Offer) -> Result<X> {
        self.countdown.call("an import, before it took the memory")?;
        let imported = self.adapter.import(offer)?;
        self.countdown.call("an import, after it took the memory")?;
        Ok(imported)
    }

    fn compact(&self, tensor: &X) -> Result<X> {
        self.countdown.call("a copy by the framework")?;
        self.adapter.compact(tensor)
    }

    fn overwritten(&self, tensor: &X) -> Result<()> {
        self.countdown.call("a report of a write")?;
        self.adapter.overwritten(tensor)
    }

    fn overwritten_all(&self, tensors: &[&X]) -> Result<(), Failed> {
        self.countdown.call("a report of several writes").map_err(|error| Failed::new(0, error))?;
        self.adapter.overwritten_all(tensors)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<X> {
        self.countdown.call("an allocation")?;
        // SAFETY: the caller's obligation.
        unsafe { self.adapter.empty(device, dtype, shape, order) }
    }
}

/// An ordering whose calls are counted, where they can fail.
pub(super) struct FailingOrdering {
    pub(super) ordering: Arc<dyn Ordering>,
    pub(super) countdown: Countdown,
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: every method is that of the ordering inside, which has made the promises, or returns an error.
unsafe impl Ordering for FailingOrdering {
    unsafe fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        self.countdown.call(WAIT)?;
        // SAFETY: the caller's promise.
        unsafe { self.ordering.order(device, earlier, later) }
    }

    unsafe fn order_across(&self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        self.countdown.call(WAIT)?;
        // SAFETY: the caller's promise.
        unsafe { self.ordering.order_across(earlier, later) }
    }

    unsafe fn synchronize(&self, device: Device, stream: Stream) -> Result<()> {
        self.countdown.call(WAIT)?;
        // SAFETY: the caller's promise.
        unsafe { self.ordering.synchronize(device, stream) }
    }

    forward! { ordering:
        unsafe fn release_later(device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>);
        unsafe fn release_all_later(device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>);
        unsafe fn release_after_all_work(device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>);
        unsafe fn defer(device: Device, stream: Stream, attempt: Deferred);
        unsafe fn is_captured(device: Device, stream: Stream) -> Option<bool>;
    }

    forward! { ordering:
        fn flush_later(flush: Flush);
    }

    fn copies(&self) -> Option<&dyn Copies> {
        self.ordering.copies().map(|_| self as &dyn Copies)
    }
}

impl FailingOrdering {
    fn inside(&self) -> Result<&dyn Copies> {
        self.ordering.copies().ok_or_else(|| Error::new(ErrorKind::CopyNeeded, "the ordering has no copies"))
    }
}

/// The copies of the ordering inside.
#[deny(clippy::missing_trait_methods)]
// SAFETY: every method is that of the copies inside, which have made the promises, or returns an error.
unsafe impl Copies for FailingOrdering {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()> {
        self.countdown.call("a copy by kernels")?;
        // SAFETY: the caller's promises.
        unsafe { self.inside()?.copy(from, to, flips, stream) }
    }

    unsafe fn copy_all(&self, pieces: &[Piece<'_>], stream: Option<Stream>) -> Result<(), Failed> {
        let inside = self.countdown.call("copies by one kernel").and_then(|()| self.inside());
        let inside = inside.map_err(|error| Failed::new(0, error))?;
        // SAFETY: the caller's promises.
        unsafe { inside.copy_all(pieces, stream) }
    }

    unsafe fn plan(
        &self,
        device: Device,
        pieces: &[Piece<'_>],
        stream: Option<Stream>,
    ) -> Result<Option<Box<dyn Planned>>, Failed> {
        let inside = self.inside().map_err(|error| Failed::new(0, error))?;
        // SAFETY: the caller's promise.
        unsafe { inside.plan(device, pieces, stream) }
    }

    fn casts(&self, cast: Cast) -> Result<()> {
        self.inside()?.casts(cast)
    }

    fn reaches(&self, device: Device) -> Result<()> {
        self.inside()?.reaches(device)
    }

    unsafe fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        keep: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        self.countdown.call("an allocation for a copy")?;
        // SAFETY: the caller's promise.
        unsafe { self.inside()?.allocate(device, nbytes, stream, keep) }
    }

    fn prepare(&self, fresh: Range<usize>) {
        if let Ok(inside) = self.inside() {
            inside.prepare(fresh);
        }
    }
}
