//! The MadeUp of this process, looked up once.

//% if cuda
use crate::streams::MadeUpConsumer;
//% end
//% if host
use bridge_core::Views;
//% end
use crate::raised;
use bridge_core::{DType, DeviceKind, Profile, Result, Strides};
use bridge_pyo3::{PyTensor, installed, is_instance};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::sync::Arc;

pub(crate) struct Runtime {
    pub(crate) profile: Profile,
//% if cuda
    pub(crate) consumer: Arc<MadeUpConsumer>,
//% end
//% if host
    /// Host memory has no streams.
    pub(crate) consumer: Arc<Views>,
//% end
    tensor: Py<PyType>,
}

impl Runtime {
    pub(crate) fn get(py: Python<'_>) -> Result<&'static Self> {
        static RUNTIME: PyOnceLock<Runtime> = PyOnceLock::new();
        RUNTIME.get_or_try_init(py, || {
            let madeup = installed(py, "madeup", "madeup")?;
            Self::look_up(&madeup).map_err(|error| raised(py, error))
        })
    }

    fn look_up(madeup: &Bound<'_, PyModule>) -> PyResult<Self> {
        // What it can hold, no more and no less: the suite tries all of it.
        let profile = Profile::export_only("madeup")
            .with_dtypes(vec![DType::FLOAT32, DType::UINT8])
            .with_strides(Strides::Compact)
            .with_alignment(1)
//% if cuda
            .with_devices(vec![DeviceKind::CPU, DeviceKind::CUDA])
//% end
//% if host
            .with_devices(vec![DeviceKind::CPU])
//% end
            .with_keeps_read_only(false);
        // The class of its tensors.
        let tensor = madeup.getattr("Tensor")?.cast_into::<PyType>()?.unbind();
        Ok(Self { profile, consumer: Arc::default(), tensor })
    }

    pub(crate) fn is_tensor(&self, object: &PyTensor<'_>) -> bool {
        is_instance(object, self.tensor.bind(object.py()))
    }
}
