//! The process that shares: its socket, and the thread that serves it.

mod folder;
mod serve;
mod table;

pub use table::Held;

use crate::server::{Peer, Serving, Waker};
use crate::settings::Settings;
use crate::socket::Listening;
use crate::sync::{self, Mutex, MutexGuard, locked};
use crate::ticket::{Ticket, Token, now};
use crate::wire::{Content, HEADER, MAX_ANSWER, MAX_FILES, UNASKED, Why, frame};
use bridge_core::{Device, Error, ErrorKind, Result, Stream};
use rustix::fd::OwnedFd;
use serve::Clerk;
use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use table::Table;

/// The most bytes of an answer around a content.
const AROUND: usize = 128;

/// The content of a share, with what keeps it.
pub(crate) struct Stored {
    pub(crate) content: Content,
    /// The descriptors of the segments, in their order.
    pub(crate) files: Vec<Arc<OwnedFd>>,
    /// The streams in which the owners of device memory work.
    pub(crate) streams: Vec<(Device, Stream)>,
    /// Whether the work on the elements has run: a process that opens them does not wait for those streams.
    pub(crate) is_finished: bool,
    /// The leases of stores that were not returned. A store that has ended returns none, and other processes may
    /// still use the memory.
    pub(crate) outside: Arc<AtomicUsize>,
    /// Whether the memory may be used again when its owners are dropped.
    pub(crate) is_reused: bool,
    pub(crate) owners: Vec<Box<dyn Any + Send + Sync>>,
}

impl Stored {
    /// Returns a content that no work of this process on a device has to be waited for.
    pub(crate) fn finished(
        content: Content,
        files: Vec<Arc<OwnedFd>>,
        owners: Vec<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        let (streams, outside) = (Vec::new(), Arc::default());
        Self { content, files, streams, is_finished: true, outside, is_reused: false, owners }
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        // Nothing says when the last process has dropped what a killed store had passed on.
        if self.is_reused && self.outside.load(Relaxed) > 0 {
            std::mem::forget(std::mem::take(&mut self.owners));
        }
    }
}

/// The part of a process that shares tensors with other processes: a socket, and a thread that answers.
///
/// A share is kept until it has ended and every lease on it is returned. The drop ends all shares, and drops what is
/// still leased.
pub struct Exporter {
    desk: Arc<Desk>,
    serving: Serving,
}

bridge_core::debug_fields!(impl[] Exporter);

/// What the thread shares with the callers.
struct Desk {
    socket: PathBuf,
    listening: Listening,
    table: Mutex<Table<Stored>>,
    /// Connections to tell that a share was revoked, with its number.
    notices: Mutex<Vec<(Peer, u64)>>,
    waker: Arc<Waker>,
}

impl Desk {
    fn table(&self) -> MutexGuard<'_, Table<Stored>> {
        locked(&self.table)
    }
}

impl Exporter {
    /// Opens a socket, and starts the thread.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Denied`] where the folder belongs to another user or lets others in, [`ErrorKind::Argument`] where
    /// the path of the socket would be too long, and errors of the system.
    pub fn new(settings: Settings) -> Result<Self> {
        let folder = folder::ready(settings.folder, &settings.users)?;
        let (listener, socket) = folder::listen(&folder, settings.users.is_empty())?;
        let waker = Waker::new()?;
        let desk = Arc::new(Desk {
            listening: Listening::new(&listener, &socket),
            socket,
            table: Mutex::new(Table::new(settings.limits)),
            notices: Mutex::default(),
            waker: Arc::clone(&waker),
        });
        let clerk = Clerk::new(Arc::clone(&desk));
        let serving = Serving::start(listener, clerk, settings.users, settings.limits.connections, waker)?;
        Ok(Self { desk, serving })
    }

    /// Returns whether processes can connect: the program may have closed the descriptors, or removed the folder.
    pub(crate) fn is_reachable(&self) -> bool {
        self.desk.listening.is_open() && self.desk.listening.is_named(&self.desk.socket)
    }

    /// Returns whether the descriptor of the socket is closed. Then the drop would close and write to descriptors that
    /// may belong to others now.
    pub(crate) fn is_closed(&self) -> bool {
        !self.is_elsewhere() && !self.desk.listening.is_open()
    }

    /// Refuses to use the exporter in a forked process, where its locks may be held for ever.
    fn check(&self) -> Result<()> {
        match self.serving.is_elsewhere() {
            true => {
                let text = "this process was forked from the one that shares: make a new exporter";
                Err(Error::new(ErrorKind::Gone, text))
            }
            false => Ok(()),
        }
    }

    /// Shares a content, for a ticket that can be opened for this time. `bytes` counts against the limit.
    pub(crate) fn share(&self, kept: Stored, bytes: usize, about: &str, time: Duration) -> Result<Ticket> {
        self.check()?;
        if !self.is_reachable() {
            let text = "no process can open a ticket of this one: its socket was closed or removed. Share again with a new exporter";
            return Err(Error::new(ErrorKind::Gone, text));
        }
        let files = kept.files.len() + usize::from(!kept.streams.is_empty());
        if frame(UNASKED, &kept.content).len() > HEADER + MAX_ANSWER - AROUND || files > MAX_FILES {
            let text =
                format!("{} tensors do not fit into one ticket: share them in parts", kept.content.tensors.len());
            return Err(Error::new(ErrorKind::Argument, text));
        }
        let token = Token::random()?;
        let until = sync::now().checked_add(time).ok_or_else(|| {
            Error::new(ErrorKind::Argument, "a ticket cannot be valid that long: pass a shorter time")
        })?;
        let mut table = self.desk.table();
        let free = table.expire(sync::now());
        if !table.has_capacity(bytes) {
            drop(table);
            drop(free);
            let text = "this process shares as much as its limits allow: revoke shares, or raise the limits";
            return Err(Error::new(ErrorKind::Busy, text));
        }
        // The thread is woken then, if it has to be woken at all.
        let awaited = table.next_expiry().is_some_and(|next| next <= until);
        let share = table.share(kept, bytes, token, until);
        drop(table);
        drop(free);
        if !awaited {
            self.desk.waker.ring();
        }
        self.desk.waker.expect();
        // A part of a second counts as a whole one: the ticket must not expire before the share does.
        let expires = now().saturating_add(time.as_secs() + u64::from(time.subsec_nanos() > 0));
        Ticket::new(&self.desk.socket, share, token, expires, about)
    }

    /// Ends the share of a ticket now: no process can open it any more, and the processes that have it open are
    /// notified.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for a ticket that this exporter has not made.
    pub fn revoke(&self, ticket: &Ticket) -> Result<()> {
        let (share, token) = self.own(ticket)?;
        let (peers, free) = self.desk.table().revoke(share, &token).map_err(forged)?;
        let notices = peers.into_iter().map(|peer| (peer, share));
        locked(&self.desk.notices).extend(notices);
        // Elsewhere the number of the waker may be that of another file.
        if self.desk.listening.is_open() {
            self.desk.waker.ring();
        }
        drop(free);
        Ok(())
    }

    /// Lets a ticket expire now: no process can open it any more, and the processes that have it open keep it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for a ticket that this exporter has not made.
    pub fn end(&self, ticket: &Ticket) -> Result<()> {
        let (share, token) = self.own(ticket)?;
        let free = self.desk.table().end(share, &token).map_err(forged)?;
        drop(free);
        Ok(())
    }

    /// Returns whether this exporter has made a ticket.
    pub(crate) fn has_made(&self, ticket: &Ticket) -> bool {
        self.own(ticket).is_ok()
    }

    /// Returns the share that a ticket of this exporter opens.
    fn own(&self, ticket: &Ticket) -> Result<(u64, Token)> {
        self.check()?;
        if ticket.socket() != self.desk.socket {
            let text = "the ticket is of another process: end or revoke it there";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        Ok(ticket.share())
    }

    /// Returns whether this process was forked from the one that made the exporter: it shares nothing here.
    pub fn is_elsewhere(&self) -> bool {
        self.serving.is_elsewhere()
    }

    /// Returns what other processes hold now; in a forked process, nothing.
    pub fn held(&self) -> Held {
        if self.is_elsewhere() { Held::default() } else { self.desk.table().held() }
    }
}

/// Returns the error for a ticket with the number of a share and another token.
fn forged(_: Why) -> Error {
    Error::new(ErrorKind::Argument, "the ticket was not made here: pass the one that share returned")
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // A forked process has no right to the socket.
        if !self.serving.is_elsewhere() {
            let _ = std::fs::remove_file(&self.desk.socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn content(tree: Option<String>) -> Content {
        Content { segments: Vec::new(), tensors: [].into(), points: Vec::new(), tree, persistent: false }
    }

    /// A process that opens it reads no longer frame, and no more descriptors.
    #[test]
    fn a_ticket_has_as_much_as_one_answer() {
        let folder = std::env::temp_dir().join(format!("truebridge-limits-{}", std::process::id()));
        let settings = Settings { folder: Some(folder.clone()), ..Settings::default() };
        let exporter = Exporter::new(settings).unwrap();
        let share = |tree: usize, files: usize| {
            let file = Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
            let kept = Stored::finished(content(Some("x".repeat(tree))), vec![file; files], Vec::new());
            exporter.share(kept, 0, "", Duration::from_secs(60)).map_err(|error| error.kind())
        };
        let most = HEADER + MAX_ANSWER - AROUND - frame(UNASKED, &content(Some(String::new()))).len();
        let (ticket, until) = (share(most, 0).unwrap(), Instant::now() + Duration::from_secs(120));
        let opened = loop {
            match crate::importer::open(&ticket) {
                // 16 MiB take a busy machine longer than a reader waits. The connection goes on.
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < until => continue,
                opened => break opened.unwrap(),
            }
        };
        assert_eq!(opened.tree.map(|tree| tree.len()), Some(most));
        assert_eq!(share(most + 1, 0).unwrap_err(), ErrorKind::Argument);
        drop(share(1, MAX_FILES).unwrap());
        assert_eq!(share(1, MAX_FILES + 1).unwrap_err(), ErrorKind::Argument);
        drop(exporter);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn memory_that_a_killed_store_passed_on_is_not_used_again() {
        let is_dropped = |is_reused, leases: usize| {
            let owner = Arc::new(());
            let mut kept = Stored::finished(content(None), Vec::new(), vec![Box::new(Arc::clone(&owner))]);
            (kept.is_reused, kept.outside) = (is_reused, Arc::new(AtomicUsize::new(leases)));
            drop(kept);
            Arc::strong_count(&owner) == 1
        };
        assert!(is_dropped(true, 0), "no other process has it");
        assert!(!is_dropped(true, 1) && !is_dropped(true, 2));
        assert!(is_dropped(false, 1), "only the name of the memory goes");
    }
}
