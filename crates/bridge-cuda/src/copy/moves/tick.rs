//! How far a move is, told by the thread that makes it.

use bridge_core::Result;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Takes the bytes of a move that are done. An error ends the move, and is its error.
pub type Tick = Rc<dyn Fn(usize) -> Result<()>>;

thread_local! {
    static TICK: RefCell<Option<Tick>> = const { RefCell::new(None) };
    /// The bytes that were moved before the present part of a move.
    static BEFORE: Cell<usize> = const { Cell::new(0) };
}

/// Calls `tick` after each piece that this thread copies of a move in `body`. Other threads may have copied more, and
/// the last pieces may still be on their way.
///
/// A move between pinned memory and a device is one copy by the driver, without pieces. So is one between two devices,
/// unless it is packed into several blocks.
pub fn ticking<R>(tick: Tick, body: impl FnOnce() -> R) -> R {
    with(Some(tick), body)
}

/// Makes a part of a move by `body`, after parts of so many bytes.
pub(super) fn after<R>(before: usize, body: impl FnOnce() -> R) -> R {
    let _outer = Outer(BEFORE.replace(before));
    body()
}

/// The bytes before the part around.
struct Outer(usize);

impl Drop for Outer {
    fn drop(&mut self) {
        BEFORE.set(self.0);
    }
}

/// Calls this thread's [`Tick`], if it has one. A move that the tick itself makes is not told to it.
pub(super) fn tick(done: usize) -> Result<()> {
    match TICK.with_borrow(Option::clone) {
        Some(tick) => {
            let done = BEFORE.get() + done;
            with(None, || tick(done))
        }
        None => Ok(()),
    }
}

fn with<R>(tick: Option<Tick>, body: impl FnOnce() -> R) -> R {
    /// The tick before.
    struct Before(Option<Tick>);
    impl Drop for Before {
        fn drop(&mut self) {
            TICK.replace(self.0.take());
        }
    }
    let _before = Before(TICK.replace(tick));
    after(0, body)
}
