//! The ladder of copies: who makes the copy of a tensor, tried in order.

use crate::alive::alive;
use crate::conversion::{Conversion, Streams};
use crate::fill::{fill, pending};
use crate::fresh::{fresh_beside, prepare};
use crate::overlap::share_bytes;
use crate::plan::{loses_read_only, moves_to, needed};
use crate::{
    Adapter, Advice, Device, DeviceKind, Dims, Error, ErrorKind, Lent, Options, Order, Ordering, Result, Reuse,
    host_copy,
};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Who makes a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CopiedBy {
    /// The kernels of the ordering's [`Copies`](crate::Copies), on the device.
    Kernels,
    /// The loops of the ordering's [`Copies`](crate::Copies) or of core, on the host.
    Host,
    /// The ordering's [`Copies`](crate::Copies), from one device to another.
    Move,
    /// The producer, with its own kernels.
    Producer,
    /// The consumer, with its own kernels.
    Consumer,
}

impl fmt::Display for CopiedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kernels => "kernels",
            Self::Host => "host",
            Self::Move => "move",
            Self::Producer => "producer",
            Self::Consumer => "consumer",
        })
    }
}

impl CopiedBy {
    /// Returns who fills memory of this device by [`Copies`](crate::Copies).
    pub(crate) fn filling(device: Device) -> Self {
        if device.kind == DeviceKind::CPU { Self::Host } else { Self::Kernels }
    }
}

/// Returns who would make the copy of `lent`, an export of `from`, on its way to `to`. Nothing is copied: where the
/// kernels turn out not to copy such elements, the frameworks do, and the other way round for a producer that turns out
/// to have no kernels.
pub fn copied_by<F, T>(
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    lent: &Lent,
    ordering: &Arc<dyn Ordering>,
    options: &Options,
) -> CopiedBy {
    if moves_to(lent.device(), to.profile(), options).is_some() {
        return CopiedBy::Move;
    }
    let device = Conversion::new(from, to, ordering, options).landing(lent);
    // A tensor without elements takes no memory. It has as many dimensions: not every framework has others.
    let none = Dims::from_elem(0, lent.layout().shape().len().max(1));
    // SAFETY: the tensors have no elements.
    let lends = unsafe {
        to.empty(device, lent.dtype(), &none, Order::RowMajor).is_ok()
            || from.empty(lent.device(), lent.dtype(), &none, Order::RowMajor).is_ok()
    };
    let copies = ordering.copies().is_some() && pending(lent).is_some();
    if to.profile().owns_memory {
        return CopiedBy::filling(device);
    }
    if copies && lends { CopiedBy::filling(device) } else { CopiedBy::Producer }
}

/// A copy as a tensor of the consumer, the streams that were ordered for it, and who made it.
type Copied<T> = (T, Streams, CopiedBy);

/// What a rung of the ladder returns: the copy, or the tensor as it was where this one makes no copy of it.
type Rung<T> = std::result::Result<T, Lent>;

impl<F, T> Conversion<'_, F, T> {
    /// Imports a copy, made by the first that can make it: see [`transfer`](crate::transfer).
    pub(crate) fn copy(&self, lent: Lent, tensor: &F) -> Result<Copied<T>> {
        let lent = match self.by_ordering_into_consumer(lent)? {
            Ok(copied) => return Ok(copied),
            Err(lent) => lent,
        };
        if self.profile.owns_memory {
            return self.by_core_into_consumer(lent, tensor);
        }
        let lent = match self.by_ordering_into_producer(lent)? {
            Ok(copied) => return Ok(copied),
            Err(lent) => lent,
        };
        let lent = match self.by_producer(lent, tensor)? {
            Ok(copied) => return Ok(copied),
            Err(lent) => lent,
        };
        if lent.device().kind == DeviceKind::CPU && lent.pending().is_none() {
            return self.by_core(lent);
        }
        match self.by_ordering_beside(lent)? {
            Ok(copied) => Ok(copied),
            Err(lent) => self.by_consumer(lent),
        }
    }

    /// The ordering's copies fill fresh memory of the consumer, which is the result.
    fn by_ordering_into_consumer(&self, lent: Lent) -> Result<Rung<Copied<T>>> {
        let (memory, device) = (lent.device(), self.landing(&lent));
        let filled = self.by_ordering_into(self.to, lent.seen_on(device))?;
        Ok(match filled {
            Ok((copy, _, ordered)) => Ok((copy, ordered, CopiedBy::filling(device))),
            Err(lent) => Err(lent.seen_on(memory)),
        })
    }

    /// The ordering's copies fill fresh memory of the producer, of which the consumer imports a view.
    fn by_ordering_into_producer(&self, lent: Lent) -> Result<Rung<Copied<T>>> {
        let device = lent.device();
        let copy = match self.by_ordering_into(self.from, lent)? {
            Ok((_, copy, _)) => copy,
            Err(lent) => return Ok(Err(lent)),
        };
        self.batch.iter().for_each(|batch| batch.disorder());
        let (copy, ordered) = self.import(copy, true)?;
        Ok(Ok((copy, ordered, CopiedBy::filling(device))))
    }

    /// The ordering's copies fill fresh memory of `side`, in its current stream. Returns the copy, and its export.
    fn by_ordering_into<X>(&self, side: &dyn Adapter<Tensor = X>, lent: Lent) -> Result<Rung<(X, Lent, Streams)>> {
        // Before anything is allocated: a consumer may have memory for one copy alone.
        if self.ordering.copies().is_none() || pending(&lent).is_none() {
            return Ok(Err(lent));
        }
        match self.fresh_of(side, lent.device(), &lent)? {
            Some((fresh, target)) if !share_bytes(&target, &lent) => {
                prepare(&target, self.ordering);
                let filled = fill(lent, &target, side.consumer(), self.ordering, self.batch)?;
                Ok(filled.map(|ordered| (fresh, target, ordered)))
            }
            _ => Ok(Err(lent)),
        }
    }

    /// The producer copies with its own kernels. Where its copy does not fit the consumer, but has applied what was
    /// deferred, the copy takes the place of the tensor.
    fn by_producer(&self, lent: Lent, tensor: &F) -> Result<Rung<Copied<T>>> {
        let compacted = self.from.compact(tensor).and_then(|copy| self.from.export(&copy));
        self.batch.iter().for_each(|batch| batch.disorder());
        match compacted.and_then(|copy| copy.permuted(self.options.permute.as_ref())) {
            Ok(copy) if share_bytes(&copy, &lent) => Ok(Err(lent)),
            Ok(copy) if self.fits(&copy) => {
                return_original(lent, self.ordering);
                let (copy, ordered) = self.import(copy, true)?;
                Ok(Ok((copy, ordered, CopiedBy::Producer)))
            }
            Ok(copy) if lent.pending().is_some() => {
                return_original(lent, self.ordering);
                Ok(Err(copy))
            }
            Err(error) if error.kind() != ErrorKind::CopyNeeded => Err(error),
            _ => Ok(Err(lent)),
        }
    }

    /// Core copies host memory into fresh memory of its own, of which the consumer imports a view.
    fn by_core(&self, lent: Lent) -> Result<Copied<T>> {
        let alignment = self.profile.alignment_of(lent.dtype());
        let copy = host_copy::compact(lent, self.order(), alignment, self.ordering)?;
        let (copy, ordered) = self.import(copy, true)?;
        Ok((copy, ordered, CopiedBy::Host))
    }

    /// Core copies host memory into fresh memory of a consumer that takes no other.
    fn by_core_into_consumer(&self, lent: Lent, tensor: &F) -> Result<Copied<T>> {
        let lent = match lent.pending() {
            None => lent,
            Some(_) => self.from.export(&self.from.compact(tensor)?)?.permuted(self.options.permute.as_ref())?,
        };
        let fresh = match lent.device().kind {
            DeviceKind::CPU if lent.pending().is_none() => self.fresh_of(self.to, lent.device(), &lent)?,
            _ => None,
        };
        let Some((fresh, target)) = fresh.filter(|(_, target)| !share_bytes(target, &lent)) else {
            let (name, device) = (&self.profile.name, lent.device());
            let text = format!(
                "{name} takes only its own memory, and the ordering cannot copy this tensor into it on {device}"
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text).advise(Advice::Copies));
        };
        host_copy::copy_by_loop(&lent, &target, 0);
        Ok((fresh, None, CopiedBy::Host))
    }

    /// The ordering's copies fill memory of their own on a device, of which the consumer imports a view: for a producer
    /// without kernels and a consumer whose memory cannot be written from outside.
    fn by_ordering_beside(&self, lent: Lent) -> Result<Rung<Copied<T>>> {
        let device = lent.device();
        if device.kind != DeviceKind::CUDA || self.ordering.copies().is_none() || pending(&lent).is_none() {
            return Ok(Err(lent));
        }
        let elements = (lent.dtype(), lent.layout().shape());
        let target = match fresh_beside((self.to, self.profile), self.ordering, device, elements, self.order()) {
            Err(error) if error.kind() == ErrorKind::CopyNeeded => return Ok(Err(lent)),
            target => target?,
        };
        let ordered = match fill(lent, &target, self.to.consumer(), self.ordering, self.batch)? {
            Ok(ordered) => ordered,
            Err(lent) => return Ok(Err(lent)),
        };
        self.batch.iter().for_each(|batch| batch.disorder());
        let (copy, _) = self.import(target, true)?;
        Ok(Ok((copy, ordered, CopiedBy::Kernels)))
    }

    /// The consumer copies a tensor that it takes in place, with its own kernels.
    fn by_consumer(&self, lent: Lent) -> Result<Copied<T>> {
        let (from, to) = (&self.from.profile().name, &self.profile.name);
        // The consumer copies into row-major order.
        if self.order() == Order::ColumnMajor {
            let text = format!("{from} cannot make a column-major copy: copy it with its own framework first");
            return Err(Error::new(ErrorKind::CopyNeeded, text).or_advise(Advice::AnyOrder));
        }
        let read_only = loses_read_only(&lent, self.profile).then(|| "memory that is read-only".into());
        if let Some(reason) = needed(&lent, self.profile, None).map(|reason| reason.to_string()).or(read_only) {
            let text = format!(
                "{from} makes no copy that {to} can use, and {to} cannot take the tensor in place because of {reason}: make a compact copy with its own framework first"
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        let (view, ordered) = self.import(lent, false)?;
        Ok((self.to.compact(&view)?, ordered, CopiedBy::Consumer))
    }
}

/// Returns to its owner a tensor that its own framework has copied: the copy may still read memory of unknown reuse.
fn return_original(lent: Lent, ordering: &Arc<dyn Ordering>) {
    let (device, reuse) = (lent.buffer().device(), lent.buffer().reuse());
    if let (Some(stream), Reuse::Unknown) = (lent.buffer().stream(), reuse) {
        alive(&**ordering).retire(device, stream, lent.into_buffer());
    }
}
