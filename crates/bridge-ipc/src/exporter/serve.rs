//! What the exporter's thread answers.

use super::{Desk, Stored};
use crate::device::{Orders, Role};
use crate::server::{Letter, Peer, Service};
use crate::sync::{locked, now};
use crate::wire::{Answer, Content, Request, Segment, UNASKED, Why, frame};
use bridge_core::Result;
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// What answers on the thread.
pub(super) struct Clerk {
    desk: Arc<Desk>,
    /// The order of the work at both ends of each connection.
    orders: BTreeMap<Peer, Orders>,
    /// The leases of stores, and the counters of what they hold.
    stores: BTreeMap<(Peer, u64), Arc<AtomicUsize>>,
}

impl Clerk {
    pub(super) fn new(desk: Arc<Desk>) -> Self {
        Self { desk, orders: BTreeMap::new(), stores: BTreeMap::new() }
    }

    /// Returns the content as it is sent over a connection, and its descriptors.
    fn told(&mut self, peer: Peer, kept: &Stored) -> Result<(Content, Vec<Arc<OwnedFd>>)> {
        let (mut content, mut files) = (kept.content.clone(), kept.files.clone());
        if let Some(orders) = self.orders.get_mut(&peer).filter(|_| !kept.streams.is_empty()) {
            content.points = match kept.is_finished {
                true => orders.points_that_are_reached(&kept.streams)?,
                false => orders.points_after(&kept.streams)?,
            };
            files.extend(orders.page().cloned());
        }
        Ok((content, files))
    }
}

impl Service for Clerk {
    type Request = Request;

    fn join(&mut self, process: Option<&Arc<OwnedFd>>) -> Peer {
        let peer = self.desk.table().join();
        self.orders.insert(peer, Orders::new(Role::Exporter, process.cloned()));
        peer
    }

    fn is_question(request: &Request) -> bool {
        matches!(request, Request::Open { .. })
    }

    fn keeps(&self, peer: Peer) -> bool {
        self.desk.table().holds(peer, |_| true)
    }

    fn answer(&mut self, peer: Peer, number: u64, request: Request, out: &mut Vec<Letter>) -> Result<(), Why> {
        match request {
            Request::Open { share, token, persistent } => {
                let opened = self.desk.table().open(peer, share, &token, now());
                let (answer, files) = match opened {
                    Ok((lease, kept)) => match self.told(peer, &kept) {
                        Ok((content, files)) => {
                            if persistent {
                                kept.outside.fetch_add(1, Relaxed);
                                self.stores.insert((peer, lease), Arc::clone(&kept.outside));
                            }
                            (Answer::Opened { lease, content }, files)
                        }
                        Err(_) => {
                            drop(self.desk.table().give_back(peer, lease)?);
                            (Answer::Refused { why: Why::Failed }, Vec::new())
                        }
                    },
                    Err(why) => (Answer::Refused { why }, Vec::new()),
                };
                out.push(Letter { files, ..Letter::answer(peer, number, &answer) });
            }
            Request::Return { lease, lost, points } => {
                // Without the wait the memory could be reused too early: the lease is kept until that process ends.
                let orders = self.orders.get_mut(&peer).ok_or(Why::Protocol)?;
                orders.wait_for(&points, None).map_err(|_| Why::Protocol)?;
                let free = self.desk.table().give_back(peer, lease)?;
                if let Some(outside) = self.stores.remove(&(peer, lease)).filter(|_| !lost) {
                    outside.fetch_sub(1, Relaxed);
                }
                drop(free);
            }
        }
        Ok(())
    }

    /// Work on a device goes on when a connection is closed; memory of the host is a file, which each side persistent.
    fn holds(&self, peer: Peer) -> bool {
        let on_a_device = |segment: &Segment| !matches!(segment, Segment::File { .. });
        self.desk.table().holds(peer, |kept| kept.content.segments.iter().any(on_a_device))
    }

    fn leave(&mut self, peer: Peer, _: &mut Vec<Letter>) {
        self.orders.remove(&peer);
        self.stores.retain(|(store, _), _| *store != peer);
        let free = self.desk.table().leave(peer);
        drop(free);
    }

    /// Ends shares that have expired, and notifies the processes that have a revoked one open.
    fn turn(&mut self, out: &mut Vec<Letter>) {
        let free = self.desk.table().expire(now());
        drop(free);
        let notices = std::mem::take(&mut *locked(&self.desk.notices));
        let letter = |(to, share)| Letter::notice(to, &Answer::Revoked { share });
        out.extend(notices.into_iter().map(letter));
    }

    fn deadline(&self) -> Option<Instant> {
        self.desk.table().next_expiry()
    }

    fn refusal(why: Why) -> Vec<u8> {
        frame(UNASKED, &Answer::Refused { why })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Table;
    use super::*;
    use crate::memory::Writing;
    use crate::server::Waker;
    use crate::socket::Listening;
    use crate::sync::Mutex;
    use crate::ticket::Token;
    use crate::wire::Hex;
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    fn clerk() -> Clerk {
        let table = Mutex::new(Table::new(Default::default()));
        let listening = Listening::new(&OwnedFd::from(File::open("/").unwrap()).into(), "/".as_ref());
        let desk =
            Desk { socket: "/".into(), listening, table, notices: Mutex::default(), waker: Waker::new().unwrap() };
        Clerk::new(Arc::new(desk))
    }

    fn content(segments: Vec<Segment>) -> Content {
        Content { segments, tensors: [].into(), points: Vec::new(), tree: None, persistent: false }
    }

    /// A process may still use memory of a device when it has closed the connection. Memory of the host is a file.
    #[test]
    fn a_connection_holds_memory_of_devices_alone() {
        let mut clerk = clerk();
        let file = Segment::File { nbytes: 1, writing: Writing::Never };
        let pool =
            Segment::Files { device: Hex([1; 16]), process: Hex([2; 16]), parts: vec![], writing: Writing::Shared };
        for (segment, holds) in [(file, false), (pool, true)] {
            let (peer, token) = (clerk.join(None), Token::random().unwrap());
            assert!(!clerk.keeps(peer) && !clerk.holds(peer));
            let kept = Stored::finished(content(vec![segment]), Vec::new(), Vec::new());
            let share = clerk.desk.table().share(kept, 0, token, now() + Duration::from_secs(60));
            clerk.answer(peer, 1, Request::Open { share, token, persistent: false }, &mut Vec::new()).unwrap();
            assert_eq!((clerk.keeps(peer), clerk.holds(peer)), (true, holds));
        }
    }

    /// A store that ends returns its leases as lost, or not at all.
    #[test]
    fn a_lease_that_a_store_lost_counts_for_ever() {
        let mut clerk = clerk();
        let kept = Stored::finished(content(Vec::new()), Vec::new(), Vec::new());
        let (outside, token) = (Arc::clone(&kept.outside), Token::random().unwrap());
        let share = clerk.desk.table().share(kept, 0, token, now() + Duration::from_secs(60));
        let peers = [clerk.join(None), clerk.join(None)];
        let mut last = peers[1];
        let mut open = |clerk: &mut Clerk, peer, persistent| {
            let request = Request::Open { share, token, persistent };
            clerk.answer(peer, 1, request, &mut Vec::new()).unwrap();
            last += 1;
            last
        };
        let give_back = |clerk: &mut Clerk, peer, lease, lost| {
            let request = Request::Return { lease, lost, points: Vec::new() };
            clerk.answer(peer, UNASKED, request, &mut Vec::new()).unwrap();
        };
        let reads = open(&mut clerk, peers[0], false);
        let leases = [0, 1, 1].map(|peer| open(&mut clerk, peers[peer], true));
        assert_eq!(outside.load(Relaxed), 3);
        give_back(&mut clerk, peers[0], reads, false);
        assert_eq!(outside.load(Relaxed), 3, "it was not a store's");
        clerk.leave(peers[0], &mut Vec::new());
        assert_eq!(outside.load(Relaxed), 3);
        give_back(&mut clerk, peers[1], leases[1], false);
        assert_eq!(outside.load(Relaxed), 2);
        give_back(&mut clerk, peers[1], leases[2], true);
        assert_eq!(outside.load(Relaxed), 2);
    }
}
