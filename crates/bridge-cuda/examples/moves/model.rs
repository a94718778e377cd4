//! A link without a device: copies take time and move nothing.

use bridge_core::{Device, Result, Stream};
use bridge_cuda::{Event, Link};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Copies run one after the other.
pub struct Model {
    /// Nanoseconds of a byte, and of a copy next to its bytes.
    pub byte: f64,
    pub copy: f64,
    began: Instant,
    /// When the last copy will have run, in nanoseconds.
    until: AtomicUsize,
    /// Its memory, which lives as long as it does.
    memory: Mutex<Vec<Vec<u8>>>,
}

impl Model {
    pub fn new(byte: f64, copy: f64) -> Self {
        Self { byte, copy, began: Instant::now(), until: AtomicUsize::new(0), memory: Mutex::default() }
    }

    fn now(&self) -> usize {
        self.began.elapsed().as_nanos() as usize
    }
}

impl Link for Model {
    unsafe fn copy(&self, _: (Device, usize), _: (Device, usize), nbytes: usize, _: Stream) -> Result<()> {
        let taken = (self.copy + self.byte * nbytes as f64) as usize;
        let now = self.now();
        let _ = self.until.fetch_update(Relaxed, Relaxed, |until| Some(until.max(now) + taken));
        Ok(())
    }

    unsafe fn poison(&self, _: Device, _: usize, _: usize, _: Stream) -> Result<()> {
        Ok(())
    }

    fn new_stream(&self, _: Device) -> Result<Stream> {
        Ok(Stream::LEGACY)
    }

    unsafe fn record(&self, _: Device, _: Stream) -> Result<Event> {
        // SAFETY: the numbers of this implementation are times.
        Ok(unsafe { Event::new(self.until.load(Relaxed)) })
    }

    fn is_complete(&self, _: Device, event: &Event) -> Result<bool> {
        Ok(event.number() <= self.now())
    }

    fn wait(&self, _: Device, event: &Event) -> Result<()> {
        while event.number() > self.now() {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn release(&self, _: Device, _: Event) {}

    unsafe fn is_captured(&self, _: Device, _: Stream) -> Result<bool> {
        Ok(false)
    }

    fn is_pinned(&self, _: usize, _: usize) -> Result<bool> {
        Ok(false)
    }

    fn allocate_pinned(&self, _: Device, nbytes: usize) -> Result<usize> {
        let mut memory = vec![1u8; nbytes];
        let address = memory.as_mut_ptr().expose_provenance();
        self.memory.lock().expect("no holder panics").push(memory);
        Ok(address)
    }

    unsafe fn free_pinned(&self, _: Device, _: usize) -> Result<()> {
        Ok(())
    }

    unsafe fn allocate(&self, device: Device, _: usize, _: Stream) -> Result<usize> {
        self.allocate_pinned(device, 1)
    }

    unsafe fn free(&self, _: Device, _: usize, _: Stream) -> Result<()> {
        Ok(())
    }
}
