//! The DLPack codec, over [`dlpark`]: imports managed tensors, versioned and legacy, and exports them.
//!
//! The rules are those of `dlpack.h` 1.3. A managed tensor that breaks one is refused with [`ErrorKind::Protocol`], and
//! its deleter is called. [`DLPack`] is the adapter over it.

mod adapter;

use crate::planted::is_planted;
use crate::sync::Mutex;
use crate::{
    Access, Allocation, DType, Device, DeviceKind, Error, ErrorKind, Export, Keep, Layout, Lease, MAX_NDIM, Memory,
    Order, Result, Reuse, Stream,
};
pub use adapter::{DLPack, Tensor};
pub use dlpark::DlpackFlags;
pub use dlpark::ffi;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::metadata::{Dynamic, PreparedDynamic};
pub use dlpark::{Managed, ManagedTensorBase, legacy, versioned};
use dlpark::{OpaqueContext, TensorRef};
use std::ops::Range;
use std::slice;
use std::sync::{Arc, PoisonError};

impl From<DLDataType> for DType {
    fn from(dtype: DLDataType) -> Self {
        DType { code: dtype.code.0, bits: dtype.bits, lanes: dtype.lanes }
    }
}

impl From<DType> for DLDataType {
    fn from(dtype: DType) -> Self {
        DLDataType { code: DLDataTypeCode(dtype.code), bits: dtype.bits, lanes: dtype.lanes }
    }
}

impl From<DLDevice> for Device {
    fn from(device: DLDevice) -> Self {
        // The codes of dlpack.h are small and positive; bindgen chose an unsigned type for the C enum.
        Device::numbered(DeviceKind(device.device_type.0 as i32), device.device_id)
    }
}

impl From<Device> for DLDevice {
    fn from(device: Device) -> Self {
        DLDevice { device_type: DLDeviceType(device.kind.0 as u32), device_id: device.index }
    }
}

/// What a managed tensor does not say about its memory.
#[non_exhaustive]
pub struct Origin {
    /// The device, where it is not the one that the tensor names: DLPack writes ordinal 0 for all pinned and managed
    /// memory.
    pub device: Option<Device>,
    /// As [`DeviceBuffer::stream`](crate::DeviceBuffer::stream).
    pub stream: Option<Stream>,
    /// As [`DeviceBuffer::reuse`](crate::DeviceBuffer::reuse).
    pub reuse: Reuse,
    /// Addresses of an allocation that must hold the view, where the caller knows it.
    pub allocation: Option<Range<usize>>,
    /// A value that must live as long as the memory is exported.
    pub keep: Option<Keep>,
    /// Custom destructor for producers whose deleter must not run on every thread at every time. It may leak, for
    /// example during interpreter shutdown.
    pub release: Option<Release>,
}

crate::debug_fields!(impl[] Origin: device, stream, reuse, allocation);

impl Origin {
    /// Returns the origin of memory whose producer writes in `stream`. [`Reuse::Unknown`] is always right.
    pub const fn new(stream: Option<Stream>, reuse: Reuse) -> Self {
        Self { device: None, stream, reuse, allocation: None, keep: None, release: None }
    }

    /// Returns the origin of host memory, which is ready at any time.
    pub const fn host() -> Self {
        Self::new(None, Reuse::InStreamOrder)
    }

    /// Returns the same origin on this [`device`](Self::device).
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        Self { device: Some(device), ..self }
    }

    /// Returns the same origin within this [`allocation`](Self::allocation).
    #[must_use]
    pub fn within(self, allocation: Option<Range<usize>>) -> Self {
        Self { allocation, ..self }
    }

    /// Returns the same origin with a value to [`keep`](Self::keep).
    #[must_use]
    pub fn keeping(self, keep: Option<Keep>) -> Self {
        Self { keep, ..self }
    }

    /// Returns the same origin with this [`release`](Self::release).
    #[must_use]
    pub fn released_by(self, release: Option<Release>) -> Self {
        Self { release, ..self }
    }
}

/// Drops an owner, or leaks it.
pub type Release = fn(Box<dyn Send + Sync>);

/// An owner with a custom destructor.
struct CustomDrop {
    owner: Option<Box<dyn Send + Sync>>,
    release: Release,
}

impl Drop for CustomDrop {
    fn drop(&mut self) {
        self.owner.take().into_iter().for_each(self.release);
    }
}

fn broken(text: String) -> Error {
    Error::new(ErrorKind::Protocol, format!("the DLPack tensor is malformed: {text}"))
}

/// Takes a raw managed tensor into ownership.
///
/// # Errors
///
/// [`ErrorKind::Protocol`] for a null pointer, [`ErrorKind::Version`] for a major version other than 1, after the
/// deleter has been called.
///
/// # Safety
///
/// As for [`Managed::from_raw`]: `managed` is null, or an initialised managed tensor of exactly this ABI that the
/// caller owns and whose deleter may be called on any thread.
pub unsafe fn adopt<M: ManagedTensorBase>(managed: *mut M) -> Result<Managed<M>> {
    // SAFETY: the caller's obligation is the same.
    unsafe { Managed::from_raw(managed) }.map_err(|error| match error {
        dlpark::dlpack::FromRawError::Version { source } => {
            let text = format!("{source}: ask the producer for max_version=(1, 0)");
            Error::new(ErrorKind::Version, text).caused_by(source)
        }
        other => broken(other.to_string()).caused_by(other),
    })
}

/// Exports a managed tensor. `origin` receives the tensor's device and the address of its first element (0 for a tensor
/// without elements), and returns what the tensor does not say. The access of an unversioned tensor is
/// [`Access::Unstated`].
///
/// # Errors
///
/// The deleter has been called in every case.
///
/// [`ErrorKind::Protocol`] and [`ErrorKind::Layout`] for what breaks DLPack's rules or arithmetic,
/// [`ErrorKind::Dtype`] for vectors (lanes ≠ 1, but for packed float4) and elements that are not whole bytes.
///
/// # Safety
///
/// The producer keeps DLPack's promises for this tensor, and `origin` returns the truth: the caller guarantees the
/// stream, the reuse and the allocation as the safety section of [`DeviceBuffer`](crate::DeviceBuffer) demands.
pub unsafe fn export<M: ManagedTensorBase>(
    managed: Managed<M>,
    origin: impl FnOnce(Device, usize) -> Result<Origin>,
) -> Result<Export> {
    // SAFETY: the handle owns the tensor, and no other code changes it.
    let tensor = unsafe { managed.tensor() };
    if tensor.strides.is_null() {
        // It depends on the version whether they may be left out.
        readable(tensor)?;
        managed.validate().map_err(|error| broken(error.to_string()).caused_by(error))?;
    }
    // SAFETY: as above.
    let access = match unsafe { &*managed.as_ptr() }.version() {
        // DLPack has no flag for it before version 1.0.
        None => Access::Unstated,
        Some(_) if managed.flags().contains(DlpackFlags::READ_ONLY) && !is_planted("dlpack_flags_ignored") => {
            Access::ReadOnly
        }
        Some(_) => Access::ReadWrite,
    };
    // SAFETY: as above, and the producer guarantees the shape and the strides.
    let described = unsafe { Described::of(tensor, access, |device, data| Ok((origin(device, data)?, ()))) };
    if described.is_err() && is_planted("dlpack_refused_leaked") {
        std::mem::forget(managed);
        return described.and_then(|_| Err(broken(String::new())));
    }
    let (Described { data, dtype, layout, allocation, keep, release }, ()) = described?;
    let owner = (managed.into_deleter(), keep);
    match release {
        // SAFETY: the producer guarantees memory, access and deleter through DLPack's contract, the caller for the
        // stream, the reuse and the allocation; the range was checked above. Here and below.
        None => Export::at(data, dtype, layout, unsafe { Memory::new(allocation, owner) }),
        Some(release) => {
            let owner = CustomDrop { owner: Some(Box::new(owner)), release };
            // SAFETY: see above.
            Export::at(data, dtype, layout, unsafe { Memory::new(allocation, owner) })
        }
    }
}

/// What a tensor of DLPack says, without an owner.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct View {
    /// The address of the first element.
    pub data: usize,
    /// The element type.
    pub dtype: DType,
    /// Shape and strides. The offset is 0.
    pub layout: Layout,
    /// The device that the memory is on, as the producer states it.
    pub device: Device,
}

impl View {
    /// Reads a tensor, whose data pointer may be null.
    ///
    /// # Safety
    ///
    /// The shape and the strides of `tensor` stay readable during the call.
    #[inline]
    unsafe fn of(tensor: &ffi::DLTensor) -> Result<Self> {
        // SAFETY: the caller's obligation, here and below.
        let view = unsafe { dims(tensor) }.and_then(|(shape, strides)| {
            let (dtype, device) = (DType::from(tensor.dtype), Device::from(tensor.device));
            let columns = strides.is_none() && is_planted("dlpack_columns_assumed");
            let columns = columns.then(|| Order::ColumnMajor.strides(shape));
            let layout = Layout::new(dtype, shape, columns.as_deref().or(strides), 0).ok()?;
            // DLPack counts bits.
            layout.nbytes().checked_mul(8)?;
            let offset =
                if is_planted("dlpack_offset_ignored") { 0 } else { usize::try_from(tensor.byte_offset).ok()? };
            let data = tensor.data.expose_provenance().checked_add(offset)?;
            (dtype.is_element() && device.index >= 0).then_some(Self { data, dtype, layout, device })
        });
        // SAFETY: see above.
        view.ok_or_else(|| unsafe { refusal(tensor) })
    }
}

/// Returns the shape, and the strides where they are stated, if the tensor has dimensions that can be read.
///
/// # Safety
///
/// As for [`View::of`], for a lifetime that ends before that of `tensor`.
#[inline]
unsafe fn dims(tensor: &ffi::DLTensor) -> Option<(&[i64], Option<&[i64]>)> {
    let ndim = usize::try_from(tensor.ndim).ok().filter(|ndim| *ndim <= MAX_NDIM)?;
    if !tensor.shape.is_aligned() || !tensor.strides.is_aligned() || (ndim > 0 && tensor.shape.is_null()) {
        return None;
    }
    // SAFETY: the pointer is aligned and not null, and the caller guarantees what it points to.
    let dims = |start: *const i64| unsafe { slice::from_raw_parts(start, ndim) };
    match ndim {
        0 => Some((&[], None)),
        _ => Some((dims(tensor.shape), (!tensor.strides.is_null()).then(|| dims(tensor.strides)))),
    }
}

/// Returns why a tensor is not read.
///
/// # Safety
///
/// As for [`View::of`].
#[cold]
unsafe fn refusal(tensor: &ffi::DLTensor) -> Error {
    let check = || {
        readable(tensor)?;
        // SAFETY: the caller's obligation.
        let known = unsafe { TensorRef::from_raw(tensor) };
        let known = known.map_err(|error| broken(error.to_string()).caused_by(error))?;
        let (dtype, device) = (DType::from(tensor.dtype), Device::from(tensor.device));
        if !dtype.is_element() {
            let text =
                format!("vector elements (lanes = {}) have no counterpart: view the tensor as scalars", dtype.lanes);
            return Err(Error::new(ErrorKind::Dtype, text));
        }
        if device.index < 0 {
            return Err(broken(format!("device number {} is negative", device.index)));
        }
        Layout::new(dtype, known.shape(), known.strides(), 0).map(drop)
    };
    let offset = || broken(format!("byte_offset {} overflows the address", tensor.byte_offset));
    check().map_or_else(|error| error, |()| offset())
}

/// Reads a tensor that the producer keeps.
///
/// # Errors
///
/// Those of [`export`] for the tensor itself.
///
/// # Safety
///
/// The shape and the strides of `tensor` stay readable during the call.
#[inline]
pub unsafe fn read(tensor: &ffi::DLTensor) -> Result<View> {
    // SAFETY: the caller guarantees the shape and the strides.
    let view = unsafe { View::of(tensor) }?;
    if view.layout.numel() > 0 && tensor.data.is_null() {
        return Err(broken("the data pointer is null".into()));
    }
    Ok(view)
}

/// Returns whether a tensor that the producer keeps is what was exported: the same memory, shape, strides and dtype.
/// What is malformed is not.
///
/// # Safety
///
/// That of [`read`].
pub unsafe fn describes(tensor: &ffi::DLTensor, exported: &Export) -> bool {
    // SAFETY: the caller guarantees the shape and the strides.
    let Some((shape, strides)) = (unsafe { dims(tensor) }) else { return false };
    let data = (tensor.data.addr() as u64).checked_add(tensor.byte_offset);
    let layout = exported.layout();
    data == Some(exported.data() as u64)
        && shape == layout.shape()
        // A tensor without dimensions has none.
        && strides.unwrap_or_default() == layout.strides()
        && (DType::from(tensor.dtype), Device::from(tensor.device)) == (exported.dtype(), exported.device())
}

/// Exports a tensor that its producer describes without giving up ownership, as `dltensor_from_py_object_no_sync` of
/// the exchange API does. `origin` is as for [`export`], and also returns the value that keeps the memory.
/// [`Origin::release`] is not called: that value knows itself how to be dropped.
///
/// # Errors
///
/// Those of [`export`].
///
/// # Safety
///
/// As for [`export`]; the shape and the strides of `tensor` stay readable during the call, and the memory lives as long
/// as the value that `origin` returns.
pub unsafe fn export_borrowed<O: Send + Sync + 'static>(
    tensor: &ffi::DLTensor,
    access: Access,
    origin: impl FnOnce(Device, usize) -> Result<(Origin, O)>,
) -> Result<Export> {
    // SAFETY: the caller guarantees the shape and the strides.
    let (described, owner) = unsafe { Described::of(tensor, access, origin) }?;
    let Described { data, dtype, layout, allocation, keep, .. } = described;
    // SAFETY: as in `export`, with the owner that the caller guarantees.
    let memory = unsafe { Memory::new(allocation, (owner, keep)) };
    Export::at(data, dtype, layout, memory)
}

/// Refuses a tensor whose shape and strides cannot be read.
fn readable(raw: &ffi::DLTensor) -> Result<()> {
    if !(raw.shape.is_aligned() && raw.strides.is_aligned()) {
        return Err(broken("the shape or the strides are not aligned".into()));
    }
    if usize::try_from(raw.ndim).is_ok_and(|ndim| ndim > MAX_NDIM) {
        // Before the shape is read: a wild ndim means a wild shape.
        return Err(broken(format!("{} dimensions are more than {MAX_NDIM}", raw.ndim)));
    }
    Ok(())
}

/// A tensor that was checked, with its origin.
struct Described {
    /// Address of the first element.
    data: usize,
    dtype: DType,
    layout: Layout,
    allocation: Allocation,
    keep: Option<Keep>,
    release: Option<Release>,
}

impl Described {
    /// # Safety
    ///
    /// As for [`View::of`].
    unsafe fn of<T>(
        tensor: &ffi::DLTensor,
        access: Access,
        origin: impl FnOnce(Device, usize) -> Result<(Origin, T)>,
    ) -> Result<(Self, T)> {
        // SAFETY: the caller's obligation.
        let View { data, dtype, layout, device: stated } = unsafe { View::of(tensor) }?;
        let (origin, rest) = origin(stated, if layout.numel() == 0 { 0 } else { data })?;
        if layout.numel() > 0 && tensor.data.is_null() {
            return Err(broken("the data pointer is null".into()));
        }
        let bytes = layout.extent_at(data, None);
        let mut bytes = bytes.map_err(|error| broken("the view leaves the address space".into()).caused_by(error))?;
        if origin.allocation.is_some() {
            bytes = layout.extent_at(data, origin.allocation.as_ref())?;
        }
        let device = origin.device.unwrap_or(stated);
        let allocation = Allocation::new(bytes, device, access, origin.stream, origin.reuse);
        Ok((Self { data, dtype, layout, allocation, keep: origin.keep, release: origin.release }, rest))
    }
}

/// A second hold on the lease inside a managed tensor, to reclaim it if the consumer fails without saying whether it
/// has taken the tensor.
#[derive(Debug)]
pub struct Handover(Arc<Held>);

/// A lease inside a managed tensor, and how the tensor's deleter drops it.
#[derive(Debug)]
struct Held {
    lease: Mutex<Option<Lease>>,
    release: fn(Lease),
}

impl Held {
    fn take(&self) -> Option<Lease> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.take().into_iter().for_each(self.release);
    }
}

impl Handover {
    /// Drops the lease if the consumer has not. The managed tensor's deleter, if it is still called, does nothing.
    ///
    /// # Safety
    ///
    /// No code uses the memory of the managed tensor from now on: its consumer has failed.
    pub unsafe fn reclaim(self) {
        drop(self.0.take());
    }
}

/// Wraps a lease as a managed tensor, whose deleter drops the lease. Strides are always present, as DLPack 1.2 demands,
/// and the byte offset is folded into the address, because several frameworks ignore it.
pub fn wrap(lease: Lease) -> (versioned::Dlpack, Handover) {
    // SAFETY: a versioned tensor says that it must not be written to.
    unsafe { wrap_as(lease, drop) }
}

/// As [`wrap`], as a managed tensor of any kind, and with the function that drops the lease, on any thread. It lets no
/// panic out.
///
/// # Safety
///
/// A managed tensor without a version cannot say that its memory must not be written to: no consumer does so.
pub unsafe fn wrap_as<M: ManagedTensorBase>(lease: Lease, release: fn(Lease)) -> (Managed<M>, Handover) {
    let (dtype, device, data) = (lease.dtype(), lease.device(), lease.data());
    let prepared = prepare(lease.layout());
    let mut flags = DlpackFlags::empty();
    flags.set(DlpackFlags::READ_ONLY, lease.access().forbids_writes());
    flags.set(DlpackFlags::IS_COPIED, lease.is_copy());
    let lease = Arc::new(Held { lease: Mutex::new(Some(lease)), release });
    // SAFETY: dtype, layout and address are those of the lease, which the context keeps alive until the deleter.
    // IS_COPIED is set only where the memory was copied for this lease and no other.
    (unsafe { managed(prepared, dtype, device, data, flags, Arc::clone(&lease)) }, Handover(lease))
}

/// Describes memory that is known by other means as a managed tensor, so that [`export`] checks it as one. `data` is
/// the address of the first element.
///
/// # Safety
///
/// The producer keeps DLPack's promises for this tensor, and `owner` keeps the memory alive.
pub unsafe fn describe(
    dtype: DType,
    layout: &Layout,
    device: Device,
    data: usize,
    read_only: bool,
    owner: Keep,
) -> versioned::Dlpack {
    // SAFETY: the caller's obligation.
    unsafe { describe_as(dtype, layout, device, data, read_only, owner) }
}

/// As [`describe`], in either ABI. An unversioned tensor cannot say that it is read-only.
///
/// # Safety
///
/// As for [`describe`].
pub unsafe fn describe_as<M: ManagedTensorBase>(
    dtype: DType,
    layout: &Layout,
    device: Device,
    data: usize,
    read_only: bool,
    owner: Keep,
) -> Managed<M> {
    let flags = if read_only { DlpackFlags::READ_ONLY } else { DlpackFlags::empty() };
    // SAFETY: the caller's obligation.
    unsafe { managed(prepare(layout), dtype, device, data, flags, Arc::new(owner)) }
}

/// Makes the memory of a managed tensor, with a copy of the shape and the strides.
fn prepare<M: ManagedTensorBase>(layout: &Layout) -> PreparedDynamic<M> {
    let prepared = Dynamic::new(layout.shape(), layout.strides()).prepare_as::<M>();
    prepared.expect("core's layouts have at most MAX_NDIM dimensions, all in range")
}

/// Makes a managed tensor.
///
/// # Safety
///
/// All arguments describe the same tensor, which `context` keeps alive.
unsafe fn managed<M: ManagedTensorBase>(
    prepared: PreparedDynamic<M>,
    dtype: DType,
    device: Device,
    data: usize,
    flags: DlpackFlags,
    context: impl OpaqueContext,
) -> Managed<M> {
    let mut initialized = prepared.initialize(context);
    initialized.set_data(data as *mut _).set_device(device.into()).set_dtype(dtype.into());
    // SAFETY: the caller's obligation.
    unsafe {
        initialized.set_flags_unchecked(flags);
        initialized.finish()
    }
}
