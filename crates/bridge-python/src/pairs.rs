//! Pairs of tensors: two trees of the same structure, walked together.

use crate::containers::{Kind, Step, is_plain, raised};
use crate::errors::argument;
use crate::frameworks::{AnyAdapter, adapter_of, advice_for_target, not_a_capsule, seen, source};
use crate::holders::{all_of, holds_none};
use crate::progress;
use crate::trees::{DEEPEST, Tree};
use bridge_core::{DType, DeviceKind, Error, ErrorKind, Misfit, Pair, Result};
use bridge_pyo3::{PyTensor, type_name};
use pyo3::prelude::*;
use std::collections::HashSet;

/// A tensor and the one that it is copied into.
struct Leaf<'py> {
    from: AnyAdapter<'py>,
    tensor: PyTensor<'py>,
    to: AnyAdapter<'py>,
    out: PyTensor<'py>,
    place: Place,
}

/// What a container holds, with the step to it.
type Content<'py> = (Step<'py>, PyTensor<'py>);

/// The number of the last step to an object in [`Pairs::steps`]; `None` for a root.
type Place = Option<usize>;

/// The pairs of tensors of two trees.
#[derive(Default)]
pub(crate) struct Pairs<'py> {
    leaves: Vec<Leaf<'py>>,
    /// Each step with the one before it.
    steps: Vec<(Place, Step<'py>)>,
    /// Pairs of containers that were met, kept alive, so that an address means one object. They are walked once.
    met: HashSet<(usize, usize)>,
    kept: Vec<PyTensor<'py>>,
    /// Containers of the target that are being walked, by address. To meet one again is a cycle.
    open: Vec<usize>,
    /// Whether an object was met that is not a tensor.
    others: bool,
}

/// An error, and its place.
struct Lost {
    place: Place,
    error: Error,
}

/// Returns the error for two trees that differ.
fn differ(text: impl std::fmt::Display) -> Error {
    argument(format!("{text}: pass trees of the same structure"))
}

/// Returns the adapters of a source and of its target.
///
/// # Errors
///
/// [`NotATensor`](ErrorKind::NotATensor), and [`Argument`](ErrorKind::Argument) for a source that is a container of
/// tensors, and for a target that is a capsule.
pub(crate) fn sides<'py>(src: &PyTensor<'py>, out: &PyTensor<'py>) -> Result<(AnyAdapter<'py>, AnyAdapter<'py>)> {
    not_a_capsule(out).map_err(|error| error.at("the target"))?;
    let to = source(out).map_err(|error| match error.kind() {
        ErrorKind::NotATensor => {
            not_a_target(out, advice_for_target(out).unwrap_or("pass a writable tensor, or a slice of one"))
        }
        _ => error,
    })?;
    Ok((beside(src)?, to))
}

fn not_a_target(out: &PyTensor<'_>, advice: &str) -> Error {
    let text = format!("the target is a {}, which is not a tensor: {advice}", type_name(out));
    Error::new(ErrorKind::NotATensor, text)
}

/// Returns the error of a copy, with what to call instead where the target is never written to in place.
#[cold]
pub(crate) fn of_target(out: &PyTensor<'_>, error: Error) -> Error {
    match advice_for_target(out).filter(|_| error.kind() == ErrorKind::ReadOnly) {
        Some(advice) => {
            let text = format!("a {} is not written to in place: {advice}", type_name(out));
            Error::new(ErrorKind::ReadOnly, text)
        }
        None => error,
    }
}

/// Returns the adapter of a source whose target is a tensor.
fn beside<'py>(src: &PyTensor<'py>) -> Result<AnyAdapter<'py>> {
    source(src).map_err(|error| match Tree::of(src) {
        Ok(Some(_)) => differ(format!("the target is a tensor and the source a {} of tensors", type_name(src))),
        _ => error,
    })
}

impl<'py> Pairs<'py> {
    /// Walks a source and a target. Returns `None` for a target that is not a container, and for one that holds objects
    /// but no tensor.
    ///
    /// # Errors
    ///
    /// [`Argument`](bridge_core::ErrorKind::Argument) where the two differ in structure, for a target that holds itself,
    /// and for more than [`DEEPEST`] levels; what Python raises.
    pub(crate) fn of(src: &PyTensor<'py>, out: &PyTensor<'py>) -> Result<Option<Self>> {
        if seen(out).is_some() || is_plain(out) || Kind::of(out)?.is_none() {
            return Ok(None);
        }
        let mut pairs = Self::default();
        if let Err(Lost { place, error }) = pairs.walk(src, out, None) {
            return Err(error.at(&pairs.path(place)));
        }
        Ok((!pairs.leaves.is_empty() || !pairs.others).then_some(pairs))
    }

    /// Returns every pair, with its adapters. Sources of other dtypes are cast to this one.
    pub(crate) fn each(&self, dtype: Option<DType>) -> Vec<Pair<'_, PyTensor<'py>, PyTensor<'py>>> {
        let leaves = self.leaves.iter();
        leaves.map(|Leaf { from, tensor, to, out, .. }| Pair::new(from, tensor, to, out).with_dtype(dtype)).collect()
    }

    /// Returns the bytes that go to another device.
    pub(crate) fn to_move(&self) -> usize {
        let nbytes = |leaf: &Leaf<'py>| {
            let (from, to) = (leaf.from.borrow(&leaf.tensor).ok()?, leaf.to.borrow(&leaf.out).ok()?);
            // A device casts, so elements move as they are on the host.
            let moving = if from.device().kind == DeviceKind::CUDA { to.layout() } else { from.layout() };
            let nbytes = || to.layout().numel() * moving.itemsize();
            progress::moves(from.device(), to.device()).then(nbytes)
        };
        self.leaves.iter().filter_map(nbytes).sum()
    }

    /// Returns every source with its target.
    pub(crate) fn objects(&self) -> Vec<(PyTensor<'py>, PyTensor<'py>)> {
        self.leaves.iter().map(|leaf| (leaf.tensor.clone(), leaf.out.clone())).collect()
    }

    /// Returns the error with the path to the pair that it is about.
    pub(crate) fn error(&self, Misfit { index, beside, error, .. }: Misfit) -> Error {
        let error = match self.leaves.get(index) {
            Some(leaf) => of_target(&leaf.out, error),
            None => error,
        };
        let path = |index: usize| self.path(self.leaves.get(index).and_then(|leaf| leaf.place));
        match beside {
            Some(other) => error.at(&format!("{} and {}", path(index), path(other))),
            None => error.at(&path(index)),
        }
    }

    fn path(&self, mut place: Place) -> String {
        let mut steps = Vec::new();
        while let Some((before, step)) = place.and_then(|place| self.steps.get(place)) {
            steps.push(step.to_string());
            place = *before;
        }
        steps.push("tree".into());
        steps.reverse();
        steps.concat()
    }

    fn walk(&mut self, src: &PyTensor<'py>, out: &PyTensor<'py>, place: Place) -> Result<(), Lost> {
        let lost = |error| Lost { place, error };
        let to = match seen(out) {
            Some(framework) => Some(framework.open(out.py()).map_err(lost)?),
            None if is_plain(out) => None,
            None => match Kind::of(out).map_err(lost)? {
                Some(kind) => return self.containers(src, out, kind, place),
                None => adapter_of(out).map_err(lost)?,
            },
        };
        let Some(to) = to else {
            self.others = true;
            let none = || no_tensor_beside(src, out).and_then(|()| none_in(out)).and_then(|()| none_in(src));
            return none().map_err(|error| {
                let differs = error.kind() == ErrorKind::Argument && !is_plain(out);
                let advice = advice_for_target(out).filter(|_| differs);
                lost(advice.map_or(error, |advice| not_a_target(out, advice)))
            });
        };
        if let AnyAdapter::Protocol(_) = to {
            not_a_capsule(out).map_err(|error| lost(error.at("the target")))?;
        }
        let from = beside(src).map_err(lost)?;
        self.leaves.push(Leaf { from, tensor: src.clone(), to, out: out.clone(), place });
        Ok(())
    }

    fn containers(&mut self, src: &PyTensor<'py>, out: &PyTensor<'py>, kind: Kind, place: Place) -> Result<(), Lost> {
        let lost = |error| Lost { place, error };
        let of_source = if seen(src).is_some() || is_plain(src) { None } else { Kind::of(src).map_err(lost)? };
        if of_source.is_none_or(|other| !other.matches(kind)) {
            let text = format!("the target is a {} and the source a {}", type_name(out), type_name(src));
            return Err(lost(differ(text)));
        }
        let address = out.as_ptr().addr();
        if self.open.contains(&address) {
            return Err(lost(argument("this container holds itself: pass a tree without cycles")));
        }
        if self.open.len() == DEEPEST {
            return Err(lost(argument(format!("more than {DEEPEST} containers are nested: copy their tensors apart"))));
        }
        if !self.met.insert((src.as_ptr().addr(), address)) {
            return Ok(());
        }
        self.kept.extend([src.clone(), out.clone()]);
        self.open.push(address);
        let targets = all_of(out, kind).map_err(lost)?;
        let sources = all_of(src, of_source.unwrap_or(kind)).map_err(lost)?;
        if sources.len() != targets.len() {
            let lacking = |contents: &[_], other: &_, held: &[_]| {
                lacking(contents, other, held).map_err(raised(out)).map_err(|error| Lost { place, error })
            };
            let (step, text) = if let Some(step) = lacking(&targets, src, &sources)? {
                (step, "the source has nothing here")
            } else if let Some(step) = lacking(&sources, out, &targets)? {
                (step, "the target has nothing here")
            } else {
                let (count, plural) = (targets.len(), if targets.len() == 1 { "" } else { "s" });
                let text = format!("the target holds {count} object{plural} and the source {}", sources.len());
                return Err(lost(differ(text)));
            };
            self.steps.push((place, step));
            return Err(Lost { place: Some(self.steps.len() - 1), error: differ(text) });
        }
        self.steps.reserve(targets.len());
        self.leaves.reserve(targets.len());
        let mut sources = sources.into_iter();
        for (step, target) in targets {
            let (other, mut source) = sources.next().expect("there are as many");
            self.steps.push((place, step));
            let at = Some(self.steps.len() - 1);
            let step = &self.steps[self.steps.len() - 1].1;
            let lost = |error| Lost { place: at, error };
            if !step.is(&other).map_err(raised(out)).map_err(lost)? {
                // Dicts are equal in any order.
                let found = match step {
                    Step::Key(key) => at_key(src, key).map_err(raised(src)).map_err(lost)?,
                    _ => None,
                };
                source = found.ok_or_else(|| lost(differ("the source has nothing here")))?;
            }
            self.walk(&source, &target, at)?;
        }
        self.open.pop();
        Ok(())
    }
}

/// Returns the first step of a container's contents that another container, which holds `held`, has not.
fn lacking<'py>(
    contents: &[Content<'py>],
    other: &PyTensor<'py>,
    held: &[Content<'py>],
) -> PyResult<Option<Step<'py>>> {
    for (step, _) in contents {
        let mut is_there = false;
        if let Step::Key(key) = step {
            is_there = at_key(other, key)?.is_some();
        } else {
            for (other, _) in held {
                is_there = is_there || step.is(other)?;
            }
        }
        if !is_there {
            return Ok(Some(step.clone()));
        }
    }
    Ok(None)
}

/// Returns the value that a dict or another mapping has for a key.
fn at_key<'py>(mapping: &PyTensor<'py>, key: &PyTensor<'py>) -> PyResult<Option<PyTensor<'py>>> {
    // To look up a missing key may make it.
    mapping.contains(key)?.then(|| mapping.get_item(key)).transpose()
}

/// Refuses an object in which a tensor would stay as it is.
fn none_in(object: &PyTensor<'_>) -> Result<()> {
    if is_plain(object) { Ok(()) } else { holds_none(object) }
}

/// Refuses a tensor in the source next to an object of the target that is none.
fn no_tensor_beside(src: &PyTensor<'_>, out: &PyTensor<'_>) -> Result<()> {
    if is_plain(src) {
        return Ok(());
    }
    let holds = seen(src).is_some() || adapter_of(src)?.is_some() || Kind::of(src)?.is_some();
    match holds {
        true => Err(differ(format!("the target is a {} and the source a {}", type_name(out), type_name(src)))),
        false => Ok(()),
    }
}
