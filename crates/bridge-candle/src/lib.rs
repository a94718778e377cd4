//! Tensors of candle: out in place, in by one copy.
//!
//! [`Candle`] is the adapter, and `candle_core::Tensor` its tensor. A tensor goes out in place, with its strides and
//! its offset. It comes in as a copy in memory of candle: a `CpuStorage` is a set of vectors, and a vector frees its
//! memory itself, so that candle cannot keep memory of another owner. [`plan`](bridge_core::plan()) says so:
//! [`Reason::MemoryNotOwned`](bridge_core::Reason::MemoryNotOwned).
//!
//! ```
//! use bridge_candle::Candle;
//! use bridge_core::{HostOnly, Options, Ordering, Plan, Reason, transfer};
//! use bridge_ndarray::{HostArray, NdArray};
//! use candle_core::{Device, Tensor};
//! use ndarray::array;
//! use std::sync::Arc;
//!
//! let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
//! // SAFETY: this program has no custom operations, and writes to no tensor.
//! let candle = unsafe { Candle::new() };
//! let tensor = Tensor::arange(0f32, 6.0, &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
//!
//! // SAFETY: the program uses the memory of a tensor on one thread at a time.
//! let (seen, done) = transfer(&candle, &unsafe { NdArray::new() }, &tensor.t().unwrap(), &ordering, &Options::default())?;
//! assert_eq!(done.plan, Plan::ZeroCopy);
//! assert_eq!(seen.to_array::<f32>()?, array![[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]].into_dyn());
//!
//! // SAFETY: the program uses the memory of a tensor on one thread at a time.
//! let (back, done) = transfer(&unsafe { NdArray::new() }, &candle, &seen, &ordering, &Options::default())?;
//! assert_eq!(done.plan, Plan::Copy(Reason::MemoryNotOwned));
//! assert_eq!(back.dims(), [3, 2]);
//! # Ok::<(), bridge_core::Error>(())
//! ```
//!
//! # CUDA
//!
//! With the feature `cuda`, tensors on CUDA devices go out in place, in the stream of their device. `Candle::with_cuda`
//! makes an adapter that also takes them in: by one copy on the device, in its stream, into memory that candle
//! allocates. The reason is the same as on the host: a slice of `cudarc` frees its memory itself. The host waits for
//! neither. Copies on devices are those of `bridge-cuda`: pass its ordering.
//!
#![cfg_attr(feature = "cuda", doc = "```no_run")]
#![cfg_attr(not(feature = "cuda"), doc = "```ignore")]
//! use bridge_candle::Candle;
//! use bridge_core::{Options, Plan, Reason, transfer};
//! use bridge_cudarc::Cudarc;
//! use candle_core::{Device, Tensor};
//!
//! let device = Device::new_cuda_with_stream(0).unwrap();
//! // SAFETY: this program has no custom operations, and uses a tensor only in the stream of its device.
//! let candle = unsafe { Candle::with_cuda(device.as_cuda_device().unwrap()) };
//! let (cudarc, ordering) = (Cudarc::of_device(0)?, bridge_cuda::ordering());
//!
//! let tensor = Tensor::arange(0f32, 6.0, &device).unwrap();
//! let (array, done) = transfer(&candle, &cudarc, &tensor, ordering, &Options::default())?;
//! assert_eq!(done.plan, Plan::ZeroCopy);
//! let (back, done) = transfer(&cudarc, &candle, &array, ordering, &Options::default())?;
//! assert_eq!(done.plan, Plan::Copy(Reason::MemoryNotOwned));
//! # Ok::<(), bridge_core::Error>(())
//! ```
//!
//! The build compiles candle's kernels with `nvcc` of a CUDA toolkit, for the GPU of the machine or for
//! `CUDA_COMPUTE_CAP` (`90` for an H100 or H200). It links the driver, the CUDA runtime, cuBLAS and cuRAND, so that the
//! program starts only where those libraries are. Without the feature a tensor on a device is refused with
//! [`ErrorKind::Device`]; so is a tensor on Metal in any case.
//!
//! Take `Device::new_cuda_with_stream` where you can. `Device::new_cuda` works in the default stream of each thread,
//! and a tensor may have been written in that of another thread. So the adapter orders others after the legacy default
//! stream, which waits for the streams of all threads, and the memory of an exported tensor is kept until the device
//! has done that work.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(feature = "cuda")]
mod cuda;
mod export;
mod import;
mod storage;

/// The crate `candle_core`, in the version that this adapter takes: a program that names it by this path cannot have another.
#[doc(no_inline)]
pub use candle_core as framework;

use bridge_core::{
    Adapter, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Offer, Order, Profile, Result, Strides,
    Views,
};
use candle_core::Tensor;
use std::sync::{Arc, LazyLock};

static ON_HOST: LazyLock<Profile> = LazyLock::new(|| profile(vec![DeviceKind::CPU]));
#[cfg(feature = "cuda")]
static ON_CUDA: LazyLock<Profile> = LazyLock::new(|| profile(vec![DeviceKind::CPU, DeviceKind::CUDA]));

fn profile(devices: Vec<DeviceKind>) -> Profile {
    Profile::export_only("candle")
        .with_dtypes(storage::DTYPES.into())
        .with_strides(Strides::Any)
        .with_devices(devices)
        .with_keeps_read_only(false)
        .with_owns_memory(true)
}

/// candle on the host, and on a CUDA device.
#[derive(Clone)]
pub struct Candle {
    views: Arc<Views>,
    #[cfg(feature = "cuda")]
    cuda: Option<Arc<cuda::OnDevice>>,
}

bridge_core::debug_fields!(impl[] Candle);

impl Candle {
    /// Makes the adapter. It takes tensors in host memory in, and puts out any.
    ///
    /// # Safety
    ///
    /// candle reads the elements of a tensor through Rust's references, and does not know that they are used elsewhere.
    /// While a tensor of another framework shares the memory of a tensor of candle:
    ///
    /// - No code writes to it through the one while another thread reads or writes it through the other.
    /// - No reference to its elements is held while other code writes to it, and no mutable one while other code reads
    ///   it: that of a storage guard (`Tensor::storage_and_layout`) sees what [`copy_into`](bridge_core::copy_into)
    ///   writes, also on one thread, and an operation of candle in place has a mutable one until it ends.
    ///   candle uses its write lock only in its own operations, and a thread that held the guard would wait for
    ///   itself.
    /// - No custom operation in place (`candle_core::InplaceOp1` and its like) replaces the storage that it is to write
    ///   to. Those of candle itself write to its elements.
    ///
    /// Every constructor is unsafe, because operations of candle in place are safe methods of shared tensors.
    ///
    /// On a CUDA device the stream of the tensor orders both, and `cudarc` records only candle's uses. So:
    ///
    /// - Another stream (`Tensor::to_device` reads in that of its target) uses a tensor that another framework writes
    ///   to, or one that came in, only where it waits for the stream of the tensor (`cudarc`'s `CudaStream::join`).
    pub unsafe fn new() -> Self {
        Self {
            views: Arc::default(),
            #[cfg(feature = "cuda")]
            cuda: None,
        }
    }

    /// Makes the adapter for a device of candle, on which it also takes tensors in. candle joins tensors in one
    /// operation only if they were made with the same device: pass that of the model.
    ///
    /// # Safety
    ///
    /// As for [`new`](Self::new).
    #[cfg(feature = "cuda")]
    pub unsafe fn with_cuda(device: &candle_core::CudaDevice) -> Self {
        let cuda = cuda::OnDevice { candle: device.clone(), views: Views::default() };
        Self { views: Arc::default(), cuda: Some(Arc::new(cuda)) }
    }
}

// SAFETY: a storage keeps its lease. Candle works in the stream of the device, which the consumer names, and writes
// to tensors only as the contract of `new` allows.
unsafe impl Adapter for Candle {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        #[cfg(feature = "cuda")]
        if self.cuda.is_some() {
            return &ON_CUDA;
        }
        &ON_HOST
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = &self.cuda {
            return cuda.clone();
        }
        self.views.clone()
    }

    fn export(&self, tensor: &Tensor) -> Result<Export> {
        export::export(tensor)
    }

    /// Returns an error: core copies every tensor into an [`empty`](Adapter::empty) one.
    fn import(&self, _: Offer) -> Result<Tensor> {
        Err(Error::new(
            ErrorKind::CopyNeeded,
            "candle cannot hold memory of another owner: copy it into a tensor of Candle::empty",
        ))
    }

    /// Writes to the elements of every tensor that shares the storage, as `Tensor::slice_set` does.
    fn overwritten(&self, _: &Tensor) -> Result<()> {
        Ok(())
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = self.cuda.as_ref().filter(|_| device.kind == DeviceKind::CUDA) {
            cuda.check(device)?;
            return import::empty(dtype, shape, order, |dtype, numel, dims| cuda.allocate(dtype, numel, dims));
        }
        if device.kind != DeviceKind::CPU {
            let text = format!("this adapter cannot allocate on {device}: make one for candle's device there");
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        import::empty(dtype, shape, order, import::on_host)
    }
}

/// Wraps an error of candle.
#[cold]
pub(crate) fn raised(error: candle_core::Error) -> Error {
    let text = format!("candle: {error}");
    let kind = if text.contains("OUT_OF_MEMORY") { ErrorKind::OutOfMemory } else { ErrorKind::Framework };
    Error::new(kind, text)
}
