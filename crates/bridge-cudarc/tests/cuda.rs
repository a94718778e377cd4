//! `cudarc` on a CUDA device. Without one, each test says so and ends.

use bridge_core::{Access, Adapter, DType, Device, ErrorKind, Options, Order, Plan, Result, Transfer, stats, transfer};
use bridge_cudarc::{Cudarc, DeviceArray};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Counts of leases are those of the process: one test at a time. `None` without a device.
fn context() -> Option<(Arc<CudaContext>, MutexGuard<'static, ()>)> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    if let Err(missing) = bridge_cuda::available() {
        println!("skipped: {missing}");
        return None;
    }
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    Some((CudaContext::new(0).unwrap(), guard))
}

fn across(tensor: &DeviceArray, from: &Arc<CudaStream>, to: &Arc<CudaStream>) -> Result<(DeviceArray, Transfer)> {
    let (from, to) = (Cudarc::new(from.clone())?, Cudarc::new(to.clone())?);
    transfer(&from, &to, tensor, bridge_cuda::ordering(), &Options::default())
}

fn numbers(tensor: &DeviceArray) -> Vec<f32> {
    let reading = tensor.read::<f32>().unwrap();
    tensor.stream().clone_dtoh(&reading.view()).unwrap()
}

/// Work of some milliseconds in a stream, and then other elements in `slice`.
fn late(stream: &Arc<CudaStream>, slice: &mut CudaSlice<f32>, value: f32) {
    const BYTES: usize = 256 << 20;
    let (from, mut to) = (stream.alloc_zeros::<u8>(BYTES).unwrap(), stream.alloc_zeros::<u8>(BYTES).unwrap());
    (0..40).for_each(|_| stream.memcpy_dtod(&from, &mut to).unwrap());
    let elements = vec![value; slice.len()];
    stream.memcpy_htod(&elements, slice).unwrap();
}

#[test]
fn a_slice_converts_in_place_and_in_order() {
    let Some((context, _guard)) = context() else { return };
    let (producer, consumer) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    for round in 0..20 {
        let mut slice = producer.alloc_zeros::<f32>(1 << 20).unwrap();
        late(&producer, &mut slice, round as f32 + 1.0);
        let made = DeviceArray::from_slice(slice, &[1024, 1024], None, 0).unwrap();
        let (seen, done) = across(&made, &producer, &consumer).unwrap();
        assert_eq!((done.plan, seen.data()), (Plan::ZeroCopy, made.data()));
        let (owner, reader) = done.ordered.expect("two streams");
        assert_eq!(
            (owner.handle(), reader.handle()),
            (producer.cu_stream().addr() as u64, consumer.cu_stream().addr() as u64)
        );
        drop(made);
        let elements = numbers(&seen);
        assert!(elements.iter().all(|element| *element == round as f32 + 1.0), "stale in round {round}");
    }
}

/// The memory of a dropped view is not reused while the consumer's stream still reads it.
#[test]
fn memory_returns_after_its_readers() {
    let Some((context, _guard)) = context() else { return };
    let (producer, consumer) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let before = stats();
    for round in 0..20 {
        let slice = producer.clone_htod(&vec![7.0f32; 1 << 20]).unwrap();
        let address = slice.cu_address();
        let made = DeviceArray::from_slice(slice, &[1 << 20], None, 0).unwrap();
        let (seen, _) = across(&made, &producer, &consumer).unwrap();
        let mut copy = consumer.alloc_zeros::<f32>(1 << 20).unwrap();
        let mut busy = consumer.alloc_zeros::<f32>(1).unwrap();
        late(&consumer, &mut busy, 1.0);
        let reading = seen.read::<f32>().unwrap();
        consumer.memcpy_dtod(&reading.view(), &mut copy).unwrap();
        drop(reading);
        drop((made, seen));
        // The pool of the producer's stream has the block again, and overwrites it.
        let reused = producer.clone_htod(&vec![9.0f32; 1 << 20]).unwrap();
        if round == 19 && reused.cu_address() != address {
            println!("the pool chose another block: nothing shown");
        }
        let elements = consumer.clone_dtoh(&copy).unwrap();
        assert!(elements.iter().all(|element| *element == 7.0), "overwritten in round {round}");
    }
    let after = stats();
    assert_eq!(
        (after.leased - before.leased, after.released - before.released, after.leaked - before.leaked),
        (20, 20, 0)
    );
}

/// A use in the stream of another adapter is recorded for all views of the memory, which keep that stream.
#[test]
fn a_view_keeps_the_stream_of_an_array_that_another_adapter_exports() {
    let Some((context, _guard)) = context() else { return };
    let adapter = || Cudarc::new(context.new_stream().unwrap()).unwrap();
    let (owner, first, second) = (adapter(), adapter(), adapter());
    let made = DeviceArray::from_slice(owner.stream().clone_htod(&[1.0f32; 4]).unwrap(), &[4], None, 0).unwrap();
    let view = |of: &DeviceArray, from: &Cudarc, to: &Cudarc| {
        transfer(from, to, of, bridge_cuda::ordering(), &Options::default()).unwrap().0
    };
    let (in_first, in_second) = (view(&made, &owner, &first), view(&made, &owner, &second));
    drop(view(&in_first, &second, &owner));
    let stream = Arc::downgrade(first.stream());
    // Memory that is returned later keeps streams, too.
    let settle = || {
        context.synchronize().unwrap();
        while bridge_cuda::pending_releases() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    drop((in_first, first));
    settle();
    assert!(stream.upgrade().is_some(), "the owner waits for it at the drop of the other view");
    drop(in_second);
    settle();
    assert!(stream.upgrade().is_none());
}

trait Address {
    fn cu_address(&self) -> u64;
}

impl Address for CudaSlice<f32> {
    fn cu_address(&self) -> u64 {
        use cudarc::driver::DevicePtr;
        self.device_ptr(self.stream()).0
    }
}

/// A guard's end frees nothing: the owner still has its elements.
#[test]
fn views_of_imported_memory_never_free_it() {
    let Some((context, _guard)) = context() else { return };
    let (producer, consumer) = (context.default_stream(), context.new_stream().unwrap());
    let slice = Arc::new(producer.clone_htod(&[1.0f32, 2.0, 3.0, 4.0]).unwrap());
    // SAFETY: the slice is kept, never written to, and freed in the order of its stream.
    let made =
        unsafe { DeviceArray::from_view(&slice.slice(1..), (&[3], None, 0), &producer, Arc::clone(&slice)).unwrap() };
    assert_eq!(made.access(), Access::ReadOnly);
    let overwritten = |array| Cudarc::new(producer.clone()).unwrap().overwritten(array);
    assert_eq!(overwritten(&made).unwrap_err().kind(), ErrorKind::ReadOnly);
    for _ in 0..3 {
        let (mut seen, _) = across(&made, &producer, &consumer).unwrap();
        assert_eq!(numbers(&seen), [2.0, 3.0, 4.0]);
        assert_eq!(seen.write::<f32>().map(drop).unwrap_err().kind(), ErrorKind::ReadOnly);
    }
    drop(made);
    assert_eq!(producer.clone_dtoh(&*slice).unwrap(), [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn a_write_through_a_view_is_seen_by_the_producer() {
    let Some((context, _guard)) = context() else { return };
    let (producer, consumer) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let made = DeviceArray::from_slice(producer.clone_htod(&[1.0f32; 8]).unwrap(), &[2, 4], None, 0).unwrap();
    let (mut seen, _) = across(&made, &producer, &consumer).unwrap();
    consumer.memcpy_htod(&[5.0f32; 8], &mut seen.write::<f32>().unwrap().view()).unwrap();
    // The drop makes the producer's stream wait for the consumer's.
    drop(seen);
    assert_eq!(numbers(&made), [5.0; 8]);
}

#[test]
fn strided_arrays_are_launch_arguments_only() {
    let Some((context, _guard)) = context() else { return };
    let stream = context.default_stream();
    let slice = stream.clone_htod(&(0..12).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
    let address = slice.cu_address();
    let columns = DeviceArray::from_slice(slice, &[4, 3], Some(&[1, 4]), 0).unwrap();
    let (seen, done) = across(&columns, &stream, &stream).unwrap();
    assert_eq!((done.plan, done.ordered, seen.data()), (Plan::ZeroCopy, None, address));
    assert_eq!(seen.layout().strides(), [1, 4]);
    assert_eq!(seen.read::<f32>().map(drop).unwrap_err().kind(), ErrorKind::Layout);
    assert_eq!(seen.read::<i32>().map(drop).unwrap_err().kind(), ErrorKind::Dtype);
}

#[test]
fn fresh_memory_is_that_of_the_stream() {
    let Some((context, _guard)) = context() else { return };
    let cudarc = Cudarc::new(context.new_stream().unwrap()).unwrap();
    // SAFETY: the elements are numbers, of any bits.
    let fresh = unsafe { cudarc.empty(Device::cuda(0), DType::BFLOAT16, &[3, 5], Order::ColumnMajor) }.unwrap();
    assert!(fresh.layout().follows(Order::ColumnMajor) && fresh.data().is_multiple_of(64));
    assert_eq!((fresh.dtype(), fresh.layout().shape()), (DType::BFLOAT16, &[3, 5][..]));
    assert!(format!("{fresh:?}").contains("bfloat16"));
    cudarc.overwritten(&fresh).unwrap();
    // SAFETY: the call makes no tensor.
    let too_large =
        unsafe { cudarc.empty(Device::cuda(0), DType::UINT8, &[1 << 44], Order::RowMajor) }.map(drop).unwrap_err();
    assert_eq!(too_large.kind(), ErrorKind::OutOfMemory);
    for nowhere in [Device::CPU, Device::cuda(1)] {
        // SAFETY: the call makes no tensor.
        let refused = unsafe { cudarc.empty(nowhere, DType::FLOAT32, &[1], Order::RowMajor) }.map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::CopyNeeded);
    }
}

#[test]
fn the_consumer_knows_its_own_stream_and_device() {
    let Some((context, _guard)) = context() else { return };
    let [own, other] = [(); 2].map(|()| Cudarc::new(context.new_stream().unwrap()).unwrap());
    let device = Device::cuda(0);
    let [own_stream, others] = [&own, &other].map(|cudarc| cudarc.consumer().current_stream(device).unwrap().unwrap());
    assert!(own.consumer().keep(device, own_stream).is_some() && own.consumer().keep(device, others).is_none());
    assert_eq!(own.consumer().current_stream(Device::cuda(1)).unwrap_err().kind(), ErrorKind::Device);
}

#[test]
fn a_stream_is_recorded_for_views_alone() {
    let Some((context, _guard)) = context() else { return };
    let [producer, consumer, other] = [(); 3].map(|()| context.new_stream().unwrap());
    let made = DeviceArray::from_slice(producer.clone_htod(&[1.0f32; 8]).unwrap(), &[8], None, 0).unwrap();
    let cudarc = Cudarc::new(consumer.clone()).unwrap();
    assert_eq!(cudarc.record_stream(&made, &other), 0);
    let (seen, _) = across(&made, &producer, &consumer).unwrap();
    assert_eq!(cudarc.record_stream(&seen, &other), 1);
}

/// The end of a guard makes the array's stream wait for the streams in which its views were used.
#[test]
fn a_write_is_after_the_readers_in_other_streams() {
    let Some((context, _guard)) = context() else { return };
    let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    for round in 0..10 {
        let slice = stream.clone_htod(&vec![7.0f32; 1 << 20]).unwrap();
        let mut array = DeviceArray::from_slice(slice, &[1 << 20], None, 0).unwrap();
        let (mut copy, mut busy) = (other.alloc_zeros::<f32>(1 << 20).unwrap(), other.alloc_zeros::<f32>(1).unwrap());
        late(&other, &mut busy, 1.0);
        let reading = array.read::<f32>().unwrap();
        other.memcpy_dtod(&reading.view(), &mut copy).unwrap();
        drop(reading);
        stream.memcpy_htod(&vec![9.0f32; 1 << 20], &mut array.write::<f32>().unwrap().view()).unwrap();
        let elements = other.clone_dtoh(&copy).unwrap();
        assert!(elements.iter().all(|element| *element == 7.0), "overwritten in round {round}");
    }
}

/// The end of an array waits for the uses of guards that were forgotten: its memory is not that of the next array before.
#[test]
fn a_guard_that_is_forgotten_keeps_the_memory_until_its_uses_are_done() {
    let Some((context, _guard)) = context() else { return };
    let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let source = other.clone_htod(&vec![9.0f32; 1 << 20]).unwrap();
    let mut busy = other.alloc_zeros::<f32>(1).unwrap();
    let mut reused = 0;
    for round in 0..20 {
        let made = || DeviceArray::from_slice(stream.clone_htod(&vec![7.0f32; 1 << 20]).unwrap(), &[1 << 20], None, 0);
        let mut array = made().unwrap();
        let address = array.data();
        late(&other, &mut busy, 1.0);
        if round % 2 == 0 {
            let mut writing = array.write::<f32>().unwrap();
            other.memcpy_dtod(&source, &mut writing.view()).unwrap();
            std::mem::forget(writing);
            drop(array);
            let next = made().unwrap();
            reused += usize::from(next.data() == address);
            other.synchronize().unwrap();
            let elements = stream.clone_dtoh(&next.read::<f32>().unwrap().view()).unwrap();
            assert!(elements.iter().all(|element| *element == 7.0), "written to after its end in round {round}");
        } else {
            let mut copy = other.alloc_zeros::<f32>(1 << 20).unwrap();
            let reading = array.read::<f32>().unwrap();
            other.memcpy_dtod(&reading.view(), &mut copy).unwrap();
            std::mem::forget(reading);
            drop(array);
            let next = DeviceArray::from_slice(stream.clone_htod(&vec![5.0f32; 1 << 20]).unwrap(), &[1 << 20], None, 0);
            reused += usize::from(next.unwrap().data() == address);
            let elements = other.clone_dtoh(&copy).unwrap();
            assert!(elements.iter().all(|element| *element == 7.0), "reused before it was read in round {round}");
        }
    }
    assert!(reused > 0, "no memory was used again");
}

#[test]
fn the_current_context_is_left_as_it_was() {
    let Some((context, _guard)) = context() else { return };
    let stream = context.new_stream().unwrap();
    let made = DeviceArray::from_slice(stream.clone_htod(&[1.0f32; 4]).unwrap(), &[4], None, 0).unwrap();
    let on_a_thread = move || {
        assert_eq!(bridge_cuda::current_device().unwrap(), None);
        let (seen, _) = across(&made, &stream, &stream).unwrap();
        drop(seen.read::<f32>().unwrap());
        drop((seen, made));
        assert_eq!(bridge_cuda::current_device().unwrap(), None);
    };
    std::thread::spawn(on_a_thread).join().unwrap();
}

#[test]
fn memory_and_streams_of_elsewhere_are_refused() {
    let Some((context, _guard)) = context() else { return };
    let stream = context.default_stream();
    let host = [0u8; 16];
    // SAFETY: nothing reads the address.
    let refused = unsafe {
        let address = host.as_ptr().addr() as u64;
        DeviceArray::from_raw(address, DType::UINT8, (&[16], None), Access::ReadOnly, &stream, ())
    };
    assert_eq!(refused.map(drop).unwrap_err().kind(), ErrorKind::Device);
    let slice = stream.clone_htod(&[0u8; 16]).unwrap();
    let short = DeviceArray::from_slice(slice, &[17], None, 0);
    assert_eq!(short.map(drop).unwrap_err().kind(), ErrorKind::Layout);
    let ordinal = bridge_cuda::device_count();
    assert_eq!(Cudarc::of_device(ordinal).map(drop).unwrap_err().kind(), ErrorKind::Device);
    if ordinal > 1 {
        let other = CudaContext::new(1).unwrap().default_stream();
        let made = DeviceArray::from_slice(stream.clone_htod(&[0u8; 4]).unwrap(), &[4], None, 0).unwrap();
        assert_eq!(across(&made, &stream, &other).map(drop).unwrap_err().kind(), ErrorKind::Device);
    }
}

#[test]
fn without_a_driver_there_is_an_error_and_no_panic() {
    if bridge_cuda::available().is_ok() {
        return;
    }
    let refused = Cudarc::of_device(0).map(drop).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Missing | ErrorKind::Driver), "{refused}");
}
