//! `truebridge.lend`: tensors for libraries that are known only by a protocol.

use crate::conversions::transferred;
use crate::errors::into_python;
use crate::frameworks::source;
use crate::immutable::Exposed;
use crate::options::Keywords;
use crate::ordering::ordering;
use crate::streams;
use crate::trace::{self, Call};
use crate::trees::{Leaf, Tree};
use bridge_core::{Device, DeviceKind, Failed, Result};
use bridge_frameworks::{Lending, Named};
use bridge_pyo3::PyTensor;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Return an object that any consumer of DLPack or of an array interface takes, over the memory of ``x``.
///
/// Parameters
/// ----------
/// x : tensor or container of tensors
///     As for ``to_torch``.
/// stream : stream or int, optional
///     The CUDA stream that the consumer will use the tensor in, as for ``record_stream``. The tensor is ready in it,
///     and the memory is reused after it. Without it the tensor is ready in the current stream of its framework:
///     each consumer waits for that in the stream that it names, and the memory is reused after all work that the device
///     has when the last view is dropped.
/// copy : bool, optional
///     As for ``to_torch``. Every layout is taken in place.
/// device : str, device or tuple of int, optional
///     As for ``to_torch``.
/// order : {None, "C", "F"}
///     As for ``to_torch``.
/// permute : sequence of int, optional
///     As for ``to_torch``.
/// detach : bool, optional
///     As for ``to_torch``.
/// read_only : bool, optional
///     Whether you promise that consumers do not write. Then read-only memory also goes to consumers of unversioned
///     capsules, which do not learn that it is read-only, and the call does not warn of memory that its framework
///     never changes.
///
/// Returns
/// -------
/// Loan or container
///     In place, or a copy.
///
/// Raises
/// ------
/// BridgeError
///     As for ``to_torch``. ``kind`` is ``"device"`` for a stream of another device, and ``"argument"`` without a stream
///     where the driver, before CUDA 12.5, cannot tell when a device has done its work.
///
/// Warns
/// -----
/// ImmutableWarning
///     If the memory is of a framework that never changes it: once for each framework.
///
/// Notes
/// -----
/// In a ``with`` block the loan is closed at the end, and the tensor's framework waits in its current stream for the
/// stream that was named: so a kernel may write to the tensor. Some libraries drop their view before they launch
/// (cuTile): the loan keeps the memory until the end of the block, after the launch.
///
/// See Also
/// --------
/// call : calls a function with all its tensors in one stream.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import torch
/// >>> import truebridge as tb
/// >>> t = torch.zeros(3)
/// >>> with tb.lend(t) as loan:
/// ...     np.from_dlpack(loan)[0] = 42  # any library with from_dlpack
/// >>> t
/// tensor([42.,  0.,  0.])
#[pyfunction]
#[pyo3(signature = (
    x, stream=None, *, copy=None, device=None, order=None, permute=None, detach=false, read_only=false
))]
#[allow(clippy::too_many_arguments, reason = "the keywords of conversions")]
pub(crate) fn lend<'py>(
    x: &PyTensor<'py>,
    stream: Option<&PyTensor<'py>>,
    #[pyo3(from_py_with = crate::options::copy)] copy: Option<bool>,
    device: Option<&PyTensor<'py>>,
    order: Option<&PyTensor<'py>>,
    permute: Option<&PyTensor<'py>>,
    #[pyo3(from_py_with = crate::options::detach)] detach: bool,
    #[pyo3(from_py_with = crate::options::read_only)] read_only: bool,
) -> PyResult<PyTensor<'py>> {
    let keywords = Keywords { copy, device, order, permute, detach, read_only, ..Keywords::default() };
    let exposed = Exposed::default();
    let lend = |call: Option<&Call>| {
        let named = stream.map(named).transpose()?;
        match Tree::of(x)? {
            None => lend_one(call, &(source(x)?, x.clone()), named, keywords, &exposed),
            Some(tree) => tree.map(x, |leaves| lend_each(call, leaves, named.as_ref(), keywords, &exposed)),
        }
    };
    let loaned = trace::call("lend", || "dlpack", lend).map_err(|error| into_python(x.py(), error))?;
    exposed.warn(x.py())?;
    Ok(loaned)
}

/// What [`lend_together`] returns.
type Together<'py> = (PyTensor<'py>, Vec<PyTensor<'py>>, Option<(i32, u64)>);

/// Lends the tensors among the arguments of a call in one stream: `stream`, or the stream that is current in the
/// framework of the first tensor on a device. Returns the arguments, the loans, and the device and the handle of the
/// stream.
#[pyfunction]
#[pyo3(signature = (arguments, stream, read_only))]
pub(crate) fn lend_together<'py>(
    arguments: &PyTensor<'py>,
    stream: Option<&PyTensor<'py>>,
    #[pyo3(from_py_with = crate::options::read_only)] read_only: bool,
) -> PyResult<Together<'py>> {
    let keywords = Keywords { read_only, ..Keywords::default() };
    let exposed = Exposed::default();
    let lend = |call: Option<&Call>| {
        let Some(tree) = Tree::of_arguments(arguments)? else { return Ok((arguments.clone(), Vec::new(), None)) };
        let (mut loans, mut place) = (Vec::new(), None);
        let loaned = tree.map(arguments, |leaves| {
            let first = first_on_a_device(leaves)?;
            let named = match stream {
                Some(stream) => Some(named(stream).map_err(|error| Failed::new(0, error))?),
                None => first.as_ref().map(|(_, current)| current.clone()),
            };
            place = first.and_then(|(device, _)| Some((device.index, named.as_ref()?.stream().handle())));
            loans = lend_each(call, leaves, named.as_ref(), keywords, &exposed)?;
            Ok(loans.clone())
        })?;
        Ok((loaned, loans, place))
    };
    let loaned = trace::call("lend", || "dlpack", lend).map_err(|error| into_python(arguments.py(), error))?;
    exposed.warn(arguments.py())?;
    Ok(loaned)
}

/// Reads the stream that the caller names.
fn named(stream: &PyTensor<'_>) -> Result<Named> {
    // SAFETY: the object keeps its stream; the caller keeps the stream of a raw handle, as the documentation demands.
    Ok(unsafe { Named::new(streams::handle(stream)?, streams::keep(stream)) })
}

/// Returns the device of the first tensor that is on one, and the stream that is current there in its framework.
fn first_on_a_device(leaves: &[Leaf<'_>]) -> Result<Option<(Device, Named)>, Failed> {
    for (index, (adapter, tensor)) in leaves.iter().enumerate() {
        let failed = |error| Failed::new(index, error);
        // A look at a capsule consumes it.
        if tensor.is_instance_of::<PyCapsule>() {
            continue;
        }
        let Some((device, _)) = adapter.locate(tensor).map_err(failed)? else { continue };
        let consumer = adapter.consumer();
        if device.kind != DeviceKind::CPU
            && let Some(stream) = consumer.current_stream(device).map_err(failed)?
        {
            // SAFETY: by the contract of `Consumer` the stream is alive as long as its `keep`, or as the process.
            return Ok(Some((device, unsafe { Named::new(stream, consumer.keep(device, stream)) })));
        }
    }
    Ok(None)
}

fn lend_each<'py>(
    call: Option<&Call>,
    leaves: &[Leaf<'py>],
    named: Option<&Named>,
    keywords: Keywords<'_, 'py>,
    exposed: &Exposed,
) -> Result<Vec<PyTensor<'py>>, Failed> {
    call.iter().for_each(|call| call.expect(leaves.len()));
    let lend = |(index, leaf)| {
        lend_one(call, leaf, named.cloned(), keywords, exposed).map_err(|error| Failed::new(index, error))
    };
    leaves.iter().enumerate().map(lend).collect()
}

fn lend_one<'py>(
    call: Option<&Call>,
    (from, x): &Leaf<'py>,
    named: Option<Named>,
    keywords: Keywords<'_, 'py>,
    exposed: &Exposed,
) -> Result<PyTensor<'py>> {
    let options = keywords.read()?;
    let x = keywords.detached(x)?;
    let to = Lending::new(&x, from.consumer(), named, ordering(), &options);
    let (loan, done) = transferred(call, &**from, &to, &x, &options)?;
    exposed.note_loan(&**from, &done);
    Ok(loan)
}
