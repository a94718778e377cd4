//! Sessions of ONNX Runtime on a CUDA device, with tensors of `cudarc`. Without a device, or a library that has the
//! CUDA provider, each test says so and ends.

mod model;

use bridge_core::{
    Adapter, CopiedBy, Device, ErrorKind, Options, Plan, Reason, Reuse, Stream, Transfer, stats, transfer,
};
use bridge_cuda::ordering;
use bridge_cudarc::{Cudarc, DeviceArray};
use bridge_ndarray::{HostArray, NdArray};
use bridge_ort::Ort;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use ort::ep::{CUDA, ExecutionProvider};
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{IoBinding, RunOptions, Session};
use ort::value::DynTensor;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A macro, because the type has a lifetime from rc.13 of `ort` on.
macro_rules! on {
    ($place:ident) => {
        MemoryInfo::new(AllocationDevice::$place, 0, AllocatorType::Device, MemoryType::Default).unwrap()
    };
}

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

const GPU: Device = Device::cuda(0);
const SHAPE: [i64; 2] = [1024, 1024];
const ELEMENTS: usize = 1 << 20;
const ROUNDS: u8 = 50;

/// A session in a compute stream, and two streams of `cudarc` next to it: one that makes inputs, one that reads
/// outputs.
struct Sides {
    ort: Ort,
    session: Session,
    /// Runs in which the host does not wait for the device.
    unwaited: RunOptions,
    compute: Arc<CudaStream>,
    producer: Cudarc,
    reader: Cudarc,
    /// Leases are counted per process: one test at a time.
    _alone: MutexGuard<'static, ()>,
}

/// Work of some milliseconds in one stream. Only that stream uses its memory: `cudarc` orders streams that share
/// any.
struct Delay {
    stream: Arc<CudaStream>,
    from: CudaSlice<u8>,
    to: CudaSlice<u8>,
}

impl Delay {
    fn new(stream: &Arc<CudaStream>) -> Self {
        let ballast = || stream.alloc_zeros::<u8>(256 << 20).unwrap();
        Self { from: ballast(), to: ballast(), stream: Arc::clone(stream) }
    }

    fn add(&mut self) {
        (0..40).for_each(|_| self.stream.memcpy_dtod(&self.from, &mut self.to).unwrap());
    }
}

impl Sides {
    /// `None` without a device or the CUDA provider.
    fn new() -> Option<Self> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(missing) = bridge_cuda::available() {
            println!("skipped: {missing}");
            return None;
        }
        // SAFETY: no tensor is converted by this one.
        match unsafe { Ort::new() } {
            Err(error) if error.kind() == ErrorKind::Missing => {
                println!("skipped: {error}");
                return None;
            }
            made => drop(made.unwrap()),
        }
        if !CUDA::default().is_available().unwrap() {
            println!("skipped: this ONNX Runtime is built without the CUDA provider");
            return None;
        }
        let context = CudaContext::new(0).unwrap();
        let stream = || context.new_stream().unwrap();
        let (compute, producer, reader) = (stream(), Cudarc::new(stream()).unwrap(), Cudarc::new(stream()).unwrap());
        // Not destroyed: memory may return a moment after the session.
        std::mem::forget(Arc::clone(&compute));
        // SAFETY: the stream is one of this device, and is not destroyed. The sessions of the tests work in it.
        let ort = unsafe { Ort::with_compute_stream(GPU, handle(&compute)).unwrap() };
        let mut unwaited = RunOptions::new().unwrap();
        unwaited.disable_device_sync().unwrap();
        let mut sides = Self { ort, session: session(&compute), unwaited, compute, producer, reader, _alone: alone };
        // The first run loads kernels, for which the driver may wait.
        let x = sides.input(&sides.array(0));
        drop(sides.doubled(&x));
        sides.compute.synchronize().unwrap();
        Some(sides)
    }

    /// Numbers of the producer.
    fn slice(&self, value: u8) -> CudaSlice<f32> {
        self.producer.stream().clone_htod(&vec![f32::from(value); ELEMENTS]).unwrap()
    }

    fn array(&self, value: u8) -> DeviceArray {
        whole(self.slice(value))
    }

    /// The producer's copy of numbers, after all work in its stream. The host does not wait for it.
    fn copied(&self, numbers: &CudaSlice<f32>) -> CudaSlice<f32> {
        let mut copy = self.producer.stream().alloc_zeros::<f32>(ELEMENTS).unwrap();
        self.producer.stream().memcpy_dtod(numbers, &mut copy).unwrap();
        copy
    }

    fn bring_in(&self, array: &DeviceArray) -> (Arc<DynTensor>, Transfer) {
        transfer(&self.producer, &self.ort, array, ordering(), &Options::default()).unwrap()
    }

    fn input(&self, array: &DeviceArray) -> Arc<DynTensor> {
        self.bring_in(array).0
    }

    fn out(&self, tensor: &Arc<DynTensor>) -> DeviceArray {
        let (array, done) = transfer(&self.ort, &self.reader, tensor, ordering(), &Options::default()).unwrap();
        assert_eq!((done.plan, array.data()), (Plan::ZeroCopy, tensor.data_ptr().addr() as u64));
        assert_eq!(done.ordered, Some((handle(&self.compute), handle(self.reader.stream()))));
        array
    }

    /// Returns `x + x` in memory of ONNX Runtime on the device. The host does not wait for it.
    fn doubled(&mut self, x: &Arc<DynTensor>) -> Arc<DynTensor> {
        let mut binding = self.session.create_binding().unwrap();
        binding.bind_output_to_device("y", &on!(CUDA)).unwrap();
        self.doubled_by(&mut binding, x)
    }

    fn doubled_by(&mut self, binding: &mut IoBinding, x: &Arc<DynTensor>) -> Arc<DynTensor> {
        binding.bind_input("x", x).unwrap();
        let mut outputs = self.session.run_binding_with_options(binding, &self.unwaited).unwrap();
        Arc::new(outputs.remove("y").unwrap().downcast().unwrap())
    }

    /// Reads an array, in the stream that is its own.
    fn read(&self, array: &DeviceArray) -> Vec<f32> {
        array.stream().clone_dtoh(&array.read::<f32>().unwrap().view()).unwrap()
    }
}

/// Makes a session that works in `stream`.
fn session(stream: &CudaStream) -> Session {
    // SAFETY: the stream is not destroyed.
    let provider = unsafe { CUDA::default().with_device_id(0).with_compute_stream(stream.cu_stream().cast()) };
    // A library that has the provider and cannot use it fails the test.
    let builder = Session::builder().unwrap().with_execution_providers([provider.build().error_on_failure()]).unwrap();
    // Nor does the session fall back to the host.
    let mut builder = builder.with_disable_cpu_fallback().unwrap();
    builder.commit_from_memory(&model::doubling()).unwrap()
}

fn whole(slice: CudaSlice<f32>) -> DeviceArray {
    DeviceArray::from_slice(slice, &SHAPE, None, 0).unwrap()
}

fn handle(stream: &CudaStream) -> Stream {
    // SAFETY: the caller keeps the stream.
    unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) }
}

fn all(elements: &[f32], value: u8) -> bool {
    elements.len() == ELEMENTS && elements.iter().all(|element| *element == f32::from(value))
}

/// Waits until every lease has been released: those of ONNX Runtime's own memory are released a moment later.
fn settle() {
    let started = Instant::now();
    while stats().leased > stats().released + stats().leaked {
        assert!(started.elapsed() < Duration::from_secs(10), "leases are not released: {:?}", stats());
        std::thread::yield_now();
    }
}

#[test]
fn a_slice_goes_in_and_the_output_comes_out_in_place() {
    let Some(mut sides) = Sides::new() else { return };
    let mut array = sides.array(3);
    let (x, done) = sides.bring_in(&array);
    assert_eq!((done.plan, done.bytes_copied, x.data_ptr().addr() as u64), (Plan::ZeroCopy, 0, array.data()));
    assert_eq!(done.ordered, Some((handle(sides.producer.stream()), handle(&sides.compute))));
    assert_eq!((x.memory_info().allocation_device(), x.memory_info().device_id()), (AllocationDevice::CUDA, 0));
    let y = sides.doubled(&x);
    let exported = sides.ort.export(&y).unwrap();
    assert_eq!((exported.device(), exported.buffer().stream()), (GPU, Some(handle(&sides.compute))));
    assert_eq!(exported.buffer().reuse(), Reuse::Unknown);
    drop(exported);
    assert!(all(&sides.read(&sides.out(&y)), 6));

    // The binding has not copied either: it reads what the slice holds at the run.
    let mut binding = sides.session.create_binding().unwrap();
    binding.bind_input("x", &x).unwrap();
    binding.bind_output_to_device("y", &on!(CUDA)).unwrap();
    let stream = Arc::clone(array.stream());
    stream.memcpy_htod(&vec![5.0f32; ELEMENTS], &mut array.write::<f32>().unwrap().view()).unwrap();
    stream.synchronize().unwrap();
    let mut outputs = sides.session.run_binding(&binding).unwrap();
    let y = Arc::new(outputs.remove("y").unwrap().downcast().unwrap());
    drop(outputs);
    assert!(all(&sides.read(&sides.out(&y)), 10));
}

#[test]
fn a_session_writes_to_a_slice_that_is_bound_as_its_output() {
    let Some(mut sides) = Sides::new() else { return };
    let (before, mut delay) = (stats(), Delay::new(&sides.compute));
    for round in 1..=ROUNDS {
        let (input, result) = (sides.array(round), sides.array(0));
        let (x, y) = (sides.input(&input), sides.input(&result));
        let mut binding = sides.session.create_binding().unwrap();
        binding.bind_input("x", &x).unwrap();
        binding.bind_output("y", Arc::into_inner(y).unwrap()).unwrap();
        delay.add();
        drop(sides.session.run_binding_with_options(&binding, &sides.unwaited).unwrap());
        // The drop makes the producer's stream wait for the session.
        drop((binding, x));
        assert!(all(&sides.read(&result), 2 * round), "not written in round {round}");
    }
    settle();
    assert_eq!((stats().leased - before.leased, stats().leaked), (2 * u64::from(ROUNDS), before.leaked));
}

/// The compute stream waits for the producer's kernels, and the reader's stream for the session. The host waits for
/// none.
#[test]
fn a_session_reads_what_the_producer_writes_last() {
    let Some(mut sides) = Sides::new() else { return };
    let mut delay = Delay::new(sides.producer.stream());
    let (mut stale, mut pending) = (Vec::new(), 0);
    for round in 1..=ROUNDS {
        let numbers = sides.slice(round);
        let mut slice = sides.producer.stream().alloc_zeros::<f32>(ELEMENTS).unwrap();
        sides.producer.stream().synchronize().unwrap();
        delay.add();
        sides.producer.stream().memcpy_dtod(&numbers, &mut slice).unwrap();
        let written = sides.producer.stream().record_event(None).unwrap();
        let x = sides.input(&whole(slice));
        let y = sides.doubled(&x);
        drop(x);
        let array = sides.out(&y);
        drop(y);
        pending += usize::from(!written.is_complete());
        if !all(&sides.read(&array), 2 * round) {
            stale.push(round);
        }
    }
    println!("{} of {ROUNDS} rounds stale; in {pending} the producer still worked after the run", stale.len());
    assert_eq!(stale, []);
    assert!(pending > usize::from(ROUNDS) / 2, "the host has waited");
}

/// The memory of an input that was dropped is not reused while the session has still to read it.
#[test]
fn an_input_is_reused_after_the_session() {
    let Some(mut sides) = Sides::new() else { return };
    let (sevens, nines) = (sides.slice(7), sides.slice(9));
    let (before, mut delay) = (stats(), Delay::new(&sides.compute));
    let (mut overwritten, mut pending, mut reused) = (Vec::new(), 0, 0);
    for round in 1..=ROUNDS {
        let array = whole(sides.copied(&sevens));
        let address = array.data();
        let x = sides.input(&array);
        delay.add();
        let y = sides.doubled(&x);
        let done = sides.compute.record_event(None).unwrap();
        drop((x, array));
        // The pool of the producer's stream has the block again, and the stream overwrites it.
        let others: Vec<_> = (0..8).map(|_| whole(sides.copied(&nines))).collect();
        pending += usize::from(!done.is_complete());
        reused += usize::from(others.iter().any(|other| other.data() == address));
        if !all(&sides.read(&sides.out(&y)), 14) {
            overwritten.push(round);
        }
    }
    println!(
        "{} of {ROUNDS} rounds overwritten; in {pending} the session still worked when the input was dropped, in {reused} \
         the pool returned its block",
        overwritten.len()
    );
    assert_eq!(overwritten, []);
    assert!(pending > usize::from(ROUNDS) / 2, "the host has waited");
    assert!(reused > 0, "no block was used again: nothing shown");
    settle();
    assert_eq!(stats().leaked, before.leaked);
}

/// ONNX Runtime does not reuse the memory of an output that was dropped while another stream still reads it.
#[test]
fn an_output_is_reused_after_its_reader() {
    let Some(mut sides) = Sides::new() else { return };
    let (seven, nine) = (sides.input(&sides.array(7)), sides.input(&sides.array(9)));
    let (stream, mut delay) = (Arc::clone(sides.reader.stream()), Delay::new(sides.reader.stream()));
    let (mut overwritten, mut pending) = (Vec::new(), 0);
    for round in 1..=ROUNDS {
        let y = sides.doubled(&seven);
        let array = sides.out(&y);
        let mut copy = stream.alloc_zeros::<f32>(ELEMENTS).unwrap();
        delay.add();
        stream.memcpy_dtod(&array.read::<f32>().unwrap().view(), &mut copy).unwrap();
        let done = stream.record_event(None).unwrap();
        drop((y, array));
        let others: Vec<_> = (0..8).map(|_| sides.doubled(&nine)).collect();
        pending += usize::from(!done.is_complete());
        if !all(&stream.clone_dtoh(&copy).unwrap(), 14) {
            overwritten.push(round);
        }
        drop(others);
    }
    println!("{} of {ROUNDS} rounds overwritten; in {pending} the reader still worked", overwritten.len());
    assert_eq!(overwritten, []);
    assert!(pending > usize::from(ROUNDS) / 2, "the host has waited");
}

/// A binding writes to the same outputs in each run. The drop of a view makes the next run wait for the view's readers.
#[test]
fn a_second_run_of_a_binding_waits_for_the_readers_of_the_first() {
    let Some(mut sides) = Sides::new() else { return };
    let (seven, nine) = (sides.input(&sides.array(7)), sides.input(&sides.array(9)));
    let (stream, mut delay) = (Arc::clone(sides.reader.stream()), Delay::new(sides.reader.stream()));
    let mut overwritten = Vec::new();
    for round in 1..=ROUNDS {
        let mut binding = sides.session.create_binding().unwrap();
        binding.bind_output_to_device("y", &on!(CUDA)).unwrap();
        let y = sides.doubled_by(&mut binding, &seven);
        let (array, address) = (sides.out(&y), y.data_ptr());
        let mut copy = stream.alloc_zeros::<f32>(ELEMENTS).unwrap();
        delay.add();
        stream.memcpy_dtod(&array.read::<f32>().unwrap().view(), &mut copy).unwrap();
        drop((y, array));
        let again = sides.doubled_by(&mut binding, &nine);
        assert_eq!(again.data_ptr(), address, "another run, another output");
        if !all(&stream.clone_dtoh(&copy).unwrap(), 14) {
            overwritten.push(round);
        }
        assert!(all(&sides.read(&sides.out(&again)), 18));
    }
    println!("{} of {ROUNDS} rounds overwritten", overwritten.len());
    assert_eq!(overwritten, []);
}

/// A run that waits for the device has filled an output in pinned memory, which the host reads in place.
#[test]
fn pinned_outputs_are_memory_of_the_host() {
    let Some(mut sides) = Sides::new() else { return };
    let x = sides.input(&sides.array(4));
    let mut binding = sides.session.create_binding().unwrap();
    binding.bind_input("x", &x).unwrap();
    binding.bind_output_to_device("y", &on!(CUDA_PINNED)).unwrap();
    let mut outputs = sides.session.run_binding(&binding).unwrap();
    let y: Arc<DynTensor> = Arc::new(outputs.remove("y").unwrap().downcast().unwrap());
    println!("in {:?}", y.memory_info().allocation_device());
    let (seen, done) = transfer(&sides.ort, &ndarray(), &y, ordering(), &Options::default()).unwrap();
    assert_eq!((done.plan, seen.data()), (Plan::ZeroCopy, y.data_ptr().addr()));
    assert!(all(seen.to_array::<f32>().unwrap().as_slice().unwrap(), 8));
}

#[test]
fn views_that_start_inside_a_slice_and_tensors_without_elements_convert() {
    let Some(mut sides) = Sides::new() else { return };
    let stream = Arc::clone(sides.producer.stream());
    let numbers: Vec<_> = (0..ELEMENTS + 1).map(|i| (i % 1000) as f32).collect();
    let inside = DeviceArray::from_slice(stream.clone_htod(&numbers).unwrap(), &SHAPE, None, 1).unwrap();
    let x = sides.input(&inside);
    assert_eq!((x.data_ptr().addr() as u64, inside.data() % 64), (inside.data(), 4));
    let y = sides.doubled(&x);
    let doubled: Vec<_> = numbers[1..].iter().map(|number| 2.0 * number).collect();
    assert!(sides.read(&sides.out(&y)) == doubled);

    let nothing = DeviceArray::from_slice(stream.clone_htod(&[1.0f32]).unwrap(), &[0, 3], None, 0).unwrap();
    let x = sides.input(&nothing);
    assert_eq!(&x.shape()[..], [0, 3]);
    let y = sides.doubled(&x);
    let (empty, _) = transfer(&sides.ort, &sides.reader, &y, ordering(), &Options::default()).unwrap();
    assert_eq!((empty.layout().shape(), empty.device()), (&[0, 3][..], GPU));
}

/// ONNX Runtime allocates on a device for a session only, so copies are in memory of the producer or of the driver's
/// pool.
#[test]
fn strided_tensors_are_copied_on_the_device_and_tensors_of_the_host_move_there() {
    let Some(mut sides) = Sides::new() else { return };
    let stream = Arc::clone(sides.producer.stream());
    let mut delay = Delay::new(&stream);
    let numbers: Vec<_> = (0..ELEMENTS).map(|i| (i % 1000) as f32).collect();
    let slice = stream.clone_htod(&numbers).unwrap();
    let mut later = stream.alloc_zeros::<f32>(ELEMENTS).unwrap();
    delay.add();
    stream.memcpy_dtod(&slice, &mut later).unwrap();
    let columns = DeviceArray::from_slice(later, &SHAPE, Some(&[1, 1024]), 0).unwrap();
    let (x, done) = sides.bring_in(&columns);
    assert_eq!((done.plan, done.copied_by), (Plan::Copy(Reason::Strides), Some(CopiedBy::Kernels)));
    drop(columns);
    let y = sides.doubled(&x);
    drop(x);
    let expected: Vec<_> = (0..ELEMENTS).map(|i| 2.0 * numbers[i % 1024 * 1024 + i / 1024]).collect();
    assert!(sides.read(&sides.out(&y)) == expected);

    let array = HostArray::from(ndarray::array![[1.0f32, 2.0], [3.0, 4.0]]);
    let to = |device| Options::default().with_device(device);
    let (x, done) = transfer(&ndarray(), &sides.ort, &array, ordering(), &to(GPU)).unwrap();
    assert_eq!((done.plan, done.copied_by), (Plan::Copy(Reason::Moved), Some(CopiedBy::Move)));
    let y = sides.doubled(&x);
    let (back, _) = transfer(&sides.ort, &ndarray(), &y, ordering(), &to(Device::CPU)).unwrap();
    assert_eq!(back.to_array::<f32>().unwrap(), ndarray::array![[2.0, 4.0], [6.0, 8.0]].into_dyn());
}

#[test]
fn tensors_of_a_device_without_a_compute_stream_are_refused() {
    let Some(mut sides) = Sides::new() else { return };
    let array = sides.array(1);
    let y = sides.doubled(&sides.input(&array));
    // SAFETY: no tensor is converted.
    let (host, other) =
        unsafe { (Ort::new().unwrap(), Ort::with_compute_stream(Device::cuda(1), handle(&sides.compute)).unwrap()) };
    for ort in [&host, &other] {
        let refused = transfer(&sides.producer, ort, &array, ordering(), &Options::default()).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Device, "{refused}");
        let refused = transfer(ort, &sides.reader, &y, ordering(), &Options::default()).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Device, "{refused}");
    }
}

#[test]
fn the_current_context_is_left_as_it_was() {
    let Some(mut sides) = Sides::new() else { return };
    let array = sides.array(1);
    let y = sides.doubled(&sides.input(&array));
    let sides = &sides;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(bridge_cuda::current_device().unwrap(), None);
            drop((sides.input(&array), sides.out(&y)));
            assert_eq!(bridge_cuda::current_device().unwrap(), None);
        });
    });
}
