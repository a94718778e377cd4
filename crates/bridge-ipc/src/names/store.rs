//! What a store does: it takes the memory of tickets over, and shares it itself.

use super::LISTED;
use crate::exporter::{Exporter, Stored};
use crate::importer;
use crate::server::Waker;
use crate::settings::Settings;
use crate::sync::{Mutex, locked, thread};
use crate::ticket::Ticket;
use crate::wire::{Content, Segment, Why};
use bridge_core::{Error, ErrorKind};
use rustix::fd::OwnedFd;
use rustix::fs::fstat;
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The number of a task: the connection that waits for its end.
pub(super) type Task = u64;

/// A task that has ended, with the store's own ticket for the same memory.
pub(super) type Adopted = (Task, Result<Ticket, Why>);

/// Keeps the memory of tickets.
pub(super) trait Storing: Send {
    /// Begins to take over the memory of a ticket.
    fn adopt(&mut self, task: Task, ticket: &Ticket);

    /// Returns the tasks that have ended.
    fn adopted(&mut self) -> Vec<Adopted>;

    /// Ends the share of a ticket of the store. Processes that have it open keep it.
    fn end(&mut self, ticket: &Ticket);

    /// Returns the bytes that are stored, and the most that may be.
    fn held(&self) -> (usize, usize);
}

/// Keeps memory by its descriptors. It opens none of it, and so needs no driver.
pub(super) struct Store {
    exporter: Arc<Exporter>,
    ledger: Arc<Mutex<Ledger>>,
    adopted: Arc<Mutex<Vec<Adopted>>>,
    /// Whether it ends, and its leases with it.
    ends: Arc<AtomicBool>,
    waker: Arc<Waker>,
}

impl Store {
    pub(super) fn new(settings: Settings, waker: Arc<Waker>) -> bridge_core::Result<Self> {
        // A connection takes a socket, and a descriptor of its process.
        let spare = (settings.limits.connections as u64).saturating_mul(2).saturating_add(64);
        let files =
            getrlimit(Resource::Nofile).current.map_or(usize::MAX, |most| (most - spare.min(most / 2)) as usize);
        let most = (settings.limits.bytes, files);
        let ledger = Arc::new(Mutex::new(Ledger { stored: BTreeMap::new(), total: (0, 0), most }));
        let exporter = Arc::new(Exporter::new(settings)?);
        Ok(Self { exporter, ledger, adopted: Arc::default(), ends: Arc::default(), waker })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // The leases are dropped after this.
        self.ends.store(true, Relaxed);
    }
}

impl Storing for Store {
    /// On its own thread: the process that shares may be slow to answer.
    fn adopt(&mut self, task: Task, ticket: &Ticket) {
        let (exporter, adopted, waker) =
            (Arc::clone(&self.exporter), Arc::clone(&self.adopted), Arc::clone(&self.waker));
        let (ledger, ends, ticket) = (Arc::clone(&self.ledger), Arc::clone(&self.ends), ticket.clone());
        let adopting = move || {
            let stored = adopted_by(&exporter, &ledger, &ends, &ticket);
            locked(&adopted).push((task, stored));
            waker.ring();
        };
        if thread::Builder::new().name("truebridge-ipc".into()).spawn(adopting).is_err() {
            locked(&self.adopted).push((task, Err(Why::Busy)));
            self.waker.ring();
        }
    }

    fn adopted(&mut self) -> Vec<Adopted> {
        std::mem::take(&mut locked(&self.adopted))
    }

    /// The processes that have it open are notified, so that they do not hand it to the store's successor.
    fn end(&mut self, ticket: &Ticket) {
        let _ = self.exporter.revoke(ticket);
    }

    fn held(&self) -> (usize, usize) {
        let ledger = locked(&self.ledger);
        (ledger.total.0, ledger.most.0)
    }
}

/// Takes over the memory of a ticket. Returns a ticket of the store for it.
fn adopted_by(
    exporter: &Exporter,
    ledger: &Arc<Mutex<Ledger>>,
    ends: &Arc<AtomicBool>,
    ticket: &Ticket,
) -> Result<Ticket, Why> {
    let (content, files, lease) = importer::adopt(ticket, ends).map_err(|error| why(&error))?;
    let entry = Entry::of(ledger, &content, &files)?;
    // The entry is dropped after the descriptors: the lease and what it counts end together.
    let stored =
        Stored::finished(Content { persistent: true, ..content }, files, vec![Box::new(lease), Box::new(entry)]);
    exporter.share(stored, 0, ticket.about(), LISTED).map_err(|_| Why::Full)
}

/// Returns the notice for the process that has put a ticket.
fn why(error: &Error) -> Why {
    match error.kind() {
        ErrorKind::Gone => Why::Unknown,
        ErrorKind::Denied => Why::Denied,
        ErrorKind::Version => Why::Version,
        ErrorKind::Argument => Why::NotPersistent,
        ErrorKind::Busy => Why::Busy,
        ErrorKind::OutOfMemory => Why::Full,
        _ => Why::Protocol,
    }
}

/// What names a piece of memory: of the host by its file, of a device by its process and number.
type Piece = ([u8; 16], u64);

/// The memory that is stored: each piece once, in however many shares it is.
struct Ledger {
    /// How many shares each piece is in, and its bytes.
    stored: BTreeMap<Piece, (usize, usize)>,
    /// Bytes, and descriptors of all shares.
    total: (usize, usize),
    /// The most of both.
    most: (usize, usize),
}

/// The memory of one share.
struct Entry {
    ledger: Arc<Mutex<Ledger>>,
    pieces: Vec<Piece>,
    files: usize,
}

impl Entry {
    /// Enters the memory of a share, if there is room for it.
    fn of(ledger: &Arc<Mutex<Ledger>>, content: &Content, files: &[Arc<OwnedFd>]) -> Result<Self, Why> {
        let (pieces, count) = (pieces(content, files)?, files.len());
        let mut table = locked(ledger);
        let mut fresh = pieces.iter().filter(|(piece, _)| !table.stored.contains_key(piece));
        let more = fresh.try_fold(0usize, |sum, (_, nbytes)| sum.checked_add(*nbytes)).ok_or(Why::Protocol)?;
        if table.total.0.saturating_add(more) > table.most.0 || table.total.1 + count > table.most.1 {
            return Err(Why::Full);
        }
        table.total.1 += count;
        for (piece, nbytes) in &pieces {
            let (uses, nbytes) = table.stored.entry(*piece).or_insert((0, *nbytes));
            *uses += 1;
            let first = if *uses == 1 { *nbytes } else { 0 };
            table.total.0 += first;
        }
        drop(table);
        let pieces = pieces.into_iter().map(|(piece, _)| piece).collect();
        Ok(Self { ledger: Arc::clone(ledger), pieces, files: count })
    }
}

/// Returns the memory of a content, each piece with its bytes.
fn pieces(content: &Content, files: &[Arc<OwnedFd>]) -> Result<Vec<(Piece, usize)>, Why> {
    let (mut left, mut pieces) = (files.iter(), Vec::new());
    for segment in &content.segments {
        match segment {
            Segment::File { nbytes, .. } => {
                let file = fstat(left.next().ok_or(Why::Protocol)?).map_err(|_| Why::Protocol)?;
                let mut device = [0; 16];
                device[..8].copy_from_slice(&file.st_dev.to_le_bytes());
                // An empty segment has a file of one byte.
                let length = usize::try_from(file.st_size).map_err(|_| Why::Protocol)?;
                pieces.push(((device, file.st_ino), if *nbytes == 0 { 0 } else { length }));
            }
            Segment::Files { process, parts, .. } => {
                left.by_ref().take(parts.len()).for_each(drop);
                pieces.extend(parts.iter().map(|(nbytes, number)| ((process.0, *number), *nbytes)));
            }
            Segment::Handle { .. } | Segment::Pool { .. } => return Err(Why::NotPersistent),
        }
    }
    Ok(pieces)
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut ledger = locked(&self.ledger);
        ledger.total.1 -= self.files;
        for piece in &self.pieces {
            let Some((uses, nbytes)) = ledger.stored.get_mut(piece) else { continue };
            *uses -= 1;
            let (uses, nbytes) = (*uses, *nbytes);
            if uses == 0 {
                ledger.stored.remove(piece);
                ledger.total.0 -= nbytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Writing, create};
    use crate::settings::Limits;
    use crate::wire::Hex;

    fn content(segments: Vec<Segment>) -> Content {
        Content { segments, tensors: Arc::default(), points: Vec::new(), tree: None, persistent: false }
    }

    fn on_a_device(parts: Vec<(usize, u64)>) -> Content {
        let (device, process) = (Hex([1; 16]), Hex([2; 16]));
        content(vec![Segment::Files { device, process, parts, writing: Writing::Shared }])
    }

    fn file(nbytes: usize) -> Arc<OwnedFd> {
        Arc::new(create(nbytes).unwrap().0)
    }

    #[test]
    fn the_leases_of_a_store_are_lost_with_it() {
        let folder = std::env::temp_dir().join(format!("truebridge-store-{}", std::process::id()));
        let limits = Limits { connections: usize::MAX, ..Limits::default() };
        let settings = Settings { folder: Some(folder.clone()), limits, ..Settings::default() };
        let store = Store::new(settings, Waker::new().unwrap()).unwrap();
        let ends = Arc::clone(&store.ends);
        assert!(!ends.load(Relaxed));
        drop(store);
        assert!(ends.load(Relaxed));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_process_is_told_why_its_ticket_is_refused() {
        for (kind, refusal) in [
            (ErrorKind::Gone, Why::Unknown),
            (ErrorKind::Denied, Why::Denied),
            (ErrorKind::Version, Why::Version),
            (ErrorKind::Argument, Why::NotPersistent),
            (ErrorKind::Busy, Why::Busy),
            (ErrorKind::OutOfMemory, Why::Full),
            (ErrorKind::Protocol, Why::Protocol),
            (ErrorKind::Driver, Why::Protocol),
        ] {
            assert_eq!(why(&Error::new(kind, "")), refusal, "{kind:?}");
        }
    }

    /// Also what is refused: it leaves nothing behind.
    #[test]
    fn the_ledger_has_what_is_stored_and_nothing_else() {
        let ledger = Arc::new(Mutex::new(Ledger { stored: BTreeMap::new(), total: (0, 0), most: (100, 3) }));
        let enter = |content: &Content, files: &[Arc<OwnedFd>]| Entry::of(&ledger, content, files);
        let total = || locked(&ledger).total;
        let (one, two) = (file(1), [file(1), file(1)]);
        let twice = on_a_device(vec![(40, 7), (40, 8)]);
        let first = enter(&twice, &two).unwrap();
        assert_eq!(total(), (80, 2));
        let again = enter(&on_a_device(vec![(40, 7)]), std::slice::from_ref(&one)).unwrap();
        assert_eq!(total(), (80, 3), "memory counts once, its descriptors each time");
        drop(first);
        assert_eq!(total(), (40, 1));
        let refused = [
            (on_a_device(vec![(usize::MAX, 9), (usize::MAX, 10)]), &two[..], Why::Protocol),
            (on_a_device(vec![(61, 9)]), &two[..1], Why::Full),
            (on_a_device(vec![(1, 9), (1, 10), (1, 11)]), &[file(1), file(1), file(1)][..], Why::Full),
            (content(vec![Segment::File { nbytes: 1, writing: Writing::Never }]), &[][..], Why::Protocol),
        ];
        for (content, files, why) in refused {
            assert_eq!(enter(&content, files).err(), Some(why), "{content:?}");
            assert_eq!(total(), (40, 1));
        }
        let host = content(vec![Segment::File { nbytes: 8, writing: Writing::Never }]);
        let long = enter(&host, &[file(50)]).unwrap();
        assert_eq!(total(), (90, 2), "what the file has, and not what is said");
        drop((again, long));
        assert_eq!((total(), locked(&ledger).stored.len()), ((0, 0), 0));
    }
}
