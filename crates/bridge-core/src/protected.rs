//! Protected memory that a framework without read-only tensors holds for another one.

use crate::planted::is_planted;
use crate::{Access, Lease, Spans};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The protected memory among what a framework has imported, for one that writes to no tensor and has no flag for
/// read-only ones (TensorFlow, JAX). Its exports of that memory are protected too.
#[derive(Debug, Default)]
pub struct Protected {
    /// The number of views of each range.
    ranges: Mutex<Spans<(), usize>>,
    /// The number of all views, which is read without the lock.
    count: AtomicUsize,
}

/// An imported lease, and its range if that is protected: the owner of a tensor's memory.
#[derive(Debug)]
#[must_use = "dropping it returns the memory: keep it as long as the view"]
pub struct Imported {
    _lease: Lease,
    protected: Option<(&'static Protected, Range<usize>)>,
}

impl Drop for Imported {
    fn drop(&mut self) {
        if let Some((memory, bytes)) = &self.protected {
            memory.leave(bytes);
        }
    }
}

impl Protected {
    fn lock(&self) -> MutexGuard<'_, Spans<(), usize>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lease as the owner of a tensor's memory, and records the memory until the owner is dropped if the
    /// lease is read-only.
    pub fn owner(&'static self, lease: Lease) -> Imported {
        let protected = (lease.access() == Access::ReadOnly).then(|| (self, lease.compact_bytes()));
        protected.iter().for_each(|(memory, bytes)| memory.enter(bytes));
        Imported { _lease: lease, protected }
    }

    /// Records a view of the bytes, until it [leaves](Self::leave).
    fn enter(&self, bytes: &Range<usize>) {
        if let Some(views) = self.lock().enter((), bytes) {
            *views += 1;
            self.count.fetch_add(1, Relaxed);
        }
    }

    fn leave(&self, bytes: &Range<usize>) {
        if is_planted("core_protection_left") {
            return;
        }
        self.lock().leave((), bytes, |views| {
            if is_planted("core_protection_forgotten") {
                *views = 1;
            }
            *views -= 1;
            self.count.fetch_sub(1, Relaxed);
            *views == 0
        });
    }

    /// Returns what a view may do with the memory at an address: `own` where it is not protected.
    pub fn access(&self, address: usize, own: Access) -> Access {
        if self.contains(address) { Access::ReadOnly } else { own }
    }

    fn contains(&self, address: usize) -> bool {
        let mut found = false;
        if self.count.load(Relaxed) > 0 {
            self.lock().containing((), address, |_, _| found = true);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protected_memory_stays_so_until_its_last_view_leaves() {
        let protected = Protected::default();
        assert!(!protected.contains(0x1000));
        protected.enter(&(0x1000..0x1000));
        assert!(!protected.contains(0x1000));
        protected.leave(&(0x1000..0x1000));
        // The same range twice, a part of it, one that overlaps it, and one next to it.
        let ranges = [0x1000..0x2000, 0x1000..0x2000, 0x1400..0x1800, 0x1800..0x2800, 0x3000..0x4000];
        let orders = [[0, 1, 2, 3, 4], [1, 0, 4, 3, 2], [4, 3, 2, 1, 0], [2, 0, 3, 1, 4]];
        for order in orders {
            ranges.iter().for_each(|range| protected.enter(range));
            for count in 0..=order.len() {
                let left = || order[count..].iter().map(|i| &ranges[*i]);
                for address in (0xfff..0x4002).step_by(0x3ff).chain([0x1000, 0x17ff, 0x1800, 0x1fff, 0x2000, 0x27ff]) {
                    let expected = left().any(|range| range.contains(&address));
                    assert_eq!(protected.contains(address), expected, "{address:#x} after {count} of {order:?}");
                }
                if let Some(i) = order.get(count) {
                    protected.leave(&ranges[*i]);
                }
            }
        }
    }
}
