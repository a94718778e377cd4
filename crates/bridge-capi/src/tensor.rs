//! Tensors of the caller: exported as they are, and copied by this library in host memory.

use crate::on_device::{in_streams, stream_on};
use crate::pointers::{borrow, drop_raw, into_raw, non_null, right_size, slice, write};
use crate::reader::{InStream, Reader};
use crate::status::{Status, answer, refused};
use bridge_core::dlpack::{Origin, Release};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout, MAX_NDIM,
    Memory, Offer, Options, Order, Ordering, Permutation, Profile, Result, Reuse, Stream, transfer,
};
use bridge_pyo3::interpreter::{AnyManaged, Guarded};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// The most dimensions of a tensor.
pub const TB_MAX_NDIM: usize = 64;

const _: () = assert!(TB_MAX_NDIM == MAX_NDIM);

/// DLDataType of dlpack.h.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CDType {
    /// kind of number
    pub(crate) code: u8,
    /// bits of a lane
    pub(crate) bits: u8,
    /// must be 1
    pub(crate) lanes: u16,
}

/// DLDevice of dlpack.h.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CDevice {
    /// 1 host, 2 CUDA, 3 pinned, 13 managed
    pub(crate) kind: i32,
    /// in a tb_memory, -1 means the device of the address, by the driver; there is one host, whatever its number
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

impl From<CDevice> for Device {
    fn from(CDevice { kind, index }: CDevice) -> Self {
        Device::numbered(DeviceKind(kind), index)
    }
}

impl From<Device> for CDevice {
    fn from(Device { kind, index }: Device) -> Self {
        Self { kind: kind.0, index }
    }
}

/// A tensor in plain memory.
#[repr(C)]
pub struct CMemory {
    /// sizeof(tb_memory), set by the caller
    pub(crate) size: usize,
    /// the first element; may be NULL for a tensor without elements
    pub(crate) data: *mut c_void,
    /// ndim lengths
    pub(crate) shape: *const i64,
    /// ndim strides, signed, in elements; NULL for a compact, row-major tensor
    pub(crate) strides: *const i64,
    pub(crate) ndim: i32,
    /// not 0: no consumer may write to it
    pub(crate) read_only: i32,
    pub(crate) dtype: CDType,
    pub(crate) device: CDevice,
    /// the stream of pending work on the tensor; 0 for none
    pub(crate) stream: u64,
    /// called once with owner, on any thread, when the memory is no longer used; or NULL
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

/// A tensor of the caller or of another framework, which can be fed and transferred any number of times.
#[derive(Clone)]
pub struct CTensor(Arc<Export>);

/// Looks up the device of an address, and the allocation around it, in the driver. Only memory that work in streams
/// touches is looked up. A producer may label managed memory as memory of its GPU, as CuPy does.
fn located(stated: Device, address: usize) -> Result<(Device, Option<Range<usize>>)> {
    let known = Device { index: stated.index.max(0), ..stated };
    if !in_streams(stated) || address == 0 {
        return Ok((known, None));
    }
    let fits = |found: &bridge_cuda::Located| match stated.kind {
        // DLPack writes number 0 for all managed memory.
        DeviceKind::CUDA_MANAGED => found.device.kind == DeviceKind::CUDA_MANAGED,
        _ => in_streams(found.device) && (stated.index < 0 || found.device.index == stated.index),
    };
    let found = bridge_cuda::locate(address)?.filter(fits).ok_or_else(|| {
        let place = if stated.index < 0 { "a CUDA device".into() } else { stated.to_string() };
        let text = format!("the tensor claims to be on {place}, but the driver knows no such memory there");
        Error::new(ErrorKind::Protocol, text)
    })?;
    Ok((Device { kind: stated.kind, ..found.device }, Some(found.range)))
}

impl CTensor {
    pub(crate) fn exported(&self) -> &Export {
        &self.0
    }

    /// Keeps an exported tensor.
    pub(crate) fn new(exported: Export) -> Self {
        Self(Arc::new(exported))
    }

    /// Takes ownership of a managed tensor of DLPack, whose producer works in the stream with this handle.
    ///
    /// # Safety
    ///
    /// The tensor is null, or the caller owns it and its producer keeps DLPack's promises. On a CUDA device the last
    /// writes are in the stream, or ordered before it, and the stream lives as long as the tensor.
    pub(crate) unsafe fn managed(managed: AnyManaged, stream: u64) -> Result<Self> {
        let origin = |stated: Device, address| {
            let (device, allocation) = located(stated, address)?;
            let (stream, reuse) = match in_streams(device) {
                // SAFETY: the caller names a stream that is alive.
                true => (Some(unsafe { stream_on(device, stream) }?.on_any_thread()), Reuse::Unknown),
                false => (None, Reuse::InStreamOrder),
            };
            // The deleter may need the GIL.
            let release: Option<Release> = Some(|owner| drop(Guarded::new(owner)));
            Ok(Origin::new(stream, reuse).on(device).within(allocation).released_by(release))
        };
        // SAFETY: the caller's obligations; the stream is the caller's as well, and nothing is claimed of the reuse.
        Ok(Self::new(unsafe { managed.export(origin) }?))
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
        if !dtype.is_element() {
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
        let data = if layout.numel() == 0 { 0 } else { memory.data.expose_provenance() };
        if data == 0 && layout.numel() > 0 {
            return Err(refused("data is NULL, but the tensor has elements"));
        }
        // Before the driver is needed, which may be missing.
        layout.extent_at(data, None)?;
        let (device, allocation) = located(Device::from(memory.device), data)?;
        let bytes = layout.extent_at(data, allocation.as_ref())?;
        let access = if memory.read_only != 0 { Access::ReadOnly } else { Access::ReadWrite };
        let (stream, reuse) = match in_streams(device) {
            true => (Some(Stream::LEGACY), Reuse::Unknown),
            false => (None, Reuse::InStreamOrder),
        };
        if let (Some(legacy), 2..) = (stream, memory.stream) {
            // The stream may be destroyed before the memory is returned; the legacy stream is not.
            // SAFETY: the caller names a stream that exists (`truebridge.h`).
            unsafe { bridge_cuda::ordering().order(device, Stream::from_handle(memory.stream), legacy) }?;
        }
        // SAFETY: the caller guarantees the memory and its owner; the range was checked above. The legacy stream waits
        // for the work of the owner's stream, and nothing is claimed of the reuse.
        let memory = unsafe { Memory::new(Allocation::new(bytes, device, access, stream, reuse), owner) };
        Ok(Self::new(Export::at(data, dtype, layout, memory)?))
    }
}

/// The caller's side of a transfer, for one tensor: works in the stream of its owner. It imports nothing, because it
/// belongs to no framework.
pub(crate) struct Caller<'a> {
    stream: Option<Stream>,
    permutation: Option<Permutation>,
    ordering: &'a Arc<dyn Ordering>,
}

static PROFILE: LazyLock<Profile> = LazyLock::new(|| Profile::export_only("the owner"));

impl<'a> Caller<'a> {
    pub(crate) fn of(tensor: &CTensor, ordering: &'a Arc<dyn Ordering>) -> Self {
        Self { stream: tensor.0.buffer().stream(), permutation: None, ordering }
    }

    /// Exports tensors with permuted dimensions.
    pub(crate) fn permuting(self, permutation: Option<Permutation>) -> Self {
        Self { permutation, ..self }
    }
}

// SAFETY: it only exports.
unsafe impl Adapter for Caller<'_> {
    type Tensor = CTensor;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        Arc::new(InStream(self.stream))
    }

    /// Refuses memory of another process that has ended or has taken it back.
    fn export(&self, tensor: &CTensor) -> Result<Export> {
        if bridge_ipc::is_leasing() {
            bridge_ipc::check(&tensor.0)?;
        }
        tensor.shared(tensor.0.device())?.permuted(self.permutation.as_ref())
    }

    fn import(&self, _: Offer) -> Result<CTensor> {
        Err(refused("a tensor of the caller cannot be imported into"))
    }

    /// Copies pinned memory, as host memory. Core copies the host's own.
    fn compact(&self, tensor: &CTensor) -> Result<CTensor> {
        if tensor.0.device().kind != DeviceKind::CUDA_HOST {
            let text = "cannot copy such elements here: copy the tensor with its own framework first";
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        let host = CTensor::new(tensor.shared(Device::CPU)?);
        let reader = Reader::of_any(&host.0);
        let always = Options::copied();
        let (copy, _) = transfer(&Caller::of(&host, self.ordering), &reader, &host, self.ordering, &always)?;
        let (dtype, layout, (start, nbytes)) = (copy.dtype(), copy.layout().clone(), copy.buffer());
        // SAFETY: the lease keeps the memory of a copy, and no other tensor is over it.
        let memory = unsafe { Memory::new(Allocation::host(start..start + nbytes, Access::ReadWrite), copy) };
        Ok(CTensor::new(Export::new(dtype, layout, memory)?))
    }

    /// Allocates memory of the driver's pool, in the stream of the owner. Core allocates host memory.
    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<CTensor> {
        let stream = self.stream.filter(|_| device.kind == DeviceKind::CUDA);
        let (Some(stream), Some(copies)) = (stream, self.ordering.copies()) else {
            return Err(Error::new(ErrorKind::CopyNeeded, format!("cannot allocate memory for copies on {device}")));
        };
        let layout = Layout::new(dtype, shape, Some(&order.strides(shape)), 0)?;
        // SAFETY: the stream of the owner lives as long as the tensor and all that is made of it (`truebridge.h`).
        let memory = unsafe { copies.allocate(device, layout.nbytes(), stream, None) }?;
        Ok(CTensor::new(Export::new(dtype, layout, memory)?))
    }

    /// The memory may be written, unless it is read-only, which core checks.
    fn overwritten(&self, _: &CTensor) -> Result<()> {
        Ok(())
    }
}

impl CTensor {
    /// Returns the tensor once more, as memory of `device`.
    pub(crate) fn shared(&self, device: Device) -> Result<Export> {
        let (exported, memory) = (&self.0, self.0.buffer());
        let bytes = memory.address()..memory.address() + memory.len();
        let (access, stream, reuse) = (memory.access(), memory.stream(), memory.reuse());
        // SAFETY: the promises are those of the buffer, which the owner keeps. The host reads pinned memory as its own.
        let shared =
            unsafe { Memory::new(Allocation::new(bytes, device, access, stream, reuse), Arc::clone(exported)) };
        Export::new(exported.dtype(), exported.layout().clone(), shared)
    }
}

/// Makes a tensor of plain memory. The legacy default stream waits for memory->stream from now on, so memory->stream
/// may be destroyed after the call. The owner is taken over, also on an error other than TB_VERSION, the
/// status for another memory->size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_memory(memory: *const CMemory, out: *mut *mut CTensor) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe {
            right_size(memory, "tb_memory")?;
            let memory = borrow(memory, "memory")?;
            let owner = Guarded::new(CallerOwned { release: memory.release, owner: memory.owner });
            non_null(out, "out")?;
            write(out, into_raw(CTensor::memory(memory, owner)?), "out")
        }
    })
}

/// Makes a tensor of a DLManagedTensor (versioned 0) or a DLManagedTensorVersioned (versioned 1), which is taken over,
/// also on an error. On a CUDA device stream is that of the owner: it holds the last writes, or waits for them, and
/// must live as long as the tensor and everything that is made of it. 0 means the legacy default stream. In host memory
/// it means nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_dlpack(
    managed: *mut c_void,
    versioned: i32,
    stream: u64,
    out: *mut *mut CTensor,
) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe {
            let tensor = CTensor::managed(AnyManaged::from_raw(managed, versioned != 0), stream);
            non_null(out, "out")?;
            write(out, into_raw(tensor?), "out")
        }
    })
}

/// Drops a tensor. NULL is allowed, here and in every other drop. What was made of the tensor keeps the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_drop(tensor: *mut CTensor) {
    // SAFETY: the caller's obligation.
    unsafe { drop_raw(tensor) };
}
