//! What a framework accepts and emits, as data.

use crate::{DType, DeviceKind};
use serde::{Deserialize, Serialize};

/// Which strides a framework takes. The order is from generous to strict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strides {
    /// Any strides, of either sign.
    Any,
    /// Any that are not negative.
    NonNegative,
    /// Only those of a compact, row-major tensor.
    Compact,
}

/// What a framework accepts and emits. It is data: printed, compared, kept in `fixtures/profiles/`, and judged by the
/// suite, which checks that a framework takes exactly what its profile says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// The framework's name, as users write it in `convert(x, "torch")`.
    pub name: String,
    /// The dtypes that it has a counterpart for.
    pub dtypes: Vec<DType>,
    /// The strides that it takes.
    pub strides: Strides,
    /// The alignment, in bytes, that the address of the first element must have, beyond the itemsize. 1 where the
    /// itemsize is enough, 0 where no alignment is needed at all.
    pub alignment: usize,
    /// The kinds of device that its tensors can be on, in this process.
    pub devices: Vec<DeviceKind>,
    /// Whether it keeps read-only memory read-only.
    pub keeps_read_only: bool,
    /// Whether the host waits for the device when one of its tensors is lent.
    #[serde(default)]
    pub waits_on_export: bool,
    /// Whether it calls C++ functions of the framework that have no stable interface, because they were tested with the
    /// installed version. With other versions it calls public ones in their place, which are slower or do less.
    #[serde(default)]
    pub private_functions: bool,
}

impl Profile {
    /// That of a lender behind which no framework is known that could take anything.
    pub fn of_lender(name: &str) -> Self {
        Self {
            name: name.into(),
            dtypes: Vec::new(),
            strides: Strides::Any,
            alignment: 0,
            devices: Vec::new(),
            keeps_read_only: true,
            waits_on_export: false,
            private_functions: false,
        }
    }

    /// The alignment in bytes that an element of `itemsize` bytes needs here.
    pub fn alignment_of(&self, itemsize: usize) -> usize {
        match self.alignment {
            0 => 1,
            // A power of two divides every larger one, so the larger one serves both.
            more => more.max(1 << itemsize.trailing_zeros()),
        }
    }
}
