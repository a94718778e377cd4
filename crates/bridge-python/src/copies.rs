//! `tensor_bridge.copy`, and copies that release the GIL.

use crate::errors::into_python;
use crate::frameworks::source;
use crate::{not_a_capsule, processes, trace};
use bridge_copy::Copier;
use bridge_core::{Copies, Device, DeviceBuffer, DeviceKind, Keep, Ordering, Result, Stream, Strided};
use bridge_pyo3::PyTensor;
use pyo3::prelude::*;
use std::sync::{Arc, LazyLock};

/// Returns the ordering of the process, whose copies release the GIL where they take long.
pub(crate) fn ordering() -> &'static Arc<dyn Ordering> {
    static ORDERING: LazyLock<Arc<dyn Ordering>> = LazyLock::new(|| bridge_copy::ordering_with(&Releasing));
    &ORDERING
}

/// The copies of `bridge-copy`, made without the GIL where the host waits, or copies at least [`LONG`] bytes.
struct Releasing;

/// Copies of fewer bytes take less time than a thread switch of Python.
const LONG: usize = 1 << 20;

#[deny(clippy::missing_trait_methods)]
// SAFETY: every method is that of the copies inside, which have made the promises.
unsafe impl Copies for Releasing {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()> {
        // SAFETY: the caller's promises.
        let copy = || unsafe { Copier.copy(from, to, flips, stream) };
        let (reads_host, writes_host) = (from.device.kind == DeviceKind::CPU, to.device.kind == DeviceKind::CPU);
        let waits = writes_host && stream.is_some();
        if waits || ((reads_host || writes_host) && from.layout.nbytes() >= LONG) {
            // Conversions hold the GIL, so this only names it.
            Python::attach(|py| py.detach(copy))
        } else {
            copy()
        }
    }

    fn reaches(&self, device: Device) -> Result<()> {
        Copier.reaches(device)
    }

    fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        keep: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        Copier.allocate(device, nbytes, stream, keep)
    }
}

/// Copy the elements of one tensor into another that exists, and return that.
///
/// Parameters
/// ----------
/// src : tensor
///     A tensor of any framework. It is broadcast to the shape of ``out``, as in ``numpy.copyto``.
/// out : tensor
///     A tensor of PyTorch, CuPy or NumPy, or a slice of one, with any strides and the dtype of ``src``, on any device.
///
/// Returns
/// -------
/// tensor
///     ``out``.
///
/// Raises
/// ------
/// BridgeError
///     Before anything is written, if the two share memory, if ``out`` is read-only, requires grad, has two elements at
///     one address or is a tensor of TensorFlow, and if shapes or dtypes do not fit together.
///
/// Notes
/// -----
/// On a device the copy runs in the current stream of the framework of ``out``. It waits for the work on ``src``, and
/// the owner of ``src`` waits for it before it reuses the memory. The host waits only for elements that it receives.
/// PyTorch's autograd notices the write.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import torch
/// >>> import tensor_bridge as tb
/// >>> batch = torch.zeros(2, 3)
/// >>> tb.copy(np.array([1, 2, 3], np.float32), out=batch[1])
/// tensor([1., 2., 3.])
/// >>> batch.sum()
/// tensor(6.)
#[pyfunction]
#[pyo3(signature = (src, *, out))]
pub(crate) fn copy<'py>(src: &PyTensor<'py>, out: &PyTensor<'py>) -> PyResult<PyTensor<'py>> {
    let py = src.py();
    let fill = |call: Option<&trace::Call>| {
        not_a_capsule(out)?;
        let (from, to) = (source(src)?, source(out)?);
        processes::check(&from, src)?;
        trace::copy_into(call, &*from, &*to, src, out)
    };
    trace::call("copy", "", fill).map(|()| out.clone()).map_err(|error| into_python(py, error))
}
