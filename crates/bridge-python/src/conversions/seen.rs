//! Adapters that are looked at, for traces and for `truebridge.debug`.

use super::may_be_gone;
use crate::debug::{self, Owned};
use crate::trace::{Call, Facts, Outcome, is_debugging};
use bridge_core::{Adapter, Consumer, DType, Device, Export, Failed, Offer, Order, Profile, Result};
use bridge_ipc::Leases;
use std::cell::RefCell;
use std::sync::Arc;

/// An adapter that refuses memory of a process that has ended, and stores the first export for a call. For
/// `truebridge.debug` it wraps the exports.
pub(super) struct Seen<'a, F> {
    call: Option<&'a Call>,
    adapter: &'a dyn Adapter<Tensor = F>,
    /// The framework that the tensors go to, where they are leased to it: then their exports may be wrapped.
    to: Option<&'a str>,
    /// The leases that tensors of the call lie in.
    leases: &'a RefCell<Leases>,
    facts: RefCell<Option<Facts>>,
}

impl<'a, F> Seen<'a, F> {
    pub(super) fn of(
        call: Option<&'a Call>,
        adapter: &'a dyn Adapter<Tensor = F>,
        to: Option<&'a str>,
        leases: &'a RefCell<Leases>,
    ) -> Self {
        Self { call, adapter, to, leases, facts: RefCell::new(None) }
    }

    pub(super) fn device(&self) -> Option<Device> {
        self.facts.borrow().as_ref().map(|facts| facts.device)
    }

    /// Notes in the call what became of the tensor that was exported through this.
    pub(super) fn note(&self, outcome: Outcome) {
        if let Some(call) = self.call {
            call.note(&self.adapter.profile().name, self.facts.take(), outcome);
        }
    }

    /// Remembers the stream that the consumer of the tensor has.
    pub(super) fn remember<T>(&self, to: &dyn Adapter<Tensor = T>) {
        if is_debugging() {
            debug::saw(&to.profile().name, &*to.consumer(), self.device());
        }
    }
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does.
unsafe impl<F: Owned> Adapter for Seen<'_, F> {
    type Tensor = F;

    fn profile(&self) -> &Profile {
        self.adapter.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.adapter.consumer()
    }

    fn export(&self, tensor: &F) -> Result<Export> {
        let exported = self.adapter.export(tensor)?;
        if may_be_gone::<F>() {
            self.leases.borrow_mut().check(&exported)?;
        }
        if self.call.is_none() {
            return Ok(exported);
        }
        self.facts.borrow_mut().get_or_insert_with(|| Facts {
            dtype: exported.dtype(),
            shape: exported.layout().shape().into(),
            nbytes: exported.layout().nbytes(),
            device: exported.device(),
        });
        match self.to.filter(|_| is_debugging()) {
            Some(to) => debug::exported(self.adapter, tensor, exported, to),
            None => Ok(exported),
        }
    }

    fn import(&self, offer: Offer) -> Result<F> {
        self.adapter.import(offer)
    }

    fn compact(&self, tensor: &F) -> Result<F> {
        self.adapter.compact(tensor)
    }

    fn overwritten(&self, tensor: &F) -> Result<()> {
        self.adapter.overwritten(tensor)
    }

    fn overwritten_all(&self, tensors: &[&F]) -> Result<(), Failed> {
        self.adapter.overwritten_all(tensors)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<F> {
        // SAFETY: the caller's obligation.
        unsafe { self.adapter.empty(device, dtype, shape, order) }
    }
}
