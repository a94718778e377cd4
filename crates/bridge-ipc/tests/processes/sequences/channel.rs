//! What a hostile peer says, and how it says it.

use super::super::wire::{Answer, HEADER, numbered};
use super::Random;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::collections::VecDeque;
use std::io::{ErrorKind as Io, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long a send waits for a peer that does not read, and a read for one that is silent.
const WAIT: Duration = Duration::from_millis(1);

/// A connection whose frames wait until they are sent, or something else is done with them.
pub struct Channel {
    socket: UnixStream,
    incoming: Vec<u8>,
    pub waiting: VecDeque<Answer>,
    /// How often of a thousand steps something is done that the protocol forbids.
    mischief: usize,
    /// Whether nothing was.
    pub is_honest: bool,
    /// Frames that were sent whole and in their turn.
    pub sent: usize,
}

impl Channel {
    pub fn new(socket: UnixStream, mischief: usize) -> Self {
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket.set_write_timeout(Some(WAIT)).unwrap();
        Self { socket, incoming: Vec::new(), waiting: VecDeque::new(), mischief, is_honest: true, sent: 0 }
    }

    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    pub fn say(&mut self, number: u64, body: &str, files: Vec<OwnedFd>) {
        self.waiting.push_back(Answer { bytes: numbered(number, body.as_bytes()), files });
    }

    /// Reads for a moment. `None`: the connection has ended.
    pub fn read(&mut self) -> Option<()> {
        let mut bytes = [0; 4096];
        match self.socket.read(&mut bytes) {
            Ok(0) => None,
            Ok(read) => {
                self.incoming.extend(&bytes[..read]);
                Some(())
            }
            Err(error) => matches!(error.kind(), Io::WouldBlock | Io::TimedOut | Io::Interrupted).then_some(()),
        }
    }

    /// Returns the number and the body of the next frame that has come whole.
    pub fn heard(&mut self) -> Option<(u64, String)> {
        let header = self.incoming.first_chunk::<HEADER>()?;
        let len = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
        let number = u64::from_le_bytes(header[8..].try_into().unwrap());
        let body = String::from_utf8(self.incoming.get(HEADER..HEADER + len)?.to_vec()).unwrap();
        self.incoming.drain(..HEADER + len);
        Some((number, body))
    }

    /// Does one thing. `None`: the connection has ended, or is to end.
    pub fn step(&mut self, random: &mut Random) -> Option<()> {
        match random.below(1000) {
            at if at < self.mischief => self.mischief(random),
            at if at < 700 => match self.waiting.pop_front() {
                Some(answer) => {
                    self.sent += 1;
                    self.send(&answer, random)
                }
                None => Some(()),
            },
            at if at < 995 => {
                std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
                Some(())
            }
            // Sometimes longer than the program waits.
            _ => {
                std::thread::sleep(Duration::from_millis(random.below(250) as u64));
                Some(())
            }
        }
    }

    /// Does what the protocol forbids. The numbers of frames stay as they are, or become those of no question: with the
    /// number of another question, an answer would be a good one.
    fn mischief(&mut self, random: &mut Random) -> Option<()> {
        self.is_honest = false;
        let mut front = self.waiting.pop_front();
        match (random.below(9), &mut front) {
            (0, _) => return None,
            // It is dropped.
            (1, _) => front = None,
            (2, Some(answer)) => {
                let twice = Answer { bytes: answer.bytes.clone(), files: copies(&answer.files) };
                self.waiting.push_front(twice);
            }
            (3, Some(_)) if !self.waiting.is_empty() => {
                let other = self.waiting.remove(random.below(self.waiting.len()));
                self.waiting.extend(front.take());
                front = other;
            }
            (4, Some(answer)) => {
                for _ in 0..1 + random.below(3) {
                    let places = answer.bytes.len() - 8;
                    let at = random.below(places);
                    answer.bytes[if at < 8 { at } else { at + 8 }] ^= 1 << random.below(8);
                }
            }
            (5, Some(answer)) => answer.bytes.truncate(random.below(answer.bytes.len())),
            (6, Some(answer)) => {
                let number = [0, u64::MAX, 1 << 40][random.below(3)];
                answer.bytes[8..HEADER].copy_from_slice(&u64::to_le_bytes(number));
            }
            (7, Some(answer)) => {
                answer.files.pop();
            }
            _ => {
                let bytes = (0..1 + random.below(100)).map(|_| random.bits() as u8).collect();
                self.waiting.extend(front.take());
                front = Some(Answer { bytes, files: Vec::new() });
            }
        }
        front.map_or(Some(()), |answer| self.send(&answer, random))
    }

    /// Sends a frame, sometimes in pieces. `None`: the peer reads nothing, or has ended the connection.
    fn send(&self, answer: &Answer, random: &mut Random) -> Option<()> {
        let (mut at, mut tries) = (0, 0);
        while at < answer.bytes.len() {
            let end = match random.below(8) {
                0 => (at + 1 + random.below(40)).min(answer.bytes.len()),
                _ => answer.bytes.len(),
            };
            let files: Vec<_> = answer.files.iter().filter(|_| at == 0).map(|file| file.as_fd()).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)));
            match sendmsg(&self.socket, &[IoSlice::new(&answer.bytes[at..end])], &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => at += sent,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) if tries < 1000 => tries += 1,
                Err(_) => return None,
            }
        }
        Some(())
    }
}

fn copies(files: &[OwnedFd]) -> Vec<OwnedFd> {
    files.iter().map(|file| file.try_clone().unwrap()).collect()
}
