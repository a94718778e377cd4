//! Host memory, and copies of it where the producer cannot copy.

use crate::fill::fill;
use crate::{
    Access, Allocation, COPY_ALIGNMENT, DType, DeviceKind, Error, ErrorKind, Layout, Lent, Memory, Order, Ordering,
    Result, Views, poison,
};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

/// A unit of memory with the alignment of copies.
#[derive(Debug)]
#[repr(align(64))]
struct Block {
    _bytes: [u8; COPY_ALIGNMENT],
}

const _: () = assert!(align_of::<Block>() == COPY_ALIGNMENT && size_of::<Block>() == COPY_ALIGNMENT);

/// Host memory of its own, aligned to [`COPY_ALIGNMENT`] bytes. Its bytes stay in place until it is dropped.
#[derive(Debug)]
pub struct HostMemory {
    bytes: Range<usize>,
    blocks: Vec<Block>,
}

impl HostMemory {
    /// Allocates memory. Its bytes are undefined.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`].
    pub fn new(nbytes: usize) -> Result<Self> {
        let mut blocks: Vec<Block> = Vec::new();
        blocks.try_reserve_exact(nbytes.div_ceil(COPY_ALIGNMENT)).map_err(|error| {
            let text = format!("no host memory for {nbytes} bytes: free some first");
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })?;
        let start = blocks.as_mut_ptr().expose_provenance();
        Ok(Self { bytes: start..start + nbytes, blocks })
    }

    /// Allocates memory of zeros: a valid element of every dtype.
    ///
    /// # Errors
    ///
    /// Those of [`HostMemory::new`].
    pub fn zeroed(nbytes: usize) -> Result<Self> {
        let memory = Self::new(nbytes)?;
        // SAFETY: the vector has room for as many bytes, and no other code knows them.
        unsafe { ptr::write_bytes(ptr::with_exposed_provenance_mut::<u8>(memory.bytes.start), 0, nbytes) };
        Ok(memory)
    }

    /// Returns the addresses of its bytes, whose provenance is exposed.
    pub fn bytes(&self) -> Range<usize> {
        self.bytes.clone()
    }

    /// Fills the memory with [`poison::BYTE`].
    #[cold]
    fn poison(&mut self) {
        // SAFETY: the vector has room for as many bytes. No reader is left: the memory is about to be freed.
        unsafe { ptr::write_bytes(self.blocks.as_mut_ptr().cast::<u8>(), poison::BYTE, self.bytes.len()) };
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

/// Copies a tensor in host memory, without a deferred operation, into fresh memory, compact in this order and aligned
/// to [`COPY_ALIGNMENT`] bytes: by the copies of `ordering`, or by a loop of this module.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`], and those of [`fill`].
pub(crate) fn copy(lent: Lent, order: Order, ordering: &Arc<dyn Ordering>) -> Result<Lent> {
    debug_assert!(lent.device().kind == DeviceKind::CPU && lent.pending().is_none());
    let target = empty(lent.dtype(), lent.layout().shape(), order)?;
    if let Err(lent) = fill(lent, &target, Arc::new(Views::default()), ordering, None)? {
        copy_elements_into(&lent, &target, order);
    }
    Ok(target)
}

/// Copies a tensor in host memory, without a deferred operation, into fresh host memory of the same dtype and shape that
/// is compact in this order.
pub(crate) fn copy_elements_into(lent: &Lent, target: &Lent, order: Order) {
    debug_assert!(target.layout().follows(order) && lent.layout().shape() == target.layout().shape());
    let to = ptr::with_exposed_provenance_mut(target.data());
    // In column-major order the elements lie as those of the reversed dimensions lie in row-major order.
    let reversed = (order == Order::ColumnMajor).then(|| lent.layout().reversed());
    let layout = reversed.as_ref().unwrap_or(lent.layout());
    // SAFETY: by the contract of `DeviceBuffer` the bytes of the view are mapped and, as host memory, ready; `Lent::new`
    // has checked that the layout stays inside them. The target is fresh, has room for every element, and no other code
    // uses it.
    unsafe { copy_elements(ptr::with_exposed_provenance(lent.data()), layout, to) };
}

/// Returns fresh host memory, compact in this order and aligned to [`COPY_ALIGNMENT`] bytes.
pub(crate) fn empty(dtype: DType, shape: &[i64], order: Order) -> Result<Lent> {
    let layout = Layout::new(dtype, shape, Some(&order.strides(shape)), 0)?;
    let memory = HostMemory::new(layout.nbytes())?;
    // SAFETY: the bytes stay in place until the owner is dropped, with the buffer. No other code knows them.
    let memory = unsafe { Memory::new(Allocation::host(memory.bytes(), Access::ReadWrite), memory) };
    Lent::new(dtype, layout, memory)
}

/// Copies the elements in row-major order.
///
/// # Safety
///
/// `from` is the address of the first element of a readable view with this layout. `to` has room for all elements, and
/// does not overlap the view.
unsafe fn copy_elements(from: *const u8, layout: &Layout, to: *mut u8) {
    if layout.numel() == 0 {
        return;
    }
    let itemsize = layout.itemsize();
    // The compact innermost dimensions are copied as one row.
    let mut outer = layout.shape().len();
    let mut row = 1i64;
    while outer > 0 && (layout.shape()[outer - 1] == 1 || layout.strides()[outer - 1] == row) {
        row *= layout.shape()[outer - 1];
        outer -= 1;
    }
    let (shape, strides) = (&layout.shape()[..outer], &layout.strides()[..outer]);
    let row = row as usize * itemsize;
    let mut index = [0i64; crate::MAX_NDIM];
    let mut done = 0;
    loop {
        let elements: i64 = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        // SAFETY: the row is part of the view, and `to` has room for it behind the `done` bytes written so far. The
        // arithmetic stays within the extent that `Layout::new` has checked.
        unsafe { ptr::copy_nonoverlapping(from.offset(elements as isize * itemsize as isize), to.add(done), row) };
        done += row;
        let Some(d) = (0..outer).rev().find(|d| index[*d] + 1 < shape[*d]) else { return };
        index[d] += 1;
        index[d + 1..outer].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceBuffer, HostOnly};
    use proptest::prelude::*;

    #[test]
    fn memory_is_filled_before_it_is_freed_while_that_is_on() {
        for nbytes in [0usize, 1, 64, 1000] {
            let mut memory = HostMemory::zeroed(nbytes).unwrap();
            let before = poison::count();
            memory.poison();
            assert!(poison::count() > before);
            // SAFETY: the memory is alive, has these bytes and was written as a whole.
            let bytes = unsafe { std::slice::from_raw_parts(memory.blocks.as_ptr().cast::<u8>(), nbytes) };
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

    /// A view with these lengths and strides over bytes that mostly differ.
    fn lent(dtype: DType, dims: &[(i64, i64)]) -> Lent {
        let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
        let layout = Layout::new(dtype, &shape, Some(&strides), 0).unwrap();
        let (below, above) = layout.reach();
        let bytes: Vec<u8> = (0..below + above).map(|i| (i * 37 % 251) as u8).collect();
        let range = bytes.as_ptr().expose_provenance()..bytes.as_ptr().addr() + bytes.len();
        // SAFETY: the vector owns the bytes, and is dropped with the buffer.
        let memory = unsafe { Memory::new(Allocation::host(range, Access::ReadOnly), bytes) };
        Lent::at(memory.address() + below, dtype, layout, memory).unwrap()
    }

    fn host() -> Arc<dyn Ordering> {
        Arc::new(HostOnly)
    }

    fn read(lent: &Lent, address: usize) -> Vec<u8> {
        // SAFETY: the caller names an element of the view, whose bytes are readable.
        unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(address), lent.layout().itemsize()) }.to_vec()
    }

    proptest! {
        /// A copy has every element at its place, whatever the strides.
        #[test]
        fn a_copy_has_every_element(
            dims in prop::collection::vec((0i64..5, -6i64..7), 0..5),
            dtype in prop::sample::select(&[DType::UINT8, DType::FLOAT16, DType::FLOAT32, DType::COMPLEX128][..]),
            order in prop::sample::select(&[Order::RowMajor, Order::ColumnMajor][..]),
        ) {
            let original = lent(dtype, &dims);
            let copy = copy(lent(dtype, &dims), order, &host()).unwrap();
            let (layout, itemsize) = (original.layout(), original.layout().itemsize());
            prop_assert_eq!((copy.layout().shape(), copy.layout().follows(order)), (layout.shape(), true));
            prop_assert_eq!((copy.data() % COPY_ALIGNMENT, copy.buffer().access()), (0, Access::ReadWrite));
            prop_assert_eq!(copy.buffer().len(), layout.nbytes());
            // The elements by an independent walk: all addresses, the fastest dimension last.
            let mut addresses = vec![original.data() as i64];
            let mut slowest_first = dims.clone();
            if order == Order::ColumnMajor {
                slowest_first.reverse();
            }
            for (length, stride) in slowest_first {
                let steps = |at: &i64| (0..length).map(|i| at + i * stride * itemsize as i64).collect::<Vec<_>>();
                addresses = addresses.iter().flat_map(steps).collect();
            }
            prop_assert_eq!(addresses.len(), layout.numel());
            for (i, address) in addresses.into_iter().enumerate() {
                prop_assert_eq!(read(&copy, copy.data() + i * itemsize), read(&original, address as usize));
            }
        }
    }

    #[test]
    fn a_copy_that_does_not_fit_into_memory_is_an_error() {
        let byte = 0u8;
        let start = (&raw const byte).addr();
        let layout = Layout::new(DType::UINT8, &[i64::MAX], Some(&[0]), 0).unwrap();
        // SAFETY: the view repeats one byte, which outlives the buffer.
        let memory = unsafe { Memory::new(Allocation::host(start..start + 1, Access::ReadOnly), ()) };
        let giant = Lent::new(DType::UINT8, layout, memory).unwrap();
        assert_eq!(copy(giant, Order::RowMajor, &host()).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
}
