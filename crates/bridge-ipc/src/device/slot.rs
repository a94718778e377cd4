//! Memory of other processes that is open in this one: each piece once, and open a little longer than it is used.

use super::closer::defer;
use super::{Name, close, locked};
use bridge_core::{Device, Error, ErrorKind, Result};
use bridge_cuda::Opened;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Slots for memory, by the driver's name of it. The driver opens most memory only once at a time, so there is one slot
/// for it, in which one thread at a time opens or closes.
#[derive(Debug)]
pub(super) struct Slots(Mutex<BTreeMap<Vec<u8>, Arc<Slot>>>);

/// The memory of other processes that is open in this one.
pub(super) static OPENED: Slots = Slots::new();

/// A slot for memory that is open.
#[derive(Debug, Default)]
pub(super) struct Slot(Mutex<Inside>);

#[derive(Debug, Default)]
struct Inside {
    opened: Option<(Name, Device, Opened)>,
    /// Mappings, and those that end after the work on them.
    uses: usize,
    /// How often a use has begun.
    begun: usize,
    /// Who will use it again. They keep it open only where the driver does not need it closed.
    expected: usize,
}

/// How long a ticket may wait for the end of work on memory that its owner has freed, and the time between two checks.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);

impl Slots {
    const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    fn at(&self, called: Vec<u8>) -> Arc<Slot> {
        let mut slots = locked(&self.0);
        // A slot that nothing else refers to has no open memory.
        slots.retain(|_, slot| Arc::strong_count(slot) > 1);
        Arc::clone(slots.entry(called).or_default())
    }

    /// Begins a use of memory, by the driver's name of it, its own name and its device. `open` opens it unless it is
    /// open. Returns its slot and its addresses.
    ///
    /// Memory that its owner has freed, after the work on it here, may still be open. The driver does not open new
    /// memory at that address before the old memory is closed: `open` fails with [`ErrorKind::Busy`], or the memory in
    /// this slot has another name.
    pub(super) fn enter(
        &self,
        called: Vec<u8>,
        (name, device): (&Name, Device),
        open: impl Fn() -> Result<Opened>,
        close: impl Fn(Device, Opened),
    ) -> Result<(Arc<Slot>, Range<usize>)> {
        let (slot, until) = (self.at(called), Instant::now() + PATIENCE);
        loop {
            let entered = locked(&slot.0).enter((name, device), &open, &close);
            match entered {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < until => (),
                entered => return Ok((slot, entered?)),
            }
            self.end_unused(&close);
            thread::sleep(PAUSE);
        }
    }

    /// Closes all memory that is open and not in use, except what another thread opens or closes now.
    fn end_unused(&self, close: impl Fn(Device, Opened)) {
        let slots: Vec<_> = locked(&self.0).values().cloned().collect();
        for slot in slots {
            if let Ok(mut inside) = slot.0.try_lock() {
                inside.end(&close);
            }
        }
    }
}

impl Slot {
    /// Ends a use. Returns whether it was the last one.
    pub(super) fn leave(&self) -> bool {
        let mut inside = locked(&self.0);
        inside.uses -= 1;
        inside.uses == 0
    }

    /// Returns how often a use has begun.
    fn begun(&self) -> usize {
        locked(&self.0).begun
    }

    /// Closes the memory, unless it is in use or will be used again.
    pub(super) fn end(&self, close: impl Fn(Device, Opened)) {
        self.end_since(self.begun(), close);
    }

    /// Closes the memory as `end` does, unless a use has begun since `begun` was that number.
    fn end_since(&self, begun: usize, close: impl Fn(Device, Opened)) {
        let mut inside = locked(&self.0);
        if inside.expected == 0 && inside.begun == begun {
            inside.end(close);
        }
    }

    /// Says that the memory will be used again, or with `false` that it will not. Returns whether nothing needs it then.
    pub(super) fn expect(&self, again: bool) -> bool {
        let mut inside = locked(&self.0);
        if again {
            inside.expected += 1;
        } else {
            inside.expected -= 1;
        }
        inside.expected == 0 && inside.uses == 0
    }

    pub(super) fn is_ordered(&self) -> bool {
        locked(&self.0).opened.as_ref().is_some_and(|(_, _, opened)| opened.closes_in_order())
    }
}

impl Inside {
    fn enter(
        &mut self,
        (name, device): (&Name, Device),
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
        self.begun += 1;
        Ok(opened.range.clone())
    }

    fn end(&mut self, close: impl Fn(Device, Opened)) {
        if let Some((_, device, opened)) = self.opened.take_if(|_| self.uses == 0) {
            close(device, opened);
        }
    }
}

/// Closes memory a little later, unless it is used meanwhile: the next ticket for the same block opens in a tenth of the
/// time.
pub(super) fn close_later(slot: Arc<Slot>) {
    let begun = slot.begun();
    defer(move || slot.end_since(begun, close));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::broken;
    use crate::wire::Hex;
    use std::cell::{Cell, RefCell};

    fn name(number: u8) -> Name {
        (Hex([1; 16]), vec![number])
    }

    const GPU: Device = Device::cuda(0);

    /// What was entered: its slot and its address.
    type Entered = Result<(Arc<Slot>, usize)>;

    /// Begins a use, and returns what was opened and closed as well.
    fn enter(slots: &Slots, number: u8) -> (Entered, Vec<String>) {
        let calls = RefCell::new(Vec::new());
        let open = || {
            calls.borrow_mut().push(format!("open {number}"));
            Ok(Opened::new(usize::from(number)..100))
        };
        let close = |_, opened: Opened| calls.borrow_mut().push(format!("close {}", opened.range.start));
        let entered = slots.enter(b"called".into(), (&name(number), GPU), open, close);
        (entered.map(|(slot, range)| (slot, range.start)), calls.into_inner())
    }

    fn end(slot: &Slot) -> bool {
        let closed = Cell::new(false);
        slot.end(|_, _| closed.set(true));
        closed.get()
    }

    /// Ends a use on another thread, a moment later.
    fn leave_after_a_pause(slot: Arc<Slot>) -> thread::JoinHandle<bool> {
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            slot.leave()
        })
    }

    #[test]
    fn memory_is_opened_once_and_stays_open_until_it_is_closed() {
        let slots = Slots::new();
        let (entered, calls) = enter(&slots, 1);
        let (slot, _) = entered.unwrap();
        assert_eq!(calls, ["open 1"]);
        assert!(enter(&slots, 1).1.is_empty());
        assert!(!slot.leave() && !end(&slot), "the other use keeps it");
        assert!(slot.leave());
        assert!(enter(&slots, 1).1.is_empty(), "it has not been closed");
        assert!(slot.leave() && end(&slot) && !end(&slot));
        assert_eq!(enter(&slots, 1).1, ["open 1"]);
    }

    #[test]
    fn memory_that_was_used_meanwhile_stays_open() {
        let slots = Slots::new();
        let (slot, _) = enter(&slots, 1).0.unwrap();
        assert!(slot.leave());
        let begun = slot.begun();
        assert!(enter(&slots, 1).1.is_empty() && slot.leave());
        slot.end_since(begun, |_, _| panic!("the last use has ended just now"));
        assert!(end(&slot));
    }

    #[test]
    fn memory_that_its_owner_has_freed_is_closed_before_other_memory_is_opened() {
        let slots = Slots::new();
        let (slot, _) = enter(&slots, 1).0.unwrap();
        slot.leave();
        let (entered, calls) = enter(&slots, 2);
        assert_eq!((entered.unwrap().1, calls), (2, vec!["close 1".to_owned(), "open 2".to_owned()]));
    }

    #[test]
    fn a_ticket_waits_for_the_end_of_work_on_freed_memory() {
        let slots = Slots::new();
        let ends = leave_after_a_pause(enter(&slots, 1).0.unwrap().0);
        assert_eq!(enter(&slots, 2).1, ["close 1", "open 2"]);
        assert!(ends.join().unwrap());
    }

    #[test]
    fn memory_that_will_be_used_again_stays_open_until_the_driver_needs_it_closed() {
        let slots = Slots::new();
        let (slot, _) = enter(&slots, 1).0.unwrap();
        assert!(!slot.expect(true) && slot.leave());
        assert!(!end(&slot), "it is expected");
        assert!(enter(&slots, 1).1.is_empty());
        assert!(!slot.expect(false), "it is in use");
        assert!(!slot.expect(true) && slot.leave());
        assert_eq!(enter(&slots, 2).1, ["close 1", "open 2"], "its owner has freed it");
        assert!(slot.leave() && slot.expect(false) && end(&slot));
    }

    #[test]
    fn memory_that_does_not_open_is_tried_again() {
        let slots = Slots::new();
        let failed = slots.enter(b"called".into(), (&name(1), GPU), || Err(broken("no memory")), |_, _| ());
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(enter(&slots, 1).1, ["open 1"]);
    }

    #[test]
    fn memory_opens_where_the_driver_wants_other_memory_closed_first() {
        let (slots, is_open) = (Slots::new(), Cell::new(true));
        let (old, _) = enter(&slots, 1).0.unwrap();
        // Also where it is expected to be used again.
        old.expect(true);
        let ends = leave_after_a_pause(Arc::clone(&old));
        let open = || match is_open.get() {
            true => Err(Error::new(ErrorKind::Busy, "already mapped")),
            false => Ok(Opened::new(2..100)),
        };
        let close = |_, closed: Opened| is_open.set(closed.range.start != 1);
        let (_, opened) = slots.enter(b"other".into(), (&name(2), GPU), open, close).unwrap();
        assert_eq!(opened.start, 2, "the work on the old memory has ended, and it was closed");
        assert!(ends.join().unwrap() && !end(&old));
    }
}
