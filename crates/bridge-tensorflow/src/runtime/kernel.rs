//! Operations and kernels of our own, through TensorFlow's C functions for them.

use crate::eager::handle::{Handle, nothing};
use crate::runtime::Runtime;
use crate::runtime::api::{
    Compute, Core, CreateKernel, DeleteKernel, InferShapes, RESOURCE_EXHAUSTED, Status, TF_KernelBuilder,
    TF_OpKernelConstruction, TF_OpKernelContext, TF_ShapeInferenceContext, TF_Status, TF_Tensor,
};
use crate::runtime::library::Series;
use bridge_core::{Dims, Error, ErrorKind, Result, Stream};
use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// An operation: what TensorFlow is told of it.
pub(crate) struct Operation {
    pub(crate) name: &'static CStr,
    pub(crate) inputs: &'static [&'static CStr],
    pub(crate) outputs: &'static [&'static CStr],
    pub(crate) attributes: &'static [&'static CStr],
    /// Arguments that are in host memory on any device.
    pub(crate) host: &'static [&'static CStr],
    pub(crate) kernels: &'static [Entry],
}

/// What an operation computes on a type of device.
pub(crate) trait Kernel {
    /// An attribute, an int, by which instances differ.
    const ATTRIBUTE: Option<&CStr> = None;

    /// The number of an instance whose attribute has this value.
    fn instance(_attribute: i32) -> u64 {
        0
    }

    /// Runs it once.
    fn compute(call: &Call) -> Result<()>;

    /// An instance of it is gone: the session or the function that it was made for.
    fn gone(_instance: u64) {}
}

/// A kernel as TensorFlow takes it.
pub(crate) struct Entry {
    device: &'static CStr,
    /// One for each series. TensorFlow tells a kernel nothing by which it would know which of them calls.
    functions: [(CreateKernel, Compute, DeleteKernel); 2],
}

/// The kernel for a type of device.
pub(crate) const fn entry<K: Kernel>(device: &'static CStr) -> Entry {
    let one = (create::<K, 0> as CreateKernel, compute::<K, 0> as Compute, delete::<K> as DeleteKernel);
    Entry { device, functions: [one, (create::<K, 1>, compute::<K, 1>, delete::<K>)] }
}

/// What TensorFlow keeps of an instance is a number.
unsafe extern "C" fn create<K: Kernel, const SLOT: usize>(construction: *mut TF_OpKernelConstruction) -> *mut c_void {
    let attribute = K::ATTRIBUTE.zip(Runtime::in_slot(SLOT)).map_or(0, |(attribute, runtime)| {
        let (mut value, status) = (0, Status::new(&runtime.core));
        let get = runtime.core.TF_OpKernelConstruction_GetAttrInt32;
        // SAFETY: TensorFlow calls this with a construction of its own; the output is writable. The operation has the
        // attribute.
        unsafe { get(construction, attribute.as_ptr(), &mut value, status.raw()) };
        value
    });
    std::ptr::without_provenance_mut(K::instance(attribute) as usize)
}

unsafe extern "C" fn compute<K: Kernel, const SLOT: usize>(instance: *mut c_void, context: *mut TF_OpKernelContext) {
    let Some(runtime) = Runtime::in_slot(SLOT) else { return };
    // SAFETY: TensorFlow calls this to compute, and it returns after this.
    unsafe { Call::run(Call { runtime, context, instance: instance.addr() as u64 }, K::compute) }
}

unsafe extern "C" fn delete<K: Kernel>(instance: *mut c_void) {
    // What is dropped may come from anywhere, and TensorFlow takes no panic.
    let _ = catch_unwind(|| K::gone(instance.addr() as u64));
}

impl Operation {
    /// Registers the operation and its kernels, for the rest of the process. Nobody may have done so before: TensorFlow
    /// aborts at the second time.
    pub(crate) fn register(&self, runtime: &Runtime) -> Result<()> {
        let (core, slot) = (&runtime.core, runtime.series() as usize);
        let status = Status::new(core);
        // SAFETY: every pointer is a C string or a builder of TensorFlow's; registering takes the builders over. The
        // kernels live for ever.
        unsafe {
            let builder = (core.TF_NewOpDefinitionBuilder)(self.name.as_ptr());
            for (add, items) in [
                (core.TF_OpDefinitionBuilderAddInput, self.inputs),
                (core.TF_OpDefinitionBuilderAddOutput, self.outputs),
                (core.TF_OpDefinitionBuilderAddAttr, self.attributes),
            ] {
                items.iter().for_each(|item| add(builder, item.as_ptr()));
            }
            // Never folded, merged or left out: what it gives depends on more than its inputs.
            (core.TF_OpDefinitionBuilderSetIsStateful)(builder, true);
            (core.TF_OpDefinitionBuilderSetShapeInferenceFunction)(builder, ANY_SHAPE[slot]);
            (core.TF_RegisterOpDefinition)(builder, status.raw());
            status.check()?;
            for Entry { device, functions } in self.kernels {
                let (create, compute, delete) = functions[slot];
                let kernel: *mut TF_KernelBuilder =
                    (core.TF_NewKernelBuilder)(self.name.as_ptr(), device.as_ptr(), create, compute, delete);
                self.host.iter().for_each(|argument| (core.TF_KernelBuilder_HostMemory)(kernel, argument.as_ptr()));
                (core.TF_RegisterKernelBuilder)(self.name.as_ptr(), kernel, status.raw());
                status.check()?;
            }
        }
        Ok(())
    }
}

/// For each series.
const ANY_SHAPE: [InferShapes; 2] = [any_shape::<0>, any_shape::<1>];

unsafe extern "C" fn any_shape<const SLOT: usize>(context: *mut TF_ShapeInferenceContext, status: *mut TF_Status) {
    if let Some(runtime) = Runtime::in_slot(SLOT) {
        // SAFETY: TensorFlow calls this with a context and a status of its own.
        unsafe { (runtime.core.TF_ShapeInferenceContextSetUnknownShape)(context, status) };
    }
}

/// Registers operations, unless this has been done; for the rest of the process.
///
/// # Errors
///
/// [`ErrorKind::Argument`] if somebody else has: their kernels would not know what is fed here.
pub(crate) fn register(runtime: &'static Runtime, operations: &[&'static Operation]) -> Result<()> {
    static OURS: Mutex<Vec<(Series, &CStr)>> = Mutex::new(Vec::new());
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    for operation in operations {
        let name = (runtime.series(), operation.name);
        if ours.contains(&name) {
            continue;
        }
        if is_registered(runtime, operation.name) {
            let text = "another copy of tensor_bridge in this process has registered its operations: load it once";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        operation.register(runtime)?;
        ours.push(name);
    }
    Ok(())
}

/// Whether TensorFlow knows an operation. Registering one a second time ends the process.
pub(crate) fn is_registered(runtime: &Runtime, operation: &CStr) -> bool {
    let sessions = &runtime.sessions;
    // SAFETY: the list is ours until it is deleted, and says how long it is.
    unsafe {
        let list = (sessions.TF_GetAllOpList)();
        let bytes = std::slice::from_raw_parts((*list).data.cast::<u8>(), (*list).length);
        let name = operation.to_bytes();
        let found = bytes.windows(name.len()).any(|window| window == name);
        (sessions.TF_DeleteBuffer)(list);
        found
    }
}

/// A tensor of TensorFlow's C API: a counted reference to a buffer.
pub(crate) struct Tensor {
    core: &'static Core,
    raw: NonNull<TF_Tensor>,
}

// SAFETY: the reference is counted atomically, and nothing here writes to the tensor.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// # Safety
    ///
    /// `raw` is null or a reference that is taken over.
    pub(crate) unsafe fn from_raw(core: &'static Core, raw: *mut TF_Tensor) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { core, raw })
    }

    /// A fresh tensor in host memory.
    pub(crate) fn allocate(core: &'static Core, code: c_int, shape: &[i64], nbytes: usize) -> Result<Self> {
        // SAFETY: the shape has as many lengths as are told; what comes back is ours.
        let tensor = unsafe {
            Self::from_raw(core, (core.TF_AllocateTensor)(code, shape.as_ptr(), shape.len() as c_int, nbytes))
        };
        tensor.ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, format!("tensorflow has no memory for a tensor of {nbytes} bytes"))
        })
    }

    /// A fresh tensor in host memory with these numbers.
    pub(crate) fn of<T: Copy>(core: &'static Core, code: c_int, numbers: &[T]) -> Result<Self> {
        let nbytes = size_of_val(numbers);
        let tensor = Self::allocate(core, code, &[numbers.len() as i64], nbytes)?;
        // SAFETY: the tensor is fresh, and both have as many bytes.
        unsafe { tensor.write(numbers.as_ptr().cast(), nbytes) };
        Ok(tensor)
    }

    /// Fills a tensor in host memory with bytes from elsewhere.
    ///
    /// # Safety
    ///
    /// Both have as many bytes, and nobody uses the tensor meanwhile.
    pub(crate) unsafe fn write(&self, bytes: *const u8, nbytes: usize) {
        // SAFETY: the caller's obligation.
        unsafe { bytes.copy_to_nonoverlapping((self.core.TF_TensorData)(self.raw()).cast(), nbytes) };
    }

    pub(crate) fn raw(&self) -> *mut TF_Tensor {
        self.raw.as_ptr()
    }

    /// A handle of the eager runtime to the same memory.
    pub(crate) fn into_handle(self, runtime: &'static Runtime) -> Result<Handle> {
        let status = Status::new(self.core);
        // SAFETY: the tensor is alive, and the handle takes a reference of its own; what comes back is ours.
        let handle =
            unsafe { Handle::from_raw(runtime, (runtime.eager().TFE_NewTensorHandle)(self.raw(), status.raw())) };
        status.check()?;
        handle.ok_or_else(nothing)
    }

    pub(crate) fn code(&self) -> c_int {
        // SAFETY: the tensor is alive, here and below.
        unsafe { (self.core.TF_TensorType)(self.raw()) }
    }

    pub(crate) fn shape(&self) -> Dims {
        // SAFETY: see above; the dimensions asked for are there.
        unsafe { (0..(self.core.TF_NumDims)(self.raw())).map(|i| (self.core.TF_Dim)(self.raw(), i)).collect() }
    }

    pub(crate) fn nbytes(&self) -> usize {
        // SAFETY: see above.
        unsafe { (self.core.TF_TensorByteSize)(self.raw()) }
    }

    /// The address of the first byte, on whatever device.
    pub(crate) fn address(&self) -> usize {
        // SAFETY: see above.
        unsafe { (self.core.TF_TensorData)(self.raw()) }.addr()
    }

    /// The numbers of a tensor in host memory, if it holds as many.
    ///
    /// # Safety
    ///
    /// The tensor is in host memory, and any bytes are a `T`.
    pub(crate) unsafe fn numbers<T: Copy, const N: usize>(&self) -> Option<[T; N]> {
        // SAFETY: there are enough bytes; they need not be aligned.
        (self.nbytes() == size_of::<[T; N]>())
            .then(|| unsafe { (self.core.TF_TensorData)(self.raw()).cast::<[T; N]>().read_unaligned() })
    }

    /// The handle at a place in a list of them in host memory; without a place it is all that is there.
    ///
    /// # Safety
    ///
    /// The tensor is in host memory.
    pub(crate) unsafe fn handle(&self, place: Option<usize>) -> Option<[i32; 2]> {
        let Some(place) = place else {
            // SAFETY: the caller's obligation.
            return unsafe { self.numbers() };
        };
        // SAFETY: there are enough bytes; they need not be aligned.
        (self.nbytes() >= size_of::<[i32; 2]>() * (place + 1))
            .then(|| unsafe { (self.core.TF_TensorData)(self.raw()).cast::<[i32; 2]>().add(place).read_unaligned() })
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the reference is ours.
        unsafe { (self.core.TF_DeleteTensor)(self.raw()) };
    }
}

/// One run of a kernel.
pub(crate) struct Call {
    pub(crate) runtime: &'static Runtime,
    context: *mut TF_OpKernelContext,
    /// The number of the kernel's instance.
    pub(crate) instance: u64,
}

impl Call {
    /// Runs `body` for a kernel; what it reports becomes the failure of the operation.
    ///
    /// # Safety
    ///
    /// The context is what TensorFlow gave to a kernel's function for computing, and the function returns after this.
    unsafe fn run(call: Self, body: fn(&Self) -> Result<()>) {
        let (runtime, context) = (call.runtime, call.context);
        let done = catch_unwind(AssertUnwindSafe(|| body(&call)));
        let (code, failed) = match done {
            Ok(Ok(())) => return,
            Ok(Err(error)) if error.kind() == ErrorKind::OutOfMemory => (RESOURCE_EXHAUSTED, error.to_string()),
            Ok(Err(error)) => (INVALID_ARGUMENT, error.to_string()),
            Err(_) => (INVALID_ARGUMENT, "tensor_bridge panicked: please report this".into()),
        };
        let (status, text) = (Status::new(&runtime.core), CString::new(failed.replace('\0', " ")));
        // SAFETY: the status is ours, the text a C string, and the context alive; TensorFlow copies both.
        unsafe {
            (runtime.core.TF_SetStatus)(status.raw(), code, text.unwrap_or_default().as_ptr());
            (runtime.core.TF_OpKernelContext_Failure)(context, status.raw());
        }
    }

    pub(crate) fn input(&self, number: c_int) -> Result<Tensor> {
        let (core, mut raw) = (&self.runtime.core, std::ptr::null_mut());
        let status = Status::new(core);
        // SAFETY: the context is alive; the operation has the input; the reference that comes back is ours.
        let tensor = unsafe {
            (core.TF_GetInput)(self.context, number, &mut raw, status.raw());
            Tensor::from_raw(core, raw)
        };
        status.check()?;
        tensor.ok_or_else(|| Error::new(ErrorKind::Framework, "tensorflow gave no input"))
    }

    pub(crate) fn output(&self, tensor: &Tensor) -> Result<()> {
        let core = &self.runtime.core;
        let status = Status::new(core);
        // SAFETY: the context and the tensor are alive; TensorFlow takes a reference of its own.
        unsafe { (core.TF_SetOutput)(self.context, 0, tensor.raw(), status.raw()) };
        status.check()
    }

    /// The code of the dtype that the operation is to give.
    pub(crate) fn output_code(&self) -> c_int {
        // SAFETY: the context is alive, and the operation has one output.
        unsafe { (self.runtime.core.TF_ExpectedOutputDataType)(self.context, 0) }
    }

    /// TensorFlow's stream of the device that the kernel runs on, which must be a GPU.
    pub(crate) fn stream(&self) -> Result<Stream> {
        let gpu_device = self
            .runtime
            .cxx
            .gpu_device
            .ok_or_else(|| Error::new(ErrorKind::Version, "this build of TensorFlow does not show its stream"))?;
        type StreamOf = unsafe extern "C" fn(*const c_void) -> *const u64;
        // SAFETY: in a GPU kernel's run, the function gives the address of Eigen's device, whose first member is the
        // address of its stream interface (`GpuDevice` in Eigen's TensorDeviceGpu.h). The interface's table of virtual
        // functions begins with the two destructors, and `stream()` follows, which gives a reference to the handle.
        let handle = unsafe {
            let interface = *gpu_device(self.context);
            let functions = *interface.cast::<*const *const c_void>();
            let stream_of: StreamOf = std::mem::transmute::<*const c_void, StreamOf>(*functions.add(2));
            *stream_of(interface.cast())
        };
        Ok(Stream::from_handle(handle))
    }
}

/// `TF_INVALID_ARGUMENT`
const INVALID_ARGUMENT: c_int = 3;
