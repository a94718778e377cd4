//! Exports that are made together.

use std::cell::Cell;

thread_local! {
    /// The number of the batch that this thread is in, or 0, and the last number.
    static BATCH: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

fn change(is_in: bool) {
    let last = BATCH.get().1 + 1;
    BATCH.set((if is_in { last } else { 0 }, last));
}

/// The end of a batch, or of what runs outside of it. Comes also where that panics.
struct End {
    was_in: bool,
}

impl Drop for End {
    fn drop(&mut self) {
        change(self.was_in);
    }
}

fn run<R>(is_in: bool, body: impl FnOnce() -> R) -> R {
    let _end = End { was_in: batch().is_some() };
    change(is_in);
    body()
}

/// Calls `body`, whose exports are one batch: all of them live until the last is made.
pub fn together<R>(body: impl FnOnce() -> R) -> R {
    run(true, body)
}

/// Calls `body` outside of any batch, because it may run code of the program. What follows is another batch.
pub fn apart<R>(body: impl FnOnce() -> R) -> R {
    run(false, body)
}

/// Returns the number of the batch that this thread is in. In a batch an adapter may reuse what it has found for an
/// earlier tensor, such as the current stream.
pub fn batch() -> Option<u64> {
    Some(BATCH.get().0).filter(|number| *number != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_batches_have_one_number() {
        assert_eq!((batch(), apart(batch)), (None, None));
        let numbers = together(|| {
            let first = batch();
            let inner = together(batch);
            let second = batch();
            assert_eq!(apart(batch), None);
            [first, inner, second, batch()]
        });
        let mut known: Vec<_> = numbers.into_iter().map(Option::unwrap).collect();
        known.dedup();
        assert_eq!(known.len(), 4, "{known:?}");
        assert_eq!(batch(), None);
        assert!(std::panic::catch_unwind(|| together(|| panic!("inside"))).is_err());
        assert_eq!(batch(), None);
        assert!(together(batch) > known.last().copied());
    }
}
