//! The process that opens: connections, and the leases that come through them.

mod connection;

use crate::line::broken;
use crate::memory::{self, Mapping, Writing};
use crate::tensor::IpcTensor;
use crate::ticket::Ticket;
use crate::wire::{Content, Described, Segment};
use bridge_core::{Access, Error, ErrorKind, Layout, Lent, Result};
use connection::Connection;
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::vec;

/// A lease on the share of another process, with its memory as this process sees it. The drop gives it back.
pub(crate) struct Import {
    connection: Arc<Connection>,
    share: u64,
    lease: u64,
    segments: Vec<Open>,
}

/// A segment of a share, open in this process.
pub(crate) struct Open {
    mapping: Mapping,
    /// To share it again.
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) writing: Writing,
}

impl Open {
    /// Returns its addresses in this process.
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.mapping.bytes()
    }
}

/// The segments that are open in this process, by address.
static OPEN: Mutex<BTreeMap<usize, (Weak<Import>, usize)>> = Mutex::new(BTreeMap::new());

fn registry() -> MutexGuard<'static, BTreeMap<usize, (Weak<Import>, usize)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns an error for a tensor of any framework that lies in memory of another process which has ended or has revoked
/// the share.
///
/// # Errors
///
/// [`ErrorKind::Gone`].
pub fn check(lent: &Lent) -> Result<()> {
    containing(lent).map_or(Ok(()), |(import, _)| import.check())
}

/// Returns whether this process has a lease of another one.
pub fn is_leasing() -> bool {
    !registry().is_empty()
}

/// Returns the lease that a tensor's memory is on, and the number of the segment.
pub(crate) fn containing(lent: &Lent) -> Option<(Arc<Import>, usize)> {
    let hull = lent.layout().hull(lent.data(), None).ok()?;
    let (import, number) = registry().range(..=hull.start).next_back().map(|(_, found)| found.clone())?;
    let import = import.upgrade()?;
    let inside = lent.layout().numel() > 0 && hull.end <= import.segment(number).bytes().end;
    inside.then_some((import, number))
}

impl Drop for Import {
    fn drop(&mut self) {
        let mut open = registry();
        self.segments.iter().for_each(|segment| drop(open.remove(&segment.bytes().start)));
        drop(open);
        // The other process may write to the memory again once it has the lease back.
        self.segments.clear();
        self.connection.give_back(self.lease);
    }
}

impl Import {
    /// Returns an error where the memory is no longer lent: the share was revoked, or the other process has ended.
    pub(crate) fn check(&self) -> Result<()> {
        self.connection.check(self.share)
    }

    pub(crate) fn segment(&self, number: usize) -> &Open {
        &self.segments[number]
    }
}

/// What a share holds, open in this process.
pub struct Opened {
    /// The tensors, in the order in which they were shared.
    pub tensors: Vec<IpcTensor>,
    /// How they lie in a tree, in the words of the process that made the share.
    pub tree: Option<String>,
}

/// Opens a ticket: its tensors lie in memory of the process that made it, which keeps them until the last of them, and
/// the last view of them, is dropped here.
///
/// # Errors
///
/// - [`ErrorKind::Gone`]: the ticket has expired, was revoked, or its process has ended.
/// - [`ErrorKind::Denied`]: the process is of another user and does not let this one in, or is not the one that made
///   the ticket.
/// - [`ErrorKind::Busy`]: it has as many connections or leases as it allows, or does not answer in time.
/// - [`ErrorKind::Protocol`], [`ErrorKind::Version`]: it does not speak this protocol, or another version of it.
/// - [`ErrorKind::OutOfMemory`]: this process has no address space, or too many files open.
pub fn open(ticket: &Ticket) -> Result<Opened> {
    if ticket.remaining().is_none() {
        return Err(Error::new(
            ErrorKind::Gone,
            "the ticket has expired: ask for a new one, or share with a longer time",
        ));
    }
    let (share, token) = ticket.share();
    let connection = Connection::to(ticket.socket())?;
    let (lease, content, files) = connection.open(share, token)?;
    // From here on the drop gives the lease back.
    let mut import = Import { connection, share, lease, segments: Vec::new() };
    let Content { segments, tensors, tree } = content;
    let mut files = files.into_iter();
    for segment in &segments {
        import.segments.push(open_segment(segment, &mut files)?);
    }
    let import = Arc::new(import);
    let numbered = import.segments.iter().enumerate();
    registry().extend(numbered.map(|(number, open)| (open.bytes().start, (Arc::downgrade(&import), number))));
    let tensors = tensors.iter().map(|described| tensor(described, &import)).collect::<Result<_>>()?;
    Ok(Opened { tensors, tree })
}

fn open_segment(segment: &Segment, files: &mut vec::IntoIter<OwnedFd>) -> Result<Open> {
    let Segment::File { nbytes, writing } = *segment;
    let file = files.next().ok_or_else(|| broken("a descriptor is missing"))?;
    Ok(Open { mapping: memory::open(&file, nbytes, writing)?, file: Arc::new(file), writing })
}

/// Returns a tensor that another process describes, after the checks that it lies in its segment.
fn tensor(described: &Described, import: &Arc<Import>) -> Result<IpcTensor> {
    let Described { segment, offset, dtype, ref shape, ref strides } = *described;
    let open = import.segments.get(segment).ok_or_else(|| broken("a tensor lies in no segment"))?;
    let bytes = open.mapping.bytes();
    let wrong = |error: Error| broken("a tensor does not lie in its segment").caused_by(error);
    let layout = Layout::new(dtype, shape, Some(strides), 0).map_err(wrong)?;
    let data = bytes.start.checked_add(offset).ok_or_else(|| broken("an offset is too large"))?;
    layout.hull(data, Some(&bytes)).map_err(wrong)?;
    let access = if open.writing == Writing::Never { Access::ReadOnly } else { Access::ReadWrite };
    Ok(IpcTensor::imported(data, dtype, layout, access, Arc::clone(import)))
}
