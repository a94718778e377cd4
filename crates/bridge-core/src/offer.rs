//! What an import receives.

use crate::{Adapter, DType, Device, Error, ErrorKind, Layout, Lease, Options, Result, plan};
use std::ptr;
use std::sync::Arc;

/// An exported tensor that a framework may take: what [`Adapter::import`] receives.
///
/// It becomes a [`Lease`], which names the memory, only by [`accept`](Self::accept). Safe code can pass an offer to the
/// import of an adapter that it was not made for; `accept` refuses it there. Dropping an offer returns the memory, as
/// dropping a lease does.
#[derive(Debug)]
pub struct Offer {
    lease: Lease,
    vouched_for: bool,
}

impl Offer {
    pub(crate) fn new(lease: Lease) -> Self {
        Self { lease, vouched_for: false }
    }

    /// Returns the lease, if the tensor fits the profile of `adapter` in place, and the lease returns its memory after
    /// the work of the consumer of `adapter`. An import calls it first, with itself.
    ///
    /// # Errors
    ///
    /// Those of [`plan`](plan()) without a copy, and [`ErrorKind::Argument`] for an offer to another consumer. The memory
    /// is then returned.
    pub fn accept<A: Adapter + ?Sized>(self, adapter: &A) -> Result<Lease> {
        let Self { lease, vouched_for } = self;
        if vouched_for {
            return Ok(lease);
        }
        plan(lease.lent(), adapter.profile(), &Options::in_place())?;
        match lease.consumer().is_none_or(|own| ptr::addr_eq(Arc::as_ptr(own), Arc::as_ptr(&adapter.consumer()))) {
            true => Ok(lease),
            false => {
                let name = &adapter.profile().name;
                let text = format!("the tensor was offered to another consumer than that of {name}: call transfer");
                Err(Error::new(ErrorKind::Argument, text))
            }
        }
    }

    /// Returns the same offer, which [`accept`](Self::accept) does not check. For an adapter that wraps another one and
    /// states another profile or consumer in its name.
    ///
    /// # Safety
    ///
    /// The adapter that accepts the offer takes such a tensor in place, and the consumer that the offer was made to names
    /// the streams and has the views of the consumer of that adapter.
    #[must_use]
    pub unsafe fn vouched_for(self) -> Self {
        Self { vouched_for: true, ..self }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.lease.dtype()
    }

    /// Returns the shape, the strides and the offset.
    pub fn layout(&self) -> &Layout {
        self.lease.layout()
    }

    /// Returns the device that the memory is on, as the consumer sees it.
    pub fn device(&self) -> Device {
        self.lease.device()
    }
}
