//! C functions of tensors, looked up by name.

use crate::library::{AtTensor, Held, function};
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

/// Functions of tensors.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    /// `bool c10::TensorImpl::requires_grad() const`
    pub(crate) requires_grad: unsafe extern "C" fn(*const c_void) -> bool,
    /// `bool at::native::is_conj(const at::Tensor&)`
    pub(crate) is_conj: unsafe extern "C" fn(AtTensor) -> bool,
    /// `bool at::native::is_neg(const at::Tensor&)`
    pub(crate) is_neg: unsafe extern "C" fn(AtTensor) -> bool,
    /// The code of the dtype: handle, result.
    pub(crate) dtype: unsafe extern "C" fn(AtTensor, *mut i32) -> c_int,
    /// The codes of `torch.int8` and of `torch.uint8`.
    pub(crate) int8: unsafe extern "C" fn() -> i32,
    pub(crate) uint8: unsafe extern "C" fn() -> i32,
    /// A new tensor over the storage of another: handle, dimensions, sizes, strides, offset, result.
    reinterpret: unsafe extern "C" fn(AtTensor, i64, *const i64, *const i64, i64, *mut AtTensor) -> c_int,
    delete: unsafe extern "C" fn(AtTensor) -> c_int,
}

impl Functions {
    /// Returns the functions if all exist.
    pub(crate) fn find() -> Option<Self> {
        const CPU: &str = "libtorch_cpu.so";
        // SAFETY: the signatures are those of `torch/csrc/inductor/aoti_torch/c/shim.h`, and what the mangled names
        // say; a C++ function that reads a flag returns a `bool`.
        unsafe {
            Some(Self {
                requires_grad: function("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv")?,
                is_conj: function(CPU, "_ZN2at6native7is_conjERKNS_6TensorE")?,
                is_neg: function(CPU, "_ZN2at6native6is_negERKNS_6TensorE")?,
                dtype: function(CPU, "aoti_torch_get_dtype")?,
                int8: function(CPU, "aoti_torch_dtype_int8")?,
                uint8: function(CPU, "aoti_torch_dtype_uint8")?,
                reinterpret: function(CPU, "aoti_torch__reinterpret_tensor")?,
                delete: function(CPU, "aoti_torch_delete_tensor_object")?,
            })
        }
    }

    /// Makes a tensor without dimensions over the storage of another one. `None` for a tensor without a storage, and where
    /// memory runs out.
    ///
    /// # Safety
    ///
    /// `tensor` points to a tensor that is alive.
    pub(crate) unsafe fn hold(&self, tensor: AtTensor) -> Option<Held> {
        let mut held = ptr::null_mut();
        // SAFETY: the caller's obligation. No dimensions are read, and the result is writable and ours. The function catches
        // what C++ throws.
        let code = unsafe { (self.reinterpret)(tensor, 0, ptr::null(), ptr::null(), 0, &mut held) };
        Some(Held { tensor: NonNull::new(held).filter(|_| code == 0)?, delete: self.delete })
    }
}
