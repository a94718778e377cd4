//! Models of pending releases, which shuttle runs under many schedules: see `cargo xtask audit`.

use crate::fake::{Counted, Fake};
use crate::ordering::CudaOrdering;
use crate::sync::thread;
use bridge_core::{Device, Stream, explore};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

// SAFETY: no driver sees this stream.
const A: Stream = unsafe { Stream::from_handle(0xa0) };
// SAFETY: no driver sees this stream.
const B: Stream = unsafe { Stream::from_handle(0xb0) };
const GPU: Device = Device::cuda(0);

type Cuda = Arc<CudaOrdering<Fake>>;

fn setup() -> (Cuda, Arc<AtomicUsize>) {
    (Arc::new(CudaOrdering::new(Fake::default(), 1)), Arc::default())
}

/// Starts a thread of a model.
fn start(cuda: &Cuda, body: impl FnOnce(&Cuda) + Send + 'static) -> thread::JoinHandle<()> {
    let cuda = Arc::clone(cuda);
    thread::spawn(move || body(&cuda))
}

/// Runs the threads of a model to their ends.
fn join<const N: usize>(threads: [thread::JoinHandle<()>; N]) {
    threads.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
}

/// Lets the other threads go on until no release is pending. A schedule under which it never comes is an error.
fn settled(cuda: &Cuda) {
    while cuda.releases().pending() > 0 {
        thread::yield_now();
    }
}

#[test]
fn buffers_are_added_while_a_poll_ends() {
    explore(|| {
        let (cuda, drops) = setup();
        let take = |stream| {
            let drops = Arc::clone(&drops);
            start(&cuda, move |cuda| {
                for _ in 0..2 {
                    cuda.release_later(GPU, stream, Counted::boxed(&drops));
                    // Its poll of this line, which may be its last, ends now or later.
                    cuda.devices().driver().finish(stream);
                }
            })
        };
        join([take(A), take(B)]);
        settled(&cuda);
        assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (4, 0));
    });
}

#[test]
fn no_buffer_is_dropped_before_its_event_has_fired() {
    explore(|| {
        let (cuda, early) = setup();
        let late = Arc::<AtomicUsize>::default();
        let (first, second) = (Arc::clone(&early), Arc::clone(&late));
        join([
            start(&cuda, move |cuda| {
                cuda.release_later(GPU, A, Counted::boxed(&first));
                cuda.devices().driver().finish(A);
            }),
            start(&cuda, move |cuda| cuda.release_later(GPU, B, Counted::boxed(&second))),
            start(&cuda, |cuda| _ = cuda.releases().is_after(cuda.devices(), GPU, B)),
        ]);
        while early.load(SeqCst) == 0 {
            thread::yield_now();
        }
        assert_eq!((late.load(SeqCst), cuda.releases().leaked()), (0, 0));
        cuda.devices().driver().finish(B);
        settled(&cuda);
        assert_eq!((early.load(SeqCst), late.load(SeqCst), cuda.releases().leaked()), (1, 1, 0));
    });
}

#[test]
fn what_waits_is_returned_although_the_ordering_is_dropped() {
    explore(|| {
        let (cuda, drops) = setup();
        let (released, flushed) = (Arc::clone(&drops), Arc::clone(&drops));
        join([
            start(&cuda, move |cuda| {
                cuda.release_later(GPU, A, Counted::boxed(&released));
                cuda.devices().driver().finish(A);
            }),
            start(&cuda, move |cuda| {
                cuda.flush_later(Box::new(move || {
                    flushed.fetch_add(1, SeqCst);
                }));
            }),
        ]);
        drop(cuda);
        // Both threads end by themselves, or shuttle reports a deadlock.
        while drops.load(SeqCst) < 2 {
            thread::yield_now();
        }
    });
}

#[test]
fn threads_that_order_at_once_share_no_event() {
    explore(|| {
        let (cuda, _) = setup();
        let order = |earlier: u64| {
            start(&cuda, move |cuda| {
                // SAFETY: no driver sees this stream.
                (0..2)
                    .for_each(|_| cuda.order(GPU, unsafe { Stream::from_handle(earlier) }, B).expect("it is ordered"));
            })
        };
        join([order(0x100), order(0x101), order(0x102)]);
        let mut ordered = cuda.devices().driver().ordered();
        ordered.sort_unstable();
        // An event that two threads record at once orders one of their streams twice and the other not at all.
        // SAFETY: no driver sees this stream.
        let each = [0x100, 0x100, 0x101, 0x101, 0x102, 0x102].map(|stream| (unsafe { Stream::from_handle(stream) }, B));
        assert_eq!(ordered, each);
    });
}

#[test]
fn memory_that_waits_for_a_capture_is_returned_when_it_ends() {
    explore(|| {
        let (cuda, attempts) = setup();
        cuda.devices().driver().capture(A);
        let defer = || {
            let attempts = Arc::clone(&attempts);
            start(&cuda, move |cuda| {
                let attempt = move || attempts.fetch_add(1, SeqCst) < usize::MAX;
                cuda.defer(GPU, A, Box::new(attempt));
            })
        };
        join([defer(), defer(), start(&cuda, |cuda| cuda.devices().driver().end_capture())]);
        while attempts.load(SeqCst) < 2 {
            thread::yield_now();
        }
        while cuda.after_capture().deferred() > 0 {
            thread::yield_now();
        }
        assert_eq!(attempts.load(SeqCst), 2);
    });
}
