//! Publications: versions of the same tensors under a name, in memory that is used again.

use crate::allocations::{Spec, allocations};
use crate::channel::{SLICE, goes_on};
use crate::device::{self, Role};
use crate::exporter::{Exporter, Stored};
use crate::memory::{self, Writing};
use crate::message::{described, shared_arena};
use crate::names::{Client, LISTED, checked};
use crate::sync::{self, Condvar, Mutex, MutexGuard, locked, now, thread};
use crate::tensor::{Arena, IpcTensor};
use crate::wire::{Content, Segment};
use bridge_core::{Device, Error, ErrorKind, Result, Stream};
use rustix::fd::OwnedFd;
use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

/// Versions of the same tensors under a name. Each is written into memory that no process reads, a *slot*, and
/// announced when the device has finished it: a process that opens the name sees a whole version, also if this process
/// is killed at any time. A version that a newer one has displaced keeps its slot until every process that has it open
/// has dropped it.
///
/// Nothing here waits for the device. [`draft`](Self::draft) waits where no slot is free.
///
/// The drop closes it. The newest version stays until the connection to the names is closed, or until the name is
/// removed.
pub struct Publication {
    desk: Arc<Desk>,
}

bridge_core::debug_fields!(impl[] Publication: desk);

/// What the threads share.
struct Desk {
    state: Mutex<State>,
    changed: Condvar,
    /// Locked by the thread that announces: the newest version is announced last.
    turn: Mutex<()>,
    /// Weak: the program closes the connection, which ends what was put.
    client: Weak<Client>,
    /// Weak: the exporter keeps the shares, and these keep the desk.
    exporter: Weak<Exporter>,
    name: String,
    what: What,
    process: u32,
}

/// What is published.
struct What {
    specs: Vec<Spec>,
    places: Vec<usize>,
    /// Whether a store passes the versions on.
    outlives: bool,
}

bridge_core::debug_fields!(impl[] Desk: name);

struct State {
    /// The slots that no version needs.
    free: Vec<Arc<Slot>>,
    /// How many slots were given up: a store has ended that had passed them on, so other processes may still read
    /// them.
    lost: usize,
    /// Counts the versions that were to be announced.
    handed: u64,
    /// The newest of them that the devices have finished, and that is to be announced.
    finished: Option<(u64, Draft)>,
    /// The newest that was announced, or has failed.
    settled: u64,
    /// What the names call it.
    version: u64,
    failed: Option<Error>,
    is_closed: bool,
}

/// Memory for one version.
struct Slot {
    tensors: Vec<IpcTensor>,
    content: Content,
    files: Vec<Arc<OwnedFd>>,
    /// The bytes of the host that it takes.
    on_host: usize,
    devices: Vec<Device>,
    about: String,
    owners: Vec<Box<dyn Any + Send + Sync>>,
}

/// A version that is being written. If it is dropped before it is announced, it was never there.
#[must_use = "no process sees it before it is announced"]
pub struct Draft {
    /// `None` in the drop, which makes the slot free.
    slot: Option<Arc<Slot>>,
    /// Text for the processes that open the version, which describes its tree.
    tree: Option<String>,
    /// How many stores have it.
    outside: Arc<AtomicUsize>,
    desk: Arc<Desk>,
}

bridge_core::debug_fields!(impl[] Draft: desk);

impl Draft {
    /// Returns the tensors to fill, as many and of the shapes as the publication was made for. Fill all of them.
    pub fn tensors(&self) -> &[IpcTensor] {
        self.slot.as_ref().map_or(&[], |slot| &slot.tensors)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // The lock of a forked process may be held for ever.
        if self.desk.check().is_ok() {
            let slot = self.slot.take();
            let mut state = self.desk.lock();
            // Memory is freed without the lock.
            let given_up = match self.outside.load(Relaxed) {
                0 => {
                    state.free.extend(slot);
                    None
                }
                _ => {
                    state.lost += 1;
                    slot
                }
            };
            drop(state);
            drop(given_up);
            self.desk.changed.notify_all();
        }
    }
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Refuses to publish for the process that this one was forked from.
    fn check(&self) -> Result<()> {
        match self.process == sync::process() {
            true => Ok(()),
            false => {
                let text = "this process was forked from the one that publishes: publish again";
                Err(Error::new(ErrorKind::Gone, text))
            }
        }
    }

    /// Puts a version under the name. The share keeps the draft, which frees the slot at its end.
    fn put(&self, draft: Draft) -> Result<u64> {
        let (Some(slot), Some(client), Some(exporter)) =
            (draft.slot.clone(), self.client.upgrade(), self.exporter.upgrade())
        else {
            return Err(Error::new(
                ErrorKind::Gone,
                "the connection to the names is closed: connect and publish again",
            ));
        };
        let content = Content { tree: draft.tree.clone(), ..slot.content.clone() };
        let (files, outside) = (slot.files.clone(), Arc::clone(&draft.outside));
        let streams = if self.what.outlives { Vec::new() } else { slot.streams()? };
        let mut kept = Stored::finished(content, files, vec![Box::new(draft)]);
        (kept.outside, kept.streams) = (outside, streams);
        let ticket = exporter.share(kept, slot.on_host, &slot.about, LISTED)?;
        client.put_share(&exporter, &self.name, &ticket, 1)
    }

    /// Announces the version with this number, unless a newer one was announced. Returns the newest. `is_later` keeps
    /// an error for the next call.
    fn announce(&self, number: u64, draft: Draft, is_later: bool) -> Result<u64> {
        let _turn = locked(&self.turn);
        let state = self.lock();
        let (is_closed, is_newest) = (state.is_closed, state.settled < number);
        drop(state);
        let put = match (is_closed, is_newest) {
            (true, _) => Err(closed()),
            (false, true) => self.put(draft).map(Some),
            (false, false) => Ok(None),
        };
        let mut state = self.lock();
        state.settled = state.settled.max(number);
        let announced = match put {
            Ok(version) => {
                state.version = version.unwrap_or(state.version);
                Ok(state.version)
            }
            Err(error) if is_later => {
                state.failed = Some(error);
                Ok(state.version)
            }
            Err(error) => Err(error),
        };
        drop(state);
        self.changed.notify_all();
        announced
    }

    /// Announces what devices have finished, until the publication is dropped.
    fn attend(&self) {
        let mut state = self.lock();
        while !state.is_closed {
            let Some((number, draft)) = state.finished.take() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let _ = self.announce(number, draft, true);
            state = self.lock();
        }
    }

    /// Waits until something is there, at most for `time`.
    fn wait<T>(&self, time: Duration, mut found: impl FnMut(&mut State) -> Option<T>) -> Result<Option<T>> {
        self.check()?;
        let until = now().checked_add(time);
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return Err(closed());
            }
            if let Some(error) = state.failed.take() {
                return Err(error.at("an earlier version was not announced"));
            }
            if let Some(found) = found(&mut state) {
                return Ok(Some(found));
            }
            let left = until.map_or(SLICE, |until| until.saturating_duration_since(now()));
            if left.is_zero() {
                return Ok(None);
            }
            let waited = self.changed.wait_timeout(state, left.min(SLICE)).unwrap_or_else(PoisonError::into_inner);
            state = waited.0;
            if waited.1.timed_out() {
                // The program may need the lock.
                drop(state);
                goes_on()?;
                state = self.lock();
            }
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Gone, "the publication is closed: publish again")
}

/// A version that devices have yet to finish. When the last of them has, the drop hands it to the thread that announces.
struct Finishing(Option<(u64, Draft)>);

impl Drop for Finishing {
    fn drop(&mut self) {
        let Some((number, draft)) = self.0.take() else { return };
        let desk = Arc::clone(&draft.desk);
        if desk.check().is_err() {
            return;
        }
        let mut state = desk.lock();
        // Only the newest counts. A draft is dropped without the lock.
        let is_newest = !state.is_closed && state.finished.as_ref().is_none_or(|(other, _)| *other < number);
        let dropped = if is_newest { state.finished.replace((number, draft)) } else { Some((number, draft)) };
        drop(state);
        desk.changed.notify_all();
        drop(dropped);
    }
}

impl Slot {
    /// Allocates memory for compact tensors, one piece for each device.
    fn new(What { specs, places, outlives }: &What) -> Result<Self> {
        let content =
            Content { segments: Vec::new(), tensors: [].into(), points: Vec::new(), tree: None, persistent: false };
        let (tensors, files, devices, owners) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut slot = Self { tensors, content, files, on_host: 0, devices, about: String::new(), owners };
        let (mut nbytes, mut placed) = (0usize, Vec::with_capacity(specs.len()));
        // SAFETY: a version is written before it can be read.
        for (arena, tensors) in unsafe { allocations(specs, *outlives) }? {
            slot.devices.extend(Some(arena.device()).filter(|device| device::in_streams(*device)));
            let (segment, start) = slot.segment(&arena)?;
            for (index, tensor) in tensors {
                nbytes = nbytes.saturating_add(tensor.layout().nbytes());
                placed.push((index, described(&tensor, segment, start), tensor));
            }
        }
        placed.sort_by_key(|(index, ..)| *index);
        let each = || places.iter().map(|place| &placed[*place]);
        slot.content.tensors = each().map(|(_, described, _)| described.clone()).collect();
        slot.tensors = each().map(|(_, _, tensor)| tensor.clone()).collect();
        slot.about = format!("{} tensors, {nbytes} bytes", places.len());
        Ok(slot)
    }

    /// Makes memory one that can be shared. Returns its number, and where it begins.
    fn segment(&mut self, arena: &Arena) -> Result<(usize, usize)> {
        let (segment, start) = match arena.another_file()? {
            Some(file) => {
                let nbytes = arena.bytes().len();
                self.on_host = self.on_host.saturating_add(nbytes);
                memory::seal_for_others(&file)?;
                self.files.push(file);
                (Segment::File { nbytes, writing: Writing::Private }, arena.bytes().start)
            }
            None => {
                let shared = shared_arena(arena)?;
                self.files.extend(shared.files);
                self.owners.push(Box::new(shared.named));
                (shared.segment, shared.range.start)
            }
        };
        self.content.segments.push(segment);
        Ok((self.content.segments.len() - 1, start))
    }

    /// Returns the streams in which the slot is written.
    fn streams(&self) -> Result<Vec<(Device, Stream)>> {
        self.devices.iter().map(|device| Ok((*device, device::stream(*device, Role::Exporter)?))).collect()
    }
}

impl Publication {
    /// Allocates `slots` times memory for tensors of these dtypes and shapes on these devices: those of CUDA, or the
    /// host. `places` has the index of each tensor's among them: a tensor that stands at several places is kept once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for a wrong name, for fewer than two slots, and for places without a tensor or none,
    /// [`ErrorKind::OutOfMemory`], and [`ErrorKind::Device`] for a device of another kind.
    pub fn new(
        client: &Arc<Client>,
        exporter: &Arc<Exporter>,
        name: &str,
        (specs, places): (&[Spec], &[usize]),
        slots: usize,
    ) -> Result<Self> {
        let name = checked(name)?;
        if slots < 2 {
            let text = "a version is written while another one is read: publish with 2 slots or more";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        if places.is_empty() || places.iter().any(|place| *place >= specs.len()) {
            let text = "a place names no tensor, or there is none: pass tensors, and the index of one for each place";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        let what = What { specs: specs.into(), places: places.into(), outlives: client.is_persistent()? };
        let free = (0..slots).map(|_| Slot::new(&what).map(Arc::new)).collect::<Result<Vec<_>>>()?;
        let (lost, handed, settled) = (0, 0, 0);
        let state = State { free, lost, handed, finished: None, settled, version: 0, failed: None, is_closed: false };
        let (state, changed, process) = (Mutex::new(state), Condvar::new(), sync::process());
        let (client, exporter) = (Arc::downgrade(client), Arc::downgrade(exporter));
        let desk = Arc::new(Desk { state, changed, turn: Mutex::new(()), client, exporter, name, what, process });
        let attending = Arc::clone(&desk);
        let thread = thread::Builder::new().name("truebridge-ipc".into()).spawn(move || attending.attend());
        thread.map_err(|error| {
            let text = "cannot start a thread for the publication: raise the limit of processes (ulimit -u)";
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })?;
        Ok(Self { desk })
    }

    /// Returns a slot to fill, as soon as there is a free one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] where none becomes free within `time`: other processes have old versions open, or the device
    /// has yet to finish earlier ones. [`ErrorKind::Gone`] in a forked process. The error with which an earlier version
    /// was not announced.
    pub fn draft(&self, time: Duration) -> Result<Draft> {
        let found = |state: &mut State| match (state.free.pop(), state.lost.checked_sub(1)) {
            (None, Some(lost)) => {
                state.lost = lost;
                Some(None)
            }
            (slot, _) => slot.map(Some),
        };
        let found = self.desk.wait(time, found)?.ok_or_else(|| {
            let text = "other processes have old versions open, or the device has yet to finish earlier ones: drop old versions, or publish with more slots";
            Error::new(ErrorKind::Busy, text)
        })?;
        // Without memory, the slot stays lost: the next draft tries again.
        let again = |error| {
            self.desk.lock().lost += 1;
            error
        };
        let slot = found.map_or_else(|| Slot::new(&self.desk.what).map(Arc::new).map_err(again), Ok)?;
        Ok(Draft { slot: Some(slot), tree: None, outside: Arc::default(), desk: Arc::clone(&self.desk) })
    }

    /// Announces a version when the devices have finished it; in memory of the host at once, and then its number is
    /// returned. `tree` is text for the processes that open it, which describes its tree.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for a draft of another publication. Those of [`Client::put_share`] for memory of the host;
    /// for a device, the next call returns them.
    pub fn announce(&self, mut draft: Draft, tree: Option<String>) -> Result<Option<u64>> {
        self.desk.check()?;
        if !Arc::ptr_eq(&self.desk, &draft.desk) {
            let text = format!("the draft is of the publication {:?}: announce it there", draft.desk.name);
            return Err(Error::new(ErrorKind::Argument, text));
        }
        draft.tree = tree;
        let streams = draft.slot.as_ref().map_or(Ok(Vec::new()), |slot| slot.streams())?;
        let mut state = self.desk.lock();
        state.handed += 1;
        let number = state.handed;
        drop(state);
        if streams.is_empty() {
            return self.desk.announce(number, draft, false).map(Some);
        }
        device::drop_after(&streams, Arc::new(Finishing(Some((number, draft)))));
        Ok(None)
    }

    /// Waits until no version is pending, at most for `time`. Returns the newest version; `None` after that time.
    ///
    /// # Errors
    ///
    /// The error with which an earlier version was not announced; [`ErrorKind::Gone`] in a forked process.
    pub fn settled(&self, time: Duration) -> Result<Option<u64>> {
        self.desk.wait(time, |state| (state.settled == state.handed).then_some(state.version))
    }

    /// Returns the newest version that was announced; 0 before the first, and in a forked process.
    pub fn version(&self) -> u64 {
        if self.desk.check().is_ok() { self.desk.lock().version } else { 0 }
    }

    /// Stops announcing. A call that waits ends with [`ErrorKind::Gone`].
    pub fn close(&self) {
        if self.desk.check().is_ok() {
            self.end();
            // What is being announced is, when this returns.
            drop(locked(&self.desk.turn));
        }
    }

    fn end(&self) {
        let mut state = self.desk.lock();
        state.is_closed = true;
        // A draft is dropped without the lock.
        let finished = state.finished.take();
        drop(state);
        self.desk.changed.notify_all();
        drop(finished);
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        // Without waiting: the thread that announces may wait for a lock of the program.
        if self.desk.check().is_ok() {
            self.end();
        }
    }
}

#[cfg(test)]
mod tests;
