//! Objects that are neither tensors nor containers: they pass through, but not with a tensor in them, which would
//! stay unconverted without an error. The attributes of a container are such objects, too.

use crate::containers::{Contents, Kind, Step, attributes, is_builtin, is_plain, raised};
use crate::frameworks::{adapter_of, advice_for_holder, seen};
use bridge_core::{Error, ErrorKind, Result};
use bridge_pyo3::{PyTensor, is_interrupt, type_name};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyCFunction, PyDictItems, PyDictKeys, PyDictValues, PyFrozenSet, PyFunction, PyModule, PySet, PyString, PyType,
};
use std::collections::{HashSet, VecDeque};

/// The most objects that are looked at in an object. Those with more, such as a tokenizer with its vocabulary, are
/// seldom among tensors, and each conversion would look at all of them.
const MOST: usize = 1000;

/// Names of types whose objects belong to the program, and which PyO3 has no type for. An exception knows its traceback,
/// which knows the frames.
const PROGRAM: [&str; 6] = ["method", "frame", "traceback", "generator", "coroutine", "async_generator"];

/// Refuses an object in which a tensor is found.
///
/// # Errors
///
/// [`NotATensor`](ErrorKind::NotATensor) with the path to the tensor; interrupts of Python.
pub(crate) fn holds_none(object: &PyTensor<'_>) -> Result<()> {
    let met = HashSet::from([object.as_ptr().addr()]);
    let Some(path) = first_tensor(inside(object, "x")?, met, |_| true)? else { return Ok(()) };
    let what = type_name(object);
    let advice = advice_for_holder(object).unwrap_or("pass a dict of its tensors, such as vars(x)");
    let text = format!("{what} is not a container, and holds a tensor ({path}): {advice}");
    Err(Error::new(ErrorKind::NotATensor, text))
}

/// Returns what a container holds, and refuses one in whose attributes there is a tensor that is not one of its elements.
/// Of the attributes only containers of Python's own classes are looked into: others may be its parents.
///
/// # Errors
///
/// [`NotATensor`](ErrorKind::NotATensor) with the path to the tensor; what Python raises.
pub(crate) fn all_of<'py>(object: &PyTensor<'py>, kind: Kind) -> Result<Contents<'py>> {
    let py = object.py();
    let elements = kind.contents(object).map_err(raised(object))?;
    let may_have_more = matches!(kind, Kind::Dict | Kind::List | Kind::Mapping | Kind::Sequence);
    if !may_have_more || is_builtin(object).map_err(raised(object))? {
        return Ok(elements);
    }
    let found = quiet(py, attributes(object).map_err(raised(object)))?.unwrap_or_default();
    let found = found.into_iter().map(|(step, value)| (format!("x{step}"), value)).collect();
    let met = elements.iter().map(|(_, element)| element.as_ptr().addr()).collect();
    let tensor = first_tensor(found, met, |object| is_builtin(object).unwrap_or(false))?;
    let Some(path) = tensor else { return Ok(elements) };
    let what = type_name(object);
    let text = format!("{what} holds a tensor ({path}) that is not one of its elements: pass a dict of both");
    Err(Error::new(ErrorKind::NotATensor, text))
}

/// Returns the path to the nearest tensor among objects and in those that are looked into, the first [`MOST`] of them.
fn first_tensor<'py>(
    objects: Vec<(String, PyTensor<'py>)>,
    mut met: HashSet<usize>,
    is_looked_into: impl Fn(&PyTensor<'py>) -> bool,
) -> Result<Option<String>> {
    let mut queue = VecDeque::from(objects);
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
        if is_looked_into(&object) {
            queue.extend(inside(&object, &path)?);
        }
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

/// Returns what is in an object, with the path to each: the elements of a container, and of any other object the
/// attributes, and what else Python's collector sees in it, such as the arguments of a `partial`. Classes, functions
/// and modules belong to the program, not to the tree.
fn inside<'py>(object: &PyTensor<'py>, path: &str) -> Result<Vec<(String, PyTensor<'py>)>> {
    let py = object.py();
    let is_of_the_program = |name: Bound<'_, PyString>| PROGRAM.iter().any(|known| name == *known);
    if object.get_type().name().is_ok_and(is_of_the_program)
        || object.is_instance_of::<PyType>()
        || object.is_instance_of::<PyFunction>()
        || object.is_instance_of::<PyCFunction>()
        || object.is_instance_of::<PyModule>()
    {
        return Ok(Vec::new());
    }
    let any = |element: PyResult<PyTensor<'py>>| Ok((format!("{path}.*"), element?));
    let is_set = object.is_instance_of::<PySet>()
        || object.is_instance_of::<PyFrozenSet>()
        || object.is_instance_of::<PyDictKeys>()
        || object.is_instance_of::<PyDictValues>()
        || object.is_instance_of::<PyDictItems>();
    if is_set {
        let elements = || -> PyResult<Vec<_>> { object.try_iter()?.map(any).collect() };
        return Ok(quiet(py, elements().map_err(raised(object)))?.unwrap_or_default());
    }
    let kind = quiet(py, Kind::of(object))?.flatten();
    let contents = kind.map_or_else(|| attributes(object), |kind| kind.contents(object));
    let contents = quiet(py, contents.map_err(raised(object)))?.unwrap_or_default();
    let step = |(step, value): (Step<'_>, _)| (format!("{path}{step}"), value);
    let mut found: Vec<_> = contents.into_iter().map(step).collect();
    if kind.is_none() {
        let seen = || -> PyResult<Vec<_>> {
            py.import(intern!(py, "gc"))?
                .call_method1(intern!(py, "get_referents"), (object,))?
                .try_iter()?
                .map(any)
                .collect()
        };
        found.extend(quiet(py, seen().map_err(raised(object)))?.unwrap_or_default());
    }
    Ok(found)
}

/// Returns what a look at an object returns; `None` where that fails, because the object would pass through without it.
fn quiet<T>(py: Python<'_>, result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_interrupt(py, &error) => Err(error),
        Err(_) => Ok(None),
    }
}
