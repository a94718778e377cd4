//! Why PyTorch does not export a tensor.

use bridge_core::{Error, ErrorKind, MAX_NDIM};
use bridge_pyo3::{PyTensor, brief_str, call};
use pyo3::exceptions::PyNotImplementedError;
use pyo3::intern;
use pyo3::prelude::*;

/// What is wrong under a mode that replaces every new tensor.
pub(crate) const NO_REAL_TENSORS: &str =
    "torch cannot allocate real tensors in its current mode: leave the mode first, such as FakeTensorMode";

const WITHOUT_MEMORY: &str = "this tensor has no memory (a ZeroTensor, or one that functionalisation or \
    another transform of torch.func wraps, such as vmap, grad and jvp): pass a .clone() of a ZeroTensor, or convert \
    outside of the transform";

/// Subclasses of PyTorch that have no memory, and the call that returns a tensor with the same values.
const SUBCLASSES: &[(&str, &str)] = &[
    ("DTensor", "call .full_tensor(), which gathers all of it, or .to_local() for the part of this process"),
    ("AsyncCollectiveTensor", "call .wait(), which returns the result"),
    ("NestedTensor", "call .values(), or .to_padded_tensor(0.0) for one shape"),
    ("MaskedTensor", "call .get_data(), or .to_tensor(0.0), which fills in what is masked"),
    ("SparseSemiStructuredTensor", "call .to_dense() first"),
    ("FakeTensor", "it has no values: pass a plain tensor, outside of FakeTensorMode"),
    ("FunctionalTensor", "call .from_functional()"),
];

/// Makes the error for a tensor of a subclass that decides itself where its data is.
#[cold]
pub(crate) fn of_subclass(tensor: &PyTensor<'_>) -> Error {
    let name_of = |class: &PyTensor<'_>| -> Option<String> {
        let text = |name| class.getattr(name).and_then(|text| text.extract::<String>()).ok();
        text("__name__").filter(|_| text("__module__").is_some_and(|module| module.starts_with("torch.")))
    };
    let known = tensor.get_type().mro().iter().find_map(|class| {
        let name = name_of(&class)?;
        SUBCLASSES.iter().find(|(known, _)| *known == name)
    });
    let text = match known {
        Some((name, advice)) => format!("{name} has no memory: {advice}"),
        None => "this tensor subclass has no data pointer: pass the plain tensor that it wraps".into(),
    };
    Error::new(ErrorKind::NotATensor, text)
}

/// Returns why a tensor has no address, or is none that core reads.
#[cold]
pub(crate) fn without_memory(tensor: &PyTensor<'_>) -> Error {
    let py = tensor.py();
    let ndim = || -> PyResult<usize> { call(tensor, intern!(py, "dim"), &[])?.extract() };
    if let Ok(ndim) = ndim()
        && ndim > MAX_NDIM
    {
        let text = format!("a tensor of {ndim} dimensions has more than {MAX_NDIM}: call .reshape() first");
        return Error::new(ErrorKind::Layout, text);
    }
    let nbytes = || -> PyResult<u128> {
        let count = |name| call(tensor, name, &[])?.extract::<u64>();
        Ok(u128::from(count(intern!(py, "numel"))?) * u128::from(count(intern!(py, "element_size"))?))
    };
    if let Ok(nbytes) = nbytes()
        && nbytes > i64::MAX as u128
    {
        return Error::new(
            ErrorKind::Layout,
            format!("a tensor of {nbytes} bytes has more than 2^63: pass a part of it"),
        );
    }
    let length = || -> PyResult<usize> {
        call(&call(tensor, intern!(py, "untyped_storage"), &[])?, intern!(py, "nbytes"), &[])?.extract()
    };
    let text = match length() {
        Ok(0) => "the storage of this tensor was freed or resized to 0 bytes: pass a tensor that has its memory",
        _ => WITHOUT_MEMORY,
    };
    Error::new(ErrorKind::NotATensor, text)
}

/// Returns the address of the tensor's storage, or PyTorch's exception.
fn address(tensor: &PyTensor<'_>) -> PyResult<usize> {
    let py = tensor.py();
    call(&call(tensor, intern!(py, "untyped_storage"), &[])?, intern!(py, "data_ptr"), &[])?.extract()
}

/// Makes the error for a tensor that PyTorch does not export, with advice.
#[cold]
pub(crate) fn refusal(tensor: &PyTensor<'_>, error: PyErr) -> Error {
    let text_of = |name: &str| tensor.getattr(name).map_or_else(|_| "?".into(), |value| brief_str(&value));
    let (layout, dtype, device) = (text_of("layout"), text_of("dtype"), text_of("device"));
    let (kind, text) = if layout != "torch.strided" {
        (ErrorKind::NotATensor, format!("a tensor of layout {layout} has no single memory: call .to_dense() first"))
    } else if device.starts_with("meta") {
        (
            ErrorKind::NotATensor,
            "a meta tensor has no memory: load its module on a device first, or call module.to_empty(device=\"cpu\")"
                .into(),
        )
    } else if text_of("is_quantized") == "True" {
        (
            ErrorKind::Dtype,
            format!("quantised dtype {dtype} has no counterpart: call .dequantize() or .int_repr() first"),
        )
    } else if ["torch.bits", "torch.q"].iter().any(|start| dtype.starts_with(start)) {
        let text = format!(
            "{dtype} has no counterpart in other frameworks: pass .view(torch.uint8), which takes the bytes across"
        );
        (ErrorKind::Dtype, text)
    } else if text_of("is_nested") == "True" {
        (ErrorKind::NotATensor, "a nested tensor has no single shape: call .to_padded_tensor() first".into())
    } else if let Err(refused) = address(tensor) {
        match refused.is_instance_of::<PyNotImplementedError>(tensor.py()) {
            true => (ErrorKind::NotATensor, WITHOUT_MEMORY.into()),
            // Such as that of an output of a CUDA graph that a later run has overwritten. Its advice comes last.
            false => {
                let text =
                    format!("torch gives no access to the memory of this tensor: {}", refused.value(tensor.py()));
                (ErrorKind::Framework, text)
            }
        }
    } else {
        let reason = brief_str(error.value(tensor.py()));
        (ErrorKind::Framework, format!("torch does not export a tensor of dtype {dtype} on {device}: {reason}"))
    };
    Error::new(kind, text).caused_by(error)
}
