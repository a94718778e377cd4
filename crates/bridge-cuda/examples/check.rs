//! Repeats on a CUDA device what the tests check with a fake driver: work is ordered, no call waits, memory is not
//! dropped early, contexts and captures are unaffected. Prints a line per check.
//!
//! Run it with `cargo run --release -p truebridge-cuda --example check`. Without CUDA it prints why there is nothing
//! to check.

use bridge_core::{Access, Device, DeviceBuffer, DeviceKind, Reuse, Stream};
use cudarc::driver::sys::{self, CUcontext, CUdeviceptr, CUresult, CUstream};
use std::process::ExitCode;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

const GPU: Device = Device::cuda(0);
/// Fills of the big buffer that keep a stream busy for some milliseconds.
const FILLS: usize = 100;
const BIG: usize = 512 << 20;
const ROUNDS: u32 = 50;

/// Calls the driver through cudarc, as an independent oracle, and aborts the program when a call fails.
macro_rules! cu {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: in this program all handles come from the driver and are alive, all outputs are writable, and fills
        // and copies stay inside their allocations.
        let result = unsafe { sys::$name($($argument),*) };
        assert_eq!(result, CUresult::CUDA_SUCCESS, stringify!($name));
    }};
}

fn main() -> ExitCode {
    if let Err(error) = bridge_cuda::available() {
        println!("nothing to check: {error}");
        return ExitCode::SUCCESS;
    }
    let mut checks = Checks::new();
    println!("{} CUDA device(s)", bridge_cuda::device_count());
    checks.contexts();
    checks.order();
    checks.release();
    checks.captures();
    checks.addresses();
    checks.cost();
    checks.leave_one_pending();
    println!("{} check(s) failed", checks.failed);
    ExitCode::from(u8::from(checks.failed > 0))
}

/// The primary context, two streams and some memory.
struct Checks {
    primary: CUcontext,
    streams: [CUstream; 2],
    big: CUdeviceptr,
    /// Two numbers: one to write, and a copy of it.
    small: [CUdeviceptr; 2],
    failed: usize,
}

fn stream(handle: CUstream) -> Stream {
    // SAFETY: the stream is made here, and destroyed at the end.
    unsafe { Stream::from_handle(handle as u64) }
}

fn busy(handle: CUstream) -> bool {
    // SAFETY: the stream is alive, or the default stream of the current context.
    match unsafe { sys::cuStreamQuery(handle) } {
        CUresult::CUDA_SUCCESS => false,
        CUresult::CUDA_ERROR_NOT_READY => true,
        other => panic!("cuStreamQuery: {other:?}"),
    }
}

fn current() -> CUcontext {
    let mut context = null_mut();
    cu!(cuCtxGetCurrent(&mut context));
    context
}

fn allocate(bytes: usize) -> CUdeviceptr {
    let mut address = 0;
    cu!(cuMemAlloc_v2(&mut address, bytes));
    address
}

fn settle() {
    let limit = Instant::now() + Duration::from_secs(20);
    while bridge_cuda::pending_releases() > 0 {
        assert!(Instant::now() < limit, "releases are still pending after 20 s");
        thread::sleep(Duration::from_micros(50));
    }
}

impl Checks {
    fn new() -> Self {
        let (mut device, mut primary) = (0, null_mut());
        cu!(cuDeviceGet(&mut device, 0));
        cu!(cuDevicePrimaryCtxRetain(&mut primary, device));
        cu!(cuCtxSetCurrent(primary));
        let streams = [(); 2].map(|()| {
            let mut handle = null_mut();
            // Non-blocking: ordered with the default streams only by `order`.
            cu!(cuStreamCreate(&mut handle, 1));
            handle
        });
        let (big, small) = (allocate(BIG), [(); 2].map(|()| allocate(4)));
        Self { primary, streams, big, small, failed: 0 }
    }

    fn check(&mut self, ok: bool, what: &str) {
        println!("{}  {what}", if ok { "ok    " } else { "FAILED" });
        self.failed += usize::from(!ok);
    }

    fn keep_busy(&self, handle: CUstream) {
        for _ in 0..FILLS {
            cu!(cuMemsetD32Async(self.big, 0, BIG / 4, handle));
        }
    }

    /// The current context stays current: none, the primary one, another one; also after an error.
    fn contexts(&mut self) {
        let mut other = null_mut();
        cu!(cuCtxCreate_v2(&mut other, 0, 0));
        // Otherwise it would stay on the thread's stack, below the primary context.
        cu!(cuCtxPopCurrent_v2(&mut other));
        for (name, context) in [("no", null_mut()), ("the primary", self.primary), ("another", other)] {
            cu!(cuCtxSetCurrent(context));
            let [a, b] = self.streams.map(stream);
            let works = ordered(GPU, a, b).is_ok() && current() == context;
            self.check(works, &format!("{name} context current: order() works and leaves it"));
            let refused = ordered(Device::cuda(99), a, b).is_err() && current() == context;
            self.check(refused, &format!("{name} context current: order() on cuda:99 is refused and leaves it"));
            let known = bridge_cuda::locate(self.big as usize).is_ok_and(|found| found.is_some());
            self.check(known && current() == context, &format!("{name} context current: locate() works and leaves it"));
        }
        cu!(cuCtxDestroy_v2(other));
        cu!(cuCtxSetCurrent(self.primary));
    }

    /// Returns how many reads on `later` missed the write at the end of `earlier`, and how many calls waited for it.
    fn rounds(&self, earlier: CUstream, later: CUstream, order: impl Fn()) -> (usize, usize) {
        let [written, read] = self.small;
        let (mut stale, mut waited) = (0, 0);
        for round in 1..=ROUNDS {
            self.keep_busy(earlier);
            cu!(cuMemsetD32Async(written, round, 1, earlier));
            order();
            waited += usize::from(!busy(earlier));
            cu!(cuMemcpyDtoDAsync_v2(read, written, 4, later));
            cu!(cuCtxSynchronize());
            let mut seen = 0u32;
            cu!(cuMemcpyDtoH_v2((&raw mut seen).cast(), read, 4));
            stale += usize::from(seen != round);
        }
        (stale, waited)
    }

    fn order(&mut self) {
        let [a, b] = self.streams;
        let (legacy, per_thread) = (1usize as CUstream, 2usize as CUstream);
        for (earlier, later) in [(a, b), (b, a), (a, legacy), (legacy, b), (a, per_thread), (per_thread, b)] {
            let (from, to) = (stream(earlier), stream(later));
            let (unordered, _) = self.rounds(earlier, later, || ());
            let (stale, waited) = self.rounds(earlier, later, || ordered(GPU, from, to).expect("order"));
            let text = format!("{to} after {from}: {stale} of {ROUNDS} stale ({unordered} without), {waited} waited");
            self.check(stale == 0 && waited == 0 && unordered > 0, &text);
        }
        let (from, to) = (stream(a), stream(b));
        let elsewhere = || {
            let call = || ordered(GPU, from, to).expect("order");
            thread::scope(|scope| scope.spawn(call).join().expect("no panic"));
        };
        let (stale, waited) = self.rounds(a, b, elsewhere);
        let text = format!("the same from a thread without a context: {stale} of {ROUNDS} stale, {waited} waited");
        self.check(stale == 0 && waited == 0, &text);
    }

    /// A buffer that is passed to `release_later` is dropped after the work, and not before.
    fn release(&mut self) {
        let [a, b] = self.streams;
        let (mut early, mut waited, mut held_back) = (0, 0, 0);
        for _ in 0..ROUNDS {
            let (slow, quick) = (Flag::default(), Flag::default());
            self.keep_busy(a);
            release_later(stream(a), slow.buffer());
            release_later(stream(b), quick.buffer());
            waited += usize::from(!busy(a));
            while bridge_cuda::pending_releases() > 0 {
                // In this order: a buffer that is dropped before the stream is seen busy was dropped early.
                let (dropped, quick) = (slow.is_dropped(), quick.is_dropped());
                early += usize::from(dropped && busy(a));
                held_back += usize::from(dropped && !quick);
            }
            early += usize::from(!slow.is_dropped() || !quick.is_dropped());
        }
        let text =
            format!("release_later(): {early} early or lost, {held_back} held back, {waited} waited, of {ROUNDS}");
        self.check((early, held_back, waited) == (0, 0, 0), &text);
        self.check(bridge_cuda::leaked() == 0, "release_later(): nothing leaked");
    }

    /// A capture on this thread survives the background thread, and a buffer used in it is never dropped.
    fn captures(&mut self) {
        let [a, b] = self.streams;
        let (outside, inside) = (Flag::default(), Flag::default());
        self.keep_busy(b);
        cu!(cuStreamBeginCapture_v2(a, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        release_later(stream(b), outside.buffer());
        release_later(stream(a), inside.buffer());
        settle();
        cu!(cuMemsetD32Async(self.small[0], 1, 1, a));
        let refused = ordered(GPU, Stream::LEGACY, stream(b));
        let mut graph = null_mut();
        // SAFETY: the stream is alive and the output writable.
        let result = unsafe { sys::cuStreamEndCapture(a, &mut graph) };
        match &refused {
            Ok(()) => println!("        order() on the legacy stream during a capture works"),
            Err(error) => println!("        order() on the legacy stream during a capture: {error}"),
        }
        self.check(result == CUresult::CUDA_SUCCESS, &format!("a capture in the global mode survives: {result:?}"));
        self.check(outside.is_dropped(), "a buffer released outside a capture is dropped meanwhile");
        let leaked = !inside.is_dropped() && bridge_cuda::leaked() == 1;
        self.check(leaked, "a buffer released on a captured stream is leaked, and counted");
        let [from, to] = [b, a].map(stream);
        self.check(ordered(GPU, from, to).is_ok(), "order() works after the capture");
        cu!(cuCtxSynchronize());
    }

    fn addresses(&mut self) {
        let (mut pinned, mut managed) = (null_mut(), 0);
        cu!(cuMemHostAlloc(&mut pinned, 4096, 0));
        cu!(cuMemAllocManaged(&mut managed, 4096, 1));
        let (big, pinned, managed) = (self.big as usize, pinned as usize, managed as usize);
        let cases = [
            ("cuMemAlloc", big, BIG, DeviceKind::CUDA),
            ("cuMemHostAlloc", pinned, 4096, DeviceKind::CUDA_HOST),
            ("cuMemAllocManaged", managed, 4096, DeviceKind::CUDA_MANAGED),
        ];
        for (name, base, size, kind) in cases {
            for address in [base, base + size - 1] {
                // On a thread without a context.
                let found = thread::spawn(move || bridge_cuda::locate(address)).join().expect("no panic");
                let right = matches!(&found, Ok(Some(found)) if found.device == Device { kind, index: 0 }
                    && found.range.start <= base && found.range.end >= base + size);
                self.check(right, &format!("locate() of {name} + {}: {found:x?}", address - base));
            }
        }
        let stacked = 0u8;
        let boxed = vec![0u8; 4096];
        for address in [(&raw const stacked).addr(), boxed.as_ptr().addr(), 0, 64] {
            let found = bridge_cuda::locate(address);
            self.check(
                matches!(found, Ok(None)),
                &format!("locate() of {address:#x}, memory unknown to CUDA: {found:?}"),
            );
        }
        cu!(cuMemFreeHost(pinned as *mut _));
        cu!(cuMemFree_v2(managed as CUdeviceptr));
    }

    /// Prints timings; machines differ, so nothing is checked.
    fn cost(&self) {
        let [a, b] = self.streams.map(stream);
        let order = || ordered(GPU, a, b).expect("order");
        let mut event = null_mut();
        cu!(cuEventCreate(&mut event, 2));
        let [raw_a, raw_b] = self.streams;
        let bare = || {
            cu!(cuEventRecord(event, raw_a));
            cu!(cuStreamWaitEvent(raw_b, event, 0));
        };
        println!("        {:>6.0} ns per bare record and wait", self.median_ns(bare));
        println!("        {:>6.0} ns per order(), primary context current", self.median_ns(order));
        cu!(cuCtxSetCurrent(null_mut()));
        println!("        {:>6.0} ns per order(), no context current", self.median_ns(order));
        println!("        {:>6.0} ns per locate()", self.median_ns(|| drop(bridge_cuda::locate(self.big as usize))));
        cu!(cuCtxSetCurrent(self.primary));
    }

    fn median_ns(&self, call: impl Fn()) -> f64 {
        const CALLS: u32 = 50;
        let mut batches = [0.0; 201].map(|_: f64| {
            // Full queues would make the host wait.
            self.streams.iter().for_each(|handle| while busy_in(self.primary, *handle) {});
            let start = Instant::now();
            (0..CALLS).for_each(|_| call());
            start.elapsed().as_nanos() as f64 / f64::from(CALLS)
        });
        batches.sort_by(f64::total_cmp);
        batches[batches.len() / 2]
    }

    /// Leaves a buffer pending: the process must still end.
    fn leave_one_pending(&self) {
        self.keep_busy(self.streams[0]);
        release_later(stream(self.streams[0]), Flag::default().buffer());
        println!("        ends with {} buffer(s) pending", bridge_cuda::pending_releases());
    }
}

fn ordered(device: Device, earlier: Stream, later: Stream) -> bridge_core::Result<()> {
    // SAFETY: the streams of this program live until its end.
    unsafe { bridge_cuda::ordering().order(device, earlier, later) }
}

fn release_later(stream: Stream, buffer: Box<dyn DeviceBuffer>) {
    // SAFETY: as above.
    unsafe { bridge_cuda::ordering().release_later(GPU, stream, buffer) }
}

fn busy_in(context: CUcontext, handle: CUstream) -> bool {
    let before = current();
    cu!(cuCtxSetCurrent(context));
    let busy = busy(handle);
    cu!(cuCtxSetCurrent(before));
    busy
}

/// Records whether its buffer was dropped.
#[derive(Default)]
struct Flag(Arc<AtomicBool>);

impl Flag {
    fn buffer(&self) -> Box<dyn DeviceBuffer> {
        Box::new(Flagged(Arc::clone(&self.0)))
    }

    fn is_dropped(&self) -> bool {
        self.0.load(SeqCst)
    }
}

struct Flagged(Arc<AtomicBool>);

// SAFETY: there are no bytes, and nothing changes.
unsafe impl DeviceBuffer for Flagged {
    fn address(&self) -> usize {
        0
    }
    fn len(&self) -> usize {
        0
    }
    fn device(&self) -> Device {
        GPU
    }
    fn access(&self) -> Access {
        Access::ReadWrite
    }
    fn stream(&self) -> Option<Stream> {
        None
    }
    fn reuse(&self) -> Reuse {
        Reuse::Unknown
    }
}

impl Drop for Flagged {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}
