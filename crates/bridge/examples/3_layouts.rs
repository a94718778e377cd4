//! 3. Dimensions and orders: a permuted view costs nothing, and one copy makes any order.

use truebridge::Order;
use truebridge::dlpack::DLPack;
use truebridge::prelude::*;

pub(crate) fn main() -> truebridge::Result<()> {
    // SAFETY: this program uses the memory of a tensor on one thread at a time.
    let (ndarray, dlpack) = unsafe { (NdArray::new(), DLPack::host()) };
    let nchw = HostArray::from(ndarray::Array4::<u8>::from_shape_fn((2, 3, 4, 5), |(n, c, ..)| (10 * n + c) as u8));

    // Strides are in elements. Row-major NCHW, read as NHWC:
    let nhwc = Options::default().with_permute(Permutation::new(&[0, 2, 3, 1])?);
    let (view, done) = transfer(&ndarray, &dlpack, &nchw, ordering(), &nhwc)?;
    assert_eq!((view.layout().shape(), view.layout().strides()), (&[2, 4, 5, 3][..], &[60, 5, 1, 20][..]));
    assert_eq!(done.bytes_copied, 0);

    // The same with its elements in that order: one copy does both.
    let (compact, done) = transfer(&ndarray, &dlpack, &nchw, ordering(), &nhwc.with_order(Order::RowMajor))?;
    assert_eq!((compact.layout().strides(), done.bytes_copied), (&[60, 15, 3, 1][..], 2 * 3 * 4 * 5));

    // Into a tensor that exists, whatever its strides.
    let existing = HostArray::from(ndarray::Array4::<u8>::zeros((2, 4, 5, 3)));
    copy_into(&dlpack, &ndarray, &view, &existing, ordering())?;
    assert_eq!(existing.to_array::<u8>()?[[1, 0, 0, 2]], 12);
    println!("{} → {}", view.layout(), compact.layout());
    Ok(())
}
