//! Connections to processes that share, one for each.

use crate::memory::failed;
use crate::socket::{self, OtherEnd};
use crate::ticket::Token;
use crate::wire::{Answer, Content, Frames, MAX_ANSWER, MAX_FILES, Request, Why, frame};
use bridge_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::geteuid;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::ErrorKind as Io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Time for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes that are read at once.
const CHUNK: usize = 16 << 10;

/// The connections of this process, by the path of the socket.
static CONNECTIONS: Mutex<BTreeMap<PathBuf, Weak<Connection>>> = Mutex::new(BTreeMap::new());

/// A connection to a process that shares. What is written to it is written whole.
pub(super) struct Connection {
    socket: UnixStream,
    /// Becomes readable when that process ends, whose forks may keep the socket open.
    process: Option<OwnedFd>,
    /// The process that made the connection: one that it forks must not speak for it.
    own: u32,
    read: Mutex<Incoming>,
    /// Bytes of frames that the socket has not taken yet.
    unsent: Mutex<Vec<u8>>,
}

struct Incoming {
    frames: Frames,
    files: VecDeque<OwnedFd>,
    revoked: BTreeSet<u64>,
    /// Why nothing more comes.
    ended: Option<End>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Closed,
    Refused(Why),
    Broken,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the error for a process that does not keep to the protocol.
#[cold]
pub(super) fn broken(what: &str) -> Error {
    let text =
        format!("the other process does not speak this protocol ({what}): use one version of tensor_bridge in both");
    Error::new(ErrorKind::Protocol, text)
}

fn gone(what: &str) -> Error {
    Error::new(ErrorKind::Gone, format!("{what}: ask for a new ticket"))
}

impl End {
    fn error(self) -> Error {
        match self {
            Self::Closed => gone("the process that shares the memory has ended"),
            Self::Refused(why) => refused(why),
            Self::Broken => broken("its messages cannot be read"),
        }
    }
}

fn refused(why: Why) -> Error {
    let (kind, text) = match why {
        Why::Denied => (ErrorKind::Denied, "the process that shares does not let this user in: run both as one user"),
        Why::Unknown => (
            ErrorKind::Gone,
            "there is no such share: it was revoked, or the ticket is not of that process. Ask for a new one",
        ),
        Why::Busy => (
            ErrorKind::Busy,
            "the process that shares has as many connections or leases as it allows: close some, or raise its limits",
        ),
        Why::Version => (
            ErrorKind::Version,
            "the process that shares speaks another version: use one version of tensor_bridge in both",
        ),
        Why::Protocol => return broken("it did not understand the request"),
    };
    Error::new(kind, text)
}

impl Connection {
    /// Returns the connection to the process at this socket.
    pub(super) fn to(path: &Path) -> Result<Arc<Self>> {
        let mut connections = locked(&CONNECTIONS);
        connections.retain(|_, connection| connection.strong_count() > 0);
        if let Some(connection) = connections.get(path).and_then(Weak::upgrade).filter(|known| known.is_usable()) {
            return Ok(connection);
        }
        let connection = Arc::new(Self::connect(path)?);
        connections.insert(path.into(), Arc::downgrade(&connection));
        Ok(connection)
    }

    fn connect(path: &Path) -> Result<Self> {
        let socket = UnixStream::connect(path).map_err(|error| match error.kind() {
            Io::PermissionDenied => refused(Why::Denied).caused_by(error),
            Io::NotFound | Io::ConnectionRefused => End::Closed.error().caused_by(error),
            Io::InvalidInput => {
                Error::new(ErrorKind::Argument, "the ticket names a socket with too long a path").caused_by(error)
            }
            _ => Error::new(ErrorKind::Busy, "the socket of the process that shares takes no connection: try again")
                .caused_by(error),
        })?;
        let OtherEnd { user, process } =
            socket::other_end(&socket).map_err(|error| broken("it hides who it is").caused_by(error))?;
        // Another user could have put a socket of its own into a folder that both may write to.
        let own = geteuid().as_raw();
        if user != own && user != 0 && own != 0 {
            let text = format!("the socket is of user {user}, and this process runs as {own}: run both as one user");
            return Err(Error::new(ErrorKind::Denied, text));
        }
        socket.set_nonblocking(true).map_err(|error| End::Closed.error().caused_by(error))?;
        let incoming =
            Incoming { frames: Frames::new(MAX_ANSWER), files: VecDeque::new(), revoked: BTreeSet::new(), ended: None };
        Ok(Self { socket, process, own: std::process::id(), read: Mutex::new(incoming), unsent: Mutex::default() })
    }

    fn is_usable(&self) -> bool {
        self.own == std::process::id() && {
            let mut incoming = locked(&self.read);
            // While it waits for an answer, nothing else is to be read.
            let _ = self.take_in(&mut incoming, None);
            incoming.ended.is_none()
        }
    }

    /// Asks for a lease. Returns its number, the content, and the descriptors of the segments.
    pub(super) fn open(&self, share: u64, token: Token) -> Result<(u64, Content, Vec<OwnedFd>)> {
        let until = Instant::now() + PATIENCE;
        let mut incoming = locked(&self.read);
        // Of a connection that was refused, the refusal can be read although nothing can be sent.
        let mut sent = Some(self.send(&frame(&Request::Open { share, token })));
        let mut answer = None;
        loop {
            self.take_in(&mut incoming, Some(&mut answer))?;
            match answer.take() {
                Some(Answer::Opened { lease, content }) => {
                    let wanted = content.segments.iter().map(|segment| segment.files()).sum();
                    if incoming.files.len() < wanted {
                        incoming.ended = Some(End::Broken);
                        return Err(broken("descriptors are missing"));
                    }
                    incoming.revoked.remove(&share);
                    return Ok((lease, content, incoming.files.drain(..wanted).collect()));
                }
                Some(Answer::Refused { why }) => return Err(refused(why)),
                Some(Answer::Revoked { .. }) | None => (),
            }
            if let Some(end) = incoming.ended {
                return Err(end.error());
            }
            sent.take().transpose()?;
            if !self.wait(PollFlags::IN, until) {
                // The answer would be taken for that of the next request.
                incoming.ended = Some(End::Closed);
                let text = format!("the process that shares did not answer within {} s: try again", PATIENCE.as_secs());
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
    }

    /// Returns an error if the process has ended or has revoked the share.
    pub(super) fn check(&self, share: u64) -> Result<()> {
        // Another thread that waits for an answer reads what comes meanwhile.
        let Ok(mut incoming) = self.read.try_lock() else { return Ok(()) };
        self.take_in(&mut incoming, None)?;
        match incoming.ended {
            Some(end) => Err(end.error()),
            None if incoming.revoked.contains(&share) => {
                Err(gone("the process that shares the memory has taken it back"))
            }
            None => Ok(()),
        }
    }

    /// Reads what has come, up to the answer to a request, if there is one, without waiting.
    fn take_in(&self, incoming: &mut Incoming, mut answer: Option<&mut Option<Answer>>) -> Result<()> {
        let mut bytes = [0; CHUNK];
        loop {
            loop {
                match incoming.frames.next() {
                    Ok(None) => break,
                    Ok(Some(Answer::Revoked { share })) => drop(incoming.revoked.insert(share)),
                    Ok(Some(found)) => match (found, answer.as_deref_mut()) {
                        (Answer::Refused { why }, None) => incoming.ended = Some(End::Refused(why)),
                        (_, None) => incoming.ended = Some(End::Broken),
                        (found, Some(answer)) => {
                            *answer = Some(found);
                            return Ok(());
                        }
                    },
                    Err(Why::Version) => incoming.ended = Some(End::Refused(Why::Version)),
                    Err(_) => incoming.ended = Some(End::Broken),
                }
                if incoming.ended.is_some() {
                    return Ok(());
                }
            }
            match socket::receive(&self.socket, &mut bytes, &mut incoming.files) {
                Ok(0) => incoming.ended = Some(End::Closed),
                Ok(_) if incoming.files.len() > MAX_FILES => incoming.ended = Some(End::Broken),
                Ok(received) => {
                    incoming.frames.add(&bytes[..received]);
                    continue;
                }
                Err(error) if error.kind() == Io::WouldBlock => {
                    if self.has_ended() {
                        incoming.ended = Some(End::Closed);
                    }
                }
                Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
                    incoming.ended = Some(End::Broken);
                    return Err(failed("descriptors were lost")(rustix::io::Errno::MFILE));
                }
                Err(_) => incoming.ended = Some(End::Closed),
            }
            return Ok(());
        }
    }

    /// Returns whether the process has ended, as far as this process can see it.
    fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let process = self.process.as_ref().map(|process| PollFd::new(process, PollFlags::IN));
        process.is_some_and(|process| poll(&mut [process], Some(&now)).is_ok_and(|ready| ready > 0))
    }

    /// Waits for the socket. Returns whether there was time left.
    fn wait(&self, what: PollFlags, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut asked = vec![PollFd::new(&self.socket, what)];
        asked.extend(self.process.as_ref().map(|process| PollFd::new(process, PollFlags::IN)));
        let _ = poll(&mut asked, Some(&timeout));
        !left.is_zero()
    }

    /// Sends a frame, behind what was not sent yet.
    fn send(&self, frame: &[u8]) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let mut unsent = locked(&self.unsent);
        unsent.extend_from_slice(frame);
        while !self.flush(&mut unsent)? {
            if self.has_ended() || !self.wait(PollFlags::OUT, until) {
                return Err(Error::new(
                    ErrorKind::Busy,
                    "the process that shares reads nothing: look whether it hangs",
                ));
            }
        }
        Ok(())
    }

    /// Sends what the socket takes now. Returns whether nothing is left.
    fn flush(&self, unsent: &mut Vec<u8>) -> Result<bool> {
        while !unsent.is_empty() {
            match socket::send(&self.socket, unsent, &[]) {
                Ok(sent) => drop(unsent.drain(..sent)),
                Err(error) if error.kind() == Io::WouldBlock => return Ok(false),
                Err(error) => return Err(End::Closed.error().caused_by(error)),
            }
        }
        Ok(true)
    }

    /// Gives a lease back, without waiting. Where the socket is full, a thread waits.
    pub(super) fn give_back(self: &Arc<Self>, lease: u64) {
        if self.own != std::process::id() {
            return;
        }
        let mut unsent = locked(&self.unsent);
        let waits = !unsent.is_empty();
        unsent.extend_from_slice(&frame(&Request::Return { lease }));
        // A process that has ended has its leases back.
        if matches!(self.flush(&mut unsent), Ok(false)) && !waits {
            let connection = Arc::clone(self);
            // Without a thread, the next request sends it, or the end of this process.
            let _ = std::thread::Builder::new().name("tensor-bridge-ipc".into()).spawn(move || connection.drain());
        }
    }

    /// Sends what is left, as long as the process is there.
    fn drain(&self) {
        loop {
            self.wait(PollFlags::OUT, Instant::now() + PATIENCE);
            if self.has_ended() || !matches!(self.flush(&mut locked(&self.unsent)), Ok(false)) {
                return;
            }
        }
    }
}
