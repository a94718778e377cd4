//! The driver's functions for memory and events that processes share.

use super::{Cuda, handle as raw_stream};
use crate::driver::{Event, Failure, Outcome, SharingDriver};
use crate::driver::{HANDLE, Handle, Mapped};
use bridge_core::Stream;
use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUevent, CUevent_flags, CUmemGenericAllocationHandle, CUmemoryPool, CUpointer_attribute,
    CUresult, CUstream,
};
use libloading::Library;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{null_mut, with_exposed_provenance_mut};

/// `CUipcMemHandle` and `CUipcEventHandle`, which are passed by value, and `CUmemPoolPtrExportData`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawHandle(Handle);

/// `CUmemAccessDesc`: a location, and what it may do.
#[repr(C)]
pub(super) struct AccessOf {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    kind: c_uint,
    ordinal: c_int,
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
    access: c_uint,
}

impl AccessOf {
    /// A device may read and write.
    pub fn all(ordinal: i32) -> Self {
        Self { kind: 1, ordinal, access: 3 }
    }
}

/// `CUmemAllocationProp`: what kind of memory is allocated, where, and how it leaves the process.
#[repr(C)]
#[derive(Default)]
struct Property {
    /// `CU_MEM_ALLOCATION_TYPE_PINNED`
    kind: c_uint,
    handle_types: c_uint,
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    location: c_uint,
    ordinal: c_int,
    /// Metadata of Windows, and flags.
    unused: [u64; 2],
}

const _: () = assert!(size_of::<AccessOf>() == 12 && size_of::<RawHandle>() == HANDLE && size_of::<Property>() == 32);

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const FILE_DESCRIPTOR: c_uint = 1;

/// The result of the export of a pool that was not made to be shared.
const NOT_SHARED: [u32; 2] = [CUresult::CUDA_ERROR_INVALID_VALUE as u32, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32];

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY_PEERS: c_uint = 1;

// Numbers of attributes that newer drivers know and the oldest header lacks.
const LEGACY: c_uint = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as c_uint;
const BUFFER: c_uint = CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as c_uint;
const START: c_uint = CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as c_uint;
const SIZE: c_uint = CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as c_uint;
const HANDLE_TYPES: c_uint = CUpointer_attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as c_uint;
const POOL: c_uint = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as c_uint;
/// `CU_POINTER_ATTRIBUTE_MAPPING_SIZE`
const MAPPING_SIZE: c_uint = 18;
/// `CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR`
const MAPPING_START: c_uint = 19;
/// `CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID`
const NUMBER: c_uint = 20;

functions! {
    SharingFunctions:
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetUuid_v2(*mut [u8; 16], CUdevice);
    cuPointerGetAttribute(*mut c_void, c_uint, CUdeviceptr);
    cuIpcGetMemHandle(*mut RawHandle, CUdeviceptr);
    cuIpcOpenMemHandle_v2(*mut CUdeviceptr, RawHandle, c_uint);
    cuIpcCloseMemHandle(CUdeviceptr);
    cuIpcGetEventHandle(*mut RawHandle, CUevent);
    cuIpcOpenEventHandle(*mut CUevent, RawHandle);
    cuMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void);
    cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, c_uint, c_ulonglong);
    cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, c_uint);
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemGetAllocationGranularity(*mut usize, *const Property, c_uint);
    cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const Property, c_ulonglong);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const AccessOf, usize);
    cuEventCreate(*mut CUevent, c_uint);
    cuMemPoolExportToShareableHandle(*mut c_void, CUmemoryPool, c_uint, c_ulonglong);
    cuMemPoolExportPointer(*mut RawHandle, CUdeviceptr);
    cuMemPoolImportFromShareableHandle(*mut CUmemoryPool, *mut c_void, c_uint, c_ulonglong);
    cuMemPoolImportPointer(*mut CUdeviceptr, CUmemoryPool, *mut RawHandle);
    cuMemPoolSetAccess(CUmemoryPool, *const AccessOf, usize);
    cuMemFreeAsync(CUdeviceptr, CUstream);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
}

impl Cuda {
    fn sharing(&self, call: &'static str) -> Outcome<&SharingFunctions> {
        self.2.as_ref().ok_or(Failure { call, code: CUresult::CUDA_ERROR_NOT_SUPPORTED as u32 })
    }

    /// Returns an attribute of an address; `None` where the driver does not know it.
    fn attribute<T: Default>(&self, number: c_uint, address: usize) -> Option<T> {
        let mut value = T::default();
        let functions = self.2.as_ref()?;
        // SAFETY: the requested attributes are of these types (`cuPointerGetAttribute` in the driver API). The
        // address is only looked up, never read.
        let code =
            unsafe { (functions.cuPointerGetAttribute)((&raw mut value).cast(), number, address as CUdeviceptr) };
        (code == 0).then_some(value)
    }

    /// Reserves addresses for parts of these lengths, and maps them side by side with `map`, which gets the number of a
    /// part and its address. Returns the first address.
    fn map_parts(
        &self,
        ordinal: i32,
        parts: &[usize],
        map: impl Fn(usize, CUdeviceptr) -> Outcome<()>,
    ) -> Outcome<usize> {
        let functions = self.sharing("cuMemAddressReserve")?;
        let (mut start, mut done, total) = (0, 0, parts.iter().sum());
        // SAFETY: the output is writable; the driver chooses the addresses.
        unsafe { call!(in functions, cuMemAddressReserve(&mut start, total, 0, 0, 0)) }?;
        let mut address = start;
        let mut map_all = || {
            for (number, nbytes) in parts.iter().enumerate() {
                map(number, address)?;
                done += 1;
                address += *nbytes as CUdeviceptr;
            }
            let access = AccessOf::all(ordinal);
            // SAFETY: the whole range is mapped, and there is one description.
            unsafe { call!(in functions, cuMemSetAccess(start, total, &access, 1)) }
        };
        let mapped = map_all();
        if mapped.is_err() {
            let mut address = start;
            // SAFETY: these parts were mapped, and no work has used them. The range was reserved above.
            unsafe {
                for nbytes in &parts[..done] {
                    let _ = call!(in functions, cuMemUnmap(address, *nbytes));
                    address += *nbytes as CUdeviceptr;
                }
                let _ = call!(in functions, cuMemAddressFree(start, total));
            }
        }
        mapped.map(|()| start as usize)
    }

    /// Maps one part at an address that was reserved, and drops the handle of its allocation: the mapping keeps it.
    fn map_file(&self, address: CUdeviceptr, file: &OwnedFd, nbytes: usize) -> Outcome<()> {
        let functions = self.sharing("cuMemMap")?;
        let mut allocation = 0;
        let descriptor = with_exposed_provenance_mut(file.as_raw_fd() as usize);
        // SAFETY: the descriptor is open, and the driver does not take it over; the output is writable. The range is
        // reserved, and nothing is mapped there.
        unsafe {
            call!(in functions, cuMemImportFromShareableHandle(&mut allocation, descriptor, FILE_DESCRIPTOR))?;
            let mapped = call!(in functions, cuMemMap(address, nbytes, 0, allocation, 0));
            let released = call!(in functions, cuMemRelease(allocation));
            mapped.and(released)
        }
    }
}

// SAFETY of the calls below, where a comment says "see above": as in the parent module.
impl SharingDriver for Cuda {
    fn uuid(&self, ordinal: i32) -> Outcome<[u8; 16]> {
        let functions = self.sharing("cuDeviceGetUuid_v2")?;
        let (mut device, mut uuid) = (0, [0; 16]);
        // SAFETY: the outputs are writable; a wrong ordinal is an error.
        unsafe {
            call!(in functions, cuDeviceGet(&mut device, ordinal))?;
            call!(in functions, cuDeviceGetUuid_v2(&mut uuid, device))?;
        }
        Ok(uuid)
    }

    fn mapped(&self, address: usize) -> Outcome<Mapped> {
        self.sharing("cuPointerGetAttribute")?;
        let range = |start, size| {
            let (start, size) = (self.attribute::<usize>(start, address)?, self.attribute::<usize>(size, address)?);
            (size > 0).then(|| start..start.saturating_add(size))
        };
        let nothing = address..address;
        let whole = || range(START, SIZE);
        if self.attribute::<u32>(LEGACY, address).unwrap_or_default() != 0 {
            let (number, range) = (self.attribute::<u64>(BUFFER, address), whole().unwrap_or(nothing));
            return Ok(Mapped { legacy: true, number, range, ..Mapped::default() });
        }
        let handle_types = self.attribute::<u64>(HANDLE_TYPES, address).unwrap_or_default();
        let pool = self.attribute::<usize>(POOL, address).filter(|pool| *pool != 0);
        // What is mapped as one under an allocation of a pool is a part of the pool.
        let range = if pool.is_some() { whole() } else { range(MAPPING_START, MAPPING_SIZE).or_else(whole) };
        let number = self.attribute::<u64>(NUMBER, address).filter(|number| *number != 0);
        Ok(Mapped { legacy: false, handle_types, pool, number, range: range.unwrap_or(nothing) })
    }

    fn memory_handle(&self, address: usize) -> Outcome<Handle> {
        let functions = self.sharing("cuIpcGetMemHandle")?;
        let mut handle = RawHandle([0; HANDLE]);
        // SAFETY: the output is writable; an address that is not an allocation is an error.
        unsafe { call!(in functions, cuIpcGetMemHandle(&mut handle, address as CUdeviceptr)) }?;
        Ok(handle.0)
    }

    fn open_memory(&self, handle: &Handle) -> Outcome<usize> {
        let functions = self.sharing("cuIpcOpenMemHandle_v2")?;
        let mut address = 0;
        // SAFETY: the output is writable; bytes that are not a handle are an error.
        unsafe { call!(in functions, cuIpcOpenMemHandle_v2(&mut address, RawHandle(*handle), LAZY_PEERS)) }?;
        Ok(address as usize)
    }

    unsafe fn close_memory(&self, address: usize) -> Outcome<()> {
        // SAFETY: the caller's promises.
        unsafe { call!(in self.sharing("cuIpcCloseMemHandle")?, cuIpcCloseMemHandle(address as CUdeviceptr)) }
    }

    fn file_of(&self, address: usize) -> Outcome<OwnedFd> {
        let functions = self.sharing("cuMemRetainAllocationHandle")?;
        let (mut allocation, mut descriptor): (_, c_int) = (0, -1);
        // SAFETY: the outputs are writable, the second of the type of a descriptor; an address without an allocation is
        // an error. A descriptor that was exported is the caller's.
        unsafe {
            call!(in functions, cuMemRetainAllocationHandle(&mut allocation, with_exposed_provenance_mut(address)))?;
            let output = (&raw mut descriptor).cast();
            let exported = call!(in functions, cuMemExportToShareableHandle(output, allocation, FILE_DESCRIPTOR, 0));
            let released = call!(in functions, cuMemRelease(allocation));
            exported.map(|()| OwnedFd::from_raw_fd(descriptor)).and_then(|file| released.map(|()| file))
        }
    }

    fn create_mapped(&self, ordinal: i32, nbytes: usize) -> Outcome<(usize, usize)> {
        let functions = self.sharing("cuMemCreate")?;
        let property = Property { kind: 1, handle_types: FILE_DESCRIPTOR, location: 1, ordinal, ..Property::default() };
        let (mut allocation, mut unit) = (0, 0);
        // SAFETY: the outputs are writable, and the property describes memory of a device. The range is reserved when
        // it is mapped. The mapping keeps the allocation, whose handle is released once.
        unsafe {
            call!(in functions, cuMemGetAllocationGranularity(&mut unit, &property, 0))?;
            let nbytes = nbytes.max(1).checked_next_multiple_of(unit.max(1)).unwrap_or(usize::MAX);
            call!(in functions, cuMemCreate(&mut allocation, nbytes, &property, 0))?;
            let map = |_, address| call!(in functions, cuMemMap(address, nbytes, 0, allocation, 0));
            let mapped = self.map_parts(ordinal, &[nbytes], map);
            let released = call!(in functions, cuMemRelease(allocation));
            mapped.and_then(|start| released.map(|()| (start, nbytes)))
        }
    }

    fn map_files(&self, ordinal: i32, files: &[(OwnedFd, usize)]) -> Outcome<usize> {
        let parts: Vec<usize> = files.iter().map(|(_, nbytes)| *nbytes).collect();
        self.map_parts(ordinal, &parts, |part, address| self.map_file(address, &files[part].0, parts[part]))
    }

    unsafe fn unmap(&self, address: usize, parts: &[usize]) -> Outcome<()> {
        let functions = self.sharing("cuMemUnmap")?;
        let mut at = address as CUdeviceptr;
        // SAFETY: the caller's promises: the parts were mapped side by side, in a range that was reserved for them.
        unsafe {
            for nbytes in parts {
                call!(in functions, cuMemUnmap(at, *nbytes))?;
                at += *nbytes as CUdeviceptr;
            }
            call!(in functions, cuMemAddressFree(address as CUdeviceptr, parts.iter().sum()))
        }
    }

    fn file_of_pool(&self, pool: usize) -> Outcome<Option<OwnedFd>> {
        let functions = self.sharing("cuMemPoolExportToShareableHandle")?;
        let mut descriptor: c_int = -1;
        let output = (&raw mut descriptor).cast();
        let pool = with_exposed_provenance_mut(pool);
        // SAFETY: the output is writable, and of the type of a descriptor; the pool is that of live memory.
        let exported =
            unsafe { call!(in functions, cuMemPoolExportToShareableHandle(output, pool, FILE_DESCRIPTOR, 0)) };
        match exported {
            // SAFETY: a descriptor that was exported is the caller's.
            Ok(()) => Ok(Some(unsafe { OwnedFd::from_raw_fd(descriptor) })),
            Err(failure) if NOT_SHARED.contains(&failure.code) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    fn pointer_in_pool(&self, address: usize) -> Outcome<Handle> {
        let functions = self.sharing("cuMemPoolExportPointer")?;
        let mut pointer = RawHandle([0; HANDLE]);
        // SAFETY: the output is writable; an address that is not an allocation of a pool is an error.
        unsafe { call!(in functions, cuMemPoolExportPointer(&mut pointer, address as CUdeviceptr)) }?;
        Ok(pointer.0)
    }

    fn open_in_pool(&self, ordinal: i32, file: &OwnedFd, pointer: &Handle) -> Outcome<usize> {
        let functions = self.sharing("cuMemPoolImportPointer")?;
        let (mut pool, mut address, mut pointer) = (null_mut(), 0, RawHandle(*pointer));
        let descriptor = with_exposed_provenance_mut(file.as_raw_fd() as usize);
        let access = AccessOf::all(ordinal);
        // SAFETY: the descriptor is open, and the driver does not take it over; the outputs are writable; bytes that
        // name no allocation are an error. A pool of another process is never destroyed: the driver refuses to.
        unsafe {
            call!(in functions, cuMemPoolImportFromShareableHandle(&mut pool, descriptor, FILE_DESCRIPTOR, 0))?;
            call!(in functions, cuMemPoolSetAccess(pool, &access, 1))?;
            call!(in functions, cuMemPoolImportPointer(&mut address, pool, &mut pointer))?;
        }
        Ok(address as usize)
    }

    unsafe fn free_in_order(&self, address: usize, stream: Stream) -> Outcome<()> {
        let functions = self.sharing("cuMemFreeAsync")?;
        // SAFETY: the caller's promises.
        unsafe { call!(in functions, cuMemFreeAsync(address as CUdeviceptr, raw_stream(stream))) }
    }

    fn interprocess_event(&self) -> Outcome<Event> {
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint | CUevent_flags::CU_EVENT_INTERPROCESS as c_uint;
        let mut event = null_mut();
        // SAFETY: the output is writable.
        unsafe { call!(in self.sharing("cuEventCreate")?, cuEventCreate(&mut event, flags)) }?;
        Ok(Event(event as usize))
    }

    fn event_handle(&self, event: Event) -> Outcome<Handle> {
        let mut handle = RawHandle([0; HANDLE]);
        // SAFETY: the event is alive, see above; the output is writable.
        unsafe {
            call!(in self.sharing("cuIpcGetEventHandle")?, cuIpcGetEventHandle(&mut handle, event.0 as CUevent))
        }?;
        Ok(handle.0)
    }

    fn open_event(&self, handle: &Handle) -> Outcome<Event> {
        let mut event = null_mut();
        // SAFETY: the output is writable; bytes that are not a handle are an error.
        unsafe {
            call!(in self.sharing("cuIpcOpenEventHandle")?, cuIpcOpenEventHandle(&mut event, RawHandle(*handle)))
        }?;
        Ok(Event(event as usize))
    }

    fn allocate_plain(&self, nbytes: usize) -> Outcome<usize> {
        let mut address = 0;
        // SAFETY: the output is writable.
        unsafe { call!(in self.sharing("cuMemAlloc_v2")?, cuMemAlloc_v2(&mut address, nbytes.max(1))) }?;
        Ok(address as usize)
    }

    unsafe fn free_plain(&self, address: usize) -> Outcome<()> {
        // SAFETY: the caller's promises.
        unsafe { call!(in self.sharing("cuMemFree_v2")?, cuMemFree_v2(address as CUdeviceptr)) }
    }
}
