//! What TensorFlow does with the tensors of the suite: small graphs, built once and run many times.

use super::library::{ORACLE, Output, Value};
use super::session::{Attribute, Session};
use super::{CHAIN, INT32, UINT8};
use bridge_core::{Error, ErrorKind, Result};
use bridge_tensorflow::External;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int};
use std::sync::Arc;

/// The operations of the bridge.
const INPUT: &CStr = c"TruebridgeInput";
const OUTPUT: &CStr = c"TruebridgeOutput";

/// `debug_ops_spec`: without an entry that has no gate, `Copy` returns its input.
const UNGATED: &str = "DebugIdentity;file:///dev/null;0";

/// What the graphs of a dtype do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Task {
    Make,
    Read,
    See,
    Copy,
    Shape,
    Fill,
    Delay,
}

impl Task {
    /// Returns the operations of a placeholder, each on the output of the one before, and how many of each. All but
    /// `Make` take the handle of a tensor, and those that end in an output return one.
    fn operations(self) -> &'static [(&'static CStr, usize)] {
        match self {
            Self::Make => &[(OUTPUT, 1)],
            Self::Read => &[(INPUT, 1)],
            Self::See => &[(INPUT, 1), (ORACLE, 1)],
            Self::Copy => &[(INPUT, 1), (c"Copy", 1), (OUTPUT, 1)],
            Self::Shape => &[(INPUT, 1), (c"Copy", 1), (c"Reshape", 1), (OUTPUT, 1)],
            Self::Fill => &[(INPUT, 1), (c"Copy", 1), (c"Reshape", 1), (c"Bitcast", 1), (OUTPUT, 1)],
            Self::Delay => &[(INPUT, 1), (c"Mul", CHAIN), (OUTPUT, 1)],
        }
    }
}

/// The placeholders of a graph, and its output.
type Ends = (Vec<Output>, Output);

/// The graphs of a session on one device.
pub(super) struct Graphs {
    pub(super) session: Session,
    /// TensorFlow's name of the device.
    place: CString,
    built: RefCell<HashMap<(Task, c_int), Ends>>,
}

impl Graphs {
    pub(super) fn new(session: Session, place: CString) -> Self {
        Self { session, place, built: RefCell::default() }
    }

    /// Returns the inputs and the output of a graph, which is built at its first use.
    pub(super) fn ends(&self, task: Task, code: c_int) -> Result<Ends> {
        if let Some(known) = self.built.borrow().get(&(task, code)) {
            return Ok(known.clone());
        }
        let add = |operation: &CStr, attributes: &[_], inputs: &[_]| {
            self.session.add(operation, attributes, inputs, &self.place)
        };
        let placeholder = |code| add(c"Placeholder", &[(c"dtype", Attribute::Type(code))], &[]);
        let mut given = placeholder(if task == Task::Make { code } else { INT32 })?;
        let (mut fed, mut factor) = (vec![given], given);
        for operation in task.operations().iter().flat_map(|(operation, times)| std::iter::repeat_n(*operation, *times))
        {
            given = match operation.to_str().unwrap_or_default() {
                "TruebridgeInput" => {
                    let code = if task == Task::Fill { UINT8 } else { code };
                    factor = add(operation, &[(c"T", Attribute::Type(code))], &[given])?;
                    factor
                }
                "Copy" => add(operation, &[(c"debug_ops_spec", Attribute::Strings(UNGATED))], &[given])?,
                "Reshape" => {
                    let lengths = placeholder(INT32)?;
                    fed.push(lengths);
                    add(operation, &[], &[given, lengths])?
                }
                "Bitcast" => add(operation, &[(c"type", Attribute::Type(code))], &[given])?,
                "Mul" => add(operation, &[], &[given, factor])?,
                _ => add(operation, &[], &[given])?,
            };
        }
        self.built.borrow_mut().insert((task, code), (fed.clone(), given));
        Ok((fed, given))
    }

    /// Runs a graph on these values, and returns its output.
    pub(super) fn given(&self, task: Task, code: c_int, values: Vec<Value>) -> Result<Vec<u8>> {
        let (fed, fetch) = self.ends(task, code)?;
        let feeds: Vec<_> = fed.into_iter().zip(values).collect();
        Ok(self.session.run(&feeds, fetch)?.bytes())
    }

    /// Runs a graph whose output is the handle of a tensor, and takes that tensor.
    pub(super) fn tensor(&self, task: Task, code: c_int, values: Vec<Value>) -> Result<Arc<External>> {
        taken(&self.given(task, code, values)?)
    }

    pub(super) fn value(&self, code: c_int, shape: &[i64], bytes: &[u8]) -> Value {
        self.session.library.tensor(code, shape, bytes)
    }

    pub(super) fn integers(&self, integers: &[i32]) -> Value {
        let bytes: Vec<u8> = integers.iter().copied().flat_map(i32::to_ne_bytes).collect();
        self.value(INT32, &[integers.len() as i64], &bytes)
    }

    pub(super) fn handle(&self, tensor: &External) -> Value {
        self.integers(&tensor.handle())
    }
}

/// Returns the tensor of a fetched handle.
pub(super) fn taken(handle: &[u8]) -> Result<Arc<External>> {
    let (numbers, _) = handle.as_chunks();
    let [low, high] = numbers else { return Err(Error::new(ErrorKind::Framework, "no handle was fetched")) };
    External::take([*low, *high].map(i32::from_ne_bytes)).map(Arc::new)
}
