//! Fills memory that exists with the elements of an exported tensor.

use crate::batch::Batch;
use crate::conversion::{Streams, order_after};
use crate::{Consumer, DeviceKind, ErrorKind, Export, Lease, Ordering, Result, Strided};
use std::sync::Arc;

/// What [`fill`] returns: the two streams that it ordered, where they differ, or the source as it was.
pub(crate) type Filled = std::result::Result<Streams, Export>;

/// Copies `source` into `target` by the [`Copies`](crate::Copies) of `ordering`, in the stream of `target`, with the
/// deferred operations of both applied. That stream waits for the owner of `source` first, and the owner then waits
/// for that stream before it reuses the memory: in a batch, at its end. `consumer` is that of the framework of
/// `target`, whose current stream
/// is the stream of `target`.
///
/// Both have the same shape and dtype and share no bytes; `target` is writable. Returns the source as it was where the
/// ordering has no copies, or none for this one.
///
/// # Errors
///
/// Those of [`Ordering::order`] and [`Copies::copy`](crate::Copies::copy). The source is then dropped; if anything was
/// launched, after it.
pub(crate) fn fill(
    source: Export,
    target: &Export,
    consumer: Arc<dyn Consumer>,
    ordering: &Arc<dyn Ordering>,
    batch: Option<&Batch>,
) -> Result<Filled> {
    let Some(copies) = ordering.copies() else { return Ok(Err(source)) };
    let Some(flips) = flips(&source, target) else { return Ok(Err(source)) };
    let stream = target.buffer().stream();
    if stream.is_none() && target.device().kind != DeviceKind::CPU {
        return Ok(Err(source));
    }
    if source.layout().numel() == 0 {
        return Ok(Ok(None));
    }
    let ordered = order_after(ordering, &source, stream, batch)?;
    let side = |exported: &Export| (exported.device(), exported.data());
    let ((from, start), (to, first)) = (side(&source), side(target));
    let from = Strided { device: from, data: start, layout: source.layout() };
    let to = Strided { device: to, data: first, layout: target.layout() };
    // SAFETY: both buffers are alive, and by the contract of `DeviceBuffer` so are their bytes and streams;
    // `Export::new` has checked that the views stay inside. `order_after` has ordered the stream, which is the one that
    // the target's memory is ready in; the lease below makes the owner of the source wait for it.
    let copied = unsafe { copies.copy(from, to, flips, stream) };
    if copied.as_ref().is_err_and(|error| error.kind() == ErrorKind::CopyNeeded) {
        return Ok(Err(source));
    }
    // A lease orders the return of what it held. It is made also where the copy has failed: part of it may be launched.
    let lease = Lease::new(source, stream, false, consumer, Arc::clone(ordering));
    match batch {
        Some(batch) => batch.hold(lease),
        None => drop(lease),
    }
    copied?;
    Ok(Ok(ordered))
}

/// Returns the bits to flip in each element, for the deferred operations of both sides, if flipping bits
/// does them. An operation that is deferred for the target is its own inverse, so the elements to store have it
/// applied. Where they are cast it is applied to the source: casts round both signs alike.
pub(crate) fn flips(source: &Export, target: &Export) -> Option<u128> {
    let of_target = target
        .pending()
        .map_or(Some(0), |pending| pending.flips(target.dtype()).and_then(|_| pending.flips(source.dtype())));
    Some(pending(source)? ^ of_target?)
}

/// Returns the bits to flip in each element for the deferred operation, if flipping bits does it.
pub(crate) fn pending(exported: &Export) -> Option<u128> {
    exported.pending().map_or(Some(0), |pending| pending.flips(exported.dtype()))
}
