//! Containers that may hold tensors: how each kind is read, and made again with other values.

use crate::frameworks::adapter_of;
use crate::pytrees;
use bridge_core::{Error, Result};
use bridge_pyo3::{PyTensor, brief_str, framework_error, probe};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyList, PyMemoryView, PyRange, PyString, PyTuple, PyType,
};
use std::fmt;

/// The flags by which a `match` statement knows a class as a sequence or a mapping (PEP 634).
const SEQUENCE: u64 = 1 << 5;
const MAPPING: u64 = 1 << 6;
/// The flag of classes that are made as the program runs. No other has slots of Python.
const HEAP: u64 = 1 << 9;

/// What a container holds, with the step to each.
pub(crate) type Contents<'py> = Vec<(Step<'py>, PyTensor<'py>)>;

/// A kind of container.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// A `dict`, or of a subclass.
    Dict,
    /// A `list`, or of a subclass.
    List,
    /// A `tuple` itself.
    Tuple,
    /// A named tuple.
    Named,
    /// A struct sequence, such as `torch.return_types.max`: its class takes one sequence.
    Struct,
    /// A node of a pytree, by the registration of its class. It may be a dataclass.
    Registered,
    /// An instance of a dataclass.
    Dataclass,
    /// Any other `Mapping`, such as a `UserDict`, and PyTorch's `ParameterDict`.
    Mapping,
    /// Any other `Sequence`, such as a `deque`, and PyTorch's `ParameterList`.
    Sequence,
}

/// The step from a container to a value in it.
#[derive(Clone)]
pub(crate) enum Step<'py> {
    Key(PyTensor<'py>),
    Index(usize),
    /// The element of a named tuple.
    Element(usize, PyTensor<'py>),
    Field(PyTensor<'py>),
    /// The value of a registered node, and how its path is printed.
    Child(usize, PyTensor<'py>),
}

impl fmt::Display for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => write!(f, "[{}]", key.repr().map_or_else(|_| "?".into(), |key| brief_str(&key))),
            Self::Index(index) => write!(f, "[{index}]"),
            Self::Element(_, name) | Self::Field(name) => write!(f, ".{}", brief_str(name)),
            Self::Child(_, path) => f.write_str(&brief_str(path)),
        }
    }
}

impl Step<'_> {
    /// Returns whether this step and one of another container lead to values that belong together.
    pub(crate) fn is(&self, other: &Self) -> PyResult<bool> {
        match (self, other) {
            (Self::Index(_), Self::Index(_)) => Ok(true),
            (Self::Element(one, _), Self::Index(two)) | (Self::Index(one), Self::Element(two, _)) => Ok(one == two),
            (Self::Key(one), Self::Key(two))
            | (Self::Field(one), Self::Field(two))
            | (Self::Element(_, one), Self::Element(_, two))
            | (Self::Child(_, one), Self::Child(_, two)) => Ok(one.is(two) || one.eq(two)?),
            _ => Ok(false),
        }
    }

    pub(crate) fn child(&self) -> Option<usize> {
        match self {
            Self::Child(index, _) => Some(*index),
            _ => None,
        }
    }
}

impl Kind {
    /// Returns whether the values of two containers can belong together: those of a list and of a tuple do, and so those
    /// of a named tuple and of a tuple, as which it arrives in another process.
    pub(crate) fn matches(self, other: Self) -> bool {
        let is_sequence = |kind| matches!(kind, Self::List | Self::Tuple | Self::Struct | Self::Sequence);
        let is_tuple = |kind| matches!(kind, Self::Named | Self::Tuple);
        let is_mapping = |kind| matches!(kind, Self::Dict | Self::Mapping);
        let both = |is: fn(Self) -> bool| is(self) && is(other);
        self == other || both(is_sequence) || both(is_tuple) || both(is_mapping)
    }

    /// Returns the kind of a container; `None` for any other object. A dataclass or a registered node that is a tensor is
    /// not a container.
    ///
    /// # Errors
    ///
    /// What Python raises.
    pub(crate) fn of(object: &PyTensor<'_>) -> Result<Option<Self>> {
        let py = object.py();
        let class = object.get_type();
        let has = |name| class.getattr_opt(name).map(|found| found.is_some());
        let raised = |error| framework_error(py, "Python", error);
        let has = |name| has(name).map_err(raised);
        if object.is_instance_of::<PyDict>() {
            return Ok(Some(Self::Dict));
        } else if object.is_instance_of::<PyList>() {
            return Ok(Some(Self::List));
        } else if object.is_exact_instance_of::<PyTuple>() {
            return Ok(Some(Self::Tuple));
        } else if object.is_instance_of::<PyTuple>() {
            if has(intern!(py, "_make"))? {
                return Ok(Some(Self::Named));
            } else if has(intern!(py, "n_sequence_fields"))? {
                return Ok(Some(Self::Struct));
            }
        }
        let kind = if pytrees::is_registered(object).map_err(raised)? {
            Some(Self::Registered)
        } else if has(intern!(py, "__dataclass_fields__"))? && !object.is_instance_of::<PyType>() {
            Some(Self::Dataclass)
        } else {
            by_protocol(object).map_err(raised)?
        };
        match kind {
            Some(kind) => Ok(adapter_of(object)?.is_none().then_some(kind)),
            None => Ok(None),
        }
    }

    /// Returns what a container of this kind holds now. Code that runs later may change it.
    pub(crate) fn contents<'py>(self, object: &PyTensor<'py>) -> PyResult<Contents<'py>> {
        let py = object.py();
        match self {
            Self::Dict | Self::List | Self::Tuple if is_builtin(object)? => Ok(stored(object)?.unwrap_or_default()),
            Self::Dict | Self::Mapping => {
                let pair = |pair: PyResult<PyTensor<'py>>| {
                    let (key, value) = pair?.extract()?;
                    Ok((Step::Key(key), value))
                };
                object.call_method0(intern!(py, "items"))?.try_iter()?.map(pair).collect()
            }
            Self::List | Self::Tuple | Self::Struct | Self::Sequence => {
                let element = |(index, element): (_, PyResult<_>)| Ok((Step::Index(index), element?));
                object.try_iter()?.enumerate().map(element).collect()
            }
            Self::Named => {
                let names = object.getattr(intern!(py, "_fields"))?.cast_into::<PyTuple>()?;
                let elements = names.iter().enumerate().map(|(index, name)| Step::Element(index, name));
                elements.zip(object.try_iter()?).map(|(step, value)| Ok((step, value?))).collect()
            }
            Self::Registered => {
                let values = pytrees::contents(object)?.into_iter().enumerate();
                Ok(values.map(|(index, (path, value))| (Step::Child(index, path), value)).collect())
            }
            Self::Dataclass => {
                let mut contents = Vec::new();
                let fields = py.import(intern!(py, "dataclasses"))?.call_method1(intern!(py, "fields"), (object,))?;
                for field in fields.try_iter()? {
                    let name = field?.getattr(intern!(py, "name"))?;
                    // A field may have no value yet.
                    if let Some(value) = object.getattr_opt(name.cast::<PyString>()?)? {
                        contents.push((Step::Field(name), value));
                    }
                }
                Ok(contents)
            }
        }
    }
}

/// Returns the elements that are where Python keeps those of a dict, a list or a tuple, whatever its class says; `None`
/// for any other object.
pub(crate) fn stored<'py>(object: &PyTensor<'py>) -> PyResult<Option<Contents<'py>>> {
    let indexed = |items: &Bound<'py, PyTuple>| {
        items.iter().enumerate().map(|(index, item)| (Step::Index(index), item)).collect()
    };
    Ok(if let Ok(dict) = object.cast::<PyDict>() {
        Some(dict.iter().map(|(key, value)| (Step::Key(key), value)).collect())
    } else if let Ok(list) = object.cast::<PyList>() {
        Some(indexed(&list.to_tuple()))
    } else {
        object.cast::<PyTuple>().ok().map(indexed)
    })
}

/// Returns the flags of a class.
fn flags(class: &PyTensor<'_>) -> PyResult<u64> {
    class.getattr(intern!(class.py(), "__flags__"))?.extract()
}

/// Returns the kind of an object that says it is a mapping or a sequence, or that is one of PyTorch's containers. Texts
/// and numbers in a row are none.
fn by_protocol(object: &PyTensor<'_>) -> PyResult<Option<Kind>> {
    static TEXT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let (py, class) = (object.py(), object.get_type());
    // All of them have a length, and scalars of NumPy and most objects have none.
    if class.getattr_opt(intern!(py, "__len__"))?.is_none() {
        return Ok(None);
    }
    // A proxy, such as those of wrapt, names the class of what it stands for.
    let named = probe(py, object.getattr(intern!(py, "__class__")))?;
    let named = named.filter(|named| !named.is(&class) && named.is_instance_of::<PyType>());
    let flags = flags(&class)? | named.map_or(Ok(0), |named| flags(&named))?;
    let is_row = || -> PyResult<bool> {
        Ok(object.is_instance_of::<PyRange>()
            || object.is_instance_of::<PyMemoryView>()
            || class.fully_qualified_name()? == "array.array"
            || class.is_subclass(TEXT.import(py, "collections", "UserString")?)?)
    };
    let is_type = object.is_instance_of::<PyType>();
    if flags & MAPPING != 0 && !is_type {
        return Ok(Some(Kind::Mapping));
    }
    if flags & SEQUENCE != 0 && !is_type {
        return Ok((!is_row()?).then_some(Kind::Sequence));
    }
    // Only a module has these.
    if class.getattr_opt(intern!(py, "named_parameters"))?.is_none() {
        return Ok(None);
    }
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let torch = modules.call_method1(intern!(py, "get"), (intern!(py, "torch.nn"),))?;
    let is = |name| torch.getattr_opt(name)?.map_or(Ok(false), |known| class.is_subclass(&known));
    Ok(if is(intern!(py, "ParameterDict"))? {
        Some(Kind::Mapping)
    } else {
        is(intern!(py, "ParameterList"))?.then_some(Kind::Sequence)
    })
}

/// Returns the attributes that an object keeps, without the properties that compute theirs.
pub(crate) fn attributes<'py>(object: &PyTensor<'py>) -> PyResult<Contents<'py>> {
    let py = object.py();
    let mut found = Vec::new();
    if let Some(Ok(kept)) = object.getattr_opt(intern!(py, "__dict__"))?.map(Bound::cast_into::<PyDict>) {
        found.extend(kept.iter().map(|(name, value)| (Step::Field(name), value)));
    }
    let class = object.get_type();
    if flags(&class)? & HEAP == 0 {
        return Ok(found);
    }
    let slots = py.import(intern!(py, "copyreg"))?.call_method1(intern!(py, "_slotnames"), (class,))?;
    for name in slots.try_iter()? {
        let name = name?.cast_into::<PyString>()?;
        if let Some(value) = object.getattr_opt(&name)? {
            found.push((Step::Field(name.into_any()), value));
        }
    }
    Ok(found)
}

/// Returns whether the type of an object is one of the many that are never tensors.
pub(crate) fn is_plain(object: &PyTensor<'_>) -> bool {
    object.is_none()
        || object.is_exact_instance_of::<PyFloat>()
        || object.is_exact_instance_of::<PyInt>()
        || object.is_exact_instance_of::<PyString>()
        || object.is_exact_instance_of::<PyBool>()
        || object.is_exact_instance_of::<PyBytes>()
        || object.is_exact_instance_of::<PyComplex>()
}

/// Returns what makes an error of what Python raises over an object.
pub(crate) fn raised(object: &PyTensor<'_>) -> impl Fn(PyErr) -> Error {
    let py = object.py();
    move |error| framework_error(py, "Python", error)
}

/// Returns whether an object is of a class of Python's, whose elements [`stored`] reads.
pub(crate) fn is_builtin(object: &PyTensor<'_>) -> PyResult<bool> {
    static CLASSES: [PyOnceLock<Py<PyType>>; 2] = [const { PyOnceLock::new() }; 2];
    if object.is_exact_instance_of::<PyDict>()
        || object.is_exact_instance_of::<PyList>()
        || object.is_exact_instance_of::<PyTuple>()
    {
        return Ok(true);
    }
    let (py, class) = (object.py(), object.get_type());
    let is = |known: usize, name| Ok::<_, PyErr>(class.is(CLASSES[known].import(py, "collections", name)?));
    Ok(is(0, "OrderedDict")? || is(1, "defaultdict")?)
}
