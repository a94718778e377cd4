//! The errors of a connection through which no more messages come.

use crate::memory::failed;
use crate::wire::Why;
use bridge_core::{Error, ErrorKind};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Why no more messages come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Closed,
    Refused(Why),
    Broken,
}

/// Returns the error for a process that does not keep to the protocol.
#[cold]
pub(crate) fn broken(what: &str) -> Error {
    let text =
        format!("the other process does not speak this protocol ({what}): use one version of truebridge in both");
    Error::new(ErrorKind::Protocol, text)
}

pub(crate) fn gone(what: &str) -> Error {
    Error::new(ErrorKind::Gone, format!("{what}: ask for a new ticket, or connect again"))
}

impl End {
    pub(super) fn error(self) -> Error {
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
            "the sharing process refuses this user: run both as one user, or accept each other in `users`",
        ),
        Why::Unknown => (
            ErrorKind::Gone,
            "there is no such share: it was revoked, or the ticket is not of that process. Ask for a new one",
        ),
        Why::Busy => (
            ErrorKind::Busy,
            "the sharing process has reached its limit of connections or leases: close some, or raise its limits",
        ),
        Why::Version => {
            (ErrorKind::Version, "the sharing process has another version: use one version of truebridge in both")
        }
        Why::Failed => (ErrorKind::Driver, "the driver failed in the sharing process: see its errors"),
        Why::Full => (
            ErrorKind::OutOfMemory,
            "the store is full: remove names, or start it with a larger --max-bytes, or more open files (ulimit -n)",
        ),
        Why::NotPersistent => (
            ErrorKind::Argument,
            "the memory ends with the process that shares it, so a store cannot keep it: put a message of Message::outliving",
        ),
        Why::Protocol => return broken("it did not understand the request"),
    };
    Error::new(kind, text)
}

/// Returns the error of a wait that was too long. The other end may be in this process, and find no free descriptor.
pub(super) fn busy(what: &str) -> Error {
    if let Err(errno @ (Errno::MFILE | Errno::NFILE)) = eventfd(0, EventfdFlags::CLOEXEC) {
        return failed(what)(errno);
    }
    Error::new(ErrorKind::Busy, format!("{what}: try again"))
}
