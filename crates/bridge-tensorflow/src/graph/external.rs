//! Tensors at the edges of graphs, and the handles that stand for them.
//!
//! A graph is built once and run many times, so it holds a handle: two numbers in host memory. The kernels of
//! [`operations`](crate::graph::operations) look up the fed tensor of a handle, and record the tensors that they fetch,
//! which [`results`](crate::graph::results) takes.

use crate::runtime::Runtime;
use crate::runtime::library::Series;
use crate::runtime::release::Owner;
use crate::runtime::tensor::RuntimeTensor;
use bridge_core::{
    Access, Allocation, Consumer, DType, Device, Dims, Error, ErrorKind, Export, Layout, Lease, Memory, Result, Reuse,
    Stream,
};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// A tensor at the edge of a runtime's graphs: one of another framework, to be fed, or one that a run has fetched. Runs
/// can read it any number of times as long as this value lives; they keep the memory for as long as they need it.
pub struct External {
    id: u64,
    value: Arc<Value>,
    /// Whether it can be fed. It cannot once it is put back.
    is_fed: bool,
}

impl std::fmt::Debug for External {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "External({} {:?} on {})", self.dtype(), self.shape(), self.device())
    }
}

/// The memory of such a tensor, with its dtype, shape and device.
pub(crate) struct Value {
    pub(crate) runtime: &'static Runtime,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    pub(crate) shape: Dims,
    pub(crate) bytes: Range<usize>,
    /// TensorFlow's stream on the device, or the legacy stream if that is unknown; `None` on the host.
    pub(crate) stream: Option<Stream>,
    pub(crate) held: Held,
    pub(crate) origin: Origin,
    /// The number of the kernel instance that has fetched it, which [`reclaim`] receives; 0 for no instance.
    pub(crate) instance: u64,
}

/// The origin of a tensor at the edge of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Another framework, which feeds it.
    Fed,
    /// A run. As soon as it is taken, nothing else has its memory.
    Run,
    /// Eager execution, where the program has the tensor: what is taken shares its memory, as in every conversion.
    Eager,
}

/// The owner of the memory.
pub(crate) enum Held {
    /// TensorFlow.
    Tensor(RuntimeTensor),
    /// Another framework.
    Owner { _owner: Owner },
}

type Table = LazyLock<Mutex<HashMap<u64, Arc<Value>>>>;

/// The tensors that can be fed.
static FED: Table = LazyLock::new(Mutex::default);
/// The tensors that runs have fetched, until they are taken.
static UNCLAIMED: Table = LazyLock::new(Mutex::default);
/// Never reused, so that an old handle never means a new tensor.
static NEXT: AtomicU64 = AtomicU64::new(1);
static RECLAIMED: AtomicU64 = AtomicU64::new(0);

fn lock(table: &Table) -> MutexGuard<'_, HashMap<u64, Arc<Value>>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a number that no other call returns.
pub(crate) fn unique() -> u64 {
    NEXT.fetch_add(1, Relaxed)
}

fn id([low, high]: [i32; 2]) -> u64 {
    u64::from(low as u32) | u64::from(high as u32) << 32
}

fn handle(id: u64) -> [i32; 2] {
    [id as i32, (id >> 32) as i32]
}

/// Returns the tensor that is fed under this handle.
pub(crate) fn fed(handle: [i32; 2]) -> Option<Arc<Value>> {
    lock(&FED).get(&id(handle)).cloned()
}

/// Returns an unused handle.
pub(crate) fn new_handle() -> [i32; 2] {
    handle(unique())
}

/// Records a fetched tensor under a handle, and returns whether the handle had none.
pub(crate) fn record_fetched(handle: [i32; 2], value: Value) -> bool {
    let value = Arc::new(value);
    let mut unclaimed = lock(&UNCLAIMED);
    let recorded = unclaimed.entry(id(handle)).or_insert_with(|| value.clone());
    Arc::ptr_eq(recorded, &value)
}

/// Takes the tensor that was recorded under a handle.
///
/// # Errors
///
/// [`ErrorKind::Consumed`] if there is none.
pub(crate) fn recorded(handle: [i32; 2]) -> Result<Arc<Value>> {
    lock(&UNCLAIMED).remove(&id(handle)).ok_or_else(|| {
        let text = "no fetched tensor has this handle: it was taken before, its session is closed, or it is not a result of external_output";
        Error::new(ErrorKind::Consumed, text)
    })
}

/// Drops the tensors of a kernel instance that were not taken: its session is closed.
pub(crate) fn reclaim(instance: u64) {
    if instance == 0 {
        return;
    }
    // Dropped outside the lock: releasing memory may call this again.
    let reclaimed: Vec<_> = lock(&UNCLAIMED).extract_if(|_, value| value.instance == instance).collect();
    RECLAIMED.fetch_add(reclaimed.len() as u64, Relaxed);
}

impl External {
    /// Returns the tensor of a lease, to be fed.
    pub(crate) fn feed(runtime: &'static Runtime, lease: Lease) -> Result<Self> {
        Ok(Self::new(Value {
            runtime,
            dtype: lease.dtype(),
            device: lease.device(),
            shape: lease.layout().shape().into(),
            bytes: lease.compact_bytes(),
            stream: runtime.consumer.current_stream(lease.device())?,
            held: Held::Owner { _owner: Box::new(runtime.consumer.protected.owner(lease)) },
            origin: Origin::Fed,
            instance: 0,
        }))
    }

    pub(crate) fn new(value: Value) -> Self {
        Self::fed(unique(), Arc::new(value))
    }

    fn fed(id: u64, value: Arc<Value>) -> Self {
        lock(&FED).insert(id, value.clone());
        Self { id, value, is_fed: true }
    }

    /// Returns a tensor under the handle by which a run has recorded it.
    pub(crate) fn under(handle: [i32; 2], value: Arc<Value>) -> Self {
        Self::fed(id(handle), value)
    }

    /// Returns whether a run has fetched it, and it is not a tensor of another framework.
    pub fn is_fetched(&self) -> bool {
        self.value.origin != Origin::Fed
    }

    /// Records a fetched tensor again, under the same handle, so that it can be taken. Drops a tensor of another
    /// framework.
    pub fn put_back(mut self) {
        // In this order: as soon as it is recorded, another thread can take it, and feed it under the same handle.
        self.is_fed = false;
        let fed = lock(&FED).remove(&self.id);
        if self.is_fetched() {
            lock(&UNCLAIMED).insert(self.id, self.value.clone());
        }
        drop(fed);
    }

    /// Returns the number of fetched tensors that were not taken yet.
    pub fn unclaimed() -> usize {
        lock(&UNCLAIMED).len()
    }

    /// Returns the number of fetched tensors that were dropped before they were taken, because their sessions were
    /// closed.
    pub fn reclaimed() -> u64 {
        RECLAIMED.load(Relaxed)
    }

    /// Returns the handle that stands for it in a graph.
    pub fn handle(&self) -> [i32; 2] {
        handle(self.id)
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.value.dtype
    }

    /// Lengths, in elements. The memory is compact.
    pub fn shape(&self) -> &[i64] {
        &self.value.shape
    }

    /// The device of the memory.
    pub fn device(&self) -> Device {
        self.value.device
    }

    /// Address of the first element.
    pub fn address(&self) -> usize {
        self.value.bytes.start
    }

    /// The series of the runtime that it belongs to.
    pub fn series(&self) -> Series {
        self.value.runtime.series()
    }

    /// Whether the memory may be written. TensorFlow writes to none of its tensors, but other frameworks may.
    pub fn access(&self) -> Access {
        self.value.runtime.consumer.protected.access(self.address(), Access::ReadWrite)
    }

    pub(crate) fn value(&self) -> &Arc<Value> {
        &self.value
    }

    /// Exports it.
    pub(crate) fn export(&self) -> Result<Export> {
        let value = &self.value;
        let layout = Layout::new(value.dtype, &value.shape, None, 0)?;
        let reuse = if value.stream.is_none() { Reuse::InStreamOrder } else { Reuse::Unknown };
        let (bytes, device) = (value.bytes.clone(), value.device);
        let allocation = Allocation::new(bytes, device, self.access(), value.stream, reuse);
        // SAFETY: the value keeps its memory. The kernel that fetched it has seen its device and the stream in which it
        // was written; for a fed tensor, the lease states them.
        let memory = unsafe { Memory::new(allocation, value.clone()) };
        Export::new(value.dtype, layout, memory)
    }
}

impl Drop for External {
    fn drop(&mut self) {
        if self.is_fed {
            // Dropped outside the lock: it may be the last reference to the lease.
            let entry = lock(&FED).remove(&self.id);
            drop(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers are never reused, so a process that runs for long needs more than 32 bits of them.
    #[test]
    fn a_handle_holds_all_bits_of_its_number() {
        for number in [0, 1, u64::from(u32::MAX), 1 << 32, 0x0123_4567_89ab_cdef, 0x8000_0000_8000_0000, u64::MAX] {
            assert_eq!(id(handle(number)), number);
        }
        assert_eq!((handle(1 << 32 | 2), id([-1, 0])), ([2, 1], u64::from(u32::MAX)));
    }
}
