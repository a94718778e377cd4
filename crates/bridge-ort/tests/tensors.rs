//! Tensors of ONNX Runtime out and in, through a session and its IO binding. Where no library is named and none is found,
//! each test says so and ends.

mod model;

use bridge_core::{
    Access, Adapter, COPY_ALIGNMENT, CopiedBy, DType, Device, DeviceKind, ErrorKind, Options, Order, Plan, Reason,
    Stream, copy_into, stats, transfer,
};
use bridge_cuda::ordering;
use bridge_ndarray::{HostArray, NdArray};
use bridge_ort::Ort;
use ndarray::{Array2, array};
use ort::AsPointer;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::Session;
use ort::value::{DynTensor, Tensor, TensorElementType};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

/// Counts of leases are those of the process: one test at a time. `None` without the library.
fn runtime() -> Option<(Ort, MutexGuard<'static, ()>)> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the tests write to no tensor that another thread reads.
    match unsafe { Ort::new() } {
        Ok(ort) => Some((ort, guard)),
        Err(error) if error.kind() == ErrorKind::Missing && std::env::var_os("ORT_DYLIB_PATH").is_none() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn arrive(ort: &Ort, array: &HostArray) -> (Arc<DynTensor>, Plan) {
    let (tensor, done) = transfer(&ndarray(), ort, array, ordering(), &Options::default()).unwrap();
    (tensor, done.plan)
}

/// Its address may be any, and `ort` makes a slice of it.
#[test]
fn an_empty_tensor_is_an_empty_slice_of_every_dtype() {
    let Some((ort, _guard)) = runtime() else { return };
    macro_rules! empty {
        ($($element:ty),*) => {$({
            let (tensor, _) = arrive(&ort, &HostArray::from(Array2::<$element>::default((0, 3))));
            let (shape, elements) = tensor.try_extract_tensor::<$element>().unwrap();
            assert_eq!((&**shape, elements, elements.as_ptr().addr() % COPY_ALIGNMENT), (&[0, 3][..], &[][..], 0));
        })*};
    }
    empty!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, bool);
}

#[test]
fn tensors_go_in_and_out_of_a_binding_in_place() {
    let Some((ort, _guard)) = runtime() else { return };
    let mut session = Session::builder().unwrap().commit_from_memory(&model::doubling()).unwrap();
    let input = HostArray::from(array![[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    let result = HostArray::from(Array2::<f32>::zeros((2, 3)));
    let before = stats();
    let ((x, plan), (y, _)) = (arrive(&ort, &input), arrive(&ort, &result));
    assert_eq!((plan, x.data_ptr().addr()), (Plan::ZeroCopy, input.data()));

    let mut binding = session.create_binding().unwrap();
    binding.bind_input("x", &x).unwrap();
    binding.bind_output("y", Arc::into_inner(y).unwrap()).unwrap();
    // The binding keeps the memory of both.
    drop(x);
    assert_eq!(stats().released - before.released, 0);
    drop(session.run_binding(&binding).unwrap());
    assert_eq!(result.to_array::<f32>().unwrap(), array![[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]].into_dyn());
    drop((binding, session));
    let after = stats();
    assert_eq!((after.leased - before.leased, after.released - before.released), (2, 2));
}

#[test]
fn an_output_goes_out_in_place_and_outlives_its_session() {
    let Some((ort, _guard)) = runtime() else { return };
    let mut session = Session::builder().unwrap().commit_from_memory(&model::doubling()).unwrap();
    let (x, _) = arrive(&ort, &HostArray::from(array![[0.5f32, -1.0]]));
    let mut outputs = session.run(ort::inputs!["x" => &*x]).unwrap();
    let y: Arc<DynTensor> = Arc::new(outputs.remove("y").unwrap().downcast().unwrap());
    drop(outputs);
    let address = y.data_ptr().addr();
    let (seen, done) = transfer(&ort, &ndarray(), &y, ordering(), &Options::default()).unwrap();
    assert_eq!((done.plan, seen.data(), seen.access()), (Plan::ZeroCopy, address, Access::ReadWrite));
    drop((session, y, x));
    assert_eq!(seen.to_array::<f32>().unwrap(), array![[1.0, -2.0]].into_dyn());
}

/// The next run overwrites what a view of the last one shows.
#[test]
fn a_binding_writes_to_the_same_outputs_in_each_run() {
    let Some((ort, _guard)) = runtime() else { return };
    let mut session = Session::builder().unwrap().commit_from_memory(&model::doubling()).unwrap();
    let mut binding = session.create_binding().unwrap();
    binding.bind_output_to_device("y", &MemoryInfo::default()).unwrap();
    let mut run = |number: f32| {
        let (x, _) = arrive(&ort, &HostArray::from(array![[number]]));
        binding.bind_input("x", &x).unwrap();
        let mut outputs = session.run_binding(&binding).unwrap();
        let y: Arc<DynTensor> = Arc::new(outputs.remove("y").unwrap().downcast().unwrap());
        transfer(&ort, &ndarray(), &y, ordering(), &Options::default()).unwrap().0
    };
    let first = run(1.0);
    assert_eq!(first.to_array::<f32>().unwrap(), array![[2.0]].into_dyn());
    let second = run(3.0);
    assert_eq!((first.data(), first.to_array::<f32>().unwrap()), (second.data(), array![[6.0]].into_dyn()));
}

/// Returns a tensor over these elements, of which ONNX Runtime is told that they are in such memory.
fn tensor_in(place: AllocationDevice, elements: &[f32]) -> Arc<DynTensor> {
    let info = MemoryInfo::new(place, 0, AllocatorType::Device, MemoryType::Default).unwrap();
    let (shape, mut value) = ([elements.len() as i64], ptr::null_mut());
    // SAFETY: the shape and the memory are as long as stated, the result is writable, and the elements outlive the value.
    unsafe {
        let made = (ort::api().CreateTensorWithDataAsOrtValue)(
            info.ptr(),
            elements.as_ptr().cast_mut().cast(),
            size_of_val(elements),
            shape.as_ptr(),
            shape.len(),
            TensorElementType::Float32.into(),
            &mut value,
        );
        ort::Error::<()>::result_from_status(made).unwrap();
        Arc::new(DynTensor::from_ptr(NonNull::new(value).unwrap(), None))
    }
}

/// Pinned memory is that of the host, though ONNX Runtime calls it one of a GPU. Memory of other devices is refused.
#[test]
fn pinned_tensors_are_exported_as_host_memory() {
    let Some((ort, _guard)) = runtime() else { return };
    let elements = [1.0f32, 2.0];
    let tensor = tensor_in(AllocationDevice::CUDA_PINNED, &elements);
    let exported = ort.export(&tensor).unwrap();
    assert_eq!(
        (exported.device(), exported.data(), exported.buffer().stream()),
        (Device::CPU, elements.as_ptr().addr(), None)
    );
    let elsewhere = tensor_in(AllocationDevice::DIRECTML, &elements);
    assert_eq!(ort.export(&elsewhere).unwrap_err().kind(), ErrorKind::Device);
}

#[test]
fn strided_tensors_are_copied_once_into_memory_of_onnx_runtime() {
    let Some((ort, _guard)) = runtime() else { return };
    let columns = HostArray::from(array![[1i64, 2], [3, 4], [5, 6]].reversed_axes());
    let before = stats();
    let (tensor, done) = transfer(&ndarray(), &ort, &columns, ordering(), &Options::default()).unwrap();
    assert_eq!((done.plan, done.copied_by), (Plan::Copy(Reason::Strides), Some(CopiedBy::Host)));
    let (shape, elements) = tensor.try_extract_tensor::<i64>().unwrap();
    assert_eq!((&shape[..], elements), (&[2i64, 3][..], &[1, 3, 5, 2, 4, 6][..]));
    assert!(tensor.data_ptr().addr().is_multiple_of(COPY_ALIGNMENT));
    let after = stats();
    assert_eq!(after.leased - before.leased, after.released - before.released, "nothing of the array is kept");
    copy_into(&ndarray(), &ort, &HostArray::from(array![[7i64, 7, 7], [8, 8, 8]]), &tensor, ordering()).unwrap();
    assert_eq!(tensor.try_extract_tensor::<i64>().unwrap().1, [7, 7, 7, 8, 8, 8]);
}

#[test]
fn every_dtype_of_the_profile_converts_in_both_directions() {
    let Some((ort, _guard)) = runtime() else { return };
    let dtypes = &ort.profile().dtypes;
    for dtype in [DType::BOOL, DType::UINT8, DType::INT64, DType::FLOAT16, DType::BFLOAT16, DType::FLOAT64] {
        assert!(dtypes.contains(&dtype), "{dtype}");
    }
    for dtype in dtypes {
        // SAFETY: nothing reads the elements.
        let made = unsafe { ort.empty(Device::CPU, *dtype, &[2, 3], Order::RowMajor) }.unwrap();
        let before = stats();
        let (same, done) = transfer(&ort, &ort, &made, ordering(), &Options::default()).unwrap();
        assert_eq!((done.plan, same.data_ptr()), (Plan::ZeroCopy, made.data_ptr()), "{dtype}");
        assert_eq!(ort.export(&same).unwrap().dtype(), *dtype);
        drop((made, same));
        assert_eq!(stats().released - before.released, 1, "{dtype}");
    }
}

#[test]
fn tensors_without_elements_and_dimensions_convert() {
    let Some((ort, _guard)) = runtime() else { return };
    let (empty, _) = arrive(&ort, &HostArray::from(Array2::<u8>::zeros((0, 3))));
    assert_eq!(&empty.shape()[..], [0, 3]);
    let (scalar, _) = arrive(&ort, &HostArray::from(ndarray::arr0(7u16)));
    assert_eq!(&scalar.shape()[..], [0i64; 0]);
    let (back, _) = transfer(&ort, &ndarray(), &scalar, ordering(), &Options::default()).unwrap();
    assert_eq!(back.to_array::<u16>().unwrap().into_raw_vec_and_offset().0, [7]);
}

#[test]
fn what_has_no_counterpart_is_refused() {
    let Some((ort, _guard)) = runtime() else { return };
    let words = Arc::new(Tensor::from_string_array(([1usize], &["word"][..])).unwrap().upcast());
    assert_eq!(ort.export(&words).unwrap_err().kind(), ErrorKind::Dtype);
    // SAFETY: the call makes no tensor.
    let kind = |dtype, device, order| unsafe { ort.empty(device, dtype, &[2, 3], order) }.map(drop).unwrap_err().kind();
    assert_eq!(kind(DType::COMPLEX32, Device::CPU, Order::RowMajor), ErrorKind::Dtype);
    assert_eq!(kind(DType::FLOAT32, Device::cuda(0), Order::RowMajor), ErrorKind::CopyNeeded);
    assert_eq!(kind(DType::FLOAT32, Device::CPU, Order::ColumnMajor), ErrorKind::CopyNeeded);
    // SAFETY: the elements are numbers, of any bits.
    let both = unsafe { ort.empty(Device::CPU, DType::FLOAT32, &[1, 6], Order::ColumnMajor) }.unwrap();
    assert_eq!(&both.shape()[..], [1, 6], "it is row-major as well");
}

/// Its memory may be that of an earlier tensor, and safe code reads it.
#[test]
fn a_fresh_tensor_has_zeros() {
    let Some((ort, _guard)) = runtime() else { return };
    let source = HostArray::from(ndarray::Array1::<u8>::from_elem(64, 7));
    for _ in 0..2 {
        // SAFETY: the elements are numbers, of any bits.
        let empty = || unsafe { ort.empty(Device::CPU, DType::UINT8, &[64], Order::RowMajor) }.unwrap();
        let made: Vec<_> = (0..100).map(|_| empty()).collect();
        for tensor in &made {
            assert_eq!(tensor.try_extract_tensor::<u8>().unwrap().1, [0; 64]);
            copy_into(&ndarray(), &ort, &source, tensor, ordering()).unwrap();
        }
    }
}

/// The compute stream of one device orders its tensors, and no other's.
#[test]
fn the_compute_stream_is_that_of_its_device() {
    let Some((host, _guard)) = runtime() else { return };
    // SAFETY: no driver sees this stream.
    let stream = unsafe { Stream::from_handle(0x7000) };
    // SAFETY: no tensor is converted.
    let make = |device| unsafe { Ort::with_compute_stream(device, stream) };
    assert_eq!(make(Device::CPU).map(drop).unwrap_err().kind(), ErrorKind::Device);
    // SAFETY: no tensor is converted.
    let per_thread = unsafe { Ort::with_compute_stream(Device::cuda(1), Stream::PER_THREAD) };
    assert_eq!(per_thread.map(drop).unwrap_err().kind(), ErrorKind::Argument);
    let ort = make(Device::cuda(1)).unwrap();
    assert_eq!(ort.profile().devices, [DeviceKind::CPU, DeviceKind::CUDA]);
    assert_eq!(ort.consumer().current_stream(Device::cuda(1)).unwrap(), Some(stream));
    assert_eq!(ort.consumer().current_stream(Device::CPU).unwrap(), None);
    assert_eq!(ort.consumer().current_stream(Device::cuda(0)).unwrap_err().kind(), ErrorKind::Device);
    assert_eq!(host.consumer().current_stream(Device::cuda(1)).unwrap_err().kind(), ErrorKind::Device);
    assert_eq!(host.profile().devices, [DeviceKind::CPU]);
    let (one, other) = (host.consumer(), ort.consumer());
    assert!(ptr::eq(one.views(), other.views()), "a view is known to every adapter");
}

#[test]
fn a_copy_that_does_not_fit_is_out_of_memory() {
    let Some((ort, _guard)) = runtime() else { return };
    // SAFETY: the call makes no tensor.
    let refused = unsafe { ort.empty(Device::CPU, DType::FLOAT32, &[1 << 45], Order::RowMajor) }.map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfMemory, "{refused}");
}
