//! Copies of host memory, for producers that cannot copy.

use crate::{Access, COPY_ALIGNMENT, Device, DeviceKind, Error, ErrorKind, Layout, Lent, Memory, Result, Reuse};
use std::ptr;

/// A unit of memory with the alignment that every framework takes.
#[repr(align(64))]
struct Block {
    _bytes: [u8; COPY_ALIGNMENT],
}

const _: () = assert!(align_of::<Block>() == COPY_ALIGNMENT && size_of::<Block>() == COPY_ALIGNMENT);

/// Copies a tensor in host memory into fresh, compact memory, aligned to [`COPY_ALIGNMENT`] bytes.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`].
pub(crate) fn copy(lent: &Lent) -> Result<Lent> {
    debug_assert!(lent.device().kind == DeviceKind::CPU && lent.pending().is_none());
    let (layout, nbytes) = (lent.layout(), lent.layout().nbytes());
    let mut memory: Vec<Block> = Vec::new();
    let count = nbytes.div_ceil(COPY_ALIGNMENT);
    memory.try_reserve_exact(count).map_err(|error| {
        let text = format!("there is no host memory for a copy of {nbytes} bytes: free some first");
        Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
    })?;
    let start = memory.as_mut_ptr().cast::<u8>();
    // SAFETY: by the contract of `DeviceBuffer` the bytes of the view are mapped and, as host memory, ready; `Lent::new`
    // has checked that the layout stays inside them. The capacity has room for every element, and belongs to us alone.
    unsafe { copy_elements(lent.data() as *const u8, layout, start) };
    let bytes = start.addr()..start.addr() + nbytes;
    let compact = Layout::new(lent.dtype(), layout.shape(), None, 0)?;
    // SAFETY: the vector owns the bytes, which never move, and is dropped with the buffer. Nothing else knows them.
    let memory = unsafe { Memory::new(bytes, Device::CPU, Access::ReadWrite, None, Reuse::InStreamOrder, memory) };
    Lent::new(lent.dtype(), compact, Box::new(memory))
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
    // The innermost dimensions that are compact are copied as one row.
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
        // SAFETY: the element is one of the view, and the row behind it too; `done` rows have been written before. The
        // arithmetic stays within the extent that `Layout::new` has checked.
        unsafe { ptr::copy_nonoverlapping(from.offset(elements as isize * itemsize as isize), to.add(done), row) };
        done += row;
        let Some(d) = (0..outer).rev().find(|d| index[*d] + 1 < shape[*d]) else { return };
        index[d] += 1;
        index[d + 1..outer].fill(0);
    }
}
