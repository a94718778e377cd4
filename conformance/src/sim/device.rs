//! Streams whose work runs later, and the order among them.

use super::clock::Clock;
use super::memory::{Access, Memory};
use crate::model::Random;
use bridge_core::{Device, DeviceBuffer, DeviceKind, Error, ErrorKind, Ordering, Result, Stream};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a piece of work does.
pub(super) type Work = Box<dyn FnOnce(&mut Memory) + Send>;

enum Task {
    Run(Work),
    /// Waits for the first `tick` pieces of work of another stream.
    Wait {
        stream: usize,
        tick: u64,
    },
    /// Takes its time: everything else goes first that may.
    Delay,
}

struct Queue {
    /// `None` once it was destroyed: what is in it still runs.
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

struct State {
    memory: Memory,
    queues: Vec<Queue>,
    /// Handles of destroyed streams: the next streams get them.
    handles: Vec<Stream>,
    /// What the host knows to have happened.
    host: Clock,
    retired: Vec<(Event, Box<dyn DeviceBuffer>)>,
    found: Vec<String>,
    random: Random,
}

/// The simulated device. Clones are the same device.
#[derive(Clone)]
pub struct SimDevice(Arc<Mutex<State>>);

/// At most so many pieces of work run between two calls of the host.
const PROGRESS: usize = 3;

impl SimDevice {
    /// Its place among the devices: an extension device in DLPack's list (`kDLExtDev`).
    pub const DEVICE: Device = Device { kind: DeviceKind(12), index: 0 };

    /// A device that schedules by this seed. It has a default stream.
    pub fn new(seed: u64) -> Self {
        let device = Self(Arc::new(Mutex::new(State {
            memory: Memory::default(),
            queues: Vec::new(),
            handles: Vec::new(),
            host: Clock::default(),
            retired: Vec::new(),
            found: Vec::new(),
            random: Random::new(seed),
        })));
        device.stream();
        device
    }

    /// A new stream; the first one is the default one, [`Stream::LEGACY`].
    pub fn stream(&self) -> Stream {
        let mut state = self.lock();
        let number = state.queues.len() as u64;
        let stream = state.handles.pop().unwrap_or(match number {
            0 => Stream::LEGACY,
            // The handles below are CUDA's names for default streams.
            number => Stream::from_handle(0x100 * number),
        });
        let (waiting, clock) = (VecDeque::new(), Clock::default());
        state.queues.push(Queue { stream: Some(stream), waiting, put_in: 0, done: 0, clock });
        stream
    }

    /// Destroys a stream. Its work still runs; its handle goes to the next stream that is made.
    pub(super) fn destroy(&self, stream: Stream) {
        let mut state = self.lock();
        if let Ok(index) = state.index(stream) {
            state.queues[index].stream = None;
            state.handles.push(stream);
        }
    }

    /// What orders streams of this device.
    pub fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::new(SimOrdering(self.clone()))
    }

    /// What the checker has found since the last call.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Driver`] with what was found first.
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

    /// Runs everything, and drops what was retired behind it.
    pub fn drain(&self) {
        loop {
            let mut state = self.lock();
            for stream in 0..state.queues.len() {
                let tick = state.queues[stream].put_in;
                state.advance(stream, tick);
                state.host.see(stream, tick);
            }
            state.memory.forget_past();
            let done = state.retired.is_empty();
            drop(state);
            if done {
                return;
            }
            // A buffer that is dropped may retire the one that it was a view of.
            self.drop_retired();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts work into a stream. The accesses are judged now: what is ordered before it is known already.
    pub(super) fn submit(&self, stream: Stream, accesses: &[Access], work: Work) -> Result<()> {
        let mut state = self.lock();
        let index = state.index(stream)?;
        state.submit(index, accesses, Task::Run(work));
        Ok(())
    }

    /// Puts work that takes its time into a stream.
    pub(super) fn delay(&self, stream: Stream) -> Result<()> {
        let mut state = self.lock();
        let index = state.index(stream)?;
        state.submit(index, &[], Task::Delay);
        Ok(())
    }

    /// Lets the host wait for everything in a stream.
    pub(super) fn synchronize(&self, stream: Stream) -> Result<()> {
        let mut state = self.lock();
        let index = state.index(stream)?;
        let tick = state.queues[index].put_in;
        state.advance(index, tick);
        let clock = state.queues[index].clock.clone();
        state.host.join(&clock);
        Ok(())
    }

    /// The point behind everything that is in a stream now.
    pub(super) fn record(&self, stream: Stream) -> Result<Event> {
        let mut state = self.lock();
        let index = state.index(stream)?;
        let Queue { put_in, clock, .. } = &state.queues[index];
        Ok(Event { stream: index, tick: *put_in, clock: clock.clone() })
    }

    /// Whether the point has been reached. If so, the host knows it from now on.
    pub(super) fn reached(&self, event: &Event) -> bool {
        self.lock().reached(event)
    }

    /// Drops the retired buffers whose work is done.
    pub(super) fn drop_retired(&self) {
        let mut state = self.lock();
        let retired = std::mem::take(&mut state.retired);
        let (done, waiting): (Vec<_>, Vec<_>) = retired.into_iter().partition(|(event, _)| state.reached(event));
        state.retired.extend(waiting);
        drop(state);
        // Without the lock: their owners give memory back.
        drop(done);
    }

    /// New memory.
    pub(super) fn reserve(&self, len: usize) -> usize {
        self.lock().memory.reserve(len)
    }

    /// The block at `address` is handed out.
    pub(super) fn hand_out(&self, address: usize) {
        self.lock().memory.own(address, true);
    }

    /// The block at `address` is given back; whether it was not before.
    pub(super) fn give_back(&self, address: usize) -> bool {
        let mut state = self.lock();
        let first = state.memory.own(address, false);
        if !first {
            state.found.push(format!("that the block at {address:#x} was given back twice"));
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

    /// Runs a stream as far as `tick`, and what that waits for. Waits point backwards in time, so this ends.
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

/// Orders streams of a simulated device.
pub struct SimOrdering(SimDevice);

impl Ordering for SimOrdering {
    fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        if device != SimDevice::DEVICE {
            return Err(Error::new(ErrorKind::Driver, format!("there is no simulated device {device}")));
        }
        let mut state = self.0.lock();
        let (earlier, later) = (state.index(earlier)?, state.index(later)?);
        let (tick, clock) = (state.queues[earlier].put_in, state.queues[earlier].clock.clone());
        state.queues[later].clock.join(&clock);
        state.submit(later, &[], Task::Wait { stream: earlier, tick });
        Ok(())
    }

    fn retire(&self, _: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        match self.0.record(stream) {
            Ok(event) => self.0.lock().retired.push((event, buffer)),
            // Nothing can be known of the stream: the memory is lost rather than reused too early.
            Err(_) => std::mem::forget(buffer),
        }
    }
}

/// An access to a range of addresses.
pub(super) fn access(bytes: Range<usize>, writes: bool) -> Access {
    Access { bytes, writes }
}
