//! TensorFlow's C functions, looked up at run time.
//!
//! The signatures are those of `tensorflow/c/*.h`, which are the same in 1.15 and since 2.12.

use std::ffi::{c_char, c_int, c_void};

/// Defines types that are used only through pointers.
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
    TF_Graph;
    TF_Operation;
    TF_OperationDescription;
    TF_ImportGraphDefOptions;
    TF_ImportGraphDefResults;
    TF_SessionOptions;
    TF_Session;
}

/// Releases memory: address, length in bytes, and the argument that was passed with the memory.
pub(crate) type Deallocator = unsafe extern "C" fn(*mut c_void, usize, *mut c_void);
pub(crate) type CreateKernel = unsafe extern "C" fn(*mut TF_OpKernelConstruction) -> *mut c_void;
pub(crate) type DeleteKernel = unsafe extern "C" fn(*mut c_void);
pub(crate) type Compute = unsafe extern "C" fn(*mut c_void, *mut TF_OpKernelContext);
pub(crate) type InferShapes = unsafe extern "C" fn(*mut TF_ShapeInferenceContext, *mut TF_Status);

/// Defines a table of functions, which `find` looks up.
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
            /// [`ErrorKind::Version`](bridge_core::ErrorKind::Version), which names the first function that is missing.
            pub(crate) fn find(libraries: &$crate::runtime::library::Libraries) -> bridge_core::Result<Self> {
                // SAFETY: the signatures are those of the headers.
                Ok(Self { $($name: unsafe { libraries.required(stringify!($name)) }?,)* })
            }
        }
    };
}

pub(crate) use {functions, opaque};

functions! {
    /// Tensors, operations and kernels.
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
        TF_TensorMaybeMove(*mut TF_Tensor) -> *mut TF_Tensor;
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

/// Bytes that TensorFlow owns.
#[allow(non_camel_case_types, reason = "the name in TensorFlow's headers")]
#[repr(C)]
pub(crate) struct TF_Buffer {
    pub(crate) data: *const c_void,
    /// In bytes.
    pub(crate) length: usize,
    data_deallocator: Option<unsafe extern "C" fn(*mut c_void, usize)>,
}

/// An output of an operation in a graph.
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
        TF_SetAttrValueProto(*mut TF_OperationDescription, *const c_char, *const c_void, usize, *mut TF_Status);
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
