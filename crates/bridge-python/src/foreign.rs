//! Objects of frameworks that nobody knows here, but that speak DLPack: capsules, and producers with `__dlpack__`.

use bridge_core::dlpack::Origin;
use bridge_core::{
    Adapter, Consumer, Device, DeviceKind, Error, ErrorKind, Lease, Lent, Profile, Result, Reuse, Stream, Views,
};
use bridge_pyo3::{PyAdapter, PyTensor, drop_guarded, framework_error, take_capsule};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::sync::{Arc, LazyLock};

/// Lends only: there is no framework behind it that could wrap anything.
pub(crate) struct Foreign<'py>(pub(crate) Python<'py>);

static PROFILE: LazyLock<Profile> = LazyLock::new(|| Profile::of_lender("DLPack"));

static NOBODY: LazyLock<Arc<Views>> = LazyLock::new(Arc::default);

/// What a capsule does not say. The producer was asked to make the legacy default stream wait for its work; whoever
/// passes a bare capsule has seen to that (the docstring of `to_torch` says so). How the producer reuses memory is its
/// own affair.
fn origin(device: Device, address: usize) -> Result<Origin> {
    if device.kind != DeviceKind::CUDA {
        return Ok(Origin {
            stream: None,
            reuse: Reuse::InStreamOrder,
            allocation: None,
            keep: None,
            release: Some(drop_guarded),
        });
    }
    let legacy = Origin {
        stream: Some(Stream::LEGACY),
        reuse: Reuse::Unknown,
        allocation: None,
        keep: None,
        release: Some(drop_guarded),
    };
    if address == 0 {
        return Ok(legacy);
    }
    let located = bridge_cuda::locate(address)?.filter(|located| located.device == device);
    let located = located.ok_or_else(|| {
        let text = format!("the DLPack tensor says that it is on {device}, but the driver knows no such memory there");
        Error::new(ErrorKind::Protocol, text)
    })?;
    Ok(Origin { allocation: Some(located.range), ..legacy })
}

/// The capsule of a producer, whose work has been ordered in front of the legacy default stream.
fn capsule<'py>(producer: &PyTensor<'py>, copy: bool) -> PyResult<PyTensor<'py>> {
    let py = producer.py();
    let (kind, _): (i32, i32) = producer.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    let call = |max_version: bool| {
        let kwargs = PyDict::new(py);
        if DeviceKind(kind) == DeviceKind::CUDA {
            kwargs.set_item(intern!(py, "stream"), Stream::LEGACY.handle())?;
        }
        if max_version {
            kwargs.set_item(intern!(py, "max_version"), (1, 0))?;
        }
        if copy {
            kwargs.set_item(intern!(py, "copy"), true)?;
        }
        producer.call_method(intern!(py, "__dlpack__"), (), Some(&kwargs))
    };
    // Producers from before the array API of 2023 know neither argument.
    call(true).or_else(|error| if error.is_instance_of::<PyTypeError>(py) && !copy { call(false) } else { Err(error) })
}

fn refused(py: Python<'_>, error: PyErr) -> Error {
    framework_error(py, "the producer", error)
}

impl<'py> Adapter for Foreign<'py> {
    type Tensor = PyTensor<'py>;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        NOBODY.clone()
    }

    fn export(&self, object: &PyTensor<'py>) -> Result<Lent> {
        let py = self.0;
        let capsule = if object.is_instance_of::<PyCapsule>() {
            object.clone()
        } else if object.hasattr(intern!(py, "__dlpack__")).unwrap_or(false) {
            capsule(object, false).map_err(|error| refused(py, error))?
        } else {
            let name = object.get_type().fully_qualified_name().map_or_else(|_| "this".into(), |name| name.to_string());
            let text = format!(
                "{name} is no tensor: pass one of torch, cupy, numpy, tensorflow or tensorflow1 (of a Keras variable its value), or an object with __dlpack__"
            );
            return Err(Error::new(ErrorKind::NotATensor, text));
        };
        // SAFETY: whoever hands over a capsule or implements `__dlpack__` vouches for DLPack's contract; what can be
        // checked of it is checked.
        unsafe { take_capsule(&capsule, &origin) }
    }

    fn import(&self, _: Lease) -> Result<PyTensor<'py>> {
        Err(Error::new(ErrorKind::Argument, "DLPack is no target: name a framework"))
    }

    fn compact(&self, object: &PyTensor<'py>) -> Result<PyTensor<'py>> {
        if object.is_instance_of::<PyCapsule>() {
            let text = "a bare capsule cannot be copied by its producer: pass the tensor that it came from";
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        capsule(object, true).map_err(|error| refused(object.py(), error))
    }
}

impl<'py> PyAdapter<'py> for Foreign<'py> {
    fn owns(&self, _: &PyTensor<'py>) -> bool {
        false
    }
}
