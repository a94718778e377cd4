//! What the exporter's thread answers.

use super::Desk;
use crate::device::{self, Role};
use crate::server::{Enclosed, Letter, Peer, Service};
use crate::sync::{locked, now};
use crate::wire::{Answer, Content, Request, UNASKED, Why, frame};
use std::sync::Arc;
use std::time::Instant;

impl Service for Arc<Desk> {
    type Request = Request;

    fn join(&mut self) -> Peer {
        self.book().join()
    }

    fn is_question(request: &Request) -> bool {
        matches!(request, Request::Open { .. })
    }

    fn keeps(&self, peer: Peer) -> bool {
        self.book().holds(peer, |_| true)
    }

    fn answer(&mut self, peer: Peer, number: u64, request: Request, out: &mut Vec<Letter>) -> Result<(), Why> {
        match request {
            Request::Open { share, token } => {
                let opened = self.book().open(peer, share, &token, now());
                let (answer, enclosed) = match opened {
                    Ok((lease, kept)) => match device::points_after(kept.awaited(), Role::Lends) {
                        Ok(points) => {
                            let content = Content { points, ..kept.content.clone() };
                            (Answer::Opened { lease, content }, Some(kept as Arc<dyn Enclosed>))
                        }
                        Err(_) => {
                            drop(self.book().give_back(peer, lease)?);
                            (Answer::Refused { why: Why::Failed }, None)
                        }
                    },
                    Err(why) => (Answer::Refused { why }, None),
                };
                out.push(Letter { enclosed, ..Letter::answer(peer, number, &answer) });
            }
            Request::Return { lease, points } => {
                // Without the wait the memory could be reused too early: the lease is kept until that process ends.
                device::wait_for(&points, Role::Lends).map_err(|_| Why::Protocol)?;
                let free = self.book().give_back(peer, lease)?;
                drop(free);
            }
        }
        Ok(())
    }

    /// Work on a device goes on when a connection is closed; memory of the host is a file, which each side keeps.
    fn holds(&self, peer: Peer) -> bool {
        self.book().holds(peer, |kept| !kept.streams.is_empty())
    }

    fn leave(&mut self, peer: Peer, _: &mut Vec<Letter>) {
        let free = self.book().leave(peer);
        drop(free);
    }

    /// Ends shares that have expired, and notifies the processes that have a revoked one open.
    fn turn(&mut self, out: &mut Vec<Letter>) {
        let free = self.book().expire(now());
        drop(free);
        let notices = std::mem::take(&mut *locked(&self.notices));
        let letter = |(to, share)| Letter::notice(to, &Answer::Revoked { share });
        out.extend(notices.into_iter().map(letter));
    }

    fn deadline(&self) -> Option<Instant> {
        self.book().next_expiry()
    }

    fn refusal(why: Why) -> Vec<u8> {
        frame(UNASKED, &Answer::Refused { why })
    }
}
