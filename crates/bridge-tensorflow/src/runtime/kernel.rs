//! Operations and kernels of our own, registered through TensorFlow's C functions.

use crate::runtime::Runtime;
use crate::runtime::api::{
    Compute, CreateKernel, DeleteKernel, InferShapes, TF_KernelBuilder, TF_OpKernelConstruction, TF_OpKernelContext,
    TF_ShapeInferenceContext, TF_Status,
};
use crate::runtime::library::Series;
use crate::runtime::status::{INVALID_ARGUMENT, RESOURCE_EXHAUSTED, Status};
use crate::runtime::tensor::RuntimeTensor;
use bridge_core::{Error, ErrorKind, Result, Stream};
use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

/// The type of device of kernels on the host.
pub(crate) const CPU: &CStr = c"CPU";
/// The type of device of kernels on GPUs.
pub(crate) const GPU: &CStr = c"GPU";

/// An operation, as it is registered.
pub(crate) struct Operation {
    pub(crate) name: &'static CStr,
    pub(crate) inputs: &'static [&'static CStr],
    pub(crate) outputs: &'static [&'static CStr],
    pub(crate) attributes: &'static [&'static CStr],
    /// Arguments that are in host memory, on GPUs too.
    pub(crate) host: &'static [&'static CStr],
    pub(crate) kernels: &'static [Entry],
}

/// The code of an operation on a type of device.
pub(crate) trait Kernel {
    /// The attribute, an int, that [`instance`](Self::instance) receives.
    const ATTRIBUTE: Option<&CStr> = None;

    /// Returns the number of a new instance. It is all that TensorFlow keeps of the instance.
    fn instance(_attribute: i32) -> u64 {
        0
    }

    /// Runs the kernel once.
    fn compute(call: &Call) -> Result<()>;

    /// Runs when an instance is destroyed, with the session or the function that it was made for.
    fn destroyed(_instance: u64) {}
}

/// A kernel, as it is registered.
pub(crate) struct Entry {
    device: &'static CStr,
    /// One for each series: what TensorFlow passes to a kernel does not say which series calls.
    functions: [(CreateKernel, Compute, DeleteKernel); 2],
}

/// Returns the kernel `K` for a type of device.
pub(crate) const fn entry<K: Kernel>(device: &'static CStr) -> Entry {
    let one = (create::<K, 0> as CreateKernel, compute::<K, 0> as Compute, delete::<K> as DeleteKernel);
    Entry { device, functions: [one, (create::<K, 1>, compute::<K, 1>, delete::<K>)] }
}

/// Returns the number of the instance, in the form of a pointer.
unsafe extern "C" fn create<K: Kernel, const SLOT: usize>(construction: *mut TF_OpKernelConstruction) -> *mut c_void {
    let attribute = K::ATTRIBUTE.zip(Runtime::in_slot(SLOT)).map_or(0, |(attribute, runtime)| {
        let (mut value, status) = (0, Status::new(&runtime.core));
        let get = runtime.core.TF_OpKernelConstruction_GetAttrInt32;
        // SAFETY: TensorFlow passes its own construction; the output is writable. The operation has the attribute.
        unsafe { get(construction, attribute.as_ptr(), &mut value, status.raw()) };
        value
    });
    std::ptr::without_provenance_mut(K::instance(attribute) as usize)
}

unsafe extern "C" fn compute<K: Kernel, const SLOT: usize>(instance: *mut c_void, context: *mut TF_OpKernelContext) {
    let Some(runtime) = Runtime::in_slot(SLOT) else { return };
    // SAFETY: TensorFlow passes the context of the run, which lasts until this function returns.
    unsafe { Call::run(Call { runtime, context, instance: instance.addr() as u64 }, K::compute) }
}

unsafe extern "C" fn delete<K: Kernel>(instance: *mut c_void) {
    // Owners from other crates are dropped here, and a panic must not reach TensorFlow.
    let _ = catch_unwind(|| K::destroyed(instance.addr() as u64));
}

impl Operation {
    /// Registers the operation and its kernels, for the rest of the process. It must not be registered: TensorFlow
    /// aborts the process at the second time.
    pub(crate) fn register(&self, runtime: &Runtime) -> Result<()> {
        let (core, slot) = (&runtime.core, runtime.series() as usize);
        let status = Status::new(core);
        // SAFETY: every pointer is a C string or a builder of TensorFlow's; registering takes the builders over. The
        // kernels are functions of this library, which is never unloaded.
        unsafe {
            let builder = (core.TF_NewOpDefinitionBuilder)(self.name.as_ptr());
            for (add, items) in [
                (core.TF_OpDefinitionBuilderAddInput, self.inputs),
                (core.TF_OpDefinitionBuilderAddOutput, self.outputs),
                (core.TF_OpDefinitionBuilderAddAttr, self.attributes),
            ] {
                items.iter().for_each(|item| add(builder, item.as_ptr()));
            }
            // Never folded, merged or left out: its result depends on more than its inputs.
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

/// A function for each series.
const ANY_SHAPE: [InferShapes; 2] = [any_shape::<0>, any_shape::<1>];

unsafe extern "C" fn any_shape<const SLOT: usize>(context: *mut TF_ShapeInferenceContext, status: *mut TF_Status) {
    if let Some(runtime) = Runtime::in_slot(SLOT) {
        // SAFETY: TensorFlow passes a context and its own status.
        unsafe { (runtime.core.TF_ShapeInferenceContextSetUnknownShape)(context, status) };
    }
}

/// Registers those of the operations that are not registered, for the rest of the process.
///
/// # Errors
///
/// [`ErrorKind::Argument`] if another copy of this crate has registered one: its kernels do not find what is fed here.
pub(crate) fn register(runtime: &'static Runtime, operations: &[&'static Operation]) -> Result<()> {
    static OURS: Mutex<Vec<(Series, &CStr)>> = Mutex::new(Vec::new());
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    for operation in operations {
        let name = (runtime.series(), operation.name);
        if ours.contains(&name) {
            continue;
        }
        if is_registered(runtime, operation.name) {
            let text = "another copy of truebridge in this process has registered its operations: load it once";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        operation.register(runtime)?;
        ours.push(name);
    }
    Ok(())
}

/// Returns whether an operation is registered.
pub(crate) fn is_registered(runtime: &Runtime, operation: &CStr) -> bool {
    let sessions = &runtime.sessions;
    // SAFETY: the list is ours until it is deleted, and has the length that it states.
    unsafe {
        let list = (sessions.TF_GetAllOpList)();
        let bytes = std::slice::from_raw_parts((*list).data.cast::<u8>(), (*list).length);
        let name = operation.to_bytes();
        let found = bytes.windows(name.len()).any(|window| window == name);
        (sessions.TF_DeleteBuffer)(list);
        found
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
    /// Runs `body` for a kernel. Its error becomes the failure of the operation.
    ///
    /// # Safety
    ///
    /// The context is the one that TensorFlow passed to the kernel's `compute` function, which returns after this.
    unsafe fn run(call: Self, body: fn(&Self) -> Result<()>) {
        let (runtime, context) = (call.runtime, call.context);
        let done = catch_unwind(AssertUnwindSafe(|| body(&call)));
        let (code, failed) = match done {
            Ok(Ok(())) => return,
            Ok(Err(error)) if error.kind() == ErrorKind::OutOfMemory => (RESOURCE_EXHAUSTED, error.to_string()),
            Ok(Err(error)) => (INVALID_ARGUMENT, error.to_string()),
            Err(_) => (INVALID_ARGUMENT, "truebridge panicked: please report this".into()),
        };
        let (status, text) = (Status::new(&runtime.core), CString::new(failed.replace('\0', " ")));
        // SAFETY: the status is ours, the text a C string, and the context alive; TensorFlow copies both.
        unsafe {
            (runtime.core.TF_SetStatus)(status.raw(), code, text.unwrap_or_default().as_ptr());
            (runtime.core.TF_OpKernelContext_Failure)(context, status.raw());
        }
    }

    /// Returns an input, by its number.
    pub(crate) fn input(&self, number: c_int) -> Result<RuntimeTensor> {
        let (core, mut raw) = (&self.runtime.core, std::ptr::null_mut());
        let status = Status::new(core);
        // SAFETY: the context is alive; the operation has the input; the returned reference is ours.
        let tensor = unsafe {
            (core.TF_GetInput)(self.context, number, &mut raw, status.raw());
            RuntimeTensor::from_raw(core, raw)
        };
        status.check()?;
        tensor.ok_or_else(|| Error::new(ErrorKind::Framework, "tensorflow returned no input"))
    }

    /// Sets the one output.
    pub(crate) fn output(&self, tensor: &RuntimeTensor) -> Result<()> {
        let core = &self.runtime.core;
        let status = Status::new(core);
        // SAFETY: the context and the tensor are alive; TensorFlow takes its own reference.
        unsafe { (core.TF_SetOutput)(self.context, 0, tensor.raw(), status.raw()) };
        status.check()
    }

    /// TensorFlow's code of the dtype that the output must have.
    pub(crate) fn output_code(&self) -> c_int {
        // SAFETY: the context is alive, and the operation has one output.
        unsafe { (self.runtime.core.TF_ExpectedOutputDataType)(self.context, 0) }
    }

    /// Returns TensorFlow's stream of the GPU that the kernel runs on.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Version`] if this version does not show its streams.
    ///
    /// # Safety
    ///
    /// The kernel is registered for GPUs.
    pub(crate) unsafe fn stream(&self) -> Result<Stream> {
        let gpu_device = self.runtime.gpu_device;
        let gpu_device = gpu_device
            .ok_or_else(|| Error::new(ErrorKind::Version, "this build of TensorFlow does not show its stream"))?;
        // SAFETY: the context is that of a kernel for GPUs (the caller's obligation), which is running.
        Ok(unsafe { gpu_device.stream(self.context) })
    }
}
