//! The subject of a faulty adapter is the sound one, but for views that the framework makes of its tensors, and for a
//! fault of the subject's own.

use super::{Breakable, Fault, Faulty};
use crate::{Capabilities, Observed, Raised, Replay, Spec, Subject, Threads, Usage, Usual, model};
use bridge_core::{Device, Ordering, Result, Stream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

#[deny(clippy::missing_trait_methods)]
impl<A: Breakable> Subject for Faulty<A> {
    fn name(&self) -> &str {
        self.sound.name()
    }

    fn device(&self) -> Device {
        self.sound.device()
    }

    fn capabilities(&self) -> Capabilities {
        self.sound.capabilities()
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        self.sound.ordering()
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<A::Tensor> {
        self.sound.create(spec, bytes)
    }

    fn create_unwritten(&self, spec: &Spec) -> Option<Result<A::Tensor>> {
        self.sound.create_unwritten(spec)
    }

    fn observe(&self, tensor: &A::Tensor) -> Result<Observed> {
        self.sound.observe(tensor)
    }

    fn read(&self, tensor: &A::Tensor) -> Result<Vec<u8>> {
        let bytes = self.sound.read(tensor)?;
        match self.fault {
            Some(Fault::ReadUnstrided) => Ok(in_order_of_memory(&bytes, &self.sound.observe(tensor)?)),
            _ => Ok(bytes),
        }
    }

    fn write(&self, tensor: &A::Tensor, bytes: &[u8]) -> Result<()> {
        self.sound.write(tensor, bytes)
    }

    fn fill(&self, tensor: &mut A::Tensor, byte: u8) -> Result<()> {
        self.sound.fill(tensor, byte)
    }

    fn allocate(&self, nbytes: usize) -> Result<A::Tensor> {
        self.sound.allocate(nbytes)
    }

    fn snapshot(&self, from: &A::Tensor, into: &mut A::Tensor) -> Result<()> {
        self.sound.snapshot(from, into)
    }

    fn share(&self, tensor: &A::Tensor) -> A::Tensor {
        self.sound.share(tensor)
    }

    fn drop_on_thread(&self, tensor: A::Tensor) {
        self.sound.drop_on_thread(tensor);
    }

    fn streams(&self) -> Vec<Stream> {
        self.sound.streams()
    }

    unsafe fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.sound.on_stream(stream, body) }
    }

    unsafe fn join(&self, earlier: Stream, later: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.sound.join(earlier, later) }
    }

    fn on_fresh_stream(&self, external: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.sound.on_fresh_stream(external, body)
    }

    fn note(&self, view: &A::Tensor) -> Result<()> {
        self.sound.note(view)
    }

    fn delay(&self) -> Result<()> {
        self.sound.delay()
    }

    fn part(&self, tensor: &A::Tensor, start: usize) -> Option<Result<A::Tensor>> {
        let part = self.sound.part(tensor, start);
        match self.fault {
            Some(Fault::PartOrphaned) => part.map(|part| part.map(|part| self.sound.orphan(&part))),
            _ => part,
        }
    }

    fn version(&self, tensor: &A::Tensor) -> Result<Option<u64>> {
        self.sound.version(tensor)
    }

    fn usual(&self, number: usize, seed: u64) -> Option<Result<Usual<'_, A::Tensor>>> {
        self.sound.usual(number, seed)
    }

    fn raising(&self, number: usize, body: &mut dyn FnMut()) -> Option<Result<Raised>> {
        self.sound.raising(number, body)
    }

    fn drop_amid_exception(&self, tensor: A::Tensor) -> Result<()> {
        self.sound.drop_amid_exception(tensor)
    }

    fn together(&self, body: &mut dyn FnMut()) {
        self.sound.together(body);
    }

    fn threads(&self) -> Option<Threads> {
        self.sound.threads()
    }

    fn elsewhere(&self, body: &mut dyn FnMut() -> Result<()>) -> Option<Result<()>> {
        self.is_elsewhere.store(true, Relaxed);
        let result = self.sound.elsewhere(body);
        self.is_elsewhere.store(false, Relaxed);
        result
    }

    fn captured<'a>(&'a self, body: &mut dyn FnMut() -> Result<()>) -> Option<Result<Replay<'a>>> {
        self.sound.captured(body)
    }

    fn settle(&self) -> Result<Option<usize>> {
        self.sound.settle()
    }

    fn usage(&self) -> Result<Usage> {
        self.sound.usage()
    }

    fn patience(&self) -> Duration {
        self.sound.patience()
    }

    fn leases(&self) -> u64 {
        self.sound.leases()
    }

    fn import_natively(&self, other: &A::Tensor) -> Option<Result<A::Tensor>> {
        self.sound.import_natively(other)
    }

    fn check(&self) -> Result<()> {
        self.sound.check()
    }
}

/// Returns the elements of a tensor by their addresses.
fn in_order_of_memory(bytes: &[u8], seen: &Observed) -> Vec<u8> {
    let elements: Vec<_> = bytes.chunks(model::itemsize(seen.dtype)).collect();
    let mut placed: Vec<_> = model::places(&seen.shape, &seen.strides).into_iter().zip(elements).collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().flat_map(|(_, element)| element.iter().copied()).collect()
}
