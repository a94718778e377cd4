//! Whether a tensor is converted in place, as a copy, or not at all.

use crate::planted::is_planted;
use crate::{
    Access, Advice, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout, Order, Pending, Permutation, Profile,
    Result, Strides,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The caller's requests. More may come: start from [`default`](Self::default), [`in_place`](Self::in_place) or
/// [`copied`](Self::copied).
///
/// ```
/// use bridge_core::{Device, Options, Order, Permutation};
///
/// let nhwc = Options::in_place().with_permute(Permutation::new(&[0, 2, 3, 1])?);
/// assert_eq!(nhwc.copy, Some(false));
/// let columns = Options::default().with_order(Order::ColumnMajor).with_device(Device::cuda(1));
/// assert_eq!(columns.device, Some(Device::cuda(1)));
/// # Ok::<(), bridge_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// As in the array API: `None` copies only if needed, `Some(true)` always, `Some(false)` never.
    pub copy: Option<bool>,
    /// The device that the result must be on. `None`: where the tensor is. Another device than the tensor's means a
    /// move, unless `copy` is `Some(false)`.
    pub device: Option<Device>,
    /// The order that the elements of the result must have in memory, without gaps. `None`: any that the target takes.
    pub order: Option<Order>,
    /// The dimensions of the result, in terms of the tensor's. `None`: as they are.
    pub permute: Option<Permutation>,
    /// Whether the caller promises not to write to the result: [`with_read_only`](Self::with_read_only).
    pub(crate) read_only: bool,
    /// Whether a target that counts the writes to its tensors watches a result that must not be written to: it refuses to
    /// export one that was. For what users convert: code that writes on purpose leaves it off.
    pub watch: bool,
}

impl Options {
    /// Returns the device that the result must be on. There is one host, whatever its number.
    pub(crate) fn requested(&self) -> Option<Device> {
        self.device.map(Device::of_one_host)
    }

    /// Returns the request for no copy: the result shares the memory, or there is an error.
    pub const fn in_place() -> Self {
        Self { copy: Some(false), device: None, order: None, permute: None, read_only: false, watch: false }
    }

    /// Returns the request for a copy, in any case.
    pub const fn copied() -> Self {
        Self { copy: Some(true), ..Self::in_place() }
    }

    /// Returns the same requests with another [`copy`](Self::copy).
    #[must_use]
    pub fn with_copy(self, copy: impl Into<Option<bool>>) -> Self {
        Self { copy: copy.into(), ..self }
    }

    /// Returns the same requests with another [`device`](Self::device).
    #[must_use]
    pub fn with_device(self, device: impl Into<Option<Device>>) -> Self {
        Self { device: device.into(), ..self }
    }

    /// Returns the same requests with another [`order`](Self::order).
    #[must_use]
    pub fn with_order(self, order: impl Into<Option<Order>>) -> Self {
        Self { order: order.into(), ..self }
    }

    /// Returns the same requests with another [`permute`](Self::permute).
    #[must_use]
    pub fn with_permute(self, permute: impl Into<Option<Permutation>>) -> Self {
        Self { permute: permute.into(), ..self }
    }

    /// Returns the same requests with the promise not to write to the result. A target that does not keep read-only memory
    /// read-only then takes it in place.
    ///
    /// # Safety
    ///
    /// If it is `true`, the program does not write to a result that is made with these options, although safe methods of the
    /// target would: the memory may be a constant, or pages that the system protects. Nor does it write to the memory
    /// through the source while the result exists.
    #[must_use]
    pub const unsafe fn with_read_only(self, read_only: bool) -> Self {
        Self { read_only, ..self }
    }

    /// Returns whether the caller promises not to write to the result.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the same requests with another [`watch`](Self::watch).
    #[must_use]
    pub fn with_watch(self, watch: bool) -> Self {
        Self { watch, ..self }
    }
}

/// Why a copy is made. It is made on the tensor's device, unless it is a move; [`transfer`](crate::transfer()) says
/// what makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// The caller asked for it ([`Options::copied`]).
    Asked,
    /// The producer has deferred a conjugation.
    PendingConjugation,
    /// The producer has deferred a negation.
    PendingNegation,
    /// The strides are not a whole number of elements, and the producer packs them.
    PendingPacking,
    /// The target accepts no negative strides.
    NegativeStrides,
    /// The target accepts only compact tensors.
    Strides,
    /// The elements are not in the order that the caller asked for, or have gaps between them.
    Order,
    /// The address does not have the alignment that the target requires.
    Alignment,
    /// The target's tensors own their memory, so it cannot take another owner's ([`Profile::owns_memory`]).
    MemoryNotOwned,
    /// Others may write to the memory, and the target takes none that changes ([`Profile::takes_mutable`]).
    Mutable,
    /// The caller asked for another device than the tensor's. The ordering's [`Copies`](crate::Copies) move it.
    Moved,
}

/// How a tensor will be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Plan {
    /// In place: the same memory.
    ZeroCopy,
    /// As a copy.
    Copy(Reason),
}

impl Plan {
    /// Returns why a copy is made; `None` in place.
    pub const fn reason(self) -> Option<Reason> {
        match self {
            Self::ZeroCopy => None,
            Self::Copy(reason) => Some(reason),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Asked => "asked for",
            Self::PendingConjugation => "a pending conjugation",
            Self::PendingNegation => "a pending negation",
            Self::PendingPacking => "strides that are not a whole number of elements",
            Self::NegativeStrides => "negative strides",
            Self::Strides => "strides that are not compact",
            Self::Order => "another order than the requested one",
            Self::Alignment => "an unaligned address",
            Self::MemoryNotOwned => "memory that it does not own",
            Self::Mutable => "memory that others may write to",
            Self::Moved => "another device",
        })
    }
}

/// Decides how `exported` is converted to the framework with this profile. If `options` name a permutation, the caller
/// has applied it already: see [`Export::permuted`].
///
/// # Errors
///
/// - [`ErrorKind::Argument`]: the target has row-major tensors only, and `options` ask for another order; or its profile
///   states an alignment that is not a power of two, or too large.
/// - [`ErrorKind::Device`]: the target has no device of the tensor's kind, or none of the kind that `options` name.
/// - [`ErrorKind::Dtype`]: the target has no such dtype.
/// - [`ErrorKind::Layout`]: the target's tensors have no such number of dimensions ([`Profile::rank`]).
/// - [`ErrorKind::ReadOnly`]: it is protected ([`Access::ReadOnly`]), the target would make it writable, no copy is made,
///   and the caller does not promise to write nothing ([`Options::with_read_only`]).
/// - [`ErrorKind::CopyNeeded`]: it must be copied or moved, and `copy` is `Some(false)`.
pub fn plan(exported: &Export, target: &Profile, options: &Options) -> Result<Plan> {
    decide(exported, target, options, target.owns_memory)
}

/// Decides as [`plan`]. `not_owned` says that the memory is another owner's, and that the target takes no such memory.
pub(crate) fn decide(exported: &Export, target: &Profile, options: &Options, not_owned: bool) -> Result<Plan> {
    target.check()?;
    let (device, dtype, name) = (exported.device(), exported.dtype(), &target.name);
    let moved = moves_to(device, target, options);
    if let Some(requested) = moved {
        movable(device, requested, target)?;
    } else if landing(device, target, options.requested()).is_none() {
        let (place, advice) = match device.kind {
            DeviceKind::CPU => ("in host memory (cpu)".into(), "move it to a device"),
            _ => (format!("on {device}"), "copy it to the host"),
        };
        let kind = target.devices.iter().find(|kind| MOVED.1.contains(kind));
        let text = format!(
            "the tensor is {place}, which {name} does not have in this process: {advice} with its own framework first"
        );
        let error = Error::new(ErrorKind::Device, text);
        return Err(match kind.filter(|_| MOVED.0.contains(&device.kind)) {
            Some(&DeviceKind::CPU) => error.or_advise(Advice::MoveToHost),
            Some(_) => error.or_advise(Advice::MoveToCuda),
            None => error,
        });
    }
    if !target.dtypes.contains(&dtype) {
        return Err(without_dtype(dtype, target));
    }
    fits_rank(exported.layout().shape().len(), target)?;
    let order = options.order;
    if order == Some(Order::ColumnMajor) && target.strides == Strides::Compact && !one_order(exported.layout()) {
        let error = Error::new(ErrorKind::Argument, format!("{name} has row-major tensors only"));
        return Err(error.advise(Advice::AnyOrder).or_advise(Advice::ReverseDimensions));
    }
    if let Some(requested) = moved {
        if options.copy == Some(false) {
            let text = format!("the tensor is on {device}, not on {requested}");
            return Err(Error::new(ErrorKind::CopyNeeded, text).advise(Advice::AllowMove));
        }
        return Ok(Plan::Copy(Reason::Moved));
    }
    let others = || {
        let changes = !target.takes_mutable && exported.buffer().access() != Access::Immutable && !options.read_only;
        if not_owned { Some(Reason::MemoryNotOwned) } else { changes.then_some(Reason::Mutable) }
    };
    match (options.copy, needed(exported, target, order).or_else(others)) {
        (Some(true), reason) => Ok(Plan::Copy(reason.unwrap_or(Reason::Asked))),
        (_, None) if loses_read_only(exported, target) && !options.read_only => {
            let text = format!("the tensor is read-only, and {name} would let you write to it");
            Err(Error::new(ErrorKind::ReadOnly, text).advise(Advice::Copy).advise(Advice::PromiseReadOnly))
        }
        (_, None) => Ok(Plan::ZeroCopy),
        (None, Some(reason)) => Ok(Plan::Copy(reason)),
        (Some(false), Some(reason)) => {
            // The layout states no strides where it cannot.
            let what = match reason {
                Reason::PendingPacking => String::new(),
                Reason::Alignment => {
                    format!(" ({:#x} is not a multiple of {})", exported.data(), target.alignment_of(dtype))
                }
                _ => format!(" ({})", exported.layout()),
            };
            let text = format!("{name} cannot take the tensor in place because of {reason}{what}");
            Err(Error::new(ErrorKind::CopyNeeded, text).advise(Advice::AllowCopy))
        }
    }
}

/// Returns whether the target would let the user write to a tensor whose memory is protected.
pub(crate) fn loses_read_only(exported: &Export, target: &Profile) -> bool {
    exported.buffer().access() == Access::ReadOnly && !target.keeps_read_only
}

/// Returns the error for a dtype that the target does not accept.
#[cold]
fn without_dtype(dtype: DType, target: &Profile) -> Error {
    let disabled = target.disabled.as_ref().filter(|(dtypes, _)| dtypes.contains(&dtype));
    let other = disabled.map_or("view its bytes as uint8", |(_, enable)| enable);
    let text = match dtype.lanes {
        1 => format!("{} has no dtype {dtype}: cast the tensor, or {other}, first", target.name),
        // No framework casts it.
        _ => format!("{} has no dtype {dtype}: pass .view(torch.uint8), which takes the bytes across", target.name),
    };
    Error::new(ErrorKind::Dtype, text)
}

/// Refuses a number of dimensions that the target's tensors cannot have.
pub(crate) fn fits_rank(ndim: usize, target: &Profile) -> Result<()> {
    let (name, rank) = (&target.name, &target.rank);
    if rank.contains(&ndim) {
        return Ok(());
    }
    let taken = match (*rank.start(), *rank.end()) {
        (1, 1) => "1 dimension".into(),
        (least, most) if least == most => format!("{least} dimensions"),
        (least, most) => format!("{least} to {most} dimensions"),
    };
    let plural = if ndim == 1 { "" } else { "s" };
    let text = format!(
        "the tensor has {ndim} dimension{plural}, and {name} takes {taken}: reshape it with its own framework first"
    );
    Err(Error::new(ErrorKind::Layout, text))
}

/// Returns the device that the caller asks for, where the target cannot use memory of `device` as memory of that one.
pub(crate) fn moves_to(device: Device, target: &Profile, options: &Options) -> Option<Device> {
    options.requested().filter(|requested| *requested != device && landing(device, target, Some(*requested)).is_none())
}

/// Kinds of memory that tensors are moved from, and those that they are moved to.
const MOVED: (&[DeviceKind], &[DeviceKind]) = (
    &[DeviceKind::CPU, DeviceKind::CUDA, DeviceKind::CUDA_HOST, DeviceKind::CUDA_MANAGED],
    &[DeviceKind::CPU, DeviceKind::CUDA],
);

/// Returns whether tensors are moved from this memory to that.
pub(crate) fn moved_between(from: Device, to: Device) -> bool {
    MOVED.0.contains(&from.kind) && MOVED.1.contains(&to.kind)
}

/// Refuses a move that cannot be made.
fn movable(device: Device, requested: Device, target: &Profile) -> Result<()> {
    let text = if !target.devices.contains(&requested.kind) {
        let devices: Vec<_> = target.devices.iter().map(DeviceKind::to_string).collect();
        let (name, devices) = (&target.name, devices.join(" and "));
        let text =
            format!("the tensor is on {device}, not on {requested}, and {name} has only {devices} in this process");
        return Err(Error::new(ErrorKind::Device, text).advise(Advice::OtherDevice));
    } else if !moved_between(device, requested) {
        format!(
            "the tensor is on {device}, not on {requested}, and cannot be moved between them: move it with its own framework first"
        )
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Device, text))
}

/// Kinds of memory, and another kind of device that can use them. A GPU uses managed memory as its own, and the host
/// reads pinned and managed memory (CUDA driver API, "Unified Addressing").
const ALSO: &[(DeviceKind, DeviceKind)] = &[
    (DeviceKind::CUDA_MANAGED, DeviceKind::CUDA),
    (DeviceKind::CUDA_MANAGED, DeviceKind::CPU),
    (DeviceKind::CUDA_HOST, DeviceKind::CPU),
];

/// Returns the devices that can use memory of `device`, itself first.
pub(crate) fn usable(device: Device) -> impl Iterator<Item = Device> {
    let also = ALSO.iter().filter(move |(kind, _)| *kind == device.kind).map(move |(_, kind)| match *kind {
        DeviceKind::CPU => Device::CPU,
        kind => Device { kind, ..device },
    });
    [device].into_iter().chain(also)
}

/// Returns the device under which the target uses memory of `device`, if it can and the caller requests no other.
pub(crate) fn landing(device: Device, target: &Profile, requested: Option<Device>) -> Option<Device> {
    let mut usable = usable(device).filter(|device| target.devices.contains(&device.kind));
    usable.find(|device| requested.is_none_or(|requested| requested == *device))
}

/// Whether both orders are the same for this shape.
fn one_order(layout: &Layout) -> bool {
    layout.numel() == 0 || layout.shape().iter().filter(|length| **length > 1).count() < 2
}

/// Returns the first reason why the target cannot take the tensor in place, in this order.
pub(crate) fn needed(exported: &Export, target: &Profile, order: Option<Order>) -> Option<Reason> {
    let layout = exported.layout();
    if let Some(pending) = exported.pending() {
        return Some(match pending {
            Pending::Conjugation | Pending::NegatedConjugation => Reason::PendingConjugation,
            Pending::Negation => Reason::PendingNegation,
            Pending::Packing => Reason::PendingPacking,
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
    if order.is_some_and(|order| !layout.follows(order)) && !is_planted("core_order_ignored") {
        return Some(Reason::Order);
    }
    let aligned = exported.data().is_multiple_of(target.alignment_of(exported.dtype()));
    (!aligned).then_some(Reason::Alignment)
}
