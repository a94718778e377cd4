//! TensorFlow's C functions, looked up at run time.
//!
//! The signatures are those of `tensorflow/c/*.h`, which are the same in 1.15 and since 2.12. A few functions have no C name;
//! theirs is the one that the C++ compiler gave, and they are called in the versions that they were tested with.

use crate::runtime::library::Libraries;
use bridge_core::{Error, ErrorKind, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::RangeInclusive;
use std::ptr::NonNull;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])*
        #[allow(non_camel_case_types, reason = "the names in TensorFlow's headers")]
        #[repr(C)]
        pub(crate) struct $name([u8; 0]);)*
    };
}

opaque! {
    TF_Status;
    TF_Tensor;
    TF_DeviceList;
    TF_OpDefinitionBuilder;
    TF_KernelBuilder;
    TF_OpKernelConstruction;
    TF_OpKernelContext;
    TF_ShapeInferenceContext;
    TFE_Context;
    TFE_Op;
    TFE_TensorHandle;
    TF_Graph;
    TF_Operation;
    TF_OperationDescription;
    TF_ImportGraphDefOptions;
    TF_ImportGraphDefResults;
    TF_SessionOptions;
    TF_Session;
    /// `tensorflow::Tensor`
    CxxTensor;
}

/// Gives memory back to whoever owns it: address, length in bytes, and what was given along.
pub(crate) type Deallocator = unsafe extern "C" fn(*mut c_void, usize, *mut c_void);
pub(crate) type CreateKernel = unsafe extern "C" fn(*mut TF_OpKernelConstruction) -> *mut c_void;
pub(crate) type DeleteKernel = unsafe extern "C" fn(*mut c_void);
pub(crate) type Compute = unsafe extern "C" fn(*mut c_void, *mut TF_OpKernelContext);
pub(crate) type InferShapes = unsafe extern "C" fn(*mut TF_ShapeInferenceContext, *mut TF_Status);

macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($name:ident($($type:ty),*) $(-> $result:ty)?;)* }) => {
        $(#[$doc])*
        #[expect(non_snake_case, reason = "the names in TensorFlow's headers")]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
        }

        impl $table {
            /// Looks all functions up.
            ///
            /// # Errors
            ///
            /// [`ErrorKind::Version`], which names the first function that is not there.
            pub(crate) fn find(libraries: &Libraries) -> Result<Self> {
                // SAFETY: the signatures are those of the headers, see the head of this file.
                Ok(Self { $($name: unsafe { libraries.required(stringify!($name)) }?,)* })
            }
        }
    };
}

functions! {
    /// What every runtime has.
    Core {
        TF_NewStatus() -> *mut TF_Status;
        TF_DeleteStatus(*mut TF_Status);
        TF_SetStatus(*mut TF_Status, c_int, *const c_char);
        TF_GetCode(*const TF_Status) -> c_int;
        TF_Message(*const TF_Status) -> *const c_char;
        TF_DataTypeSize(c_int) -> usize;
        TF_NewTensor(c_int, *const i64, c_int, *mut c_void, usize, Deallocator, *mut c_void) -> *mut TF_Tensor;
        TF_AllocateTensor(c_int, *const i64, c_int, usize) -> *mut TF_Tensor;
        TF_DeleteTensor(*mut TF_Tensor);
        TF_TensorType(*const TF_Tensor) -> c_int;
        TF_NumDims(*const TF_Tensor) -> c_int;
        TF_Dim(*const TF_Tensor, c_int) -> i64;
        TF_TensorByteSize(*const TF_Tensor) -> usize;
        TF_TensorData(*const TF_Tensor) -> *mut c_void;
        TF_NewOpDefinitionBuilder(*const c_char) -> *mut TF_OpDefinitionBuilder;
        TF_OpDefinitionBuilderAddInput(*mut TF_OpDefinitionBuilder, *const c_char);
        TF_OpDefinitionBuilderAddOutput(*mut TF_OpDefinitionBuilder, *const c_char);
        TF_OpDefinitionBuilderAddAttr(*mut TF_OpDefinitionBuilder, *const c_char);
        TF_OpDefinitionBuilderSetIsStateful(*mut TF_OpDefinitionBuilder, bool);
        TF_OpDefinitionBuilderSetShapeInferenceFunction(*mut TF_OpDefinitionBuilder, InferShapes);
        TF_RegisterOpDefinition(*mut TF_OpDefinitionBuilder, *mut TF_Status);
        TF_ShapeInferenceContextSetUnknownShape(*mut TF_ShapeInferenceContext, *mut TF_Status);
        TF_NewKernelBuilder(*const c_char, *const c_char, CreateKernel, Compute, DeleteKernel) -> *mut TF_KernelBuilder;
        TF_KernelBuilder_HostMemory(*mut TF_KernelBuilder, *const c_char);
        TF_RegisterKernelBuilder(*const c_char, *mut TF_KernelBuilder, *mut TF_Status);
        TF_GetInput(*mut TF_OpKernelContext, c_int, *mut *mut TF_Tensor, *mut TF_Status);
        TF_SetOutput(*mut TF_OpKernelContext, c_int, *const TF_Tensor, *mut TF_Status);
        TF_ExpectedOutputDataType(*mut TF_OpKernelContext, c_int) -> c_int;
        TF_OpKernelConstruction_GetAttrInt32(*mut TF_OpKernelConstruction, *const c_char, *mut i32, *mut TF_Status);
        TF_OpKernelContext_Failure(*mut TF_OpKernelContext, *mut TF_Status);
    }
}

/// Bytes of TensorFlow's.
#[allow(non_camel_case_types, reason = "the name in TensorFlow's headers")]
#[repr(C)]
pub(crate) struct TF_Buffer {
    pub(crate) data: *const c_void,
    /// In bytes.
    pub(crate) length: usize,
    data_deallocator: Option<unsafe extern "C" fn(*mut c_void, usize)>,
}

/// An output of an operation in a graph, and likewise an input.
#[allow(non_camel_case_types, reason = "the name in TensorFlow's headers")]
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct TF_Output {
    pub(crate) oper: *mut TF_Operation,
    pub(crate) index: c_int,
}

functions! {
    /// Graphs and sessions.
    Sessions {
        TF_GetAllOpList() -> *mut TF_Buffer;
        TF_NewBufferFromString(*const c_void, usize) -> *mut TF_Buffer;
        TF_DeleteBuffer(*mut TF_Buffer);
        TF_NewGraph() -> *mut TF_Graph;
        TF_DeleteGraph(*mut TF_Graph);
        TF_GraphOperationByName(*mut TF_Graph, *const c_char) -> *mut TF_Operation;
        TF_GraphSetTensorShape(*mut TF_Graph, TF_Output, *const i64, c_int, *mut TF_Status);
        TF_OperationNumOutputs(*mut TF_Operation) -> c_int;
        TF_OperationOutputType(TF_Output) -> c_int;
        TF_NewOperation(*mut TF_Graph, *const c_char, *const c_char) -> *mut TF_OperationDescription;
        TF_SetDevice(*mut TF_OperationDescription, *const c_char);
        TF_ColocateWith(*mut TF_OperationDescription, *mut TF_Operation);
        TF_AddInput(*mut TF_OperationDescription, TF_Output);
        TF_SetAttrType(*mut TF_OperationDescription, *const c_char, c_int);
        TF_SetAttrInt(*mut TF_OperationDescription, *const c_char, i64);
        TF_SetAttrTensor(*mut TF_OperationDescription, *const c_char, *mut TF_Tensor, *mut TF_Status);
        TF_SetAttrStringList(*mut TF_OperationDescription, *const c_char, *const *const c_void, *const usize, c_int);
        TF_FinishOperation(*mut TF_OperationDescription, *mut TF_Status) -> *mut TF_Operation;
        TF_NewImportGraphDefOptions() -> *mut TF_ImportGraphDefOptions;
        TF_DeleteImportGraphDefOptions(*mut TF_ImportGraphDefOptions);
        TF_ImportGraphDefOptionsAddInputMapping(*mut TF_ImportGraphDefOptions, *const c_char, c_int, TF_Output);
        TF_ImportGraphDefOptionsRemapControlDependency(*mut TF_ImportGraphDefOptions, *const c_char, *mut TF_Operation);
        TF_GraphImportGraphDefWithResults(*mut TF_Graph, *const TF_Buffer, *const TF_ImportGraphDefOptions, *mut TF_Status) -> *mut TF_ImportGraphDefResults;
        TF_ImportGraphDefResultsMissingUnusedInputMappings(*mut TF_ImportGraphDefResults, *mut c_int, *mut *mut *const c_char, *mut *mut c_int);
        TF_DeleteImportGraphDefResults(*mut TF_ImportGraphDefResults);
        TF_NewSessionOptions() -> *mut TF_SessionOptions;
        TF_SetConfig(*mut TF_SessionOptions, *const c_void, usize, *mut TF_Status);
        TF_DeleteSessionOptions(*mut TF_SessionOptions);
        TF_NewSession(*mut TF_Graph, *const TF_SessionOptions, *mut TF_Status) -> *mut TF_Session;
        TF_CloseSession(*mut TF_Session, *mut TF_Status);
        TF_DeleteSession(*mut TF_Session, *mut TF_Status);
        TF_SessionListDevices(*mut TF_Session, *mut TF_Status) -> *mut TF_DeviceList;
        TF_DeleteDeviceList(*mut TF_DeviceList);
        TF_DeviceListCount(*const TF_DeviceList) -> c_int;
        TF_DeviceListName(*const TF_DeviceList, c_int, *mut TF_Status) -> *const c_char;
        TF_SessionRun(*mut TF_Session, *const TF_Buffer, *const TF_Output, *const *mut TF_Tensor, c_int, *const TF_Output, *mut *mut TF_Tensor, c_int, *const *const TF_Operation, c_int, *mut TF_Buffer, *mut TF_Status);
    }
}

functions! {
    /// The eager runtime of TensorFlow 2.
    Eager {
        TFE_ContextListDevices(*mut TFE_Context, *mut TF_Status) -> *mut TF_DeviceList;
        TFE_NewOp(*mut TFE_Context, *const c_char, *mut TF_Status) -> *mut TFE_Op;
        TFE_DeleteOp(*mut TFE_Op);
        TFE_OpSetDevice(*mut TFE_Op, *const c_char, *mut TF_Status);
        TFE_OpSetAttrType(*mut TFE_Op, *const c_char, c_int);
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

/// C++ functions, where they are there and known: without them something is slower, or cannot be had.
pub(crate) struct Cxx {
    /// The tensor of a local handle, and its address.
    pub(crate) tensor: Option<TensorFunctions>,
    /// `bool TensorHandle::IsReady() const`: whether the tensor has been made, as it always has without an asynchronous
    /// executor.
    pub(crate) is_ready: Option<unsafe extern "C" fn(*const TFE_TensorHandle) -> bool>,
    /// `const GpuDevice& OpKernelContext::eigen_device<GpuDevice>() const`; only of builds for GPUs.
    pub(crate) gpu_device: Option<unsafe extern "C" fn(*mut TF_OpKernelContext) -> *const *const *const c_void>,
}

#[derive(Clone, Copy)]
pub(crate) struct TensorFunctions {
    /// `Status TensorHandle::Tensor(const Tensor**) const`: the status is written to the first argument.
    tensor_of: unsafe extern "C" fn(*mut usize, *mut TFE_TensorHandle, *mut *const CxxTensor) -> *mut usize,
    /// `void* Tensor::data() const`
    data_of: unsafe extern "C" fn(*const CxxTensor) -> *mut c_void,
    /// The status that stands for success.
    ok: usize,
}

impl TensorFunctions {
    /// Returns the address of the handle's tensor, or `None` where the function fails.
    ///
    /// # Safety
    ///
    /// The handle is a local one, and its tensor has been made.
    pub(crate) unsafe fn address(&self, handle: *mut TFE_TensorHandle) -> Option<usize> {
        let (mut result, mut tensor) = (!self.ok, std::ptr::null());
        // SAFETY: the caller's obligation; both outputs are writable. The tensor lives as long as the handle.
        unsafe {
            (self.tensor_of)(&mut result, handle, &mut tensor);
            (result == self.ok && !tensor.is_null()).then(|| (self.data_of)(tensor).addr())
        }
    }
}

/// The first two numbers of a version.
pub(crate) type Version = (u32, u32);
type Versions = RangeInclusive<Version>;

/// Versions with which the functions of [`TensorHandle`](Cxx::tensor) were tested, with the status that stands for success:
/// a mangled name says nothing of the result, and `Status` was a pointer before it was a number.
const HANDLES: [(Versions, usize); 2] = [((2, 12)..=(2, 19), 0), ((2, 20)..=(2, 21), 1)];

/// Versions whose [`eigen_device`](Cxx::gpu_device) returns a device whose first member is its stream's interface: run on a
/// GPU with 1.15 and 2.21, and the same instructions in those between.
const STREAMS: [Versions; 2] = [(1, 15)..=(1, 15), (2, 12)..=(2, 21)];

impl Cxx {
    pub(crate) fn find(libraries: &Libraries, version: Version) -> Self {
        let ok = HANDLES.iter().find(|(versions, _)| versions.contains(&version)).map(|(_, ok)| *ok);
        // SAFETY: the signatures are what the names say; the results that have no C type (a status, a reference) were
        // tried with the versions of the tables.
        unsafe {
            let tensor_of = libraries.optional("_ZNK10tensorflow12TensorHandle6TensorEPPKNS_6TensorE");
            let data_of = libraries.optional("_ZNK10tensorflow6Tensor4dataEv");
            let tensor = ok.zip(tensor_of).zip(data_of);
            Self {
                // Elsewhere a result like this status does not come back through a first argument.
                tensor: tensor
                    .filter(|_| cfg!(target_arch = "x86_64"))
                    .map(|((ok, tensor_of), data_of)| TensorFunctions { tensor_of, data_of, ok }),
                is_ready: ok.and_then(|_| libraries.optional("_ZNK10tensorflow12TensorHandle7IsReadyEv")),
                gpu_device: Self::shows_streams(version)
                    .then(|| {
                        libraries.optional("_ZNK10tensorflow15OpKernelContext12eigen_deviceIN5Eigen9GpuDeviceEEERKT_v")
                    })
                    .flatten()
                    .filter(|_| is_for_cuda(libraries)),
            }
        }
    }

    /// Whether functions of this table are called in a version.
    pub(crate) fn shows_streams(version: Version) -> bool {
        STREAMS.iter().any(|versions| versions.contains(&version))
    }
}

/// Whether the libraries were built for CUDA: others have the functions for GPUs as well.
///
/// # Safety
///
/// The version is one of [`STREAMS`].
unsafe fn is_for_cuda(libraries: &Libraries) -> bool {
    // SAFETY: the function has this signature in these versions, and no obligations.
    unsafe {
        let built: Option<unsafe extern "C" fn() -> bool> =
            libraries.optional("_ZN10tensorflow19IsGoogleCudaEnabledEv");
        built.is_none_or(|built| built())
    }
}

/// `TF_RESOURCE_EXHAUSTED`: the host or a GPU has no memory left.
pub(crate) const RESOURCE_EXHAUSTED: c_int = 8;

/// Where functions say whether they succeeded.
pub(crate) struct Status<'a> {
    core: &'a Core,
    raw: NonNull<TF_Status>,
}

impl<'a> Status<'a> {
    pub(crate) fn new(core: &'a Core) -> Self {
        // SAFETY: the function has no obligations.
        let raw = unsafe { (core.TF_NewStatus)() };
        Self { core, raw: NonNull::new(raw).expect("TF_NewStatus gives a status") }
    }

    pub(crate) fn raw(&self) -> *mut TF_Status {
        self.raw.as_ptr()
    }

    /// What the last function said that was given this status.
    pub(crate) fn check(&self) -> Result<()> {
        // SAFETY: the status lives as long as `self`.
        match unsafe { (self.core.TF_GetCode)(self.raw()) } {
            0 => Ok(()),
            code => Err(self.error(code)),
        }
    }

    #[cold]
    fn error(&self, code: c_int) -> Error {
        // SAFETY: the message is a C string that lives as long as the status is not written to.
        let message = unsafe { CStr::from_ptr((self.core.TF_Message)(self.raw())) }.to_string_lossy();
        let kind = if code == RESOURCE_EXHAUSTED { ErrorKind::OutOfMemory } else { ErrorKind::Framework };
        Error::new(kind, format!("tensorflow reported: {message}"))
    }
}

impl Drop for Status<'_> {
    fn drop(&mut self) {
        // SAFETY: the status is ours, and nobody uses it any more.
        unsafe { (self.core.TF_DeleteStatus)(self.raw()) };
    }
}

#[cfg(test)]
#[path = "../../tests/installed/mod.rs"]
mod installed;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::library::{self, Series};

    #[test]
    fn private_functions_are_called_in_tested_versions_alone() {
        let Some(folder) = installed::two() else {
            eprintln!("left out: no TensorFlow 2 (cargo xtask setup fetches it)");
            return;
        };
        let (series, folder) = library::find(&folder).unwrap();
        assert_eq!(series, Series::Two);
        // TensorFlow cannot be unloaded.
        let libraries = std::mem::ManuallyDrop::new(Libraries::load(series, &folder).unwrap());
        for (version, ok, streams) in [
            ((1, 15), None, true),
            ((2, 11), None, false),
            ((2, 12), Some(0), true),
            ((2, 19), Some(0), true),
            ((2, 20), Some(1), true),
            ((2, 21), Some(1), true),
            ((2, 22), None, false),
            ((3, 12), None, false),
        ] {
            let cxx = Cxx::find(&libraries, version);
            let expected = if cfg!(target_arch = "x86_64") { ok } else { None };
            assert_eq!(cxx.tensor.map(|functions| functions.ok), expected, "{version:?}");
            assert_eq!(cxx.is_ready.is_some(), ok.is_some(), "{version:?}");
            assert_eq!(Cxx::shows_streams(version), streams, "{version:?}");
            assert!(streams || cxx.gpu_device.is_none(), "{version:?}");
        }
    }
}
