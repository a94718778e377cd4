//! Copies in host memory, aligned for every framework.

use bridge_core::{COPY_ALIGNMENT, Dims, Error, ErrorKind, Layout, Result};
use std::alloc::{Layout as Block, alloc, dealloc};
use std::ptr::NonNull;

/// Uninitialised host memory at an address that [`COPY_ALIGNMENT`] divides.
pub(crate) struct Aligned {
    data: NonNull<u8>,
    block: Block,
}

// SAFETY: the value owns the memory, and never reads or writes it.
unsafe impl Send for Aligned {}
// SAFETY: as above.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// Allocates `nbytes` bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`] if the allocation fails.
    pub(crate) fn new(nbytes: usize) -> Result<Self> {
        let full = || Error::new(ErrorKind::Layout, format!("there is no memory for a copy of {nbytes} bytes"));
        let block = Block::from_size_align(nbytes.max(1), COPY_ALIGNMENT).map_err(|_| full())?;
        // SAFETY: the block is not empty.
        let data = NonNull::new(unsafe { alloc(block) }).ok_or_else(full)?;
        Ok(Self { data, block })
    }

    pub(crate) fn data(&self) -> *mut u8 {
        self.data.as_ptr()
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated as this block.
        unsafe { dealloc(self.data(), self.block) };
    }
}

/// Copies the elements of a view to compact, row-major memory. `from` is the address of its first element.
///
/// # Safety
///
/// The memory that `layout` reaches around `from` is readable, and `layout.nbytes()` bytes at `to` are writable.
pub(crate) unsafe fn compact(from: *const u8, layout: &Layout, to: *mut u8) {
    let (shape, strides) = (layout.shape(), layout.strides());
    // The last dimensions that are compact are copied as one block.
    let (mut outer, mut block) = (shape.len(), 1);
    while outer > 0 && (shape[outer - 1] == 1 || strides[outer - 1] == block) {
        outer -= 1;
        block *= shape[outer];
    }
    let (outer, nbytes, itemsize) = (&shape[..outer], block as usize * layout.itemsize(), layout.itemsize() as i64);
    let (mut index, mut at) = (Dims::from_elem(0, outer.len()), 0i64);
    for number in 0..layout.nbytes() / nbytes.max(1) {
        // SAFETY: `at` is the offset of an element of the view, and every block has a place of its own in the copy.
        unsafe {
            let block = from.offset((at * itemsize) as isize);
            block.copy_to_nonoverlapping(to.add(number * nbytes), nbytes);
        }
        for d in (0..outer.len()).rev() {
            index[d] += 1;
            at += strides[d];
            if index[d] < outer[d] {
                break;
            }
            at -= index[d] * strides[d];
            index[d] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::DType;

    /// Returns the bytes of the elements of a view of 0, 1, …, computed element by element.
    fn expected(shape: &[i64], strides: &[i64], first: i64) -> Vec<u8> {
        let mut elements = vec![first];
        for (length, stride) in shape.iter().zip(strides) {
            elements = elements.iter().flat_map(|at| (0..*length).map(move |i| at + i * stride)).collect();
        }
        elements.iter().flat_map(|element| (*element as u16).to_ne_bytes()).collect()
    }

    #[test]
    fn every_view_becomes_compact() {
        let memory: Vec<u16> = (0..120).collect();
        let cases: &[(&[i64], &[i64], i64)] = &[
            (&[], &[], 7),
            (&[0], &[1], 0),
            (&[3, 0, 2], &[1, 1, 1], 5),
            (&[120], &[1], 0),
            (&[60], &[2], 1),
            (&[120], &[-1], 119),
            (&[4, 5], &[1, 4], 0),
            (&[5, 4, 3], &[12, -3, 1], 9),
            (&[2, 3, 4], &[0, 0, 1], 100),
            (&[2, 1, 6], &[60, 999, 10], 3),
            (&[3, 3], &[1, 1], 0),
        ];
        for (shape, strides, first) in cases {
            let layout = Layout::new(DType::UINT16, shape, Some(strides), 0).unwrap();
            let copy = Aligned::new(layout.nbytes()).unwrap();
            assert!(copy.data().addr().is_multiple_of(COPY_ALIGNMENT));
            // SAFETY: the cases stay inside the memory; the copy has room for them.
            let bytes = unsafe {
                compact(memory.as_ptr().add(*first as usize).cast(), &layout, copy.data());
                std::slice::from_raw_parts(copy.data(), layout.nbytes())
            };
            assert_eq!(bytes, expected(shape, strides, *first), "{layout}");
        }
    }

    #[test]
    fn too_much_is_an_error() {
        assert_eq!(Aligned::new(usize::MAX).err().map(|error| error.kind()), Some(ErrorKind::Layout));
    }
}
