//! Device memory of `cudarc` as tensors, and tensors of any framework as its views and launch arguments.
//!
//! [`Cudarc`] is the adapter: one stream of a device, in which the caller works. [`DeviceArray`] is its tensor:
//! elements of one dtype in any strides on the device, that a `CudaSlice`, the caller or another framework owns.
//!
//! ```no_run
//! use bridge_core::{Options, transfer};
//! use bridge_cudarc::{Cudarc, DeviceArray};
//! use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
//!
//! # fn example(kernel: cudarc::driver::CudaFunction) -> bridge_core::Result<()> {
//! let context = CudaContext::new(0).unwrap();
//! let (producer, consumer) = (context.default_stream(), context.new_stream().unwrap());
//! let made = DeviceArray::from_slice(producer.clone_htod(&[1.0f32; 12]).unwrap(), &[3, 4], None, 0)?;
//!
//! // The consumer's stream waits for the producer's, and the host for nothing.
//! let (from, to) = (Cudarc::new(producer)?, Cudarc::new(consumer.clone())?);
//! let (mut tensor, _) = transfer(&from, &to, &made, bridge_cuda::ordering(), &Options::default())?;
//! let mut writing = tensor.write::<f32>()?;
//! // SAFETY: the kernel writes to 12 elements.
//! unsafe { consumer.launch_builder(&kernel).arg(&mut writing.view()).launch(LaunchConfig::for_num_elems(12)) }.unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! # When memory is touched, and when it returns
//!
//! The stream of an array holds the last work on it. A [`Reading`] or a [`Writing`] makes that stream wait, when it is
//! dropped, for the other streams of `cudarc` in which its views were used, by the events of `cudarc`; one that is
//! forgotten does so when the array is dropped. Where event tracking is switched off, record those streams with
//! [`Cudarc::record_stream`]. The memory of another framework returns to it after that stream when the last
//! [`DeviceArray`] over it is dropped. Neither frees it.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod array;
mod context;
mod element;

pub use array::{DeviceArray, Reading, Writing};
pub use context::keeping_context;
/// The crate `cudarc`, in the version that this adapter takes: a program that names it by this path cannot have another.
#[doc(no_inline)]
pub use cudarc as framework;
pub use element::Element;

use bridge_core::{
    Adapter, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Keep, Offer, Order, Profile, Result,
    Stream, Strides, Views,
};
use context::{device_of, handle_of};
use cudarc::driver::{CudaContext, CudaStream};
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// One stream of a device, as a framework.
#[derive(Clone)]
pub struct Cudarc {
    consumer: Arc<InStream>,
}

bridge_core::debug_fields!(impl[] Cudarc);

impl Cudarc {
    /// Makes the adapter for work in `stream`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`] for a stream of a context other than the device's primary one, which the frameworks share.
    pub fn new(stream: Arc<CudaStream>) -> Result<Self> {
        if !stream.context().is_primary() {
            let text = "the stream's context is not the device's primary one: make the context with CudaContext::new";
            return Err(Error::new(ErrorKind::Device, text));
        }
        Ok(Self { consumer: Arc::new(InStream { stream }) })
    }

    /// Makes the adapter for a new stream of a device.
    ///
    /// # Errors
    ///
    /// Those of [`bridge_cuda::available`], without which `cudarc` panics, and [`ErrorKind::Driver`].
    pub fn of_device(ordinal: usize) -> Result<Self> {
        bridge_cuda::available()?;
        let count = bridge_cuda::device_count();
        if ordinal >= count {
            let text = format!("there is no cuda:{ordinal}: this process has {count}");
            return Err(Error::new(ErrorKind::Device, text));
        }
        context::restored(|| Ok(Self::new(CudaContext::new(ordinal)?.new_stream()?)?))
    }

    /// Returns the stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.consumer.stream
    }

    /// Records that a view of imported memory is used in another stream than the array's, by launches of which `cudarc`
    /// keeps no events. The owner waits for it as well. Returns the number of views that this concerns.
    pub fn record_stream(&self, array: &DeviceArray, stream: &Arc<CudaStream>) -> usize {
        let keep = || Some(Arc::clone(stream) as Keep);
        // SAFETY: the reference keeps the stream now, and what `keep` returns does from then on.
        unsafe { VIEWS.used(array.device(), array.data() as usize, handle_of(stream).on_any_thread(), keep) }
    }
}

/// The views of imported memory that `cudarc` has, whatever stream they were made in.
static VIEWS: LazyLock<Views> = LazyLock::new(Views::default);

static PROFILE: LazyLock<Profile> = LazyLock::new(|| {
    Profile::export_only("cudarc")
        .with_dtypes(DType::NAMED.iter().map(|(dtype, _)| *dtype).filter(|dtype| dtype.itemsize().is_some()).collect())
        .with_strides(Strides::Any)
        .with_alignment(1)
        .with_devices(vec![DeviceKind::CUDA])
});

/// The streams of arrays that were exported by the adapter for another stream, by their handles: a use of such an array is
/// recorded for all views of its memory, which may outlive it.
static OTHERS: Mutex<BTreeMap<Stream, Weak<CudaStream>>> = Mutex::new(BTreeMap::new());

fn others() -> MutexGuard<'static, BTreeMap<Stream, Weak<CudaStream>>> {
    OTHERS.lock().unwrap_or_else(PoisonError::into_inner)
}

struct InStream {
    stream: Arc<CudaStream>,
}

impl InStream {
    fn check(&self, device: Device) -> Result<()> {
        let own = device_of(&self.stream);
        if device == own {
            return Ok(());
        }
        let text = format!("the stream is one of {own}, not of {device}: use an adapter for a stream of that device");
        Err(Error::new(ErrorKind::Device, text))
    }
}

// SAFETY: an array is used in the stream of its adapter, which this keeps, and in those that `record_stream` notes.
unsafe impl Consumer for InStream {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        self.check(device)?;
        Ok(Some(handle_of(&self.stream)))
    }

    fn keep(&self, _: Device, stream: Stream) -> Option<Keep> {
        match stream == handle_of(&self.stream) {
            true => Some(Arc::clone(&self.stream) as Keep),
            // The array that was exported in it keeps it during this call.
            false => others().get(&stream)?.upgrade().map(|stream| stream as Keep),
        }
    }

    fn views(&self) -> &Views {
        &VIEWS
    }
}

// SAFETY: an array keeps its lease. It is used in the stream that the consumer has, and written to only where it may
// be.
unsafe impl Adapter for Cudarc {
    type Tensor = DeviceArray;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    /// The stream of the buffer is that of the array, which holds the last work on it.
    fn export(&self, array: &DeviceArray) -> Result<Export> {
        if handle_of(array.stream()) != handle_of(&self.consumer.stream) {
            let mut others = others();
            others.retain(|_, stream| stream.strong_count() > 0);
            others.insert(handle_of(array.stream()), Arc::downgrade(array.stream()));
        }
        array.export()
    }

    fn import(&self, offer: Offer) -> Result<DeviceArray> {
        let lease = offer.accept(&PROFILE, &self.consumer)?;
        self.consumer.check(lease.device())?;
        Ok(DeviceArray::of_lease(lease, Arc::clone(&self.consumer.stream)))
    }

    fn overwritten(&self, array: &DeviceArray) -> Result<()> {
        if array.access().forbids_writes() { Err(array::read_only()) } else { Ok(()) }
    }

    /// Allocates with `cudarc`, in the adapter's stream.
    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<DeviceArray> {
        if device != device_of(&self.consumer.stream) {
            let text = format!("the stream cannot allocate on {device}: use an adapter for a stream of that device");
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        DeviceArray::fresh(&self.consumer.stream, dtype, shape, order)
    }
}
