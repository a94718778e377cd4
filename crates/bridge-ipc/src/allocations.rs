//! Fresh memory for tensors that are shared as they are: the slots of a publication, and what a store takes over.

use crate::device;
use crate::memory::{self, Writing};
use crate::own::Own;
use crate::tensor::{Arena, Ipc, IpcTensor};
use bridge_core::{Adapter, DType, Device, Error, ErrorKind, Export, Layout, Order, Result, Stream};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// What a tensor is: its dtype, its shape, and the device that it is on.
pub type Spec = (DType, Vec<i64>, Device);

/// Memory on one device, with the tensors in it, by their index among the specifications.
pub(crate) type Allocated = (Arc<Arena>, Vec<(usize, IpcTensor)>);

/// Allocates memory for compact tensors, one piece for each device, which can be kept beyond the end of this process if
/// it `outlives`.
///
/// # Safety
///
/// The caller writes every element before safe code can read it.
pub(crate) unsafe fn allocations(specs: &[Spec], outlives: bool) -> Result<Vec<Allocated>> {
    let mut devices: Vec<Device> = specs.iter().map(|(_, _, device)| *device).collect();
    devices.sort_unstable_by_key(|device| (device.kind.0, device.index));
    devices.dedup();
    devices.iter().try_for_each(|device| has_memory(*device))?;
    let allocation = |device: Device| {
        let of_device = || specs.iter().enumerate().filter(move |(_, spec)| spec.2 == device);
        let mut nbytes = 0usize;
        for (_, (dtype, shape, _)) in of_device() {
            let bytes = Layout::new(*dtype, shape, None, 0)?.nbytes();
            nbytes = nbytes.saturating_add(Arena::capacity_for(device, bytes));
        }
        let arena = Arc::new(Arena::new(device, nbytes, outlives)?);
        let adapter = Ipc::into(Arc::clone(&arena));
        let tensors = of_device().map(|(index, (dtype, shape, _))| {
            // SAFETY: the caller's obligation.
            unsafe { adapter.empty(device, *dtype, shape, Order::RowMajor) }.map(|tensor| (index, tensor))
        });
        let tensors = tensors.collect::<Result<_>>()?;
        Ok((arena, tensors))
    };
    devices.into_iter().map(allocation).collect()
}

/// The memory of [`empty`] and [`allocate`], by its first address.
static GIVEN: Own<BTreeMap<usize, Weak<Arena>>> = Own::new();

/// Makes tensors in memory that a store takes over in place ([`Names::persistent`](crate::Names::persistent)): one
/// piece of it for each device. Their elements are what the system left there, on the host zeros.
///
/// What this process writes to them after it has put them is seen by the processes that open them.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`], [`ErrorKind::Device`] for a device that is neither the host nor one of CUDA, and those
/// of the driver.
///
/// # Safety
///
/// On a device the caller writes every element before safe code can read it.
pub unsafe fn empty(specs: &[Spec]) -> Result<Vec<IpcTensor>> {
    let mut tensors = Vec::with_capacity(specs.len());
    // SAFETY: the caller's obligation.
    for (arena, placed) in unsafe { allocations(specs, true) }? {
        arena.file().map_or(Ok(()), memory::seal_for_others)?;
        give(&arena);
        tensors.extend(placed);
    }
    tensors.sort_by_key(|(index, _)| *index);
    Ok(tensors.into_iter().map(|(_, tensor)| tensor).collect())
}

/// Refuses a device that has no memory to share here.
fn has_memory(device: Device) -> Result<()> {
    if device == Device::CPU || device::in_streams(device) {
        return Ok(());
    }
    let text = format!("{device} has no memory to share here: name the host, or a CUDA device where CUDA is built in");
    Err(Error::new(ErrorKind::Device, text))
}

fn give(arena: &Arc<Arena>) {
    let mut given = GIVEN.lock();
    given.retain(|_, arena| arena.strong_count() > 0);
    given.insert(arena.bytes().start, Arc::downgrade(arena));
}

/// The memory that an allocator of a framework has, by its first address.
static POOL: Own<BTreeMap<usize, Arc<Arena>>> = Own::new();

/// Allocates memory of a device for the allocator of a framework, which a store takes over in place as that of
/// [`empty`]. Returns its address.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`], [`ErrorKind::Device`] for a device that is neither the host nor one of CUDA, and those
/// of the driver.
pub fn allocate(device: Device, nbytes: usize) -> Result<usize> {
    has_memory(device)?;
    let arena = Arc::new(Arena::new(device, nbytes, true)?);
    give(&arena);
    let start = arena.bytes().start;
    POOL.lock().insert(start, arena);
    Ok(start)
}

/// Frees memory of [`allocate`], after the work that is now in the stream. A store that has taken it over keeps it.
/// Another address is ignored.
///
/// # Safety
///
/// All work that uses the memory is in the stream, which has not been destroyed, or ordered before it.
pub unsafe fn free(address: usize, device: Device, stream: Stream) {
    let Some(arena) = POOL.lock().remove(&address) else { return };
    // Without the order it is never freed here.
    match device::export_after(device, stream) {
        Ok(()) => drop(arena),
        Err(_) => std::mem::forget(arena),
    }
}

/// Returns whether an allocator may use the memory again as soon as a tensor is dropped.
pub(crate) fn is_reused(arena: &Arena) -> bool {
    !POOL.is_untouched() && POOL.lock().contains_key(&arena.bytes().start)
}

/// Returns the memory of [`empty`] or [`allocate`] that a tensor lies in, if other processes can have it as `asked`.
pub(crate) fn given(exported: &Export, asked: Writing) -> Option<Arc<Arena>> {
    let extent = exported.layout().extent_at(exported.data(), None).ok().filter(|extent| !extent.is_empty())?;
    let arena = if GIVEN.is_untouched() { None } else { GIVEN.lock().range(..=extent.start).next_back()?.1.upgrade() }?;
    let is_as_asked = arena.file().is_none() || asked == Writing::Private;
    (extent.end <= arena.bytes().end && is_as_asked).then_some(arena)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::DeviceKind;

    #[test]
    fn a_device_without_such_memory_is_named() {
        let specs = [(DType::FLOAT32, vec![4], Device { kind: DeviceKind(10), index: 0 })];
        // SAFETY: the call makes no tensor.
        for refused in [unsafe { empty(&specs) }.unwrap_err(), allocate(specs[0].2, 64).unwrap_err()] {
            assert_eq!(refused.kind(), ErrorKind::Device);
            assert!(refused.to_string().contains("no memory to share"), "{refused}");
        }
    }
}
