//! Orders streams with CUDA events: the ordering of the process, and that of any driver.

use crate::after_capture::AfterCapture;
use crate::context::{Capture, Devices, Entered, Point};
use crate::driver::{Driver, error};
use crate::flushes::Flushes;
use crate::library::{self, Cuda};
use crate::releases;
use crate::releases::{Buffers, Releases};
use bridge_core::planted::is_planted;
use bridge_core::{Copies, Deferred, Device, DeviceBuffer, Error, Flush, HostOnly, Ordering, Result, Stream};
use smallvec::smallvec;
use std::sync::{Arc, OnceLock};

static CUDA: OnceLock<Result<Arc<CudaOrdering<Cuda>>>> = OnceLock::new();

/// Returns the ordering of this process, after loading CUDA at the first call.
pub(crate) fn cuda() -> Result<&'static Arc<CudaOrdering<Cuda>>> {
    let load = || Cuda::load(library::NAME).map(|(driver, count)| Arc::new(CudaOrdering::new(driver, count)));
    CUDA.get_or_init(load).as_ref().map_err(|error| Error::new(error.kind(), error.to_string()))
}

/// Returns the ordering if it has been used, without initialising CUDA.
pub(crate) fn used() -> Option<&'static CudaOrdering<Cuda>> {
    CUDA.get()?.as_ref().ok().map(|cuda| &**cuda)
}

/// Returns the ordering of this process with these copies, such as [`Copier`](crate::Copier) or a wrapper of it.
pub fn ordering_with(copies: &'static dyn Copies) -> Arc<dyn Ordering> {
    Arc::new(OfProcess(copies))
}

struct OfProcess(&'static dyn Copies);

#[deny(clippy::missing_trait_methods)]
// SAFETY: it orders by events of the driver, or returns its error, and drops buffers after them.
unsafe impl Ordering for OfProcess {
    unsafe fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        cuda()?.order(device, earlier, later)
    }

    unsafe fn order_across(&self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        cuda()?.order_across(earlier, later)
    }

    unsafe fn release_later(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        match cuda() {
            Ok(cuda) => cuda.release_later(device, stream, buffer),
            // SAFETY: the caller's promise.
            Err(_) => unsafe { HostOnly.release_later(device, stream, buffer) },
        }
    }

    unsafe fn release_all_later(&self, device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
        match cuda() {
            Ok(cuda) => cuda.release_all_later(device, stream, buffers),
            // SAFETY: the caller's promise.
            Err(_) => unsafe { HostOnly.release_all_later(device, stream, buffers) },
        }
    }

    unsafe fn release_after_all_work(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        match cuda() {
            Ok(cuda) => cuda.release_after_all_work(device, stream, buffer),
            // SAFETY: the caller's promise.
            Err(_) => unsafe { HostOnly.release_later(device, stream, buffer) },
        }
    }

    unsafe fn is_captured(&self, device: Device, stream: Stream) -> Option<bool> {
        cuda().ok()?.is_captured(device, stream)
    }

    fn flush_later(&self, flush: Flush) {
        match cuda() {
            Ok(cuda) => cuda.flush_later(flush),
            Err(_) => flush(),
        }
    }

    unsafe fn synchronize(&self, device: Device, stream: Stream) -> Result<()> {
        cuda()?.synchronize(device, stream)
    }

    unsafe fn defer(&self, device: Device, stream: Stream, attempt: Deferred) {
        if let Ok(cuda) = cuda() {
            cuda.defer(device, stream, attempt);
        }
    }

    fn copies(&self) -> Option<&dyn Copies> {
        Some(self.0)
    }
}

/// Orders streams with events of the driver.
///
/// "`cuStreamWaitEvent()` uses the most recently captured state at the time of the call, and is not affected by later
/// calls to `cuEventRecord()`" (CUDA driver API, `cuEventRecord`). So an event returns to the pool as soon as the wait
/// has been submitted, long before it fires.
pub(crate) struct CudaOrdering<D> {
    devices: Arc<Devices<D>>,
    releases: Arc<Releases>,
    after_capture: AfterCapture,
    flushes: Flushes,
}

impl<D: Driver> CudaOrdering<D> {
    pub fn new(driver: D, count: usize) -> Self {
        Self {
            devices: Arc::new(Devices::new(driver, count)),
            releases: Arc::default(),
            after_capture: AfterCapture::default(),
            flushes: Flushes::default(),
        }
    }

    pub fn devices(&self) -> &Devices<D> {
        &self.devices
    }

    pub fn releases(&self) -> &Releases {
        &self.releases
    }

    #[cfg(test)]
    pub fn releases_mut(&mut self) -> &mut Releases {
        Arc::get_mut(&mut self.releases).expect("no capture is pending")
    }

    #[cfg(test)]
    pub fn flushes_mut(&mut self) -> &mut Flushes {
        &mut self.flushes
    }

    pub fn after_capture(&self) -> &AfterCapture {
        &self.after_capture
    }

    /// Never blocks and never fails: where no event can be recorded, the memory is leaked, because an early return
    /// would let the owner overwrite bytes that are still read. Where a capture of another stream forbids the event, it
    /// is recorded after the capture.
    fn release_buffers_later(&self, device: Device, after: After, buffers: Buffers) {
        let Err(buffers) = release_later(&self.devices, &self.releases, device, after, buffers) else { return };
        let (devices, releases) = (Arc::clone(&self.devices), Arc::clone(&self.releases));
        let mut held = Held { buffers: Some(buffers), releases };
        let attempt = move || {
            let buffers = held.buffers.take();
            held.buffers =
                buffers.and_then(|buffers| release_later(&devices, &held.releases, device, after, buffers).err());
            held.buffers.is_none()
        };
        self.after_capture.add(&self.devices, device, Stream::LEGACY, Box::new(attempt));
    }
}

/// The work after which buffers are dropped.
#[derive(Clone, Copy)]
enum After {
    /// That of one stream.
    Stream(Stream),
    /// That of every stream of the device; the reader's is named.
    All(Stream),
}

/// Drops buffers after the work now in the device, or leaks them. Returns them where a capture of another stream forbids
/// the event.
fn release_later<D: Driver>(
    devices: &Arc<Devices<D>>,
    releases: &Releases,
    device: Device,
    after: After,
    buffers: Buffers,
) -> Result<(), Buffers> {
    let Ok(entered) = devices.enter(device) else {
        releases.leak(buffers);
        return Ok(());
    };
    let (stream, point) = match after {
        // Events fire in the order of their stream, so work after a pending one is pending.
        After::Stream(stream) => {
            (Some(stream), entered.record_unless_idle(stream, || releases.is_after(devices, device, stream)))
        }
        After::All(stream) => (None, entered.record_all(stream).map(Point::Event)),
    };
    match point {
        Some(Point::Idle) => releases::drop_here(devices.driver(), buffers),
        Some(Point::Event(event)) => releases.take(devices, device, stream, event, buffers),
        None if is_forbidden(&entered, after) => return Err(buffers),
        None => releases.leak(buffers),
    }
    Ok(())
}

/// Returns whether a capture of another stream forbids the event: one of the legacy stream, or of every stream.
fn is_forbidden<D: Driver>(entered: &Entered<'_, D>, after: After) -> bool {
    let forbidden = |stream| entered.capture(stream) == Ok(Capture::Forbids);
    match after {
        After::Stream(stream) => forbidden(stream),
        After::All(stream) => entered.capture(stream) != Ok(Capture::Yes) && forbidden(Stream::LEGACY),
    }
}

/// Buffers that wait for the end of a capture. Dropping it leaks them.
struct Held {
    buffers: Option<Buffers>,
    releases: Arc<Releases>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.buffers.take().into_iter().for_each(|buffers| self.releases.leak(buffers));
    }
}

/// What [`Ordering`] does, for streams that are alive: see the module `driver`.
impl<D: Driver> CudaOrdering<D> {
    pub fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        if earlier == later {
            return Ok(());
        }
        let entered = self.devices.enter(device)?;
        entered.both_or_neither_captured(earlier, later)?;
        let is_captured = || entered.is_captured(later) == Some(true);
        let is_blocking = || later != Stream::LEGACY && self.devices.driver().is_blocking(later) == Ok(true);
        let skipped = is_planted("cuda_wait_skipped_in_a_capture") && is_captured()
            || is_planted("cuda_blocking_not_ordered") && is_blocking();
        if skipped {
            return Ok(());
        }
        let event = entered.record(earlier).and_then(|event| entered.wait(later, event).map(|()| event));
        entered.recycle(event.map_err(|failure| error(self.devices.driver(), failure))?);
        Ok(())
    }

    pub fn order_across(&self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        match earlier.0.index == later.0.index {
            true => self.order(earlier.0, earlier.1, later.1),
            false => self.devices.order_across(earlier, later),
        }
    }

    pub fn release_later(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        self.release_buffers_later(device, After::Stream(stream), smallvec![buffer]);
    }

    pub fn release_all_later(&self, device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
        self.release_buffers_later(device, After::Stream(stream), buffers.into());
    }

    pub fn release_after_all_work(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        self.release_buffers_later(device, After::All(stream), smallvec![buffer]);
    }

    pub fn is_captured(&self, device: Device, stream: Stream) -> Option<bool> {
        self.devices.enter(device).ok()?.is_captured(stream)
    }

    pub fn flush_later(&self, flush: Flush) {
        self.flushes.add(&self.devices, flush);
    }

    pub fn synchronize(&self, device: Device, stream: Stream) -> Result<()> {
        self.devices.enter(device)?.synchronize(stream)
    }

    pub fn defer(&self, device: Device, stream: Stream, attempt: Deferred) {
        self.after_capture.add(&self.devices, device, stream, attempt);
    }
}

#[cfg(test)]
mod tests;
