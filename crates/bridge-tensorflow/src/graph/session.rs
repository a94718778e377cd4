//! Sessions without Python: a graph that was saved, with inputs and outputs that are other frameworks' memory.

use crate::eager::devices::{self, FLOAT, Gpu, STREAM, told};
use crate::eager::handle::nothing;
use crate::graph::config::{SessionOptions, argument};
use crate::graph::definition::{Definition, Node, OutputName};
use crate::graph::external::{self, External};
use crate::graph::operations::{INPUT, KEEP, PLACE};
use crate::runtime::Runtime;
use crate::runtime::api::{Status, TF_Operation, TF_Output, TF_Session, TF_Tensor};
use crate::runtime::dtypes::{self, INT32};
use crate::runtime::kernel::{Tensor, register};
use bridge_core::{DType, Device, Error, ErrorKind, Result};
use std::ffi::{CString, c_int};
use std::ptr::{NonNull, null, null_mut};

/// A tensor of a graph that is fed.
#[derive(Debug, Clone)]
pub struct Input {
    name: OutputName,
    dtype: DType,
    shape: Option<Vec<Option<i64>>>,
    device: Option<CString>,
}

impl Input {
    /// The one with this name, such as `x:0`, of this dtype and shape. Lengths that may differ from run to run are `None`,
    /// or -1 as elsewhere.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] if that is no name of a tensor.
    pub fn new(name: &str, dtype: DType, shape: &[Option<i64>]) -> Result<Self> {
        let shape = shape.iter().map(|length| length.filter(|length| *length >= 0)).collect();
        Ok(Self { shape: Some(shape), ..Self::of_any_shape(name, dtype)? })
    }

    /// The same where nothing is known of the shape.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn of_any_shape(name: &str, dtype: DType) -> Result<Self> {
        Ok(Self { name: OutputName::parse(name)?, dtype, shape: None, device: None })
    }

    /// Where what is fed will be, by TensorFlow's name, such as `/device:GPU:1`. Without this it is the first GPU if the
    /// session has one, and the host if not.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for a name with a null character.
    pub fn on(mut self, device: &str) -> Result<Self> {
        let text = "the name of a device holds a null character";
        self.device = Some(CString::new(device).map_err(|_| Error::new(ErrorKind::Argument, text))?);
        Ok(self)
    }

    /// What is wrong with a tensor that is fed.
    fn refusal(&self, fed: &External) -> Option<String> {
        if fed.dtype() != self.dtype {
            return Some(format!("is {}, but what was fed is {}", self.dtype, fed.dtype()));
        }
        let shape = self.shape.as_ref()?;
        let fits = shape.len() == fed.shape().len()
            && shape.iter().zip(fed.shape()).all(|(declared, fed)| declared.is_none_or(|declared| declared == *fed));
        let shown: Vec<_> = shape.iter().map(|length| length.map_or("?".into(), |length| length.to_string())).collect();
        (!fits).then(|| format!("has the shape [{}], but what was fed has {:?}", shown.join(", "), fed.shape()))
    }
}

/// A graph and what runs it. Runs may be on several threads at once.
///
/// Results stay valid when the session is gone. A session does not survive a fork: the child can neither run nor end it.
pub struct Session {
    runtime: &'static Runtime,
    raw: NonNull<TF_Session>,
    /// The process that it belongs to.
    process: u32,
    inputs: Vec<Input>,
    /// Where all handles are fed: those of the inputs, and then those of the outputs.
    handles: TF_Output,
    /// What keeps the outputs.
    outputs: Vec<*mut TF_Operation>,
    /// The names of the outputs.
    names: Vec<String>,
    devices: Vec<String>,
    /// Deleted after the session.
    graph: Definition,
}

// SAFETY: TensorFlow's sessions may be run, and deleted, on any thread.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    /// Loads a serialised `GraphDef`, whose tensors `inputs` are replaced by what is fed in a run and whose tensors
    /// `outputs` are what a run gives.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for bytes that are no `GraphDef`, for a graph with variables or without a tensor that is
    /// named, for an input that is named twice, and without outputs; [`ErrorKind::Device`] for a GPU that is not there;
    /// [`ErrorKind::Dtype`] for inputs and outputs of a dtype that cannot cross; and what TensorFlow reports.
    pub fn open(
        runtime: &'static Runtime,
        graph_def: &[u8],
        inputs: &[Input],
        outputs: &[&str],
        options: &SessionOptions,
    ) -> Result<Self> {
        // Before there is a session: the first one settles how GPU memory is taken.
        for (i, input) in inputs.iter().enumerate() {
            if inputs[..i].iter().any(|other| other.name == input.name) {
                return Err(argument(format!("the input {} is named twice", input.name)));
            }
        }
        if outputs.is_empty() {
            return Err(argument("name at least one output".into()));
        }
        register(runtime, &[&INPUT, &KEEP])?;
        let mut session = Self::empty(runtime, options)?;
        session.learn_streams()?;
        let fed = inputs.iter().map(|input| session.add_input(input)).collect::<Result<Vec<_>>>()?;
        let replaced: Vec<_> = inputs.iter().map(|input| &input.name).zip(fed).collect();
        session.graph.import(graph_def, &replaced)?;
        for name in outputs {
            let name = OutputName::parse(name)?;
            let fed = replaced.iter().find(|(replaced, _)| **replaced == name);
            let output = fed.map_or_else(|| session.graph.find(&name), |(_, fed)| Ok(*fed))?;
            session.add_output(&name, output)?;
        }
        Ok(session)
    }

    /// A session that copies bytes on a GPU, in TensorFlow's stream and without a kernel.
    pub(crate) fn for_copies(runtime: &'static Runtime, gpu: Device) -> Result<Self> {
        /// `Copy` is made for debuggers, and passes its input on where there is none.
        const DEBUGGED: &str = "DebugIdentity;file:///dev/null;0";
        register(runtime, &[&INPUT, &KEEP])?;
        let mut session = Self::empty(runtime, &SessionOptions::default())?;
        session.learn_streams()?;
        let device = runtime.consumer.name_of(gpu);
        let device = device.ok_or_else(|| argument(format!("tensorflow does not show {gpu} in this process")))?;
        let input = Input { device: Some(device), ..Input::new("x:0", DType::UINT8, &[None])? };
        let fed = session.add_input(&input)?;
        let strings = &[(c"debug_ops_spec", DEBUGGED)];
        let node = Node { inputs: &[fed], strings, beside: Some(fed), ..Node::default() };
        let made = session.graph.add(c"Copy", "y", &node)?;
        session.add_output(&OutputName::parse("y")?, made)?;
        Ok(session)
    }

    fn empty(runtime: &'static Runtime, options: &SessionOptions) -> Result<Self> {
        let (config, visible) = options.serialised()?;
        check_devices(runtime, &visible.unwrap_or_default())?;
        let (sessions, status) = (&runtime.sessions, Status::new(&runtime.core));
        let graph = Definition::new(runtime);
        let placeholder = Node { types: &[(c"dtype", INT32)], ..Node::default() };
        let handles = graph.add(c"Placeholder", "tensor_bridge/handles", &placeholder)?;
        // SAFETY: the options are ours until they are deleted, the bytes are copied, and the graph lives longer than the
        // session; the list of devices is given away.
        unsafe {
            let raw_options = (sessions.TF_NewSessionOptions)();
            (sessions.TF_SetConfig)(raw_options, config.as_ptr().cast(), config.len(), status.raw());
            let configured = status.check();
            let raw = match configured {
                Ok(()) => (sessions.TF_NewSession)(graph.raw(), raw_options, status.raw()),
                Err(_) => null_mut(),
            };
            (sessions.TF_DeleteSessionOptions)(raw_options);
            configured?;
            status.check()?;
            let raw = NonNull::new(raw).ok_or_else(nothing)?;
            let mut session = Self {
                runtime,
                raw,
                process: std::process::id(),
                inputs: Vec::new(),
                handles,
                outputs: Vec::new(),
                names: Vec::new(),
                devices: Vec::new(),
                graph,
            };
            let list = (sessions.TF_SessionListDevices)(session.raw(), status.raw());
            status.check()?;
            session.devices = devices::names(runtime, list);
            Ok(session)
        }
    }

    fn raw(&self) -> *mut TF_Session {
        self.raw.as_ptr()
    }

    fn core(&self) -> &'static crate::runtime::api::Core {
        &self.runtime.core
    }

    /// The whole names of the devices that it can use.
    pub fn devices(&self) -> &[String] {
        &self.devices
    }

    /// Asks the GPUs for their streams.
    fn learn_streams(&self) -> Result<()> {
        let cuda = self.runtime.capabilities().cuda;
        for name in self.devices.iter().filter(|name| cuda && name.contains("/device:GPU:")) {
            devices::register(self.runtime)?;
            let name = CString::new(name.as_str()).expect("it was a C string");
            let (number, zero) =
                (name.to_string_lossy().replace(['/', ':'], "_"), Tensor::of(self.core(), FLOAT, &[0f32])?);
            let (types, tensors) = (&[(c"dtype", FLOAT)], &[(c"value", &zero)]);
            // On the host: on a GPU it would keep memory as long as the session lives.
            let constant = Node { types, tensors, device: Some(devices::HOST), ..Node::default() };
            let constant = self.graph.add(c"Const", &format!("tensor_bridge/zero{number}"), &constant)?;
            let node = Node { inputs: &[constant], device: Some(&name), ..Node::default() };
            let tell = self.graph.add(STREAM.name, &format!("tensor_bridge/stream{number}"), &node)?;
            let told_here = self.execute(&[], &[], &[tell], &[])?;
            // SAFETY: what a run gives is in host memory.
            if let Some((stream, ordinal)) = unsafe { told(&told_here[0]) }? {
                self.runtime.consumer.learn(Gpu { name, ordinal, stream });
            }
        }
        Ok(())
    }

    fn add_input(&mut self, input: &Input) -> Result<TF_Output> {
        let code = dtypes::code(input.dtype).filter(|_| self.runtime.profile.dtypes.contains(&input.dtype));
        let code = code.ok_or_else(|| {
            Error::new(
                ErrorKind::Dtype,
                format!("tensorflow has no dtype {} for the input {}", input.dtype, input.name),
            )
        })?;
        let has_gpu = self.devices.iter().any(|name| name.contains("/device:GPU:"));
        let device = input.device.as_deref().unwrap_or(if has_gpu { c"/device:GPU:0" } else { devices::HOST });
        let numbers = &[(PLACE, self.inputs.len() as i64)];
        let node =
            Node { inputs: &[self.handles], types: &[(c"T", code)], numbers, device: Some(device), ..Node::default() };
        let fed = self.graph.add(INPUT.name, &node_name("input", &input.name), &node)?;
        if let Some(shape) = &input.shape {
            self.graph.set_shape(fed, shape)?;
        }
        self.inputs.push(input.clone());
        Ok(fed)
    }

    fn add_output(&mut self, name: &OutputName, output: TF_Output) -> Result<()> {
        dtypes::dtype(self.graph.code(output))
            .map_err(|reason| Error::new(ErrorKind::Dtype, format!("the output {name} cannot be taken: {reason}")))?;
        self.names.push(name.to_string());
        let name = format!("{}_{}", node_name("output", name), self.outputs.len());
        let numbers = &[(PLACE, (self.inputs.len() + self.outputs.len()) as i64)];
        let node = Node { inputs: &[output, self.handles], numbers, beside: Some(output), ..Node::default() };
        self.outputs.push(self.graph.add(KEEP.name, &name, &node)?.oper);
        Ok(())
    }

    /// Runs the graph once: every input has to be fed, by its name, and the outputs come back in the order in which they
    /// were declared.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for an input that is not fed, fed twice or not declared, or is of another dtype or shape,
    /// [`ErrorKind::Framework`] for an output in a branch that is not taken, and what TensorFlow reports; the error names
    /// the input, the output or the operation.
    pub fn run(&self, feeds: &[(&str, &External)]) -> Result<Vec<External>> {
        if self.process != std::process::id() {
            return Err(argument("a session does not survive a fork: open one in the child".into()));
        }
        let mut fed: Vec<Option<&External>> = vec![None; self.inputs.len()];
        for (name, tensor) in feeds {
            let parsed = OutputName::parse(name)?;
            let place = self.inputs.iter().position(|input| input.name == parsed).ok_or_else(|| {
                let declared: Vec<_> = self.inputs.iter().map(|input| input.name.to_string()).collect();
                argument(format!("the session has no input {name}: it has {}", declared.join(", ")))
            })?;
            if let Some(refusal) = self.inputs[place].refusal(tensor) {
                return Err(argument(format!("the input {name} {refusal}")));
            }
            if fed[place].replace(tensor).is_some() {
                return Err(argument(format!("the input {name} is fed twice")));
            }
        }
        if let Some(missing) = fed.iter().position(Option::is_none) {
            return Err(argument(format!("the input {} is not fed", self.inputs[missing].name)));
        }
        let results: Vec<_> = self.outputs.iter().map(|_| external::new_handle()).collect();
        let handles: Vec<[i32; 2]> =
            fed.iter().flatten().map(|fed| fed.handle()).chain(results.iter().copied()).collect();
        let handles = Tensor::of(self.core(), INT32, handles.as_flattened())?;
        let done = self.execute(&[self.handles], &[handles], &[], &self.outputs);
        // Also what a run has kept that failed.
        let results: Vec<_> = results.into_iter().map(External::take).collect();
        done?;
        let named = |(result, name): (Result<External>, &String)| {
            result.map_err(|_| {
                let text = format!("the output {name} was not computed: it is in a branch that this run did not take");
                Error::new(ErrorKind::Framework, text)
            })
        };
        results.into_iter().zip(&self.names).map(named).collect()
    }

    fn execute(
        &self,
        inputs: &[TF_Output],
        values: &[Tensor],
        outputs: &[TF_Output],
        targets: &[*mut TF_Operation],
    ) -> Result<Vec<Tensor>> {
        debug_assert_eq!(inputs.len(), values.len());
        let (core, status) = (self.core(), Status::new(self.core()));
        let values: Vec<*mut TF_Tensor> = values.iter().map(Tensor::raw).collect();
        let mut results: Vec<*mut TF_Tensor> = vec![null_mut(); outputs.len()];
        // SAFETY: the session and its graph are alive; every array has as many entries as are told; results are ours.
        unsafe {
            (self.runtime.sessions.TF_SessionRun)(
                self.raw(),
                null(),
                inputs.as_ptr(),
                values.as_ptr(),
                inputs.len() as c_int,
                outputs.as_ptr(),
                results.as_mut_ptr(),
                outputs.len() as c_int,
                targets.as_ptr().cast(),
                targets.len() as c_int,
                null_mut(),
                status.raw(),
            );
            let results: Vec<_> = results.into_iter().map(|raw| Tensor::from_raw(core, raw)).collect();
            status.check()?;
            results.into_iter().map(|result| result.ok_or_else(nothing)).collect()
        }
    }

    /// Ends the session. Dropping it does the same, and says nothing.
    ///
    /// # Errors
    ///
    /// What TensorFlow reports.
    pub fn close(self) -> Result<()> {
        let status = Status::new(self.core());
        // SAFETY: the session is alive.
        unsafe { (self.runtime.sessions.TF_CloseSession)(self.raw(), status.raw()) };
        status.check()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // TensorFlow would wait for threads that the child does not have.
            return;
        }
        let status = Status::new(self.core());
        // SAFETY: the session is ours, and nobody runs it any more.
        unsafe { (self.runtime.sessions.TF_DeleteSession)(self.raw(), status.raw()) };
    }
}

/// TensorFlow 1.x ends the process when it is to use a GPU that is not there.
fn check_devices(runtime: &Runtime, visible: &[u32]) -> Result<()> {
    if !runtime.capabilities().cuda || visible.is_empty() {
        return Ok(());
    }
    let count = bridge_cuda::device_count();
    match visible.iter().find(|number| **number as usize >= count) {
        None => Ok(()),
        Some(number) => {
            let text = format!("there is no GPU {number} to be made visible: this process sees {count} CUDA device(s)");
            Err(Error::new(ErrorKind::Device, text))
        }
    }
}

/// A name for an operation of ours, which says for which tensor of the graph it is.
fn node_name(kind: &str, name: &OutputName) -> String {
    format!("tensor_bridge/{kind}/{}", name.to_string().replace(':', "_"))
}
