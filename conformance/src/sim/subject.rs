//! The subject of a simulated framework.

use super::device::SimDevice;
use super::framework::{Current, OwnStream, SimFramework};
use super::memory::{Access, Memory};
use super::tensor::{Owner, SimTensor, View};
use crate::habits::Habits;
use crate::{Capabilities, Observed, Replay, Spec, Subject, Threads, model};
use bridge_core::{
    Access as Rights, Adapter, DType, Device, Error, ErrorKind, Layout, Ordering, Pending, Result, Stream,
};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

impl SimFramework {
    /// Submits work to the current stream. Work holds no tensors, or they would outlive their last reference.
    fn submit(&self, accesses: &[Access], work: impl Fn(&mut Memory) + Send + Sync + 'static) -> Result<()> {
        self.device().submit(self.consumer.current(), accesses, Arc::new(work))
    }

    /// Copies elements in the current stream.
    pub(super) fn copy(&self, source: &View, target: &View) -> Result<()> {
        let (source, target) = (source.clone(), target.clone());
        self.submit(&[source.reads()?, target.writes()?], move |memory| {
            let bytes = source.gather(memory);
            target.scatter(memory, &bytes);
        })
    }

    fn put(&self, view: &View, bytes: Vec<u8>) -> Result<()> {
        let view = view.clone();
        self.submit(&[view.writes()?], move |memory| view.scatter(memory, &bytes))
    }

    /// Returns the block of the tensor that `spec` describes, and the tensor, both not initialised.
    fn unwritten(&self, spec: &Spec) -> (SimTensor, SimTensor) {
        // Blocks begin at multiples of more than `Spec::GRAIN`.
        let itemsize = model::itemsize(spec.dtype);
        let whole = self.fresh(DType::UINT8, &[(spec.align + spec.base * itemsize) as i64]);
        let view = View {
            dtype: spec.dtype,
            shape: spec.shape.clone(),
            strides: spec.strides.clone(),
            address: whole.view.address + spec.align + spec.offset * itemsize,
            pending: spec.pending,
        };
        let access = if spec.read_only { Rights::ReadOnly } else { whole.access };
        let tensor = SimTensor { view, access, ..whole.clone() };
        (whole, tensor)
    }

    /// Returns whether tensors can be written to.
    pub(super) fn writes(&self) -> bool {
        self.habits != Habits::Immutable
    }

    pub(super) fn writable(&self, tensor: &SimTensor) -> Result<()> {
        match tensor.access.forbids_writes() {
            true => Err(Error::new(ErrorKind::Framework, "the tensor is read-only")),
            false => Ok(()),
        }
    }
}

impl Subject for SimFramework {
    fn name(&self) -> &str {
        &self.name
    }

    fn device(&self) -> Device {
        SimDevice::DEVICE
    }

    fn capabilities(&self) -> Capabilities {
        let generous = self.habits == Habits::Generous;
        Capabilities {
            dtypes: self.profile().dtypes.clone(),
            negative_strides: generous,
            read_only: generous,
            unaligned: generous,
            defers: if generous {
                vec![Pending::Conjugation, Pending::Negation, Pending::NegatedConjugation]
            } else {
                Vec::new()
            },
            writes: self.writes(),
            immutable: !self.writes(),
            gigabytes: self.writes(),
            parts: self.writes(),
            threads: true,
            devices: self.writes(),
            graphs: self.writes(),
            imports: Some(1),
            ..Capabilities::default()
        }
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        self.device().ordering()
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<SimTensor> {
        let (whole, tensor) = self.unwritten(spec);
        let address = whole.view.address + spec.align;
        let base = View { address, shape: vec![bytes.len() as i64], ..whole.view };
        self.put(&base, bytes.to_vec())?;
        self.device().synchronize(self.consumer.current())?;
        Ok(tensor)
    }

    fn create_unwritten(&self, spec: &Spec) -> Option<Result<SimTensor>> {
        Some(Ok(self.unwritten(spec).1))
    }

    fn observe(&self, tensor: &SimTensor) -> Result<Observed> {
        let View { dtype, shape, strides, address, .. } = tensor.view.clone();
        // Where tensors cannot be written to, none shows whether its memory is read-only.
        let read_only = tensor.access.forbids_writes() && self.writes();
        Ok(Observed { dtype, shape, strides, address, read_only, device: tensor.device })
    }

    fn read(&self, tensor: &SimTensor) -> Result<Vec<u8>> {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (view, into) = (tensor.view.clone(), Arc::clone(&bytes));
        self.submit(&[view.reads()?], move |memory| {
            *into.lock().unwrap_or_else(PoisonError::into_inner) = view.gather(memory);
        })?;
        self.device().synchronize(self.consumer.current())?;
        Ok(std::mem::take(&mut *bytes.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn write(&self, tensor: &SimTensor, bytes: &[u8]) -> Result<()> {
        self.writable(tensor)?;
        self.put(&tensor.view, bytes.to_vec())
    }

    fn fill(&self, tensor: &mut SimTensor, byte: u8) -> Result<()> {
        if self.writes() {
            self.writable(tensor)?;
        } else {
            *tensor = self.fresh(tensor.view.dtype, &tensor.view.shape);
        }
        let nbytes = model::numel(&tensor.view.shape) * model::itemsize(tensor.view.dtype);
        self.put(&tensor.view, vec![byte; nbytes])
    }

    fn allocate(&self, nbytes: usize) -> Result<SimTensor> {
        let tensor = self.fresh(DType::UINT8, &[nbytes as i64]);
        if !self.writes() {
            self.put(&tensor.view, vec![0xcd; nbytes])?;
        }
        Ok(tensor)
    }

    fn snapshot(&self, from: &SimTensor, into: &mut SimTensor) -> Result<()> {
        if !self.writes() {
            *into = self.fresh(into.view.dtype, &into.view.shape);
        }
        self.copy(&from.view, &into.view)
    }

    fn share(&self, tensor: &SimTensor) -> SimTensor {
        tensor.clone()
    }

    fn drop_on_thread(&self, tensor: SimTensor) {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(tensor));
        });
    }

    fn part(&self, tensor: &SimTensor, start: usize) -> Option<Result<SimTensor>> {
        self.writes().then(|| Ok(self.rows_from(tensor, start)))
    }

    fn threads(&self) -> Option<Threads> {
        // SAFETY: what it changes is behind locks, and its memory is simulated.
        Some(unsafe { Threads::free() })
    }

    /// There is one device: only a planted fault sees the difference.
    fn elsewhere(&self, body: &mut dyn FnMut() -> Result<()>) -> Option<Result<()>> {
        self.writes().then(body)
    }

    fn captured<'a>(&'a self, body: &mut dyn FnMut() -> Result<()>) -> Option<Result<Replay<'a>>> {
        let captured = || {
            let device = self.device();
            device.begin_capture(self.consumer.current())?;
            let result = body();
            let graph = device.end_capture();
            result?;
            Ok(Box::new(move || device.replay(self.consumer.current(), &graph)) as Replay<'a>)
        };
        self.writes().then(captured)
    }

    fn streams(&self) -> Vec<Stream> {
        self.streams.clone()
    }

    unsafe fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let before = self.consumer.switch(stream.into());
        let result = body();
        self.consumer.switch(before);
        result
    }

    unsafe fn join(&self, earlier: Stream, later: Stream) -> Result<()> {
        self.device().wait(earlier, later)
    }

    fn on_fresh_stream(&self, external: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        if self.streams.is_empty() {
            return body();
        }
        let stream = self.device().stream();
        let owner = Arc::new(OwnStream { device: self.device().clone(), stream });
        let before = self.consumer.switch(Current { stream, owner: (!external).then(|| Arc::clone(&owner)) });
        let result = body();
        self.consumer.switch(before);
        result
    }

    fn delay(&self) -> Result<()> {
        self.device().delay(self.consumer.current())
    }

    fn settle(&self) -> Result<Option<usize>> {
        self.device().drain();
        Ok(Some(self.pool.in_use()))
    }

    fn patience(&self) -> Duration {
        Duration::ZERO
    }

    fn check(&self) -> Result<()> {
        self.device().check()
    }

    /// As frameworks do it without this project: neither side waits, and the owner reuses the memory at once.
    fn import_natively(&self, other: &SimTensor) -> Option<Result<SimTensor>> {
        let View { dtype, shape, strides, address, .. } = &other.view;
        let layout = Layout::new(*dtype, shape, Some(strides), 0);
        Some(layout.and_then(|layout| match self.fatal(*dtype, &layout, *address) {
            Some(fatal) => Err(Error::new(ErrorKind::Framework, format!("{} aborts because of {fatal}", self.name))),
            None => Ok(SimTensor { owner: Owner::Native(Arc::new(other.owner.clone())), ..other.clone() }),
        }))
    }
}
