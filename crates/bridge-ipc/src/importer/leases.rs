//! The leases that tensors lie in.

use super::{Import, containing};
use crate::tensor::Keeps;
use bridge_core::{Export, Result};
use std::ops::Range;
use std::sync::Arc;

/// The leases that the tensors of a call lie in. Each is looked at once, because a look makes system calls.
#[derive(Default)]
pub struct Leases(Vec<Arc<Import>>);

bridge_core::debug_fields!(impl[] Leases);

impl Leases {
    /// As [`check`](super::check), where a lease that was looked at is good.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`](bridge_core::ErrorKind::Gone).
    pub fn check(&mut self, exported: &Export) -> Result<()> {
        let Some((import, _)) = containing(exported) else { return Ok(()) };
        if !self.0.iter().any(|known| Arc::ptr_eq(known, &import)) {
            import.check()?;
            self.0.push(import);
        }
        Ok(())
    }

    /// Looks again at each lease that was looked at.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`](bridge_core::ErrorKind::Gone).
    pub fn check_again(&self) -> Result<()> {
        self.0.iter().try_for_each(|import| import.check())
    }
}

/// Ranges of addresses, by their start. Each has the largest end of those before it and its own.
pub(super) struct Extents(Vec<(usize, usize)>);

impl FromIterator<Range<usize>> for Extents {
    fn from_iter<I: IntoIterator<Item = Range<usize>>>(extents: I) -> Self {
        let mut extents: Vec<_> = extents.into_iter().map(|extent| (extent.start, extent.end)).collect();
        extents.sort_unstable();
        let mut largest = 0;
        for (_, end) in &mut extents {
            largest = largest.max(*end);
            *end = largest;
        }
        Self(extents)
    }
}

impl Extents {
    /// Returns whether one of them contains these addresses.
    pub(super) fn contain(&self, extent: &Range<usize>) -> bool {
        let before = self.0.partition_point(|(start, _)| *start <= extent.start);
        before.checked_sub(1).is_some_and(|last| extent.end <= self.0[last].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range() -> impl Strategy<Value = Range<usize>> {
        (0usize..40, 0usize..20).prop_map(|(start, length)| start..start + length)
    }

    proptest! {
        #[test]
        fn a_range_within_one_of_them_is_found(extents in prop::collection::vec(range(), 0..12), extent in range()) {
            let within = extents.iter().any(|whole| whole.start <= extent.start && extent.end <= whole.end);
            prop_assert_eq!(extents.into_iter().collect::<Extents>().contain(&extent), within);
        }
    }
}
