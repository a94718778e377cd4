//! What keeps the memory of a tensor that clones share.

use crate::Lease;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// The owner of a tensor's memory. A clone keeps the same owner, which is dropped with the last of them, on any thread.
///
/// For a tensor type of Rust that can be cloned. It takes a [`Lease`] without an allocation: most tensors that a transfer
/// returns are never cloned, and the first clone makes the lease one that is counted.
///
/// ```
/// use bridge_core::Owner;
///
/// let owner = Owner::new(vec![1.0, 2.0]);
/// let other = owner.clone();
/// drop(owner);
/// // `other` still keeps the vector.
/// # drop(other);
/// ```
pub struct Owner(Mutex<Option<Held>>);

enum Held {
    /// Its producer has boxed it already.
    Alone(Lease),
    Shared(Arc<dyn Any + Send + Sync>),
}

impl Owner {
    /// Makes an owner of a value.
    pub fn new(value: impl Send + Sync + 'static) -> Self {
        Self::of(Held::Shared(Arc::new(value)))
    }

    fn of(held: Held) -> Self {
        Self(Mutex::new(Some(held)))
    }
}

impl From<Lease> for Owner {
    fn from(lease: Lease) -> Self {
        Self::of(Held::Alone(lease))
    }
}

impl Clone for Owner {
    fn clone(&self) -> Self {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shared: Arc<dyn Any + Send + Sync> = match held.take().expect("it is put back under the lock") {
            Held::Alone(lease) => Arc::new(lease),
            Held::Shared(value) => value,
        };
        *held = Some(Held::Shared(Arc::clone(&shared)));
        Self::of(Held::Shared(shared))
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owner")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn the_last_clone_drops_the_value() {
        let value = Arc::new(());
        let owner = Owner::new(Arc::clone(&value));
        let clones: Vec<_> = (0..8).map(|_| owner.clone()).collect();
        let threads: Vec<_> = clones.into_iter().map(|clone| thread::spawn(move || drop(clone.clone()))).collect();
        assert!(threads.into_iter().all(|thread| thread.join().is_ok()));
        assert_eq!(Arc::strong_count(&value), 2);
        drop(owner);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
