//! Memory of other processes that is open in this one: each piece once, and a little longer than it is used.

use super::{Name, closer, locked};
use bridge_core::{Device, Error, ErrorKind, Result};
use bridge_cuda::Opened;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// The memory of other processes that is open in this one, by what the driver calls it. The driver opens most memory
/// only once at a time, so that there is one place for it, in which one thread at a time opens or closes.
static MAPPED: Mutex<BTreeMap<Vec<u8>, Arc<Slot>>> = Mutex::new(BTreeMap::new());

/// A place for memory that is open.
#[derive(Debug, Default)]
pub(super) struct Slot(Mutex<Inside>);

#[derive(Debug, Default)]
struct Inside {
    opened: Option<(Name, Opened)>,
    /// Mappings, and those that end behind the work on them.
    uses: usize,
}

/// How long a ticket may wait for the end of work on memory that its owner has freed, and the time between two looks.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);

impl Slot {
    /// Returns the place of memory that the driver calls this.
    pub(super) fn of(called: Vec<u8>) -> Arc<Self> {
        let mut mapped = locked(&MAPPED);
        // What nothing else refers to is open nowhere.
        mapped.retain(|_, slot| Arc::strong_count(slot) > 1);
        Arc::clone(mapped.entry(called).or_default())
    }

    /// Begins a use of the memory with this name, which `open` opens unless it is open. Returns its addresses.
    ///
    /// Memory with another name that is open here has been freed by its owner, behind the work on it here. The driver
    /// opens no other in its place before it is closed.
    pub(super) fn enter(
        &self,
        name: &Name,
        open: impl FnOnce() -> Result<Opened>,
        close: impl FnOnce(Opened),
    ) -> Result<Range<usize>> {
        let until = Instant::now() + PATIENCE;
        let mut inside = locked(&self.0);
        while inside.uses > 0 && inside.opened.as_ref().is_some_and(|(known, _)| known != name) {
            if Instant::now() > until {
                let text =
                    "memory that its owner has freed is in use here: drop what was opened before, and open again";
                return Err(Error::new(ErrorKind::Busy, text));
            }
            drop(inside);
            thread::sleep(PAUSE);
            inside = locked(&self.0);
        }
        if let Some((_, old)) = inside.opened.take_if(|(known, _)| known != name) {
            close(old);
        }
        if inside.opened.is_none() {
            inside.opened = Some((name.clone(), open()?));
        }
        inside.uses += 1;
        Ok(inside.opened.as_ref().map_or(0..0, |(_, opened)| opened.range.clone()))
    }

    /// Ends a use. Returns whether it was the last one.
    pub(super) fn leave(&self) -> bool {
        let mut inside = locked(&self.0);
        inside.uses -= 1;
        inside.uses == 0
    }

    /// Closes the memory, unless it is in use.
    pub(super) fn end(&self, close: impl FnOnce(Opened)) {
        let Inside { opened, uses } = &mut *locked(&self.0);
        if let Some((_, opened)) = opened.take_if(|_| *uses == 0) {
            close(opened);
        }
    }

    pub(super) fn is_ordered(&self) -> bool {
        locked(&self.0).opened.as_ref().is_some_and(|(_, opened)| opened.closes_in_order())
    }
}

/// How long memory without a use stays open: the next ticket for the same block opens in a tenth of the time.
const LINGER: Duration = Duration::from_millis(200);

/// Closes memory on a thread of its own: to close a handle, the driver waits for all work of the device.
pub(super) fn close_later(slot: Arc<Slot>, device: Device) {
    type Closing = (Instant, Arc<Slot>, Device);
    static CLOSER: OnceLock<Option<Mutex<mpsc::Sender<Closing>>>> = OnceLock::new();
    let thread = CLOSER.get_or_init(|| {
        let (sender, receiver) = mpsc::channel::<Closing>();
        let close = move || {
            for (due, slot, device) in receiver {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                slot.end(closer(device));
            }
        };
        thread::Builder::new().name("tensor-bridge-ipc".into()).spawn(close).ok().map(|_| Mutex::new(sender))
    });
    let closing = (Instant::now() + LINGER, Arc::clone(&slot), device);
    let sent = thread.as_ref().is_some_and(|thread| locked(thread).send(closing).is_ok());
    if !sent {
        slot.end(closer(device));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::broken;
    use crate::wire::Hex;

    fn name(number: u8) -> Name {
        (Hex([1; 16]), vec![number])
    }

    /// Enters a slot, and returns the address and what was opened and closed.
    fn enter(slot: &Slot, number: u8) -> (Result<usize>, Vec<String>) {
        let calls = std::cell::RefCell::new(Vec::new());
        let open = || {
            calls.borrow_mut().push(format!("open {number}"));
            Ok(Opened::new(usize::from(number)..100))
        };
        let close = |opened: Opened| calls.borrow_mut().push(format!("close {}", opened.range.start));
        let entered = slot.enter(&name(number), open, close).map(|range| range.start);
        (entered, calls.into_inner())
    }

    fn end(slot: &Slot) -> bool {
        let mut closed = false;
        slot.end(|_| closed = true);
        closed
    }

    #[test]
    fn memory_is_opened_once_and_stays_open_until_it_is_closed() {
        let slot = Slot::default();
        assert_eq!(enter(&slot, 1).1, ["open 1"]);
        assert!(enter(&slot, 1).1.is_empty());
        assert!(!slot.leave() && !end(&slot), "the other use keeps it");
        assert!(slot.leave());
        assert!(enter(&slot, 1).1.is_empty(), "it has not been closed");
        assert!(slot.leave() && end(&slot) && !end(&slot));
        assert_eq!(enter(&slot, 1).1, ["open 1"]);
    }

    #[test]
    fn memory_that_its_owner_has_freed_is_closed_before_other_memory_is_opened() {
        let slot = Slot::default();
        enter(&slot, 1).0.unwrap();
        slot.leave();
        let (address, calls) = enter(&slot, 2);
        assert_eq!((address.unwrap(), calls), (2, vec!["close 1".to_owned(), "open 2".to_owned()]));
    }

    #[test]
    fn a_ticket_waits_for_the_end_of_work_on_freed_memory() {
        let slot = Arc::new(Slot::default());
        enter(&slot, 1).0.unwrap();
        let other = Arc::clone(&slot);
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            other.leave();
        });
        assert_eq!(enter(&slot, 2).1, ["close 1", "open 2"]);
        ends.join().unwrap();
    }

    #[test]
    fn memory_that_does_not_open_is_tried_again() {
        let slot = Slot::default();
        let failed = slot.enter(&name(1), || Err(broken("no memory")), |_| ()).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Protocol);
        assert_eq!(enter(&slot, 1).1, ["open 1"]);
    }
}
