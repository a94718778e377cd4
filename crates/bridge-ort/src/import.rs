//! Imports leases as tensors of ONNX Runtime, and makes tensors to copy into.

use crate::elements::{checked, element_of};
use bridge_core::{COPY_ALIGNMENT, DType, Device, DeviceKind, Error, ErrorKind, Layout, Lease, Order, Result};
use ort::AsPointer;
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::SharedSessionInner;
use ort::sys::{OrtAllocator, OrtMemoryInfo, OrtValue};
use ort::value::DynTensor;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The version of the C API that has added the last field of `ort`'s `OrtAllocator`. ONNX Runtime reads no further.
const ALLOCATOR_VERSION: u32 = 18;

/// An allocator, as ONNX Runtime sees it, whose one block is the memory of a lease. It allocates nothing.
#[repr(C)]
struct Owner {
    allocator: OrtAllocator,
    /// A `MemoryInfo`, whose type has a lifetime from rc.13 of `ort` on.
    info: Box<dyn AsPointer<Sys = OrtMemoryInfo>>,
    lease: Mutex<Option<Lease>>,
}

// SAFETY: an `OrtMemoryInfo` is a constant, which any thread may read and release. The rest is `Send` and `Sync`.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

impl Owner {
    fn new(lease: Lease) -> Result<Self> {
        let (place, index) = match lease.device().kind {
            DeviceKind::CPU => (AllocationDevice::CPU, 0),
            _ => (AllocationDevice::CUDA, lease.device().index),
        };
        let info = MemoryInfo::new(place, index, AllocatorType::Device, MemoryType::Default);
        let info =
            info.map_err(|error| Error::new(ErrorKind::Framework, format!("ONNX Runtime: {error}")).caused_by(error))?;
        let allocator = OrtAllocator {
            version: ALLOCATOR_VERSION,
            Alloc: Some(nothing),
            Free: Some(give_back),
            Info: Some(place_of),
            Reserve: Some(nothing_reserved),
        };
        Ok(Self { allocator, info: Box::new(info), lease: Mutex::new(Some(lease)) })
    }

    fn take(&self) -> Option<Lease> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

unsafe extern "system" fn nothing(_: *mut OrtAllocator, _: usize) -> *mut c_void {
    ptr::null_mut()
}

unsafe extern "system" fn nothing_reserved(_: *const OrtAllocator, _: usize) -> *mut c_void {
    ptr::null_mut()
}

unsafe extern "system" fn place_of(allocator: *const OrtAllocator) -> *const OrtMemoryInfo {
    // SAFETY: the allocator is the first field of an `Owner`, which lives until `give_back` is called.
    unsafe { &*allocator.cast::<Owner>() }.info.ptr()
}

/// Drops the lease, on any thread. ONNX Runtime calls it when the last value over the memory is released, and does not
/// use the allocator afterwards.
unsafe extern "system" fn give_back(allocator: *mut OrtAllocator, _: *mut c_void) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `wrap` made the pointer by `Arc::into_raw`, and a block is freed once.
        drop(unsafe { Arc::from_raw(allocator.cast_const().cast::<Owner>()) }.take());
    }));
}

pub(crate) fn wrap(lease: Lease) -> Result<Arc<DynTensor>> {
    let (layout, element) = (lease.layout().clone(), element_of(lease.dtype())?);
    // Without elements the address may be null, which ONNX Runtime refuses, or not aligned, as `ort` makes slices of it.
    let data = if layout.numel() == 0 { ptr::without_provenance_mut(COPY_ALIGNMENT) } else { lease.as_ptr() };
    let owner = Arc::new(Owner::new(lease)?);
    let deleter = Arc::into_raw(Arc::clone(&owner)).cast_mut().cast();
    let mut value = ptr::null_mut();
    // SAFETY: the shape has as many lengths as stated, the memory as many bytes, and the result is writable. The lease
    // keeps the memory until the deleter is called, which lets no panic out.
    let made = unsafe {
        checked((ort::api().CreateTensorWithDataAndDeleterAsOrtValue)(
            deleter,
            data,
            layout.nbytes(),
            layout.shape().as_ptr(),
            layout.shape().len(),
            element.into(),
            &mut value,
        ))
    };
    if made.is_err() {
        // The owner is kept: ONNX Runtime does not say whether it will still call the deleter.
        drop(owner.take());
    }
    made.and_then(|()| adopt(value))
}

/// Allocates on the host by ONNX Runtime's default allocator.
pub(crate) fn empty(device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Arc<DynTensor>> {
    let refused = |text| Err(Error::new(ErrorKind::CopyNeeded, text));
    if device.kind != DeviceKind::CPU {
        return refused(format!("ONNX Runtime allocates on {device} for a session only"));
    }
    let layout = Layout::new(dtype, shape, None, 0)?;
    if order != Order::RowMajor && !layout.follows(order) {
        return refused("ONNX Runtime has row-major tensors only".into());
    }
    let mut value = ptr::null_mut();
    let mut allocator = Allocator::default();
    // SAFETY: the shape has as many lengths as stated, and the result is writable. The default allocator lives as long as
    // the process.
    unsafe {
        checked((ort::api().CreateTensorAsOrtValue)(
            allocator.ptr_mut(),
            shape.as_ptr(),
            shape.len(),
            element_of(dtype)?.into(),
            &mut value,
        ))?;
    }
    let tensor = adopt(value)?;
    if !tensor.data_ptr().addr().is_multiple_of(COPY_ALIGNMENT) {
        return refused(format!("ONNX Runtime's allocator does not align to {COPY_ALIGNMENT} bytes"));
    }
    if layout.numel() > 0 {
        // Safe code reads the elements through `ort`, and 0 is an element of every dtype.
        // SAFETY: the fresh tensor has so many bytes, which no other code knows.
        unsafe { ptr::write_bytes(tensor.data_ptr().cast_mut().cast::<u8>(), 0, layout.nbytes()) };
    }
    Ok(tensor)
}

fn adopt(value: *mut OrtValue) -> Result<Arc<DynTensor>> {
    let value = NonNull::new(value).ok_or_else(|| Error::new(ErrorKind::Framework, "ONNX Runtime made no tensor"))?;
    // SAFETY: the C API has returned a new value, a tensor, which belongs to no session.
    Ok(Arc::new(unsafe { with_owner(DynTensor::from_ptr, value) }))
}

/// What `ort` keeps as long as a tensor.
trait Owns: Sized {
    /// Returns that of a tensor which belongs to no session.
    fn own() -> Option<Self>;
}

/// From rc.14 on: an allocator. The default one lives as long as the process, and a lease keeps its own memory.
impl Owns for &Allocator {
    fn own() -> Option<Self> {
        static DEFAULT: OnceLock<Usual> = OnceLock::new();
        Some(&DEFAULT.get_or_init(|| Usual(Allocator::default())).0)
    }
}

/// The default allocator.
struct Usual(Allocator);

// SAFETY: ONNX Runtime returns one object to all threads, and never releases it. Nothing is allocated through this.
unsafe impl Send for Usual {}
// SAFETY: as above.
unsafe impl Sync for Usual {}

/// Up to rc.13: a session.
impl Owns for Arc<SharedSessionInner> {
    fn own() -> Option<Self> {
        None
    }
}

/// Calls `from_ptr` of any version of `ort`.
///
/// # Safety
///
/// As for that function.
unsafe fn with_owner<O: Owns, T>(
    from_ptr: unsafe fn(NonNull<OrtValue>, Option<O>) -> T,
    value: NonNull<OrtValue>,
) -> T {
    // SAFETY: the caller's obligation.
    unsafe { from_ptr(value, O::own()) }
}
