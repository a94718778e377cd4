//! A model of streams: each has a clock, and a buffer checks at its drop that its owner's stream waits for every use.

use crate::common::{GPU, Item, Office, READER};
use bridge_core::{
    Access, Adapter, Consumer, DType, Deferred, Device, DeviceBuffer, Error, ErrorKind, Export, Flush, Layout, Lease,
    Offer, Options, Ordering, Profile, Result, Reuse, Stream, Strides, transfer_all,
};
use std::collections::HashMap;
use std::sync::Arc;

#[cfg(shuttle)]
use shuttle::sync::{Mutex, MutexGuard};
#[cfg(not(shuttle))]
use std::sync::{Mutex, MutexGuard};

/// What happens in a step of a model.
#[derive(Default)]
pub struct State {
    /// For each stream, how much work of each stream is done before its next work.
    pub clocks: HashMap<Stream, HashMap<Stream, u64>>,
    /// For each buffer, its owner's stream and the work that used it: stream and number.
    pub uses: Vec<(Stream, Vec<(Stream, u64)>)>,
    /// How often each buffer was dropped.
    pub drops: Vec<usize>,
    pub orders: Vec<(Stream, Stream)>,
    pub deferred_releases: usize,
    pub captured: Vec<Stream>,
    pub destroyed: Vec<Stream>,
    pub fails: bool,
    /// Whether a call has failed or found a capture, so that memory may have been leaked.
    pub excused: bool,
    pub wrong: Vec<String>,
}

impl State {
    pub fn work(&mut self, stream: Stream) -> u64 {
        let own = self.clocks.entry(stream).or_default().entry(stream).or_default();
        *own += 1;
        *own
    }

    pub fn check(&mut self, buffer: usize) {
        let (owner, uses) = &self.uses[buffer];
        let before = self.clocks.entry(*owner).or_default();
        let late = uses.iter().filter(|(stream, number)| before.get(stream).is_none_or(|done| done < number));
        self.wrong.extend(late.map(|(stream, _)| format!("buffer {buffer} was returned before its use in {stream}")));
    }
}

#[derive(Clone, Default)]
pub struct Model {
    pub state: Arc<Mutex<State>>,
    pub flushes: Arc<Mutex<Vec<Flush>>>,
    pub later: Arc<Mutex<Vec<Deferred>>>,
}

impl Model {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn tick(&self) {
        let due = std::mem::take(&mut *self.flushes.lock().unwrap());
        due.into_iter().for_each(|flush| flush());
    }

    pub fn end_capture(&self) {
        self.state().captured.clear();
        let mut waiting = std::mem::take(&mut *self.later.lock().unwrap());
        assert!(waiting.iter_mut().all(|attempt| attempt()), "no stream is captured");
    }
}

// SAFETY: the tests know what it does not do: their memory is only numbers, or of the host.
unsafe impl Ordering for Model {
    unsafe fn order(&self, _: Device, earlier: Stream, later: Stream) -> Result<()> {
        let mut state = self.state();
        if state.fails {
            state.excused = true;
            return Err(Error::new(ErrorKind::Driver, "planned"));
        }
        let dead = [earlier, later].into_iter().filter(|stream| state.destroyed.contains(stream));
        let dead: Vec<_> = dead.map(|stream| format!("{stream} was ordered after it was destroyed")).collect();
        state.wrong.extend(dead);
        match [earlier, later].iter().filter(|stream| state.captured.contains(stream)).count() {
            0 => (),
            1 => {
                state.excused = true;
                return Err(Error::new(ErrorKind::Captured, "planned"));
            }
            _ => {
                state.wrong.push(format!("the wait of {later} for {earlier} became a part of a graph"));
                return Ok(());
            }
        }
        let done = state.clocks.get(&earlier).cloned().unwrap_or_default();
        let clock = state.clocks.entry(later).or_default();
        for (stream, number) in done {
            let known = clock.entry(stream).or_default();
            *known = number.max(*known);
        }
        state.orders.push((earlier, later));
        Ok(())
    }

    unsafe fn release_later(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        // SAFETY: the caller's promise.
        unsafe { self.release_all_later(device, stream, vec![buffer]) };
    }

    unsafe fn release_all_later(&self, _: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
        {
            let mut state = self.state();
            state.deferred_releases += 1;
            if state.captured.contains(&stream) {
                state.excused = true;
                return buffers.into_iter().for_each(std::mem::forget);
            }
        }
        drop(buffers);
    }

    unsafe fn defer(&self, _: Device, stream: Stream, mut attempt: Deferred) {
        if self.state().captured.contains(&stream) {
            self.later.lock().unwrap().push(attempt);
        } else {
            attempt();
        }
    }

    unsafe fn is_captured(&self, _: Device, stream: Stream) -> Option<bool> {
        Some(self.state().captured.contains(&stream))
    }

    fn flush_later(&self, flush: Flush) {
        self.flushes.lock().unwrap().push(flush);
    }
}

/// A buffer that checks its drop.
struct Checked {
    model: Model,
    number: usize,
    address: usize,
    owner: Stream,
    reuse: Reuse,
}

// SAFETY: there is no memory, and no test touches the address.
unsafe impl DeviceBuffer for Checked {
    fn address(&self) -> usize {
        self.address
    }
    fn len(&self) -> usize {
        4
    }
    fn device(&self) -> Device {
        GPU
    }
    fn access(&self) -> Access {
        Access::ReadWrite
    }
    fn stream(&self) -> Option<Stream> {
        Some(self.owner)
    }
    fn reuse(&self) -> Reuse {
        self.reuse
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        let mut state = self.model.state();
        state.drops[self.number] += 1;
        state.check(self.number);
    }
}

/// Exports numbered buffers.
struct Producer {
    model: Model,
    office: Office,
    /// The bytes from one buffer to the next: 0 for buffers at one address.
    apart: usize,
}

impl Producer {
    fn address(&self, number: usize) -> usize {
        0x10000 + number * self.apart
    }
}

/// The number of a buffer, its owner's stream, and when its memory is reused.
pub type Numbered = (usize, Stream, Reuse);

// SAFETY: it only exports memory that nothing reads.
unsafe impl Adapter for Producer {
    type Tensor = Numbered;

    fn profile(&self) -> &Profile {
        &self.office.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.office.consumer()
    }

    fn export(&self, &(number, owner, reuse): &Numbered) -> Result<Export> {
        let buffer = Checked { model: self.model.clone(), number, address: self.address(number), owner, reuse };
        self.model.state().work(owner);
        Export::new(DType::FLOAT32, Layout::new(DType::FLOAT32, &[1], None, 0)?, buffer)
    }

    fn import(&self, _: Offer) -> Result<Numbered> {
        Err(Error::new(ErrorKind::Argument, "it only exports"))
    }
}

/// A batch that has been converted.
pub struct Batch {
    pub model: Model,
    from: Producer,
    pub to: Office,
    pub leases: Vec<Option<Lease>>,
}

impl Batch {
    pub fn new(tensors: &[(Stream, Reuse)]) -> Self {
        Self::apart(0x100, tensors)
    }

    /// A batch whose buffers begin so many bytes apart.
    pub fn apart(apart: usize, tensors: &[(Stream, Reuse)]) -> Self {
        let model = Model::default();
        let from = Producer { model: model.clone(), office: Office::new(Strides::Any), apart };
        let mut batch = Self { model, from, to: Office::new(Strides::Any), leases: Vec::new() };
        batch.leases = batch.convert(tensors).into_iter().map(Some).collect();
        {
            let state = batch.model.state();
            let exported = state.uses.iter().map(|(owner, _)| *owner).collect::<Vec<_>>();
            for owner in exported {
                let (last, seen) =
                    (state.clocks[&owner][&owner], state.clocks.get(&READER).and_then(|c| c.get(&owner)));
                assert!(owner == READER || seen == Some(&last), "the reader waits for the last work of {owner}");
            }
        }
        batch
    }

    /// Makes buffers, with the next numbers, and takes them across.
    pub fn convert(&self, tensors: &[(Stream, Reuse)]) -> Vec<Lease> {
        let first = {
            let mut state = self.model.state();
            state.uses.extend(tensors.iter().map(|(owner, _)| (*owner, Vec::new())));
            let count = state.uses.len();
            state.drops.resize(count, 0);
            count - tensors.len()
        };
        let numbered = tensors.iter().enumerate().map(|(index, (owner, reuse))| (first + index, *owner, *reuse));
        let numbered: Vec<Numbered> = numbered.collect();
        let tensors: Vec<(&dyn Adapter<Tensor = Numbered>, _)> =
            numbered.iter().map(|tensor| (&self.from as _, tensor)).collect();
        let ordering: Arc<dyn Ordering> = Arc::new(self.model.clone());
        let converted = transfer_all(&tensors, &self.to, &ordering, &Options::default()).expect("it converts");
        let leases = converted.into_iter().map(|(item, _)| match item {
            Item::Leased(lease) => lease,
            Item::Own(_) => unreachable!("import returns leases"),
        });
        leases.collect()
    }

    /// Uses a view in a stream, which is recorded unless it is the one of the import.
    pub fn touch(&self, number: usize, stream: Stream) {
        if self.leases[number].is_some() {
            assert_eq!(self.work(number, stream), usize::from(stream != READER));
        }
    }

    /// Uses a view in a stream, also after its lease was handed on. Returns the number of views that the use was recorded
    /// for.
    pub fn work(&self, number: usize, stream: Stream) -> usize {
        let views = match stream {
            READER => 0,
            _ => self.to.side.used(self.from.address(number), stream, || None),
        };
        let mut state = self.model.state();
        let work = state.work(stream);
        state.uses[number].1.push((stream, work));
        views
    }

    pub fn drop_on(&mut self, number: usize, current: Option<Stream>) {
        *self.to.side.current.lock().unwrap() = current;
        drop(self.leases[number].take());
    }

    pub fn returns(&self) -> Vec<(Stream, Stream)> {
        let state = self.model.state();
        state.orders.iter().filter(|(earlier, _)| *earlier == READER).copied().collect()
    }

    pub fn drops(&self) -> Vec<usize> {
        self.model.state().drops.clone()
    }
}
