//! Tensors of the caller: lent as they are, and copied by this library in host memory.

use crate::memory::{Aligned, compact};
use crate::pointers::{borrow, drop_raw, into_raw, non_null, slice, write};
use crate::status::{Status, answer, refused};
use bridge_core::dlpack::{Origin, Release};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Layout, Lease, Lent, MAX_NDIM,
    Memory, Profile, Result, Reuse, Stream, Views,
};
use bridge_interpreter::{AnyManaged, Guarded};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// `tb_dtype`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CDType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `tb_device`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CDevice {
    pub(crate) kind: i32,
    pub(crate) index: i32,
}

impl From<CDType> for DType {
    fn from(CDType { code, bits, lanes }: CDType) -> Self {
        DType { code, bits, lanes }
    }
}

impl From<DType> for CDType {
    fn from(DType { code, bits, lanes }: DType) -> Self {
        Self { code, bits, lanes }
    }
}

impl From<Device> for CDevice {
    fn from(Device { kind, index }: Device) -> Self {
        Self { kind: kind.0, index }
    }
}

/// `tb_memory`
#[repr(C)]
pub struct CMemory {
    pub(crate) data: *mut c_void,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) ndim: i32,
    pub(crate) read_only: i32,
    pub(crate) dtype: CDType,
    pub(crate) device: CDevice,
    pub(crate) stream: u64,
    pub(crate) release: Option<unsafe extern "C" fn(*mut c_void)>,
    pub(crate) owner: *mut c_void,
}

/// The owner of a `tb_memory`, and its deleter.
struct CallerOwned {
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    owner: *mut c_void,
}

// SAFETY: the caller of `tb_tensor_memory` promises that the deleter may be called on any thread.
unsafe impl Send for CallerOwned {}
// SAFETY: as above; a shared one is not used.
unsafe impl Sync for CallerOwned {}

impl Drop for CallerOwned {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: this is the only call, which the caller of `tb_tensor_memory` has allowed.
            unsafe { release(self.owner) };
        }
    }
}

/// `tb_tensor`: a tensor of the caller, which can be lent any number of times.
pub struct CTensor(Arc<Lent>);

/// Looks up the device of an address, and the allocation around it, in the driver. Only addresses on CUDA devices are
/// looked up.
fn located(device: Device, address: usize) -> Result<(Device, Option<Range<usize>>)> {
    if device.kind != DeviceKind::CUDA {
        return Ok((Device { index: device.index.max(0), ..device }, None));
    }
    if address == 0 {
        return Ok((Device::cuda(device.index.max(0)), None));
    }
    let asked = |found: &bridge_cuda::Located| {
        found.device == device || (device.index < 0 && found.device.kind == DeviceKind::CUDA)
    };
    let found = bridge_cuda::locate(address)?.filter(asked).ok_or_else(|| {
        let place = if device.index < 0 { "a CUDA device".into() } else { device.to_string() };
        let text = format!("the tensor claims to be on {place}, but the driver knows no such memory there");
        Error::new(ErrorKind::Protocol, text)
    })?;
    Ok((found.device, Some(found.range)))
}

impl CTensor {
    /// Takes ownership of a managed tensor of DLPack.
    ///
    /// # Safety
    ///
    /// The tensor is null, or the caller owns it and its producer keeps DLPack's promises. On a CUDA device its work is
    /// ordered before the legacy default stream.
    pub(crate) unsafe fn managed(managed: AnyManaged) -> Result<Self> {
        let origin = |device: Device, address| {
            let (_, allocation) = located(device, address)?;
            let (stream, reuse) = match device.kind {
                DeviceKind::CUDA => (Some(Stream::LEGACY), Reuse::Unknown),
                _ => (None, Reuse::InStreamOrder),
            };
            // The deleter may need the GIL.
            let release: Option<Release> = Some(|owner| drop(Guarded::new(owner)));
            Ok(Origin { device: None, stream, reuse, allocation, keep: None, release })
        };
        // SAFETY: the caller's obligations; the stream is the caller's as well, and nothing is claimed of the reuse.
        Ok(Self(Arc::new(unsafe { managed.lend(origin) }?)))
    }

    /// Takes ownership of plain memory.
    ///
    /// # Safety
    ///
    /// The shape and the strides have `ndim` entries. The elements that they describe are readable memory until `owner`
    /// is dropped, and writable unless the memory says otherwise.
    unsafe fn memory(memory: &CMemory, owner: Guarded<CallerOwned>) -> Result<Self> {
        let ndim = usize::try_from(memory.ndim).ok().filter(|ndim| *ndim <= MAX_NDIM);
        let ndim = ndim.ok_or_else(|| refused(format!("ndim is {}: it must be 0 to {MAX_NDIM}", memory.ndim)))?;
        let dtype = DType::from(memory.dtype);
        if dtype.lanes != 1 {
            let text =
                format!("vector elements (lanes = {}) have no counterpart: describe them as scalars", dtype.lanes);
            return Err(Error::new(ErrorKind::Dtype, text));
        }
        // SAFETY: the caller's obligation.
        let (shape, strides) = unsafe {
            let strides = if memory.strides.is_null() { None } else { Some(slice(memory.strides, ndim, "strides")?) };
            (slice(memory.shape, ndim, "shape")?, strides)
        };
        let layout = Layout::new(dtype, shape, strides, 0)?;
        let data = if layout.numel() == 0 { 0 } else { memory.data.addr() };
        if data == 0 && layout.numel() > 0 {
            return Err(refused("data is NULL, but there are elements"));
        }
        let kind = DeviceKind(memory.device.kind);
        // Before the driver is needed, which may be missing.
        layout.hull(data, None)?;
        let (device, allocation) = located(Device { kind, index: memory.device.index }, data)?;
        let bytes = layout.hull(data, allocation.as_ref())?;
        let access = if memory.read_only != 0 { Access::ReadOnly } else { Access::ReadWrite };
        let (stream, reuse) = match kind {
            DeviceKind::CUDA => (Some(Stream::LEGACY), Reuse::Unknown),
            _ => (None, Reuse::InStreamOrder),
        };
        if let (Some(legacy), 2..) = (stream, memory.stream) {
            // The stream may be destroyed before the memory is returned; the legacy stream is not.
            bridge_cuda::ordering().order(device, Stream::from_handle(memory.stream), legacy)?;
        }
        // SAFETY: the caller vouches for the memory and its owner; the range was checked above. The legacy stream waits
        // for the work of the owner's stream, and nothing is claimed of the reuse.
        let memory = unsafe { Memory::new(Allocation { bytes, device, access, stream, reuse }, owner) };
        Ok(Self(Arc::new(Lent::at(data, dtype, layout, memory)?)))
    }
}

/// Exports the caller's tensors. It imports nothing, because no framework stands behind it.
pub(crate) struct Caller;

static PROFILE: LazyLock<Profile> = LazyLock::new(|| Profile::export_only("the owner"));

static NO_VIEWS: LazyLock<Arc<Views>> = LazyLock::new(Arc::default);

impl Adapter for Caller {
    type Tensor = CTensor;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        NO_VIEWS.clone()
    }

    fn export(&self, tensor: &CTensor) -> Result<Lent> {
        let lent = &tensor.0;
        let (memory, layout) = (lent.buffer(), lent.layout().clone());
        let allocation = Allocation {
            bytes: memory.address()..memory.address() + memory.len(),
            device: memory.device(),
            access: memory.access(),
            stream: memory.stream(),
            reuse: memory.reuse(),
        };
        // SAFETY: the promises are those of the buffer, which the owner keeps.
        let memory = unsafe { Memory::new(allocation, Arc::clone(lent)) };
        Lent::new(lent.dtype(), layout, memory)
    }

    fn import(&self, _: Lease) -> Result<CTensor> {
        Err(refused("the caller's side imports no tensors"))
    }

    fn compact(&self, tensor: &CTensor) -> Result<CTensor> {
        let lent = &tensor.0;
        if lent.buffer().stream().is_some() {
            let text = "the tensor has to be copied on its device: call .contiguous() or .copy() on it first";
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        let layout = Layout::new(lent.dtype(), lent.layout().shape(), None, 0)?;
        let copy = Aligned::new(layout.nbytes())?;
        // SAFETY: the producer vouches for the memory, which is on the host; the copy is fresh and as long as needed.
        unsafe { compact(lent.data() as *const u8, lent.layout(), copy.data()) };
        let start = copy.data().addr();
        let host = Allocation::host(start..start + layout.nbytes(), Access::ReadWrite);
        let allocation = Allocation { device: lent.device(), ..host };
        // SAFETY: the copy keeps its memory until it is dropped, and no one else has it.
        let memory = unsafe { Memory::new(allocation, copy) };
        Ok(CTensor(Arc::new(Lent::new(lent.dtype(), layout, memory)?)))
    }
}

/// Makes a tensor of plain memory.
///
/// # Safety
///
/// `memory` is null, or describes memory as the header says; its owner is passed on. `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_memory(memory: *const CMemory, out: *mut *mut CTensor) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe {
            let memory = borrow(memory, "memory")?;
            let owner = Guarded::new(CallerOwned { release: memory.release, owner: memory.owner });
            non_null(out, "out")?;
            write(out, into_raw(CTensor::memory(memory, owner)?), "out")
        }
    })
}

/// Makes a tensor of a managed tensor of DLPack.
///
/// # Safety
///
/// As for [`CTensor::managed`], of the ABI that `versioned` says; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_dlpack(managed: *mut c_void, versioned: i32, out: *mut *mut CTensor) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe {
            let tensor = CTensor::managed(AnyManaged::from_raw(managed, versioned != 0));
            non_null(out, "out")?;
            write(out, into_raw(tensor?), "out")
        }
    })
}

/// Drops a tensor.
///
/// # Safety
///
/// `tensor` is null, or was returned by a function here and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_drop(tensor: *mut CTensor) {
    // SAFETY: the caller's obligation.
    unsafe { drop_raw(tensor) };
}
