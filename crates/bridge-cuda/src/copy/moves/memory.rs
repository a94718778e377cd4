//! Memory for the length of a move.

use crate::Link;
use bridge_core::{Device, Error, ErrorKind, Result, Stream, poison};

/// Memory of the driver's pool.
pub(crate) struct Block<'a> {
    link: &'a dyn Link,
    device: Device,
    stream: Stream,
    pub(super) address: usize,
    nbytes: usize,
}

impl<'a> Block<'a> {
    pub fn new(link: &'a dyn Link, device: Device, nbytes: usize, stream: Stream) -> Result<Self> {
        // SAFETY: the stream is alive, as the module `moves` says. The driver allocates no 0 bytes.
        let address = unsafe { link.allocate(device, nbytes.max(1), stream) }?;
        Ok(Self { link, device, stream, nbytes, address })
    }
}

impl Block<'_> {
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Overwrites the memory, after all work on it.
    #[cold]
    pub(super) fn poison(&self) {
        // SAFETY: the memory is this block's until it is freed, in the same stream. A driver that fails leaves it.
        let _ = unsafe { self.link.poison(self.device, self.address, self.nbytes, self.stream) };
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        if poison::is_on() {
            self.poison();
        }
        // SAFETY: the memory comes from this link. Core, and `Moves` in the stream itself, have ordered all work on it
        // before the stream. A driver that has shut down keeps the memory.
        let _ = unsafe { self.link.free(self.device, self.address, self.stream) };
    }
}

/// Memory of the host.
pub(super) struct Scratch {
    pub address: usize,
    _memory: Vec<u128>,
}

impl Scratch {
    pub fn unless(is_compact: bool, nbytes: usize) -> Result<Option<Self>> {
        if is_compact {
            return Ok(None);
        }
        let mut memory: Vec<u128> = Vec::new();
        memory.try_reserve_exact(nbytes.div_ceil(size_of::<u128>())).map_err(|error| {
            let text = format!("host: out of memory allocating {nbytes} bytes for a compact copy");
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })?;
        Ok(Some(Self { address: memory.as_mut_ptr().expose_provenance(), _memory: memory }))
    }
}
