//! What the suite asks of a framework, beside its adapter.

use crate::model;
use bridge_core::{Adapter, DType, Device, Pending, Result, Stream};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A tensor to make: a base buffer of random bytes, and a strided view of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Element type.
    pub dtype: DType,
    /// Lengths, in elements.
    pub shape: Vec<i64>,
    /// Strides, in elements, signed.
    pub strides: Vec<i64>,
    /// Elements from the start of the base buffer to the first element of the view.
    pub offset: usize,
    /// Elements in the base buffer: every view element lies in it.
    pub base: usize,
    /// Bytes from a multiple of [`GRAIN`](Self::GRAIN) to the start of the base buffer. 0 for frameworks that choose the
    /// address themselves.
    #[serde(default)]
    pub align: usize,
    /// Whether the view shall be read-only (only for frameworks that have such tensors).
    pub read_only: bool,
    /// An operation that the framework shall put off (only for frameworks that do so).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<Pending>,
}

impl Spec {
    /// Addresses of base buffers are said modulo so many bytes: no framework asks for a larger alignment.
    pub const GRAIN: usize = 128;

    /// A compact tensor, alone in its base buffer.
    pub fn compact(dtype: DType, shape: &[i64]) -> Self {
        Self {
            dtype,
            shape: shape.into(),
            strides: model::row_major(shape),
            offset: 0,
            base: model::numel(shape),
            align: 0,
            read_only: false,
            pending: None,
        }
    }
}

/// What a framework itself says of one of its tensors, read without the adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    /// Element type.
    pub dtype: DType,
    /// Lengths, in elements.
    pub shape: Vec<i64>,
    /// Strides, in elements, as the framework states them (not normalised).
    pub strides: Vec<i64>,
    /// Address of the first element.
    pub address: usize,
    /// Whether the framework refuses writes to it.
    pub read_only: bool,
    /// Where it is.
    pub device: Device,
}

/// A framework under test: its adapter, and the few things that the suite does with tensors of its own.
///
/// Every method goes through the framework's own public interface and never through the adapter, so that the two are
/// independent witnesses. Methods that touch elements put work into the framework's current stream and do not wait,
/// unless they say so.
pub trait Subject: Adapter {
    /// The name under which reports and regressions file this subject. It differs from the profile's where one framework
    /// has several adapters.
    fn name(&self) -> &str {
        &self.profile().name
    }

    /// The device on which this subject makes tensors.
    fn device(&self) -> Device;

    /// Dtypes that the framework can make tensors of on this device.
    fn dtypes(&self) -> Vec<DType>;

    /// Whether it can make views with negative strides.
    fn makes_negative_strides(&self) -> bool;

    /// Whether it can make read-only tensors.
    fn makes_read_only(&self) -> bool;

    /// Whether elements of its tensors may lie at addresses that are no multiples of their size.
    fn unaligned(&self) -> bool {
        false
    }

    /// The operations that it puts off.
    fn puts_off(&self) -> Vec<Pending> {
        Vec::new()
    }

    /// Whether its tensors can be written to. Where they cannot, `write` is not called, and [`fill`](Self::fill) and
    /// [`snapshot`](Self::snapshot) put another tensor in the place of theirs.
    fn writes(&self) -> bool {
        true
    }

    /// A tensor as `spec` says, whose base buffer holds `bytes` (`spec.base * itemsize` of them). Waits until the bytes
    /// are there.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Self::Tensor>;

    /// What the framework says of the tensor.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn observe(&self, tensor: &Self::Tensor) -> Result<Observed>;

    /// The elements in row-major order, bit for bit, with every pending operation done. Waits for the current stream
    /// only.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn read(&self, tensor: &Self::Tensor) -> Result<Vec<u8>>;

    /// Overwrites the elements, given in row-major order, in the current stream. Only where the framework
    /// [writes](Self::writes).
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn write(&self, tensor: &Self::Tensor, bytes: &[u8]) -> Result<()>;

    /// Sets every byte of the elements, in the current stream, by a kernel on the device, without any host copy. Where
    /// nothing [writes](Self::writes) to tensors, the kernel makes another one of that dtype and shape, which replaces
    /// `tensor`.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn fill(&self, tensor: &mut Self::Tensor, byte: u8) -> Result<()>;

    /// A fresh tensor of `nbytes` bytes (uint8, compact) from the framework's allocator, not initialised. Where nothing
    /// [writes](Self::writes) to tensors, a kernel in the current stream has put garbage into it: [`fill`](Self::fill)
    /// fills another tensor, and memory that was given back too early must be overwritten here.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn allocate(&self, nbytes: usize) -> Result<Self::Tensor>;

    /// Copies the elements of `from` into the fresh compact tensor `into` of as many bytes, in the current stream.
    /// Where nothing [writes](Self::writes) to tensors, the copy is another such tensor, in other memory than that of
    /// `from`, and replaces `into`.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn snapshot(&self, from: &Self::Tensor, into: &mut Self::Tensor) -> Result<()>;

    /// Another reference to the same tensor object.
    fn share(&self, tensor: &Self::Tensor) -> Self::Tensor;

    /// Drops the tensor on another thread, and waits for that thread.
    fn drop_on_thread(&self, tensor: Self::Tensor);

    /// Streams of the framework that may be used beside its default stream, made once. Empty: it has no others, or the
    /// device has none.
    fn streams(&self) -> Vec<Stream>;

    /// Makes `stream` the framework's current one for the duration of `body`.
    ///
    /// # Errors
    ///
    /// What `body` or the framework reports.
    fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()>;

    /// Makes a stream, makes it the framework's current one for the duration of `body`, and drops it. An `external` stream
    /// is one that the framework knows by its handle alone, and that is destroyed at once; of any other, the last
    /// reference counts. Runs `body` in the current stream where the framework makes no streams.
    ///
    /// # Errors
    ///
    /// What `body` or the framework reports.
    fn on_fresh_stream(&self, external: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let _ = external;
        body()
    }

    /// Puts work that takes a few milliseconds into the current stream.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn delay(&self) -> Result<()>;

    /// Waits for the device, collects garbage and empties the caches; then the bytes that the framework's allocator has
    /// in use, or `None` where nobody counts them.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn settle(&self) -> Result<Option<usize>>;

    /// How long memory may take to come back after the last reference to it was dropped. It bounds a wait that ends at
    /// once where all is well; zero where everything is back when [`settle`](Self::settle) returns.
    fn patience(&self) -> Duration {
        Duration::from_secs(20)
    }

    /// Reports what a checker of the framework or its device has found since the last call; there need not be one. The
    /// suite asks after every case.
    ///
    /// # Errors
    ///
    /// What was found.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The framework's own way of taking a tensor of `other`, for the native column, or `None` where there is none.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn import_natively(&self, other: &Self::Tensor) -> Option<Result<Self::Tensor>> {
        let _ = other;
        None
    }
}
