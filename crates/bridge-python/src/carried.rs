//! Tensors on their way to and from another host, for `_carrier.py`.

use crate::errors::into_python;
use crate::processes::{Ticket, read, seconds};
use bridge_core::{Device, DeviceKind, Error, ErrorKind, Result};
use bridge_ipc::{Block, process};
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// The names of devices that tensors travel from and to.
const KINDS: [(&str, DeviceKind); 2] = [("cpu", DeviceKind::CPU), ("cuda", DeviceKind::CUDA)];

/// A block: the kind of its device, the number of that, its address, and its length in bytes.
type Described = (&'static str, i32, usize, usize);

fn described(Block { device, address, nbytes }: &Block) -> Described {
    let kind = KINDS.iter().find(|(_, kind)| *kind == device.kind).map_or("cpu", |(name, _)| name);
    (kind, device.index, *address, *nbytes)
}

fn device(kind: &str, index: i32) -> Result<Device> {
    let known = KINDS.iter().find(|(name, _)| *name == kind).filter(|_| index >= 0);
    let known = known.ok_or_else(|| Error::new(ErrorKind::Protocol, format!("{kind} {index} is not a device")));
    known.map(|(_, kind)| Device { kind: *kind, index })
}

/// The tensors of a ticket, in blocks that another host can read.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Outgoing(bridge_ipc::Outgoing);

#[pymethods]
impl Outgoing {
    #[new]
    fn new(ticket: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = ticket.py();
        let pack = |ticket| py.detach(|| bridge_ipc::Outgoing::of(bridge_ipc::open(&ticket)?, bridge_copy::ordering()));
        read(ticket).and_then(pack).map(Self).map_err(|error| into_python(py, error))
    }

    #[getter]
    fn blocks(&self) -> Vec<Described> {
        self.0.blocks().iter().map(described).collect()
    }

    /// Waits until the blocks are filled.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.wait()).map_err(|error| into_python(py, error))
    }

    /// What `Incoming` reads at the other host.
    #[getter]
    fn tensors(&self) -> &str {
        self.0.tensors()
    }

    #[getter]
    fn tree(&self) -> Option<&str> {
        self.0.tree()
    }
}

/// Blocks of memory that are filled from another host.
#[pyclass(frozen, module = "truebridge")]
pub(crate) struct Incoming(Mutex<Option<bridge_ipc::Incoming>>);

#[pymethods]
impl Incoming {
    /// Makes blocks of these lengths, each on a device that is named by its kind and its number.
    #[new]
    fn new(py: Python<'_>, tensors: &str, blocks: Vec<(String, i32, usize)>) -> PyResult<Self> {
        let make = || {
            let blocks = blocks.iter().map(|(kind, index, nbytes)| Ok((device(kind, *index)?, *nbytes)));
            let blocks = blocks.collect::<Result<Vec<_>>>()?;
            py.detach(|| bridge_ipc::Incoming::new(tensors, &blocks))
        };
        make().map(|made| Self(Mutex::new(Some(made)))).map_err(|error| into_python(py, error))
    }

    #[getter]
    fn blocks(&self) -> Vec<Described> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().flat_map(|incoming| incoming.blocks()).map(|block| described(&block)).collect()
    }

    /// Shares the tensors, once. Nothing may write to the blocks any more.
    fn share(&self, py: Python<'_>, tree: Option<String>, expires: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        let share = || {
            let time = seconds(expires)?;
            let incoming = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
            let incoming = incoming.ok_or_else(|| Error::new(ErrorKind::Argument, "the tensors are shared already"))?;
            py.detach(|| incoming.share(&*process::exporter()?, time, tree))
        };
        share().map(Ticket).map_err(|error| into_python(py, error))
    }
}

/// Makes the context of a GPU current on this thread.
#[pyfunction]
pub(crate) fn ipc_enter(py: Python<'_>, index: i32) -> PyResult<()> {
    let enter = || bridge_cuda::sharing()?.make_current(Device::cuda(index));
    enter().map_err(|error| into_python(py, error))
}

/// Frees memory of GPUs that is kept for the next transfer.
#[pyfunction]
pub(crate) fn ipc_rest(py: Python<'_>) {
    py.detach(bridge_ipc::free_idle);
}

/// Enters the classes and the functions into the module.
pub(crate) fn enter(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Outgoing>()?;
    module.add_class::<Incoming>()?;
    module.add_function(wrap_pyfunction!(ipc_rest, module)?)?;
    module.add_function(wrap_pyfunction!(ipc_enter, module)?)
}
