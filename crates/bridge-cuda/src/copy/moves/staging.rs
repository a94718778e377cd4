//! Staging buffers: pinned host memory, kept for the next move.

use super::cut::Cuts;
use crate::{Event, Link};
use bridge_core::planted::is_planted;
use bridge_core::{Device, Result, Stream};
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// A piece of pinned host memory.
struct Buffer {
    device: Device,
    address: usize,
    /// Marks the last copy into this buffer or out of it. Before the event is reached the buffer must not be used.
    event: Option<Event>,
}

/// The staging buffers of a process that no move holds now.
pub(crate) struct Pool {
    kept: Mutex<Vec<Buffer>>,
    /// Bytes of a buffer.
    length: usize,
    /// The most buffers that it keeps for a device.
    most: usize,
}

impl Pool {
    /// Returns a pool for moves that are cut this way. It keeps the buffers of one of them.
    pub const fn new(cuts: &Cuts) -> Self {
        Self { kept: Mutex::new(Vec::new()), length: cuts.longest(), most: cuts.buffers() }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Vec<Buffer>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a buffer for copies in streams of `device`. No earlier copy uses it any more.
    ///
    /// Allocates one while the pool is small, and waits for the oldest one otherwise.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub fn take<'a>(&'a self, link: &'a dyn Link, device: Device) -> Result<Staging<'a>> {
        let found = {
            let mut kept = self.kept();
            let mine = |buffer: &Buffer| buffer.device == device;
            let is_free = |buffer: &Buffer| {
                is_planted("moves_reuse_early")
                    || buffer.event.as_ref().is_none_or(|event| link.is_complete(device, event).unwrap_or(false))
            };
            // The last one was used last: the cache may still have it.
            let free = kept.iter().rposition(|buffer| mine(buffer) && is_free(buffer));
            let is_full = kept.iter().filter(|buffer| mine(buffer)).count() >= self.most;
            let oldest = || kept.iter().position(mine).filter(|_| is_full);
            free.or_else(oldest).map(|at| kept.remove(at))
        };
        let buffer = match found {
            Some(buffer) => buffer,
            None => Buffer { device, address: link.allocate_pinned(device, self.length)?, event: None },
        };
        let mut staging = Staging { pool: self, link, buffer: Some(buffer) };
        staging.wait()?;
        Ok(staging)
    }

    /// Takes a buffer back. Where the pool is full, frees it after its last copy.
    fn give(&self, link: &dyn Link, mut buffer: Buffer) {
        let (device, address) = (buffer.device, buffer.address);
        {
            let mut kept = self.kept();
            if kept.iter().filter(|buffer| buffer.device == device).count() < self.most {
                return kept.push(buffer);
            }
        }
        let reached = buffer.event.take().is_none_or(|event| {
            let waited = link.wait(device, &event).is_ok();
            link.release(device, event);
            waited
        });
        if reached {
            // SAFETY: the buffer's memory comes from this link, and its last copy has run. A failure leaks it.
            let _ = unsafe { link.free_pinned(device, address) };
        }
    }
}

/// A buffer that a move holds. Dropping it returns it to the pool.
pub(crate) struct Staging<'a> {
    pool: &'a Pool,
    link: &'a dyn Link,
    /// `None` once the buffer is lost: the driver cannot tell when its last copy has run, so it is leaked.
    buffer: Option<Buffer>,
}

impl Staging<'_> {
    fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("a move ends with the error that lost its buffer")
    }

    /// Returns the first of its bytes.
    pub fn start(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.buffer().address)
    }

    /// Submits a copy of `nbytes` bytes from `address` of the device to `stream`, and events it.
    ///
    /// # Errors
    ///
    /// Those of the driver. The buffer is then lost.
    ///
    /// # Safety
    ///
    /// The device's range stays mapped until the copy has run, `nbytes` is at most a buffer's length, and the buffer is
    /// free: [`wait`](Self::wait) has returned since its last copy.
    pub unsafe fn fill(&mut self, address: usize, nbytes: usize, stream: Stream) -> Result<()> {
        let Buffer { device, address: start, .. } = *self.buffer();
        // SAFETY: the caller's promises; the buffer is pinned and lives until its event is reached, or for ever.
        self.recorded(stream, unsafe { self.link.copy((device, address), (Device::CPU, start), nbytes, stream) })
    }

    /// Submits a copy of the first `nbytes` bytes to `address` of the device to `stream`, and events it.
    ///
    /// # Errors
    ///
    /// Those of the driver. The buffer is then lost.
    ///
    /// # Safety
    ///
    /// As of [`fill`](Self::fill).
    pub unsafe fn empty(&mut self, address: usize, nbytes: usize, stream: Stream) -> Result<()> {
        let Buffer { device, address: start, .. } = *self.buffer();
        // SAFETY: as in `fill`.
        self.recorded(stream, unsafe { self.link.copy((Device::CPU, start), (device, address), nbytes, stream) })
    }

    fn recorded(&mut self, stream: Stream, copied: Result<()>) -> Result<()> {
        let stream = if is_planted("moves_record_elsewhere") { Stream::LEGACY } else { stream };
        // SAFETY: the stream is alive, as the module `moves` says.
        let event = copied.and_then(|()| unsafe { self.link.record(self.buffer().device, stream) });
        match (event, &mut self.buffer) {
            (Ok(event), Some(buffer)) => {
                buffer.event = Some(event);
                Ok(())
            }
            (event, buffer) => {
                *buffer = None;
                event.map(drop)
            }
        }
    }

    /// Blocks the host until the last copy has run.
    ///
    /// # Errors
    ///
    /// Those of the driver. The buffer is then lost.
    pub fn wait(&mut self) -> Result<()> {
        let Some(Buffer { device, event: Some(event), .. }) = &self.buffer else { return Ok(()) };
        let waited = if is_planted("moves_reuse_early") { Ok(()) } else { self.link.wait(*device, event) };
        let device = *device;
        match &mut self.buffer {
            Some(buffer) if waited.is_ok() => {
                buffer.event.take().into_iter().for_each(|event| self.link.release(device, event))
            }
            lost => *lost = None,
        }
        waited
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give(self.link, buffer);
        }
    }
}
