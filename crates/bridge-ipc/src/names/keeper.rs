//! What a keeper does: it takes the memory of tickets over, and shares it itself.

use super::LISTED;
use crate::exporter::{Exporter, Kept};
use crate::importer;
use crate::server::Bell;
use crate::settings::Settings;
use crate::sync::{Mutex, locked, thread};
use crate::ticket::Ticket;
use crate::wire::{Content, Why};
use bridge_core::{Error, ErrorKind};
use std::sync::Arc;

/// The number of a task: the connection that waits for its end.
pub(super) type Task = u64;

/// A task that has ended, with the keeper's own ticket for the same memory.
pub(super) type Adopted = (Task, Result<Ticket, Why>);

/// Keeps the memory of tickets.
pub(super) trait Keeping: Send {
    /// Begins to take over the memory of a ticket.
    fn adopt(&mut self, task: Task, ticket: &Ticket);

    /// Returns the tasks that have ended.
    fn adopted(&mut self) -> Vec<Adopted>;

    /// Ends the share of a ticket of the keeper. Processes that have it open keep it.
    fn end(&mut self, ticket: &Ticket);

    /// Returns the bytes that are kept, and the most that may be.
    fn held(&self) -> (usize, usize);
}

/// Keeps memory by its descriptors. It opens none of it, and so needs no driver.
pub(super) struct Keeper {
    exporter: Arc<Exporter>,
    adopted: Arc<Mutex<Vec<Adopted>>>,
    bell: Arc<Bell>,
    most: usize,
}

impl Keeper {
    pub(super) fn new(settings: Settings, bell: Arc<Bell>) -> bridge_core::Result<Self> {
        let most = settings.limits.bytes;
        Ok(Self { exporter: Arc::new(Exporter::new(settings)?), adopted: Arc::default(), bell, most })
    }
}

impl Keeping for Keeper {
    /// On a thread of its own: the process that shares may be slow to answer.
    fn adopt(&mut self, task: Task, ticket: &Ticket) {
        let (exporter, adopted, bell) = (Arc::clone(&self.exporter), Arc::clone(&self.adopted), Arc::clone(&self.bell));
        let ticket = ticket.clone();
        let adopting = move || {
            let kept = adopted_by(&exporter, &ticket);
            locked(&adopted).push((task, kept));
            bell.ring();
        };
        if thread::Builder::new().name("truebridge-ipc".into()).spawn(adopting).is_err() {
            locked(&self.adopted).push((task, Err(Why::Busy)));
            self.bell.ring();
        }
    }

    fn adopted(&mut self) -> Vec<Adopted> {
        std::mem::take(&mut locked(&self.adopted))
    }

    /// The processes that have it open are notified, so that they do not hand it to the keeper's successor.
    fn end(&mut self, ticket: &Ticket) {
        let _ = self.exporter.revoke(ticket);
    }

    fn held(&self) -> (usize, usize) {
        (self.exporter.held().bytes, self.most)
    }
}

/// Takes over the memory of a ticket. Returns a ticket of the keeper for it.
fn adopted_by(exporter: &Exporter, ticket: &Ticket) -> Result<Ticket, Why> {
    let (content, files, lease) = importer::adopt(ticket).map_err(|error| why(&error))?;
    let nbytes = content.segments.iter().try_fold(0usize, |sum, segment| sum.checked_add(segment.nbytes()?));
    let kept = Kept::finished(Content { kept: true, ..content }, files, vec![Box::new(lease)]);
    exporter.share(kept, nbytes.ok_or(Why::Protocol)?, ticket.about(), LISTED).map_err(|_| Why::Full)
}

/// Returns what the process that has put a ticket is told.
fn why(error: &Error) -> Why {
    match error.kind() {
        ErrorKind::Gone => Why::Unknown,
        ErrorKind::Denied => Why::Denied,
        ErrorKind::Version => Why::Version,
        ErrorKind::Argument => Why::Unkept,
        ErrorKind::Busy => Why::Busy,
        ErrorKind::OutOfMemory => Why::Full,
        _ => Why::Protocol,
    }
}
