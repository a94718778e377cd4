//! Tensors of ONNX Runtime, through the crate `ort`: in and out of sessions and IO bindings, in place.
//!
//! [`Ort`] is the adapter. Its tensor is an `Arc<DynTensor>`: `DynTensor` is `ort`'s own type, and a view keeps it by
//! the `Arc`. The tensor that comes in is an `OrtValue` that keeps the memory itself, by a deleter of ONNX Runtime: so
//! a session, an IO binding and its outputs may hold it for as long as they like.
//!
//! ```no_run
//! use bridge_core::{HostOnly, Options, Ordering, transfer};
//! use bridge_ndarray::{HostArray, NdArray};
//! use bridge_ort::Ort;
//! use ort::session::Session;
//! use std::sync::Arc;
//!
//! let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
//! // SAFETY: nothing writes to the input while the session runs.
//! let ort = unsafe { Ort::new()? };
//! let mut session = Session::builder().unwrap().commit_from_file("model.onnx").unwrap();
//!
//! let image = HostArray::from(ndarray::Array4::<f32>::zeros((1, 3, 224, 224)));
//! // SAFETY: the program uses the memory of a tensor on one thread at a time.
//! let (input, _) = transfer(&unsafe { NdArray::new() }, &ort, &image, &ordering, &Options::default())?;
//! let mut binding = session.create_binding().unwrap();
//! binding.bind_input("image", &input).unwrap();
//! binding.bind_output_to_device("scores", &Default::default()).unwrap();
//! let mut outputs = session.run_binding(&binding).unwrap();
//!
//! let scores = Arc::new(outputs.remove("scores").unwrap().downcast().unwrap());
//! // SAFETY: the program uses the memory of a tensor on one thread at a time.
//! let (scores, _) = transfer(&ort, &unsafe { NdArray::new() }, &scores, &ordering, &Options::default())?;
//! println!("{}", scores.to_array::<f32>()?);
//! # Ok::<(), bridge_core::Error>(())
//! ```
//!
//! # On a CUDA device
//!
//! ONNX Runtime does not expose its stream, so other work cannot be ordered with it. It accepts one: create a
//! stream, pass it to the CUDA provider (`ort::ep::CUDA::with_compute_stream`) and to [`Ort::with_compute_stream`]. A
//! tensor that comes in is then ready in that stream, after the kernels of its producer, and a tensor that goes out is
//! ready after the session's. By default a run also waits for the device at its end;
//! `ort::session::RunOptions::disable_device_sync` removes that wait. An output on the host, also one in pinned memory,
//! is complete only after a run that waits.
//!
//! A binding that runs again writes to the same outputs. Drop the views of the last run first: the compute stream then
//! waits for their readers.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod elements;
mod export;
mod import;
mod runtime;

/// The crate `ort`, in the version that this adapter takes: a program that names it by this path cannot have another.
#[doc(no_inline)]
pub use ort as framework;
pub use runtime::load;

use bridge_core::{
    Adapter, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Offer, Order, Profile, Result, Stream,
    Views,
};
use ort::value::DynTensor;
use std::sync::{Arc, LazyLock};

/// ONNX Runtime, with the compute stream of the sessions of one device, if any.
#[derive(Clone)]
pub struct Ort {
    profile: Arc<Profile>,
    consumer: Arc<Compute>,
}

bridge_core::debug_fields!(impl[] Ort);

impl Ort {
    /// Makes the adapter for tensors on the host, and loads ONNX Runtime if nothing has.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] where ONNX Runtime cannot be loaded, or is older than 1.22.
    ///
    /// # Safety
    ///
    /// `ort` reads and writes elements through Rust's references (`try_extract_tensor`), and does not know that they
    /// are used elsewhere. While a tensor of another framework, or of another process, shares the memory of a tensor of
    /// ONNX Runtime:
    ///
    /// - No code writes to it through the one while another thread reads or writes it through the other.
    /// - No reference to its elements is held while other code writes to it, and no mutable one while other code reads
    ///   it: a slice of `try_extract_tensor` sees what [`copy_into`](bridge_core::copy_into) writes, also on one thread.
    ///
    /// No code writes to a tensor of memory that never changes ([`Access::Immutable`](bridge_core::Access::Immutable)).
    ///
    /// Every constructor is unsafe, because `try_extract_tensor_mut` is safe and knows no other owner.
    ///
    /// Elements of `bool` that come in are 0 or 1. Other frameworks write other bytes as well, which no `bool` of Rust
    /// has.
    ///
    /// The library that `ORT_DYLIB_PATH` names, or else the linker finds, is ONNX Runtime: its code runs, unless
    /// [`load`] has loaded one.
    pub unsafe fn new() -> Result<Self> {
        // SAFETY: the caller's obligation.
        unsafe { Self::with(None) }
    }

    /// Makes the adapter for tensors on the host and on `device`, whose sessions work in `stream`.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), [`ErrorKind::Device`] for a device that is not of CUDA, and [`ErrorKind::Argument`]
    /// for [`Stream::PER_THREAD`], which is another stream on each thread.
    ///
    /// # Safety
    ///
    /// That of [`new`](Self::new). The stream belongs to the device, and is destroyed only after the adapter and the
    /// last tensor that was converted by it. Every session whose tensors are converted on the device was made with it
    /// as its compute stream.
    pub unsafe fn with_compute_stream(device: Device, stream: Stream) -> Result<Self> {
        if device.kind != DeviceKind::CUDA {
            let text = format!("{device} has no compute stream: pass a CUDA device, or call Ort::new");
            return Err(Error::new(ErrorKind::Device, text));
        }
        if stream == Stream::PER_THREAD {
            let text = "tensors are dropped on any thread, and the per-thread default stream is another one on each: pass \
                        Stream::LEGACY or a stream of your own";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        // SAFETY: the caller's obligation.
        unsafe { Self::with(Some((device, stream))) }
    }

    /// # Safety
    ///
    /// That of [`new`](Self::new), and with a stream that of [`with_compute_stream`](Self::with_compute_stream).
    unsafe fn with(compute: Option<(Device, Stream)>) -> Result<Self> {
        // SAFETY: the caller's obligation.
        let mut profile = unsafe { runtime::profile() }?.clone();
        profile.devices.extend(compute.map(|(device, _)| device.kind));
        Ok(Self { profile: Arc::new(profile), consumer: Arc::new(Compute { compute }) })
    }
}

/// The views of imported memory that ONNX Runtime has, whatever stream they were made in.
static VIEWS: LazyLock<Views> = LazyLock::new(Views::default);

struct Compute {
    compute: Option<(Device, Stream)>,
}

// SAFETY: a session works in the stream that the caller of the constructor has named.
unsafe impl Consumer for Compute {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        match self.compute {
            _ if device.kind == DeviceKind::CPU => Ok(None),
            Some((own, stream)) if own == device => Ok(Some(stream)),
            _ => {
                let text =
                    format!("the compute stream of {device} is unknown: make the adapter by with_compute_stream");
                Err(Error::new(ErrorKind::Device, text))
            }
        }
    }

    fn views(&self) -> &Views {
        &VIEWS
    }
}

// SAFETY: a value keeps its lease. Streams and writes are what the contracts of the constructors say.
unsafe impl Adapter for Ort {
    type Tensor = Arc<DynTensor>;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, tensor: &Arc<DynTensor>) -> Result<Export> {
        export::export(&*self.consumer, tensor)
    }

    fn import(&self, offer: Offer) -> Result<Arc<DynTensor>> {
        let lease = offer.accept(&self.profile, &self.consumer)?;
        // The lease is ordered after the compute stream of its device.
        self.consumer.current_stream(lease.device())?;
        import::wrap(lease)
    }

    fn overwritten(&self, _: &Arc<DynTensor>) -> Result<()> {
        Ok(())
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Arc<DynTensor>> {
        import::empty(device, dtype, shape, order)
    }
}
