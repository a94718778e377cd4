//! Sockets: who listens and who calls, and bytes and descriptors through them.

use crate::wire::MAX_FILES;
use bridge_core::{Error, ErrorKind, Result};
use rustix::cmsg_space;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::VecDeque;
use std::fs;
use std::io::{self, ErrorKind as Io, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::ptr;

/// Sends bytes, and descriptors with the first of them, without waiting. Returns how many bytes were sent.
pub(crate) fn send(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FILES))];
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

/// Receives bytes, and adds the descriptors that came with them, without waiting. Returns how many bytes were received:
/// 0 at the end of the stream.
///
/// # Errors
///
/// Also where descriptors were lost, because this process has too many files open.
pub(crate) fn receive(socket: &UnixStream, bytes: &mut [u8], files: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => (),
            received => break received?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            files.extend(came);
        }
    }
    match received.flags.contains(ReturnFlags::CTRUNC) {
        true => Err(io::Error::from(Errno::MFILE)),
        false => Ok(received.bytes),
    }
}

/// The process at the other end of a socket, when it was connected or began to listen.
pub(crate) struct OtherEnd {
    /// The user, by number.
    pub(crate) user: u32,
    /// Becomes readable when the process ends. `None` where this process cannot see it.
    pub(crate) process: Option<OwnedFd>,
    /// Whether the process has ended already.
    pub(crate) has_ended: bool,
}

/// Returns who is at the other end.
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
    // A process of another namespace has the number 0 here.
    let process = Pid::from_raw(found.pid).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    // A socket that a fork has kept may be there after its process.
    let has_ended = matches!(process, Some(Err(Errno::SRCH)));
    Ok(OtherEnd { user: found.uid, process: process.and_then(|process| process.ok()), has_ended })
}

/// The most bytes of a socket's path (`sockaddr_un`, with the 0 at its end).
const MAX_PATH: usize = 107;

/// Listens at a path. With `private`, this user alone may connect.
///
/// # Errors
///
/// [`ErrorKind::Argument`] for a path that is too long or names another file, [`ErrorKind::Busy`] where another process
/// listens, [`ErrorKind::Denied`], and errors of the system.
pub(crate) fn listen(path: &Path, private: bool) -> Result<UnixListener> {
    let refused =
        |kind, what: &str| Error::new(kind, format!("no socket at {}: {what}. Name another path", path.display()));
    if path.as_os_str().len() > MAX_PATH {
        return Err(refused(ErrorKind::Argument, &format!("the path has more than {MAX_PATH} bytes")));
    }
    if is_abandoned(path) {
        let _ = fs::remove_file(path);
    }
    let listener = UnixListener::bind(path).map_err(|error| {
        let (kind, what) = match error.kind() {
            Io::PermissionDenied => (ErrorKind::Denied, "this user may not make one there"),
            Io::AddrInUse if is_socket(path) => (ErrorKind::Busy, "another process listens there"),
            Io::AddrInUse => (ErrorKind::Argument, "it is another file"),
            _ => (ErrorKind::Argument, "the system refuses it"),
        };
        refused(kind, what).caused_by(error)
    })?;
    let mode = if private { 0o600 } else { 0o666 };
    let ready =
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).and_then(|()| listener.set_nonblocking(true));
    ready.map_err(|error| refused(ErrorKind::Framework, "it cannot be made ready").caused_by(error))?;
    Ok(listener)
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Returns whether a path is the socket of a process that has ended.
pub(crate) fn is_abandoned(path: &Path) -> bool {
    is_socket(path) && connect(path).is_err_and(|errno| errno == Errno::CONNREFUSED)
}

/// Returns a socket that never blocks, connected to this path. [`Errno::AGAIN`] where the other process has as many
/// callers as the system lets wait.
pub(crate) fn connect(path: &Path) -> rustix::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}
