//! Turns of the calls that count references to XLA's buffers on a device.
//!
//! An export holds such a reference. The plugins of jaxlib keep those of a buffer in a vector that no lock guards
//! (`PJRT_Buffer_IncreaseExternalReferenceCount` and its opposite, in `pjrt_c_api_wrapper_impl.cc`). An export adds to it
//! after jaxlib has released the GIL, and the end of an export on another thread takes from it: at the same time they
//! corrupt the heap, or leave a reference for which XLA aborts the process when it destroys the buffer. So one thread
//! exports at a time, and exports that end meanwhile wait for it.

use bridge_pyo3::{PyTensor, drop_guarded};
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

type Owner = Box<dyn Send + Sync>;

struct Turns {
    /// The addresses of the arrays that are being exported; [`NONE`] while an export is being ended.
    taken: Vec<usize>,
    /// Exports that ended meanwhile.
    ended: Vec<Owner>,
}

const NONE: usize = 0;

/// Threads look at it with the GIL, so that none holds it where a process is forked.
static TURNS: Mutex<Turns> = Mutex::new(Turns { taken: Vec::new(), ended: Vec::new() });

fn turns() -> MutexGuard<'static, Turns> {
    TURNS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long an export waits for that of another array. An export takes microseconds, unless XLA waits for a callback of
/// Python, which may itself export an array: longer waits could be for each other.
const PATIENCE: Duration = Duration::from_millis(100);

/// How often a thread that waits looks again at once, and how long it sleeps after that.
const LOOKS: usize = 20;
const PAUSE: Duration = Duration::from_micros(50);

/// A turn. While it lasts, exports that end are kept; its end drops them.
struct Turn(usize);

impl Turn {
    /// Takes a turn if no array is being exported. A caller that is not `patient` waits only for this array.
    fn take(array: usize, patient: bool) -> Option<Self> {
        let mut turns = turns();
        if turns.taken.contains(&array) || (patient && !turns.taken.is_empty()) {
            return None;
        }
        turns.taken.push(array);
        Some(Self(array))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        loop {
            let mut turns = turns();
            if turns.taken.len() > 1 || turns.ended.is_empty() {
                turns.taken.retain(|taken| *taken != self.0);
                return;
            }
            let ended = mem::take(&mut turns.ended);
            drop(turns);
            drop(ended);
        }
    }
}

/// Calls `export`, which exports the array, in a turn.
pub(crate) fn in_turn<R>(array: &PyTensor<'_>, export: impl FnOnce() -> R) -> R {
    let (py, address, since) = (array.py(), array.as_ptr().addr(), Instant::now());
    let _turn = (0..).find_map(|look| {
        let turn = Turn::take(address, since.elapsed() < PATIENCE);
        if turn.is_none() {
            py.detach(|| if look < LOOKS { thread::yield_now() } else { thread::sleep(PAUSE) });
        }
        turn
    });
    export()
}

/// Ends an export now, or after the turns that others have. The caller holds the GIL.
pub(crate) fn end(export: Owner) {
    let mut turns = turns();
    if !turns.taken.is_empty() {
        turns.ended.push(export);
        return;
    }
    turns.taken.push(NONE);
    drop(turns);
    let _turn = Turn(NONE);
    drop(export);
}

/// An export that ends when it is dropped, with the GIL.
struct Ended(Option<Owner>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(end);
    }
}

/// Ends an export, on any thread.
pub(crate) fn release(export: Owner) {
    drop_guarded(Box::new(Ended(Some(export))));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    /// Counts how often it is dropped. A drop ends another export where there is one.
    struct Counts(Arc<AtomicUsize>, Option<Owner>);

    impl Drop for Counts {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
            self.1.take().into_iter().for_each(end);
        }
    }

    #[test]
    fn exports_end_when_no_array_is_being_exported() {
        let ended = Arc::new(AtomicUsize::new(0));
        let count = || ended.load(SeqCst);
        let export = |other| Box::new(Counts(Arc::clone(&ended), other));
        end(export(None));
        assert_eq!(count(), 1, "at once, because no array is being exported");
        let first = Turn::take(8, true).expect("no array is being exported");
        end(export(None));
        assert!(Turn::take(8, true).is_none() && Turn::take(16, true).is_none());
        assert!(Turn::take(8, false).is_none(), "that array is being exported");
        let second = Turn::take(16, false).expect("the patience has ended");
        end(export(Some(export(None))));
        drop(first);
        assert_eq!(count(), 1, "the second turn lasts");
        drop(second);
        assert_eq!(count(), 4, "the last turn ends them all, also those that their drop ends");
        drop(Turn::take(8, true).expect("all turns have ended"));
    }
}
