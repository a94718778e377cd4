//! Streams whose work runs later, and the order among them.

use super::clock::Clock;
use super::copies::SimCopies;
use super::memory::{Access, Memory};
use crate::fault::Fault;
use crate::model::Random;
use bridge_core::{
    Copies, Deferred, Device, DeviceBuffer, DeviceKind, Error, ErrorKind, Flush, Ordering, Result, Stream,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A piece of work, which a graph runs again.
pub(super) type Work = Arc<dyn Fn(&mut Memory) + Send + Sync>;

/// The work that was captured, with what it accesses.
pub(super) type Graph = Vec<(Vec<Access>, Work)>;

/// A capture that is under way.
struct Capture {
    stream: usize,
    graph: Graph,
}

enum Task {
    Run(Work),
    /// Waits for the first `tick` pieces of work of another stream.
    Wait {
        stream: usize,
        tick: u64,
    },
    /// Takes its time: all other work that is ready runs first.
    Delay,
}

struct Queue {
    /// `None` after it was destroyed: its work still runs.
    stream: Option<Stream>,
    waiting: VecDeque<Task>,
    put_in: u64,
    done: u64,
    clock: Clock,
}

/// A point in a stream.
pub(super) struct Event {
    stream: usize,
    tick: u64,
    clock: Clock,
}

impl Event {
    /// Returns the point that many pieces of work of the same stream later.
    pub(super) fn after(self, more: u64) -> Self {
        let Self { stream, tick, mut clock } = self;
        clock.see(stream, tick + more);
        Self { stream, tick: tick + more, clock }
    }
}

struct State {
    memory: Memory,
    queues: Vec<Queue>,
    /// Handles of destroyed streams, which new streams reuse.
    handles: Vec<Stream>,
    /// The work that the host has waited for.
    host: Clock,
    retired: Vec<(Event, Box<dyn DeviceBuffer>)>,
    capture: Option<Capture>,
    /// What returns memory after the capture.
    deferred: Vec<Deferred>,
    /// What the ordering is to call in a moment.
    soon: Vec<Flush>,
    /// Whether it is called now.
    flushing: bool,
    found: Vec<String>,
    random: Random,
}

/// The simulated device. Clones are the same device.
#[derive(Clone)]
pub struct SimDevice(Arc<Mutex<State>>);

bridge_core::debug_fields!(impl[] SimDevice);

/// The most pieces of work that run between two calls of the host.
const PROGRESS: usize = 3;

impl SimDevice {
    /// An extension device in DLPack's list (`kDLExtDev`).
    pub const DEVICE: Device = Device { kind: DeviceKind(12), index: 0 };

    /// A device that schedules work by this seed. It has a default stream.
    pub fn new(seed: u64) -> Self {
        let device = Self(Arc::new(Mutex::new(State {
            memory: Memory::default(),
            queues: Vec::new(),
            handles: Vec::new(),
            host: Clock::default(),
            retired: Vec::new(),
            capture: None,
            deferred: Vec::new(),
            soon: Vec::new(),
            flushing: false,
            found: Vec::new(),
            random: Random::new(seed),
        })));
        device.stream();
        device
    }

    /// Makes a stream. The first one is the default one, [`Stream::LEGACY`].
    pub fn stream(&self) -> Stream {
        let mut state = self.lock();
        let number = state.queues.len() as u64;
        let stream = state.handles.pop().unwrap_or(match number {
            0 => Stream::LEGACY,
            // Lower handles are CUDA's names of default streams.
            // SAFETY: no driver sees this stream.
            number => unsafe { Stream::from_handle(0x100 * number) },
        });
        let (waiting, clock) = (VecDeque::new(), Clock::default());
        state.queues.push(Queue { stream: Some(stream), waiting, put_in: 0, done: 0, clock });
        stream
    }

    /// Destroys a stream. Its work still runs; the next new stream reuses its handle.
    pub(super) fn destroy(&self, stream: Stream) {
        let mut state = self.lock();
        if let Ok(index) = state.index(stream) {
            state.queues[index].stream = None;
            state.handles.push(stream);
        }
    }

    /// Returns what orders streams of this device, with copies.
    pub fn ordering(&self) -> Arc<dyn Ordering> {
        self.ordering_with(None)
    }

    /// As [`ordering`](Self::ordering), with a fault in it or in its copies.
    pub(crate) fn ordering_with(&self, fault: Option<Fault>) -> Arc<dyn Ordering> {
        Arc::new(SimOrdering { device: self.clone(), copies: SimCopies::new(self.clone(), fault), fault })
    }

    /// Reports what the checker has found since the last call.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Driver`] with the first finding.
    pub fn check(&self) -> Result<()> {
        let found = std::mem::take(&mut self.lock().found);
        match &found[..] {
            [] => Ok(()),
            [first, rest @ ..] => {
                let text = format!("the checker of the simulated device found {first}, and {} more", rest.len());
                Err(Error::new(ErrorKind::Driver, text))
            }
        }
    }

    /// Captures what is submitted to a stream from now on, instead of running it.
    pub(super) fn begin_capture(&self, stream: Stream) -> Result<()> {
        let mut state = self.lock();
        let index = state.index(stream)?;
        state.capture = Some(Capture { stream: index, graph: Graph::new() });
        Ok(())
    }

    /// Ends the capture, and returns memory that waits for that.
    pub(super) fn end_capture(&self) -> Graph {
        let mut state = self.lock();
        let graph = state.capture.take().map(|capture| capture.graph);
        let deferred = std::mem::take(&mut state.deferred);
        drop(state);
        // Without the lock: they order streams. After the capture each of them is done at once.
        for mut attempt in deferred {
            attempt();
        }
        graph.unwrap_or_default()
    }

    /// Submits the work of a graph.
    pub(super) fn replay(&self, stream: Stream, graph: &Graph) -> Result<()> {
        graph.iter().try_for_each(|(accesses, work)| self.submit(stream, accesses, Arc::clone(work)))
    }

    /// Runs all work, returns the memory that waits for it, and drops the retired buffers.
    pub fn drain(&self) {
        loop {
            let mut state = self.lock();
            for stream in 0..state.queues.len() {
                let tick = state.queues[stream].put_in;
                state.advance(stream, tick);
                state.host.see(stream, tick);
            }
            state.memory.forget_past();
            let done = state.retired.is_empty() && state.soon.is_empty();
            drop(state);
            if done {
                return;
            }
            // Dropping a view may retire the buffer that it was a view of.
            self.flush();
            self.drop_retired();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits work to a stream. The accesses are judged at once: all earlier work is already known.
    pub(super) fn submit(&self, stream: Stream, accesses: &[Access], work: Work) -> Result<()> {
        let mut state = self.lock();
        let index = state.index(stream)?;
        match &mut state.capture {
            Some(capture) if capture.stream == index => capture.graph.push((accesses.to_vec(), work)),
            _ => state.submit(index, accesses, Task::Run(work)),
        }
        Ok(())
    }

    /// Submits work that takes its time to a stream.
    pub(super) fn delay(&self, stream: Stream) -> Result<()> {
        let mut state = self.lock();
        let index = state.outside_capture(stream)?;
        state.submit(index, &[], Task::Delay);
        Ok(())
    }

    /// Waits on the host for all work in a stream.
    pub(super) fn synchronize(&self, stream: Stream) -> Result<()> {
        let mut state = self.lock();
        let index = state.outside_capture(stream)?;
        let tick = state.queues[index].put_in;
        state.advance(index, tick);
        let clock = state.queues[index].clock.clone();
        state.host.join(&clock);
        Ok(())
    }

    /// Records a point after all work that is in a stream now.
    pub(super) fn record(&self, stream: Stream) -> Result<Event> {
        let mut state = self.lock();
        let index = state.outside_capture(stream)?;
        let Queue { put_in, clock, .. } = &state.queues[index];
        Ok(Event { stream: index, tick: *put_in, clock: clock.clone() })
    }

    /// Returns whether the point has been reached. From then on that work lies in the host's past.
    pub(super) fn reached(&self, event: &Event) -> bool {
        self.lock().reached(event)
    }

    /// Lets time pass, as between two calls of the host: memory that waits a moment may be returned.
    pub(super) fn pass_time(&self) {
        if self.lock().random.below(2) == 0 {
            self.flush();
        }
        self.drop_retired();
    }

    /// Calls what is to be called in a moment.
    fn flush(&self) {
        let mut state = self.lock();
        let flushes = std::mem::take(&mut state.soon);
        state.flushing = true;
        drop(state);
        // Without the lock: they order streams.
        flushes.into_iter().for_each(|flush| flush());
        self.lock().flushing = false;
    }

    /// Drops the retired buffers whose work is done.
    fn drop_retired(&self) {
        let mut state = self.lock();
        let retired = std::mem::take(&mut state.retired);
        let (done, waiting): (Vec<_>, Vec<_>) = retired.into_iter().partition(|(event, _)| state.reached(event));
        state.retired.extend(waiting);
        drop(state);
        // Without the lock, which their owners take to give memory back.
        drop(done);
    }

    /// Makes all later work of a stream wait for all work that another one has now.
    pub(super) fn wait(&self, earlier: Stream, later: Stream) -> Result<()> {
        let mut state = self.lock();
        let (earlier, later) = (state.index(earlier)?, state.index(later)?);
        state.wait(earlier, later);
        Ok(())
    }

    /// Writes bytes from the host, at once, into a block that no work reads or writes.
    pub(super) fn write(&self, address: usize, bytes: &[u8]) -> Result<()> {
        let mut state = self.lock();
        let known = state.memory.bytes(address..address + bytes.len());
        let known = known.ok_or_else(|| Error::new(ErrorKind::Driver, format!("no block has {address:#x}")))?;
        known.copy_from_slice(bytes);
        Ok(())
    }

    /// Allocates new memory.
    pub(super) fn reserve(&self, len: usize) -> usize {
        self.lock().memory.reserve(len)
    }

    /// Marks the block at `address` as handed out.
    pub(super) fn hand_out(&self, address: usize) {
        self.lock().memory.own(address, true);
    }

    /// Marks the block at `address` as released. Returns `false`, and reports it, where it was already.
    pub(super) fn give_back(&self, address: usize) -> bool {
        let mut state = self.lock();
        let first = state.memory.own(address, false);
        if !first {
            state.found.push(format!("that the block at {address:#x} was released twice"));
        }
        first
    }
}

impl State {
    fn index(&mut self, stream: Stream) -> Result<usize> {
        let index = self.queues.iter().position(|queue| queue.stream == Some(stream));
        if index.is_none() {
            self.found.push(format!("a use of {stream}, which was destroyed"));
        }
        index.ok_or_else(|| Error::new(ErrorKind::Driver, format!("the simulated device has no {stream}")))
    }

    fn wait(&mut self, earlier: usize, later: usize) {
        let (tick, clock) = (self.queues[earlier].put_in, self.queues[earlier].clock.clone());
        self.queues[later].clock.join(&clock);
        self.submit(later, &[], Task::Wait { stream: earlier, tick });
    }

    fn is_captured(&self, index: usize) -> bool {
        self.capture.as_ref().is_some_and(|capture| capture.stream == index)
    }

    /// As [`index`](Self::index). Refuses a stream that is being captured: its work has no place in time.
    fn outside_capture(&mut self, stream: Stream) -> Result<usize> {
        let index = self.index(stream)?;
        if self.is_captured(index) {
            return Err(Error::new(ErrorKind::Captured, format!("{stream} is being captured")));
        }
        Ok(index)
    }

    fn submit(&mut self, index: usize, accesses: &[Access], task: Task) {
        let Self { memory, queues, host, found, .. } = self;
        let queue = &mut queues[index];
        queue.put_in += 1;
        queue.clock.join(host);
        queue.clock.see(index, queue.put_in);
        found
            .extend(accesses.iter().filter_map(|access| memory.judge(access, index, queue.put_in, &queue.clock).err()));
        queue.waiting.push_back(task);
        for _ in 0..self.random.below(PROGRESS + 1) {
            let any = self.random.below(self.queues.len());
            if !matches!(self.queues[any].waiting.front(), Some(Task::Delay)) && self.ready(any) {
                self.run_one(any);
            }
        }
    }

    fn ready(&self, index: usize) -> bool {
        match self.queues[index].waiting.front() {
            Some(Task::Wait { stream, tick }) => self.queues[*stream].done >= *tick,
            Some(_) => true,
            None => false,
        }
    }

    fn run_one(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        let Some(task) = queue.waiting.pop_front() else { return };
        queue.done += 1;
        if let Task::Run(work) = task {
            work(&mut self.memory);
        }
    }

    /// Runs a stream up to `tick`, and the work that it waits for. Waits point backwards in time, so this terminates.
    fn advance(&mut self, index: usize, tick: u64) {
        while self.queues[index].done < tick {
            if let Some(Task::Wait { stream, tick }) = self.queues[index].waiting.front() {
                let (stream, tick) = (*stream, *tick);
                self.advance(stream, tick);
            }
            self.run_one(index);
        }
    }

    fn reached(&mut self, event: &Event) -> bool {
        let reached = self.queues[event.stream].done >= event.tick;
        if reached {
            self.host.join(&event.clock);
        }
        reached
    }
}

/// Orders streams of a simulated device, and copies on it.
pub struct SimOrdering {
    device: SimDevice,
    copies: SimCopies,
    fault: Option<Fault>,
}

bridge_core::debug_fields!(impl[] SimOrdering: fault);

// SAFETY: the simulated device checks each use of its memory itself.
unsafe impl Ordering for SimOrdering {
    fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        if device != SimDevice::DEVICE {
            return Err(Error::new(ErrorKind::Driver, format!("there is no simulated device {device}")));
        }
        if self.fault == Some(Fault::UpdateNotAwaited) && self.copies.tables.launched_in(earlier) {
            return Ok(());
        }
        let mut state = self.device.lock();
        let (earlier, later) = (state.index(earlier)?, state.index(later)?);
        if state.is_captured(earlier) != state.is_captured(later) {
            let text = "one of the streams is being captured, and the other is not";
            let ignored = self.fault == Some(Fault::CaptureIgnored);
            return if ignored { Ok(()) } else { Err(Error::new(ErrorKind::Captured, text)) };
        }
        if self.fault == Some(Fault::FlushNotOrdered) && state.flushing {
            return Ok(());
        }
        state.wait(earlier, later);
        Ok(())
    }

    fn retire(&self, _: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        match self.device.record(stream) {
            Ok(event) => self.device.lock().retired.push((event, buffer)),
            // The stream is unknown: the memory is leaked rather than reused too early.
            Err(_) => std::mem::forget(buffer),
        }
    }

    fn is_captured(&self, _: Device, stream: Stream) -> Option<bool> {
        let mut state = self.device.lock();
        // A destroyed stream is reported.
        state.index(stream).ok().map(|index| state.is_captured(index))
    }

    fn defer(&self, _: Device, stream: Stream, mut attempt: Deferred) {
        if !attempt() && self.is_captured(SimDevice::DEVICE, stream) == Some(true) {
            self.device.lock().deferred.push(attempt);
        }
    }

    fn soon(&self, flush: Flush) {
        if self.fault != Some(Fault::FlushForgotten) {
            self.device.lock().soon.push(flush);
        }
    }

    fn retire_all(&self, device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
        if self.fault == Some(Fault::GroupReleasedEarly) {
            return drop(buffers);
        }
        buffers.into_iter().for_each(|buffer| self.retire(device, stream, buffer));
    }

    fn copies(&self) -> Option<&dyn Copies> {
        Some(&self.copies)
    }
}

/// Returns an access to a range of addresses.
pub(super) fn access(bytes: Range<usize>, writes: bool) -> Access {
    Access { bytes, writes }
}
