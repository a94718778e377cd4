//! The thread that writes words in place of processes that have ended.
//!
//! A host that waits for a device calls nothing meanwhile, so a thread watches the processes. It runs as long as there
//! are pages, and calls neither the driver nor the program.

use super::page::{Page, Role};
use crate::memory::failed;
use crate::own::Own;
use bridge_core::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// A page, and the process at its other end, whose words are those of a role.
#[derive(Clone)]
struct Watched {
    process: Arc<OwnedFd>,
    page: Weak<Page>,
    role: Role,
}

/// What the thread watches.
#[derive(Default)]
struct Watch {
    pages: Vec<Watched>,
    /// Wakes the thread. `None`: there is no thread.
    waker: Option<Arc<OwnedFd>>,
}

static WATCH: Own<Watch> = Own::new();

/// Time until the thread asks the system again after it has refused.
const PAUSE: Duration = Duration::from_millis(10);

/// Releases the words of a role once this process has ended.
pub(super) fn watch(process: &Arc<OwnedFd>, page: &Arc<Page>, role: Role) -> Result<()> {
    let mut watch = WATCH.lock();
    let waker = match &watch.waker {
        Some(waker) => Arc::clone(waker),
        None => {
            let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed("no eventfd"))?;
            let (waker, hears) = (Arc::new(waker), thread::Builder::new().name("truebridge-ipc".into()));
            let heard = Arc::clone(&waker);
            hears.spawn(move || run(&heard)).map_err(|error| {
                let text = "cannot start the thread that orders work: raise the limit of processes (ulimit -u)";
                Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
            })?;
            Arc::clone(watch.waker.insert(waker))
        }
    };
    watch.pages.push(Watched { process: Arc::clone(process), page: Arc::downgrade(page), role });
    ring(&waker);
    Ok(())
}

/// Makes the thread forget pages that were unmapped.
pub(super) fn forget() {
    WATCH.lock().waker.iter().for_each(|waker| ring(waker));
}

fn ring(waker: &OwnedFd) {
    // The counter of an eventfd overflows after 2^64 calls that are not read.
    let _ = rustix::io::write(waker, &1u64.to_ne_bytes());
}

/// Returns the pages that are left; `None` where there are none, and the thread ends.
fn left() -> Option<Vec<Watched>> {
    let mut watch = WATCH.lock();
    watch.pages.retain(|watched| watched.page.strong_count() > 0);
    if watch.pages.is_empty() {
        watch.waker = None;
        return None;
    }
    Some(watch.pages.clone())
}

fn run(waker: &OwnedFd) {
    while let Some(pages) = left() {
        let mut asked = vec![PollFd::new(waker, PollFlags::IN)];
        asked.extend(pages.iter().map(|watched| PollFd::from_borrowed_fd(watched.process.as_fd(), PollFlags::IN)));
        if poll(&mut asked, None).is_err() {
            thread::sleep(PAUSE);
            continue;
        }
        let mut counter = [0; 8];
        let _ = rustix::io::read(waker, &mut counter);
        let ended = pages.iter().zip(&asked[1..]).filter(|(_, asked)| !asked.revents().is_empty());
        for (watched, _) in ended {
            if let Some(page) = watched.page.upgrade() {
                page.release(watched.role);
            }
            let is_it = |other: &Watched| Weak::ptr_eq(&other.page, &watched.page);
            WATCH.lock().pages.retain(|other| !is_it(other));
        }
    }
}

#[cfg(test)]
pub(super) fn watched(process: &Arc<OwnedFd>) -> usize {
    WATCH.lock().pages.iter().filter(|watched| Arc::ptr_eq(&watched.process, process)).count()
}
