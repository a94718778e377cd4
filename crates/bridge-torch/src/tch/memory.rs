//! Which memory libtorch's caching allocator owns, which stream uses it, and what keeps it.

use super::libtorch::{Libtorch, handle};
use crate::library::{MemoryOffsets, SEARCHED, WORD, library_of, word};
use crate::memory::{Kept, Memory};
use crate::record::RecordStream;
use ::tch::{Kind, Tensor};
use bridge_core::{Device, Stream};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub(crate) struct Allocator {
    /// `None` where the allocator's memory is not recognised.
    offsets: Option<Offsets>,
    /// `None` where no stream can be recorded.
    record: Option<RecordStream>,
    /// Deleters that are not the allocator's, and that are; 0 for none yet.
    deleters: [AtomicUsize; 2],
}

/// Distances in bytes, found by looking.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Offsets {
    /// From a `TensorImpl` to the pointer to its `StorageImpl`.
    storage: usize,
    memory: MemoryOffsets,
}

/// The library that has the deleters of `native` and `cudaMallocAsync`, the allocators whose `recordStream` delays the
/// reuse of a block. Those of pluggable allocators, of other processes and of imported memory are in other libraries.
const CACHING: &str = "libc10_cuda.so";

impl Allocator {
    pub(crate) fn find(libtorch: &Libtorch) -> Self {
        Self { offsets: Offsets::find(libtorch), record: RecordStream::find(), deleters: Default::default() }
    }

    pub(crate) fn knows_its_memory(&self) -> bool {
        self.offsets.is_some()
    }

    /// Records that `stream`, which is libtorch's current one of the device, uses the tensor's memory, whatever stream
    /// it was allocated on: the allocator then reuses the block only after that stream. Returns `false`, and does
    /// nothing, for memory of another owner, or where the owner is unknown.
    pub(crate) fn record_stream(&self, tensor: &Tensor, device: Device, stream: Stream) -> bool {
        let (Some(offsets), Some(record)) = (self.offsets, &self.record) else { return false };
        if !self.owns(offsets.deleter_of(tensor)) {
            return false;
        }
        let Some(by_value) = record.lasting(device, stream) else { return false };
        // SAFETY: the tensor is alive, and the layout of a stream was compared. The function throws only for memory of
        // other allocators.
        unsafe { (record.record)(handle(tensor), by_value) };
        true
    }

    /// Keeps the memory of a tensor on the host; `None` where a hold on its storage has to do.
    pub(crate) fn keep(&self, tensor: &Tensor) -> Option<Kept> {
        let offsets = self.offsets?;
        // SAFETY: the tensor keeps its storage, whose memory is on the host. A reference to a tensor is on one thread.
        unsafe { Some(Memory::of(offsets.storage_of(tensor)?, offsets.memory, || true)?.keep()) }
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
        let held = libtorch.keep_alive(&one).ok()?;
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
        let memory = |tensor: &Tensor, at| {
            // SAFETY: as above; the word is the address of the storage, which is alive with its tensor.
            unsafe { MemoryOffsets::find(word(at, storage), tensor.data_ptr().expose_provenance()) }
        };
        let memory = memory(&one, one_at).filter(|first| memory(&other, other_at) == Some(*first))?;
        let offsets = Self { storage, memory };
        let bytes = [0u8; 4];
        // SAFETY: the tensor is dropped before the bytes, and never written to.
        let imported =
            unsafe { Tensor::f_from_blob(bytes.as_ptr(), &[4], &[1], Kind::Uint8, ::tch::Device::Cpu) }.ok()?;
        let [own, same, other] = [&one, &other, &imported].map(|tensor| offsets.deleter_of(tensor));
        (own == same && own != other && offsets.keep_memory(sample()?)?).then_some(offsets)
    }

    /// Returns whether memory stays that libtorch lets go of, tried out with a tensor whose memory it replaces.
    fn keep_memory(&self, mut tensor: Tensor) -> Option<bool> {
        // SAFETY: the tensor keeps its storage, whose memory is on the host, and is on this thread.
        let kept = unsafe { Memory::of(self.storage_of(&tensor)?, self.memory, || true)?.keep() };
        let before = kept.is_let_go();
        let _same = tensor.f_resize_([1 << 10]).ok()?;
        Some(!before && kept.is_let_go())
    }

    /// Returns the address of the deleter of the tensor's memory, 0 for none.
    pub(super) fn deleter_of(&self, tensor: &Tensor) -> usize {
        // SAFETY: the tensor keeps its storage, and the offset is inside.
        self.storage_of(tensor).map_or(0, |storage| unsafe { word(storage, self.memory.deleter) })
    }

    /// Returns the address of the tensor's storage, if it has one.
    fn storage_of(&self, tensor: &Tensor) -> Option<usize> {
        // SAFETY: the tensor keeps its implementation, and the offset is inside.
        let storage = unsafe { word((*handle(tensor)).expose_provenance(), self.storage) };
        (storage != 0).then_some(storage)
    }
}
