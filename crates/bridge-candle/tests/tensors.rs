//! Tensors of candle out and in.

use bridge_candle::Candle;
use bridge_core::{
    Adapter, COPY_ALIGNMENT, CopiedBy, DType, Device, ErrorKind, HostOnly, Options, Order, Ordering, Plan, Reason,
    copied_by, copy_into, transfer,
};
use bridge_ndarray::{HostArray, NdArray};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType as Kind, Device as Place, Storage, Tensor, Var};
use ndarray::{Array2, Array3, Axis, array};
use std::sync::Arc;

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

fn candle() -> Candle {
    // SAFETY: the tests write to no tensor that another thread reads, and replace no storage.
    unsafe { Candle::new() }
}

/// An ordering with only core's copies, and one with those of bridge-cuda.
fn orderings() -> [Arc<dyn Ordering>; 2] {
    [Arc::new(HostOnly), Arc::clone(bridge_cuda::ordering())]
}

fn counted(shape: (usize, usize, usize)) -> Tensor {
    Tensor::arange(0i64, (shape.0 * shape.1 * shape.2) as i64, &Place::Cpu).unwrap().reshape(shape).unwrap()
}

fn address(tensor: &Tensor) -> usize {
    candle().export(tensor).unwrap().data()
}

#[test]
fn every_view_goes_out_in_place() {
    let base = counted((3, 4, 5));
    let views = [
        base.clone(),
        base.transpose(0, 2).unwrap(),
        base.narrow(1, 1, 2).unwrap().narrow(2, 3, 2).unwrap(),
        base.narrow(0, 1, 1).unwrap().broadcast_as((6, 4, 5)).unwrap(),
        base.unfold(2, 3, 2).unwrap(),
        base.flatten_all().unwrap().get(7).unwrap(),
    ];
    for view in views {
        let (seen, done) =
            transfer(&candle(), &ndarray(), &view, bridge_cuda::ordering(), &Options::default()).unwrap();
        assert_eq!((done.plan, done.bytes_copied), (Plan::ZeroCopy, 0));
        assert_eq!(seen.data(), address(&base) + 8 * view.layout().start_offset());
        let dims: Vec<i64> = view.dims().iter().map(|dim| *dim as i64).collect();
        assert_eq!(seen.layout().shape(), dims);
        let elements = view.flatten_all().unwrap().to_vec1::<i64>().unwrap();
        assert_eq!(seen.to_array::<i64>().unwrap().into_iter().collect::<Vec<_>>(), elements);
    }
}

#[test]
fn the_memory_outlives_the_tensor() {
    let tensor = counted((2, 3, 4));
    let (seen, _) = transfer(&candle(), &ndarray(), &tensor, bridge_cuda::ordering(), &Options::default()).unwrap();
    drop(tensor);
    assert_eq!(seen.to_array::<i64>().unwrap().sum(), 276);
}

#[test]
fn tensors_come_in_as_one_copy() {
    let mut reversed = Array3::from_shape_fn((3, 4, 5), |(i, j, k)| (100 * i + 10 * j + k) as f64);
    reversed.invert_axis(Axis(1));
    let elements: Vec<f64> = reversed.iter().copied().collect();
    let made = HostArray::from(reversed);
    for ordering in orderings() {
        for order in [Order::RowMajor, Order::ColumnMajor] {
            let options = Options::default().with_order(order);
            let (copy, done) = transfer(&ndarray(), &candle(), &made, &ordering, &options).unwrap();
            assert_eq!((done.bytes_copied, done.copied_by), (480, Some(CopiedBy::Host)));
            assert!(matches!(done.plan, Plan::Copy(Reason::MemoryNotOwned | Reason::Order)), "{:?}", done.plan);
            assert_eq!((copy.dims(), copy.dtype()), (&[3, 4, 5][..], Kind::F64));
            assert_eq!(copy.flatten_all().unwrap().to_vec1::<f64>().unwrap(), elements);
            let exported = candle().export(&copy).unwrap();
            assert!(exported.layout().follows(order) && exported.data().is_multiple_of(COPY_ALIGNMENT));
        }
        let exported = ndarray().export(&made).unwrap();
        let by = copied_by(&ndarray(), &candle(), &exported, &ordering, &Options::default());
        assert_eq!(by, CopiedBy::Host);
        let in_place = Options::in_place();
        let refused = transfer(&ndarray(), &candle(), &made, &ordering, &in_place).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::CopyNeeded);
        let text = refused.to_string();
        assert!(
            text.starts_with("candle cannot take the tensor in place because of memory that it does not own"),
            "{text}"
        );
    }
}

#[test]
fn tensors_without_elements_and_dimensions_come_in() {
    let (empty, scalar) = (HostArray::from(Array2::<u8>::zeros((0, 3))), HostArray::from(ndarray::arr0(7u8)));
    for ordering in orderings() {
        let arrive = |array| transfer(&ndarray(), &candle(), array, &ordering, &Options::default()).unwrap().0;
        assert_eq!(arrive(&empty).dims(), [0, 3]);
        assert_eq!(arrive(&scalar).to_scalar::<u8>().unwrap(), 7);
    }
}

/// The bits of every dtype are those that were sent: candle's own kernels copy them.
#[test]
fn every_dtype_converts_in_both_directions() {
    let kinds = [
        Kind::U8,
        Kind::U32,
        Kind::I16,
        Kind::I32,
        Kind::I64,
        Kind::BF16,
        Kind::F16,
        Kind::F32,
        Kind::F64,
        Kind::F8E4M3,
    ];
    assert_eq!(kinds.len(), candle().profile().dtypes.len());
    for kind in kinds {
        let made = Tensor::new(&[1f32, 2.0, 3.5, 100.0], &Place::Cpu).unwrap().to_dtype(kind).unwrap();
        for ordering in orderings() {
            let (copy, done) = transfer(&candle(), &candle(), &made, &ordering, &Options::default()).unwrap();
            assert_eq!(done.plan, Plan::Copy(Reason::MemoryNotOwned));
            assert_eq!((copy.dtype(), done.bytes_copied), (kind, 4 * kind.size_in_bytes()));
            let widened = |tensor: &Tensor| tensor.to_dtype(Kind::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(widened(&copy), widened(&made));
            assert_ne!(address(&copy), address(&made));
        }
    }
    // SAFETY: the call makes no tensor.
    let refused = unsafe { candle().empty(Device::CPU, DType::COMPLEX64, &[2], Order::RowMajor) }.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Dtype);
    // SAFETY: the call makes no tensor.
    let refused = unsafe { candle().empty(Device::cuda(0), DType::FLOAT32, &[2], Order::RowMajor) }.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::CopyNeeded);
    // SAFETY: the call makes no tensor.
    let refused = unsafe { candle().empty(Device::CPU, DType::FLOAT32, &[1 << 60], Order::RowMajor) }.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfMemory);
}

#[test]
fn a_tensor_of_candle_is_filled_in_place() {
    let (target, source) = (counted((1, 2, 3)), HostArray::from(array![[[9i64, 8, 7], [6, 5, 4]]]));
    copy_into(&ndarray(), &candle(), &source, &target, bridge_cuda::ordering()).unwrap();
    assert_eq!(target.flatten_all().unwrap().to_vec1::<i64>().unwrap(), [9, 8, 7, 6, 5, 4]);
}

#[test]
fn what_is_no_plain_memory_is_refused() {
    let var = Var::from_vec(vec![1f32, 2.0], 2, &Place::Cpu).unwrap();
    let made_of_it = (var.as_tensor() * 2.0).unwrap();
    let short = Storage::Cpu(CpuStorage::F32(vec![0.0; 5]));
    let short = Tensor::from_storage(short, (2, 3), BackpropOp::none(), false);
    let small = Tensor::from_storage(Storage::Cpu(CpuStorage::F4(vec![0; 2])), 2, BackpropOp::none(), false);
    let table = [
        (var.as_tensor(), ErrorKind::RequiresGrad, "call .detach() first"),
        (&made_of_it, ErrorKind::RequiresGrad, "call .detach() first"),
        (&short, ErrorKind::Layout, "check its strides, or make it again"),
        (&small, ErrorKind::Dtype, "cast the tensor first"),
    ];
    for (tensor, kind, advice) in table {
        let refused = candle().export(tensor).unwrap_err();
        assert_eq!(refused.kind(), kind, "{refused}");
        assert!(refused.to_string().ends_with(advice), "{refused}");
    }
    assert_eq!(address(&var.as_detached_tensor()), address(&var.as_tensor().detach()));
}
