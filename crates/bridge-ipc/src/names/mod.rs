//! Names for tickets, for programs that run for a long time.

mod board;
mod shares;
mod wire;

pub use wire::Listed;

use crate::exporter::Exporter;
use crate::line::{Line, PATIENCE, broken};
use crate::server::{Bell, Serving};
use crate::settings::Settings;
use crate::socket;
use crate::sync::{now, thread};
use crate::ticket::Ticket;
use board::Board;
use bridge_core::{Error, ErrorKind, Result};
use shares::{Put, Shares};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use wire::{Answer, Request, is_name};

/// A socket at which processes put tickets under names, and find them. The drop ends it.
///
/// Only names pass through this process, not memory: a process that has found a ticket opens it at the process that
/// made it. What a process has put is removed when it ends.
#[must_use = "the drop ends the names: keep it"]
pub struct Names {
    serving: Serving,
    path: PathBuf,
}

bridge_core::debug_fields!(impl[] Names: path);

impl Names {
    /// Serves names at `path`. The folder in `settings` is not used.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] where another process serves at this path, [`ErrorKind::Denied`] and [`ErrorKind::Argument`]
    /// for a path where this process cannot make a socket.
    pub fn serve(path: &Path, settings: Settings) -> Result<Self> {
        let listener = socket::listen(path, settings.users.is_empty())?;
        let bell = Bell::new()?;
        let serving =
            Serving::start(listener, Board::new(settings.limits), settings.users, settings.limits.connections, bell)?;
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
#[must_use = "the drop removes what it has put: keep it"]
pub struct Client {
    path: PathBuf,
    line: Arc<Line<Answer>>,
    shares: Arc<Shares>,
}

bridge_core::debug_fields!(impl[] Client: path);

fn missing(name: &str) -> Error {
    Error::new(ErrorKind::Gone, format!("no ticket has the name {name:?}: put one first"))
}

/// Refuses what is not a name.
///
/// # Errors
///
/// [`ErrorKind::Argument`] for one that is empty, has control characters or more than 128 bytes.
pub fn check_name(name: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    let brief: String = name.chars().take(40).collect();
    let text = format!("{brief:?} is not a name: one has 1 to 128 bytes in UTF-8, and no control characters");
    Err(Error::new(ErrorKind::Argument, text))
}

pub(crate) fn checked(name: &str) -> Result<String> {
    check_name(name).map(|()| name.into())
}

impl Client {
    /// Connects to the process that serves names at `path`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Denied`] for one of a user whom this process does not
    /// accept.
    pub fn connect(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        Ok(Self { line: Arc::new(Line::connect(&path)?), path, shares: Arc::default() })
    }

    /// Refuses to speak for the process that this one was forked from.
    fn check(&self) -> Result<()> {
        match self.line.is_elsewhere() {
            true => {
                let text = "this process was forked from the one that connected: connect again";
                Err(Error::new(ErrorKind::Gone, text))
            }
            false => Ok(()),
        }
    }

    fn ask(&self, request: &Request) -> Result<Answer> {
        self.ask_and_hear(request, |_, _| ())
    }

    /// Sends a question. `hears` is called with the answer whenever that comes.
    fn ask_and_hear(&self, request: &Request, hears: impl FnOnce(&Answer, bool) + Send + 'static) -> Result<Answer> {
        self.check()?;
        let answered = self.line.ask(request, now() + PATIENCE, |notice| self.shares.hear(notice), hears);
        self.shares.release();
        Ok(answered?.0)
    }

    /// Puts a ticket under a name, which keeps its `keep` newest tickets. Returns the version.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for a name that is empty, has control characters or more than 128 bytes, and for a
    /// `keep` of 0. [`ErrorKind::Busy`] where there are as many as allowed, and those of the connection.
    pub fn put(&self, name: &str, ticket: &Ticket, keep: u64) -> Result<u64> {
        self.put_and_hear(name, ticket, keep, |_, _| ())
    }

    fn put_and_hear(
        &self,
        name: &str,
        ticket: &Ticket,
        keep: u64,
        hears: impl FnOnce(&Answer, bool) + Send + 'static,
    ) -> Result<u64> {
        let name = checked(name)?;
        if keep == 0 {
            return Err(Error::new(ErrorKind::Argument, "keep counts the versions that can be opened: pass 1 or more"));
        }
        match self.ask_and_hear(&Request::Put { name, ticket: ticket.clone(), keep }, hears)? {
            Answer::Stored { version } => Ok(version),
            _ => Err(broken("it answers another question")),
        }
    }

    /// Puts a ticket of this exporter under a name, and ends its share once the name does not stand for it any more:
    /// newer versions have replaced it, the name was removed, or the connection has ended. Returns the version.
    ///
    /// From the first call on, a thread waits for that until the connection ends.
    ///
    /// # Errors
    ///
    /// Those of [`put`](Self::put). The share has ended then, or it ends when the process that serves names refuses it
    /// later: after an error of the program, and after a [`ErrorKind::Busy`] that says that there was no answer in
    /// time, that process may still list the ticket.
    pub fn put_share(&self, exporter: &Arc<Exporter>, name: &str, ticket: &Ticket, keep: u64) -> Result<u64> {
        self.check()?;
        let put = Put::new(&self.shares, ticket, exporter);
        let stored =
            self.attend().and_then(|()| self.put_and_hear(name, ticket, keep, move |answer, _| put.answered(answer)));
        self.shares.release();
        stored
    }

    /// Starts the thread that receives the notices about tickets of this connection for which no name stands any more.
    fn attend(&self) -> Result<()> {
        if self.shares.is_attended.swap(true, Relaxed) {
            return Ok(());
        }
        let (line, shares) = (Arc::clone(&self.line), Arc::clone(&self.shares));
        let attend = move || {
            loop {
                let goes_on = line.attend(|notice| shares.hear(notice));
                shares.release();
                if goes_on.is_err() {
                    break;
                }
            }
            shares.end();
        };
        let thread = thread::Builder::new().name("truebridge-ipc".into()).spawn(attend);
        thread.map(drop).map_err(|error| {
            self.shares.is_attended.store(false, Relaxed);
            let text = "no thread for the connection: raise the limit of processes (ulimit -u)";
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })
    }

    /// Returns the newest ticket of a name, or that of one version, with the version.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Argument`] for what is not a name, and those of the
    /// connection.
    pub fn get(&self, name: &str, version: Option<u64>) -> Result<(u64, Ticket)> {
        let found = found(self.ask(&Request::Get { name: checked(name)?, version })?);
        found.ok_or_else(|| match version {
            Some(version) => {
                let text =
                    format!("version {version} of the name {name:?} is not kept: take the newest, without a version");
                Error::new(ErrorKind::Gone, text)
            }
            None => missing(name),
        })
    }

    /// Returns the newest ticket of a name and its version, if there is one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for what is not a name, and those of the connection.
    pub fn newest(&self, name: &str) -> Result<Option<(u64, Ticket)>> {
        Ok(found(self.ask(&Request::Get { name: checked(name)?, version: None })?))
    }

    /// Removes a name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Argument`] for what is not a name, and those of the
    /// connection.
    pub fn remove(&self, name: &str) -> Result<()> {
        match self.ask(&Request::Remove { name: checked(name)? })? {
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
    /// [`ErrorKind::Argument`] for what is not a name, and those of the connection.
    pub fn watch(&self, name: &str, after: u64) -> Result<Watch> {
        let name = checked(name)?;
        let line = Line::connect(&self.path)?;
        line.start(&Request::Wait { name, after })?;
        Ok(Watch { line })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The connection of a forked process is its parent's.
        if !self.line.is_elsewhere() {
            self.line.close();
            self.shares.end();
        }
    }
}

/// A version of a name that is waited for.
#[must_use = "call wait"]
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
        Ok(self.line.answered(now() + time)?.and_then(found))
    }
}

fn found(answer: Answer) -> Option<(u64, Ticket)> {
    match answer {
        Answer::Found { version, ticket } => Some((version, ticket)),
        _ => None,
    }
}
