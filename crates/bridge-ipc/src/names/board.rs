//! Which ticket a name stands for, without sockets: the state machine of the names.

use super::keeper::Keeping;
use super::wire::{About, Answer, Listed, Request, is_name};
use crate::server::{Letter, Peer, Service};
use crate::settings::Limits;
use crate::ticket::Ticket;
use crate::wire::{MAX_ANSWER, UNASKED, Why, frame};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The most bytes that the list of all names may have.
const MOST_BYTES: usize = MAX_ANSWER - 1024;

/// Bytes around a name and its ticket in a list, or more.
const AROUND: usize = 64;

/// The most questions of a connection that wait until the keeper has taken memory over: those that were given up.
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
}

/// A `put` that waits until the keeper has taken its memory over, and the questions after it.
struct Adopting {
    number: u64,
    put: Put,
    after: Vec<(u64, Request)>,
}

/// Names, with the tickets that they stand for, by version. A ticket is removed with the connection that put it, unless
/// this is a keeper: then it is a ticket of the keeper's own.
pub(super) struct Board {
    limits: Limits,
    keeper: Option<Box<dyn Keeping>>,
    names: BTreeMap<String, BTreeMap<u64, Standing>>,
    /// The number of tickets, and their bytes.
    total: (usize, usize),
    /// The connections that wait for a version of a name, after which one, and the numbers of their questions.
    waiting: BTreeMap<Peer, (String, u64, u64)>,
    adopting: BTreeMap<Peer, Adopting>,
    /// The connections, and how many tickets each has put.
    peers: BTreeMap<Peer, usize>,
    /// Counts connections and versions: no number is used twice, not even after a name was removed.
    last: u64,
}

/// Returns the microseconds since 1970. Versions of a keeper count up from there, so that its successor, which begins
/// later, never uses one of them again.
fn microseconds() -> u64 {
    let passed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(passed.as_micros()).unwrap_or(u64::MAX >> 1)
}

impl Board {
    pub(super) fn new(limits: Limits, keeper: Option<Box<dyn Keeping>>) -> Self {
        let last = if keeper.is_some() { microseconds() } else { 0 };
        let (names, waiting, adopting, peers) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { limits, keeper, names, total: (0, 0), waiting, adopting, peers, last }
    }

    /// Returns the newest version of a name after `after`, or this one.
    fn found(&self, name: &str, after: u64, version: Option<u64>) -> Answer {
        let versions = self.names.get(name).into_iter().flatten();
        let mut fitting = versions.filter(|(number, _)| **number > after && version.is_none_or(|one| one == **number));
        match fitting.next_back() {
            Some((version, standing)) => {
                let (ticket, kept) = (standing.ticket.clone(), self.keeper.is_some());
                Answer::Found { version: *version, ticket, kept }
            }
            None => Answer::Missing,
        }
    }

    /// Puts a ticket; into a keeper, once that has taken its memory over. Returns the answer, if there is one now.
    fn begin(&mut self, by: Peer, number: u64, put: Put, out: &mut Vec<Letter>) -> Option<Answer> {
        match (&mut self.keeper, put.version) {
            (Some(_), Some(version)) if version > microseconds() => Some(Answer::Refused { why: Why::Protocol }),
            (None, Some(_)) => Some(Answer::Refused { why: Why::Protocol }),
            (Some(keeper), _) => {
                keeper.adopt(by, &put.ticket);
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
        // Another process may have handed over the same version, after the keeper was started again.
        let same = version.and_then(|version| self.names.get_mut(&name)?.get_mut(&version).map(|same| (version, same)));
        if let Some((version, same)) = same {
            same.by.push((by, own));
            *self.peers.entry(by).or_default() += 1;
            self.end(&ticket);
            return Answer::Stored { version, kept: true };
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
        versions.insert(version, Standing { ticket, by: vec![(by, own)], bytes });
        let old: Vec<_> = (0..old).filter_map(|_| versions.pop_first()).collect();
        old.into_iter().for_each(|(_, standing)| self.displaced(standing, out));
        Answer::Stored { version, kept: self.keeper.is_some() }
    }

    /// Ends the keeper's own share of a ticket.
    fn end(&mut self, ticket: &Ticket) {
        self.keeper.iter_mut().for_each(|keeper| keeper.end(ticket));
    }

    /// Forgets a name.
    fn remove(&mut self, name: &str, out: &mut Vec<Letter>) -> Answer {
        let Some(versions) = self.names.remove(name) else { return Answer::Missing };
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
        let (nbytes, limit) = self.keeper.as_ref().map_or((0, 0), |keeper| keeper.held());
        Answer::About(About { keeps: self.keeper.is_some(), nbytes, limit })
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

    /// Answers a `put` whose memory the keeper has taken over, or could not.
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

impl Service for Board {
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
        let keeps = self.keeper.is_some();
        let stays = |standing: &mut Standing| {
            standing.by.retain(|(by, _)| *by != peer);
            keeps || !standing.by.is_empty()
        };
        self.names.values_mut().for_each(|versions| versions.retain(|_, standing| stays(standing)));
        self.names.retain(|_, versions| !versions.is_empty());
        let bytes = |versions: &BTreeMap<u64, Standing>| versions.values().map(|put| put.bytes).sum::<usize>();
        self.total = (self.names.values().map(BTreeMap::len).sum(), self.names.values().map(bytes).sum());
    }

    fn turn(&mut self, out: &mut Vec<Letter>) {
        let adopted = self.keeper.as_mut().map_or_else(Vec::new, |keeper| keeper.adopted());
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
mod tests {
    use super::*;
    use crate::line::Reply;
    use crate::wire::{Frames, HEADER};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn ticket(number: u64) -> Ticket {
        let text = format!(
            r#"{{"truebridge":3,"socket":"/s","share":{number},"token":"{}","expires":9,"about":"{number}"}}"#,
            "0".repeat(32)
        );
        text.parse().unwrap()
    }

    fn read(letter: &Letter) -> Answer {
        let mut frames = Frames::new(MAX_ANSWER);
        frames.add(&letter.bytes);
        frames.next().unwrap().unwrap().1
    }

    #[derive(Debug, Clone)]
    enum Step {
        Join,
        Leave { peer: usize },
        Put { peer: usize, name: usize, keep: u64 },
        Get { peer: usize, name: usize },
        Wait { peer: usize, name: usize, newer: bool },
        Remove { peer: usize, name: usize },
        List { peer: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        let (peer, name) = (0usize..4, 0usize..3);
        prop_oneof![
            2 => Just(Step::Join),
            1 => peer.clone().prop_map(|peer| Step::Leave { peer }),
            4 => (peer.clone(), name.clone(), 0u64..4).prop_map(|(peer, name, keep)| Step::Put { peer, name, keep }),
            3 => (peer.clone(), name.clone()).prop_map(|(peer, name)| Step::Get { peer, name }),
            3 => (peer.clone(), name.clone(), any::<bool>())
                .prop_map(|(peer, name, newer)| Step::Wait { peer, name, newer }),
            1 => (peer.clone(), name).prop_map(|(peer, name)| Step::Remove { peer, name }),
            1 => peer.prop_map(|peer| Step::List { peer }),
        ]
    }

    proptest! {
        /// A name stands for the last ticket that a living process has put. A process that waits is notified once, and
        /// only of a newer version. What a process has put is removed when it ends.
        #[test]
        fn names_stand_for_what_was_put_last(steps in prop::collection::vec(step(), 1..80)) {
            let mut board = Board::new(Limits::default(), None);
            let (mut peers, mut waiting): (Vec<Peer>, BTreeMap<Peer, (usize, u64)>) = Default::default();
            // By name: version, who, and the number of the ticket.
            let mut known: Vec<Vec<(u64, Peer, u64)>> = vec![Vec::new(); 3];
            let mut count = 0;
            for step in steps {
                let mut out = Vec::new();
                let peer = match &step {
                    Step::Join => {
                        peers.push(board.join(None));
                        continue;
                    }
                    Step::Leave { peer } | Step::Put { peer, .. } | Step::Get { peer, .. } | Step::Wait { peer, .. }
                    | Step::Remove { peer, .. } | Step::List { peer } => {
                        if peers.is_empty() { continue } else { peers[peer % peers.len()] }
                    }
                };
                if let Step::Leave { .. } = step {
                    peers.retain(|known| *known != peer);
                    waiting.remove(&peer);
                    known.iter_mut().for_each(|puts| puts.retain(|(_, by, _)| *by != peer));
                    board.leave(peer, &mut out);
                    prop_assert!(out.is_empty());
                    continue;
                }
                let text = |name: &usize| format!("name {name}");
                let (newest, ask) = match &step {
                    Step::Put { name, keep, .. } => {
                        count += 1;
                        (None, Request::Put { name: text(name), ticket: ticket(count), keep: *keep, version: None })
                    }
                    Step::Get { name, .. } => (known[*name].last(), Request::Get { name: text(name), version: None }),
                    Step::Wait { name, newer, .. } => {
                        let last = known[*name].last();
                        let after = if *newer { last.map_or(0, |last| last.0) } else { 0 };
                        (last.filter(|last| last.0 > after), Request::Wait { name: text(name), after })
                    }
                    Step::Remove { name, .. } => (known[*name].last(), Request::Remove { name: text(name) }),
                    _ => (None, Request::List),
                };
                let newest = newest.map(|(version, _, number)| (*version, ticket(*number)));
                let answered = board.answer(peer, 7, ask, &mut out);
                if waiting.contains_key(&peer) {
                    prop_assert_eq!(answered, Err(Why::Protocol), "one question at a time");
                    continue;
                }
                prop_assert_eq!(answered, Ok(()));
                let (notices, answers): (Vec<_>, Vec<_>) = out.into_iter().partition(|letter| read(letter).is_notice());
                let displaced: Vec<_> = notices.iter().map(|letter| (letter.to, read(letter))).collect();
                let mut out = answers;
                let own = out.iter().position(|letter| letter.to == peer).map(|at| read(&out.remove(at)));
                let ended = |puts: &[(u64, Peer, u64)]| -> Vec<_> {
                    puts.iter().map(|(_, by, number)| (*by, Answer::Displaced { ticket: ticket(*number) })).collect()
                };
                let found = newest.clone().map(|(version, ticket)| Answer::Found { version, ticket, kept: false });
                match step {
                    Step::Put { name, keep, .. } => {
                        let Some(Answer::Stored { version, .. }) = own else { panic!("{own:?}") };
                        known[name].push((version, peer, count));
                        let old = known[name].len().saturating_sub(keep.max(1) as usize);
                        let old: Vec<_> = known[name].drain(..old).collect();
                        prop_assert_eq!(displaced, ended(&old), "each owner is told what it need not share any more");
                        let told: BTreeSet<Peer> = out.iter().map(|letter| letter.to).collect();
                        let due = waiting.iter().filter(|(_, (waits, after))| *waits == name && version > *after);
                        prop_assert_eq!(&told, &due.map(|(peer, _)| *peer).collect::<BTreeSet<_>>());
                        prop_assert_eq!(told.len(), out.len());
                        for letter in &out {
                            prop_assert_eq!(read(letter), Answer::Found { version, ticket: ticket(count), kept: false });
                            waiting.remove(&letter.to);
                        }
                        continue;
                    }
                    Step::Get { .. } => prop_assert_eq!(own, found.or(Some(Answer::Missing))),
                    Step::Wait { name, newer, .. } => {
                        if own.is_none() {
                            let after = if newer { known[name].last().map_or(0, |last| last.0) } else { 0 };
                            waiting.insert(peer, (name, after));
                        }
                        prop_assert_eq!(own, found);
                    }
                    Step::Remove { name, .. } => {
                        prop_assert_eq!(displaced, ended(&known[name]));
                        known[name].clear();
                        let expected = if newest.is_some() { Answer::Removed } else { Answer::Missing };
                        prop_assert_eq!(own, Some(expected));
                    }
                    _ => {
                        let listed = known.iter().enumerate().filter_map(|(name, puts)| {
                            let (version, _, number) = puts.last()?;
                            Some(Listed { name: text(&name), version: *version, about: number.to_string() })
                        });
                        prop_assert_eq!(own, Some(Answer::Listed { names: listed.collect() }));
                    }
                }
                prop_assert!(out.is_empty());
            }
        }
    }

    fn asked(board: &mut Board, peer: Peer, request: Request) -> Answer {
        let mut out = Vec::new();
        board.answer(peer, 1, request, &mut out).unwrap();
        out.iter().filter(|letter| letter.to == peer).map(read).find(|answer| !answer.is_notice()).unwrap()
    }

    #[test]
    fn a_name_is_short_and_plain() {
        let mut board = Board::new(Limits::default(), None);
        let peer = board.join(None);
        asked(&mut board, peer, Request::Put { name: "good".into(), ticket: ticket(1), keep: 1, version: None });
        for name in ["", "a\nb", &"n".repeat(129)] {
            for request in [
                Request::Get { name: name.into(), version: None },
                Request::Put { name: name.into(), ticket: ticket(1), keep: 1, version: None },
                Request::Wait { name: name.into(), after: 0 },
                Request::Remove { name: name.into() },
            ] {
                assert_eq!(asked(&mut board, peer, request), Answer::Refused { why: Why::Protocol }, "{name}");
            }
        }
        assert!(matches!(asked(&mut board, peer, Request::List), Answer::Listed { names } if names.len() == 1));
    }

    /// The names that take most room in a list, until no more are accepted.
    #[test]
    fn a_list_of_all_names_is_always_an_answer() {
        let mut board = Board::new(Limits { shares: usize::MAX, ..Limits::default() }, None);
        let peer = board.join(None);
        let mut count = 0;
        let refused = loop {
            let name = format!("{count:06}{}", "\"".repeat(122));
            match asked(&mut board, peer, Request::Put { name, ticket: ticket(count), keep: 1, version: None }) {
                Answer::Stored { .. } => count += 1,
                answer => break answer,
            }
        };
        assert_eq!(refused, Answer::Refused { why: Why::Busy });
        assert!(count > 10_000, "{count}");
        let again =
            Request::Put { name: format!("{:06}{}", 0, "\"".repeat(122)), ticket: ticket(0), keep: 1, version: None };
        assert!(matches!(asked(&mut board, peer, again), Answer::Stored { .. }), "one takes the place of another");
        let mut out = Vec::new();
        board.answer(peer, 2, Request::List, &mut out).unwrap();
        assert!(out[0].bytes.len() <= HEADER + MAX_ANSWER);
        board.leave(peer, &mut out);
        assert_eq!(board.total, (0, 0));
    }
}
