//! The process that opens: connections, and the leases that come through them.

mod connection;
mod leases;
mod stays;

use crate::channel::{broken, refused};
use crate::device::{self, DeviceMapping, Expected, Role};
use crate::memory::{self, Mapping, Writing};
use crate::own::Own;
use crate::process;
use crate::sync::MutexGuard;
use crate::tensor::{IpcTensor, Keeps};
use crate::ticket::Ticket;
use crate::wire::{Content, Described, Segment, Why};
use bridge_core::{Access, Device, Error, ErrorKind, Export, Layout, Result, Stream};
use connection::{Connection, Share};
use leases::Extents;
pub use leases::Leases;
use rustix::fd::OwnedFd;
use smallvec::SmallVec;
pub use stays::StaysMapped;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::vec;

/// A lease on the share of another process. The drop returns it, after the work on these devices.
pub(crate) struct Lease {
    share: Share,
    number: u64,
    devices: Vec<Device>,
    /// Whether the store that has it ends: other processes may still use the memory.
    is_lost: Arc<AtomicBool>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.share.give_back(self.number, &self.devices, self.is_lost.load(Relaxed));
    }
}

/// A lease, with its memory as this process sees it.
pub(crate) struct Import {
    /// `None` in the drop.
    lease: Option<Lease>,
    /// What a store shares, and the ticket for it: this process can hand it to the store's successor.
    persistent: Option<(Ticket, Content)>,
    /// Whether this process shares it itself.
    is_ours: bool,
    segments: Vec<Open>,
    /// The addresses of its tensors on devices, whose segments also hold other tensors.
    tensors: OnceLock<Extents>,
}

/// A segment of a share, open in this process.
pub(crate) struct Open {
    memory: Mapped,
    /// What it is, and its descriptors, to share it again.
    pub(crate) segment: Segment,
    pub(crate) files: Vec<Arc<OwnedFd>>,
}

enum Mapped {
    Host(Arc<Mapping>),
    Device(DeviceMapping),
}

impl Open {
    /// Opens a segment, and takes its descriptors from `files`.
    fn new(segment: Segment, files: &mut vec::IntoIter<OwnedFd>, persistent: bool) -> Result<Self> {
        let files: Vec<_> = files.take(segment.files()).map(Arc::new).collect();
        let memory = match (&segment, &files[..]) {
            (Segment::File { nbytes, writing }, [file]) => Mapped::Host(memory::open(file, *nbytes, *writing)?),
            (Segment::File { .. }, _) => return Err(broken("a descriptor is missing")),
            (segment, files) => Mapped::Device(device::open(segment, files, persistent)?),
        };
        Ok(Self { memory, segment, files })
    }

    /// Returns its addresses in this process.
    pub(crate) fn bytes(&self) -> Range<usize> {
        match &self.memory {
            Mapped::Host(mapping) => mapping.bytes(),
            Mapped::Device(mapping) => mapping.bytes(),
        }
    }

    fn is_own(&self) -> bool {
        matches!(&self.memory, Mapped::Device(mapping) if mapping.is_own())
    }

    /// Returns the device of this process that it is on.
    pub(crate) fn device(&self) -> Device {
        match &self.memory {
            Mapped::Host(_) => Device::CPU,
            Mapped::Device(mapping) => mapping.device(),
        }
    }
}

/// The segments of other processes that are open in this one, by address. A segment of a device, and one of the host that
/// all may write to, may belong to several leases.
type Registry = BTreeMap<usize, SmallVec<[(Weak<Import>, usize); 1]>>;

static OPEN: Own<Registry> = Own::new();

fn registry() -> MutexGuard<'static, Registry> {
    OPEN.lock()
}

/// Returns an error for a tensor of any framework that lies in memory of another process which has ended or has revoked
/// the share.
///
/// # Errors
///
/// [`ErrorKind::Gone`].
pub fn check(exported: &Export) -> Result<()> {
    containing(exported).map_or(Ok(()), |(import, _)| import.check())
}

/// Returns whether this process has a lease of another one.
pub fn is_leasing() -> bool {
    !OPEN.is_untouched() && !registry().is_empty()
}

/// Returns the lease that a tensor's memory is on, and the number of the segment.
pub(crate) fn containing(exported: &Export) -> Option<(Arc<Import>, usize)> {
    let extent = exported.layout().extent_at(exported.data(), None).ok()?;
    let found: SmallVec<[_; 1]> = match registry().range(..=extent.start).next_back() {
        Some((_, found)) if !extent.is_empty() => {
            found.iter().filter_map(|(import, number)| Some((import.upgrade()?, *number))).collect()
        }
        _ => return None,
    };
    let mut found: SmallVec<[_; 1]> =
        found.into_iter().filter(|(import, number)| import.has(*number, &extent)).collect();
    // What this process passes on is revoked with what it has opened.
    if found.iter().any(|(import, _)| !import.is_ours) {
        found.retain(|(import, _)| !import.is_ours);
    }
    // If the memory has several leases, one that is still valid.
    let good = (found.len() > 1).then(|| found.iter().position(|(import, _)| import.check().is_ok())).flatten();
    (!found.is_empty()).then(|| found.swap_remove(good.unwrap_or(0)))
}

impl Drop for Import {
    fn drop(&mut self) {
        let mut open = registry();
        for segment in &self.segments {
            let start = segment.bytes().start;
            if let Some(leases) = open.get_mut(&start) {
                leases.retain(|(import, _)| !std::ptr::eq(import.as_ptr(), self));
                if leases.is_empty() {
                    open.remove(&start);
                }
            }
        }
        drop(open);
        let mut devices: Vec<Device> =
            self.segments.iter().map(Open::device).filter(|on| device::in_streams(*on)).collect();
        devices.dedup();
        // Once the other process has the lease back, it may write to the memory again, and free it.
        self.segments.clear();
        let Some(mut lease) = self.lease.take() else { return };
        match self.persistent {
            // A store waits for no work: the lease is returned when that has run.
            Some(_) => {
                let streams = devices.iter().filter_map(|on| Some((*on, device::stream(*on, Role::Importer).ok()?)));
                device::drop_after(&streams.collect::<Vec<_>>(), Arc::new(lease));
            }
            // After the readers here, and where memory of a pool was closed.
            None => lease.devices = devices,
        }
    }
}

impl Keeps for Import {
    /// Returns an error also where the other process has ended, unless it is a store: its memory needs no process.
    fn check(&self) -> Result<()> {
        match (&self.persistent, &self.lease) {
            (None, Some(lease)) => lease.share.check(),
            _ => Ok(()),
        }
    }

    fn expected(&self) -> Vec<Expected> {
        let mapping = |open: &Open| match &open.memory {
            Mapped::Host(_) => None,
            Mapped::Device(mapping) => Expected::new(mapping),
        };
        self.segments.iter().filter_map(mapping).collect()
    }
}

impl Import {
    pub(crate) fn segment(&self, number: usize) -> &Open {
        &self.segments[number]
    }

    /// Returns whether its memory needs no process.
    pub(crate) fn is_persistent(&self) -> bool {
        self.persistent.is_some()
    }

    /// Returns whether these addresses are of its tensors in a segment.
    fn has(&self, number: usize, extent: &Range<usize>) -> bool {
        let open = self.segment(number);
        let (whole, shared) = (open.bytes(), device::in_streams(open.device()));
        let tensor = || self.tensors.get().is_some_and(|tensors| tensors.contain(extent));
        whole.start <= extent.start && extent.end <= whole.end && (!shared || tensor())
    }
}

/// What a share holds, open in this process.
#[derive(Debug)]
#[non_exhaustive]
pub struct Opened {
    /// The tensors, in the order in which they were shared.
    pub tensors: Vec<IpcTensor>,
    /// Their tree, as the process that made the share describes it.
    pub tree: Option<String>,
}

impl Opened {
    /// Keeps the tensors until the work that is now in these streams has run, and drops them then, on any thread. So the
    /// process that shares them gets them back when this one has read them, and its device waits for no work of this one.
    ///
    /// # Safety
    ///
    /// Each stream belongs to the device next to it, and is a default stream or has not been destroyed.
    pub unsafe fn keep_for(self, streams: &[(Device, Stream)]) {
        device::drop_after(streams, Arc::new(self.tensors));
    }
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
        return Err(expired());
    }
    let (lease, content, files) = leased(ticket, None).map_err(|error| match (error.kind(), ticket.remaining()) {
        // A ticket has whole seconds, and its share ends within the last one.
        (ErrorKind::Gone, None | Some(0 | 1)) => expired().caused_by(error),
        _ => error,
    })?;
    let persistent = content.persistent.then(|| (ticket.clone(), content.clone()));
    let is_ours = process::exporter_of(ticket).is_some_and(|exporter| exporter.has_made(ticket));
    // From here on the drop returns the lease.
    let mut import = Import { lease: Some(lease), persistent, is_ours, segments: Vec::new(), tensors: OnceLock::new() };
    let Content { segments, tensors, points, tree, persistent } = content;
    let mut files = files.into_iter();
    for segment in segments {
        import.segments.push(Open::new(segment, &mut files, persistent)?);
    }
    let page = files.next();
    import.lease.as_ref().map_or(Ok(()), |lease| lease.share.wait_for(&points, page.as_ref()))?;
    let import = Arc::new(import);
    let tensors = tensors.iter().map(|described| tensor(described, &import)).collect::<Result<Vec<_>>>()?;
    let on_devices = tensors.iter().filter(|tensor| device::in_streams(tensor.device()));
    let extents = on_devices.filter_map(|tensor| tensor.layout().extent_at(tensor.data(), None).ok());
    import.tensors.get_or_init(|| extents.collect());
    let mut open = registry();
    // What this process shares with itself is its own memory.
    for (number, segment) in import.segments.iter().enumerate().filter(|(_, segment)| !segment.is_own()) {
        open.entry(segment.bytes().start).or_default().push((Arc::downgrade(&import), number));
    }
    drop(open);
    Ok(Opened { tensors, tree })
}

/// Asks the process of a ticket for a lease; as a store, with what says that the store ends. Returns it with the
/// content and its descriptors.
fn leased(ticket: &Ticket, store: Option<&Arc<AtomicBool>>) -> Result<(Lease, Content, Vec<OwnedFd>)> {
    let (number, token) = ticket.share();
    let share = Share::new(Connection::to(ticket.socket())?, number);
    let (number, content, files) = share.open(token, store.is_some())?;
    let is_lost = store.map_or_else(Arc::default, Arc::clone);
    Ok((Lease { share, number, devices: Vec::new(), is_lost }, content, files))
}

/// Takes over the memory of a ticket for other processes, without opening it. Returns the content and its descriptors,
/// and the lease, which lasts until it is dropped. `ends` says whether the store ends then.
///
/// # Errors
///
/// Those of [`open`], and [`ErrorKind::Argument`] for memory that ends with its process.
pub(crate) fn adopt(ticket: &Ticket, ends: &Arc<AtomicBool>) -> Result<(Content, Vec<Arc<OwnedFd>>, Lease)> {
    let (lease, content, files) = leased(ticket, Some(ends))?;
    if !content.segments.iter().all(Segment::outlives) {
        return Err(refused(Why::NotPersistent));
    }
    if !content.points.is_empty() {
        return Err(broken("its memory is still written"));
    }
    let mut left = files.iter();
    for segment in &content.segments {
        let files = left.by_ref().take(segment.files()).collect::<Vec<_>>();
        if let (Segment::File { nbytes, writing }, [file]) = (segment, &files[..]) {
            memory::check(file, *nbytes, *writing)?;
            memory::check_length(file)?;
        }
    }
    Ok((content, files.into_iter().map(Arc::new).collect(), lease))
}

/// Returns what a store shares for a ticket, with its descriptors, if this process has it open and the store has not
/// revoked it.
pub(crate) fn persistent(ticket: &Ticket) -> Option<(Content, Vec<Arc<OwnedFd>>)> {
    let open: Vec<_> = registry().values().flatten().filter_map(|(import, _)| import.upgrade()).collect();
    let import = open.into_iter().find(|import| import.persistent.as_ref().is_some_and(|(own, _)| own == ticket))?;
    let is_revoked = import.lease.as_ref().is_none_or(|lease| lease.share.is_revoked());
    let (_, content) = import.persistent.as_ref().filter(|_| !is_revoked)?;
    Some((content.clone(), import.segments.iter().flat_map(|open| open.files.iter().cloned()).collect()))
}

fn expired() -> Error {
    Error::new(ErrorKind::Gone, "the ticket has expired: ask for a new one, or share with a longer time")
}

/// Returns a tensor that another process describes, after the checks that it lies in its segment.
fn tensor(described: &Described, import: &Arc<Import>) -> Result<IpcTensor> {
    let Described { segment, offset, dtype, ref shape, ref strides } = *described;
    let open = import.segments.get(segment).ok_or_else(|| broken("a tensor has no segment"))?;
    let (bytes, device) = (open.bytes(), open.device());
    let wrong = |error: Error| broken("tensor exceeds its shared segment").caused_by(error);
    let layout = Layout::new(dtype, shape, Some(strides), 0).map_err(wrong)?;
    let data = bytes.start.checked_add(offset).ok_or_else(|| broken("an offset is too large"))?;
    layout.extent_at(data, Some(&bytes)).map_err(wrong)?;
    let access = if open.segment.writing() == Writing::Never { Access::ReadOnly } else { Access::ReadWrite };
    let stream = if device::in_streams(device) { Some(device::stream(device, Role::Importer)?) } else { None };
    Ok(IpcTensor::imported((data, dtype, layout), (device, access, stream), Arc::clone(import) as _))
}
