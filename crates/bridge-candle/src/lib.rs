//! Tensors of candle on the host: out in place, in by one copy.
//!
//! [`Candle`] is the adapter, and `candle_core::Tensor` its tensor. A tensor goes out in place, with its strides and its
//! offset. It comes in as a copy in memory of candle: a `CpuStorage` is a set of vectors, and a vector frees its memory
//! itself, so that candle cannot keep memory of another owner. [`plan`](bridge_core::plan()) says so:
//! [`Reason::ForeignMemory`](bridge_core::Reason::ForeignMemory).
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
//! let (seen, done) = transfer(&candle, &NdArray::new(), &tensor.t().unwrap(), &ordering, &Options::default())?;
//! assert_eq!(done.plan, Plan::ZeroCopy);
//! assert_eq!(seen.to_array::<f32>()?, array![[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]].into_dyn());
//!
//! let (back, done) = transfer(&NdArray::new(), &candle, &seen, &ordering, &Options::default())?;
//! assert_eq!(done.plan, Plan::Copy(Reason::ForeignMemory));
//! assert_eq!(back.dims(), [3, 2]);
//! # Ok::<(), bridge_core::Error>(())
//! ```
//!
//! # CUDA and Metal
//!
//! A tensor on a device is refused with [`ErrorKind::Device`]. candle's feature `cuda`
//! links CUDA's libraries and compiles kernels with `nvcc`, while this project loads the driver at run time.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod export;
mod import;
mod storage;

use bridge_core::{
    Adapter, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Lease, Lent, Order, Profile, Result, Strides, Views,
};
use candle_core::Tensor;
use std::sync::{Arc, LazyLock};

static PROFILE: LazyLock<Profile> = LazyLock::new(|| Profile {
    dtypes: storage::DTYPES.into(),
    strides: Strides::Any,
    devices: vec![DeviceKind::CPU],
    keeps_read_only: false,
    owns_memory: true,
    ..Profile::export_only("candle")
});

/// candle on the host.
#[derive(Clone)]
pub struct Candle {
    views: Arc<Views>,
}

impl Candle {
    /// Makes the adapter.
    ///
    /// # Safety
    ///
    /// candle reads the elements of a tensor through Rust's references, and does not know that they are used elsewhere.
    /// While a tensor of another framework shares the memory of a tensor of candle:
    ///
    /// - No code writes to it through the one while another thread reads or writes it through the other.
    /// - No custom operation in place (`candle_core::InplaceOp1` and its like) replaces the storage that it is to write
    ///   to. Those of candle itself write to its elements.
    pub unsafe fn new() -> Self {
        Self { views: Arc::default() }
    }
}

impl Adapter for Candle {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.views.clone()
    }

    fn export(&self, tensor: &Tensor) -> Result<Lent> {
        export::lend(tensor)
    }

    /// Returns an error: core copies every tensor into an [`empty`](Adapter::empty) one.
    fn import(&self, _: Lease) -> Result<Tensor> {
        Err(Error::new(ErrorKind::CopyNeeded, "candle keeps no memory of another owner: copy it into Candle::empty"))
    }

    /// Returns an error: core copies host memory.
    fn compact(&self, _: &Tensor) -> Result<Tensor> {
        Err(Error::new(ErrorKind::CopyNeeded, "candle leaves copies of host memory to core"))
    }

    /// Writes to the elements of every tensor that shares the storage, as `Tensor::slice_set` does.
    fn overwritten(&self, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Tensor> {
        import::empty(device, dtype, shape, order)
    }
}
