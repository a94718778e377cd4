//! `truebridge.copier`: copies that are made again and again.

use crate::errors::into_python;
use crate::frameworks::{AnyAdapter, Framework, not_a_capsule, seen};
use crate::ordering::ordering;
use crate::pairs::{self, Pairs, of_target};
use crate::{conversions, options, trace};
use bridge_core::{DType, Error, ErrorKind, Export, Failed, Misfit, Pair, Prepared, Result};
use bridge_ipc::Leases;
use bridge_pyo3::{Fingerprint, PyTensor, together};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
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
    /// The leases that the memory lies in.
    leases: Leases,
    /// The frameworks whose tensors each call looks at.
    frameworks: Vec<Framework>,
    /// The pairs that each call looks at.
    looks: Vec<Look>,
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
        trace::call("copy", || "", fill).map(|()| self.out.bind(py).clone()).map_err(|error| into_python(py, error))
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
        let first = |error| Failed::new(0, error);
        let adapters = self.frameworks.iter().map(|framework| framework.open(py).map_err(first));
        let adapters: Vec<AnyAdapter<'_>> = adapters.collect::<Result<_, _>>()?;
        // Another lease of the same memory may still be good.
        if self.leases.check_again().is_err() {
            for index in 0..self.leaves.len() {
                let Some((source, target)) = self.prepared.held(index) else { continue };
                let both = bridge_ipc::check(source).and_then(|()| bridge_ipc::check(target));
                both.map_err(|error| Failed::new(index, error))?;
            }
        }
        for Look { index, sides } in &self.looks {
            let (index, leaf) = (*index, &self.leaves[*index]);
            let leaf = (leaf.0.bind(py), leaf.1.bind(py));
            let Some((source, target)) = self.prepared.held(index) else { continue };
            if !(sides.0.is_same(&adapters, leaf.0, source) && sides.1.is_same(&adapters, leaf.1, target)) {
                self.check(index, leaf)?;
            }
        }
        for (framework, tensors) in &self.counters {
            let adapter = framework.open(py).map_err(first)?;
            let tensors: Vec<_> = tensors.iter().map(|tensor| tensor.bind(py)).collect();
            adapter.overwritten_all(&tensors)?;
        }
        // SAFETY: the loop above has looked at every tensor, or at each storage whose memory may be replaced. Writes of
        // other threads at the same time are the program's to order, as for the frameworks' own copies.
        unsafe { self.prepared.copy_held() }
    }

    /// Exports a pair again.
    fn check(&self, index: usize, leaf: Leaf<'_, '_>) -> Result<(), Misfit> {
        let sides = sides(&[leaf]).map_err(|misfit| Failed::new(index, misfit.error))?;
        pairs(&[leaf], &sides, self.dtype).into_iter().try_for_each(|pair| self.prepared.check(index, pair, ordering()))
    }

    /// Exports all tensors again, and copies.
    fn copy_again(&self, py: Python<'_>, call: Option<&trace::Call>) -> Result<(), Misfit> {
        let leaves: Vec<_> = self.leaves.iter().map(|(src, out)| (src.bind(py), out.bind(py))).collect();
        sides(&leaves)
            .and_then(|sides| conversions::copy_all(call, &pairs(&leaves, &sides, self.dtype), Some(&self.prepared)))
    }
}

/// A pair that each call looks at, and how it looks at both sides.
struct Look {
    index: usize,
    sides: (Side, Side),
}

/// How a call looks at a side of a pair. Frameworks are those of the copier, by their number.
enum Side {
    /// At the tensor.
    Tensor(usize, Fingerprint),
    /// At the number of its storage.
    Storage(usize, usize),
    /// Not at all: memory that is kept stays.
    Kept,
    /// By an export, because the framework of its type is not known at once.
    Unseen,
}

impl Side {
    /// Returns whether a tensor is seen to be what was exported, or to have the storage that it had, without an export.
    fn is_same(&self, adapters: &[AnyAdapter<'_>], tensor: &PyTensor<'_>, exported: &Export) -> bool {
        match self {
            Self::Tensor(framework, fingerprint) => adapters[*framework].is_still(tensor, exported, fingerprint),
            Self::Storage(framework, number) => adapters[*framework].has_storage(tensor, *number),
            Self::Kept => true,
            Self::Unseen => false,
        }
    }
}

/// Returns what counts the writes to the targets, each once: the targets themselves where each call looks at them, and
/// else one tensor for each count.
///
/// # Errors
///
/// A producer without a framework does not say that it may be written to.
fn counters<'py>(
    check: bool,
    sides: &[(AnyAdapter<'py>, AnyAdapter<'py>)],
    leaves: &[Leaf<'_, 'py>],
) -> Result<Counters, Failed> {
    let (mut lists, mut met): (Counters, HashSet<usize>) = Default::default();
    for (index, ((_, to), (_, out))) in sides.iter().zip(leaves).enumerate() {
        let failed = |error| Failed::new(index, error);
        if let AnyAdapter::Protocol(_) = to {
            to.overwritten(out).map_err(failed)?;
        }
        let (Some(framework), Some(counter)) = (seen(out), to.counted_by(out).map_err(failed)?) else { continue };
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

/// Returns how each call looks at pairs: at every tensor, or at a pair for each storage whose memory may be replaced
/// although it is kept. Returns the frameworks of the tensors that it looks at, too.
fn looks(
    check: bool,
    prepared: &Prepared,
    sides: &[(AnyAdapter<'_>, AnyAdapter<'_>)],
    leaves: &[Leaf<'_, '_>],
) -> Result<(Vec<Framework>, Vec<Look>)> {
    let (mut frameworks, mut looks, mut met) = (Vec::new(), Vec::new(), HashSet::new());
    for (index, ((from, to), (src, out))) in sides.iter().zip(leaves).enumerate() {
        let Some((source, target)) = prepared.held(index) else { continue };
        let mut is_new = check;
        let mut side = |adapter: &AnyAdapter<'_>, tensor: &PyTensor<'_>, exported: &Export| -> Result<Side> {
            let storage = if check { None } else { adapter.storage(tensor)? };
            is_new |= storage.is_some_and(|storage| met.insert(storage));
            if !check && storage.is_none() {
                return Ok(Side::Kept);
            }
            let Some(framework) = seen(tensor) else { return Ok(Side::Unseen) };
            let number = frameworks.iter().position(|known| *known == framework).unwrap_or_else(|| {
                frameworks.push(framework);
                frameworks.len() - 1
            });
            Ok(match storage {
                Some(storage) => Side::Storage(number, storage),
                None => Side::Tensor(number, adapter.fingerprint(tensor, exported)),
            })
        };
        let sides = (side(from, src, source)?, side(to, out, target)?);
        if is_new {
            looks.push(Look { index, sides });
        }
    }
    Ok((frameworks, looks))
}

/// A source and its target.
type Leaf<'a, 'py> = (&'a PyTensor<'py>, &'a PyTensor<'py>);

/// Refuses scalars of NumPy, whose memory is made for each look at them.
fn not_scalars(sides: &[(AnyAdapter<'_>, AnyAdapter<'_>)], leaves: &[Leaf<'_, '_>]) -> Result<(), Failed> {
    for (index, ((from, _), (src, _))) in sides.iter().zip(leaves).enumerate() {
        let is_scalar = || src.is_instance(&src.py().import("numpy")?.getattr("generic")?);
        if matches!(from, AnyAdapter::Protocol(_)) && is_scalar().unwrap_or(false) {
            let text = "a scalar of NumPy has no memory that stays: pass numpy.asarray() of it";
            return Err(Failed::new(index, Error::new(ErrorKind::Argument, text)));
        }
    }
    Ok(())
}

/// Returns the adapters of the tensors.
fn sides<'py>(leaves: &[Leaf<'_, 'py>]) -> Result<Vec<(AnyAdapter<'py>, AnyAdapter<'py>)>, Misfit> {
    let side = |(src, out): &Leaf<'_, 'py>| {
        not_a_capsule(src)?;
        pairs::sides(src, out)
    };
    let side = |(index, leaf)| side(leaf).map_err(|error| Misfit::from(Failed::new(index, error)));
    leaves.iter().enumerate().map(side).collect()
}

fn pairs<'a, 'py>(
    leaves: &[Leaf<'a, 'py>],
    sides: &'a [(AnyAdapter<'py>, AnyAdapter<'py>)],
    dtype: Option<DType>,
) -> Vec<Pair<'a, PyTensor<'py>, PyTensor<'py>>> {
    let each = leaves.iter().zip(sides);
    each.map(|(&(tensor, out), (from, to))| Pair::new(from, tensor, to, out).with_dtype(dtype)).collect()
}

/// Returns the error with the path to the pair that it is about.
fn place<'py>(src: &PyTensor<'py>, out: &PyTensor<'py>, misfit: Misfit) -> bridge_core::Error {
    match Pairs::of(src, out) {
        Ok(Some(pairs)) => pairs.error(misfit),
        _ => of_target(out, misfit.error),
    }
}

/// Check and plan the copies from tensors into tensors that exist, to make them again and again.
///
/// Parameters
/// ----------
/// src : tensor or container of tensors
///     As for ``copy``. No DLPack capsules, no scalars of NumPy, and no fields of NumPy's records that a copy must pack
///     first.
/// out : tensor or container of tensors
///     As for ``copy``.
/// dtype : str or dtype, optional
///     As for ``copy``. Each call casts.
/// check : bool, optional
///     Whether each call looks at every tensor. With ``False`` it looks only at the storages of PyTorch's tensors, once
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
///     As for ``copy``. ``kind`` is ``"captured"`` while the target's current stream, or any blocking stream, is captured
///     into a CUDA graph. A call raises ``"layout"`` for a tensor that it looks at whose memory, shape or strides have
///     changed, ``"gone"`` for memory of another process that has ended or has revoked it, and ``"captured"`` where it
///     is captured and moves elements between the host and a device.
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
/// waiting for the copies. Tensors known only by a protocol are exported again by every call.
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
#[pyo3(
    signature = (src, *others, out = None, dtype = None, check = true),
    text_signature = "(src, *, out, dtype=None, check=True)"
)]
pub(crate) fn copier(
    src: &PyTensor<'_>,
    others: &Bound<'_, PyTuple>,
    out: Option<&PyTensor<'_>>,
    dtype: Option<&PyTensor<'_>>,
    #[pyo3(from_py_with = options::check)] check: bool,
) -> PyResult<Copier> {
    let py = src.py();
    let out = options::target("copier", others, out)?;
    let prepare = || {
        let dtype = dtype.map(options::dtype).transpose()?;
        let leaves = match Pairs::of(src, out)? {
            Some(pairs) => pairs.objects(),
            None => vec![(src.clone(), out.clone())],
        };
        let leaves: Vec<Leaf<'_, '_>> = leaves.iter().map(|(src, out)| (src, out)).collect();
        let placed = |misfit| place(src, out, misfit);
        let sides = sides(&leaves).map_err(placed)?;
        not_scalars(&sides, &leaves).map_err(|failed| placed(failed.into()))?;
        let pairs = pairs(&leaves, &sides, dtype);
        let (prepared, leases) = together(|| conversions::prepare(&pairs)).map_err(placed)?;
        let (frameworks, looks) = looks(check, &prepared, &sides, &leaves)?;
        let counters = counters(check, &sides, &leaves).map_err(|failed| placed(failed.into()))?;
        let leaves = leaves.into_iter().map(|(src, out)| (src.clone().unbind(), out.clone().unbind())).collect();
        let (src, out) = (src.clone().unbind(), out.clone().unbind());
        Ok(Copier { src, out, leaves, dtype, prepared, leases, frameworks, looks, counters })
    };
    prepare().map_err(|error| into_python(py, error))
}
