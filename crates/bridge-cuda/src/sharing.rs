//! Device memory and events that processes share.

use crate::context::Devices;
use crate::driver::{Driver, Event, Handle, SharingDriver};
use bridge_core::{Device, Error, ErrorKind, Result, Stream};
use std::ops::Range;
use std::os::fd::OwnedFd;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const FILE_DESCRIPTOR: u64 = 1;

/// The path by which memory leaves a process.
#[derive(Debug)]
pub enum Transport {
    /// A handle for the whole allocation (`cuIpcGetMemHandle`): memory of `cuMemAlloc`.
    Handle(Handle),
    /// Descriptors of allocations that are mapped side by side, each with its length in bytes: virtual memory.
    Files(Vec<(OwnedFd, usize)>),
    /// A descriptor of the pool, and the driver's name of the allocation in it: memory of `cuMemAllocAsync`, from a
    /// pool that was made to be shared.
    Pool(OwnedFd, Handle),
}

/// Memory that leaves by one path.
#[derive(Debug)]
pub struct Outlet {
    /// How it leaves the process.
    pub transport: Transport,
    /// Its addresses here.
    pub range: Range<usize>,
    /// The driver's number of each allocation, which no other has in this process, also later: one for a handle, one
    /// for each file, none for a pool. `None` where the driver gives none.
    pub numbers: Option<Vec<u64>>,
}

/// Memory of another process, mapped into this one. Pass it to [`Sharing::close`] once.
#[derive(Debug)]
#[must_use = "pass it to Sharing::close once"]
pub struct Opened {
    /// Its addresses here.
    pub range: Range<usize>,
    kind: Kind,
}

/// The path by which the memory came.
#[derive(Debug)]
enum Kind {
    Handle,
    /// The lengths of its parts in bytes.
    Files(Vec<usize>),
    Pool,
}

impl Opened {
    /// Returns memory at these addresses, for an implementation of [`Sharing`] without a driver.
    pub const fn new(range: Range<usize>) -> Self {
        Self { range, kind: Kind::Handle }
    }

    /// Returns whether [`Sharing::close`] works in the order of its stream: it is memory of a pool.
    pub const fn closes_in_order(&self) -> bool {
        matches!(self.kind, Kind::Pool)
    }
}

/// An event of this process or of another. Pass it to [`Sharing::destroy`] once.
#[derive(Debug)]
#[must_use = "pass it to Sharing::destroy once"]
pub struct Signal(Event);

impl Signal {
    /// Returns a signal with this number, for an implementation of [`Sharing`] of your own, or for one that was kept by
    /// its [`number`](Self::number).
    ///
    /// # Safety
    ///
    /// The implementation that the signal is passed to has made the number, and has not destroyed it: that of this crate
    /// takes it for an event of the driver.
    pub const unsafe fn new(number: usize) -> Self {
        Self(Event(number))
    }

    /// Returns its number.
    pub const fn number(&self) -> usize {
        self.0.0
    }
}

/// Shares memory of devices with other processes, and opens theirs. Implemented by the driver; the tests of
/// `bridge-ipc` have another implementation.
///
/// Addresses and lengths are in bytes. Every method may be called on any thread and leaves that thread's current
/// context unchanged. None waits for the device, but for [`close`](Self::close).
///
/// # Errors
///
/// [`ErrorKind::Device`] for a device that is not CUDA's, [`ErrorKind::OutOfMemory`] from allocations, and
/// [`ErrorKind::Driver`] with the driver's message.
pub trait Sharing: Send + Sync {
    /// Returns what names the device in every process.
    fn uuid(&self, device: Device) -> Result<[u8; 16]>;

    /// Returns the device of this process with that name.
    fn device_with(&self, uuid: &[u8; 16]) -> Result<Option<Device>>;

    /// Returns how the memory at these addresses leaves the process; `None` where it does not, such as memory of a
    /// pool that was not made to be shared.
    fn outlet(&self, device: Device, bytes: &Range<usize>) -> Result<Option<Outlet>>;

    /// Maps memory of another process. A process cannot open its own handle, and opens memory by a handle or of a
    /// pool once at a time: the driver refuses the second opening, or does not count it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] as well, where memory that its owner has freed was a part of the same allocation and is open
    /// here.
    fn open(&self, device: Device, transport: &Transport) -> Result<Opened>;

    /// Unmaps it: at once, or memory of a pool after all work now in the stream. The driver wants the latter closed
    /// here before its owner frees it. To close memory by a handle, the driver waits for all work of the device.
    ///
    /// # Safety
    ///
    /// It came from [`open`](Self::open), and no work uses it any more; of a pool, none but what is in the stream now, which
    /// is alive.
    unsafe fn close(&self, device: Device, opened: Opened, stream: Stream);

    /// Makes an event that other processes can wait for. Returns it with its handle.
    fn event(&self, device: Device) -> Result<(Signal, Handle)>;

    /// Opens an event of another process.
    fn open_event(&self, device: Device, handle: &Handle) -> Result<Signal>;

    /// Records the event after all work now in the stream.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn record(&self, device: Device, signal: &Signal, stream: Stream) -> Result<()>;

    /// Makes all work submitted to the stream from now on wait for the event as it is recorded now.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn wait(&self, device: Device, stream: Stream, signal: &Signal) -> Result<()>;

    /// Destroys an event.
    fn destroy(&self, device: Device, signal: Signal);

    /// Allocates memory that leaves the process by a handle, and ends with it.
    fn allocate_sharable(&self, device: Device, nbytes: usize) -> Result<usize>;

    /// Allocates memory that leaves the process by descriptors, and lives as long as one of them or a mapping, in any
    /// process. [`close`](Self::close) ends the mapping of this one.
    fn allocate_outliving(&self, device: Device, nbytes: usize) -> Result<Opened>;

    /// Frees it.
    ///
    /// # Safety
    ///
    /// It came from [`allocate_sharable`](Self::allocate_sharable), and no work uses it any more, in any process.
    unsafe fn free_sharable(&self, device: Device, address: usize);
}

impl<D: Driver + SharingDriver> Devices<D> {
    /// Returns the addresses of an allocation that was opened. A driver that does not know it has mapped no bytes.
    fn whole(&self, start: usize) -> Range<usize> {
        let mapped = self.checked(self.driver().mapped(start));
        start..mapped.map_or(start, |mapped| mapped.range.end.max(start))
    }
}

impl<D: Driver + SharingDriver> Sharing for Devices<D> {
    fn uuid(&self, device: Device) -> Result<[u8; 16]> {
        let _entered = self.enter(device)?;
        self.checked(self.driver().uuid(device.index))
    }

    fn device_with(&self, uuid: &[u8; 16]) -> Result<Option<Device>> {
        for ordinal in 0..self.count() as i32 {
            if self.checked(self.driver().uuid(ordinal))? == *uuid {
                return Ok(Some(Device::cuda(ordinal)));
            }
        }
        Ok(None)
    }

    fn outlet(&self, device: Device, bytes: &Range<usize>) -> Result<Option<Outlet>> {
        let _entered = self.enter(device)?;
        let first = self.checked(self.driver().mapped(bytes.start))?;
        if first.legacy {
            let handle = self.relaxed(|| self.driver().memory_handle(first.range.start))?;
            return Ok(Some(Outlet {
                transport: Transport::Handle(handle),
                range: first.range,
                numbers: first.number.map(|number| vec![number]),
            }));
        }
        if let Some(pool) = first.pool {
            let Some(file) = self.relaxed(|| self.driver().file_of_pool(pool))? else { return Ok(None) };
            let pointer = self.relaxed(|| self.driver().pointer_in_pool(first.range.start))?;
            return Ok(Some(Outlet {
                transport: Transport::Pool(file, pointer),
                range: first.range,
                numbers: Some(Vec::new()),
            }));
        }
        if first.handle_types & FILE_DESCRIPTOR == 0 {
            return Ok(None);
        }
        let (start, mut end, mut files) = (first.range.start, first.range.start, Vec::new());
        let mut numbers = Some(Vec::new());
        while end < bytes.end {
            let part = self.checked(self.driver().mapped(end))?;
            if part.range.start != end || part.range.is_empty() || part.handle_types & FILE_DESCRIPTOR == 0 {
                return Ok(None);
            }
            files.push((self.relaxed(|| self.driver().file_of(end))?, part.range.len()));
            match (&mut numbers, part.number) {
                (Some(numbers), Some(number)) => numbers.push(number),
                _ => numbers = None,
            }
            end = part.range.end;
        }
        Ok(Some(Outlet { transport: Transport::Files(files), range: start..end, numbers }))
    }

    fn open(&self, device: Device, transport: &Transport) -> Result<Opened> {
        let _entered = self.enter(device)?;
        match transport {
            Transport::Handle(handle) => {
                let start = self.relaxed(|| self.driver().open_memory(handle))?;
                Ok(Opened { range: self.whole(start), kind: Kind::Handle })
            }
            Transport::Pool(file, pointer) => {
                let start = self.relaxed(|| self.driver().open_in_pool(device.index, file, pointer))?;
                Ok(Opened { range: self.whole(start), kind: Kind::Pool })
            }
            Transport::Files(files) => {
                let parts: Vec<usize> = files.iter().map(|(_, nbytes)| *nbytes).collect();
                let total = parts.iter().try_fold(0usize, |sum, nbytes| sum.checked_add(*nbytes));
                let total = total.filter(|total| *total > 0).ok_or_else(|| {
                    Error::new(
                        ErrorKind::Protocol,
                        "the other process sent invalid lengths: use one version of truebridge in both",
                    )
                })?;
                let start = self.relaxed(|| self.driver().map_files(device.index, files))?;
                Ok(Opened { range: start..start + total, kind: Kind::Files(parts) })
            }
        }
    }

    unsafe fn close(&self, device: Device, opened: Opened, stream: Stream) {
        // Without the context the driver has unmapped it already.
        let Ok(_entered) = self.enter(device) else { return };
        let start = opened.range.start;
        // SAFETY: the caller's promises.
        let _ = self.relaxed(|| unsafe {
            match &opened.kind {
                Kind::Handle => self.driver().close_memory(start),
                Kind::Files(parts) => self.driver().unmap(start, parts),
                Kind::Pool => self.driver().free_in_order(start, stream),
            }
        });
    }

    fn event(&self, device: Device) -> Result<(Signal, Handle)> {
        let _entered = self.enter(device)?;
        let event = self.relaxed(|| self.driver().interprocess_event())?;
        match self.relaxed(|| self.driver().event_handle(event)) {
            Ok(handle) => Ok((Signal(event), handle)),
            Err(error) => {
                let _ = self.driver().destroy_event(event);
                Err(error)
            }
        }
    }

    fn open_event(&self, device: Device, handle: &Handle) -> Result<Signal> {
        let _entered = self.enter(device)?;
        self.relaxed(|| self.driver().open_event(handle)).map(Signal)
    }

    unsafe fn record(&self, device: Device, signal: &Signal, stream: Stream) -> Result<()> {
        let _entered = self.enter(device)?;
        self.checked(self.driver().record_event(signal.0, stream))
    }

    unsafe fn wait(&self, device: Device, stream: Stream, signal: &Signal) -> Result<()> {
        let _entered = self.enter(device)?;
        self.checked(self.driver().wait_event(stream, signal.0))
    }

    fn destroy(&self, device: Device, signal: Signal) {
        // Without the context the driver has destroyed the event already.
        let _ = self.enter(device).map(|_entered| self.driver().destroy_event(signal.0));
    }

    fn allocate_sharable(&self, device: Device, nbytes: usize) -> Result<usize> {
        let _entered = self.enter(device)?;
        self.relaxed(|| self.driver().allocate_plain(nbytes))
    }

    fn allocate_outliving(&self, device: Device, nbytes: usize) -> Result<Opened> {
        let _entered = self.enter(device)?;
        let (start, nbytes) = self.relaxed(|| self.driver().create_mapped(device.index, nbytes))?;
        Ok(Opened { range: start..start + nbytes, kind: Kind::Files(vec![nbytes]) })
    }

    unsafe fn free_sharable(&self, device: Device, address: usize) {
        // Without the context the driver has freed it already.
        let Ok(_entered) = self.enter(device) else { return };
        // SAFETY: the caller's promises.
        let _ = self.relaxed(|| unsafe { self.driver().free_plain(address) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{HANDLE, Mapped};
    use crate::fake::Fake;

    const GPU: Device = Device::cuda(1);

    fn devices() -> Devices<Fake> {
        Devices::new(Fake::default(), 2)
    }

    fn map(devices: &Devices<Fake>, legacy: bool, handle_types: u64, range: Range<usize>) {
        devices.driver().map(Mapped { legacy, handle_types, pool: None, number: Some(range.start as u64), range });
    }

    fn map_pool(devices: &Devices<Fake>, pool: usize, range: Range<usize>) {
        devices.driver().map(Mapped { pool: Some(pool), range, ..Mapped::default() });
    }

    #[test]
    fn memory_is_shared_by_the_transport_that_its_allocator_allows() {
        let devices = devices();
        map(&devices, true, 0, 0x1000..0x3000);
        map(&devices, false, FILE_DESCRIPTOR, 0x4000..0x6000);
        map(&devices, false, FILE_DESCRIPTOR, 0x6000..0x7000);
        map(&devices, false, 0, 0x8000..0x9000);
        map_pool(&devices, crate::fake::PRIVATE_POOL, 0xc000..0xd000);
        map_pool(&devices, crate::fake::PRIVATE_POOL + 1, 0xd000..0xe000);
        let outlet = |bytes: Range<usize>| devices.outlet(GPU, &bytes).unwrap();
        let whole = outlet(0x1800..0x1900).unwrap();
        assert!(matches!(whole.transport, Transport::Handle(_)));
        assert_eq!(whole.range, 0x1000..0x3000);
        let parts = outlet(0x5000..0x6800).unwrap();
        let Transport::Files(files) = &parts.transport else { panic!("{parts:?}") };
        assert_eq!(files.iter().map(|(_, nbytes)| *nbytes).collect::<Vec<_>>(), [0x2000, 0x1000]);
        assert_eq!((parts.range, parts.numbers), (0x4000..0x7000, Some(vec![0x4000, 0x6000])));
        let pool = outlet(0xd800..0xd900).unwrap();
        assert!(matches!(pool.transport, Transport::Pool(..)));
        assert_eq!(pool.range, 0xd000..0xe000);
        assert!(outlet(0xc000..0xc001).is_none(), "a pool that is not shared");
        assert!(outlet(0x8000..0x8001).is_none(), "no type of handle");
        assert!(outlet(0x6800..0x7001).is_none(), "no part follows");
        assert!(outlet(0xa000..0xa001).is_none(), "unknown to the driver");
        assert_eq!(devices.driver().take_calls().last(), Some(&crate::fake::Call::Pop), "the context is as before");
    }

    /// A span that ends with the last part asks for none after it, and each part must leave by a descriptor.
    #[test]
    fn virtual_memory_leaves_if_each_of_its_parts_can() {
        let devices = devices();
        map(&devices, false, FILE_DESCRIPTOR, 0x4000..0x6000);
        map(&devices, false, 0, 0x6000..0x7000);
        map(&devices, false, FILE_DESCRIPTOR, 0x7000..0x8000);
        map(&devices, false, FILE_DESCRIPTOR, 0x6800..0x9000);
        let range_of = |bytes: Range<usize>| devices.outlet(GPU, &bytes).unwrap().map(|outlet| outlet.range);
        assert_eq!(range_of(0x4000..0x6000), Some(0x4000..0x6000));
        assert_eq!(range_of(0x5000..0x6001), None, "the second part has no descriptor");
        assert_eq!(range_of(0x7000..0x8000), Some(0x7000..0x8000));
        assert_eq!(range_of(0x7000..0x8001), None, "the second part begins before the end of the first");
    }

    #[test]
    fn what_is_opened_is_closed() {
        let devices = devices();
        map(&devices, true, 0, 0x1000..0x3000);
        let outlet = devices.outlet(GPU, &(0x1000..0x1001)).unwrap().unwrap();
        let opened = devices.open(GPU, &outlet.transport).unwrap();
        let parts = Transport::Files(vec![(std::fs::File::open("/dev/null").unwrap().into(), 0x2000)]);
        let mapped = devices.open(GPU, &parts).unwrap();
        let in_pool = Transport::Pool(std::fs::File::open("/dev/null").unwrap().into(), [7; HANDLE]);
        let in_pool = devices.open(GPU, &in_pool).unwrap();
        assert_eq!((mapped.range.len(), devices.driver().opened()), (0x2000, 3));
        assert!(in_pool.closes_in_order() && !mapped.closes_in_order() && !opened.closes_in_order());
        // SAFETY: the fake driver maps nothing.
        unsafe {
            for each in [opened, mapped, in_pool] {
                devices.close(GPU, each, Stream::from_handle(0xa0));
            }
        }
        assert_eq!(devices.driver().opened(), 0);
        let own = devices.allocate_outliving(GPU, 5).unwrap();
        assert_eq!((own.range.len(), devices.driver().opened()), (0x1000, 1));
        // SAFETY: as above.
        unsafe { devices.close(GPU, own, Stream::from_handle(0xa0)) };
        assert_eq!(devices.driver().opened(), 0);
        devices.driver().fail("cuMemCreate", 2);
        assert_eq!(devices.allocate_outliving(GPU, 5).unwrap_err().kind(), ErrorKind::OutOfMemory);
        let nothing = devices.open(GPU, &Transport::Files(Vec::new())).unwrap_err();
        assert_eq!(nothing.kind(), ErrorKind::Protocol);
        devices.driver().fail("cuIpcOpenMemHandle_v2", 208);
        let again = devices.open(GPU, &Transport::Handle([7; HANDLE])).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::Busy, "{again}");
        let endless = (0..2).map(|_| (std::fs::File::open("/dev/null").unwrap().into(), usize::MAX)).collect();
        assert_eq!(devices.open(GPU, &Transport::Files(endless)).unwrap_err().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn events_order_streams_and_are_destroyed() {
        let devices = devices();
        // SAFETY: no driver sees this stream.
        let (a, b) = (unsafe { Stream::from_handle(0xa0) }, unsafe { Stream::from_handle(0xb0) });
        let (signal, handle) = devices.event(GPU).unwrap();
        let opened = devices.open_event(GPU, &handle).unwrap();
        // SAFETY: no driver sees these streams.
        unsafe {
            devices.record(GPU, &signal, a).unwrap();
            devices.wait(GPU, b, &opened).unwrap();
        }
        assert_eq!(devices.driver().ordered(), [(a, b)]);
        devices.destroy(GPU, signal);
        assert_eq!(devices.driver().live_events(), 0);
        devices.driver().fail("cuIpcGetEventHandle", 801);
        assert_eq!(devices.event(GPU).unwrap_err().kind(), ErrorKind::Driver);
        assert_eq!(devices.driver().live_events(), 0, "no event is left");
    }

    #[test]
    fn a_device_is_found_by_its_name() {
        let devices = devices();
        let uuid = devices.uuid(GPU).unwrap();
        assert_eq!(devices.device_with(&uuid).unwrap(), Some(GPU));
        assert_eq!(devices.device_with(&[9; 16]).unwrap(), None);
        assert_eq!(devices.uuid(Device::CPU).unwrap_err().kind(), ErrorKind::Device);
    }

    #[test]
    fn sharable_memory_is_freed_and_running_out_is_an_error_of_its_own() {
        let devices = devices();
        let address = devices.allocate_sharable(GPU, 100).unwrap();
        // SAFETY: no work uses the memory.
        unsafe { devices.free_sharable(GPU, address) };
        assert_eq!(devices.driver().live_memory(), 0);
        devices.driver().fail("cuMemAlloc_v2", 2);
        assert_eq!(devices.allocate_sharable(GPU, 100).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
}
