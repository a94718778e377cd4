//! The end of a socket that asks.

use crate::memory::failed;
use crate::process;
use crate::socket::{self, OtherEnd};
use crate::wire::{Frames, MAX_ANSWER, MAX_FILES, Why};
use bridge_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use std::cell::Cell;
use std::collections::VecDeque;
use std::io::ErrorKind as Io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Time for an answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How long a wait lasts at most before the program is asked whether it goes on: see [`while_waiting`].
const SLICE: Duration = Duration::from_millis(100);

/// How long an answer is looked for before the thread sleeps: it takes less time than to be woken.
const SPIN: Duration = Duration::from_micros(50);

/// What the program says to a wait that goes on.
static GOES_ON: OnceLock<fn() -> Result<()>> = OnceLock::new();

thread_local! {
    /// Whether this thread asks the program. What that runs must not wait for a lock of the wait.
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

/// Sets the function that is called ten times a second on a thread that waits for another process. Its error ends the
/// wait, as Ctrl-C does in a program. Calls after the first do nothing.
pub fn while_waiting(goes_on: fn() -> Result<()>) {
    GOES_ON.get_or_init(|| goes_on);
}

/// Asks the program whether a wait goes on.
fn goes_on() -> Result<()> {
    let Some(goes_on) = GOES_ON.get() else { return Ok(()) };
    let before = ASKING.replace(true);
    let answer = goes_on();
    ASKING.set(before);
    answer
}

/// Bytes that are read at once.
const CHUNK: usize = 16 << 10;

/// What comes in.
pub(crate) trait Reply: DeserializeOwned {
    /// Returns why the other process refuses something, if this says so.
    fn refusal(&self) -> Option<Why>;

    /// Whether this comes unasked.
    fn is_notice(&self) -> bool;
}

/// A connection that asks one question at a time. What is written to it is written whole.
pub(crate) struct Line<R> {
    socket: UnixStream,
    /// Becomes readable when that process ends, whose forks may keep the socket open.
    process: Option<OwnedFd>,
    /// The process that made the connection: one that it forks must not speak for it.
    own: u32,
    read: Mutex<Incoming<R>>,
    /// Bytes of frames that the socket has not taken yet.
    unsent: Mutex<Vec<u8>>,
}

/// What has come in.
struct Incoming<R> {
    frames: Frames,
    files: VecDeque<OwnedFd>,
    notices: Vec<R>,
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
pub(crate) fn broken(what: &str) -> Error {
    let text =
        format!("the other process does not speak this protocol ({what}): use one version of tensor_bridge in both");
    Error::new(ErrorKind::Protocol, text)
}

pub(crate) fn gone(what: &str) -> Error {
    Error::new(ErrorKind::Gone, format!("{what}: ask for a new ticket"))
}

impl End {
    fn error(self) -> Error {
        match self {
            Self::Closed => gone("the process at the other end has ended"),
            Self::Refused(why) => refused(why),
            Self::Broken => broken("its messages cannot be read"),
        }
    }
}

pub(crate) fn refused(why: Why) -> Error {
    let (kind, text) = match why {
        Why::Denied => (
            ErrorKind::Denied,
            "the process that shares does not let this user in: run both as one user, or accept each other in `users`",
        ),
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
        Why::Failed => (ErrorKind::Driver, "the driver failed in the process that shares: look at its errors"),
        Why::Protocol => return broken("it did not understand the request"),
    };
    Error::new(kind, text)
}

/// Returns a socket that never blocks, connected to this path. A process that accepts no connections is given time.
fn connected(path: &Path) -> Result<UnixStream> {
    let until = Instant::now() + PATIENCE;
    loop {
        let errno = match socket::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {
                goes_on()?;
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(errno) => errno,
        };
        let error = match errno {
            Errno::AGAIN | Errno::INTR => busy("the other process takes no connections"),
            Errno::NOENT | Errno::CONNREFUSED => End::Closed.error(),
            Errno::ACCESS | Errno::PERM => refused(Why::Denied),
            Errno::NAMETOOLONG => Error::new(ErrorKind::Argument, "the path of the socket is too long: pass it whole"),
            errno => failed("the socket of the other process cannot be reached")(errno),
        };
        return Err(error.caused_by(std::io::Error::from(errno)));
    }
}

fn busy(what: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("{what}: look whether it hangs, or try again"))
}

impl<R: Reply + Send + 'static> Line<R> {
    /// Connects to the process at this socket.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Denied`] for one of another user.
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let socket = connected(path)?;
        let OtherEnd { user, process: other, has_ended, .. } =
            socket::other_end(&socket).map_err(|error| broken("it hides who it is").caused_by(error))?;
        if has_ended {
            return Err(End::Closed.error());
        }
        // Another user could have put a socket of its own into a folder that both may write to.
        if !process::accepts(user) {
            let text = format!(
                "the socket is of user {user}, and this process runs as {}: run both as one user, or accept user {user} in `users`, there and here",
                geteuid().as_raw()
            );
            return Err(Error::new(ErrorKind::Denied, text));
        }
        let frames = Frames::new(MAX_ANSWER);
        let incoming = Incoming { frames, files: VecDeque::new(), notices: Vec::new(), ended: None };
        let (read, own) = (Mutex::new(incoming), std::process::id());
        Ok(Self { socket, process: other, own, read, unsent: Mutex::default() })
    }

    /// Returns whether this process was forked from the one that made the connection.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.own != std::process::id()
    }

    /// Passes what has come unasked to `see`.
    ///
    /// # Errors
    ///
    /// The error that ends the connection, if it has ended.
    pub(crate) fn notices(&self, see: impl FnMut(R)) -> Result<()> {
        // Another thread that waits for an answer reads what comes meanwhile.
        let Ok(incoming) = self.read.try_lock() else { return Ok(()) };
        self.noticed(incoming, see)
    }

    /// Passes what comes unasked to `see` until the connection ends. Another thread may ask meanwhile.
    pub(crate) fn attend(&self, mut see: impl FnMut(R)) {
        loop {
            self.wait(PollFlags::IN, Instant::now() + PATIENCE);
            let mut found = Vec::new();
            let goes_on = self.noticed(locked(&self.read), |notice| found.push(notice));
            found.into_iter().for_each(&mut see);
            if goes_on.is_err() {
                return;
            }
        }
    }

    fn noticed(&self, mut incoming: MutexGuard<'_, Incoming<R>>, see: impl FnMut(R)) -> Result<()> {
        self.take_in(&mut incoming, false)?;
        if incoming.ended.is_none() && self.has_ended() {
            incoming.ended = Some(End::Closed);
        }
        incoming.notices.drain(..).for_each(see);
        incoming.ended.map_or(Ok(()), |end| Err(end.error()))
    }

    /// Asks, and waits until `until` for the answer. Passes what comes unasked before it to `see`. `files` says how
    /// many descriptors come with an answer.
    pub(crate) fn ask(
        &self,
        frame: &[u8],
        until: Instant,
        files: impl Fn(&R) -> usize,
        see: impl FnMut(R),
    ) -> Result<(R, Vec<OwnedFd>)> {
        let mut incoming = match ASKING.get() {
            // The wait that is interrupted may be for this very connection.
            true => self.read.try_lock().map_err(|_| busy("the connection waits for an answer"))?,
            false => locked(&self.read),
        };
        let mut sent = self.send(frame);
        let answer = loop {
            let slice = until.min(Instant::now() + SLICE);
            if let Some(answer) = self.next(&mut incoming, sent, slice)? {
                break answer;
            }
            let left = match Instant::now() < until {
                true => goes_on(),
                false => Err(busy("the other process did not answer in time")),
            };
            if let Err(error) = left {
                // The answer would be taken for that of the next question.
                incoming.ended = Some(End::Closed);
                return Err(error);
            }
            sent = Ok(());
        };
        incoming.notices.drain(..).for_each(see);
        let wanted = files(&answer);
        if incoming.files.len() < wanted {
            incoming.ended = Some(End::Broken);
            return Err(broken("descriptors are missing"));
        }
        Ok((answer, incoming.files.drain(..wanted).collect()))
    }

    /// Asks a question whose answer may take long.
    pub(crate) fn start(&self, frame: &[u8]) -> Result<()> {
        self.send(frame)
    }

    /// Waits until `until` for the answer to that question; `None` where there is none yet.
    pub(crate) fn answered(&self, until: Instant) -> Result<Option<R>> {
        self.next(&mut locked(&self.read), Ok(()), until)
    }

    /// Returns the next answer; `None` where none has come until then. `sent` says whether the question was sent.
    fn next(&self, incoming: &mut Incoming<R>, sent: Result<()>, until: Instant) -> Result<Option<R>> {
        let (mut sent, asleep) = (Some(sent), Instant::now() + SPIN);
        loop {
            // Of a connection that was refused, the refusal can be read although nothing can be sent.
            if let Some(answer) = self.take_in(incoming, true)? {
                return answer.refusal().map_or(Ok(Some(answer)), |why| Err(refused(why)));
            }
            if let Some(end) = incoming.ended {
                return Err(end.error());
            }
            sent.take().transpose()?;
            if Instant::now() < asleep {
                std::thread::yield_now();
            } else if self.has_ended() {
                incoming.ended = Some(End::Closed);
            } else if !self.wait(PollFlags::IN, until) {
                return Ok(None);
            }
        }
    }

    /// Reads what has come, without waiting. Returns the answer to a question, if one was asked.
    fn take_in(&self, incoming: &mut Incoming<R>, asked: bool) -> Result<Option<R>> {
        let mut bytes = [0; CHUNK];
        loop {
            while incoming.ended.is_none() {
                match incoming.frames.next::<R>() {
                    Ok(None) => break,
                    Ok(Some(notice)) if notice.is_notice() => incoming.notices.push(notice),
                    Ok(Some(answer)) if asked => return Ok(Some(answer)),
                    Ok(Some(unasked)) => incoming.ended = Some(unasked.refusal().map_or(End::Broken, End::Refused)),
                    Err(Why::Version) => incoming.ended = Some(End::Refused(Why::Version)),
                    Err(_) => incoming.ended = Some(End::Broken),
                }
            }
            if incoming.ended.is_some() {
                return Ok(None);
            }
            match socket::receive(&self.socket, &mut bytes, &mut incoming.files) {
                Ok(0) => incoming.ended = Some(End::Closed),
                Ok(_) if incoming.files.len() > MAX_FILES => incoming.ended = Some(End::Broken),
                Ok(received) => incoming.frames.add(&bytes[..received]),
                Err(error) if error.kind() == Io::WouldBlock => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
                    incoming.ended = Some(End::Broken);
                    return Err(failed("descriptors were lost")(rustix::io::Errno::MFILE));
                }
                Err(_) => incoming.ended = Some(End::Closed),
            }
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
                return Err(busy("the other process reads nothing"));
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

    /// Sends a frame that has no answer, without waiting. Where the socket is full, a thread waits.
    pub(crate) fn say(self: &Arc<Self>, frame: &[u8]) {
        if self.is_elsewhere() {
            return;
        }
        let mut unsent = locked(&self.unsent);
        let waits = !unsent.is_empty();
        unsent.extend_from_slice(frame);
        // A process that has ended needs no word.
        if matches!(self.flush(&mut unsent), Ok(false)) && !waits {
            let line = Arc::clone(self);
            // Without a thread, the next question sends it, or the end of this process says it.
            let _ = std::thread::Builder::new().name("tensor-bridge-ipc".into()).spawn(move || line.drain());
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

impl<R> Line<R> {
    /// Ends the connection, although forks of this process still have its socket.
    pub(crate) fn close(&self) {
        if self.own == std::process::id() {
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl<R> Drop for Line<R> {
    fn drop(&mut self) {
        self.close();
    }
}
