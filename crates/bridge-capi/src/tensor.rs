//! Tensors of others: lent as they are, and copied by this library where that is possible.

use crate::memory::{Aligned, compact};
use crate::pointers::{look, put, slice, there};
use crate::release::{Owner, dropping};
use crate::status::{Status, answer, quietly, refused};
use bridge_core::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use bridge_core::dlpack::{Origin, adopt, lend};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Layout, Lease, Lent, MAX_NDIM,
    Memory, Profile, Result, Reuse, Stream, Views,
};
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

/// The owner of a `tb_memory`.
struct Released {
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    owner: *mut c_void,
}

// SAFETY: whoever hands the two over promises that the function may be called on any thread.
unsafe impl Send for Released {}
// SAFETY: as above; nothing is done with a shared one.
unsafe impl Sync for Released {}

impl Drop for Released {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: this is the one call; that it is allowed is the promise of whoever handed the function over.
            unsafe { release(self.owner) };
        }
    }
}

/// `tb_tensor`: a tensor of another framework, which can be lent any number of times.
pub struct Tensor(Arc<Lent>);

/// Where the address is, by what the driver says.
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
        let text = format!("the tensor says that it is on {place}, but the driver knows no such memory there");
        Error::new(ErrorKind::Protocol, text)
    })?;
    Ok((found.device, Some(found.range)))
}

impl Tensor {
    /// Takes over a managed tensor of DLPack.
    ///
    /// # Safety
    ///
    /// The tensor is null, or one of the kind that `versioned` says, which is the caller's to give away and keeps
    /// DLPack's promises. On a CUDA device its work is in front of the legacy default stream.
    pub(crate) unsafe fn managed(managed: *mut c_void, versioned: bool) -> Result<Self> {
        // How the producer reuses memory is its own affair.
        let origin = |device: Device, address| {
            let (_, allocation) = located(device, address)?;
            let (stream, reuse) = match device.kind {
                DeviceKind::CUDA => (Some(Stream::LEGACY), Reuse::Unknown),
                _ => (None, Reuse::InStreamOrder),
            };
            Ok(Origin { device: None, stream, reuse, allocation, keep: None, release: None })
        };
        // SAFETY: the caller's obligations, which go to the codec; the stream is the caller's as well, and of the reuse
        // nothing is claimed.
        let lent = unsafe {
            match versioned {
                true => lend(adopt(managed.cast::<DLManagedTensorVersioned>())?, origin),
                false => lend(adopt(managed.cast::<DLManagedTensor>())?, origin),
            }
        };
        Ok(Self(Arc::new(lent?)))
    }

    /// Takes over plain memory.
    ///
    /// # Safety
    ///
    /// The shape and the strides have `ndim` entries. The elements that they describe are readable memory until `owner`
    /// is dropped, and writable unless the memory says otherwise.
    unsafe fn memory(memory: &CMemory, owner: Owner) -> Result<Self> {
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
        let (device, allocation) = located(Device { kind, index: memory.device.index }, data)?;
        let bytes = layout.hull(data, allocation.as_ref())?;
        let access = if memory.read_only != 0 { Access::ReadOnly } else { Access::ReadWrite };
        let (stream, reuse) = match kind {
            DeviceKind::CUDA => (Some(Stream::LEGACY), Reuse::Unknown),
            _ => (None, Reuse::InStreamOrder),
        };
        if let (Some(legacy), 2..) = (stream, memory.stream) {
            // The stream may be gone by the time that the memory is given back, but the legacy stream will not.
            bridge_cuda::ordering().order(device, Stream::from_handle(memory.stream), legacy)?;
        }
        // SAFETY: the caller vouches for the memory and its owner; the range was checked above. The legacy stream waits
        // for the work of the owner's stream, and of the reuse nothing is claimed.
        let memory = unsafe { Memory::new(Allocation { bytes, device, access, stream, reuse }, owner) };
        Ok(Self(Arc::new(Lent::at(data, dtype, layout, Box::new(memory))?)))
    }
}

/// Lends tensors of others; there is no framework behind it that could wrap anything.
pub(crate) struct Others;

static PROFILE: LazyLock<Profile> = LazyLock::new(|| Profile::export_only("the owner"));

static NOBODY: LazyLock<Arc<Views>> = LazyLock::new(Arc::default);

impl Adapter for Others {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        NOBODY.clone()
    }

    fn export(&self, tensor: &Tensor) -> Result<Lent> {
        let lent = &tensor.0;
        let (memory, layout) = (lent.buffer(), lent.layout().clone());
        let allocation = Allocation {
            bytes: memory.address()..memory.address() + memory.len(),
            device: memory.device(),
            access: memory.access(),
            stream: memory.stream(),
            reuse: memory.reuse(),
        };
        let owner = Owner::new(Arc::clone(lent));
        // SAFETY: the promises are those of the buffer, which the owner keeps.
        let memory = unsafe { Memory::new(allocation, owner) };
        Lent::new(lent.dtype(), layout, Box::new(memory))
    }

    fn import(&self, _: Lease) -> Result<Tensor> {
        Err(refused("the owner of foreign memory takes nothing"))
    }

    fn compact(&self, tensor: &Tensor) -> Result<Tensor> {
        let lent = &tensor.0;
        if lent.buffer().stream().is_some() {
            let text = "the tensor has to be copied on its device: call .contiguous() or .copy() on it first";
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        let layout = Layout::new(lent.dtype(), lent.layout().shape(), None, 0)?;
        let copy = Aligned::new(layout.nbytes())?;
        // SAFETY: the lender vouches for the memory, which is on the host; the copy is fresh and as long as needed.
        unsafe { compact(lent.data() as *const u8, lent.layout(), copy.data()) };
        let start = copy.data().addr();
        let host = Allocation::host(start..start + layout.nbytes(), Access::ReadWrite);
        let allocation = Allocation { device: lent.device(), ..host };
        // SAFETY: the copy keeps its memory until it is dropped, and nobody else has it.
        let memory = unsafe { Memory::new(allocation, copy) };
        Ok(Tensor(Arc::new(Lent::new(lent.dtype(), layout, Box::new(memory))?)))
    }
}

/// A tensor in plain memory.
///
/// # Safety
///
/// `memory` is null, or describes memory as the header says; its owner is given away. `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_memory(memory: *const CMemory, out: *mut *mut Tensor) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe {
            let memory = look(memory, "memory")?;
            let owner = Owner::new(Released { release: memory.release, owner: memory.owner });
            there(out, "out")?;
            put(out, Box::into_raw(Box::new(Tensor::memory(memory, owner)?)), "out")
        }
    })
}

/// A managed tensor of DLPack.
///
/// # Safety
///
/// As for [`Tensor::managed`], and `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_dlpack(managed: *mut c_void, versioned: i32, out: *mut *mut Tensor) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe {
            let tensor = Tensor::managed(managed, versioned != 0);
            there(out, "out")?;
            put(out, Box::into_raw(Box::new(tensor?)), "out")
        }
    })
}

/// Drops a tensor.
///
/// # Safety
///
/// `tensor` is null, or what a function here gave and nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_drop(tensor: *mut Tensor) {
    if !tensor.is_null() {
        // SAFETY: the caller's obligation.
        quietly(|| dropping(|| drop(unsafe { Box::from_raw(tensor) })));
    }
}
