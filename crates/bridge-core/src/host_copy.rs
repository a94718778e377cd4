//! Copies of host memory where no framework copies it.

use crate::conversion::order_after;
use crate::fill::{Filled, fill, flips};
use crate::fresh::prepare;
use crate::host::empty;
use crate::planted::is_planted;
use crate::{Consumer, DeviceKind, Export, Layout, Lease, Order, Ordering, Result, Views};
use std::ptr;
use std::sync::Arc;

/// Copies a tensor in host memory, without a deferred operation, into fresh memory of core, compact in this order and
/// aligned as [`empty`] says: by the copies of `ordering`, else by core's loop.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`](crate::ErrorKind::OutOfMemory), and those of [`fill`].
pub(crate) fn compact(
    exported: Export,
    order: Order,
    alignment: usize,
    ordering: &Arc<dyn Ordering>,
) -> Result<Export> {
    debug_assert!(exported.device().kind == DeviceKind::CPU && exported.pending().is_none());
    let target = empty(exported.dtype(), exported.layout().shape(), order, alignment)?;
    prepare(&target, ordering);
    if let Err(exported) = fill(exported, &target, Arc::new(Views::default()), ordering, None)? {
        copy_by_loop(&exported, &target, 0);
    }
    Ok(target)
}

/// As [`fill`], and core's loop copies host memory where the ordering does not copy it.
///
/// # Errors
///
/// Those of [`fill`], and of [`Ordering::synchronize`] for host memory that a device writes.
pub(crate) fn fill_or_copy_by_loop(
    source: Export,
    target: &Export,
    consumer: Arc<dyn Consumer>,
    ordering: &Arc<dyn Ordering>,
) -> Result<Filled> {
    let source = match fill(source, target, Arc::clone(&consumer), ordering, None)? {
        Err(source) => source,
        filled => return Ok(filled),
    };
    let host = source.device().kind == DeviceKind::CPU && target.device().kind == DeviceKind::CPU;
    let Some(flips) = flips(&source, target).filter(|_| host && target.buffer().stream().is_none()) else {
        return Ok(Err(source));
    };
    order_after(ordering, &source, None, None)?;
    copy_by_loop(&source, target, flips);
    drop(Lease::new(source, None, false, consumer, Arc::clone(ordering)));
    Ok(Ok(None))
}

/// Copies the elements of a tensor in host memory into those of another by core's loop, and flips the bits of `flips` in each. Both have
/// the same shape and itemsize and share no bytes; `target` is writable, and has no two elements at one address.
pub(crate) fn copy_by_loop(source: &Export, target: &Export, flips: u128) {
    debug_assert_eq!(source.layout().shape(), target.layout().shape());
    debug_assert_eq!(source.layout().itemsize(), target.layout().itemsize());
    let (from, to) = (source.as_ptr::<u8>().cast_const(), target.as_ptr());
    // In column-major order the elements lie as those of the reversed dimensions lie in row-major order.
    let columns = target.layout().follows(Order::ColumnMajor) && !target.layout().follows(Order::RowMajor);
    let mistaken =
        || source.layout().shape() == source.layout().reversed().shape() && is_planted("core_square_transposed");
    let read = || if mistaken() { source.layout().clone() } else { source.layout().reversed() };
    let reversed = columns.then(|| (read(), target.layout().reversed()));
    let (read, written) =
        reversed.as_ref().map_or((source.layout(), target.layout()), |(read, written)| (read, written));
    // SAFETY: by the contract of `DeviceBuffer` the bytes of both views are mapped and, as host memory that the caller
    // has waited for, ready; `Export::new` has checked that the layouts stay inside them. The caller says that the
    // target is writable and apart from the source.
    unsafe { walk((from, read), (to, written), flips) };
}

/// Copies the elements, the last index fastest, and flips bits in each.
///
/// # Safety
///
/// Each address is that of the first element of a view with the layout next to it: the first readable, the second
/// writable, and the two share no bytes. The layouts have the same shape and itemsize.
unsafe fn walk(from: (*const u8, &Layout), to: (*mut u8, &Layout), flips: u128) {
    let (shape, itemsize) = (from.1.shape(), from.1.itemsize());
    if from.1.numel() == 0 {
        return;
    }
    // The innermost dimensions that are compact on both sides are copied as one row.
    let mut outer = shape.len();
    let mut row = 1i64;
    let follows = |d: usize, row| shape[d] == 1 || (from.1.strides()[d], to.1.strides()[d]) == (row, row);
    while outer > 0 && follows(outer - 1, row) {
        row *= shape[outer - 1];
        outer -= 1;
    }
    let row = row as usize * itemsize;
    let advance = |at: (*const u8, *mut u8), d: usize, steps: i64| {
        let bytes = |layout: &Layout| (steps * layout.strides()[d]) as isize * itemsize as isize;
        (at.0.wrapping_offset(bytes(from.1)), at.1.wrapping_offset(bytes(to.1)))
    };
    let bits = flips.to_le_bytes();
    let mut index = [0i64; crate::MAX_NDIM];
    let (mut source, mut target) = (from.0, to.0);
    loop {
        // SAFETY: the row is part of both views. The arithmetic stays within the extents that `Layout::new` has checked.
        unsafe { ptr::copy_nonoverlapping(source, target, row) };
        if flips != 0 {
            for byte in 0..row {
                // SAFETY: as above.
                unsafe { *target.add(byte) ^= bits[byte % itemsize] };
            }
        }
        let Some(d) = (0..outer).rev().find(|d| index[*d] + 1 < shape[*d]) else { return };
        index[d] += 1;
        (source, target) = advance((source, target), d, 1);
        for (d, steps) in index.iter_mut().enumerate().take(outer).skip(d + 1) {
            (source, target) = advance((source, target), d, -std::mem::take(steps));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Access, Allocation, COPY_ALIGNMENT, DType, DeviceBuffer, ErrorKind, HostOnly, Memory, Pending, repeats,
    };
    use proptest::prelude::*;

    /// A view with these lengths and strides over bytes that mostly differ.
    fn exported(dtype: DType, dims: &[(i64, i64)]) -> Export {
        let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
        let layout = Layout::new(dtype, &shape, Some(&strides), 0).unwrap();
        let (below, above) = layout.byte_extent();
        let mut bytes: Vec<u8> = (0..below + above).map(|i| (i * 37 % 251) as u8).collect();
        let range = bytes.as_mut_ptr().expose_provenance()..bytes.as_ptr().addr() + bytes.len();
        // SAFETY: the vector owns the bytes, and is dropped with the buffer.
        let memory = unsafe { Memory::new(Allocation::host(range, Access::ReadWrite), bytes) };
        Export::at(memory.address() + below, dtype, layout, memory).unwrap()
    }

    fn host() -> Arc<dyn Ordering> {
        Arc::new(HostOnly)
    }

    fn whole(exported: &Export) -> Vec<u8> {
        let (start, len) = (exported.buffer().address(), exported.buffer().len());
        // SAFETY: the buffer has these bytes.
        unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(start), len) }.to_vec()
    }

    fn read(exported: &Export, address: usize) -> Vec<u8> {
        // SAFETY: the caller names an element of the view, whose bytes are readable.
        unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(address), exported.layout().itemsize()) }
            .to_vec()
    }

    proptest! {
        /// A copy has every element at its place, whatever the strides.
        #[test]
        fn a_copy_has_every_element(
            dims in prop::collection::vec((0i64..5, -6i64..7), 0..5),
            dtype in prop::sample::select(&[DType::UINT8, DType::FLOAT16, DType::FLOAT32, DType::COMPLEX128][..]),
            order in prop::sample::select(&[Order::RowMajor, Order::ColumnMajor][..]),
            alignment in prop::sample::select(&[1, 64, 128, 1 << 16][..]),
        ) {
            let original = exported(dtype, &dims);
            let copy = compact(exported(dtype, &dims), order, alignment, &host()).unwrap();
            let (layout, itemsize) = (original.layout(), original.layout().itemsize());
            prop_assert_eq!((copy.layout().shape(), copy.layout().follows(order)), (layout.shape(), true));
            prop_assert!(copy.data().is_multiple_of(alignment.max(COPY_ALIGNMENT)));
            prop_assert_eq!(copy.buffer().access(), Access::ReadWrite);
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

    /// Returns the bytes of each element, the last index fastest.
    fn elements(exported: &Export) -> Vec<Vec<u8>> {
        let mut addresses = vec![exported.data() as i64];
        let itemsize = exported.layout().itemsize() as i64;
        for (&length, &stride) in exported.layout().shape().iter().zip(exported.layout().strides()) {
            let steps = |at: &i64| (0..length).map(|i| at + i * stride * itemsize).collect::<Vec<_>>();
            addresses = addresses.iter().flat_map(steps).collect();
        }
        addresses.into_iter().map(|address| read(exported, address as usize)).collect()
    }

    proptest! {
        /// Every element gets to its place in a target of any strides, with its bits flipped, and no other byte changes.
        #[test]
        fn a_target_of_any_strides_is_filled(
            dims in prop::collection::vec((0i64..4, -5i64..6, -9i64..10), 0..4),
            dtype in prop::sample::select(&[DType::UINT8, DType::FLOAT32, DType::COMPLEX64][..]),
            pending in prop::sample::select(&[None, Some(Pending::Negation)][..]),
        ) {
            let side = |step: fn(&(i64, i64, i64)) -> i64| dims.iter().map(|dim| (dim.0, step(dim))).collect::<Vec<_>>();
            let (source, target) = (exported(dtype, &side(|dim| dim.1)), exported(dtype, &side(|dim| dim.2)));
            prop_assume!(!repeats(target.layout()));
            let source = source.with_pending(pending);
            let bits = flips(&source, &target);
            prop_assert_eq!(bits.is_none(), pending.is_some() && dtype == DType::UINT8);
            let bits = bits.unwrap_or(0);
            let flipped = |element: Vec<u8>| element.iter().zip(bits.to_le_bytes()).map(|(byte, flip)| byte ^ flip).collect();
            let expected: Vec<Vec<u8>> = elements(&source).into_iter().map(flipped).collect();
            let sum = |exported: &Export| whole(exported).iter().map(|byte| u64::from(*byte)).sum::<u64>();
            let others = |exported: &Export| sum(exported) - elements(exported).iter().flatten().map(|byte| u64::from(*byte)).sum::<u64>();
            let before = others(&target);
            copy_by_loop(&source, &target, bits);
            prop_assert_eq!(elements(&target), expected);
            prop_assert_eq!(others(&target), before, "the bytes between");
        }
    }

    #[test]
    fn a_copy_that_does_not_fit_into_memory_is_an_error() {
        let byte = 0u8;
        let start = (&raw const byte).addr();
        let layout = Layout::new(DType::UINT8, &[i64::MAX], Some(&[0]), 0).unwrap();
        // SAFETY: the view repeats one byte, which outlives the buffer.
        let memory = unsafe { Memory::new(Allocation::host(start..start + 1, Access::ReadOnly), ()) };
        let giant = Export::new(DType::UINT8, layout, memory).unwrap();
        assert_eq!(compact(giant, Order::RowMajor, 1, &host()).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
}
