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
    forward! { sound:
        fn name() -> &str;
        fn device() -> Device;
        fn capabilities() -> Capabilities;
        fn ordering() -> Arc<dyn Ordering>;
        fn create(spec: &Spec, bytes: &[u8]) -> Result<A::Tensor>;
        fn create_unwritten(spec: &Spec) -> Option<Result<A::Tensor>>;
        fn observe(tensor: &A::Tensor) -> Result<Observed>;
        fn write(tensor: &A::Tensor, bytes: &[u8]) -> Result<()>;
        fn fill(tensor: &mut A::Tensor, byte: u8) -> Result<()>;
        fn allocate(nbytes: usize) -> Result<A::Tensor>;
        fn snapshot(from: &A::Tensor, into: &mut A::Tensor) -> Result<()>;
        fn share(tensor: &A::Tensor) -> A::Tensor;
        fn drop_on_thread(tensor: A::Tensor);
        fn streams() -> Vec<Stream>;
        fn on_fresh_stream(external: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()>;
        fn note(view: &A::Tensor) -> Result<()>;
        fn delay() -> Result<()>;
        fn version(tensor: &A::Tensor) -> Result<Option<u64>>;
        fn usual(number: usize, seed: u64) -> Option<Result<Usual<'_, A::Tensor>>>;
        fn raising(number: usize, body: &mut dyn FnMut()) -> Option<Result<Raised>>;
        fn drop_amid_exception(tensor: A::Tensor) -> Result<()>;
        fn together(body: &mut dyn FnMut());
        fn threads() -> Option<Threads>;
        fn settle() -> Result<Option<usize>>;
        fn usage() -> Result<Usage>;
        fn patience() -> Duration;
        fn leases() -> u64;
        fn import_natively(other: &A::Tensor) -> Option<Result<A::Tensor>>;
        fn check() -> Result<()>;
    }

    fn read(&self, tensor: &A::Tensor) -> Result<Vec<u8>> {
        let bytes = self.sound.read(tensor)?;
        match self.fault {
            Some(Fault::ReadUnstrided) => Ok(in_order_of_memory(&bytes, &self.sound.observe(tensor)?)),
            _ => Ok(bytes),
        }
    }

    forward! { sound:
        unsafe fn on_stream(stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()>;
        unsafe fn join(earlier: Stream, later: Stream) -> Result<()>;
    }

    fn part(&self, tensor: &A::Tensor, start: usize) -> Option<Result<A::Tensor>> {
        let part = self.sound.part(tensor, start);
        match self.fault {
            Some(Fault::PartOrphaned) => part.map(|part| part.map(|part| self.sound.orphan(&part))),
            _ => part,
        }
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
}

/// Returns the elements of a tensor by their addresses.
fn in_order_of_memory(bytes: &[u8], seen: &Observed) -> Vec<u8> {
    let elements: Vec<_> = bytes.chunks(model::itemsize(seen.dtype)).collect();
    let mut placed: Vec<_> = model::places(&seen.shape, &seen.strides).into_iter().zip(elements).collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().flat_map(|(_, element)| element.iter().copied()).collect()
}
