//! A simulated framework and its adapter.

use super::device::SimDevice;
use super::pool::Pool;
use super::tensor::{Owner, SimBuffer, SimTensor, View};
use crate::fault::Breakable;
use crate::habits::Habits;
use crate::model;
use bridge_core::{
    Adapter, Consumer, DType, Device, Error, ErrorKind, Export, Keep, Layout, Offer, Order, Profile, Result, Reuse,
    Stream, Strides, Views,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// The part that leases keep alive.
pub(super) struct SimConsumer {
    views: Views,
    /// The current stream of a thread that has chosen none.
    default: Stream,
    chosen: Mutex<HashMap<ThreadId, Current>>,
}

/// The current stream.
#[derive(Clone)]
pub(super) struct Current {
    pub(super) stream: Stream,
    /// Keeps the stream alive, where the framework made it for one case.
    pub(super) owner: Option<Arc<OwnStream>>,
}

impl From<Stream> for Current {
    fn from(stream: Stream) -> Self {
        Self { stream, owner: None }
    }
}

/// A stream that is destroyed when it is dropped.
pub(super) struct OwnStream {
    pub(super) device: SimDevice,
    pub(super) stream: Stream,
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        self.device.destroy(self.stream);
    }
}

impl SimConsumer {
    fn new(default: Stream) -> Arc<Self> {
        Arc::new(Self { views: Views::default(), default, chosen: Mutex::default() })
    }

    /// Returns the current stream of this thread.
    pub(super) fn current(&self) -> Stream {
        self.now().stream
    }

    fn now(&self) -> Current {
        self.lock().get(&thread::current().id()).cloned().unwrap_or_else(|| self.default.into())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ThreadId, Current>> {
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes another stream the current one of this thread. Returns the one before.
    pub(super) fn switch(&self, current: Current) -> Current {
        let before = self.lock().insert(thread::current().id(), current);
        before.unwrap_or_else(|| self.default.into())
    }
}

// SAFETY: the simulated streams run nothing on memory that is freed.
unsafe impl Consumer for SimConsumer {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(Some(self.current()))
    }

    fn keep(&self, _: Device, stream: Stream) -> Option<Keep> {
        let Current { stream: current, owner } = self.now();
        owner.filter(|_| current == stream).map(|owner| owner as Keep)
    }

    fn exports_in_current_stream(&self) -> bool {
        true
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

/// A framework on a simulated device.
pub struct SimFramework {
    pub(super) habits: Habits,
    pub(super) pool: Arc<Pool>,
    pub(super) consumer: Arc<SimConsumer>,
    pub(super) streams: Vec<Stream>,
    pub(super) name: String,
    profile: Profile,
}

bridge_core::debug_fields!(impl[] SimFramework: name);

impl SimFramework {
    /// A framework with these habits. Next to the default stream, which all frameworks share, it has two streams that
    /// do not wait for that one, one that does, and that of the thread; or a single stream for all its work.
    pub fn new(device: &SimDevice, habits: Habits) -> Self {
        let (current, streams) = match habits {
            Habits::Immutable => (device.stream(), Vec::new()),
            _ => {
                let kinds = [device.stream(), device.stream(), device.blocking_stream(), Stream::PER_THREAD];
                (Stream::LEGACY, kinds.into())
            }
        };
        let profile = habits.profile();
        Self {
            habits,
            name: profile.name.clone(),
            profile,
            pool: Pool::new(device.clone()),
            consumer: SimConsumer::new(current),
            streams,
        }
    }

    /// Sets a name that differs from the profile's.
    pub fn named(self, name: &str) -> Self {
        Self { name: name.into(), ..self }
    }

    pub(super) fn device(&self) -> &SimDevice {
        &self.pool.device
    }

    /// Allocates a compact tensor, not initialised.
    pub(super) fn fresh(&self, dtype: DType, shape: &[i64]) -> SimTensor {
        let nbytes = model::numel(shape) * model::itemsize(dtype);
        let block = Arc::new(self.pool.allocate(nbytes, self.consumer.current()));
        SimTensor {
            view: View {
                dtype,
                shape: shape.into(),
                strides: model::row_major(shape),
                address: block.address,
                pending: None,
            },
            device: SimDevice::DEVICE,
            access: self.habits.access(),
            owner: Owner::Own(block),
        }
    }

    /// Returns what would abort the process in a real framework. This one only reports it.
    pub(super) fn fatal(&self, dtype: DType, layout: &Layout, address: usize) -> Option<&'static str> {
        let profile = &self.profile;
        let negative = layout.has_negative_strides();
        let strides = match profile.strides {
            Strides::Any => true,
            Strides::NonNegative => !negative,
            Strides::Compact => layout.is_compact(),
            other => unreachable!("the simulation lacks {other:?}"),
        };
        let aligned = address.is_multiple_of(profile.alignment_of(dtype));
        if !profile.dtypes.contains(&dtype) {
            return Some("a dtype that it does not know");
        }
        match (layout.numel(), strides, aligned) {
            (0, ..) | (_, true, true) => None,
            (_, false, _) => Some("strides that it cannot follow"),
            (_, true, false) => Some("an address that is not aligned"),
        }
    }
}

impl Breakable for SimFramework {
    fn releaser(&self, tensor: &SimTensor) -> Box<dyn Fn() + Send + Sync> {
        let owner = tensor.owner.clone();
        Box::new(move || {
            if let Owner::Own(block) = &owner {
                block.give_back();
            }
        })
    }

    fn orphan(&self, tensor: &SimTensor) -> SimTensor {
        SimTensor { owner: Owner::Nothing(tensor.owner.bytes()), ..tensor.clone() }
    }
}

impl SimFramework {
    /// Returns the elements from `start` on along the first dimension, in the same memory.
    pub(super) fn rows_from(&self, tensor: &SimTensor, start: usize) -> SimTensor {
        let mut part = tensor.clone();
        let View { dtype, shape, strides, address, .. } = &mut part.view;
        let bytes = start as i64 * strides[0] * model::itemsize(*dtype) as i64;
        *address = (*address as i64 + bytes) as usize;
        shape[0] -= start as i64;
        part
    }
}

// SAFETY: simulated tensors keep their leases.
unsafe impl Adapter for SimFramework {
    type Tensor = SimTensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        Arc::clone(&self.consumer) as _
    }

    fn export(&self, tensor: &SimTensor) -> Result<Export> {
        let View { dtype, shape, strides, address, pending } = &tensor.view;
        let bytes = tensor.owner.bytes();
        let layout = Layout::new(*dtype, shape, Some(strides), address - bytes.start)?;
        let reuse = match (self.habits, &tensor.owner) {
            (Habits::Generous | Habits::Immutable, Owner::Own(_) | Owner::Imported(_)) => Reuse::InStreamOrder,
            // The owner of memory that was imported without the bridge is notified of no stream.
            (_, Owner::Native(_) | Owner::Nothing(_)) | (Habits::Common | Habits::Strict, _) => Reuse::Unknown,
        };
        let stream = self.consumer.current();
        let keep = self.consumer.keep(tensor.device, stream);
        let buffer = SimBuffer { tensor: tensor.clone(), bytes, stream, keep, reuse };
        Ok(Export::new(*dtype, layout, buffer)?.with_pending(*pending))
    }

    fn import(&self, offer: Offer) -> Result<SimTensor> {
        let lease = offer.accept(&self.profile, &self.consumer)?;
        if let Some(fatal) = self.fatal(lease.dtype(), lease.layout(), lease.data()) {
            return Err(Error::new(ErrorKind::Framework, format!("{} aborts because of {fatal}", self.profile.name)));
        }
        Ok(SimTensor {
            view: View {
                dtype: lease.dtype(),
                shape: lease.layout().shape().into(),
                strides: lease.layout().strides().into(),
                address: lease.data(),
                pending: None,
            },
            device: lease.device(),
            access: match lease.access() {
                access if access.forbids_writes() && self.profile.keeps_read_only => access,
                _ => self.habits.access(),
            },
            owner: Owner::Imported(Arc::new(lease)),
        })
    }

    fn compact(&self, tensor: &SimTensor) -> Result<SimTensor> {
        let copy = self.fresh(tensor.view.dtype, &tensor.view.shape);
        self.copy(&tensor.view, &copy.view)?;
        Ok(copy)
    }

    fn overwritten(&self, tensor: &SimTensor) -> Result<()> {
        self.writable(tensor)
    }

    unsafe fn empty(&self, _: Device, dtype: DType, shape: &[i64], order: Order) -> Result<SimTensor> {
        if !self.writes() {
            return Err(Error::new(ErrorKind::CopyNeeded, "the tensors of this framework are not written to"));
        }
        let fresh = self.fresh(dtype, shape);
        let strides = order.strides(shape).to_vec();
        Ok(SimTensor { view: View { strides, ..fresh.view }, ..fresh })
    }
}
