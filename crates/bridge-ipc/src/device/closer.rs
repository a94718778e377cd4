//! A thread for what the driver does only after all work of a device: to close a handle, and perhaps to end the
//! registration of memory.

use super::locked;
use std::sync::{Mutex, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// What is done, and when.
type Due = (Instant, Box<dyn FnOnce() + Send>);

/// Time until it is done. What is closed at about the same time makes the device wait once.
const LINGER: Duration = Duration::from_millis(200);

/// Does something a little later, in turn, on the thread; at once where there is no thread.
pub(crate) fn defer(what: impl FnOnce() + Send + 'static) {
    static CLOSER: OnceLock<Option<Mutex<mpsc::Sender<Due>>>> = OnceLock::new();
    let thread = CLOSER.get_or_init(|| {
        let (sender, receiver) = mpsc::channel::<Due>();
        let work = move || {
            for (due, what) in receiver {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                what();
            }
        };
        thread::Builder::new().name("truebridge-ipc".into()).spawn(work).ok().map(|_| Mutex::new(sender))
    });
    let due: Due = (Instant::now() + LINGER, Box::new(what));
    match thread {
        Some(thread) => {
            if let Err(mpsc::SendError((_, what))) = locked(thread).send(due) {
                what();
            }
        }
        None => due.1(),
    }
}
