//! Moves of tensors between devices.

use crate::conversion::{Conversion, Streams};
use crate::fill::flips;
use crate::fresh::fresh_beside;
use crate::leak::leak;
use crate::{
    Advice, Consumer, CopiedBy, Device, DeviceKind, Error, ErrorKind, Lease, Lent, Ordering, Result, Stream, Strided,
};
use std::sync::Arc;

impl<F, T> Conversion<'_, F, T> {
    /// Moves the tensor to the device that the caller asks for.
    pub(crate) fn move_away(&self, lent: Lent) -> Result<(T, Streams, CopiedBy)> {
        let device = self.options.requested().unwrap_or(lent.device());
        let copies = self.ordering.copies().ok_or_else(|| no_moves(lent.device(), device))?;
        self.batch.iter().for_each(|batch| batch.disorder());
        copies.reaches(lent.device()).and_then(|()| copies.reaches(device))?;
        if let Some((fresh, target)) = self.fresh_of(self.to, device, &lent)? {
            let (ordered, _) = move_into(lent, target, self.from.consumer(), self.ordering)?;
            return Ok((fresh, ordered, CopiedBy::Move));
        }
        let (dtype, shape) = (lent.dtype(), lent.layout().shape());
        let target = fresh_beside((self.to, self.profile), self.ordering, device, (dtype, shape), self.order())?;
        let (ordered, target) = move_into(lent, target, self.from.consumer(), self.ordering)?;
        let (result, _) = self.import(target, true)?;
        Ok((result, ordered, CopiedBy::Move))
    }
}

/// Moves `source` into `target`, memory of another device, by the [`Copies`](crate::Copies) of `ordering`. Both
/// have the same shape and dtype. `consumer` is that of the framework of `source`. Returns the two streams that were
/// ordered, and the target; work after its stream sees the elements.
///
/// | from | to | the work is in |
/// |---|---|---|
/// | host | device | the stream of the target |
/// | device | host | the stream of the source, and the host waits |
/// | device | device | the stream of the source, after that of the target, which then waits for it |
///
/// # Errors
///
/// [`ErrorKind::Device`] without copies, [`ErrorKind::CopyNeeded`] for what they cannot move, and those of
/// [`Ordering::order_across`] and [`Copies::copy`](crate::Copies::copy). The source is returned after what was
/// launched. The target is dropped, or leaked where work on it cannot be ordered.
pub(crate) fn move_into(
    source: Lent,
    target: Lent,
    consumer: Arc<dyn Consumer>,
    ordering: &Arc<dyn Ordering>,
) -> Result<(Option<(Stream, Stream)>, Lent)> {
    let (here, there) = (source.device(), target.device());
    let copies = ordering.copies().ok_or_else(|| no_moves(here, there))?;
    let flips = flips(&source, &target).ok_or_else(unmovable)?;
    if source.layout().numel() == 0 {
        return Ok((None, target));
    }
    let owner = on_device(here).then(|| source.buffer().stream().unwrap_or(Stream::LEGACY));
    let reader = on_device(there).then(|| target.buffer().stream().unwrap_or(Stream::LEGACY));
    if let (None, Some(writer)) = (owner, source.buffer().stream()) {
        // The host reads pinned memory that a device writes.
        ordering.synchronize(source.buffer().device(), writer)?;
    }
    if let Some((owner, reader)) = owner.zip(reader) {
        // The target's memory is ready after earlier work in its stream.
        ordering.order_across((there, reader), (here, owner))?;
    }
    let from = Strided { device: here, data: source.data(), layout: source.layout() };
    let to = Strided { device: there, data: target.data(), layout: target.layout() };
    // SAFETY: both buffers are alive, and by the contract of `DeviceBuffer` so are their bytes and streams; `Lent::new`
    // has checked that the views stay inside. The stream is the one that the elements are ready in, or the one that
    // the target's memory is ready in; between devices it was ordered after the other one above.
    let copied = unsafe { copies.copy(from, to, flips, owner.or(reader)) };
    let ordered = owner.zip(reader);
    let arrived = ordered.map_or(Ok(()), |(owner, reader)| ordering.order_across((here, owner), (there, reader)));
    let synchronize = || owner.is_none_or(|owner| ordering.synchronize(here, owner).is_ok());
    let settled = arrived.is_ok() || synchronize();
    // The lease returns the source after the work that read it, also where part of a failed copy was launched. Memory
    // without a stream is returned at once.
    if source.buffer().stream().is_some() || !on_device(there) || synchronize() {
        drop(Lease::new(source, owner, false, consumer, Arc::clone(ordering)));
    } else {
        leak(source);
    }
    match copied.and(arrived) {
        Ok(()) => Ok((ordered, target)),
        Err(error) => {
            // Its owner would reuse the memory under the copy.
            if settled {
                drop(target)
            } else {
                leak(target)
            }
            Err(error)
        }
    }
}

/// Returns the error for a deferred operation that a move does not do.
pub(crate) fn unmovable() -> Error {
    let text = "the tensor has a pending operation that no bits express: copy it with its own framework first";
    Error::new(ErrorKind::CopyNeeded, text)
}

/// Whether streams write memory of this device.
fn on_device(device: Device) -> bool {
    ![DeviceKind::CPU, DeviceKind::CUDA_HOST].contains(&device.kind)
}

pub(crate) fn no_moves(from: Device, to: Device) -> Error {
    let text = format!(
        "the tensor is on {from}, not on {to}, and the ordering has no copies that move it: move it with its own framework first"
    );
    Error::new(ErrorKind::Device, text).or_advise(Advice::Copies)
}
