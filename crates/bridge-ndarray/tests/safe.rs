//! What a program does without `unsafe`: nothing that it can call writes to memory that another one reads.
#![forbid(unsafe_code)]

use bridge_core::{Access, DType, ErrorKind, HostOnly, Options, Ordering, Plan, Reason, Transfer, copy_into, transfer};
use bridge_ndarray::{HostArray, NdArray};
use ndarray::{ArcArray2, Array2};
use std::sync::Arc;

fn ordering() -> Arc<dyn Ordering> {
    Arc::new(HostOnly)
}

fn across(array: &HostArray, options: &Options) -> bridge_core::Result<(HostArray, Transfer)> {
    transfer(&NdArray::read_only(), &NdArray::read_only(), array, &ordering(), options)
}

fn numbers() -> Array2<f32> {
    Array2::from_shape_fn((3, 4), |(row, column)| (4 * row + column) as f32)
}

#[test]
fn a_shared_array_is_a_view_in_place() {
    let shared: ArcArray2<f32> = numbers().into_shared();
    let columns = shared.clone().reversed_axes();
    let (seen, done) = across(&columns.into(), &Options::in_place()).unwrap();
    assert_eq!((done.plan, done.bytes_copied, seen.access()), (Plan::ZeroCopy, 0, Access::Immutable));
    let view = seen.immutable_view::<f32>().unwrap();
    assert_eq!((view.as_ptr(), view), (shared.as_ptr(), numbers().t().into_dyn()));
    let elements: Arc<[i64]> = Arc::from([1, 2, 3]);
    let (seen, _) = across(&elements.clone().into(), &Options::in_place()).unwrap();
    drop(elements);
    assert_eq!(seen.immutable_view::<i64>().unwrap().as_slice().unwrap(), [1, 2, 3]);
}

#[test]
fn a_write_to_a_shared_array_is_one_to_a_copy() {
    let mut shared: ArcArray2<f32> = numbers().into_shared();
    let (seen, _) = across(&shared.clone().into(), &Options::in_place()).unwrap();
    shared[[0, 0]] = 7.0;
    assert_eq!(seen.immutable_view::<f32>().unwrap()[[0, 0]], 0.0);
}

#[test]
fn memory_that_others_may_write_to_is_copied() {
    let array = HostArray::from(numbers());
    let refused = array.immutable_view::<f32>().map(drop).unwrap_err();
    assert!(refused.kind() == ErrorKind::Argument && refused.to_string().contains("to_array()"), "{refused}");
    let (copy, done) = across(&array, &Options::default()).unwrap();
    assert_eq!((done.plan, copy.access()), (Plan::Copy(Reason::Mutable), Access::Immutable));
    assert_eq!(copy.immutable_view::<f32>().unwrap(), numbers().into_dyn());
    assert_ne!(copy.data(), array.data());
    let refused = across(&array, &Options::in_place()).map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::CopyNeeded);
    assert!(refused.to_string().contains("memory that others may write to"), "{refused}");
}

#[test]
fn nothing_is_written_to() {
    let (source, shared) = (HostArray::from(numbers()), HostArray::from(numbers().into_shared()));
    let adapter = NdArray::read_only();
    for target in [&source.clone(), &shared] {
        let refused = copy_into(&adapter, &adapter, &source, target, &ordering()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ReadOnly, "{refused}");
    }
}

#[test]
fn bytes_are_not_taken_for_bools() {
    let array = HostArray::from(Array2::from_elem((2, 2), true).into_shared());
    assert_eq!(array.dtype(), DType::BOOL);
    assert_eq!(array.immutable_view::<bool>().map(drop).unwrap_err().kind(), ErrorKind::Dtype);
    assert!(array.to_array::<bool>().unwrap().iter().all(|element| *element));
}
