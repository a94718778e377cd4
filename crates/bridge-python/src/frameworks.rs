//! Which framework an object belongs to, and `truebridge.profile`.

use crate::errors::{argument, into_python, text};
use bridge_core::Result;
use bridge_frameworks::Source;
pub(crate) use bridge_frameworks::{
    AnyAdapter, Framework, adapter_of, advice_for_holder, advice_for_target, seen, source_of as source,
};
use bridge_pyo3::{PyTensor, brief, framework_error, type_name};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCapsule, PyDict, PyString, PyType};

/// Returns the framework that users call `target`: its name, or its module.
pub(crate) fn named(target: &Bound<'_, PyAny>) -> Result<Framework> {
    let name = match target.cast::<PyModule>() {
        Ok(module) => of_module(module)?,
        Err(_) if target.is_instance_of::<PyString>() => text(target, "the target")?,
        Err(_) => {
            let (kind, names) = (type_name(target), names());
            let kind = if target.is_instance_of::<PyType>() { "class" } else { &*kind };
            let text = format!("the target is a {kind}, not the name of a framework");
            return Err(argument(format!("{text}: pass the tensor first, and then one of {names}")));
        }
    };
    Framework::named(&name).ok_or_else(|| {
        let instead = INSTEAD.iter().find(|(other, _)| name.starts_with(other)).map_or("", |(_, text)| text);
        argument(format!("{:?} is not a target: {instead}choose one of {}", brief(&name), names()))
    })
}

/// What people take for a target, by how it begins, and what they can do.
const INSTEAD: [(&str, &str); 5] = [
    ("onnx", "call to_onnxruntime(x), or "),
    ("cpu", "a device is named by device=; "),
    ("cuda", "a device is named by device=; "),
    ("float", "a conversion keeps the dtype; "),
    ("int", "a conversion keeps the dtype; "),
];

fn names() -> String {
    let names: Vec<_> = Framework::ALL.iter().map(|known| known.name()).collect();
    names.join(", ")
}

/// Returns the package of a module: `jax` for `jax.numpy`.
fn of_module(module: &Bound<'_, PyModule>) -> Result<String> {
    let name = module.name().map_err(|error| framework_error(module.py(), "Python", error))?;
    Ok(name.to_string_lossy().split('.').next().unwrap_or_default().into())
}

/// Returns the frameworks, in an order in which all can be imported: by its name, the variable that names the folder of
/// one, or `None` for one that Python imports.
pub(crate) fn every(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let variable = |known: &Framework| match known.source() {
        Source::Distributions(_) => None,
        Source::Folder(variable) => Some(variable),
    };
    Framework::ALL.iter().map(|known| (known.name(), variable(known))).into_py_dict(py)
}

/// Returns the names of the frameworks by the other names that people use.
pub(crate) fn aliases(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let names = |known: &'static Framework| known.aliases().iter().map(|alias| (*alias, known.name()));
    Framework::ALL.iter().flat_map(names).into_py_dict(py)
}

/// Refuses a capsule, which can be read once only.
pub(crate) fn not_a_capsule(x: &PyTensor<'_>) -> Result<()> {
    match x.is_instance_of::<PyCapsule>() {
        true => Err(argument("reading a DLPack capsule consumes it, and this call may not: pass the original tensor")),
        false => Ok(()),
    }
}

/// Return what a framework accepts and exports in this process.
///
/// Parameters
/// ----------
/// target : Target
///     The name of a framework.
///
/// Returns
/// -------
/// dict
///     ``name``; ``dtypes``; ``disabled``, where a mode excludes dtypes, with how to enable them; ``strides``, in words;
///     ``alignment`` of addresses, in bytes; ``devices``;
///     ``rank``, where not every number of dimensions can be, with ``start`` and ``end``;
///     ``keeps_read_only``, whether read-only memory stays so; ``waits_on_export``, whether the host waits for the
///     device when a tensor is exported; ``private_functions``, whether functions without a stable interface are used.
///
/// Raises
/// ------
/// BridgeValueError
///     If there is no target of this name.
/// BridgeImportError
///     If the framework is not installed.
///
/// Examples
/// --------
/// >>> import truebridge as tb
/// >>> profile = tb.profile("torch")
/// >>> profile["strides"], profile["alignment"]
/// ('non_negative', 1)
#[pyfunction]
pub(crate) fn profile<'py>(py: Python<'py>, target: &PyTensor<'py>) -> PyResult<Bound<'py, PyAny>> {
    let adapter = named(target).and_then(|framework| framework.open(py));
    let adapter = adapter.map_err(|error| into_python(py, error))?;
    let text = serde_json::to_string(adapter.profile()).expect("a profile is plain data");
    py.import("json")?.call_method1("loads", (text,))
}
