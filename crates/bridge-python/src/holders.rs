//! Objects that are neither tensors nor containers: they pass through, but not with a tensor in them, which would stay
//! what it is without an error.

use crate::containers::{Kind, Step, attributes, is_plain, raised};
use crate::frameworks::{adapter_of, seen};
use bridge_core::{Error, ErrorKind, Result};
use bridge_pyo3::{PyTensor, is_interrupt, type_name};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyCFunction, PyDictItems, PyDictKeys, PyDictValues, PyFrozenSet, PyFunction, PyModule, PySet, PyType,
};
use std::collections::{HashSet, VecDeque};

/// The most objects that are looked at in an object. Those with more, such as a tokenizer with its vocabulary, are
/// seldom among tensors, and each conversion would look at all of them.
const MOST: usize = 1000;

/// Refuses an object in which a tensor is found.
///
/// # Errors
///
/// [`NotATensor`](ErrorKind::NotATensor) with the path to the tensor; interrupts of Python.
pub(crate) fn holds_none(object: &PyTensor<'_>) -> Result<()> {
    let Some(path) = first_tensor(object)? else { return Ok(()) };
    let what = type_name(object);
    let text = format!(
        "{what} is not a container that can be converted, and holds a tensor ({path}): pass a dict of its tensors, such as vars(x), or state_dict() of a module"
    );
    Err(Error::new(ErrorKind::NotATensor, text))
}

/// Returns the path to a tensor in an object: the nearest one, among the first [`MOST`] objects.
fn first_tensor(object: &PyTensor<'_>) -> Result<Option<String>> {
    let mut met = HashSet::from([object.as_ptr().addr()]);
    let mut queue = VecDeque::from(inside(object, "x")?);
    // Keeps the objects alive, so that an address means one object.
    let mut kept = Vec::new();
    while let Some((path, object)) = queue.pop_front() {
        if is_plain(&object) || !met.insert(object.as_ptr().addr()) {
            continue;
        }
        if is_tensor(&object)? {
            return Ok(Some(path));
        }
        if kept.len() == MOST {
            return Ok(None);
        }
        queue.extend(inside(&object, &path)?);
        kept.push(object);
    }
    Ok(None)
}

/// Returns whether an object is a tensor. An array of objects is not: its elements are not looked at.
fn is_tensor(object: &PyTensor<'_>) -> Result<bool> {
    let py = object.py();
    let found = match seen(object) {
        Some(_) => true,
        None => quiet(py, adapter_of(object))?.flatten().is_some(),
    };
    let holds_objects = || object.getattr(intern!(py, "dtype"))?.getattr(intern!(py, "hasobject"))?.is_truthy();
    Ok(found && !holds_objects().unwrap_or(false))
}

/// Returns what is in an object, with the path to each: the elements of a container, and the attributes of any other
/// object. Classes, functions and modules belong to the program, not to the tree.
fn inside<'py>(object: &PyTensor<'py>, path: &str) -> Result<Vec<(String, PyTensor<'py>)>> {
    let py = object.py();
    if object.is_instance_of::<PyType>()
        || object.is_instance_of::<PyFunction>()
        || object.is_instance_of::<PyCFunction>()
        || object.is_instance_of::<PyModule>()
    {
        return Ok(Vec::new());
    }
    let is_set = object.is_instance_of::<PySet>()
        || object.is_instance_of::<PyFrozenSet>()
        || object.is_instance_of::<PyDictKeys>()
        || object.is_instance_of::<PyDictValues>()
        || object.is_instance_of::<PyDictItems>();
    if is_set {
        let elements =
            || -> PyResult<Vec<_>> { object.try_iter()?.map(|element| Ok((format!("{path}.*"), element?))).collect() };
        return Ok(quiet(py, elements().map_err(raised(object)))?.unwrap_or_default());
    }
    let contents = match quiet(py, Kind::of(object))?.flatten() {
        Some(kind) => kind.contents(object),
        None => attributes(object),
    };
    let contents = quiet(py, contents.map_err(raised(object)))?.unwrap_or_default();
    Ok(contents.into_iter().map(|(step, value): (Step<'_>, _)| (format!("{path}{step}"), value)).collect())
}

/// Returns what a look at an object returns; `None` where that fails, because the object would pass through without it.
fn quiet<T>(py: Python<'_>, result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_interrupt(py, &error) => Err(error),
        Err(_) => Ok(None),
    }
}
