//! Names for tickets, between programs that run for long.

mod board;
mod wire;

pub use wire::Listed;

use crate::exporter::Exporter;
use crate::line::{Line, PATIENCE, broken};
use crate::server::{Bell, Serving};
use crate::settings::Settings;
use crate::socket;
use crate::ticket::Ticket;
use board::Board;
use bridge_core::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use wire::{Answer, Request, is_name};

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
pub struct Client {
    path: PathBuf,
    line: Arc<Line<Answer>>,
    own: Arc<Own>,
}

bridge_core::debug_fields!(impl[] Client: path);

fn missing(name: &str) -> Error {
    Error::new(ErrorKind::Gone, format!("nothing stands under the name {name:?}: put a ticket there first"))
}

/// Refuses what is no name.
///
/// # Errors
///
/// [`ErrorKind::Argument`] for one that is empty, has control characters or more than 128 bytes.
pub fn check_name(name: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    let brief: String = name.chars().take(40).collect();
    let text = format!("{brief:?} is no name: one has 1 to 128 bytes in UTF-8, and no control characters");
    Err(Error::new(ErrorKind::Argument, text))
}

fn checked(name: &str) -> Result<String> {
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
        Ok(Self { line: Arc::new(Line::connect(&path)?), path, own: Arc::default() })
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
        self.check()?;
        let mut displaced = Vec::new();
        let answered =
            self.line.ask(request, Instant::now() + PATIENCE, |notice| displaced.extend(self.own.displaced(notice)));
        // Memory is released where no lock is held.
        end(displaced);
        Ok(answered?.0)
    }

    /// Puts a ticket under a name, beside the newest ones before it: `keep` in all. Returns the version.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for a name that is empty, has control characters or more than 128 bytes, and for a
    /// `keep` of 0. [`ErrorKind::Busy`] where there are as many as allowed, and those of the connection.
    pub fn put(&self, name: &str, ticket: &Ticket, keep: u64) -> Result<u64> {
        let name = checked(name)?;
        if keep == 0 {
            return Err(Error::new(ErrorKind::Argument, "keep counts the versions that can be opened: pass 1 or more"));
        }
        match self.ask(&Request::Put { name, ticket: ticket.clone(), keep })? {
            Answer::Stored { version } => Ok(version),
            _ => Err(broken("it answers another question")),
        }
    }

    /// Puts a ticket of this exporter under a name, and ends its share once the name does not stand for it any more: a
    /// newer version has taken its place, the name was removed, or the connection has ended. Returns the version.
    ///
    /// A thread waits for that, from the first call on until the connection ends.
    ///
    /// # Errors
    ///
    /// Those of [`put`](Self::put), and the share has ended unless the process that serves names may have the ticket.
    pub fn put_share(&self, exporter: &Arc<Exporter>, name: &str, ticket: &Ticket, keep: u64) -> Result<u64> {
        self.check()?;
        self.own.add(ticket, exporter);
        let put = self.attend().and_then(|()| self.put(name, ticket, keep));
        if put.as_ref().is_err_and(|error| !self.may_stand(name, ticket, error)) {
            self.own.end(|own| own == ticket);
        }
        put
    }

    /// Returns whether a name may stand for a ticket that was put there, for this error.
    fn may_stand(&self, name: &str, ticket: &Ticket, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::Argument | ErrorKind::Gone | ErrorKind::Denied | ErrorKind::Protocol | ErrorKind::Version => {
                false
            }
            // It was refused, or not answered in time. What is asked later is answered later.
            ErrorKind::Busy => match self.get(name, None) {
                Ok((_, newest)) => newest == *ticket,
                Err(error) => error.kind() != ErrorKind::Gone,
            },
            _ => true,
        }
    }

    /// Starts the thread that hears what this connection has put and no name stands for any more.
    fn attend(&self) -> Result<()> {
        if self.own.is_attended.swap(true, Relaxed) {
            return Ok(());
        }
        let (line, own) = (Arc::clone(&self.line), Arc::clone(&self.own));
        let attend = move || {
            loop {
                let mut displaced = Vec::new();
                let goes_on = line.attend(|notice| displaced.extend(own.displaced(notice)));
                end(displaced);
                if goes_on.is_err() {
                    break;
                }
            }
            own.end(|_| true);
        };
        let thread = std::thread::Builder::new().name("tensor-bridge-ipc".into()).spawn(attend);
        thread.map(drop).map_err(|error| {
            self.own.is_attended.store(false, Relaxed);
            let text = "no thread for the connection: raise the limit of processes (ulimit -u)";
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })
    }

    /// Returns the newest ticket of a name, or that of one version, with the version.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Argument`] for what is no name, and those of the connection.
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

    /// Forgets a name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Argument`] for what is no name, and those of the connection.
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
    /// [`ErrorKind::Argument`] for what is no name, and those of the connection.
    pub fn watch(&self, name: &str, after: u64) -> Result<Watch> {
        let name = checked(name)?;
        let line = Line::connect(&self.path)?;
        line.start(&Request::Wait { name, after })?;
        Ok(Watch { line })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // What a fork has is its parent's.
        if !self.line.is_elsewhere() {
            self.line.close();
            self.own.end(|_| true);
        }
    }
}

/// A ticket that a connection has put, with the exporter that shares for it.
type Share = (Ticket, Weak<Exporter>);

/// Ends the shares of these tickets.
fn end(shares: Vec<Share>) {
    for (ticket, exporter) in shares {
        // Of an exporter that was dropped nothing is shared any more.
        exporter.upgrade().into_iter().for_each(|exporter| drop(exporter.end(&ticket)));
    }
}

/// The tickets that a connection has put.
#[derive(Default)]
struct Own {
    shares: Mutex<Vec<Share>>,
    /// Whether a thread waits for notices.
    is_attended: AtomicBool,
}

impl Own {
    fn add(&self, ticket: &Ticket, exporter: &Arc<Exporter>) {
        self.shares().push((ticket.clone(), Arc::downgrade(exporter)));
    }

    fn shares(&self) -> MutexGuard<'_, Vec<Share>> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes out what a notice says that no name stands for any more.
    fn displaced(&self, notice: Answer) -> Vec<Share> {
        match notice {
            Answer::Displaced { ticket } => self.shares().extract_if(.., |(own, _)| *own == ticket).collect(),
            _ => Vec::new(),
        }
    }

    /// Ends the shares of such tickets.
    fn end(&self, such: impl Fn(&Ticket) -> bool) {
        let ended: Vec<_> = self.shares().extract_if(.., |(ticket, _)| such(ticket)).collect();
        end(ended);
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
