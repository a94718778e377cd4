//! Connections to processes that share, one for each.

use crate::line::{Line, PATIENCE, Reply, broken, gone};
use crate::ticket::Token;
use crate::wire::{Answer, Content, Point, Request, Segment, Why, frame};
use bridge_core::Result;
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

/// The connections of this process, by the path of the socket.
static CONNECTIONS: Mutex<BTreeMap<PathBuf, Weak<Connection>>> = Mutex::new(BTreeMap::new());

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
}

/// A connection to a process that shares.
pub(super) struct Connection {
    line: Arc<Line<Answer>>,
    revoked: Mutex<BTreeSet<u64>>,
}

impl Connection {
    /// Returns the connection to the process at this socket.
    pub(super) fn to(path: &Path) -> Result<Arc<Self>> {
        let connections = || CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = connections().get(path).and_then(Weak::upgrade);
        let usable = |known: &Arc<Self>| !known.line.is_elsewhere() && known.listen().is_ok();
        if let Some(connection) = known.filter(usable) {
            return Ok(connection);
        }
        // No lock is held while the other process is waited for. Two threads may connect at once, which is no fault.
        let connection = Arc::new(Self { line: Arc::new(Line::connect(path)?), revoked: Mutex::default() });
        let mut connections = connections();
        connections.retain(|_, connection| connection.strong_count() > 0);
        connections.insert(path.into(), Arc::downgrade(&connection));
        Ok(connection)
    }

    fn note(&self, notice: Answer) {
        if let Answer::Revoked { share } = notice {
            self.revoked.lock().unwrap_or_else(PoisonError::into_inner).insert(share);
        }
    }

    /// Notes what has come unasked. Returns an error if the process has ended.
    fn listen(&self) -> Result<()> {
        self.line.notices(|notice| self.note(notice))
    }

    /// Asks for a lease. Returns its number, the content, and the descriptors of the segments.
    pub(super) fn open(&self, share: u64, token: Token) -> Result<(u64, Content, Vec<OwnedFd>)> {
        let files = |answer: &Answer| match answer {
            Answer::Opened { content, .. } => content.segments.iter().map(Segment::files).sum(),
            _ => 0,
        };
        let request = frame(&Request::Open { share, token });
        match self.line.ask(&request, Instant::now() + PATIENCE, files, |notice| self.note(notice))? {
            (Answer::Opened { lease, content }, files) => Ok((lease, content, files)),
            _ => Err(broken("it answers another question")),
        }
    }

    /// Returns an error if the process has ended or has revoked the share.
    pub(super) fn check(&self, share: u64) -> Result<()> {
        self.listen()?;
        match self.revoked.lock().unwrap_or_else(PoisonError::into_inner).contains(&share) {
            true => Err(gone("the process that shares the memory has taken it back")),
            false => Ok(()),
        }
    }

    /// Gives a lease back behind these points, without waiting.
    pub(super) fn give_back(&self, lease: u64, points: Vec<Point>) {
        self.line.say(&frame(&Request::Return { lease, points }));
    }
}
