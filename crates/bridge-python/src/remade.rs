//! Containers of classes that keep their elements in their own method: made again, and read again to see that it
//! worked.

use crate::containers::{Contents, Kind, Step, is_builtin, stored};
use crate::pytrees;
use bridge_pyo3::PyTensor;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyMappingProxy, PyString, PyTuple, PyType};

impl Kind {
    /// Returns a container like `object` with other values at some steps. Dicts, lists and dataclasses are copied by
    /// `copy.copy`, which keeps the class, the order, and attributes; no `__init__` runs. A registered node is made by
    /// its registration, and what no copy is right for is made again.
    pub(crate) fn changed<'a, 'py: 'a>(
        self,
        object: &PyTensor<'py>,
        changes: impl Iterator<Item = (&'a Step<'py>, &'a PyTensor<'py>)>,
    ) -> PyResult<PyTensor<'py>> {
        let py = object.py();
        match self {
            Self::Registered => {
                return pytrees::changed(object, changes.filter_map(|(step, value)| Some((step.child()?, value))));
            }
            Self::Tuple | Self::Struct => {
                let mut items: Vec<_> = object.cast::<PyTuple>()?.iter().collect();
                for (step, value) in changes {
                    if let Step::Index(index) = step {
                        items[*index] = value.clone();
                    }
                }
                let items = PyTuple::new(py, items)?.into_any();
                return if let Self::Struct = self { object.get_type().call1((items,)) } else { Ok(items) };
            }
            Self::Dataclass => (),
            _ if is_builtin(object)? => (),
            _ => return changed(self, object, changes),
        }
        let copy = py.import(intern!(py, "copy"))?.call_method1(intern!(py, "copy"), (object,))?;
        let frozen = matches!(self, Self::Dataclass) && is_frozen(object)?;
        for (step, value) in changes {
            match step {
                Step::Key(key) => copy.set_item(key, value)?,
                Step::Index(index) => copy.set_item(index, value)?,
                Step::Field(name) if frozen => {
                    let object = py.import(intern!(py, "builtins"))?.getattr(intern!(py, "object"))?;
                    object.call_method1(intern!(py, "__setattr__"), (&copy, name, value))?;
                }
                Step::Field(name) => copy.setattr(name.cast::<PyString>()?, value)?,
                Step::Element(..) | Step::Child(..) => (),
            }
        }
        Ok(copy)
    }
}

fn is_frozen(object: &PyTensor<'_>) -> PyResult<bool> {
    let py = object.py();
    object.get_type().getattr(intern!(py, "__dataclass_params__"))?.getattr(intern!(py, "frozen"))?.is_truthy()
}

/// Returns a container like `object` with other values at some steps: of its class, or else a dict, a list or a tuple.
fn changed<'a, 'py: 'a>(
    kind: Kind,
    object: &PyTensor<'py>,
    changes: impl Iterator<Item = (&'a Step<'py>, &'a PyTensor<'py>)>,
) -> PyResult<PyTensor<'py>> {
    let before = kind.contents(object)?;
    let mut items = before.clone();
    let by_key = PyDict::new(object.py());
    for (step, value) in changes {
        match step {
            Step::Key(key) => by_key.set_item(key, value)?,
            // The object may have changed since it was read.
            Step::Index(index) | Step::Element(index, _) if *index < items.len() => items[*index].1 = value.clone(),
            _ => (),
        }
    }
    if !by_key.is_empty() {
        for (step, value) in &mut items {
            if let Step::Key(key) = step
                && let Some(new) = by_key.get_item(&*key)?
            {
                *value = new;
            }
        }
    }
    let made = match kind {
        Kind::Named => {
            let values = PyTuple::new(object.py(), items.iter().map(|(_, value)| value))?;
            Some(object.get_type().call_method1(intern!(object.py(), "_make"), (values,))?)
        }
        _ if is_stored_in_it(object, &before)? => copied(object, &items)?,
        _ => None,
    };
    match made {
        Some(made) if made.get_type().is(object.get_type()) && is_same(&kind.contents(&made)?, &items) => Ok(made),
        _ => plain(kind, object, items),
    }
}

/// Returns whether two containers hold the same objects.
fn is_same(one: &Contents<'_>, other: &Contents<'_>) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|((_, one), (_, other))| one.is(other))
}

/// Returns whether a copy of an object has its own elements: those of a class of Python's, which `copy.copy` copies,
/// are where that class keeps them.
fn is_stored_in_it<'py>(object: &PyTensor<'py>, contents: &Contents<'py>) -> PyResult<bool> {
    static CLASSES: [PyOnceLock<Py<PyType>>; 3] = [const { PyOnceLock::new() }; 3];
    let py = object.py();
    let is = |class: usize, name| object.is_instance(CLASSES[class].import(py, "collections", name)?);
    if is(0, "deque")? {
        return Ok(true);
    }
    let stored = match is(1, "UserDict")? || is(2, "UserList")? {
        true => stored(&object.getattr(intern!(py, "data"))?),
        false => stored(object),
    };
    Ok(stored?.is_some_and(|stored| is_same(&stored, contents)))
}

/// Returns a copy of a container with these items. A dict may be its own attributes, and so is its copy.
fn copied<'py>(object: &PyTensor<'py>, items: &Contents<'py>) -> PyResult<Option<PyTensor<'py>>> {
    let (py, attributes) = (object.py(), intern!(object.py(), "__dict__"));
    if object.is_instance_of::<PyTuple>() {
        let values = PyTuple::new(py, items.iter().map(|(_, value)| value))?;
        let copy = py.get_type::<PyTuple>().call_method1(intern!(py, "__new__"), (object.get_type(), values))?;
        if let Some(found) = object.getattr_opt(attributes)? {
            copy.getattr(attributes)?.call_method1(intern!(py, "update"), (found,))?;
        }
        return Ok(Some(copy));
    }
    let copy = py.import(intern!(py, "copy"))?.call_method1(intern!(py, "copy"), (object,))?;
    if copy.is(object) {
        return Ok(None);
    }
    if object.getattr_opt(attributes)?.is_some_and(|found| found.is(object)) {
        copy.setattr(attributes, &copy)?;
    }
    for (step, value) in items {
        match step {
            Step::Key(key) => copy.set_item(key, value)?,
            Step::Index(index) => copy.set_item(index, value)?,
            _ => (),
        }
    }
    Ok(Some(copy))
}

/// Returns a container of Python's own with these items.
fn plain<'py>(kind: Kind, object: &PyTensor<'py>, items: Contents<'py>) -> PyResult<PyTensor<'py>> {
    let py = object.py();
    if let Kind::Dict | Kind::Mapping = kind {
        let dict = PyDict::new(py);
        for (step, value) in items {
            if let Step::Key(key) = step {
                dict.set_item(key, value)?;
            }
        }
        return match object.is_exact_instance_of::<PyMappingProxy>() {
            true => object.get_type().call1((dict,)),
            false => Ok(dict.into_any()),
        };
    }
    let values = items.into_iter().map(|(_, value)| value);
    // A proxy of a tuple says that it is one.
    match object.is_instance(&py.get_type::<PyTuple>())? {
        true => PyTuple::new(py, values.collect::<Vec<_>>()).map(Bound::into_any),
        false => PyList::new(py, values.collect::<Vec<_>>()).map(Bound::into_any),
    }
}
