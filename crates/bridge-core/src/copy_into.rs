//! Copies of a tensor of one framework into a tensor of another that exists.

use crate::conversion::used;
use crate::copies::no_cast;
use crate::host_copy::fill_or_copy_by_loop;
use crate::moved::{move_into, no_moves};
use crate::overlap::{repeats, share_bytes};
use crate::plan::{moved_between, usable};
use crate::{
    Access, Adapter, Advice, Cast, Consumer, CopiedBy, Device, DeviceKind, Error, ErrorKind, Export, Lease, Ordering,
    Pair, Pending, Result, Stream,
};
use std::sync::Arc;

/// Copies `tensor` into `out`, a tensor of `to` or a view of a part of one, in the current stream of `to`. That stream
/// waits for the owner of `tensor` first, and the owner waits for that stream before it reuses its memory.
///
/// `tensor` is broadcast to the shape of `out`, as in `numpy.copyto`: dimensions of length 1 and those that it lacks at
/// the front are repeated, and those of length 1 that `out` lacks at the front are dropped. The ordering's
/// [`Copies`](crate::Copies) copy the elements; where it has none, core copies host memory. Where `out` is in another memory, those copies move the elements there. A tensor that must be packed
/// first ([`Pending::Packing`]), or whose deferred operation flips no bits, is copied by [`Adapter::compact`]. Returns the owner's stream and the one that waits for
/// it, where they differ.
///
/// # Errors
///
/// Before anything is launched:
///
/// - those of [`Adapter::export`] for either side, of [`Adapter::compact`], and of [`Adapter::overwritten`];
/// - [`ErrorKind::ReadOnly`]: `out` is read-only, or its framework does not allow others to write to its tensors;
/// - [`ErrorKind::Dtype`]: the dtypes differ;
/// - [`ErrorKind::Layout`]: `tensor` does not broadcast to the shape of `out`, the two share bytes, `out` may have two
///   elements at one address, or its strides are not a whole number of elements;
/// - [`ErrorKind::Device`]: the two are in memories between which nothing is moved;
/// - [`ErrorKind::CopyNeeded`]: the memory is that of a device, and `ordering` has no copies, or none for these two;
/// - those of [`Ordering::order`].
///
/// After that those of [`Copies::copy`](crate::Copies::copy), whose text says that `out` is undefined.
pub fn copy_into<F, T>(
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    out: &T,
    ordering: &Arc<dyn Ordering>,
) -> Result<Option<(Stream, Stream)>> {
    let pair = Pair { from, tensor, to, out, dtype: None };
    let Sides { source, target, device, .. } = Sides::export(&pair, ordering)?;
    // Before anything is launched: a panic would return the memory under the copy.
    let consumer = to.consumer();
    let Some(device) = device else {
        to.overwritten(out)?;
        used(&source, || from.consumer());
        used(&target, || to.consumer());
        let (ordered, target) = move_into(source, target, from.consumer(), ordering)?;
        release(target, consumer, ordering);
        return Ok(ordered);
    };
    apart(&source, &target)?;
    to.overwritten(out)?;
    used(&source, || from.consumer());
    used(&target, || to.consumer());
    let filled = fill_or_copy_by_loop(source, &target, Arc::clone(&consumer), ordering);
    release(target, consumer, ordering);
    filled?.map_err(|source| {
        let itemsize = source.layout().itemsize();
        uncopied(itemsize, device, ordering)
    })
}

/// Both sides of a copy.
pub(crate) struct Sides {
    /// The source, broadcast.
    pub(crate) source: Export,
    pub(crate) target: Export,
    /// The device on which both are seen; `None` where the elements are moved.
    pub(crate) device: Option<Device>,
    /// Whether the source is a compact copy of the tensor, which was made for this.
    pub(crate) is_packed: bool,
    /// How the elements are cast, if they are.
    pub(crate) cast: Option<Cast>,
}

impl Sides {
    /// Exports both sides and checks everything about the pair but whether the two share bytes.
    pub(crate) fn export<F, T>(pair: &Pair<'_, F, T>, ordering: &Arc<dyn Ordering>) -> Result<Self> {
        let Pair { from, tensor, to, out, dtype } = *pair;
        let target = to.export(out).map_err(Error::of_target)?;
        let source = from.export(tensor).map_err(|error| error.instead(Advice::Detach, Advice::DetachFirst))?;
        let cast = Cast::between(source.dtype(), target.dtype(), dtype)?;
        if let Some(cast) = cast {
            ordering.copies().map_or_else(|| no_cast(cast), |copies| copies.casts(cast))?;
        }
        // The framework does what flipping bits does not.
        let is_packed = source.pending().is_some_and(|pending| pending.flips(source.dtype()).is_none());
        let source = if is_packed { packed(from, tensor, &source)? } else { source };
        let source = source.broadcast_to(target.layout().shape())?;
        let Some(device) = shared(source.device(), target.device()) else {
            movable(source.device(), target.device(), ordering)?;
            writable(&target)?;
            return Ok(Self { source, target, device: None, is_packed, cast });
        };
        let (source, target) = (source.seen_on(device), target.seen_on(device));
        if target.buffer().access() == Access::Immutable {
            // The framework says why its tensors do not change.
            to.overwritten(out)?;
        }
        writable(&target)?;
        Ok(Self { source, target, device: Some(device), is_packed, cast })
    }
}

/// Returns a compact copy of a tensor that was exported, by its framework.
fn packed<F>(from: &dyn Adapter<Tensor = F>, tensor: &F, exported: &Export) -> Result<Export> {
    used(exported, || from.consumer());
    from.export(&from.compact(tensor)?)
}

/// Returns the error for elements that nothing copies on a device.
pub(crate) fn uncopied(itemsize: usize, device: Device, ordering: &Arc<dyn Ordering>) -> Error {
    let text = format!(
        "cannot copy elements of {itemsize} bytes on {device} here: convert the tensor and assign it with the framework of the target"
    );
    let error = Error::new(ErrorKind::CopyNeeded, text);
    if ordering.copies().is_none() { error.or_advise(Advice::Copies) } else { error }
}

/// Returns who makes the copy that [`copy_into`] makes of a tensor on `source` into one on `target`.
///
/// ```
/// use bridge_core::{CopiedBy, Device, DeviceKind, copied_into_by};
///
/// let managed = Device { kind: DeviceKind::CUDA_MANAGED, index: 0 };
/// assert_eq!(copied_into_by(Device::CPU, Device::cuda(0)), CopiedBy::Move);
/// assert_eq!(copied_into_by(Device::cuda(0), managed), CopiedBy::Kernels);
/// assert_eq!(copied_into_by(managed, Device::CPU), CopiedBy::Host);
/// let npu = Device { kind: DeviceKind(12), index: 0 };
/// assert_eq!(copied_into_by(npu, npu), CopiedBy::Kernels);
/// // There is one host, whatever its number.
/// assert_eq!(copied_into_by(Device { kind: DeviceKind::CPU, index: 1 }, Device::CPU), CopiedBy::Host);
/// ```
pub fn copied_into_by(source: Device, target: Device) -> CopiedBy {
    shared(source, target).map_or(CopiedBy::Move, CopiedBy::filling)
}

/// Returns the target after the copy: a lease keeps memory of unknown reuse until that has run.
pub(crate) fn release(target: Export, consumer: Arc<dyn Consumer>, ordering: &Arc<dyn Ordering>) {
    let stream = target.buffer().stream();
    drop(Lease::new(target, stream, false, consumer, Arc::clone(ordering)));
}

/// Returns the device as which both memories can be used, if there is one. There is one host, whatever its number. A
/// device that is neither the host nor CUDA's is known only to its ordering, and shares memory with no other.
fn shared(source: Device, target: Device) -> Option<Device> {
    let plain = |device: &Device| [DeviceKind::CPU, DeviceKind::CUDA].contains(&device.kind);
    let (source, target) = (source.of_one_host(), target.of_one_host());
    let both = usable(target).filter(plain).find(|device| usable(source).any(|other| other == *device));
    both.or((source == target).then_some(target))
}

/// Refuses memories between which nothing is moved.
fn movable(source: Device, target: Device, ordering: &Arc<dyn Ordering>) -> Result<()> {
    if !moved_between(source, target) {
        let text =
            format!("the tensor is on {source} and the target on {target}: move one with its own framework first");
        return Err(Error::new(ErrorKind::Device, text));
    }
    let copies = ordering.copies().ok_or_else(|| no_moves(source, target))?;
    copies.reaches(source).and_then(|()| copies.reaches(target))
}

/// Refuses a target that must not be written to.
fn writable(target: &Export) -> Result<()> {
    if target.buffer().access().forbids_writes() {
        return Err(Error::new(ErrorKind::ReadOnly, "the target is read-only: pass a writable one"));
    }
    if target.pending() == Some(Pending::Packing) {
        let text = "the strides of the target are not a whole number of elements: copy into a compact tensor, and assign it with the framework of the target, as in records[name][...] = copy";
        return Err(Error::new(ErrorKind::Layout, text));
    }
    if repeats(target.layout()) {
        let text = format!(
            "the target may have two elements at one address ({}): pass one without repeated or overlapping elements",
            target.layout()
        );
        return Err(Error::new(ErrorKind::Layout, text));
    }
    Ok(())
}

/// Refuses a source and a target that share bytes.
fn apart(source: &Export, target: &Export) -> Result<()> {
    if share_bytes(source, target) {
        return Err(Error::new(ErrorKind::Layout, "the tensor and the target share memory").advise(Advice::CopyFirst));
    }
    Ok(())
}
