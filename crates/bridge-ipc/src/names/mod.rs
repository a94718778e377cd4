//! Names for tickets, between programs that run for long.

mod board;
mod wire;

pub use wire::Listed;

use crate::exporter::Settings;
use crate::line::{Line, PATIENCE, broken};
use crate::server::{Bell, Serving};
use crate::socket;
use crate::ticket::Ticket;
use crate::wire::frame;
use board::Board;
use bridge_core::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::{Answer, Request};

/// A socket at which processes put tickets under names, and find them. The drop ends it.
///
/// Names are passed on, memory is not: a process that has found a ticket opens it at the process that has made it. What
/// a process has put is removed when it ends.
pub struct Names {
    serving: Serving,
    path: PathBuf,
}

bridge_core::debug_fields!(impl[] Names: path);

impl Names {
    /// Serves names at `path`. Of `settings`, the folder means nothing here.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] where another process serves at this path, [`ErrorKind::Denied`] and [`ErrorKind::Argument`]
    /// for a path where this process cannot make a socket.
    pub fn serve(path: &Path, settings: Settings) -> Result<Self> {
        let listener = socket::listen(path, settings.users.is_empty())?;
        let bell = Bell::new()?;
        let serving = Serving::start(listener, Board::new(settings.limits), settings.users, bell)?;
        Ok(Self { serving, path: std::path::absolute(path).unwrap_or_else(|_| path.into()) })
    }

    /// Returns the path to connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        if !self.serving.is_elsewhere() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A connection to a process that serves names. What was put through it is removed with it.
pub struct Client {
    path: PathBuf,
    line: Arc<Line<Answer>>,
}

bridge_core::debug_fields!(impl[] Client: path);

fn asked(line: &Line<Answer>, request: &Request, until: Instant) -> Result<Answer> {
    Ok(line.ask(&frame(request), until, |_| 0, |_| ())?.0)
}

fn missing(name: &str) -> Error {
    Error::new(ErrorKind::Gone, format!("nothing stands under the name {name:?}: put a ticket there first"))
}

impl Client {
    /// Connects to the process that serves names at `path`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Denied`] for one of another user.
    pub fn connect(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        Ok(Self { line: Arc::new(Line::connect(&path)?), path })
    }

    fn ask(&self, request: &Request) -> Result<Answer> {
        if self.line.is_elsewhere() {
            let text = "this process was forked from the one that connected: connect again";
            return Err(Error::new(ErrorKind::Gone, text));
        }
        asked(&self.line, request, Instant::now() + PATIENCE)
    }

    /// Puts a ticket under a name, beside the newest ones before it: `keep` in all. Returns the version.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Protocol`] for a name that is empty, has control characters or more than 128 bytes,
    /// [`ErrorKind::Busy`] where there are as many as allowed, and those of the connection.
    pub fn put(&self, name: &str, ticket: &Ticket, keep: u64) -> Result<u64> {
        match self.ask(&Request::Put { name: name.into(), ticket: ticket.clone(), keep })? {
            Answer::Stored { version } => Ok(version),
            _ => Err(broken("it answers another question")),
        }
    }

    /// Returns the newest ticket of a name, or that of one version, with the version.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, and those of the connection.
    pub fn get(&self, name: &str, version: Option<u64>) -> Result<(u64, Ticket)> {
        found(self.ask(&Request::Get { name: name.into(), version })?).ok_or_else(|| missing(name))
    }

    /// Forgets a name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, and those of the connection.
    pub fn remove(&self, name: &str) -> Result<()> {
        match self.ask(&Request::Remove { name: name.into() })? {
            Answer::Removed => Ok(()),
            _ => Err(missing(name)),
        }
    }

    /// Returns all names, in their order.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn list(&self) -> Result<Vec<Listed>> {
        match self.ask(&Request::List)? {
            Answer::Listed { names } => Ok(names),
            _ => Err(broken("it answers another question")),
        }
    }

    /// Waits for a version of a name after this one, over a connection of its own.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn watch(&self, name: &str, after: u64) -> Result<Watch> {
        let line = Line::connect(&self.path)?;
        line.start(&frame(&Request::Wait { name: name.into(), after }))?;
        Ok(Watch { line })
    }
}

/// A version of a name that is waited for.
pub struct Watch {
    line: Line<Answer>,
}

bridge_core::debug_fields!(impl[] Watch);

impl Watch {
    /// Returns the newest version and its ticket, if there is one within `time`. Call it again to wait on.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn wait(&self, time: Duration) -> Result<Option<(u64, Ticket)>> {
        Ok(self.line.answered(Instant::now() + time)?.and_then(found))
    }
}

fn found(answer: Answer) -> Option<(u64, Ticket)> {
    match answer {
        Answer::Found { version, ticket } => Some((version, ticket)),
        _ => None,
    }
}
