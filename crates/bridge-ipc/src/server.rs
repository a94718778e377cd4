//! The thread of a socket: connections, and the answers to their questions.

mod served;
mod waker;

pub(crate) use waker::Waker;

use crate::socket::{self, Descriptor, OtherEnd};
use crate::sync::{self, now, thread};
use crate::wire::{UNASKED, Why, frame};
use bridge_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::process::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use served::{Caller, Served};
use std::collections::BTreeMap;
use std::io::ErrorKind as Io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use waker::Attention;

/// The most bytes that are read from one connection before the others have their turn.
const TURN: usize = 4096;

/// The most bytes that wait for all processes together while these do not read.
const MOST_UNREAD: usize = 64 << 20;

/// Silence after which a connection that holds nothing makes room for another.
const SILENCE: Duration = Duration::from_secs(5);

/// The most connections that are accepted before the open ones have their turn.
const CALLERS: usize = 64;

/// Time until connections are accepted again after the system has refused one.
const PAUSE: Duration = Duration::from_millis(50);

/// A connection.
pub(crate) type Peer = u64;

/// The purpose of a socket: a state that requests change. It is used only on the thread of the socket.
pub(crate) trait Service: Send + 'static {
    /// The requests of processes.
    type Request: DeserializeOwned + Send;

    /// Enters a connection, from this process if this one can see it.
    fn join(&mut self, process: Option<&Arc<OwnedFd>>) -> Peer;

    /// Returns whether a request has an answer.
    fn is_question(request: &Self::Request) -> bool;

    /// Handles the request of a connection. An error is sent to the connection, and ends it. `number` is that of the
    /// question, and is sent with its answer.
    fn answer(&mut self, peer: Peer, number: u64, request: Self::Request, out: &mut Vec<Letter>) -> Result<(), Why>;

    /// Returns whether a connection has state that would be lost with it.
    fn keeps(&self, peer: Peer) -> bool;

    /// Returns whether a connection holds memory that its process may still use after it has closed the connection.
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
    /// The descriptors that are sent with the first byte.
    pub(crate) files: Vec<Arc<OwnedFd>>,
}

impl Letter {
    /// Returns the answer to the question of this number.
    pub(crate) fn answer(to: Peer, number: u64, message: &impl Serialize) -> Self {
        Self { to, bytes: frame(number, message), files: Vec::new() }
    }

    /// Returns a notice.
    pub(crate) fn notice(to: Peer, message: &impl Serialize) -> Self {
        Self::answer(to, UNASKED, message)
    }
}

/// A thread that answers at a socket. The drop ends it.
pub(crate) struct Serving {
    waker: Arc<Waker>,
    thread: Option<thread::JoinHandle<()>>,
    process: u32,
}

impl Serving {
    /// Starts the thread. `users` may connect as well as the user of this process, and this many connections are
    /// allowed.
    pub(crate) fn start<S: Service>(
        listener: UnixListener,
        service: S,
        users: Vec<u32>,
        connections: usize,
        waker: Arc<Waker>,
    ) -> Result<Self> {
        let server = Server::new(listener, service, users, connections, Arc::clone(&waker));
        let thread = thread::Builder::new().name("truebridge-ipc".into()).spawn(move || server.run());
        let thread = thread.map_err(|error| {
            let text = "cannot start a thread for the socket: raise the limit of processes (ulimit -u)";
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })?;
        Ok(Self { waker, thread: Some(thread), process: sync::process() })
    }

    /// Returns whether this process was forked from the one that the thread runs in.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.process != sync::process()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if !self.is_elsewhere() {
            self.waker.stopped.store(true, Relaxed);
            self.waker.ring();
            self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

struct Server<S: Service> {
    listener: UnixListener,
    descriptor: Descriptor,
    service: S,
    users: Vec<u32>,
    /// The most connections.
    connections: usize,
    waker: Arc<Waker>,
    attention: Attention,
    served: BTreeMap<Peer, Served<S::Request>>,
    /// Connections that were closed before their processes ended: work of these may still use what they hold.
    ending: BTreeMap<Peer, Arc<OwnedFd>>,
    /// When connections are accepted again.
    paused: Option<Instant>,
}

impl<S: Service> Server<S> {
    fn new(listener: UnixListener, service: S, users: Vec<u32>, connections: usize, waker: Arc<Waker>) -> Self {
        let (descriptor, attention) = (Descriptor::of(&listener), Attention::new(Arc::clone(&waker)));
        let (served, ending) = (BTreeMap::new(), BTreeMap::new());
        Self { listener, descriptor, service, users, connections, waker, attention, served, ending, paused: None }
    }

    fn run(mut self) {
        let mut letters = Vec::new();
        while !self.waker.stopped.load(Relaxed) {
            let (woken, called, ready) = self.wait();
            if !self.descriptor.is_open() {
                // The program has closed all descriptors. Their numbers may be those of other files now, which the rest
                // of this function, or the drop, would read, write and close.
                return std::mem::forget(self);
            }
            if woken {
                let mut counter = [0; 8];
                let _ = rustix::io::read(&self.waker.event, &mut counter);
            }
            if called {
                self.accept(&mut letters);
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

    /// Ends a connection. What its process holds is kept until the process has ended, if this process can see that.
    fn end(&mut self, peer: Peer, ended: bool, letters: &mut Vec<Letter>) {
        let waiting = self.ending.remove(&peer).is_some();
        let process = self.served.remove(&peer).map(|served| served.process);
        match process {
            Some(Some(process)) if !ended && self.service.holds(peer) => drop(self.ending.insert(peer, process)),
            None if !waiting => (),
            _ => self.service.leave(peer, letters),
        }
    }

    /// Sends as much of the letters as the sockets accept now. If too many bytes wait in all, ends the connection with
    /// the most of them.
    fn deliver(&mut self, letters: &mut Vec<Letter>) {
        while !letters.is_empty() {
            let mut lost = Vec::new();
            for letter in letters.drain(..) {
                let peer = letter.to;
                let Some(served) = self.served.get_mut(&peer) else { continue };
                if served.post(letter).is_none() {
                    lost.push(peer);
                }
            }
            let mut unread: Vec<_> = self.served.iter().map(|(peer, served)| (served.unread(), *peer)).collect();
            let mut total: usize = unread.iter().map(|(bytes, _)| bytes).sum();
            if total > MOST_UNREAD {
                unread.sort_unstable();
            }
            while total > MOST_UNREAD {
                let Some((bytes, peer)) = unread.pop() else { break };
                total -= bytes;
                lost.push(peer);
            }
            lost.into_iter().for_each(|peer| self.end(peer, false, letters));
        }
    }

    /// Waits until there is something to do. Returns whether the thread was woken, whether a process connects, and the
    /// connections that are ready, with whether their process has ended.
    fn wait(&mut self) -> (bool, bool, Vec<(Peer, bool)>) {
        let now = now();
        self.paused = self.paused.filter(|until| *until > now);
        let until = self.service.deadline().into_iter().chain(self.paused).min();
        let timeout = until.map(|until| until.saturating_duration_since(now));
        let mut asked = vec![PollFd::new(&self.waker.event, PollFlags::IN)];
        // Without events a descriptor is reported only when it is broken.
        let calls = if self.paused.is_some() { PollFlags::empty() } else { PollFlags::IN };
        asked.push(PollFd::new(&self.listener, calls));
        let mut peers = Vec::with_capacity(2 * self.served.len());
        for (peer, served) in &self.served {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, served.question.is_none());
            events.set(PollFlags::OUT, served.lags());
            asked.push(PollFd::new(&served.socket, events));
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
        if self.attention.wait(&mut asked, timeout).is_err() {
            return (true, false, Vec::new());
        }
        let mut raised = asked.iter().map(|fd| !fd.revents().is_empty());
        let (woken, called) = (raised.next() == Some(true), raised.next() == Some(true));
        let ready = peers.into_iter().zip(raised).filter(|(_, raised)| *raised).map(|(peer, _)| peer).collect();
        (woken, called, ready)
    }

    /// Accepts connections, and checks the callers.
    fn accept(&mut self, letters: &mut Vec<Letter>) {
        for _ in 0..CALLERS {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if matches!(error.kind(), Io::Interrupted | Io::ConnectionAborted) => continue,
                Err(error) => {
                    self.paused = (error.kind() != Io::WouldBlock).then(|| now() + PAUSE);
                    return;
                }
            };
            if let Err((socket, why)) = self.admit(socket, letters) {
                refuse::<S>(&socket, why);
            }
        }
    }

    fn admit(&mut self, socket: UnixStream, letters: &mut Vec<Letter>) -> Result<(), (UnixStream, Why)> {
        let Ok(OtherEnd { user, number, process, .. }) = socket::other_end(&socket) else {
            return Err((socket, Why::Denied));
        };
        if user != geteuid().as_raw() && !self.users.contains(&user) {
            return Err((socket, Why::Denied));
        }
        let caller = Caller { user, process: number };
        if socket.set_nonblocking(true).is_err() || !self.has_capacity(caller, letters) {
            return Err((socket, Why::Busy));
        }
        let process = process.map(Arc::new);
        self.served.insert(self.service.join(process.as_ref()), Served::new(socket, caller, process));
        Ok(())
    }

    /// Returns whether another connection is allowed. One process, and one other user, has half of them at most. If
    /// there is no room, a connection that holds nothing and has been silent for long is ended instead.
    fn has_capacity(&mut self, caller: Caller, letters: &mut Vec<Letter>) -> bool {
        let alike = self.served.values().filter(|served| served.caller.is_like(&caller)).count();
        let own = alike >= self.connections.div_ceil(2);
        if !own && self.served.len() + self.ending.len() < self.connections {
            return true;
        }
        let (service, now) = (&self.service, now());
        let idle = self.served.iter().filter(|(peer, served)| {
            (!own || served.caller.is_like(&caller)) && now >= served.heard + SILENCE && !service.keeps(**peer)
        });
        let Some(peer) = idle.min_by_key(|(_, served)| served.heard).map(|(peer, _)| *peer) else { return false };
        refuse::<S>(&self.served[&peer].socket, Why::Busy);
        self.end(peer, false, letters);
        true
    }

    /// Handles the requests that a process has sent, and reads more. `None`: the connection has ended, or breaks the
    /// protocol.
    fn attend(&mut self, peer: Peer, letters: &mut Vec<Letter>) -> Option<()> {
        let mut has_read = false;
        if let Some(served) = self.served.get_mut(&peer) {
            served.flush()?;
        }
        loop {
            // It may have been ended for another one, or because too many bytes wait for it.
            let Some(served) = self.served.get_mut(&peer) else { return Some(()) };
            let request = served.question.take().map_or_else(|| served.frames.next(), |question| Ok(Some(question)));
            let done = match request {
                Ok(None) if has_read => return Some(()),
                Ok(None) => {
                    has_read = true;
                    served.read()?;
                    continue;
                }
                // A request has a number exactly if it has an answer.
                Ok(Some((number, request))) if S::is_question(&request) != (number != UNASKED) => Err(Why::Protocol),
                Ok(Some((number, question))) if number != UNASKED && served.lags() => {
                    served.question = Some((number, question));
                    return Some(());
                }
                Ok(Some((number, request))) => {
                    served.heard = now();
                    if number != UNASKED {
                        self.attention.asked();
                    }
                    self.service.answer(peer, number, request, letters)
                }
                Err(why) => Err(why),
            };
            if let Err(why) = done {
                let _ = served.post(Letter { to: peer, bytes: S::refusal(why), files: Vec::new() });
                return None;
            }
            self.deliver(letters);
        }
    }
}

/// Tells a process why it is refused. A socket that has sent nothing has room for a short answer.
fn refuse<S: Service>(socket: &UnixStream, why: Why) {
    let _ = socket::send(socket, &S::refusal(why), &[]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ticket::Token;
    use crate::wire::{Request, frame};
    use std::io::{Read, Write};
    use std::sync::atomic::AtomicUsize;

    /// Counts the requests, and answers questions with `answer` bytes.
    #[derive(Default)]
    struct Counts {
        asked: usize,
        left: usize,
        answer: usize,
        joined: Peer,
        keeps: bool,
    }

    impl Service for Counts {
        type Request = Request;

        fn join(&mut self, _: Option<&Arc<OwnedFd>>) -> Peer {
            self.joined += 1;
            self.joined
        }

        fn is_question(request: &Request) -> bool {
            matches!(request, Request::Open { .. })
        }

        fn answer(&mut self, to: Peer, _: u64, request: Request, out: &mut Vec<Letter>) -> Result<(), Why> {
            self.asked += 1;
            if Self::is_question(&request) {
                out.push(Letter { to, bytes: vec![0; self.answer], files: Vec::new() });
            }
            Ok(())
        }

        fn keeps(&self, _: Peer) -> bool {
            self.keeps
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
            vec![1]
        }
    }

    fn server(connections: usize, answer: usize) -> Server<Counts> {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let name = format!("truebridge-server-{}-{}", sync::process(), LAST.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let service = Counts { answer, ..Counts::default() };
        Server::new(listener, service, Vec::new(), connections, Waker::new().unwrap())
    }

    impl Server<Counts> {
        fn joined(&mut self) -> (Peer, UnixStream) {
            let (socket, other) = UnixStream::pair().unwrap();
            self.admit(socket, &mut Vec::new()).map_err(|(_, why)| why).unwrap();
            other.set_nonblocking(true).unwrap();
            (self.service.joined, other)
        }

        /// Does what is due for a connection, as the thread does.
        fn serve(&mut self, peer: Peer) {
            let mut letters = Vec::new();
            if self.attend(peer, &mut letters).is_none() {
                self.end(peer, false, &mut letters);
            }
            self.deliver(&mut letters);
        }
    }

    fn question() -> Vec<u8> {
        frame(1, &Request::Open { share: 1, token: Token::random().unwrap(), persistent: false })
    }

    #[test]
    fn what_was_said_before_a_connection_was_closed_is_heard_although_nothing_can_be_sent() {
        let mut server = server(4, 1);
        let (peer, mut other) = server.joined();
        other.write_all(&question()).unwrap();
        drop(other);
        server.deliver(&mut vec![Letter::notice(peer, &0)]);
        while !server.served.is_empty() {
            server.serve(peer);
        }
        assert_eq!((server.service.asked, server.service.left, server.ending.len()), (1, 1, 0));
    }

    /// Questions are sent without end, and no answer is read: one answer waits, and no other question is taken. Then
    /// all are read, and each question has its answer.
    #[test]
    fn a_process_that_does_not_read_is_not_read_either() {
        let (answer, questions) = (100_000, 400);
        let mut server = server(4, answer);
        let (peer, mut other) = server.joined();
        other.write_all(&question().repeat(questions)).unwrap();
        for _ in 0..questions {
            server.serve(peer);
            assert!(server.served[&peer].unread() <= answer);
        }
        assert!(server.service.asked < 10, "{}", server.service.asked);
        let (mut bytes, mut read) = (vec![0; 1 << 20], 0);
        while read < questions * answer {
            match other.read(&mut bytes) {
                Ok(more) => read += more,
                Err(error) => assert_eq!(error.kind(), Io::WouldBlock),
            }
            server.serve(peer);
        }
        assert_eq!((read, server.service.asked), (questions * answer, questions));
    }

    #[test]
    fn a_process_that_does_not_read_notices_is_heard() {
        let mut server = server(4, 1);
        let (peer, mut other) = server.joined();
        let notice = || Letter { to: peer, bytes: vec![0; 1 << 20], files: Vec::new() };
        server.deliver(&mut vec![notice(), notice()]);
        assert!(server.served[&peer].unread() > 0);
        other.write_all(&frame(UNASKED, &Request::Return { lease: 1, lost: false, points: Vec::new() })).unwrap();
        server.serve(peer);
        assert_eq!(server.service.asked, 1);
    }

    #[test]
    fn what_waits_for_all_is_bounded() {
        let mut server = server(8, MOST_UNREAD / 2 - 1);
        let mut others: Vec<_> = (0..3).map(|_| server.joined()).collect();
        for (peer, other) in &mut others {
            other.write_all(&question()).unwrap();
            server.serve(*peer);
            assert!(server.served.values().map(Served::unread).sum::<usize>() <= MOST_UNREAD);
        }
        assert_eq!((server.served.len(), server.service.left), (2, 1));
    }

    /// The ones for which most waits, and no more of them than necessary.
    #[test]
    fn the_connections_that_read_least_are_ended() {
        let mut server = server(8, 1);
        let peers: Vec<_> = (0..3).map(|_| server.joined()).collect();
        let lengths = [MOST_UNREAD, MOST_UNREAD / 4, MOST_UNREAD];
        let notice = |(peer, length)| Letter { to: peer, bytes: vec![0; length], files: Vec::new() };
        server.deliver(&mut peers.iter().map(|(peer, _)| *peer).zip(lengths).map(notice).collect());
        assert_eq!(server.served.keys().copied().collect::<Vec<_>>(), [peers[1].0]);
    }

    /// Work of a process that has closed its connection may still use what it holds.
    #[test]
    fn what_a_process_holds_is_kept_until_its_end() {
        let mut server = server(4, 1);
        let (peer, other) = server.joined();
        drop(other);
        server.serve(peer);
        assert_eq!((server.served.len(), server.ending.len(), server.service.left), (0, 1, 0));
        for _ in 0..2 {
            server.end(peer, true, &mut Vec::new());
            assert_eq!((server.ending.len(), server.service.left), (0, 1));
        }
        let (peer, _other) = server.joined();
        server.end(peer, true, &mut Vec::new());
        assert_eq!((server.ending.len(), server.service.left), (0, 2), "it has ended already");
    }

    /// Those that were closed and whose processes live count as well. A silent one of any process makes room.
    #[test]
    fn all_processes_together_have_the_connections() {
        let mut server = server(4, 1);
        let (closed, other) = server.joined();
        drop(other);
        server.serve(closed);
        let mut others = Vec::new();
        for process in 1..=3 {
            let (peer, other) = server.joined();
            let process = std::process::id() as i32 + process;
            server.served.get_mut(&peer).unwrap().caller.process = rustix::process::Pid::from_raw(process);
            others.push((peer, other));
        }
        let admits = |server: &mut Server<Counts>| {
            let (socket, _) = UnixStream::pair().unwrap();
            server.admit(socket, &mut Vec::new()).map_err(|(_, why)| why)
        };
        assert_eq!(admits(&mut server), Err(Why::Busy));
        let second = server.served.get_mut(&others[1].0).unwrap();
        second.heard = second.heard.checked_sub(SILENCE).unwrap();
        server.service.asked = 1;
        assert_eq!(admits(&mut server), Ok(()));
        assert!(!server.served.contains_key(&others[1].0));
    }

    #[test]
    fn one_process_has_half_of_the_connections_and_silent_ones_yield() {
        let mut server = server(4, 1);
        let others: Vec<_> = (0..2).map(|_| server.joined()).collect();
        let admitted = |server: &mut Server<Counts>| {
            let (socket, other) = UnixStream::pair().unwrap();
            server.admit(socket, &mut Vec::new()).map(|()| other).map_err(|(_, why)| why).err()
        };
        assert_eq!(admitted(&mut server), Some(Why::Busy));
        for served in server.served.values_mut() {
            served.heard = served.heard.checked_sub(SILENCE).unwrap();
        }
        (server.service.keeps, server.service.asked) = (true, 1);
        assert_eq!(admitted(&mut server), Some(Why::Busy));
        server.service.keeps = false;
        assert_eq!(admitted(&mut server), None);
        assert_eq!((server.served.len(), server.service.left), (2, 1));
        let mut answer = [0; 8];
        let (_, mut first) = others.into_iter().next().unwrap();
        assert_eq!((first.read(&mut answer).unwrap(), answer[0]), (1, 1), "it is refused");
    }
}
