//! Version counters, by which autograd notices that a tensor which it has saved was written to.

use crate::library::{AtTensor, function};
use crate::raised;
use bridge_core::Result;
use bridge_pyo3::PyTensor;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;

/// What increments the version counter of a tensor, without Python.
pub(crate) struct Counters {
    /// `bool at::native::is_inference(const at::Tensor&)`: whether a tensor has no counter.
    is_inference: unsafe extern "C" fn(AtTensor) -> bool,
    /// `void torch::autograd::impl::bump_version(const at::Tensor&)`, which throws where there is none.
    bump: unsafe extern "C" fn(AtTensor),
}

impl Counters {
    /// Returns the functions if both exist, and agree with Python about a tensor with a counter and one without.
    /// `handle` returns the `at::Tensor` of an object.
    ///
    /// # Errors
    ///
    /// What Python raises.
    pub(crate) fn find(
        torch: &Bound<'_, PyModule>,
        handle: impl Fn(&PyTensor<'_>) -> AtTensor,
    ) -> PyResult<Option<Self>> {
        const CPU: &str = "libtorch_cpu.so";
        // SAFETY: the signatures are those that the mangled names say.
        let found = || unsafe {
            Some(Self {
                is_inference: function(CPU, "_ZN2at6native12is_inferenceERKNS_6TensorE")?,
                bump: function(CPU, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE")?,
            })
        };
        let Some(counters) = found() else { return Ok(None) };
        let (py, none) = (torch.py(), torch.py().None());
        let on_the_host = [("device", "cpu".into_pyobject(py)?)].into_py_dict(py)?;
        let mut agrees = true;
        for inference in [true, false] {
            let mode = torch.call_method1("inference_mode", (inference,))?;
            mode.call_method0("__enter__")?;
            let tensor = torch.call_method("zeros", (0,), Some(&on_the_host));
            mode.call_method1("__exit__", (&none, &none, &none))?;
            let tensor = tensor?;
            let version = || tensor.getattr("_version")?.extract::<usize>();
            let before = if inference { 0 } else { version()? };
            // SAFETY: the tensor is alive.
            let is_counted = unsafe { counters.count(handle(&tensor)) };
            agrees &= is_counted != inference && (inference || version()? == before + 1);
        }
        Ok(agrees.then_some(counters))
    }

    /// Increments the counter of a tensor. Returns `false` where it has none.
    ///
    /// # Safety
    ///
    /// `tensor` points to a tensor that is alive.
    pub(crate) unsafe fn count(&self, tensor: AtTensor) -> bool {
        // SAFETY: the caller's obligation, and a tensor that was not made in inference mode has a counter.
        unsafe {
            let has_counter = !(self.is_inference)(tensor);
            if has_counter {
                (self.bump)(tensor);
            }
            has_counter
        }
    }
}

/// Returns the tensor whose version counter a tensor shares: views share that of their base.
pub(crate) fn counted_by<'py>(tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let py = tensor.py();
    let base = tensor.getattr(intern!(py, "_base")).map_err(|error| raised(py, error))?;
    Ok(if base.is_none() { tensor.clone() } else { base })
}
