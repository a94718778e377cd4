//! Which ticket a name stands for, without sockets: the state machine of the names.

use super::store::Storing;
use super::wire::{About, Answer, Listed, Request, is_name};
use crate::server::{Letter, Peer, Service};
use crate::settings::Limits;
use crate::ticket::Ticket;
use crate::wire::{MAX_ANSWER, UNASKED, Why, frame};
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The most bytes that the list of all names may have.
const MOST_BYTES: usize = MAX_ANSWER - 1024;

/// Bytes around a name and its ticket in a list, or more.
const AROUND: usize = 64;

/// The most questions of a connection that wait until the store has taken memory over: those that were given up.
const MOST_WAITING: usize = 64;

/// What is put: a ticket, under this name, of which `keep` versions stay; the version that it was before.
struct Put {
    name: String,
    ticket: Ticket,
    keep: u64,
    version: Option<u64>,
}

/// A ticket under a name.
#[derive(Debug)]
struct Standing {
    ticket: Ticket,
    /// The connections that have put it, or the same version, and their tickets.
    by: Vec<(Peer, Ticket)>,
    bytes: usize,
    /// How many versions stay when it is put.
    keep: u64,
}

/// A `put` that waits until the store has taken its memory over, and the questions after it.
struct Adopting {
    number: u64,
    put: Put,
    after: Vec<(u64, Request)>,
}

/// Names, with the tickets that they stand for, by version. A ticket is removed with the connection that put it, unless
/// this is a store: then it is a ticket of the store's own.
pub(super) struct Registry {
    limits: Limits,
    store: Option<Box<dyn Storing>>,
    names: BTreeMap<String, BTreeMap<u64, Standing>>,
    /// The number of tickets, and their bytes.
    total: (usize, usize),
    /// The connections that wait for a version of a name, after which one, and the numbers of their questions.
    waiting: BTreeMap<Peer, (String, u64, u64)>,
    adopting: BTreeMap<Peer, Adopting>,
    /// The names that were removed, and the newest version that there may have been.
    removed: BTreeMap<String, u64>,
    /// The connections, and how many tickets each has put.
    peers: BTreeMap<Peer, usize>,
    /// Counts connections and versions: no number is used twice, not even after a name was removed.
    last: u64,
}

/// The most names that were removed and are remembered.
const MOST_REMOVED: usize = 1 << 16;

/// No version is as large: the number of the next one must not overflow.
const NO_VERSION: u64 = 1 << 62;

/// Returns the microseconds since 1970. Versions of a store count up from there, so that its successor, which begins
/// later, never uses one of them again.
fn microseconds() -> u64 {
    let passed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(passed.as_micros()).unwrap_or(u64::MAX >> 1)
}

impl Registry {
    pub(super) fn new(limits: Limits, store: Option<Box<dyn Storing>>) -> Self {
        let last = if store.is_some() { microseconds() } else { 0 };
        let (names, waiting, adopting, peers) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { limits, store, names, total: (0, 0), waiting, adopting, removed: BTreeMap::new(), peers, last }
    }

    /// Returns the newest version of a name after `after`, or this one.
    fn found(&self, name: &str, after: u64, version: Option<u64>) -> Answer {
        let versions = self.names.get(name).into_iter().flatten();
        let mut fitting = versions.filter(|(number, _)| **number > after && version.is_none_or(|one| one == **number));
        match fitting.next_back() {
            Some((version, standing)) => {
                let (ticket, persistent) = (standing.ticket.clone(), self.store.is_some());
                Answer::Found { version: *version, ticket, persistent }
            }
            None => Answer::Missing,
        }
    }

    /// Puts a ticket; into a store, once that has taken its memory over. Returns the answer, if there is one now.
    fn begin(&mut self, by: Peer, number: u64, put: Put, out: &mut Vec<Letter>) -> Option<Answer> {
        match (&mut self.store, put.version) {
            (Some(_), Some(NO_VERSION..)) => Some(Answer::Refused { why: Why::Protocol }),
            (None, Some(_)) => Some(Answer::Refused { why: Why::Protocol }),
            (Some(store), _) => {
                store.adopt(by, &put.ticket);
                self.adopting.insert(by, Adopting { number, put, after: Vec::new() });
                None
            }
            (None, None) => {
                let ticket = put.ticket.clone();
                Some(self.put(by, put, ticket, out))
            }
        }
    }

    /// Puts a ticket, as `ticket`, and removes those that are too old then.
    fn put(&mut self, by: Peer, put: Put, ticket: Ticket, out: &mut Vec<Letter>) -> Answer {
        let Put { name, ticket: own, keep, version } = put;
        // Another process may have handed over the same version, after the store was started again.
        let same = version.and_then(|version| self.names.get_mut(&name)?.get_mut(&version).map(|same| (version, same)));
        if let Some((version, same)) = same {
            same.by.push((by, own));
            same.keep = same.keep.min(keep);
            *self.peers.entry(by).or_default() += 1;
            self.end(&ticket);
            return Answer::Stored { version, persistent: true };
        }
        // It was removed from this store before its process handed it over.
        let floor = self.removed.get(&name).copied();
        if let Some(version) = version.filter(|version| floor.is_some_and(|floor| *version <= floor)) {
            self.end(&ticket);
            out.push(Letter::notice(by, &Answer::Displaced { ticket: own }));
            return Answer::Stored { version, persistent: true };
        }
        // In JSON a letter of a name takes up to two bytes.
        let bytes = 2 * name.len() + ticket.text().len() + AROUND;
        let versions = self.names.get(&name);
        let there = versions.map_or(0, |versions| versions.len());
        let old = (there + 1).saturating_sub(usize::try_from(keep.max(1)).unwrap_or(usize::MAX));
        let room: usize =
            versions.into_iter().flat_map(|versions| versions.values().take(old)).map(|put| put.bytes).sum();
        if self.total.0 - old >= self.limits.shares || self.total.1 - room + bytes > MOST_BYTES {
            self.end(&ticket);
            return Answer::Refused { why: Why::Busy };
        }
        let version = version.unwrap_or(self.last + 1);
        self.last = self.last.max(version);
        self.total = (self.total.0 + 1, self.total.1 + bytes);
        *self.peers.entry(by).or_default() += 1;
        let versions = self.names.entry(name).or_default();
        versions.insert(version, Standing { ticket, by: vec![(by, own)], bytes, keep });
        // As if all had been put one after the other: what is handed over may come in any order.
        let (mut stay, mut old) = (VecDeque::new(), Vec::new());
        for (number, standing) in &*versions {
            stay.push_back(*number);
            while stay.len() as u64 > standing.keep.max(1) {
                old.extend(stay.pop_front());
            }
        }
        let old: Vec<_> = old.into_iter().filter_map(|number| versions.remove(&number)).collect();
        old.into_iter().for_each(|standing| self.displaced(standing, out));
        Answer::Stored { version, persistent: self.store.is_some() }
    }

    /// Ends the store's own share of a ticket.
    fn end(&mut self, ticket: &Ticket) {
        self.store.iter_mut().for_each(|store| store.end(ticket));
    }

    /// Forgets a name.
    fn remove(&mut self, name: &str, out: &mut Vec<Letter>) -> Answer {
        let Some(versions) = self.names.remove(name) else { return Answer::Missing };
        if self.store.is_some() {
            self.removed.insert(name.into(), self.last);
            if self.removed.len() > MOST_REMOVED {
                let oldest = self.removed.iter().min_by_key(|(_, version)| **version).map(|(name, _)| name.clone());
                self.removed.retain(|name, _| Some(name) != oldest.as_ref());
            }
        }
        versions.into_values().for_each(|standing| self.displaced(standing, out));
        Answer::Removed
    }

    /// Tells the connections that have put a ticket that no name stands for it any more.
    fn displaced(&mut self, standing: Standing, out: &mut Vec<Letter>) {
        self.total = (self.total.0 - 1, self.total.1 - standing.bytes);
        self.end(&standing.ticket);
        for (peer, ticket) in standing.by {
            self.peers.entry(peer).and_modify(|puts| *puts -= 1);
            out.push(Letter::notice(peer, &Answer::Displaced { ticket }));
        }
    }

    fn list(&self) -> Answer {
        let newest = |(name, versions): (&String, &BTreeMap<u64, Standing>)| {
            let (version, standing) = versions.last_key_value()?;
            Some(Listed { name: name.clone(), version: *version, about: standing.ticket.about().into() })
        };
        Answer::Listed { names: self.names.iter().filter_map(newest).collect() }
    }

    fn about(&self) -> Answer {
        let (nbytes, limit) = self.store.as_ref().map_or((0, 0), |store| store.held());
        Answer::About(About { persistent: self.store.is_some(), nbytes, limit })
    }

    /// Answers the connections that wait for a version that is there now.
    fn tell(&mut self, out: &mut Vec<Letter>) {
        let waiting = self.waiting.iter();
        let found = waiting.map(|(peer, (name, after, number))| ((*peer, *number), self.found(name, *after, None)));
        let found: Vec<_> = found.filter(|(_, answer)| *answer != Answer::Missing).collect();
        for ((to, number), answer) in found {
            self.waiting.remove(&to);
            out.push(Letter::answer(to, number, &answer));
        }
    }

    /// Answers a `put` whose memory the store has taken over, or could not.
    fn adopted(&mut self, peer: Peer, kept: Result<Ticket, Why>, out: &mut Vec<Letter>) {
        let (adopting, kept) = match (self.adopting.remove(&peer), kept) {
            (Some(adopting), kept) => (adopting, kept),
            // The connection has ended meanwhile, and nothing has said that the version is there.
            (None, kept) => return kept.iter().for_each(|ticket| self.end(ticket)),
        };
        let answer = match kept {
            Ok(ticket) => self.put(peer, adopting.put, ticket, out),
            Err(why) => Answer::Refused { why },
        };
        out.push(Letter::answer(peer, adopting.number, &answer));
        self.tell(out);
        for (number, request) in adopting.after {
            if let Err(why) = self.answer(peer, number, request, out) {
                out.push(Letter::notice(peer, &Answer::Refused { why }));
            }
        }
    }
}

impl Service for Registry {
    type Request = Request;

    fn join(&mut self, _: Option<&Arc<OwnedFd>>) -> Peer {
        self.last += 1;
        self.peers.insert(self.last, 0);
        self.last
    }

    fn is_question(_: &Request) -> bool {
        true
    }

    /// An invalid name is refused, and the connection goes on: what was put through it stays.
    fn answer(&mut self, peer: Peer, number: u64, request: Request, out: &mut Vec<Letter>) -> Result<(), Why> {
        if self.waiting.contains_key(&peer) {
            return Err(Why::Protocol);
        }
        if let Some(adopting) = self.adopting.get_mut(&peer) {
            adopting.after.push((number, request));
            return if adopting.after.len() > MOST_WAITING { Err(Why::Protocol) } else { Ok(()) };
        }
        let answer = match request {
            Request::Put { ref name, .. }
            | Request::Get { ref name, .. }
            | Request::Wait { ref name, .. }
            | Request::Remove { ref name }
                if !is_name(name) =>
            {
                Answer::Refused { why: Why::Protocol }
            }
            Request::Put { name, ticket, keep, version } => {
                match self.begin(peer, number, Put { name, ticket, keep, version }, out) {
                    Some(answer) => answer,
                    None => return Ok(()),
                }
            }
            Request::Get { name, version } => self.found(&name, 0, version),
            Request::Remove { name } => self.remove(&name, out),
            Request::List => self.list(),
            Request::About => self.about(),
            Request::Wait { name, after } => {
                self.waiting.insert(peer, (name, after, number));
                self.tell(out);
                return Ok(());
            }
        };
        let stored = matches!(answer, Answer::Stored { .. });
        out.push(Letter::answer(peer, number, &answer));
        if stored {
            self.tell(out);
        }
        Ok(())
    }

    fn keeps(&self, peer: Peer) -> bool {
        let is_awaited = self.waiting.contains_key(&peer) || self.adopting.contains_key(&peer);
        is_awaited || self.peers.get(&peer).is_some_and(|puts| *puts > 0)
    }

    fn holds(&self, _: Peer) -> bool {
        false
    }

    fn leave(&mut self, peer: Peer, _: &mut Vec<Letter>) {
        self.peers.remove(&peer);
        self.waiting.remove(&peer);
        self.adopting.remove(&peer);
        let persistent = self.store.is_some();
        let stays = |standing: &mut Standing| {
            standing.by.retain(|(by, _)| *by != peer);
            persistent || !standing.by.is_empty()
        };
        self.names.values_mut().for_each(|versions| versions.retain(|_, standing| stays(standing)));
        self.names.retain(|_, versions| !versions.is_empty());
        let bytes = |versions: &BTreeMap<u64, Standing>| versions.values().map(|put| put.bytes).sum::<usize>();
        self.total = (self.names.values().map(BTreeMap::len).sum(), self.names.values().map(bytes).sum());
    }

    fn turn(&mut self, out: &mut Vec<Letter>) {
        let adopted = self.store.as_mut().map_or_else(Vec::new, |store| store.adopted());
        adopted.into_iter().for_each(|(peer, kept)| self.adopted(peer, kept, out));
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn refusal(why: Why) -> Vec<u8> {
        frame(UNASKED, &Answer::Refused { why })
    }
}

#[cfg(test)]
mod tests;
