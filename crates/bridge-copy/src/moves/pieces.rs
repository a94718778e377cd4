//! Moves of plain bytes between the host and a device, in pieces that overlap.

use super::staging::{PIECE, Pool, Staging};
use super::stores::{copy_streaming, prefer_huge_pages};
use crate::host::at_most;
use bridge_core::{Device, Result, Stream};
use bridge_cuda::Link;
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Bytes for each thread of a move: starting a thread costs as much as copying some hundred KiB.
const SHARE: usize = 8 << 20;

/// The most threads of a move. Four fill 55 GB/s with stores past the cache. Fresh memory needs more: the system clears
/// each page at its first use.
pub(crate) const THREADS: usize = 16;

/// The shortest piece. A shorter move is one piece.
const SHORTEST: usize = 256 << 10;

/// Buffers of a thread: the device fills or empties one while the thread empties or fills the other.
pub(crate) const DEPTH: usize = 2;

/// A move of `nbytes` bytes between `host`, any host memory, and `address` on `device`, in `stream`.
pub(crate) struct Bytes<'a> {
    pub link: &'a dyn Link,
    pub pool: &'a Pool,
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
        if self.nbytes > PIECE {
            prefer_huge_pages(ptr::with_exposed_provenance_mut(self.host), self.nbytes);
            // Threads that wait for their first piece keep their cores busy. So one waits alone for earlier work.
            self.wait_for_stream()?;
        }
        // SAFETY: the caller's promises.
        self.in_threads(|pieces| unsafe { self.read(pieces) })
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
        if self.nbytes > PIECE && self.link.is_pinned(self.host, self.nbytes)? {
            // SAFETY: the caller's promises; the host's range is pinned.
            return unsafe { self.direct((Device::CPU, self.host), (self.device, self.address)) };
        }
        // SAFETY: the caller's promises.
        self.in_threads(|pieces| unsafe { self.write(pieces) })
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
    fn in_threads(&self, work: impl Fn(&Pieces) -> Result<()> + Sync) -> Result<()> {
        let threads = (self.nbytes / SHARE).clamp(1, THREADS.min(at_most()));
        let pieces = Pieces::of(self.nbytes, threads);
        let claim_all = || work(&pieces).inspect_err(|_| pieces.stop());
        std::thread::scope(|scope| {
            let spawn = |_| {
                let thread = std::thread::Builder::new().name("tensor-bridge-move".into());
                // Without the thread the others claim its pieces.
                thread.spawn_scoped(scope, claim_all).ok()
            };
            let others: Vec<_> = (1..threads).filter_map(spawn).collect();
            let here = claim_all();
            let join = |other: std::thread::ScopedJoinHandle<'_, Result<()>>| {
                other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            others.into_iter().map(join).fold(here, Result::and)
        })
    }

    /// Copies pieces to the host while the following ones come in.
    unsafe fn read(&self, pieces: &Pieces) -> Result<()> {
        let mut coming: VecDeque<(Range<usize>, Staging<'_>)> = VecDeque::with_capacity(DEPTH);
        let mut free: Option<Staging<'_>> = None;
        loop {
            while coming.len() < DEPTH
                && let Some(piece) = pieces.claim()
            {
                let mut buffer = free.take().map_or_else(|| self.pool.take(self.link, self.device), Ok)?;
                // SAFETY: the caller's promises for this part of the range; a piece fits a buffer, and this one is
                // fresh or has been waited for.
                unsafe { buffer.fill(self.address + piece.start, piece.len(), self.stream) }?;
                coming.push_back((piece, buffer));
            }
            let Some((piece, mut buffer)) = coming.pop_front() else { return Ok(()) };
            buffer.wait()?;
            let target: *mut u8 = ptr::with_exposed_provenance_mut(self.host + piece.start);
            // SAFETY: the piece has come in. By the caller's promises this part of the target is writable, and no other
            // thread has claimed it.
            unsafe {
                match self.nbytes > PIECE {
                    true => copy_streaming(buffer.start(), target, piece.len()),
                    false => ptr::copy_nonoverlapping(buffer.start(), target, piece.len()),
                }
            }
            free = Some(buffer);
        }
    }

    /// Copies pieces into staging while the preceding ones go out.
    unsafe fn write(&self, pieces: &Pieces) -> Result<()> {
        let mut going: VecDeque<Staging<'_>> = VecDeque::with_capacity(DEPTH);
        while let Some(piece) = pieces.claim() {
            let mut buffer = match going.len() < DEPTH {
                true => self.pool.take(self.link, self.device)?,
                false => going.pop_front().expect("there are some"),
            };
            buffer.wait()?;
            let source: *const u8 = ptr::with_exposed_provenance(self.host + piece.start);
            // SAFETY: by the caller's promises this part of the source is readable; the piece fits the buffer, whose
            // last copy has been waited for. The promises hold for the device's part, too.
            unsafe {
                ptr::copy_nonoverlapping(source, buffer.start(), piece.len());
                buffer.empty(self.address + piece.start, piece.len(), self.stream)?;
            }
            going.push_back(buffer);
        }
        Ok(())
    }
}

/// The pieces of a move, each claimed once.
struct Pieces {
    nbytes: usize,
    length: usize,
    next: AtomicUsize,
    stopped: AtomicBool,
}

impl Pieces {
    /// Cuts `nbytes` bytes so that every thread has several pieces in turn.
    fn of(nbytes: usize, threads: usize) -> Self {
        const PAGE: usize = 4 << 10;
        let length = (nbytes / (threads * 4)).next_multiple_of(PAGE).clamp(SHORTEST, PIECE);
        Self { nbytes, length, next: AtomicUsize::new(0), stopped: AtomicBool::new(false) }
    }

    fn claim(&self) -> Option<Range<usize>> {
        let start = self.next.fetch_add(1, Relaxed).checked_mul(self.length)?;
        (start < self.nbytes && !self.stopped.load(Relaxed)).then(|| start..self.nbytes.min(start + self.length))
    }

    /// Ends the move after an error: no piece is claimed any more.
    fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_whole_without_a_gap_and_fit_a_buffer() {
        for nbytes in [1, 4095, SHORTEST, SHORTEST + 1, PIECE, PIECE + 1, 100 << 20, (1 << 30) + 3] {
            for threads in [1, 3, 8] {
                let pieces = Pieces::of(nbytes, threads);
                let mut end = 0;
                while let Some(piece) = pieces.claim() {
                    assert_eq!(piece.start, end);
                    assert!((1..=PIECE).contains(&piece.len()));
                    end = piece.end;
                }
                assert_eq!(end, nbytes, "{threads} threads");
            }
        }
    }
}
