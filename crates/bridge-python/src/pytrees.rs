//! Objects of classes that are registered with JAX as nodes of its pytrees. The registration says which values are in such
//! an object, and makes it again with others; what else it has, such as static fields, stays as it is.

use bridge_pyo3::PyTensor;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyList};

/// Returns the functions of JAX for pytrees; `None` in a program without JAX, which has registered nothing.
fn functions<'py>(py: Python<'py>) -> PyResult<Option<PyTensor<'py>>> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let module = modules.call_method1(intern!(py, "get"), (intern!(py, "jax.tree_util"),))?;
    // Another thread may be importing it.
    Ok(module.hasattr(intern!(py, "all_leaves"))?.then_some(module))
}

/// Returns whether JAX knows an object as a node of a pytree.
pub(crate) fn is_registered(object: &PyTensor<'_>) -> PyResult<bool> {
    let py = object.py();
    let Some(functions) = functions(py)? else { return Ok(false) };
    let leaves = functions.call_method1(intern!(py, "all_leaves"), (PyList::new(py, [object])?,))?;
    Ok(!leaves.is_truthy()?)
}

/// Calls a function of JAX that flattens a node, but not what is in it.
fn flatten<'py>(object: &PyTensor<'py>, function: &str) -> PyResult<(Vec<PyTensor<'py>>, PyTensor<'py>)> {
    let py = object.py();
    let is_other = py.import(intern!(py, "operator"))?.getattr(intern!(py, "is_not"))?;
    let is_leaf = py.import(intern!(py, "functools"))?.call_method1(intern!(py, "partial"), (is_other, object))?;
    let functions = py.import(intern!(py, "jax.tree_util"))?;
    let keywords = [("is_leaf", is_leaf)].into_py_dict(py)?;
    functions.call_method(function, (object,), Some(&keywords))?.extract()
}

/// Returns the values of a node, with the path to each as JAX prints it.
pub(crate) fn contents<'py>(object: &PyTensor<'py>) -> PyResult<Vec<(PyTensor<'py>, PyTensor<'py>)>> {
    let py = object.py();
    let (pairs, _) = flatten(object, "tree_flatten_with_path")?;
    let functions = py.import(intern!(py, "jax.tree_util"))?;
    let named = |pair: PyTensor<'py>| {
        let (path, value): (PyTensor<'py>, PyTensor<'py>) = pair.extract()?;
        Ok((functions.call_method1(intern!(py, "keystr"), (path,))?, value))
    };
    pairs.into_iter().map(named).collect()
}

/// Returns a node like `object` with other values at some positions.
pub(crate) fn changed<'a, 'py: 'a>(
    object: &PyTensor<'py>,
    changes: impl Iterator<Item = (usize, &'a PyTensor<'py>)>,
) -> PyResult<PyTensor<'py>> {
    let py = object.py();
    let (mut values, structure) = flatten(object, "tree_flatten")?;
    for (index, value) in changes {
        // The object may have changed since it was read.
        if let Some(old) = values.get_mut(index) {
            *old = value.clone();
        }
    }
    structure.call_method1(intern!(py, "unflatten"), (PyList::new(py, values)?,))
}
