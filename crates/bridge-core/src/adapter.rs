//! What a framework's adapter does, and the one way through.

use crate::plan::{landing, needed};
use crate::{
    Device, DeviceKind, Error, ErrorKind, Keep, Lease, Lent, Options, Ordering, Plan, Profile, Result, Stream, Views,
    host, plan,
};
use std::sync::Arc;

/// The part of a framework that leases keep hold of: it outlives every view.
pub trait Consumer: Send + Sync {
    /// The stream into which the framework would put work for `device` now, on this thread. `None` for memory that the
    /// framework reads on the host, and while the interpreter shuts down, when nothing can be known.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn current_stream(&self, device: Device) -> Result<Option<Stream>>;

    /// Keeps `stream`, as [`current_stream`](Self::current_stream) gave it, from being destroyed: a view may be dropped
    /// long after the stream that it was made under has gone out of scope, and waiting for a stream that is gone
    /// crashes the driver. `None` for streams that live as long as the process.
    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        let _ = (device, stream);
        None
    }

    /// The foreign memory that the framework has views of.
    fn views(&self) -> &Views;
}

/// Nothing but views: of a lender behind which no framework is known, or whose tensors are in host memory.
impl Consumer for Views {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(None)
    }

    fn views(&self) -> &Views {
        self
    }
}

/// The alignment in bytes of copies that adapters make: the most that any framework asks for (TensorFlow).
pub const COPY_ALIGNMENT: usize = 64;

/// A framework, as core sees it. Adapters translate; checking and planning is core's job.
///
/// # For implementers
///
/// An adapter knows its own framework and no other. It is judged by the conformance suite: write a `Subject` for it and
/// call `certify`.
pub trait Adapter {
    /// The framework's own tensor.
    type Tensor;

    /// What the framework accepts and emits.
    fn profile(&self) -> &Profile;

    /// What leases keep hold of.
    fn consumer(&self) -> Arc<dyn Consumer>;

    /// Lends a tensor: in place, without a copy, without blocking the host. The stream of the buffer is the one that is
    /// current in the framework now.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotATensor`] for anything that has no single strided memory (sparse, quantised, meta, …),
    /// [`ErrorKind::RequiresGrad`], [`ErrorKind::Dtype`], [`ErrorKind::Layout`].
    fn export(&self, tensor: &Self::Tensor) -> Result<Lent>;

    /// Wraps a lease as a tensor that shares its memory and drops it with the last view. Core has checked that the
    /// lease fits [`profile`](Self::profile), and ordered the current stream behind the owner's.
    ///
    /// # Errors
    ///
    /// What the framework reports; the lease is given back then.
    fn import(&self, lease: Lease) -> Result<Self::Tensor>;

    /// A fresh, compact copy, aligned to [`COPY_ALIGNMENT`], by the framework's own kernels, on the same device, in the
    /// current stream, with every pending operation done.
    ///
    /// # Errors
    ///
    /// What the framework reports; [`ErrorKind::CopyNeeded`] where it cannot copy. Then core copies host memory, and the
    /// consumer copies device memory that it can take in place.
    fn compact(&self, tensor: &Self::Tensor) -> Result<Self::Tensor>;
}

/// What a transfer did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The path taken.
    pub plan: Plan,
    /// Bytes that were copied: 0 in place.
    pub bytes_copied: usize,
    /// The owner's stream and the consumer's stream that was made to wait for it, where they differ.
    pub ordered: Option<(Stream, Stream)>,
}

/// Takes `tensor` from one framework into another: lends it, plans, copies where the plan says so, orders the
/// consumer's current stream behind the owner's, and wraps it.
///
/// # Errors
///
/// Those of [`plan`](crate::plan), [`Adapter::export`], [`Adapter::import`] and [`Ordering::order`]. After an error
/// nothing is left behind.
pub fn transfer<F, T>(
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    ordering: &Arc<dyn Ordering>,
    options: &Options,
) -> Result<(T, Transfer)> {
    let lent = from.export(tensor)?;
    let path = plan(&lent, to.profile(), options)?;
    // The tensor may itself be a view of foreign memory. Its owner must then wait for this use, a copy included.
    if let Some(stream) = lent.buffer().stream() {
        let lender = from.consumer();
        let keep = || lender.keep(lent.device(), stream);
        lender.views().used(lent.device(), lent.buffer().address(), stream.on_any_thread(), keep);
    }
    let crossing = Crossing { from, to, ordering, options };
    match path {
        Plan::ZeroCopy => {
            let (result, ordered) = crossing.place(lent, false)?;
            Ok((result, Transfer { plan: path, bytes_copied: 0, ordered }))
        }
        Plan::Copy(_) => {
            let bytes_copied = lent.layout().nbytes();
            let (result, ordered) = crossing.copy(lent, tensor)?;
            Ok((result, Transfer { plan: path, bytes_copied, ordered }))
        }
    }
}

/// The owner's stream and the consumer's, where one was made to wait for the other.
type Streams = Option<(Stream, Stream)>;

struct Crossing<'a, F, T> {
    from: &'a dyn Adapter<Tensor = F>,
    to: &'a dyn Adapter<Tensor = T>,
    ordering: &'a Arc<dyn Ordering>,
    options: &'a Options,
}

impl<F, T> Crossing<'_, F, T> {
    /// Orders the consumer behind the owner, and wraps the memory.
    fn place(&self, lent: Lent, copied: bool) -> Result<(T, Streams)> {
        let memory = lent.device();
        let device = landing(memory, self.to.profile(), self.options.device).unwrap_or(memory);
        let lent = lent.seen_on(device);
        let consumer = self.to.consumer();
        let owner = lent.buffer().stream();
        let reader = if owner.is_some() { consumer.current_stream(device)? } else { None };
        let ordered = owner.zip(reader).filter(|(owner, reader)| owner != reader);
        match (ordered, owner) {
            (Some((owner, reader)), _) => self.ordering.order(memory, owner, reader)?,
            (None, Some(owner)) if reader.is_none() => self.ordering.synchronize(memory, owner)?,
            _ => (),
        }
        let lease = Lease::new(lent, reader, copied, consumer, Arc::clone(self.ordering));
        Ok((self.to.import(lease)?, ordered))
    }

    /// Lets the producer copy. Where it cannot, or its copy shares memory with the original or does not fit the target,
    /// core copies host memory, and the consumer copies device memory.
    fn copy(&self, lent: Lent, tensor: &F) -> Result<(T, Streams)> {
        match self.from.compact(tensor).and_then(|copy| self.from.export(&copy)) {
            Ok(copy) if self.fits(&copy) && !overlap(&copy, &lent) => {
                drop(lent);
                return self.place(copy, true);
            }
            Err(error) if error.kind() != ErrorKind::CopyNeeded => return Err(error),
            _ => (),
        }
        if lent.device().kind == DeviceKind::CPU && lent.pending().is_none() {
            let copy = host::copy(&lent)?;
            drop(lent);
            return self.place(copy, true);
        }
        if let Some(reason) = needed(&lent, self.to.profile()) {
            let (from, to) = (&self.from.profile().name, &self.to.profile().name);
            let text = format!(
                "{from} makes no copy that {to} can use, and {to} cannot take the tensor in place because of {reason}: make a compact copy with the framework that owns it first"
            );
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        let (view, ordered) = self.place(lent, false)?;
        Ok((self.to.compact(&view)?, ordered))
    }

    fn fits(&self, copy: &Lent) -> bool {
        let options = Options { copy: Some(false), ..*self.options };
        plan(copy, self.to.profile(), &options).is_ok()
    }
}

/// Whether two tensors share bytes.
fn overlap(one: &Lent, other: &Lent) -> bool {
    let (one, other) = (one.hull(), other.hull());
    one.start < other.end && other.start < one.end
}
