//! Memory of devices that stays mapped between two versions of the same tensors.

use super::Opened;
use crate::device::Expected;
use crate::tensor::IpcTensor;

/// A slot stays mapped for so many versions. One that none of them has used may have been freed.
const VERSIONS: u64 = 4;

/// Keeps the memory of the versions that were opened last mapped on their devices: the next version in the same memory
/// opens in less time. It is not a lease. Until the mapping ends, memory that its owner has freed is not returned to the
/// device.
#[derive(Default)]
pub struct StaysMapped(Recent<Vec<Expected>>);

bridge_core::debug_fields!(impl[] StaysMapped);

impl StaysMapped {
    /// Keeps the memory of a version mapped, and ends this for memory that none of the last four has used.
    pub fn keep(&mut self, version: &Opened) {
        // All tensors are of one share.
        let expected = version.tensors.first().map_or_else(Vec::new, IpcTensor::expected);
        let same = |one: &Vec<Expected>, other: &Vec<Expected>| {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.is(other))
        };
        self.0.keep(expected, same);
    }
}

/// What the last versions had, and the number of the last one that had it.
struct Recent<T> {
    count: u64,
    items: Vec<(u64, T)>,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self { count: 0, items: Vec::new() }
    }
}

impl<T> Recent<T> {
    fn keep(&mut self, item: T, same: impl Fn(&T, &T) -> bool) {
        self.count += 1;
        let count = self.count;
        self.items.retain(|(last, known)| last + VERSIONS > count && !same(known, &item));
        self.items.push((count, item));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_stay_until_four_versions_have_not_used_them() {
        let mut recent = Recent::default();
        let mut after = |slot: u8| {
            recent.keep(slot, |one, other| one == other);
            recent.items.iter().map(|(_, slot)| *slot).collect::<Vec<_>>()
        };
        let kept: Vec<_> = [1, 2, 1, 2, 3, 4, 3, 4, 3].map(&mut after).into();
        assert_eq!(kept[3], [1, 2]);
        assert_eq!(kept[5], [1, 2, 3, 4]);
        assert_eq!(kept[6], [2, 4, 3], "1 was used four versions before");
        assert_eq!(kept[8], [4, 3]);
    }
}
