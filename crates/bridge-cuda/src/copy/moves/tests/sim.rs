//! A link without a device. Its streams are as late as streams can be: work runs when the host waits for it and no
//! earlier, and of two streams that do not wait for each other the later work is the first to run.

use super::*;
use crate::Event;
use std::collections::HashMap;

/// Work in a stream.
pub type Work = Box<dyn FnOnce() + Send>;

/// A stream of a device.
pub type Place = (Device, Stream);

/// What work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Copy,
    Launch,
    Fill,
}

/// Work, and that which runs before it, by number.
pub struct Node {
    pub place: Place,
    pub kind: Kind,
    pub work: Option<Work>,
    pub after: Vec<usize>,
}

#[derive(Default)]
pub struct State {
    pub nodes: Vec<Node>,
    /// What the next work in a stream waits for.
    pub ends: HashMap<Place, Vec<usize>>,
    /// Marks by number, and what they wait for.
    pub events: HashMap<usize, Vec<usize>>,
    pub submitted: usize,
    pub done: usize,
    /// How many streams were made, two for each lane.
    pub streams: usize,
    pub made: usize,
    /// Memory that was freed, with other bytes than those that were there.
    pub freed: Vec<Box<[u128]>>,
    /// Live memory, by address.
    pub memory: HashMap<usize, Box<[u128]>>,
    /// How much of it is memory of the device.
    pub blocks: usize,
    /// Pinned memory that belongs to the test.
    pub pinned: HashSet<usize>,
    pub copies: Vec<(Device, Device, usize)>,
    /// The pieces of each launch.
    pub launches: Vec<usize>,
    /// Streams that waited for one another, the earlier first.
    pub orders: Vec<[(Device, Stream); 2]>,
    pub waits: usize,
    pub captured: bool,
    /// Calls until one fails.
    pub left: Option<usize>,
    /// Copies at once in a stream without pending work.
    pub makes_at_once: bool,
    /// Fails to.
    pub fails_at_once: bool,
    /// Claims that every event is reached.
    pub lies: bool,
}

#[derive(Default)]
pub struct Sim(Mutex<State>);

impl Sim {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Counts a call, which may be the one that fails.
    pub fn call(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.state();
        match &mut state.left {
            Some(0) => return Err(Error::new(ErrorKind::Driver, "planned failure")),
            Some(left) => *left -= 1,
            None => (),
        }
        Ok(state)
    }

    pub fn submit(state: &mut State, (place, kind): (Place, Kind), work: Work) {
        let after = state.ends.insert(place, vec![state.nodes.len()]).unwrap_or_default();
        state.nodes.push(Node { place, kind, work: Some(work), after });
        state.submitted += 1;
    }

    /// Runs work and what comes before it.
    pub fn run(state: &mut State, until: &[usize]) {
        let mut wanted = until.to_vec();
        while let Some(number) = wanted.last().copied() {
            let node = &mut state.nodes[number];
            if node.work.is_some() && !node.after.is_empty() {
                wanted.append(&mut node.after);
                continue;
            }
            wanted.pop();
            if let Some(work) = node.work.take() {
                work();
                state.done += 1;
            }
        }
    }

    /// Runs all work, the latest first that waits for nothing.
    pub fn finish(&self) {
        let state = &mut *self.state();
        let is_done = |state: &State, number: &usize| state.nodes[*number].work.is_none();
        let is_ready =
            |state: &State, node: &Node| node.work.is_some() && node.after.iter().all(|number| is_done(state, number));
        while let Some(number) = state.nodes.iter().rposition(|node| is_ready(state, node)) {
            Self::run(state, &[number]);
        }
        state.freed.clear();
    }

    /// Overwrites memory in stream order.
    pub fn garble(state: &mut State, place: Place, (start, nbytes): (usize, usize)) {
        // SAFETY: the memory is kept until all work has run.
        let fill = move || unsafe { at_mut::<u8>(start).write_bytes(0xef, nbytes) };
        Self::submit(state, (place, Kind::Fill), Box::new(fill));
    }

    pub fn allocate_bytes(state: &mut State, nbytes: usize) -> usize {
        let mut memory = vec![0xabab_u128; nbytes.div_ceil(16)].into_boxed_slice();
        let address = memory.as_mut_ptr().expose_provenance();
        state.memory.insert(address, memory);
        address
    }
}

impl Link for Sim {
    unsafe fn copy(&self, from: (Device, usize), to: (Device, usize), nbytes: usize, stream: Stream) -> Result<()> {
        let mut state = self.call()?;
        state.copies.push((from.0, to.0, nbytes));
        let place = (if is_host(from.0) { to.0 } else { from.0 }, stream);
        let (from, to) = (from.1, to.1);
        // SAFETY: the promises of `copy`.
        Self::submit(
            &mut state,
            (place, Kind::Copy),
            Box::new(move || unsafe { at::<u8>(from).copy_to(at_mut(to), nbytes) }),
        );
        Ok(())
    }

    unsafe fn copy_at_once(
        &self,
        from: (Device, usize),
        to: (Device, usize),
        nbytes: usize,
        stream: Stream,
    ) -> Result<bool> {
        let device = if is_host(from.0) { to.0 } else { from.0 };
        let mut state = self.call()?;
        let is_idle =
            |state: &State| state.nodes.iter().all(|node| node.place != (device, stream) || node.work.is_none());
        if !state.makes_at_once || !is_idle(&state) {
            return Ok(false);
        }
        if state.fails_at_once {
            return Err(Error::new(ErrorKind::Driver, "memory that is pinned in part"));
        }
        state.copies.push((from.0, to.0, nbytes));
        // SAFETY: the promises of `copy_at_once`.
        unsafe { at::<u8>(from.1).copy_to(at_mut(to.1), nbytes) };
        Ok(true)
    }

    fn new_stream(&self, device: Device) -> Result<Stream> {
        let state = &mut *self.call()?;
        state.streams += 1;
        let number = (state.streams - 1) / 2;
        Ok(own(device, number).1)
    }

    unsafe fn record(&self, device: Device, stream: Stream) -> Result<Event> {
        let mut state = self.call()?;
        state.made += 1;
        let (number, end) = (state.made, state.ends.get(&(device, stream)).cloned().unwrap_or_default());
        state.events.insert(number, end);
        // SAFETY: this implementation has made the number.
        Ok(unsafe { Event::new(number) })
    }

    fn is_complete(&self, _: Device, event: &Event) -> Result<bool> {
        let state = self.call()?;
        Ok(state.lies || state.events[&event.number()].iter().all(|number| state.nodes[*number].work.is_none()))
    }

    fn wait(&self, _: Device, event: &Event) -> Result<()> {
        let mut state = self.call()?;
        state.waits += 1;
        if !state.lies {
            let until = state.events[&event.number()].clone();
            Self::run(&mut state, &until);
        }
        Ok(())
    }

    fn release(&self, _: Device, event: Event) {
        self.state().events.remove(&event.number()).expect("an event is released once");
    }

    unsafe fn poison(&self, device: Device, address: usize, nbytes: usize, stream: Stream) -> Result<()> {
        let fill = move || {
            // SAFETY: the block is freed by later work of the same queue.
            unsafe { at_mut::<u8>(address).write_bytes(poison::BYTE, nbytes) };
            poison::filled();
        };
        Self::submit(&mut self.state(), ((device, stream), Kind::Fill), Box::new(fill));
        Ok(())
    }

    unsafe fn is_captured(&self, _: Device, _: Stream) -> Result<bool> {
        Ok(self.call()?.captured)
    }

    fn is_pinned(&self, address: usize, _: usize) -> Result<bool> {
        Ok(self.call()?.pinned.contains(&address))
    }

    fn allocate_pinned(&self, _: Device, nbytes: usize) -> Result<usize> {
        Ok(Self::allocate_bytes(&mut *self.call()?, nbytes))
    }

    unsafe fn free_pinned(&self, _: Device, address: usize) -> Result<()> {
        self.state().memory.remove(&address).expect("memory is freed once");
        Ok(())
    }

    unsafe fn allocate(&self, device: Device, nbytes: usize, stream: Stream) -> Result<usize> {
        let mut state = self.call()?;
        state.blocks += 1;
        let address = Self::allocate_bytes(&mut state, nbytes);
        // It is that of an earlier owner until the stream is there.
        Self::garble(&mut state, (device, stream), (address, nbytes));
        Ok(address)
    }

    unsafe fn free(&self, device: Device, address: usize, stream: Stream) -> Result<()> {
        let mut state = self.state();
        let mut memory = state.memory.remove(&address).expect("memory is freed once");
        state.blocks -= 1;
        let bytes = (memory.as_mut_ptr().expose_provenance(), size_of_val(&*memory));
        state.freed.push(memory);
        // The next owner has it after the work that uses it.
        Self::garble(&mut state, (device, stream), bytes);
        Ok(())
    }
}

/// Returns the stream of a device in the nth lane that was made.
pub fn own(device: Device, lane: usize) -> Place {
    // SAFETY: no driver sees this stream.
    (device, unsafe { Stream::from_handle(0xb0 + device.index as u64 + 0x10 * lane as u64) })
}
