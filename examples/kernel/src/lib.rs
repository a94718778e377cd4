//! A Python extension module in Rust: one function, which every framework can call with its own tensors.
//!
//! `scaled.scale(x, factor)` takes a float32 vector of PyTorch, CuPy, NumPy, TensorFlow or JAX, with any stride, and
//! returns `x * factor` as a tensor of the same framework, on the same device. On a CUDA device a kernel computes it in
//! the framework's current stream: nothing is copied, and the host waits for nothing.

use pyo3::prelude::*;
use truebridge::cuda::{Kernels, Launch};
use truebridge::prelude::*;
use truebridge::python::{PyTensor, Tensor, exception};
use truebridge::{DType, Result};

/// The kernel, in a form that the driver compiles for the device at the first launch.
// SAFETY: PTX with a zero at its end.
static KERNELS: Kernels =
    unsafe { Kernels::new(concat!(include_str!("scale.ptx"), "\0").as_bytes(), &[(c"scale", 0)]) };

const THREADS: u32 = 256;

/// The parameter of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    from: *const f32,
    to: *mut f32,
    /// In elements.
    stride: i64,
    count: u32,
    factor: f32,
}

#[pymodule]
fn scaled(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(scale, module)?)
}

/// Return ``x * factor``: a float32 vector of the framework that ``x`` is of, and on its device.
#[pyfunction]
fn scale<'py>(py: Python<'py>, x: Tensor<'py>, factor: f32) -> PyResult<PyTensor<'py>> {
    scaled_by(&x, factor).map_err(|error| exception(py, error))
}

fn scaled_by<'py>(x: &Tensor<'py>, factor: f32) -> Result<PyTensor<'py>> {
    let vector = x.borrow()?;
    let (&[length], &[stride]) = (vector.shape(), vector.strides()) else {
        return Err(Error::new(ErrorKind::Argument, format!("pass a vector, not the shape {:?}", vector.shape())));
    };
    if vector.dtype() != DType::FLOAT32 {
        return Err(Error::new(ErrorKind::Dtype, format!("pass float32, not {}", vector.dtype())));
    }
    let count = u32::try_from(length)
        .map_err(|_| Error::new(ErrorKind::Argument, "pass a vector of fewer than 2^32 elements"))?;
    let result = x.output(ordering(), DType::FLOAT32, &[length])?;
    let call = Call { from: vector.as_ptr(), to: result.as_ptr(), stride, count, factor };
    match (vector.stream(), result.stream()) {
        _ if count == 0 => (),
        // SAFETY: the borrow and the result are host memory of so many elements, and no other code writes to either.
        (None, None) => unsafe { on_the_host(&call) },
        // The result's stream is the current one of the same framework.
        (Some(stream), Some(_)) => {
            let launch = Launch::new(0, count.div_ceil(THREADS), THREADS);
            // SAFETY: the parameter is the kernel's. It reads and writes so many elements of the borrow and of the
            // result, in the stream that both are used in: their memory is reused after it.
            unsafe { KERNELS.launch(vector.device(), stream, launch, &call) }?;
        }
        _ => {
            return Err(Error::new(
                ErrorKind::Device,
                "pass memory of the host or of a CUDA device, not managed memory",
            ));
        }
    }
    // SAFETY: the loop has written every element, or the kernel that does is in the stream of the result.
    unsafe { result.finish() }
}

/// # Safety
///
/// Both pointers are to as many elements.
unsafe fn on_the_host(call: &Call) {
    for i in 0..call.count as usize {
        // SAFETY: the caller's obligation.
        unsafe { call.to.add(i).write(call.from.offset(i as isize * call.stride as isize).read() * call.factor) };
    }
}
