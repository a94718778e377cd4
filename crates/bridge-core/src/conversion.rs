//! One conversion: the export, the import, and what copies and moves need of both sides.

use crate::batch::Batch;
use crate::ordering::{self, alive};
use crate::plan::{decide, landing};
use crate::planted::is_left_behind;
use crate::{
    Access, Adapter, Consumer, Device, DeviceKind, Export, Lease, Offer, Options, Order, Ordering, Plan, Profile,
    Result, Stream, plan,
};
use std::sync::Arc;

/// The owner's stream, and the stream that waits for it.
pub(crate) type Streams = Option<(Stream, Stream)>;

/// One conversion.
pub(crate) struct Conversion<'a, F, T> {
    pub(crate) from: &'a dyn Adapter<Tensor = F>,
    pub(crate) to: &'a dyn Adapter<Tensor = T>,
    /// What `to` has stated once: a plan, a copy and an offer must mean the same profile, whatever it states later.
    pub(crate) profile: &'a Profile,
    pub(crate) ordering: &'a Arc<dyn Ordering>,
    pub(crate) options: &'a Options,
    /// The batch that the tensor belongs to, if any.
    pub(crate) batch: Option<&'a Batch>,
}

impl<'a, F, T> Conversion<'a, F, T> {
    pub(crate) fn new(
        from: &'a dyn Adapter<Tensor = F>,
        to: &'a dyn Adapter<Tensor = T>,
        profile: &'a Profile,
        ordering: &'a Arc<dyn Ordering>,
        options: &'a Options,
    ) -> Self {
        Self { from, to, profile, ordering, options, batch: None }
    }

    /// Exports the tensor, and plans.
    pub(crate) fn export(&self, tensor: &F) -> Result<(Export, Plan)> {
        let exported = self.from.export(tensor)?.permuted(self.options.permute.as_ref())?;
        let path = plan(&exported, self.profile, self.options)?;
        used(&exported, || self.from.consumer());
        // A target that keeps protected memory read-only needs no promise for it.
        let kept = exported.buffer().access() == Access::ReadOnly && self.profile.keeps_read_only;
        Ok((if self.options.read_only && !kept { exported.promised() } else { exported }, path))
    }

    /// Orders the consumer's stream after the owner's, and imports the memory.
    pub(crate) fn import(&self, exported: Export, copied: bool) -> Result<(T, Streams)> {
        self.import_for(self.to.consumer(), exported, copied)
    }

    /// As [`import`](Self::import), for the consumer of `to`.
    pub(crate) fn import_for(
        &self,
        consumer: Arc<dyn Consumer>,
        exported: Export,
        copied: bool,
    ) -> Result<(T, Streams)> {
        let device = self.landing(&exported);
        let exported = if copied { exported.fresh() } else { exported }.seen_on(device);
        // The host reads memory of the host, whatever stream a consumer names.
        let streams = exported.buffer().stream().is_some() && device.kind != DeviceKind::CPU;
        let reader = if streams { consumer.current_stream(device)? } else { None };
        let ordered = order_after(self.ordering, &exported, reader, self.batch)?;
        let watch = self.options.watch && exported.buffer().access() == Access::Immutable;
        let exported = if watch { exported.watched() } else { exported };
        let lease = Lease::new(exported, reader, copied, consumer, Arc::clone(self.ordering));
        let lease = match self.batch {
            Some(batch) => batch.join(lease),
            None => lease,
        };
        let offer = Offer::new(lease, self.profile);
        Ok((self.to.import(offer)?, ordered))
    }

    /// Returns the device under which the consumer sees the memory.
    pub(crate) fn landing(&self, exported: &Export) -> Device {
        landing(exported.device(), self.profile, self.options.requested()).unwrap_or(exported.device())
    }

    /// Returns the order of a copy.
    pub(crate) fn order(&self) -> Order {
        self.options.order.unwrap_or_default()
    }

    /// Returns whether the consumer takes this copy in place.
    pub(crate) fn fits(&self, copy: &Export) -> bool {
        let options = Options { copy: Some(false), ..*self.options };
        decide(copy, self.profile, &options, false).is_ok()
    }
}

/// Records the stream of an export in the views of its framework: the tensor may itself be a view of imported memory,
/// whose owner must then wait for this use, a copy included.
pub(crate) fn used(exported: &Export, producer: impl FnOnce() -> Arc<dyn Consumer>) {
    if let Some(stream) = exported.buffer().stream() {
        let producer = producer();
        let keep = || producer.keep(exported.device(), stream);
        ordering::used(producer.views(), exported.device(), exported.buffer().address(), stream.on_any_thread(), keep);
    }
}

/// Orders `reader` after the owner's stream. Where the reader has no stream and the owner has one, the host waits.
/// Returns the two streams where they differ.
pub(crate) fn order_after(
    ordering: &Arc<dyn Ordering>,
    exported: &Export,
    reader: Option<Stream>,
    batch: Option<&Batch>,
) -> Result<Streams> {
    let device = exported.buffer().device();
    match (exported.buffer().stream(), reader) {
        (Some(owner), Some(reader)) if owner != reader => {
            match batch {
                _ if is_left_behind("core_order_lost_by_failure") => (),
                Some(batch) => batch.order(&**ordering, device, owner, reader)?,
                None => alive(&**ordering).order(device, owner, reader)?,
            }
            return Ok(Some((owner, reader)));
        }
        (Some(owner), None) => alive(&**ordering).synchronize(device, owner)?,
        _ => (),
    }
    Ok(None)
}
