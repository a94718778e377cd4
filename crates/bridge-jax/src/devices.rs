//! The devices that JAX has in this process.

use crate::driver::has_devices;
use bridge_core::{Device, DeviceKind, Error, ErrorKind, Result};
use bridge_pyo3::{PyTensor, framework_error};
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;

/// Returns whether JAX would find CUDA devices, without a look at them: that would take most of their memory.
pub(crate) fn has_cuda(jax: &Bound<'_, PyModule>) -> PyResult<bool> {
    let py = jax.py();
    let platforms = jax.getattr("config")?.getattr("jax_platforms")?;
    let allowed = match platforms.extract::<Option<String>>()? {
        Some(names) if !names.is_empty() => names.split(',').any(|name| ["cuda", "gpu"].contains(&name.trim())),
        _ => true,
    };
    if !allowed || !has_devices() {
        return Ok(false);
    }
    let Ok(plugins) = py.import("jax_plugins") else { return Ok(false) };
    let found = py.import("pkgutil")?.call_method1("iter_modules", (plugins.getattr("__path__")?,))?;
    for plugin in found.try_iter()? {
        if plugin?.getattr("name")?.extract::<String>()?.starts_with("xla_cuda") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Queries JAX for its object for a device of this process.
///
/// # Errors
///
/// [`ErrorKind::Device`] for one that JAX does not have.
pub(crate) fn device_of<'py>(py: Python<'py>, device: Device) -> Result<PyTensor<'py>> {
    let (backend, index) = match device.kind {
        DeviceKind::CPU => ("cpu", None),
        _ => ("cuda", Some(device.index)),
    };
    let find = || -> PyResult<Option<PyTensor<'py>>> {
        let keywords = [("backend", backend)].into_py_dict(py)?;
        let devices = py.import("jax")?.call_method("local_devices", (), Some(&keywords))?;
        for found in devices.try_iter()? {
            let found = found?;
            if index
                .is_none_or(|index| found.getattr("local_hardware_id").and_then(|id| id.extract()).ok() == Some(index))
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    };
    find().map_err(|error| raised(py, error))?.ok_or_else(|| {
        let text = format!("JAX has no {device} in this process: look at jax.local_devices()");
        Error::new(ErrorKind::Device, text)
    })
}

pub(crate) fn raised(py: Python<'_>, error: PyErr) -> Error {
    framework_error(py, "jax", error)
}
