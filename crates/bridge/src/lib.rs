//! Tensors of one framework used in another, in place: pick the adapters that you need.
//!
//! [`Adapter`]s export and import tensors, and four verbs connect them. [`plan`](plan()) says whether a conversion copies
//! and why, [`transfer`](transfer()) converts a tensor, [`transfer_all`] converts many, and [`copy_into`] fills a tensor
//! that exists. What their callers need is at the top of this crate; what the author of an adapter needs as well is in
//! [`contract`]. Each feature adds a module: adapters for Rust libraries are in [`adapters`], under the names of the
//! libraries, and `cuda`, `dlpack`, `ipc` and `python` are here. Start with the [`prelude`] and pass [`ordering`].
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(all(doctest, feature = "dlpack"))]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(all(doctest, feature = "cuda", feature = "python", feature = "tensorflow"))]
#[doc = include_str!("../../../docs/rust.md")]
struct Page;

#[cfg(doctest)]
mod misuse;

#[cfg(feature = "python")]
pub mod python;

/// CUDA: what [`bridge_cuda`] has.
#[cfg(feature = "cuda")]
pub mod cuda {
    #[doc(inline)]
    pub use bridge_cuda::*;
}

/// Tensors of other processes: what [`bridge_ipc`] has.
#[cfg(feature = "ipc")]
pub mod ipc {
    #[doc(inline)]
    pub use bridge_ipc::*;
}

#[cfg(feature = "dlpack")]
#[doc(inline)]
pub use bridge_core::dlpack;
#[doc(inline)]
pub use bridge_core::{
    Adapter, Cast, CopiedBy, DType, Device, DeviceKind, Error, ErrorKind, Failed, HostOnly, Layout, Misfit, Options,
    Order, Ordering, Pair, ParseDTypeError, ParseDeviceError, Permutation, Plan, Prepared, Reason, Result, Stats,
    Stream, Transfer, copied_by, copied_into_by, copy_all, copy_into, plan, stats, transfer, transfer_all,
};

use std::sync::Arc;

/// The contract between adapters, for their authors: what an [`Adapter`] exports and imports, what its consumer and an
/// [`Ordering`] promise, and the copies that they make. The documentation of [`bridge_core`] says whose job each check
/// is.
pub mod contract {
    #[doc(inline)]
    pub use bridge_core::{
        Access, Advice, Allocation, COPY_ALIGNMENT, Consumer, Copies, Deferred, DeviceBuffer, Dims, Export, Flush,
        HostMemory, Imported, Keep, Lease, MAX_NDIM, Memory, Offer, Output, Owner, Pending, Piece, Planned, Profile,
        Protected, Reuse, Spans, Strided, Strides, Views, output, overlap, poison, repeats,
    };
}

/// The adapters for libraries of Rust, each under the name of its library: `adapters::ndarray::NdArray`. They are not
/// at the top of the crate, where `use truebridge::*` would hide the libraries themselves.
///
/// Each has its library as `framework`, in the version that it takes: `adapters::ndarray::framework::Array2`.
pub mod adapters {
    // adapters: begin
    /// Tensors of candle: what [`bridge_candle`] has.
    #[cfg(feature = "candle")]
    pub mod candle {
        #[doc(inline)]
        pub use bridge_candle::*;
    }

    /// Tensors of cudarc: what [`bridge_cudarc`] has.
    #[cfg(feature = "cudarc")]
    pub mod cudarc {
        #[doc(inline)]
        pub use bridge_cudarc::*;
    }

    /// Tensors of ndarray: what [`bridge_ndarray`] has.
    #[cfg(feature = "ndarray")]
    pub mod ndarray {
        #[doc(inline)]
        pub use bridge_ndarray::*;
    }

    /// Tensors of ONNX Runtime: what [`bridge_ort`] has.
    #[cfg(feature = "ort")]
    pub mod ort {
        #[doc(inline)]
        pub use bridge_ort::*;
    }

    /// Tensors of TensorFlow: what [`bridge_tensorflow`] has.
    #[cfg(feature = "tensorflow")]
    pub mod tensorflow {
        #[doc(inline)]
        pub use bridge_tensorflow::*;
    }

    /// Tensors of the crate `tch`: what [`bridge_torch`] has.
    #[cfg(feature = "torch")]
    pub mod torch {
        #[doc(inline)]
        pub use bridge_torch::*;
    }
    // adapters: end
}

/// What most programs need: the four verbs, their options, the ordering, and the types of the adapters.
///
/// [`Result`] and [`Ordering`] are left out, because they would hide those of the standard library.
pub mod prelude {
    pub use crate::{
        Adapter, Device, Error, ErrorKind, Options, Permutation, Plan, copy_into, ordering, plan, transfer,
        transfer_all,
    };

    // adapters: begin
    #[cfg(feature = "candle")]
    pub use crate::adapters::candle::Candle;

    #[cfg(feature = "cudarc")]
    pub use crate::adapters::cudarc::{Cudarc, DeviceArray};

    #[cfg(feature = "ndarray")]
    pub use crate::adapters::ndarray::{HostArray, NdArray};

    #[cfg(feature = "ort")]
    pub use crate::adapters::ort::Ort;

    #[cfg(feature = "python")]
    pub use crate::python::{Borrowed, PyAdapter, PyTensor};

    #[cfg(feature = "tensorflow")]
    pub use crate::adapters::tensorflow::{GraphEdges, Runtime, Session};

    #[cfg(feature = "torch")]
    pub use crate::adapters::torch::Tch;
    // adapters: end
}

/// Returns the ordering of this process, to be passed to every transfer.
///
/// With the feature `cuda` it orders streams of CUDA devices by events, looks for a driver at the first need of one,
/// and copies strided tensors by its kernels. Without the feature it is [`HostOnly`]: tensors in host memory are
/// converted, and everything that needs a stream is refused with [`ErrorKind::Missing`].
pub fn ordering() -> &'static Arc<dyn Ordering> {
    #[cfg(feature = "cuda")]
    return bridge_cuda::ordering();
    #[cfg(not(feature = "cuda"))]
    {
        static HOST: std::sync::LazyLock<Arc<dyn Ordering>> = std::sync::LazyLock::new(|| Arc::new(HostOnly));
        &HOST
    }
}
