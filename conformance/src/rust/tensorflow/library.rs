//! TensorFlow's C functions (`tensorflow/c/*.h`), in a library that the process has loaded, and tensors of theirs.
//!
//! They are looked up here once more, so that the second oracle is not the adapter's.

use bridge_core::{Error, ErrorKind, Result};
use bridge_tensorflow::{Runtime, Series};
use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// A pointer to an object of the C interface.
pub(super) type Raw = *mut c_void;

/// `TF_Output`: one output of an operation of a graph.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Output {
    pub(super) oper: Raw,
    pub(super) index: c_int,
}

/// `TF_Buffer`
#[repr(C)]
pub(super) struct Buffer {
    pub(super) data: *const c_void,
    /// In bytes.
    pub(super) length: usize,
    deallocator: Option<unsafe extern "C" fn(*mut c_void, usize)>,
}

impl Buffer {
    /// A buffer over bytes, or an empty one that TensorFlow fills.
    pub(super) fn over(bytes: &[u8]) -> Self {
        let data = if bytes.is_empty() { null() } else { bytes.as_ptr().cast() };
        Self { data, length: bytes.len(), deallocator: None }
    }

    /// Returns the bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: the buffer is over a slice that lives as long, or TensorFlow has filled it.
        unsafe { std::slice::from_raw_parts(self.data.cast(), self.length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(deallocate) = self.deallocator {
            // SAFETY: TensorFlow has filled the buffer, and names how its memory is freed.
            unsafe { deallocate(self.data.cast_mut(), self.length) };
        }
    }
}

/// `TF_OpKernelContext` of the run, after the kernel.
type Compute = unsafe extern "C" fn(Raw, Raw);

macro_rules! functions {
    ($($name:ident($($type:ty),*) $(-> $result:ty)?;)*) => {
        #[expect(non_snake_case, reason = "the names in TensorFlow's headers")]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
        }

        impl Functions {
            fn find(library: &Loaded) -> std::result::Result<Self, libloading::Error> {
                Ok(Self { $(
                    // SAFETY: the signature is that of the header, and TensorFlow cannot be unloaded.
                    $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?,
                )* })
            }
        }
    };
}

functions! {
    TF_NewStatus() -> Raw;
    TF_DeleteStatus(Raw);
    TF_GetCode(Raw) -> c_int;
    TF_Message(Raw) -> *const c_char;
    TF_DataTypeSize(c_int) -> usize;
    TF_AllocateTensor(c_int, *const i64, c_int, usize) -> Raw;
    TF_DeleteTensor(Raw);
    TF_TensorType(Raw) -> c_int;
    TF_NumDims(Raw) -> c_int;
    TF_Dim(Raw, c_int) -> i64;
    TF_TensorByteSize(Raw) -> usize;
    TF_TensorData(Raw) -> *mut c_void;
    TF_NewGraph() -> Raw;
    TF_DeleteGraph(Raw);
    TF_NewOperation(Raw, *const c_char, *const c_char) -> Raw;
    TF_AddInput(Raw, Output);
    TF_SetAttrType(Raw, *const c_char, c_int);
    TF_SetAttrStringList(Raw, *const c_char, *const *const c_void, *const usize, c_int);
    TF_SetDevice(Raw, *const c_char);
    TF_FinishOperation(Raw, Raw) -> Raw;
    TF_NewSessionOptions() -> Raw;
    TF_SetConfig(Raw, *const c_void, usize, Raw);
    TF_DeleteSessionOptions(Raw);
    TF_NewSession(Raw, Raw, Raw) -> Raw;
    TF_DeleteSession(Raw, Raw);
    TF_SessionListDevices(Raw, Raw) -> Raw;
    TF_DeviceListCount(Raw) -> c_int;
    TF_DeviceListName(Raw, c_int, Raw) -> *const c_char;
    TF_DeleteDeviceList(Raw);
    TF_SessionRun(Raw, *const Buffer, *const Output, *const Raw, c_int, *const Output, *mut Raw, c_int, *const Raw, c_int, *mut Buffer, Raw);
    TF_NewOpDefinitionBuilder(*const c_char) -> Raw;
    TF_OpDefinitionBuilderAddInput(Raw, *const c_char);
    TF_OpDefinitionBuilderAddOutput(Raw, *const c_char);
    TF_OpDefinitionBuilderAddAttr(Raw, *const c_char);
    TF_OpDefinitionBuilderSetIsStateful(Raw, bool);
    TF_OpDefinitionBuilderSetShapeInferenceFunction(Raw, unsafe extern "C" fn(Raw, Raw));
    TF_ShapeInferenceContextSetUnknownShape(Raw, Raw);
    TF_RegisterOpDefinition(Raw, Raw);
    TF_NewKernelBuilder(*const c_char, *const c_char, Option<unsafe extern "C" fn(Raw) -> Raw>, Compute, Option<unsafe extern "C" fn(Raw)>) -> Raw;
    TF_KernelBuilder_HostMemory(Raw, *const c_char);
    TF_RegisterKernelBuilder(*const c_char, Raw, Raw);
    TF_GetInput(Raw, c_int, *mut Raw, Raw);
    TF_SetOutput(Raw, c_int, Raw, Raw);
}

/// `TF_INT64`
const INT64: c_int = 9;

/// The operation of the suite that reports what a kernel sees of its input: the code, the address and the shape.
pub(super) const ORACLE: &CStr = c"ConformanceOracle";

/// The functions of one TensorFlow.
pub(super) struct Library {
    pub(super) call: Functions,
}

/// One for each series.
static LIBRARIES: [OnceLock<std::result::Result<Library, String>>; 2] = [const { OnceLock::new() }; 2];

fn raised(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Framework, text)
}

impl Library {
    /// Returns the functions of the TensorFlow that `runtime` has loaded, with the [`ORACLE`] registered.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Framework`] for a function that is missing, and what TensorFlow reports.
    pub(super) fn of(runtime: &Runtime) -> Result<&'static Self> {
        let (slot, name, oracle): (_, _, Compute) = match runtime.series() {
            Series::One => (0, "python/_pywrap_tensorflow_internal.so", oracle::<0>),
            _ => (1, "libtensorflow_cc.so.2", oracle::<1>),
        };
        let open = || {
            /// Fail if the library is not loaded yet (`dlfcn.h` of Linux).
            const RTLD_NOLOAD: c_int = 4;
            let path = runtime.folder().join(name);
            // SAFETY: the library is loaded already, so no initialiser runs.
            let loaded = unsafe { Loaded::open(Some(&path), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) };
            let found = loaded.and_then(|loaded| Functions::find(&loaded)).map_err(|error| error.to_string())?;
            let library = Self { call: found };
            library.register(oracle).map_err(|error| error.to_string())?;
            Ok(library)
        };
        LIBRARIES[slot].get_or_init(open).as_ref().map_err(raised)
    }

    /// Calls a function that takes a status, and returns its result.
    ///
    /// # Errors
    ///
    /// What TensorFlow reports.
    pub(super) fn checked<T>(&self, call: impl FnOnce(Raw) -> T) -> Result<T> {
        // SAFETY: the status is ours until it is deleted, and its message a C string until then.
        unsafe {
            let status = (self.call.TF_NewStatus)();
            let result = call(status);
            let error = ((self.call.TF_GetCode)(status) != 0)
                .then(|| raised(CStr::from_ptr((self.call.TF_Message)(status)).to_string_lossy()));
            (self.call.TF_DeleteStatus)(status);
            error.map_or(Ok(result), Err)
        }
    }

    /// Registers [`ORACLE`] for both kinds of devices.
    fn register(&self, compute: Compute) -> Result<()> {
        let call = &self.call;
        // SAFETY: the names are C strings, the builders are ours until they are registered, and the kernel is a
        // function of this library, which is never unloaded.
        unsafe {
            let builder = (call.TF_NewOpDefinitionBuilder)(ORACLE.as_ptr());
            (call.TF_OpDefinitionBuilderAddInput)(builder, c"x: T".as_ptr());
            (call.TF_OpDefinitionBuilderAddOutput)(builder, c"seen: int64".as_ptr());
            (call.TF_OpDefinitionBuilderAddAttr)(builder, c"T: type".as_ptr());
            (call.TF_OpDefinitionBuilderSetIsStateful)(builder, true);
            let unknown = call.TF_ShapeInferenceContextSetUnknownShape;
            (call.TF_OpDefinitionBuilderSetShapeInferenceFunction)(builder, unknown);
            self.checked(|status| (call.TF_RegisterOpDefinition)(builder, status))?;
            for device in [c"CPU", c"GPU"] {
                let kernel = (call.TF_NewKernelBuilder)(ORACLE.as_ptr(), device.as_ptr(), None, compute, None);
                (call.TF_KernelBuilder_HostMemory)(kernel, c"seen".as_ptr());
                self.checked(|status| (call.TF_RegisterKernelBuilder)(ORACLE.as_ptr(), kernel, status))?;
            }
        }
        Ok(())
    }

    /// Makes a tensor in host memory.
    pub(super) fn tensor(&'static self, code: c_int, shape: &[i64], bytes: &[u8]) -> Value {
        // SAFETY: the shape has as many lengths as are passed. The tensor is new, and has as many bytes.
        unsafe {
            let raw = (self.call.TF_AllocateTensor)(code, shape.as_ptr(), shape.len() as c_int, bytes.len());
            assert!(!raw.is_null(), "TF_AllocateTensor returns a tensor");
            if !bytes.is_empty() {
                (self.call.TF_TensorData)(raw).cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            }
            Value { library: self, raw }
        }
    }
}

/// Reports the first input of a kernel. Without a report the run fails.
///
/// # Safety
///
/// TensorFlow calls it with the context of a kernel.
unsafe extern "C" fn oracle<const SLOT: usize>(_: Raw, context: Raw) {
    let Some(Ok(library)) = LIBRARIES[SLOT].get() else { return };
    let (call, mut given) = (&library.call, null_mut());
    // SAFETY: the context is alive during the call, and the references to both tensors are ours.
    unsafe {
        if library.checked(|status| (call.TF_GetInput)(context, 0, &mut given, status)).is_err() {
            return;
        }
        let given = Value { library, raw: given };
        let seen = [given.code().into(), given.address() as i64].into_iter().chain(given.shape());
        let seen: Vec<u8> = seen.flat_map(i64::to_ne_bytes).collect();
        let report = library.tensor(INT64, &[(seen.len() / 8) as i64], &seen);
        let _ = library.checked(|status| (call.TF_SetOutput)(context, 0, report.raw, status));
    }
}

/// A reference to a tensor of TensorFlow's.
pub(super) struct Value {
    library: &'static Library,
    pub(super) raw: Raw,
}

impl Value {
    /// Takes a reference over.
    ///
    /// # Safety
    ///
    /// `raw` is a reference of the caller's to a tensor of this library.
    pub(super) unsafe fn from_raw(library: &'static Library, raw: Raw) -> Self {
        Self { library, raw }
    }

    fn code(&self) -> c_int {
        // SAFETY: the tensor is alive, here and below.
        unsafe { (self.library.call.TF_TensorType)(self.raw) }
    }

    fn address(&self) -> usize {
        // SAFETY: see above.
        unsafe { (self.library.call.TF_TensorData)(self.raw) }.addr()
    }

    /// Lengths, in elements.
    fn shape(&self) -> Vec<i64> {
        let call = &self.library.call;
        // SAFETY: see above; the dimensions are in range.
        unsafe { (0..(call.TF_NumDims)(self.raw)).map(|dim| (call.TF_Dim)(self.raw, dim)).collect() }
    }

    /// Returns the bytes of a tensor in host memory, as the results of a run are.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let call = &self.library.call;
        // SAFETY: see above; the memory is the host's, and nothing writes to it.
        unsafe {
            let length = (call.TF_TensorByteSize)(self.raw);
            if length == 0 {
                return Vec::new();
            }
            std::slice::from_raw_parts((call.TF_TensorData)(self.raw).cast::<u8>(), length).to_vec()
        }
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: the reference is ours.
        unsafe { (self.library.call.TF_DeleteTensor)(self.raw) };
    }
}
