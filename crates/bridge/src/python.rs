//! Tensors of Python's frameworks, for extension modules that are written with pyo3.
//!
//! [`borrow`] returns where a tensor of any framework is, how it lies, and in which stream to launch a kernel.
//! [`Framework`] opens an adapter by name, for [`transfer`](crate::transfer()). TensorFlow is among the frameworks with the
//! feature `tensorflow`. Other producers are known by a protocol, and so is JAX here, whose adapter only the Python
//! package has: see [`Protocol`]. Their memory on CUDA devices needs the feature `cuda`.
//!
//! The types are those of pyo3 0.30, so the extension module depends on that version.
//!
//! ```
//! use truebridge::prelude::*;
//! use truebridge::python::{self, Framework};
//!
//! /// Launches a kernel on a float32 vector of any framework, in that framework's current stream.
//! fn scale(tensor: &PyTensor<'_>, factor: f32) -> truebridge::Result<()> {
//!     let vector = python::borrow(tensor)?;
//!     let (Some(stream), &[length], &[stride]) = (vector.stream(), vector.shape(), vector.strides()) else {
//!         return Err(Error::new(ErrorKind::Argument, "pass a vector on a CUDA device"));
//!     };
//!     launch(vector.device(), stream.handle(), vector.as_ptr(), length, stride, factor)
//! }
//! # fn launch(_: Device, _: u64, _: *mut f32, _: i64, _: i64, _: f32) -> truebridge::Result<()> { Ok(()) }
//!
//! /// Returns a `torch.Tensor` over the memory of a tensor of any framework.
//! fn to_torch<'py>(tensor: &PyTensor<'py>) -> truebridge::Result<PyTensor<'py>> {
//!     let Some(from) = python::adapter_of(tensor)? else {
//!         return Err(Error::new(ErrorKind::NotATensor, "pass a tensor"));
//!     };
//!     let to = Framework::Torch.open(tensor.py())?;
//!     let (tensor, _) = transfer(&from, &to, tensor, ordering(), &Options::default())?;
//!     Ok(tensor)
//! }
//! ```

#[doc(inline)]
pub use bridge_frameworks::{AnyAdapter, Framework, Protocol, Tensor, adapter_of, borrow};
#[doc(no_inline)]
pub use bridge_pyo3::pyo3;
#[doc(inline)]
pub use bridge_pyo3::{Borrowed, PyAdapter, PyTensor, exception};
