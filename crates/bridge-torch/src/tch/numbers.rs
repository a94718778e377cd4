//! The numbers by which libtorch's C functions name dtypes and devices.

use super::libtorch::{Libtorch, named};
use crate::library::dtypes;
use bridge_core::{DType, Device, DeviceKind, Error, ErrorKind, Result};

pub(crate) struct Numbers {
    /// The dtypes that this version names.
    dtypes: Vec<(DType, i32)>,
    /// `c10::DeviceType` of the kinds of device that this process has.
    kinds: Vec<(DeviceKind, i32)>,
}

impl Numbers {
    pub(crate) fn of(libtorch: &Libtorch, has_cuda: bool) -> Self {
        // SAFETY: functions without arguments that return a number.
        let (cpu, cuda) = unsafe { ((libtorch.device_type_cpu)(), (libtorch.device_type_cuda)()) };
        let mut kinds = vec![(DeviceKind::CPU, cpu)];
        kinds.extend(has_cuda.then_some((DeviceKind::CUDA, cuda)));
        // SAFETY: functions of these names take nothing and return a number (`shim.h`).
        Self { dtypes: dtypes(|name| unsafe { named(name) }), kinds }
    }

    /// Returns the dtypes that this version of libtorch names.
    pub(crate) fn dtypes(&self) -> impl Iterator<Item = DType> {
        self.dtypes.iter().map(|(dtype, _)| *dtype)
    }

    /// Returns the kinds of device that this process has.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = DeviceKind> {
        self.kinds.iter().map(|(kind, _)| *kind)
    }

    /// Returns the dtype with this number.
    pub(crate) fn dtype(&self, number: i32) -> Option<DType> {
        self.dtypes.iter().find(|(_, known)| *known == number).map(|(dtype, _)| *dtype)
    }

    /// Returns the number of a dtype.
    pub(crate) fn number(&self, dtype: DType) -> Result<i32> {
        let found = self.dtypes.iter().find(|(known, _)| *known == dtype).map(|(_, number)| *number);
        found.ok_or_else(|| {
            Error::new(ErrorKind::Dtype, format!("libtorch has no dtype {dtype}: cast the tensor first"))
        })
    }

    /// Returns the device with this type and index of `c10::Device`.
    pub(crate) fn device(&self, kind: i32, index: i32) -> Option<Device> {
        let (kind, _) = self.kinds.iter().find(|(_, number)| *number == kind)?;
        Some(Device { kind: *kind, index: index.max(0) })
    }

    /// Returns type and index of `c10::Device`, in which the host has the index -1.
    pub(crate) fn place(&self, device: Device) -> Result<(i32, i32)> {
        let found = self.kinds.iter().find(|(kind, _)| *kind == device.kind).map(|(_, number)| *number);
        let number = found.ok_or_else(|| {
            Error::new(ErrorKind::CopyNeeded, format!("libtorch has no memory on {device} in this process"))
        })?;
        Ok((number, if device.kind == DeviceKind::CPU { -1 } else { device.index }))
    }
}
