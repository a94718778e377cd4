//! Copies of bytes between the host and devices, and memory for them.

use crate::context::{Capture, Devices, both_or_neither};
use crate::driver::{Direction, Driver, Event as RawEvent, Outcome, RELAXED, error};
use bridge_core::{Device, DeviceKind, Error, ErrorKind, Result, Stream, poison};

/// A point in a stream: the work that the stream held when [`Link::record`] was called. Pass it to [`Link::release`]
/// once.
#[derive(Debug)]
#[must_use = "pass it to Link::release once"]
pub struct Event(RawEvent);

impl Event {
    /// Returns an event with this number, for an implementation of [`Link`] of your own.
    ///
    /// # Safety
    ///
    /// The implementation that the event is passed to has made the number, and has not released it: that of this crate
    /// takes it for an event of the driver.
    pub const unsafe fn new(number: usize) -> Self {
        Self(RawEvent(number))
    }

    /// Returns its number.
    pub const fn number(&self) -> usize {
        self.0.0
    }
}

/// Copies bytes between the host and devices, and allocates memory for them. Implemented by the driver; the tests of
/// `bridge-cuda` have another implementation.
///
/// Addresses and lengths are in bytes. Every method may be called on any thread, and leaves that thread's current
/// context unchanged. Methods that take a stream are unsafe: it is alive until its framework destroys it, and the driver
/// takes handles unchecked. A stream of [`new_stream`](Self::new_stream) always is.
///
/// # Errors
///
/// [`ErrorKind::Device`] for a device that is not CUDA's, [`ErrorKind::OutOfMemory`] from allocations, and
/// [`ErrorKind::Driver`] with the driver's message.
pub trait Link: Send + Sync {
    /// Copies `nbytes` bytes, by addresses on two devices, in `stream`, which belongs to the one that is a CUDA device.
    /// Between two CUDA devices it belongs to that of `from`. One side at least is a CUDA device.
    ///
    /// # Safety
    ///
    /// Both ranges stay mapped until the work has run, and the host's range, if there is one, is pinned. `stream` is alive.
    unsafe fn copy(&self, from: (Device, usize), to: (Device, usize), nbytes: usize, stream: Stream) -> Result<()>;

    /// Copies `nbytes` bytes between any memory of the host and a CUDA device, and waits for that copy, unless work is
    /// pending in `stream`. Returns `false`, and copies nothing, where some is, or where that is unknown, as this
    /// default does.
    ///
    /// # Safety
    ///
    /// Both ranges are mapped during the call. `stream` is alive, and is not being captured.
    unsafe fn copy_at_once(
        &self,
        from: (Device, usize),
        to: (Device, usize),
        nbytes: usize,
        stream: Stream,
    ) -> Result<bool> {
        let _ = (from, to, nbytes, stream);
        Ok(false)
    }

    /// Fills device memory with [`poison::BYTE`](bridge_core::poison::BYTE) in stream order, and counts it. Where the
    /// stream is being captured, nothing is done: the fill would become a part of the graph.
    ///
    /// # Safety
    ///
    /// The range stays mapped until the work has run, and no work after it reads what was there. `stream` is alive.
    unsafe fn poison(&self, device: Device, address: usize, nbytes: usize, stream: Stream) -> Result<()>;

    /// Makes a stream that waits for no default stream. It lives as long as the process.
    fn new_stream(&self, device: Device) -> Result<Stream>;

    /// Marks the work that the stream holds now.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn record(&self, device: Device, stream: Stream) -> Result<Event>;

    /// Returns whether all work before the event has run.
    fn is_complete(&self, device: Device, event: &Event) -> Result<bool>;

    /// Blocks the host until all work before the event has run.
    fn wait(&self, device: Device, event: &Event) -> Result<()>;

    /// Releases an event.
    fn release(&self, device: Device, event: Event);

    /// Returns whether the stream is being captured into a graph.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn is_captured(&self, device: Device, stream: Stream) -> Result<bool>;

    /// Returns whether all bytes of the range are pinned host memory.
    fn is_pinned(&self, address: usize, nbytes: usize) -> Result<bool>;

    /// Allocates pinned host memory, for all devices.
    fn allocate_pinned(&self, device: Device, nbytes: usize) -> Result<usize>;

    /// Frees pinned memory.
    ///
    /// # Safety
    ///
    /// The address is one of [`allocate_pinned`](Self::allocate_pinned), and no work uses the memory any more.
    unsafe fn free_pinned(&self, device: Device, address: usize) -> Result<()>;

    /// Allocates memory of the device from the driver's pool, in stream order.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn allocate(&self, device: Device, nbytes: usize, stream: Stream) -> Result<usize>;

    /// Returns memory to the driver's pool, in stream order.
    ///
    /// # Safety
    ///
    /// The address is one of [`allocate`](Self::allocate), and all work that uses the memory is in `stream`, which is alive,
    /// or ordered before it.
    unsafe fn free(&self, device: Device, address: usize, stream: Stream) -> Result<()>;
}

impl<D: Driver> Link for Devices<D> {
    unsafe fn copy(&self, from: (Device, usize), to: (Device, usize), nbytes: usize, stream: Stream) -> Result<()> {
        let ((from_device, from), (to_device, to)) = (from, to);
        let (device, direction) = match (is_host(from_device), is_host(to_device)) {
            (true, true) => return Err(no_cuda_side(from_device, to_device)),
            (true, false) => (to_device, Direction::Up),
            (false, true) => (from_device, Direction::Down),
            (false, false) if from_device.index == to_device.index => (from_device, Direction::Within),
            (false, false) => {
                self.enable_peer_access(from_device, to_device)?;
                let (to, from) = (self.enter(to_device)?.context(), self.enter(from_device)?.context());
                (from_device, Direction::Across { to, from })
            }
        };
        let _entered = self.enter(device)?;
        // SAFETY: the caller's promises; the context is that of the stream's device.
        self.checked(unsafe { self.driver().copy(direction, to, from, nbytes, stream) })
    }

    unsafe fn copy_at_once(
        &self,
        from: (Device, usize),
        to: (Device, usize),
        nbytes: usize,
        stream: Stream,
    ) -> Result<bool> {
        let (device, direction) = if is_host(from.0) { (to.0, Direction::Up) } else { (from.0, Direction::Down) };
        let _entered = self.enter(device)?;
        if !self.checked(self.driver().is_idle(stream))? {
            return Ok(false);
        }
        // SAFETY: the caller's promises. The driver has read or written pageable memory when it returns (CUDA driver
        // API, "API synchronization behavior"), and the stream is waited for because memory may be pinned.
        let copied = || unsafe { self.driver().copy(direction, to.1, from.1, nbytes, stream) };
        self.relaxed(|| copied().and_then(|()| self.driver().synchronize(stream)))?;
        Ok(true)
    }

    unsafe fn poison(&self, device: Device, address: usize, nbytes: usize, stream: Stream) -> Result<()> {
        if nbytes == 0 || self.is_captured(device, stream)? {
            return Ok(());
        }
        let _entered = self.enter(device)?;
        // SAFETY: the caller's promises.
        self.checked(unsafe { self.driver().fill(address, poison::BYTE, nbytes, stream) })?;
        poison::filled();
        Ok(())
    }

    fn new_stream(&self, device: Device) -> Result<Stream> {
        let _entered = self.enter(device)?;
        self.relaxed(|| self.driver().create_stream())
    }

    unsafe fn record(&self, device: Device, stream: Stream) -> Result<Event> {
        self.record(device, stream)
    }

    fn is_complete(&self, device: Device, event: &Event) -> Result<bool> {
        let _entered = self.enter(device)?;
        self.relaxed(|| self.driver().query_event(event.0))
    }

    fn wait(&self, device: Device, event: &Event) -> Result<()> {
        let _entered = self.enter(device)?;
        self.relaxed(|| self.driver().synchronize_event(event.0))
    }

    fn release(&self, device: Device, event: Event) {
        // Without the context the driver has destroyed the event already.
        let _ = self.enter(device).map(|entered| entered.recycle(event.0));
    }

    unsafe fn is_captured(&self, device: Device, stream: Stream) -> Result<bool> {
        self.is_captured(device, stream)
    }

    fn is_pinned(&self, address: usize, nbytes: usize) -> Result<bool> {
        let located = crate::pointer::locate(self, address)?;
        let end = address.saturating_add(nbytes);
        Ok(located.is_some_and(|at| at.device.kind == DeviceKind::CUDA_HOST && at.range.end >= end))
    }

    fn allocate_pinned(&self, device: Device, nbytes: usize) -> Result<usize> {
        let _entered = self.enter(device)?;
        self.relaxed(|| self.driver().allocate_pinned(nbytes))
    }

    unsafe fn free_pinned(&self, device: Device, address: usize) -> Result<()> {
        let _entered = self.enter(device)?;
        // SAFETY: the caller's promises.
        self.relaxed(|| unsafe { self.driver().free_pinned(address) })
    }

    unsafe fn allocate(&self, device: Device, nbytes: usize, stream: Stream) -> Result<usize> {
        let _entered = self.enter(device)?;
        self.checked(self.driver().allocate(nbytes, stream))
    }

    unsafe fn free(&self, device: Device, address: usize, stream: Stream) -> Result<()> {
        let _entered = self.enter(device)?;
        // SAFETY: the caller's promises.
        self.checked(unsafe { self.driver().free(address, stream) })
    }
}

impl<D: Driver> Devices<D> {
    /// As [`Link::record`].
    fn record(&self, device: Device, stream: Stream) -> Result<Event> {
        self.checked(self.enter(device)?.record(stream).map(Event))
    }

    /// As [`Link::is_captured`].
    fn is_captured(&self, device: Device, stream: Stream) -> Result<bool> {
        Ok(self.checked(self.enter(device)?.capture(stream))? != Capture::No)
    }

    pub(crate) fn checked<T>(&self, outcome: Outcome<T>) -> Result<T> {
        outcome.map_err(|failure| error(self.driver(), failure))
    }

    /// Calls the driver so that a capture that is under direction is unaffected: in other modes these calls invalidate
    /// it (CUDA driver API, `cuThreadExchangeStreamCaptureMode`).
    pub(crate) fn relaxed<T>(&self, call: impl FnOnce() -> Outcome<T>) -> Result<T> {
        let before = self.checked(self.driver().exchange_capture_mode(RELAXED))?;
        let outcome = call();
        // The call worked a moment ago; a driver that has shut down meanwhile has no captures.
        let _ = self.driver().exchange_capture_mode(before);
        self.checked(outcome)
    }

    /// Makes all work submitted to a stream of one device from now on wait for all work now in a stream of another.
    ///
    /// Each call is made in its own device's context, because the default streams have one handle on all devices. An
    /// event may be waited for by streams of other devices (CUDA driver API, `cuStreamWaitEvent`).
    pub fn order_across(&self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        let capture = |(device, stream)| Ok::<_, Error>((stream, self.checked(self.enter(device)?.capture(stream))?));
        both_or_neither(capture(earlier)?, capture(later)?)?;
        let event = self.record(earlier.0, earlier.1)?;
        let waited = self.enter(later.0).and_then(|_entered| self.checked(self.driver().wait_event(later.1, event.0)));
        Link::release(self, earlier.0, event);
        waited
    }
}

fn is_host(device: Device) -> bool {
    [DeviceKind::CPU, DeviceKind::CUDA_HOST].contains(&device.kind)
}

fn no_cuda_side(from: Device, to: Device) -> Error {
    Error::new(ErrorKind::Device, format!("neither {from} nor {to} is a CUDA device: copy on the host instead"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Context;
    use crate::driver::Pointer;
    use crate::fake::{Call, Fake};

    // SAFETY: no driver sees this stream.
    const A: Stream = unsafe { Stream::from_handle(0xa0) };
    // SAFETY: as above.
    const B: Stream = unsafe { Stream::from_handle(0xb0) };
    const GPUS: [Device; 2] = [Device::cuda(0), Device::cuda(1)];
    const CALLERS: Context = Context(7);

    fn devices() -> Devices<Fake> {
        Devices::new(Fake::default(), 2)
    }

    #[test]
    fn an_event_has_the_number_that_it_was_given() {
        // SAFETY: no implementation gets it.
        let event = unsafe { Event::new(7) };
        assert_eq!(event.number(), 7);
    }

    fn recorded(link: &dyn Link) -> Result<Event> {
        // SAFETY: no driver sees this stream.
        unsafe { link.record(GPUS[0], A) }
    }

    fn allocate(link: &dyn Link, device: Device) -> Result<usize> {
        // SAFETY: as above.
        unsafe { link.allocate(device, 64, A) }
    }

    fn copy(link: &dyn Link, from: Device, to: Device) -> Result<()> {
        // SAFETY: the fake driver copies nothing.
        unsafe { link.copy((from, 0x10), (to, 0x20), 8, A) }
    }

    #[test]
    fn the_direction_follows_from_the_devices_and_the_context_is_that_of_the_stream() {
        let pinned = Device { kind: DeviceKind::CUDA_HOST, index: 0 };
        let across = Direction::Across { to: Fake::primary(0), from: Fake::primary(1) };
        let cases = [
            (Device::CPU, GPUS[1], Direction::Up),
            (pinned, GPUS[1], Direction::Up),
            (GPUS[1], Device::CPU, Direction::Down),
            (GPUS[1], GPUS[1], Direction::Within),
            (GPUS[1], GPUS[0], across),
        ];
        for (from, to, direction) in cases {
            let devices = devices();
            copy(&devices, from, to).unwrap();
            let calls = devices.driver().take_calls();
            let at = calls.iter().position(|call| *call == Call::Copy(direction, 8, A)).expect("the copy was made");
            assert_eq!(calls[..at].last(), Some(&Call::Push(Fake::primary(1))), "{from} to {to}");
            assert_eq!(devices.driver().current_context(), Ok(None));
        }
        assert_eq!(copy(&devices(), Device::CPU, pinned).unwrap_err().kind(), ErrorKind::Device);
        assert_eq!(copy(&devices(), GPUS[0], Device::cuda(2)).unwrap_err().kind(), ErrorKind::Device);
    }

    #[test]
    fn a_copy_at_once_is_made_in_an_idle_stream_and_waited_for() {
        for (from, to, direction) in [(Device::CPU, GPUS[1], Direction::Up), (GPUS[1], Device::CPU, Direction::Down)] {
            let devices = devices();
            // SAFETY: the fake driver copies nothing.
            let copied = || unsafe { Link::copy_at_once(&devices, (from, 0x10), (to, 0x20), 8, A) };
            let made = || {
                let calls = devices.driver().take_calls();
                let made = calls.into_iter().filter(|call| matches!(call, Call::Copy(..) | Call::Synchronize(_)));
                made.collect::<Vec<_>>()
            };
            assert_eq!((copied().unwrap(), made()), (false, vec![]));
            devices.driver().idle(A);
            assert_eq!((copied().unwrap(), made()), (true, vec![Call::Copy(direction, 8, A), Call::Synchronize(A)]));
            // A capture elsewhere does not end.
            devices.driver().capture(B);
            assert!(copied().unwrap());
            assert_eq!(devices.driver().current_context(), Ok(None));
        }
    }

    /// Also where the driver cannot: it copies through the host then.
    #[test]
    fn a_device_reaches_another_one_from_the_first_copy_on() {
        for code in [0, 217, 2] {
            let devices = devices();
            devices.driver().fail("cuCtxEnablePeerAccess", code);
            devices.driver().fail("cuMemPoolSetAccess", code);
            for (from, to) in [(GPUS[0], GPUS[1]), (GPUS[0], GPUS[1]), (GPUS[1], GPUS[0])] {
                copy(&devices, from, to).unwrap();
            }
            let calls = devices.driver().take_calls();
            let reached =
                calls.into_iter().filter(|call| matches!(call, Call::EnablePeerAccess(_) | Call::OpenPool(..)));
            let of = |other: i32, own| [Call::EnablePeerAccess(Fake::primary(other)), Call::OpenPool(other, own)];
            // Memory may be there the next time.
            let expected = if code == 2 { vec![of(1, 0), of(1, 0), of(0, 1)] } else { vec![of(1, 0), of(0, 1)] };
            assert_eq!(reached.collect::<Vec<_>>(), expected.concat());
            assert_eq!(devices.driver().current_context(), Ok(None));
        }
    }

    #[test]
    fn an_event_is_complete_when_its_stream_is_and_is_used_again() {
        let devices = devices();
        let link: &dyn Link = &devices;
        let event = recorded(link).unwrap();
        assert!(!link.is_complete(GPUS[0], &event).unwrap());
        link.wait(GPUS[0], &event).unwrap();
        assert!(link.is_complete(GPUS[0], &event).unwrap());
        link.release(GPUS[0], event);
        let again = recorded(link).unwrap();
        assert_eq!((again.number(), devices.driver().live_events()), (1, 1));
    }

    #[test]
    fn memory_is_freed_and_running_out_of_it_is_an_error_of_its_own() {
        let devices = devices();
        let link: &dyn Link = &devices;
        let (pinned, block) = (link.allocate_pinned(GPUS[0], 64).unwrap(), allocate(link, GPUS[1]).unwrap());
        assert_eq!(devices.driver().live_memory(), 2);
        // SAFETY: both are allocations of this link, which nothing uses.
        unsafe {
            link.free_pinned(GPUS[0], pinned).unwrap();
            link.free(GPUS[1], block, A).unwrap();
        }
        assert_eq!(devices.driver().live_memory(), 0);
        for call in ["cuMemHostAlloc", "cuMemAllocAsync"] {
            devices.driver().fail(call, 2);
        }
        let errors = [link.allocate_pinned(GPUS[0], 64), allocate(link, GPUS[0])].map(Result::unwrap_err);
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::OutOfMemory), "{errors:?}");
    }

    #[test]
    fn memory_is_poisoned_in_its_stream_and_not_during_a_capture() {
        let devices = devices();
        // SAFETY: the fake driver writes nothing.
        let poison = |nbytes| unsafe { Link::poison(&devices, GPUS[1], 0x1000, nbytes, A) }.unwrap();
        let fills = || -> Vec<Call> {
            let calls = devices.driver().take_calls();
            calls.into_iter().filter(|call| matches!(call, Call::Fill(..))).collect()
        };
        poison(64);
        assert_eq!(fills(), [Call::Fill(0x1000, 0xff, 64, A)]);
        poison(0);
        assert_eq!(fills(), []);
        devices.driver().capture(A);
        poison(64);
        assert_eq!(fills(), []);
        assert_eq!(devices.driver().current_context(), Ok(None));
    }

    #[test]
    fn pinned_memory_is_known_by_its_whole_range() {
        let devices = devices();
        let pointer = Pointer { memory_type: 1, managed: false, ordinal: 0, start: 0x1000, size: 0x100 };
        devices.driver().know(0x1000, pointer);
        devices.driver().know(0x2000, Pointer { memory_type: 2, start: 0x2000, ..pointer });
        let is_pinned = |address, nbytes| Link::is_pinned(&devices, address, nbytes).unwrap();
        assert!(is_pinned(0x1000, 0x100));
        assert!(!is_pinned(0x1000, 0x101), "the end is another allocation's");
        assert!(!is_pinned(0x2000, 1) && !is_pinned(0x3000, 1));
    }

    /// Each call of the driver fails in turn: the error names it, and the context and the capture mode are restored.
    #[test]
    fn every_failure_is_an_error_that_names_the_call_and_changes_nothing() {
        type Step = fn(&dyn Link) -> Result<()>;
        let steps: [(&str, Step); 15] = [
            ("cuMemcpyHtoDAsync_v2", |link| copy(link, Device::CPU, GPUS[0])),
            ("cuMemcpyDtoHAsync_v2", |link| copy(link, GPUS[0], Device::CPU)),
            ("cuMemcpyDtoDAsync_v2", |link| copy(link, GPUS[0], GPUS[0])),
            ("cuMemcpyPeerAsync", |link| copy(link, GPUS[0], GPUS[1])),
            ("cuCtxPushCurrent_v2", |link| copy(link, GPUS[0], GPUS[1])),
            ("cuEventRecord", |link| recorded(link).map(drop)),
            ("cuEventQuery", |link| link.is_complete(GPUS[0], &recorded(link)?).map(drop)),
            ("cuEventSynchronize", |link| link.wait(GPUS[0], &recorded(link)?)),
            // SAFETY: no driver sees this stream.
            ("cuStreamIsCapturing", |link| unsafe { link.is_captured(GPUS[0], A) }.map(drop)),
            ("cuPointerGetAttributes", |link| link.is_pinned(0x1000, 1).map(drop)),
            // SAFETY: the fake driver writes nothing.
            ("cuMemsetD8Async", |link| unsafe { link.poison(GPUS[0], 0x1000, 64, A) }),
            ("cuMemHostAlloc", |link| link.allocate_pinned(GPUS[0], 64).map(drop)),
            ("cuMemAllocAsync", |link| allocate(link, GPUS[0]).map(drop)),
            // SAFETY: the fake driver refuses the address.
            ("cuMemFreeHost", |link| unsafe { link.free_pinned(GPUS[0], 0x1000) }),
            // SAFETY: as above.
            ("cuMemFreeAsync", |link| unsafe { link.free(GPUS[0], 0x1000, A) }),
        ];
        for (call, step) in steps {
            let devices = devices();
            devices.driver().push_context(CALLERS).unwrap();
            devices.driver().fail(call, 719);
            let error = step(&devices).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Driver);
            assert!(error.to_string().starts_with(call), "{error}");
            assert_eq!(devices.driver().current_context(), Ok(Some(CALLERS)), "after {call} failed");
            let modes = devices.driver().take_calls();
            let mut modes =
                modes.iter().filter_map(|call| if let Call::Mode(mode) = call { Some(*mode) } else { None });
            assert_ne!(modes.next_back(), Some(RELAXED), "after {call} failed");
        }
    }

    #[test]
    fn streams_of_two_devices_are_ordered_each_in_its_own_context() {
        let devices = devices();
        let (earlier, later) = ((GPUS[0], Stream::LEGACY), (GPUS[1], Stream::LEGACY));
        devices.order_across(earlier, later).unwrap();
        let calls = devices.driver().take_calls();
        let context_of = |wanted: fn(&Call) -> bool| {
            let at = calls.iter().position(wanted).expect("the call was made");
            calls[..at].iter().rev().find_map(|call| if let Call::Push(context) = call { Some(*context) } else { None })
        };
        assert_eq!(context_of(|call| matches!(call, Call::Record(..))), Some(Fake::primary(0)));
        assert_eq!(context_of(|call| matches!(call, Call::Wait(..))), Some(Fake::primary(1)));
        assert_eq!(devices.driver().ordered(), [(Stream::LEGACY, Stream::LEGACY)]);
        devices.driver().capture(A);
        assert_eq!(devices.order_across((GPUS[0], A), later).unwrap_err().kind(), ErrorKind::Captured);
        devices.driver().end_capture();
        for call in ["cuEventRecord", "cuStreamWaitEvent"] {
            devices.driver().fail(call, 719);
            assert!(devices.order_across(earlier, later).unwrap_err().to_string().starts_with(call));
            assert_eq!(devices.driver().current_context(), Ok(None));
            devices.driver().fail(call, 0);
        }
    }
}
