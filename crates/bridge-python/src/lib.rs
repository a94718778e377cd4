//! The Python package `tensor_bridge`: a thin layer over the adapters and core's `transfer`.

mod borrow;
mod containers;
mod convert;
mod copies;
mod debug;
mod device;
mod errors;
mod frameworks;
mod nvtx;
mod options;
mod plan;
mod processes;
mod streams;
mod tensorflow;
mod tensorflow1;
mod trace;
mod trees;
mod via;

use bridge_core::{Adapter, DeviceKind, Error, ErrorKind, Failed};
use bridge_pyo3::PyTensor;
use errors::{argument, into_python};
use frameworks::{Framework, source};
use options::Keywords;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use trees::Tree;

fn transfer<'py>(x: &PyTensor<'py>, to: Framework, keywords: Keywords<'_, 'py>) -> PyResult<PyTensor<'py>> {
    let py = x.py();
    let cross = |call: Option<&trace::Call>| {
        let (to, options, through_host) = (to.open(py)?, keywords.read()?, keywords.through_host()?);
        match Tree::of(x)? {
            None => {
                let from = source(x)?;
                processes::check(&from, x)?;
                let x = keywords.detached(x)?;
                if through_host {
                    return via::transfer(call, &from, &to, &x, &options);
                }
                trace::transfer(call, &*from, &*to, &x, &options)
            }
            Some(tree) => tree.map(x, |leaves| {
                let mut tensors = Vec::with_capacity(leaves.len());
                for (index, (from, tensor)) in leaves.iter().enumerate() {
                    let checked = processes::check(from, tensor).and_then(|()| keywords.detached(tensor));
                    tensors.push(checked.map_err(|error| Failed { index, error })?);
                }
                if through_host {
                    let crossed = leaves.iter().zip(&tensors).enumerate().map(|(index, ((from, _), tensor))| {
                        via::transfer(call, from, &to, tensor, &options).map_err(|error| Failed { index, error })
                    });
                    return crossed.collect();
                }
                let leaves: Vec<(&dyn Adapter<Tensor = PyTensor<'py>>, _)> =
                    leaves.iter().zip(&tensors).map(|((from, _), tensor)| (&**from as _, tensor)).collect();
                trace::transfer_all(call, &leaves, &*to, &options)
            }),
        }
    };
    trace::call("convert", to.name(), cross).map_err(|error| into_python(py, error))
}

/// Refuses a capsule, which can be read once only.
fn not_a_capsule(x: &PyTensor<'_>) -> bridge_core::Result<()> {
    match x.is_instance_of::<PyCapsule>() {
        true => Err(argument(
            "reading a DLPack capsule consumes it: pass the original tensor to plan(), copy() or record_stream()",
        )),
        false => Ok(()),
    }
}

/// Record that a result of this package is used on one more stream.
///
/// The owner of the memory waits for that stream before it reuses the memory. The stream that is current at the
/// conversion, and the one that is current where the view is dropped, need no record.
///
/// Parameters
/// ----------
/// view : tensor
///     A result of this package, or a part of one. Host memory and views without elements need no record.
/// stream : stream or int
///     A ``torch.cuda.Stream``, a ``cupy.cuda.Stream`` or any object with ``__cuda_stream__``, on the device of the
///     view, which keeps it alive. Keep an ``ExternalStream``, and the stream of a handle passed as an ``int``, alive
///     yourself.
///
/// Raises
/// ------
/// BridgeTypeError
///     If ``view`` is no tensor.
/// BridgeValueError
///     If this package has not made ``view``, if ``stream`` is no stream, or if it is of another device.
///
/// Examples
/// --------
/// >>> import cupy
/// >>> import torch
/// >>> import tensor_bridge as tb
/// >>> a = tb.to_cupy(torch.ones(3, device="cuda"))
/// >>> stream = cupy.cuda.Stream(non_blocking=True)
/// >>> stream.wait_event(cupy.cuda.get_current_stream().record())
/// >>> tb.record_stream(a, stream)
/// >>> with stream:
/// ...     doubled = 2 * a
/// >>> del a  # PyTorch reuses the memory behind stream
#[pyfunction]
fn record_stream(view: &PyTensor<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = view.py();
    let record = || {
        not_a_capsule(view)?;
        let (object, stream) = (stream, streams::handle(stream)?);
        let adapter = source(view)?;
        let Some((device, address)) = adapter.locate(view)?.filter(|(device, _)| device.kind == DeviceKind::CUDA)
        else {
            return Ok(());
        };
        // SAFETY: the caller names a stream that is alive, as the documentation demands of a raw handle.
        if !unsafe { bridge_cuda::has_stream(device, stream) }? {
            let text = format!(
                "{stream} belongs to another device than the view, which is on {device}: pass a stream of {device}"
            );
            return Err(Error::new(ErrorKind::Device, text));
        }
        if trace::is_debugging() {
            debug::named(device, stream, &adapter.profile().name, streams::keep(object));
        }
        match adapter.consumer().views().used(device, address, stream.on_any_thread(), || streams::keep(object)) {
            0 => {
                let text = "this tensor is no view that tensor_bridge has made: use its own framework's record_stream";
                Err(argument(text))
            }
            _ => Ok(()),
        }
    };
    record().map_err(|error| into_python(py, error))
}

/// Return what a framework accepts and exports in this process.
///
/// Parameters
/// ----------
/// target : {"torch", "cupy", "numpy", "tensorflow", "tensorflow1"}
///     The framework.
///
/// Returns
/// -------
/// dict
///     ``name``; ``dtypes``; ``strides``, in words; ``alignment`` of addresses, in bytes; ``devices``;
///     ``keeps_read_only``, whether read-only memory stays so; ``waits_on_export``, whether the host waits for the
///     device when a tensor is exported; ``private_functions``, whether functions without a stable interface are used.
///
/// Raises
/// ------
/// BridgeValueError
///     If there is no target of this name.
/// BridgeImportError
///     If the framework is not installed.
///
/// Examples
/// --------
/// >>> import tensor_bridge as tb
/// >>> profile = tb.profile("torch")
/// >>> profile["strides"], profile["alignment"]
/// ('non_negative', 1)
#[pyfunction]
fn profile<'py>(py: Python<'py>, target: &PyTensor<'py>) -> PyResult<Bound<'py, PyAny>> {
    let adapter = frameworks::named(target).and_then(|framework| framework.open(py));
    let adapter = adapter.map_err(|error| into_python(py, error))?;
    let text = serde_json::to_string(adapter.profile()).expect("a profile is plain data");
    py.import("json")?.call_method1("loads", (text,))
}

/// Return counts of the whole process.
///
/// Returns
/// -------
/// dict of str to int
///     ``leased`` views were made and ``released`` ones returned to their owners. Of these, the memory of ``retired``
///     ones still waits for the device, and that of ``leaked`` ones is never reused, because the driver cannot tell
///     when it may be. ``untaken`` results of TensorFlow's graphs wait for ``take``; ``reclaimed`` ones never were
///     taken, and were dropped with their session.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import tensor_bridge as tb
/// >>> before = tb.stats()["leased"]
/// >>> t = tb.to_torch(np.zeros(3))
/// >>> tb.stats()["leased"] - before
/// 1
#[pyfunction]
fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let stats = bridge_core::stats();
    let counts = pyo3::types::PyDict::new(py);
    counts.set_item("leased", stats.leased)?;
    counts.set_item("released", stats.released)?;
    counts.set_item("leaked", stats.leaked + bridge_cuda::leaked() as u64)?;
    counts.set_item("retired", bridge_cuda::retired())?;
    counts.set_item("untaken", bridge_tensorflow::External::untaken())?;
    counts.set_item("reclaimed", bridge_tensorflow::External::reclaimed())?;
    // Behind the counts, so that the owners of all views that they call released are dropped when this returns.
    bridge_pyo3::drop_deferred();
    Ok(counts.into_any())
}

// What relies on the GIL is listed in docs/design/adapters.md.
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    bridge_pyo3::refuse_subinterpreters(module.py())?;
    bridge_pyo3::watch_for_exit(module.py());
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("borrow", borrow::capsule(module.py())?)?;
    module.add("KEYWORDS", include_str!("docs/keywords.txt"))?;
    module.add("FRAMEWORKS", frameworks::importable(module.py())?)?;
    module.add_class::<plan::Plan>()?;
    module.add_function(wrap_pyfunction!(convert::to_torch, module)?)?;
    module.add_function(wrap_pyfunction!(convert::to_cupy, module)?)?;
    module.add_function(wrap_pyfunction!(convert::to_numpy, module)?)?;
    module.add_function(wrap_pyfunction!(convert::to_tensorflow, module)?)?;
    module.add_function(wrap_pyfunction!(convert::convert, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan, module)?)?;
    module.add_function(wrap_pyfunction!(copies::copy, module)?)?;
    module.add_function(wrap_pyfunction!(record_stream, module)?)?;
    module.add_function(wrap_pyfunction!(profile, module)?)?;
    module.add_class::<tensorflow::Feed>()?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_operations, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_feed, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_take, module)?)?;
    module.add_class::<tensorflow1::Session>()?;
    module.add_class::<bridge_tensorflow::PyExternal>()?;
    module.add_function(wrap_pyfunction!(tensorflow1::tensorflow1_open, module)?)?;
    processes::enter(module)?;
    trace::enter(module)?;
    debug::enter(module)?;
    module.add_function(wrap_pyfunction!(stats, module)?)
}
