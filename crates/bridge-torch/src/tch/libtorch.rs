//! The C functions of libtorch, and the handles that they take.

use crate::library::{AtTensor, Held, function};
use ::tch::Tensor;
use bridge_core::{Error, ErrorKind, Result};
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

/// Returns the handle that libtorch's C functions take. `tch` keeps a `C_tensor*`, which is an `at::Tensor*`, and so is
/// an `AtenTensorHandle`. It is valid as long as the tensor.
pub(crate) fn handle(tensor: &Tensor) -> AtTensor {
    tensor.as_ptr().cast_mut().cast()
}

/// Returns a tensor that owns the handle.
///
/// # Safety
///
/// The handle is ours: a C function of libtorch has returned it, and no other code deletes it.
pub(crate) unsafe fn adopt(handle: NonNull<*mut c_void>) -> Tensor {
    // SAFETY: both sides make an `at::Tensor` with C++'s `new`, and delete it with `delete`. It is the caller's.
    unsafe { Tensor::from_ptr(handle.as_ptr().cast()) }
}

/// Reads one fact of a tensor.
pub(crate) type Read<T> = unsafe extern "C" fn(AtTensor, *mut T) -> c_int;
/// Called by libtorch when the last tensor over the memory is dropped: the address, and the context.
pub(crate) type Deleter = unsafe extern "C" fn(*mut c_void, *mut c_void);

macro_rules! functions {
    ($($field:ident: $name:literal, $type:ty;)*) => {
        /// Functions of `torch/csrc/inductor/aoti_torch/c/shim.h` and `torch/csrc/stable/c/shim.h`. All catch what C++
        /// throws, and return 0 for success.
        pub(crate) struct Libtorch {
            $(#[doc = concat!("`", $name, "`")]
            pub(crate) $field: $type,)*
        }

        impl Libtorch {
            /// # Errors
            ///
            /// [`ErrorKind::Missing`] without libtorch in the process, [`ErrorKind::Version`] where it lacks a function.
            pub(crate) fn find() -> Result<Self> {
                // SAFETY: every libtorch has this function, of this type.
                if unsafe { named::<unsafe extern "C" fn() -> i32>("aoti_torch_device_type_cpu") }.is_none() {
                    let text = "the process has not loaded libtorch_cpu.so: link libtorch dynamically, as tch does by default";
                    return Err(Error::new(ErrorKind::Missing, text));
                }
                // SAFETY: the types are those of the headers.
                unsafe { Ok(Self { $($field: named($name).ok_or_else(|| too_old($name))?,)* }) }
            }
        }
    };
}

functions! {
    device_type_cpu: "aoti_torch_device_type_cpu", unsafe extern "C" fn() -> i32;
    device_type_cuda: "aoti_torch_device_type_cuda", unsafe extern "C" fn() -> i32;
    device_type_meta: "aoti_torch_device_type_meta", unsafe extern "C" fn() -> i32;
    layout_strided: "aoti_torch_layout_strided", unsafe extern "C" fn() -> i32;
    is_defined: "aoti_torch_is_defined", Read<bool>;
    layout: "aoti_torch_get_layout", Read<i32>;
    device_type: "aoti_torch_get_device_type", Read<i32>;
    device_index: "aoti_torch_get_device_index", Read<i32>;
    dtype: "aoti_torch_get_dtype", Read<i32>;
    dim: "aoti_torch_get_dim", Read<i64>;
    sizes: "aoti_torch_get_sizes", Read<*mut i64>;
    strides: "aoti_torch_get_strides", Read<*mut i64>;
    data: "aoti_torch_get_data_ptr", Read<*mut c_void>;
    reinterpret: "aoti_torch__reinterpret_tensor",
        unsafe extern "C" fn(AtTensor, i64, *const i64, *const i64, i64, *mut AtTensor) -> c_int;
    delete: "aoti_torch_delete_tensor_object", unsafe extern "C" fn(AtTensor) -> c_int;
    empty_strided: "aoti_torch_empty_strided",
        unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut AtTensor) -> c_int;
    from_blob: "torch_from_blob",
        unsafe extern "C" fn(
            *mut c_void, i64, *const i64, *const i64, i64, i32, i32, i32, *mut AtTensor, i32, *const u8, i64,
            Option<Deleter>, *mut c_void,
        ) -> c_int;
}

/// Looks up a function of libtorch's part for the host.
///
/// # Safety
///
/// `F` is the type of the function with this name.
pub(crate) unsafe fn named<F: Copy>(name: &str) -> Option<F> {
    // SAFETY: the caller's obligation.
    unsafe { function("libtorch_cpu.so", name) }
}

#[cold]
fn too_old(name: &str) -> Error {
    let text = format!("libtorch has no {name}: use libtorch 2.11 or later, with the version of tch that takes it");
    Error::new(ErrorKind::Version, text)
}

/// Makes the error for a function that has failed. libtorch prints its reason to the standard error and keeps none.
#[cold]
pub(crate) fn failed(what: &str) -> Error {
    Error::new(ErrorKind::Framework, format!("libtorch {what}: it printed the reason to the standard error"))
}

impl Libtorch {
    /// Reads one fact of a tensor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Framework`] where the tensor has no such fact.
    pub(crate) fn read<T: Copy>(&self, fact: Read<T>, tensor: &Tensor, nothing: T) -> Result<T> {
        let mut value = nothing;
        // SAFETY: the tensor is alive, and the result is writable.
        match unsafe { fact(handle(tensor), &mut value) } {
            0 => Ok(value),
            _ => Err(failed("does not describe the tensor")),
        }
    }

    /// Returns a hold on the tensor's storage. The tensor itself would not do: `set_data` replaces its memory.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Framework`] for a tensor without a storage.
    pub(crate) fn keep_alive(&self, tensor: &Tensor) -> Result<Held> {
        let mut held = ptr::null_mut();
        // SAFETY: the tensor is alive. No dimensions are read, and the result is writable and ours.
        let code = unsafe { (self.reinterpret)(handle(tensor), 0, ptr::null(), ptr::null(), 0, &mut held) };
        let tensor = NonNull::new(held).filter(|_| code == 0);
        let tensor = tensor.ok_or_else(|| failed("holds no storage of the tensor"))?;
        Ok(Held { tensor, delete: self.delete })
    }
}
