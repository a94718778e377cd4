//! How far a move is, told by the thread that makes it.

use bridge_core::Result;
use std::cell::RefCell;
use std::rc::Rc;

/// Takes the bytes of a move that are done. An error ends the move, and is its error.
pub type Tick = Rc<dyn Fn(usize) -> Result<()>>;

thread_local! {
    static TICK: RefCell<Option<Tick>> = const { RefCell::new(None) };
}

/// Calls `tick` after each piece that this thread copies of a move in `body`. Other threads may have copied more, and
/// the last pieces may still be on their way.
///
/// A move between pinned memory and a device, and one between two devices, is one copy by the driver: without pieces.
pub fn ticking<R>(tick: Tick, body: impl FnOnce() -> R) -> R {
    with(Some(tick), body)
}

/// Calls this thread's [`Tick`], if it has one. A move that the tick itself makes is not told to it.
pub(super) fn tick(done: usize) -> Result<()> {
    match TICK.with_borrow(Option::clone) {
        Some(tick) => with(None, || tick(done)),
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
    body()
}
