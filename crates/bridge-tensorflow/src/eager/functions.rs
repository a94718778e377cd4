//! The functions of the eager runtime: C functions, and a few of C++ in tested versions.

use crate::runtime::Runtime;
use crate::runtime::api::{Deallocator, TF_DeviceList, TF_Status, TF_Tensor, functions, opaque};
use crate::runtime::dtypes::UINT8;
use crate::runtime::library::{Libraries, Version, Versions};
use crate::runtime::status::Status;
use crate::runtime::tensor::RuntimeTensor;
use bridge_core::{Dims, Result};
use std::ffi::{c_char, c_int, c_void};

opaque! {
    TFE_ContextOptions;
    TFE_Context;
    TFE_Op;
    TFE_TensorHandle;
    /// `tensorflow::Tensor`
    CxxTensor;
}

/// A TensorFlow 2 with the functions of its eager runtime.
pub(crate) struct EagerRuntime {
    pub(crate) runtime: &'static Runtime,
    pub(crate) functions: EagerFunctions,
    pub(crate) handles: HandleFunctions,
}

impl EagerRuntime {
    /// Looks the functions up.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Version`](bridge_core::ErrorKind::Version) if one of those is missing that every version has.
    pub(crate) fn find(runtime: &'static Runtime) -> Result<Self> {
        let (libraries, version) = runtime.libraries();
        let (functions, handles) = (EagerFunctions::find(libraries)?, HandleFunctions::find(libraries, version));
        let mut found = Self { runtime, functions, handles };
        if !found.reads_a_shape().is_ok_and(|reads| reads) {
            found.handles.tensor = None;
        }
        Ok(found)
    }

    /// Returns whether the C++ functions, if they were found, read the shape of a tensor.
    fn reads_a_shape(&self) -> Result<bool> {
        let Some(read) = self.handles.tensor else { return Ok(false) };
        let (core, shape, bytes) = (&self.runtime.core, [2, 1, 300], [0; 600]);
        let status = Status::new(core);
        // SAFETY: there are as many bytes as the shape has elements. The tensor is alive; the handle is ours, local, and
        // deleted once.
        let read = unsafe {
            let tensor = RuntimeTensor::copied(core, UINT8, &shape, bytes.as_ptr(), bytes.len())?;
            let handle = (self.functions.TFE_NewTensorHandle)(tensor.raw(), status.raw());
            status.check()?;
            let read = read.read(handle);
            (self.functions.TFE_DeleteTensorHandle)(handle);
            read
        };
        Ok(read.is_some_and(|(read, _)| *read == shape))
    }
}

functions! {
    /// The C functions (`tensorflow/c/eager/c_api.h`).
    EagerFunctions {
        TFE_NewContextOptions() -> *mut TFE_ContextOptions;
        TFE_ContextOptionsSetConfig(*mut TFE_ContextOptions, *const c_void, usize, *mut TF_Status);
        TFE_DeleteContextOptions(*mut TFE_ContextOptions);
        TFE_NewContext(*const TFE_ContextOptions, *mut TF_Status) -> *mut TFE_Context;
        TFE_ContextListDevices(*mut TFE_Context, *mut TF_Status) -> *mut TF_DeviceList;
        TFE_NewOp(*mut TFE_Context, *const c_char, *mut TF_Status) -> *mut TFE_Op;
        TFE_DeleteOp(*mut TFE_Op);
        TFE_OpSetDevice(*mut TFE_Op, *const c_char, *mut TF_Status);
        TFE_OpSetAttrType(*mut TFE_Op, *const c_char, c_int);
        TFE_OpSetAttrInt(*mut TFE_Op, *const c_char, i64);
        TFE_OpSetAttrFloat(*mut TFE_Op, *const c_char, f32);
        TFE_OpSetAttrBool(*mut TFE_Op, *const c_char, u8);
        TFE_OpAddInput(*mut TFE_Op, *mut TFE_TensorHandle, *mut TF_Status);
        TFE_Execute(*mut TFE_Op, *mut *mut TFE_TensorHandle, *mut c_int, *mut TF_Status);
        TFE_NewTensorHandle(*const TF_Tensor, *mut TF_Status) -> *mut TFE_TensorHandle;
        TFE_NewTensorHandleFromDeviceMemory(*mut TFE_Context, *const c_char, c_int, *const i64, c_int, *mut c_void, usize, Deallocator, *mut c_void, *mut TF_Status) -> *mut TFE_TensorHandle;
        TFE_TensorHandleCopyToDevice(*mut TFE_TensorHandle, *mut TFE_Context, *const c_char, *mut TF_Status) -> *mut TFE_TensorHandle;
        TFE_TensorHandleCopySharingTensor(*mut TFE_TensorHandle, *mut TF_Status) -> *mut TFE_TensorHandle;
        TFE_TensorHandleResolve(*mut TFE_TensorHandle, *mut TF_Status) -> *mut TF_Tensor;
        TFE_DeleteTensorHandle(*mut TFE_TensorHandle);
        TFE_TensorHandleDataType(*mut TFE_TensorHandle) -> c_int;
        TFE_TensorHandleNumDims(*mut TFE_TensorHandle, *mut TF_Status) -> c_int;
        TFE_TensorHandleDim(*mut TFE_TensorHandle, c_int, *mut TF_Status) -> i64;
        TFE_TensorHandleDeviceMemorySize(*mut TFE_TensorHandle, *mut TF_Status) -> usize;
        TFE_TensorHandleDevicePointer(*mut TFE_TensorHandle, *mut TF_Status) -> *mut c_void;
        TFE_TensorHandleBackingDeviceName(*mut TFE_TensorHandle, *mut TF_Status) -> *const c_char;
        TFE_TensorHandleDeviceName(*mut TFE_TensorHandle, *mut TF_Status) -> *const c_char;
    }
}

/// C++ functions of handles, in tested versions. Without them, exporting an eager tensor waits for the device.
pub(crate) struct HandleFunctions {
    /// The tensor of a local handle, its shape and its address.
    pub(crate) tensor: Option<TensorFunctions>,
    /// `bool TensorHandle::IsReady() const`: whether the tensor has been made, which is always so without an
    /// asynchronous executor.
    pub(crate) is_ready: Option<unsafe extern "C" fn(*const TFE_TensorHandle) -> bool>,
}

#[derive(Clone, Copy)]
pub(crate) struct TensorFunctions {
    /// `Status TensorHandle::Tensor(const Tensor**) const`: the status is written to the first argument.
    tensor_of: unsafe extern "C" fn(*mut usize, *mut TFE_TensorHandle, *mut *const CxxTensor) -> *mut usize,
    /// `void* Tensor::data() const`
    data_of: unsafe extern "C" fn(*const CxxTensor) -> *mut c_void,
    /// `int TensorShapeBase<TensorShape>::dims() const` and `int64_t TensorShapeBase<TensorShape>::dim_size(int) const`.
    /// The shape is the first member of the tensor.
    dims_of: unsafe extern "C" fn(*const CxxTensor) -> c_int,
    dim_of: unsafe extern "C" fn(*const CxxTensor, c_int) -> i64,
    /// The status of success.
    ok: usize,
}

impl TensorFunctions {
    /// Returns the shape and the address of the handle's tensor, or `None` where the function fails.
    ///
    /// # Safety
    ///
    /// The handle is alive and local, and its tensor has been made.
    pub(crate) unsafe fn read(&self, handle: *mut TFE_TensorHandle) -> Option<(Dims, usize)> {
        let (mut result, mut tensor) = (!self.ok, std::ptr::null());
        // SAFETY: the caller's obligation; both outputs are writable. The tensor lives as long as the handle, and the
        // dimensions are in range.
        unsafe {
            (self.tensor_of)(&mut result, handle, &mut tensor);
            if result != self.ok || tensor.is_null() {
                return None;
            }
            let shape = (0..(self.dims_of)(tensor)).map(|i| (self.dim_of)(tensor, i)).collect();
            Some((shape, (self.data_of)(tensor).expose_provenance()))
        }
    }
}

/// Versions with which [`HandleFunctions`] were tested, with the status of success: a mangled name says nothing of the
/// result, and `Status` was a pointer before it was a number.
const HANDLES: [(Versions, usize); 2] = [((2, 12)..=(2, 19), 0), ((2, 20)..=(2, 21), 1)];

impl HandleFunctions {
    fn find(libraries: &Libraries, version: Version) -> Self {
        let ok = HANDLES.iter().find(|(versions, _)| versions.contains(&version)).map(|(_, ok)| *ok);
        // SAFETY: the signatures are what the mangled names say; the status, which has no C type, was tried with the
        // versions of the table.
        unsafe {
            let tensor_of = libraries.optional("_ZNK10tensorflow12TensorHandle6TensorEPPKNS_6TensorE");
            let data_of = libraries.optional("_ZNK10tensorflow6Tensor4dataEv");
            let dims_of = libraries.optional("_ZNK10tensorflow15TensorShapeBaseINS_11TensorShapeEE4dimsEv");
            let dim_of = libraries.optional("_ZNK10tensorflow15TensorShapeBaseINS_11TensorShapeEE8dim_sizeEi");
            let tensor = ok.zip(tensor_of).zip(data_of).zip(dims_of).zip(dim_of);
            Self {
                // On other architectures a status is not returned through a first argument.
                tensor: tensor.filter(|_| cfg!(target_arch = "x86_64")).map(
                    |((((ok, tensor_of), data_of), dims_of), dim_of)| TensorFunctions {
                        tensor_of,
                        data_of,
                        dims_of,
                        dim_of,
                        ok,
                    },
                ),
                is_ready: ok.and_then(|_| libraries.optional("_ZNK10tensorflow12TensorHandle7IsReadyEv")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::installed;
    use crate::runtime::library::Series;

    #[test]
    fn functions_of_handles_are_called_in_tested_versions_alone() {
        let Some(folder) = installed::two() else {
            eprintln!("left out: no TensorFlow 2 (cargo xtask setup fetches it)");
            return;
        };
        // TensorFlow cannot be unloaded.
        // SAFETY: it is the folder of a TensorFlow.
        let libraries = unsafe { Libraries::load(Series::Two, &folder) };
        let libraries = std::mem::ManuallyDrop::new(libraries.unwrap());
        for (version, ok) in [
            ((1, 15), None),
            ((2, 11), None),
            ((2, 12), Some(0)),
            ((2, 19), Some(0)),
            ((2, 20), Some(1)),
            ((2, 21), Some(1)),
            ((2, 22), None),
            ((3, 12), None),
        ] {
            let found = HandleFunctions::find(&libraries, version);
            let expected = if cfg!(target_arch = "x86_64") { ok } else { None };
            assert_eq!(found.tensor.map(|functions| functions.ok), expected, "{version:?}");
            assert_eq!(found.is_ready.is_some(), ok.is_some(), "{version:?}");
        }
    }
}
