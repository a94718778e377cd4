//! The end of a socket that sends questions.

mod errors;
mod program;
mod turn;

pub(crate) use errors::{broken, gone, refused};
pub use program::while_waiting;

use crate::memory::failed;
use crate::settings;
use crate::socket::{self, Came, OtherEnd};
use crate::sync::{self, Mutex, locked, now, thread};
use crate::wire::{Frames, MAX_ANSWER, MAX_FILES, UNASKED, Why, frame};
use bridge_core::{Error, ErrorKind, Result};
use errors::{End, busy};
use program::is_asking;
pub(crate) use program::{SLICE, goes_on};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::io::ErrorKind as Io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use turn::{Taken, Turn};

/// Time for an answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How long a thread polls for an answer before it sleeps: about the time that it takes to wake the thread that
/// answers.
const SPIN: Duration = Duration::from_micros(200);

/// Bytes of one read.
const CHUNK: usize = 16 << 10;

/// The most bytes that are read from a process before the program goes on, even if it sends more.
const MOST_AT_ONCE: usize = 4 << 20;

/// No time at all.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// What comes in.
pub(crate) trait Reply: DeserializeOwned {
    /// Returns why the other process refuses a request, if this is a refusal.
    fn refusal(&self) -> Option<Why>;

    /// Whether this is a notice: it answers no question.
    fn is_notice(&self) -> bool;

    /// Returns how many descriptors come with it.
    fn files(&self) -> usize {
        0
    }
}

/// A connection that asks one question at a time.
///
/// Questions have numbers, and answers have those of their questions. A question that was not answered in time may be
/// answered later: the number identifies such an answer.
pub(crate) struct Channel<R> {
    socket: UnixStream,
    /// Becomes readable when that process ends, whose forks may keep the socket open.
    process: Option<Arc<OwnedFd>>,
    /// The process that made the connection. Its forks must not use it.
    own: u32,
    read: Turn<Incoming<R>>,
    /// Why no more messages come, also for threads that do not read.
    ended: Arc<OnceLock<End>>,
    unsent: Mutex<Unsent>,
}

/// Receives the answer to a question, and whether the thread that asked takes it: it does not if it has given up, or if
/// descriptors were lost. Runs under a lock. It is dropped without an answer when the connection ends, or if the
/// question was not sent.
type Hears<R> = Box<dyn FnOnce(&R, bool) + Send>;

/// What has come in.
struct Incoming<R> {
    frames: Frames,
    /// The descriptors that came with the frame that is read, in one send or in several.
    files: Option<Came>,
    /// The number of the last question that was answered. Answers come in the order of the questions.
    answered: u64,
    /// The receivers of the answers to the questions after it.
    waiting: VecDeque<Hears<R>>,
    ended: Arc<OnceLock<End>>,
}

/// Bytes of frames that the socket has not accepted yet. They are sent in order, each frame whole.
#[derive(Default)]
struct Unsent {
    bytes: Vec<u8>,
    /// Whether a thread sends them.
    has_thread: bool,
}

/// Returns a socket that never blocks, connected to this path. A process that does not accept connections yet gets time
/// to do so.
fn connected(path: &Path) -> Result<UnixStream> {
    let until = now() + PATIENCE;
    loop {
        let errno = match socket::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(Errno::AGAIN | Errno::INTR) if now() < until => {
                goes_on()?;
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(errno) => errno,
        };
        let error = match errno {
            Errno::AGAIN | Errno::INTR => {
                busy(&format!("the other process accepted no connection within {PATIENCE:?}"))
            }
            Errno::NOENT | Errno::NOTDIR | Errno::CONNREFUSED => {
                let text = format!(
                    "no process listens at {}: it has ended, or its socket was moved. Start it again, ask for a new ticket, or name the right path",
                    path.display()
                );
                Error::new(ErrorKind::Gone, text)
            }
            Errno::ACCESS | Errno::PERM => refused(Why::Denied),
            Errno::NAMETOOLONG => {
                Error::new(ErrorKind::Argument, "the path of the socket is too long: name a shorter one")
            }
            Errno::INVAL => {
                Error::new(ErrorKind::Argument, "the path of the socket holds a null character: name another one")
            }
            errno => failed(&format!("cannot connect to the socket {}", path.display()))(errno),
        };
        return Err(error.caused_by(std::io::Error::from(errno)));
    }
}

impl<R: Reply> Incoming<R> {
    /// Returns the descriptors of an answer: those that came with its frame.
    fn files_of(&mut self, answer: &impl Reply) -> Result<Vec<OwnedFd>> {
        match self.files.take().unwrap_or_else(|| Some(Vec::new())) {
            Some(files) if files.len() == answer.files() => Ok(files),
            None => Err(failed("descriptors were lost")(Errno::MFILE)),
            Some(_) => {
                self.end(End::Broken);
                Err(broken("descriptors are missing"))
            }
        }
    }

    /// Adds descriptors to those of the frame that is read. More than any answer has end the connection.
    fn came(&mut self, more: Came) {
        let both = self.files.take().unwrap_or_else(|| Some(Vec::new())).zip(more);
        let files = both.map(|(files, more)| files.into_iter().chain(more).collect::<Vec<_>>());
        if files.as_ref().is_some_and(|files| files.len() > MAX_FILES) {
            self.end(End::Broken);
        } else {
            self.files = Some(files);
        }
    }

    /// Ends the connection. Pending questions get no answer.
    fn end(&mut self, end: End) {
        // The first reason stays.
        let _ = self.ended.set(end);
        self.waiting.clear();
    }

    /// Returns the receiver of the answer to this question, if that is the next one to be answered.
    fn answer_to(&mut self, number: u64) -> Option<Hears<R>> {
        let is_next = number == self.answered + 1;
        let hears = is_next.then(|| self.waiting.pop_front()).flatten()?;
        self.answered = number;
        Some(hears)
    }
}

impl<R: Reply + Send + 'static> Channel<R> {
    /// Connects to the process at this socket.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Gone`] where there is none, [`ErrorKind::Denied`] for one of another user.
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let socket = connected(path)?;
        let OtherEnd { user, process: other, has_ended, .. } =
            socket::other_end(&socket).map_err(|error| broken("its user is not known").caused_by(error))?;
        if has_ended {
            return Err(End::Closed.error());
        }
        // Another user could have put its own socket into a folder that both may write to.
        if !settings::accepts(user) {
            let text = format!(
                "the socket is of user {user}, and this process runs as {}: run both as one user, or accept user {user} in `users`, there and here",
                geteuid().as_raw()
            );
            return Err(Error::new(ErrorKind::Denied, text));
        }
        let frames = Frames::new(MAX_ANSWER);
        let (waiting, ended) = (VecDeque::new(), Arc::<OnceLock<End>>::default());
        let incoming = Incoming { frames, files: None, answered: UNASKED, waiting, ended: Arc::clone(&ended) };
        let (own, read) = (sync::process(), Turn::new(incoming));
        Ok(Self { socket, process: other.map(Arc::new), own, read, ended, unsent: Mutex::default() })
    }

    /// Returns the process at the other end, if this one can see it.
    pub(crate) fn process(&self) -> Option<&Arc<OwnedFd>> {
        self.process.as_ref()
    }

    /// Returns whether this process was forked from the one that made the connection.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.own != sync::process()
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

    /// Passes the notices that have come to `see`, which runs under a lock. In a forked process there are none.
    ///
    /// # Errors
    ///
    /// The error that ends the connection, if it has ended.
    pub(crate) fn notices(&self, see: impl FnMut(R)) -> Result<()> {
        // What is read here would be lost to the process that made the connection, and its lock may be held for ever.
        if self.is_elsewhere() {
            return if self.has_ended() { Err(End::Closed.error()) } else { Ok(()) };
        }
        // Another thread that waits for an answer reads the messages meanwhile.
        match self.read.try_lock() {
            Some(incoming) => self.noticed(incoming, see),
            None => self.alive(),
        }
    }

    /// Waits for notices, and passes them to `see`, which runs under a lock. Another thread may send a question
    /// meanwhile.
    pub(crate) fn attend(&self, see: impl FnMut(R)) -> Result<()> {
        self.wait(PollFlags::IN, now() + PATIENCE);
        self.noticed(self.read.lock(), see)
    }

    fn noticed(&self, mut incoming: Taken<'_, Incoming<R>>, mut see: impl FnMut(R)) -> Result<()> {
        self.take_in(&mut incoming, None, &mut see)?;
        if self.has_ended() {
            incoming.end(End::Closed);
        }
        self.alive()
    }

    /// Returns the error that has ended the connection, if it has ended.
    fn alive(&self) -> Result<()> {
        self.ended.get().map_or(Ok(()), |end| Err(end.error()))
    }

    /// Sends a question, and waits until `until` for the answer and its descriptors. Passes notices that come before it
    /// to `see`, which runs under a lock. `hears` is called with the answer whenever that comes.
    ///
    /// # Errors
    ///
    /// After those of the program, of too many open files, and after [`ErrorKind::Busy`], the connection goes on.
    pub(crate) fn ask(
        &self,
        question: &impl Serialize,
        until: Instant,
        mut see: impl FnMut(R),
        hears: impl FnOnce(&R, bool) + Send + 'static,
    ) -> Result<(R, Vec<OwnedFd>)> {
        self.check()?;
        let started = now();
        let incoming = match is_asking() {
            // The interrupted wait may be for this connection.
            true => self.read.try_lock(),
            false => self.read.wait(until)?,
        };
        let mut incoming = incoming.ok_or_else(|| busy("the connection is busy with an earlier request"))?;
        let number = self.put(&mut incoming, question, Box::new(hears))?;
        loop {
            let slice = until.min(now() + SLICE);
            if let Some(answer) = self.next(&mut incoming, number, slice, &mut see)? {
                return Ok(answer);
            }
            if now() >= until {
                let did = if locked(&self.unsent).bytes.is_empty() { "answer" } else { "read the request" };
                let within = until.saturating_duration_since(started).as_secs_f64();
                return Err(busy(&format!("the other process did not {did} within {within:.0} s")));
            }
            goes_on()?;
        }
    }

    /// Sends a question whose answer may take long, and which is the only one of the connection.
    pub(crate) fn start(&self, question: &impl Serialize) -> Result<()> {
        self.check()?;
        self.put(&mut self.read.lock(), question, Box::new(|_, _| ()))?;
        self.flush(&mut locked(&self.unsent)).map(drop)
    }

    /// Waits until `until` for the answer to that question; `None` where there is none yet.
    pub(crate) fn answered(&self, until: Instant) -> Result<Option<R>> {
        self.check()?;
        let Some(mut incoming) = self.read.wait(until)? else { return Ok(None) };
        let found = self.next(&mut incoming, UNASKED + 1, until, &mut |_| ())?;
        Ok(found.map(|(answer, _)| answer))
    }

    /// Queues a question after what was not sent yet. Returns its number.
    fn put(&self, incoming: &mut Incoming<R>, question: &impl Serialize, hears: Hears<R>) -> Result<u64> {
        self.alive()?;
        incoming.waiting.push_back(hears);
        let number = incoming.answered + incoming.waiting.len() as u64;
        locked(&self.unsent).bytes.extend(frame(number, question));
        Ok(number)
    }

    /// Returns the answer to the question of this number; `None` where none has come until then.
    fn next(
        &self,
        incoming: &mut Incoming<R>,
        number: u64,
        until: Instant,
        see: &mut dyn FnMut(R),
    ) -> Result<Option<(R, Vec<OwnedFd>)>> {
        let asleep = until.min(now() + SPIN);
        loop {
            let sent = self.flush(&mut locked(&self.unsent));
            // The refusal of a connection can be read even though nothing can be sent.
            if let Some((answer, files)) = self.take_in(incoming, Some(number), see)? {
                return answer.refusal().map_or(Ok(Some((answer, files))), |why| Err(refused(why)));
            }
            self.alive()?;
            let is_sent = match sent {
                Ok(is_sent) => is_sent,
                Err(error) => {
                    incoming.end(End::Closed);
                    return Err(error);
                }
            };
            let events = if is_sent { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            if now() < asleep {
                thread::yield_now();
            } else if self.has_ended() {
                incoming.end(End::Closed);
            } else if !self.wait(events, until) {
                return Ok(None);
            }
        }
    }

    /// Reads what has come, without waiting. Returns the answer to the question of this number, with its descriptors.
    fn take_in(
        &self,
        incoming: &mut Incoming<R>,
        asked: Option<u64>,
        see: &mut dyn FnMut(R),
    ) -> Result<Option<(R, Vec<OwnedFd>)>> {
        let (mut bytes, mut read) = ([0; CHUNK], 0);
        loop {
            while self.ended.get().is_none() {
                match incoming.frames.next::<R>() {
                    Ok(None) => break,
                    Ok(Some((UNASKED, notice))) if notice.is_notice() => see(notice),
                    Ok(Some((UNASKED, said))) => {
                        incoming.end(said.refusal().map_or(End::Broken, End::Refused));
                    }
                    Ok(Some((number, answer))) if !answer.is_notice() => {
                        let Some(hears) = incoming.answer_to(number) else {
                            incoming.end(End::Broken);
                            break;
                        };
                        let (files, is_awaited) = (incoming.files_of(&answer), asked == Some(number));
                        hears(&answer, is_awaited && files.is_ok());
                        if is_awaited {
                            return files.map(|files| Some((answer, files)));
                        }
                    }
                    Ok(Some(_)) => incoming.end(End::Broken),
                    Err(Why::Version) => incoming.end(End::Refused(Why::Version)),
                    Err(_) => incoming.end(End::Broken),
                }
            }
            if self.ended.get().is_some() || read >= MOST_AT_ONCE {
                return Ok(None);
            }
            // The bytes of one frame at a time: what comes with them belongs to it.
            let wanted = incoming.frames.missing().min(CHUNK);
            match socket::receive(&self.socket, &mut bytes[..wanted]) {
                Ok((0, _)) => incoming.end(End::Closed),
                Ok((received, files)) => {
                    read += received;
                    incoming.frames.add(&bytes[..received]);
                    if let Some(files) = files {
                        incoming.came(files);
                    }
                }
                Err(error) if error.kind() == Io::WouldBlock => return Ok(None),
                Err(_) => incoming.end(End::Closed),
            }
        }
    }

    /// Returns whether the process has ended, as far as this process can see it.
    fn has_ended(&self) -> bool {
        let process = self.process.as_ref().map(|process| PollFd::new(process, PollFlags::IN));
        process.is_some_and(|process| rustix::event::poll(&mut [process], Some(&NOW)).is_ok_and(|ready| ready > 0))
    }

    /// Waits for the socket. Returns whether there was time left.
    fn wait(&self, what: PollFlags, until: Instant) -> bool {
        let left = until.saturating_duration_since(now());
        let mut asked = vec![PollFd::new(&self.socket, what)];
        asked.extend(self.process.as_ref().map(|process| PollFd::new(process, PollFlags::IN)));
        let _ = sync::poll(&mut asked, Some(left));
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

    /// Sends a message that has no answer, without waiting. If the socket is full, a thread waits.
    pub(crate) fn say(self: &Arc<Self>, message: &impl Serialize) {
        if self.is_elsewhere() {
            return;
        }
        let mut unsent = locked(&self.unsent);
        unsent.bytes.extend(frame(UNASKED, message));
        // A process that has ended needs no message.
        if matches!(self.flush(&mut unsent), Ok(false)) && !unsent.has_thread {
            let channel = Arc::clone(self);
            // Without a thread, the next question sends it, or the end of this process implies it.
            let thread = thread::Builder::new().name("truebridge-ipc".into()).spawn(move || channel.drain());
            unsent.has_thread = thread.is_ok();
        }
    }

    /// Sends the rest, as long as the process lives.
    fn drain(&self) {
        loop {
            self.wait(PollFlags::OUT, now() + PATIENCE);
            let mut unsent = locked(&self.unsent);
            if self.has_ended() || !matches!(self.flush(&mut unsent), Ok(false)) {
                unsent.has_thread = false;
                return;
            }
        }
    }
}

impl<R> Channel<R> {
    /// Ends the connection, even if forks of this process still have its socket.
    pub(crate) fn close(&self) {
        if self.own == sync::process() {
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl<R> Drop for Channel<R> {
    fn drop(&mut self) {
        self.close();
    }
}
