//! What keeps a storage while memory of it is exported.

use crate::library::Held;
use crate::memory::Kept;
use bridge_core::Result;
use bridge_pyo3::{Guarded, batch};
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// Keeps a storage. It may be dropped on any thread: the drop takes the GIL, because the last one frees memory whose
/// owner may be an object of Python.
pub(crate) struct StorageHold {
    _tensor: Guarded<Held>,
}

impl StorageHold {
    pub(crate) fn new(tensor: Held) -> Self {
        Self { _tensor: Guarded::new(tensor) }
    }
}

/// A hold of one export, or one that the exports of a batch share.
pub(crate) enum Hold {
    Memory(#[expect(dead_code, reason = "it is dropped")] Kept),
    Own(#[expect(dead_code, reason = "it is dropped")] StorageHold),
    Shared(#[expect(dead_code, reason = "it is dropped")] Arc<StorageHold>),
}

/// Holds that a thread remembers: many tensors of a list are often views of a source's storage and of a target's.
const REMEMBERED: usize = 4;

/// The last shared holds of a thread, by the address of their storage, and the next that is replaced.
struct Recent {
    holds: [(usize, Weak<StorageHold>); REMEMBERED],
    next: usize,
}

thread_local! {
    static RECENT: RefCell<Recent> =
        const { RefCell::new(Recent { holds: [const { (0, Weak::new()) }; REMEMBERED], next: 0 }) };
}

/// Returns a hold on the storage at an address: in a batch one that another export has, or else a new one. As long as a
/// hold lives, so does its storage, and no other one has its address.
pub(crate) fn hold(storage: usize, new: impl FnOnce() -> Result<StorageHold>) -> Result<Hold> {
    if batch().is_none() {
        return new().map(Hold::Own);
    }
    let find = |recent: &Recent| {
        let mut same = recent.holds.iter().filter(|(held, _)| *held == storage);
        same.find_map(|(_, hold)| hold.upgrade())
    };
    if let Some(hold) = RECENT.with_borrow(find) {
        return Ok(Hold::Shared(hold));
    }
    let hold = Arc::new(new()?);
    RECENT.with_borrow_mut(|recent| {
        recent.holds[recent.next] = (storage, Arc::downgrade(&hold));
        recent.next = (recent.next + 1) % REMEMBERED;
    });
    Ok(Hold::Shared(hold))
}
