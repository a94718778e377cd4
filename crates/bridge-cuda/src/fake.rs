//! A driver without a device, for the tests. It enforces the rules of the real one: a context must be current, and an
//! event must be alive and belong to it.

use crate::driver::Mapped;
use crate::driver::{Context, Direction, Driver, Event, Failure, Function, Grid, Module, Outcome, Pointer};
use crate::sync::{Mutex, MutexGuard, thread, thread::ThreadId};
use bridge_core::{Access, Device, DeviceBuffer, Reuse, Stream};
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

mod sharing;
mod words;
pub use sharing::PRIVATE_POOL;

/// A call that changes state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Retain(i32),
    Push(Context),
    Pop,
    EnablePeerAccess(Context),
    OpenPool(i32, i32),
    Create,
    Destroy(Event),
    Record(Event, Stream),
    RecordContext(Event, Context),
    Wait(Stream, Event),
    Mode(u32),
    Synchronize(Stream),
    Load(&'static [u8]),
    AllowShared(Function, u32),
    Launch(Function, Grid, Stream),
    Copy(Direction, usize, Stream),
    Fill(usize, u8, usize, Stream),
    Free(usize),
    Write(Stream, usize, u64),
    Await(Stream, usize, u64),
}

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`, the initial mode of every thread.
const GLOBAL: u32 = 0;

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    failing: HashMap<&'static str, u32>,
    stacks: HashMap<ThreadId, Vec<Context>>,
    /// Live events: context, stream of the last record, and whether the event has fired.
    events: HashMap<Event, (Context, Option<Stream>, bool)>,
    created: usize,
    ordered: Vec<(Stream, Stream)>,
    queries: usize,
    capturing: Option<Stream>,
    idle: Vec<Stream>,
    blocking: Vec<Stream>,
    modes: HashMap<ThreadId, u32>,
    /// Live allocations of host and device memory: address and length.
    memory: HashMap<usize, usize>,
    allocated: usize,
    pointers: HashMap<usize, Pointer>,
    /// The contexts of streams; all others belong to the first device's context.
    streams: HashMap<Stream, Context>,
    /// What addresses are mapped to.
    mapped: Vec<Mapped>,
    /// Live mappings of imported memory.
    opened: Vec<usize>,
    /// Host memory that is registered.
    registered: Vec<Range<usize>>,
}

impl State {
    /// Returns the failure of a call that uses the legacy stream while a blocking stream is being captured
    /// (`CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`).
    fn implicit(&self, call: &'static str, stream: Stream) -> Outcome<()> {
        let is_blocking = |captured| self.blocking.contains(&captured) || captured == Stream::PER_THREAD;
        match stream == Stream::LEGACY && self.capturing.is_some_and(is_blocking) {
            true => Err(Failure { call, code: 906 }),
            false => Ok(()),
        }
    }

    fn current(&self) -> Option<Context> {
        self.stacks.get(&thread::current().id())?.last().copied()
    }

    fn stack(&mut self) -> &mut Vec<Context> {
        self.stacks.entry(thread::current().id()).or_default()
    }

    fn outcome(&self, call: &'static str) -> Outcome<()> {
        self.failing.get(call).map_or(Ok(()), |code| Err(Failure { call, code: *code }))
    }

    fn allocate(&mut self, call: &'static str, nbytes: usize) -> Outcome<usize> {
        self.outcome(call)?;
        self.current().ok_or(Failure { call, code: 201 })?;
        self.allocated += 1;
        let address = self.allocated << 20;
        self.memory.insert(address, nbytes);
        Ok(address)
    }

    fn free(&mut self, call: &'static str, address: usize) -> Outcome<()> {
        self.calls.push(Call::Free(address));
        self.outcome(call)?;
        self.memory.remove(&address).map(|_| ()).ok_or(Failure { call, code: 1 })
    }

    /// Returns the event, if it is alive in the current context.
    fn event(&mut self, call: &'static str, event: Event) -> Outcome<&mut (Context, Option<Stream>, bool)> {
        self.outcome(call)?;
        let current = self.current().ok_or(Failure { call, code: 201 })?;
        self.events.get_mut(&event).filter(|(context, ..)| *context == current).ok_or(Failure { call, code: 400 })
    }
}

#[derive(Default)]
pub(crate) struct Fake(Mutex<State>);

impl Fake {
    /// Returns the primary context of a device.
    pub fn primary(ordinal: i32) -> Context {
        Context(1000 + ordinal as usize)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Makes all later calls of a function fail; with code 0, succeed again.
    pub fn fail(&self, call: &'static str, code: u32) {
        let mut state = self.state();
        state.failing.retain(|name, _| *name != call);
        state.failing.extend((code != 0).then_some((call, code)));
    }

    /// Finishes all work in the stream.
    pub fn finish(&self, stream: Stream) {
        self.state().events.values_mut().filter(|(_, at, _)| *at == Some(stream)).for_each(|event| event.2 = true);
    }

    /// Finishes all work of every stream.
    pub fn finish_all(&self) {
        self.state().events.values_mut().for_each(|event| event.2 = true);
    }

    /// Begins the capture of a stream.
    pub fn capture(&self, stream: Stream) {
        self.state().capturing = Some(stream);
    }

    /// Ends the capture.
    pub fn end_capture(&self) {
        self.state().capturing = None;
    }

    /// Assigns a stream to a device.
    pub fn belongs(&self, stream: Stream, ordinal: i32) {
        self.state().streams.insert(stream, Self::primary(ordinal));
    }

    /// Makes a stream a blocking one.
    pub fn blocking(&self, stream: Stream) {
        self.state().blocking.push(stream);
    }

    /// Makes a stream idle.
    pub fn idle(&self, stream: Stream) {
        self.state().idle.push(stream);
    }

    /// Registers what the driver knows about an address.
    pub fn know(&self, address: usize, pointer: Pointer) {
        self.state().pointers.insert(address, pointer);
    }

    /// Returns the calls since the last `take_calls`.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }

    /// Returns the pairs of streams that were ordered.
    pub fn ordered(&self) -> Vec<(Stream, Stream)> {
        self.state().ordered.clone()
    }

    /// Returns the number of live events.
    pub fn live_events(&self) -> usize {
        self.state().events.len()
    }

    /// Returns the number of live allocations.
    pub fn live_memory(&self) -> usize {
        self.state().memory.len()
    }

    /// Returns the number of event queries.
    pub fn queries(&self) -> usize {
        self.state().queries
    }
}

impl Driver for Fake {
    fn retain_primary_context(&self, ordinal: i32) -> Outcome<Context> {
        let mut state = self.state();
        state.calls.push(Call::Retain(ordinal));
        state.outcome("cuDevicePrimaryCtxRetain")?;
        Ok(Self::primary(ordinal))
    }

    fn current_context(&self) -> Outcome<Option<Context>> {
        let state = self.state();
        state.outcome("cuCtxGetCurrent")?;
        Ok(state.current())
    }

    fn enable_peer_access(&self, context: Context) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::EnablePeerAccess(context));
        state.outcome("cuCtxEnablePeerAccess")
    }

    fn open_pool(&self, owner: i32, reader: i32) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::OpenPool(owner, reader));
        state.outcome("cuMemPoolSetAccess")
    }

    fn push_context(&self, context: Context) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::Push(context));
        state.outcome("cuCtxPushCurrent_v2")?;
        state.stack().push(context);
        Ok(())
    }

    fn pop_context(&self) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::Pop);
        state.stack().pop().map(|_| ()).ok_or(Failure { call: "cuCtxPopCurrent_v2", code: 201 })
    }

    fn create_event(&self) -> Outcome<Event> {
        let mut state = self.state();
        state.calls.push(Call::Create);
        state.outcome("cuEventCreate")?;
        let context = state.current().ok_or(Failure { call: "cuEventCreate", code: 201 })?;
        state.created += 1;
        let event = Event(state.created);
        state.events.insert(event, (context, None, false));
        Ok(event)
    }

    fn create_stream(&self) -> Outcome<Stream> {
        self.state().outcome("cuStreamCreate")?;
        // SAFETY: no driver sees this stream.
        Ok(unsafe { Stream::from_handle(0xfeed) })
    }

    fn destroy_event(&self, event: Event) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::Destroy(event));
        state.events.remove(&event).map(|_| ()).ok_or(Failure { call: "cuEventDestroy_v2", code: 400 })
    }

    fn record_event(&self, event: Event, stream: Stream) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::Record(event, stream));
        assert_eq!(state.implicit("cuEventRecord", stream), Ok(()), "it ends the capture");
        let entry = state.event("cuEventRecord", event)?;
        (entry.1, entry.2) = (Some(stream), false);
        Ok(())
    }

    fn can_record_contexts(&self) -> bool {
        true
    }

    fn record_context(&self, event: Event, context: Context) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::RecordContext(event, context));
        assert_eq!(state.implicit("cuCtxRecordEvent", Stream::LEGACY), Ok(()), "it ends the capture");
        let entry = state.event("cuCtxRecordEvent", event)?;
        (entry.1, entry.2) = (None, false);
        Ok(())
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::Wait(stream, event));
        assert_eq!(state.implicit("cuStreamWaitEvent", stream), Ok(()), "it ends the capture");
        state.outcome("cuStreamWaitEvent")?;
        // A stream may wait for an event of another context.
        let (_, earlier, _) = *state.events.get(&event).ok_or(Failure { call: "cuStreamWaitEvent", code: 400 })?;
        state.ordered.push((earlier.expect("an event is recorded before it is waited for"), stream));
        Ok(())
    }

    fn query_event(&self, event: Event) -> Outcome<bool> {
        let mut state = self.state();
        state.queries += 1;
        state.event("cuEventQuery", event).map(|(_, _, fired)| *fired)
    }

    fn is_blocking(&self, stream: Stream) -> Outcome<bool> {
        let state = self.state();
        state.outcome("cuStreamGetFlags")?;
        Ok(state.blocking.contains(&stream))
    }

    fn is_idle(&self, stream: Stream) -> Outcome<bool> {
        let state = self.state();
        state.outcome("cuStreamQuery")?;
        let ends = state.capturing == Some(stream) || state.implicit("cuStreamQuery", stream).is_err();
        assert!(!ends, "a query of a captured stream, or of the legacy stream meanwhile, ends the capture");
        Ok(state.idle.contains(&stream))
    }

    fn is_done(&self, stream: Stream) -> Outcome<bool> {
        self.is_idle(stream)
    }

    fn is_capturing(&self, stream: Stream) -> Outcome<bool> {
        let state = self.state();
        state.outcome("cuStreamIsCapturing")?;
        state.implicit("cuStreamIsCapturing", stream)?;
        Ok(state.capturing == Some(stream))
    }

    fn synchronize(&self, stream: Stream) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::Synchronize(stream));
        assert_eq!(state.implicit("cuStreamSynchronize", stream), Ok(()), "it ends the capture");
        state.outcome("cuStreamSynchronize")
    }

    fn synchronize_event(&self, event: Event) -> Outcome<()> {
        let mut state = self.state();
        state.event("cuEventSynchronize", event)?.2 = true;
        Ok(())
    }

    /// Copies nothing: the addresses are made up.
    unsafe fn copy(&self, direction: Direction, _: usize, _: usize, nbytes: usize, stream: Stream) -> Outcome<()> {
        let call = match direction {
            Direction::Up => "cuMemcpyHtoDAsync_v2",
            Direction::Down => "cuMemcpyDtoHAsync_v2",
            Direction::Within => "cuMemcpyDtoDAsync_v2",
            Direction::Across { .. } => "cuMemcpyPeerAsync",
        };
        let mut state = self.state();
        state.outcome(call)?;
        state.current().ok_or(Failure { call, code: 201 })?;
        state.calls.push(Call::Copy(direction, nbytes, stream));
        Ok(())
    }

    unsafe fn fill(&self, address: usize, byte: u8, nbytes: usize, stream: Stream) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::Fill(address, byte, nbytes, stream));
        state.current().ok_or(Failure { call: "cuMemsetD8Async", code: 201 })?;
        state.outcome("cuMemsetD8Async")
    }

    fn allocate_pinned(&self, nbytes: usize) -> Outcome<usize> {
        self.state().allocate("cuMemHostAlloc", nbytes)
    }

    unsafe fn free_pinned(&self, address: usize) -> Outcome<()> {
        self.state().free("cuMemFreeHost", address)
    }

    fn allocate(&self, nbytes: usize, _: Stream) -> Outcome<usize> {
        self.state().allocate("cuMemAllocAsync", nbytes)
    }

    unsafe fn free(&self, address: usize, _: Stream) -> Outcome<()> {
        self.state().free("cuMemFreeAsync", address)
    }

    fn current_device(&self) -> Outcome<i32> {
        let current = self.state().current();
        let ordinal = current.map(|context| context.0 as i32 - Self::primary(0).0 as i32);
        ordinal.ok_or(Failure { call: "cuCtxGetDevice", code: 201 })
    }

    fn context_of(&self, stream: Stream) -> Outcome<Context> {
        let state = self.state();
        state.outcome("cuStreamGetCtx")?;
        Ok(state.streams.get(&stream).copied().unwrap_or(Self::primary(0)))
    }

    fn exchange_capture_mode(&self, mode: u32) -> Outcome<u32> {
        let state = &mut *self.state();
        let before = state.modes.insert(thread::current().id(), mode).unwrap_or(GLOBAL);
        state.calls.push(Call::Mode(mode));
        Ok(before)
    }

    fn pointer(&self, address: usize) -> Outcome<Pointer> {
        let state = self.state();
        state.outcome("cuPointerGetAttributes")?;
        Ok(state.pointers.get(&address).copied().unwrap_or_default())
    }

    fn load_module(&self, image: &'static [u8]) -> Outcome<Module> {
        let mut state = self.state();
        state.calls.push(Call::Load(image));
        state.current().ok_or(Failure { call: "cuModuleLoadData", code: 201 })?;
        state.outcome("cuModuleLoadData").map(|()| Module(1))
    }

    fn function(&self, _: Module, name: &CStr) -> Outcome<Function> {
        self.state().outcome("cuModuleGetFunction")?;
        Ok(Function(name.to_bytes()[0].into()))
    }

    fn allow_shared(&self, function: Function, nbytes: u32) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::AllowShared(function, nbytes));
        state.outcome("cuFuncSetAttribute")
    }

    unsafe fn launch(&self, function: Function, grid: Grid, stream: Stream, _: *const c_void) -> Outcome<()> {
        let mut state = self.state();
        state.calls.push(Call::Launch(function, grid, stream));
        state.current().ok_or(Failure { call: "cuLaunchKernel", code: 201 })?;
        state.outcome("cuLaunchKernel")
    }

    fn describe(&self, code: u32) -> String {
        format!("CUDA_ERROR_FAKE (code {code})")
    }
}

/// A buffer without bytes that counts its drops, and can panic in the drop.
pub(crate) struct Counted {
    pub drops: Arc<AtomicUsize>,
    pub panics: bool,
}

impl Counted {
    pub fn boxed(drops: &Arc<AtomicUsize>) -> Box<dyn DeviceBuffer> {
        Box::new(Self { drops: Arc::clone(drops), panics: false })
    }
}

// SAFETY: there are no bytes, and nothing changes.
unsafe impl DeviceBuffer for Counted {
    fn address(&self) -> usize {
        0
    }
    fn len(&self) -> usize {
        0
    }
    fn device(&self) -> Device {
        Device::cuda(0)
    }
    fn access(&self) -> Access {
        Access::ReadWrite
    }
    fn stream(&self) -> Option<Stream> {
        None
    }
    fn reuse(&self) -> Reuse {
        Reuse::Unknown
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.drops.fetch_add(1, SeqCst);
        assert!(!self.panics, "planned panic in the drop");
    }
}

/// Waits until another thread has made the condition true.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < limit, "still not true after 20 s: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}
