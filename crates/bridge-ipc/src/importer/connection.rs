//! Connections to processes that share, one for each.

use crate::channel::{Channel, PATIENCE, Reply, broken, gone};
use crate::device::{self, Orders, Role};
use crate::own::Own;
use crate::sync::{Mutex, MutexGuard, locked, now};
use crate::ticket::Token;
use crate::wire::{Answer, Content, Point, Request, Why};
use bridge_core::{Device, Result};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};

/// The connections of this process, by the path of the socket.
static CONNECTIONS: Own<BTreeMap<PathBuf, Weak<Connection>>> = Own::new();

impl Reply for Answer {
    fn refusal(&self) -> Option<Why> {
        match self {
            Self::Refused { why } => Some(*why),
            _ => None,
        }
    }

    fn is_notice(&self) -> bool {
        matches!(self, Self::Revoked { .. })
    }

    fn files(&self) -> usize {
        match self {
            Self::Opened { content, .. } => content.files(),
            _ => 0,
        }
    }
}

/// A connection to a process that shares.
pub(super) struct Connection {
    channel: Arc<Channel<Answer>>,
    /// The shares that are open here or about to be, and whether each was revoked.
    shares: Mutex<BTreeMap<u64, Weak<AtomicBool>>>,
    /// A point is made and sent in one step: values count up in the order of the work.
    orders: Mutex<Orders>,
    /// Whether it is kept for a moment although nothing is open.
    lingers: AtomicBool,
    /// Whether it was used while it was kept.
    was_used: AtomicBool,
}

/// A share of another process, in use here.
pub(super) struct Share {
    connection: Arc<Connection>,
    number: u64,
    is_revoked: Arc<AtomicBool>,
}

impl Connection {
    /// Returns the connection to the process at this socket.
    pub(super) fn to(path: &Path) -> Result<Arc<Self>> {
        let known = CONNECTIONS.lock().get(path).and_then(Weak::upgrade);
        let usable = |known: &Arc<Self>| known.listen().is_ok();
        if let Some(connection) = known.filter(usable) {
            return Ok(connection);
        }
        // No lock is held during the wait for the other process. Two threads may connect at once, which does no harm.
        let channel = Arc::new(Channel::connect(path)?);
        let orders = Mutex::new(Orders::new(Role::Importer, channel.process().cloned()));
        let connection = Arc::new(Self {
            channel,
            shares: Mutex::default(),
            orders,
            lingers: AtomicBool::new(false),
            was_used: AtomicBool::new(false),
        });
        let mut connections = CONNECTIONS.lock();
        connections.retain(|_, connection| connection.strong_count() > 0);
        connections.insert(path.into(), Arc::downgrade(&connection));
        Ok(connection)
    }

    fn shares(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<AtomicBool>>> {
        locked(&self.shares)
    }

    fn note(&self, notice: Answer) {
        if let Answer::Revoked { share } = notice {
            let found = self.shares().get(&share).and_then(Weak::upgrade);
            found.into_iter().for_each(|is_revoked| is_revoked.store(true, Relaxed));
        }
    }

    /// Reads the notices that have come. Returns an error if the process has ended.
    fn listen(&self) -> Result<()> {
        self.channel.notices(|notice| self.note(notice))
    }
}

impl Share {
    /// Begins to use a share. Notices about it are read from now on.
    pub(super) fn new(connection: Arc<Connection>, number: u64) -> Self {
        let mut shares = connection.shares();
        let is_revoked = shares.get(&number).and_then(Weak::upgrade).unwrap_or_default();
        shares.insert(number, Arc::downgrade(&is_revoked));
        drop(shares);
        Self { connection, number, is_revoked }
    }

    /// Asks for a lease, as a store if this process `persistent`. Returns its number, the content, and the descriptors
    /// of the segments.
    pub(super) fn open(&self, token: Token, persistent: bool) -> Result<(u64, Content, Vec<OwnedFd>)> {
        let (connection, request) = (&self.connection, Request::Open { share: self.number, token, persistent });
        let channel = Arc::downgrade(&connection.channel);
        let give_back = move |answer: &Answer, is_taken| {
            // The memory was not touched: there is nothing to wait for.
            if let (Answer::Opened { lease, .. }, false, Some(channel)) = (answer, is_taken, channel.upgrade()) {
                channel.say(&Request::Return { lease: *lease, lost: false, points: Vec::new() });
            }
        };
        match connection.channel.ask(&request, now() + PATIENCE, |notice| connection.note(notice), give_back)? {
            (Answer::Opened { lease, content }, files) => Ok((lease, content, files)),
            _ => Err(broken("its answer does not fit the request")),
        }
    }

    /// Returns whether the process has revoked the share, as far as it could say so before its end.
    pub(super) fn is_revoked(&self) -> bool {
        let _ = self.connection.listen();
        self.is_revoked.load(Relaxed)
    }

    /// Returns an error if the process has ended or has revoked the share.
    pub(super) fn check(&self) -> Result<()> {
        self.connection.listen()?;
        match self.is_revoked.load(Relaxed) {
            true => Err(gone("the process that shares the memory has revoked it")),
            false => Ok(()),
        }
    }

    /// Orders what this process does with a content after its points. `page` came with them.
    pub(super) fn wait_for(&self, points: &[Point], page: Option<&OwnedFd>) -> Result<()> {
        locked(&self.connection.orders).wait_for(points, page)
    }

    /// Returns a lease after the work that is now in the streams for these devices, without waiting. If it is `lost`,
    /// other processes may still use the memory.
    pub(super) fn give_back(&self, lease: u64, devices: &[Device], lost: bool) {
        // In a forked process the lock may be held for ever, and nothing is said.
        if self.connection.channel.is_elsewhere() {
            return;
        }
        let mut orders = locked(&self.connection.orders);
        // A driver that fails has lost the work of this process anyway.
        let points = devices.iter().filter_map(|device| orders.point(*device).ok()).collect();
        self.connection.channel.say(&Request::Return { lease, lost, points });
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // In a forked process the lock may be held for ever.
        if self.connection.channel.is_elsewhere() {
            return;
        }
        let mut shares = self.connection.shares();
        // Other uses of the share refer to the same object.
        if Arc::strong_count(&self.is_revoked) == 1 {
            shares.remove(&self.number);
        }
        drop(shares);
        self.linger();
    }
}

impl Share {
    /// Keeps a connection with a page, of which this is the last share, as long as memory stays mapped: the next ticket
    /// needs both again, and a page costs more than a ticket.
    fn linger(&self) {
        let connection = &self.connection;
        if connection.lingers.load(Relaxed) {
            connection.was_used.store(true, Relaxed);
            return;
        }
        let is_last = Arc::strong_count(connection) == 1 && locked(&connection.orders).has_page();
        if is_last && !connection.lingers.swap(true, Relaxed) {
            stay(Arc::clone(connection));
        }
    }
}

/// Keeps a connection a little, and longer if it is used meanwhile.
fn stay(kept: Arc<Connection>) {
    device::defer(move || match kept.was_used.swap(false, Relaxed) {
        true => stay(kept),
        false => kept.lingers.store(false, Relaxed),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn connection() -> Arc<Connection> {
        let path = std::env::temp_dir().join(format!("truebridge-shares-{}", std::process::id()));
        let _listener = UnixListener::bind(&path).unwrap();
        let connection = Connection::to(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        connection
    }

    #[test]
    fn what_is_not_open_here_is_not_remembered() {
        let connection = connection();
        let [one, same, other] = [1, 1, 2].map(|number| Share::new(Arc::clone(&connection), number));
        (3..1000).for_each(|share| connection.note(Answer::Revoked { share }));
        assert_eq!(connection.shares().len(), 2);
        connection.note(Answer::Revoked { share: 1 });
        let revoked = [&one, &same, &other].map(|share| share.is_revoked.load(Relaxed));
        assert_eq!(revoked, [true, true, false]);
        drop(one);
        assert_eq!(connection.shares().len(), 2, "another lease is on the share");
        drop((same, other));
        assert!(connection.shares().is_empty());
    }
}
