//! The process that puts tickets under names, and finds them.

use super::shares::{Placed, Put, Shares};
use super::wire::{About, Answer, Listed, Request};
use super::{LISTED, checked};
use crate::channel::{Channel, PATIENCE, broken, goes_on};
use crate::exporter::{Exporter, Stored};
use crate::importer;
use crate::own::Own;
use crate::process;
use crate::sync::{self, Mutex, locked, now, thread};
use crate::ticket::Ticket;
use crate::wire::Content;
use bridge_core::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// The longest time to wait: 136 years.
const LONGEST: Duration = Duration::from_secs(1 << 32);

/// Time between two attempts to reach the successor of a store, at first and at last.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(100)];

/// How much that was found at a store is remembered before what is not open is forgotten.
const MOST_FOUND: usize = 64;

/// A connection to a process that serves names. What was put through it is removed with it, unless that process is a
/// store.
///
/// If a store ends, the connection waits for its successor on a thread, and hands it what was put through it, and what
/// this process has found there, through any connection, and still has open.
#[must_use = "the drop removes what it has put: keep it"]
pub struct Client {
    end: Arc<End>,
}

bridge_core::debug_fields!(impl[] Client: end);

/// What the thread shares with the callers.
struct End {
    path: PathBuf,
    channel: Mutex<Arc<Channel<Answer>>>,
    persistent: OnceLock<bool>,
    shares: Arc<Shares>,
    found: Arc<Mutex<Vec<Found>>>,
    is_closed: AtomicBool,
    process: u32,
}

bridge_core::debug_fields!(impl[] End: path);

/// A version that was found at a store.
struct Found {
    name: String,
    version: u64,
    ticket: Ticket,
    /// The ticket with which each connection has last handed it to a store's successor.
    own: BTreeMap<usize, Ticket>,
}

/// What this process has found at the stores of each path. All its connections to a path share it, as each of them may
/// be the last one.
static FOUND: Own<BTreeMap<PathBuf, Weak<Mutex<Vec<Found>>>>> = Own::new();

fn found_at(path: &Path) -> Arc<Mutex<Vec<Found>>> {
    let mut known = FOUND.lock();
    known.retain(|_, found| found.strong_count() > 0);
    let found = known.get(path).and_then(Weak::upgrade).unwrap_or_default();
    known.insert(path.into(), Arc::downgrade(&found));
    found
}

fn missing(name: &str) -> Error {
    Error::new(ErrorKind::Gone, format!("there is no name {name:?}: put tensors under it first"))
}

impl End {
    /// Refuses to speak for the process that this one was forked from.
    fn check(&self) -> Result<()> {
        match self.process == sync::process() {
            true => Ok(()),
            false => {
                let text = "this process was forked from the one that connected: connect again";
                Err(Error::new(ErrorKind::Gone, text))
            }
        }
    }

    fn is_of_store(&self) -> bool {
        self.persistent.get() == Some(&true)
    }

    fn hear(&self, notice: Answer) {
        if let Answer::Displaced { ticket } = &notice {
            locked(&self.found).retain(|found| !found.own.values().any(|own| own == ticket));
        }
        self.shares.hear(notice);
    }

    /// Returns the connection; one to the successor of a store that has ended.
    fn channel(&self) -> Result<Arc<Channel<Answer>>> {
        self.check()?;
        let channel = Arc::clone(&locked(&self.channel));
        let is_over = || channel.notices(|notice| self.hear(notice)).is_err();
        if self.is_of_store() && is_over() { self.again(&channel) } else { Ok(channel) }
    }

    /// Connects to the successor of a store, and hands it what this process has.
    fn again(&self, old: &Arc<Channel<Answer>>) -> Result<Arc<Channel<Answer>>> {
        let mut channel = locked(&self.channel);
        // Another thread may have done so.
        if Arc::ptr_eq(&channel, old) && !self.is_closed.load(Relaxed) {
            let new = Arc::new(Channel::connect(&self.path)?);
            self.hand_over(&new)?;
            *channel = new;
        }
        Ok(Arc::clone(&channel))
    }

    /// Hands a store what its predecessor kept. It has no room for some, and some it has already.
    fn hand_over(&self, channel: &Channel<Answer>) -> Result<()> {
        let put = |name, version, keep, ticket| {
            let request = Request::Put { name, ticket, keep, version: Some(version) };
            let answered = Arc::new(AtomicBool::new(false));
            let hears = Arc::clone(&answered);
            let asked = channel.ask(
                &request,
                now() + PATIENCE,
                |notice| self.hear(notice),
                move |_, _| hears.store(true, Relaxed),
            );
            // It refuses what it has no room for. Without an answer, all of it is handed over again later.
            if answered.load(Relaxed) { Ok(()) } else { asked.map(drop) }
        };
        for Placed { name, version, keep, ticket } in self.shares.placed() {
            put(name, version, keep, ticket)?;
        }
        let known: Vec<_> = locked(&self.found).iter().map(|found| found.ticket.clone()).collect();
        for ticket in known {
            let Some((content, files)) = importer::persistent(&ticket) else { continue };
            let exporter = process::exporter()?;
            let kept = Stored::finished(Content { persistent: false, ..content }, files, Vec::new());
            let own = exporter.share(kept, 0, ticket.about(), LISTED)?;
            let place = locked(&self.found).iter_mut().find(|found| found.ticket == ticket).map(|found| {
                found.own.insert(ptr::from_ref(self).addr(), own.clone());
                (found.name.clone(), found.version)
            });
            let put = place.map_or(Ok(()), |(name, version)| put(name, version, u64::MAX, own.clone()));
            exporter.end(&own)?;
            put?;
        }
        Ok(())
    }

    /// Receives the notices about what this process has put or found, until the connection ends; that to a store,
    /// until the program closes it.
    fn attend(&self) {
        let [mut pause, most] = PAUSES;
        let mut channel = Arc::clone(&locked(&self.channel));
        loop {
            while channel.attend(|notice| self.hear(notice)).is_ok() {
                self.shares.release();
                pause = PAUSES[0];
            }
            self.shares.release();
            if self.is_closed.load(Relaxed) || !self.is_of_store() {
                break;
            }
            match self.again(&channel) {
                Ok(new) => channel = new,
                Err(_) => {
                    thread::sleep(pause);
                    pause = most.min(2 * pause);
                }
            }
        }
        self.shares.end();
    }
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
        let end = End {
            channel: Mutex::new(Arc::new(Channel::connect(&path)?)),
            found: found_at(&path),
            path,
            persistent: OnceLock::new(),
            shares: Arc::default(),
            is_closed: AtomicBool::new(false),
            process: sync::process(),
        };
        Ok(Self { end: Arc::new(end) })
    }

    /// Returns what the process that serves names says about itself.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn about(&self) -> Result<About> {
        match self.ask(&Request::About)? {
            Answer::About(about) => Ok(about),
            _ => Err(broken("its answer does not fit the request")),
        }
    }

    /// Returns whether that process is a store: what is put there belongs to it
    /// ([`Names::persistent`](super::Names::persistent)).
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn is_persistent(&self) -> Result<bool> {
        match self.end.persistent.get() {
            Some(persistent) => Ok(*persistent),
            None => {
                let about = self.about()?;
                let persistent = *self.end.persistent.get_or_init(|| about.persistent);
                if persistent {
                    // It hands over what other connections of this process have found, too.
                    self.attend()?;
                }
                Ok(persistent)
            }
        }
    }

    fn ask(&self, request: &Request) -> Result<Answer> {
        self.ask_and_hear(request, |_, _| ())
    }

    /// Sends a question. `hears` is called with the answer whenever that comes.
    fn ask_and_hear(&self, request: &Request, hears: impl FnOnce(&Answer, bool) + Send + 'static) -> Result<Answer> {
        let channel = self.end.channel()?;
        let answered = channel.ask(request, now() + PATIENCE, |notice| self.end.hear(notice), hears);
        self.end.shares.release();
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
        match self.ask_and_hear(&Request::Put { name, ticket: ticket.clone(), keep, version: None }, hears)? {
            Answer::Stored { version, .. } => Ok(version),
            _ => Err(broken("its answer does not fit the request")),
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
        self.end.check()?;
        let put = Put::new(&self.end.shares, ticket, exporter, (name, keep));
        let end = Arc::clone(&self.end);
        let hears = move |answer: &Answer, _| {
            if let Answer::Stored { persistent: true, .. } = answer {
                end.persistent.get_or_init(|| true);
            }
            put.answered(answer);
        };
        let stored = self.attend().and_then(|()| self.put_and_hear(name, ticket, keep, hears));
        self.end.shares.release();
        stored
    }

    /// Starts the thread that receives the notices about tickets of this connection for which no name stands any more.
    fn attend(&self) -> Result<()> {
        if self.end.shares.is_attended.swap(true, Relaxed) {
            return Ok(());
        }
        let end = Arc::clone(&self.end);
        let thread = thread::Builder::new().name("truebridge-ipc".into()).spawn(move || end.attend());
        thread.map(drop).map_err(|error| {
            self.end.shares.is_attended.store(false, Relaxed);
            let text = "cannot start a thread for the connection: raise the limit of processes (ulimit -u)";
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })
    }

    /// Remembers what was found at a store, for its successor.
    fn remember(&self, name: &str, (version, ticket): &(u64, Ticket)) -> Result<()> {
        self.end.persistent.get_or_init(|| true);
        self.attend()?;
        let mut found = locked(&self.end.found);
        if !found.iter().any(|known| known.ticket == *ticket) {
            // What was found just now may be about to be opened.
            if found.len() >= MOST_FOUND {
                found.retain(|known| importer::persistent(&known.ticket).is_some());
            }
            found.push(Found { name: name.into(), version: *version, ticket: ticket.clone(), own: BTreeMap::new() });
        }
        Ok(())
    }

    /// Returns the newest ticket of a name, or that of one version, with the version.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Argument`] for what is not a name, and those of the
    /// connection.
    pub fn get(&self, name: &str, version: Option<u64>) -> Result<(u64, Ticket)> {
        self.found(name, version)?.ok_or_else(|| match version {
            Some(version) => {
                let text =
                    format!("the name {name:?} has no version {version} now: take the newest, without a version");
                Error::new(ErrorKind::Gone, text)
            }
            None => missing(name),
        })
    }

    fn found(&self, name: &str, version: Option<u64>) -> Result<Option<(u64, Ticket)>> {
        let answer = self.ask(&Request::Get { name: checked(name)?, version })?;
        let is_persistent = matches!(answer, Answer::Found { persistent: true, .. });
        let found = found(answer);
        found.iter().filter(|_| is_persistent).try_for_each(|found| self.remember(name, found))?;
        Ok(found)
    }

    /// Returns the newest ticket of a name and its version, if there is one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for what is not a name, and those of the connection.
    pub fn newest(&self, name: &str) -> Result<Option<(u64, Ticket)>> {
        self.found(name, None)
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
            _ => Err(broken("its answer does not fit the request")),
        }
    }

    /// Waits for a version of a name after this one, over its own connection.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for what is not a name, and those of the connection.
    pub fn watch(&self, name: &str, after: u64) -> Result<Watch> {
        let (name, persistent) = (checked(name)?, self.is_persistent()?);
        let mut watch = Watch { path: self.end.path.clone(), name, after, persistent, channel: Mutex::new(None) };
        match watch.start() {
            Err(error) if persistent && error.kind() == ErrorKind::Gone => (),
            started => watch.channel = Mutex::new(Some(started?)),
        }
        Ok(watch)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The connection of a forked process is its parent's.
        if self.end.check().is_ok() {
            self.end.is_closed.store(true, Relaxed);
            locked(&self.end.channel).close();
            self.end.shares.end();
        }
    }
}

/// A version of a name that is waited for.
#[must_use = "call wait"]
pub struct Watch {
    path: PathBuf,
    name: String,
    after: u64,
    persistent: bool,
    /// `None` after the end of a store, until its successor is there.
    channel: Mutex<Option<Channel<Answer>>>,
}

bridge_core::debug_fields!(impl[] Watch);

impl Watch {
    fn start(&self) -> Result<Channel<Answer>> {
        let channel = Channel::connect(&self.path)?;
        channel.start(&Request::Wait { name: self.name.clone(), after: self.after })?;
        Ok(channel)
    }

    /// Returns the newest version and its ticket, if there is one within `time`. Call it again to wait on. If a store
    /// ends, it waits for its successor.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn wait(&self, time: Duration) -> Result<Option<(u64, Ticket)>> {
        // The sum with a longer time may be more than the clock can count.
        let until = now() + time.min(LONGEST);
        let mut channel = locked(&self.channel);
        loop {
            let answered = match &*channel {
                Some(channel) => channel.answered(until),
                None => self.start().map(|started| channel.insert(started)).and_then(|channel| channel.answered(until)),
            };
            match answered {
                Err(error) if self.persistent && error.kind() == ErrorKind::Gone => *channel = None,
                answered => return Ok(answered?.and_then(found)),
            }
            if now() >= until {
                return Ok(None);
            }
            goes_on()?;
            thread::sleep(PAUSES[0].min(until.saturating_duration_since(now())));
        }
    }
}

fn found(answer: Answer) -> Option<(u64, Ticket)> {
    match answer {
        Answer::Found { version, ticket, .. } => Some((version, ticket)),
        _ => None,
    }
}
