//! The Python package `tensor_bridge`: a thin layer over the adapters and core's `transfer`.

mod borrow;
mod containers;
mod copies;
mod device;
mod errors;
mod frameworks;
mod nvtx;
mod options;
mod processes;
mod streams;
mod tensorflow;
mod tensorflow1;
mod trace;
mod trees;

use bridge_core::{Adapter, CopiedBy, Device, DeviceKind, Error, ErrorKind, Failed};
use bridge_pyo3::{PyTensor, framework_error};
use errors::{argument, into_python};
use frameworks::{AnyAdapter, Framework, source};
use options::Keywords;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use trees::Tree;

fn transfer<'py>(x: &PyTensor<'py>, to: Framework, keywords: Keywords<'_, 'py>) -> PyResult<PyTensor<'py>> {
    let py = x.py();
    let cross = |call: Option<&trace::Call>| {
        let (to, options) = (to.open(py)?, keywords.read()?);
        match Tree::of(x)? {
            None => {
                let from = source(x)?;
                processes::check(&from, x)?;
                trace::transfer(call, &*from, &*to, &keywords.detached(x)?, &options)
            }
            Some(tree) => tree.map(x, |leaves| {
                let mut tensors = Vec::with_capacity(leaves.len());
                for (index, (from, tensor)) in leaves.iter().enumerate() {
                    let checked = processes::check(from, tensor).and_then(|()| keywords.detached(tensor));
                    tensors.push(checked.map_err(|error| Failed { index, error })?);
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

/// Returns a ``torch.Tensor`` over the memory of ``x``.
///
/// ``x`` is a tensor of one of the frameworks, an object with ``__dlpack__``, ``__cuda_array_interface__`` or
/// ``__array_interface__``, or a DLPack capsule, which this call consumes.
///
/// ``x`` may also be a dict, a list, a tuple, a named tuple or a dataclass that holds tensors, at any depth. The result
/// is a new container of the same class, in which each tensor is converted. Everything else passes through, and so does
/// a container that holds no tensor. Each pair of streams is ordered once for all tensors. An error names the way to
/// its tensor and leaves nothing behind. The other arguments apply to each tensor.
///
/// ``copy`` is as in the array API: ``None`` copies only where the target cannot take ``x`` in place (see ``plan``),
/// ``True`` always, ``False`` never. This package makes the copy, on the device of ``x``, into memory that the target
/// allocates, or else the framework of ``x``. Where it cannot, the frameworks copy by themselves.
///
/// ``permute`` names the dimensions of ``x`` in the order of the result, as ``numpy.transpose`` does: ``(0, 2, 3, 1)``
/// makes NHWC of NCHW. ``order="C"`` asks for row-major elements without gaps, ``order="F"`` for column-major ones;
/// TensorFlow has the first only. ``layout="compact"`` is another name of ``order="C"``. The result shares the memory
/// where the target takes the permuted strides and the order is met; otherwise one copy does it all.
///
/// ``device`` is the device that the result must be on. A tensor that is elsewhere is moved there, unless ``copy`` is
/// ``False``; without ``device`` nothing is moved. A result on the host has its elements when the call returns; a
/// result on a device has them in the target's current stream. ``device`` is a name such as ``"cuda:0"``, where
/// ``"cuda"`` means the current device, a ``torch.device``, a ``cupy.cuda.Device``, or the pair that
/// ``__dlpack_device__`` returns.
///
/// ``detach=True`` takes a tensor of PyTorch that requires grad as what ``x.detach()`` returns: its memory, without its
/// gradients. Without it, such a tensor is an error.
///
/// An unversioned capsule does not say whether its memory may be written: NumPy takes it as read-only, the other
/// targets as writable. A capsule on a CUDA device does not name the stream that its tensor is written on: order that
/// work before the legacy default stream, or pass the tensor itself.
///
/// TensorFlow assumes that tensors do not change, and shares constants in the whole process: to write to the result
/// when ``x`` is a tensor of TensorFlow, pass ``copy=True``.
///
/// Raises a ``BridgeError`` if ``x`` cannot cross.
#[pyfunction]
#[pyo3(signature = (x, *, copy=None, device=None, order=None, permute=None, layout=None, detach=false))]
fn to_torch<'py>(
    x: &PyTensor<'py>,
    copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    layout: Option<&PyTensor<'py>>,
    detach: bool,
) -> PyResult<PyTensor<'py>> {
    transfer(x, Framework::Torch, Keywords { copy, device, order, permute, layout, detach })
}

/// Returns a ``cupy.ndarray`` over the memory of ``x``. Arguments and errors are those of ``to_torch``.
#[pyfunction]
#[pyo3(signature = (x, *, copy=None, device=None, order=None, permute=None, layout=None, detach=false))]
fn to_cupy<'py>(
    x: &PyTensor<'py>,
    copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    layout: Option<&PyTensor<'py>>,
    detach: bool,
) -> PyResult<PyTensor<'py>> {
    transfer(x, Framework::CuPy, Keywords { copy, device, order, permute, layout, detach })
}

/// Returns a ``numpy.ndarray`` over the memory of ``x``, which must be host memory: pass ``device="cpu"`` to move a
/// tensor of a CUDA device. Arguments and errors are those of
/// ``to_torch``.
#[pyfunction]
#[pyo3(signature = (x, *, copy=None, device=None, order=None, permute=None, layout=None, detach=false))]
fn to_numpy<'py>(
    x: &PyTensor<'py>,
    copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    layout: Option<&PyTensor<'py>>,
    detach: bool,
) -> PyResult<PyTensor<'py>> {
    transfer(x, Framework::NumPy, Keywords { copy, device, order, permute, layout, detach })
}

/// Returns an eager ``tf.Tensor`` of TensorFlow 2 over the memory of ``x``. Arguments and errors are those of
/// ``to_torch``.
///
/// TensorFlow takes compact tensors at addresses that 64 divides, and copies of others. It never writes to ``x``,
/// except by the raw operations ``InplaceUpdate``, ``InplaceAdd`` and ``InplaceSub``. Read-only memory stays read-only
/// when it is exported again. While a ``tf.function`` is traced, the tensor becomes a constant of the function: pass it
/// as an argument.
#[pyfunction]
#[pyo3(signature = (x, *, copy=None, device=None, order=None, permute=None, layout=None, detach=false))]
fn to_tensorflow<'py>(
    x: &PyTensor<'py>,
    copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    layout: Option<&PyTensor<'py>>,
    detach: bool,
) -> PyResult<PyTensor<'py>> {
    transfer(x, Framework::TensorFlow, Keywords { copy, device, order, permute, layout, detach })
}

/// Returns a tensor of the framework named ``target`` over the memory of ``x``. Arguments and errors are those of
/// ``to_torch``.
#[pyfunction]
#[pyo3(signature = (x, target, *, copy=None, device=None, order=None, permute=None, layout=None, detach=false))]
#[expect(clippy::too_many_arguments, reason = "the keywords of conversions")]
fn convert<'py>(
    x: &PyTensor<'py>,
    target: &PyTensor<'py>,
    copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    layout: Option<&PyTensor<'py>>,
    detach: bool,
) -> PyResult<PyTensor<'py>> {
    let target = frameworks::named(target).map_err(|error| into_python(x.py(), error))?;
    transfer(x, target, Keywords { copy, device, order, permute, layout, detach })
}

/// How a conversion would be done.
#[pyclass(frozen, module = "tensor_bridge")]
struct Plan {
    plan: bridge_core::Plan,
    nbytes: usize,
    device: Device,
    /// `None` in place.
    copied_by: Option<CopiedBy>,
}

#[pymethods]
impl Plan {
    /// Whether the result would share the memory.
    #[getter]
    fn zero_copy(&self) -> bool {
        self.plan == bridge_core::Plan::ZeroCopy
    }

    /// Why a copy would be made, or ``None``.
    #[getter]
    fn reason(&self) -> Option<String> {
        match self.plan {
            bridge_core::Plan::ZeroCopy => None,
            bridge_core::Plan::Copy(reason) => Some(reason.to_string()),
        }
    }

    /// Bytes that would be copied.
    #[getter]
    fn nbytes(&self) -> usize {
        if self.zero_copy() { 0 } else { self.nbytes }
    }

    /// Who would make the copy, or ``None``: ``"kernels"`` of this package on the device, its loops on the ``"host"``,
    /// or the ``"producer"`` with its own kernels. ``"move"`` is this package, to another device.
    #[getter]
    fn copied_by(&self) -> Option<String> {
        self.copied_by.map(|by| by.to_string())
    }

    /// The device of the result: that of the tensor, unless it would be moved.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    fn __repr__(&self) -> String {
        match (self.reason(), self.copied_by) {
            (Some(reason), Some(by)) => {
                format!("<Plan: copy of {} bytes on {} by {by} because of {reason}>", self.nbytes, self.device)
            }
            _ => format!("<Plan: zero copy on {}>", self.device),
        }
    }
}

/// Returns what ``convert`` with the same arguments would do, and raises what it would raise. For a tree, returns the
/// tree with a ``Plan`` in the place of each tensor.
#[pyfunction]
#[pyo3(signature = (x, target, *, copy=None, device=None, order=None, permute=None, layout=None, detach=false))]
#[expect(clippy::too_many_arguments, reason = "the keywords of conversions")]
fn plan<'py>(
    x: &PyTensor<'py>,
    target: &PyTensor<'py>,
    copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    layout: Option<&PyTensor<'py>>,
    detach: bool,
) -> PyResult<PyTensor<'py>> {
    let py = x.py();
    let look = || {
        let to = frameworks::named(target)?.open(py)?;
        let keywords = Keywords { copy, device, order, permute, layout, detach };
        let options = keywords.read()?;
        let plan_of = |from: &AnyAdapter<'py>, x: &PyTensor<'py>| -> bridge_core::Result<PyTensor<'py>> {
            not_a_capsule(x)?;
            let lent = from.export(&keywords.detached(x)?)?.permuted(options.permute.as_ref())?;
            let plan = bridge_core::plan(&lent, to.profile(), &options)?;
            let moved = options.device.filter(|_| plan == bridge_core::Plan::Copy(bridge_core::Reason::Moved));
            if let (Some(device), Some(copies)) = (moved, copies::ordering().copies()) {
                copies.reaches(lent.device()).and_then(|()| copies.reaches(device))?;
            }
            let copies = plan != bridge_core::Plan::ZeroCopy;
            let copied_by = copies.then(|| bridge_core::copied_by(&**from, &*to, &lent, copies::ordering(), &options));
            let (nbytes, device) = (lent.layout().nbytes(), moved.unwrap_or(lent.device()));
            let plan = Bound::new(py, Plan { plan, nbytes, device, copied_by });
            plan.map(Bound::into_any).map_err(|error| framework_error(py, "Python", error))
        };
        match Tree::of(x)? {
            None => plan_of(&source(x)?, x),
            Some(tree) => tree.map(x, |leaves| {
                let plans = leaves.iter().enumerate();
                let plans = plans.map(|(index, (from, x))| plan_of(from, x).map_err(|error| Failed { index, error }));
                plans.collect()
            }),
        }
    };
    look().map_err(|error| into_python(py, error))
}

/// Records that ``view``, a result of this package or a part of one, is used on one more stream. Its owner waits for
/// that stream before it reuses the memory. Host memory and views without elements need no record.
///
/// The stream that is current at the conversion, and the one that is current where the view is dropped, need no record.
/// ``stream`` is a stream of any framework (``torch.cuda.Stream``, ``cupy.cuda.Stream``, any object with
/// ``__cuda_stream__``) on the device of the view. The view keeps it alive, except for an ``ExternalStream`` and a
/// handle passed as an ``int``: keep those alive yourself.
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

/// Returns what a framework accepts and exports in this process.
#[pyfunction]
fn profile<'py>(py: Python<'py>, target: &PyTensor<'py>) -> PyResult<Bound<'py, PyAny>> {
    let adapter = frameworks::named(target).and_then(|framework| framework.open(py));
    let adapter = adapter.map_err(|error| into_python(py, error))?;
    let text = serde_json::to_string(adapter.profile()).expect("a profile is plain data");
    py.import("json")?.call_method1("loads", (text,))
}

/// Returns counts of the whole process: views made (``leased``) and returned to their owners (``released``); of the
/// returned ones, those whose memory still waits for the device (``retired``) and those whose memory is never reused,
/// because the driver cannot tell when it may be (``leaked``). ``untaken`` results of TensorFlow's graphs wait for
/// ``take``; ``reclaimed`` results were never taken and were dropped with their session.
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
    bridge_pyo3::watch_for_exit(module.py());
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("borrow", borrow::capsule(module.py())?)?;
    module.add_class::<Plan>()?;
    module.add_function(wrap_pyfunction!(to_torch, module)?)?;
    module.add_function(wrap_pyfunction!(to_cupy, module)?)?;
    module.add_function(wrap_pyfunction!(to_numpy, module)?)?;
    module.add_function(wrap_pyfunction!(to_tensorflow, module)?)?;
    module.add_function(wrap_pyfunction!(convert, module)?)?;
    module.add_function(wrap_pyfunction!(plan, module)?)?;
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
    module.add_function(wrap_pyfunction!(stats, module)?)
}
