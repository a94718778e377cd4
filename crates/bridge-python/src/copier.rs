//! `truebridge.copier`: copies that are made again and again.

use crate::errors::into_python;
use crate::frameworks::{AnyAdapter, Framework, not_a_capsule, seen};
use crate::ordering::ordering;
use crate::pairs::{self, Pairs};
use crate::{cross, options, trace};
use bridge_core::{DType, Failed, Lent, Misfit, Pair, Prepared, Result};
use bridge_pyo3::PyTensor;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::collections::HashSet;

/// What counts writes, one list for each framework.
type Counters = Vec<(Framework, Vec<Py<PyAny>>)>;

/// Copies that are checked and planned. ``copier`` makes it, and each call copies again.
///
/// It keeps the tensors and their memory. ``len`` is the number of its tensors.
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
    /// The dtype to which sources of another one are cast.
    dtype: Option<DType>,
    prepared: Prepared,
    /// The pairs that each call looks at, and the numbers of their storages where a look at these is enough.
    checked: Vec<(usize, Option<Storages>)>,
    /// What counts writes to the targets.
    counters: Counters,
}

#[pymethods]
impl Copier {
    /// Copy again, as ``copy`` does, and return ``out``.
    fn __call__<'py>(&self, py: Python<'py>) -> PyResult<PyTensor<'py>> {
        let fill = |call: Option<&trace::Call>| {
            // A trace sees what is exported.
            let done = match (call, self.prepared.held(0)) {
                (None, Some(_)) => self.copy_held(py),
                _ => self.copy_again(py, call),
            };
            done.map_err(|misfit| place(self.src.bind(py), self.out.bind(py), misfit))
        };
        trace::call("copy", "", fill).map(|()| self.out.bind(py).clone()).map_err(|error| into_python(py, error))
    }

    /// Shows the garbage collector what the copier keeps: a tree may keep its copier.
    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        let leaves = self.leaves.iter().flat_map(|(src, out)| [src, out]);
        leaves.chain([&self.src, &self.out]).try_for_each(|object| visit.call(object))?;
        self.counters.iter().flat_map(|(_, tensors)| tensors).try_for_each(|tensor| visit.call(tensor))
    }

    fn __len__(&self) -> usize {
        self.leaves.len()
    }

    fn __repr__(&self) -> String {
        let count = self.leaves.len();
        format!("<Copier of {count} tensor{}>", if count == 1 { "" } else { "s" })
    }
}

impl Copier {
    /// Copies from and into the memory that is kept.
    fn copy_held(&self, py: Python<'_>) -> Result<(), Misfit> {
        for &(index, storages) in &self.checked {
            let leaf = (self.leaves[index].0.bind(py), self.leaves[index].1.bind(py));
            let Some((source, target)) = self.prepared.held(index) else { continue };
            let is_same = match storages {
                Some((from, to)) => has_storage(leaf.0, from) && has_storage(leaf.1, to),
                None => is_still(leaf.0, source) && is_still(leaf.1, target),
            };
            if !is_same {
                self.check(index, leaf)?;
            }
            if bridge_ipc::is_leasing() {
                bridge_ipc::check(source).map_err(|error| Failed { index, error })?;
            }
        }
        for (framework, tensors) in &self.counters {
            let adapter = framework.open(py).map_err(|error| Failed { index: 0, error })?;
            let tensors: Vec<_> = tensors.iter().map(|tensor| tensor.bind(py)).collect();
            adapter.overwritten_all(&tensors)?;
        }
        // SAFETY: the loop above has looked at every tensor, or at each storage whose memory may be replaced. Writes of
        // other threads at the same time are the program's to order, as for the frameworks' own copies.
        unsafe { self.prepared.copy_held() }
    }

    /// Exports a pair again.
    fn check(&self, index: usize, leaf: Leaf<'_, '_>) -> Result<(), Misfit> {
        let sides = sides(&[leaf]).map_err(|misfit| Failed { index, error: misfit.error })?;
        pairs(&[leaf], &sides, self.dtype).into_iter().try_for_each(|pair| self.prepared.check(index, pair, ordering()))
    }

    /// Exports all tensors again, and copies.
    fn copy_again(&self, py: Python<'_>, call: Option<&trace::Call>) -> Result<(), Misfit> {
        let leaves: Vec<_> = self.leaves.iter().map(|(src, out)| (src.bind(py), out.bind(py))).collect();
        sides(&leaves)
            .and_then(|sides| cross::copy_all(call, &pairs(&leaves, &sides, self.dtype), Some(&self.prepared)))
    }
}

/// The numbers of the storages of a source and of its target; `None` where memory that is kept stays.
type Storages = (Option<usize>, Option<usize>);

fn adapter<'py>(tensor: &PyTensor<'py>) -> Option<AnyAdapter<'py>> {
    seen(tensor).and_then(|framework| framework.open(tensor.py()).ok())
}

/// Returns whether a tensor is seen to be what was exported, without an export.
fn is_still(tensor: &PyTensor<'_>, lent: &Lent) -> bool {
    adapter(tensor).is_some_and(|adapter| adapter.is_still(tensor, lent))
}

/// Returns whether a tensor is seen to have this storage.
fn has_storage(tensor: &PyTensor<'_>, number: Option<usize>) -> bool {
    number.is_none_or(|number| adapter(tensor).is_some_and(|adapter| adapter.has_storage(tensor, number)))
}

/// Returns what counts the writes to the targets, each once: the targets themselves where each call looks at them, and
/// else one tensor for each count.
fn counters<'py>(
    check: bool,
    sides: &[(AnyAdapter<'py>, AnyAdapter<'py>)],
    leaves: &[Leaf<'_, 'py>],
) -> Result<Counters> {
    let (mut lists, mut met): (Counters, HashSet<usize>) = Default::default();
    for ((_, to), (_, out)) in sides.iter().zip(leaves) {
        let (Some(framework), Some(counter)) = (seen(out), to.counted_by(out)?) else { continue };
        let counter = if check { (*out).clone() } else { counter };
        if !met.insert(counter.as_ptr() as usize) {
            continue;
        }
        let list = lists.iter().position(|(known, _)| *known == framework).unwrap_or_else(|| {
            lists.push((framework, Vec::new()));
            lists.len() - 1
        });
        lists[list].1.push(counter.unbind());
    }
    Ok(lists)
}

/// Returns a pair for each storage whose memory may be replaced although it is kept: a look at the storages tells.
fn storages(
    sides: &[(AnyAdapter<'_>, AnyAdapter<'_>)],
    leaves: &[Leaf<'_, '_>],
) -> Result<Vec<(usize, Option<Storages>)>> {
    let (mut met, mut first) = (HashSet::new(), Vec::new());
    for (index, ((from, to), (src, out))) in sides.iter().zip(leaves).enumerate() {
        let both = (from.storage(src)?, to.storage(out)?);
        if [both.0, both.1].into_iter().flatten().fold(false, |is_new, storage| met.insert(storage) | is_new) {
            first.push((index, Some(both)));
        }
    }
    Ok(first)
}

/// A source and its target.
type Leaf<'a, 'py> = (&'a PyTensor<'py>, &'a PyTensor<'py>);

/// Returns the adapters of the tensors, and checks that the sources are still there.
fn sides<'py>(leaves: &[Leaf<'_, 'py>]) -> Result<Vec<(AnyAdapter<'py>, AnyAdapter<'py>)>, Misfit> {
    let side = |(src, out): &Leaf<'_, 'py>| {
        not_a_capsule(src)?;
        let (from, to) = pairs::sides(src, out)?;
        cross::check(&from, src)?;
        Ok((from, to))
    };
    let side = |(index, leaf)| side(leaf).map_err(|error| Misfit::from(Failed { index, error }));
    leaves.iter().enumerate().map(side).collect()
}

fn pairs<'a, 'py>(
    leaves: &[Leaf<'a, 'py>],
    sides: &'a [(AnyAdapter<'py>, AnyAdapter<'py>)],
    dtype: Option<DType>,
) -> Vec<Pair<'a, PyTensor<'py>, PyTensor<'py>>> {
    let each = leaves.iter().zip(sides);
    each.map(|(&(tensor, out), (from, to))| Pair { from, tensor, to, out, dtype }).collect()
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
///     As for ``copy``. No DLPack capsules, and no fields of NumPy's records that a copy must pack first.
/// out : tensor or container of tensors
///     As for ``copy``.
/// dtype : str, optional
///     As for ``copy``. Each call casts.
/// check : bool, optional
///     Whether each call looks at every tensor. With ``False`` it looks at the storages of PyTorch's tensors alone, once
///     each: then the tensors must stay the views that they are, and arrays of NumPy must not be resized
///     (``refcheck=False``).
///
/// Returns
/// -------
/// Copier
///     A callable without arguments. Each call copies what the sources hold then, and returns ``out``.
///
/// Raises
/// ------
/// BridgeError
///     As for ``copy``. ``kind`` is ``"captured"`` while the target's current stream is captured into a CUDA graph. A
///     call raises ``"layout"`` for a tensor that it looks at whose memory, shape or strides have changed, and
///     ``"captured"`` where it is captured and moves elements between the host and a device.
///
/// Notes
/// -----
/// On a device the table of the pieces is made and uploaded here, and the host waits for that. A call orders the streams
/// that are current then, and launches. It may be captured into a CUDA graph: then the table stays until the process
/// ends, because the graph may be launched at any time. Keep the copier as long as the graph.
///
/// Elements that change memory are moved by each call as ``copy`` moves them. Of those nothing but the checks is kept.
///
/// The copier keeps the memory that the tensors have when it is made, and each call ends with the owners' current streams
/// waiting for the copies. Tensors known by a protocol alone are exported again by every call.
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
#[pyo3(signature = (src, *, out, dtype = None, check = true))]
pub(crate) fn copier(
    src: &PyTensor<'_>,
    out: &PyTensor<'_>,
    dtype: Option<&PyTensor<'_>>,
    #[pyo3(from_py_with = options::check)] check: bool,
) -> PyResult<Copier> {
    let py = src.py();
    let prepare = || {
        let dtype = dtype.map(options::dtype).transpose()?;
        let leaves = match Pairs::of(src, out)? {
            Some(pairs) => pairs.objects(),
            None => vec![(src.clone(), out.clone())],
        };
        let leaves: Vec<Leaf<'_, '_>> = leaves.iter().map(|(src, out)| (src, out)).collect();
        let placed = |misfit| place(src, out, misfit);
        let sides = sides(&leaves).map_err(placed)?;
        let prepared = Prepared::new(&pairs(&leaves, &sides, dtype), ordering()).map_err(placed)?;
        let checked =
            if check { (0..leaves.len()).map(|index| (index, None)).collect() } else { storages(&sides, &leaves)? };
        let counters = counters(check, &sides, &leaves)?;
        let leaves = leaves.into_iter().map(|(src, out)| (src.clone().unbind(), out.clone().unbind())).collect();
        Ok(Copier { src: src.clone().unbind(), out: out.clone().unbind(), leaves, dtype, prepared, checked, counters })
    };
    prepare().map_err(|error| into_python(py, error))
}
