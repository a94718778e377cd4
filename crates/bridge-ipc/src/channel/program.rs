//! The program's hook, which decides whether a wait goes on.

use crate::sync::thread_local;
use bridge_core::Result;
use std::cell::Cell;
use std::sync::OnceLock;
use std::time::Duration;

/// How long a wait lasts at most before the hook decides whether it goes on: see [`while_waiting`].
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// The function by which the program decides whether a wait goes on.
static GOES_ON: OnceLock<fn() -> Result<()>> = OnceLock::new();

thread_local! {
    /// Whether this thread is asking the program. What the program runs must not wait for a lock of the wait.
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

/// Sets the function that is called ten times a second on a thread that waits for another process. Its error ends the
/// wait, as Ctrl-C does in a program. Calls after the first do nothing.
pub fn while_waiting(goes_on: fn() -> Result<()>) {
    GOES_ON.get_or_init(|| goes_on);
}

/// Asks the program whether a wait goes on.
pub(crate) fn goes_on() -> Result<()> {
    let Some(goes_on) = GOES_ON.get() else { return Ok(()) };
    let before = ASKING.with(|asking| asking.replace(true));
    let answer = goes_on();
    ASKING.with(|asking| asking.set(before));
    answer
}

/// Returns whether this thread is asking the program: it interrupts a wait, perhaps one for the same connection.
pub(super) fn is_asking() -> bool {
    ASKING.with(Cell::get)
}
