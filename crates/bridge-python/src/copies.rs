//! `truebridge.copy`.

use crate::errors::into_python;
use crate::pairs::{Pairs, of_target, sides};
use crate::{conversions, options, progress, trace};
use bridge_core::Pair;
use bridge_pyo3::PyTensor;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Copy the elements of one tensor into another that exists, or of many into many, and return that.
///
/// Parameters
/// ----------
/// src : tensor or container of tensors
///     A tensor of any framework that does not require grad. It is broadcast to the shape of ``out``, as in
///     ``numpy.copyto``. Or a container of tensors, as for ``to_torch``.
/// out : tensor or container of tensors
///     A tensor of PyTorch, CuPy or NumPy, or a slice of one, with any strides and the dtype of ``src``, or ``dtype``,
///     on any device. Or a container of these with the structure of ``src``: the same keys, names and lengths. A list
///     and a tuple go together; objects that are not tensors, and hold none, are left as they are.
/// dtype : str or dtype, optional
///     The dtype to which elements are cast on their way: ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"float64"``,
///     ``"float8_e4m3fn"`` or ``"float8_e5m2"``, or a framework's object such as ``torch.bfloat16``. A target of this dtype takes sources of all six. Where the two sides
///     have one dtype, whichever it is, elements are copied as they are, such as integers among the weights of a model.
/// progress : bool or function, optional
///     Whether to show how far a move between the host and a device is, as for ``to_torch``.
///
/// Returns
/// -------
/// tensor or container
///     ``out``.
///
/// Raises
/// ------
/// BridgeError
///     Before anything is written, if the two share memory, if ``src`` requires grad, if ``out`` is read-only, requires
///     grad, may have two elements at one address, is a field of NumPy's records whose strides are not a whole number of
///     elements, or is a tensor of TensorFlow, and if shapes or dtypes do not fit together. Of containers, also if they
///     differ in structure, or if a target shares memory with another target or another source. The message names the
///     path to the tensor.
///
/// Notes
/// -----
/// On a device the copy runs in the current stream of the framework of ``out``. It waits for the work on ``src``, and
/// the owner of ``src`` waits for it before it reuses the memory. The host waits only for elements that it receives,
/// and for a move of up to 4 MiB in an idle stream.
/// PyTorch's autograd notices the write.
///
/// Tensors of containers are copied together: each stream waits once, whatever the number of tensors, and on a device
/// one kernel copies all that are rows of adjacent bytes on both sides. A pair of the same source and the same target
/// as an earlier one, such as weights that a model holds twice, is copied once. Small tensors of a container that
/// change memory move together: they are packed into large blocks, and one kernel copies all of a block.
///
/// Casts round as ``Tensor.to`` of PyTorch: to nearest, ties to even, and a float64 to float32 first, where it becomes
/// smaller than that. What is too large becomes infinite, and NaN in float8_e4m3fn. On a device one kernel makes all
/// casts of a container. Between the host and a device, the device casts; between two devices, that of the source.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import torch
/// >>> import truebridge as tb
/// >>> batch = torch.zeros(2, 3)
/// >>> tb.copy(np.array([1, 2, 3], np.float32), out=batch[1])
/// tensor([1., 2., 3.])
/// >>> batch.sum()
/// tensor(6.)
/// >>> rows = {"first": np.ones(3, np.float32), "second": torch.zeros(3)}
/// >>> _ = tb.copy(rows, out={"first": batch[0], "second": batch[1]})
/// >>> batch.sum()
/// tensor(3.)
/// >>> tb.copy(batch[0], out=torch.zeros(3, dtype=torch.bfloat16), dtype="bfloat16")
/// tensor([1., 1., 1.], dtype=torch.bfloat16)
#[pyfunction]
#[pyo3(
    signature = (src, *others, out=None, dtype=None, progress=None),
    text_signature = "(src, *, out, dtype=None, progress=None)"
)]
pub(crate) fn copy<'py>(
    src: &PyTensor<'py>,
    others: &Bound<'py, PyTuple>,
    out: Option<&PyTensor<'py>>,
    dtype: Option<&PyTensor<'py>>,
    progress: Option<&PyTensor<'py>>,
) -> PyResult<PyTensor<'py>> {
    let py = src.py();
    let out = options::target("copy", others, out)?;
    let fill = |call: Option<&trace::Call>| {
        let dtype = dtype.map(options::dtype).transpose()?;
        if let Some(pairs) = Pairs::of(src, out)? {
            progress::expect(|| pairs.to_move());
            return conversions::copy_all(call, &pairs.each(dtype), None).map_err(|misfit| pairs.error(misfit));
        }
        let (from, to) = sides(src, out)?;
        if dtype.is_none() {
            return conversions::copy_into(call, &*from, &*to, src, out).map_err(|error| of_target(out, error));
        }
        let pair = Pair::new(&*from, src, &*to, out).with_dtype(dtype);
        conversions::copy_all(call, &[pair], None).map_err(|misfit| of_target(out, misfit.error))
    };
    progress::shown(py, progress, || {
        trace::call("copy", || "", fill).map(|()| out.clone()).map_err(|error| into_python(py, error))
    })
}
