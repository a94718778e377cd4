//! `truebridge.plan`.

use crate::conversions;
use crate::errors::into_python;
use crate::frameworks::{self, AnyAdapter, Framework, not_a_capsule};
use crate::options::takes_keywords;
use crate::ordering::ordering;
use crate::trees::{self, Tree};
use bridge_core::{CopiedBy, Device, Export, Failed, Profile, Reason};
use bridge_pyo3::{PyTensor, framework_error};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// How a conversion would be done. ``plan`` returns it.
///
/// Attributes
/// ----------
/// zero_copy : bool
///     Whether the result would share the memory.
/// reason : str or None
///     Why a copy would be made.
/// nbytes : int
///     Bytes that would be copied.
/// copied_by : {"kernels", "host", "producer", "move"} or None
///     Who would make the copy: ``"kernels"`` of this package on the device, its loops on the ``"host"``, the
///     ``"producer"`` with its own kernels, or a ``"move"`` of this package to another device.
/// device : str
///     The device of the result: that of the tensor, unless it would be moved.
/// advice : str or None
///     How to avoid the copy, where its reason is an unaligned address: the address, and what the target takes.
///
/// A value: equal plans say the same, and plans can be copied and pickled. It is neither true nor false (``bool`` raises
/// ``TypeError``): read ``zero_copy``.
#[pyclass(frozen, eq, hash, get_all, module = "truebridge")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Why a copy would be made, or ``None``.
    reason: Option<String>,
    /// Bytes that would be copied.
    nbytes: usize,
    /// The device of the result.
    device: String,
    /// Who would make the copy, or ``None``.
    copied_by: Option<String>,
    /// How to avoid the copy, or ``None``.
    advice: Option<String>,
}

/// What `Plan.__new__` takes.
type Fields = (Option<String>, usize, String, Option<String>, Option<String>);

impl Plan {
    /// Describes a plan for `nbytes` bytes whose result is on `device`. `copied_by` is for a copy.
    fn of(plan: bridge_core::Plan, nbytes: usize, device: Device, copied_by: Option<CopiedBy>) -> Self {
        let reason = plan.reason().map(|reason| reason.to_string());
        let nbytes = if reason.is_some() { nbytes } else { 0 };
        Self { reason, nbytes, device: device.to_string(), copied_by: copied_by.map(|by| by.to_string()), advice: None }
    }

    /// Returns the plan with the address that the target does not take, if that is its reason.
    fn with_address(self, plan: bridge_core::Plan, exported: &Export, from: &Profile, to: &Profile) -> Self {
        if plan != bridge_core::Plan::Copy(Reason::Alignment) {
            return self;
        }
        let (address, alignment) = (exported.data(), to.alignment_of(exported.dtype()));
        let mut advice = format!("{address:#x} is not a multiple of {alignment}");
        if let Some(from) = Framework::named(&from.name) {
            advice += &format!("; convert(x, \"{}\", copy=True) makes an aligned tensor", from.name());
        }
        Self { advice: Some(advice), ..self }
    }

    /// Describes the move of `nbytes` bytes through the host, which are copied twice.
    fn through_host(nbytes: usize, device: Device) -> Self {
        let (reason, copied_by) = (Some("via=\"host\"".into()), Some(CopiedBy::Move.to_string()));
        Self { reason, nbytes: 2 * nbytes, device: device.to_string(), copied_by, advice: None }
    }
}

/// Returns a short text as HTML, for notebooks.
pub(crate) fn as_html(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<code>{escaped}</code>")
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (reason, nbytes, device, copied_by, advice=None))]
    fn new(
        reason: Option<String>,
        nbytes: usize,
        device: String,
        copied_by: Option<String>,
        advice: Option<String>,
    ) -> Self {
        Self { reason, nbytes, device, copied_by, advice }
    }

    /// Whether the result would share the memory.
    #[getter]
    fn zero_copy(&self) -> bool {
        self.reason.is_none()
    }

    /// Refuses: a copy is a plan as well.
    fn __bool__(&self) -> PyResult<bool> {
        Err(PyTypeError::new_err("a plan is neither true nor false: read plan.zero_copy"))
    }

    fn __repr__(&self) -> String {
        match (&self.reason, &self.copied_by) {
            (Some(reason), Some(by)) => {
                let advice = self.advice.as_ref().map_or(String::new(), |advice| format!(": {advice}"));
                format!("<Plan: copy of {} bytes on {} by {by} because of {reason}{advice}>", self.nbytes, self.device)
            }
            _ => format!("<Plan: zero copy on {}>", self.device),
        }
    }

    /// The text, for notebooks.
    fn _repr_html_(&self) -> String {
        as_html(&self.__repr__())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, Fields) {
        let Self { reason, nbytes, device, copied_by, advice } = slf.get();
        let fields = (reason.clone(), *nbytes, device.clone(), copied_by.clone(), advice.clone());
        (slf.get_type().into_any(), fields)
    }
}

takes_keywords! {
    /// Return what ``convert`` with the same arguments would do, without doing it.
    ///
    /// Parameters
    /// ----------
    /// x : tensor or container of tensors
    ///     As for ``to_torch``, except for a capsule, which can be read once only.
    /// target : Target
    ///     The name of a framework.
    #[doc = include_str!("docs/keywords.txt")]
    /// Returns
    /// -------
    /// Plan or container
    ///     For a container the same with a ``Plan`` instead of each tensor.
    ///
    /// Raises
    /// ------
    /// BridgeError
    ///     What ``convert`` would raise.
    ///
    /// Examples
    /// --------
    /// >>> import numpy as np
    /// >>> import truebridge as tb
    /// >>> a = np.zeros((2, 3), np.float32)
    /// >>> tb.plan(a, "torch")
    /// <Plan: zero copy on cpu>
    /// >>> tb.plan(a[:, ::-1], "torch")
    /// <Plan: copy of 24 bytes on cpu by host because of negative strides>
    fn plan(x, target; keywords) {
        let py = x.py();
        let look = || {
            let to = frameworks::named(target)?.open(py)?;
            let (options, through_host) = (keywords.read()?, keywords.through_host()?);
            let plan_of = |from: &AnyAdapter<'py>, x: &PyTensor<'py>| -> bridge_core::Result<PyTensor<'py>> {
                not_a_capsule(x)?;
                let exported = from.export(&keywords.detached(x)?)?;
                conversions::check(&exported)?;
                let exported = exported.permuted(options.permute.as_ref())?;
                let value =
                    |plan| Bound::new(py, plan).map(Bound::into_any).map_err(|error| framework_error(py, "Python", error));
                if let Some(device) = conversions::back(exported.device(), &options).filter(|_| through_host) {
                    return value(Plan::through_host(exported.layout().nbytes(), device));
                }
                let plan = bridge_core::plan(&exported, to.profile(), &options)?;
                let moved = options.device.filter(|_| plan == bridge_core::Plan::Copy(bridge_core::Reason::Moved));
                if let (Some(device), Some(copies)) = (moved, ordering().copies()) {
                    copies.reaches(exported.device()).and_then(|()| copies.reaches(device))?;
                }
                let copies = plan != bridge_core::Plan::ZeroCopy;
                let copied_by = copies.then(|| bridge_core::copied_by(&**from, &*to, &exported, ordering(), &options));
                let (nbytes, device) = (exported.layout().nbytes(), moved.unwrap_or(exported.device()));
                let made = Plan::of(plan, nbytes, device, copied_by);
                value(made.with_address(plan, &exported, from.profile(), to.profile()))
            };
            match Tree::of(x)? {
                None => plan_of(&trees::source_of(x)?, x),
                Some(tree) => tree.map(x, |leaves| {
                    let plans = leaves.iter().enumerate();
                    let plans = plans.map(|(index, (from, x))| plan_of(from, x).map_err(|error| Failed::new(index, error)));
                    plans.collect()
                }),
            }
        };
        look().map_err(|error| into_python(py, error))
    }
}
