//! What a framework's adapter does, and the one way through.

use crate::{
    Device, Error, ErrorKind, Keep, Lease, Lent, Options, Ordering, Plan, Profile, Result, Stream, Views, plan,
};
use std::sync::Arc;

/// The part of a framework that leases keep hold of: it outlives every view.
pub trait Consumer: Send + Sync {
    /// The stream into which the framework would put work for `device` now, on this thread. `None` for host memory,
    /// and where nothing can be known any more because the interpreter shuts down.
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
    /// What the framework reports.
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
    let (lent, bytes_copied) = match path {
        Plan::ZeroCopy => (lent, 0),
        Plan::Copy(_) => {
            let nbytes = lent.layout().nbytes();
            drop(lent);
            (copy(from, to, tensor)?, nbytes)
        }
    };
    let device = lent.device();
    let consumer = to.consumer();
    let (owner, reader) = match lent.buffer().stream() {
        Some(owner) => (Some(owner), Some(consumer.current_stream(device)?.unwrap_or(Stream::LEGACY))),
        None => (None, None),
    };
    let ordered = owner.zip(reader).filter(|(owner, reader)| owner != reader);
    if let Some((owner, reader)) = ordered {
        ordering.order(device, owner, reader)?;
    }
    if let Some(owner) = owner {
        // The tensor may itself be a view of foreign memory. Its owner must then wait for what happens here.
        let lender = from.consumer();
        let keep = || lender.keep(device, owner);
        lender.views().used(device, lent.buffer().address(), owner.on_any_thread(), keep);
    }
    let lease = Lease::new(lent, reader, path != Plan::ZeroCopy, consumer, Arc::clone(ordering));
    Ok((to.import(lease)?, Transfer { plan: path, bytes_copied, ordered }))
}

fn copy<F, T>(from: &dyn Adapter<Tensor = F>, to: &dyn Adapter<Tensor = T>, tensor: &F) -> Result<Lent> {
    let lent = from.export(&from.compact(tensor)?)?;
    match plan(&lent, to.profile(), &Options::default())? {
        Plan::ZeroCopy => Ok(lent),
        Plan::Copy(reason) => {
            let (from, to) = (&from.profile().name, &to.profile().name);
            let text = format!("the copy that {from} made does not fit {to} because of {reason}: please report this");
            Err(Error::new(ErrorKind::Framework, text))
        }
    }
}
