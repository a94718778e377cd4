//! candle's storages: a vector for each dtype, or a slice of `cudarc`.

use bridge_core::{Access, Allocation, DType, Device, Error, ErrorKind, Result, Reuse, Stream};
use candle_core::CpuStorage;
use std::alloc::{Layout, alloc_zeroed};
use std::ops::Range;
#[cfg(feature = "cuda")]
use {
    candle_core::{CudaStorage, cuda::CudaStorageSlice},
    cudarc::driver::CudaStream,
};

/// What is known of a storage.
pub(crate) struct Origin {
    pub(crate) dtype: DType,
    /// Addresses of the elements.
    pub(crate) memory: Range<usize>,
    pub(crate) device: Device,
    pub(crate) stream: Option<Stream>,
    pub(crate) reuse: Reuse,
}

impl Origin {
    /// `None` for a dtype of less than a byte.
    pub(crate) fn on_host(storage: &CpuStorage) -> Option<Self> {
        let (dtype, memory) = elements(storage)?;
        Some(Self { dtype, memory, device: Device::CPU, stream: None, reuse: Reuse::InStreamOrder })
    }

    pub(crate) fn allocation(&self, bytes: Range<usize>) -> Allocation {
        let Self { device, stream, reuse, .. } = *self;
        Allocation::new(bytes, device, Access::ReadWrite, stream, reuse)
    }
}

#[cfg(feature = "cuda")]
/// A slice of `cudarc`, whatever its elements are.
pub(crate) trait Slice {
    /// Makes `stream` wait for the writes that `cudarc` has recorded in other streams, and returns the addresses.
    fn memory(&self, stream: &CudaStream) -> Range<usize>;

    /// Returns whether the memory is freed in the order of `stream`.
    fn is_freed_in(&self, stream: &CudaStream) -> bool;
}

macro_rules! storages {
    ($($variant:ident = $dtype:ident;)*) => {
        /// The dtypes of storages. The others of candle have elements of less than a byte.
        pub(crate) const DTYPES: &[DType] = &[$(DType::$dtype),*];

        /// Returns the dtype of a storage, and the addresses of its elements. `None` for a dtype of less than a byte.
        pub(crate) fn elements(storage: &CpuStorage) -> Option<(DType, Range<usize>)> {
            match storage {
                $(CpuStorage::$variant(elements) => {
                    let start = elements.as_ptr().expose_provenance();
                    Some((DType::$dtype, start..start + size_of_val(elements.as_slice())))
                })*
                _ => None,
            }
        }

        /// Returns a storage of `len` zeros.
        ///
        /// # Errors
        ///
        /// [`ErrorKind::Dtype`] for a dtype that candle lacks, and [`ErrorKind::OutOfMemory`].
        pub(crate) fn zeros(dtype: DType, len: usize) -> Result<CpuStorage> {
            match dtype {
                // SAFETY: the elements are numbers, for which all bits may be 0.
                $(DType::$dtype => Ok(CpuStorage::$variant(unsafe { zeroed(len) }?)),)*
                _ => Err(lacks(dtype)),
            }
        }

        /// Returns candle's name of a dtype.
        ///
        /// # Errors
        ///
        /// [`ErrorKind::Dtype`] for a dtype that candle lacks.
        #[cfg(feature = "cuda")]
        pub(crate) fn kind(dtype: DType) -> Result<candle_core::DType> {
            match dtype {
                $(DType::$dtype => Ok(candle_core::DType::$variant),)*
                _ => Err(lacks(dtype)),
            }
        }

        /// Returns the dtype of a storage on a device, and its elements. `None` for a dtype of less than a byte.
        #[cfg(feature = "cuda")]
        pub(crate) fn slice(storage: &CudaStorage) -> Option<(DType, &dyn Slice)> {
            match &storage.slice {
                $(CudaStorageSlice::$variant(elements) => Some((DType::$dtype, elements)),)*
                _ => None,
            }
        }
    };
}

storages! {
    U8 = UINT8;
    U32 = UINT32;
    I16 = INT16;
    I32 = INT32;
    I64 = INT64;
    BF16 = BFLOAT16;
    F16 = FLOAT16;
    F32 = FLOAT32;
    F64 = FLOAT64;
    F8E4M3 = FLOAT8_E4M3FN;
}

#[cold]
fn lacks(dtype: DType) -> Error {
    Error::new(ErrorKind::Dtype, format!("candle has no dtype {dtype}: cast the tensor first"))
}

/// Returns a vector of zeros, whose pages the system provides at the first write.
///
/// # Safety
///
/// All bits of a `T` may be 0.
unsafe fn zeroed<T>(len: usize) -> Result<Vec<T>> {
    let no_memory = || {
        let text = format!("host: out of memory allocating {len} elements of {} bytes", size_of::<T>());
        Error::new(ErrorKind::OutOfMemory, text)
    };
    let layout = Layout::array::<T>(len).map_err(|_| no_memory())?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout has bytes.
    let memory = unsafe { alloc_zeroed(layout) };
    if memory.is_null() {
        return Err(no_memory());
    }
    // SAFETY: the memory was allocated so for as many elements, which are 0: valid by the caller's obligation.
    Ok(unsafe { Vec::from_raw_parts(memory.cast(), len, len) })
}
