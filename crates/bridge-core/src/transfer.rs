//! The transfer of tensors between two adapters: one, or many at once.

use crate::batch::Batch;
use crate::conversion::Conversion;
use crate::planted::{self, is_planted};
use crate::{Access, Adapter, CopiedBy, Export, Failed, Options, Ordering, Plan, Reason, Result, Stream};
use std::sync::Arc;

/// What a transfer did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Transfer {
    /// How the tensor was converted.
    pub plan: Plan,
    /// Bytes copied: 0 in place.
    pub bytes_copied: usize,
    /// Who made the copy: `None` in place.
    pub copied_by: Option<CopiedBy>,
    /// The owner's stream, and the stream that now waits for it, where they differ.
    pub ordered: Option<(Stream, Stream)>,
    /// Whether the result shares memory that its framework never changes ([`Access::Immutable`]), and the caller has not
    /// promised to write nothing ([`Options::with_read_only`]). A target that does not keep read-only memory read-only
    /// ([`Profile::keeps_read_only`](crate::Profile)) lets its users write to it.
    pub shares_immutable: bool,
}

impl Transfer {
    /// Returns what a transfer by this plan does, with streams that need no order.
    pub const fn planned(plan: Plan, bytes_copied: usize, copied_by: Option<CopiedBy>) -> Self {
        Self { plan, bytes_copied, copied_by, ordered: None, shares_immutable: false }
    }
}

/// Converts `tensor` from one framework to another: exports it, plans, copies if the plan says so, orders the
/// consumer's current stream after the owner's, and imports it.
///
/// A copy is made by the first of these that can make it:
///
/// 1. the [`Copies`](crate::Copies) of `ordering`, into fresh memory of the consumer ([`Adapter::empty`]), else of the
///    producer, else on the host of core, in the current stream of the framework that allocates it;
/// 2. the producer ([`Adapter::compact`]);
/// 3. core, for host memory;
/// 4. the consumer, for a tensor that it can take in place.
///
/// If the consumer takes only its own memory ([`Profile::owns_memory`](crate::Profile)), the copy is always made into
/// that: by the first, or for host memory by core.
///
/// If the caller requests another device, the tensor is moved by the [`Copies`](crate::Copies) of `ordering`, into
/// fresh memory of the consumer, else of core on the host, else of those copies on a device. A result on the host has
/// its elements when this returns.
///
/// # Errors
///
/// Those of [`plan`](crate::plan()), [`Adapter::export`], [`Adapter::empty`], [`Adapter::import`],
/// [`Copies::copy`](crate::Copies::copy) and [`Ordering::order`]. After an error, no view and no lease is left.
pub fn transfer<F, T>(
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    ordering: &Arc<dyn Ordering>,
    options: &Options,
) -> Result<(T, Transfer)> {
    let conversion = Conversion::new(from, to, to.profile(), ordering, options);
    finish(&conversion, conversion.export(tensor)?, tensor)
}

/// As [`transfer`], for many tensors at once: exports all of them, then orders each pair of streams
/// once, then copies and imports them. Views that are dropped together also return their memory together.
///
/// The tensors may come from several frameworks, each with its adapter. The results are in the order of the tensors.
/// A copy that the producer makes is new work in its stream, and takes its own ordering.
///
/// # Errors
///
/// Those of [`transfer`], with the index of the first tensor that failed. The others are released.
pub fn transfer_all<F, T>(
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    to: &dyn Adapter<Tensor = T>,
    ordering: &Arc<dyn Ordering>,
    options: &Options,
) -> Result<Vec<(T, Transfer)>, Failed> {
    let batch = Batch::of(tensors.len());
    let profile = to.profile();
    let conversion = |from| Conversion { batch: Some(&batch), ..Conversion::new(from, to, profile, ordering, options) };
    let failed = |index| {
        move |error| {
            planted::failed();
            Failed { index, error }
        }
    };
    let mut exported = Vec::with_capacity(tensors.len());
    for (index, (from, tensor)) in tensors.iter().enumerate() {
        exported.push(conversion(*from).export(tensor).map_err(failed(index))?);
    }
    if is_planted("core_batch_planned_by_first") {
        let first = exported.first().map(|(_, plan)| *plan);
        exported.iter_mut().for_each(|(_, plan)| *plan = first.unwrap_or(*plan));
    }
    let mut results = Vec::with_capacity(tensors.len());
    for (index, ((from, tensor), exported)) in tensors.iter().zip(exported).enumerate() {
        results.push(finish(&conversion(*from), exported, tensor).map_err(failed(index))?);
    }
    if is_planted("core_batch_swapped") && results.len() > 1 {
        results.swap(0, 1);
    }
    Ok(results)
}

/// Does what was planned for an exported tensor.
fn finish<F, T>(
    conversion: &Conversion<'_, F, T>,
    (exported, plan): (Export, Plan),
    tensor: &F,
) -> Result<(T, Transfer)> {
    if plan == Plan::ZeroCopy {
        let shares_immutable = exported.buffer().access() == Access::Immutable && !conversion.options.read_only;
        let (result, ordered) = conversion.import(exported, false)?;
        return Ok((result, Transfer { plan, bytes_copied: 0, copied_by: None, ordered, shares_immutable }));
    }
    let bytes_copied = exported.layout().nbytes();
    let (result, ordered, by) = match plan {
        Plan::Copy(Reason::Moved) => conversion.move_away(exported)?,
        _ => conversion.copy(exported, tensor)?,
    };
    Ok((result, Transfer { plan, bytes_copied, copied_by: Some(by), ordered, shares_immutable: false }))
}
