//! The tensor of a simulated framework, and its buffer when it is exported.

use super::memory::{Access, Memory};
use super::pool::Block;
use crate::model;
use bridge_core::planted::is_planted;
use bridge_core::{Access as Rights, DType, Device, DeviceBuffer, Keep, Layout, Lease, Pending, Result, Reuse, Stream};
use std::ops::Range;
use std::sync::Arc;

/// What keeps the memory alive.
#[derive(Clone)]
pub(super) enum Owner {
    Own(Arc<Block>),
    Imported(Arc<Lease>),
    /// Of a tensor that was imported without the bridge.
    Native(Arc<Owner>),
    /// Nothing: a planted fault.
    Nothing(Range<usize>),
}

impl Owner {
    /// Returns the addresses of the memory.
    pub(super) fn bytes(&self) -> Range<usize> {
        match self {
            Self::Own(block) => block.bytes(),
            Self::Native(owner) => owner.bytes(),
            Self::Nothing(bytes) => bytes.clone(),
            Self::Imported(lease) => {
                let (address, len) = lease.buffer();
                address..address + len
            }
        }
    }
}

/// A strided view of memory of the simulated device. Clones are further references to the same tensor.
#[derive(Clone)]
pub struct SimTensor {
    pub(super) view: View,
    pub(super) device: Device,
    pub(super) access: Rights,
    pub(super) owner: Owner,
}

bridge_core::debug_fields!(impl[] SimTensor: access);

/// Which bytes a tensor means, without keeping them alive: what work in a stream knows of it.
#[derive(Clone)]
pub(super) struct View {
    pub(super) dtype: DType,
    pub(super) shape: Vec<i64>,
    pub(super) strides: Vec<i64>,
    pub(super) address: usize,
    pub(super) pending: Option<Pending>,
}

impl View {
    /// Returns the addresses between the lowest and the highest byte.
    pub(super) fn bytes(&self) -> Result<Range<usize>> {
        let (below, above) = Layout::new(self.dtype, &self.shape, Some(&self.strides), 0)?.byte_extent();
        Ok(self.address - below..self.address + above)
    }

    pub(super) fn reads(&self) -> Result<Access> {
        Ok(Access::read(self.bytes()?))
    }

    pub(super) fn writes(&self) -> Result<Access> {
        Ok(Access::write(self.bytes()?))
    }

    /// Returns the addresses of the runs of elements that lie one after another, in row-major order, and the bytes of a
    /// run.
    fn runs(&self) -> (impl Iterator<Item = usize>, usize) {
        let (address, size) = (self.address, model::itemsize(self.dtype));
        let (places, len) = model::runs(&self.shape, &self.strides);
        (places.into_iter().map(move |place| (address as i64 + place * size as i64) as usize), len * size)
    }

    /// Returns the elements, with deferred operations applied. Empty outside any block, which the checker reports.
    pub(super) fn gather(&self, memory: &mut Memory) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(model::numel(&self.shape) * model::itemsize(self.dtype));
        let (runs, len) = self.runs();
        for at in runs {
            bytes.extend_from_slice(memory.bytes(at..at + len).unwrap_or_default());
        }
        model::resolve(self.dtype, self.pending, &mut bytes);
        bytes
    }

    /// Overwrites the elements.
    pub(super) fn scatter(&self, memory: &mut Memory, elements: &[u8]) {
        let (runs, len) = self.runs();
        for (at, run) in runs.zip(elements.chunks(len.max(1))) {
            if let Some(bytes) = memory.bytes(at..at + run.len()) {
                bytes.copy_from_slice(run);
            }
        }
    }
}

/// An exported tensor.
pub(super) struct SimBuffer {
    pub(super) tensor: SimTensor,
    pub(super) bytes: Range<usize>,
    pub(super) stream: Stream,
    /// Keeps the stream alive.
    pub(super) keep: Option<Keep>,
    pub(super) reuse: Reuse,
}

// SAFETY: the memory is simulated, so its addresses are only numbers; `tensor` keeps its block from being reused until
// the drop. With `Reuse::InStreamOrder` the drop records the stream with the allocator.
unsafe impl DeviceBuffer for SimBuffer {
    fn address(&self) -> usize {
        self.bytes.start
    }
    fn len(&self) -> usize {
        self.bytes.len()
    }
    fn device(&self) -> Device {
        self.tensor.device
    }
    fn access(&self) -> Rights {
        self.tensor.access
    }
    fn stream(&self) -> Option<Stream> {
        Some(self.stream)
    }
    fn reuse(&self) -> Reuse {
        self.reuse
    }
}

impl Drop for SimBuffer {
    fn drop(&mut self) {
        if let (Reuse::InStreamOrder, Owner::Own(block)) = (self.reuse, &self.tensor.owner) {
            // The block may be returned on another thread, which has another per-thread stream.
            let kept = if is_planted("sim_records_per_thread") { self.stream } else { self.stream.on_any_thread() };
            block.record_stream(kept, self.keep.take());
        }
    }
}
