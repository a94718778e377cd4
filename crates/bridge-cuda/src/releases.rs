//! Drops buffers whose release is pending when their events have fired.

use crate::context::Devices;
use crate::driver::{Driver, Event, RELAXED};
use crate::queue::Queue;
use crate::sync::{AtomicUsize, rest, thread};
use bridge_core::planted::is_planted;
use bridge_core::{Device, DeviceBuffer, Stream};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{Ordering::Acquire, Ordering::Release};
use std::time::Duration;

/// Pauses of the thread between two polls of the events: the first after a success, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(2));

/// One in so many calls of `release_later` polls earlier buffers, because a query costs as much as an event.
const TURNS: usize = 8;

/// Events whose buffers such a call drops at most: more than [`TURNS`], so that the queue shrinks; few, so that the
/// caller is not delayed.
const SHARE: usize = 2 * TURNS;

/// Buffers that wait for one event: nearly always one.
pub(crate) type Buffers = SmallVec<[Box<dyn DeviceBuffer>; 1]>;

/// Drops buffers. Each drop runs external code, whose panic must not prevent the others.
fn drop_each(buffers: Buffers) {
    for buffer in buffers {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(buffer)));
    }
}

/// As [`drop_each`], on a thread of the program. A deleter may free memory by the driver, which invalidates captures in
/// every mode but the relaxed one.
pub(crate) fn drop_here<D: Driver>(driver: &D, buffers: Buffers) {
    relaxed(driver, || drop_each(buffers));
}

/// Calls `body` in the relaxed mode.
pub(crate) fn relaxed<D: Driver>(driver: &D, body: impl FnOnce()) {
    let before = driver.exchange_capture_mode(RELAXED);
    body();
    // A driver that has shut down has no captures.
    let _ = before.and_then(|before| driver.exchange_capture_mode(before));
}

#[derive(Default)]
struct Counts {
    pending: AtomicUsize,
    leaked: AtomicUsize,
}

/// The buffers of one stream, or of all streams of a device (`None`), whose events have not fired, as far as is known.
/// Events fire in the order of their stream, so only the first is polled. (A stream with the handle of one that was
/// destroyed is queued after it: later than necessary, never too early.)
struct Queued {
    device: Device,
    stream: Option<Stream>,
    waiting: VecDeque<PendingRelease>,
}

impl Queued {
    fn is_of(&self, device: Device, stream: Option<Stream>) -> bool {
        (self.device, self.stream) == (device, stream)
    }
}

#[derive(Default)]
struct State {
    /// One queue for each stream with waiting buffers.
    queues: Vec<Queued>,
    /// Calls of `release_later` that found buffers waiting.
    turns: usize,
}

impl State {
    /// Polls the first event of each queue, and the next while they are done. Removes up to `most` that are not
    /// pending.
    fn finished<D: Driver>(&mut self, devices: &Devices<D>, most: usize) -> Vec<PendingRelease> {
        let mut finished = Vec::new();
        self.queues.retain_mut(|queue| {
            while finished.len() < most && queue.waiting.front_mut().is_some_and(|first| !first.must_wait(devices)) {
                finished.extend(queue.waiting.pop_front());
            }
            !queue.waiting.is_empty()
        });
        finished
    }

    /// Polls on the calling thread. That thread may have a capture under way, which a query invalidates in every mode
    /// but the relaxed one (CUDA driver API, `cuThreadExchangeStreamCaptureMode`).
    fn finished_here<D: Driver>(&mut self, devices: &Devices<D>) -> Vec<PendingRelease> {
        let Ok(before) = devices.driver().exchange_capture_mode(RELAXED) else { return Vec::new() };
        let finished = self.finished(devices, SHARE);
        // The call worked a moment ago; a driver that has shut down meanwhile has no captures.
        let _ = devices.driver().exchange_capture_mode(before);
        finished
    }

    fn push(&mut self, stream: Option<Stream>, release: PendingRelease) {
        let device = release.device;
        let found = self.queues.iter().position(|queue| queue.is_of(device, stream));
        let index = found.unwrap_or_else(|| {
            self.queues.push(Queued { device, stream, waiting: VecDeque::new() });
            self.queues.len() - 1
        });
        self.queues[index].waiting.push_back(release);
    }
}

/// Holds buffers whose release is pending until their events have fired. Some calls of `release_later` drop buffers
/// that are due; a background thread, started when it is first needed, drops the rest.
///
/// The queues of all streams are polled in turn, so that no finished buffer waits for an unfinished one of another
/// stream.
pub(crate) struct Releases {
    counts: Arc<Counts>,
    queue: Arc<Queue<State>>,
    spawn: Spawn,
}

/// Starts a thread, and returns whether that worked.
type Spawn = fn(Box<dyn FnOnce() + Send>) -> bool;

impl Default for Releases {
    fn default() -> Self {
        let spawn = |body| thread::Builder::new().name("truebridge".into()).spawn(body).is_ok();
        Self { counts: Arc::default(), queue: Arc::default(), spawn }
    }
}

impl Releases {
    /// Returns the number of buffers that are neither dropped nor leaked yet.
    pub fn pending(&self) -> usize {
        self.counts.pending.load(Acquire)
    }

    /// Returns the number of buffers that will never be dropped.
    pub fn leaked(&self) -> usize {
        self.counts.leaked.load(Acquire)
    }

    /// Returns whether a buffer still waits for this stream, as far as is known. May first drop buffers that are due.
    pub fn is_after<D: Driver>(&self, devices: &Devices<D>, device: Device, stream: Stream) -> bool {
        let (due, after) = self.queue.with(|state| {
            if state.queues.is_empty() {
                return (Vec::new(), false);
            }
            state.turns += 1;
            let due = if state.turns % TURNS == 1 { state.finished_here(devices) } else { Vec::new() };
            (due, state.queues.iter().any(|queue| queue.is_of(device, Some(stream))))
        });
        // Not under the lock: this runs external code.
        due.into_iter().for_each(|release| release.give_back(|buffers| drop_here(devices.driver(), buffers)));
        after
    }

    /// Drops the buffers after `event`, which was recorded in `stream`, or in all streams of the device (`None`), has
    /// fired.
    pub fn take<D: Driver>(
        &self,
        devices: &Arc<Devices<D>>,
        device: Device,
        stream: Option<Stream>,
        event: Event,
        buffers: Buffers,
    ) {
        let release = PendingRelease::new(device, event, buffers, Arc::clone(&self.counts));
        let start = || {
            let (devices, queue) = (Arc::clone(devices), Arc::clone(&self.queue));
            (self.spawn)(Box::new(move || run(&devices, &queue)))
        };
        self.queue.add(start, |state, _| state.push(stream, release));
    }

    /// Never drops the buffers, and counts them.
    pub fn leak(&self, buffers: Buffers) {
        self.counts.leaked.fetch_add(buffers.len(), Release);
        buffers.into_iter().for_each(mem::forget);
    }
}

impl Drop for Releases {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// Buffers that wait for an event. Only [`give_back`](Self::give_back) drops them; any other drop leaks them.
struct PendingRelease {
    device: Device,
    event: Event,
    /// Whether the event has fired.
    fired: bool,
    buffers: Buffers,
    counts: Arc<Counts>,
}

impl PendingRelease {
    fn new(device: Device, event: Event, buffers: Buffers, counts: Arc<Counts>) -> Self {
        counts.pending.fetch_add(buffers.len(), Release);
        Self { device, event, fired: false, buffers, counts }
    }

    /// Polls the event, and returns whether it is still pending. If not, the event has returned to its pool, or the
    /// query has failed.
    fn must_wait<D: Driver>(&mut self, devices: &Devices<D>) -> bool {
        let Ok(entered) = devices.enter(self.device) else { return false };
        match entered.query(self.event) {
            Ok(true) => entered.recycle(self.event),
            Ok(false) => return true,
            // The work before the event may or may not have run.
            Err(_) => return false,
        }
        self.fired = true;
        false
    }

    /// Drops the buffers if their event has fired.
    fn give_back(mut self, drop_each: impl FnOnce(Buffers)) {
        if self.fired {
            let buffers = mem::take(&mut self.buffers);
            let count = buffers.len();
            drop_each(buffers);
            self.counts.pending.fetch_sub(count, Release);
        }
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        let leaked = mem::take(&mut self.buffers);
        self.counts.leaked.fetch_add(leaked.len(), Release);
        self.counts.pending.fetch_sub(leaked.len(), Release);
        leaked.into_iter().for_each(mem::forget);
    }
}

/// Polls the events until [`Releases`] has been dropped and no buffer is left.
fn run<D: Driver>(devices: &Devices<D>, queue: &Queue<State>) {
    // A query would invalidate captures of other threads, too. If this fails, so does every query.
    if !is_planted("cuda_releases_not_relaxed") {
        let _ = devices.driver().exchange_capture_mode(RELAXED);
    }
    let mut pause = PAUSES.0;
    let is_empty = |state: &State| state.queues.is_empty();
    while let Some(due) = queue.wait(is_empty, |state| state.finished(devices, usize::MAX)) {
        pause = if due.is_empty() { PAUSES.1.min(pause * 2) } else { PAUSES.0 };
        due.into_iter().for_each(|release| release.give_back(drop_each));
        rest(pause);
    }
}

#[cfg(test)]
mod tests {
    use super::TURNS;
    use crate::driver::RELAXED;
    use crate::fake::{Call, Counted, Fake, eventually};
    use crate::ordering::CudaOrdering;
    use bridge_core::{Device, Stream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    // SAFETY: no driver sees this stream.
    const A: Stream = unsafe { Stream::from_handle(0xa0) };
    // SAFETY: no driver sees this stream.
    const B: Stream = unsafe { Stream::from_handle(0xb0) };
    const GPU: Device = Device::cuda(0);

    fn setup() -> (CudaOrdering<Fake>, Arc<AtomicUsize>) {
        (CudaOrdering::new(Fake::default(), 2), Arc::default())
    }

    fn settled(cuda: &CudaOrdering<Fake>) {
        eventually("nothing is pending", || cuda.releases().pending() == 0);
    }

    #[test]
    fn a_buffer_is_dropped_once_and_not_before_its_event_has_fired() {
        let (cuda, drops) = setup();
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        eventually("the event was queried a few times", || cuda.devices().driver().queries() > 5);
        assert_eq!((drops.load(SeqCst), cuda.releases().pending()), (0, 1));
        cuda.devices().driver().finish(A);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (1, 0));
    }

    #[test]
    fn a_finished_buffer_does_not_wait_for_an_unfinished_one() {
        let (cuda, drops) = setup();
        let late = Arc::default();
        cuda.release_later(GPU, A, Counted::boxed(&late));
        cuda.release_later(GPU, B, Counted::boxed(&drops));
        cuda.devices().driver().finish(B);
        eventually("the second is dropped", || drops.load(SeqCst) == 1);
        eventually("one is left", || cuda.releases().pending() == 1);
        assert_eq!(late.load(SeqCst), 0);
        cuda.devices().driver().finish(A);
        settled(&cuda);
        assert_eq!((late.load(SeqCst), drops.load(SeqCst)), (1, 1));
    }

    #[test]
    fn memory_is_leaked_where_the_driver_cannot_tell_when() {
        for (call, code) in
            [("cuCtxGetCurrent", 4), ("cuEventCreate", 2), ("cuEventRecord", 900), ("cuEventQuery", 907)]
        {
            let (cuda, drops) = setup();
            cuda.devices().driver().fail(call, code);
            cuda.release_later(GPU, A, Counted::boxed(&drops));
            settled(&cuda);
            assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (0, 1), "{call}");
            cuda.devices().driver().fail(call, 0);
            cuda.release_later(GPU, B, Counted::boxed(&drops));
            cuda.devices().driver().finish(B);
            settled(&cuda);
            assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (1, 1), "afterwards, {call}");
        }
    }

    #[test]
    fn memory_of_a_captured_stream_is_leaked_and_the_capture_not_touched() {
        let (cuda, drops) = setup();
        cuda.devices().driver().capture(A);
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (0, 1));
        let calls = cuda.devices().driver().take_calls();
        assert!(!calls.iter().any(|call| matches!(call, Call::Record(..))), "{calls:?}");
    }

    #[test]
    fn memory_of_no_cuda_device_is_leaked() {
        let (cuda, drops) = setup();
        for device in [Device::CPU, Device::cuda(2), Device::cuda(-1)] {
            cuda.release_later(device, A, Counted::boxed(&drops));
        }
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (0, 3));
    }

    #[test]
    fn pending_buffers_are_leaked_when_the_driver_shuts_down() {
        let (cuda, drops) = setup();
        for _ in 0..3 {
            cuda.release_later(GPU, A, Counted::boxed(&drops));
        }
        cuda.devices().driver().fail("cuCtxGetCurrent", 4);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (0, 3));
    }

    #[test]
    fn a_panic_in_a_drop_does_not_take_the_others_with_it() {
        let (cuda, drops) = setup();
        cuda.release_later(GPU, A, Box::new(Counted { drops: Arc::clone(&drops), panics: true }));
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        cuda.devices().driver().finish(A);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (2, 0));
    }

    #[test]
    fn a_drop_that_calls_the_driver_does_no_harm_to_the_callers_captures() {
        let (cuda, drops) = setup();
        cuda.devices().driver().idle(A);
        for panics in [false, true] {
            cuda.devices().driver().take_calls();
            cuda.release_later(GPU, A, Box::new(Counted { drops: Arc::clone(&drops), panics }));
            let calls = cuda.devices().driver().take_calls();
            assert!(calls.windows(2).any(|two| two == [Call::Mode(RELAXED), Call::Mode(0)]), "{calls:?}");
        }
        assert_eq!(drops.load(SeqCst), 2);
    }

    #[test]
    fn a_release_polls_older_buffers_without_harm_to_the_callers_captures() {
        let (cuda, drops) = setup();
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        eventually("the thread polls", || cuda.devices().driver().queries() > 1);
        cuda.release_later(GPU, B, Counted::boxed(&drops));
        let calls = cuda.devices().driver().take_calls();
        let modes: Vec<_> = calls.iter().filter(|call| matches!(call, Call::Mode(_))).collect();
        // One of them is the thread's own.
        assert_eq!(modes.iter().filter(|call| ***call == Call::Mode(RELAXED)).count(), 2, "{modes:?}");
        assert_eq!(modes.iter().filter(|call| ***call == Call::Mode(0)).count(), 1, "{modes:?}");
        cuda.devices().driver().finish(A);
        cuda.devices().driver().finish(B);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (2, 0));
    }

    #[test]
    fn work_after_a_pending_buffer_is_pending_without_a_query() {
        let (cuda, drops) = setup();
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        cuda.devices().driver().idle(A);
        cuda.devices().driver().idle(B);
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        assert_eq!((drops.load(SeqCst), cuda.releases().pending()), (0, 2), "the stream was queried");
        cuda.release_later(GPU, B, Counted::boxed(&drops));
        cuda.release_later(Device::cuda(1), A, Counted::boxed(&drops));
        assert_eq!((drops.load(SeqCst), cuda.releases().pending()), (2, 2), "no buffer waits for those streams");
        cuda.devices().driver().finish(A);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (4, 0));
    }

    #[test]
    fn only_the_first_buffer_of_a_stream_is_polled() {
        let (cuda, drops) = setup();
        let never: fn(Box<dyn FnOnce() + Send>) -> bool = |_| true;
        let mut cuda = cuda;
        cuda.releases_mut().spawn = never;
        for _ in 0..TURNS {
            cuda.release_later(GPU, A, Counted::boxed(&drops));
        }
        assert_eq!(cuda.devices().driver().queries(), 1, "one turn polls, one buffer");
        cuda.devices().driver().finish(A);
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        assert_eq!(drops.load(SeqCst), TURNS, "the next turn drops them all");
    }

    #[test]
    fn events_are_reused_and_the_thread_starts_once() {
        let (cuda, drops) = setup();
        for round in 1..=20 {
            cuda.release_later(GPU, A, Counted::boxed(&drops));
            cuda.devices().driver().finish(A);
            settled(&cuda);
            assert_eq!(drops.load(SeqCst), round);
        }
        let calls = cuda.devices().driver().take_calls();
        assert_eq!(calls.iter().filter(|call| **call == Call::Mode(RELAXED)).count(), 1);
        assert_eq!(cuda.devices().driver().live_events(), 1);
    }

    #[test]
    fn a_thread_that_could_not_be_started_is_tried_again() {
        static TRIES: AtomicUsize = AtomicUsize::new(0);
        let (mut cuda, drops) = setup();
        let spawn = cuda.releases().spawn;
        cuda.releases_mut().spawn = |body| match TRIES.fetch_add(1, SeqCst) {
            0 => false,
            _ => std::thread::Builder::new().spawn(body).is_ok(),
        };
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        cuda.devices().driver().finish(A);
        assert_eq!((drops.load(SeqCst), cuda.releases().pending(), cuda.releases().leaked()), (0, 1, 0));
        cuda.release_later(GPU, B, Counted::boxed(&drops));
        cuda.devices().driver().finish(B);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked(), TRIES.load(SeqCst)), (2, 0, 2));
        assert!(spawn(Box::new(|| ())));
    }

    #[test]
    fn threads_may_release_at_once() {
        let (cuda, drops) = setup();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (cuda, drops) = (&cuda, &drops);
                scope.spawn(move || {
                    for number in 0..100 {
                        let device = Device::cuda(number % 2);
                        // SAFETY: no driver sees this stream.
                        cuda.release_later(device, unsafe { Stream::from_handle(100 + thread) }, Counted::boxed(drops));
                    }
                });
            }
        });
        assert_eq!(drops.load(SeqCst), 0);
        // SAFETY: no driver sees this stream.
        (0..4).for_each(|thread| cuda.devices().driver().finish(unsafe { Stream::from_handle(100 + thread) }));
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (400, 0));
    }

    #[test]
    fn pending_buffers_are_dropped_after_the_ordering() {
        let (cuda, drops) = setup();
        let counts = Arc::clone(&cuda.releases().counts);
        cuda.release_later(GPU, A, Counted::boxed(&drops));
        cuda.devices().driver().finish(A);
        drop(cuda);
        eventually("it is dropped", || counts.pending.load(SeqCst) == 0);
        assert_eq!(drops.load(SeqCst), 1);
    }
}
