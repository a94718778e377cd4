//! The thread behind a socket: connections, and what they are answered.

use crate::exporter::Kept;
use crate::socket::{self, OtherEnd};
use crate::wire::{Frames, MAX_REQUEST, Why};
use bridge_core::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind as Io, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most bytes that are read of one connection before the others have their turn.
const TURN: usize = 4096;

/// The most bytes that wait for a process that does not read.
const MOST_UNREAD: usize = 64 << 20;

/// The most connections that are accepted before the open ones have their turn.
const CALLERS: usize = 64;

/// Time until connections are accepted again after the system has refused one.
const PAUSE: Duration = Duration::from_millis(50);

/// A connection.
pub(crate) type Peer = u64;

/// What a socket is for: a state that requests change. It is used on the thread of the socket alone.
pub(crate) trait Service: Send + 'static {
    /// What processes ask for.
    type Request: DeserializeOwned;

    /// Enters a connection, if another is allowed.
    fn join(&mut self) -> Result<Peer, Why>;

    /// Does what a connection asks for. An error is said to it, and ends it.
    fn answer(&mut self, peer: Peer, request: Self::Request, out: &mut Vec<Letter>) -> Result<(), Why>;

    /// Returns whether a connection holds what its process may still use after it has closed it.
    fn holds(&self, peer: Peer) -> bool;

    /// Forgets a connection that has ended.
    fn leave(&mut self, peer: Peer, out: &mut Vec<Letter>);

    /// Does what is due, after the thread was woken, and at least at [`deadline`](Self::deadline).
    fn turn(&mut self, out: &mut Vec<Letter>);

    /// Returns when something is due.
    fn deadline(&self) -> Option<Instant>;

    /// Returns the frame that says why a connection is refused.
    fn refusal(why: Why) -> Vec<u8>;
}

/// A frame for a connection.
pub(crate) struct Letter {
    pub(crate) to: Peer,
    pub(crate) bytes: Vec<u8>,
    /// The content whose descriptors go with the first byte.
    pub(crate) kept: Option<Arc<Kept>>,
}

/// What wakes and stops the thread of a socket.
pub(crate) struct Bell {
    event: OwnedFd,
    stopped: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.map_err(crate::memory::failed("no eventfd"))?;
        Ok(Arc::new(Self { event, stopped: AtomicBool::new(false) }))
    }

    /// Makes the thread look at what has changed.
    pub(crate) fn ring(&self) {
        // The counter of an eventfd overflows after 2^64 calls that are not read.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// A thread that answers at a socket. The drop ends it.
pub(crate) struct Serving {
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Serving {
    /// Starts the thread. `users` may connect beside the user of this process.
    pub(crate) fn start<S: Service>(
        listener: UnixListener,
        service: S,
        users: Vec<u32>,
        bell: Arc<Bell>,
    ) -> Result<Self> {
        let server = Server {
            listener,
            service,
            users,
            bell: Arc::clone(&bell),
            served: BTreeMap::new(),
            ending: BTreeMap::new(),
            paused: None,
        };
        let thread = std::thread::Builder::new().name("tensor-bridge-ipc".into()).spawn(move || server.run());
        let thread = thread.map_err(|error| {
            let text = "no thread for the socket: raise the limit of processes (ulimit -u)";
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })?;
        Ok(Self { bell, thread: Some(thread), process: std::process::id() })
    }

    /// Returns whether this process was forked from the one that the thread runs in.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.process != std::process::id()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if !self.is_elsewhere() {
            self.bell.stopped.store(true, Relaxed);
            self.bell.ring();
            self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

/// A process at the other end of a connection.
struct Served {
    socket: UnixStream,
    /// Becomes readable when the process ends, whose forks may keep the socket open.
    process: Option<OwnedFd>,
    frames: Frames,
    out: VecDeque<Out>,
}

/// A letter on its way, and how many bytes of it were sent.
struct Out {
    letter: Letter,
    sent: usize,
}

struct Server<S> {
    listener: UnixListener,
    service: S,
    users: Vec<u32>,
    bell: Arc<Bell>,
    served: BTreeMap<Peer, Served>,
    /// Connections that were closed, and whose processes have not ended yet: work of theirs may still use what they
    /// hold.
    ending: BTreeMap<Peer, OwnedFd>,
    /// When connections are accepted again.
    paused: Option<Instant>,
}

impl<S: Service> Server<S> {
    fn run(mut self) {
        let mut letters = Vec::new();
        while !self.bell.stopped.load(Relaxed) {
            let (woken, called, ready) = self.wait();
            if woken {
                let mut counter = [0; 8];
                let _ = rustix::io::read(&self.bell.event, &mut counter);
            }
            if called {
                self.accept();
            }
            for (peer, ended) in ready {
                if ended || self.attend(peer, &mut letters).is_none() {
                    self.end(peer, ended, &mut letters);
                }
            }
            self.service.turn(&mut letters);
            self.deliver(&mut letters);
        }
    }

    /// Ends a connection. What its process holds is kept until the process has ended, as far as that can be seen.
    fn end(&mut self, peer: Peer, ended: bool, letters: &mut Vec<Letter>) {
        let waiting = self.ending.remove(&peer).is_some();
        let process = self.served.remove(&peer).map(|served| served.process);
        match process {
            Some(Some(process)) if !ended && self.service.holds(peer) => drop(self.ending.insert(peer, process)),
            None if !waiting => (),
            _ => self.service.leave(peer, letters),
        }
    }

    /// Sends letters, as far as the sockets take them now.
    fn deliver(&mut self, letters: &mut Vec<Letter>) {
        while !letters.is_empty() {
            let mut lost = Vec::new();
            for letter in letters.drain(..) {
                let peer = letter.to;
                let Some(served) = self.served.get_mut(&peer) else { continue };
                served.out.push_back(Out { letter, sent: 0 });
                if served.flush().is_none() {
                    lost.push(peer);
                }
            }
            lost.into_iter().for_each(|peer| self.end(peer, false, letters));
        }
    }

    /// Waits until something is to be done. Returns whether the thread was woken, whether a process calls, and the
    /// connections that are ready, with whether their process has ended.
    fn wait(&mut self) -> (bool, bool, Vec<(Peer, bool)>) {
        let now = Instant::now();
        self.paused = self.paused.filter(|until| *until > now);
        let until = self.service.deadline().into_iter().chain(self.paused).min();
        let timeout = until.map(|until| until.saturating_duration_since(now));
        let timeout = timeout.map(|time| Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let mut asked = vec![PollFd::new(&self.bell.event, PollFlags::IN)];
        // Without events a descriptor is only reported when it is broken.
        let calls = if self.paused.is_some() { PollFlags::empty() } else { PollFlags::IN };
        asked.push(PollFd::new(&self.listener, calls));
        let mut peers = Vec::with_capacity(2 * self.served.len());
        for (peer, served) in &self.served {
            let more = if served.out.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            asked.push(PollFd::new(&served.socket, PollFlags::IN | more));
            peers.push((*peer, false));
            if let Some(process) = &served.process {
                asked.push(PollFd::new(process, PollFlags::IN));
                peers.push((*peer, true));
            }
        }
        for (peer, process) in &self.ending {
            asked.push(PollFd::new(process, PollFlags::IN));
            peers.push((*peer, true));
        }
        if poll(&mut asked, timeout.as_ref()).is_err() {
            return (true, false, Vec::new());
        }
        let mut raised = asked.iter().map(|fd| !fd.revents().is_empty());
        let (woken, called) = (raised.next() == Some(true), raised.next() == Some(true));
        let ready = peers.into_iter().zip(raised).filter(|(_, raised)| *raised).map(|(peer, _)| peer).collect();
        (woken, called, ready)
    }

    /// Accepts connections, and checks who calls.
    fn accept(&mut self) {
        for _ in 0..CALLERS {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if matches!(error.kind(), Io::Interrupted | Io::ConnectionAborted) => continue,
                Err(error) => {
                    self.paused = (error.kind() != Io::WouldBlock).then(|| Instant::now() + PAUSE);
                    return;
                }
            };
            if let Err((socket, why)) = self.admit(socket) {
                // A socket that was just opened has room for a short answer.
                let _ = socket::send(&socket, &S::refusal(why), &[]);
            }
        }
    }

    fn admit(&mut self, socket: UnixStream) -> Result<(), (UnixStream, Why)> {
        let Ok(OtherEnd { user, process, .. }) = socket::other_end(&socket) else { return Err((socket, Why::Denied)) };
        if user != geteuid().as_raw() && !self.users.contains(&user) {
            return Err((socket, Why::Denied));
        }
        if socket.set_nonblocking(true).is_err() {
            return Err((socket, Why::Busy));
        }
        let peer = match self.service.join() {
            Ok(peer) => peer,
            Err(why) => return Err((socket, why)),
        };
        let frames = Frames::new(MAX_REQUEST);
        let served = Served { socket, process, frames, out: VecDeque::new() };
        self.served.insert(peer, served);
        Ok(())
    }

    /// Reads what a process has sent, and does it. `None`: the connection has ended, or breaks the protocol.
    fn attend(&mut self, peer: Peer, letters: &mut Vec<Letter>) -> Option<()> {
        let Some(served) = self.served.get_mut(&peer) else { return Some(()) };
        let mut bytes = [0; TURN];
        match served.socket.read(&mut bytes) {
            Ok(0) => return None,
            Ok(read) => served.frames.add(&bytes[..read]),
            Err(error) if matches!(error.kind(), Io::WouldBlock | Io::Interrupted) => (),
            Err(_) => return None,
        }
        loop {
            let done = match served.frames.next() {
                Ok(None) => return served.flush(),
                Ok(Some(request)) => self.service.answer(peer, request, letters),
                Err(why) => Err(why),
            };
            if let Err(why) = done {
                let letter = Letter { to: peer, bytes: S::refusal(why), kept: None };
                served.out.push_back(Out { letter, sent: 0 });
                let _ = served.flush();
                return None;
            }
        }
    }
}

impl Served {
    /// Sends what the socket takes now. `None`: its process does not read.
    fn flush(&mut self) -> Option<()> {
        while let Some(Out { letter, sent }) = self.out.front_mut() {
            let files: Vec<_> = match &letter.kept {
                Some(kept) if *sent == 0 => kept.files.iter().map(|file| file.as_fd()).collect(),
                _ => Vec::new(),
            };
            match socket::send(&self.socket, &letter.bytes[*sent..], &files) {
                Ok(more) => *sent += more,
                Err(error) if error.kind() == Io::WouldBlock => break,
                // The process has closed the connection. What it said before is still to be read: perhaps it has given
                // back its last lease.
                Err(_) => {
                    self.out.clear();
                    return Some(());
                }
            }
            if *sent == letter.bytes.len() {
                self.out.pop_front();
            }
        }
        let waiting: usize = self.out.iter().map(|out| out.letter.bytes.len() - out.sent).sum();
        (waiting <= MOST_UNREAD).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ticket::Token;
    use crate::wire::{Request, frame};
    use std::io::Write;

    /// Counts what is asked.
    #[derive(Default)]
    struct Counts {
        asked: usize,
        left: usize,
    }

    impl Service for Counts {
        type Request = Request;

        fn join(&mut self) -> Result<Peer, Why> {
            Ok(1)
        }

        fn answer(&mut self, _: Peer, _: Request, _: &mut Vec<Letter>) -> Result<(), Why> {
            self.asked += 1;
            Ok(())
        }

        fn holds(&self, _: Peer) -> bool {
            self.asked == 0
        }

        fn leave(&mut self, _: Peer, _: &mut Vec<Letter>) {
            self.left += 1;
        }

        fn turn(&mut self, _: &mut Vec<Letter>) {}

        fn deadline(&self) -> Option<Instant> {
            None
        }

        fn refusal(_: Why) -> Vec<u8> {
            Vec::new()
        }
    }

    #[test]
    fn what_was_said_before_a_connection_was_closed_is_heard_although_nothing_can_be_sent() {
        let folder = std::env::temp_dir().join(format!("tensor-bridge-server-{}", std::process::id()));
        let listener = UnixListener::bind(&folder).unwrap();
        std::fs::remove_file(&folder).unwrap();
        let mut server = Server {
            listener,
            service: Counts::default(),
            users: Vec::new(),
            bell: Bell::new().unwrap(),
            served: BTreeMap::new(),
            ending: BTreeMap::new(),
            paused: None,
        };
        let (socket, mut other) = UnixStream::pair().unwrap();
        let OtherEnd { process, .. } = socket::other_end(&socket).unwrap();
        server.served.insert(1, Served { socket, process, frames: Frames::new(MAX_REQUEST), out: VecDeque::new() });
        other.write_all(&frame(&Request::Open { share: 1, token: Token::random().unwrap() })).unwrap();
        drop(other);
        let mut letters = vec![Letter { to: 1, bytes: vec![0], kept: None }];
        server.deliver(&mut letters);
        while !server.served.is_empty() {
            if server.attend(1, &mut letters).is_none() {
                server.end(1, false, &mut letters);
            }
        }
        assert_eq!((server.service.asked, server.service.left, server.ending.len()), (1, 1, 0));
    }
}
