//! `tch` and `cudarc` on a CUDA device. Without one, each test says so and ends.

use bridge_core::{Adapter, Device, Options, Plan, Reuse, Stream, stats, transfer};
use bridge_cudarc::{Cudarc, DeviceArray};
use bridge_torch::Tch;
use cudarc::driver::{CudaContext, CudaStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Kind, Tensor};

/// Returns the adapter.
fn tch_of_process() -> bridge_core::Result<Tch> {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { Tch::new() }
}

const GPU: Device = Device::cuda(0);
const PLACE: tch::Device = tch::Device::Cuda(0);
const ELEMENTS: i64 = 1 << 20;

/// `tch` in its own stream, and `cudarc` in another.
struct Sides {
    tch: Tch,
    cudarc: Cudarc,
    /// The stream that is current in `tch`.
    stream: Arc<CudaStream>,
    /// The current stream is that of a thread, and leases are counted per process: one test at a time.
    _alone: MutexGuard<'static, ()>,
}

impl Sides {
    fn new() -> Option<Self> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(missing) = bridge_cuda::available() {
            println!("skipped: {missing}");
            return None;
        }
        assert!(tch::Cuda::device_count() > 0, "the driver has devices, and libtorch none: link libtorch_cuda");
        let context = CudaContext::new(0).unwrap();
        let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let sides = Self { tch: tch_of_process().unwrap(), cudarc: Cudarc::new(other).unwrap(), stream, _alone: alone };
        // SAFETY: the stream is of this device. It is not destroyed: libtorch keeps memory that was used in it.
        unsafe { sides.tch.set_current_stream(GPU, handle(&sides.stream)).unwrap() };
        std::mem::forget(Arc::clone(&sides.stream));
        Some(sides)
    }

    fn out(&self, tensor: &Tensor) -> DeviceArray {
        let (array, done) =
            transfer(&self.tch, &self.cudarc, tensor, bridge_cuda::ordering(), &Options::default()).unwrap();
        assert_eq!((done.plan, array.data()), (Plan::ZeroCopy, tensor.data_ptr().addr() as u64));
        assert_eq!(done.ordered, Some((handle(&self.stream), handle(self.cudarc.stream()))));
        array
    }

    fn back(&self, array: &DeviceArray) -> Tensor {
        let (tensor, done) =
            transfer(&self.cudarc, &self.tch, array, bridge_cuda::ordering(), &Options::default()).unwrap();
        assert_eq!((done.plan, tensor.data_ptr().addr() as u64), (Plan::ZeroCopy, array.data()));
        tensor
    }
}

fn handle(stream: &CudaStream) -> Stream {
    // SAFETY: the caller keeps the stream.
    unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) }
}

/// Work of some milliseconds in the current stream of `tch`.
fn delay() {
    let (from, mut to) =
        (Tensor::zeros([256 << 20], (Kind::Uint8, PLACE)), Tensor::zeros([256 << 20], (Kind::Uint8, PLACE)));
    (0..40).for_each(|_| to.copy_(&from));
}

/// As [`delay`], in a stream of `cudarc`.
fn delay_in(stream: &Arc<CudaStream>) {
    let (from, mut to) = (stream.alloc_zeros::<u8>(256 << 20).unwrap(), stream.alloc_zeros::<u8>(256 << 20).unwrap());
    (0..40).for_each(|_| stream.memcpy_dtod(&from, &mut to).unwrap());
}

fn all(elements: &[f32], value: f32) -> bool {
    elements.len() == ELEMENTS as usize && elements.iter().all(|element| *element == value)
}

#[test]
fn cudarc_reads_what_tch_writes_last() {
    let Some(sides) = Sides::new() else { return };
    for round in 0..20 {
        let mut tensor = Tensor::zeros([ELEMENTS], (Kind::Float, PLACE));
        delay();
        let _ = tensor.fill_(f64::from(round) + 1.0);
        let array = sides.out(&tensor);
        let stream = sides.cudarc.stream();
        let elements = stream.clone_dtoh(&array.read::<f32>().unwrap().view()).unwrap();
        assert!(all(&elements, round as f32 + 1.0), "stale in round {round}");
    }
}

#[test]
fn tch_reads_what_cudarc_writes_last() {
    let Some(sides) = Sides::new() else { return };
    let stream = sides.cudarc.stream();
    for round in 0..20 {
        let slice = stream.alloc_zeros::<f32>(ELEMENTS as usize).unwrap();
        let mut array = DeviceArray::from_slice(slice, &[ELEMENTS], None, 0).unwrap();
        delay_in(stream);
        let elements = vec![round as f32 + 1.0; ELEMENTS as usize];
        stream.memcpy_htod(&elements, &mut array.write::<f32>().unwrap().view()).unwrap();
        let tensor = sides.back(&array);
        drop(array);
        assert!(all(&Vec::try_from(&tensor).unwrap(), round as f32 + 1.0), "stale in round {round}");
    }
}

/// A block of the caching allocator is not reused while a stream of `cudarc` still reads it.
#[test]
fn the_allocator_of_tch_waits_for_cudarc() {
    let Some(sides) = Sides::new() else { return };
    let (stream, before) = (sides.cudarc.stream(), stats());
    for round in 0..20 {
        let tensor = Tensor::full([ELEMENTS], 7.0, (Kind::Float, PLACE));
        let array = sides.out(&tensor);
        let mut copy = stream.alloc_zeros::<f32>(ELEMENTS as usize).unwrap();
        delay_in(stream);
        let reading = array.read::<f32>().unwrap();
        stream.memcpy_dtod(&reading.view(), &mut copy).unwrap();
        drop(reading);
        drop((tensor, array));
        let reused: Vec<_> = (0..8).map(|_| Tensor::full([ELEMENTS], 9.0, (Kind::Float, PLACE))).collect();
        assert!(all(&stream.clone_dtoh(&copy).unwrap(), 7.0), "overwritten in round {round}");
        drop(reused);
    }
    let after = stats();
    assert_eq!(
        (after.leased - before.leased, after.released - before.released, after.leaked - before.leaked),
        (20, 20, 0)
    );
}

/// A slice of `cudarc` is not freed while the stream of `tch` still reads it.
#[test]
fn the_pool_of_cudarc_waits_for_tch() {
    let Some(sides) = Sides::new() else { return };
    let stream = sides.cudarc.stream();
    for round in 0..20 {
        let slice = stream.clone_htod(&vec![7.0f32; ELEMENTS as usize]).unwrap();
        let array = DeviceArray::from_slice(slice, &[ELEMENTS], None, 0).unwrap();
        let tensor = sides.back(&array);
        drop(array);
        delay();
        let copy = tensor.copy();
        drop(tensor);
        let reused: Vec<_> = (0..8).map(|_| stream.clone_htod(&vec![9.0f32; ELEMENTS as usize]).unwrap()).collect();
        assert!(all(&Vec::try_from(&copy).unwrap(), 7.0), "overwritten in round {round}");
        drop(reused);
    }
}

/// Only memory of the caching allocator is claimed to be reused in stream order.
#[test]
fn the_owner_of_the_memory_is_known() {
    let Some(sides) = Sides::new() else { return };
    assert!(sides.tch.profile().private_functions, "libtorch 2.11 shows who owns memory");
    let own = Tensor::zeros([4], (Kind::Float, PLACE));
    assert_eq!(sides.tch.export(&own).unwrap().buffer().reuse(), Reuse::InStreamOrder);
    let slice = sides.cudarc.stream().clone_htod(&[1.0f32; 4]).unwrap();
    let imported = sides.back(&DeviceArray::from_slice(slice, &[4], None, 0).unwrap());
    assert_eq!(sides.tch.export(&imported).unwrap().buffer().reuse(), Reuse::Unknown);
    assert_eq!(sides.tch.export(&imported).unwrap().buffer().stream(), Some(handle(&sides.stream)));
}

#[test]
fn strided_and_empty_tensors_convert_in_place() {
    let Some(sides) = Sides::new() else { return };
    let tensor = Tensor::arange(24, (Kind::Float, PLACE)).view([4, 6]).narrow(1, 1, 3).tr();
    let array = sides.out(&tensor);
    assert_eq!((array.layout().shape(), array.layout().strides()), (&[3, 4][..], &[1, 6][..]));
    assert!(sides.back(&array).equal(&tensor));
    let nothing = tensor.narrow(0, 0, 0);
    let (array, _) =
        transfer(&sides.tch, &sides.cudarc, &nothing, bridge_cuda::ordering(), &Options::default()).unwrap();
    let (back, _) = transfer(&sides.cudarc, &sides.tch, &array, bridge_cuda::ordering(), &Options::default()).unwrap();
    assert_eq!((back.size(), back.device()), (vec![0, 4], PLACE));
}
