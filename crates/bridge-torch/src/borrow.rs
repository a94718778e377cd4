//! Borrows PyTorch tensors.

use crate::export::{export, plain};
use crate::fingerprint::INLINE;
use crate::raised;
use crate::refusal::refusal;
use crate::runtime::Runtime;
use crate::watched;
use bridge_core::dlpack::{View, describes, read};
use bridge_core::{Access, Consumer, DeviceKind, Export, Result, Stream};
use bridge_pyo3::{Borrowed, Fingerprint, PyTensor, call, not_a_tensor, without_pending};
use pyo3::intern;

/// Borrows a tensor through PyTorch's C functions. Versions without them export.
pub(crate) fn borrow<'a>(runtime: &Runtime, tensor: &'a PyTensor<'_>) -> Result<Borrowed<'a>> {
    let py = tensor.py();
    if !runtime.is_tensor(tensor) {
        return Err(not_a_tensor("torch", tensor));
    }
    plain(runtime, tensor)?;
    let Some(native) = &runtime.native else {
        let detached = call(tensor, intern!(py, "detach"), &[]).map_err(|error| raised(py, error))?;
        return Borrowed::of(tensor, export(runtime, &detached)?);
    };
    let described = native.borrow(tensor).map_err(|error| refusal(tensor, error))?;
    // SAFETY: the tensor is alive and unchanged, because the GIL is held.
    let View { data, dtype, layout, device, .. } = unsafe { read(&described) }?;
    layout.extent_at(data, native.range(tensor).as_ref())?;
    runtime.refuse_narrower(tensor, dtype)?;
    without_pending(native.pending(tensor))?;
    let stream = match device.kind {
        DeviceKind::CUDA => {
            runtime.start_cuda(py)?;
            Some(runtime.consumer.current_stream(device)?.unwrap_or(Stream::LEGACY))
        }
        _ => None,
    };
    Ok(Borrowed::new(tensor, data, dtype, layout, device, Access::ReadWrite, stream))
}

/// Returns whether a tensor still is what was exported, where PyTorch's C functions say so.
pub(crate) fn is_still(runtime: &Runtime, tensor: &PyTensor<'_>, exported: &Export, fingerprint: &Fingerprint) -> bool {
    let Some(native) = &runtime.native else { return false };
    if watched::check(runtime, tensor).is_err() {
        return false;
    }
    if runtime.is_plain(tensor) && native.has_fingerprint(tensor, fingerprint) {
        return true;
    }
    let is_described = || {
        let described = native.borrow(tensor).ok()?;
        // SAFETY: the tensor is alive and unchanged, because the GIL is held.
        Some(unsafe { describes(&described, exported) })
    };
    runtime.is_tensor(tensor)
        && plain(runtime, tensor).is_ok()
        && !native.requires_grad(tensor)
        && native.pending(tensor).is_none()
        && exported.pending().is_none()
        && runtime.refuse_narrower(tensor, exported.dtype()).is_ok()
        && is_described() == Some(true)
}

/// Returns the fingerprint of a tensor that is what was exported. Only those have one whose type decides nothing and
/// whose shape is part of their implementation.
pub(crate) fn fingerprint(runtime: &Runtime, tensor: &PyTensor<'_>, exported: &Export) -> Fingerprint {
    let has_fingerprint = runtime.is_plain(tensor) && exported.layout().shape().len() <= INLINE;
    match &runtime.native {
        Some(native) if has_fingerprint && is_still(runtime, tensor, exported, &Fingerprint::default()) => {
            native.fingerprint(tensor)
        }
        _ => Fingerprint::default(),
    }
}
