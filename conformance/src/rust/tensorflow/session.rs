//! A graph that grows, and the session that runs it.

use super::library::{Buffer, Library, Output, Raw, Value};
use bridge_core::Result;
use prost::Message;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_int};
use std::ptr::{null, null_mut};

/// A `ConfigProto`: memory of the GPU as it is needed, and graphs that are run as they were built
/// (`gpu_options.allow_growth`, `graph_options.rewrite_options.disable_meta_optimizer`).
const CONFIG: [u8; 11] = [0x32, 2, 0x20, 1, 0x52, 5, 0x52, 3, 0x98, 1, 1];

/// `RunOptions` that request statistics (`trace_level: SOFTWARE_TRACE`).
const TRACE: [u8; 2] = [8, 1];

/// The path in a `RunMetadata` to the bytes that an allocator has in use (`tensorflow/core/protobuf/config.proto`,
/// `tensorflow/core/framework/step_stats.proto`).
#[derive(Clone, PartialEq, Message)]
struct RunMetadata {
    #[prost(message, optional, tag = "1")]
    step_stats: Option<StepStats>,
}

#[derive(Clone, PartialEq, Message)]
struct StepStats {
    #[prost(message, repeated, tag = "1")]
    dev_stats: Vec<DeviceStepStats>,
}

#[derive(Clone, PartialEq, Message)]
struct DeviceStepStats {
    #[prost(message, repeated, tag = "2")]
    node_stats: Vec<NodeExecStats>,
}

#[derive(Clone, PartialEq, Message)]
struct NodeExecStats {
    #[prost(message, repeated, tag = "6")]
    memory: Vec<AllocatorMemoryUsed>,
}

#[derive(Clone, PartialEq, Message)]
struct AllocatorMemoryUsed {
    #[prost(int64, tag = "5")]
    allocator_bytes_in_use: i64,
}

/// An attribute of an operation.
pub(super) enum Attribute<'a> {
    Type(c_int),
    /// A list with one string.
    Strings(&'a str),
}

/// A graph and its session.
pub(super) struct Session {
    pub(super) library: &'static Library,
    graph: Raw,
    session: Raw,
    operations: Cell<usize>,
}

impl Session {
    pub(super) fn new(library: &'static Library) -> Result<Self> {
        let call = &library.call;
        // SAFETY: graph, options and session are ours until they are deleted; the bytes are copied.
        unsafe {
            let options = (call.TF_NewSessionOptions)();
            let graph = (call.TF_NewGraph)();
            let made = library
                .checked(|status| (call.TF_SetConfig)(options, CONFIG.as_ptr().cast(), CONFIG.len(), status))
                .and_then(|()| library.checked(|status| (call.TF_NewSession)(graph, options, status)));
            (call.TF_DeleteSessionOptions)(options);
            let session = made.inspect_err(|_| (call.TF_DeleteGraph)(graph))?;
            Ok(Self { library, graph, session, operations: Cell::default() })
        }
    }

    /// Returns the full names of the devices.
    pub(super) fn devices(&self) -> Result<Vec<String>> {
        let call = &self.library.call;
        // SAFETY: the session is alive; the list is ours until it is deleted, and its names are C strings until then.
        unsafe {
            let list = self.library.checked(|status| (call.TF_SessionListDevices)(self.session, status))?;
            let name = |i| {
                let name = self.library.checked(|status| (call.TF_DeviceListName)(list, i, status))?;
                Ok(CStr::from_ptr(name).to_string_lossy().into_owned())
            };
            let names = (0..(call.TF_DeviceListCount)(list)).map(name).collect();
            (call.TF_DeleteDeviceList)(list);
            names
        }
    }

    /// Adds an operation, and returns its first output.
    pub(super) fn add(
        &self,
        operation: &CStr,
        attributes: &[(&CStr, Attribute<'_>)],
        inputs: &[Output],
        device: &CStr,
    ) -> Result<Output> {
        let call = &self.library.call;
        self.operations.set(self.operations.get() + 1);
        let name = format!("{}_{}", operation.to_string_lossy(), self.operations.get());
        let name = CString::new(name).expect("the name of an operation holds no null character");
        // SAFETY: the graph is alive, every argument is a C string or belongs to the graph, and finishing takes the
        // description over, even if it fails.
        unsafe {
            let new = (call.TF_NewOperation)(self.graph, operation.as_ptr(), name.as_ptr());
            inputs.iter().for_each(|input| (call.TF_AddInput)(new, *input));
            for (name, attribute) in attributes {
                match attribute {
                    Attribute::Type(code) => (call.TF_SetAttrType)(new, name.as_ptr(), *code),
                    Attribute::Strings(string) => {
                        let (start, length) = (string.as_ptr().cast(), string.len());
                        (call.TF_SetAttrStringList)(new, name.as_ptr(), &start, &length, 1);
                    }
                }
            }
            (call.TF_SetDevice)(new, device.as_ptr());
            let oper = self.library.checked(|status| (call.TF_FinishOperation)(new, status))?;
            Ok(Output { oper, index: 0 })
        }
    }

    /// Feeds values, and returns `fetch`.
    pub(super) fn run(&self, feeds: &[(Output, Value)], fetch: Output) -> Result<Value> {
        self.execute(feeds, fetch, null(), null_mut())
    }

    /// Does the same, and returns as well the most bytes in use that the allocator of an operation counted, or `None`
    /// where none did.
    pub(super) fn run_traced(&self, feeds: &[(Output, Value)], fetch: Output) -> Result<(Value, Option<usize>)> {
        let (options, mut about) = (Buffer::over(&TRACE), Buffer::over(&[]));
        let value = self.execute(feeds, fetch, &options, &mut about)?;
        let metadata = RunMetadata::decode(about.bytes()).unwrap_or_default();
        let devices = metadata.step_stats.into_iter().flat_map(|stats| stats.dev_stats);
        let used = devices.flat_map(|device| device.node_stats).flat_map(|node| node.memory);
        Ok((value, used.map(|used| used.allocator_bytes_in_use as usize).max()))
    }

    fn execute(
        &self,
        feeds: &[(Output, Value)],
        fetch: Output,
        options: *const Buffer,
        about: *mut Buffer,
    ) -> Result<Value> {
        let (places, values): (Vec<_>, Vec<_>) = feeds.iter().map(|(place, value)| (*place, value.raw)).unzip();
        let (count, mut fetched) = (feeds.len() as c_int, null_mut());
        // SAFETY: the session and its graph are alive; every array has as many entries as are passed; the buffers are
        // null or live as long as the call; the result is ours.
        unsafe {
            let run = self.library.call.TF_SessionRun;
            let call = |status| {
                let (places, values, none) = (places.as_ptr(), values.as_ptr(), null());
                run(self.session, options, places, values, count, &fetch, &mut fetched, 1, none, 0, about, status);
            };
            self.library.checked(call)?;
            Ok(Value::from_raw(self.library, fetched))
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let call = &self.library.call;
        // SAFETY: both are ours, and no run is left.
        unsafe {
            let _ = self.library.checked(|status| (call.TF_DeleteSession)(self.session, status));
            (call.TF_DeleteGraph)(self.graph);
        }
    }
}
