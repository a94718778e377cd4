//! The transfer of a tensor between two adapters.

use crate::batch::Batch;
use crate::fill::{behind, fill, pending};
use crate::moved::{move_into, no_moves};
use crate::plan::{decide, landing, moves_to, needed};
use crate::{
    Access, Adapter, Advice, DType, Device, DeviceKind, Error, ErrorKind, Layout, Lease, Lent, Options, Order,
    Ordering, Plan, Reason, Result, Reuse, Stream, host, plan,
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

/// What a transfer did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Transfer {
    /// How the tensor crossed.
    pub plan: Plan,
    /// Bytes copied: 0 in place.
    pub bytes_copied: usize,
    /// Who made the copy: `None` in place.
    pub copied_by: Option<CopiedBy>,
    /// The owner's stream, and the stream that now waits for it, where they differ.
    pub ordered: Option<(Stream, Stream)>,
}

impl Transfer {
    /// Returns what a transfer by this plan does, with streams that need no order.
    pub const fn planned(plan: Plan, bytes_copied: usize, copied_by: Option<CopiedBy>) -> Self {
        Self { plan, bytes_copied, copied_by, ordered: None }
    }
}

/// Takes `tensor` from one framework into another: exports it, plans, copies where the plan says so, orders the
/// consumer's current stream behind the owner's, and imports it.
///
/// A copy is made by the first of these that can make it:
///
/// 1. the [`Copies`](crate::Copies) of `ordering`, into fresh memory of the consumer ([`Adapter::empty`]), else of the
///    producer, else on the host of core, in the current stream of the framework that allocates it;
/// 2. the producer ([`Adapter::compact`]);
/// 3. core, for host memory;
/// 4. the consumer, for a tensor that it can take in place.
///
/// Where the consumer takes no memory but its own ([`Profile::owns_memory`](crate::Profile)), the copy is always made
/// into that: by the first, or for host memory by core.
///
/// A tensor that the caller asks for on another device is moved by the [`Copies`](crate::Copies) of `ordering`, into
/// fresh memory of the consumer, else of core on the host, else of those copies on a device. A result on the host has
/// its elements when this returns.
///
/// # Errors
///
/// Those of [`plan`](crate::plan()), [`Adapter::export`], [`Adapter::empty`], [`Adapter::import`],
/// [`Copies::copy`](crate::Copies::copy) and [`Ordering::order`]. An error leaves no view and no lease behind.
pub fn transfer<F, T>(
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    ordering: &Arc<dyn Ordering>,
    options: &Options,
) -> Result<(T, Transfer)> {
    let crossing = Crossing { from, to, ordering, options, batch: None };
    crossing.finish(crossing.export(tensor)?, tensor)
}

/// Returns who would make the copy of `lent`, an export of `from`, on its way to `to`. Nothing is copied: where the
/// kernels turn out not to copy such elements, the frameworks do.
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
    let device = Crossing { from, to, ordering, options, batch: None }.landing(lent);
    // A tensor without elements takes no memory.
    let lends = to.empty(device, lent.dtype(), &[0], Order::RowMajor).is_ok()
        || from.empty(lent.device(), lent.dtype(), &[0], Order::RowMajor).is_ok();
    let copies = ordering.copies().is_some() && pending(lent).is_some();
    if to.profile().owns_memory {
        return filled_on(device);
    }
    if copies && lends { filled_on(device) } else { CopiedBy::Producer }
}

/// Records the stream of an export in the views of its framework: the tensor may itself be a view of foreign memory,
/// whose owner must then wait for this use, a copy included.
pub(crate) fn used<F>(from: &dyn Adapter<Tensor = F>, lent: &Lent) {
    if let Some(stream) = lent.buffer().stream() {
        let producer = from.consumer();
        let keep = || producer.keep(lent.device(), stream);
        producer.views().used(lent.device(), lent.buffer().address(), stream.on_any_thread(), keep);
    }
}

/// Returns a tensor that its own framework has copied: the copy may still read memory of unknown reuse.
fn copied(lent: Lent, ordering: &Arc<dyn Ordering>) {
    let (device, reuse) = (lent.buffer().device(), lent.buffer().reuse());
    if let (Some(stream), Reuse::Unknown) = (lent.buffer().stream(), reuse) {
        ordering.retire(device, stream, lent.into_buffer());
    }
}

/// The owner's stream, and the stream that waits for it.
type Streams = Option<(Stream, Stream)>;

/// A tensor that is taken across.
pub(crate) struct Crossing<'a, F, T> {
    pub(crate) from: &'a dyn Adapter<Tensor = F>,
    pub(crate) to: &'a dyn Adapter<Tensor = T>,
    pub(crate) ordering: &'a Arc<dyn Ordering>,
    pub(crate) options: &'a Options,
    /// The batch that the tensor belongs to, if any.
    pub(crate) batch: Option<&'a Batch>,
}

impl<F, T> Crossing<'_, F, T> {
    /// Exports the tensor, and plans. [`finish`](Self::finish) does the rest.
    pub(crate) fn export(&self, tensor: &F) -> Result<(Lent, Plan)> {
        let lent = self.from.export(tensor)?.permuted(self.options.permute.as_ref())?;
        let path = plan(&lent, self.to.profile(), self.options)?;
        used(self.from, &lent);
        Ok((lent, path))
    }

    /// Does what was planned for an exported tensor.
    pub(crate) fn finish(&self, (lent, path): (Lent, Plan), tensor: &F) -> Result<(T, Transfer)> {
        match path {
            Plan::ZeroCopy => {
                let (result, ordered) = self.place(lent, false)?;
                Ok((result, Transfer { plan: path, bytes_copied: 0, copied_by: None, ordered }))
            }
            Plan::Copy(Reason::Moved) => {
                let bytes_copied = lent.layout().nbytes();
                let (result, ordered) = self.move_away(lent)?;
                Ok((result, Transfer { plan: path, bytes_copied, copied_by: Some(CopiedBy::Move), ordered }))
            }
            Plan::Copy(_) => {
                let bytes_copied = lent.layout().nbytes();
                let (result, ordered, by) = self.copy(lent, tensor)?;
                Ok((result, Transfer { plan: path, bytes_copied, copied_by: Some(by), ordered }))
            }
        }
    }

    /// Orders the consumer's stream behind the owner's, and imports the memory.
    pub(crate) fn place(&self, lent: Lent, copied: bool) -> Result<(T, Streams)> {
        let device = self.landing(&lent);
        let lent = lent.seen_on(device);
        let consumer = self.to.consumer();
        let reader = if lent.buffer().stream().is_some() { consumer.current_stream(device)? } else { None };
        let ordered = behind(self.ordering, &lent, reader, self.batch)?;
        let lease = Lease::new(lent, reader, copied, consumer, Arc::clone(self.ordering));
        Ok((self.to.import(Batch::join(self.batch, lease))?, ordered))
    }

    /// Returns the device under which the consumer sees the memory.
    fn landing(&self, lent: &Lent) -> Device {
        landing(lent.device(), self.to.profile(), self.options.device).unwrap_or(lent.device())
    }

    /// Imports a copy, made by the first that can make it: see [`transfer`].
    fn copy(&self, lent: Lent, tensor: &F) -> Result<(T, Streams, CopiedBy)> {
        let (memory, device) = (lent.device(), self.landing(&lent));
        let lent = match self.fill_fresh(self.to, lent.seen_on(device))? {
            Ok((copy, _, ordered)) => return Ok((copy, ordered, filled_on(device))),
            Err(lent) => lent.seen_on(memory),
        };
        if self.to.profile().owns_memory {
            return self.copy_into_own(lent, tensor);
        }
        let lent = match self.fill_fresh(self.from, lent)? {
            Ok((_, copy, _)) => {
                self.batch.iter().for_each(|batch| batch.disorder());
                let (copy, ordered) = self.place(copy, true)?;
                return Ok((copy, ordered, filled_on(memory)));
            }
            Err(lent) => lent,
        };
        let compacted = self.from.compact(tensor).and_then(|copy| self.from.export(&copy));
        self.batch.iter().for_each(|batch| batch.disorder());
        let lent = match compacted.and_then(|copy| copy.permuted(self.options.permute.as_ref())) {
            Ok(copy) if overlap(&copy, &lent) => lent,
            Ok(copy) if self.fits(&copy) => {
                copied(lent, self.ordering);
                let (copy, ordered) = self.place(copy, true)?;
                return Ok((copy, ordered, CopiedBy::Producer));
            }
            // Of what the producer has deferred, the copy is free.
            Ok(copy) if lent.pending().is_some() => {
                copied(lent, self.ordering);
                copy
            }
            Err(error) if error.kind() != ErrorKind::CopyNeeded => return Err(error),
            _ => lent,
        };
        if lent.device().kind == DeviceKind::CPU && lent.pending().is_none() {
            let alignment = self.to.profile().alignment_of(lent.layout().itemsize());
            let copy = host::copy(lent, self.order(), alignment, self.ordering)?;
            let (copy, ordered) = self.place(copy, true)?;
            return Ok((copy, ordered, CopiedBy::Host));
        }
        // The consumer copies into row-major order.
        if self.order() == Order::ColumnMajor {
            let text = format!(
                "{} makes no column-major copy: copy it with the framework that owns it first",
                self.from.profile().name
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text).or_advise(Advice::AnyOrder));
        }
        if let Some(reason) = needed(&lent, self.to.profile(), None) {
            let (from, to) = (&self.from.profile().name, &self.to.profile().name);
            let text = format!(
                "{from} makes no copy that {to} can use, and {to} cannot take the tensor in place because of {reason}: make a compact copy with the framework that owns it first"
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        let (view, ordered) = self.place(lent, false)?;
        Ok((self.to.compact(&view)?, ordered, CopiedBy::Consumer))
    }

    /// Copies host memory by core, into fresh memory of a consumer that takes no other.
    fn copy_into_own(&self, lent: Lent, tensor: &F) -> Result<(T, Streams, CopiedBy)> {
        let lent = match lent.pending() {
            None => lent,
            Some(_) => self.from.export(&self.from.compact(tensor)?)?.permuted(self.options.permute.as_ref())?,
        };
        let fresh = match lent.device().kind {
            DeviceKind::CPU if lent.pending().is_none() => self.fresh(self.to, lent.device(), &lent)?,
            _ => None,
        };
        let Some((fresh, target)) = fresh.filter(|(_, target)| !overlap(target, &lent)) else {
            let (name, device) = (&self.to.profile().name, lent.device());
            let text = format!(
                "{name} takes no memory but its own, and the ordering does not copy this tensor on {device} into it"
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text).advise(Advice::Copies));
        };
        host::copy_elements(&lent, &target, 0);
        Ok((fresh, None, CopiedBy::Host))
    }

    /// Copies the tensor into fresh memory of `side`, in its current stream. Returns the copy, which is exported
    /// already, or the tensor as it was where `side` has no such memory or the ordering no such copies.
    fn fill_fresh<X>(&self, side: &dyn Adapter<Tensor = X>, lent: Lent) -> Result<Result<(X, Lent, Streams), Lent>> {
        if self.ordering.copies().is_none() {
            return Ok(Err(lent));
        }
        match self.fresh(side, lent.device(), &lent)? {
            Some((fresh, target)) if !overlap(&target, &lent) => {
                let filled = fill(lent, &target, side.consumer(), self.ordering, self.batch)?;
                Ok(filled.map(|ordered| (fresh, target, ordered)))
            }
            _ => Ok(Err(lent)),
        }
    }

    /// Returns fresh memory of `side` on `device` for the elements of `lent`, and its export; `None` where it has none.
    fn fresh<X>(&self, side: &dyn Adapter<Tensor = X>, device: Device, lent: &Lent) -> Result<Option<(X, Lent)>> {
        let fresh = match side.empty(device, lent.dtype(), lent.layout().shape(), self.order()) {
            Err(error) if error.kind() == ErrorKind::CopyNeeded => return Ok(None),
            fresh => fresh?,
        };
        // A mode of the framework may replace every new tensor, as PyTorch's FakeTensorMode does.
        let Ok(target) = side.export(&fresh) else { return Ok(None) };
        let as_asked =
            (target.device(), target.dtype(), target.layout().shape()) == (device, lent.dtype(), lent.layout().shape());
        let writable = target.buffer().access() == Access::ReadWrite && target.pending().is_none();
        let compact = target.layout().follows(self.order());
        Ok((as_asked && compact && writable && self.fits(&target)).then_some((fresh, target)))
    }

    /// Moves the tensor to the device that the caller asks for.
    fn move_away(&self, lent: Lent) -> Result<(T, Streams)> {
        let device = self.options.device.unwrap_or(lent.device());
        let copies = self.ordering.copies().ok_or_else(|| no_moves(lent.device(), device))?;
        self.batch.iter().for_each(|batch| batch.disorder());
        copies.reaches(lent.device()).and_then(|()| copies.reaches(device))?;
        if let Some((fresh, target)) = self.fresh(self.to, device, &lent)? {
            let (ordered, _) = move_into(lent, target, self.from.consumer(), self.ordering)?;
            return Ok((fresh, ordered));
        }
        let (dtype, shape) = (lent.dtype(), lent.layout().shape());
        let target = memory(self.to, self.ordering, device, (dtype, shape), self.order())?;
        let (ordered, target) = move_into(lent, target, self.from.consumer(), self.ordering)?;
        let (result, _) = self.place(target, true)?;
        Ok((result, ordered))
    }

    /// Returns the order of a copy.
    fn order(&self) -> Order {
        self.options.order.unwrap_or_default()
    }

    fn fits(&self, copy: &Lent) -> bool {
        let options = Options { copy: Some(false), ..*self.options };
        decide(copy, self.to.profile(), &options, false).is_ok()
    }
}

/// Returns memory on `device` for a consumer whose own cannot be written from outside, compact in this order.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`], those of [`Copies::allocate`](crate::Copies::allocate), and [`ErrorKind::CopyNeeded`]
/// for a device without copies of the ordering, and where its memory is less aligned than the consumer wants it.
pub(crate) fn memory<T>(
    to: &dyn Adapter<Tensor = T>,
    ordering: &Arc<dyn Ordering>,
    device: Device,
    (dtype, shape): (DType, &[i64]),
    order: Order,
) -> Result<Lent> {
    let layout = Layout::new(dtype, shape, Some(&order.strides(shape)), 0)?;
    let alignment = to.profile().alignment_of(layout.itemsize());
    if device.kind == DeviceKind::CPU {
        return host::empty(dtype, shape, order, alignment);
    }
    let copies = ordering.copies().ok_or_else(|| {
        let text =
            format!("{} has no memory on {device} that can be written to, and the ordering none", to.profile().name);
        Error::new(ErrorKind::CopyNeeded, text).advise(Advice::Copies)
    })?;
    let consumer = to.consumer();
    let stream = consumer.current_stream(device)?.unwrap_or(Stream::LEGACY);
    let buffer = copies.allocate(device, layout.nbytes(), stream, consumer.keep(device, stream))?;
    let lent = Lent::new(dtype, layout, buffer)?;
    if lent.layout().numel() > 0 && !lent.data().is_multiple_of(alignment) {
        let text = format!(
            "{} takes addresses that {alignment} divides, and memory on {device} is not aligned so: copy the tensor into memory that is",
            to.profile().name
        );
        return Err(Error::new(ErrorKind::CopyNeeded, text));
    }
    Ok(lent)
}

/// Returns who fills memory of this device by [`Copies`](crate::Copies).
pub(crate) fn filled_on(device: Device) -> CopiedBy {
    if device.kind == DeviceKind::CPU { CopiedBy::Host } else { CopiedBy::Kernels }
}

/// Whether two tensors share bytes.
fn overlap(one: &Lent, other: &Lent) -> bool {
    let (one, other) = (one.hull(), other.hull());
    one.start < other.end && other.start < one.end
}
