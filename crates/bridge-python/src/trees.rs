//! Trees of tensors: dicts, lists, tuples, dataclasses and nodes of pytrees, one inside another.

use crate::containers::{Kind, Step, is_plain, raised};
use crate::errors::argument;
use crate::frameworks::{AnyAdapter, adapter_of, seen, source};
use crate::holders::{all_of, holds_none};
use bridge_core::{Error, Failed, Result};
use bridge_pyo3::PyTensor;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// The most containers one inside another. Each level takes some of the C stack.
pub(crate) const DEEPEST: usize = 100;

/// What an object of the tree is.
#[derive(Clone, Copy, PartialEq)]
enum Node {
    /// It passes through: no tensor, and no container that holds one.
    Other,
    /// A tensor, by its place in [`Tree::leaves`].
    Leaf(usize),
    /// A container that holds a tensor, by its place in [`Tree::containers`].
    Container(usize),
    /// A container that is being walked. To meet it again is a cycle.
    Open,
}

struct Container<'py> {
    object: PyTensor<'py>,
    kind: Kind,
    /// The leaves and the containers in it.
    changes: Vec<(Step<'py>, Node)>,
}

/// A tensor of a tree, with the adapter that exports it.
pub(crate) type Leaf<'py> = (AnyAdapter<'py>, PyTensor<'py>);

/// A tree of tensors. An object that stands in it twice is one leaf or one container.
#[derive(Default)]
pub(crate) struct Tree<'py> {
    /// Each comes after those in it, so the root is the last.
    containers: Vec<Container<'py>>,
    leaves: Vec<Leaf<'py>>,
    /// What was met, by address. The objects are kept alive, so that an address means one object.
    met: HashMap<usize, (PyTensor<'py>, Node), BuildHasherDefault<OfAddress>>,
    /// Whether an object was met that passes through.
    others: bool,
    /// Whether such an object may hold tensors.
    passes_holders: bool,
}

/// The hash of an address. Those of objects differ by small multiples of their alignment: the product spreads them over the
/// upper bits, and the rotation brings these down to where a map looks for its bucket.
#[derive(Default)]
struct OfAddress(u64);

impl Hasher for OfAddress {
    fn write_usize(&mut self, address: usize) {
        // The golden ratio, as a part of 2^64.
        self.0 = (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("the keys are addresses");
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// An error, and the steps to its place, the last one first.
struct Lost<'py> {
    steps: Vec<Step<'py>>,
    error: Error,
}

impl From<Error> for Lost<'_> {
    fn from(error: Error) -> Self {
        Self { steps: Vec::new(), error }
    }
}

impl<'py> Lost<'py> {
    fn in_container(mut self, step: Step<'py>) -> Self {
        self.steps.push(step);
        self
    }

    fn into_error(self) -> Error {
        let steps: String = self.steps.iter().rev().map(Step::to_string).collect();
        self.error.at(&format!("tree{steps}"))
    }
}

/// Returns the adapter of an object that is not a tree.
///
/// # Errors
///
/// [`NotATensor`](bridge_core::ErrorKind::NotATensor): for a container, about the first object in it that is neither a
/// number nor a text, if there is one; those of the adapter.
pub(crate) fn source_of<'py>(object: &PyTensor<'py>) -> Result<AnyAdapter<'py>> {
    source(object).map_err(|error| unsupported(object, &mut HashSet::new()).map_or(error, Lost::into_error))
}

#[cold]
fn unsupported<'py>(object: &PyTensor<'py>, met: &mut HashSet<usize>) -> Option<Lost<'py>> {
    let contents = Kind::of(object).ok()??.contents(object).ok()?;
    if !met.insert(object.as_ptr().addr()) {
        return None;
    }
    contents.into_iter().filter(|(_, value)| !is_plain(value)).find_map(|(step, value)| {
        let lost = match Kind::of(&value).ok()? {
            Some(_) => unsupported(&value, met),
            None => source(&value).err().map(Lost::from),
        };
        lost.map(|lost| lost.in_container(step))
    })
}

impl<'py> Tree<'py> {
    /// Returns the tree whose root is `root`; `None` for an object that is not a container, and for a container that
    /// holds objects but no tensor.
    ///
    /// # Errors
    ///
    /// [`Argument`](bridge_core::ErrorKind::Argument) for a container that holds itself, and for more than [`DEEPEST`]
    /// levels; [`NotATensor`](bridge_core::ErrorKind::NotATensor) for an object that is not a container and holds a
    /// tensor; what Python raises.
    pub(crate) fn of(root: &PyTensor<'py>) -> Result<Option<Self>> {
        Self::read(root, false)
    }

    /// Returns the tree of the arguments of a function, which takes what holds tensors as it is.
    ///
    /// # Errors
    ///
    /// As [`of`](Self::of), but for objects that hold tensors.
    pub(crate) fn of_arguments(root: &PyTensor<'py>) -> Result<Option<Self>> {
        Self::read(root, true)
    }

    fn read(root: &PyTensor<'py>, passes_holders: bool) -> Result<Option<Self>> {
        if seen(root).is_some() || Kind::of(root)?.is_none() {
            return Ok(None);
        }
        let mut tree = Self { passes_holders, ..Self::default() };
        tree.walk(root, 0).map_err(Lost::into_error)?;
        Ok((!tree.leaves.is_empty() || !tree.others).then_some(tree))
    }

    fn walk(&mut self, object: &PyTensor<'py>, depth: usize) -> Result<Node, Lost<'py>> {
        if is_plain(object) {
            self.others = true;
            return Ok(Node::Other);
        }
        let address = object.as_ptr().addr();
        let place = match self.met.entry(address) {
            Entry::Vacant(place) => place,
            Entry::Occupied(met) if met.get().1 == Node::Open => {
                return Err(argument("this container holds itself: pass a tree without cycles").into());
            }
            Entry::Occupied(met) => return Ok(met.get().1),
        };
        let kind = if seen(object).is_some() { None } else { Kind::of(object)? };
        if let Some(kind) = kind {
            place.insert((object.clone(), Node::Open));
            let node = self.container(object, kind, depth)?;
            self.met.insert(address, (object.clone(), node));
            return Ok(node);
        }
        let node = match adapter_of(object)? {
            Some(adapter) => {
                self.leaves.push((adapter, object.clone()));
                Node::Leaf(self.leaves.len() - 1)
            }
            None => {
                if !self.passes_holders {
                    holds_none(object)?;
                }
                self.others = true;
                Node::Other
            }
        };
        place.insert((object.clone(), node));
        Ok(node)
    }

    fn container(&mut self, object: &PyTensor<'py>, kind: Kind, depth: usize) -> Result<Node, Lost<'py>> {
        if depth == DEEPEST {
            let text = format!("more than {DEEPEST} containers are nested: convert their tensors apart");
            return Err(argument(text).into());
        }
        let mut changes = Vec::new();
        let contents =
            if self.passes_holders { kind.contents(object).map_err(raised(object))? } else { all_of(object, kind)? };
        for (step, value) in contents {
            match self.walk(&value, depth + 1) {
                Ok(Node::Other) => (),
                Ok(node) => changes.push((step, node)),
                Err(lost) => return Err(lost.in_container(step)),
            }
        }
        if changes.is_empty() {
            return Ok(Node::Other);
        }
        self.containers.push(Container { object: object.clone(), kind, changes });
        Ok(Node::Container(self.containers.len() - 1))
    }

    /// Returns the tree with the objects that `convert` returns for the leaves, in new containers. Containers without a
    /// tensor pass through. An error names the steps to its leaf.
    ///
    /// # Errors
    ///
    /// Those of `convert`, and what Python raises when a container is made.
    pub(crate) fn map(
        &self,
        root: &PyTensor<'py>,
        convert: impl FnOnce(&[Leaf<'py>]) -> Result<Vec<PyTensor<'py>>, Failed>,
    ) -> Result<PyTensor<'py>> {
        let leaves = convert(&self.leaves).map_err(|failed| self.at(Node::Leaf(failed.index), failed.error))?;
        let mut made = Vec::with_capacity(self.containers.len());
        for (index, container) in self.containers.iter().enumerate() {
            let changes = container.changes.iter().filter_map(|(step, node)| match node {
                Node::Leaf(leaf) => Some((step, &leaves[*leaf])),
                Node::Container(inner) => Some((step, &made[*inner])),
                Node::Other | Node::Open => None,
            });
            let changed = container.kind.changed(&container.object, changes);
            made.push(changed.map_err(|error| self.at(Node::Container(index), raised(root)(error)))?);
        }
        Ok(made.pop().unwrap_or_else(|| root.clone()))
    }

    /// Returns the error with the steps from the root to a node.
    fn at(&self, mut node: Node, error: Error) -> Error {
        let mut lost = Lost::from(error);
        let step_to = |node: Node| {
            self.containers.iter().enumerate().find_map(|(outer, container)| {
                let (step, _) = container.changes.iter().find(|(_, held)| *held == node)?;
                Some((step.clone(), Node::Container(outer)))
            })
        };
        // A container comes after those in it, so this ends at the root.
        while let Some((step, outer)) = step_to(node) {
            lost = lost.in_container(step);
            node = outer;
        }
        lost.into_error()
    }
}
