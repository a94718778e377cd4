//! Whether a tensor crosses in place, as a copy, or not at all.

use crate::{Access, Device, DeviceKind, Error, ErrorKind, Lent, Pending, Profile, Result, Strides};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The caller's requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// As in the array API: `None` copies only where it is needed, `Some(true)` always, `Some(false)` never.
    pub copy: Option<bool>,
    /// The device that the result must be on. `None`: where the tensor is.
    pub device: Option<Device>,
}

/// Why a copy is made. The producer makes it, on the tensor's device. Where it cannot, core copies host memory, and the
/// consumer copies device memory that it accepts in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// The caller passed `copy=True`.
    Asked,
    /// The producer has deferred a conjugation.
    PendingConjugation,
    /// The producer has deferred a negation.
    PendingNegation,
    /// The target accepts no negative strides.
    NegativeStrides,
    /// The target accepts compact tensors only.
    Strides,
    /// The address does not have the alignment that the target requires.
    Alignment,
}

/// How a tensor will cross.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Plan {
    /// In place: the same memory.
    ZeroCopy,
    /// As a copy.
    Copy(Reason),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Asked => "asked for",
            Self::PendingConjugation => "a pending conjugation",
            Self::PendingNegation => "a pending negation",
            Self::NegativeStrides => "negative strides",
            Self::Strides => "strides that are not compact",
            Self::Alignment => "an unaligned address",
        })
    }
}

/// Decides how `lent` crosses into the framework with this profile.
///
/// # Errors
///
/// - [`ErrorKind::Device`]: it is not on the device that `options` names, or the target has no such device.
/// - [`ErrorKind::Dtype`]: the target has no such dtype.
/// - [`ErrorKind::ReadOnly`]: it is read-only, the target would make it writable, and no copy is made.
/// - [`ErrorKind::CopyNeeded`]: it must be copied, and `copy` is `Some(false)`.
pub fn plan(lent: &Lent, target: &Profile, options: &Options) -> Result<Plan> {
    let (device, dtype, name) = (lent.device(), lent.dtype(), &target.name);
    if landing(device, target, options.device).is_none() {
        if let Some(requested) = options.device.filter(|requested| *requested != device) {
            let text = format!("the tensor is on {device}, not on {requested}: move it with its own framework first");
            return Err(Error::new(ErrorKind::Device, text));
        }
        let (place, advice) = match device.kind {
            DeviceKind::CPU => ("in host memory (cpu)".into(), "move it to a device"),
            _ => (format!("on {device}"), "copy it to the host"),
        };
        let text = format!(
            "the tensor is {place}, which {name} does not have in this process: {advice} with its own framework first"
        );
        return Err(Error::new(ErrorKind::Device, text));
    }
    if !target.dtypes.contains(&dtype) {
        let text = format!("{name} has no dtype {dtype}: cast the tensor, or view its bytes as uint8, first");
        return Err(Error::new(ErrorKind::Dtype, text));
    }
    let lost = lent.buffer().access() == Access::ReadOnly && !target.keeps_read_only;
    match (options.copy, needed(lent, target)) {
        (Some(true), reason) => Ok(Plan::Copy(reason.unwrap_or(Reason::Asked))),
        (_, None) if lost => {
            let text = format!("the tensor is read-only, and {name} would let you write to it: pass copy=True");
            Err(Error::new(ErrorKind::ReadOnly, text))
        }
        (_, None) => Ok(Plan::ZeroCopy),
        (None, Some(reason)) => Ok(Plan::Copy(reason)),
        (Some(false), Some(reason)) => {
            let what = lent.layout();
            let text = format!(
                "{name} cannot take the tensor in place because of {reason} ({what}): pass copy=None to allow a copy"
            );
            Err(Error::new(ErrorKind::CopyNeeded, text))
        }
    }
}

/// Kinds of memory, and another kind of device that can use them. A GPU uses managed memory as its own, and the host
/// reads pinned and managed memory (CUDA driver API, "Unified Addressing").
const ALSO: &[(DeviceKind, DeviceKind)] = &[
    (DeviceKind::CUDA_MANAGED, DeviceKind::CUDA),
    (DeviceKind::CUDA_MANAGED, DeviceKind::CPU),
    (DeviceKind::CUDA_HOST, DeviceKind::CPU),
];

/// Returns the device under which the target uses memory of `device`, if it can and the caller requests no other.
pub(crate) fn landing(device: Device, target: &Profile, requested: Option<Device>) -> Option<Device> {
    let also = ALSO.iter().filter(|(kind, _)| *kind == device.kind).map(|(_, kind)| match *kind {
        DeviceKind::CPU => Device::CPU,
        kind => Device { kind, ..device },
    });
    let mut usable = [device].into_iter().chain(also).filter(|device| target.devices.contains(&device.kind));
    usable.find(|device| requested.is_none_or(|requested| requested == *device))
}

/// Returns the first reason why the target cannot take the tensor in place.
pub(crate) fn needed(lent: &Lent, target: &Profile) -> Option<Reason> {
    let layout = lent.layout();
    if let Some(pending) = lent.pending() {
        return Some(match pending {
            Pending::Conjugation => Reason::PendingConjugation,
            Pending::Negation => Reason::PendingNegation,
        });
    }
    if layout.numel() == 0 {
        return None;
    }
    let negative = layout.has_negative_strides();
    match target.strides {
        Strides::NonNegative | Strides::Compact if negative => return Some(Reason::NegativeStrides),
        Strides::Compact if !layout.is_compact() => return Some(Reason::Strides),
        _ => (),
    }
    let aligned = lent.data().is_multiple_of(target.alignment_of(layout.itemsize()));
    (!aligned).then_some(Reason::Alignment)
}
