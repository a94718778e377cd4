//! The shares of the tickets that a connection has put. A share ends once no name stands for its ticket, and no late
//! answer can say that one does.

use super::wire::Answer;
use crate::exporter::Exporter;
use crate::sync::{self, Mutex, locked};
use crate::ticket::Ticket;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

/// A ticket that was put, with its exporter, and where it stands.
#[derive(Clone)]
struct Share {
    ticket: Ticket,
    exporter: Weak<Exporter>,
    name: String,
    keep: u64,
    /// `None` before the answer.
    version: Option<u64>,
}

/// A ticket, and where it stands.
pub(super) struct Placed {
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) keep: u64,
    pub(super) ticket: Ticket,
}

/// The shares of a connection.
pub(super) struct Shares {
    state: Mutex<State>,
    /// Whether a thread waits for notices.
    pub(super) is_attended: AtomicBool,
    process: u32,
}

#[derive(Default)]
struct State {
    /// A name stands for these, or may.
    standing: Vec<Share>,
    /// No name stands for these. Each has its own number.
    fallen: BTreeMap<u64, Share>,
    last: u64,
}

impl State {
    fn fall(&mut self, such: impl Fn(&Ticket) -> bool) {
        for share in self.standing.extract_if(.., |share| such(&share.ticket)) {
            self.last += 1;
            self.fallen.insert(self.last, share);
        }
    }
}

impl Default for Shares {
    fn default() -> Self {
        Self { state: Mutex::default(), is_attended: AtomicBool::new(false), process: sync::process() }
    }
}

impl Shares {
    /// Receives the notice that no name stands for a ticket any more.
    pub(super) fn hear(&self, notice: Answer) {
        if let Answer::Displaced { ticket } = notice {
            locked(&self.state).fall(|own| *own == ticket);
        }
    }

    /// Ends the shares for which no name stands. Memory is released where no lock is held, so the receiver of a notice
    /// does not do it.
    pub(super) fn release(&self) {
        let fallen = locked(&self.state).fallen.clone();
        for share in fallen.values() {
            // An exporter that was dropped shares nothing any more.
            share.exporter.upgrade().into_iter().for_each(|exporter| drop(exporter.end(&share.ticket)));
        }
        // Only now: another thread that releases has to find them, so that they have ended when it returns.
        locked(&self.state).fallen.retain(|number, _| !fallen.contains_key(number));
    }

    /// Returns what stands under a name, from the oldest version on.
    pub(super) fn placed(&self) -> Vec<Placed> {
        let state = locked(&self.state);
        let placed = state.standing.iter().filter_map(|Share { ticket, name, keep, version, .. }| {
            let (name, ticket) = (name.clone(), ticket.clone());
            Some(Placed { name, version: (*version)?, keep: *keep, ticket })
        });
        let mut placed: Vec<_> = placed.collect();
        placed.sort_by_key(|placed| placed.version);
        placed
    }

    /// Ends all shares.
    pub(super) fn end(&self) {
        locked(&self.state).fall(|_| true);
        self.release();
    }
}

/// A ticket that is being put. If it is dropped before an answer says that the ticket is stored, no name stands for the
/// ticket.
pub(super) struct Put {
    shares: Arc<Shares>,
    ticket: Ticket,
    is_stored: bool,
}

impl Put {
    /// Begins to put a ticket under a name, which keeps so many versions.
    pub(super) fn new(
        shares: &Arc<Shares>,
        ticket: &Ticket,
        exporter: &Arc<Exporter>,
        (name, keep): (&str, u64),
    ) -> Self {
        let exporter = Arc::downgrade(exporter);
        let share = Share { ticket: ticket.clone(), exporter, name: name.into(), keep, version: None };
        locked(&shares.state).standing.push(share);
        Self { shares: Arc::clone(shares), ticket: ticket.clone(), is_stored: false }
    }

    pub(super) fn answered(mut self, answer: &Answer) {
        let Answer::Stored { version, .. } = answer else { return };
        self.is_stored = true;
        let mut state = locked(&self.shares.state);
        state.standing.iter_mut().filter(|own| own.ticket == self.ticket).for_each(|own| own.version = Some(*version));
    }
}

impl Drop for Put {
    fn drop(&mut self) {
        // The shares of a forked process are its parent's, and their locks may be held for ever.
        if !self.is_stored && self.shares.process == sync::process() {
            locked(&self.shares.state).fall(|own| *own == self.ticket);
        }
    }
}
