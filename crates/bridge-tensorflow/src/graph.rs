//! Operations that take a tensor of another framework into a graph and one of TensorFlow out of it.
//!
//! A graph is built once and run many times, so what it holds is a handle: two numbers in host memory. `TensorBridgeInput`
//! gives the tensor that was fed under its handle, in place; `TensorBridgeOutput` keeps its input and gives a handle to
//! take it by. Handles are `int32`, because TensorFlow leaves tensors of that dtype in host memory on any device.

use crate::api::TF_OpKernelContext;
use crate::devices::{CPU, GPU, ordinal_of};
use crate::dtypes::{self, INT32};
use crate::kernel::{Call, Operation, Tensor};
use crate::release::{into_raw, release};
use crate::runtime::Runtime;
use bridge_core::{
    Access, DType, Device, DeviceKind, Dims, Error, ErrorKind, Layout, Lent, Memory, Result, Reuse, Stream,
};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

pub(crate) static INPUT: Operation = Operation {
    name: c"TensorBridgeInput",
    inputs: &[c"handle: int32"],
    outputs: &[c"y: T"],
    attributes: &[c"T: type"],
    host: &[c"handle"],
    kernels: &[(CPU, input_on_host), (GPU, input_on_gpu)],
};

pub(crate) static OUTPUT: Operation = Operation {
    name: c"TensorBridgeOutput",
    inputs: &[c"x: T"],
    outputs: &[c"handle: int32"],
    attributes: &[c"T: type"],
    host: &[c"handle"],
    kernels: &[(CPU, output_on_host), (GPU, output_on_gpu)],
};

/// A tensor at the edge of a graph.
///
/// One that was fed can be read by runs as long as this value lives; the runs keep the memory for as long as they need
/// it. One that was fetched goes back to wait in the process if it is dropped before it was [taken](Self::taken).
pub struct External {
    id: u64,
    fetched: Option<Arc<Fetched>>,
}

/// What was fed: the owner of the memory and what a tensor over it needs.
pub(crate) struct Fed {
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    pub(crate) shape: Dims,
    pub(crate) bytes: Range<usize>,
    /// The stream that waits for the owner's work.
    pub(crate) stream: Option<Stream>,
    pub(crate) _owner: Box<dyn Send + Sync>,
}

/// What was fetched.
struct Fetched {
    tensor: Tensor,
    dtype: DType,
    device: Device,
    stream: Option<Stream>,
}

type Table<T> = LazyLock<Mutex<HashMap<u64, Arc<T>>>>;

static FED: Table<Fed> = LazyLock::new(Mutex::default);
static FETCHED: Table<Fetched> = LazyLock::new(Mutex::default);
/// Never used twice, so that an old handle means nothing instead of something else.
static NEXT: AtomicU64 = AtomicU64::new(1);

fn lock<T>(table: &Table<T>) -> MutexGuard<'_, HashMap<u64, Arc<T>>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

fn enter<T>(table: &Table<T>, entry: T) -> u64 {
    let id = NEXT.fetch_add(1, Relaxed);
    lock(table).insert(id, Arc::new(entry));
    id
}

impl External {
    pub(crate) fn feed(fed: Fed) -> Self {
        Self { id: enter(&FED, fed), fetched: None }
    }

    /// What a run has fetched, by the numbers that it gave.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Consumed`] if somebody has taken it, or is about to.
    pub fn fetched(handle: [i32; 2]) -> Result<Self> {
        let id = id(handle);
        let fetched = lock(&FETCHED).remove(&id).ok_or_else(|| {
            let text = "no fetched tensor has this handle: it was taken before, or is no result of external_output";
            Error::new(ErrorKind::Consumed, text)
        })?;
        Ok(Self { id, fetched: Some(fetched) })
    }

    /// The numbers that stand for it in a graph.
    pub fn handle(&self) -> [i32; 2] {
        handle(self.id)
    }

    /// Lends what was fetched, which is read-only if `is_read_only` says so of its address.
    pub(crate) fn lend(&self, is_read_only: impl FnOnce(usize) -> bool) -> Result<Lent> {
        let fetched = self.fetched.clone().ok_or_else(|| refused("what is fed is no result of a run"))?;
        let layout = Layout::new(fetched.dtype, &fetched.tensor.shape(), None, 0)?;
        let address = fetched.tensor.address();
        let access = if is_read_only(address) { Access::ReadOnly } else { Access::ReadWrite };
        let (dtype, device, stream) = (fetched.dtype, fetched.device, fetched.stream);
        let reuse = if stream.is_none() { Reuse::InStreamOrder } else { Reuse::Unknown };
        let bytes = address..address + layout.nbytes();
        // SAFETY: the tensor keeps its memory; the kernel that had it as its input has seen where it is, and in which
        // stream it was written.
        let memory = unsafe { Memory::new(bytes, device, access, stream, reuse, fetched) };
        Lent::new(dtype, layout, Box::new(memory))
    }

    /// Says that somebody has what was fetched.
    pub fn taken(mut self) {
        self.fetched = None;
    }

    /// How many fetched tensors wait to be taken.
    pub fn waiting() -> usize {
        lock(&FETCHED).len()
    }
}

impl Drop for External {
    fn drop(&mut self) {
        match self.fetched.take() {
            Some(fetched) => drop(lock(&FETCHED).insert(self.id, fetched)),
            None => {
                // Dropped outside the lock: it may be the last reference to the lease.
                let entry = lock(&FED).remove(&self.id);
                drop(entry);
            }
        }
    }
}

fn handle(id: u64) -> [i32; 2] {
    [id as i32, (id >> 32) as i32]
}

fn id([low, high]: [i32; 2]) -> u64 {
    u64::from(low as u32) | u64::from(high as u32) << 32
}

unsafe extern "C" fn input_on_host(_: *mut c_void, context: *mut TF_OpKernelContext) {
    // SAFETY: TensorFlow calls this to compute, and so below.
    unsafe { Call::run(context, |call| input(call, None)) }
}

unsafe extern "C" fn input_on_gpu(_: *mut c_void, context: *mut TF_OpKernelContext) {
    // SAFETY: see above.
    unsafe { Call::run(context, |call| input(call, Some(call.stream()?))) }
}

unsafe extern "C" fn output_on_host(_: *mut c_void, context: *mut TF_OpKernelContext) {
    // SAFETY: see above.
    unsafe { Call::run(context, |call| output(call, None)) }
}

unsafe extern "C" fn output_on_gpu(_: *mut c_void, context: *mut TF_OpKernelContext) {
    // SAFETY: see above.
    unsafe { Call::run(context, |call| output(call, Some(call.stream()?))) }
}

fn refused(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Argument, text)
}

/// Gives the tensor that was fed, to a kernel that computes in `stream`, or on the host.
fn input(call: &Call, stream: Option<Stream>) -> Result<()> {
    // SAFETY: the operation has its handle in host memory.
    let handle = unsafe { call.input(0)?.numbers::<i32, 2>() };
    let handle = handle.ok_or_else(|| refused("a handle is what tensor_bridge.tensorflow.feed gives: two int32"))?;
    let fed = lock(&FED).get(&id(handle)).cloned().ok_or_else(|| {
        refused(
            "no tensor is fed under this handle: keep what tensor_bridge.tensorflow.feed gave until the run is over",
        )
    })?;
    let (dtype, device) = (fed.dtype, fed.device);
    let code = dtypes::code(dtype).filter(|code| *code == call.output_code());
    let code = code.ok_or_else(|| {
        let declared = dtypes::dtype(call.output_code()).map_or("another dtype".into(), |dtype| dtype.to_string());
        refused(format!("the tensor fed is {dtype}, but {declared} was declared"))
    })?;
    if fed.stream != stream {
        let place = if stream.is_some() { "a GPU" } else { "the CPU" };
        return Err(refused(format!(
            "the tensor fed is on {device}, but this external_input was placed on {place}: build it under tf.device of the tensor's device"
        )));
    }
    call.output(&over(call.runtime, code, fed)?)
}

/// A tensor over the memory of what was fed.
fn over(runtime: &'static Runtime, code: c_int, fed: Arc<Fed>) -> Result<Tensor> {
    let (shape, nbytes) = (fed.shape.clone(), fed.bytes.len());
    // Memory of no bytes may be anywhere, but TensorFlow looks at its alignment all the same.
    let data = if nbytes == 0 { null_mut() } else { fed.bytes.start as *mut c_void };
    // SAFETY: the memory is compact, of the length that shape and dtype need, aligned as core has checked it against the
    // profile, and kept by the owner, which comes back once, also where no tensor is made.
    unsafe {
        let (core, ndim) = (&runtime.core, shape.len() as c_int);
        let raw = (core.TF_NewTensor)(code, shape.as_ptr(), ndim, data, nbytes, release, into_raw(Box::new(fed)));
        Tensor::from_raw(core, raw).ok_or_else(|| refused("tensorflow made no tensor of the memory"))
    }
}

/// Keeps the input, written in `stream` or on the host, until it is taken.
fn output(call: &Call, stream: Option<Stream>) -> Result<()> {
    let tensor = call.input(0)?;
    let dtype = dtypes::dtype(tensor.code()).map_err(refused)?;
    let device = match stream {
        None => Device::CPU,
        Some(stream) => match bridge_cuda::locate(tensor.address())? {
            Some(located) if located.device.kind == DeviceKind::CUDA => located.device,
            // Of a tensor without elements TensorFlow shows no memory.
            _ if tensor.nbytes() == 0 => Device::cuda(ordinal_of(stream).unwrap_or(0)),
            _ => Device::CPU,
        },
    };
    let stream = stream.filter(|_| device != Device::CPU);
    let id = enter(&FETCHED, Fetched { tensor, dtype, device, stream });
    call.output(&Tensor::of(&call.runtime.core, INT32, &handle(id))?)
}
