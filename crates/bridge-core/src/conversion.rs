//! One conversion: the export, the import, and what copies and moves need of both sides.

use crate::alive;
use crate::batch::Batch;
use crate::fill::order_after;
use crate::plan::{decide, landing};
use crate::{
    Access, Adapter, Device, DeviceKind, Export, Lease, Offer, Options, Order, Ordering, Plan, Profile, Result, Stream,
    plan,
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
        ordering: &'a Arc<dyn Ordering>,
        options: &'a Options,
    ) -> Self {
        Self { from, to, profile: to.profile(), ordering, options, batch: None }
    }

    /// Exports the tensor, and plans.
    pub(crate) fn export(&self, tensor: &F) -> Result<(Export, Plan)> {
        let exported = self.from.export(tensor)?.permuted(self.options.permute.as_ref())?;
        let path = plan(&exported, self.profile, self.options)?;
        used(self.from, &exported);
        // A target that keeps protected memory read-only needs no promise for it.
        let kept = exported.buffer().access() == Access::ReadOnly && self.profile.keeps_read_only;
        Ok((if self.options.read_only && !kept { exported.promised() } else { exported }, path))
    }

    /// Orders the consumer's stream after the owner's, and imports the memory.
    pub(crate) fn import(&self, exported: Export, copied: bool) -> Result<(T, Streams)> {
        let device = self.landing(&exported);
        let exported = if copied { exported.fresh() } else { exported }.seen_on(device);
        let consumer = self.to.consumer();
        // The host reads memory of the host, whatever stream a consumer names.
        let streams = exported.buffer().stream().is_some() && device.kind != DeviceKind::CPU;
        let reader = if streams { consumer.current_stream(device)? } else { None };
        let ordered = order_after(self.ordering, &exported, reader, self.batch)?;
        let watch = self.options.watch && exported.buffer().access() == Access::Immutable;
        let exported = if watch { exported.watched() } else { exported };
        let lease = Lease::new(exported, reader, copied, consumer, Arc::clone(self.ordering));
        let offer = Offer::new(Batch::join(self.batch, lease), self.profile);
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
pub(crate) fn used<F>(from: &dyn Adapter<Tensor = F>, exported: &Export) {
    if let Some(stream) = exported.buffer().stream() {
        let producer = from.consumer();
        let keep = || producer.keep(exported.device(), stream);
        alive::used(producer.views(), exported.device(), exported.buffer().address(), stream.on_any_thread(), keep);
    }
}
