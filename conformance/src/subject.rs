//! What the suite needs of a framework, next to its adapter.

use crate::{Raised, Usual};
use bridge_core::{Adapter, DType, Device, Error, ErrorKind, HostOnly, Ordering, Pending, Result, Stream};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
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
    /// Bytes from a multiple of [`GRAIN`](Self::GRAIN) to the start of the base buffer. 0 for frameworks that choose
    /// the address themselves.
    #[serde(default)]
    pub align: usize,
    /// Whether the view is read-only (only for frameworks that make such tensors).
    pub read_only: bool,
    /// An operation that the framework defers (only for frameworks that do so).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<Pending>,
}

impl Spec {
    /// The modulus of [`align`](Self::align), in bytes: no framework needs a larger alignment.
    pub const GRAIN: usize = 128;
}

/// What a framework itself reports of one of its tensors, read without the adapter.
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
    /// Device of the memory.
    pub device: Device,
}

/// What a framework can do on the device of its subject. The suite makes no other tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capabilities {
    /// Dtypes of the tensors that it can make.
    pub dtypes: Vec<DType>,
    /// Whether it makes views with negative strides.
    pub negative_strides: bool,
    /// Whether it makes views with strides of 0.
    #[serde(default = "yes")]
    pub broadcasts: bool,
    /// Whether it makes read-only tensors.
    pub read_only: bool,
    /// Whether elements may lie at addresses that are not multiples of their size.
    pub unaligned: bool,
    /// The operations that it defers.
    pub defers: Vec<Pending>,
    /// Whether tensors can be written to. Where they cannot, [`Subject::write`] is not called, and [`Subject::fill`]
    /// and [`Subject::snapshot`] replace their tensor by another.
    pub writes: bool,
    /// Whether tensors never change: views of them are read-only, where the other framework has read-only tensors.
    #[serde(default)]
    pub immutable: bool,
    /// Whether [`Subject::create_unwritten`] makes tensors, and there is room for a few gigabytes.
    #[serde(default)]
    pub gigabytes: bool,
    /// Whether it can copy its tensors. Half of the cases of a pair whose frameworks both do are copied by them.
    #[serde(default = "yes")]
    pub copies: bool,
    /// Whether [`Subject::part`] makes views.
    #[serde(default)]
    pub parts: bool,
    /// Whether [`Subject::threads`] says how tensors are used on several threads.
    #[serde(default)]
    pub threads: bool,
    /// Whether [`Subject::elsewhere`] has another device to make the current one.
    #[serde(default)]
    pub devices: bool,
    /// Whether [`Subject::captured`] captures graphs.
    #[serde(default)]
    pub graphs: bool,
    /// Whether it names the legacy default stream whatever its current one is. Others are ordered only with that
    /// stream, and users of another stream order it themselves.
    #[serde(default)]
    pub legacy_stream: bool,
    /// Whether it compiles a program for each dtype and shape, which takes tens of milliseconds. Its pairs run fewer cases.
    #[serde(default)]
    pub compiles: bool,
    /// Whether [`Subject::on_stream`] takes streams of other frameworks too.
    #[serde(default = "yes")]
    pub external_streams: bool,
    /// Whether its adapter refuses to export a view that must not be written to, and was: see
    /// [`Options::watch`](bridge_core::Options::watch).
    #[serde(default)]
    pub watches: bool,
    /// Whether [`Subject::usual`] makes tensors.
    #[serde(default)]
    pub usual: bool,
    /// Whether [`Subject::raising`] makes functions raise.
    #[serde(default)]
    pub raises: bool,
    /// The alignment, in bytes, beyond that of the element, with which kernels of the framework compute on what
    /// [`Subject::import_natively`] takes: by the framework's own word, not the profile's. `None` where it takes nothing.
    #[serde(default)]
    pub imports: Option<usize>,
    /// Whether strides that [`Subject::import_natively`] takes cost the framework's users nothing. If not, the profile may
    /// refuse them.
    #[serde(default = "yes")]
    pub imports_strides: bool,
}

fn yes() -> bool {
    true
}

/// float32 tensors that can be written to, and nothing else.
impl Default for Capabilities {
    fn default() -> Self {
        Self {
            dtypes: vec![DType::FLOAT32],
            negative_strides: false,
            broadcasts: true,
            read_only: false,
            unaligned: false,
            defers: Vec::new(),
            writes: true,
            immutable: false,
            gigabytes: false,
            copies: true,
            parts: false,
            threads: false,
            devices: false,
            graphs: false,
            legacy_stream: false,
            compiles: false,
            external_streams: true,
            watches: false,
            usual: false,
            raises: false,
            imports: None,
            imports_strides: true,
        }
    }
}

/// What this process uses, as far as it is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Blocks that objects of the framework's language take, after garbage was collected.
    pub objects: Option<usize>,
    /// Bytes of resident memory.
    pub resident: Option<usize>,
}

impl Usage {
    /// Returns the bytes of memory that are resident, where the system says so (Linux).
    pub fn resident() -> Option<usize> {
        /// Bytes of a page on the machines that the suite runs on. Where pages are larger, less is counted.
        const PAGE: usize = 4096;
        let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
        Some(pages.split(' ').nth(1)?.parse::<usize>().ok()? * PAGE)
    }
}

/// Runs the work of a graph once more, in the current stream.
pub type Replay<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// How a subject and the tensors of its framework are used on several threads at once.
#[derive(Clone, Copy)]
pub struct Threads {
    outside: fn(&mut dyn FnMut()),
    inside: fn(&mut dyn FnMut()),
}

bridge_core::debug_fields!(impl[] Threads);

impl Threads {
    /// `outside` runs its argument where this thread waits for others, `inside` where a thread uses the framework.
    ///
    /// # Safety
    ///
    /// While the thread that has made the subject is in `outside`, any number of threads in `inside` may use the
    /// subject, its ordering, and tensors that they have made themselves.
    pub unsafe fn new(outside: fn(&mut dyn FnMut()), inside: fn(&mut dyn FnMut())) -> Self {
        Self { outside, inside }
    }

    /// For a subject without a lock around it.
    ///
    /// # Safety
    ///
    /// Any number of threads may use the subject, its ordering, and tensors that they have made themselves.
    pub unsafe fn free() -> Self {
        Self { outside: |body| body(), inside: |body| body() }
    }

    pub(crate) fn outside(self, body: &mut dyn FnMut()) {
        (self.outside)(body);
    }

    pub(crate) fn inside(self, body: &mut dyn FnMut()) {
        (self.inside)(body);
    }
}

/// A framework under test: its adapter, and the few things that the suite does with its own tensors.
///
/// Every method uses the framework's own public interface and never the adapter, so that the two are independent
/// oracles. Methods that touch elements submit work to the framework's current stream and do not wait for it, unless
/// their documentation says so. All report the framework's own errors.
pub trait Subject: Adapter {
    /// Returns the name in reports and regressions. It differs from the profile's where one framework has several
    /// adapters.
    fn name(&self) -> &str {
        &self.profile().name
    }

    /// Returns the device on which this subject makes tensors.
    fn device(&self) -> Device;

    /// Returns what the framework can do on this device.
    fn capabilities(&self) -> Capabilities;

    /// Returns what orders the streams of the device. The default serves frameworks of host memory.
    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::new(HostOnly)
    }

    /// Makes the tensor that `spec` describes. `bytes` are those of its base buffer (`spec.base * itemsize`). Waits
    /// until they are written.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Self::Tensor>;

    /// Makes the tensor that `spec` describes without writing its base buffer, which may be gigabytes long. Returns
    /// `None` where the framework makes no such tensors: see [`Capabilities::gigabytes`].
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn create_unwritten(&self, spec: &Spec) -> Option<Result<Self::Tensor>> {
        let _ = spec;
        None
    }

    /// Returns what the framework reports of the tensor.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn observe(&self, tensor: &Self::Tensor) -> Result<Observed>;

    /// Returns the elements in row-major order, bit for bit, with deferred operations applied. Waits for the current
    /// stream only.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn read(&self, tensor: &Self::Tensor) -> Result<Vec<u8>>;

    /// Overwrites the elements, in row-major order, in the current stream. Called only where
    /// [`Capabilities::writes`] is set.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn write(&self, tensor: &Self::Tensor, bytes: &[u8]) -> Result<()>;

    /// Sets every byte of the elements, in the current stream, by a kernel on the device and without a host copy. Where
    /// tensors cannot be [written](Capabilities::writes) to, the kernel makes another tensor of the same dtype and
    /// shape, which replaces `tensor`. A bool is `true` after any byte but 0, and its byte may be 1 instead.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn fill(&self, tensor: &mut Self::Tensor, byte: u8) -> Result<()>;

    /// Allocates a compact uint8 tensor of `nbytes` bytes, of any shape, by the framework's allocator, not initialised. Where tensors
    /// cannot be [written](Capabilities::writes) to, a kernel in the current stream fills it with garbage: `fill`
    /// fills another tensor, and memory that was released too early must be overwritten here.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn allocate(&self, nbytes: usize) -> Result<Self::Tensor>;

    /// Copies the elements of `from` into the fresh compact tensor `into` of as many bytes, in the current stream.
    /// Where tensors cannot be [written](Capabilities::writes) to, the copy is another such tensor, in memory of its
    /// own, and replaces `into`.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn snapshot(&self, from: &Self::Tensor, into: &mut Self::Tensor) -> Result<()>;

    /// Returns another reference to the same tensor object.
    fn share(&self, tensor: &Self::Tensor) -> Self::Tensor;

    /// Drops the tensor on another thread, and waits for that thread.
    fn drop_on_thread(&self, tensor: Self::Tensor);

    /// Returns the framework's own view of a tensor of at least one dimension: its rows from `start` on, in the same
    /// memory. Returns `None` where the framework copies instead: see [`Capabilities::parts`].
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn part(&self, tensor: &Self::Tensor, start: usize) -> Option<Result<Self::Tensor>> {
        let _ = (tensor, start);
        None
    }

    /// Returns a number that is larger after each write to the tensor that the framework knows of, a copy into it
    /// included. By it autograd notices that a tensor which it has saved has changed. `None` where writes are not counted.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn version(&self, tensor: &Self::Tensor) -> Result<Option<u64>> {
        let _ = tensor;
        Ok(None)
    }

    /// Makes one of the tensors that the framework's users make: those with the numbers from 0 on, until there is
    /// none. All bytes are chosen by `seed`, and the memory is its own for each call. See [`Capabilities::usual`].
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn usual(&self, number: usize, seed: u64) -> Option<Result<Usual<'_, Self::Tensor>>> {
        let _ = (number, seed);
        None
    }

    /// Runs `body` while one of the framework's functions raises that adapters call: those with the numbers from 0 on,
    /// until there is none. See [`Capabilities::raises`].
    ///
    /// # Errors
    ///
    /// What the framework reports where the function cannot be replaced.
    fn raising(&self, number: usize, body: &mut dyn FnMut()) -> Option<Result<Raised>> {
        let _ = (number, body);
        None
    }

    /// Drops the tensor while an exception is pending, as happens when one leaves a function. The default serves
    /// frameworks without exceptions.
    ///
    /// # Errors
    ///
    /// The exception is no longer pending, or another one is.
    fn drop_amid_exception(&self, tensor: Self::Tensor) -> Result<()> {
        drop(tensor);
        Ok(())
    }

    /// Runs `body`, which converts many tensors by one call, as the calls of users are made.
    fn together(&self, body: &mut dyn FnMut()) {
        body();
    }

    /// Returns how this subject is used on several threads at once, or `None` where only one thread may use it: see
    /// [`Capabilities::threads`].
    fn threads(&self) -> Option<Threads> {
        None
    }

    /// Runs `body` while another device than [`device`](Self::device) is the framework's current one. Returns `None`
    /// where there is no other: see [`Capabilities::devices`].
    ///
    /// # Errors
    ///
    /// What `body` or the framework reports, and a current device that `body` has changed.
    fn elsewhere(&self, body: &mut dyn FnMut() -> Result<()>) -> Option<Result<()>> {
        let _ = body;
        None
    }

    /// Captures the work that `body` submits to the current stream, which is not the default one, into a graph. Returns
    /// what replays it in the stream that is current then, or `None` where the framework captures no graphs: see
    /// [`Capabilities::graphs`]. The capture has ended when this returns, whatever `body` returns.
    ///
    /// # Errors
    ///
    /// What `body` or the framework reports.
    fn captured<'a>(&'a self, body: &mut dyn FnMut() -> Result<()>) -> Option<Result<Replay<'a>>> {
        let _ = body;
        None
    }

    /// Returns the framework's streams besides its default one, made once. Empty where it or the device has no others.
    fn streams(&self) -> Vec<Stream>;

    /// Runs `body` with `stream` as the framework's current stream.
    ///
    /// # Errors
    ///
    /// What `body` or the framework reports.
    ///
    /// # Safety
    ///
    /// `stream` is one of [`streams`](Self::streams), or another one that has not been destroyed.
    unsafe fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()>;

    /// Makes all later work in a stream of this framework wait for all work that another one of its streams has now, as
    /// users do by an event. Where the earlier one is being captured, the later one joins the capture. Called only where
    /// [`Capabilities::graphs`] is set.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    ///
    /// # Safety
    ///
    /// Both are [`streams`](Self::streams) of this subject.
    unsafe fn join(&self, earlier: Stream, later: Stream) -> Result<()> {
        let text = format!("{} has no way to make {later} wait for {earlier}", self.name());
        Err(Error::new(ErrorKind::Missing, text))
    }

    /// Makes a stream, runs `body` with it as the framework's current stream, and drops it. The framework knows an
    /// `external` stream only by its handle, and the stream is destroyed at once; any other lives until its last
    /// reference is dropped. Runs `body` in the current stream where the framework makes no streams.
    ///
    /// # Errors
    ///
    /// What `body` or the framework reports.
    fn on_fresh_stream(&self, external: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let _ = external;
        body()
    }

    /// Records that a view is used in the current stream, as users do by `record_stream`.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn note(&self, view: &Self::Tensor) -> Result<()> {
        let (device, consumer) = (self.device(), self.consumer());
        if let Some(stream) = consumer.current_stream(device)? {
            let address = self.observe(view)?.address;
            // SAFETY: by the contract of `Consumer` the stream is alive as long as its `keep`, or as the process.
            unsafe { consumer.views().used(device, address, stream, || consumer.keep(device, stream)) };
        }
        Ok(())
    }

    /// Submits work of a few milliseconds to the current stream.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn delay(&self) -> Result<()>;

    /// Waits for the device, collects garbage and empties the caches. Returns the bytes that the framework's allocator
    /// then has in use, or `None` where they are not counted.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn settle(&self) -> Result<Option<usize>>;

    /// Collects garbage and returns what this process uses, for [`growth`](crate::PROPERTIES): nothing, where other threads
    /// of the process allocate meanwhile, as those of other tests do.
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn usage(&self) -> Result<Usage> {
        Ok(Usage::default())
    }

    /// Returns how long memory may take to be released after its last reference was dropped. The suite polls and
    /// stops at once when it is back. Zero where everything is back when [`settle`](Self::settle) returns.
    fn patience(&self) -> Duration {
        Duration::from_secs(20)
    }

    /// Returns how many leases of this process a tensor keeps that was taken in place.
    fn leases(&self) -> u64 {
        1
    }

    /// Reports what a checker of the framework or its device has found since the last call. Called after every case.
    ///
    /// # Errors
    ///
    /// What was found.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Imports a tensor of the same type by the framework's own means, for the native column and for `profile`. Returns
    /// `None` where it has none: see [`Capabilities::imports`].
    ///
    /// # Errors
    ///
    /// What the framework reports.
    fn import_natively(&self, other: &Self::Tensor) -> Option<Result<Self::Tensor>> {
        let _ = other;
        None
    }
}
