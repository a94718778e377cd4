//! The four verbs through the facade, on the host, with the feature `cuda` and without it.
#![cfg(feature = "dlpack")]

use std::ptr::with_exposed_provenance_mut;
use truebridge::dlpack::{DLPack, Tensor};
use truebridge::prelude::*;
use truebridge::{DType, Order};

/// Returns the adapter.
fn dlpack() -> DLPack {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { DLPack::host() }
}

fn elements(tensor: &Tensor) -> impl Iterator<Item = *mut i32> {
    let first: *mut i32 = with_exposed_provenance_mut(tensor.data());
    // SAFETY: the tensor has so many elements of int32, one after the other.
    (0..tensor.layout().numel()).map(move |i| unsafe { first.add(i) })
}

fn write(tensor: &Tensor, values: impl Iterator<Item = i32>) {
    // SAFETY: the memory is writable, and the tests use it on one thread. Here and below.
    elements(tensor).zip(values).for_each(|(element, value)| unsafe { element.write(value) });
}

/// Returns the elements of a tensor that was written, in the order of its memory.
fn read(tensor: &Tensor) -> Vec<i32> {
    // SAFETY: see above.
    elements(tensor).map(|element| unsafe { element.read() }).collect()
}

fn counted(dlpack: &DLPack, shape: &[i64]) -> Tensor {
    // SAFETY: the elements are numbers, of any bits.
    let tensor = unsafe { dlpack.empty(Device::CPU, DType::INT32, shape, Order::RowMajor) }.expect("there is memory");
    write(&tensor, 0..);
    tensor
}

#[test]
fn plan_transfer_transfer_all_copy_into() -> truebridge::Result<()> {
    let dlpack = dlpack();
    let tensor = counted(&dlpack, &[2, 3]);

    let column_major = Options::default().with_order(Order::ColumnMajor);
    assert_eq!(plan(&dlpack.export(&tensor)?, dlpack.profile(), &Options::default())?, Plan::ZeroCopy);
    assert!(matches!(plan(&dlpack.export(&tensor)?, dlpack.profile(), &column_major)?, Plan::Copy(_)));

    let (view, done) = transfer(&dlpack, &dlpack, &tensor, ordering(), &Options::default())?;
    assert_eq!((view.data(), done.bytes_copied), (tensor.data(), 0));
    let (copy, done) = transfer(&dlpack, &dlpack, &tensor, ordering(), &column_major)?;
    assert_eq!((read(&copy), done.bytes_copied), (vec![0, 3, 1, 4, 2, 5], 24));

    let both: [(&dyn Adapter<Tensor = Tensor>, _); 2] = [(&dlpack, &tensor), (&dlpack, &copy)];
    let converted = transfer_all(&both, &dlpack, ordering(), &Options::default()).map_err(|failed| failed.error)?;
    let addresses: Vec<_> = converted.iter().map(|(tensor, _)| tensor.data()).collect();
    assert_eq!(addresses, [tensor.data(), copy.data()]);

    let target = counted(&dlpack, &[2, 3]);
    write(&target, std::iter::repeat(-1));
    copy_into(&dlpack, &dlpack, &copy, &target, ordering())?;
    assert_eq!(read(&target), [0, 1, 2, 3, 4, 5]);
    Ok(())
}
