//! `__dlpack__` and capsules, for versions of PyTorch without the C exchange API.

use crate::exchange::Exchange;
use crate::raised;
use crate::refusal::refusal;
use bridge_core::dlpack::{Origin, versioned::Dlpack};
use bridge_core::{Device, DeviceKind, Export, Result, Stream};
use bridge_pyo3::{PyTensor, call, take_capsule, with_gil};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

pub(crate) struct Capsules;

/// "No synchronisation" (array API, `__dlpack__`): core orders streams.
const NO_SYNC: i32 = -1;

fn capsule<'py>(tensor: &PyTensor<'py>) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    // `__dlpack__` refuses the conj bit, which is reported separately. A second conjugation clears it over the same
    // memory.
    let conjugated = call(tensor, intern!(py, "is_conj"), &[])?.is_truthy()?;
    let tensor = &if conjugated { call(tensor, intern!(py, "conj"), &[])? } else { tensor.clone() };
    let (kind, _): (i32, i32) = tensor.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    let kwargs = PyDict::new(py);
    kwargs.set_item(intern!(py, "max_version"), (1, 0))?;
    if DeviceKind(kind) == DeviceKind::CUDA {
        kwargs.set_item(intern!(py, "stream"), NO_SYNC)?;
    }
    tensor.call_method(intern!(py, "__dlpack__"), (), Some(&kwargs))
}

/// Imports a bare capsule, for which PyTorch neither waits nor reads streams.
fn from_dlpack<'py>(capsule: Bound<'py, PyAny>) -> PyResult<PyTensor<'py>> {
    let py = capsule.py();
    py.import(intern!(py, "torch.utils.dlpack"))?.call_method1(intern!(py, "from_dlpack"), (capsule,))
}

impl Exchange for Capsules {
    fn export(&self, tensor: &PyTensor<'_>, origin: &dyn Fn(Device) -> Result<Origin>) -> Result<Export> {
        let capsule = capsule(tensor).map_err(|error| refusal(tensor, error))?;
        // SAFETY: PyTorch keeps DLPack's promises, and the origin is that of this tensor.
        unsafe { take_capsule(&capsule, &|device, _| origin(device)) }
    }

    fn import<'py>(&self, py: Python<'py>, managed: Dlpack) -> PyResult<PyTensor<'py>> {
        from_dlpack(bridge_pyo3::capsule(py, managed)?)
    }

    fn round_trip<'py>(&self, tensor: &PyTensor<'py>) -> PyResult<PyTensor<'py>> {
        from_dlpack(capsule(tensor)?)
    }

    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        let current = with_gil(|py| {
            let look_up = || -> PyResult<u64> {
                let kwargs = [("device", device.index)].into_py_dict(py)?;
                let cuda = py.import(intern!(py, "torch.cuda"))?;
                cuda.call_method("current_stream", (), Some(&kwargs))?.getattr("cuda_stream")?.extract()
            };
            // SAFETY: PyTorch keeps its streams as long as the process, and an external one is its maker's to keep.
            look_up().map(|handle| unsafe { Stream::from_handle(handle) }).map_err(|error| raised(py, error))
        });
        current.transpose()
    }
}
