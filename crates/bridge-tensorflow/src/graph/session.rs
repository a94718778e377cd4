//! Sessions without Python: a frozen graph or a saved model, with inputs and outputs in other frameworks' memory.

use crate::graph::argument;
use crate::graph::config::{SessionOptions, check_devices};
use crate::graph::definition::{Graph, Node, OutputName};
use crate::graph::external::{self, External, Value};
use crate::graph::input::Input;
use crate::graph::operations::{INPUT, KEEP, PLACE};
use crate::graph::saved::{Endpoint, STRING, SavedModel};
use crate::runtime::Runtime;
use crate::runtime::api::{Core, TF_Operation, TF_Output, TF_Session, TF_Tensor};
use crate::runtime::dtypes::{self, INT32};
use crate::runtime::gpus::{GPUS, Gpu, HOST, names};
use crate::runtime::kernel::register;
use crate::runtime::status::Status;
use crate::runtime::stream::{self, FLOAT, STREAM};
use crate::runtime::tensor::{RuntimeTensor, no_tensor};
use bridge_core::{DType, Device, Error, ErrorKind, Result};
use std::ffi::{CString, c_int};
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, OnceLock};

/// A graph that can be run, on several threads at once.
///
/// Results stay valid when the session is closed. No session survives a fork: the threads that TensorFlow runs graphs
/// on do not exist in the child, which can neither run nor close a session, nor open one if its parent has opened one.
/// Run sessions in a process that is started and not forked.
pub struct Session {
    runtime: &'static Runtime,
    raw: NonNull<TF_Session>,
    /// The id of the process that opened it.
    process: u32,
    inputs: Vec<Input>,
    /// The placeholder of all handles: those of the inputs, then those of the outputs.
    handles: TF_Output,
    /// The operations that record the outputs.
    outputs: Vec<*mut TF_Operation>,
    /// The names of the outputs.
    names: Vec<String>,
    devices: Vec<String>,
    /// Deleted after the session.
    graph: Graph,
}

bridge_core::debug_fields!(impl[] Session: inputs, names);

// SAFETY: TensorFlow's sessions may be run, and deleted, on any thread.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    /// Loads a serialised `GraphDef`. A run replaces its tensors `inputs` by the fed ones, and returns its tensors
    /// `outputs`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for bytes that are not a `GraphDef`, for a graph with variables or without one of the
    /// named tensors, for an input that is named twice, and without outputs; [`ErrorKind::Device`] for a GPU that does
    /// not exist; [`ErrorKind::Dtype`] for inputs and outputs of a dtype that no other framework has; and what
    /// TensorFlow reports.
    pub fn open(
        runtime: &'static Runtime,
        graph_def: &[u8],
        inputs: &[Input],
        outputs: &[&str],
        options: &SessionOptions,
    ) -> Result<Self> {
        Self::over(runtime, graph_def, None, inputs, outputs, options)
    }

    /// Loads a saved model: restores its variables and runs its initialiser. A run replaces its tensors `inputs` by the
    /// fed ones, and returns its tensors `outputs`.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open), but for the variables.
    pub fn open_saved_model(
        runtime: &'static Runtime,
        model: &SavedModel,
        inputs: &[Input],
        outputs: &[&str],
        options: &SessionOptions,
    ) -> Result<Self> {
        Self::over(runtime, model.graph_def(), Some(model), inputs, outputs, options)
    }

    /// Loads a saved model, and runs one of its signatures. Inputs and outputs have their keys in the signature as
    /// names; the outputs are returned in the order of their keys.
    ///
    /// # Errors
    ///
    /// As for [`open_saved_model`](Self::open_saved_model), and those of [`SavedModel::signature`] and
    /// [`Endpoint::input`](crate::Endpoint::input).
    pub fn open_signature(
        runtime: &'static Runtime,
        model: &SavedModel,
        signature: &str,
        options: &SessionOptions,
    ) -> Result<Self> {
        let signature = model.signature(signature)?;
        signature.check()?;
        let inputs = signature.inputs().iter().map(Endpoint::input).collect::<Result<Vec<_>>>()?;
        let outputs: Vec<_> = signature.outputs().iter().map(|output| &*output.tensor).collect();
        let mut session = Self::open_saved_model(runtime, model, &inputs, &outputs, options)?;
        session.names = signature.outputs().iter().map(|output| output.key.clone()).collect();
        Ok(session)
    }

    fn over(
        runtime: &'static Runtime,
        graph_def: &[u8],
        model: Option<&SavedModel>,
        inputs: &[Input],
        outputs: &[&str],
        options: &SessionOptions,
    ) -> Result<Self> {
        // Before the session is created: the first one of 1.x sets the options of GPU memory.
        for (i, input) in inputs.iter().enumerate() {
            if inputs[..i].iter().any(|other| other.name == input.name) {
                return Err(argument(format!("the input {} is named twice: name it once", input.name)));
            }
        }
        if outputs.is_empty() {
            return Err(argument("name at least one output"));
        }
        register(runtime, &[&INPUT, &KEEP])?;
        let mut session = Self::empty(runtime, options)?;
        session.query_streams()?;
        let fed = inputs.iter().map(|input| session.add_input(input)).collect::<Result<Vec<_>>>()?;
        let paths = model.map_or(Ok(Vec::new()), SavedModel::paths)?;
        let read = paths.iter().map(|path| session.add_path(path)).collect::<Result<Vec<_>>>()?;
        let fed = inputs.iter().map(|input| &input.name).zip(fed);
        let replaced: Vec<_> = fed.chain(paths.iter().map(|(name, _)| name).zip(read)).collect();
        session.graph.import(graph_def, &replaced, model.is_some())?;
        for name in model.map(SavedModel::operations).unwrap_or_default() {
            let operation = session.graph.operation(&OutputName::parse(&name)?)?;
            session.execute(&[], &[], &[], &[operation])?;
        }
        for name in outputs {
            let name = OutputName::parse(name)?;
            let fed = replaced.iter().find(|(replaced, _)| **replaced == name);
            let output = fed.map_or_else(|| session.graph.find(&name), |(_, fed)| Ok(*fed))?;
            session.add_output(&name, output)?;
        }
        Ok(session)
    }

    /// Opens a session that copies bytes on a GPU, in TensorFlow's stream and without a kernel.
    pub(crate) fn for_copies(runtime: &'static Runtime, gpu: Device) -> Result<Self> {
        /// `Copy` is meant for debuggers, and without one forwards its input.
        const DEBUGGED: &str = "DebugIdentity;file:///dev/null;0";
        register(runtime, &[&INPUT, &KEEP])?;
        let mut session = Self::empty(runtime, &SessionOptions::default())?;
        session.query_streams()?;
        let device = runtime.consumer.gpus.name_of(gpu);
        let device = device.ok_or_else(|| argument(format!("tensorflow does not use {gpu} in this process")))?;
        let input = Input { device: Some(device), ..Input::new("x:0", DType::UINT8, &[None])? };
        let fed = session.add_input(&input)?;
        let strings = &[(c"debug_ops_spec", DEBUGGED)];
        let node = Node { inputs: &[fed], strings, beside: Some(fed), ..Node::default() };
        let made = session.graph.add(c"Copy", "y", &node)?;
        session.add_output(&OutputName::parse("y")?, made)?;
        Ok(session)
    }

    fn empty(runtime: &'static Runtime, options: &SessionOptions) -> Result<Self> {
        if self::process(runtime) != std::process::id() {
            return Err(forked());
        }
        let (config, visible) = options.serialised()?;
        check_devices(runtime, &visible.unwrap_or_default())?;
        let (sessions, status) = (&runtime.sessions, Status::new(&runtime.core));
        let graph = Graph::new(runtime);
        let placeholder = Node { types: &[(c"dtype", INT32)], ..Node::default() };
        let handles = graph.add(c"Placeholder", "truebridge/handles", &placeholder)?;
        // SAFETY: the options are ours until they are deleted, the bytes are copied, and the graph lives longer than
        // the session; the list of devices is ours, and handed over.
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
            let raw = NonNull::new(raw).ok_or_else(no_tensor)?;
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
            session.devices = names(&runtime.core, &runtime.sessions, list);
            Ok(session)
        }
    }

    fn raw(&self) -> *mut TF_Session {
        self.raw.as_ptr()
    }

    fn core(&self) -> &'static Core {
        &self.runtime.core
    }

    /// The names of the outputs, in the order in which a run returns them.
    pub fn outputs(&self) -> &[String] {
        &self.names
    }

    /// The full names of the devices that it can use.
    pub fn devices(&self) -> &[String] {
        &self.devices
    }

    fn has_gpu(&self) -> bool {
        self.devices.iter().any(|name| name.contains(GPUS))
    }

    /// Queries the streams of the GPUs.
    fn query_streams(&self) -> Result<()> {
        let cuda = self.runtime.has_cuda();
        for name in self.devices.iter().filter(|name| cuda && name.contains(GPUS)) {
            stream::register(self.runtime)?;
            let name = CString::new(name.as_str()).expect("it was a C string");
            let (suffix, zero) = (name.to_string_lossy().replace(['/', ':'], "_"), stream::input(self.runtime)?);
            let (types, tensors) = (&[(c"dtype", FLOAT)], &[(c"value", &zero)]);
            // On the host: on a GPU it would keep memory as long as the session lives.
            let constant = Node { types, tensors, device: Some(HOST), ..Node::default() };
            let constant = self.graph.add(c"Const", &format!("truebridge/zero{suffix}"), &constant)?;
            let node = Node { inputs: &[constant], device: Some(&name), ..Node::default() };
            let report = self.graph.add(STREAM.name, &format!("truebridge/stream{suffix}"), &node)?;
            let results = self.execute(&[], &[], &[report], &[])?;
            // SAFETY: the results of a run are in host memory.
            if let Some((stream, ordinal)) = unsafe { stream::reported(&results[0]) }? {
                self.runtime.consumer.gpus.record(Gpu { name, ordinal, stream });
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
        let device = input.device.as_deref().unwrap_or(if self.has_gpu() { c"/device:GPU:0" } else { HOST });
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

    /// Adds a string to be read on the host, instead of one of a saved model.
    fn add_path(&self, (name, value): &(OutputName, Vec<u8>)) -> Result<TF_Output> {
        let (types, protos) = (&[(c"dtype", STRING)], &[(c"value", &**value)]);
        let node = Node { types, protos, device: Some(HOST), ..Node::default() };
        self.graph.add(c"Const", &node_name("path", name), &node)
    }

    fn add_output(&mut self, name: &OutputName, output: TF_Output) -> Result<()> {
        dtypes::dtype(self.graph.code(output))
            .map_err(|reason| Error::new(ErrorKind::Dtype, format!("the output {name} cannot be taken: {reason}")))?;
        self.names.push(name.to_string());
        let name = format!("{}_{}", node_name("output", name), self.outputs.len());
        let numbers = &[(PLACE, (self.inputs.len() + self.outputs.len()) as i64)];
        // Where no GPU is, on the host: 1.x has computed some outputs on `XLA_CPU`, which has no kernel of ours.
        let (beside, device) = if self.has_gpu() { (Some(output), None) } else { (None, Some(HOST)) };
        let node = Node { inputs: &[output, self.handles], numbers, beside, device, ..Node::default() };
        self.outputs.push(self.graph.add(KEEP.name, &name, &node)?.oper);
        Ok(())
    }

    /// Runs the graph once, as [`run`](Self::run) does. Returns the outputs with their handles, as TensorFlow has them:
    /// other tensors may share their memory.
    pub(crate) fn fetch(&self, feeds: &[(&str, &External)]) -> Result<Vec<([i32; 2], Arc<Value>)>> {
        if self.process != std::process::id() {
            return Err(forked());
        }
        let mut fed: Vec<Option<&External>> = vec![None; self.inputs.len()];
        for (name, tensor) in feeds {
            let place = self.place_of(name)?;
            if let Some(refusal) = self.inputs[place].refusal(tensor) {
                return Err(argument(format!("the input {name} {refusal}")));
            }
            if fed[place].replace(tensor).is_some() {
                return Err(argument(format!("the input {name} is fed twice")));
            }
        }
        if let Some(missing) = fed.iter().position(Option::is_none) {
            return Err(argument(format!("the input {} is not fed: feed a tensor by this name", self.inputs[missing])));
        }
        let results: Vec<_> = self.outputs.iter().map(|_| external::new_handle()).collect();
        let handles: Vec<[i32; 2]> =
            fed.iter().flatten().map(|fed| fed.handle()).chain(results.iter().copied()).collect();
        let handles = RuntimeTensor::of(self.core(), INT32, handles.as_flattened())?;
        let done = self.execute(&[self.handles], &[handles], &[], &self.outputs);
        // Before the error is returned: a run that fails may have recorded some outputs.
        let results: Vec<_> =
            results.into_iter().map(|handle| Some((handle, external::recorded(handle).ok()?))).collect();
        done?;
        let named = |(result, name): (Option<_>, &String)| {
            result.ok_or_else(|| {
                let text = format!("the output {name} was not computed: it is in a branch that this run did not take");
                Error::new(ErrorKind::Framework, text)
            })
        };
        results.into_iter().zip(&self.names).map(named).collect()
    }

    /// Returns the index of the input that is fed by this name.
    fn place_of(&self, name: &str) -> Result<usize> {
        if let Some(place) = self.inputs.iter().position(|input| input.key.as_deref() == Some(name)) {
            return Ok(place);
        }
        let parsed = OutputName::parse(name)?;
        self.inputs.iter().position(|input| input.name == parsed).ok_or_else(|| {
            let declared: Vec<_> = self.inputs.iter().map(Input::to_string).collect();
            argument(format!("the session has no input {name}: it has {}", declared.join(", ")))
        })
    }

    fn execute(
        &self,
        inputs: &[TF_Output],
        values: &[RuntimeTensor],
        outputs: &[TF_Output],
        targets: &[*mut TF_Operation],
    ) -> Result<Vec<RuntimeTensor>> {
        debug_assert_eq!(inputs.len(), values.len());
        let (core, status) = (self.core(), Status::new(self.core()));
        let values: Vec<*mut TF_Tensor> = values.iter().map(RuntimeTensor::raw).collect();
        let mut results: Vec<*mut TF_Tensor> = vec![null_mut(); outputs.len()];
        // SAFETY: the session and its graph are alive; every array has as many entries as are passed; the results are
        // ours.
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
            let results: Vec<_> = results.into_iter().map(|raw| RuntimeTensor::from_raw(core, raw)).collect();
            status.check()?;
            results.into_iter().map(|result| result.ok_or_else(no_tensor)).collect()
        }
    }

    /// Closes the session. Dropping it does the same, and ignores errors.
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
            // TensorFlow would wait for threads that do not exist in the child.
            return;
        }
        let status = Status::new(self.core());
        // SAFETY: the session is ours, and no run borrows it any more.
        unsafe { (self.runtime.sessions.TF_DeleteSession)(self.raw(), status.raw()) };
    }
}

/// The id of the process in which this runtime's first session was opened, which started TensorFlow's threads.
fn process(runtime: &Runtime) -> u32 {
    static PROCESSES: [OnceLock<u32>; 2] = [const { OnceLock::new() }; 2];
    *PROCESSES[runtime.series() as usize].get_or_init(std::process::id)
}

fn forked() -> Error {
    argument(
        "sessions do not survive a fork, and a child cannot open others, because TensorFlow's threads are in the \
         parent: run them in a process that is started, not forked (in Python: the method \"spawn\" of multiprocessing)",
    )
}

/// Returns a name for an operation of ours at a tensor of the graph.
fn node_name(kind: &str, name: &OutputName) -> String {
    format!("truebridge/{kind}/{}", name.to_string().replace(':', "_"))
}
