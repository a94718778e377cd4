//! The shares of the tickets that a connection has put. A share ends once no name stands for its ticket, and no late
//! answer can say that one does.

use super::wire::Answer;
use crate::exporter::Exporter;
use crate::sync::{self, Mutex, locked};
use crate::ticket::Ticket;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

/// A ticket that was put, with its exporter.
type Share = (Ticket, Weak<Exporter>);

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
    /// No name stands for these. Each has a number of its own.
    fallen: BTreeMap<u64, Share>,
    last: u64,
}

impl State {
    fn fall(&mut self, such: impl Fn(&Ticket) -> bool) {
        for share in self.standing.extract_if(.., |(ticket, _)| such(ticket)) {
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
        for (ticket, exporter) in fallen.values() {
            // An exporter that was dropped shares nothing any more.
            exporter.upgrade().into_iter().for_each(|exporter| drop(exporter.end(ticket)));
        }
        // Only now: another thread that releases has to find them, so that they have ended when it returns.
        locked(&self.state).fallen.retain(|number, _| !fallen.contains_key(number));
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
    pub(super) fn new(shares: &Arc<Shares>, ticket: &Ticket, exporter: &Arc<Exporter>) -> Self {
        locked(&shares.state).standing.push((ticket.clone(), Arc::downgrade(exporter)));
        Self { shares: Arc::clone(shares), ticket: ticket.clone(), is_stored: false }
    }

    pub(super) fn answered(mut self, answer: &Answer) {
        self.is_stored = matches!(answer, Answer::Stored { .. });
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
