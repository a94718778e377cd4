//! Moves of plain bytes between the host and a device, in pieces that overlap.

use super::cut::{Cut, Pieces, Way};
use super::staging::{Pool, Staging};
use super::stores::{copy_streaming, prefer_huge_pages, touch};
use crate::host::at_most;
use bridge_core::{Device, Result, Stream};
use bridge_cuda::Link;
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread::{Builder, Scope};

/// The figures of a move.
pub(crate) const CUT: Cut = Cut {
    share: 2 << 20,
    threads: 16,
    depth: 2,
    shortest: 256 << 10,
    longest: 2 << 20,
    streaming: [true, false],
    touching: true,
};

/// A move of `nbytes` bytes between `host`, any host memory, and `address` on `device`, in `stream`.
pub(crate) struct Bytes<'a> {
    pub link: &'a dyn Link,
    pub pool: &'a Pool,
    pub cut: &'a Cut,
    pub device: Device,
    pub stream: Stream,
    pub address: usize,
    pub host: usize,
    pub nbytes: usize,
}

impl Bytes<'_> {
    /// Moves device memory to the host. When it returns, also with an error, the host's bytes are not written any more.
    ///
    /// # Errors
    ///
    /// Those of the driver. The bytes of the host are then undefined.
    ///
    /// # Safety
    ///
    /// Both ranges are mapped, and no other work writes the device's or uses the host's until the work has run.
    pub unsafe fn down(&self) -> Result<()> {
        if self.link.is_pinned(self.host, self.nbytes)? {
            // SAFETY: the caller's promises; the host's range is pinned.
            return unsafe { self.direct((self.device, self.address), (Device::CPU, self.host)) };
        }
        if self.nbytes > self.cut.longest {
            prefer_huge_pages(ptr::with_exposed_provenance_mut(self.host), self.nbytes);
            // Threads that wait for their first piece keep their cores busy. So one waits alone for earlier work.
            self.wait_for_stream()?;
        }
        // SAFETY: the caller's promises.
        self.in_threads(Way::Down, |pieces| unsafe { self.read(pieces) })
    }

    /// Moves host memory to the device. When it returns, the host's bytes have been read; the rest of the work is in
    /// the stream.
    ///
    /// # Errors
    ///
    /// Those of the driver. The bytes of the device are then undefined.
    ///
    /// # Safety
    ///
    /// Both ranges are mapped, and no other work uses the device's or writes the host's until the work has run.
    pub unsafe fn up(&self) -> Result<()> {
        // A short move is staged, because a direct one must wait for earlier work in the stream.
        if self.nbytes > self.cut.longest && self.link.is_pinned(self.host, self.nbytes)? {
            // SAFETY: the caller's promises; the host's range is pinned.
            return unsafe { self.direct((Device::CPU, self.host), (self.device, self.address)) };
        }
        // SAFETY: the caller's promises.
        self.in_threads(Way::Up, |pieces| unsafe { self.write(pieces) })
    }

    /// Makes one copy, from or to pinned memory, and waits for it.
    unsafe fn direct(&self, from: (Device, usize), to: (Device, usize)) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe { self.link.copy(from, to, self.nbytes, self.stream) }?;
        self.wait_for_stream()
    }

    fn wait_for_stream(&self) -> Result<()> {
        let mark = self.link.mark(self.device, self.stream)?;
        let waited = self.link.wait(self.device, &mark);
        self.link.release(self.device, mark);
        waited
    }

    /// Calls `work` on this thread and on some more. Every piece is claimed by one of them.
    fn in_threads(&self, way: Way, work: impl Fn(&Pieces<'_>) -> Result<()> + Sync) -> Result<()> {
        let threads = (self.nbytes / self.cut.share).clamp(1, self.cut.threads.min(at_most()));
        let pieces = Pieces::of(self.cut, way, (self.host, self.nbytes), threads);
        let outcome = Mutex::new(Ok(()));
        let claim_all = || {
            if let Err(error) = work(&pieces) {
                pieces.stop();
                *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
            }
        };
        std::thread::scope(|scope| {
            // One thread starts all others: this one begins at once.
            start(scope, &claim_all, threads - 1, 1);
            claim_all();
        });
        outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies pieces to the host while the following ones come in.
    unsafe fn read(&self, pieces: &Pieces<'_>) -> Result<()> {
        let mut coming: VecDeque<(Range<usize>, Staging<'_>)> = VecDeque::with_capacity(self.cut.depth);
        let mut free: Option<Staging<'_>> = None;
        loop {
            let before = coming.len();
            while coming.len() < self.cut.depth
                && let Some(piece) = pieces.claim()
            {
                let mut buffer = free.take().map_or_else(|| self.pool.take(self.link, self.device), Ok)?;
                // SAFETY: the caller's promises for this part of the range; a piece fits a buffer, and this one is
                // fresh or has been waited for.
                unsafe { buffer.fill(self.address + piece.start, piece.len(), self.stream) }?;
                coming.push_back((piece, buffer));
            }
            if self.cut.touching && self.nbytes > self.cut.longest {
                coming.range(before..).for_each(|(piece, _)| touch(self.host + piece.start, piece.len()));
            }
            let Some((piece, mut buffer)) = coming.pop_front() else { return Ok(()) };
            buffer.wait()?;
            let target: *mut u8 = ptr::with_exposed_provenance_mut(self.host + piece.start);
            // SAFETY: the piece has come in. By the caller's promises this part of the target is writable, and no other
            // thread has claimed it.
            unsafe { self.store(0, buffer.start(), target, piece.len()) };
            free = Some(buffer);
        }
    }

    /// Copies pieces into staging while the preceding ones go out.
    unsafe fn write(&self, pieces: &Pieces<'_>) -> Result<()> {
        let mut going: VecDeque<Staging<'_>> = VecDeque::with_capacity(self.cut.depth);
        while let Some(piece) = pieces.claim() {
            let mut buffer = match going.len() < self.cut.depth {
                true => self.pool.take(self.link, self.device)?,
                false => going.pop_front().expect("there are some"),
            };
            buffer.wait()?;
            let source: *const u8 = ptr::with_exposed_provenance(self.host + piece.start);
            // SAFETY: by the caller's promises this part of the source is readable; the piece fits the buffer, whose
            // last copy has been waited for. The promises hold for the device's part, too.
            unsafe {
                self.store(1, source, buffer.start(), piece.len());
                buffer.empty(self.address + piece.start, piece.len(), self.stream)?;
            }
            going.push_back(buffer);
        }
        Ok(())
    }

    unsafe fn store(&self, way: usize, from: *const u8, to: *mut u8, nbytes: usize) {
        // SAFETY: the caller's promises.
        unsafe {
            match self.cut.streaming[way] && self.nbytes > self.cut.longest {
                true => copy_streaming(from, to, nbytes),
                false => ptr::copy_nonoverlapping(from, to, nbytes),
            }
        }
    }
}

/// Starts `count` threads that call `work`: some `from_here`, which start the others.
fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: &'scope (dyn Fn() + Sync),
    mut count: usize,
    from_here: usize,
) {
    for left in (1..=from_here).rev() {
        let theirs = count.div_ceil(left);
        if theirs == 0 {
            return;
        }
        let started = move || {
            start(scope, work, theirs - 1, 2);
            work();
        };
        // Without a thread, and those that it would start, the others claim its pieces.
        let _ = Builder::new().name("tensor-bridge-move".into()).spawn_scoped(scope, started);
        count -= theirs;
    }
}
