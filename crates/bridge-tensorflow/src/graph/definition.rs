//! A graph of TensorFlow's, as it is built for a session.

use crate::graph::argument;
use crate::runtime::Runtime;
use crate::runtime::api::{TF_Graph, TF_Operation, TF_Output};
use crate::runtime::status::Status;
use crate::runtime::tensor::RuntimeTensor;
use bridge_core::Result;
use prost::Message;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{NonNull, null_mut};

/// An owned graph.
pub(crate) struct Graph {
    runtime: &'static Runtime,
    raw: NonNull<TF_Graph>,
}

// SAFETY: TensorFlow guards graphs with its own lock.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

/// The fields of a `GraphDef` that are read (`tensorflow/core/framework/graph.proto`).
#[derive(Clone, PartialEq, Message)]
struct GraphDef {
    #[prost(message, repeated, tag = "1")]
    node: Vec<NodeDef>,
}

#[derive(Clone, PartialEq, Message)]
struct NodeDef {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    op: String,
}

/// Operations that are variables: only a saved model has their values.
const VARIABLES: [&str; 4] = ["Variable", "VariableV2", "TemporaryVariable", "VarHandleOp"];

/// The arguments of an operation.
#[derive(Default)]
pub(crate) struct Node<'a> {
    pub(crate) inputs: &'a [TF_Output],
    pub(crate) types: &'a [(&'a CStr, c_int)],
    pub(crate) numbers: &'a [(&'a CStr, i64)],
    pub(crate) tensors: &'a [(&'a CStr, &'a RuntimeTensor)],
    /// Values as serialised `AttrValue`s.
    pub(crate) protos: &'a [(&'a CStr, &'a [u8])],
    /// Lists with one string.
    pub(crate) strings: &'a [(&'a CStr, &'a str)],
    pub(crate) device: Option<&'a CStr>,
    /// An output of the operation with which it must be colocated.
    pub(crate) beside: Option<TF_Output>,
}

/// The name of an output in a graph: an operation and an index, such as `x:0`. Without an index it is the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputName {
    operation: CString,
    index: c_int,
}

impl OutputName {
    /// # Errors
    ///
    /// [`ErrorKind::Argument`](bridge_core::ErrorKind::Argument) for a text that is not such a name.
    pub(crate) fn parse(name: &str) -> Result<Self> {
        let (operation, index) = name.rsplit_once(':').unwrap_or((name, "0"));
        let parsed = CString::new(operation).ok().zip(index.parse().ok().filter(|index| *index >= 0));
        let (operation, index) = parsed
            .filter(|_| !operation.is_empty())
            .ok_or_else(|| argument(format!("{name:?} names no tensor of a graph, as \"x:0\" does")))?;
        Ok(Self { operation, index })
    }
}

impl std::fmt::Display for OutputName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.operation.to_string_lossy(), self.index)
    }
}

impl Graph {
    pub(crate) fn new(runtime: &'static Runtime) -> Self {
        // SAFETY: the function has no obligations; the result is ours.
        let raw = unsafe { (runtime.sessions.TF_NewGraph)() };
        Self { runtime, raw: NonNull::new(raw).expect("TF_NewGraph returns a graph") }
    }

    pub(crate) fn raw(&self) -> *mut TF_Graph {
        self.raw.as_ptr()
    }

    /// Adds an operation, and returns its first output.
    pub(crate) fn add(&self, operation: &CStr, name: &str, node: &Node<'_>) -> Result<TF_Output> {
        let (sessions, status) = (&self.runtime.sessions, Status::new(&self.runtime.core));
        let name = CString::new(name).map_err(|_| argument("a name holds a null character"))?;
        // SAFETY: the graph is alive, every argument is a C string or belongs to the graph, and finishing takes the
        // description over, even if it fails.
        unsafe {
            let new = (sessions.TF_NewOperation)(self.raw(), operation.as_ptr(), name.as_ptr());
            node.inputs.iter().for_each(|input| (sessions.TF_AddInput)(new, *input));
            node.types.iter().for_each(|(attribute, code)| (sessions.TF_SetAttrType)(new, attribute.as_ptr(), *code));
            node.numbers
                .iter()
                .for_each(|(attribute, number)| (sessions.TF_SetAttrInt)(new, attribute.as_ptr(), *number));
            for (attribute, tensor) in node.tensors {
                // Finishing reports a failure here, too: the attribute is missing then.
                (sessions.TF_SetAttrTensor)(new, attribute.as_ptr(), tensor.raw(), status.raw());
            }
            for (attribute, proto) in node.protos {
                let (start, length) = (proto.as_ptr().cast(), proto.len());
                (sessions.TF_SetAttrValueProto)(new, attribute.as_ptr(), start, length, status.raw());
            }
            for (attribute, string) in node.strings {
                let (start, length) = (string.as_ptr().cast(), string.len());
                (sessions.TF_SetAttrStringList)(new, attribute.as_ptr(), &start, &length, 1);
            }
            node.device.iter().for_each(|device| (sessions.TF_SetDevice)(new, device.as_ptr()));
            node.beside.iter().for_each(|other| (sessions.TF_ColocateWith)(new, other.oper));
            let oper = (sessions.TF_FinishOperation)(new, status.raw());
            status.check()?;
            Ok(TF_Output { oper, index: 0 })
        }
    }

    /// Returns the output with this name.
    pub(crate) fn find(&self, name: &OutputName) -> Result<TF_Output> {
        let sessions = &self.runtime.sessions;
        // SAFETY: the graph is alive, and so are its operations.
        let oper: *mut TF_Operation =
            unsafe { (sessions.TF_GraphOperationByName)(self.raw(), name.operation.as_ptr()) };
        // SAFETY: as above.
        let there = !oper.is_null() && name.index < unsafe { (sessions.TF_OperationNumOutputs)(oper) };
        let output = TF_Output { oper, index: name.index };
        there.then_some(output).ok_or_else(|| {
            argument(format!("the graph has no tensor {name}: name one that the graph has, such as \"y:0\""))
        })
    }

    /// TensorFlow's code of an output's dtype.
    pub(crate) fn code(&self, output: TF_Output) -> c_int {
        // SAFETY: the output is one of an operation of this graph.
        unsafe { (self.runtime.sessions.TF_OperationOutputType)(output) }
    }

    /// Declares the shape of an output, with `None` for lengths that may differ.
    pub(crate) fn set_shape(&self, output: TF_Output, shape: &[Option<i64>]) -> Result<()> {
        let status = Status::new(&self.runtime.core);
        let shape: Vec<i64> = shape.iter().map(|length| length.unwrap_or(-1)).collect();
        // SAFETY: the graph is alive, the output its own, and the shape has as many lengths as are passed.
        unsafe {
            let set = self.runtime.sessions.TF_GraphSetTensorShape;
            set(self.raw(), output, shape.as_ptr(), shape.len() as c_int, status.raw());
        }
        status.check()
    }

    /// Returns the operation with this name.
    pub(crate) fn operation(&self, name: &OutputName) -> Result<*mut TF_Operation> {
        // SAFETY: the graph is alive, and the name a C string.
        let oper = unsafe { (self.runtime.sessions.TF_GraphOperationByName)(self.raw(), name.operation.as_ptr()) };
        let missing = || argument(format!("the graph has no operation {}", name.operation.to_string_lossy()));
        (!oper.is_null()).then_some(oper).ok_or_else(missing)
    }

    /// Adds all operations of a serialised `GraphDef`, with some of its outputs replaced by outputs of the graph.
    /// Refuses variables, unless something `restores` them.
    pub(crate) fn import(&self, graph_def: &[u8], replaced: &[(&OutputName, TF_Output)], restores: bool) -> Result<()> {
        let (sessions, status) = (&self.runtime.sessions, Status::new(&self.runtime.core));
        let nodes = GraphDef::decode(graph_def).map_err(|error| {
            argument(format!("this is not a serialised GraphDef ({error}): pass the bytes of a frozen graph"))
                .caused_by(error)
        })?;
        if let Some(node) = nodes.node.iter().find(|node| !restores && VARIABLES.contains(&&*node.op)) {
            let name = &node.name;
            return Err(argument(format!(
                "the graph holds the variable {name}: freeze it (convert_variables_to_constants), or open its saved model"
            )));
        }
        let placeholders: Vec<&str> =
            nodes.node.iter().filter(|node| node.op.starts_with("Placeholder")).map(|node| &*node.name).collect();
        // SAFETY: the bytes are copied; options, results and buffer are ours until they are deleted; the returned names
        // belong to the results.
        unsafe {
            let bytes = (sessions.TF_NewBufferFromString)(graph_def.as_ptr().cast(), graph_def.len());
            let options = (sessions.TF_NewImportGraphDefOptions)();
            for (name, output) in replaced {
                let map = sessions.TF_ImportGraphDefOptionsAddInputMapping;
                map(options, name.operation.as_ptr(), name.index, *output);
                // Control dependencies on a placeholder move to the fed output. Other replaced operations still run, as
                // when TensorFlow feeds them.
                if placeholders.iter().any(|placeholder| placeholder.as_bytes() == name.operation.to_bytes()) {
                    let remap = sessions.TF_ImportGraphDefOptionsRemapControlDependency;
                    remap(options, name.operation.as_ptr(), output.oper);
                }
            }
            let results = (sessions.TF_GraphImportGraphDefWithResults)(self.raw(), bytes, options, status.raw());
            (sessions.TF_DeleteImportGraphDefOptions)(options);
            (sessions.TF_DeleteBuffer)(bytes);
            status.check()?;
            let (mut count, mut names, mut indices) = (0, null_mut::<*const c_char>(), null_mut());
            let missing = sessions.TF_ImportGraphDefResultsMissingUnusedInputMappings;
            missing(results, &mut count, &mut names, &mut indices);
            let first = (count > 0).then(|| format!("{}:{}", CStr::from_ptr(*names).to_string_lossy(), *indices));
            (sessions.TF_DeleteImportGraphDefResults)(results);
            match first {
                None => Ok(()),
                Some(name) => {
                    let known: Vec<_> = placeholders.iter().map(|placeholder| format!("{placeholder}:0")).collect();
                    Err(argument(format!("the graph has no input {name}: its placeholders are {}", known.join(", "))))
                }
            }
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is ours; a session drops it after itself.
        unsafe { (self.runtime.sessions.TF_DeleteGraph)(self.raw()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_index() {
        let name = |text| OutputName::parse(text).map(|name| name.to_string()).ok();
        assert_eq!(name("x:0").as_deref(), Some("x:0"));
        assert_eq!(name("scope/x").as_deref(), Some("scope/x:0"));
        assert_eq!(name("x:12").as_deref(), Some("x:12"));
        for wrong in ["", ":0", "x:", "x:-1", "x:y", "x\0:0"] {
            assert_eq!(name(wrong), None, "{wrong:?}");
        }
    }
}
