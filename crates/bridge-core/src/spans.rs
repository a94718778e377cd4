//! A map from ranges of addresses, which may overlap, to values.

use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry::Occupied;
use std::ops::{Range, RangeInclusive};

/// Number of classes: one for each bit of a length.
const CLASSES: usize = usize::BITS as usize;

/// Number of entries outside the classes. A program with few live views allocates nothing for them.
const FEW: usize = 4;

/// A place and a range.
type Key<P> = (P, usize, usize);

/// Values by place, such as a device, and range of addresses. Ranges may overlap.
///
/// The first few entries are in a list. The others are in classes by the highest bit of their length, so a range of
/// class `k` that contains an address starts less than `2^(k+1)` before it. A look-up visits the list, and only such
/// neighbours of the address in the classes that are not empty.
#[derive(Debug)]
pub struct Spans<P, T> {
    few: SmallVec<[(Key<P>, T); FEW]>,
    classes: [BTreeMap<Key<P>, T>; CLASSES],
    /// Bit set of the classes that are not empty.
    occupied: usize,
}

impl<P, T> Default for Spans<P, T> {
    fn default() -> Self {
        Self { few: SmallVec::new(), classes: [const { BTreeMap::new() }; CLASSES], occupied: 0 }
    }
}

/// Returns the class of a range; `None` for an empty range.
fn class(bytes: &Range<usize>) -> Option<usize> {
    Some(bytes.end.checked_sub(bytes.start)?.checked_ilog2()? as usize)
}

impl<P: Copy + Ord, T> Spans<P, T> {
    /// Returns the value for this range, after inserting the default if there is none. `None` for an empty range.
    pub fn enter(&mut self, place: P, bytes: &Range<usize>) -> Option<&mut T>
    where
        T: Default,
    {
        let (class, key) = (class(bytes)?, (place, bytes.start, bytes.end));
        if let Some(at) = self.place_of(&key) {
            return Some(&mut self.few[at].1);
        }
        if self.few.len() < FEW && !self.classes[class].contains_key(&key) {
            self.few.push((key, T::default()));
            return self.few.last_mut().map(|(_, value)| value);
        }
        self.occupied |= 1 << class;
        Some(self.classes[class].entry(key).or_default())
    }

    /// Returns where the list has this key.
    fn place_of(&self, key: &Key<P>) -> Option<usize> {
        self.few.iter().position(|(known, _)| known == key)
    }

    /// Removes and returns the value for this range if `is_last` returns `true` for it.
    pub fn leave(&mut self, place: P, bytes: &Range<usize>, is_last: impl FnOnce(&mut T) -> bool) -> Option<T> {
        let (class, key) = (class(bytes)?, (place, bytes.start, bytes.end));
        if let Some(at) = self.place_of(&key) {
            return is_last(&mut self.few[at].1).then(|| self.few.swap_remove(at).1);
        }
        let Occupied(mut entry) = self.classes[class].entry(key) else { return None };
        let removed = is_last(entry.get_mut()).then(|| entry.remove());
        if self.classes[class].is_empty() {
            self.occupied &= !(1 << class);
        }
        removed
    }

    /// Calls `visit` with every range that contains the address, and its value. The order depends only on the ranges
    /// that are there.
    pub fn containing(&mut self, place: P, address: usize, mut visit: impl FnMut(Range<usize>, &mut T)) {
        let covers = |(at, start, end): &Key<P>| *at == place && (*start..*end).contains(&address);
        let few = self.few.iter_mut().filter(|(key, _)| covers(key));
        few.for_each(|((_, start, end), value)| visit(*start..*end, value));
        let mut occupied = self.occupied;
        while occupied != 0 {
            let class = occupied.trailing_zeros() as usize;
            occupied &= occupied - 1;
            let near = Self::near(place, address, class);
            let nearby = self.classes[class].range_mut(near);
            let nearby = nearby.filter(|((_, _, end), _)| *end > address);
            nearby.for_each(|((_, start, end), value)| visit(*start..*end, value));
        }
    }

    /// Returns the keys of this class whose ranges may contain the address.
    fn near(place: P, address: usize, class: usize) -> RangeInclusive<Key<P>> {
        let farthest = usize::MAX >> (CLASSES - 1 - class);
        (place, address.saturating_sub(farthest), 0)..=(place, address, usize::MAX)
    }

    /// Returns whether there is no range.
    pub fn is_empty(&self) -> bool {
        self.few.is_empty() && self.occupied == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counted(spans: &mut Spans<u8, usize>, place: u8, address: usize) -> usize {
        let mut count = 0;
        spans.containing(place, address, |bytes, views| {
            assert!(bytes.contains(&address));
            count += *views;
        });
        count
    }

    #[test]
    fn ranges_at_the_ends_of_the_address_space() {
        let mut spans = Spans::<u8, usize>::default();
        for bytes in [0..1, 0..usize::MAX, usize::MAX - 1..usize::MAX] {
            *spans.enter(0, &bytes).unwrap() += 1;
        }
        let at = |spans: &mut _, address| counted(spans, 0, address);
        assert_eq!([0, 1, usize::MAX - 1, usize::MAX].map(|address| at(&mut spans, address)), [2, 1, 2, 0]);
        assert!(spans.enter(0, &(5..5)).is_none() && spans.leave(0, &(5..5), |_| true).is_none());
        let reversed = Range { start: 6, end: 5 };
        assert!(spans.enter(0, &reversed).is_none());
    }

    proptest! {
        /// The map agrees with a list of all ranges.
        #[test]
        fn it_agrees_with_a_list(
            steps in prop::collection::vec((0u8..2, 0usize..300, 0usize..9, 0usize..16, 0..4), 0..200),
        ) {
            let (mut spans, mut list) = (Spans::<u8, usize>::default(), Vec::new());
            for (place, start, log, more, step) in steps {
                let bytes = start..start + (1 << log) + more;
                match step {
                    0 | 1 => {
                        *spans.enter(place, &bytes).unwrap() += 1;
                        list.push((place, bytes));
                    }
                    2 if !list.is_empty() => {
                        let (place, bytes) = list.swap_remove(start % list.len());
                        let removed = spans.leave(place, &bytes, |views| {
                            *views -= 1;
                            *views == 0
                        });
                        prop_assert_eq!(removed.is_some(), !list.contains(&(place, bytes)));
                    }
                    _ => {
                        let expected = list.iter().filter(|(at, bytes)| *at == place && bytes.contains(&start)).count();
                        prop_assert_eq!(counted(&mut spans, place, start), expected);
                    }
                }
                prop_assert_eq!(spans.is_empty(), list.is_empty());
            }
        }
    }
}
