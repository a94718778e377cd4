//! Memory of other processes that is open in this one: each piece once, and a little longer than it is used.

use super::{Name, close, locked};
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
    opened: Option<(Name, Device, Opened)>,
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
    /// Memory that its owner has freed, behind the work on it here, may still be open. The driver opens no other in its
    /// place before it is closed: `open` fails with [`ErrorKind::Busy`], or the memory in this place has another name.
    pub(super) fn enter(
        &self,
        name: &Name,
        device: Device,
        open: impl Fn() -> Result<Opened>,
        close: impl Fn(Device, Opened),
    ) -> Result<Range<usize>> {
        let until = Instant::now() + PATIENCE;
        loop {
            let entered = locked(&self.0).enter(name, device, &open, &close);
            match entered {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < until => (),
                entered => return entered,
            }
            end_unused(&close);
            thread::sleep(PAUSE);
        }
    }

    /// Ends a use. Returns whether it was the last one.
    pub(super) fn leave(&self) -> bool {
        let mut inside = locked(&self.0);
        inside.uses -= 1;
        inside.uses == 0
    }

    /// Closes the memory, unless it is in use.
    pub(super) fn end(&self, close: impl Fn(Device, Opened)) {
        locked(&self.0).end(close);
    }

    pub(super) fn is_ordered(&self) -> bool {
        locked(&self.0).opened.as_ref().is_some_and(|(_, _, opened)| opened.closes_in_order())
    }
}

impl Inside {
    fn enter(
        &mut self,
        name: &Name,
        device: Device,
        open: impl Fn() -> Result<Opened>,
        close: impl Fn(Device, Opened),
    ) -> Result<Range<usize>> {
        if self.opened.as_ref().is_some_and(|(known, ..)| known != name) {
            self.end(close);
        }
        let (known, _, opened) = match &mut self.opened {
            Some(opened) => opened,
            none => none.insert((name.clone(), device, open()?)),
        };
        if known != name {
            let text = "memory that its owner has freed is in use here: drop what was opened before, and open again";
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.uses += 1;
        Ok(opened.range.clone())
    }

    fn end(&mut self, close: impl Fn(Device, Opened)) {
        if let Some((_, device, opened)) = self.opened.take_if(|_| self.uses == 0) {
            close(device, opened);
        }
    }
}

/// Closes all memory that is open and not in use, but for what another thread opens or closes now.
fn end_unused(close: impl Fn(Device, Opened)) {
    let slots: Vec<_> = locked(&MAPPED).values().cloned().collect();
    for slot in slots {
        if let Ok(mut inside) = slot.0.try_lock() {
            inside.end(&close);
        }
    }
}

/// How long memory without a use stays open: the next ticket for the same block opens in a tenth of the time.
const LINGER: Duration = Duration::from_millis(200);

/// Closes memory on a thread of its own: to close a handle, the driver waits for all work of the device.
pub(super) fn close_later(slot: Arc<Slot>) {
    type Closing = (Instant, Arc<Slot>);
    static CLOSER: OnceLock<Option<Mutex<mpsc::Sender<Closing>>>> = OnceLock::new();
    let thread = CLOSER.get_or_init(|| {
        let (sender, receiver) = mpsc::channel::<Closing>();
        let work = move || {
            for (due, slot) in receiver {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                slot.end(close);
            }
        };
        thread::Builder::new().name("tensor-bridge-ipc".into()).spawn(work).ok().map(|_| Mutex::new(sender))
    });
    let closing = (Instant::now() + LINGER, Arc::clone(&slot));
    let sent = thread.as_ref().is_some_and(|thread| locked(thread).send(closing).is_ok());
    if !sent {
        slot.end(close);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::broken;
    use crate::wire::Hex;
    use std::cell::{Cell, RefCell};

    fn name(number: u8) -> Name {
        (Hex([1; 16]), vec![number])
    }

    /// Enters a slot, and returns the address and what was opened and closed.
    fn enter(slot: &Slot, number: u8) -> (Result<usize>, Vec<String>) {
        let calls = RefCell::new(Vec::new());
        let open = || {
            calls.borrow_mut().push(format!("open {number}"));
            Ok(Opened::new(usize::from(number)..100))
        };
        let close = |_, opened: Opened| calls.borrow_mut().push(format!("close {}", opened.range.start));
        let entered = slot.enter(&name(number), Device::cuda(0), open, close).map(|range| range.start);
        (entered, calls.into_inner())
    }

    fn end(slot: &Slot) -> bool {
        let closed = Cell::new(false);
        slot.end(|_, _| closed.set(true));
        closed.get()
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
        let failed = slot.enter(&name(1), Device::cuda(0), || Err(broken("no memory")), |_, _| ()).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Protocol);
        assert_eq!(enter(&slot, 1).1, ["open 1"]);
    }

    #[test]
    fn memory_opens_where_the_driver_wants_other_memory_closed_first() {
        let (device, old, new) = (Device::cuda(0), Slot::of(b"old".into()), Slot::of(b"new".into()));
        let is_open = Cell::new(true);
        old.enter(&name(1), device, || Ok(Opened::new(1..100)), |_, _| ()).unwrap();
        let ends = Arc::clone(&old);
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            ends.leave();
        });
        let open = || match is_open.get() {
            true => Err(Error::new(ErrorKind::Busy, "already mapped")),
            false => Ok(Opened::new(2..100)),
        };
        let opened = new.enter(&name(2), device, open, |_, closed| is_open.set(closed.range.start != 1));
        assert_eq!(opened.unwrap().start, 2, "the work on the old memory has ended, and it was closed");
        assert!(!end(&old));
        ends.join().unwrap();
    }
}
