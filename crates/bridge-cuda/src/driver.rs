//! The driver functions that the protocol needs, as a trait, so that the tests need no device.
//!
//! # Streams and events are alive
//!
//! The driver takes handles unchecked. Here and in the modules above, functions that take a stream are safe all the same,
//! because only this crate can call them, and each stream comes from one of these:
//!
//! - an unsafe public function ([`Ordering`](bridge_core::Ordering), [`Link`](crate::Link), [`Sharing`](crate::Sharing),
//!   [`Words`](crate::Words), `Kernels::launch`, `has_stream`, `unordered`, `works_after_legacy`), whose caller has promised
//!   that the stream is alive. What is kept for later (`after_capture`, and memory that waits for the end of a capture) is so with
//!   the attempt or the buffer, as long as which the caller of `Ordering::defer` or `release_after_all_work` has
//!   promised it;
//! - [`Driver::create_stream`], whose streams are never destroyed, and the default streams.
//!
//! `releases.rs` compares streams, and passes none to the driver. Events are owned by what holds them, and destroyed
//! there.

use bridge_core::{Error, ErrorKind, Stream};
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::os::fd::OwnedFd;

/// Bytes of a handle for memory or for an event (`CU_IPC_HANDLE_SIZE`).
pub const HANDLE: usize = 64;

/// A handle that another process opens.
pub type Handle = [u8; HANDLE];

/// What an address is mapped to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Mapped {
    /// Whether `cuIpcGetMemHandle` takes it.
    pub legacy: bool,
    /// The types of handles that the allocation can be exported as (`CUmemAllocationHandleType`, as bits).
    pub handle_types: u64,
    /// The pool that it came from (`CUmemoryPool`).
    pub pool: Option<usize>,
    /// The driver's number of the allocation, or of virtual memory that of the physical one.
    pub number: Option<u64>,
    /// The allocation, or of virtual memory the part that is mapped as one.
    pub range: Range<usize>,
}

/// A CUDA context (`CUcontext`), never null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Context(pub usize);

/// A CUDA event (`CUevent`), never null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Event(pub usize);

/// Code that was loaded into a context (`CUmodule`), never null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Module(pub usize);

/// A kernel (`CUfunction`), never null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Function(pub usize);

/// The size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Blocks, in one dimension.
    pub blocks: u32,
    /// Threads of a block, in one dimension.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
}

/// The two sides of a copy of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From host memory to the device of the current context.
    Up,
    /// From the device of the current context to host memory.
    Down,
    /// Within the device of the current context. A graph may capture it, which a copy between contexts refuses even where
    /// both are the same.
    Within,
    /// From one context's device to another's.
    Across {
        /// The context of the target.
        to: Context,
        /// The context of the source.
        from: Context,
    },
}

/// What the driver knows about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Pointer {
    /// `CUmemorytype`, or 0 for memory that the driver does not know.
    pub memory_type: u32,
    /// Whether the memory is managed.
    pub managed: bool,
    /// Ordinal of the device that the memory was allocated for.
    pub ordinal: i32,
    /// Lowest address of the allocation.
    pub start: usize,
    /// Length of the allocation in bytes.
    pub size: usize,
}

/// A failed driver call. It is small: the message is made on the error path only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The driver function.
    pub call: &'static str,
    /// Its `CUresult`, as a number, because a newer driver may return codes that no enum has.
    pub code: u32,
}

/// The result of a driver call.
pub(crate) type Outcome<T> = Result<T, Failure>;

/// The mode in which driver calls do not affect captures (`CU_STREAM_CAPTURE_MODE_RELAXED`).
pub(crate) const RELAXED: u32 = 2;

/// The driver. Methods act on the calling thread's current context. Only [`synchronize`](Self::synchronize) and
/// [`synchronize_event`](Self::synchronize_event) wait for the device.
pub(crate) trait Driver: Send + Sync + 'static {
    /// Retains the device's primary context, which all frameworks share, for the rest of the process.
    fn retain_primary_context(&self, ordinal: i32) -> Outcome<Context>;
    /// Returns the calling thread's current context.
    fn current_context(&self) -> Outcome<Option<Context>>;
    /// Lets the device of the current context reach memory of another context.
    fn enable_peer_access(&self, context: Context) -> Outcome<()>;
    /// Lets a device reach the memory of another one's current pool.
    fn open_pool(&self, owner: i32, reader: i32) -> Outcome<()>;
    /// Makes a context current, and keeps the previous one below it.
    fn push_context(&self, context: Context) -> Outcome<()>;
    /// Restores the context that was current before the push.
    fn pop_context(&self) -> Outcome<()>;
    /// Creates an event in the current context, without timing.
    fn create_event(&self) -> Outcome<Event>;
    /// Creates a stream in the current context that does not wait for the legacy default stream.
    fn create_stream(&self) -> Outcome<Stream>;
    /// Destroys an event, after it has fired.
    fn destroy_event(&self, event: Event) -> Outcome<()>;
    /// Records the event after all work now in the stream.
    fn record_event(&self, event: Event, stream: Stream) -> Outcome<()>;
    /// Returns whether [`record_context`](Self::record_context) is there: since CUDA 12.5.
    fn can_record_contexts(&self) -> bool;
    /// Records the event after all work now in any stream of the context. It ends captures of streams of the context.
    fn record_context(&self, event: Event, context: Context) -> Outcome<()>;
    /// Makes all work submitted to the stream from now on wait for the event as it is recorded now.
    fn wait_event(&self, stream: Stream, event: Event) -> Outcome<()>;
    /// Returns whether the event has fired.
    fn query_event(&self, event: Event) -> Outcome<bool>;
    /// Returns whether work in the stream and earlier work in the legacy default stream wait for each other.
    fn is_blocking(&self, stream: Stream) -> Outcome<bool>;
    /// Returns whether all work of the stream has run, whatever else new work in it would wait for. The stream must not
    /// be captured. Other captures are unaffected.
    fn is_done(&self, stream: Stream) -> Outcome<bool>;
    /// Returns whether an event recorded in the stream now would fire at once; `false` also where that is unknown. The
    /// stream must not be captured. Other captures are unaffected.
    fn is_idle(&self, stream: Stream) -> Outcome<bool>;
    /// Returns whether the stream is being captured into a graph.
    fn is_capturing(&self, stream: Stream) -> Outcome<bool>;
    /// Blocks the host until all work now in the stream has run.
    fn synchronize(&self, stream: Stream) -> Outcome<()>;
    /// Blocks the host until the event has fired.
    fn synchronize_event(&self, event: Event) -> Outcome<()>;
    /// Copies `nbytes` bytes in stream order.
    ///
    /// # Safety
    ///
    /// Both ranges are mapped, on the sides that `direction` names, until the copy has run. Host memory is pinned, or the
    /// stream is idle: for pageable memory the driver may wait for earlier work.
    unsafe fn copy(&self, direction: Direction, to: usize, from: usize, nbytes: usize, stream: Stream) -> Outcome<()>;
    /// Fills `nbytes` bytes of device memory in stream order.
    ///
    /// # Safety
    ///
    /// The range is mapped until the work has run.
    unsafe fn fill(&self, address: usize, byte: u8, nbytes: usize, stream: Stream) -> Outcome<()>;
    /// Allocates host memory that every device can copy to and from at full speed.
    fn allocate_pinned(&self, nbytes: usize) -> Outcome<usize>;
    /// Frees pinned memory.
    ///
    /// # Safety
    ///
    /// The address is one of [`allocate_pinned`](Self::allocate_pinned), and no work uses the memory any more.
    unsafe fn free_pinned(&self, address: usize) -> Outcome<()>;
    /// Allocates device memory from the device's own pool, in stream order.
    fn allocate(&self, nbytes: usize, stream: Stream) -> Outcome<usize>;
    /// Frees device memory in stream order.
    ///
    /// # Safety
    ///
    /// The address is one of [`allocate`](Self::allocate), and work that uses the memory is in the stream, or ordered
    /// before it.
    unsafe fn free(&self, address: usize, stream: Stream) -> Outcome<()>;
    /// Returns the ordinal of the device of the calling thread's current context. It is an error if there is none.
    fn current_device(&self) -> Outcome<i32>;
    /// Returns the context that a stream belongs to.
    fn context_of(&self, stream: Stream) -> Outcome<Context>;
    /// Sets the calling thread's capture mode, and returns the previous one.
    fn exchange_capture_mode(&self, mode: u32) -> Outcome<u32>;
    /// Returns what the driver knows about an address. Needs no current context.
    fn pointer(&self, address: usize) -> Outcome<Pointer>;
    /// Loads a fatbinary, a cubin, or PTX that ends with a zero byte, into the current context, for the rest of the process.
    fn load_module(&self, image: &'static [u8]) -> Outcome<Module>;
    /// Returns a kernel of a module.
    fn function(&self, module: Module, name: &CStr) -> Outcome<Function>;
    /// Allows a kernel this much dynamic shared memory, in bytes.
    fn allow_shared(&self, function: Function, nbytes: u32) -> Outcome<()>;
    /// Launches a kernel with one parameter in a stream of the current context.
    ///
    /// # Safety
    ///
    /// `parameter` points to a value of the type of the kernel's parameter, and the kernel may run with it.
    unsafe fn launch(&self, function: Function, grid: Grid, stream: Stream, parameter: *const c_void) -> Outcome<()>;
    /// Returns the name and the description of a result code.
    fn describe(&self, code: u32) -> String;
}

/// The driver's functions for memory and events that processes share. Methods act on the calling thread's current
/// context.
pub(crate) trait SharingDriver {
    /// Returns what names the device in every process.
    fn uuid(&self, ordinal: i32) -> Outcome<[u8; 16]>;
    /// Returns what an address is mapped to. Needs no current context.
    fn mapped(&self, address: usize) -> Outcome<Mapped>;
    /// Returns the handle of an allocation of `cuMemAlloc`, by its address.
    fn memory_handle(&self, address: usize) -> Outcome<Handle>;
    /// Maps the allocation of a handle, and lets other devices reach it as they need.
    fn open_memory(&self, handle: &Handle) -> Outcome<usize>;
    /// Unmaps it.
    ///
    /// # Safety
    ///
    /// The address is one of [`open_memory`](Self::open_memory), and no work uses the memory any more.
    unsafe fn close_memory(&self, address: usize) -> Outcome<()>;
    /// Returns a descriptor of the allocation that an address of virtual memory is mapped to.
    fn file_of(&self, address: usize) -> Outcome<OwnedFd>;
    /// Allocates and maps memory that descriptors can keep, readable and writable on the device. Returns its address,
    /// and its length in bytes, which is at least `nbytes`. [`unmap`](Self::unmap) ends the mapping.
    fn create_mapped(&self, ordinal: i32, nbytes: usize) -> Outcome<(usize, usize)>;
    /// Maps allocations side by side, readable and writable on the device. Returns the address of the first.
    fn map_files(&self, ordinal: i32, files: &[(OwnedFd, usize)]) -> Outcome<usize>;
    /// Unmaps them.
    ///
    /// # Safety
    ///
    /// The address is one of [`map_files`](Self::map_files), for parts of these lengths, and no work uses the memory
    /// any more.
    unsafe fn unmap(&self, address: usize, parts: &[usize]) -> Outcome<()>;
    /// Returns a descriptor of a pool; `None` where it was not made to be shared.
    fn file_of_pool(&self, pool: usize) -> Outcome<Option<OwnedFd>>;
    /// Returns what names an allocation of such a pool, by its address.
    fn pointer_in_pool(&self, address: usize) -> Outcome<Handle>;
    /// Opens an allocation of another process's pool, readable and writable on the device.
    fn open_in_pool(&self, ordinal: i32, file: &OwnedFd, pointer: &Handle) -> Outcome<usize>;
    /// Closes it after the work in a stream.
    ///
    /// # Safety
    ///
    /// The address is one of [`open_in_pool`](Self::open_in_pool), and no work but what is in the stream uses the
    /// memory.
    unsafe fn free_in_order(&self, address: usize, stream: Stream) -> Outcome<()>;
    /// Creates an event in the current context that other processes can open, without timing.
    fn interprocess_event(&self) -> Outcome<Event>;
    /// Returns the handle of such an event.
    fn event_handle(&self, event: Event) -> Outcome<Handle>;
    /// Opens an event of another process.
    fn open_event(&self, handle: &Handle) -> Outcome<Event>;
    /// Allocates device memory in the current context (`cuMemAlloc`).
    fn allocate_plain(&self, nbytes: usize) -> Outcome<usize>;
    /// Frees it.
    ///
    /// # Safety
    ///
    /// The address is one of [`allocate_plain`](Self::allocate_plain), and no work uses the memory any more.
    unsafe fn free_plain(&self, address: usize) -> Outcome<()>;
}

/// The driver's functions for words of host memory in streams. Methods act on the calling thread's current context.
pub(crate) trait WordsDriver {
    /// Registers host memory for every context.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until [`unregister`](Self::unregister).
    unsafe fn register(&self, start: usize, nbytes: usize) -> Outcome<()>;
    /// Ends the registration.
    ///
    /// # Safety
    ///
    /// No work uses the memory any more.
    unsafe fn unregister(&self, start: usize) -> Outcome<()>;
    /// Writes a word after all work now in the stream.
    ///
    /// # Safety
    ///
    /// The word is registered until the work has run, and all that use it on the host do so atomically.
    unsafe fn write_word(&self, stream: Stream, word: usize, value: u64) -> Outcome<()>;
    /// Makes all work submitted to the stream from now on wait until a word has reached a value.
    ///
    /// # Safety
    ///
    /// The word is registered until the wait has ended, and all that use it on the host do so atomically.
    unsafe fn wait_word(&self, stream: Stream, word: usize, value: u64) -> Outcome<()>;
}

/// Errors by range of result codes: first code, last code, the kind, what to do next.
///
/// The driver also gives `CUDA_ERROR_ALREADY_MAPPED` (208) for a handle whose memory was part of other allocations
/// before, while this process has those open (seen on an H200).
const ADVICE: &[(u32, u32, ErrorKind, &str)] = &[
    (2, 2, ErrorKind::OutOfMemory, "free memory on the device first"),
    (3, 3, ErrorKind::Driver, "CUDA does not survive a fork: start processes with the method \"spawn\""),
    (4, 4, ErrorKind::Driver, "the driver is shutting down with the process"),
    (101, 101, ErrorKind::Driver, "the device was hidden or lost: see CUDA_VISIBLE_DEVICES"),
    (208, 208, ErrorKind::Busy, "memory that was freed is still open at its address: drop it, and open again"),
    (400, 400, ErrorKind::Driver, "the stream was destroyed, or belongs to another device than the tensor"),
    (700, 700, ErrorKind::Driver, LOST),
    (709, 709, ErrorKind::Driver, "the device was reset: restart the process"),
    (710, 719, ErrorKind::Driver, LOST),
    (900, 908, ErrorKind::Captured, "a stream is being captured: exchange the tensor before, or on that stream"),
];

const LOST: &str = "a kernel failed earlier and its context is lost: restart the process";

/// Makes the error that the user sees.
#[cold]
pub(crate) fn error(driver: &impl Driver, failure: Failure) -> Error {
    let Failure { call, code } = failure;
    let text = format!("{call} failed: {}", driver.describe(code));
    match ADVICE.iter().find(|(first, last, ..)| (*first..=*last).contains(&code)) {
        Some((.., kind, advice)) => Error::new(*kind, format!("{text}: {advice}")),
        None => Error::new(ErrorKind::Driver, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;

    #[test]
    fn errors_say_what_failed_and_what_to_do() {
        let text = |code| error(&Fake::default(), Failure { call: "cuEventRecord", code }).to_string();
        assert!(text(900).starts_with("cuEventRecord failed: CUDA_ERROR_FAKE (code 900): a stream is being captured"));
        assert!(text(3).contains("spawn"));
        assert_eq!(text(999), "cuEventRecord failed: CUDA_ERROR_FAKE (code 999)");
    }

    #[test]
    fn advice_is_unambiguous() {
        assert!(ADVICE.iter().all(|(first, last, ..)| first <= last));
        assert!(ADVICE.windows(2).all(|pair| pair[0].1 < pair[1].0));
    }
}
