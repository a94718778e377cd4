//! Host memory of core.

use crate::{
    Access, Allocation, COPY_ALIGNMENT, DType, Error, ErrorKind, Export, Layout, Memory, Order, Result, poison,
};
use std::alloc::{Layout as Blocks, alloc, alloc_zeroed};
use std::ops::Range;
use std::ptr;

/// A unit of memory with an alignment that allocators give to every block: beyond it they fill zeros themselves, and
/// below it the system provides pages of zeros.
#[derive(Debug)]
#[repr(align(16))]
struct Block {
    _bytes: [u8; BLOCK],
}

const BLOCK: usize = 16;
const _: () = assert!(align_of::<Block>() == BLOCK && size_of::<Block>() == BLOCK);

/// Host memory that this value owns, aligned to [`COPY_ALIGNMENT`] bytes. Its bytes stay in place until it is dropped.
#[derive(Debug)]
#[must_use = "dropping it frees the memory"]
pub struct HostMemory {
    bytes: Range<usize>,
    _blocks: Vec<Block>,
}

impl HostMemory {
    /// Allocates memory. Its bytes are undefined.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`].
    pub fn new(nbytes: usize) -> Result<Self> {
        Self::aligned(nbytes, COPY_ALIGNMENT, alloc)
    }

    /// Allocates memory of zeros: a valid element of every dtype.
    ///
    /// # Errors
    ///
    /// Those of [`HostMemory::new`].
    pub fn zeroed(nbytes: usize) -> Result<Self> {
        Self::aligned(nbytes, COPY_ALIGNMENT, alloc_zeroed)
    }

    /// Allocates memory by `allocate`, with a first byte at a multiple of `alignment` bytes.
    fn aligned(nbytes: usize, alignment: usize, allocate: unsafe fn(Blocks) -> *mut u8) -> Result<Self> {
        // What lies before the first multiple is not used.
        let capacity = nbytes.saturating_add(alignment);
        let no_memory = || {
            let text = format!("host: out of memory allocating {capacity} bytes");
            Error::new(ErrorKind::OutOfMemory, text)
        };
        let count = capacity.div_ceil(BLOCK).max(1);
        let layout = Blocks::array::<Block>(count).map_err(|error| no_memory().caused_by(error))?;
        // SAFETY: the layout has a block at least.
        let start = unsafe { allocate(layout) }.cast::<Block>();
        if start.is_null() {
            return Err(no_memory());
        }
        // SAFETY: the global allocator has returned memory for `count` blocks, of which the vector says that none is a
        // value yet.
        let mut blocks = unsafe { Vec::from_raw_parts(start, 0, count) };
        let start = blocks.as_mut_ptr().expose_provenance().next_multiple_of(alignment);
        Ok(Self { bytes: start..start + nbytes, _blocks: blocks })
    }

    /// Returns the addresses of its bytes, whose provenance is exposed.
    pub fn bytes(&self) -> Range<usize> {
        self.bytes.clone()
    }

    /// Fills the memory with [`poison::BYTE`].
    #[cold]
    fn poison(&mut self) {
        let start = ptr::with_exposed_provenance_mut::<u8>(self.bytes.start);
        // SAFETY: the vector has room for as many bytes. No reader is left: the memory is about to be freed.
        unsafe { ptr::write_bytes(start, poison::BYTE, self.bytes.len()) };
        poison::filled();
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if poison::is_on() && !self.bytes.is_empty() {
            self.poison();
        }
    }
}

/// Returns fresh host memory, compact in this order and aligned to [`COPY_ALIGNMENT`] bytes, or to `alignment` bytes
/// where that is more. Its elements are undefined.
pub(crate) fn empty(dtype: DType, shape: &[i64], order: Order, alignment: usize) -> Result<Export> {
    fresh(dtype, shape, order, |nbytes| HostMemory::aligned(nbytes, alignment.max(COPY_ALIGNMENT), alloc))
}

/// As [`empty`], aligned to [`COPY_ALIGNMENT`], with elements of zeros, which may be read before they are written.
#[cfg(feature = "dlpack")]
pub(crate) fn zeros(dtype: DType, shape: &[i64], order: Order) -> Result<Export> {
    fresh(dtype, shape, order, HostMemory::zeroed)
}

fn fresh(
    dtype: DType,
    shape: &[i64],
    order: Order,
    allocate: impl FnOnce(usize) -> Result<HostMemory>,
) -> Result<Export> {
    let layout = Layout::new(dtype, shape, Some(&order.strides(shape)), 0)?;
    let memory = allocate(layout.nbytes())?;
    // SAFETY: the bytes stay in place until the owner is dropped, with the buffer. No other code knows them.
    let memory = unsafe { Memory::new(Allocation::host(memory.bytes(), Access::ReadWrite), memory) };
    Export::new(dtype, layout, memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_filled_before_it_is_freed_while_that_is_on() {
        for nbytes in [0usize, 1, 64, 1000] {
            let mut memory = HostMemory::zeroed(nbytes).unwrap();
            let before = poison::count();
            memory.poison();
            assert!(poison::count() > before);
            let start = ptr::with_exposed_provenance::<u8>(memory.bytes.start);
            // SAFETY: the memory is alive, has these bytes and was written as a whole.
            let bytes = unsafe { std::slice::from_raw_parts(start, nbytes) };
            assert!(bytes.iter().all(|byte| *byte == poison::BYTE), "{nbytes}");
        }
        let drops = |on| {
            poison::set(on);
            let before = poison::count();
            drop(HostMemory::zeroed(8).unwrap());
            poison::count() - before
        };
        // Other tests of the process free memory as well.
        assert!(drops(true) >= 1);
        poison::set(false);
    }

    #[test]
    fn an_alignment_that_no_memory_has_is_an_error() {
        assert_eq!(HostMemory::aligned(8, 1 << 63, alloc).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
}
