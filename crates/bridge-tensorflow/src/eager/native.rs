//! The eager runtime in its own context, without Python.

use crate::eager::copy::{copied_on_device, copied_on_host};
use crate::eager::devices::{Devices, elsewhere};
use crate::eager::functions::{EagerRuntime, TFE_Context};
use crate::eager::handle::Handle;
use crate::eager::seen::{Seen, shape, wait};
use crate::graph::argument;
use crate::graph::config::SessionOptions;
use crate::runtime::Runtime;
use crate::runtime::dtypes;
use crate::runtime::library::Series;
use crate::runtime::status::Status;
use crate::runtime::tensor::no_tensor;
use bridge_core::{
    Adapter, Consumer, DType, DeviceKind, Dims, Error, ErrorKind, Export, Layout, Offer, Profile, Result,
};
use std::ffi::{CStr, CString, c_int};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, OnceLock};

/// The eager runtime of TensorFlow 2, without Python: the adapter for its tensors, and its operations, which run at
/// once. One context serves all threads; TensorFlow keeps it until the process ends.
#[derive(Clone)]
pub struct Eager {
    eager: &'static EagerRuntime,
    context: Context,
    devices: Arc<Devices>,
    profile: Profile,
}

bridge_core::debug_fields!(impl[] Eager);

/// A context, which is never deleted.
#[derive(Clone, Copy)]
struct Context(NonNull<TFE_Context>);

// SAFETY: TensorFlow guards contexts with its own locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A tensor of the eager runtime, which does not change. A clone is the same tensor.
#[derive(Clone)]
pub struct EagerTensor(Arc<Handle>);

bridge_core::debug_fields!(impl[] EagerTensor);

/// The value of an attribute of an operation.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Attribute {
    /// A dtype.
    Type(DType),
    /// An integer.
    Int(i64),
    /// A number.
    Float(f32),
    /// A truth value.
    Bool(bool),
}

/// The operations of TensorFlow that write to their input.
const WRITING: [&str; 4] = ["InplaceUpdate", "InplaceAdd", "InplaceSub", "_ParallelConcatUpdate"];

/// The most outputs that a call takes: more than any operation of TensorFlow has.
const MAX_OUTPUTS: usize = 1 << 16;

impl Eager {
    /// Makes a context, and sets up the devices.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Version`] for a TensorFlow 1.x or one without a function that is needed, and what TensorFlow
    /// reports.
    pub fn new(runtime: &'static Runtime, options: &SessionOptions) -> Result<Self> {
        static EAGER: OnceLock<EagerRuntime> = OnceLock::new();
        if runtime.series() != Series::Two {
            let (version, supported) = (runtime.version(), Series::Two.supported());
            let text = format!("TensorFlow {version} has no eager tensors to share: open {supported}, or a session");
            return Err(Error::new(ErrorKind::Version, text));
        }
        let eager = match EAGER.get() {
            Some(eager) => eager,
            None => {
                let found = EagerRuntime::find(runtime)?;
                EAGER.get_or_init(|| found)
            }
        };
        let (config, _) = options.serialised()?;
        let (functions, status) = (&eager.functions, Status::new(&runtime.core));
        // SAFETY: the options are ours until they are deleted, and the bytes are copied.
        let context = unsafe {
            let raw_options = (functions.TFE_NewContextOptions)();
            (functions.TFE_ContextOptionsSetConfig)(raw_options, config.as_ptr().cast(), config.len(), status.raw());
            let configured = status.check();
            let raw = match configured {
                Ok(()) => (functions.TFE_NewContext)(raw_options, status.raw()),
                Err(_) => null_mut(),
            };
            (functions.TFE_DeleteContextOptions)(raw_options);
            configured?;
            status.check()?;
            Context(NonNull::new(raw).ok_or_else(no_tensor)?)
        };
        // SAFETY: the context is never deleted.
        let devices = unsafe { Devices::query(eager, context.0.as_ptr(), Arc::new(())) }?;
        let cuda = (!devices.gpus.is_empty()).then_some(DeviceKind::CUDA);
        let profile = runtime
            .profile
            .clone()
            .with_devices([DeviceKind::CPU].into_iter().chain(cuda).collect())
            .with_waits_on_export(eager.handles.tensor.is_none());
        Ok(Self { eager, context, devices: Arc::new(devices), profile })
    }

    /// The runtime.
    pub fn runtime(&self) -> &'static Runtime {
        self.eager.runtime
    }

    /// Runs an operation of TensorFlow's, such as `MatMul`, on these tensors, and returns its outputs, of which it must
    /// have as many as `outputs`. TensorFlow chooses the device by the inputs. Attributes that follow from the inputs,
    /// or have a default, can be left out.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for a name with a null character, for an operation that writes to its input, such as
    /// `InplaceAdd`, and for more outputs than any operation has, [`ErrorKind::Dtype`] for an attribute that is a dtype
    /// which TensorFlow does not have, and what TensorFlow reports.
    pub fn execute(
        &self,
        operation: &str,
        inputs: &[&EagerTensor],
        attributes: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<Vec<EagerTensor>> {
        let (functions, status) = (&self.eager.functions, Status::new(&self.eager.runtime.core));
        if WRITING.contains(&operation) {
            let text = format!(
                "{operation} writes to its input, which may be memory of another framework: use an operation that returns a new tensor"
            );
            return Err(Error::new(ErrorKind::Argument, text));
        }
        if outputs > MAX_OUTPUTS {
            let text = format!("an operation has at most {MAX_OUTPUTS} outputs, not {outputs}: pass its number");
            return Err(Error::new(ErrorKind::Argument, text));
        }
        let operation = c_string(operation)?;
        // SAFETY: the context is never deleted, the inputs are alive, the names are C strings, and the operation is ours
        // until it is deleted. There is room for as many results as are passed; those that are returned are ours.
        unsafe {
            let op = (functions.TFE_NewOp)(self.context.0.as_ptr(), operation.as_ptr(), status.raw());
            status.check()?;
            let run = || -> Result<_> {
                for input in inputs {
                    (functions.TFE_OpAddInput)(op, input.0.raw(), status.raw());
                    status.check()?;
                }
                for (name, attribute) in attributes {
                    let name = c_string(name)?;
                    match *attribute {
                        Attribute::Type(dtype) => {
                            (functions.TFE_OpSetAttrType)(op, name.as_ptr(), dtypes::required(dtype)?);
                        }
                        Attribute::Int(value) => (functions.TFE_OpSetAttrInt)(op, name.as_ptr(), value),
                        Attribute::Float(value) => (functions.TFE_OpSetAttrFloat)(op, name.as_ptr(), value),
                        Attribute::Bool(value) => (functions.TFE_OpSetAttrBool)(op, name.as_ptr(), value.into()),
                    }
                }
                let (mut results, mut count) = (vec![null_mut(); outputs], outputs as c_int);
                (functions.TFE_Execute)(op, results.as_mut_ptr(), &mut count, status.raw());
                let results = results.into_iter().map(|raw| Handle::from_raw(self.eager, raw));
                let results: Vec<_> = results.flatten().map(|handle| EagerTensor(Arc::new(handle))).collect();
                status.check()?;
                Ok(results)
            };
            let results = run();
            (functions.TFE_DeleteOp)(op);
            let results = results?;
            let has = results.len();
            (has == outputs).then_some(results).ok_or_else(|| argument(format!("the operation has {has} outputs")))
        }
    }

    fn seen(&self, tensor: &EagerTensor) -> Result<Seen> {
        let place = |name: &CStr| {
            self.devices.named(name).ok_or_else(|| elsewhere(self.eager.runtime, &name.to_string_lossy()))
        };
        let handle = tensor.0.raw();
        // SAFETY: the tensor keeps its handle, and those on devices of other processes are refused before the wait.
        unsafe { Seen::of(self.eager, handle, place, |status| wait(self.eager, handle, status)) }
    }
}

fn c_string(name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| argument(format!("the name {name:?} holds a null character")))
}

impl EagerTensor {
    /// Returns the element type and the layout, which is compact.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Dtype`] for a dtype that no other framework has, and what TensorFlow reports.
    pub fn layout(&self) -> Result<(DType, Layout)> {
        let eager = self.0.eager();
        let status = Status::new(&eager.runtime.core);
        // SAFETY: the handle is alive.
        let (code, shape) =
            unsafe { ((eager.functions.TFE_TensorHandleDataType)(self.0.raw()), shape(eager, self.0.raw(), &status)?) };
        let dtype = dtypes::dtype(code).map_err(|reason| Error::new(ErrorKind::Dtype, reason))?;
        Ok((dtype, Layout::new(dtype, &shape, None, 0)?))
    }
}

// SAFETY: TensorFlow keeps the lease with the tensor, and its consumer has its streams. `execute` refuses the operations
// that write to a tensor.
unsafe impl Adapter for Eager {
    type Tensor = EagerTensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.eager.runtime.consumer.clone()
    }

    fn export(&self, tensor: &EagerTensor) -> Result<Export> {
        self.seen(tensor)?.export()
    }

    fn import(&self, offer: Offer) -> Result<EagerTensor> {
        let lease = offer.accept(&self.profile, &self.eager.runtime.consumer)?;
        let (code, place) = (dtypes::required(lease.dtype())?, self.devices.name_of(lease.device())?);
        let (shape, bytes) = (Dims::from(lease.layout().shape()), lease.compact_bytes());
        let owner = self.eager.runtime.consumer.protected.owner(lease);
        // SAFETY: the context is never deleted. The owner keeps the memory, which core has checked against the profile.
        let handle = unsafe { Handle::over(self.eager, self.context.0.as_ptr(), place, (code, &shape), bytes, owner) }?;
        Ok(EagerTensor(Arc::new(handle)))
    }

    fn compact(&self, tensor: &EagerTensor) -> Result<EagerTensor> {
        let exported = self.export(tensor)?;
        if exported.device().kind != DeviceKind::CUDA {
            return Ok(EagerTensor(Arc::new(copied_on_host(self.eager, &exported)?)));
        }
        let (code, shape) = (dtypes::required(exported.dtype())?, Dims::from(exported.layout().shape()));
        let (context, place) = (self.context.0.as_ptr(), self.devices.name_of(exported.device())?);
        // SAFETY: the context is never deleted. The copy is alive while it is waited for, and keeps its memory.
        let handle = unsafe {
            let ready = |handle, status: &Status<'_>| wait(self.eager, handle, status);
            let (copy, bytes) = copied_on_device(self.eager, context, place, exported, ready)?;
            Handle::over(self.eager, context, place, (code, &shape), bytes, copy)
        }?;
        Ok(EagerTensor(Arc::new(handle)))
    }
}
