//! Moves of tensors between devices.

use crate::batch::Batch;
use crate::cast::Change;
use crate::conversion::{Conversion, Streams};
use crate::fill::flips;
use crate::fresh::fresh_beside;
use crate::ordering::alive;
use crate::ordering::leak;
use crate::{
    Advice, Consumer, CopiedBy, Device, DeviceKind, Error, ErrorKind, Export, Failed, Lease, Ordering, Piece, Result,
    Stream, Strided,
};
use std::sync::Arc;

impl<F, T> Conversion<'_, F, T> {
    /// Moves the tensor to the device that the caller asks for.
    pub(crate) fn move_away(&self, exported: Export) -> Result<(T, Streams, CopiedBy)> {
        let device = self.options.requested().unwrap_or(exported.device());
        let copies = self.ordering.copies().ok_or_else(|| no_moves(exported.device(), device))?;
        self.batch.iter().for_each(|batch| batch.disorder());
        copies.reaches(exported.device()).and_then(|()| copies.reaches(device))?;
        if let Some((fresh, target)) = self.fresh_of(self.to, device, &exported)? {
            let (ordered, _) = move_into(exported, target, self.from.consumer(), self.ordering)?;
            return Ok((fresh, ordered, CopiedBy::Move));
        }
        let (dtype, shape) = (exported.dtype(), exported.layout().shape());
        let consumer = self.to.consumer();
        let target = fresh_beside((self.profile, &consumer), self.ordering, device, (dtype, shape), self.order())?;
        let (ordered, target) = move_into(exported, target, self.from.consumer(), self.ordering)?;
        let (result, _) = self.import_for(consumer, target, true)?;
        Ok((result, ordered, CopiedBy::Move))
    }
}

/// Moves `source` into `target`, memory of another device, by the [`Copies`](crate::Copies) of `ordering`. Both
/// have the same shape and dtype. `consumer` is that of the framework of `source`. Returns the two streams that were
/// ordered, and the target; work after its stream sees the elements. [`Route`] says where the work is.
///
/// # Errors
///
/// [`ErrorKind::Device`] without copies, [`ErrorKind::CopyNeeded`] for what they cannot move, and those of
/// [`Ordering::order_across`] and [`Copies::copy`](crate::Copies::copy). The source is returned after what was
/// launched. The target is dropped, or leaked where work on it cannot be ordered.
pub(crate) fn move_into(
    source: Export,
    target: Export,
    consumer: Arc<dyn Consumer>,
    ordering: &Arc<dyn Ordering>,
) -> Result<(Streams, Export)> {
    ordering.copies().ok_or_else(|| no_moves(source.device(), target.device()))?;
    let change = (flips(&source, &target).ok_or_else(unmovable)?, None);
    if source.layout().numel() == 0 {
        return Ok((None, target));
    }
    let (route, moving) = (Route::between(&source, &target), Moving { source, target, change, consumer });
    let (ordered, mut targets) = route.move_all(vec![moving], None, ordering).map_err(|failed| failed.error)?;
    Ok((ordered, targets.remove(0)))
}

/// A tensor that is moved.
pub(crate) struct Moving {
    pub(crate) source: Export,
    pub(crate) target: Export,
    pub(crate) change: Change,
    /// That of the framework of the source.
    pub(crate) consumer: Arc<dyn Consumer>,
}

/// From where to where elements move, and in which streams.
///
/// | from | to | the work is in |
/// |---|---|---|
/// | host | device | the stream of the target |
/// | device | host | the stream of the source, and the host waits |
/// | device | device | the stream of the source, after that of the target, which then waits for it |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    here: Device,
    there: Device,
    /// The streams of the two sides; `None` for the host.
    owner: Option<Stream>,
    reader: Option<Stream>,
    /// The stream that writes pinned memory of the source, which the host reads.
    writer: Option<(Device, Stream)>,
}

impl Route {
    pub(crate) fn between(source: &Export, target: &Export) -> Self {
        Self::within((source, source.buffer().stream()), (target, target.buffer().stream()))
    }

    /// Returns the route between two tensors whose memory is ready in these streams.
    pub(crate) fn within(
        (source, owned): (&Export, Option<Stream>),
        (target, read): (&Export, Option<Stream>),
    ) -> Self {
        let (here, there) = (source.device(), target.device());
        let owner = on_device(here).then(|| owned.unwrap_or(Stream::LEGACY));
        let reader = on_device(there).then(|| read.unwrap_or(Stream::LEGACY));
        let writer = owned.filter(|_| owner.is_none()).map(|writer| (source.buffer().device(), writer));
        Self { here, there, owner, reader, writer }
    }

    /// Returns whether the host waits for the elements.
    pub(crate) fn ends_on_host(&self) -> bool {
        self.reader.is_none()
    }

    /// Orders what is earlier than the move.
    ///
    /// # Errors
    ///
    /// Those of [`Ordering::synchronize`] and [`Ordering::order_across`].
    pub(crate) fn begin(&self, ordering: &dyn Ordering) -> Result<()> {
        if let Some((device, writer)) = self.writer {
            alive(ordering).synchronize(device, writer)?;
        }
        match self.owner.zip(self.reader) {
            // The target's memory is ready after earlier work in its stream.
            Some((owner, reader)) => alive(ordering).order_across((self.there, reader), (self.here, owner)),
            None => Ok(()),
        }
    }

    /// Moves the elements.
    ///
    /// # Errors
    ///
    /// Those of [`Copies::copy_all`](crate::Copies::copy_all), and [`ErrorKind::Device`] without copies.
    ///
    /// # Safety
    ///
    /// That of [`Copies::copy_all`](crate::Copies::copy_all), after [`begin`](Self::begin).
    pub(crate) unsafe fn copy(&self, pieces: &[Piece<'_>], ordering: &dyn Ordering) -> Result<(), Failed> {
        let first = |error| Failed { index: 0, error };
        let copies = ordering.copies().ok_or_else(|| first(no_moves(self.here, self.there)))?;
        let stream = self.owner.or(self.reader);
        match *pieces {
            // SAFETY: the caller's promises.
            [Piece { from, to, flips, cast: None }] => unsafe { copies.copy(from, to, flips, stream) }.map_err(first),
            // SAFETY: as above.
            _ => unsafe { copies.copy_all(pieces, stream) },
        }
    }

    /// Makes the stream of the target wait for the move. Returns both streams.
    ///
    /// # Errors
    ///
    /// Those of [`Ordering::order_across`].
    pub(crate) fn end(&self, ordering: &dyn Ordering) -> Result<Streams> {
        let Some((owner, reader)) = self.owner.zip(self.reader) else { return Ok(None) };
        alive(ordering).order_across((self.here, owner), (self.there, reader))?;
        Ok(Some((owner, reader)))
    }

    /// Waits for the stream of the source. Returns whether the work there has run.
    pub(crate) fn synchronize(&self, ordering: &dyn Ordering) -> bool {
        self.owner.is_none_or(|owner| alive(ordering).synchronize(self.here, owner).is_ok())
    }

    /// Returns whether the source has no stream in which it could be returned after a move that is pending.
    pub(crate) fn is_unordered(&self, source: &Export) -> bool {
        source.buffer().stream().is_none() && self.owner.and(self.reader).is_some()
    }

    /// Moves tensors on this route, as [`move_into`] does, all together. `batch` returns the sources, if there is one.
    ///
    /// # Errors
    ///
    /// Those of [`move_into`], with the index of the tensor.
    pub(crate) fn move_all(
        &self,
        moves: Vec<Moving>,
        batch: Option<&Batch>,
        ordering: &Arc<dyn Ordering>,
    ) -> Result<(Streams, Vec<Export>), Failed> {
        self.begin(&**ordering).map_err(|error| Failed { index: 0, error })?;
        let side = |exported: &'_ Export| (exported.device(), exported.data());
        let mut pieces = Vec::with_capacity(moves.len());
        for Moving { source, target, change: (flips, cast), .. } in &moves {
            let ((here, from), (there, to)) = (side(source), side(target));
            let from = Strided { device: here, data: from, layout: source.layout() };
            let to = Strided { device: there, data: to, layout: target.layout() };
            pieces.push(Piece { from, to, flips: *flips, cast: *cast });
        }
        // SAFETY: the buffers are alive, and by the contract of `DeviceBuffer` so are their bytes and streams;
        // `Export::new` has checked that the views stay inside. The stream is the one that the elements are ready in,
        // or the one that the targets' memory is ready in; between devices `begin` has ordered it after the other one.
        // Those that move several tensors have checked that no target shares bytes with another side.
        let copied = unsafe { self.copy(&pieces, &**ordering) };
        let arrived = self.end(&**ordering);
        let settled = arrived.is_ok() || self.synchronize(&**ordering);
        let mut targets = Vec::with_capacity(moves.len());
        for Moving { source, target, consumer, .. } in moves {
            targets.push(target);
            // The lease returns the source after the work that read it, also where part of a failed copy was launched.
            // Memory without a stream is returned at once.
            if self.is_unordered(&source) && !self.synchronize(&**ordering) {
                leak(source);
                continue;
            }
            let lease = Lease::new(source, self.owner, false, consumer, Arc::clone(ordering));
            match batch {
                Some(batch) => batch.hold(lease),
                None => drop(lease),
            }
        }
        match copied.and_then(|()| arrived.map_err(|error| Failed { index: 0, error })) {
            Ok(ordered) => Ok((ordered, targets)),
            Err(failed) => {
                if !settled {
                    // Their owner would reuse the memory under the copy.
                    targets.into_iter().for_each(leak);
                }
                Err(failed)
            }
        }
    }
}

/// Returns the error for a deferred operation that a move does not do.
pub(crate) fn unmovable() -> Error {
    let text = "the tensor has a deferred operation, which a move cannot apply: copy it with its own framework first";
    Error::new(ErrorKind::CopyNeeded, text)
}

/// Whether streams write memory of this device.
fn on_device(device: Device) -> bool {
    ![DeviceKind::CPU, DeviceKind::CUDA_HOST].contains(&device.kind)
}

pub(crate) fn no_moves(from: Device, to: Device) -> Error {
    let text = format!(
        "the tensor is on {from}, not on {to}, and the ordering cannot move it: move it with its own framework first"
    );
    Error::new(ErrorKind::Device, text).or_advise(Advice::Copies)
}
