//! `truebridge.copier`: copies that are made again and again.

use crate::errors::into_python;
use crate::frameworks::{AnyAdapter, not_a_capsule, source};
use crate::ordering::ordering;
use crate::pairs::Pairs;
use crate::{cross, trace};
use bridge_core::{Failed, Misfit, Pair, Prepared, Result};
use bridge_pyo3::PyTensor;
use pyo3::prelude::*;

/// Copies that are checked and planned. ``copier`` makes it, and each call copies again.
///
/// It keeps the tensors alive. A call refuses a tensor whose memory, shape or strides have changed since. ``len`` is the
/// number of its tensors.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import truebridge as tb
/// >>> update = tb.copier([np.ones(3)], out=[np.zeros(3)])
/// >>> isinstance(update, tb.Copier), update()
/// (True, [array([1., 1., 1.])])
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Copier {
    src: Py<PyAny>,
    out: Py<PyAny>,
    /// Every source with its target.
    leaves: Vec<(Py<PyAny>, Py<PyAny>)>,
    prepared: Prepared,
}

#[pymethods]
impl Copier {
    /// Copy again, as ``copy`` does, and return ``out``.
    fn __call__<'py>(&self, py: Python<'py>) -> PyResult<PyTensor<'py>> {
        let leaves: Vec<_> = self.leaves.iter().map(|(src, out)| (src.bind(py), out.bind(py))).collect();
        let fill = |call: Option<&trace::Call>| {
            let done =
                sides(&leaves).and_then(|sides| cross::copy_all(call, &pairs(&leaves, &sides), Some(&self.prepared)));
            done.map_err(|misfit| place(self.src.bind(py), self.out.bind(py), misfit))
        };
        trace::call("copy", "", fill).map(|()| self.out.bind(py).clone()).map_err(|error| into_python(py, error))
    }

    fn __len__(&self) -> usize {
        self.leaves.len()
    }

    fn __repr__(&self) -> String {
        format!("<Copier of {} tensors>", self.leaves.len())
    }
}

/// A source and its target.
type Leaf<'a, 'py> = (&'a PyTensor<'py>, &'a PyTensor<'py>);

/// Returns the adapters of the tensors, and checks that the sources are still there.
fn sides<'py>(leaves: &[Leaf<'_, 'py>]) -> Result<Vec<(AnyAdapter<'py>, AnyAdapter<'py>)>, Misfit> {
    let side = |(src, out): &Leaf<'_, 'py>| {
        not_a_capsule(src).and_then(|()| not_a_capsule(out))?;
        let (from, to) = (source(src)?, source(out)?);
        cross::check(&from, src)?;
        Ok((from, to))
    };
    let side = |(index, leaf)| side(leaf).map_err(|error| Misfit::from(Failed { index, error }));
    leaves.iter().enumerate().map(side).collect()
}

fn pairs<'a, 'py>(
    leaves: &[Leaf<'a, 'py>],
    sides: &'a [(AnyAdapter<'py>, AnyAdapter<'py>)],
) -> Vec<Pair<'a, PyTensor<'py>, PyTensor<'py>>> {
    let each = leaves.iter().zip(sides);
    each.map(|(&(tensor, out), (from, to))| Pair { from, tensor, to, out }).collect()
}

/// Returns the error with the path to the pair that it is about.
fn place<'py>(src: &PyTensor<'py>, out: &PyTensor<'py>, misfit: Misfit) -> bridge_core::Error {
    match Pairs::of(src, out) {
        Ok(Some(pairs)) => pairs.error(misfit),
        _ => misfit.error,
    }
}

/// Check and plan the copies from tensors into tensors that exist, to make them again and again.
///
/// Parameters
/// ----------
/// src : tensor or container of tensors
///     As for ``copy``. No DLPack capsules.
/// out : tensor or container of tensors
///     As for ``copy``, each in the same memory as its source: on the same device, or both on the host.
///
/// Returns
/// -------
/// Copier
///     A callable without arguments. Each call copies what the sources hold then, and returns ``out``.
///
/// Raises
/// ------
/// BridgeError
///     As for ``copy``. ``kind`` is ``"device"`` for elements that change memory, and ``"captured"`` while the target's
///     current stream is captured into a CUDA graph. A call raises ``"layout"`` for a tensor whose memory, shape or
///     strides have changed.
///
/// Notes
/// -----
/// On a device the table of the pieces is made and uploaded here, and the host waits for that. A call orders the streams
/// that are current then, and launches. It may be captured into a CUDA graph: then the table stays until the process
/// ends, because the graph may be launched at any time. Keep the tensors as long as the graph.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> import torch
/// >>> import truebridge as tb
/// >>> trained = {"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
/// >>> served = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
/// >>> update = tb.copier(trained, out=served)
/// >>> trained["bias"] += 1
/// >>> update()["bias"]
/// tensor([1., 1.])
#[pyfunction]
#[pyo3(signature = (src, *, out))]
pub(crate) fn copier(src: &PyTensor<'_>, out: &PyTensor<'_>) -> PyResult<Copier> {
    let py = src.py();
    let prepare = || {
        let leaves = match Pairs::of(src, out)? {
            Some(pairs) => pairs.objects(),
            None => vec![(src.clone(), out.clone())],
        };
        let leaves: Vec<Leaf<'_, '_>> = leaves.iter().map(|(src, out)| (src, out)).collect();
        let prepared = sides(&leaves).and_then(|sides| Prepared::new(&pairs(&leaves, &sides), ordering()));
        let prepared = prepared.map_err(|misfit| place(src, out, misfit))?;
        let leaves = leaves.into_iter().map(|(src, out)| (src.clone().unbind(), out.clone().unbind())).collect();
        Ok(Copier { src: src.clone().unbind(), out: out.clone().unbind(), leaves, prepared })
    };
    prepare().map_err(|error| into_python(py, error))
}
