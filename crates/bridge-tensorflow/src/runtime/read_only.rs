//! Read-only memory that TensorFlow holds for another framework.

use bridge_core::{Access, Lease, Spans};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The read-only memory among the imported. TensorFlow writes to none of its tensors, but for raw operations that say
/// so (`InplaceUpdate` and the like). A framework that imports the memory from TensorFlow must not write to it either.
#[derive(Default)]
pub(crate) struct ReadOnly {
    /// The number of views of each range.
    ranges: Mutex<Spans<(), usize>>,
    /// The number of all views, which is read without the lock.
    count: AtomicUsize,
}

/// An imported lease, and its range if it is read-only.
pub(crate) struct Imported {
    _lease: Lease,
    read_only: Option<(&'static ReadOnly, Range<usize>)>,
}

impl Drop for Imported {
    fn drop(&mut self) {
        if let Some((memory, bytes)) = &self.read_only {
            memory.leave(bytes);
        }
    }
}

/// The range of a lease's compact memory.
pub(crate) fn bytes(lease: &Lease) -> Range<usize> {
    lease.data()..lease.data() + lease.layout().nbytes()
}

impl ReadOnly {
    fn lock(&self) -> MutexGuard<'_, Spans<(), usize>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lease as the owner of a tensor's memory, and records the memory until the owner is dropped if the
    /// lease is read-only.
    pub(crate) fn owner(&'static self, lease: Lease) -> Imported {
        let read_only = (lease.access() == Access::ReadOnly).then(|| (self, bytes(&lease)));
        read_only.iter().for_each(|(memory, bytes)| memory.enter(bytes));
        Imported { _lease: lease, read_only }
    }

    /// Records a view of the bytes, until it [leaves](Self::leave).
    fn enter(&self, bytes: &Range<usize>) {
        if let Some(views) = self.lock().enter((), bytes) {
            *views += 1;
            self.count.fetch_add(1, Relaxed);
        }
    }

    fn leave(&self, bytes: &Range<usize>) {
        self.lock().leave((), bytes, |views| {
            *views -= 1;
            self.count.fetch_sub(1, Relaxed);
            *views == 0
        });
    }

    /// Returns what a framework may do with the memory at an address.
    pub(crate) fn access(&self, address: usize) -> Access {
        if self.contains(address) { Access::ReadOnly } else { Access::ReadWrite }
    }

    fn contains(&self, address: usize) -> bool {
        let mut found = false;
        if self.count.load(Relaxed) > 0 {
            self.lock().containing((), address, |_| found = true);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_only_memory_stays_so_until_its_last_view_leaves() {
        let read_only = ReadOnly::default();
        assert!(!read_only.contains(0x1000));
        read_only.enter(&(0x1000..0x1000));
        assert!(!read_only.contains(0x1000));
        read_only.leave(&(0x1000..0x1000));
        // The same range twice, a part of it, one that overlaps it, and one beside it.
        let ranges = [0x1000..0x2000, 0x1000..0x2000, 0x1400..0x1800, 0x1800..0x2800, 0x3000..0x4000];
        let orders = [[0, 1, 2, 3, 4], [1, 0, 4, 3, 2], [4, 3, 2, 1, 0], [2, 0, 3, 1, 4]];
        for order in orders {
            ranges.iter().for_each(|range| read_only.enter(range));
            for count in 0..=order.len() {
                let left = || order[count..].iter().map(|i| &ranges[*i]);
                for address in (0xfff..0x4002).step_by(0x3ff).chain([0x1000, 0x17ff, 0x1800, 0x1fff, 0x2000, 0x27ff]) {
                    let expected = left().any(|range| range.contains(&address));
                    assert_eq!(read_only.contains(address), expected, "{address:#x} after {count} of {order:?}");
                }
                if let Some(i) = order.get(count) {
                    read_only.leave(&ranges[*i]);
                }
            }
        }
    }
}
