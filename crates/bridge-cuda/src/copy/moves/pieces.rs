//! Moves of bytes between the host and a device, in pieces that overlap.

use super::cut::{Cut, Cuts, Ends, Pieces, Short};
use super::packed::{Packed, Plain};
use super::staging::{Pool, Staging};
use super::stores::{copy, copy_streaming, prefer_huge_pages};
use super::tick::tick;
use super::wait;
use crate::Link;
use crate::copy::host::at_most;
use bridge_core::{Device, Result, Stream};
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

/// The figures of moves, measured on an H200 host with 16 cores.
pub(crate) const CUTS: Cuts = Cuts {
    // Fewer threads fill the link, but fresh memory needs all: the system clears each page at its first use.
    down: Cut { share: 4 << 20, threads: 16, buffers: 24, shortest: 512 << 10, longest: 2 << 20, at_once: 4 << 20 },
    up: Cut { share: 4 << 20, threads: 12, buffers: 24, shortest: 512 << 10, longest: 4 << 20, at_once: 4 << 20 },
    // The ends of a block do not overlap with the next one, and its memory is taken from the device's.
    block: 128 << 20,
    // A longer piece is worth its own copy. One block is packed and one is spread while another one moves, so the
    // first and the last cost time.
    across: (2 << 20, 32 << 20),
};

/// The figures of uploads behind whatever is in the stream. Each piece has its own buffer, so that the host never
/// waits, and the pool keeps as many as were pending at once.
pub(crate) const UNHURRIED: Cuts = {
    let cut =
        Cut { share: usize::MAX, threads: 1, buffers: usize::MAX, shortest: 128 << 10, longest: 128 << 10, at_once: 0 };
    Cuts { down: cut, up: cut, block: 0, across: (0, 0) }
};

/// Pieces whose copies to the host are pending, the next one first.
type Coming<'a> = Mutex<VecDeque<(Range<usize>, Staging<'a>)>>;

/// Where the bytes of a move are on the host.
#[derive(Clone, Copy)]
pub(crate) enum Host<'a> {
    /// From this address on, in any memory.
    At(usize),
    /// In small pieces, which are packed on their way.
    Packed(&'a Packed<'a>),
}

impl Host<'_> {
    fn ends(&self) -> Ends<'_> {
        match self {
            Self::At(start) => Ends::Pages(*start),
            Self::Packed(packed) => Ends::At(packed.ends()),
        }
    }

    /// Copies these bytes of the move into staging, whose lines another core has where it `is_cold`.
    ///
    /// # Safety
    ///
    /// The bytes are readable, and staging has room for them.
    unsafe fn read(&self, bytes: Range<usize>, staging: *mut u8, is_cold: bool) -> Result<()> {
        let copy: Plain = if is_cold { copy_streaming } else { copy };
        match self {
            // SAFETY: the caller's promises.
            Self::Packed(packed) => unsafe { packed.on_host(bytes, staging.expose_provenance(), copy) },
            Self::At(start) => {
                let source: *const u8 = ptr::with_exposed_provenance(start + bytes.start);
                // SAFETY: the caller's promises.
                unsafe { copy(source, staging, bytes.len()) };
                Ok(())
            }
        }
    }

    /// Copies these bytes of the move out of staging.
    ///
    /// # Safety
    ///
    /// Staging has the bytes, and on the host they are writable.
    unsafe fn write(&self, bytes: Range<usize>, staging: *mut u8) -> Result<()> {
        match self {
            // SAFETY: the caller's promises.
            Self::Packed(packed) => unsafe { packed.on_host(bytes, staging.expose_provenance(), copy) },
            Self::At(start) => {
                let target = ptr::with_exposed_provenance_mut(start + bytes.start);
                // SAFETY: the caller's promises. An ordinary store: pages that the system has just cleared are in the
                // cache.
                unsafe { copy(staging, target, bytes.len()) };
                Ok(())
            }
        }
    }
}

/// One side of a move: a device, and an address there.
type Side = (Device, usize);

/// A move of `nbytes` bytes between `host` and `address` on `device`, in `stream`.
pub(crate) struct Bytes<'a> {
    pub link: &'a dyn Link,
    pub pool: &'a Pool,
    pub cuts: &'a Cuts,
    pub device: Device,
    pub stream: Stream,
    pub address: usize,
    pub host: Host<'a>,
    pub nbytes: usize,
}

impl Bytes<'_> {
    /// Moves device memory to the host. When it returns, also with an error, the host's bytes are not written any more.
    ///
    /// # Errors
    ///
    /// Those of the driver, and that of a [`Tick`](super::Tick). The bytes of the host are then undefined.
    ///
    /// # Safety
    ///
    /// Both ranges are mapped, and no other work writes the device's or uses the host's until the work has run.
    pub unsafe fn down(&self) -> Result<()> {
        // SAFETY: the caller's promises.
        if unsafe { self.at_once(&self.cuts.down, |host| ((self.device, self.address), host)) } {
            return tick(self.nbytes);
        }
        if let Some(host) = self.pinned()? {
            // SAFETY: the caller's promises; the host's range is pinned.
            return unsafe { self.direct((self.device, self.address), (Device::CPU, host)) };
        }
        let pieces = Pieces::of(&self.cuts.down, Short::Last, (self.host.ends(), self.nbytes), at_most());
        if let Host::At(host) = self.host {
            prefer_huge_pages(ptr::with_exposed_provenance_mut(host), self.nbytes);
        }
        if pieces.threads > 1 {
            // Threads that wait for their first piece keep their cores busy. So one thread waits by itself for earlier
            // work.
            wait(self.link, (self.device, self.stream))?;
        }
        let coming = Coming::default();
        // SAFETY: the caller's promises.
        let fill = |count| unsafe { self.fill(&pieces, &coming, count) };
        // SAFETY: the caller's promises.
        in_threads(&pieces, fill, || unsafe { self.read(&pieces, &coming) })
    }

    /// Moves host memory to the device. When it returns, the host's bytes have been read; the rest of the work is in
    /// the stream.
    ///
    /// # Errors
    ///
    /// Those of the driver, and that of a [`Tick`](super::Tick). The bytes of the device are then undefined.
    ///
    /// # Safety
    ///
    /// Both ranges are mapped, and no other work uses the device's or writes the host's until the work has run.
    pub unsafe fn up(&self) -> Result<()> {
        // SAFETY: the caller's promises.
        if unsafe { self.at_once(&self.cuts.up, |host| (host, (self.device, self.address))) } {
            return tick(self.nbytes);
        }
        // A short move is staged, because a direct one must wait for earlier work in the stream.
        let is_short = self.nbytes <= self.cuts.up.longest;
        if let Some(host) = if is_short { None } else { self.pinned()? } {
            // SAFETY: the caller's promises; the host's range is pinned.
            return unsafe { self.direct((Device::CPU, host), (self.device, self.address)) };
        }
        let pieces = Pieces::of(&self.cuts.up, Short::First, (self.host.ends(), self.nbytes), at_most());
        // SAFETY: the caller's promises.
        let moved = in_threads(&pieces, |_| Ok(()), || unsafe { self.write(&pieces) });
        // The caller drops the target of a move that was ended, also where its memory is reused on another stream.
        moved.inspect_err(|_| drop(wait(self.link, (self.device, self.stream))))
    }

    /// Lets the driver make a short move by itself, from or to any memory of the host, if the stream is idle. Returns
    /// whether it has. Where it fails, such as for memory that is pinned in part, staging takes its place.
    unsafe fn at_once(&self, cut: &Cut, sides: impl Fn(Side) -> (Side, Side)) -> bool {
        let Host::At(host) = self.host else { return false };
        let (from, to) = sides((Device::CPU, host));
        // SAFETY: the caller's promises.
        self.nbytes <= cut.at_once
            && matches!(unsafe { self.link.copy_at_once(from, to, self.nbytes, self.stream) }, Ok(true))
    }

    /// Returns the address on the host, where all bytes are in pinned memory.
    fn pinned(&self) -> Result<Option<usize>> {
        match self.host {
            Host::At(start) => Ok(self.link.is_pinned(start, self.nbytes)?.then_some(start)),
            Host::Packed(_) => Ok(None),
        }
    }

    /// Makes one copy, from or to pinned memory, and waits for it.
    unsafe fn direct(&self, from: (Device, usize), to: (Device, usize)) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe { self.link.copy(from, to, self.nbytes, self.stream) }?;
        wait(self.link, (self.device, self.stream))
    }

    /// Starts the copies of `count` more pieces to the host.
    unsafe fn fill<'s>(&'s self, pieces: &Pieces<'_>, coming: &Coming<'s>, count: usize) -> Result<()> {
        for _ in 0..count {
            let Some(piece) = pieces.claim() else { break };
            // SAFETY: the caller's promises.
            unsafe { self.fill_one(piece, self.pool.take(self.link, self.device)?, coming) }?;
        }
        Ok(())
    }

    unsafe fn fill_one<'s>(&self, piece: Range<usize>, mut buffer: Staging<'s>, coming: &Coming<'s>) -> Result<()> {
        // SAFETY: the caller's promises for this part of the range; a piece fits a buffer, and this one is fresh or has
        // been waited for.
        unsafe { buffer.fill(self.address + piece.start, piece.len(), self.stream) }?;
        coming.lock().unwrap_or_else(PoisonError::into_inner).push_back((piece, buffer));
        Ok(())
    }

    /// Copies pieces to the host while the following ones come in.
    ///
    /// There are as many buffers as threads or more, and each thread holds one. So a copy is pending as long as pieces
    /// are left, and the move ends when none is.
    unsafe fn read<'s>(&'s self, pieces: &Pieces<'_>, coming: &Coming<'s>) -> Result<()> {
        let next = || coming.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        while let Some((piece, mut buffer)) = next() {
            buffer.wait()?;
            // SAFETY: the piece has come in. By the caller's promises this part of the target is writable, and no other
            // thread has claimed it.
            unsafe { self.host.write(piece, buffer.start()) }?;
            if let Some(piece) = pieces.claim() {
                // SAFETY: the caller's promises.
                unsafe { self.fill_one(piece, buffer, coming) }?;
            }
            tick(pieces.claimed())?;
        }
        Ok(())
    }

    /// Copies pieces into staging while the preceding ones go out.
    unsafe fn write(&self, pieces: &Pieces<'_>) -> Result<()> {
        // Each thread has its own buffers, so that their lines stay in the cache of its core. With few threads each
        // has more of them, so that a short move does not wait for work in the stream.
        let depth = self.cuts.up.buffers.div_ceil(pieces.threads);
        let mut going: VecDeque<Staging<'_>> = VecDeque::new();
        while let Some(piece) = pieces.claim() {
            let is_new = going.len() < depth;
            let mut buffer = match is_new {
                true => self.pool.take(self.link, self.device)?,
                false => going.pop_front().expect("there are some"),
            };
            buffer.wait()?;
            // Another core has used a buffer that is new here: an ordinary store would fetch its lines from there.
            let is_cold = is_new && pieces.threads > 1;
            // SAFETY: by the caller's promises this part of the source is readable; the piece fits the buffer, whose
            // last copy has been waited for. The promises hold for the device's part, too.
            unsafe {
                self.host.read(piece.clone(), buffer.start(), is_cold)?;
                buffer.empty(self.address + piece.start, piece.len(), self.stream)?;
            }
            going.push_back(buffer);
            tick(pieces.claimed())?;
        }
        Ok(())
    }
}

/// Calls `work` on this thread and on others, and before it starts each of them `ahead`, with the thread's number of
/// buffers. Every piece is claimed by one of them.
fn in_threads(
    pieces: &Pieces<'_>,
    ahead: impl Fn(usize) -> Result<()>,
    work: impl Fn() -> Result<()> + Sync,
) -> Result<()> {
    let outcome = Mutex::new(Ok(()));
    let stop = |error| {
        pieces.stop();
        *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
    };
    let claim_all = || work().unwrap_or_else(stop);
    std::thread::scope(|scope| {
        for thread in 1..=pieces.threads {
            let buffers = |threads: usize| pieces.buffers * threads / pieces.threads;
            ahead(buffers(thread) - buffers(thread - 1)).unwrap_or_else(stop);
            if thread < pieces.threads {
                // Without the thread the others claim its pieces.
                let _ = Builder::new().name("truebridge-move".into()).spawn_scoped(scope, claim_all);
            }
        }
        claim_all();
    });
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}
