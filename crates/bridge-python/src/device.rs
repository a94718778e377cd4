//! The argument `device=`.

use crate::errors::{argument, text};
use bridge_core::{Device, DeviceKind, Error, ErrorKind, Result};
use bridge_pyo3::{PyTensor, brief, framework_error, probe, type_name};
use pyo3::prelude::*;
use pyo3::types::PyString;

/// Reads a device: a name such as `"cpu"` or `"cuda:0"`, a `torch.device`, a `cupy.cuda.Device`, a `jax.Device`, or
/// what `__dlpack_device__` returns. `"cuda"` without a number means the current device, as in PyTorch.
///
/// # Errors
///
/// [`Argument`](bridge_core::ErrorKind::Argument) for anything else.
pub(crate) fn device(object: &PyTensor<'_>) -> Result<Device> {
    let py = object.py();
    if object.is_instance_of::<PyString>() {
        let name = text(object, "a device")?;
        return named(&name, None);
    }
    let read = || -> PyResult<_> {
        if let Some((kind, index)) = probe(py, object.extract::<(i32, i32)>())? {
            return Ok(Some(Ok(Device::numbered(DeviceKind(kind), index))));
        }
        let attribute = |name: &str| probe(py, object.getattr(name));
        // torch.device
        if let (Some(kind), Some(index)) = (attribute("type")?, attribute("index")?)
            && kind.is_instance_of::<PyString>()
        {
            return Ok(Some(named(&kind.extract::<String>()?, index.extract()?)));
        }
        // jax.Device
        if let (Some(platform), Some(id)) = (attribute("platform")?, attribute("local_hardware_id")?)
            && platform.is_instance_of::<PyString>()
        {
            if let (Some(owner), Some(client)) = (attribute("process_index")?, attribute("client")?)
                && !owner.eq(client.call_method0("process_index")?)?
            {
                return Ok(Some(Err(elsewhere(object, &owner))));
            }
            return Ok(of_platform(&platform.extract::<String>()?, id.extract()?).map(Ok));
        }
        // cupy.cuda.Device
        let module = object.get_type().module()?;
        if module.to_string_lossy().starts_with("cupy") {
            let id = attribute("id")?.and_then(|id| id.extract().ok());
            return Ok(id.map(|id| Ok(Device::cuda(id))));
        }
        Ok(None)
    };
    let other = || {
        let kind = type_name(object);
        argument(format!(
            "{kind} is not a device: pass \"cpu\", \"cuda\", \"cuda:0\", a torch.device, a cupy.cuda.Device or a jax.Device"
        ))
    };
    match read() {
        Ok(found) => found.unwrap_or_else(|| Err(other())),
        Err(error) => Err(framework_error(py, "the device", error)),
    }
}

#[cold]
fn elsewhere(device: &PyTensor<'_>, owner: &PyTensor<'_>) -> Error {
    let text = format!("{device} is a device of process {owner}: name one of jax.local_devices()");
    Error::new(ErrorKind::Device, text)
}

/// Returns the device of a platform as JAX names it; `None` for what is neither the host nor CUDA.
fn of_platform(platform: &str, id: Option<i32>) -> Option<Device> {
    match platform {
        "cpu" => Some(Device::CPU),
        "gpu" | "cuda" => id.map(Device::cuda),
        _ => None,
    }
}

/// Returns the error for a name that is not a device, with the name that another library's name such as `/GPU:0` means.
#[cold]
fn unknown(name: &str) -> Error {
    let meant = name.to_lowercase();
    let meant = meant.rsplit('/').next().unwrap_or_default().trim_start_matches("device:").replacen("gpu", "cuda", 1);
    let advice = match meant.parse::<Device>() {
        Ok(_) => format!("pass \"{meant}\""),
        Err(_) => "pass \"cpu\", \"cuda\" or \"cuda:0\" (others are not supported)".into(),
    };
    argument(format!("{:?} is not a device: {advice}", brief(name)))
}

fn named(name: &str, index: Option<i32>) -> Result<Device> {
    let parse = |name: &str| name.parse::<Device>().map_err(|_| unknown(name));
    match index {
        Some(index) => parse(&format!("{name}:{index}")),
        // Without a number the current device is meant. Without CUDA device 0 does as well.
        None => match parse(name)? {
            device if device.kind == DeviceKind::CUDA && !name.contains(':') => {
                Ok(bridge_cuda::current_device().ok().flatten().unwrap_or(device))
            }
            device => Ok(device),
        },
    }
}
