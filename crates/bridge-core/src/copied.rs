//! The ladder of copies: who makes the copy of a tensor, tried in order.

use crate::conversion::{Conversion, Streams};
use crate::fill::{fill, pending};
use crate::fresh::{fresh_beside, prepare};
use crate::ordering::alive;
use crate::overlap::share_bytes;
use crate::plan::{landing, loses_read_only, moves_to, needed};
use crate::planted::is_planted;
use crate::{
    Adapter, Advice, Device, DeviceKind, Dims, Error, ErrorKind, Export, Options, Order, Ordering, Result, Reuse,
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

/// Returns who would make the copy of `exported`, an export of `from`, for `to`. Nothing is copied: where the
/// kernels turn out not to copy such elements, the frameworks do, and the reverse for a producer that turns out
/// to have no kernels.
pub fn copied_by<F, T>(
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    exported: &Export,
    ordering: &Arc<dyn Ordering>,
    options: &Options,
) -> CopiedBy {
    let (profile, device) = (to.profile(), exported.device());
    if moves_to(device, profile, options).is_some() {
        return CopiedBy::Move;
    }
    let device = landing(device, profile, options.requested()).unwrap_or(device);
    // A tensor without elements takes no memory. It has as many dimensions: not every framework has others.
    let none = Dims::from_elem(0, exported.layout().shape().len().max(1));
    // SAFETY: the tensors have no elements.
    let has_memory = unsafe {
        to.empty(device, exported.dtype(), &none, Order::RowMajor).is_ok()
            || from.empty(exported.device(), exported.dtype(), &none, Order::RowMajor).is_ok()
    };
    let copies = ordering.copies().is_some() && pending(exported).is_some();
    if profile.owns_memory {
        return CopiedBy::filling(device);
    }
    if copies && has_memory { CopiedBy::filling(device) } else { CopiedBy::Producer }
}

/// A copy as a tensor of the consumer, the streams that were ordered for it, and who made it.
type Copied<T> = (T, Streams, CopiedBy);

/// What a rung of the ladder returns: the copy, or the tensor as it was where this one makes no copy of it.
type Rung<T> = std::result::Result<T, Export>;

impl<F, T> Conversion<'_, F, T> {
    /// Imports a copy, made by the first that can make it: see [`transfer`](crate::transfer).
    pub(crate) fn copy(&self, exported: Export, tensor: &F) -> Result<Copied<T>> {
        let exported = match self.by_ordering_into_consumer(exported)? {
            Ok(copied) => return Ok(copied),
            Err(exported) => exported,
        };
        if self.profile.owns_memory {
            return self.by_core_into_consumer(exported, tensor);
        }
        let exported = match self.by_ordering_into_producer(exported)? {
            Ok(copied) => return Ok(copied),
            Err(exported) => exported,
        };
        let exported = match self.by_producer(exported, tensor)? {
            Ok(copied) => return Ok(copied),
            Err(exported) => exported,
        };
        if exported.device().kind == DeviceKind::CPU && exported.pending().is_none() {
            return self.by_core(exported);
        }
        match self.by_ordering_beside(exported)? {
            Ok(copied) => Ok(copied),
            Err(exported) => self.by_consumer(exported),
        }
    }

    /// The ordering's copies fill fresh memory of the consumer, which is the result.
    fn by_ordering_into_consumer(&self, exported: Export) -> Result<Rung<Copied<T>>> {
        let (memory, device) = (exported.device(), self.landing(&exported));
        let filled = self.by_ordering_into(self.to, exported.seen_on(device))?;
        Ok(match filled {
            Ok((copy, _, ordered)) => Ok((copy, ordered, CopiedBy::filling(device))),
            Err(exported) => Err(exported.seen_on(memory)),
        })
    }

    /// The ordering's copies fill fresh memory of the producer, of which the consumer imports a view.
    fn by_ordering_into_producer(&self, exported: Export) -> Result<Rung<Copied<T>>> {
        let device = exported.device();
        let copy = match self.by_ordering_into(self.from, exported)? {
            Ok((_, copy, _)) => copy,
            Err(exported) => return Ok(Err(exported)),
        };
        self.batch.iter().for_each(|batch| batch.disorder());
        let (copy, ordered) = self.import(copy, true)?;
        Ok(Ok((copy, ordered, CopiedBy::filling(device))))
    }

    /// The ordering's copies fill fresh memory of `side`, in its current stream. Returns the copy, and its export.
    fn by_ordering_into<X>(
        &self,
        side: &dyn Adapter<Tensor = X>,
        exported: Export,
    ) -> Result<Rung<(X, Export, Streams)>> {
        // Before anything is allocated: a consumer may have memory only for one copy.
        if self.ordering.copies().is_none() || pending(&exported).is_none() {
            return Ok(Err(exported));
        }
        match self.fresh_of(side, exported.device(), &exported)? {
            Some((fresh, target)) if !share_bytes(&target, &exported) => {
                prepare(&target, self.ordering);
                let filled = fill(exported, &target, side.consumer(), self.ordering, self.batch)?;
                Ok(filled.map(|ordered| (fresh, target, ordered)))
            }
            _ => Ok(Err(exported)),
        }
    }

    /// The producer copies with its own kernels. Where its copy does not fit the consumer, but has applied what was
    /// deferred, the copy takes the place of the tensor.
    fn by_producer(&self, exported: Export, tensor: &F) -> Result<Rung<Copied<T>>> {
        let compacted = self.from.compact(tensor).and_then(|copy| self.from.export(&copy));
        self.batch.iter().for_each(|batch| batch.disorder());
        let permute = self.options.permute.as_ref().filter(|_| !is_planted("core_copy_not_permuted"));
        match compacted.and_then(|copy| copy.permuted(permute)) {
            Ok(copy) if share_bytes(&copy, &exported) => Ok(Err(exported)),
            Ok(copy) if self.fits(&copy) => {
                return_original(exported, self.ordering);
                let (copy, ordered) = self.import(copy, true)?;
                Ok(Ok((copy, ordered, CopiedBy::Producer)))
            }
            Ok(copy) if exported.pending().is_some() => {
                return_original(exported, self.ordering);
                Ok(Err(copy))
            }
            Err(error) if error.kind() != ErrorKind::CopyNeeded => Err(error),
            _ => Ok(Err(exported)),
        }
    }

    /// Core copies host memory into fresh memory that it owns. The consumer imports a view of it.
    fn by_core(&self, exported: Export) -> Result<Copied<T>> {
        let alignment = self.profile.alignment_of(exported.dtype());
        let copy = host_copy::compact(exported, self.order(), alignment, self.ordering)?;
        let (copy, ordered) = self.import(copy, true)?;
        Ok((copy, ordered, CopiedBy::Host))
    }

    /// Core copies host memory into fresh memory of a consumer that takes no other.
    fn by_core_into_consumer(&self, exported: Export, tensor: &F) -> Result<Copied<T>> {
        let exported = match exported.pending() {
            None => exported,
            Some(_) => self.from.export(&self.from.compact(tensor)?)?.permuted(self.options.permute.as_ref())?,
        };
        let fresh = match exported.device().kind {
            DeviceKind::CPU if exported.pending().is_none() => self.fresh_of(self.to, exported.device(), &exported)?,
            _ => None,
        };
        let Some((fresh, target)) = fresh.filter(|(_, target)| !share_bytes(target, &exported)) else {
            let (name, device) = (&self.profile.name, exported.device());
            let text = format!(
                "{name} takes only its own memory, and the ordering cannot copy this tensor into it on {device}"
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text).advise(Advice::Copies));
        };
        host_copy::copy_by_loop(&exported, &target, 0);
        Ok((fresh, None, CopiedBy::Host))
    }

    /// The ordering's copies fill memory that they own on a device. The consumer imports a view of it. For a producer
    /// without kernels and a consumer whose memory cannot be written from outside.
    fn by_ordering_beside(&self, exported: Export) -> Result<Rung<Copied<T>>> {
        let device = exported.device();
        if device.kind != DeviceKind::CUDA || self.ordering.copies().is_none() || pending(&exported).is_none() {
            return Ok(Err(exported));
        }
        let elements = (exported.dtype(), exported.layout().shape());
        let consumer = self.to.consumer();
        let target = match fresh_beside((self.profile, &consumer), self.ordering, device, elements, self.order()) {
            Err(error) if error.kind() == ErrorKind::CopyNeeded => return Ok(Err(exported)),
            target => target?,
        };
        let ordered = match fill(exported, &target, Arc::clone(&consumer), self.ordering, self.batch)? {
            Ok(ordered) => ordered,
            Err(exported) => return Ok(Err(exported)),
        };
        self.batch.iter().for_each(|batch| batch.disorder());
        let (copy, _) = self.import_for(consumer, target, true)?;
        Ok(Ok((copy, ordered, CopiedBy::Kernels)))
    }

    /// The consumer copies a tensor that it takes in place, with its own kernels.
    fn by_consumer(&self, exported: Export) -> Result<Copied<T>> {
        let (from, to) = (&self.from.profile().name, &self.profile.name);
        // The consumer copies into row-major order.
        if self.order() == Order::ColumnMajor {
            let text = format!("{from} cannot make a column-major copy: copy it with its own framework first");
            return Err(Error::new(ErrorKind::CopyNeeded, text).or_advise(Advice::AnyOrder));
        }
        let read_only = loses_read_only(&exported, self.profile).then(|| "memory that is read-only".into());
        if let Some(reason) = needed(&exported, self.profile, None).map(|reason| reason.to_string()).or(read_only) {
            let text = format!(
                "{from} makes no copy that {to} can use, and {to} cannot take the tensor in place because of {reason}: make a compact copy with its own framework first"
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        let (view, ordered) = self.import(exported, false)?;
        Ok((self.to.compact(&view)?, ordered, CopiedBy::Consumer))
    }
}

/// Returns to its owner a tensor that its own framework has copied: the copy may still read memory of unknown reuse.
fn return_original(exported: Export, ordering: &Arc<dyn Ordering>) {
    let (device, reuse) = (exported.buffer().device(), exported.buffer().reuse());
    if let (Some(stream), Reuse::Unknown) = (exported.buffer().stream(), reuse) {
        alive(&**ordering).release_later(device, stream, exported.into_buffer());
    }
}
