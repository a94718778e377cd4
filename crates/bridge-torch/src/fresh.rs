//! New tensors of PyTorch without Python: a call of `torch.empty_strided` takes three times as long.

use crate::library::{AtTensor, Held, dtypes, function};
use bridge_core::{DType, Device, DeviceKind};
use bridge_pyo3::PyTensor;
use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use std::ffi::c_int;
use std::ptr::{self, NonNull};

/// The most elements of a tensor that is made here. Where memory runs out, libtorch prints its stack to the standard
/// error. Python makes larger tensors: there that is more likely, and the time of the call does not matter.
const MOST: i64 = 1 << 18;

/// The functions that make a tensor and its object.
pub(crate) struct Fresh {
    /// Dimensions, sizes, strides, dtype, kind of device, index, result.
    empty_strided: unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut AtTensor) -> c_int,
    delete: unsafe extern "C" fn(AtTensor) -> c_int,
    /// `PyObject* THPVariable_Wrap(const at::TensorBase&)`
    wrap: unsafe extern "C" fn(AtTensor) -> *mut PyObject,
    /// `static bool c10::impl::TorchDispatchModeTLS::any_modes_set(bool skip_infra_modes)`
    any_modes_set: unsafe extern "C" fn(bool) -> bool,
    dtypes: Vec<(DType, i32)>,
    /// `c10::DeviceType` of the host and of CUDA.
    kinds: [(DeviceKind, i32); 2],
}

impl Fresh {
    /// Returns the functions if all exist and make the tensor that Python makes.
    ///
    /// # Errors
    ///
    /// What Python raises.
    pub(crate) fn find(torch: &Bound<'_, PyModule>) -> PyResult<Option<Self>> {
        const CPU: &str = "libtorch_cpu.so";
        let number = |name: &str| {
            // SAFETY: functions of these names take nothing and return a number (`aoti_torch/c/shim.h`).
            unsafe { function::<unsafe extern "C" fn() -> i32>(CPU, name).map(|number| number()) }
        };
        // SAFETY: the signatures are those of the same header, and what the mangled names say: a tensor by reference,
        // and a static function.
        let found = || unsafe {
            Some(Self {
                empty_strided: function(CPU, "aoti_torch_empty_strided")?,
                delete: function(CPU, "aoti_torch_delete_tensor_object")?,
                wrap: function("libtorch_python.so", "_Z16THPVariable_WrapRKN2at10TensorBaseE")?,
                any_modes_set: function("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb")?,
                dtypes: dtypes(|name| function(CPU, name)),
                kinds: [
                    (DeviceKind::CPU, number("aoti_torch_device_type_cpu")?),
                    (DeviceKind::CUDA, number("aoti_torch_device_type_cuda")?),
                ],
            })
        };
        let Some(fresh) = found() else { return Ok(None) };
        let py = torch.py();
        let Some(made) = fresh.empty(py, Device::CPU, DType::INT16, &[2, 3], &[1, 2]) else { return Ok(None) };
        let options = [("dtype", torch.getattr("int16")?), ("device", "cpu".into_pyobject(py)?.into_any())];
        let other = torch.call_method("empty_strided", ((2, 3), (1, 2)), Some(&options.into_py_dict(py)?))?;
        let says = |tensor: &PyTensor<'_>| -> PyResult<_> {
            let strides: Vec<i64> = tensor.call_method0("stride")?.extract()?;
            let shape: Vec<i64> = tensor.getattr("shape")?.extract()?;
            let numbers =
                ["dtype", "device", "layout", "requires_grad"].map(|name| Ok(tensor.getattr(name)?.to_string()));
            Ok((shape, strides, numbers.into_iter().collect::<PyResult<Vec<_>>>()?, tensor.get_type().as_ptr().addr()))
        };
        Ok((says(&made)? == says(&other)?).then_some(fresh))
    }

    /// Returns a new tensor. Returns `None` for more than [`MOST`] elements, for a dtype that this version does not name,
    /// where memory runs out, and in a mode of the dispatcher, such as `FakeTensorMode`, which the function does not call.
    pub(crate) fn empty<'py>(
        &self,
        py: Python<'py>,
        device: Device,
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
    ) -> Option<PyTensor<'py>> {
        if shape.iter().fold(1, |all: i64, length| all.saturating_mul(*length)) > MOST {
            return None;
        }
        let (_, number) = self.dtypes.iter().find(|(known, _)| *known == dtype)?;
        let (_, kind) = self.kinds.iter().find(|(known, _)| *known == device.kind)?;
        let index = if device.kind == DeviceKind::CPU { -1 } else { device.index };
        // SAFETY: it reads what is set on this thread.
        if unsafe { (self.any_modes_set)(false) } {
            return None;
        }
        let mut made = ptr::null_mut();
        // SAFETY: shape and strides have as many lengths as stated; the result is writable. The function catches what
        // C++ throws.
        let code = unsafe {
            let ndim = shape.len() as i64;
            (self.empty_strided)(ndim, shape.as_ptr(), strides.as_ptr(), *number, *kind, index, &mut made)
        };
        let tensor = Held { tensor: NonNull::new(made).filter(|_| code == 0)?, delete: self.delete };
        // SAFETY: the GIL is held, and the tensor is alive. The result is a new reference, or null with an exception.
        unsafe { Bound::from_owned_ptr_or_err(py, (self.wrap)(tensor.tensor.as_ptr())).ok() }
    }
}
