//! One connection of a socket's thread: what its process has sent, and what waits for it.

use super::{Letter, TURN};
use crate::socket;
use crate::sync::now;
use crate::wire::{FILES_AT_ONCE, Frames, MAX_REQUEST};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Pid, geteuid};
use std::collections::VecDeque;
use std::io::{ErrorKind as Io, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

/// A process at the other end of a connection.
pub(super) struct Served<R> {
    pub(super) socket: UnixStream,
    pub(super) caller: Caller,
    /// Becomes readable when the process ends, whose forks may keep the socket open.
    pub(super) process: Option<Arc<OwnedFd>>,
    pub(super) frames: Frames,
    /// A question, with its number, that is answered once the process has read what waits for it. Until then no more is
    /// read from it.
    pub(super) question: Option<(u64, R)>,
    out: VecDeque<Out>,
    /// When it last sent something.
    pub(super) heard: Instant,
}

/// The caller: its user, and the number of its process, if this one can see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) user: u32,
    pub(super) process: Option<Pid>,
}

impl Caller {
    /// Returns whether two callers are the same process, or the same user other than that of this process. All
    /// processes that this one cannot see count as one.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.process == other.process || (self.user == other.user && self.user != geteuid().as_raw())
    }
}

/// A letter that is being sent, and how many bytes of it were sent.
struct Out {
    letter: Letter,
    sent: usize,
}

impl<R> Served<R> {
    pub(super) fn new(socket: UnixStream, caller: Caller, process: Option<Arc<OwnedFd>>) -> Self {
        let (frames, out, heard) = (Frames::new(MAX_REQUEST), VecDeque::new(), now());
        Self { socket, caller, process, frames, question: None, out, heard }
    }

    /// Sends a letter after those that wait. `None`: the system cannot send it.
    pub(super) fn post(&mut self, letter: Letter) -> Option<()> {
        let waits = self.lags();
        self.out.push_back(Out { letter, sent: 0 });
        if waits { Some(()) } else { self.flush() }
    }

    /// Returns whether something waits for the process to read.
    pub(super) fn lags(&self) -> bool {
        !self.out.is_empty()
    }

    /// Reads once what the process has sent. `None`: it has closed the connection.
    pub(super) fn read(&mut self) -> Option<()> {
        let mut bytes = [0; TURN];
        match self.socket.read(&mut bytes) {
            Ok(0) => None,
            Ok(read) => {
                self.frames.add(&bytes[..read]);
                Some(())
            }
            Err(error) => matches!(error.kind(), Io::WouldBlock | Io::Interrupted).then_some(()),
        }
    }

    /// Returns how many bytes wait for the process to read.
    pub(super) fn unread(&self) -> usize {
        self.out.iter().map(|out| out.letter.bytes.len() - out.sent).sum()
    }

    /// Sends what the socket accepts now. `None`: the system cannot send it.
    pub(super) fn flush(&mut self) -> Option<()> {
        while let Some(Out { letter, sent }) = self.out.front_mut() {
            // The first bytes come with as many descriptors each as can be sent at once, the last of these with the rest.
            let mut groups = letter.files.chunks(FILES_AT_ONCE).skip(*sent);
            let files: Vec<_> = groups.next().into_iter().flatten().map(|file| file.as_fd()).collect();
            let end = if groups.next().is_some() { *sent + 1 } else { letter.bytes.len() };
            match socket::send(&self.socket, &letter.bytes[*sent..end], &files) {
                Ok(more) => *sent += more,
                Err(error) if error.kind() == Io::WouldBlock => break,
                // The process has closed the connection. What it sent before is still to be read: it may have returned
                // its last lease.
                Err(error) if matches!(error.kind(), Io::BrokenPipe | Io::ConnectionReset) => {
                    self.out.clear();
                    break;
                }
                // If an answer were left out, the next one would be taken for it.
                Err(_) => return None,
            }
            if *sent == letter.bytes.len() {
                self.out.pop_front();
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of them come, and each before the last byte.
    #[test]
    fn many_descriptors_are_sent_with_the_first_bytes() {
        let (socket, other) = UnixStream::pair().unwrap();
        let file = Arc::new(OwnedFd::from(other.try_clone().unwrap()));
        let caller = Caller { user: 0, process: None };
        let mut served = Served::<()>::new(socket, caller, None);
        let files = vec![file; 2 * FILES_AT_ONCE + 1];
        served.post(Letter { to: 1, bytes: vec![7; 5], files }).unwrap();
        let mut bytes = [0; 5];
        for (length, count) in [(1, FILES_AT_ONCE), (1, FILES_AT_ONCE), (3, 1)] {
            let (received, files) = socket::receive(&other, &mut bytes[..length]).unwrap();
            assert_eq!((received, files.flatten().unwrap().len()), (length, count));
        }
        assert!(!served.lags());
    }

    #[test]
    fn callers_are_alike_by_process_or_as_one_other_user() {
        let own = geteuid().as_raw();
        let caller = |user: u32, process: i32| Caller { user: own + user, process: Pid::from_raw(process) };
        for (one, other, alike) in [
            (caller(0, 1), caller(0, 1), true),
            (caller(0, 1), caller(0, 2), false),
            (caller(1, 1), caller(1, 2), true),
            (caller(1, 1), caller(2, 2), false),
            (caller(0, 0), caller(1, 0), true),
        ] {
            assert_eq!((one.is_like(&other), other.is_like(&one)), (alike, alike), "{one:?} {other:?}");
        }
    }
}
