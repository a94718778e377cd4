//! Which memory libtorch's caching allocator owns, and which stream uses it.

use super::libtorch::{Libtorch, handle};
use crate::library::{SEARCHED, WORD, library_of, memory_offsets, word};
use crate::record::{RecordStream, StreamByValue};
use ::tch::{Kind, Tensor};
use bridge_core::{Device, Stream};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub(crate) struct Allocator {
    /// `None` where the allocator's memory is not recognised, or no stream can be recorded.
    known: Option<Known>,
    /// Deleters that are not the allocator's, and that are; 0 for none yet.
    deleters: [AtomicUsize; 2],
}

struct Known {
    record: RecordStream,
    offsets: Offsets,
}

/// Distances in bytes, found by looking.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Offsets {
    /// From a `TensorImpl` to the pointer to its `StorageImpl`.
    storage: usize,
    /// From a `StorageImpl` to the deleter of its memory.
    deleter: usize,
}

/// The library that has the deleters of `native` and `cudaMallocAsync`, the allocators whose `recordStream` delays the
/// reuse of a block. Those of pluggable allocators, of other processes and of foreign memory are in other libraries.
const CACHING: &str = "libc10_cuda.so";

impl Allocator {
    pub(crate) fn find(libtorch: &Libtorch) -> Self {
        let known = RecordStream::find().zip(Offsets::find(libtorch));
        Self { known: known.map(|(record, offsets)| Known { record, offsets }), deleters: Default::default() }
    }

    pub(crate) fn knows_its_memory(&self) -> bool {
        self.known.is_some()
    }

    /// Records that `stream`, which is libtorch's current one of the device, uses the tensor's memory, whatever stream
    /// it was allocated on: the allocator then reuses the block only after that stream. Returns `false`, and does
    /// nothing, for memory of another owner, or where the owner is unknown.
    pub(crate) fn record_stream(&self, tensor: &Tensor, device: Device, stream: Stream) -> bool {
        let Some((known, by_value)) = self.known.as_ref().zip(StreamByValue::of(device, stream)) else { return false };
        let settled = self.owns(known.offsets.deleter_of(tensor)) && known.record.takes(by_value);
        if settled {
            // SAFETY: the tensor is alive, and the layout of a stream was compared. The function throws only for memory
            // of other allocators.
            unsafe { (known.record.record)(handle(tensor), by_value) };
        }
        settled
    }

    fn owns(&self, deleter: usize) -> bool {
        let is_known = |known: &AtomicUsize| deleter != 0 && known.load(Relaxed) == deleter;
        if let Some(answer) = self.deleters.iter().position(is_known) {
            return answer == 1;
        }
        let own = library_of(deleter).is_some_and(|library| library.ends_with(CACHING));
        self.deleters[usize::from(own)].store(deleter, Relaxed);
        own
    }
}

impl Offsets {
    /// Finds the offsets in a few tensors; `None` where they do not agree.
    pub(super) fn find(libtorch: &Libtorch) -> Option<Self> {
        let sample = || Tensor::f_empty([2], (Kind::Float, ::tch::Device::Cpu)).ok();
        let (one, other) = (sample()?, sample()?);
        let held = libtorch.hold(&one).ok()?;
        // SAFETY: a handle points to the tensor's implementation, which the tensor keeps.
        let [one_at, held_at, other_at] =
            [handle(&one), held.tensor.as_ptr(), handle(&other)].map(|tensor| unsafe { *tensor }.expose_provenance());
        // Of the words that the two tensors over one storage share, only the pointer to it differs in the third.
        // SAFETY: the three implementations are alive, and longer than what is searched.
        let shared = |offset: &usize| unsafe {
            word(one_at, *offset) == word(held_at, *offset) && word(one_at, *offset) != word(other_at, *offset)
        };
        let mut found = (WORD..SEARCHED).step_by(WORD).filter(shared);
        let storage = found.next().filter(|_| found.next().is_none())?;
        let deleter = |tensor: &Tensor, at| {
            // SAFETY: as above; the word is the address of the storage, which is alive with its tensor.
            unsafe { memory_offsets(word(at, storage), tensor.data_ptr().expose_provenance()) }
        };
        let (_, deleter) = deleter(&one, one_at).filter(|first| deleter(&other, other_at) == Some(*first))?;
        let offsets = Self { storage, deleter };
        let bytes = [0u8; 4];
        // SAFETY: the tensor is dropped before the bytes, and never written to.
        let foreign =
            unsafe { Tensor::f_from_blob(bytes.as_ptr(), &[4], &[1], Kind::Uint8, ::tch::Device::Cpu) }.ok()?;
        let [own, same, other] = [&one, &other, &foreign].map(|tensor| offsets.deleter_of(tensor));
        (own == same && own != other).then_some(offsets)
    }

    /// Returns the address of the deleter of the tensor's memory, 0 for none.
    pub(super) fn deleter_of(&self, tensor: &Tensor) -> usize {
        // SAFETY: the tensor keeps its implementation and that its storage; the offsets are inside both.
        unsafe {
            let storage = word((*handle(tensor)).expose_provenance(), self.storage);
            if storage == 0 { 0 } else { word(storage, self.deleter) }
        }
    }
}
