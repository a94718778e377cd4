//! Drops retired buffers when their events have fired.

use crate::context::Devices;
use crate::driver::{Driver, Event, RELAXED};
use bridge_core::{Device, DeviceBuffer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pauses of the thread between two looks at the events: the first after it found something, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(2));

/// How many buffers whoever retires one looks at: more than it adds, so that nothing piles up, and few, so that it is not
/// held up.
const SHARE: usize = 8;

#[derive(Default)]
struct Counts {
    retired: AtomicUsize,
    leaked: AtomicUsize,
}

#[derive(Default)]
struct State {
    /// What waits for its events.
    waiting: Vec<Retired>,
    /// Whether no more will come.
    closed: bool,
    /// Whether a thread looks after them.
    thread: bool,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at a share of the oldest, on a thread of the user's. It may have a capture under way, which a query would
    /// invalidate in any mode but the relaxed one (CUDA driver API, `cuThreadExchangeStreamCaptureMode`).
    fn finished_here<D: Driver>(waiting: &mut Vec<Retired>, devices: &Devices<D>) -> Vec<Retired> {
        let Ok(before) = devices.driver().exchange_capture_mode(RELAXED) else { return Vec::new() };
        let finished = Self::finished(waiting, devices, SHARE);
        // It worked a moment ago; a driver that shuts down meanwhile has no captures.
        let _ = devices.driver().exchange_capture_mode(before);
        finished
    }

    /// Takes those of the `oldest` that need wait no longer.
    fn finished<D: Driver>(waiting: &mut Vec<Retired>, devices: &Devices<D>, oldest: usize) -> Vec<Retired> {
        let oldest = oldest.min(waiting.len());
        waiting.extract_if(..oldest, |retired| !retired.must_wait(devices)).collect()
    }
}

/// Whoever retires a buffer first drops some that are due; a background thread, started when it is first needed, drops
/// the rest when nobody comes any more.
///
/// All events are asked in turn, so that a buffer whose work has run never stands behind one whose work has not.
pub(crate) struct Reaper {
    counts: Arc<Counts>,
    queue: Arc<Queue>,
    spawn: Spawn,
}

/// Starts a thread, and returns whether it could.
type Spawn = fn(Box<dyn FnOnce() + Send>) -> bool;

impl Default for Reaper {
    fn default() -> Self {
        let spawn = |body| std::thread::Builder::new().name("tensor-bridge".into()).spawn(body).is_ok();
        Self { counts: Arc::default(), queue: Arc::default(), spawn }
    }
}

impl Reaper {
    /// Buffers that are neither dropped nor leaked yet.
    pub fn retired(&self) -> usize {
        self.counts.retired.load(Acquire)
    }

    /// Buffers that will never be dropped.
    pub fn leaked(&self) -> usize {
        self.counts.leaked.load(Acquire)
    }

    /// Drops `buffer` when `event` has fired; leaks it without one.
    pub fn take<D: Driver>(
        &self,
        devices: &Arc<Devices<D>>,
        device: Device,
        event: Option<Event>,
        buffer: Box<dyn DeviceBuffer>,
    ) {
        let retired = Retired::new(device, event, buffer, Arc::clone(&self.counts));
        // A forked child records no events, and so it never gets here, where it would have no thread.
        if event.is_none() {
            return;
        }
        let due = {
            let state = &mut *self.queue.lock();
            // Where no thread can be started, the buffer waits for the next one that is retired, which tries again.
            if !state.thread {
                let (devices, queue) = (Arc::clone(devices), Arc::clone(&self.queue));
                state.thread = (self.spawn)(Box::new(move || run(&devices, &queue)));
            }
            let waiting = &mut state.waiting;
            let due = if waiting.is_empty() { Vec::new() } else { Queue::finished_here(waiting, devices) };
            waiting.push(retired);
            due
        };
        self.queue.changed.notify_one();
        // Behind the lock: this runs code of the owners.
        due.into_iter().for_each(Retired::give_back);
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.changed.notify_one();
    }
}

/// A buffer behind an event. It is dropped by [`give_back`](Self::give_back) alone; lost in any other way, it is leaked.
struct Retired {
    device: Device,
    event: Option<Event>,
    /// Whether the event has fired.
    fired: bool,
    buffer: Option<Box<dyn DeviceBuffer>>,
    counts: Arc<Counts>,
}

impl Retired {
    fn new(device: Device, event: Option<Event>, buffer: Box<dyn DeviceBuffer>, counts: Arc<Counts>) -> Self {
        counts.retired.fetch_add(1, Release);
        Self { device, event, fired: false, buffer: Some(buffer), counts }
    }

    /// Whether to ask again later. Afterwards the event is back in its pool, or lost with what it stood for.
    fn must_wait<D: Driver>(&mut self, devices: &Devices<D>) -> bool {
        let (Some(event), Ok(entered)) = (self.event, devices.enter(self.device)) else { return false };
        match entered.query(event) {
            Ok(true) => entered.recycle(event),
            Ok(false) => return true,
            // What the event stood for may or may not have run.
            Err(_) => return false,
        }
        self.fired = true;
        false
    }

    /// Drops the buffer if its event has fired.
    fn give_back(mut self) {
        if let Some(buffer) = self.buffer.take_if(|_| self.fired) {
            // The owner's code: its panic must not take the other buffers with it.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(buffer)));
            self.counts.retired.fetch_sub(1, Release);
        }
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            std::mem::forget(buffer);
            self.counts.leaked.fetch_add(1, Release);
            self.counts.retired.fetch_sub(1, Release);
        }
    }
}

/// Ends when nothing is left and nobody can send any more.
fn run<D: Driver>(devices: &Devices<D>, queue: &Queue) {
    // Captures of other threads count as well. Where it fails, so does every query.
    let _ = devices.driver().exchange_capture_mode(RELAXED);
    let mut pause = PAUSES.0;
    loop {
        let mut state = queue.lock();
        while state.waiting.is_empty() {
            if state.closed {
                return;
            }
            state = queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let due = Queue::finished(&mut state.waiting, devices, usize::MAX);
        drop(state);
        pause = if due.is_empty() { PAUSES.1.min(pause * 2) } else { PAUSES.0 };
        due.into_iter().for_each(Retired::give_back);
        std::thread::sleep(pause);
    }
}

#[cfg(test)]
mod tests {
    use crate::driver::RELAXED;
    use crate::fake::{Call, Counted, Fake, eventually};
    use crate::ordering::CudaOrdering;
    use bridge_core::{Device, Ordering, Stream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    const A: Stream = Stream::from_handle(0xa0);
    const B: Stream = Stream::from_handle(0xb0);
    const GPU: Device = Device::cuda(0);

    fn setup() -> (CudaOrdering<Fake>, Arc<AtomicUsize>) {
        (CudaOrdering::new(Fake::default(), 2), Arc::default())
    }

    fn settled(cuda: &CudaOrdering<Fake>) {
        eventually("nothing is pending", || cuda.reaper().retired() == 0);
    }

    #[test]
    fn a_buffer_is_dropped_once_and_not_before_its_event_has_fired() {
        let (cuda, drops) = setup();
        cuda.retire(GPU, A, Counted::boxed(&drops));
        eventually("the event was asked a few times", || cuda.devices().driver().queries() > 5);
        assert_eq!((drops.load(SeqCst), cuda.reaper().retired()), (0, 1));
        cuda.devices().driver().finish(A);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (1, 0));
    }

    #[test]
    fn what_is_finished_does_not_stand_behind_what_is_not() {
        let (cuda, drops) = setup();
        let late = Arc::default();
        cuda.retire(GPU, A, Counted::boxed(&late));
        cuda.retire(GPU, B, Counted::boxed(&drops));
        cuda.devices().driver().finish(B);
        eventually("the second is dropped", || drops.load(SeqCst) == 1);
        eventually("one is left", || cuda.reaper().retired() == 1);
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
            cuda.retire(GPU, A, Counted::boxed(&drops));
            settled(&cuda);
            assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (0, 1), "{call}");
            cuda.devices().driver().fail(call, 0);
            cuda.retire(GPU, B, Counted::boxed(&drops));
            cuda.devices().driver().finish(B);
            settled(&cuda);
            assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (1, 1), "afterwards, {call}");
        }
    }

    #[test]
    fn memory_of_a_captured_stream_is_leaked_and_the_capture_not_touched() {
        let (cuda, drops) = setup();
        cuda.devices().driver().capture(A);
        cuda.retire(GPU, A, Counted::boxed(&drops));
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (0, 1));
        let calls = cuda.devices().driver().take_calls();
        assert!(!calls.iter().any(|call| matches!(call, Call::Record(..))), "{calls:?}");
    }

    #[test]
    fn memory_of_no_cuda_device_is_leaked() {
        let (cuda, drops) = setup();
        for device in [Device::CPU, Device::cuda(2), Device::cuda(-1)] {
            cuda.retire(device, A, Counted::boxed(&drops));
        }
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (0, 3));
    }

    #[test]
    fn a_driver_that_shuts_down_leaves_what_is_pending() {
        let (cuda, drops) = setup();
        for _ in 0..3 {
            cuda.retire(GPU, A, Counted::boxed(&drops));
        }
        cuda.devices().driver().fail("cuCtxGetCurrent", 4);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (0, 3));
    }

    #[test]
    fn a_panic_in_a_drop_does_not_take_the_others_with_it() {
        let (cuda, drops) = setup();
        cuda.retire(GPU, A, Box::new(Counted { drops: Arc::clone(&drops), panics: true }));
        cuda.retire(GPU, A, Counted::boxed(&drops));
        cuda.devices().driver().finish(A);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (2, 0));
    }

    #[test]
    fn whoever_retires_looks_at_older_buffers_without_harm_to_its_captures() {
        let (cuda, drops) = setup();
        cuda.retire(GPU, A, Counted::boxed(&drops));
        eventually("the thread looks", || cuda.devices().driver().queries() > 1);
        cuda.retire(GPU, B, Counted::boxed(&drops));
        let calls = cuda.devices().driver().take_calls();
        let modes: Vec<_> = calls.iter().filter(|call| matches!(call, Call::Mode(_))).collect();
        // The thread has set its own, once.
        assert_eq!(modes.iter().filter(|call| ***call == Call::Mode(RELAXED)).count(), 2, "{modes:?}");
        assert_eq!(modes.iter().filter(|call| ***call == Call::Mode(0)).count(), 1, "{modes:?}");
        cuda.devices().driver().finish(A);
        cuda.devices().driver().finish(B);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (2, 0));
    }

    #[test]
    fn events_come_back_and_the_thread_starts_once() {
        let (cuda, drops) = setup();
        for round in 1..=20 {
            cuda.retire(GPU, A, Counted::boxed(&drops));
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
        let spawn = cuda.reaper().spawn;
        cuda.reaper_mut().spawn = |body| match TRIES.fetch_add(1, SeqCst) {
            0 => false,
            _ => std::thread::Builder::new().spawn(body).is_ok(),
        };
        cuda.retire(GPU, A, Counted::boxed(&drops));
        cuda.devices().driver().finish(A);
        assert_eq!((drops.load(SeqCst), cuda.reaper().retired(), cuda.reaper().leaked()), (0, 1, 0));
        cuda.retire(GPU, B, Counted::boxed(&drops));
        cuda.devices().driver().finish(B);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.reaper().leaked(), TRIES.load(SeqCst)), (2, 0, 2));
        assert!(spawn(Box::new(|| ())));
    }

    #[test]
    fn threads_may_retire_at_once() {
        let (cuda, drops) = setup();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (cuda, drops) = (&cuda, &drops);
                scope.spawn(move || {
                    for number in 0..100 {
                        let device = Device::cuda(number % 2);
                        cuda.retire(device, Stream::from_handle(100 + thread), Counted::boxed(drops));
                    }
                });
            }
        });
        assert_eq!(drops.load(SeqCst), 0);
        (0..4).for_each(|thread| cuda.devices().driver().finish(Stream::from_handle(100 + thread)));
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.reaper().leaked()), (400, 0));
    }

    #[test]
    fn what_is_pending_is_still_dropped_when_the_ordering_goes() {
        let (cuda, drops) = setup();
        let counts = Arc::clone(&cuda.reaper().counts);
        cuda.retire(GPU, A, Counted::boxed(&drops));
        cuda.devices().driver().finish(A);
        drop(cuda);
        eventually("it is dropped", || counts.retired.load(SeqCst) == 0);
        assert_eq!(drops.load(SeqCst), 1);
    }
}
