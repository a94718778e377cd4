//! DLPack's tensors in transfers: shared memory, every owner dropped once, streams ordered.

use crate::common::Event::{Dropped, Ordered, ReleasedLater};
use crate::common::{GPU, Item, OWNER, Office, Paper, READER, Recorder, taken};
use bridge_core::dlpack::{DLPack, DlpackFlags, Managed, ManagedTensorBase, Origin, Tensor};
use bridge_core::{
    Access, Adapter, DType, Device, ErrorKind, HostOnly, Options, Order, Ordering, Plan, Reason, Reuse, Strides,
    transfer,
};
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;

/// Returns the adapter.
pub(crate) fn on_host() -> DLPack {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { DLPack::host() }
}

fn ordering(recorder: &Arc<Recorder>) -> Arc<dyn Ordering> {
    recorder.clone()
}

/// Returns the numbers 0, 1, 2, … as float32 of the host.
pub(crate) fn counted(shape: &[i64]) -> Tensor {
    // SAFETY: the elements are numbers, of any bits.
    let tensor =
        unsafe { on_host().empty(Device::CPU, DType::FLOAT32, shape, Order::RowMajor) }.expect("there is memory");
    for i in 0..tensor.layout().numel() {
        // SAFETY: the memory is that of a compact float32 tensor with so many elements, and no other code uses it.
        unsafe { with_exposed_provenance_mut::<f32>(tensor.data()).add(i).write(i as f32) };
    }
    tensor
}

/// Reads the elements of a float32 tensor of the host in row-major order.
pub(crate) fn elements(tensor: &Tensor) -> Vec<f32> {
    let (layout, mut offsets) = (tensor.layout(), vec![0_i64]);
    for (length, stride) in layout.shape().iter().zip(layout.strides()) {
        offsets = offsets.iter().flat_map(|start| (0..*length).map(move |i| start + i * stride)).collect();
    }
    let first: *mut f32 = with_exposed_provenance_mut(tensor.data());
    // SAFETY: the offsets are those of elements of the tensor, all of which were written.
    offsets.into_iter().map(|offset| unsafe { first.offset(offset as isize).read() }).collect()
}

/// Returns a tensor over a paper, whose drop is recorded.
fn converted(recorder: &Arc<Recorder>, paper: Paper) -> Tensor {
    let device = paper.device;
    let dlpack = if device == Device::CPU { on_host() } else { in_stream(device) };
    let office = Office::new(Strides::Any);
    transfer(&office, &dlpack, &Item::Own(paper), &ordering(recorder), &Options::default()).expect("it converts").0
}

/// Returns whether the lease says that the memory belongs only to the consumer.
fn is_alone(tensor: Tensor) -> bool {
    let managed = tensor.into_managed();
    managed.flags().contains(DlpackFlags::IS_COPIED)
}

#[test]
fn memory_that_no_other_tensor_shares_is_the_consumers() {
    let tensor = counted(&[2, 3]);
    let convert = |options| transfer(&on_host(), &on_host(), &tensor, &(Arc::new(HostOnly) as _), &options).unwrap().0;
    assert!(is_alone(convert(Options::copied())) && !is_alone(convert(Options::default())));
    assert!(!is_alone(tensor.clone()) && is_alone(tensor));
    // By a copy into memory that the adapter allocates, as with the kernels' ordering.
    let fresh = counted(&[3]);
    let other = fresh.clone();
    assert!(!is_alone(fresh) && is_alone(other));
}

fn in_stream(device: Device) -> DLPack {
    // SAFETY: the ordering of these tests waits for no stream.
    unsafe { DLPack::in_stream(device, READER) }
}

fn received<M: ManagedTensorBase>(managed: Managed<M>, origin: Origin) -> Tensor {
    // SAFETY: the tensor was made by `managed`. Its memory, which does not exist, is not touched.
    unsafe { Tensor::new(managed, |_, _| Ok(origin)) }.expect("it is sound")
}

fn on_the_host(access: Access, recorder: &Arc<Recorder>) -> Paper {
    Paper { device: Device::CPU, stream: None, access, strides: vec![-3, 1], ..Paper::new(&recorder.log) }
}

#[test]
fn a_tensor_converts_in_place_and_keeps_its_memory() {
    let recorder = Arc::new(Recorder::default());
    let managed = converted(&recorder, on_the_host(Access::ReadOnly, &recorder)).into_managed();
    let tensor = received(managed, Origin::host());
    let (view, done) = transfer(&on_host(), &on_host(), &tensor, &ordering(&recorder), &Options::default()).unwrap();
    assert_eq!((done.plan, done.bytes_copied, view.data()), (Plan::ZeroCopy, 0, 0x1000));
    assert_eq!((view.layout().shape(), view.layout().strides()), (&[2, 3][..], &[-3, 1][..]));
    assert_eq!(view.access(), Access::ReadOnly);
    let clone = view.clone();
    drop((tensor, view));
    assert_eq!(taken(&recorder.log), []);
    std::thread::spawn(move || drop(clone)).join().unwrap();
    assert_eq!(taken(&recorder.log), [Dropped]);
}

#[test]
fn unversioned_tensors_do_not_state_their_access() {
    let recorder = Arc::new(Recorder::default());
    let managed =
        converted(&recorder, on_the_host(Access::ReadWrite, &recorder)).into_legacy().expect("it may be written to");
    let tensor = received(managed, Origin::host());
    assert_eq!(tensor.access(), Access::Unstated);
    drop(tensor);
    assert_eq!(taken(&recorder.log), [Dropped]);
}

#[test]
fn a_tensor_on_a_device_is_ordered_in_both_directions() {
    let recorder = Arc::new(Recorder::default());
    let managed = converted(&recorder, Paper::new(&recorder.log)).into_managed();
    assert_eq!(taken(&recorder.log), [Ordered(OWNER, READER)]);
    let origin = Origin::new(Some(READER), Reuse::Unknown);
    let tensor = received(managed, origin);
    let dlpack = in_stream(GPU);
    let office = Office::new(Strides::Any);
    *office.side.current.lock().unwrap() = Some(OWNER);
    let (item, _) = transfer(&dlpack, &office, &tensor, &ordering(&recorder), &Options::default()).unwrap();
    assert_eq!(taken(&recorder.log), [Ordered(READER, OWNER)]);
    drop(tensor);
    drop(item);
    let events = taken(&recorder.log);
    assert_eq!(events, [Ordered(OWNER, READER), ReleasedLater(READER), Ordered(READER, OWNER), Dropped]);
}

#[test]
fn a_view_is_exported_in_the_stream_of_its_adapter() {
    let recorder = Arc::new(Recorder::default());
    let dlpack = in_stream(GPU);
    let office = Office::new(Strides::Any);
    let paper = Item::Own(Paper::new(&recorder.log));
    let (view, _) = transfer(&office, &dlpack, &paper, &ordering(&recorder), &Options::default()).unwrap();
    let exported = dlpack.export(&view).unwrap();
    assert_eq!((exported.buffer().stream(), exported.buffer().reuse()), (Some(READER), Reuse::Unknown));
    assert_eq!(on_host().export(&view).unwrap_err().kind(), ErrorKind::Device);
}

#[test]
fn a_device_without_a_stream_is_refused() {
    let recorder = Arc::new(Recorder::default());
    let paper = Item::Own(Paper::new(&recorder.log));
    let refused = transfer(&Office::new(Strides::Any), &on_host(), &paper, &ordering(&recorder), &Options::in_place());
    assert_eq!(refused.expect_err("it is refused").kind(), ErrorKind::Device);
    assert_eq!(taken(&recorder.log), [Dropped]);
}

#[test]
fn copies_have_the_elements() {
    let (dlpack, host): (_, Arc<dyn Ordering>) = (on_host(), Arc::new(HostOnly));
    let tensor = counted(&[2, 3]);
    let options = Options::default().with_order(Order::ColumnMajor);
    let (copy, done) = transfer(&dlpack, &dlpack, &tensor, &host, &options).unwrap();
    assert_eq!((done.plan, done.bytes_copied), (Plan::Copy(Reason::Order), 24));
    assert_eq!((copy.layout().strides(), elements(&copy)), (&[1, 2][..], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
}

/// Safe code reads it by a transfer to a framework of vectors, for example.
#[test]
fn fresh_memory_is_zeros_whatever_was_freed_before() {
    for nbytes in [0, 1, 63, 64, 1000, 70_000_i64] {
        drop(vec![0xAB_u8; nbytes as usize + 64]);
        // SAFETY: the elements are numbers, of any bits.
        let fresh = unsafe { on_host().empty(Device::CPU, DType::UINT8, &[nbytes], Order::RowMajor) }.unwrap();
        assert!(fresh.data().is_multiple_of(64));
        let first = std::ptr::with_exposed_provenance::<u8>(fresh.data());
        // SAFETY: the tensor has so many bytes; that they are initialised is what Miri checks here.
        assert!((0..nbytes as usize).all(|i| unsafe { first.add(i).read() } == 0), "{nbytes} bytes");
    }
}

#[test]
fn memory_of_a_device_is_not_allocated() {
    // SAFETY: the call makes no tensor.
    let refused = unsafe { on_host().empty(GPU, DType::FLOAT32, &[1], Order::RowMajor) };
    assert_eq!(refused.expect_err("it is refused").kind(), ErrorKind::CopyNeeded);
}
