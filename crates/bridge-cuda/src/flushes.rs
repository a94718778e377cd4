//! Calls flushes in about a millisecond.

use crate::context::Devices;
use crate::driver::{Driver, RELAXED};
use crate::queue::Queue;
use crate::sync::{rest, thread};
use bridge_core::Flush;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// How long a flush waits: long enough for the drop of a tree of tensors, short enough that no allocator notices.
const MOMENT: Duration = Duration::from_millis(1);

/// The flushes that are called in about a millisecond, on a thread that starts with the first.
pub(crate) struct Flushes {
    queue: Arc<Queue<Vec<Flush>>>,
    moment: Duration,
}

impl Default for Flushes {
    fn default() -> Self {
        Self { queue: Arc::default(), moment: MOMENT }
    }
}

impl Flushes {
    /// Calls `flush` in about a millisecond, or now where no thread can be started.
    pub fn add<D: Driver>(&self, devices: &Arc<Devices<D>>, flush: Flush) {
        let start = || {
            let (devices, queue, moment) = (Arc::clone(devices), Arc::clone(&self.queue), self.moment);
            let thread = thread::Builder::new().name("truebridge-flush".into());
            thread.spawn(move || run(&devices, &queue, moment)).is_ok()
        };
        let left = self.queue.add(start, |flushes, runs| {
            if runs {
                flushes.push(flush);
                return None;
            }
            Some(flush)
        });
        // Not under the lock: this runs external code.
        left.into_iter().for_each(|flush| flush());
    }
}

impl Drop for Flushes {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// Calls the flushes until the queue has been closed and is empty.
fn run<D: Driver>(devices: &Devices<D>, queue: &Queue<Vec<Flush>>, moment: Duration) {
    // A flush may query a stream, which would invalidate captures of other threads. If this fails, so does the query.
    let _ = devices.driver().exchange_capture_mode(RELAXED);
    while queue.wait(Vec::is_empty, |_| ()).is_some() {
        rest(moment);
        let due = queue.with(std::mem::take);
        for flush in due {
            // External code: its panic must not prevent the other calls.
            let _ = catch_unwind(AssertUnwindSafe(flush));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Call, Counted, Fake, eventually};
    use crate::ordering::CudaOrdering;
    use bridge_core::{
        Access, Adapter, Allocation, Consumer, DType, Deferred, Device, DeviceBuffer, DeviceKind, Error, ErrorKind,
        Export, Layout, Lease, Memory, Offer, Options, Ordering, Profile, Result, Reuse, Stream, Strides, Views,
        transfer_all,
    };
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    // SAFETY: no driver sees this stream.
    const A: Stream = unsafe { Stream::from_handle(0xa0) };
    // SAFETY: no driver sees this stream.
    const B: Stream = unsafe { Stream::from_handle(0xb0) };
    const GPU: Device = Device::cuda(0);

    /// A framework of buffers without bytes, which works in one stream.
    struct Empties {
        profile: Profile,
        stream: Stream,
        reuse: Reuse,
        drops: Arc<AtomicUsize>,
        views: Arc<InStream>,
    }

    struct InStream(std::sync::Mutex<Stream>, Views);

    // SAFETY: the tests do all work in this stream.
    unsafe impl Consumer for InStream {
        fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
            Ok(Some(*self.0.lock().unwrap()))
        }

        fn views(&self) -> &Views {
            &self.1
        }
    }

    impl Empties {
        fn new(stream: Stream, reuse: Reuse) -> Self {
            let export_only = Profile::export_only("empties");
            let (dtypes, devices) = (vec![DType::FLOAT32], vec![DeviceKind::CUDA]);
            let profile = export_only.with_dtypes(dtypes).with_devices(devices).with_strides(Strides::Any);
            let views = Arc::new(InStream(stream.into(), Views::default()));
            Self { profile, stream, reuse, drops: Arc::default(), views }
        }
    }

    // SAFETY: it only exports empty tensors.
    unsafe impl Adapter for Empties {
        type Tensor = Option<Lease>;

        fn profile(&self) -> &Profile {
            &self.profile
        }

        fn consumer(&self) -> Arc<dyn Consumer> {
            self.views.clone()
        }

        fn export(&self, _: &Option<Lease>) -> Result<Export> {
            let (stream, access) = (Some(self.stream), Access::ReadWrite);
            let allocation = Allocation::new(0..0, GPU, access, stream, self.reuse);
            // SAFETY: there are no bytes.
            let memory = unsafe { Memory::new(allocation, Counted::boxed(&self.drops)) };
            Export::new(DType::FLOAT32, Layout::new(DType::FLOAT32, &[0], None, 0)?, memory)
        }

        fn import(&self, offer: Offer) -> Result<Option<Lease>> {
            Ok(Some(offer.accept(&self.profile, &self.views)?))
        }

        fn compact(&self, _: &Option<Lease>) -> Result<Option<Lease>> {
            Err(Error::new(ErrorKind::CopyNeeded, "planned"))
        }
    }

    // SAFETY: it orders as the driver's does, over the fake driver.
    unsafe impl Ordering for CudaOrdering<Fake> {
        unsafe fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
            self.order(device, earlier, later)
        }

        unsafe fn order_across(&self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
            self.order_across(earlier, later)
        }

        unsafe fn release_later(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
            self.release_later(device, stream, buffer);
        }

        unsafe fn release_all_later(&self, device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
            self.release_all_later(device, stream, buffers);
        }

        unsafe fn release_after_all_work(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
            self.release_after_all_work(device, stream, buffer);
        }

        unsafe fn is_captured(&self, device: Device, stream: Stream) -> Option<bool> {
            self.is_captured(device, stream)
        }

        fn flush_later(&self, flush: Flush) {
            self.flush_later(flush);
        }

        unsafe fn synchronize(&self, device: Device, stream: Stream) -> Result<()> {
            self.synchronize(device, stream)
        }

        unsafe fn defer(&self, device: Device, stream: Stream, attempt: Deferred) {
            self.defer(device, stream, attempt);
        }
    }

    fn convert(from: &Empties, to: &Empties, ordering: &Arc<dyn Ordering>, count: usize) -> Vec<Option<Lease>> {
        let tensors: Vec<(&dyn Adapter<Tensor = Option<Lease>>, _)> = vec![(from, &None); count];
        let converted = transfer_all(&tensors, to, ordering, &Options::default()).expect("they convert");
        converted.into_iter().map(|(view, _)| view).collect()
    }

    /// Returns an ordering whose flushes wait longer than any test, unless the last view calls them.
    fn patient() -> (Arc<CudaOrdering<Fake>>, Arc<dyn Ordering>) {
        let mut cuda = CudaOrdering::new(Fake::default(), 1);
        cuda.flushes_mut().moment = Duration::from_secs(3600);
        let cuda = Arc::new(cuda);
        (cuda.clone(), cuda)
    }

    fn records_and_waits(cuda: &CudaOrdering<Fake>) -> (usize, usize) {
        let calls = cuda.devices().driver().take_calls();
        let count = |kind: fn(&Call) -> bool| calls.iter().filter(|call| kind(call)).count();
        (count(|call| matches!(call, Call::Record(..))), count(|call| matches!(call, Call::Wait(..))))
    }

    #[test]
    fn three_hundred_tensors_cost_the_events_of_one() {
        for (reuse, returned) in [(Reuse::InStreamOrder, (1, 1)), (Reuse::Unknown, (2, 1))] {
            let (cuda, ordering) = patient();
            let (from, to) = (Empties::new(A, reuse), Empties::new(B, reuse));
            let views = convert(&from, &to, &ordering, 300);
            assert_eq!(records_and_waits(&cuda), (1, 1));
            drop(views);
            assert_eq!(records_and_waits(&cuda), returned);
            cuda.devices().driver().finish(A);
            eventually("all are dropped", || from.drops.load(SeqCst) == 300);
            eventually("no release is pending", || cuda.releases().pending() == 0);
            assert_eq!(cuda.releases().leaked(), 0);
        }
    }

    #[test]
    fn in_one_stream_only_memory_of_unknown_reuse_costs_an_event() {
        for (reuse, returned) in [(Reuse::InStreamOrder, (0, 0)), (Reuse::Unknown, (1, 0))] {
            let (cuda, ordering) = patient();
            let (from, to) = (Empties::new(A, reuse), Empties::new(A, reuse));
            drop(convert(&from, &to, &ordering, 300));
            assert_eq!(records_and_waits(&cuda), returned);
        }
    }

    #[test]
    fn a_single_dropped_view_is_returned_by_the_thread() {
        let cuda = Arc::new(CudaOrdering::new(Fake::default(), 1));
        let ordering: Arc<dyn Ordering> = cuda.clone();
        let (from, to) = (Empties::new(A, Reuse::InStreamOrder), Empties::new(B, Reuse::InStreamOrder));
        let mut views = convert(&from, &to, &ordering, 8);
        for dropped in 1..=3 {
            views.pop();
            eventually("its memory is returned", || from.drops.load(SeqCst) == dropped);
        }
        assert_eq!(cuda.devices().driver().ordered().last(), Some(&(B, A)));
    }

    #[test]
    fn a_view_that_is_dropped_while_the_owner_is_captured_is_returned_after_the_capture() {
        let cuda = Arc::new(CudaOrdering::new(Fake::default(), 1));
        let ordering: Arc<dyn Ordering> = cuda.clone();
        for reuse in [Reuse::InStreamOrder, Reuse::Unknown] {
            let (from, to) = (Empties::new(A, reuse), Empties::new(B, reuse));
            let mut views = convert(&from, &to, &ordering, 8);
            cuda.devices().driver().take_calls();
            cuda.devices().driver().capture(A);
            views.pop();
            eventually("its return is deferred", || cuda.after_capture().deferred() == 1);
            assert_eq!((from.drops.load(SeqCst), records_and_waits(&cuda)), (0, (0, 0)));
            cuda.devices().driver().end_capture();
            cuda.devices().driver().idle(A);
            eventually("its memory is returned", || from.drops.load(SeqCst) == 1);
            drop(views);
            assert_eq!((from.drops.load(SeqCst), cuda.releases().leaked()), (8, 0));
        }
    }

    /// Drops a view of memory of `owner` that was read in `reader`, while `current` is current and `captured` is being
    /// captured. Returns whether its memory is returned after the capture; else it is leaked.
    fn is_returned(owner: Stream, reader: Stream, current: Stream, captured: Stream, reuse: Reuse) -> bool {
        let cuda = Arc::new(CudaOrdering::new(Fake::default(), 1));
        let ordering: Arc<dyn Ordering> = cuda.clone();
        let fake = cuda.devices().driver();
        let (from, to) = (Empties::new(owner, reuse), Empties::new(reader, reuse));
        let views = convert(&from, &to, &ordering, 1);
        *to.views.0.lock().unwrap() = current;
        fake.blocking(A);
        fake.capture(captured);
        drop(views);
        let deferred = cuda.after_capture().deferred();
        assert_eq!(from.drops.load(SeqCst), 0, "the capture goes on");
        fake.end_capture();
        eventually("nothing waits", || {
            fake.finish_all();
            cuda.after_capture().deferred() + cuda.releases().pending() == 0
        });
        assert_eq!(from.drops.load(SeqCst), deferred);
        deferred == 1
    }

    #[test]
    fn a_view_that_took_no_part_in_the_capture_of_a_blocking_stream_is_returned_after_it() {
        let (legacy, per_thread) = (Stream::LEGACY, Stream::PER_THREAD);
        for reuse in [Reuse::InStreamOrder, Reuse::Unknown] {
            for (owner, reader, current, captured) in [
                (legacy, B, A, A),
                (legacy, legacy, A, A),
                (legacy, B, per_thread, per_thread),
                (B, legacy, A, A),
                (B, legacy, per_thread, per_thread),
                (A, B, A, A),
                // The capture is of another thread.
                (legacy, B, B, A),
            ] {
                let case = (owner, reader, current, captured, reuse);
                assert!(is_returned(owner, reader, current, captured, reuse), "{case:?}");
            }
            for (owner, reader, captured) in [(legacy, A, A), (B, A, A), (B, per_thread, per_thread)] {
                let case = (owner, reader, captured, reuse);
                assert!(!is_returned(owner, reader, captured, captured, reuse), "a graph may use it: {case:?}");
            }
        }
    }

    #[test]
    fn threads_drop_trees_in_any_order_and_all_memory_is_returned() {
        const THREADS: usize = 4;
        const ROUNDS: usize = 100;
        const TENSORS: usize = 16;
        let mut cuda = CudaOrdering::new(Fake::default(), 1);
        // Many flushes meet the drops.
        cuda.flushes_mut().moment = Duration::from_micros(50);
        let cuda = Arc::new(cuda);
        let ordering: Arc<dyn Ordering> = cuda.clone();
        let from = [Reuse::InStreamOrder, Reuse::Unknown].map(|reuse| Empties::new(A, reuse));
        thread::scope(|scope| {
            for number in 0..THREADS {
                let (ordering, from) = (&ordering, &from[number % 2]);
                scope.spawn(move || {
                    // SAFETY: no driver sees this stream.
                    let to = Empties::new(unsafe { Stream::from_handle(0xb0 + number as u64) }, Reuse::InStreamOrder);
                    let mut kept = Vec::new();
                    for round in 0..ROUNDS {
                        let mut views = convert(from, &to, ordering, TENSORS);
                        kept.extend(views.drain(..round % TENSORS));
                        (0..round % 3).for_each(|_| drop(views.pop()));
                        if round % 10 == 0 {
                            kept.clear();
                        }
                    }
                });
            }
        });
        eventually("all are returned", || {
            // The events of the pending releases.
            cuda.devices().driver().finish(A);
            from.iter().map(|from| from.drops.load(SeqCst)).sum::<usize>() == THREADS * ROUNDS * TENSORS
        });
        assert_eq!(cuda.releases().leaked(), 0);
    }

    #[test]
    fn memory_is_leaked_where_the_driver_fails_at_the_flush() {
        let (cuda, ordering) = patient();
        let (from, to) = (Empties::new(A, Reuse::InStreamOrder), Empties::new(B, Reuse::InStreamOrder));
        let views = convert(&from, &to, &ordering, 8);
        cuda.devices().driver().fail("cuEventRecord", 4);
        drop(views);
        assert_eq!(from.drops.load(SeqCst), 0);
    }
}
