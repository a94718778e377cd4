//! Memory of devices, and the order of the work on it across processes.
//!
//! A process creates two streams on each device: one for what it shares with others, one for what it has opened.
//! Shared memory is read in the first stream, so that core's release makes the owner wait for what that stream waits for.
//! Opened memory is owned by the second.
//!
//! The driver takes handles of streams unchecked. Only this crate can call functions here that take a stream, and each
//! stream is alive: it is one of those two, which live as long as the process; or that of a tensor whose export the caller
//! holds ([`DeviceBuffer`]); or one that the caller of an unsafe public function ([`Opened::keep_for`](crate::Opened),
//! [`free`](crate::free)) guarantees.

mod closer;
mod fence;
mod orders;
mod page;
mod slot;
mod watch;

use crate::channel::broken;
use crate::memory::Writing;
use crate::own::Own;
use crate::ticket::random;
use crate::wire::{Hex, Segment, Uuid};
use bridge_core::{Access, Device, DeviceBuffer, DeviceKind, Error, ErrorKind, Result, Reuse, Stream};
use bridge_cuda::{Opened, Outlet, Transport, ordering, sharing};
pub(crate) use closer::defer;
use orders::lane;
pub(crate) use orders::{Orders, export_after, stream};
pub(crate) use page::Role;
use rustix::fd::OwnedFd;
use slot::{OPENED, Slot, close_later};
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether work in streams touches memory of this device.
pub(crate) fn in_streams(device: Device) -> bool {
    device.kind == DeviceKind::CUDA
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
pub(crate) struct Shared {
    pub(crate) segment: Segment,
    pub(crate) files: Vec<Arc<OwnedFd>>,
    /// Its addresses here.
    pub(crate) range: Range<usize>,
    /// Lets this process open it as its own.
    pub(crate) named: Arc<Named>,
}

/// Identifies a piece of memory: a random number of the process that shares it, and a name that no other memory has
/// there, not even after it was freed.
type Name = (Hex<16>, Vec<u8>);

/// The name of memory that this process shares, as long as it does.
#[derive(Debug)]
pub(crate) struct Named(Name);

/// The addresses of what this process shares, and how often: it does not open its own memory.
static OWN: Own<BTreeMap<Name, (Range<usize>, usize)>> = Own::new();

impl Named {
    fn new(name: Name, range: &Range<usize>) -> Arc<Self> {
        OWN.lock().entry(name.clone()).or_insert_with(|| (range.clone(), 0)).1 += 1;
        Arc::new(Self(name))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let mut own = OWN.lock();
        let Some((_, times)) = own.get_mut(&self.0) else { return };
        *times -= 1;
        if *times == 0 {
            own.remove(&self.0);
        }
    }
}

/// Returns the random number that distinguishes the names of this process's allocations from those of others.
fn this_process() -> Result<Hex<16>> {
    static NUMBER: OnceLock<Hex<16>> = OnceLock::new();
    match NUMBER.get() {
        Some(number) => Ok(*number),
        None => random().map(|number| *NUMBER.get_or_init(|| Hex(number))),
    }
}

/// Returns the name of memory of a device.
fn name_of(segment: &Segment) -> Result<Name> {
    let with_numbers = |bytes: &[u8], numbers: &[u64]| {
        bytes.iter().copied().chain(numbers.iter().flat_map(|number| number.to_le_bytes())).collect()
    };
    match segment {
        Segment::Handle { process, handle, number, .. } => Ok((*process, with_numbers(&handle.0, &[*number]))),
        // The name of a freed allocation may be used again, but the allocation is closed before it is freed.
        Segment::Pool { process, pointer, .. } => Ok((*process, pointer.0.into())),
        Segment::Files { process, parts, .. } => {
            // One byte longer than a number: no other name is as long.
            let numbers: Vec<u64> = parts.iter().map(|(_, number)| *number).collect();
            Ok((*process, with_numbers(&[0], &numbers)))
        }
        Segment::File { .. } => Err(broken("a file in memory is no memory of a device")),
    }
}

/// Returns how the memory of a tensor, at the addresses `extent`, leaves the process; `None` where it does not.
pub(crate) fn shared(device: Device, extent: &Range<usize>) -> Result<Option<Shared>> {
    if !in_streams(device) || extent.is_empty() {
        return Ok(None);
    }
    let (driver, uuid) = (sharing()?, lane(device, Role::Exporter)?.uuid);
    let Some(Outlet { transport, range, numbers }) = driver.outlet(device, extent)? else { return Ok(None) };
    let (nbytes, writing, mut files) = (range.len(), Writing::Shared, Vec::new());
    // Without numbers each share has its own name.
    let process = if numbers.is_some() { this_process()? } else { Hex(random()?) };
    let mut numbers = numbers.unwrap_or_default().into_iter();
    let mut number = || numbers.next().unwrap_or_default();
    let segment = match transport {
        Transport::Handle(handle) => {
            Segment::Handle { device: uuid, process, handle: Hex(handle), number: number(), nbytes, writing }
        }
        Transport::Pool(file, pointer) => {
            files.push(Arc::new(file));
            Segment::Pool { device: uuid, process, pointer: Hex(pointer), nbytes, writing }
        }
        Transport::Files(parts) => {
            let lengths: Vec<_> = parts.iter().map(|(_, nbytes)| (*nbytes, number())).collect();
            files.extend(parts.into_iter().map(|(file, _)| Arc::new(file)));
            Segment::Files { device: uuid, process, parts: lengths, writing }
        }
    };
    let named = Named::new(name_of(&segment)?, &range);
    Ok(Some(Shared { segment, files, range, named }))
}

/// Memory of another process, mapped into this one. It is unmapped after the work in the stream for what was opened.
#[derive(Debug)]
pub(crate) struct DeviceMapping {
    device: Device,
    bytes: Range<usize>,
    /// `None` for memory of this process.
    slot: Option<Arc<Slot>>,
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
        self.slot.is_none()
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        let Ok(lane) = lane(self.device, Role::Importer) else { return };
        if slot.is_ordered() {
            if slot.leave() {
                slot.end(close);
            }
            return;
        }
        release_later(self.device, lane.stream, Then::Leave(slot));
    }
}

/// Keeps memory of another process mapped after its use, for the next one: to map it takes milliseconds. Where the driver
/// needs it unmapped, or the memory must be unmapped before its owner frees it, it is.
#[derive(Debug)]
pub(crate) struct Expected(Device, Arc<Slot>);

impl Expected {
    /// Returns `None` for memory that is not persistent mapped.
    pub(crate) fn new(mapping: &DeviceMapping) -> Option<Self> {
        let slot = mapping.slot.as_ref().filter(|slot| !slot.is_ordered())?;
        slot.expect(true);
        Some(Self(mapping.device, Arc::clone(slot)))
    }

    /// Returns whether it is this memory.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.1, &other.1)
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        // A fork has no lane: the slot, and the thread that closes, are its parent's.
        if lane(self.0, Role::Importer).is_ok() && self.1.expect(false) {
            close_later(Arc::clone(&self.1));
        }
    }
}

/// Memory that no new work uses.
struct AfterWork {
    device: Device,
    then: Then,
}

/// What happens to the memory when the work on it has run.
enum Then {
    Leave(Arc<Slot>),
    Free(usize),
    Unmap(Option<Opened>),
    /// What needed it is dropped.
    Drop(#[expect(dead_code, reason = "persistent until it is dropped")] Arc<dyn Any + Send + Sync>),
}

impl Drop for AfterWork {
    fn drop(&mut self) {
        match &mut self.then {
            Then::Leave(slot) => {
                if slot.leave() {
                    close_later(Arc::clone(slot));
                }
            }
            Then::Free(address) => {
                let Ok(driver) = sharing() else { return };
                // SAFETY: `allocate_sharable` has returned it. The work on it has run: the ordering drops this after
                // that work.
                unsafe { driver.free_sharable(self.device, *address) };
            }
            Then::Unmap(mapped) => {
                let (device, mapped) = (self.device, mapped.take());
                defer(move || mapped.into_iter().for_each(|mapped| close(device, mapped)));
            }
            Then::Drop(_) => (),
        }
    }
}

/// Does this when the work that is now in a stream has run.
fn release_later(device: Device, stream: Stream, then: Then) {
    // SAFETY: the streams of this crate are alive, as the module says.
    unsafe { ordering().release_later(device, stream, Box::new(AfterWork { device, then })) };
}

/// Drops something when the work that is now in these streams has run, on any thread; at once where there are none.
pub(crate) fn drop_after(streams: &[(Device, Stream)], what: Arc<dyn Any + Send + Sync>) {
    for (device, stream) in streams {
        release_later(*device, *stream, Then::Drop(Arc::clone(&what)));
    }
}

// SAFETY: nothing reads or writes through it; it only waits for its end.
unsafe impl DeviceBuffer for AfterWork {
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

/// Returns the driver's name of memory. Memory that is allocated after other memory was freed may get the same name.
fn called(segment: &Segment, name: &Name) -> Vec<u8> {
    match segment {
        Segment::Handle { handle, .. } => handle.0.into(),
        _ => [&name.0.0[..], &name.1[..]].concat(),
    }
}

/// Closes memory of a device that a [`Slot`] or [`DeviceMemory`] gives out.
fn close(device: Device, opened: Opened) {
    let (Ok(driver), Ok(lane)) = (sharing(), lane(device, Role::Importer)) else { return };
    // SAFETY: a slot gives out what it opened once, and only when it has no use. `DeviceMapping::drop` ends a use when
    // the work on the memory has run, or for memory of a pool when it is in this stream; `DeviceMemory::drop` likewise.
    unsafe { driver.close(device, opened, lane.stream) };
}

/// Opens a segment on a device, with its descriptors. What is open already is not mapped again, nor is what this
/// process shares, unless it is `persistent`: then it may outlive the share.
pub(crate) fn open(segment: &Segment, files: &[Arc<OwnedFd>], persistent: bool) -> Result<DeviceMapping> {
    let (name, nbytes) = (name_of(segment)?, segment.nbytes().ok_or_else(|| broken("lengths are no memory"))?);
    let (transport, uuid) = match segment {
        Segment::Handle { device, handle, .. } => (Transport::Handle(handle.0), device),
        Segment::Pool { device, pointer, .. } => {
            let file = copies(files)?.pop().ok_or_else(|| broken("a descriptor is missing"))?;
            (Transport::Pool(file, pointer.0), device)
        }
        Segment::Files { device, parts, .. } => {
            let lengths = parts.iter().map(|(nbytes, _)| *nbytes);
            (Transport::Files(copies(files)?.into_iter().zip(lengths).collect()), device)
        }
        Segment::File { .. } => return Err(broken("a file in memory is no memory of a device")),
    };
    let (device, own) = (device_of(uuid)?, OWN.lock().get(&name).map(|(range, _)| range.clone()));
    let mapping = match own.filter(|_| !persistent) {
        Some(bytes) => DeviceMapping { device, bytes, slot: None },
        None => mapping(device, called(segment, &name), &name, &transport)?,
    };
    match mapping.bytes.len() >= nbytes {
        true => Ok(mapping),
        false => Err(broken("its device memory is shorter than declared")),
    }
}

fn mapping(device: Device, called: Vec<u8>, name: &Name, transport: &Transport) -> Result<DeviceMapping> {
    let (slot, bytes) = OPENED.enter(called, (name, device), || sharing()?.open(device, transport), close)?;
    Ok(DeviceMapping { device, bytes, slot: Some(slot) })
}

fn copies(files: &[Arc<OwnedFd>]) -> Result<Vec<OwnedFd>> {
    let copies: std::io::Result<_> = files.iter().map(|file| file.try_clone()).collect();
    copies.map_err(|error| {
        Error::new(ErrorKind::OutOfMemory, "too many files are open: raise the limit (ulimit -n)").caused_by(error)
    })
}

/// Memory of a device that this process has allocated to share. It is freed after the work in the stream for what is
/// shared.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    device: Device,
    address: usize,
    /// The mapping of memory that may outlive this process.
    mapped: Option<Opened>,
}

impl DeviceMemory {
    /// Allocates memory, which a descriptor of it keeps beyond the end of this process if it `outlives`.
    pub(crate) fn new(device: Device, nbytes: usize, outlives: bool) -> Result<Self> {
        let driver = sharing()?;
        if outlives {
            let mapped = driver.allocate_outliving(device, nbytes)?;
            return Ok(Self { device, address: mapped.range.start, mapped: Some(mapped) });
        }
        Ok(Self { device, address: driver.allocate_sharable(device, nbytes)?, mapped: None })
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(lane) = lane(self.device, Role::Exporter) else { return };
        let then = self.mapped.take().map_or(Then::Free(self.address), |mapped| Then::Unmap(Some(mapped)));
        release_later(self.device, lane.stream, then);
    }
}
