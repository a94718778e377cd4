//! Streams whose work runs later, and the order among them.

use super::clock::Clock;
use super::memory::{Access, Memory};
use crate::habits;
use crate::model::Random;
use bridge_core::{Deferred, Device, DeviceBuffer, Error, ErrorKind, Flush, Result, Stream};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// A piece of work, which a graph runs again.
pub(super) type Work = Arc<dyn Fn(&mut Memory) + Send + Sync>;

/// What was captured, by the number of the captured stream. The first is the one in which the capture began.
enum Node {
    Run(usize, Vec<Access>, Work),
    Delay(usize),
    Wait { earlier: usize, later: usize },
}

/// The work that was captured.
#[derive(Default)]
pub(super) struct Graph {
    nodes: Vec<Node>,
    /// Number of captured streams.
    streams: usize,
}

/// A capture that is pending.
pub(super) struct Capture {
    streams: Vec<usize>,
    nodes: Vec<Node>,
}

impl Capture {
    /// Returns the number of a captured stream.
    fn number(&self, index: usize) -> Option<usize> {
        self.streams.iter().position(|captured| *captured == index)
    }

    /// Makes a captured stream wait for another one, which becomes a captured one.
    pub(super) fn wait(&mut self, earlier: usize, later: usize) {
        let mut number = |index| {
            self.number(index).unwrap_or_else(|| {
                self.streams.push(index);
                self.streams.len() - 1
            })
        };
        let node = Node::Wait { earlier: number(earlier), later: number(later) };
        self.nodes.push(node);
    }
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

pub(super) struct Queue {
    /// `None` after it was destroyed, when its work still runs, and for one whose handle also names others.
    stream: Option<Stream>,
    /// Whether it waits for the legacy stream, and that one for it.
    pub(super) blocking: bool,
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

pub(super) struct State {
    memory: Memory,
    pub(super) queues: Vec<Queue>,
    /// The queue that [`Stream::PER_THREAD`] means on a thread.
    per_thread: HashMap<ThreadId, usize>,
    /// Handles of destroyed streams, which new streams reuse.
    handles: Vec<Stream>,
    /// The work that the host has waited for.
    host: Clock,
    pub(super) releases: Vec<(Event, Box<dyn DeviceBuffer>)>,
    capture: Option<Capture>,
    /// What returns memory after the capture.
    pub(super) deferred: Vec<Deferred>,
    /// What the ordering is to call in a moment.
    pub(super) flushes: Vec<Flush>,
    /// Whether it is called now.
    pub(super) flushing: bool,
    found: Vec<String>,
    random: Random,
}

/// The simulated device. Clones are the same device.
#[derive(Clone)]
pub struct SimDevice(Arc<Mutex<State>>);

bridge_core::debug_fields!(impl[] SimDevice);

/// The index of the legacy stream.
pub(super) const LEGACY: usize = 0;

/// The most pieces of work that run between two calls of the host.
const PROGRESS: usize = 3;

impl SimDevice {
    /// An extension device in DLPack's list (`kDLExtDev`).
    pub const DEVICE: Device = habits::DEVICE;

    /// A device that schedules work by this seed. It has a default stream.
    pub fn new(seed: u64) -> Self {
        let device = Self(Arc::new(Mutex::new(State {
            memory: Memory::default(),
            queues: Vec::new(),
            per_thread: HashMap::new(),
            handles: Vec::new(),
            host: Clock::default(),
            releases: Vec::new(),
            capture: None,
            deferred: Vec::new(),
            flushes: Vec::new(),
            flushing: false,
            found: Vec::new(),
            random: Random::new(seed),
        })));
        device.made(true);
        device
    }

    /// Makes a stream that the default one does not wait for.
    pub fn stream(&self) -> Stream {
        self.made(false)
    }

    /// Makes a stream that waits for the default one, and that one for it.
    pub fn blocking_stream(&self) -> Stream {
        self.made(true)
    }

    /// Makes a stream. The first one is the default one, [`Stream::LEGACY`].
    fn made(&self, blocking: bool) -> Stream {
        let mut state = self.lock();
        let number = state.queues.len() as u64;
        let stream = state.handles.pop().unwrap_or(match number {
            0 => Stream::LEGACY,
            // Lower handles are CUDA's names of default streams.
            // SAFETY: no driver sees this stream.
            number => unsafe { Stream::from_handle(0x100 * number) },
        });
        state.queue(Some(stream), blocking);
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
        state.capture = Some(Capture { streams: vec![index], nodes: Vec::new() });
        Ok(())
    }

    /// Ends the capture, and returns memory that waits for that.
    pub(super) fn end_capture(&self) -> Graph {
        let mut state = self.lock();
        let graph = state.capture.take().map(|Capture { streams, nodes }| Graph { nodes, streams: streams.len() });
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
        let mut state = self.lock();
        let first = state.outside_capture(stream)?;
        let mut streams = vec![first];
        for _ in 1..graph.streams {
            let other = state.queue(None, false);
            state.wait(first, other);
            streams.push(other);
        }
        for node in &graph.nodes {
            match node {
                Node::Run(number, accesses, work) => {
                    state.submit(streams[*number], accesses, Task::Run(Arc::clone(work)));
                }
                Node::Delay(number) => state.submit(streams[*number], &[], Task::Delay),
                Node::Wait { earlier, later } => state.wait(streams[*earlier], streams[*later]),
            }
        }
        streams[1..].iter().for_each(|other| state.wait(*other, first));
        Ok(())
    }

    /// Runs all work, returns the memory that waits for it, and drops the released buffers.
    pub fn drain(&self) {
        loop {
            let mut state = self.lock();
            for stream in 0..state.queues.len() {
                let tick = state.queues[stream].put_in;
                state.advance(stream, tick);
                state.host.see(stream, tick);
            }
            state.memory.forget_past();
            let done = state.releases.is_empty() && state.flushes.is_empty();
            drop(state);
            if done {
                return;
            }
            // Dropping a view may release the buffer that it was a view of.
            self.flush();
            self.drop_released();
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits work to a stream. The accesses are judged at once: all earlier work is already known.
    pub(super) fn submit(&self, stream: Stream, accesses: &[Access], work: Work) -> Result<()> {
        let mut state = self.lock();
        let index = state.allowed(stream)?;
        match state.captured(index) {
            Some((capture, number)) => capture.nodes.push(Node::Run(number, accesses.to_vec(), work)),
            None => state.submit(index, accesses, Task::Run(work)),
        }
        Ok(())
    }

    /// Submits work that takes its time to a stream.
    pub(super) fn delay(&self, stream: Stream) -> Result<()> {
        let mut state = self.lock();
        let index = state.allowed(stream)?;
        match state.captured(index) {
            Some((capture, number)) => capture.nodes.push(Node::Delay(number)),
            None => state.submit(index, &[], Task::Delay),
        }
        Ok(())
    }

    /// Waits on the host for all work in a stream.
    pub(super) fn synchronize(&self, stream: Stream) -> Result<()> {
        let mut state = self.lock();
        let index = state.outside_capture(stream)?;
        state.before_point(index);
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
        state.before_point(index);
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
        self.drop_released();
    }

    /// Calls what is to be called in a moment.
    fn flush(&self) {
        let mut state = self.lock();
        let flushes = std::mem::take(&mut state.flushes);
        state.flushing = true;
        drop(state);
        // Without the lock: they order streams.
        flushes.into_iter().for_each(|flush| flush());
        self.lock().flushing = false;
    }

    /// Drops the released buffers whose work is done.
    fn drop_released(&self) {
        let mut state = self.lock();
        let releases = std::mem::take(&mut state.releases);
        let (done, waiting): (Vec<_>, Vec<_>) = releases.into_iter().partition(|(event, _)| state.reached(event));
        state.releases.extend(waiting);
        drop(state);
        // Without the lock, which their owners take to give memory back.
        drop(done);
    }

    /// Makes all later work of a stream wait for all work that another one has now. Where that one is being captured,
    /// the other is from then on.
    pub(super) fn wait(&self, earlier: Stream, later: Stream) -> Result<()> {
        let mut state = self.lock();
        let (earlier, later) = (state.allowed(earlier)?, state.allowed(later)?);
        match state.captured(earlier) {
            Some((capture, _)) => capture.wait(earlier, later),
            None => state.wait(earlier, later),
        }
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
    /// Adds a queue, and returns its index.
    fn queue(&mut self, stream: Option<Stream>, blocking: bool) -> usize {
        let (waiting, clock) = (VecDeque::new(), Clock::default());
        self.queues.push(Queue { stream, blocking, waiting, put_in: 0, done: 0, clock });
        self.queues.len() - 1
    }

    pub(super) fn index(&mut self, stream: Stream) -> Result<usize> {
        if stream == Stream::PER_THREAD {
            let thread = thread::current().id();
            let known = self.per_thread.get(&thread).copied();
            let index = known.unwrap_or_else(|| self.queue(None, true));
            self.per_thread.insert(thread, index);
            return Ok(index);
        }
        let index = self.queues.iter().position(|queue| queue.stream == Some(stream));
        if index.is_none() {
            self.found.push(format!("a use of {stream}, which was destroyed"));
        }
        index.ok_or_else(|| Error::new(ErrorKind::Driver, format!("the simulated device has no {stream}")))
    }

    pub(super) fn wait(&mut self, earlier: usize, later: usize) {
        self.before_point(earlier);
        self.link(earlier, later);
    }

    /// Does what a stream waits for before a point in it is marked. A mark in the legacy stream comes after the work of
    /// every blocking one; an event recorded in one of those waits only for the work of its stream.
    fn before_point(&mut self, index: usize) {
        if index == LEGACY {
            self.wait_for_legacy(index);
        }
    }

    /// Makes new work in a stream wait for those that its kind waits for: a blocking one for the legacy stream, and that
    /// for every blocking one.
    fn wait_for_legacy(&mut self, index: usize) {
        let meets = |other: usize| other != index && (index == LEGACY || other == LEGACY);
        for other in (0..self.queues.len()).filter(|other| meets(*other)) {
            let [one, two] = [index, other].map(|index| &self.queues[index]);
            if one.blocking && two.blocking && !one.clock.has_seen(other, two.put_in) {
                self.link(other, index);
            }
        }
    }

    /// Makes a stream wait for the work that was put into another one.
    fn link(&mut self, earlier: usize, later: usize) {
        let (tick, clock) = (self.queues[earlier].put_in, self.queues[earlier].clock.clone());
        self.queues[later].clock.join(&clock);
        self.put(later, &[], Task::Wait { stream: earlier, tick });
    }

    /// Returns the capture of a stream, and its number there.
    pub(super) fn captured(&mut self, index: usize) -> Option<(&mut Capture, usize)> {
        let capture = self.capture.as_mut()?;
        let number = capture.number(index)?;
        Some((capture, number))
    }

    /// Returns whether a stream is being captured. The legacy stream counts as captured while a capture of a blocking
    /// stream forbids it.
    pub(super) fn is_captured(&self, index: usize) -> bool {
        let Some(capture) = &self.capture else { return false };
        capture.number(index).is_some() || index == LEGACY && self.forbids_legacy(capture)
    }

    fn forbids_legacy(&self, capture: &Capture) -> bool {
        capture.streams.iter().any(|captured| self.queues[*captured].blocking)
    }

    /// As [`index`](Self::index). Refuses the legacy stream while a capture forbids it.
    fn allowed(&mut self, stream: Stream) -> Result<usize> {
        let index = self.index(stream)?;
        match &self.capture {
            Some(capture) if index == LEGACY && self.forbids_legacy(capture) => Err(Error::new(
                ErrorKind::Captured,
                "a blocking stream is being captured, which forbids the legacy one",
            )),
            _ => Ok(index),
        }
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
        self.wait_for_legacy(index);
        self.put(index, accesses, task);
    }

    fn put(&mut self, index: usize, accesses: &[Access], task: Task) {
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
