//! The keywords of conversions.

use crate::device;
use crate::errors::{argument, into_python, text};
use bridge_core::{Cast, DType, Error, ErrorKind, MAX_NDIM, Options, Order, Permutation, Result};
use bridge_pyo3::{PyTensor, brief, brief_repr, brief_str, framework_error, probe};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PySet, PyString, PyTuple};

/// The keywords that every conversion takes, as Python passes them.
#[derive(Clone, Copy, Default)]
pub(crate) struct Keywords<'a, 'py> {
    pub(crate) copy: Option<bool>,
    pub(crate) device: Option<&'a PyTensor<'py>>,
    pub(crate) order: Option<&'a PyTensor<'py>>,
    pub(crate) permute: Option<&'a PyTensor<'py>>,
    pub(crate) detach: bool,
    pub(crate) via: Option<&'a PyTensor<'py>>,
    pub(crate) read_only: bool,
    pub(crate) progress: Option<&'a PyTensor<'py>>,
}

impl<'py> Keywords<'_, 'py> {
    /// Returns the tensor without its part in autograd, if the caller wants that; else the tensor.
    ///
    /// # Errors
    ///
    /// What PyTorch raises.
    pub(crate) fn detached(self, x: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        if !self.detach {
            return Ok(x.clone());
        }
        let py = x.py();
        // Of the frameworks that the package knows, only PyTorch has this attribute.
        let detach = || match x.getattr_opt(intern!(py, "requires_grad"))? {
            Some(tracked) if tracked.is_truthy()? => x.call_method0(intern!(py, "detach")),
            _ => Ok(x.clone()),
        };
        detach().map_err(|error| framework_error(py, "PyTorch", error))
    }

    /// Reads them.
    ///
    /// # Errors
    ///
    /// [`Argument`](bridge_core::ErrorKind::Argument) for values that no keyword takes.
    pub(crate) fn read(self) -> Result<Options> {
        let options = Options::default()
            .with_copy(self.copy)
            .with_device(self.device.map(device::device).transpose()?)
            .with_order(self.order.map(order).transpose()?)
            .with_permute(self.permute.map(permutation).transpose()?);
        // SAFETY: the Python program promises it by the keyword. Python holds no Rust references to elements.
        Ok(unsafe { options.with_read_only(self.read_only) })
    }

    /// Returns whether the caller wants the path through the host.
    ///
    /// # Errors
    ///
    /// [`Argument`](bridge_core::ErrorKind::Argument) for another way, and for one without copies.
    pub(crate) fn through_host(self) -> Result<bool> {
        let Some(via) = self.via else { return Ok(false) };
        let name = text(via, "via")?;
        match self.copy {
            _ if name != "host" => {
                Err(argument(format!("{:?} is not a value of via: pass \"host\", or leave it out", brief(&name))))
            }
            Some(false) => Err(argument("via=\"host\" always copies: remove copy=False")),
            _ => Ok(true),
        }
    }
}

/// Reads the keyword `dtype`: one that elements are cast to, as its name or as a framework's object.
///
/// # Errors
///
/// [`Argument`](bridge_core::ErrorKind::Argument) for another one, and for what is not a dtype.
pub(crate) fn dtype(value: &PyTensor<'_>) -> Result<DType> {
    let name = name_of_dtype(value)?;
    name.parse().ok().filter(|dtype| Cast::DTYPES.contains(dtype)).ok_or_else(|| {
        let names = Cast::DTYPES.map(|dtype| format!("\"{dtype}\"")).join(", ");
        argument(format!("cannot cast to dtype {}: pass one of {names}", brief(&name)))
    })
}

/// Returns the name of a dtype: a `str`, a dtype of NumPy or TensorFlow (`name`), one of `jax.numpy` (`dtype.name`), a
/// class of scalars (`__name__`), or one of PyTorch, whose text is `torch.float32`.
fn name_of_dtype(value: &PyTensor<'_>) -> Result<String> {
    if value.is_instance_of::<PyString>() {
        return text(value, "dtype");
    }
    let py = value.py();
    let read = || -> PyResult<String> {
        for path in [&["name"][..], &["dtype", "name"], &["__name__"]] {
            let found = path.iter().try_fold(value.clone(), |object, name| object.getattr(*name));
            if let Some(name) = probe(py, found.and_then(|name| name.extract::<String>()))? {
                return Ok(name);
            }
        }
        Ok(value.str()?.to_string_lossy().trim_start_matches("torch.").into())
    };
    read().map_err(|error| framework_error(py, "the dtype", error))
}

/// Reads the keyword `copy`.
pub(crate) fn copy(value: &PyTensor<'_>) -> PyResult<Option<bool>> {
    match value.is_none() {
        true => Ok(None),
        false => flag(value, "copy", "True, False, or None for a copy where one is needed").map(Some),
    }
}

/// Reads the keyword `detach`.
pub(crate) fn detach(value: &PyTensor<'_>) -> PyResult<bool> {
    flag(value, "detach", "True or False")
}

/// Reads the keyword `read_only`.
pub(crate) fn read_only(value: &PyTensor<'_>) -> PyResult<bool> {
    flag(value, "read_only", "True or False")
}

/// Reads the keyword `check`.
pub(crate) fn check(value: &PyTensor<'_>) -> PyResult<bool> {
    flag(value, "check", "True or False")
}

fn flag(value: &PyTensor<'_>, name: &str, values: &str) -> PyResult<bool> {
    let wrong = |_| into_python(value.py(), argument(format!("{name} is {}: pass {values}", brief_repr(value))));
    value.extract().map_err(wrong)
}

fn order(object: &PyTensor<'_>) -> Result<Order> {
    let name = text(object, "an order")?;
    let known = [Order::RowMajor, Order::ColumnMajor].into_iter().find(|order| order.letter() == name);
    known.ok_or_else(|| {
        argument(format!("{:?} is not an order: pass \"C\" (row-major) or \"F\" (column-major)", brief(&name)))
    })
}

fn permutation(object: &PyTensor<'_>) -> Result<Permutation> {
    let unordered = object.is_instance_of::<PyDict>()
        || object.is_instance_of::<PySet>()
        || object.is_instance_of::<PyFrozenSet>()
        || object.is_instance_of::<PyString>();
    // What the object says about its length is not relied on.
    let read = || object.try_iter()?.take(MAX_NDIM + 1).map(|axis| axis?.extract()).collect::<PyResult<Vec<i64>>>();
    let axes = if unordered { Ok(None) } else { probe(object.py(), read()) };
    let axes = axes.map_err(|error| framework_error(object.py(), "permute", error))?;
    let axes = axes.ok_or_else(|| {
        argument(format!("permute must be a sequence of axes such as (0, 2, 3, 1), not {}", brief_repr(object)))
    })?;
    Permutation::new(&axes)
}

/// Keywords of other libraries, and what to do instead.
const OTHERS: [(&str, &str); 9] = [
    ("dtype", "a conversion keeps the dtype, cast before or after it, or use copy(x, out=..., dtype=...)"),
    ("readonly", "did you mean read_only?"),
    ("writable", "did you mean read_only?"),
    ("zero_copy", "did you mean copy=False?"),
    ("stream", "the current streams of both frameworks are ordered"),
    ("non_blocking", "the host waits only for elements that it receives"),
    ("requires_grad", "call .requires_grad_() on the result"),
    ("dst", "did you mean out=?"),
    ("dim", "did you mean permute=?"),
];

/// Refuses keywords that a function does not have, as Python does, with advice.
///
/// # Errors
///
/// `TypeError`.
pub(crate) fn only_known(function: &str, unknown: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
    let Some(name) = unknown.and_then(|unknown| unknown.keys().get_item(0).ok()) else { return Ok(()) };
    let name = brief_str(&name);
    let advice = OTHERS.iter().find(|(other, _)| *other == name).map_or(String::new(), |(_, text)| format!(": {text}"));
    Err(PyTypeError::new_err(format!("{function}() got an unexpected keyword argument '{name}'{advice}")))
}

/// Returns the target of a copy, which is a keyword: libraries differ in which of the two comes first.
///
/// # Errors
///
/// `TypeError` for a second argument by position, and an error of [`ErrorKind::NotATensor`] without the target.
pub(crate) fn target<'a, 'py>(
    function: &str,
    others: &Bound<'py, PyTuple>,
    out: Option<&'a PyTensor<'py>>,
) -> PyResult<&'a PyTensor<'py>> {
    let text = || format!("{function}() takes the target by keyword: {function}(src, out=target)");
    if !others.is_empty() {
        return Err(PyTypeError::new_err(text()));
    }
    out.ok_or_else(|| into_python(others.py(), Error::new(ErrorKind::NotATensor, text())))
}

/// Defines functions of Python that take the keywords of conversions after their own tensors or names.
macro_rules! takes_keywords {
    ($($(#[$about:meta])* fn $name:ident($($argument:ident),+; $keywords:ident) $body:block)+) => {
        /// Adds the functions to the module.
        pub(crate) fn enter(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
            use pyo3::types::PyModuleMethods as _;
            $(module.add_function(pyo3::wrap_pyfunction!($name, module)?)?;)+
            Ok(())
        }

        $($crate::options::takes_keywords! {
            @shown ($($argument),+) $(#[$about])* fn $name($($argument),+; $keywords) $body
        })+
    };
    (@shown (x) $($function:tt)+) => {
        $crate::options::takes_keywords! {
            @one "(x, *, copy=None, device=None, order=None, permute=None, detach=False, via=None, read_only=False, progress=None)"
            $($function)+
        }
    };
    (@shown (x, target) $($function:tt)+) => {
        $crate::options::takes_keywords! {
            @one "(x, target, *, copy=None, device=None, order=None, permute=None, detach=False, via=None, read_only=False, progress=None)"
            $($function)+
        }
    };
    (@one $shown:literal $(#[$about:meta])* fn $name:ident($($argument:ident),+; $keywords:ident) $body:block) => {
        $(#[$about])*
        #[pyo3::pyfunction]
        #[pyo3(
            signature = (
                $($argument,)+ *, copy=None, device=None, order=None, permute=None, detach=false, via=None,
                read_only=false, progress=None, **unknown
            ),
            text_signature = $shown
        )]
        #[allow(clippy::too_many_arguments, reason = "the keywords of conversions")]
        pub(crate) fn $name<'py>(
            $($argument: &bridge_pyo3::PyTensor<'py>,)+
            #[pyo3(from_py_with = $crate::options::copy)] copy: Option<bool>,
            device: Option<&bridge_pyo3::PyTensor<'py>>,
            order: Option<&bridge_pyo3::PyTensor<'py>>,
            permute: Option<&bridge_pyo3::PyTensor<'py>>,
            #[pyo3(from_py_with = $crate::options::detach)] detach: bool,
            via: Option<&bridge_pyo3::PyTensor<'py>>,
            #[pyo3(from_py_with = $crate::options::read_only)] read_only: bool,
            progress: Option<&bridge_pyo3::PyTensor<'py>>,
            unknown: Option<&pyo3::Bound<'py, pyo3::types::PyDict>>,
        ) -> pyo3::PyResult<bridge_pyo3::PyTensor<'py>> {
            $crate::options::only_known(stringify!($name), unknown)?;
            let $keywords = $crate::options::Keywords { copy, device, order, permute, detach, via, read_only, progress };
            $body
        }
    };
}
pub(crate) use takes_keywords;
