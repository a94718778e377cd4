//! The end of a socket that asks.

use crate::memory::failed;
use crate::settings;
use crate::socket::{self, OtherEnd};
use crate::wire::{Frames, MAX_ANSWER, UNASKED, Why, frame};
use bridge_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::Cell;
use std::collections::VecDeque;
use std::io::ErrorKind as Io;
use std::marker::PhantomData;
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

/// The most bytes that are read of a process before the program goes on, although it sends more.
const MOST_AT_ONCE: usize = 4 << 20;

/// The most answers whose descriptors wait: one that is read in part, and the next.
const MOST_WAITING: usize = 2;

/// What comes in.
pub(crate) trait Reply: DeserializeOwned {
    /// Returns why the other process refuses something, if this says so.
    fn refusal(&self) -> Option<Why>;

    /// Whether this comes unasked.
    fn is_notice(&self) -> bool;

    /// Returns how many descriptors come with it.
    fn files(&self) -> usize {
        0
    }

    /// Returns the frame that gives back what it brings, for an answer that nothing waits for any more.
    fn given_back(&self) -> Option<Vec<u8>> {
        None
    }
}

/// A connection that asks one question at a time.
///
/// Questions have numbers, and answers have those of their questions. What was asked and not answered in time is
/// answered later: such an answer is told by its number, and what it brings is given back.
pub(crate) struct Line<R> {
    socket: UnixStream,
    /// Becomes readable when that process ends, whose forks may keep the socket open.
    process: Option<OwnedFd>,
    /// The process that made the connection: one that it forks must not use it.
    own: u32,
    read: Mutex<Incoming>,
    unsent: Mutex<Unsent>,
    answers: PhantomData<fn() -> R>,
}

/// What has come in.
struct Incoming {
    frames: Frames,
    /// The descriptors that came with each answer that has some; `None` where this process had too many files open.
    files: VecDeque<Option<Vec<OwnedFd>>>,
    /// The number of the last question.
    asked: u64,
    /// The number of the last question that was answered. Answers come in the order of the questions.
    answered: u64,
    /// Why nothing more comes.
    ended: Option<End>,
}

/// Bytes of frames that the socket has not taken yet. They go out in their order, each frame whole.
#[derive(Default)]
struct Unsent {
    bytes: Vec<u8>,
    /// Whether a thread sends them.
    has_thread: bool,
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

impl Incoming {
    /// Returns the descriptors of an answer.
    fn files_of(&mut self, answer: &impl Reply) -> Result<Vec<OwnedFd>> {
        let wanted = answer.files();
        if wanted == 0 {
            return Ok(Vec::new());
        }
        match self.files.pop_front() {
            Some(Some(files)) if files.len() == wanted => Ok(files),
            Some(None) => Err(failed("descriptors were lost")(Errno::MFILE)),
            _ => {
                self.ended = Some(End::Broken);
                Err(broken("descriptors are missing"))
            }
        }
    }

    /// Returns whether the question of this number waits for its answer.
    fn awaits(&self, number: u64) -> bool {
        self.answered < number && number <= self.asked
    }
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
        if !settings::accepts(user) {
            let text = format!(
                "the socket is of user {user}, and this process runs as {}: run both as one user, or accept user {user} in `users`, there and here",
                geteuid().as_raw()
            );
            return Err(Error::new(ErrorKind::Denied, text));
        }
        let frames = Frames::new(MAX_ANSWER);
        let incoming = Incoming { frames, files: VecDeque::new(), asked: UNASKED, answered: UNASKED, ended: None };
        let (read, own) = (Mutex::new(incoming), std::process::id());
        Ok(Self { socket, process: other, own, read, unsent: Mutex::default(), answers: PhantomData })
    }

    /// Returns whether this process was forked from the one that made the connection.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.own != std::process::id()
    }

    /// Refuses to use the connection in a process that was forked from the one that made it.
    fn check(&self) -> Result<()> {
        match self.is_elsewhere() {
            true => Err(Error::new(
                ErrorKind::Gone,
                "this process was forked from the one that connected: connect, or open, once more",
            )),
            false => Ok(()),
        }
    }

    /// Passes what has come unasked to `see`, which runs under a lock. In a fork, nothing has come.
    ///
    /// # Errors
    ///
    /// The error that ends the connection, if it has ended.
    pub(crate) fn notices(&self, see: impl FnMut(R)) -> Result<()> {
        // What is read here would be lost to the process that made the connection, and its lock may be held for good.
        if self.is_elsewhere() {
            return if self.has_ended() { Err(End::Closed.error()) } else { Ok(()) };
        }
        // Another thread that waits for an answer reads what comes meanwhile.
        let Ok(incoming) = self.read.try_lock() else { return Ok(()) };
        self.noticed(incoming, see)
    }

    /// Waits for what comes unasked, and passes it to `see`, which runs under a lock. Another thread may ask meanwhile.
    pub(crate) fn attend(&self, see: impl FnMut(R)) -> Result<()> {
        self.wait(PollFlags::IN, Instant::now() + PATIENCE);
        self.noticed(locked(&self.read), see)
    }

    fn noticed(&self, mut incoming: MutexGuard<'_, Incoming>, mut see: impl FnMut(R)) -> Result<()> {
        self.take_in(&mut incoming, None, &mut see)?;
        if incoming.ended.is_none() && self.has_ended() {
            incoming.ended = Some(End::Closed);
        }
        incoming.ended.map_or(Ok(()), |end| Err(end.error()))
    }

    /// Asks, and waits until `until` for the answer and its descriptors. Passes what comes unasked before it to `see`,
    /// which runs under a lock.
    ///
    /// # Errors
    ///
    /// After those of the program, of too many open files, and after [`ErrorKind::Busy`], the connection goes on.
    pub(crate) fn ask(
        &self,
        question: &impl Serialize,
        until: Instant,
        mut see: impl FnMut(R),
    ) -> Result<(R, Vec<OwnedFd>)> {
        self.check()?;
        let mut incoming = match ASKING.get() {
            // The wait that is interrupted may be for this very connection.
            true => self.read.try_lock().map_err(|_| busy("the connection waits for an answer"))?,
            false => locked(&self.read),
        };
        self.put(&mut incoming, question);
        loop {
            let slice = until.min(Instant::now() + SLICE);
            if let Some(answer) = self.next(&mut incoming, slice, &mut see)? {
                return Ok(answer);
            }
            if Instant::now() >= until {
                return Err(busy(match locked(&self.unsent).bytes.is_empty() {
                    true => "the other process did not answer in time",
                    false => "the other process reads nothing",
                }));
            }
            goes_on()?;
        }
    }

    /// Asks a question whose answer may take long.
    pub(crate) fn start(&self, question: &impl Serialize) -> Result<()> {
        self.check()?;
        self.put(&mut locked(&self.read), question);
        self.flush(&mut locked(&self.unsent)).map(drop)
    }

    /// Waits until `until` for the answer to that question; `None` where there is none yet.
    pub(crate) fn answered(&self, until: Instant) -> Result<Option<R>> {
        self.check()?;
        let found = self.next(&mut locked(&self.read), until, &mut |_| ())?;
        Ok(found.map(|(answer, _)| answer))
    }

    /// Gives a question its number, and puts it after what was not sent yet.
    fn put(&self, incoming: &mut Incoming, question: &impl Serialize) {
        incoming.asked += 1;
        locked(&self.unsent).bytes.extend(frame(incoming.asked, question));
    }

    /// Returns the answer to the last question; `None` where none has come until then.
    fn next(
        &self,
        incoming: &mut Incoming,
        until: Instant,
        see: &mut dyn FnMut(R),
    ) -> Result<Option<(R, Vec<OwnedFd>)>> {
        let asleep = Instant::now() + SPIN;
        loop {
            let sent = self.flush(&mut locked(&self.unsent));
            // Of a connection that was refused, the refusal can be read although nothing can be sent.
            if let Some((answer, files)) = self.take_in(incoming, Some(incoming.asked), see)? {
                return answer.refusal().map_or(Ok(Some((answer, files))), |why| Err(refused(why)));
            }
            if let Some(end) = incoming.ended {
                return Err(end.error());
            }
            let is_sent = match sent {
                Ok(is_sent) => is_sent,
                Err(error) => {
                    incoming.ended = Some(End::Closed);
                    return Err(error);
                }
            };
            let events = if is_sent { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            if Instant::now() < asleep {
                std::thread::yield_now();
            } else if self.has_ended() {
                incoming.ended = Some(End::Closed);
            } else if !self.wait(events, until) {
                return Ok(None);
            }
        }
    }

    /// Reads what has come, without waiting. Returns the answer to the question of this number, with its descriptors.
    /// What answers an earlier question is given back.
    fn take_in(
        &self,
        incoming: &mut Incoming,
        asked: Option<u64>,
        see: &mut dyn FnMut(R),
    ) -> Result<Option<(R, Vec<OwnedFd>)>> {
        let (mut bytes, mut read) = ([0; CHUNK], 0);
        loop {
            while incoming.ended.is_none() {
                match incoming.frames.next::<R>() {
                    Ok(None) => break,
                    Ok(Some((UNASKED, notice))) if notice.is_notice() => see(notice),
                    Ok(Some((UNASKED, said))) => {
                        incoming.ended = Some(said.refusal().map_or(End::Broken, End::Refused));
                    }
                    Ok(Some((number, answer))) if incoming.awaits(number) && !answer.is_notice() => {
                        incoming.answered = number;
                        let files = incoming.files_of(&answer);
                        match files {
                            Ok(files) if asked == Some(number) => return Ok(Some((answer, files))),
                            _ => answer.given_back().into_iter().for_each(|frame| self.push(&frame)),
                        }
                        if asked == Some(number) {
                            files?;
                        }
                    }
                    Ok(Some(_)) => incoming.ended = Some(End::Broken),
                    Err(Why::Version) => incoming.ended = Some(End::Refused(Why::Version)),
                    Err(_) => incoming.ended = Some(End::Broken),
                }
            }
            if incoming.ended.is_some() || read >= MOST_AT_ONCE {
                return Ok(None);
            }
            match socket::receive(&self.socket, &mut bytes) {
                Ok((0, _)) => incoming.ended = Some(End::Closed),
                Ok((received, files)) => {
                    read += received;
                    incoming.frames.add(&bytes[..received]);
                    incoming.files.extend(files);
                    // An answer may be read only in part, and the one after it bring the next descriptors.
                    if incoming.files.len() > MOST_WAITING {
                        incoming.ended = Some(End::Broken);
                    }
                }
                Err(error) if error.kind() == Io::WouldBlock => return Ok(None),
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

    /// Sends what the socket takes now. Returns whether nothing is left.
    fn flush(&self, unsent: &mut Unsent) -> Result<bool> {
        while !unsent.bytes.is_empty() {
            match socket::send(&self.socket, &unsent.bytes, &[]) {
                Ok(sent) => drop(unsent.bytes.drain(..sent)),
                Err(error) if error.kind() == Io::WouldBlock => return Ok(false),
                Err(error) => {
                    // Nothing is sent any more.
                    unsent.bytes.clear();
                    return Err(End::Closed.error().caused_by(error));
                }
            }
        }
        Ok(true)
    }

    /// Puts a frame after what was not sent yet, and sends what the socket takes now.
    fn push(&self, frame: &[u8]) {
        let mut unsent = locked(&self.unsent);
        unsent.bytes.extend_from_slice(frame);
        // The next question notices that the connection has ended.
        let _ = self.flush(&mut unsent);
    }

    /// Says what has no answer, without waiting. Where the socket is full, a thread waits.
    pub(crate) fn say(self: &Arc<Self>, message: &impl Serialize) {
        if self.is_elsewhere() {
            return;
        }
        let mut unsent = locked(&self.unsent);
        unsent.bytes.extend(frame(UNASKED, message));
        // A process that has ended needs no word.
        if matches!(self.flush(&mut unsent), Ok(false)) && !unsent.has_thread {
            let line = Arc::clone(self);
            // Without a thread, the next question sends it, or the end of this process says it.
            let thread = std::thread::Builder::new().name("tensor-bridge-ipc".into()).spawn(move || line.drain());
            unsent.has_thread = thread.is_ok();
        }
    }

    /// Sends what is left, as long as the process is there.
    fn drain(&self) {
        loop {
            self.wait(PollFlags::OUT, Instant::now() + PATIENCE);
            let mut unsent = locked(&self.unsent);
            if self.has_ended() || !matches!(self.flush(&mut unsent), Ok(false)) {
                unsent.has_thread = false;
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
