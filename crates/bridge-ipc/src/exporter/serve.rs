//! The thread that answers.

use super::book::Peer;
use super::{Desk, Kept};
use crate::socket;
use crate::wire::{Answer, Frames, MAX_REQUEST, Request, Why, frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::geteuid;
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind as Io, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes that are read of one connection before the others have their turn.
const TURN: usize = 4096;

/// The most bytes that wait for a process that does not read.
const MOST_UNREAD: usize = 64 << 20;

/// Time until connections are accepted again after the system has refused one.
const PAUSE: Duration = Duration::from_millis(50);

/// A process at the other end of a connection.
struct Served {
    socket: UnixStream,
    /// Becomes readable when the process ends, whose forks may keep the socket open.
    process: Option<OwnedFd>,
    frames: Frames,
    out: VecDeque<Out>,
}

/// An answer on its way.
struct Out {
    bytes: Vec<u8>,
    sent: usize,
    /// The content whose descriptors go with the first byte.
    kept: Option<Arc<Kept>>,
}

pub(super) struct Server {
    listener: UnixListener,
    desk: Arc<Desk>,
    users: Vec<u32>,
    served: BTreeMap<Peer, Served>,
    /// When connections are accepted again.
    paused: Option<Instant>,
}

impl Server {
    pub(super) fn new(listener: UnixListener, desk: Arc<Desk>, users: Vec<u32>) -> Self {
        Self { listener, desk, users, served: BTreeMap::new(), paused: None }
    }

    /// Answers until the exporter is dropped.
    pub(super) fn run(mut self) {
        while !self.desk.stopped.load(Relaxed) {
            let (woken, called, ready) = self.wait();
            if woken {
                let mut counter = [0; 8];
                let _ = rustix::io::read(&self.desk.wake, &mut counter);
                self.tell();
            }
            if called {
                self.accept();
            }
            for (peer, ended) in ready {
                if ended || self.attend(peer).is_none() {
                    self.served.remove(&peer);
                    let free = self.desk.book().leave(peer);
                    drop(free);
                }
            }
            let free = self.desk.book().expire(Instant::now());
            drop(free);
        }
    }

    /// Waits until something is to be done. Returns whether the thread was woken, whether somebody calls, and the
    /// connections that are ready, with whether their process has ended.
    fn wait(&mut self) -> (bool, bool, Vec<(Peer, bool)>) {
        let now = Instant::now();
        self.paused = self.paused.filter(|until| *until > now);
        let until = self.desk.book().next_expiry().into_iter().chain(self.paused).min();
        let timeout = until.map(|until| until.saturating_duration_since(now));
        let timeout = timeout.map(|time| Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let mut asked = vec![PollFd::new(&self.desk.wake, PollFlags::IN)];
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
        if poll(&mut asked, timeout.as_ref()).is_err() {
            return (true, false, Vec::new());
        }
        let mut raised = asked.iter().map(|fd| !fd.revents().is_empty());
        let (woken, called) = (raised.next() == Some(true), raised.next() == Some(true));
        let ready = peers.into_iter().zip(raised).filter(|(_, raised)| *raised).map(|(peer, _)| peer).collect();
        (woken, called, ready)
    }

    /// Tells the connections whose shares were revoked.
    fn tell(&mut self) {
        let notices = std::mem::take(&mut *self.desk.notices.lock().unwrap_or_else(PoisonError::into_inner));
        for (peer, share) in notices {
            if let Some(served) = self.served.get_mut(&peer) {
                served.answer(&Answer::Revoked { share }, None);
            }
        }
    }

    /// Accepts connections, and checks who calls.
    fn accept(&mut self) {
        loop {
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
                let _ = socket::send(&socket, &frame(&Answer::Refused { why }), &[]);
            }
        }
    }

    fn admit(&mut self, socket: UnixStream) -> Result<(), (UnixStream, Why)> {
        let Ok(caller) = socket::other_end(&socket) else { return Err((socket, Why::Denied)) };
        if caller.user != geteuid().as_raw() && !self.users.contains(&caller.user) {
            return Err((socket, Why::Denied));
        }
        if socket.set_nonblocking(true).is_err() {
            return Err((socket, Why::Busy));
        }
        let peer = match self.desk.book().join() {
            Ok(peer) => peer,
            Err(why) => return Err((socket, why)),
        };
        let frames = Frames::new(MAX_REQUEST);
        let served = Served { socket, process: caller.process, frames, out: VecDeque::new() };
        self.served.insert(peer, served);
        Ok(())
    }

    /// Reads what a process has sent, and answers. `None`: the connection has ended, or breaks the protocol.
    fn attend(&mut self, peer: Peer) -> Option<()> {
        let Some(served) = self.served.get_mut(&peer) else { return Some(()) };
        let mut bytes = [0; TURN];
        match served.socket.read(&mut bytes) {
            Ok(0) => return None,
            Ok(read) => served.frames.add(&bytes[..read]),
            Err(error) if matches!(error.kind(), Io::WouldBlock | Io::Interrupted) => (),
            Err(_) => return None,
        }
        loop {
            let request = match served.frames.next() {
                Ok(None) => return served.flush(),
                Ok(Some(request)) => request,
                Err(why) => {
                    served.answer(&Answer::Refused { why }, None);
                    let _ = served.flush();
                    return None;
                }
            };
            match request {
                Request::Open { share, token } => {
                    let opened = self.desk.book().open(peer, share, &token, Instant::now());
                    match opened {
                        Ok((lease, kept)) => {
                            let content = kept.content.clone();
                            served.answer(&Answer::Opened { lease, content }, Some(kept));
                        }
                        Err(why) => served.answer(&Answer::Refused { why }, None),
                    }
                }
                Request::Return { lease } => {
                    let free = self.desk.book().give_back(peer, lease);
                    drop(free.ok()?);
                }
            }
        }
    }
}

impl Served {
    fn answer(&mut self, answer: &Answer, kept: Option<Arc<Kept>>) {
        self.out.push_back(Out { bytes: frame(answer), sent: 0, kept });
    }

    /// Sends what the socket takes now. `None`: the connection is broken, or nobody reads.
    fn flush(&mut self) -> Option<()> {
        while let Some(out) = self.out.front_mut() {
            let files: Vec<_> = match &out.kept {
                Some(kept) if out.sent == 0 => kept.files.iter().map(|file| file.as_fd()).collect(),
                _ => Vec::new(),
            };
            match socket::send(&self.socket, &out.bytes[out.sent..], &files) {
                Ok(sent) => out.sent += sent,
                Err(error) if error.kind() == Io::WouldBlock => break,
                Err(_) => return None,
            }
            if out.sent == out.bytes.len() {
                self.out.pop_front();
            }
        }
        let waiting: usize = self.out.iter().map(|out| out.bytes.len() - out.sent).sum();
        (waiting <= MOST_UNREAD).then_some(())
    }
}
