//! Memory of devices, and the order of the work on it across processes.
//!
//! A process has two streams of its own on each device: one for what it lends to others, one for what it has opened.
//! Each has an event that other processes wait for. The memory that is lent is read in the first, so that core's
//! release makes its owner wait for what the first waits for; the memory that was opened is owned by the second.

use crate::line::broken;
use crate::memory::Writing;
use crate::ticket::random;
use crate::wire::{Hex, Point, Segment, Uuid};
use bridge_core::{Access, Device, DeviceBuffer, DeviceKind, Error, ErrorKind, Result, Reuse, Stream};
use bridge_cuda::{Handle, Opened, Outlet, Signal, Way, ordering, sharing};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// What a stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// It waits for the owners of what is lent, and for those who give it back.
    Lends,
    /// It waits for those who lend, and for the readers here.
    Opens,
}

/// A stream of this process, and the event by which other processes wait for it.
#[derive(Debug, Clone, Copy)]
struct Lane {
    stream: Stream,
    /// The number of its event.
    event: usize,
    handle: Handle,
    uuid: Uuid,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the stream of a device for a role. It lives as long as the process.
fn lane(device: Device, role: Role) -> Result<Lane> {
    static LANES: Mutex<BTreeMap<(i32, Role), Lane>> = Mutex::new(BTreeMap::new());
    let mut lanes = locked(&LANES);
    if let Some(lane) = lanes.get(&(device.index, role)) {
        return Ok(*lane);
    }
    let driver = sharing()?;
    let (signal, handle) = driver.event(device)?;
    let (stream, uuid) = (driver.stream(device)?, Hex(driver.uuid(device)?));
    let lane = Lane { stream, event: signal.number(), handle, uuid };
    lanes.insert((device.index, role), lane);
    Ok(lane)
}

/// Returns the stream of a device for a role.
pub(crate) fn stream(device: Device, role: Role) -> Result<Stream> {
    Ok(lane(device, role)?.stream)
}

/// Returns whether work in streams touches memory of this device.
pub(crate) fn in_streams(device: Device) -> bool {
    device.kind == DeviceKind::CUDA
}

/// Returns points behind all work that is now in these streams, one for each device.
pub(crate) fn points_behind(streams: &[(Device, Stream)], role: Role) -> Result<Vec<Point>> {
    let mut devices: Vec<Device> = streams.iter().map(|(device, _)| *device).collect();
    devices.sort_unstable_by_key(|device| device.index);
    devices.dedup();
    for (device, stream) in streams {
        ordering().order(*device, *stream, lane(*device, role)?.stream)?;
    }
    devices.into_iter().map(|device| point(device, role)).collect()
}

/// Returns a point behind all work that is now in the stream of a role.
pub(crate) fn point(device: Device, role: Role) -> Result<Point> {
    let lane = lane(device, role)?;
    sharing()?.record(device, &Signal::new(lane.event), lane.stream)?;
    Ok(Point { device: lane.uuid, event: Hex(lane.handle) })
}

/// Makes the stream of a role wait for the points of another process.
pub(crate) fn wait_for(points: &[Point], role: Role) -> Result<()> {
    /// The events of other processes, by their handles. They are few: two for each process and device.
    static EVENTS: Mutex<BTreeMap<Hex<64>, usize>> = Mutex::new(BTreeMap::new());
    for point in points {
        let (driver, device) = (sharing()?, device_of(&point.device)?);
        let lane = lane(device, role)?;
        // The events of this process need not be opened, and cannot be.
        let own = [Role::Lends, Role::Opens].into_iter().filter_map(|role| self::lane(device, role).ok());
        let own = own.into_iter().find(|lane| lane.handle == point.event.0).map(|lane| lane.event);
        let event = match own {
            Some(event) => event,
            None => {
                let mut events = locked(&EVENTS);
                match events.get(&point.event) {
                    Some(event) => *event,
                    None => {
                        let event = driver.open_event(device, &point.event.0)?.number();
                        events.insert(point.event, event);
                        event
                    }
                }
            }
        };
        driver.wait(device, lane.stream, &Signal::new(event))?;
    }
    Ok(())
}

/// Returns the device of this process with this name.
fn device_of(uuid: &Uuid) -> Result<Device> {
    sharing()?.device_with(&uuid.0)?.ok_or_else(|| {
        let text = "the memory is on a device that this process does not have: see CUDA_VISIBLE_DEVICES, or share a copy on the host";
        Error::new(ErrorKind::Device, text)
    })
}

/// Memory of a device that leaves the process.
#[derive(Debug, Clone)]
pub(crate) struct Lending {
    pub(crate) segment: Segment,
    pub(crate) files: Vec<Arc<OwnedFd>>,
    /// Its addresses here.
    pub(crate) range: Range<usize>,
}

/// The ranges that were lent by handles: a process does not open its own.
static OWN: Mutex<BTreeMap<Handle, Range<usize>>> = Mutex::new(BTreeMap::new());

/// Returns what tells the names of this process's allocations from those of others.
fn this_process() -> Result<Hex<16>> {
    static NUMBER: OnceLock<Hex<16>> = OnceLock::new();
    match NUMBER.get() {
        Some(number) => Ok(*number),
        None => random().map(|number| *NUMBER.get_or_init(|| Hex(number))),
    }
}

/// Returns how the memory of a tensor, at the addresses `hull`, leaves the process; `None` where it does not.
pub(crate) fn lending(device: Device, hull: &Range<usize>) -> Result<Option<Lending>> {
    if !in_streams(device) || hull.is_empty() {
        return Ok(None);
    }
    let (driver, uuid) = (sharing()?, lane(device, Role::Lends)?.uuid);
    let Some(Outlet { way, range }) = driver.outlet(device, hull)? else { return Ok(None) };
    Ok(Some(match way {
        Way::Handle(handle) => {
            locked(&OWN).insert(handle, range.clone());
            let segment =
                Segment::Handle { device: uuid, handle: Hex(handle), nbytes: range.len(), writing: Writing::Shared };
            Lending { segment, files: Vec::new(), range }
        }
        Way::Pool(file, pointer) => {
            locked(&OWN).insert(pointer, range.clone());
            let segment = Segment::Pool {
                device: uuid,
                process: this_process()?,
                pointer: Hex(pointer),
                nbytes: range.len(),
                writing: Writing::Shared,
            };
            Lending { segment, files: vec![Arc::new(file)], range }
        }
        Way::Files(parts) => {
            let (files, parts): (Vec<_>, Vec<_>) =
                parts.into_iter().map(|(file, nbytes)| (Arc::new(file), nbytes)).unzip();
            Lending { segment: Segment::Files { device: uuid, parts, writing: Writing::Shared }, files, range }
        }
    }))
}

/// Memory of another process, mapped into this one. It is unmapped behind the work in the stream for what was opened.
#[derive(Debug)]
pub(crate) struct DeviceMapping {
    device: Device,
    bytes: Range<usize>,
    /// `None` for memory of this process.
    opened: Mutex<Option<Opened>>,
}

impl DeviceMapping {
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn bytes(&self) -> Range<usize> {
        self.bytes.clone()
    }

    /// Returns whether it is memory of this process, which is not mapped again.
    pub(crate) fn is_own(&self) -> bool {
        locked(&self.opened).is_none()
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        let Some(opened) = locked(&self.opened).take() else { return };
        let Ok(lane) = lane(self.device, Role::Opens) else { return };
        if opened.closes_in_order() {
            let Ok(driver) = sharing() else { return };
            // SAFETY: `open` has mapped it, and the stream waits for all readers here.
            unsafe { driver.close(self.device, opened, lane.stream) };
            return;
        }
        let closing = Retired { device: self.device, then: Then::Close(Some(opened), lane.stream) };
        ordering().retire(self.device, lane.stream, Box::new(closing));
    }
}

/// Memory that no new work uses.
struct Retired {
    device: Device,
    then: Then,
}

/// What becomes of the memory when the work on it has run.
enum Then {
    Close(Option<Opened>, Stream),
    Free(usize),
}

impl Drop for Retired {
    fn drop(&mut self) {
        let Ok(driver) = sharing() else { return };
        // SAFETY: `open` has mapped the one, and `allocate_sharable` has returned the other. The work on it has run:
        // the ordering drops this behind that work.
        unsafe {
            match &mut self.then {
                Then::Close(opened, stream) => {
                    opened.take().into_iter().for_each(|opened| driver.close(self.device, opened, *stream));
                }
                Then::Free(address) => driver.free_sharable(self.device, *address),
            }
        }
    }
}

// SAFETY: nothing reads or writes through it; it only waits for its end.
unsafe impl DeviceBuffer for Retired {
    fn address(&self) -> usize {
        0
    }
    fn len(&self) -> usize {
        0
    }
    fn device(&self) -> Device {
        self.device
    }
    fn access(&self) -> Access {
        Access::ReadOnly
    }
    fn stream(&self) -> Option<Stream> {
        None
    }
    fn reuse(&self) -> Reuse {
        Reuse::Unknown
    }
}

/// Opens a segment on a device, and takes its descriptors off `files`. What is open already is not mapped again.
pub(crate) fn open(segment: &Segment, files: &[Arc<OwnedFd>]) -> Result<Arc<DeviceMapping>> {
    match segment {
        Segment::Handle { device, handle, nbytes, .. } => {
            block(device, (*device, handle.0), *nbytes, true, || Ok(Way::Handle(handle.0)))
        }
        // The driver's names of allocations are those of one process.
        Segment::Pool { device, process, pointer, nbytes, .. } => {
            block(device, (*process, pointer.0), *nbytes, *process == this_process()?, || {
                let file = copies(files)?.pop().ok_or_else(|| broken("a descriptor is missing"))?;
                Ok(Way::Pool(file, pointer.0))
            })
        }
        Segment::Files { device, parts, .. } => {
            let parts = copies(files)?.into_iter().zip(parts.iter().copied()).collect();
            Ok(Arc::new(mapping(device_of(device)?, &Way::Files(parts))?))
        }
        Segment::File { .. } => Err(broken("a file in memory is no memory of a device")),
    }
}

/// Returns a block of an allocator by its name, which `may_be_own` of this process. It is mapped once.
fn block(
    uuid: &Uuid,
    name: (Hex<16>, Handle),
    nbytes: usize,
    may_be_own: bool,
    way: impl FnOnce() -> Result<Way>,
) -> Result<Arc<DeviceMapping>> {
    static MAPPED: Mutex<BTreeMap<(Hex<16>, Handle), Weak<DeviceMapping>>> = Mutex::new(BTreeMap::new());
    let mut mapped = locked(&MAPPED);
    mapped.retain(|_, mapping| mapping.strong_count() > 0);
    if let Some(mapping) = mapped.get(&name).and_then(Weak::upgrade) {
        return long_enough(mapping, nbytes);
    }
    let device = device_of(uuid)?;
    let own = locked(&OWN).get(&name.1).filter(|_| may_be_own).cloned();
    let mapping = match own {
        Some(bytes) => DeviceMapping { device, bytes, opened: Mutex::new(None) },
        None => mapping(device, &way()?)?,
    };
    let mapping = Arc::new(mapping);
    mapped.insert(name, Arc::downgrade(&mapping));
    long_enough(mapping, nbytes)
}

fn copies(files: &[Arc<OwnedFd>]) -> Result<Vec<OwnedFd>> {
    let copies: std::io::Result<_> = files.iter().map(|file| file.try_clone()).collect();
    copies.map_err(|error| {
        Error::new(ErrorKind::OutOfMemory, "too many files are open: raise the limit (ulimit -n)").caused_by(error)
    })
}

fn mapping(device: Device, way: &Way) -> Result<DeviceMapping> {
    let opened = sharing()?.open(device, way)?;
    Ok(DeviceMapping { device, bytes: opened.range.clone(), opened: Mutex::new(Some(opened)) })
}

fn long_enough(mapping: Arc<DeviceMapping>, nbytes: usize) -> Result<Arc<DeviceMapping>> {
    match mapping.bytes.len() >= nbytes {
        true => Ok(mapping),
        false => Err(broken("memory of a device is shorter than was said")),
    }
}

/// Memory of a device that this process has allocated to share copies. It is freed behind the work in the stream for
/// what is lent.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    device: Device,
    address: usize,
}

impl DeviceMemory {
    pub(crate) fn new(device: Device, nbytes: usize) -> Result<Self> {
        Ok(Self { device, address: sharing()?.allocate_sharable(device, nbytes)? })
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(lane) = lane(self.device, Role::Lends) else { return };
        let freeing = Retired { device: self.device, then: Then::Free(self.address) };
        ordering().retire(self.device, lane.stream, Box::new(freeing));
    }
}
