//! Which ticket a name stands for, without sockets: the state machine of the names.

use super::wire::{Answer, Listed, Request};
use crate::exporter::Limits;
use crate::server::{Letter, Peer, Service};
use crate::ticket::Ticket;
use crate::wire::{Why, frame};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// The most bytes of a name.
const MAX_NAME: usize = 128;

/// A ticket under a name.
#[derive(Debug)]
struct Put {
    by: Peer,
    ticket: Ticket,
}

/// Names, with the tickets that they stand for, by version. A ticket goes with the connection that has put it.
#[derive(Debug)]
pub(crate) struct Board {
    limits: Limits,
    names: BTreeMap<String, BTreeMap<u64, Put>>,
    /// Who waits for a version of a name, and after which one.
    waiting: BTreeMap<Peer, (String, u64)>,
    peers: BTreeSet<Peer>,
    /// Counts connections and versions: no number is used twice, also of a name that was removed.
    last: u64,
}

impl Board {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, names: BTreeMap::new(), waiting: BTreeMap::new(), peers: BTreeSet::new(), last: 0 }
    }

    /// Returns the newest version of a name after `after`, or this one.
    fn found(&self, name: &str, after: u64, version: Option<u64>) -> Answer {
        let versions = self.names.get(name).into_iter().flatten();
        let mut fitting = versions.filter(|(number, _)| **number > after && version.is_none_or(|one| one == **number));
        match fitting.next_back() {
            Some((version, put)) => Answer::Found { version: *version, ticket: put.ticket.clone() },
            None => Answer::Missing,
        }
    }

    fn put(&mut self, by: Peer, name: String, ticket: Ticket, keep: u64) -> Answer {
        let total: usize = self.names.values().map(BTreeMap::len).sum();
        if total >= self.limits.shares {
            return Answer::Refused { why: Why::Busy };
        }
        self.last += 1;
        let versions = self.names.entry(name).or_default();
        versions.insert(self.last, Put { by, ticket });
        while versions.len() as u64 > keep.max(1) {
            versions.pop_first();
        }
        Answer::Stored { version: self.last }
    }

    fn list(&self) -> Answer {
        let newest = |(name, versions): (&String, &BTreeMap<u64, Put>)| {
            let (version, put) = versions.last_key_value()?;
            Some(Listed { name: name.clone(), version: *version, about: put.ticket.about().into() })
        };
        Answer::Listed { names: self.names.iter().filter_map(newest).collect() }
    }

    /// Answers the connections that wait for a version that is there now.
    fn tell(&mut self, out: &mut Vec<Letter>) {
        let found = self.waiting.iter().map(|(peer, (name, after))| (*peer, self.found(name, *after, None)));
        let found: Vec<_> = found.filter(|(_, answer)| *answer != Answer::Missing).collect();
        for (to, answer) in found {
            self.waiting.remove(&to);
            out.push(Letter { to, bytes: frame(&answer), kept: None });
        }
    }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && !name.contains(char::is_control)
}

impl Service for Board {
    type Request = Request;

    fn join(&mut self) -> Result<Peer, Why> {
        if self.peers.len() >= self.limits.connections {
            return Err(Why::Busy);
        }
        self.last += 1;
        self.peers.insert(self.last);
        Ok(self.last)
    }

    fn answer(&mut self, peer: Peer, request: Request, out: &mut Vec<Letter>) -> Result<(), Why> {
        let named = match &request {
            Request::Put { name, .. } | Request::Get { name, .. } | Request::Wait { name, .. } => is_name(name),
            Request::Remove { name } => is_name(name),
            Request::List => true,
        };
        if !named || self.waiting.contains_key(&peer) {
            return Err(Why::Protocol);
        }
        let answer = match request {
            Request::Put { name, ticket, keep } => self.put(peer, name, ticket, keep),
            Request::Get { name, version } => self.found(&name, 0, version),
            Request::Remove { name } => self.names.remove(&name).map_or(Answer::Missing, |_| Answer::Removed),
            Request::List => self.list(),
            Request::Wait { name, after } => {
                self.waiting.insert(peer, (name, after));
                self.tell(out);
                return Ok(());
            }
        };
        let stored = matches!(answer, Answer::Stored { .. });
        out.push(Letter { to: peer, bytes: frame(&answer), kept: None });
        if stored {
            self.tell(out);
        }
        Ok(())
    }

    fn holds(&self, _: Peer) -> bool {
        false
    }

    fn leave(&mut self, peer: Peer, _: &mut Vec<Letter>) {
        self.peers.remove(&peer);
        self.waiting.remove(&peer);
        self.names.values_mut().for_each(|versions| versions.retain(|_, put| put.by != peer));
        self.names.retain(|_, versions| !versions.is_empty());
    }

    fn turn(&mut self, _: &mut Vec<Letter>) {}

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn refusal(why: Why) -> Vec<u8> {
        frame(&Answer::Refused { why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Frames, MAX_ANSWER};
    use proptest::prelude::*;

    fn ticket(number: u64) -> Ticket {
        let text = format!(
            r#"{{"tensor_bridge":1,"socket":"/s","share":{number},"token":"{}","expires":9,"about":"{number}"}}"#,
            "0".repeat(32)
        );
        text.parse().unwrap()
    }

    fn read(letter: &Letter) -> Answer {
        let mut frames = Frames::new(MAX_ANSWER);
        frames.add(&letter.bytes);
        frames.next().unwrap().unwrap()
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
        /// A name stands for the last ticket that a process which is there has put, a process that waits is told once
        /// and of a newer version alone, and what a process has put goes with it.
        #[test]
        fn names_stand_for_what_was_put_last(steps in prop::collection::vec(step(), 1..80)) {
            let mut board = Board::new(Limits { connections: 4, ..Limits::default() });
            let (mut peers, mut waiting): (Vec<Peer>, BTreeMap<Peer, (usize, u64)>) = Default::default();
            // By name: version, who, and the number of the ticket.
            let mut known: Vec<Vec<(u64, Peer, u64)>> = vec![Vec::new(); 3];
            let mut count = 0;
            for step in steps {
                let mut out = Vec::new();
                let peer = match &step {
                    Step::Join => {
                        match board.join() {
                            Ok(peer) => peers.push(peer),
                            Err(why) => prop_assert_eq!((why, peers.len()), (Why::Busy, 4)),
                        }
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
                        (None, Request::Put { name: text(name), ticket: ticket(count), keep: *keep })
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
                let answered = board.answer(peer, ask, &mut out);
                if waiting.contains_key(&peer) {
                    prop_assert_eq!(answered, Err(Why::Protocol), "one question at a time");
                    continue;
                }
                prop_assert_eq!(answered, Ok(()));
                let own = out.iter().position(|letter| letter.to == peer).map(|at| read(&out.remove(at)));
                let found = newest.clone().map(|(version, ticket)| Answer::Found { version, ticket });
                match step {
                    Step::Put { name, keep, .. } => {
                        let Some(Answer::Stored { version }) = own else { panic!("{own:?}") };
                        known[name].push((version, peer, count));
                        let old = known[name].len().saturating_sub(keep.max(1) as usize);
                        known[name].drain(..old);
                        let told: BTreeSet<Peer> = out.iter().map(|letter| letter.to).collect();
                        let due = waiting.iter().filter(|(_, (waits, after))| *waits == name && version > *after);
                        prop_assert_eq!(&told, &due.map(|(peer, _)| *peer).collect::<BTreeSet<_>>());
                        prop_assert_eq!(told.len(), out.len());
                        for letter in &out {
                            prop_assert_eq!(read(letter), Answer::Found { version, ticket: ticket(count) });
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

    #[test]
    fn a_name_is_short_and_plain() {
        let mut board = Board::new(Limits::default());
        let peer = board.join().unwrap();
        for name in ["", "a\nb", &"n".repeat(MAX_NAME + 1)] {
            let request = Request::Get { name: name.into(), version: None };
            assert_eq!(board.answer(peer, request, &mut Vec::new()), Err(Why::Protocol), "{name}");
        }
    }
}
