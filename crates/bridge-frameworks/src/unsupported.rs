//! Objects that are not tensors: what to pass instead.

use crate::Framework;
use bridge_core::{Error, ErrorKind};
use bridge_pyo3::{PyTensor, type_name};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// What users pass most often: the package of the class or of one that it extends, its name, and the advice.
const KNOWN: &[(&str, &str, &str)] = &[
    ("builtins", "list", "pass numpy.asarray(x), or a list of tensors"),
    ("builtins", "tuple", "pass numpy.asarray(x), or a tuple of tensors"),
    ("builtins", "dict", "pass a dict of tensors, made of its values with numpy.asarray"),
    ("builtins", "mappingproxy", "pass dict(x), a dict of tensors"),
    ("collections", "Mapping", "pass dict(x), a dict of tensors"),
    ("collections", "Sequence", "pass list(x), a list of tensors"),
    ("collections", "deque", "pass list(x), a list of tensors"),
    ("builtins", "bool", "pass numpy.asarray(x)"),
    ("builtins", "int", "pass numpy.asarray(x)"),
    ("builtins", "float", "pass numpy.asarray(x)"),
    ("builtins", "complex", "pass numpy.asarray(x)"),
    ("builtins", "range", "pass numpy.asarray(x)"),
    ("builtins", "bytes", "pass numpy.frombuffer(x, dtype)"),
    ("builtins", "bytearray", "pass numpy.frombuffer(x, dtype)"),
    ("builtins", "memoryview", "pass numpy.asarray(x)"),
    ("array", "array", "pass numpy.asarray(x)"),
    ("_ctypes", "Array", "pass numpy.ctypeslib.as_array(x)"),
    ("_ctypes", "_Pointer", "pass numpy.ctypeslib.as_array(x, shape)"),
    ("decimal", "Decimal", "pass numpy.asarray(float(x))"),
    ("fractions", "Fraction", "pass numpy.asarray(float(x))"),
    ("mmap", "mmap", "pass numpy.frombuffer(x, dtype)"),
    ("builtins", "str", "pass a tensor; truebridge.load(path, target) reads one from a file"),
    ("pathlib", "PurePath", "truebridge.load(path, target) reads a tensor from a file"),
    ("_io", "BytesIO", "pass numpy.frombuffer(x.getbuffer(), dtype)"),
    ("_io", "_IOBase", "truebridge.load(path, target) reads a tensor from a file"),
    ("builtins", "set", "pass numpy.asarray(list(x))"),
    ("builtins", "frozenset", "pass numpy.asarray(list(x))"),
    ("builtins", "map", "pass list(x), a list of tensors"),
    ("builtins", "filter", "pass list(x), a list of tensors"),
    ("builtins", "zip", "pass list(x), a list of tuples of tensors"),
    ("builtins", "dict_values", "pass list(x), a list of tensors"),
    ("builtins", "dict_items", "pass dict(x), a dict of tensors"),
    ("builtins", "NoneType", "pass a tensor (a function without a result returns None)"),
    ("builtins", "module", "pass one of its tensors"),
    ("builtins", "function", "pass the tensor that it returns"),
    ("builtins", "generator", "pass the tensors that it yields, one by one or as a list"),
    ("pandas", "DataFrame", "pass x.to_numpy()"),
    ("pandas", "Series", "pass x.to_numpy()"),
    ("pandas", "Index", "pass x.to_numpy()"),
    ("pandas", "ExtensionArray", "pass x.to_numpy(dtype=...), with na_value=... where values are missing"),
    ("polars", "DataFrame", "pass x.to_numpy()"),
    ("polars", "Series", "pass x.to_numpy()"),
    ("polars", "LazyFrame", "pass x.collect().to_numpy()"),
    ("pyarrow", "Table", "pass x[name].to_numpy() of a column"),
    ("pyarrow", "RecordBatch", "pass x[name].to_numpy() of a column"),
    ("pyarrow", "Scalar", "pass numpy.asarray(x.as_py())"),
    ("pyarrow", "Buffer", "pass numpy.frombuffer(x, dtype)"),
    ("pyarrow", "ChunkedArray", "pass x.to_numpy()"),
    ("xarray", "DataArray", "pass x.to_numpy()"),
    ("xarray", "Dataset", "pass x[name].to_numpy() of a variable"),
    ("h5py", "Dataset", "pass dataset[...], which reads it"),
    ("h5py", "Group", "pass file[name][...], which reads a dataset"),
    ("zarr", "Array", "pass array[...], which reads it"),
    ("scipy", "spmatrix", "pass x.toarray()"),
    ("scipy", "sparray", "pass x.toarray()"),
    ("torch", "ParameterDict", "pass dict(x), a dict of tensors"),
    ("torch", "ParameterList", "pass list(x), a list of tensors"),
    ("torch", "Module", "pass module.state_dict(), a dict of tensors"),
    ("torch", "Optimizer", "pass optimizer.state_dict(), a dict of tensors"),
    ("torch", "DataLoader", "pass the batches that it yields"),
    ("torch", "TensorDataset", "pass x.tensors"),
    ("torch", "Dataset", "pass its items"),
    ("torch", "PackedSequence", "pass x.data"),
    ("torch", "UntypedStorage", "pass a tensor over it, torch.empty(0, dtype=...).set_(storage)"),
    ("torch", "TypedStorage", "pass a tensor over it, torch.empty(0, dtype=...).set_(storage)"),
    (
        "keras",
        "KerasTensor",
        "it has no value while a model is built: convert what the model returns when it is called",
    ),
    ("keras", "Variable", "pass variable.value"),
    ("keras", "Layer", "pass model.get_weights()"),
    ("jax", "ShapeDtypeStruct", "it has no values: pass an array, such as jax.numpy.zeros(x.shape, x.dtype)"),
    ("jax", "Ref", "pass ref[...], which reads it"),
    ("tensorflow", "DatasetV2", "pass the tensors that it yields"),
    ("tensorflow", "_DictWrapper", "pass dict(x), a dict of tensors"),
    ("tensorflow", "ListWrapper", "pass list(x), a list of tensors"),
    ("tensorflow", "Module", "pass module.variables"),
];

/// Objects that are not written to in place, and what to call instead where one is the target of a copy.
const TARGETS: &[(&str, &str, &str)] = &[
    ("tensorflow", "Variable", "call variable.assign(truebridge.to_tensorflow(source))"),
    ("keras", "Variable", "call variable.assign(truebridge.to_tensorflow(source))"),
    ("keras", "Layer", "call layer.set_weights(truebridge.to_numpy(weights))"),
    ("torch", "Module", "pass module.state_dict() as out, and a dict of the same keys as the source"),
];

/// Returns the error for an object of no framework, with what to pass instead.
#[cold]
pub(crate) fn no_tensor(object: &PyTensor<'_>) -> Error {
    let what = type_name(object);
    let text = match advice(object) {
        _ if object.is_instance_of::<PyType>() => "a class is not a tensor: pass an instance of it".into(),
        Some(advice) => format!("{what} is not a tensor: {advice}"),
        None => {
            let names: Vec<_> = Framework::ALL.iter().map(|framework| framework.name()).collect();
            let names = names.join(", ");
            format!(
                "{what} is not a tensor: pass a tensor of {names}, or an object with __dlpack__ or an array interface"
            )
        }
    };
    Error::new(ErrorKind::NotATensor, text)
}

/// Returns what to pass instead of an object of a well-known class.
fn advice(object: &PyTensor<'_>) -> Option<&'static str> {
    of_class(object, KNOWN)
}

/// Returns what to pass instead of an object that holds tensors. What is said of Python's own classes is for numbers.
pub fn advice_for_holder(object: &PyTensor<'_>) -> Option<&'static str> {
    let of_python = ["builtins", "collections"];
    let package = package_of(&object.get_type())?;
    if of_python.contains(&&*package) { None } else { advice(object) }
}

/// Returns what to call instead of a copy into an object of a well-known class.
pub fn advice_for_target(object: &PyTensor<'_>) -> Option<&'static str> {
    of_class(object, TARGETS)
}

fn of_class(object: &PyTensor<'_>, table: &[(&str, &str, &'static str)]) -> Option<&'static str> {
    object.get_type().mro().iter().find_map(|class| {
        let (package, name) = (package_of(&class)?, text(&class, "__name__")?);
        table.iter().find(|known| (known.0, known.1) == (&*package, &*name)).map(|known| known.2)
    })
}

/// Returns the package that a class comes from.
fn package_of(class: &PyTensor<'_>) -> Option<String> {
    text(class, "__module__")?.split('.').next().map(String::from)
}

/// Returns whether the object's class, or one that it extends, comes from a package.
pub(crate) fn is_of(object: &PyTensor<'_>, package: &str) -> bool {
    object.get_type().mro().iter().any(|class| package_of(&class).is_some_and(|of| of == package))
}

fn text(class: &PyTensor<'_>, name: &str) -> Option<String> {
    class.getattr(name).and_then(|text| text.extract()).ok()
}
