//! Bytes and descriptors through a socket.

use crate::wire::MAX_FILES;
use rustix::cmsg_space;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
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
    let process = Pid::from_raw(found.pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    Ok(OtherEnd { user: found.uid, process })
}
