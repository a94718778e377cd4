//! The kinds of simulated frameworks.

use bridge_core::{Access, DType, Device, DeviceKind, Profile, Strides};

/// The device of every simulated framework: an extension device in DLPack's list (`kDLExtDev`).
pub(crate) const DEVICE: Device = Device { kind: DeviceKind(12), index: 0 };

/// The kind of a simulated framework.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Habits {
    /// Takes any strides and addresses, keeps read-only, defers operations, and its allocator records streams.
    Generous,
    /// Takes strides that are not negative, and its allocator records no streams, like CuPy's.
    Common,
    /// Takes compact tensors at aligned addresses only.
    Strict,
    /// Is as strict, has its own single stream, and writes to no tensor, like TensorFlow.
    Immutable,
}

/// Every kind.
pub const HABITS: [Habits; 4] = [Habits::Generous, Habits::Common, Habits::Strict, Habits::Immutable];

impl Habits {
    /// What its own tensors may be used for.
    pub(crate) fn access(self) -> Access {
        if self == Self::Immutable { Access::Immutable } else { Access::ReadWrite }
    }

    /// What it accepts.
    pub(crate) fn profile(self) -> Profile {
        let whole = DType::NAMED.iter().map(|(dtype, _)| *dtype).filter(|dtype| dtype.itemsize().is_some());
        let (name, strides, alignment, keeps_read_only, leaves_out): (_, _, _, _, &[DType]) = match self {
            Self::Generous => ("sim-generous", Strides::Any, 0, true, &[]),
            Self::Common => ("sim-common", Strides::NonNegative, 1, false, &[DType::COMPLEX32, DType::UINT16]),
            Self::Strict => ("sim-strict", Strides::Compact, 64, false, &[DType::COMPLEX32, DType::FLOAT8_E3M4]),
            Self::Immutable => ("sim-immutable", Strides::Compact, 64, true, &[DType::COMPLEX32, DType::FLOAT8_E4M3]),
        };
        Profile::export_only(name)
            .with_dtypes(whole.filter(|dtype| !leaves_out.contains(dtype)).collect())
            .with_strides(strides)
            .with_alignment(alignment)
            .with_devices(vec![DEVICE.kind])
            .with_keeps_read_only(keeps_read_only)
    }
}
