//! Fresh memory for copies: a framework's, or ours for a framework whose memory cannot be written from outside.

use crate::conversion::Conversion;
use crate::ordering;
use crate::{
    Access, Adapter, Advice, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout, Order, Ordering,
    Profile, Result, Stream, host,
};
use std::sync::Arc;

/// Kinds of errors after which no other memory is tried: something failed, and the user has to know what.
const FAILED: [ErrorKind; 3] = [ErrorKind::Framework, ErrorKind::Driver, ErrorKind::OutOfMemory];

impl<F, T> Conversion<'_, F, T> {
    /// Returns fresh memory of `side` on `device` for the elements of `exported`, and its export; `None` where it has
    /// none.
    pub(crate) fn fresh_of<X>(
        &self,
        side: &dyn Adapter<Tensor = X>,
        device: Device,
        exported: &Export,
    ) -> Result<Option<(X, Export)>> {
        // SAFETY: the caller of this function copies all elements, or drops it.
        let fresh = match unsafe { side.empty(device, exported.dtype(), exported.layout().shape(), self.order()) } {
            Err(error) if error.kind() == ErrorKind::CopyNeeded => return Ok(None),
            fresh => fresh?,
        };
        let target = match side.export(&fresh) {
            Ok(target) => target,
            Err(error) if FAILED.contains(&error.kind()) => return Err(error),
            // A mode of the framework may replace every new tensor, as PyTorch's FakeTensorMode does.
            Err(_) => return Ok(None),
        };
        let as_asked = is_as_asked(&target, device, (exported.dtype(), exported.layout().shape()), self.order());
        Ok((as_asked && self.fits(&target)).then_some((fresh, target)))
    }
}

/// Returns whether what [`Adapter::empty`] has made can be filled with elements as they were asked for.
pub(crate) fn is_as_asked(target: &Export, device: Device, (dtype, shape): (DType, &[i64]), order: Order) -> bool {
    let writable = target.buffer().access() == Access::ReadWrite && target.pending().is_none();
    let same = (target.device(), target.dtype(), target.layout().shape()) == (device, dtype, shape);
    writable && same && target.layout().follows(order)
}

/// Tells the ordering's copies, if it has any, that a copy is about to fill a fresh target for the first time.
pub(crate) fn prepare(target: &Export, ordering: &Arc<dyn Ordering>) {
    if target.device().kind == DeviceKind::CPU
        && let Some(copies) = ordering.copies()
    {
        copies.prepare(target.data()..target.data() + target.layout().nbytes());
    }
}

/// Returns fresh memory on `device` for a consumer whose own cannot be written from outside: of core on the host, and
/// of the ordering's [`Copies`](crate::Copies) on a device. It is compact in this order.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`], those of [`Copies::allocate`](crate::Copies::allocate), and [`ErrorKind::CopyNeeded`]
/// for a device without copies of the ordering, and where its memory is less aligned than the consumer wants it.
pub(crate) fn fresh_beside(
    (profile, consumer): (&Profile, &Arc<dyn Consumer>),
    ordering: &Arc<dyn Ordering>,
    device: Device,
    (dtype, shape): (DType, &[i64]),
    order: Order,
) -> Result<Export> {
    let layout = Layout::new(dtype, shape, Some(&order.strides(shape)), 0)?;
    profile.check()?;
    let alignment = profile.alignment_of(dtype);
    if device.kind == DeviceKind::CPU {
        return host::empty(dtype, shape, order, alignment);
    }
    let copies = ordering.copies().ok_or_else(|| {
        let text = format!("neither {} nor the ordering can allocate writable memory on {device}", profile.name);
        Error::new(ErrorKind::CopyNeeded, text).advise(Advice::Copies)
    })?;
    let stream = consumer.current_stream(device)?.unwrap_or(Stream::LEGACY);
    let buffer = ordering::allocate(copies, device, layout.nbytes(), stream, consumer.keep(device, stream))?;
    let exported = Export::new(dtype, layout, buffer)?;
    if exported.layout().numel() > 0 && !exported.data().is_multiple_of(alignment) {
        let text = format!(
            "{} needs memory aligned to {alignment} bytes, and that on {device} is not: copy the tensor into aligned memory",
            profile.name
        );
        return Err(Error::new(ErrorKind::CopyNeeded, text));
    }
    Ok(exported)
}
