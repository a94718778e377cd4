//! Who shares what with whom, without sockets and without memory: the exporter's state machine.

use crate::server::Peer;
use crate::settings::Limits;
use crate::ticket::Token;
use crate::wire::Why;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// All connections together may have this many times the leases of one.
const CROWD: usize = 16;

/// What a process shares now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Held {
    /// Shares that can be opened or are still leased.
    pub shares: usize,
    /// Leases of other processes.
    pub leases: usize,
    /// Connections.
    pub connections: usize,
    /// Bytes of all shares together that were copied into memory for this purpose.
    pub bytes: usize,
}

#[derive(Debug)]
struct Share<C> {
    content: Arc<C>,
    bytes: usize,
    token: Token,
    /// `None`: it was revoked, or has expired.
    until: Option<Instant>,
    leases: usize,
}

/// Shares, connections, and the leases between them.
///
/// A share keeps its content until it has ended and its last lease is returned. A connection that ends returns all of
/// its leases. Contents that no share needs are returned, so that the caller drops them where no lock is held.
#[derive(Debug)]
pub(crate) struct Table<C> {
    limits: Limits,
    shares: BTreeMap<u64, Share<C>>,
    /// When each share that can be opened expires, and its number.
    ends: BTreeSet<(Instant, u64)>,
    bytes: usize,
    /// Leases of all connections.
    leases: usize,
    /// Leases by connection: the share of each.
    peers: BTreeMap<Peer, BTreeMap<u64, u64>>,
    /// Counts shares, leases and connections: no number is used twice.
    last: u64,
}

impl<C> Table<C> {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            shares: BTreeMap::new(),
            ends: BTreeSet::new(),
            bytes: 0,
            leases: 0,
            peers: BTreeMap::new(),
            last: 0,
        }
    }

    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Returns whether another share of this many bytes is allowed.
    pub(crate) fn has_capacity(&self, bytes: usize) -> bool {
        self.shares.len() < self.limits.shares && self.bytes.saturating_add(bytes) <= self.limits.bytes
    }

    /// Enters a share, which `token` opens until `until`. Returns its number.
    pub(crate) fn share(&mut self, content: C, bytes: usize, token: Token, until: Instant) -> u64 {
        let number = self.next();
        let share = Share { content: Arc::new(content), bytes, token, until: Some(until), leases: 0 };
        self.shares.insert(number, share);
        self.ends.insert((until, number));
        self.bytes += bytes;
        number
    }

    /// Enters a connection.
    pub(crate) fn join(&mut self) -> Peer {
        let peer = self.next();
        self.peers.insert(peer, BTreeMap::new());
        peer
    }

    /// Gives a connection a lease. Returns its number, and the content. A wrong token and a share that has ended get
    /// the same answer, so that no process finds out which shares there are.
    pub(crate) fn open(&mut self, peer: Peer, number: u64, token: &Token, now: Instant) -> Result<(u64, Arc<C>), Why> {
        let lease = self.last + 1;
        let leases = self.peers.get_mut(&peer).ok_or(Why::Protocol)?;
        let share = self.shares.get_mut(&number).filter(|share| share.token == *token).ok_or(Why::Unknown)?;
        if share.until.is_none_or(|until| until <= now) {
            return Err(Why::Unknown);
        }
        if leases.len() >= self.limits.leases || self.leases >= self.limits.leases.saturating_mul(CROWD) {
            return Err(Why::Busy);
        }
        self.leases += 1;
        share.leases += 1;
        leases.insert(lease, number);
        self.last = lease;
        Ok((lease, Arc::clone(&share.content)))
    }

    /// Takes a lease back from a connection. Returns the content if no share needs it now.
    pub(crate) fn give_back(&mut self, peer: Peer, lease: u64) -> Result<Option<Arc<C>>, Why> {
        let share = self.peers.get_mut(&peer).and_then(|leases| leases.remove(&lease)).ok_or(Why::Protocol)?;
        Ok(self.returned(share))
    }

    /// Returns whether a connection has leases on such contents.
    pub(crate) fn holds(&self, peer: Peer, such: impl Fn(&C) -> bool) -> bool {
        let held = |number: &u64| self.shares.get(number).is_some_and(|share| such(&share.content));
        self.peers.get(&peer).is_some_and(|leases| leases.values().any(held))
    }

    /// Takes all leases back from a connection that has ended. Returns the contents that no share needs now.
    pub(crate) fn leave(&mut self, peer: Peer) -> Vec<Arc<C>> {
        let leases = self.peers.remove(&peer).unwrap_or_default();
        leases.into_values().filter_map(|share| self.returned(share)).collect()
    }

    fn returned(&mut self, number: u64) -> Option<Arc<C>> {
        let share = self.shares.get_mut(&number).expect("a share with leases stays");
        share.leases -= 1;
        self.leases -= 1;
        self.free(number)
    }

    /// Ends a share now. Returns the connections that have leases on it, and the content if no lease is left.
    ///
    /// # Errors
    ///
    /// [`Why::Unknown`] for a wrong token, and nothing has ended.
    pub(crate) fn revoke(&mut self, number: u64, token: &Token) -> Result<(BTreeSet<Peer>, Option<Arc<C>>), Why> {
        let free = self.end(number, token)?;
        let holders = self.peers.iter().filter(|(_, leases)| leases.values().any(|share| *share == number));
        Ok((holders.map(|(peer, _)| *peer).collect(), free))
    }

    /// Ends a share now: a process that has it open keeps it. Returns the content if no lease is left. Does nothing for
    /// a share that has ended.
    ///
    /// # Errors
    ///
    /// [`Why::Unknown`] for a wrong token, and nothing has ended.
    pub(crate) fn end(&mut self, number: u64, token: &Token) -> Result<Option<Arc<C>>, Why> {
        let Some(share) = self.shares.get_mut(&number) else { return Ok(None) };
        if share.token != *token {
            return Err(Why::Unknown);
        }
        if let Some(until) = share.until.take() {
            self.ends.remove(&(until, number));
        }
        Ok(self.free(number))
    }

    /// Ends the shares that have expired. Returns the contents that no lease needs now.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Arc<C>> {
        let mut free = Vec::new();
        while let Some((until, number)) = self.ends.first().copied().filter(|(until, _)| *until <= now) {
            self.ends.remove(&(until, number));
            self.shares.get_mut(&number).expect("a share that can be opened is there").until = None;
            free.extend(self.free(number));
        }
        free
    }

    /// Removes a share that has ended and is not leased.
    fn free(&mut self, number: u64) -> Option<Arc<C>> {
        let free = self.shares.get(&number).is_some_and(|share| share.until.is_none() && share.leases == 0);
        let share = free.then(|| self.shares.remove(&number)).flatten()?;
        self.bytes -= share.bytes;
        Some(share.content)
    }

    /// Returns when the next share expires.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.ends.first().map(|(until, _)| *until)
    }

    pub(crate) fn held(&self) -> Held {
        Held { shares: self.shares.len(), leases: self.leases, connections: self.peers.len(), bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const LIMITS: Limits = Limits { connections: 3, shares: 4, leases: 3, bytes: 100 };

    /// A step of a history. Indices choose among what the history has made so far, modulo their number.
    #[derive(Debug, Clone)]
    enum Step {
        Share {
            seconds: u64,
            bytes: usize,
        },
        Join,
        Open {
            peer: usize,
            share: usize,
            forged: bool,
        },
        Return {
            peer: usize,
            lease: usize,
        },
        /// The process of a connection ends, for whatever reason.
        Leave {
            peer: usize,
        },
        Revoke {
            share: usize,
            forged: bool,
        },
        End {
            share: usize,
            forged: bool,
        },
        Wait {
            seconds: u64,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        let (index, seconds) = (0usize..8, 0u64..10);
        prop_oneof![
            3 => (seconds.clone(), 0usize..60).prop_map(|(seconds, bytes)| Step::Share { seconds, bytes }),
            2 => Just(Step::Join),
            6 => (index.clone(), index.clone(), prop::bool::weighted(0.1))
                .prop_map(|(peer, share, forged)| Step::Open { peer, share, forged }),
            4 => (index.clone(), index.clone()).prop_map(|(peer, lease)| Step::Return { peer, lease }),
            1 => index.clone().prop_map(|peer| Step::Leave { peer }),
            1 => (index.clone(), prop::bool::weighted(0.3)).prop_map(|(share, forged)| Step::Revoke { share, forged }),
            1 => (index, prop::bool::weighted(0.3)).prop_map(|(share, forged)| Step::End { share, forged }),
            2 => seconds.prop_map(|seconds| Step::Wait { seconds }),
        ]
    }

    /// What the test knows of a share.
    struct Known {
        number: u64,
        token: Token,
        until: Option<Instant>,
        bytes: usize,
        /// Alive as long as the table, or what it returned, has it.
        content: std::sync::Weak<u64>,
        leases: usize,
    }

    fn pick<T>(items: &[T], index: usize) -> Option<usize> {
        (!items.is_empty()).then(|| index % items.len())
    }

    proptest! {
        /// The content of a share lives exactly until the share has ended and every lease on it is returned, whichever
        /// process ends. A lease is given only for the right token and for a share that has not ended. Limits hold.
        #[test]
        fn a_content_lives_as_long_as_it_must(steps in prop::collection::vec(step(), 1..60)) {
            let mut table = Table::new(LIMITS);
            let mut now = Instant::now();
            let mut shares: Vec<Known> = Vec::new();
            // Connections, with their leases: the number, and the index of the share.
            let mut peers: Vec<(Peer, Vec<(u64, usize)>)> = Vec::new();
            for step in steps {
                match step {
                    Step::Share { seconds, bytes } => {
                        let alive = |share: &&Known| share.until.is_some() || share.leases > 0;
                        let held: usize = shares.iter().filter(alive).map(|share| share.bytes).sum();
                        let room = shares.iter().filter(alive).count() < LIMITS.shares && held + bytes <= LIMITS.bytes;
                        prop_assert_eq!(table.has_capacity(bytes), room);
                        if room {
                            let (token, until) = (Token::random().unwrap(), now + Duration::from_secs(seconds));
                            let number = table.share(0, bytes, token, until);
                            let content = Arc::downgrade(&table.shares[&number].content);
                            shares.push(Known { number, token, until: Some(until), bytes, content, leases: 0 });
                        }
                    }
                    Step::Join => peers.push((table.join(), Vec::new())),
                    Step::Open { peer, share, forged } => {
                        let (Some(peer), Some(index)) = (pick(&peers, peer), pick(&shares, share)) else { continue };
                        let (share, (peer, leases)) = (&mut shares[index], &mut peers[peer]);
                        let token = if forged { Token::random().unwrap() } else { share.token };
                        let may = !forged && share.until.is_some_and(|until| until > now);
                        match table.open(*peer, share.number, &token, now) {
                            Ok((lease, _)) => {
                                prop_assert!(may && leases.len() < LIMITS.leases);
                                share.leases += 1;
                                leases.push((lease, index));
                            }
                            Err(Why::Busy) => prop_assert!(may && leases.len() == LIMITS.leases),
                            Err(why) => prop_assert_eq!((why, may), (Why::Unknown, false)),
                        }
                    }
                    Step::Return { peer, lease } => {
                        let Some(peer) = pick(&peers, peer) else { continue };
                        let (number, leases) = &mut peers[peer];
                        match pick(leases, lease) {
                            Some(lease) => {
                                let (lease, share) = leases.swap_remove(lease);
                                shares[share].leases -= 1;
                                drop(table.give_back(*number, lease).unwrap());
                                prop_assert_eq!(table.give_back(*number, lease).unwrap_err(), Why::Protocol, "twice");
                            }
                            None => prop_assert_eq!(table.give_back(*number, 0).unwrap_err(), Why::Protocol),
                        }
                    }
                    Step::Leave { peer } => {
                        let Some(peer) = pick(&peers, peer) else { continue };
                        let (number, leases) = peers.swap_remove(peer);
                        leases.iter().for_each(|(_, share)| shares[*share].leases -= 1);
                        drop(table.leave(number));
                    }
                    Step::Revoke { share, forged: true } | Step::End { share, forged: true } => {
                        let Some(index) = pick(&shares, share) else { continue };
                        let (share, token) = (&shares[index], Token::random().unwrap());
                        let there = share.until.is_some() || share.leases > 0;
                        prop_assert_eq!(table.revoke(share.number, &token).is_err(), there);
                        prop_assert_eq!(table.end(share.number, &token).is_err(), there);
                    }
                    Step::Revoke { share, forged: false } => {
                        let Some(index) = pick(&shares, share) else { continue };
                        let has = |leases: &[(u64, usize)]| leases.iter().any(|(_, share)| *share == index);
                        let holders = peers.iter().filter(|(_, leases)| has(leases)).map(|(peer, _)| *peer).collect();
                        prop_assert_eq!(table.revoke(shares[index].number, &shares[index].token).unwrap().0, holders);
                        shares[index].until = None;
                    }
                    Step::End { share, forged: false } => {
                        let Some(index) = pick(&shares, share) else { continue };
                        drop(table.end(shares[index].number, &shares[index].token).unwrap());
                        shares[index].until = None;
                    }
                    Step::Wait { seconds } => {
                        now += Duration::from_secs(seconds);
                        drop(table.expire(now));
                        shares.iter_mut().for_each(|share| share.until = share.until.filter(|until| *until > now));
                        prop_assert_eq!(table.next_expiry(), shares.iter().filter_map(|share| share.until).min());
                    }
                }
                for share in &shares {
                    let must = share.until.is_some() || share.leases > 0;
                    prop_assert_eq!(share.content.strong_count(), usize::from(must));
                }
                let alive = shares.iter().filter(|share| share.until.is_some() || share.leases > 0);
                let held = Held {
                    shares: alive.clone().count(),
                    leases: peers.iter().map(|(_, leases)| leases.len()).sum(),
                    connections: peers.len(),
                    bytes: alive.map(|share| share.bytes).sum(),
                };
                prop_assert_eq!(table.held(), held);
            }
        }
    }
}
