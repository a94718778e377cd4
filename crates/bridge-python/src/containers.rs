//! Containers that may hold tensors: how each kind is read, and made again with other values.

use crate::frameworks::adapter_of;
use crate::pytrees;
use bridge_core::Result;
use bridge_pyo3::{PyTensor, brief_str, framework_error};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};
use std::fmt;

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

    fn child(&self) -> Option<usize> {
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
        let is_sequence = |kind| matches!(kind, Self::List | Self::Tuple | Self::Struct);
        let is_tuple = |kind| matches!(kind, Self::Named | Self::Tuple);
        self == other || (is_sequence(self) && is_sequence(other)) || (is_tuple(self) && is_tuple(other))
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
        let kind = if object.is_instance_of::<PyDict>() {
            Some(Self::Dict)
        } else if object.is_instance_of::<PyList>() {
            Some(Self::List)
        } else if object.is_exact_instance_of::<PyTuple>() {
            Some(Self::Tuple)
        } else if object.is_instance_of::<PyTuple>() {
            match has(intern!(py, "_make"))? {
                true => Some(Self::Named),
                false => has(intern!(py, "n_sequence_fields"))?.then_some(Self::Struct),
            }
        } else if pytrees::is_registered(object).map_err(raised)? {
            adapter_of(object)?.is_none().then_some(Self::Registered)
        } else if has(intern!(py, "__dataclass_fields__"))? && !object.is_instance_of::<PyType>() {
            adapter_of(object)?.is_none().then_some(Self::Dataclass)
        } else {
            None
        };
        Ok(kind)
    }

    /// Returns what a container of this kind holds now. Code that runs later may change it.
    pub(crate) fn contents<'py>(self, object: &PyTensor<'py>) -> PyResult<Vec<(Step<'py>, PyTensor<'py>)>> {
        let py = object.py();
        let tuple = || object.cast::<PyTuple>();
        match self {
            Self::Dict => Ok(object.cast::<PyDict>()?.iter().map(|(key, value)| (Step::Key(key), value)).collect()),
            Self::List => Ok(indexed(&object.cast::<PyList>()?.to_tuple())),
            Self::Tuple | Self::Struct => Ok(indexed(tuple()?)),
            Self::Named => {
                let names = object.getattr(intern!(py, "_fields"))?.cast_into::<PyTuple>()?;
                let elements = names.iter().enumerate().map(|(index, name)| Step::Element(index, name));
                Ok(elements.zip(tuple()?.iter()).collect())
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

    /// Returns a container like `object` with other values at some steps. Dicts, lists and dataclasses are copied by
    /// `copy.copy`, which keeps the class, the order, and attributes; no `__init__` runs. A registered node is made by
    /// its registration.
    pub(crate) fn changed<'a, 'py: 'a>(
        self,
        object: &PyTensor<'py>,
        changes: impl Iterator<Item = (&'a Step<'py>, &'a PyTensor<'py>)>,
    ) -> PyResult<PyTensor<'py>> {
        let py = object.py();
        if let Ok(tuple) = object.cast::<PyTuple>() {
            let mut items: Vec<_> = tuple.iter().collect();
            for (step, value) in changes {
                if let Step::Index(index) | Step::Element(index, _) = step {
                    items[*index] = value.clone();
                }
            }
            let items = PyTuple::new(py, items)?;
            return match self {
                Self::Named => object.get_type().call_method1(intern!(py, "_make"), (items,)),
                Self::Struct => object.get_type().call1((items,)),
                _ => Ok(items.into_any()),
            };
        }
        if let Self::Registered = self {
            return pytrees::changed(object, changes.filter_map(|(step, value)| Some((step.child()?, value))));
        }
        let copy = py.import(intern!(py, "copy"))?.call_method1(intern!(py, "copy"), (object,))?;
        let frozen = matches!(self, Self::Dataclass) && is_frozen(object)?;
        for (step, value) in changes {
            match step {
                Step::Key(key) => copy.set_item(key, value)?,
                Step::Index(index) | Step::Element(index, _) => copy.set_item(index, value)?,
                Step::Field(name) if frozen => {
                    let object = py.import(intern!(py, "builtins"))?.getattr(intern!(py, "object"))?;
                    object.call_method1(intern!(py, "__setattr__"), (&copy, name, value))?;
                }
                Step::Field(name) => copy.setattr(name.cast::<PyString>()?, value)?,
                Step::Child(..) => (),
            }
        }
        Ok(copy)
    }
}

fn indexed<'py>(items: &Bound<'py, PyTuple>) -> Vec<(Step<'py>, PyTensor<'py>)> {
    items.iter().enumerate().map(|(index, item)| (Step::Index(index), item)).collect()
}

fn is_frozen(object: &PyTensor<'_>) -> PyResult<bool> {
    let py = object.py();
    object.get_type().getattr(intern!(py, "__dataclass_params__"))?.getattr(intern!(py, "frozen"))?.is_truthy()
}
