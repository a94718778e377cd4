//! Real processes that share and open, and die at any step.

mod channel;
mod child;
mod death;
pub(crate) mod fuzz;
mod history;
mod names;
mod programs;
mod rights;
mod sequences;
mod store;
mod wire;

use bridge_core::{HostOnly, Options, Ordering, Result};
use bridge_ipc::{Exporter, Held, Limits, Message, Settings, Ticket, Writing};
use bridge_ndarray::{HostArray, NdArray};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

/// Time for what another process does.
const PATIENCE: Duration = Duration::from_secs(20);

/// Time of tickets that are not to expire.
const LONG: Duration = Duration::from_secs(3600);

fn host() -> Arc<dyn Ordering> {
    Arc::new(HostOnly)
}

/// A folder of a test's own, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let name = format!("truebridge-test-{}-{}", std::process::id(), LAST.fetch_add(1, Relaxed));
        Self(std::env::temp_dir().join(name))
    }

    fn exporter(&self, limits: Limits) -> Exporter {
        Exporter::new(Settings::default().with_folder(self.0.clone()).with_limits(limits)).unwrap()
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Shares a vector of bytes.
fn share(exporter: &Exporter, bytes: Vec<u8>, writing: Writing, time: Duration) -> Result<Ticket> {
    let (from, array) = (ndarray(), HostArray::from(bytes));
    Message::of(&[(&from, &array)], Some(writing), &host(), &Options::default())
        .map_err(|failed| failed.error)?
        .share(exporter, time, None)
}

/// Waits until the exporter's tables say so.
fn wait_for(exporter: &Exporter, what: impl Fn(&Held) -> bool) {
    let start = Instant::now();
    while !what(&exporter.held()) {
        assert!(start.elapsed() < PATIENCE, "{:?}", exporter.held());
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Prints what each thread of this process waits for.
fn print_threads() {
    for task in std::fs::read_dir("/proc/self/task").unwrap().map_while(|task| task.ok()) {
        let read = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let [name, place, call, stack] = ["comm", "wchan", "syscall", "stack"].map(read);
        println!("thread {:?} {}: in {place}, call {}\n{stack}", task.file_name(), name.trim(), call.trim());
    }
}
