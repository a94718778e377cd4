//! Descriptions of tensors by C functions of PyTorch's stable interface, at a third of the cost of the exchange table.

use crate::library::{AtTensor, SEARCHED, WORD, function, is_loaded, word};
use bridge_core::DType;
use bridge_core::dlpack::ffi::{DLDataType, DLDevice, DLDeviceType, DLTensor};
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

/// Reads a property of a tensor: handle, result. It returns 0, or an error where C++ throws.
type Read<T> = unsafe extern "C" fn(AtTensor, *mut T) -> c_int;

/// What describes tensors in memory of the host and of CUDA devices.
pub(crate) struct Describe {
    /// The address that an implementation begins with, of tensors with a storage and plain shapes. Others, such as
    /// sparse ones and those of `torch.func`, have their own functions.
    plain: usize,
    access: Access,
    dim: Read<i64>,
    sizes: Read<*mut i64>,
    strides: Read<*mut i64>,
    data: Read<*mut c_void>,
    dtype: Read<i32>,
    device_type: Read<i32>,
    device_index: Read<i32>,
    /// Bytes of the storage.
    storage_size: Read<i64>,
    /// The codes of the host and of CUDA devices.
    cpu: i32,
    cuda: Option<i32>,
    /// By PyTorch's code. It has others, such as those of narrower dtypes.
    dtypes: Vec<Option<DLDataType>>,
}

/// The most codes of dtypes that are looked at.
const CODES: usize = 64;

impl Describe {
    /// Returns the functions, if all exist. `plain` is that of a plain tensor.
    pub(crate) fn find(plain: usize, access: Access) -> Option<Self> {
        const CPU: &str = "libtorch_cpu.so";
        type Code = unsafe extern "C" fn() -> i32;
        // SAFETY: the signatures are those of `torch/csrc/inductor/aoti_torch/c/shim.h`. Those that return codes have no
        // obligations.
        unsafe {
            let code = |name: &str| Some(function::<Code>(CPU, name)?());
            let mut dtypes = vec![None; CODES];
            for (dtype, name) in DType::NAMED {
                let known = code(&format!("aoti_torch_dtype_{name}")).and_then(|code| usize::try_from(code).ok());
                if let Some(kept) = known.and_then(|code| dtypes.get_mut(code)) {
                    *kept = Some(DLDataType::from(*dtype));
                }
            }
            Some(Self {
                plain,
                access,
                dim: function(CPU, "aoti_torch_get_dim")?,
                sizes: function(CPU, "aoti_torch_get_sizes")?,
                strides: function(CPU, "aoti_torch_get_strides")?,
                data: function(CPU, "aoti_torch_get_data_ptr")?,
                dtype: function(CPU, "aoti_torch_get_dtype")?,
                device_type: function(CPU, "aoti_torch_get_device_type")?,
                device_index: function(CPU, "aoti_torch_get_device_index")?,
                storage_size: function(CPU, "aoti_torch_get_storage_size")?,
                cpu: code("aoti_torch_device_type_cpu")?,
                // PyTorch calls the devices of ROCm by the same name, and DLPack does not.
                cuda: code("aoti_torch_device_type_cuda").filter(|_| is_loaded("libtorch_cuda.so")),
                dtypes,
            })
        }
    }

    /// Returns whether a tensor is plain, and PyTorch gives access to its memory.
    ///
    /// # Safety
    ///
    /// `tensor` points to a tensor that is alive.
    pub(crate) unsafe fn is_plain(&self, tensor: AtTensor) -> bool {
        // SAFETY: the caller's obligation.
        unsafe {
            let implementation = (*tensor).expose_provenance();
            word(implementation, 0) == self.plain && self.access.is_given(implementation)
        }
    }

    /// Returns the bytes of a tensor's storage; `None` for a tensor without one.
    ///
    /// # Safety
    ///
    /// That of [`is_plain`](Self::is_plain).
    pub(crate) unsafe fn storage_size(&self, tensor: AtTensor) -> Option<usize> {
        // SAFETY: the caller's obligation.
        unsafe { read(self.storage_size, tensor) }?.try_into().ok()
    }

    /// Describes a tensor as the exchange table does. Shape and strides are the tensor's own. `None` for what the table
    /// must be asked.
    ///
    /// # Safety
    ///
    /// That of [`is_plain`](Self::is_plain).
    pub(crate) unsafe fn describe(&self, tensor: AtTensor) -> Option<DLTensor> {
        // SAFETY: the caller's obligation, here and below.
        unsafe {
            if !self.is_plain(tensor) {
                return None;
            }
            let dtype = *self.dtypes.get(usize::try_from(read(self.dtype, tensor)?).ok()?)?;
            let device = match read(self.device_type, tensor)? {
                code if code == self.cpu => DLDevice { device_type: DLDeviceType::CPU, device_id: 0 },
                code if Some(code) == self.cuda => {
                    DLDevice { device_type: DLDeviceType::CUDA, device_id: read(self.device_index, tensor)? }
                }
                _ => return None,
            };
            Some(DLTensor {
                data: read(self.data, tensor)?,
                device,
                ndim: read(self.dim, tensor)?.try_into().ok()?,
                dtype: dtype?,
                shape: read(self.sizes, tensor)?,
                strides: read(self.strides, tensor)?,
                byte_offset: 0,
            })
        }
    }
}

/// Where a storage says that PyTorch gives no access to its memory: after a later run of a CUDA graph that has made it.
///
/// PyTorch's functions of C print a stack where access is refused. The exchange table raises an exception that says why.
#[derive(Clone, Copy)]
pub(crate) struct Access {
    /// From a `TensorImpl` to the pointer to its `StorageImpl`.
    storage: usize,
    /// From a `StorageImpl` to its flags.
    flags: usize,
    /// The flags that change when access is refused, and their values before.
    mask: usize,
    given: usize,
}

impl Access {
    /// Looks where the flags are, after the address of the memory, at `memory`. `None` where they are not found.
    ///
    /// # Errors
    ///
    /// What Python raises.
    pub(crate) fn find(torch: &Bound<'_, PyModule>, storage: usize, memory: usize) -> PyResult<Option<Self>> {
        let sample = torch.call_method1("zeros", (1,))?.call_method0("untyped_storage")?;
        let address: usize = sample.getattr("_cdata")?.extract()?;
        // SAFETY: the storage is alive, and longer than what is searched.
        let words = || (0..SEARCHED).step_by(WORD).map(|offset| unsafe { word(address, offset) }).collect::<Vec<_>>();
        let before = words();
        torch.getattr("_C")?.call_method1("_set_storage_data_ptr_access_error_msg", (address, "a sample"))?;
        let after = words();
        let changed = (memory / WORD + 1..before.len()).find(|i| before[*i] != after[*i]);
        Ok(changed.map(|i| {
            let mask = before[i] ^ after[i];
            Self { storage, flags: i * WORD, mask, given: before[i] & mask }
        }))
    }

    /// Returns whether a tensor has a storage, and PyTorch gives access to its memory.
    ///
    /// # Safety
    ///
    /// The implementation is that of a plain tensor, and alive.
    unsafe fn is_given(&self, implementation: usize) -> bool {
        // SAFETY: the caller's obligation; a tensor keeps its storage.
        unsafe {
            let storage = word(implementation, self.storage);
            storage != 0 && word(storage, self.flags) & self.mask == self.given
        }
    }
}

/// Returns what a function reads; `None` for an error.
///
/// # Safety
///
/// `tensor` points to a tensor that is alive.
unsafe fn read<T>(function: Read<T>, tensor: AtTensor) -> Option<T> {
    let mut value = MaybeUninit::uninit();
    // SAFETY: the caller's obligation, and the result is writable. Without an error it is there.
    unsafe { (function(tensor, value.as_mut_ptr()) == 0).then(|| value.assume_init()) }
}
