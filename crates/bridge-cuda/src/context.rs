//! Primary contexts, made current for the length of a call, and a small pool of events for each.

use crate::driver::{Context, Driver, Event, Failure, Outcome, error};
use crate::sync::AtomicUsize;
use bridge_core::{Device, DeviceKind, Error, ErrorKind, Result, Stream};
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{self, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

/// Kinds of memory that the streams of a CUDA device write.
const KINDS: [DeviceKind; 3] = [DeviceKind::CUDA, DeviceKind::CUDA_HOST, DeviceKind::CUDA_MANAGED];

/// Result codes of calls that a capture forbids (`CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` and the following codes).
const CAPTURING: std::ops::RangeInclusive<u32> = 900..=908;

/// Result codes that another call would have as well: a framework has let the devices reach each other already
/// (`CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`), or they cannot (`…_UNSUPPORTED`), not so many of them
/// (`CUDA_ERROR_TOO_MANY_PEERS`), or not by this driver (`…_NOT_SUPPORTED`, `…_INVALID_DEVICE`).
fn is_final(failure: Failure) -> bool {
    [704, 217, 711, 801, 101].contains(&failure.code)
}

/// The most events that a pool keeps. More are in use only while many releases are pending.
const POOLED: usize = 64;

/// The events of a pool that a thread tries first: a cache line of them.
const OWN: usize = 8;

/// Events that no call uses. No thread waits for another here, and a forked child does not wait for a thread that
/// exists in its parent only: an event is taken and put back in one step.
struct Pool([AtomicUsize; POOLED]);

thread_local! {
    /// Where this thread begins to search a pool, so that threads which order at once meet different events.
    static BEGIN: usize = {
        static THREADS: atomic::AtomicUsize = atomic::AtomicUsize::new(0);
        THREADS.fetch_add(OWN, Relaxed)
    };
}

impl Default for Pool {
    fn default() -> Self {
        Self([const { AtomicUsize::new(0) }; POOLED])
    }
}

impl Pool {
    /// Returns the slots in the order in which this thread tries them. A thread that is ending begins at the first.
    fn places(&self) -> impl Iterator<Item = &AtomicUsize> {
        let begin = BEGIN.try_with(|begin| *begin).unwrap_or_default();
        (0..POOLED).map(move |step| &self.0[(begin + step) % POOLED])
    }

    fn take(&self) -> Option<Event> {
        let mut full = self.places().filter(|place| place.load(Relaxed) != 0);
        full.find_map(|place| Some(place.swap(0, Acquire)).filter(|event| *event != 0).map(Event))
    }

    /// Keeps the event; returns whether there was room.
    fn put(&self, event: Event) -> bool {
        let mut free = self.places().filter(|place| place.load(Relaxed) == 0);
        free.any(|place| place.compare_exchange(0, event.0, AcqRel, Relaxed).is_ok())
    }
}

#[derive(Default)]
struct Slot {
    context: OnceLock<Context>,
    events: Pool,
    /// A bit for each of the first 64 devices whose memory this one reaches, or never can.
    reached: atomic::AtomicUsize,
}

/// The driver, with the context and the events of each device.
pub(crate) struct Devices<D> {
    driver: D,
    slots: Box<[Slot]>,
}

impl<D: Driver> Devices<D> {
    pub fn new(driver: D, count: usize) -> Self {
        Self { driver, slots: (0..count).map(|_| Slot::default()).collect() }
    }

    pub fn driver(&self) -> &D {
        &self.driver
    }

    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// Returns the device that the calling thread's driver calls act on; `None` where no context is current.
    pub fn current(&self) -> Option<Device> {
        self.driver.current_device().ok().map(Device::cuda)
    }

    /// Keeps the context that is current on this thread, if there is one. Dropping the returned value makes it current
    /// again, whichever context other code has made current in its place.
    pub fn keep_current(&self) -> Option<Kept<'_, D>> {
        let context = self.driver.current_context().ok()??;
        self.driver.push_context(context).ok()?;
        Some(Kept { driver: &self.driver, not_send: PhantomData })
    }

    /// Returns whether the stream can hold work for `device`. The default streams belong to every device, and so does a
    /// stream whose context the driver does not know.
    pub fn has_stream(&self, device: Device, stream: Stream) -> Result<bool> {
        let entered = self.enter(device)?;
        if [Stream::LEGACY, Stream::PER_THREAD].contains(&stream) {
            return Ok(true);
        }
        let Ok(context) = self.driver.context_of(stream) else { return Ok(true) };
        let pushed = self.driver.push_context(context);
        pushed.map_err(|failure| error(&self.driver, failure))?;
        let ordinal = self.driver.current_device();
        let popped = self.driver.pop_context();
        drop(entered);
        popped.map_err(|failure| error(&self.driver, failure))?;
        Ok(ordinal.map_or(true, |ordinal| ordinal == device.index))
    }

    /// Lets a device reach memory of another one. Where it cannot, the driver copies through the host.
    pub fn enable_peer_access(&self, from: Device, to: Device) -> Result<()> {
        // Only the first 64 devices have a bit.
        let bit = u32::try_from(to.index).ok().and_then(|index| 1usize.checked_shl(index)).unwrap_or_default();
        let slot = usize::try_from(from.index).ok().and_then(|index| self.slots.get(index));
        if slot.is_none_or(|slot| slot.reached.load(Relaxed) & bit == bit) {
            return Ok(());
        }
        let other = self.enter(to)?.context();
        let entered = self.enter(from)?;
        let outcomes =
            self.relaxed(|| Ok([self.driver.enable_peer_access(other), self.driver.open_pool(to.index, from.index)]))?;
        // What fails for another reason may work next time.
        if outcomes.iter().all(|outcome| outcome.is_ok() || outcome.is_err_and(is_final)) {
            entered.slot.reached.fetch_or(bit, Relaxed);
        }
        Ok(())
    }

    /// Makes the device's primary context current until the returned value is dropped.
    pub fn enter(&self, device: Device) -> Result<Entered<'_, D>> {
        let slot = KINDS.contains(&device.kind).then(|| self.slots.get(usize::try_from(device.index).ok()?)).flatten();
        let Some(slot) = slot else {
            let text = format!("streams of {device} are not CUDA's: this process has {} CUDA device(s)", self.count());
            return Err(Error::new(ErrorKind::Device, text));
        };
        Entered::new(&self.driver, slot, device.index).map_err(|failure| error(&self.driver, failure))
    }
}

/// A context that is current again when this is dropped. Below it on the thread's stack lies the same context: other
/// code replaces the upper one.
pub(crate) struct Kept<'a, D: Driver> {
    driver: &'a D,
    /// A context is current on one thread.
    not_send: PhantomData<*const ()>,
}

impl<D: Driver> Drop for Kept<'_, D> {
    fn drop(&mut self) {
        // It fails only after the driver has shut down, when there is no current context to restore.
        let _ = self.driver.pop_context();
    }
}

/// What a capture into a graph means for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capture {
    /// No capture concerns it.
    No,
    /// It is being captured.
    Yes,
    /// It is the legacy stream, and a capture of a blocking stream forbids every use of it
    /// (`CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`).
    Forbids,
}

/// Refuses two streams of which one is being captured into a graph: the wait would pull the other one into the capture,
/// or end the capture with an error. So would one of the legacy stream while a blocking stream is captured.
pub(crate) fn both_or_neither(earlier: (Stream, Capture), later: (Stream, Capture)) -> Result<()> {
    let forbids = [earlier.1, later.1].contains(&Capture::Forbids);
    if !forbids && earlier.1 == later.1 {
        return Ok(());
    }
    let (earlier, later) = (earlier.0, later.0);
    let text = match forbids {
        true => format!(
            "a blocking stream is being captured into a CUDA graph, and so {later} must not wait for {earlier}: convert before the capture begins, or capture a non-blocking stream"
        ),
        false => format!(
            "one of {earlier} and {later} is being captured into a CUDA graph and the other is not: convert before the capture begins, or use one stream on both sides"
        ),
    };
    Err(Error::new(ErrorKind::Captured, text))
}

/// When the work now in a stream is done.
pub(crate) enum Point {
    /// Already.
    Idle,
    /// Once this event has fired.
    Event(Event),
}

/// The primary context of a device, current on this thread. Dropping it restores the previous context.
pub(crate) struct Entered<'a, D: Driver> {
    driver: &'a D,
    slot: &'a Slot,
    pushed: bool,
    /// A context is current on one thread.
    not_send: PhantomData<*const ()>,
}

impl<'a, D: Driver> Entered<'a, D> {
    fn new(driver: &'a D, slot: &'a Slot, ordinal: i32) -> Outcome<Self> {
        let context = match slot.context.get() {
            Some(context) => *context,
            // Two threads may both retain it: they get the same handle, and it is never released.
            None => {
                let context = driver.retain_primary_context(ordinal)?;
                *slot.context.get_or_init(|| context)
            }
        };
        let pushed = driver.current_context()? != Some(context);
        if pushed {
            driver.push_context(context)?;
        }
        Ok(Self { driver, slot, pushed, not_send: PhantomData })
    }

    /// Returns the driver, whose calls act on the context.
    pub fn driver(&self) -> &D {
        self.driver
    }

    /// Returns the context.
    pub fn context(&self) -> Context {
        *self.slot.context.get().expect("`new` has retained it")
    }

    /// Records an event after all work now in the stream. Pass it to [`recycle`](Self::recycle) afterwards.
    pub fn record(&self, stream: Stream) -> Outcome<Event> {
        let event = self.slot.events.take().map_or_else(|| self.driver.create_event(), Ok)?;
        self.keep_if_ok(event, self.driver.record_event(event, stream))?;
        Ok(event)
    }

    /// Returns when the work now in the stream is done, or `None` where that is unknown, as for a captured stream: a
    /// captured event never fires, querying it invalidates the capture, and the graph may use the memory at every
    /// launch. `is_busy` says that earlier work is known to be pending, which saves a query.
    pub fn record_unless_idle(&self, stream: Stream, is_busy: impl FnOnce() -> bool) -> Option<Point> {
        match self.driver.is_capturing(stream) {
            // A query of the stream costs less than an event and its polling.
            Ok(false) if !is_busy() && self.driver.is_idle(stream).unwrap_or(false) => Some(Point::Idle),
            Ok(false) => self.record(stream).ok().map(Point::Event),
            _ => None,
        }
    }

    /// Records an event after all work now in any stream of the device; `None` where that is not possible, as while
    /// `stream` or a blocking stream is being captured.
    pub fn record_all(&self, stream: Stream) -> Option<Event> {
        let free = |stream| self.driver.is_capturing(stream) == Ok(false);
        if !(free(stream) && free(Stream::LEGACY)) {
            return None;
        }
        let event = self.slot.events.take().map_or_else(|| self.driver.create_event(), Ok).ok()?;
        self.keep_if_ok(event, self.driver.record_context(event, self.context())).ok()?;
        Some(event)
    }

    /// Returns whether the context was current before, and the legacy default stream orders this stream of it.
    pub fn is_own_after_legacy(&self, stream: Stream) -> Result<bool> {
        let blocking = || self.driver.is_blocking(stream).map_err(|failure| error(self.driver, failure));
        Ok(!self.pushed && blocking()?)
    }

    /// Refuses two streams that cannot be ordered because of a capture.
    pub fn both_or_neither_captured(&self, earlier: Stream, later: Stream) -> Result<()> {
        let capture = |stream| self.capture(stream).map_err(|failure| error(self.driver, failure));
        both_or_neither((earlier, capture(earlier)?), (later, capture(later)?))
    }

    /// Returns what a capture into a graph means for a stream.
    pub fn capture(&self, stream: Stream) -> Outcome<Capture> {
        match self.driver.is_capturing(stream) {
            Ok(false) => Ok(Capture::No),
            Ok(true) => Ok(Capture::Yes),
            Err(failure) if CAPTURING.contains(&failure.code) => Ok(Capture::Forbids),
            Err(failure) => Err(failure),
        }
    }

    /// Returns whether the stream is being captured; `None` where the driver cannot tell. The legacy stream counts as
    /// captured while another capture forbids the query.
    pub fn is_captured(&self, stream: Stream) -> Option<bool> {
        self.capture(stream).ok().map(|capture| capture != Capture::No)
    }

    /// Blocks the host until all work now in the stream has run.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        if self.is_captured(stream) == Some(true) {
            let text = format!(
                "the host cannot wait for {stream}, which is being captured into a CUDA graph: convert the tensor before the capture"
            );
            return Err(Error::new(ErrorKind::Captured, text));
        }
        self.driver.synchronize(stream).map_err(|failure| error(self.driver, failure))
    }

    /// Makes the stream wait for an event.
    pub fn wait(&self, stream: Stream, event: Event) -> Outcome<()> {
        self.keep_if_ok(event, self.driver.wait_event(stream, event))
    }

    /// Returns whether an event has fired.
    pub fn query(&self, event: Event) -> Outcome<bool> {
        self.keep_if_ok(event, self.driver.query_event(event))
    }

    /// Returns an event to the pool.
    pub fn recycle(&self, event: Event) {
        if !self.slot.events.put(event) {
            self.destroy(event);
        }
    }

    /// Destroys the event if the call failed.
    fn keep_if_ok<T>(&self, event: Event, outcome: Outcome<T>) -> Outcome<T> {
        outcome.inspect_err(|_| self.destroy(event))
    }

    fn destroy(&self, event: Event) {
        // On a failure the driver destroys the event with its context.
        let _ = self.driver.destroy_event(event);
    }
}

impl<D: Driver> Drop for Entered<'_, D> {
    fn drop(&mut self) {
        if self.pushed {
            // It fails only after the driver has shut down, when there is no current context to restore.
            let _ = self.driver.pop_context();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;
    use std::collections::HashSet;

    #[test]
    fn a_context_that_other_code_replaces_is_current_again() {
        let devices = Devices::new(Fake::default(), 2);
        assert!(devices.keep_current().is_none());
        let _mine = devices.enter(Device::cuda(1)).unwrap();
        let (before, kept) = (devices.driver().current_context(), devices.keep_current().unwrap());
        // As cuCtxSetCurrent does it.
        devices.driver().pop_context().unwrap();
        let other = devices.driver().retain_primary_context(0).unwrap();
        devices.driver().push_context(other).unwrap();
        drop(kept);
        assert_eq!(devices.driver().current_context(), before);
    }

    #[test]
    fn a_pool_holds_each_event_once() {
        let pool = Pool::default();
        assert_eq!(pool.take(), None);
        let kept = (1..=POOLED + 3).filter(|event| pool.put(Event(*event))).count();
        assert_eq!(kept, POOLED);
        let taken: HashSet<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken.len(), POOLED);
        assert_eq!(pool.take(), None);
    }

    #[test]
    fn no_two_threads_take_one_event() {
        let (pool, held) = (Pool::default(), [const { AtomicUsize::new(0) }; 5]);
        (1..held.len()).for_each(|event| assert!(pool.put(Event(event))));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        // There are as many events as threads, and a slot for each.
                        let event = std::iter::repeat_with(|| pool.take()).flatten().next().unwrap();
                        assert_eq!(held[event.0].fetch_add(1, AcqRel), 0, "{event:?} was taken twice");
                        held[event.0].fetch_sub(1, AcqRel);
                        assert!(pool.put(event));
                    }
                });
            }
        });
    }
}
