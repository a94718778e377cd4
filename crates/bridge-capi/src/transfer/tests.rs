//! What a transfer orders, over streams that only record it.

use super::*;
use crate::reader::VIEWS;
use bridge_core::{Access, Allocation, Copies, DeviceBuffer, Export, Keep, Layout, Memory, Reuse, Strided};
use std::mem::take;
use std::sync::Mutex;

const GPU: Device = Device::cuda(0);
// SAFETY: no driver sees this stream.
const OWNER: Stream = unsafe { Stream::from_handle(0xa0) };
// SAFETY: no driver sees this stream.
const READER: Stream = unsafe { Stream::from_handle(0xb0) };
// SAFETY: no driver sees this stream.
const OTHER: Stream = unsafe { Stream::from_handle(0xc0) };

#[derive(Debug, PartialEq)]
enum Call {
    Order(Stream, Stream),
    ReleaseLater(Stream),
    Allocate(usize, Stream),
    Copy(Stream),
    Freed,
}
use Call::{Allocate, Copy, Freed, Order as Ordered, ReleaseLater};

/// An ordering and copies that do nothing but record, over memory that is never touched.
#[derive(Default)]
struct Recorded(Arc<Mutex<Vec<Call>>>);

impl Recorded {
    fn call(&self, call: Call) {
        self.0.lock().unwrap().push(call);
    }
}

struct Block(Arc<Mutex<Vec<Call>>>);

impl Drop for Block {
    fn drop(&mut self) {
        self.0.lock().unwrap().push(Freed);
    }
}

// SAFETY: it orders by events of the driver, or returns its error, and drops buffers after them.
unsafe impl Ordering for Recorded {
    unsafe fn order(&self, _: Device, earlier: Stream, later: Stream) -> Result<()> {
        self.call(Ordered(earlier, later));
        Ok(())
    }

    unsafe fn release_later(&self, _: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        self.call(ReleaseLater(stream));
        drop(buffer);
    }

    fn copies(&self) -> Option<&dyn Copies> {
        Some(self)
    }
}

// SAFETY: a copy that returns no error writes every element.
unsafe impl Copies for Recorded {
    unsafe fn copy(&self, _: Strided<'_>, _: Strided<'_>, _: u128, stream: Option<Stream>) -> Result<()> {
        self.call(Copy(stream.expect("copies on the device are in a stream")));
        Ok(())
    }

    unsafe fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        _: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        self.call(Allocate(nbytes, stream));
        let (bytes, access) = (0x20000..0x20000 + nbytes, Access::ReadWrite);
        let allocation = Allocation::new(bytes, device, access, Some(stream), Reuse::InStreamOrder);
        // SAFETY: no code touches the memory.
        Ok(Box::new(unsafe { Memory::new(allocation, Block(self.0.clone())) }))
    }
}

/// A tensor of 4 by 6 float32 at its own address, whose memory is reused at any time.
fn tensor(address: usize, strides: [i64; 2], calls: &Arc<Mutex<Vec<Call>>>) -> CTensor {
    let layout = Layout::new(DType::FLOAT32, &[4, 6], Some(&strides), 0).unwrap();
    let (bytes, access) = (address..address + 96, Access::ReadWrite);
    let allocation = Allocation::new(bytes, GPU, access, Some(OWNER), Reuse::Unknown);
    // SAFETY: no code touches the memory.
    let memory = unsafe { Memory::new(allocation, Block(calls.clone())) };
    CTensor::new(Export::new(DType::FLOAT32, layout, memory).unwrap())
}

fn any(tensor: &CTensor) -> Profile {
    // SAFETY: null is allowed.
    unsafe { profile(std::ptr::null(), tensor, None) }.unwrap().0
}

#[test]
fn the_reader_waits_for_the_owner_and_the_owner_for_every_reader() {
    let recorded = Recorded::default();
    let calls = recorded.0.clone();
    let ordering: Arc<dyn Ordering> = Arc::new(recorded);
    let tensor = tensor(0x10000, [6, 1], &calls);
    let (lease, done) = transferred(&tensor, any(&tensor), &Options::default(), READER, &ordering).unwrap();
    assert_eq!((done.plan, done.ordered), (Plan::ZeroCopy, Some((OWNER, READER))));
    assert_eq!(take(&mut *calls.lock().unwrap()), [Ordered(OWNER, READER)]);

    // In a managed tensor, with a further stream, and after the program has dropped the tensor.
    // SAFETY: no driver sees this stream.
    assert_eq!(unsafe { VIEWS.used(GPU, 0x10004, OTHER, || None) }, 1);
    let managed = managed(lease, true);
    drop(tensor);
    assert_eq!(*calls.lock().unwrap(), []);
    // SAFETY: the test owns the managed tensor.
    unsafe { managed.release() };
    assert_eq!(*calls.lock().unwrap(), [Ordered(READER, OWNER), Ordered(OTHER, OWNER), ReleaseLater(OWNER), Freed]);
}

#[test]
fn one_stream_needs_no_order() {
    let recorded = Recorded::default();
    let calls = recorded.0.clone();
    let ordering: Arc<dyn Ordering> = Arc::new(recorded);
    let tensor = tensor(0x11000, [6, 1], &calls);
    let (lease, done) = transferred(&tensor, any(&tensor), &Options::default(), OWNER, &ordering).unwrap();
    drop((tensor, lease));
    assert_eq!((done.ordered, &calls.lock().unwrap()[..]), (None, &[ReleaseLater(OWNER), Freed][..]));
}

#[test]
fn a_copy_is_made_in_the_owners_stream_and_returned_after_the_reader() {
    let recorded = Recorded::default();
    let calls = recorded.0.clone();
    let ordering: Arc<dyn Ordering> = Arc::new(recorded);
    let tensor = tensor(0x12000, [1, 4], &calls);
    let compact = || any(&tensor).with_strides(Strides::Compact);
    let (planned, device) = planned(&tensor, compact(), &Options::default(), &ordering).unwrap();
    take(&mut *calls.lock().unwrap());

    let (lease, done) = transferred(&tensor, compact(), &Options::default(), READER, &ordering).unwrap();
    assert_eq!((planned.plan, planned.bytes_copied, planned.copied_by), (done.plan, done.bytes_copied, done.copied_by));
    assert_eq!((done.plan, done.copied_by, device), (Plan::Copy(Reason::Strides), Some(CopiedBy::Kernels), GPU));
    assert!(lease.is_copy());
    // The original is kept by the tensor.
    let made = [Allocate(96, OWNER), Copy(OWNER), ReleaseLater(OWNER), Ordered(OWNER, READER)];
    assert_eq!(take(&mut *calls.lock().unwrap()), made);
    drop(lease);
    assert_eq!(take(&mut *calls.lock().unwrap()), [Ordered(READER, OWNER), Freed]);
    drop(tensor);
    assert_eq!(*calls.lock().unwrap(), [Freed]);
}

#[test]
fn a_view_that_is_used_again_by_another_owner_is_waited_for() {
    let recorded = Recorded::default();
    let calls = recorded.0.clone();
    let ordering: Arc<dyn Ordering> = Arc::new(recorded);
    let first = tensor(0x13000, [6, 1], &calls);
    let (lease, _) = transferred(&first, any(&first), &Options::default(), READER, &ordering).unwrap();
    // The consumer passes its view on, as a tensor whose stream is the one that it wrote in.
    let bytes = 0x13000..0x13000 + 96;
    let (access, stream) = (Access::ReadWrite, Some(OTHER));
    let allocation = Allocation::new(bytes, GPU, access, stream, Reuse::Unknown);
    // SAFETY: no code touches the memory.
    let memory = unsafe { Memory::new(allocation, lease) };
    let layout = Layout::new(DType::FLOAT32, &[24], None, 0).unwrap();
    let second = CTensor::new(Export::new(DType::FLOAT32, layout, memory).unwrap());
    let (lease, _) = transferred(&second, any(&second), &Options::default(), READER, &ordering).unwrap();
    drop((first, second));
    take(&mut *calls.lock().unwrap());
    drop(lease);
    let expected = [
        Ordered(READER, OTHER),
        ReleaseLater(OTHER),
        Ordered(READER, OWNER),
        Ordered(OTHER, OWNER),
        ReleaseLater(OWNER),
        Freed,
    ];
    assert_eq!(*calls.lock().unwrap(), expected);
}

#[test]
fn texts_are_those_of_core() {
    for (reason, text) in REASONS {
        assert_eq!(text.to_str(), Ok(reason.to_string().as_str()));
    }
    for (by, text) in COPIERS {
        assert_eq!(text.to_str(), Ok(by.to_string().as_str()));
    }
}
