//! Exports PyTorch tensors.

use crate::native::Native;
use crate::raised;
use crate::refusal::{NO_REAL_TENSORS, of_subclass, refusal, without_memory};
use crate::runtime::Runtime;
use crate::settled::settled;
use crate::watched;
use bridge_core::dlpack::{Origin, Release, export_borrowed};
use bridge_core::planted::is_planted;
use bridge_core::{
    Access, Advice, DType, Device, DeviceKind, Error, ErrorKind, Export, Keep, Pending, Result, Reuse, Stream,
};
use bridge_pyo3::{PyOwner, PyTensor, brief_str, call, drop_guarded, not_a_tensor, once, probe};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::IntoPyDict;
use std::ops::Range;
use std::sync::Arc;

pub(crate) fn export(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<Export> {
    if !runtime.is_tensor(tensor) {
        return Err(not_a_tensor("torch", tensor));
    }
    plain(runtime, tensor)?;
    watched::check(runtime, tensor)?;
    let exported = match &runtime.native {
        Some(native) => export_natively(runtime, native, tensor),
        None => export_by_attributes(runtime, tensor),
    };
    let exported = exported.and_then(|exported| runtime.refuse_narrower(tensor, exported.dtype()).map(|()| exported));
    let exported = if is_planted("torch_pending_dropped") {
        exported.map(|exported| exported.with_pending(None))
    } else {
        exported
    };
    exported.map_err(|error| match error.kind() {
        // PyTorch's capsules are well-formed, except for the null pointer of a tensor that wraps another, or whose storage
        // was freed.
        ErrorKind::Protocol => without_memory(tensor).caused_by(error),
        _ => error,
    })
}

fn export_natively(runtime: &Runtime, native: &Native, tensor: &PyTensor<'_>) -> Result<Export> {
    if native.requires_grad(tensor) && !is_planted("torch_grad_ignored") {
        return Err(requires_grad());
    }
    let described = native.borrow(tensor).map_err(|error| refusal(tensor, error))?;
    let origin = |device| {
        let storage = || call(tensor, intern!(tensor.py(), "untyped_storage"), &[]);
        let origin = origin(runtime, tensor, Some(native), storage, device)?;
        Ok((origin, native.keep_alive(tensor, device.kind == DeviceKind::CPU)?))
    };
    // SAFETY: the tensor is alive and unchanged, because the GIL is held. PyTorch keeps DLPack's promises, the origin
    // is that of this tensor, and its memory is held, or its storage, which keeps the memory.
    let exported = unsafe { export_borrowed(&described, Access::ReadWrite, |device, _| origin(device)) }?;
    Ok(exported.with_pending(native.pending(tensor)))
}

fn export_by_attributes(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<Export> {
    screen(tensor)?;
    let storage = call(tensor, intern!(tensor.py(), "untyped_storage"), &[]);
    let storage = storage.map_err(|error| refusal(tensor, error))?;
    let exported = runtime.consumer.exchange.export(tensor, &|device| {
        let keep = Some(Arc::new(PyOwner::new(&storage)) as Keep);
        // Dropping the last reference takes the GIL.
        let release = Some(drop_guarded as Release);
        let origin = origin(runtime, tensor, None, || Ok(storage.clone()), device)?;
        Ok(origin.keeping(keep).released_by(release))
    });
    let exported = exported.map_err(|error| without_counterpart(runtime, tensor, error))?;
    let memory = range(&storage).map_err(|error| raised(tensor.py(), error))?;
    if exported.layout().numel() > 0 && memory.start == 0 {
        // PyTorch adds the offset of a view to the null pointer of a storage that was freed.
        return Err(without_memory(tensor));
    }
    exported.layout().extent_at(exported.data(), Some(&memory))?;
    let pending = pending(tensor, exported.dtype()).map_err(|error| raised(tensor.py(), error))?;
    Ok(exported.with_pending(pending))
}

/// Returns the device and the address of the first element, also for a tensor that requires grad.
pub(crate) fn locate(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<Option<(Device, usize)>> {
    let py = tensor.py();
    if !runtime.is_tensor(tensor) {
        return Err(not_a_tensor("torch", tensor));
    }
    plain(runtime, tensor)?;
    let look_up = || -> PyResult<_> {
        let on_cuda = tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()?;
        let device = match on_cuda {
            true => Device::cuda(call(tensor, intern!(py, "get_device"), &[])?.extract()?),
            false => Device::CPU,
        };
        let elements: usize = call(tensor, intern!(py, "numel"), &[])?.extract()?;
        let address = call(tensor, intern!(py, "data_ptr"), &[])?.extract()?;
        Ok((elements > 0).then_some((device, address)))
    };
    look_up().map_err(|error| refusal(tensor, error))
}

/// Returns what a capsule of the tensor does not say: its stream, and when its memory is reused.
///
/// Returns the addresses of a storage.
fn range(storage: &PyTensor<'_>) -> PyResult<Range<usize>> {
    let number = |name| call(storage, name, &[])?.extract::<usize>();
    let start = number(intern!(storage.py(), "data_ptr"))?;
    Ok(start..start.saturating_add(number(intern!(storage.py(), "nbytes"))?))
}

/// The storage is kept alive besides the tensor, because operations such as `module.half()` or `t.data = …` replace the
/// tensor's storage. On a CUDA device, `record_stream` makes the caching allocator reuse the memory after the current
/// stream, whatever stream it was allocated on. That works for the allocator's own memory only. The reuse of other
/// memory is unknown, views of this adapter included: another framework may have views of the same memory.
///
/// A view may reach beyond its storage: PyTorch checks it when it is made, and `storage.resize_()` may follow.
fn origin<'py>(
    runtime: &Runtime,
    tensor: &PyTensor<'py>,
    native: Option<&Native>,
    storage: impl FnOnce() -> PyResult<PyTensor<'py>>,
    device: Device,
) -> Result<Origin> {
    let allocation = native.and_then(|native| native.range(tensor));
    if device.kind != DeviceKind::CUDA {
        return Ok(Origin::host().within(allocation));
    }
    let py = tensor.py();
    let settle = || {
        runtime.start_cuda(py)?;
        let Some(stream) = runtime.consumer.exchange.current_stream(device)? else {
            return Ok((Stream::LEGACY, Reuse::Unknown));
        };
        let stream = if is_planted("torch_stream_mistaken") { Stream::LEGACY } else { stream };
        let recorded = || -> PyResult<bool> {
            let own = runtime.allocator.owns(py, native.map(|native| native.deleter(tensor)), storage)?;
            if own {
                runtime.allocator.record_stream(native, tensor, device, stream)?;
            }
            Ok(own)
        };
        let recorded = probe(py, recorded()).map_err(|error| raised(py, error))?;
        Ok((stream, if recorded == Some(true) { Reuse::InStreamOrder } else { Reuse::Unknown }))
    };
    let known = native.map(|native| (native.storage(tensor), native.memory(tensor)));
    let (stream, reuse) = settled(device, known, settle)?;
    Ok(Origin::new(Some(stream), reuse).within(allocation))
}

/// Refuses tensors that have no memory.
pub(crate) fn plain(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<()> {
    let refused = |text| Err(Error::new(ErrorKind::NotATensor, text));
    let raised = |error| raised(tensor.py(), error);
    if runtime.is_uninitialized(tensor).map_err(raised)? {
        return refused("this parameter or buffer of a lazy module has no shape yet: call the module once first");
    }
    if runtime.has_own_dispatch(tensor).map_err(raised)? {
        return Err(of_subclass(tensor));
    }
    Ok(())
}

/// Makes the check that the exchange API omits.
fn screen(tensor: &PyTensor<'_>) -> Result<()> {
    let py = tensor.py();
    let tracked = tensor.getattr(intern!(py, "requires_grad")).and_then(|value| value.is_truthy());
    if tracked.map_err(|error| raised(py, error))? { Err(requires_grad()) } else { Ok(()) }
}

#[cold]
fn requires_grad() -> Error {
    let text = "the tensor requires grad, and autograd does not reach into other frameworks";
    Error::new(ErrorKind::RequiresGrad, text).advise(Advice::Detach)
}

/// Returns PyTorch's deferred conjugation and negation. Only complex tensors have a conj bit; all have a neg bit.
fn pending(tensor: &PyTensor<'_>, dtype: DType) -> PyResult<Option<Pending>> {
    let py = tensor.py();
    let conjugation = dtype.is_complex() && call(tensor, intern!(py, "is_conj"), &[])?.is_truthy()?;
    Ok(Pending::of(conjugation, call(tensor, intern!(py, "is_neg"), &[])?.is_truthy()?))
}

/// Makes the error of a dtype that the installed version has and does not export, as 2.9 has float8; or keeps the
/// error.
#[cold]
fn without_counterpart(runtime: &Runtime, tensor: &PyTensor<'_>, error: Error) -> Error {
    let dtype = tensor.getattr("dtype").map_or_else(|_| "?".into(), |dtype| brief_str(&dtype));
    let exported = runtime.profile.dtypes.iter().any(|known| dtype == format!("torch.{known}"));
    if error.kind() != ErrorKind::Framework || exported {
        return error;
    }
    let text = format!(
        "the installed version of torch does not export {dtype}: pass .view(torch.uint8), or another dtype by .to(), or install a later version"
    );
    Error::new(ErrorKind::Dtype, text).caused_by(error)
}

pub(crate) fn compact<'py>(tensor: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let py = tensor.py();
    let copy = || -> PyResult<PyTensor<'py>> {
        let resolved = tensor.call_method0(intern!(py, "resolve_conj"))?.call_method0(intern!(py, "resolve_neg"))?;
        if !resolved.is(tensor) && resolved.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
            return Ok(resolved);
        }
        let format = py.import(intern!(py, "torch"))?.getattr(intern!(py, "contiguous_format"))?;
        let kwargs = [("memory_format", format)].into_py_dict(py)?;
        resolved.call_method(intern!(py, "clone"), (), Some(&kwargs))
    };
    copy().map_err(|error| in_its_mode(py, error))
}

/// Makes the error for a call that PyTorch refuses, with its own kind where that is because of its current mode.
#[cold]
fn in_its_mode(py: Python<'_>, error: PyErr) -> Error {
    match error.value(py).to_string().contains("FakeTensorMode") {
        true => Error::new(ErrorKind::NotATensor, NO_REAL_TENSORS).caused_by(error),
        false => raised(py, error),
    }
}

/// Returns the address of a tensor's storage.
pub(crate) fn storage(tensor: &PyTensor<'_>) -> Result<usize> {
    let py = tensor.py();
    let look_up = || call(&call(tensor, intern!(py, "untyped_storage"), &[])?, intern!(py, "data_ptr"), &[])?.extract();
    look_up().map_err(|error| raised(py, error))
}

/// Increments the version counter of a tensor, or of each in a list. By it autograd notices that a tensor that it has
/// saved was written to.
pub(crate) fn overwritten(tensor: &Bound<'_, PyAny>) -> Result<()> {
    // An import takes longer than the call.
    static INCREMENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = tensor.py();
    let find = || -> PyResult<_> { Ok(py.import("torch.autograd.graph")?.getattr("increment_version")?.unbind()) };
    let count = || once(py, &INCREMENT, find)?.bind(py).call1((tensor,)).map(drop);
    count().map_err(|error| raised(py, error))
}
