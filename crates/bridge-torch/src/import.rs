//! Imports leases as PyTorch tensors, and makes tensors to copy into.

use crate::raised;
use crate::runtime::Runtime;
use crate::watched;
use bridge_core::planted::is_planted;
use bridge_core::{DType, Device, DeviceKind, Error, ErrorKind, Lease, Order, Result, dlpack};
use bridge_pyo3::{PyTensor, drop_with_gil};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyTuple};

pub(crate) fn wrap<'py>(py: Python<'py>, runtime: &Runtime, lease: Lease) -> Result<PyTensor<'py>> {
    if lease.device().kind == DeviceKind::CUDA {
        runtime.start_cuda(py)?;
    }
    // The deleter of a tensor without elements may have been called when it is watched.
    let watch = lease.watch().filter(|_| lease.device() == Device::CPU && lease.layout().numel() > 0);
    let watch = watch.map(|number| (number, lease.layout().clone()));
    let release = match lease.device().kind {
        DeviceKind::CUDA => drop_with_gil,
        _ if watch.is_some() => watched::release,
        _ => drop,
    };
    // SAFETY: the profile says that PyTorch may write, so memory that must not change is here by the user's promise.
    let (managed, handover) = unsafe { dlpack::wrap_as(lease, release) };
    match runtime.consumer.exchange.import(py, managed) {
        Ok(tensor) => {
            if let Some((number, layout)) = watch.filter(|_| !is_planted("torch_watch_forgotten")) {
                watched::enter(runtime, &tensor, number, layout)?;
            }
            Ok(tensor)
        }
        Err(error) => {
            // PyTorch does not say whether it took ownership before it failed.
            // SAFETY: it has made no tensor of the memory.
            unsafe { handover.reclaim() };
            Err(raised(py, error))
        }
    }
}

/// Makes a tensor by PyTorch's `empty_strided`, which aligns to 64 bytes on the host and to 512 on a device. The device is
/// named, because the user may have set another default. `torch.jit.trace` would record the allocation, and not what is
/// written to it.
pub(crate) fn empty<'py>(
    py: Python<'py>,
    runtime: &Runtime,
    device: Device,
    dtype: DType,
    shape: &[i64],
    order: Order,
) -> Result<PyTensor<'py>> {
    if ![DeviceKind::CPU, DeviceKind::CUDA].contains(&device.kind) {
        return Err(Error::new(ErrorKind::CopyNeeded, format!("torch cannot allocate on {device}")));
    }
    if device.kind == DeviceKind::CUDA {
        runtime.start_cuda(py)?;
    }
    let make = || {
        if runtime.is_tracing.bind(py).call0()?.is_truthy()? {
            return Ok(None);
        }
        let strides = order.strides(shape);
        if let Some(fresh) = &runtime.fresh
            && let Some(made) = fresh.empty(py, device, dtype, shape, &strides)
        {
            return Ok(Some(made));
        }
        let torch = py.import(intern!(py, "torch"))?;
        let dtype = torch.getattr(dtype.to_string().as_str())?;
        let device = device.to_string().into_pyobject(py)?.into_any();
        let kwargs = [("dtype", dtype), ("device", device)].into_py_dict(py)?;
        let dims = (PyTuple::new(py, shape)?, PyTuple::new(py, strides.iter())?);
        torch.call_method(intern!(py, "empty_strided"), dims, Some(&kwargs)).map(Some)
    };
    let made = make().map_err(|error| match is_planted("torch_raised_hidden") {
        true => Error::new(ErrorKind::CopyNeeded, "torch allocates no memory"),
        false => raised(py, error),
    });
    made?.ok_or_else(|| {
        let text = "torch.jit.trace does not see a copy of this package, and would record uninitialised memory: convert outside of what is traced";
        Error::new(ErrorKind::Refused, text)
    })
}
