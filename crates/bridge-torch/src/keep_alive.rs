//! What keeps the memory of a tensor while it is exported.

use crate::library::Held;
use crate::memory::{Kept, Memory};
use bridge_core::Result;
use bridge_pyo3::{Guarded, batch};
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// Keeps memory, or a storage that has it. It may be dropped on any thread: the drop of a storage takes the GIL,
/// because the last one frees memory whose owner may be an object of Python.
pub(crate) enum Owner {
    Memory(#[expect(dead_code, reason = "it is dropped")] Kept),
    Storage(#[expect(dead_code, reason = "it is dropped")] Guarded<Held>),
}

/// What is kept: no other has its address meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Memory(Memory),
    Storage(usize),
}

/// A hold of one export, or one that the exports of a batch share.
pub(crate) enum KeepAlive {
    Own(#[expect(dead_code, reason = "it is dropped")] Owner),
    Shared(#[expect(dead_code, reason = "it is dropped")] Arc<Owner>),
}

/// Holds that a thread remembers: many tensors of a list are often views of a source's storage and of a target's.
const REMEMBERED: usize = 4;

/// The last shared holds of a thread, and the next that is replaced.
struct Recent {
    recent: [(Place, Weak<Owner>); REMEMBERED],
    next: usize,
}

thread_local! {
    static RECENT: RefCell<Recent> =
        const { RefCell::new(Recent { recent: [const { (Place::Storage(0), Weak::new()) }; REMEMBERED], next: 0 }) };
}

/// Returns a hold on a place: in a batch one that another export has, or else a new one.
pub(crate) fn keep_alive(place: Place, new: impl FnOnce() -> Result<Owner>) -> Result<KeepAlive> {
    if batch().is_none() {
        return new().map(KeepAlive::Own);
    }
    let find = |recent: &Recent| {
        let mut same = recent.recent.iter().filter(|(held, _)| *held == place);
        same.find_map(|(_, keep_alive)| keep_alive.upgrade())
    };
    if let Some(keep_alive) = RECENT.with_borrow(find) {
        return Ok(KeepAlive::Shared(keep_alive));
    }
    let keep_alive = Arc::new(new()?);
    RECENT.with_borrow_mut(|recent| {
        recent.recent[recent.next] = (place, Arc::downgrade(&keep_alive));
        recent.next = (recent.next + 1) % REMEMBERED;
    });
    Ok(KeepAlive::Shared(keep_alive))
}
