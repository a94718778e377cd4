//! candle on a CUDA device. Without one, each test says so and ends.

use bridge_candle::Candle;
use bridge_core::{
    Adapter, COPY_ALIGNMENT, CopiedBy, DType, Device, ErrorKind, Options, Order, Plan, Reason, Reuse, Stream, Transfer,
    stats, transfer,
};
use bridge_cudarc::{Cudarc, DeviceArray};
use bridge_ndarray::{HostArray, NdArray};
use candle_core::{CudaDevice, DType as Kind, Device as Place, Tensor, Var};
use cudarc::driver::{CudaContext, CudaStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

const GPU: Device = Device::cuda(0);
const ELEMENTS: usize = 1 << 20;
const ROUNDS: u8 = 20;

/// candle and `cudarc`, each in its own stream.
struct Sides {
    place: Place,
    candle: Candle,
    cudarc: Cudarc,
    /// Leases are counted per process: one test at a time.
    _alone: MutexGuard<'static, ()>,
}

impl Sides {
    /// `None` without a device.
    fn new() -> Option<Self> {
        Self::on(|| Place::new_cuda_with_stream(0))
    }

    fn on(make: impl FnOnce() -> candle_core::Result<Place>) -> Option<Self> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(missing) = bridge_cuda::available() {
            println!("skipped: {missing}");
            return None;
        }
        let place = make().unwrap();
        let cudarc = Cudarc::new(CudaContext::new(0).unwrap().new_stream().unwrap()).unwrap();
        Some(Self { candle: adapter(&place), place, cudarc, _alone: alone })
    }

    fn stream(&self) -> Arc<CudaStream> {
        device(&self.place).cuda_stream()
    }

    /// Numbers that candle computes in its stream, after all work there.
    fn made(&self, value: u8) -> Tensor {
        let zeros = Tensor::zeros(ELEMENTS, Kind::F32, &self.place).unwrap();
        zeros.affine(1.0, value.into()).unwrap()
    }

    fn out(&self, tensor: &Tensor) -> (DeviceArray, Transfer) {
        transfer(&self.candle, &self.cudarc, tensor, bridge_cuda::ordering(), &Options::default()).unwrap()
    }

    fn back(&self, array: &DeviceArray, options: &Options) -> (Tensor, Transfer) {
        transfer(&self.cudarc, &self.candle, array, bridge_cuda::ordering(), options).unwrap()
    }

    /// Numbers of `cudarc`, after all work in its stream.
    fn array(&self, value: u8) -> DeviceArray {
        let slice = self.cudarc.stream().clone_htod(&vec![f32::from(value); ELEMENTS]).unwrap();
        DeviceArray::from_slice(slice, &[ELEMENTS as i64], None, 0).unwrap()
    }

    fn read(&self, array: &DeviceArray) -> Vec<f32> {
        self.cudarc.stream().clone_dtoh(&array.read::<f32>().unwrap().view()).unwrap()
    }
}

fn adapter(place: &Place) -> Candle {
    // SAFETY: the tests replace no storage, and use a converted tensor only in the stream of its device.
    unsafe { Candle::with_cuda(device(place)) }
}

fn device(place: &Place) -> &CudaDevice {
    place.as_cuda_device().unwrap()
}

fn handle(stream: &CudaStream) -> Stream {
    // SAFETY: the caller keeps the stream.
    unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) }
}

/// Work of some milliseconds.
fn delay(stream: &Arc<CudaStream>) {
    const BYTES: usize = 256 << 20;
    let (from, mut to) = (stream.alloc_zeros::<u8>(BYTES).unwrap(), stream.alloc_zeros::<u8>(BYTES).unwrap());
    (0..40).for_each(|_| stream.memcpy_dtod(&from, &mut to).unwrap());
}

fn all(elements: &[f32], value: u8) -> bool {
    elements.len() == ELEMENTS && elements.iter().all(|element| *element == f32::from(value))
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn candle_goes_out_in_place_and_in_order() {
    let Some(sides) = Sides::new() else { return };
    for round in 1..=ROUNDS {
        delay(&sides.stream());
        let tensor = sides.made(round);
        let exported = sides.candle.export(&tensor).unwrap();
        assert_eq!((exported.device(), exported.buffer().stream()), (GPU, Some(handle(&sides.stream()))));
        assert_eq!(exported.buffer().reuse(), Reuse::InStreamOrder);
        let address = exported.data() as u64;
        drop(exported);
        let (array, done) = sides.out(&tensor);
        assert_eq!((done.plan, done.bytes_copied, array.data()), (Plan::ZeroCopy, 0, address));
        assert_eq!(done.ordered, Some((handle(&sides.stream()), handle(sides.cudarc.stream()))));
        drop(tensor);
        assert!(all(&sides.read(&array), round), "stale in round {round}");
    }
}

#[test]
fn views_keep_their_strides_and_their_offset() {
    let Some(sides) = Sides::new() else { return };
    let base = Tensor::arange(0f32, 60.0, &sides.place).unwrap().reshape((3, 4, 5)).unwrap();
    let (whole, _) = sides.out(&base);
    let view = base.transpose(0, 2).unwrap().narrow(0, 1, 3).unwrap();
    let (array, done) = sides.out(&view);
    assert_eq!((done.plan, array.data()), (Plan::ZeroCopy, whole.data() + 4));
    assert_eq!((array.layout().shape(), array.layout().strides()), (&[3, 4, 3][..], &[1, 5, 20][..]));
    let (copy, done) = sides.back(&array, &Options::default());
    assert_eq!(done.plan, Plan::Copy(Reason::MemoryNotOwned));
    assert_eq!(numbers(&copy), numbers(&view));
}

#[test]
fn tensors_come_in_as_one_copy_on_the_device_in_order_and_without_a_wait() {
    let Some(sides) = Sides::new() else { return };
    let mut pending = 0;
    for round in 1..=ROUNDS {
        delay(sides.cudarc.stream());
        let array = sides.array(round);
        delay(sides.cudarc.stream());
        let late = sides.cudarc.stream().record_event(None).unwrap();
        let (tensor, done) = sides.back(&array, &Options::default());
        pending += usize::from(!late.is_complete());
        assert_eq!((done.plan, done.bytes_copied), (Plan::Copy(Reason::MemoryNotOwned), 4 * ELEMENTS));
        assert_eq!(done.copied_by, Some(CopiedBy::Kernels));
        assert_eq!(done.ordered, Some((handle(sides.cudarc.stream()), handle(&sides.stream()))));
        assert!(tensor.device().same_device(&sides.place), "candle joins it with tensors of the device");
        assert!(all(&numbers(&tensor), round), "stale in round {round}");
    }
    assert!(pending > 0, "the host has waited in every round");
    let refused = Options::in_place();
    let refused = transfer(&sides.cudarc, &sides.candle, &sides.array(1), bridge_cuda::ordering(), &refused);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::CopyNeeded);
}

/// The memory of a dropped tensor is not reused by candle while another stream still reads it.
#[test]
fn memory_returns_after_its_readers() {
    let Some(sides) = Sides::new() else { return };
    let stream = sides.cudarc.stream();
    // Leases of the tests before this one are released a moment later.
    while stats().leased > stats().released {
        std::thread::yield_now();
    }
    let before = stats();
    for round in 1..=ROUNDS {
        let tensor = sides.made(7);
        let (array, _) = sides.out(&tensor);
        let mut copy = stream.alloc_zeros::<f32>(ELEMENTS).unwrap();
        delay(stream);
        let reading = array.read::<f32>().unwrap();
        stream.memcpy_dtod(&reading.view(), &mut copy).unwrap();
        drop(reading);
        drop((tensor, array));
        // The pool has the block again, and candle overwrites it.
        let reused: Vec<_> = (0..8).map(|_| sides.made(9)).collect();
        assert!(all(&stream.clone_dtoh(&copy).unwrap(), 7), "overwritten in round {round}");
        drop(reused);
    }
    let (after, rounds) = (stats(), u64::from(ROUNDS));
    let changes = (after.leased - before.leased, after.released - before.released, after.leaked - before.leaked);
    assert_eq!(changes, (rounds, rounds, 0));
}

/// The producer's memory is not reused while candle's stream has still to copy it.
#[test]
fn what_came_in_is_whole_though_its_source_was_dropped_at_once() {
    let Some(sides) = Sides::new() else { return };
    for round in 1..=ROUNDS {
        let array = sides.array(7);
        delay(&sides.stream());
        let (tensor, _) = sides.back(&array, &Options::default());
        drop(array);
        let reused: Vec<_> = (0..8).map(|_| sides.array(9)).collect();
        assert!(all(&numbers(&tensor), 7), "overwritten in round {round}");
        drop(reused);
    }
}

#[test]
fn candle_sees_what_was_written_through_a_view() {
    let Some(sides) = Sides::new() else { return };
    let tensor = sides.made(1);
    let (mut array, _) = sides.out(&tensor);
    delay(sides.cudarc.stream());
    let elements = vec![5.0f32; ELEMENTS];
    sides.cudarc.stream().memcpy_htod(&elements, &mut array.write::<f32>().unwrap().view()).unwrap();
    // The drop makes candle's stream wait.
    drop(array);
    assert!(all(&numbers(&tensor), 5));
}

/// A device in the default stream of each thread: tensors are written on one, exported on another, dropped on a third.
#[test]
fn threads_with_default_streams_of_their_own_are_ordered() {
    let Some(sides) = Sides::on(|| Place::new_cuda(0)) else { return };
    assert_eq!(handle(&sides.stream()), Stream::PER_THREAD);
    let elsewhere = |body: &mut (dyn FnMut() + Send)| {
        std::thread::scope(|scope| {
            scope.spawn(body);
        });
    };
    let before = stats();
    for round in 1..=ROUNDS {
        let mut tensor = None;
        elsewhere(&mut || {
            delay(&sides.stream());
            tensor = Some(sides.made(round));
        });
        let tensor = tensor.unwrap();
        let exported = sides.candle.export(&tensor).unwrap();
        assert_eq!((exported.buffer().stream(), exported.buffer().reuse()), (Some(Stream::LEGACY), Reuse::Unknown));
        drop(exported);
        let (array, done) = sides.out(&tensor);
        assert_eq!(done.ordered, Some((Stream::LEGACY, handle(sides.cudarc.stream()))));
        assert!(all(&sides.read(&array), round), "stale in round {round}");
        // candle still uses the tensor here, and drops it; the last reference is dropped elsewhere.
        delay(&sides.stream());
        let copy = tensor.affine(1.0, 0.0).unwrap();
        drop(tensor);
        let mut array = Some(array);
        elsewhere(&mut || drop(array.take()));
        let mut reused = Vec::new();
        elsewhere(&mut || reused.extend((0..8).map(|_| sides.made(99))));
        assert!(all(&numbers(&copy), round), "overwritten in round {round}");
        let (back, _) = sides.back(&sides.array(round), &Options::default());
        assert!(all(&numbers(&back), round));
    }
    assert_eq!(stats().leaked, before.leaked);
}

#[test]
fn every_dtype_converts_in_both_directions_and_orders() {
    let Some(sides) = Sides::new() else { return };
    let kinds = [
        (Kind::U8, DType::UINT8),
        (Kind::U32, DType::UINT32),
        (Kind::I16, DType::INT16),
        (Kind::I32, DType::INT32),
        (Kind::I64, DType::INT64),
        (Kind::BF16, DType::BFLOAT16),
        (Kind::F16, DType::FLOAT16),
        (Kind::F32, DType::FLOAT32),
        (Kind::F64, DType::FLOAT64),
        (Kind::F8E4M3, DType::FLOAT8_E4M3FN),
    ];
    assert_eq!(kinds.len(), sides.candle.profile().dtypes.len());
    for (kind, dtype) in kinds {
        // candle casts on the host, and copies to the device.
        let host = Tensor::new(&[[1f32, 2.0, 3.5], [100.0, 0.0, 7.0]], &Place::Cpu).unwrap().to_dtype(kind).unwrap();
        let (array, done) = sides.out(&host.to_device(&sides.place).unwrap());
        assert_eq!((done.plan, array.dtype()), (Plan::ZeroCopy, dtype));
        for order in [Order::RowMajor, Order::ColumnMajor] {
            let (copy, _) = sides.back(&array, &Options::default().with_order(order));
            let exported = sides.candle.export(&copy).unwrap();
            assert!(exported.layout().follows(order) && exported.data().is_multiple_of(COPY_ALIGNMENT));
            assert_eq!(copy.dtype(), kind);
            let widened =
                |tensor: &Tensor| numbers(&tensor.to_device(&Place::Cpu).unwrap().to_dtype(Kind::F32).unwrap());
            assert_eq!(widened(&copy), widened(&host));
        }
    }
    let slice = sides.cudarc.stream().clone_htod(&[1i8, 2]).unwrap();
    let missing = DeviceArray::from_slice(slice, &[2], None, 0).unwrap();
    let refused = transfer(&sides.cudarc, &sides.candle, &missing, bridge_cuda::ordering(), &Options::default());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Dtype);
}

#[test]
fn tensors_without_elements_and_dimensions_convert() {
    let Some(sides) = Sides::new() else { return };
    let slice = |shape: &[i64]| {
        let slice = sides.cudarc.stream().clone_htod(&[3.0f32]).unwrap();
        DeviceArray::from_slice(slice, shape, None, 0).unwrap()
    };
    let (empty, _) = sides.back(&slice(&[0, 3]), &Options::default());
    assert_eq!(empty.dims(), [0, 3]);
    assert_eq!(sides.out(&empty).0.layout().shape(), [0, 3]);
    let (scalar, _) = sides.back(&slice(&[]), &Options::default());
    assert_eq!(scalar.to_scalar::<f32>().unwrap(), 3.0);
}

#[test]
fn tensors_move_between_host_and_device_where_the_caller_says_so() {
    let Some(sides) = Sides::new() else { return };
    let made = HostArray::from(ndarray::array![[1.0f32, 2.0], [3.0, 4.0]]);
    let to = |device| Options::default().with_device(device);
    let (tensor, done) = transfer(&ndarray(), &sides.candle, &made, bridge_cuda::ordering(), &to(GPU)).unwrap();
    assert_eq!((done.plan, done.copied_by), (Plan::Copy(Reason::Moved), Some(CopiedBy::Move)));
    assert!(tensor.device().same_device(&sides.place));
    let doubled = tensor.affine(2.0, 0.0).unwrap();
    let (back, _) = transfer(&sides.candle, &ndarray(), &doubled, bridge_cuda::ordering(), &to(Device::CPU)).unwrap();
    assert_eq!(back.to_array::<f32>().unwrap(), ndarray::array![[2.0, 4.0], [6.0, 8.0]].into_dyn());
}

#[test]
fn what_candle_cannot_import_or_export_is_refused() {
    let Some(sides) = Sides::new() else { return };
    let kind = |refused: bridge_core::Result<()>| refused.unwrap_err().kind();
    let variable = Var::new(&[1f32, 2.0], &sides.place).unwrap();
    assert_eq!(kind(sides.candle.export(variable.as_tensor()).map(drop)), ErrorKind::RequiresGrad);
    // SAFETY: the call makes no tensor.
    let elsewhere = unsafe { sides.candle.empty(Device::cuda(7), DType::FLOAT32, &[1], Order::RowMajor) };
    assert_eq!(kind(elsewhere.map(drop)), ErrorKind::Device);
    // SAFETY: as in `adapter`.
    let on_host = unsafe { Candle::new() };
    let refused = transfer(&sides.cudarc, &on_host, &sides.array(1), bridge_cuda::ordering(), &Options::default());
    assert_eq!(kind(refused.map(drop)), ErrorKind::Device);
    // SAFETY: the call makes no tensor.
    let huge = unsafe { sides.candle.empty(GPU, DType::FLOAT64, &[1 << 40], Order::RowMajor) };
    assert_eq!(kind(huge.map(drop)), ErrorKind::OutOfMemory);
}

#[test]
fn the_current_context_is_left_as_it_was() {
    let Some(sides) = Sides::new() else { return };
    let (tensor, array) = (sides.made(1), sides.array(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(bridge_cuda::current_device().unwrap(), None);
            let (seen, _) = sides.out(&tensor);
            let (copy, _) = sides.back(&array, &Options::default());
            drop(seen);
            let exported = sides.candle.export(&copy).unwrap();
            drop(copy);
            // The last reference.
            drop(exported);
            assert_eq!(bridge_cuda::current_device().unwrap(), None);
        });
    });
}
