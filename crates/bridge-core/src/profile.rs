//! What a framework accepts and emits, as data.

use crate::{DType, DeviceKind, Error, ErrorKind, MAX_NDIM, Result};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// The strides that a framework accepts, from lenient to strict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Strides {
    /// Any strides, of either sign.
    Any,
    /// Any strides that are not negative.
    NonNegative,
    /// Those of a compact, row-major tensor only.
    Compact,
}

/// What a framework accepts and emits, as data: printed, compared, and kept in `fixtures/profiles.json`. The conformance
/// suite checks that a framework accepts what its profile says, with each dtype, strides and alignment that it names.
/// It does not try what the profile leaves out, because an import may rely on never seeing it: a claim that is too narrow
/// costs copies, and no wrong data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Profile {
    /// The framework's name, as users write it in `convert(x, "torch")`.
    pub name: String,
    /// The dtypes that it accepts.
    pub dtypes: Vec<DType>,
    /// The dtypes that it does not accept because of a mode, and how the mode is changed: the end of an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled: Option<(Vec<DType>, String)>,
    /// The strides that it accepts.
    pub strides: Strides,
    /// The numbers of dimensions that its tensors can have; a scalar has 0. A type of matrices has `2..=2`.
    #[serde(default = "any_rank", skip_serializing_if = "is_any_rank")]
    pub rank: RangeInclusive<usize>,
    /// Alignment of the first element's address, in bytes, beyond that of the itemsize: a power of two, at most 2^30. 1:
    /// the itemsize is enough. 0: any address is accepted, also one that is not a multiple of the itemsize.
    pub alignment: usize,
    /// Whether a complex number needs only the alignment of its two parts, as in Rust and C. The types of PyTorch and
    /// CuPy are aligned to the whole number (`alignas(2 * sizeof(T))`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub complex_by_parts: bool,
    /// The kinds of device that its tensors can be on in this process.
    pub devices: Vec<DeviceKind>,
    /// Whether it keeps read-only memory read-only.
    pub keeps_read_only: bool,
    /// Whether it takes memory in place that others may write to meanwhile. If not, it takes only memory that never changes
    /// ([`Access::Immutable`](crate::Access::Immutable)), and copies the rest.
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub takes_mutable: bool,
    /// Whether exporting a tensor blocks the host until the device is done.
    #[serde(default)]
    pub waits_on_export: bool,
    /// Whether its tensors always own their memory. Then it takes no other memory in place: every tensor is copied into
    /// fresh memory of the framework ([`Adapter::empty`](crate::Adapter::empty)), and nothing is imported.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub owns_memory: bool,
    /// Whether the adapter uses functions or fields of the framework that have no stable interface: where they were
    /// compared with Python's answers in this process, or tested with the installed version (TensorFlow). Elsewhere it
    /// calls public functions, which are slower or do less.
    #[serde(default)]
    pub private_functions: bool,
}

const fn yes() -> bool {
    true
}

fn any_rank() -> RangeInclusive<usize> {
    0..=MAX_NDIM
}

fn is_any_rank(rank: &RangeInclusive<usize>) -> bool {
    *rank == any_rank()
}

/// Makes a method of each field, which returns the profile with another value of it.
macro_rules! setters {
    ($($name:ident = $field:ident: $type:ty;)*) => {
        impl Profile {
            $(#[doc = concat!("Returns the same profile with another [`", stringify!($field), "`](Self::", stringify!($field), ").")]
            #[must_use]
            pub fn $name(self, $field: $type) -> Self {
                Self { $field, ..self }
            })*
        }
    };
}

setters! {
    with_dtypes = dtypes: Vec<DType>;
    with_disabled = disabled: Option<(Vec<DType>, String)>;
    with_strides = strides: Strides;
    with_rank = rank: RangeInclusive<usize>;
    with_alignment = alignment: usize;
    with_complex_by_parts = complex_by_parts: bool;
    with_devices = devices: Vec<DeviceKind>;
    with_keeps_read_only = keeps_read_only: bool;
    with_takes_mutable = takes_mutable: bool;
    with_waits_on_export = waits_on_export: bool;
    with_owns_memory = owns_memory: bool;
    with_private_functions = private_functions: bool;
}

impl Profile {
    /// Returns the profile of an export-only source, such as a bare capsule; it accepts nothing.
    pub fn export_only(name: &str) -> Self {
        Self {
            name: name.into(),
            dtypes: Vec::new(),
            disabled: None,
            strides: Strides::Any,
            rank: any_rank(),
            alignment: 0,
            complex_by_parts: false,
            devices: Vec::new(),
            keeps_read_only: true,
            takes_mutable: true,
            waits_on_export: false,
            owns_memory: false,
            private_functions: false,
        }
    }

    /// Returns the same profile with another [`name`](Self::name).
    #[must_use]
    pub fn with_name(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Returns the alignment, in bytes, that the framework requires of an element of this dtype.
    pub fn alignment_of(&self, dtype: DType) -> usize {
        let parts = if self.complex_by_parts && dtype.is_complex() { 2 } else { 1 };
        // Half a byte has 64 zeros, and the alignment of a byte.
        let own = dtype.itemsize().map_or(1, |itemsize| 1 << ((itemsize / parts).trailing_zeros() & 63));
        match self.alignment {
            0 => 1,
            // A power of two divides every larger one, so the larger one serves both.
            more => more.max(own),
        }
    }

    /// The largest alignment that a profile may state: that of a gigabyte page.
    const MAX_ALIGNMENT: usize = 1 << 30;

    /// Refuses a profile whose alignment memory cannot be made for.
    pub(crate) fn check(&self) -> Result<()> {
        let alignment = self.alignment;
        if alignment == 0 || alignment.is_power_of_two() && alignment <= Self::MAX_ALIGNMENT {
            return Ok(());
        }
        let (name, most) = (&self.name, Self::MAX_ALIGNMENT);
        let text = format!(
            "the profile of {name} states an alignment of {alignment} bytes: state 0, or a power of two up to {most}"
        );
        Err(Error::new(ErrorKind::Argument, text))
    }
}
