//! What the tensors of a batch share: one wait for each pair of streams, and groups of leases.

use crate::group::Group;
use crate::ordering::alive;
use crate::planted::is_planted;
use crate::{Device, Lease, Ordering, Result, Stream};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::sync::Arc;

/// The fewest tensors whose memory is returned together. For fewer, waking the thread that returns the memory of a view
/// that is dropped by itself costs more than a wait for each view.
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
    pub(crate) fn of(tensors: usize) -> Self {
        Self { pairs: RefCell::default(), held: RefCell::default(), is_large: tensors >= FEWEST }
    }

    fn pair<R>(&self, device: Device, owner: Stream, reader: Stream, body: impl FnOnce(&mut Pair) -> R) -> R {
        let pairs = &mut *self.pairs.borrow_mut();
        let any_owner = is_planted("core_batch_owner_mistaken");
        let owned = |pair: &Pair| any_owner || pair.owner == owner;
        let same = |pair: &Pair| owned(pair) && (pair.device, pair.reader) == (device, reader);
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
                alive(ordering).order(device, owner, reader)?;
                pair.ordered = true;
            }
            Ok(())
        })
    }

    /// Forgets what is ordered, because there is new work in a stream of an owner.
    pub(crate) fn disorder(&self) {
        self.pairs.borrow_mut().iter_mut().for_each(|pair| pair.ordered = false);
    }

    /// Makes the lease of a view of the batch return its memory with the others.
    pub(crate) fn join(&self, lease: Lease) -> Lease {
        self.grouped(lease, |pair| &mut pair.views)
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
