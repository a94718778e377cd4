//! Exports tensors of Paddle.

use crate::naive;
use crate::raised;
use crate::runtime::Runtime;
use bridge_core::dlpack::Origin;
use bridge_core::{Device, Error, ErrorKind, Export, Result};
use bridge_pyo3::{PyTensor, call, drop_guarded, not_a_tensor, take_capsule};
use pyo3::intern;
use pyo3::prelude::*;

/// Exports a tensor that autograd does not track.
pub(crate) fn export(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<Export> {
    let py = tensor.py();
    refuse_others(runtime, tensor)?;
    let is_free = tensor.getattr(intern!(py, "stop_gradient")).and_then(|stops| stops.is_truthy());
    match is_free.map_err(|error| raised(py, error))? {
        true => by_capsule(tensor),
        false => {
            let text = "the tensor is tracked by autograd (stop_gradient is False): call .detach() first";
            Err(Error::new(ErrorKind::RequiresGrad, text))
        }
    }
}

/// Exports a tensor, tracked or not.
pub(crate) fn export_any(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<Export> {
    refuse_others(runtime, tensor)?;
    by_capsule(tensor)
}

/// Refuses all but dense tensors. Where Paddle exports one without an implementation, it reads a null pointer.
fn refuse_others(runtime: &Runtime, tensor: &PyTensor<'_>) -> Result<()> {
    let py = tensor.py();
    if !runtime.is_tensor(tensor) {
        return Err(without_memory(runtime, tensor));
    }
    let is_dense = call(tensor, intern!(py, "is_dense"), &[]).and_then(|answer| answer.is_truthy());
    match is_dense.map_err(|error| raised(py, error))? {
        true => Ok(()),
        false => Err(not_dense(tensor)),
    }
}

/// Exports a dense tensor. The capsule keeps the memory, and describes the tensor as it is at one moment.
fn by_capsule(tensor: &PyTensor<'_>) -> Result<Export> {
    let py = tensor.py();
    let export = || call(&call(tensor, intern!(py, "get_tensor"), &[])?, intern!(py, "_to_dlpack_versioned"), &[]);
    let capsule = export().map_err(|error| refused(tensor, error))?;
    // SAFETY: Paddle keeps DLPack's promises; memory of the host is ready.
    let exported = unsafe { take_capsule(&capsule, &origin) }?;
    naive::kept_by_object(tensor, exported)
}

/// Returns what a capsule of Paddle does not say.
fn origin(said: Device, _: usize) -> Result<Origin> {
    if said != Device::CPU {
        let text =
            format!("the tensor is on {said}, and Paddle's tensors are converted on the host: call .cpu() first");
        return Err(Error::new(ErrorKind::Device, text));
    }
    Ok(Origin::host().released_by(Some(drop_guarded)))
}

/// Counts a write to a tensor, for autograd.
pub(crate) fn count_write(tensor: &PyTensor<'_>) -> Result<()> {
    let py = tensor.py();
    call(tensor, intern!(py, "_bump_inplace_version"), &[]).map(drop).map_err(|error| raised(py, error))
}

/// Returns the error for an object that is no tensor with memory.
#[cold]
fn without_memory(runtime: &Runtime, object: &PyTensor<'_>) -> Error {
    match runtime.is_symbol(object) {
        true => {
            let text = "this is a tensor of a program that is not run yet, and has no memory: convert what \
                        Executor.run returns, or outside of the function that paddle.jit.to_static compiles";
            Error::new(ErrorKind::NotATensor, text)
        }
        false => not_a_tensor("paddle", object),
    }
}

/// What tensors of another kind than dense ones are, by the method that says so, with what to convert instead.
const KINDS: &[(&str, &str)] = &[
    ("is_sparse", "the tensor is sparse: convert .values() and its indices each by itself, or call .to_dense()"),
    (
        "is_selected_rows",
        "the tensor holds selected rows: make a dense one, for example with sparse=False in Embedding",
    ),
    ("is_dist", "the tensor is distributed: convert the part of this process, ._local_value(), or gather it first"),
];

/// Returns the error for a tensor that is not dense.
#[cold]
fn not_dense(tensor: &PyTensor<'_>) -> Error {
    let is = |name: &str| tensor.call_method0(name).and_then(|answer| answer.is_truthy()).unwrap_or(false);
    match KINDS.iter().find(|(name, _)| is(name)) {
        Some((_, text)) => Error::new(ErrorKind::NotATensor, *text),
        None => Error::new(ErrorKind::Consumed, CLEARED),
    }
}

const CLEARED: &str = "the tensor was cleared, and has no memory: pass one that is alive";

/// Returns the error for what Paddle does not export.
#[cold]
fn refused(tensor: &PyTensor<'_>, error: PyErr) -> Error {
    let py = tensor.py();
    let is_alive = tensor.call_method0("_is_initialized").and_then(|answer| answer.is_truthy());
    match (error.is_instance_of::<pyo3::exceptions::PyRuntimeError>(py), is_alive) {
        (true, Ok(false)) => Error::new(ErrorKind::Consumed, CLEARED).caused_by(error),
        _ => raised(py, error),
    }
}
