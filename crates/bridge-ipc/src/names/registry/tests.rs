//! Random histories of the registry, also of one that keeps.

use super::super::store::{Adopted, Task};
use super::*;
use crate::channel::Reply;
use crate::sync::{Mutex, locked};
use crate::wire::{Frames, HEADER};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn ticket(number: u64) -> Ticket {
    let text = format!(
        r#"{{"truebridge":4,"socket":"/s","share":{number},"token":"{}","expires":9,"about":"{number}"}}"#,
        "0".repeat(32)
    );
    text.parse().unwrap()
}

fn read(letter: &Letter) -> Answer {
    let mut frames = Frames::new(MAX_ANSWER);
    frames.add(&letter.bytes);
    frames.next().unwrap().unwrap().1
}

/// They count up from the time at which a store begins, and a store before it has counted less.
#[test]
fn versions_of_a_store_begin_beyond_those_of_an_earlier_one() {
    let in_2023 = 1_700_000_000_000_000;
    assert!((in_2023..NO_VERSION).contains(&microseconds()));
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
        let mut registry = Registry::new(Limits::default(), None);
        let (mut peers, mut waiting): (Vec<Peer>, BTreeMap<Peer, (usize, u64)>) = Default::default();
        // By name: version, who, and the number of the ticket.
        let mut known: Vec<Vec<(u64, Peer, u64)>> = vec![Vec::new(); 3];
        let mut count = 0;
        for step in steps {
            let mut out = Vec::new();
            let peer = match &step {
                Step::Join => {
                    peers.push(registry.join(None));
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
                registry.leave(peer, &mut out);
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
            let answered = registry.answer(peer, 7, ask, &mut out);
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
            let found = newest.clone().map(|(version, ticket)| Answer::Found { version, ticket, persistent: false });
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
                        prop_assert_eq!(read(letter), Answer::Found { version, ticket: ticket(count), persistent: false });
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

fn asked(registry: &mut Registry, peer: Peer, request: Request) -> Answer {
    let mut out = Vec::new();
    registry.answer(peer, 1, request, &mut out).unwrap();
    out.iter().filter(|letter| letter.to == peer).map(read).find(|answer| !answer.is_notice()).unwrap()
}

#[test]
fn a_name_is_short_and_plain() {
    let mut registry = Registry::new(Limits::default(), None);
    let peer = registry.join(None);
    asked(&mut registry, peer, Request::Put { name: "good".into(), ticket: ticket(1), keep: 1, version: None });
    for name in ["", "a\nb", &"n".repeat(129)] {
        for request in [
            Request::Get { name: name.into(), version: None },
            Request::Put { name: name.into(), ticket: ticket(1), keep: 1, version: None },
            Request::Wait { name: name.into(), after: 0 },
            Request::Remove { name: name.into() },
        ] {
            assert_eq!(asked(&mut registry, peer, request), Answer::Refused { why: Why::Protocol }, "{name}");
        }
    }
    assert!(matches!(asked(&mut registry, peer, Request::List), Answer::Listed { names } if names.len() == 1));
}

/// The names that take most room in a list, until no more are accepted.
#[test]
fn a_list_of_all_names_is_always_an_answer() {
    let mut registry = Registry::new(Limits { shares: usize::MAX, ..Limits::default() }, None);
    let peer = registry.join(None);
    let mut count = 0;
    let refused = loop {
        let name = format!("{count:06}{}", "\"".repeat(122));
        match asked(&mut registry, peer, Request::Put { name, ticket: ticket(count), keep: 1, version: None }) {
            Answer::Stored { .. } => count += 1,
            answer => break answer,
        }
    };
    assert_eq!(refused, Answer::Refused { why: Why::Busy });
    assert!(count > 10_000, "{count}");
    let again =
        Request::Put { name: format!("{:06}{}", 0, "\"".repeat(122)), ticket: ticket(0), keep: 1, version: None };
    assert!(matches!(asked(&mut registry, peer, again), Answer::Stored { .. }), "one takes the place of another");
    let mut out = Vec::new();
    registry.answer(peer, 2, Request::List, &mut out).unwrap();
    assert!(out[0].bytes.len() <= HEADER + MAX_ANSWER);
    registry.leave(peer, &mut out);
    assert_eq!(registry.total, (0, 0));
}

#[test]
fn as_many_tickets_stand_as_the_limit_says() {
    let mut registry = Registry::new(Limits { shares: 2, ..Limits::default() }, None);
    let peer = registry.join(None);
    let put = |registry: &mut Registry, name: &str| {
        let request = Request::Put { name: name.into(), ticket: ticket(1), keep: 1, version: None };
        matches!(asked(registry, peer, request), Answer::Stored { .. })
    };
    assert!(put(&mut registry, "one") && put(&mut registry, "other"));
    assert!(put(&mut registry, "one"), "one takes the place of another");
    assert!(!put(&mut registry, "third"));
    asked(&mut registry, peer, Request::Remove { name: "other".into() });
    assert!(put(&mut registry, "third"));
    assert!(registry.keeps(peer));
    for name in ["one", "third"] {
        asked(&mut registry, peer, Request::Remove { name: name.into() });
    }
    assert_eq!((registry.total, registry.keeps(peer)), ((0, 0), false));
}

/// Keeps without memory: adoption ends when the test says so.
#[derive(Debug, Default, Clone)]
struct Fake(Arc<Mutex<Inside>>);

#[derive(Debug, Default)]
struct Inside {
    tasks: Vec<(Task, Ticket)>,
    done: Vec<Adopted>,
    stored: Vec<u64>,
    count: u64,
}

/// The first ticket of the store's own.
const OWN: u64 = 1_000_000;

impl Fake {
    /// Ends an adoption, for which the store has its own ticket.
    fn finish(&self, index: usize, works: bool) {
        let mut inside = locked(&self.0);
        if inside.tasks.is_empty() {
            return;
        }
        let index = index % inside.tasks.len();
        let (task, _) = inside.tasks.remove(index);
        let own = OWN + inside.count;
        inside.count += 1;
        inside.stored.extend(works.then_some(own));
        inside.done.push((task, if works { Ok(ticket(own)) } else { Err(Why::Full) }));
    }
}

impl Storing for Fake {
    fn adopt(&mut self, task: Task, ticket: &Ticket) {
        locked(&self.0).tasks.push((task, ticket.clone()));
    }

    fn adopted(&mut self) -> Vec<Adopted> {
        std::mem::take(&mut locked(&self.0).done)
    }

    fn end(&mut self, ticket: &Ticket) {
        let mut inside = locked(&self.0);
        let at = inside.stored.iter().position(|own| *own == ticket.share().0).expect("a share ends once");
        inside.stored.remove(at);
    }

    fn held(&self) -> (usize, usize) {
        (locked(&self.0).stored.len(), 7)
    }
}

#[derive(Debug, Clone)]
enum StoreStep {
    Join,
    Leave { peer: usize },
    Put { peer: usize, name: usize, keep: u64, again: bool },
    Finish { task: usize, works: bool },
    Get { peer: usize, name: usize },
    Remove { peer: usize, name: usize },
}

fn store_step() -> impl Strategy<Value = StoreStep> {
    let (peer, name) = (0usize..4, 0usize..3);
    prop_oneof![
        2 => Just(StoreStep::Join),
        1 => peer.clone().prop_map(|peer| StoreStep::Leave { peer }),
        4 => (peer.clone(), name.clone(), 1u64..4, any::<bool>())
            .prop_map(|(peer, name, keep, again)| StoreStep::Put { peer, name, keep, again }),
        4 => (0usize..4, prop::bool::weighted(0.8)).prop_map(|(task, works)| StoreStep::Finish { task, works }),
        3 => (peer.clone(), name.clone()).prop_map(|(peer, name)| StoreStep::Get { peer, name }),
        1 => (peer, name).prop_map(|(peer, name)| StoreStep::Remove { peer, name }),
    ]
}

proptest! {
    /// A store's shares are those that names stand for, whatever ends when. Each question gets one answer, in the
    /// order of the questions of its connection. What is put stays when its connection ends. Each process that has
    /// put a ticket is notified once when no name stands for it.
    #[test]
    fn a_store_has_what_names_stand_for(steps in prop::collection::vec(store_step(), 1..120)) {
        let fake = Fake::default();
        let mut registry = Registry::new(Limits::default(), Some(Box::new(fake.clone())));
        let mut peers: Vec<Peer> = Vec::new();
        let mut asked: BTreeMap<Peer, Vec<(u64, u64)>> = BTreeMap::new();
        let (mut count, mut stored, mut told) = (0, BTreeSet::new(), BTreeSet::new());
        let mut versions = BTreeSet::new();
        for step in steps {
            let mut out = Vec::new();
            let request = match &step {
                StoreStep::Join => {
                    peers.push(registry.join(None));
                    continue;
                }
                StoreStep::Finish { task, works } => {
                    fake.finish(*task, *works);
                    None
                }
                _ if peers.is_empty() => continue,
                StoreStep::Leave { peer } => {
                    let peer = peers.remove(peer % peers.len());
                    registry.leave(peer, &mut out);
                    asked.remove(&peer);
                    None
                }
                StoreStep::Put { peer, name, keep, again } => {
                    count += 1;
                    let old = versions.iter().nth(count as usize % versions.len().max(1)).copied();
                    let version = old.filter(|_| *again);
                    let (name, keep) = (format!("name {name}"), *keep);
                    Some((*peer, Request::Put { name, ticket: ticket(count), keep, version }))
                }
                StoreStep::Get { peer, name } => {
                    Some((*peer, Request::Get { name: format!("name {name}"), version: None }))
                }
                StoreStep::Remove { peer, name } => Some((*peer, Request::Remove { name: format!("name {name}") })),
            };
            if let Some((peer, request)) = request {
                let peer = peers[peer % peers.len()];
                let waiting = asked.entry(peer).or_default();
                let number = 1000 * count + waiting.len() as u64 + 1;
                waiting.push((number, count));
                prop_assert_eq!(registry.answer(peer, number, request, &mut out), Ok(()));
            }
            registry.turn(&mut out);
            for letter in out {
                let mut frames = Frames::new(MAX_ANSWER);
                frames.add(&letter.bytes);
                let (number, answer): (u64, Answer) = frames.next().unwrap().unwrap();
                if let Answer::Displaced { ticket } = answer {
                    prop_assert!(told.insert((letter.to, ticket.share().0)), "told twice");
                    continue;
                }
                let Some(waiting) = asked.get_mut(&letter.to) else { continue };
                let (asked, put) = waiting.remove(0);
                prop_assert_eq!(asked, number, "in the order of the questions");
                if let Answer::Stored { version, persistent } = answer {
                    prop_assert!(persistent);
                    versions.insert(version);
                    stored.insert((letter.to, put));
                }
                if let Answer::Found { ticket, persistent, .. } = answer {
                    prop_assert!(persistent && ticket.share().0 >= OWN, "a ticket of the store");
                }
            }
            let standing: BTreeSet<u64> =
                registry.names.values().flat_map(BTreeMap::values).map(|standing| standing.ticket.share().0).collect();
            let by: BTreeSet<(Peer, u64)> = registry
                .names
                .values()
                .flat_map(BTreeMap::values)
                .flat_map(|standing| standing.by.iter().map(|(peer, ticket)| (*peer, ticket.share().0)))
                .collect();
            stored.retain(|(peer, _)| peers.contains(peer));
            for put in &stored {
                prop_assert!(by.contains(put) != told.contains(put), "it stands, or its process was told: {put:?}");
            }
            let inside = locked(&fake.0);
            prop_assert_eq!(&standing, &inside.stored.iter().copied().collect::<BTreeSet<_>>());
            prop_assert_eq!((standing.len(), registry.total.0), (inside.stored.len(), inside.stored.len()));
            let waits = registry.adopting.values().map(|adopting| 1 + adopting.after.len()).sum::<usize>();
            prop_assert_eq!(waits, asked.values().map(Vec::len).sum::<usize>(), "no question is lost");
        }
    }
}

/// Puts a ticket into a store, which takes it over at once. Returns the answer, and the notices.
fn stored_by(
    fake: &Fake,
    registry: &mut Registry,
    peer: Peer,
    put: (u64, u64, Option<u64>),
) -> (Answer, Vec<(Peer, Answer)>) {
    let (number, keep, version) = put;
    let mut out = Vec::new();
    let request = Request::Put { name: "weights".into(), ticket: ticket(number), keep, version };
    registry.answer(peer, 1, request, &mut out).unwrap();
    fake.finish(0, true);
    registry.turn(&mut out);
    let (notices, mut answers): (Vec<_>, Vec<_>) =
        out.iter().map(|letter| (letter.to, read(letter))).partition(|(_, answer)| answer.is_notice());
    (answers.pop().unwrap().1, notices)
}

fn versions(registry: &Registry) -> Vec<u64> {
    registry.names.get("weights").into_iter().flat_map(|versions| versions.keys().copied()).collect()
}

/// What is handed over may come in any order, and the same versions stand as before.
#[test]
fn versions_that_are_handed_over_stand_as_they_did() {
    let puts = [(3, 1), (4, 5), (6, 2), (7, 3)];
    let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]];
    for order in orders {
        let fake = Fake::default();
        let mut registry = Registry::new(Limits::default(), Some(Box::new(fake.clone())));
        let peer = registry.join(None);
        for index in order {
            let (version, keep) = puts[index];
            stored_by(&fake, &mut registry, peer, (version, keep, Some(version)));
        }
        // 3, then 3 and 4, then 4 and 6, then 4, 6 and 7.
        assert_eq!(versions(&registry), [4, 6, 7], "{order:?}");
    }
}

#[test]
fn what_was_removed_is_not_handed_over_later() {
    let fake = Fake::default();
    let mut registry = Registry::new(Limits::default(), Some(Box::new(fake.clone())));
    let (one, late) = (registry.join(None), registry.join(None));
    let Answer::Stored { version, .. } = stored_by(&fake, &mut registry, one, (1, 1, None)).0 else { panic!() };
    let mut out = Vec::new();
    registry.answer(one, 2, Request::Remove { name: "weights".into() }, &mut out).unwrap();
    for (number, version) in [(2, version), (3, version - 1)] {
        let (answer, notices) = stored_by(&fake, &mut registry, late, (number, 1, Some(version)));
        assert_eq!(answer, Answer::Stored { version, persistent: true });
        assert_eq!(notices, [(late, Answer::Displaced { ticket: ticket(number) })]);
        assert!(versions(&registry).is_empty());
    }
    let Answer::Stored { version: newer, .. } = stored_by(&fake, &mut registry, late, (4, 1, None)).0 else { panic!() };
    assert_eq!((versions(&registry), newer > version), (vec![newer], true));
    assert_eq!(fake.held().0, 1);
}

/// The clock of the last store was ahead.
#[test]
fn a_version_of_the_future_is_taken_over_and_newer_ones_are_higher() {
    let fake = Fake::default();
    let mut registry = Registry::new(Limits::default(), Some(Box::new(fake.clone())));
    let peer = registry.join(None);
    let future = microseconds() + 3_600_000_000;
    stored_by(&fake, &mut registry, peer, (1, 1, Some(future)));
    let Answer::Stored { version, .. } = stored_by(&fake, &mut registry, peer, (2, 2, None)).0 else { panic!() };
    assert_eq!(versions(&registry), [future, version]);
    assert!(version > future);
    let mut out = Vec::new();
    let endless = Request::Put { name: "weights".into(), ticket: ticket(3), keep: 1, version: Some(1 << 62) };
    registry.answer(peer, 3, endless, &mut out).unwrap();
    assert_eq!(read(&out[0]), Answer::Refused { why: Why::Protocol });
}

/// A process writes its tickets itself, as short as it likes, and the versions that it hands over.
#[test]
fn a_name_takes_no_more_of_a_list_than_is_counted() {
    for name in ["n", &"\"".repeat(128)] {
        let fake = Fake::default();
        let mut registry = Registry::new(Limits::default(), Some(Box::new(fake.clone())));
        let peer = registry.join(None);
        let nbytes = |registry: &Registry| frame(1, &registry.list()).len();
        let empty = nbytes(&registry);
        let mut out = Vec::new();
        let put = Request::Put { name: name.into(), ticket: ticket(1), keep: 1, version: Some(NO_VERSION - 1) };
        registry.answer(peer, 1, put, &mut out).unwrap();
        fake.finish(0, true);
        registry.turn(&mut out);
        let taken = nbytes(&registry) - empty;
        assert!((1..=registry.total.1).contains(&taken), "{taken} bytes of {}", registry.total.1);
    }
}
