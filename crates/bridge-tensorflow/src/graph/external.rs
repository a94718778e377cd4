//! Tensors at the edges of graphs, and the handles that stand for them.
//!
//! A graph is built once and run many times, so what it holds is a handle: two numbers in host memory. The kernels of
//! [`operations`](crate::graph::operations) look up what is fed by it, and enter what they fetch.

use crate::runtime::Runtime;
use crate::runtime::kernel::Tensor;
use crate::runtime::library::Series;
use crate::runtime::release::Owner;
use bridge_core::{
    Access, Allocation, Consumer, DType, Device, DeviceKind, Dims, Error, ErrorKind, Layout, Lease, Lent, Memory,
    Result, Reuse, Stream,
};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// A tensor at the edge of a runtime's graphs: one of elsewhere that can be fed, or one that a run has given. Runs can read
/// it as long as this value lives, any number of times; they keep the memory for as long as they need it.
pub struct External {
    id: u64,
    value: Arc<Value>,
    /// Whether it is among what can be fed.
    entered: bool,
}

/// The memory and what a tensor over it needs.
pub(crate) struct Value {
    pub(crate) runtime: &'static Runtime,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    pub(crate) shape: Dims,
    pub(crate) bytes: Range<usize>,
    /// The stream of TensorFlow that orders the memory, or the legacy stream in its place.
    pub(crate) stream: Option<Stream>,
    pub(crate) held: Held,
    /// The instance of a kernel that has fetched it; 0 for what comes from elsewhere.
    pub(crate) by: u64,
}

impl Value {
    fn is_fetched(&self) -> bool {
        matches!(self.held, Held::Tensor(_))
    }
}

/// What keeps the memory.
pub(crate) enum Held {
    /// TensorFlow.
    Tensor(Tensor),
    /// Somebody else.
    Owner { _owner: Owner },
}

type Table = LazyLock<Mutex<HashMap<u64, Arc<Value>>>>;

/// What can be fed.
static FED: Table = LazyLock::new(Mutex::default);
/// What was fetched and nobody has taken.
static FETCHED: Table = LazyLock::new(Mutex::default);
/// Never used twice, so that an old handle means nothing instead of something else.
static NEXT: AtomicU64 = AtomicU64::new(1);
static RECLAIMED: AtomicU64 = AtomicU64::new(0);

fn lock(table: &Table) -> MutexGuard<'_, HashMap<u64, Arc<Value>>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that no other call gives.
pub(crate) fn unique() -> u64 {
    NEXT.fetch_add(1, Relaxed)
}

fn id([low, high]: [i32; 2]) -> u64 {
    u64::from(low as u32) | u64::from(high as u32) << 32
}

fn handle(id: u64) -> [i32; 2] {
    [id as i32, (id >> 32) as i32]
}

/// What is fed under this handle.
pub(crate) fn fed(handle: [i32; 2]) -> Option<Arc<Value>> {
    lock(&FED).get(&id(handle)).cloned()
}

/// A handle that nobody has.
pub(crate) fn new_handle() -> [i32; 2] {
    handle(unique())
}

/// Enters what a kernel has fetched, to be taken by this handle; whether nothing else waits under it.
pub(crate) fn enter_fetched(handle: [i32; 2], value: Value) -> bool {
    let value = Arc::new(value);
    let mut fetched = lock(&FETCHED);
    let waits = fetched.entry(id(handle)).or_insert_with(|| value.clone());
    Arc::ptr_eq(waits, &value)
}

/// Drops what this instance of a kernel has fetched and nobody has taken: its session is gone.
pub(crate) fn reclaim(by: u64) {
    if by == 0 {
        return;
    }
    // Dropped outside the lock: memory that goes back may lead here again.
    let gone: Vec<_> = lock(&FETCHED).extract_if(|_, value| value.by == by).collect();
    RECLAIMED.fetch_add(gone.len() as u64, Relaxed);
}

/// A lease, and its place among the read-only memory.
struct Imported {
    _lease: Lease,
    read_only: Option<Range<usize>>,
    runtime: &'static Runtime,
}

impl Drop for Imported {
    fn drop(&mut self) {
        if let Some(bytes) = &self.read_only {
            self.runtime.consumer.read_only.leave(bytes);
        }
    }
}

/// The addresses that a lease lends.
pub(crate) fn bytes(lease: &Lease) -> Range<usize> {
    lease.data()..lease.data() + lease.layout().nbytes()
}

/// What keeps a lease while TensorFlow has its memory.
pub(crate) fn imported(runtime: &'static Runtime, lease: Lease) -> Owner {
    let read_only = (lease.access() == Access::ReadOnly).then(|| bytes(&lease));
    read_only.iter().for_each(|bytes| runtime.consumer.read_only.enter(bytes));
    Box::new(Imported { _lease: lease, read_only, runtime })
}

impl External {
    /// A lease that can be fed.
    pub(crate) fn feed(runtime: &'static Runtime, lease: Lease) -> Result<Self> {
        Ok(Self::new(Value {
            runtime,
            dtype: lease.dtype(),
            device: lease.device(),
            shape: lease.layout().shape().into(),
            bytes: bytes(&lease),
            stream: runtime.consumer.current_stream(lease.device())?,
            held: Held::Owner { _owner: imported(runtime, lease) },
            by: 0,
        }))
    }

    pub(crate) fn new(value: Value) -> Self {
        Self::entered(unique(), Arc::new(value))
    }

    fn entered(id: u64, value: Arc<Value>) -> Self {
        lock(&FED).insert(id, value.clone());
        Self { id, value, entered: true }
    }

    /// What a run has fetched, by the numbers that it gave.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Consumed`] if somebody has taken it, or its session is gone.
    pub fn take(handle: [i32; 2]) -> Result<Self> {
        let value = lock(&FETCHED).remove(&id(handle)).ok_or_else(|| {
            let text = "no fetched tensor has this handle: it was taken before, its session is gone, or it is no result of external_output";
            Error::new(ErrorKind::Consumed, text)
        })?;
        Ok(Self::entered(id(handle), value))
    }

    /// Whether a run has given it, and it was not fed.
    pub fn is_fetched(&self) -> bool {
        self.value.is_fetched()
    }

    /// Lets what a run has given wait to be taken again, under the same handle. What was fed is dropped.
    pub fn put_back(mut self) {
        // In this order: as soon as it can be taken, somebody else has the handle.
        self.entered = false;
        let fed = lock(&FED).remove(&self.id);
        if self.value.is_fetched() {
            lock(&FETCHED).insert(self.id, self.value.clone());
        }
        drop(fed);
    }

    /// How many fetched tensors wait to be taken.
    pub fn untaken() -> usize {
        lock(&FETCHED).len()
    }

    /// How many fetched tensors were given back because their sessions went before anybody took them.
    pub fn reclaimed() -> u64 {
        RECLAIMED.load(Relaxed)
    }

    /// The numbers that stand for it in a graph.
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

    /// Where the memory is.
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

    /// What may be done with the memory. TensorFlow writes to none of its tensors, but others may.
    pub fn access(&self) -> Access {
        match self.value.runtime.consumer.read_only.contains(self.address()) {
            true => Access::ReadOnly,
            false => Access::ReadWrite,
        }
    }

    pub(crate) fn value(&self) -> &Arc<Value> {
        &self.value
    }

    /// Lends it.
    pub(crate) fn lend(&self) -> Result<Lent> {
        let value = &self.value;
        let layout = Layout::new(value.dtype, &value.shape, None, 0)?;
        let reuse = if value.stream.is_none() { Reuse::InStreamOrder } else { Reuse::Unknown };
        let (bytes, device) = (value.bytes.clone(), value.device);
        let allocation = Allocation { bytes, device, access: self.access(), stream: value.stream, reuse };
        // SAFETY: the value keeps its memory. TensorFlow's kernel that had it as its input has seen where it is, and in
        // which stream it was written; a lease has said so.
        let memory = unsafe { Memory::new(allocation, value.clone()) };
        Lent::new(value.dtype, layout, Box::new(memory))
    }

    /// A copy in memory of TensorFlow's, on the host.
    pub(crate) fn copy_on_host(&self, code: std::ffi::c_int) -> Result<Self> {
        let value = &self.value;
        debug_assert_ne!(value.device.kind, DeviceKind::CUDA);
        let tensor = Tensor::allocate(&value.runtime.core, code, &value.shape, value.bytes.len())?;
        // SAFETY: the value is compact host memory of that many bytes, and ready; nobody else has the copy.
        unsafe { tensor.write(value.bytes.start as *const u8, value.bytes.len()) };
        let start = tensor.address();
        Ok(Self::new(Value {
            bytes: start..start + value.bytes.len(),
            shape: value.shape.clone(),
            held: Held::Tensor(tensor),
            by: 0,
            ..**value
        }))
    }
}

impl Drop for External {
    fn drop(&mut self) {
        if self.entered {
            // Dropped outside the lock: it may be the last reference to the lease.
            let entry = lock(&FED).remove(&self.id);
            drop(entry);
        }
    }
}
