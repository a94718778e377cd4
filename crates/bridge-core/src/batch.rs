//! Transfers of many tensors at once.

use crate::group::Group;
use crate::transfer::Crossing;
use crate::{Adapter, Device, Error, Lease, Options, Ordering, Result, Stream, Transfer};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::sync::Arc;

/// A tensor of a batch that did not cross.
#[derive(Debug)]
pub struct Failed {
    /// Its place in the batch.
    pub index: usize,
    /// Why it did not cross.
    pub error: Error,
}

/// As [`transfer`](crate::transfer), for many tensors at once: exports all of them, then orders each pair of streams
/// once, then copies and imports them. Views that are dropped together also return their memory together.
///
/// The tensors may come from several frameworks, each with its adapter. The results are in the order of the tensors.
/// A copy that the producer makes is new work in its stream, and takes an ordering of its own.
///
/// # Errors
///
/// Those of [`transfer`](crate::transfer), with the place of the first tensor that failed. Nothing is left of the
/// others.
pub fn transfer_all<F, T>(
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    to: &dyn Adapter<Tensor = T>,
    ordering: &Arc<dyn Ordering>,
    options: &Options,
) -> Result<Vec<(T, Transfer)>, Failed> {
    let batch = Batch::of(tensors.len());
    let crossing = |from| Crossing { from, to, ordering, options, batch: Some(&batch) };
    let mut exported = Vec::with_capacity(tensors.len());
    for (index, (from, tensor)) in tensors.iter().enumerate() {
        exported.push(crossing(*from).export(tensor).map_err(|error| Failed { index, error })?);
    }
    let mut results = Vec::with_capacity(tensors.len());
    for (index, ((from, tensor), exported)) in tensors.iter().zip(exported).enumerate() {
        results.push(crossing(*from).finish(exported, tensor).map_err(|error| Failed { index, error })?);
    }
    Ok(results)
}

/// The fewest tensors whose memory is returned together. For fewer, waking the thread that returns the memory of a view
/// that is dropped alone costs more than a wait for each view.
const FEWEST: usize = 8;

/// What the tensors of a batch share.
pub(crate) struct Batch {
    pairs: RefCell<SmallVec<[Pair; 2]>>,
    /// Leases on tensors that have been copied, to be dropped together.
    held: RefCell<Vec<Lease>>,
    /// Whether leases are grouped.
    is_large: bool,
}

/// A pair of streams.
struct Pair {
    device: Device,
    owner: Stream,
    reader: Stream,
    /// Whether the reader waits for all work of the owner that a tensor of the batch may need.
    ordered: bool,
    /// The group of the leases of views.
    views: Option<Arc<Group>>,
    /// The group of the leases that the batch holds.
    held: Option<Arc<Group>>,
}

impl Batch {
    fn of(tensors: usize) -> Self {
        Self { pairs: RefCell::default(), held: RefCell::default(), is_large: tensors >= FEWEST }
    }

    fn pair<R>(&self, device: Device, owner: Stream, reader: Stream, body: impl FnOnce(&mut Pair) -> R) -> R {
        let pairs = &mut *self.pairs.borrow_mut();
        let same = |pair: &Pair| (pair.device, pair.owner, pair.reader) == (device, owner, reader);
        let index = pairs.iter().position(same).unwrap_or_else(|| {
            pairs.push(Pair { device, owner, reader, ordered: false, views: None, held: None });
            pairs.len() - 1
        });
        body(&mut pairs[index])
    }

    /// Makes the reader wait for the owner, unless it does already.
    pub(crate) fn order(&self, ordering: &dyn Ordering, device: Device, owner: Stream, reader: Stream) -> Result<()> {
        self.pair(device, owner, reader, |pair| {
            if !pair.ordered {
                ordering.order(device, owner, reader)?;
                pair.ordered = true;
            }
            Ok(())
        })
    }

    /// Forgets what is ordered, because there is new work in a stream of an owner.
    pub(crate) fn disorder(&self) {
        self.pairs.borrow_mut().iter_mut().for_each(|pair| pair.ordered = false);
    }

    /// Makes the lease of a view of the batch, if there is one, return its memory with the others.
    pub(crate) fn join(batch: Option<&Self>, lease: Lease) -> Lease {
        match batch {
            Some(batch) => batch.grouped(lease, |pair| &mut pair.views),
            None => lease,
        }
    }

    /// Keeps a lease until the end of the batch.
    pub(crate) fn hold(&self, lease: Lease) {
        // Not with the views, which live on.
        let lease = self.grouped(lease, |pair| &mut pair.held);
        self.held.borrow_mut().push(lease);
    }

    fn grouped(&self, lease: Lease, role: fn(&mut Pair) -> &mut Option<Arc<Group>>) -> Lease {
        let Some((device, owner, reader)) = lease.streams().filter(|_| self.is_large) else { return lease };
        let group = self.pair(device, owner, reader, |pair| {
            let group = role(pair);
            *group = group.take().or_else(|| lease.new_group());
            group.clone()
        });
        match group {
            Some(group) => lease.in_group(group),
            None => lease,
        }
    }
}
