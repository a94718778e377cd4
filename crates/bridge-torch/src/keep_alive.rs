//! What keeps the memory of a tensor while it is exported.

use crate::counted::Counted;
use crate::library::Held;
use crate::memory::{Kept, Memory};
use bridge_pyo3::{Guarded, batch};
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// Keeps memory, or a storage that has it. It may be dropped on any thread: the drop of a storage takes the GIL,
/// because the last one frees memory whose owner may be an object of Python.
#[expect(dead_code, reason = "they are dropped")]
pub(crate) enum KeepAlive {
    Memory(Kept),
    /// Memory that the exports of a batch share.
    Shared(Arc<Kept>),
    Counted(Counted),
    Storage(Guarded<Held>),
}

/// Memory that a thread remembers: many tensors of a list are often views of a source's memory and of a target's.
const REMEMBERED: usize = 4;

/// The last shared memory of a thread, and the next that is replaced.
struct Recent {
    recent: [Option<(Memory, Weak<Kept>)>; REMEMBERED],
    next: usize,
}

thread_local! {
    static RECENT: RefCell<Recent> =
        const { RefCell::new(Recent { recent: [const { None }; REMEMBERED], next: 0 }) };
}

impl KeepAlive {
    /// Keeps memory: in a batch as another export does, if one has.
    ///
    /// # Safety
    ///
    /// That of [`Memory::keep`].
    pub(crate) unsafe fn of(memory: Memory) -> Self {
        // SAFETY: the caller's obligation.
        let keep = || unsafe { memory.keep() };
        if batch().is_none() {
            return Self::Memory(keep());
        }
        let find = |recent: &Recent| {
            let mut same = recent.recent.iter().flatten().filter(|(known, _)| *known == memory);
            same.find_map(|(_, kept)| kept.upgrade())
        };
        Self::Shared(RECENT.with_borrow(find).unwrap_or_else(|| {
            let kept = Arc::new(keep());
            RECENT.with_borrow_mut(|recent| {
                recent.recent[recent.next] = Some((memory, Arc::downgrade(&kept)));
                recent.next = (recent.next + 1) % REMEMBERED;
            });
            kept
        }))
    }
}
