//! TensorFlow's graphs under test, of either series and without Python: through the C functions, and through the bridge
//! where nothing else can do it.
//!
//! A graph has tensors only while it runs. The suite holds what the bridge makes of them: the bridge's input operation
//! passes a tensor into a run, and its output operation passes one out. What happens between the two is TensorFlow's
//! own, and so are the oracles: reads are fetched to the host, and an operation of the suite reports where a tensor is.

mod graphs;
mod library;
mod session;

use crate::{Capabilities, Observed, Spec, Subject, model};
use bridge_core::{
    Adapter, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Offer, Ordering, Profile, Result, Stream,
};
use bridge_tensorflow::{External, GraphEdges, Runtime, Series};
use graphs::{Graphs, Task, taken};
use library::Library;
use session::Session;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The codes of dtypes (`TF_DataType`). Those that the version does not have are left out.
const CODES: &[(DType, c_int)] = &[
    (DType::FLOAT32, FLOAT),
    (DType::FLOAT64, 2),
    (DType::INT32, INT32),
    (DType::UINT8, UINT8),
    (DType::INT16, 5),
    (DType::INT8, 6),
    (DType::COMPLEX64, 8),
    (DType::INT64, 9),
    (DType::BOOL, BOOL),
    (DType::BFLOAT16, 14),
    (DType::UINT16, 17),
    (DType::COMPLEX128, 18),
    (DType::FLOAT16, 19),
    (DType::UINT32, 22),
    (DType::UINT64, 23),
    (DType::FLOAT8_E5M2, 24),
    (DType::FLOAT8_E4M3FN, 25),
];

/// What TensorFlow neither bitcasts to nor reshapes on a GPU: this subject takes such tensors there and makes none. The
/// one for eager tensors does.
const NOT_FILLED: [DType; 2] = [DType::FLOAT8_E5M2, DType::FLOAT8_E4M3FN];

const FLOAT: c_int = 1;
const INT32: c_int = 3;
const UINT8: c_int = 4;
const BOOL: c_int = 10;

/// Elements (float32) that a delay multiplies, and how often in one run: less than a millisecond on a GPU.
const OPERAND: usize = 1 << 24;
const CHAIN: usize = 16;

/// How long a delay is to take.
const DELAY: Duration = Duration::from_millis(3);

/// The graphs of one TensorFlow on one device.
///
/// On a GPU it only copies, and in a delay multiplies floats: on a GPU that TensorFlow 1.15 does not know, each kernel
/// is compiled at its first use, all of them in many minutes.
pub struct TensorFlowSubject {
    adapter: GraphEdges,
    device: Device,
    graphs: Graphs,
    dtypes: Vec<(DType, c_int)>,
    /// Tensors of equal bytes on the GPU, by code, byte and size: a fill must not wait for a copy to the device.
    constants: RefCell<HashMap<(c_int, u8, usize), Arc<External>>>,
    /// What a delay multiplies, and how often.
    operand: Option<Arc<External>>,
    repeats: u32,
}

bridge_core::debug_fields!(impl[] TensorFlowSubject: device);

// SAFETY: it does what the inner adapter does.
unsafe impl Adapter for TensorFlowSubject {
    type Tensor = Arc<External>;

    fn profile(&self) -> &Profile {
        self.adapter.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.adapter.consumer()
    }

    fn export(&self, tensor: &Arc<External>) -> Result<Export> {
        self.adapter.export(tensor)
    }

    fn import(&self, offer: Offer) -> Result<Arc<External>> {
        self.adapter.import(offer).map(Arc::new)
    }

    fn compact(&self, tensor: &Arc<External>) -> Result<Arc<External>> {
        self.adapter.compact(tensor).map(Arc::new)
    }
}

fn missing(text: String) -> Error {
    Error::new(ErrorKind::Missing, text)
}

impl TensorFlowSubject {
    /// Makes the subject for a device. On a GPU the variable `TF_SYNC_ON_FINISH` must be `false` before: otherwise every
    /// run waits for the device at its end, and there is no pending work to order.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] where TensorFlow has no such device, and what TensorFlow reports.
    pub fn new(runtime: &'static Runtime, device: Device) -> Result<Self> {
        let cuda = device.kind == DeviceKind::CUDA;
        let place = if cuda { format!("/device:GPU:{}", device.index) } else { "/device:CPU:0".into() };
        if cuda && !runtime.has_cuda() {
            let version = runtime.version();
            return Err(missing(format!("TensorFlow {version} was not built for CUDA")));
        }
        let (adapter, session) = (GraphEdges::new(runtime)?, Session::new(Library::of(runtime)?)?);
        if !session.devices()?.iter().any(|name| name.ends_with(&place)) {
            let version = runtime.version();
            return Err(missing(format!("TensorFlow {version} has no {place}")));
        }
        // SAFETY: the function takes any number.
        let known = |code| unsafe { (session.library.call.TF_DataTypeSize)(code) } > 0;
        let mut subject = Self {
            adapter,
            device,
            dtypes: CODES.iter().copied().filter(|(_, code)| known(*code)).collect(),
            graphs: Graphs::new(session, CString::new(place).expect("the name holds no null character")),
            constants: RefCell::default(),
            operand: None,
            repeats: 1,
        };
        if cuda {
            let ones: Vec<u8> = 1f32.to_ne_bytes().repeat(OPERAND);
            subject.operand = Some(subject.make(FLOAT, &[OPERAND as i64], &ones)?);
        }
        subject.warm_up()?;
        if cuda {
            let one = subject.constant(UINT8, 0, 1)?;
            let started = Instant::now();
            subject.delay()?;
            subject.read(&one)?;
            subject.repeats = DELAY.div_duration_f64(started.elapsed()).ceil() as u32;
        }
        Ok(subject)
    }

    /// Builds every graph and loads every kernel, so that what they keep is allocated before memory is counted.
    fn warm_up(&self) -> Result<()> {
        for dtype in self.made() {
            let spec = Spec::compact(dtype, &[2]);
            let mut tensor = self.create(&spec, &vec![0; 2 * model::itemsize(dtype)])?;
            let mut copy = self.allocate(1)?;
            self.fill(&mut tensor, 1)?;
            self.snapshot(&tensor, &mut copy)?;
            self.read(&copy)?;
            self.observe(&tensor)?;
        }
        self.delay()?;
        self.settle().map(drop)
    }

    fn cuda(&self) -> bool {
        self.device.kind == DeviceKind::CUDA
    }

    /// Returns the dtypes of the tensors that this subject makes.
    fn made(&self) -> impl Iterator<Item = DType> {
        let made = |dtype: &DType| !(self.cuda() && NOT_FILLED.contains(dtype));
        self.dtypes.iter().map(|(dtype, _)| *dtype).filter(made)
    }

    fn code(&self, dtype: DType) -> Result<c_int> {
        let code = self.dtypes.iter().find(|(known, _)| *known == dtype).map(|(_, code)| *code);
        code.ok_or_else(|| Error::new(ErrorKind::Dtype, format!("tensorflow has no {dtype}")))
    }

    fn make(&self, code: c_int, shape: &[i64], bytes: &[u8]) -> Result<Arc<External>> {
        self.graphs.tensor(Task::Make, code, vec![self.graphs.value(code, shape, bytes)])
    }

    fn constant(&self, code: c_int, byte: u8, nbytes: usize) -> Result<Arc<External>> {
        let key = (code, byte, nbytes);
        if let Some(known) = self.constants.borrow().get(&key) {
            return Ok(known.clone());
        }
        let made = self.make(code, &[nbytes as i64], &vec![byte; nbytes])?;
        self.constants.borrow_mut().insert(key, made.clone());
        Ok(made)
    }

    fn copy(&self, tensor: &External) -> Result<Arc<External>> {
        self.graphs.tensor(Task::Copy, self.code(tensor.dtype())?, vec![self.graphs.handle(tensor)])
    }
}

/// Returns the device of an address, from the driver.
fn located(address: usize) -> Device {
    use cudarc::driver::sys;
    let mut ordinal: c_int = -1;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: the attribute is an int, and the driver takes any address.
    let result = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address as _) };
    if result == sys::CUresult::CUDA_SUCCESS { Device::cuda(ordinal) } else { Device::CPU }
}

impl Subject for TensorFlowSubject {
    /// The adapter of eager tensors has the profile's name.
    fn name(&self) -> &str {
        match self.adapter.runtime().series() {
            Series::One => "tensorflow1",
            _ => "tensorflow-graphs",
        }
    }

    fn device(&self) -> Device {
        self.device
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { dtypes: self.made().collect(), writes: false, ..Capabilities::default() }
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::clone(bridge_cuda::ordering())
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Arc<External>> {
        if self.cuda() && !bytes.is_empty() {
            let (kind, values) = if spec.dtype == DType::BOOL { (BOOL, 2) } else { (UINT8, 256) };
            (0..values).try_for_each(|byte| self.constant(kind, byte as u8, bytes.len()).map(drop))?;
        }
        self.make(self.code(spec.dtype)?, &spec.shape, bytes)
    }

    fn observe(&self, tensor: &Arc<External>) -> Result<Observed> {
        let seen = self.graphs.given(Task::See, self.code(tensor.dtype())?, vec![self.graphs.handle(tensor)])?;
        let (numbers, _) = seen.as_chunks();
        let numbers: Vec<i64> = numbers.iter().copied().map(i64::from_ne_bytes).collect();
        let [code, address, shape @ ..] = &*numbers else {
            return Err(Error::new(ErrorKind::Framework, "the oracle reported nothing"));
        };
        let dtype = CODES.iter().find(|(_, known)| i64::from(*known) == *code).map(|(dtype, _)| *dtype);
        // Without elements a kernel sees an arbitrary address.
        let address = if model::numel(shape) > 0 { *address as usize } else { 0 };
        Ok(Observed {
            dtype: dtype.ok_or_else(|| Error::new(ErrorKind::Dtype, format!("the code {code} is not expected")))?,
            shape: shape.into(),
            strides: model::row_major(shape),
            address,
            read_only: false,
            device: if self.cuda() && address != 0 { located(address) } else { self.device },
        })
    }

    fn read(&self, tensor: &Arc<External>) -> Result<Vec<u8>> {
        self.graphs.given(Task::Read, self.code(tensor.dtype())?, vec![self.graphs.handle(tensor)])
    }

    fn write(&self, _: &Arc<External>, _: &[u8]) -> Result<()> {
        Err(Error::new(ErrorKind::ReadOnly, "tensors of TensorFlow cannot be written to"))
    }

    fn fill(&self, tensor: &mut Arc<External>, byte: u8) -> Result<()> {
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        let (code, size) = (self.code(dtype)?, model::itemsize(dtype));
        let nbytes = model::numel(&shape) * size;
        *tensor = if self.cuda() {
            let whole = size == 1 && [UINT8, BOOL].contains(&code);
            let (task, kind) = if whole { (Task::Shape, code) } else { (Task::Fill, UINT8) };
            let lengths = shape.iter().map(|length| *length as i32).chain((size > 1).then_some(size as i32));
            let lengths = self.graphs.integers(&lengths.collect::<Vec<_>>());
            self.graphs.tensor(task, code, vec![self.graphs.handle(&*self.constant(kind, byte, nbytes)?), lengths])?
        } else {
            self.make(code, &shape, &vec![byte; nbytes])?
        };
        Ok(())
    }

    fn allocate(&self, nbytes: usize) -> Result<Arc<External>> {
        const GARBAGE: u8 = 0x5a;
        if self.cuda() {
            return self.copy(&*self.constant(UINT8, GARBAGE, nbytes)?);
        }
        self.make(UINT8, &[nbytes as i64], &vec![GARBAGE; nbytes])
    }

    fn snapshot(&self, from: &Arc<External>, into: &mut Arc<External>) -> Result<()> {
        *into = self.copy(from)?;
        Ok(())
    }

    fn share(&self, tensor: &Arc<External>) -> Arc<External> {
        Arc::clone(tensor)
    }

    fn drop_on_thread(&self, tensor: Arc<External>) {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(tensor));
        });
    }

    /// TensorFlow computes in one stream, and makes no others.
    fn streams(&self) -> Vec<Stream> {
        Vec::new()
    }

    unsafe fn on_stream(&self, stream: Stream, _: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        Err(Error::new(ErrorKind::Argument, format!("tensorflow has a single stream, and cannot use {stream:?}")))
    }

    fn delay(&self) -> Result<()> {
        let Some(operand) = &self.operand else { return Ok(()) };
        (0..self.repeats)
            .try_for_each(|_| self.graphs.tensor(Task::Delay, FLOAT, vec![self.graphs.handle(operand)]).map(drop))
    }

    fn settle(&self) -> Result<Option<usize>> {
        if !self.cuda() {
            return Ok(None);
        }
        self.constants.borrow_mut().clear();
        let (fed, fetch) = self.graphs.ends(Task::Copy, UINT8)?;
        let one = self.make(UINT8, &[1], &[0])?;
        // The fetch waits for the copy, and so for all that was submitted to the stream before.
        self.read(&one)?;
        let (handle, used) = self.graphs.session.run_traced(&[(fed[0], self.graphs.handle(&one))], fetch)?;
        taken(&handle.bytes())?;
        Ok(used)
    }
}
