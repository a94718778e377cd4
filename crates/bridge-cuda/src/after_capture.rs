//! Defers the return of memory until a capture has ended.

use crate::context::Devices;
use crate::driver::Driver;
use crate::sync::{Mutex, MutexGuard, rest, thread};
use bridge_core::{Deferred, Device, Stream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// The pause between two polls of a capture, which takes milliseconds at least.
const PAUSE: Duration = Duration::from_millis(2);

/// An attempt to return memory, and the captured stream that it waits for.
struct Waiting {
    device: Device,
    stream: Stream,
    attempt: Deferred,
}

#[derive(Default)]
struct State {
    waiting: Vec<Waiting>,
    /// How many attempts the thread has taken out to poll them.
    polled: usize,
    /// Whether the thread runs. It ends when no attempt is left.
    thread: bool,
}

/// The attempts that wait for the end of a capture. Dropping an attempt uncalled leaks its memory and counts the leak.
#[derive(Clone, Default)]
pub(crate) struct AfterCapture(Arc<Mutex<State>>);

impl AfterCapture {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of waiting attempts.
    pub fn deferred(&self) -> usize {
        let state = self.lock();
        state.waiting.len() + state.polled
    }

    /// Calls `attempt` when `stream` is no longer being captured. Where it is not captured now, calls it at once, and
    /// only once.
    pub fn add<D: Driver>(&self, devices: &Arc<Devices<D>>, device: Device, stream: Stream, attempt: Deferred) {
        let mut waiting = Waiting { device, stream, attempt };
        if waiting.is_captured(devices) != Some(true) {
            waiting.is_done();
            return;
        }
        let mut state = self.lock();
        state.waiting.push(waiting);
        // If the thread cannot be started, the next attempt tries again.
        if !state.thread {
            let (later, devices) = (self.clone(), Arc::clone(devices));
            let thread = thread::Builder::new().name("truebridge-later".into());
            state.thread = thread.spawn(move || later.run(&devices)).is_ok();
        }
    }

    fn run<D: Driver>(&self, devices: &Devices<D>) {
        loop {
            rest(PAUSE);
            let (mut due, mut kept) = (Vec::new(), Vec::new());
            let taken = {
                let state = &mut *self.lock();
                state.polled = state.waiting.len();
                std::mem::take(&mut state.waiting)
            };
            for waiting in taken {
                match waiting.is_captured(devices) {
                    Some(true) => kept.push(waiting),
                    Some(false) => due.push(waiting),
                    None => drop(waiting),
                }
            }
            // Not under the lock: this runs external code. Another capture may have begun meanwhile.
            kept.extend(due.into_iter().filter_map(|mut waiting| (!waiting.is_done()).then_some(waiting)));
            let mut state = self.lock();
            state.waiting.append(&mut kept);
            state.polled = 0;
            if state.waiting.is_empty() {
                state.thread = false;
                return;
            }
        }
    }
}

impl Waiting {
    /// Returns whether the stream is being captured; `None` where the driver cannot tell, as when it shuts down.
    fn is_captured<D: Driver>(&self, devices: &Devices<D>) -> Option<bool> {
        devices.enter(self.device).ok()?.is_captured(self.stream)
    }

    fn is_done(&mut self) -> bool {
        // External code: its panic must not prevent the other attempts.
        catch_unwind(AssertUnwindSafe(|| (self.attempt)())).unwrap_or(true)
    }
}

#[cfg(test)]
mod tests {
    use crate::fake::{Fake, eventually};
    use crate::ordering::CudaOrdering;
    use bridge_core::{Device, Stream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    // SAFETY: no driver sees this stream.
    const A: Stream = unsafe { Stream::from_handle(0xa0) };
    const GPU: Device = Device::cuda(0);

    /// An attempt that succeeds at the call with this number, and the count of calls.
    fn attempt(succeeds: usize) -> (Arc<AtomicUsize>, bridge_core::Deferred) {
        let calls = Arc::<AtomicUsize>::default();
        let counted = calls.clone();
        (calls, Box::new(move || counted.fetch_add(1, SeqCst) + 1 == succeeds))
    }

    #[test]
    fn an_attempt_is_made_after_the_capture_until_it_succeeds() {
        for _ in 0..2 {
            let cuda = CudaOrdering::new(Fake::default(), 1);
            cuda.devices().driver().capture(A);
            let (calls, attempt) = attempt(2);
            cuda.defer(GPU, A, attempt);
            std::thread::sleep(super::PAUSE * 3);
            assert_eq!((calls.load(SeqCst), cuda.after_capture().deferred()), (0, 1), "the capture goes on");
            cuda.devices().driver().end_capture();
            eventually("both calls are made", || calls.load(SeqCst) == 2);
            eventually("nothing waits", || cuda.after_capture().deferred() == 0);
        }
    }

    #[test]
    fn an_attempt_after_no_capture_is_made_once() {
        let cuda = CudaOrdering::new(Fake::default(), 1);
        let (calls, attempt) = attempt(2);
        cuda.defer(GPU, A, attempt);
        assert_eq!((calls.load(SeqCst), cuda.after_capture().deferred()), (1, 0));
    }

    #[test]
    fn an_attempt_is_dropped_where_the_driver_has_shut_down() {
        let cuda = CudaOrdering::new(Fake::default(), 1);
        cuda.devices().driver().capture(A);
        let (calls, attempt) = attempt(1);
        cuda.defer(GPU, A, attempt);
        cuda.devices().driver().fail("cuStreamIsCapturing", 4);
        eventually("nothing waits", || cuda.after_capture().deferred() == 0);
        eventually("the attempt is dropped", || Arc::strong_count(&calls) == 1);
        assert_eq!(calls.load(SeqCst), 0);
    }
}
