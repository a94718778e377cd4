//! The order of streams, without a device: addresses that nothing reads, and an ordering that records its calls.

use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceBuffer, DeviceKind, Error, ErrorKind, Export, Layout,
    Lease, Memory, Offer, Options, Ordering, Plan, Profile, Result, Reuse, Stream, Strides, Views, stats, transfer,
};
use bridge_ort::Ort;
use std::sync::{Arc, Mutex};

const DEVICE: Device = Device::cuda(1);
// SAFETY: no driver sees this stream.
const PRODUCER: Stream = unsafe { Stream::from_handle(0x10) };
// SAFETY: no driver sees this stream.
const COMPUTE: Stream = unsafe { Stream::from_handle(0x20) };
const ADDRESS: usize = 0x7f00_0000_0000;

/// Which stream was made to wait for which.
#[derive(Default)]
struct Recorder(Mutex<Vec<(Stream, Stream)>>);

// SAFETY: the tests know what it does not do: their memory is only numbers, or of the host.
unsafe impl Ordering for Recorder {
    unsafe fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        assert_eq!(device, DEVICE);
        self.0.lock().unwrap().push((earlier, later));
        Ok(())
    }

    unsafe fn release_later(&self, _: Device, _: Stream, buffer: Box<dyn DeviceBuffer>) {
        drop(buffer);
    }
}

/// A framework with one stream. Its tensors are addresses.
struct Kernels {
    profile: Profile,
    views: Arc<Work>,
}

#[derive(Default)]
struct Work(Views);

// SAFETY: the tests do their work in this stream.
unsafe impl Consumer for Work {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(Some(PRODUCER))
    }

    fn views(&self) -> &Views {
        &self.0
    }
}

impl Kernels {
    fn new() -> Self {
        let profile = Profile::export_only("kernels")
            .with_dtypes(vec![DType::FLOAT32])
            .with_strides(Strides::Any)
            .with_devices(vec![DeviceKind::CUDA]);
        Self { profile, views: Arc::default() }
    }
}

// SAFETY: an array keeps its lease, and the consumer has the stream of the tests.
unsafe impl Adapter for Kernels {
    type Tensor = Option<Lease>;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.views.clone()
    }

    fn export(&self, _: &Option<Lease>) -> Result<Export> {
        let layout = Layout::new(DType::FLOAT32, &[2, 3], None, 0)?;
        let allocation = Allocation::new(
            ADDRESS..ADDRESS + layout.nbytes(),
            DEVICE,
            Access::ReadWrite,
            Some(PRODUCER),
            Reuse::InStreamOrder,
        );
        // SAFETY: nothing reads the memory, which does not exist.
        Export::new(DType::FLOAT32, layout, unsafe { Memory::new(allocation, ()) })
    }

    fn import(&self, offer: Offer) -> Result<Option<Lease>> {
        Ok(Some(offer.accept(&self.profile, &self.views)?))
    }

    fn compact(&self, _: &Option<Lease>) -> Result<Option<Lease>> {
        Err(Error::new(ErrorKind::CopyNeeded, "nothing here needs a copy"))
    }
}

/// The compute stream waits for the producer's kernels; the consumer's stream waits for the session's; and each owner's waits
/// for its readers before the memory is used again.
#[test]
fn sessions_are_ordered_after_the_kernels_of_others() {
    // SAFETY: no session runs, and nothing reads the memory.
    let ort = match unsafe { Ort::with_compute_stream(DEVICE, COMPUTE) } {
        Err(error) if error.kind() == ErrorKind::Missing && std::env::var_os("ORT_DYLIB_PATH").is_none() => {
            return println!("skipped: {error}");
        }
        ort => ort.unwrap(),
    };
    let (kernels, recorder) = (Kernels::new(), Arc::new(Recorder::default()));
    let ordering: Arc<dyn Ordering> = recorder.clone();
    let taken = || std::mem::take(&mut *recorder.0.lock().unwrap());
    let before = stats();

    let (input, done) = transfer(&kernels, &ort, &None, &ordering, &Options::default()).unwrap();
    assert_eq!((done.plan, done.ordered), (Plan::ZeroCopy, Some((PRODUCER, COMPUTE))));
    assert_eq!(taken(), [(PRODUCER, COMPUTE)]);
    assert_eq!((input.data_ptr().addr(), input.memory_info().device_id()), (ADDRESS, 1));

    let (seen, done) = transfer(&ort, &kernels, &input, &ordering, &Options::default()).unwrap();
    assert_eq!((done.plan, done.ordered), (Plan::ZeroCopy, Some((COMPUTE, PRODUCER))));
    assert_eq!(taken(), [(COMPUTE, PRODUCER)]);

    drop(input);
    assert_eq!(taken(), [], "the view keeps the tensor");
    drop(seen);
    assert_eq!(taken(), [(PRODUCER, COMPUTE), (COMPUTE, PRODUCER)]);
    let after = stats();
    assert_eq!((after.leased - before.leased, after.released - before.released, after.leaked), (2, 2, before.leaked));
}
