//! The adapter for the edges of graphs.

use crate::graph::argument;
use crate::graph::external::{External, Held, Value};
use crate::graph::operations::{INPUT, OUTPUT};
use crate::graph::session::Session;
use crate::runtime::Runtime;
use crate::runtime::kernel::register;
use crate::runtime::library::Series;
use crate::runtime::stream;
use bridge_core::{Adapter, Consumer, DType, Device, DeviceKind, Dims, Error, ErrorKind, Lease, Lent, Profile, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// The adapter for the edges of a runtime's graphs: it imports tensors to be fed, and exports those that a run has
/// fetched.
#[derive(Clone, Copy, Debug)]
pub struct GraphEdges(&'static Runtime);

impl GraphEdges {
    /// Registers the operations, the first time: those of the edges, and the one that reports the stream of a GPU.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] if another copy of this crate in the process has registered them, and what TensorFlow
    /// reports.
    pub fn new(runtime: &'static Runtime) -> Result<Self> {
        register(runtime, &[&INPUT, &OUTPUT])?;
        stream::register(runtime)?;
        Ok(Self(runtime))
    }

    /// The runtime.
    pub fn runtime(&self) -> &'static Runtime {
        self.0
    }

    /// Refuses a tensor of the other TensorFlow, which computes in another stream.
    fn check(&self, tensor: &External) -> Result<()> {
        let version = tensor.value().runtime.version();
        std::ptr::eq(tensor.value().runtime, self.0)
            .then_some(())
            .ok_or_else(|| argument(format!("the tensor is one of TensorFlow {version}")))
    }
}

impl Adapter for GraphEdges {
    type Tensor = External;

    fn profile(&self) -> &Profile {
        &self.0.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.0.consumer.clone()
    }

    fn export(&self, tensor: &External) -> Result<Lent> {
        self.check(tensor)?;
        tensor.lend()
    }

    fn import(&self, lease: Lease) -> Result<External> {
        External::feed(self.0, lease)
    }

    fn compact(&self, tensor: &External) -> Result<External> {
        self.check(tensor)?;
        match tensor.device().kind {
            DeviceKind::CUDA => copy_on_device(self.0, tensor),
            _ => tensor.copy_on_host(),
        }
    }
}

/// Copies bytes, because few operations support every dtype.
fn copy_on_device(runtime: &'static Runtime, tensor: &External) -> Result<External> {
    type Copies = Vec<((Series, Device), Arc<Session>)>;
    static COPIES: Mutex<Copies> = Mutex::new(Vec::new());
    let value = tensor.value();
    let as_bytes = |value: &Arc<Value>, dtype: DType, shape: Dims| Value {
        dtype,
        shape,
        bytes: value.bytes.clone(),
        held: Held::Owner { _owner: Box::new(value.clone()) },
        instance: 0,
        ..**value
    };
    let bytes = External::new(as_bytes(value, DType::UINT8, [value.bytes.len() as i64].into_iter().collect()));
    let session = {
        let mut copies = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (runtime.series(), value.device);
        match copies.iter().find(|(known, _)| *known == key) {
            Some((_, session)) => session.clone(),
            None => {
                // The session of the tensor has set the GPU up.
                let session = Arc::new(Session::for_copies(runtime, value.device)?);
                copies.push((key, session.clone()));
                session
            }
        }
    };
    let copied = session.run(&[("x", &bytes)])?.pop().expect("one output was declared");
    if !value.bytes.is_empty() && copied.address() == value.bytes.start {
        return Err(Error::new(ErrorKind::Framework, "tensorflow did not copy: please report this"));
    }
    Ok(External::new(as_bytes(copied.value(), value.dtype, value.shape.clone())))
}
