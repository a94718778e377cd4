//! Managed tensors of DLPack for a consumer without Python: planned, transferred, and copied into one that exists.

use crate::on_device::{in_streams, stream_on};
use crate::pointers::{borrow, non_null, right_size, sized, slice, text, write};
use crate::reader::{Reader, managed, uncopied};
use crate::status::{Status, answer, refused};
use crate::tensor::{CDType, CDevice, CTensor, Caller};
use bridge_core::{
    Adapter, CopiedBy, DType, Device, DeviceKind, Lease, MAX_NDIM, Options, Order, Ordering, Permutation, Plan,
    Profile, Reason, Result, Stream, Strides, Transfer, copied_by, copy_into, plan, transfer,
};
use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

/// What a consumer takes in place. Zeroes mean anything; a NULL for the whole struct means the same.
#[repr(C)]
pub struct CTarget {
    /// sizeof(tb_target)
    pub(crate) size: usize,
    /// the consumer, for messages; or NULL
    pub(crate) name: *const c_char,
    /// its dtypes; NULL for any
    pub(crate) dtypes: *const CDType,
    pub(crate) dtype_count: usize,
    /// the kinds of its devices (DLDeviceType); NULL for any
    pub(crate) devices: *const i32,
    pub(crate) device_count: usize,
    /// one of tb_strides
    pub(crate) strides: i32,
    /// not 0: it would write to read-only memory, which is refused (TB_READ_ONLY)
    pub(crate) ignores_read_only: i32,
    /// the alignment of the first element, in bytes, beyond that of the element: a power of two up to 2^30; 0 for any
    /// address
    pub(crate) alignment: usize,
    /// not 0: it takes a DLManagedTensor, not a DLManagedTensorVersioned. That one has no flag for read-only memory
    pub(crate) unversioned: i32,
}

/// The strides that a consumer takes.
#[repr(C)]
#[allow(dead_code, reason = "C names the numbers")]
pub enum CStrides {
    Any = 0,
    NonNegative = 1,
    /// compact, row-major tensors only
    Compact = 2,
}

/// The order of the elements of a result in memory.
#[repr(C)]
#[allow(dead_code, reason = "C names the numbers")]
pub enum CElements {
    AnyOrder = 0,
    /// the last index runs fastest, without gaps
    RowMajor = 1,
    /// the first index runs fastest, without gaps
    ColumnMajor = 2,
}

/// Whether a copy is made.
#[repr(C)]
#[allow(dead_code, reason = "C names the numbers")]
pub enum CCopy {
    IfNeeded = 0,
    Always = 1,
    Never = 2,
}

/// The caller's requests. Zeroes mean none; a NULL for the whole struct means the same.
#[repr(C)]
pub struct COptions {
    /// sizeof(tb_options)
    pub(crate) size: usize,
    /// one of tb_copy
    pub(crate) copy: i32,
    /// one of tb_elements
    pub(crate) elements: i32,
    /// the device of the result: a tensor that is elsewhere is moved; NULL for where it is
    pub(crate) device: *const CDevice,
    /// dimension d of the result is dimension axes[d] of the tensor; NULL for all as they are
    pub(crate) axes: *const i64,
    pub(crate) axis_count: usize,
}

/// How a tensor is transferred.
#[repr(C)]
pub struct CReport {
    /// sizeof(tb_report), set by the caller
    pub(crate) size: usize,
    /// why it is copied, such as "negative strides"; NULL in place. The text lives as long as the process.
    pub(crate) reason: *const c_char,
    /// who copies: "kernels", "host", "move", "producer", "consumer"; NULL in place
    pub(crate) copied_by: *const c_char,
    /// bytes that are copied; 0 in place
    pub(crate) bytes_copied: u64,
    /// the stream of the owner, and the reader's, which waits for it; both 0 where none has to wait. tb_plan writes 0.
    pub(crate) owner: u64,
    pub(crate) reader: u64,
    /// the device of the result
    pub(crate) device: CDevice,
}

/// The reasons of copies, for C.
const REASONS: &[(Reason, &CStr)] = &[
    (Reason::Asked, c"asked for"),
    (Reason::PendingConjugation, c"a pending conjugation"),
    (Reason::PendingNegation, c"a pending negation"),
    (Reason::PendingPacking, c"strides that are not a whole number of elements"),
    (Reason::NegativeStrides, c"negative strides"),
    (Reason::Strides, c"strides that are not compact"),
    (Reason::Order, c"another order than the requested one"),
    (Reason::Alignment, c"an unaligned address"),
    (Reason::Moved, c"another device"),
];

/// The memory that is copied where the kernels copy nothing.
const COPIED: [DeviceKind; 2] = [DeviceKind::CPU, DeviceKind::CUDA_HOST];

/// Who copies, as text for C.
const COPIERS: &[(CopiedBy, &CStr)] = &[
    (CopiedBy::Kernels, c"kernels"),
    (CopiedBy::Host, c"host"),
    (CopiedBy::Move, c"move"),
    (CopiedBy::Producer, c"producer"),
    (CopiedBy::Consumer, c"consumer"),
];

/// Returns the text of a row; "another" for what core has added since.
fn named<T: PartialEq>(table: &[(T, &'static CStr)], key: &T) -> *const c_char {
    table.iter().find(|(known, _)| known == key).map_or(c"another".as_ptr(), |(_, text)| text.as_ptr())
}

/// Returns the row of a table that C names by its number.
fn numbered<T: Copy>(table: &[T], number: i32, what: &str) -> Result<T> {
    let found = usize::try_from(number).ok().and_then(|number| table.get(number));
    found.copied().ok_or_else(|| refused(format!("{what} is {number}: it must be from 0 to {}", table.len() - 1)))
}

/// `tb_copy`
pub(crate) fn copy(number: i32) -> Result<Option<bool>> {
    numbered(&[None, Some(true), Some(false)], number, "copy")
}

/// Reads a consumer's profile, and whether it takes versioned tensors. Where it takes anything, it takes the tensor as
/// it is, a copy on the host of one that the host can read, and the requested device.
///
/// # Safety
///
/// `target` is null, or what the header says.
unsafe fn profile(target: *const CTarget, tensor: &CTensor, requested: Option<Device>) -> Result<(Profile, bool)> {
    let exported = tensor.exported();
    let any = Profile::export_only("the consumer")
        .with_dtypes(vec![exported.dtype()])
        .with_devices(seen_as(exported.device()).chain(requested).map(|device| device.kind).collect());
    // SAFETY: the caller's obligation, here and below.
    let Some(target) = unsafe { sized(target, "tb_target") }? else { return Ok((any, true)) };
    let strides = numbered(&[Strides::Any, Strides::NonNegative, Strides::Compact], target.strides, "strides")?;
    if !(target.alignment == 0 || target.alignment.is_power_of_two()) {
        return Err(refused(format!("alignment is {}: it must be 0 or a power of two", target.alignment)));
    }
    let versioned = target.unversioned == 0;
    let mut profile = any
        .with_strides(strides)
        .with_alignment(target.alignment)
        .with_keeps_read_only(versioned && target.ignores_read_only == 0);
    // SAFETY: see above.
    unsafe {
        if !target.name.is_null() {
            profile.name = text(target.name, "the name of the target")?.into();
        }
        if !target.dtypes.is_null() {
            let dtypes = slice(target.dtypes, target.dtype_count, "dtypes")?;
            profile.dtypes = dtypes.iter().map(|dtype| DType::from(*dtype)).collect();
        }
        if !target.devices.is_null() {
            let kinds = slice(target.devices, target.device_count, "devices")?;
            profile.devices = kinds.iter().map(|kind| DeviceKind(*kind)).collect();
        }
    }
    Ok((profile, versioned))
}

/// Returns the devices on which a consumer of anything sees memory of `device` or a copy of it: those of pinned memory
/// are on the host.
fn seen_as(device: Device) -> impl Iterator<Item = Device> {
    [device].into_iter().chain((device.kind == DeviceKind::CUDA_HOST).then_some(Device::CPU))
}

/// Returns the device of a result that is not moved.
fn landed(device: Device, profile: &Profile) -> Device {
    let taken = |kind| profile.devices.contains(&kind);
    match device.kind {
        kind if taken(kind) => device,
        DeviceKind::CUDA_MANAGED if taken(DeviceKind::CUDA) => Device { kind: DeviceKind::CUDA, ..device },
        // The plan says that the consumer takes it, and the host reads pinned and managed memory.
        _ => Device::CPU,
    }
}

/// Reads a permutation.
///
/// # Safety
///
/// `axes` is null, or points to `count` numbers.
unsafe fn permutation(axes: *const i64, count: usize) -> Result<Option<Permutation>> {
    if axes.is_null() {
        return Ok(None);
    }
    if count > MAX_NDIM {
        return Err(refused(format!("axis_count is {count}: it must be at most {MAX_NDIM}")));
    }
    // SAFETY: the caller's obligation.
    Permutation::new(unsafe { slice(axes, count, "axes") }?).map(Some)
}

/// Reads the caller's requests.
///
/// # Safety
///
/// `options` is null, or what the header says.
unsafe fn requests(options: *const COptions) -> Result<Options> {
    // SAFETY: the caller's obligation, here and below.
    let Some(options) = unsafe { sized(options, "tb_options") }? else { return Ok(Options::default()) };
    let orders = [None, Some(Order::RowMajor), Some(Order::ColumnMajor)];
    Ok(Options::default()
        .with_copy(copy(options.copy)?)
        // SAFETY: see above.
        .with_device(unsafe { options.device.as_ref() }.map(|device| Device::from(*device)))
        .with_order(numbered(&orders, options.elements, "elements")?)
        // SAFETY: see above.
        .with_permute(unsafe { permutation(options.axes, options.axis_count) }?))
}

/// Checks where a report is written. NULL is not a fault.
///
/// # Safety
///
/// `report` is null, or points to a `tb_report` whose size is set.
unsafe fn check_capacity(report: *mut CReport) -> Result<()> {
    // SAFETY: the caller's obligation.
    unsafe { right_size(report, "tb_report") }
}

/// Writes a report, if the caller wants one.
///
/// # Safety
///
/// As for [`check_capacity`], which has checked it.
unsafe fn write_report(report: *mut CReport, done: &Transfer, device: Device) {
    let reason = done.plan.reason().map_or(std::ptr::null(), |reason| named(REASONS, &reason));
    let (owner, reader) = done.ordered.map_or((0, 0), |(owner, reader)| (owner.handle(), reader.handle()));
    let copied_by = done.copied_by.as_ref().map_or(std::ptr::null(), |by| named(COPIERS, by));
    let bytes_copied = done.bytes_copied as u64;
    let device = device.into();
    if !report.is_null() {
        let size = size_of::<CReport>();
        // SAFETY: the caller's obligation.
        unsafe { report.write(CReport { size, reason, copied_by, bytes_copied, owner, reader, device }) };
    }
}

/// Returns the tensor that is transferred. Pinned memory that is copied is memory of the host: core copies that, in any
/// order and to any alignment.
fn transferable<'a>(tensor: &'a CTensor, profile: &Profile, options: &Options) -> Result<Cow<'a, CTensor>> {
    let pinned = tensor.exported().device();
    if pinned.kind != DeviceKind::CUDA_HOST {
        return Ok(Cow::Borrowed(tensor));
    }
    let exported = tensor.shared(pinned)?.permuted(options.permute.as_ref())?;
    match plan(&exported, profile, options)? {
        Plan::Copy(reason) if reason != Reason::Moved => Ok(Cow::Owned(CTensor::new(tensor.shared(Device::CPU)?))),
        _ => Ok(Cow::Borrowed(tensor)),
    }
}

/// Returns what a transfer would do, and the device of its result.
fn planned(
    tensor: &CTensor,
    profile: Profile,
    options: &Options,
    ordering: &Arc<dyn Ordering>,
) -> Result<(Transfer, Device)> {
    let (from, to) = (Caller::of(tensor, ordering), Reader::new(profile, None));
    let exported = from.export(tensor)?.permuted(options.permute.as_ref())?;
    let plan = plan(&exported, to.profile(), options)?;
    let moved = options.device.filter(|_| plan == Plan::Copy(Reason::Moved));
    if let (Some(device), Some(copies)) = (moved, ordering.copies()) {
        copies.reaches(exported.device()).and_then(|()| copies.reaches(device))?;
    }
    let copies = plan != Plan::ZeroCopy;
    let copied_by = copies.then(|| match copied_by(&from, &to, &exported, ordering, options) {
        // Of host memory the owner copies what is pinned, and core the rest.
        CopiedBy::Producer if exported.device().kind == DeviceKind::CPU => CopiedBy::Host,
        by => by,
    });
    if copied_by == Some(CopiedBy::Producer) && !COPIED.contains(&exported.device().kind) {
        // Without a driver that is what a transfer misses.
        let of_cuda = ordering.copies().filter(|_| exported.device().kind == DeviceKind::CUDA);
        of_cuda.map_or(Ok(()), |copies| copies.reaches(exported.device()))?;
        return Err(uncopied(exported.device()));
    }
    let bytes_copied = if copies { exported.layout().nbytes() } else { 0 };
    let device = options.device.unwrap_or_else(|| landed(exported.device(), to.profile()));
    Ok((Transfer::planned(plan, bytes_copied, copied_by), device))
}

/// Takes a tensor to a reader in `stream`.
fn transferred(
    tensor: &CTensor,
    profile: Profile,
    options: &Options,
    stream: Stream,
    ordering: &Arc<dyn Ordering>,
) -> Result<(Lease, Transfer)> {
    transfer(&Caller::of(tensor, ordering), &Reader::new(profile, Some(stream)), tensor, ordering, options)
}

/// Writes to report what tb_transfer with the same arguments would do, and returns the error that it would return.
/// target and options may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_plan(
    tensor: *const CTensor,
    target: *const CTarget,
    options: *const COptions,
    report: *mut CReport,
) -> Status {
    answer(|| {
        non_null(report, "report")?;
        // SAFETY: the pointers are null or what the header says.
        unsafe {
            check_capacity(report)?;
            let (tensor, options) = (borrow(tensor, "tensor")?, requests(options)?);
            let (profile, _) = profile(target, tensor, options.device)?;
            let tensor = transferable(tensor, &profile, &options)?;
            let (done, device) = planned(&tensor, profile, &options, bridge_cuda::ordering())?;
            write_report(report, &done, device);
        }
        Ok(())
    })
}

/// Makes a managed tensor for a consumer that reads and writes in stream: over the memory of the tensor where the
/// consumer takes it, else over a copy, which is made on the device. Any work that is submitted to stream afterwards
/// waits, on the device, for the owner. The deleter of the managed tensor makes the owner's stream wait for stream, and
/// then returns the memory. So both streams must live as long as the managed tensor. Stream 0 means the legacy default
/// stream; a result in host memory needs none. A result on the host, of a tensor that is moved there, is complete when
/// the function returns; no other transfer waits. target, options and report may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_transfer(
    tensor: *const CTensor,
    target: *const CTarget,
    options: *const COptions,
    stream: u64,
    out: *mut *mut c_void,
    report: *mut CReport,
) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the pointers are null or what the header says; the stream is alive.
        unsafe {
            check_capacity(report)?;
            let (tensor, options) = (borrow(tensor, "tensor")?, requests(options)?);
            let (profile, versioned) = profile(target, tensor, options.device)?;
            let device = [options.device, Some(tensor.exported().device())]
                .into_iter()
                .flatten()
                .find(|device| in_streams(*device));
            let stream = device.map_or(Ok(Stream::LEGACY), |device| stream_on(device, stream))?;
            let tensor = transferable(tensor, &profile, &options)?;
            let (lease, done) = transferred(&tensor, profile, &options, stream, bridge_cuda::ordering())?;
            write_report(report, &done, lease.device());
            write(out, managed(lease, versioned).as_raw(), "out")
        }
    })
}

/// Copies the elements of one tensor into another that exists, of the same dtype, on any two devices and with any
/// strides. Dimension d of from is taken to be axes[d] before; axes may be NULL. Dimensions of length 1 are repeated,
/// and so are those that from lacks at the front. The copy runs in the stream of to, after the work in the stream of
/// from, which then waits for the copy. Where to is in host memory, the elements are there when the function returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_copy_into(
    from: *const CTensor,
    to: *const CTensor,
    axes: *const i64,
    axis_count: usize,
) -> Status {
    answer(|| {
        // SAFETY: the pointers are null or what the header says.
        let (from, to, axes) = unsafe { (borrow(from, "from")?, borrow(to, "to")?, permutation(axes, axis_count)?) };
        let ordering = bridge_cuda::ordering();
        let (source, target) = (Caller::of(from, ordering).permuting(axes), Caller::of(to, ordering));
        copy_into(&source, &target, from, to, ordering).map(drop)
    })
}

#[cfg(test)]
mod tests;
