//! Sockets: listening, connecting, and sending bytes and descriptors.

use crate::memory::failed;
use crate::ticket::random;
use crate::wire::FILES_AT_ONCE;
use bridge_core::{Error, ErrorKind, Result};
use rustix::cmsg_space;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs;
use std::io::{self, ErrorKind as Io, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::{Duration, Instant};

/// Sends bytes, and at most [`FILES_AT_ONCE`] descriptors with the first of them, without waiting. Returns how many bytes
/// were sent.
pub(crate) fn send(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_AT_ONCE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::from(Errno::INVAL));
    }
    loop {
        let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        match sent {
            Err(Errno::INTR) => (),
            sent => return Ok(sent?),
        }
    }
}

/// The descriptors that came with one send; `None` where some were lost, because this process has too many files open.
pub(crate) type Came = Option<Vec<OwnedFd>>;

/// Receives bytes, and the descriptors that came with them, without waiting. Returns how many bytes were received, 0 at
/// the end of the stream, and the descriptors, if any were sent.
pub(crate) fn receive(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Option<Came>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_AT_ONCE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => (),
            received => break received?,
        }
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            files.extend(came);
        }
    }
    let came = match received.flags.contains(ReturnFlags::CTRUNC) {
        true => Some(None),
        false => (!files.is_empty()).then_some(Some(files)),
    };
    Ok((received.bytes, came))
}

/// The process at the other end of a socket, when it was connected or began to listen.
pub(crate) struct OtherEnd {
    /// The user, by number.
    pub(crate) user: u32,
    /// The number of the process. `None` for one of another namespace.
    pub(crate) number: Option<Pid>,
    /// Becomes readable when the process ends. `None` where this process cannot see it.
    pub(crate) process: Option<OwnedFd>,
    /// Whether the process has ended already.
    pub(crate) has_ended: bool,
}

/// Returns the process at the other end.
pub(crate) fn other_end(socket: &UnixStream) -> io::Result<OtherEnd> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of_val(&found) as libc::socklen_t;
    // SAFETY: the option is a `ucred`, and the pointers are to one and to its length.
    let code = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            ptr::from_mut(&mut found).cast(),
            &mut len,
        )
    };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    // A process of another namespace has the number 0 in this one.
    let number = Pid::from_raw(found.pid);
    let process = number.map(|number| pidfd_open(number, PidfdFlags::empty()));
    // A socket that a fork has kept may outlive its process.
    let has_ended = matches!(process, Some(Err(Errno::SRCH)));
    let process = process.map_or_else(|| process_of(socket), |process| process.ok());
    Ok(OtherEnd { user: found.uid, number, process, has_ended })
}

/// Returns the process at the other end, also one without a number in this namespace: since Linux 6.5.
fn process_of(socket: &UnixStream) -> Option<OwnedFd> {
    /// `SO_PEERPIDFD`
    const PROCESS: i32 = 77;
    let mut found: i32 = -1;
    let mut len = size_of_val(&found) as libc::socklen_t;
    // SAFETY: the option is a descriptor, and the pointers are to one and to its length.
    let code = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, PROCESS, ptr::from_mut(&mut found).cast(), &mut len)
    };
    // SAFETY: the system has made the descriptor for the caller.
    (code == 0 && found >= 0).then(|| unsafe { OwnedFd::from_raw_fd(found) })
}

/// The most bytes of a socket's path (`sockaddr_un`, with the 0 at its end).
const MAX_PATH: usize = 107;

/// The suffix of the name of a socket that does not listen yet.
pub(crate) const UNREADY: &str = "new";

/// Time for other processes to remove the sockets of ended processes from a folder.
const PATIENCE: Duration = Duration::from_secs(5);

/// The name of a socket until it listens. The drop removes it.
struct Unready(PathBuf);

impl Drop for Unready {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Listens at a path. With `private`, only this user may connect.
///
/// The socket gets its name once it listens. So the process of a named socket that refuses connections has ended, and
/// the socket may be removed.
///
/// # Errors
///
/// [`ErrorKind::Argument`] for a path that is too long or names another file, [`ErrorKind::Busy`] where another process
/// listens, [`ErrorKind::Denied`], and errors of the system.
pub(crate) fn listen(path: &Path, private: bool) -> Result<UnixListener> {
    let refused = |kind, what: &str| Error::new(kind, format!("cannot make a socket at {}: {what}", path.display()));
    let [first, second, third, fourth, ..] = random()?;
    let number = u32::from_ne_bytes([first, second, third, fourth]);
    let unready = Unready(path.with_file_name(format!("{number:08x}.{UNREADY}")));
    if path.as_os_str().len().max(unready.0.as_os_str().len()) > MAX_PATH {
        return Err(refused(ErrorKind::Argument, &format!("name a path of at most {MAX_PATH} bytes")));
    }
    let system = |error: io::Error| match too_many(&error) {
        Some(errno) => Err(failed(&format!("cannot make a socket at {}", path.display()))(errno)),
        None => Ok(error),
    };
    let listener = listening(&unready.0, private).or_else(|error| {
        let error = system(error)?;
        let (kind, advice) = match error.kind() {
            Io::PermissionDenied => (ErrorKind::Denied, ": name a folder that this user may write to"),
            Io::NotFound => (ErrorKind::Argument, ": make its folder first"),
            _ => (ErrorKind::Argument, ""),
        };
        Err(refused(kind, &format!("{error}{advice}")).caused_by(error))
    })?;
    let mut named = fs::hard_link(&unready.0, path);
    if named.is_err() {
        remove_abandoned(path, Instant::now() + PATIENCE);
        named = fs::hard_link(&unready.0, path);
    }
    // Whether another process listens is known by a connection, which takes a descriptor.
    if named.as_ref().is_err_and(|error| error.kind() == Io::AlreadyExists)
        && let Err(errno @ (Errno::MFILE | Errno::NFILE)) = connect(path)
    {
        return Err(failed(&format!("cannot make a socket at {}", path.display()))(errno));
    }
    named.map_err(|error| {
        let (kind, what) = match error.kind() {
            Io::AlreadyExists if path.is_symlink() || path.exists() && !is_socket(path) => {
                (ErrorKind::Argument, "another file has this path: name another".into())
            }
            Io::AlreadyExists => (ErrorKind::Busy, "another process listens there: name another path".into()),
            _ => (ErrorKind::Argument, error.to_string()),
        };
        refused(kind, &what).caused_by(error)
    })?;
    Ok(listener)
}

/// Returns the error of a process, or of a system, that may open no more files.
fn too_many(error: &io::Error) -> Option<Errno> {
    Errno::from_io_error(error).filter(|errno| matches!(*errno, Errno::MFILE | Errno::NFILE))
}

/// A file, by its device and its number.
type Place = (u64, u64);

/// The descriptor of a socket that listens, as it is known from outside: programs close all descriptors, and the number
/// may be that of another file then.
pub(crate) struct Descriptor {
    number: RawFd,
    file: Option<Place>,
}

impl Descriptor {
    pub(crate) fn of(listener: &UnixListener) -> Self {
        let number = listener.as_raw_fd();
        Self { number, file: of_descriptor(number) }
    }

    /// Returns whether the descriptor is still that of the socket.
    pub(crate) fn is_open(&self) -> bool {
        self.file.is_some() && of_descriptor(self.number) == self.file
    }
}

/// A socket that listens under a name: programs close all descriptors, and remove folders.
pub(crate) struct Listening {
    descriptor: Descriptor,
    name: Option<Place>,
}

impl Listening {
    pub(crate) fn new(listener: &UnixListener, path: &Path) -> Self {
        Self { descriptor: Descriptor::of(listener), name: of_name(path) }
    }

    /// Returns whether the descriptor is still that of the socket.
    pub(crate) fn is_open(&self) -> bool {
        self.descriptor.is_open()
    }

    /// Returns whether the name still leads to the socket.
    pub(crate) fn is_named(&self, path: &Path) -> bool {
        self.name.is_some() && of_name(path) == self.name
    }
}

fn of_descriptor(number: RawFd) -> Option<Place> {
    // SAFETY: the borrow ends with the call, which reads what the number stands for now, and fails where it is closed.
    let found = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) }).ok()?;
    Some((found.st_dev, found.st_ino))
}

fn of_name(path: &Path) -> Option<Place> {
    let found = rustix::fs::lstat(path).ok()?;
    Some((found.st_dev, found.st_ino))
}

/// Returns a socket that listens at a path where there is nothing yet, and never blocks.
fn listening(path: &Path, private: bool) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let mode = if private { 0o600 } else { 0o666 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    // As many callers may wait as the system allows.
    net::listen(&socket, i32::MAX)?;
    Ok(socket.into())
}

/// Removes the socket of a process that has ended. Waits until `until` for other processes that do so.
///
/// Processes that remove sockets from one folder do so in turn, under its lock. Otherwise one could remove the socket
/// with which another has replaced the abandoned one.
pub(crate) fn remove_abandoned(path: &Path, until: Instant) {
    if !is_abandoned(path) {
        return;
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(folder) = open(folder, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) else { return };
    while flock(&folder, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= until {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if is_abandoned(path) {
        let _ = fs::remove_file(path);
    }
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Returns whether a path is a socket at which no process listens. A fork of the process that did may still have it.
pub(crate) fn is_abandoned(path: &Path) -> bool {
    is_socket(path)
        && match connect(path) {
            Ok(socket) => other_end(&socket).is_ok_and(|other| other.has_ended),
            Err(errno) => errno == Errno::CONNREFUSED,
        }
}

/// Returns a socket that never blocks, connected to this path. [`Errno::AGAIN`] if as many callers wait for the other
/// process as the system allows.
pub(crate) fn connect(path: &Path) -> rustix::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fd::AsFd;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    fn has_ended(process: &OwnedFd, seconds: i64) -> bool {
        let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
        poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&time)).unwrap() > 0
    }

    /// A program that this process starts has none of them.
    #[test]
    fn descriptors_that_come_are_closed_in_other_programs() {
        let (socket, other) = UnixStream::pair().unwrap();
        send(&socket, &[1], &[other.as_fd()]).unwrap();
        let (received, files) = receive(&other, &mut [0; 2]).unwrap();
        let files = files.flatten().unwrap();
        assert_eq!((received, files.len()), (1, 1));
        assert!(rustix::io::fcntl_getfd(&files[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }

    /// As for a process of another namespace, which has no number here.
    #[test]
    fn a_process_is_seen_through_its_socket() {
        let path = std::env::temp_dir().join(format!("truebridge-process-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let (sent, wanted) = (path.clone(), "the child connects");
        let mut command = Command::new("sleep");
        command.arg("100").stdin(Stdio::null());
        let connects = move || {
            // Its socket stays open in the program.
            let socket = UnixStream::connect(&sent)?;
            rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::empty())?;
            std::mem::forget(socket);
            Ok(())
        };
        // SAFETY: the closure calls the system, and takes no lock.
        let mut child = unsafe { command.pre_exec(connects) }.spawn().expect(wanted);
        let (socket, _) = listener.accept().unwrap();
        fs::remove_file(&path).unwrap();
        // Before 6.5, Linux has no such option.
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap());
        let process = process_of(&socket);
        assert!(process.is_some() || (numbers.next(), numbers.next()) < (Some(6), Some(5)), "Linux {release}");
        if let Some(process) = process {
            assert!(!has_ended(&process, 0));
            child.kill().unwrap();
            assert!(has_ended(&process, 20));
        }
        let _ = child.kill();
        child.wait().unwrap();
    }
}
