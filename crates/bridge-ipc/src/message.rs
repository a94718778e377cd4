//! Messages: the tensors of one ticket.

use crate::allocations;
use crate::channel::{SLICE, goes_on};
use crate::device::{self, Shared};
use crate::exporter::{Exporter, Stored};
use crate::importer::{self, Import, Leases, Open};
use crate::memory::{self, Writing};
use crate::tensor::{Arena, Ipc, IpcTensor};
use crate::ticket::Ticket;
use crate::wire::{Content, Described, MAX_FILES, Segment};
use bridge_core::{
    Adapter, Device, Error, ErrorKind, Export, Failed, Options, Ordering, Plan, Result, Stream, Transfer, plan,
    transfer, transfer_all,
};
use rustix::fd::OwnedFd;
use serde::Serialize;
use std::any::Any;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// The most bytes of the description of a tree.
const MAX_TREE: usize = 1 << 20;

/// The most tensors of a ticket.
const MAX_TENSORS: usize = 1 << 16;

/// Tensors that one ticket will open together.
///
/// A tensor that another process has shared with this one is taken in place if it said [`Writing::Shared`] and this one
/// does too, or if it said [`Writing::Never`] and this one does not say [`Writing::Shared`]. Every other tensor on the
/// host is copied once, into memory that can be shared.
#[must_use = "nothing is shared before share is called"]
pub struct Message {
    writing: Option<Writing>,
    /// Whether a store is to keep the memory beyond the end of this process.
    outlives: bool,
    segments: Vec<Part>,
    tensors: Vec<Described>,
    transfers: Vec<Transfer>,
    /// The tensors, which keep the segments that they lie in.
    owners: Vec<Box<dyn Any + Send + Sync>>,
    /// The streams in which the owners of device memory work.
    streams: Vec<(Device, Stream)>,
    /// What was copied, and all elements, in bytes.
    bytes: usize,
    nbytes: usize,
    about: String,
    /// Whether an allocator may use some of the memory again when its tensor is dropped.
    is_reused: bool,
}

bridge_core::debug_fields!(impl[] Message: writing, bytes);

/// How the memory of a tensor leaves the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Transport {
    /// In place: it is memory of another process, which is passed on.
    Passed,
    /// In place, by a handle of the driver for the block of the allocator.
    Handle,
    /// In place, by file descriptors for the virtual memory.
    Files,
    /// In place, by a file descriptor for the allocator's pool.
    Pool,
    /// By a copy into memory that can be shared.
    Copy,
}

/// Returns how the memory of a tensor would leave the process in a message with this `writing`.
///
/// # Errors
///
/// Those of [`Adapter::export`] and [`check`](crate::check), and the driver's.
pub fn transport<F>(from: &dyn Adapter<Tensor = F>, tensor: &F, writing: Option<Writing>) -> Result<Transport> {
    let exported = from.export(tensor)?;
    importer::check(&exported)?;
    let in_place = plan(&exported, Ipc::passing().profile(), &Options::default())? == Plan::ZeroCopy;
    Ok(match in_place {
        false => Transport::Copy,
        true if importer::containing(&exported)
            .is_some_and(|(import, number)| is_passed(import.segment(number), writing)) =>
        {
            Transport::Passed
        }
        true => match device::shared(exported.device(), &exported.layout().extent_at(exported.data(), None)?)?
            .map(|shared| shared.segment)
        {
            Some(Segment::Handle { .. }) => Transport::Handle,
            Some(Segment::Files { .. }) => Transport::Files,
            Some(Segment::Pool { .. }) => Transport::Pool,
            _ => Transport::Copy,
        },
    })
}

/// Returns who may write to memory of this device, where a message says `writing`.
fn asked_of(writing: Option<Writing>, device: Device) -> Writing {
    let usual = if device::in_streams(device) { Writing::Shared } else { Writing::Private };
    writing.unwrap_or(usual)
}

/// Returns whether memory of another process is passed on in place. Only this process sees what it has written to a
/// private mapping.
fn is_passed(open: &Open, writing: Option<Writing>) -> bool {
    match (open.segment.writing(), asked_of(writing, open.device())) {
        (Writing::Never, asked) => asked != Writing::Shared,
        (Writing::Shared, asked) => asked == Writing::Shared,
        (Writing::Private, _) => false,
    }
}

/// A segment of a message.
enum Part {
    /// Fresh memory of the host.
    Fresh(Arc<Arena>),
    /// Fresh memory of a device.
    Filled(Shared, Arc<Arena>),
    /// Memory of this process that a store can take over, and that is to be shared in place.
    Given(Arc<Arena>),
    /// One of another process, by its lease and its number in that process.
    Imported(Arc<Import>, usize),
    /// Memory of a device.
    Shared(Shared),
}

/// The memory that a tensor is shared from.
enum Place {
    /// Its own memory, in a segment that begins at this address.
    There(usize, usize),
    /// A copy on this device, of so many bytes.
    Copy(Device, usize),
}

impl Message {
    /// Packs tensors, of one framework or of several. `writing` says who may write to them; `None`: on the host each
    /// process for itself ([`Writing::Private`]), on a device all ([`Writing::Shared`]). `options` are those of
    /// [`transfer`].
    ///
    /// # Errors
    ///
    /// Those of [`transfer`], [`ErrorKind::Argument`] for more tensors than a ticket may have, at the first of them
    /// that is too many, and [`ErrorKind::OutOfMemory`], at the largest copy.
    pub fn of<F>(
        tensors: &[(&dyn Adapter<Tensor = F>, &F)],
        writing: Option<Writing>,
        ordering: &Arc<dyn Ordering>,
        options: &Options,
    ) -> Result<Self, Failed> {
        Self::packed(tensors, (writing, false), ordering, options)
    }

    /// Packs tensors for a store ([`Names::persistent`](crate::Names::persistent)), which keeps them beyond the end of
    /// this process: by copies, but for tensors in memory of a store.
    ///
    /// # Errors
    ///
    /// Those of [`of`](Self::of).
    pub fn outliving<F>(
        tensors: &[(&dyn Adapter<Tensor = F>, &F)],
        writing: Option<Writing>,
        ordering: &Arc<dyn Ordering>,
        options: &Options,
    ) -> Result<Self, Failed> {
        Self::packed(tensors, (writing, true), ordering, options)
    }

    fn packed<F>(
        tensors: &[(&dyn Adapter<Tensor = F>, &F)],
        (writing, outlives): (Option<Writing>, bool),
        ordering: &Arc<dyn Ordering>,
        options: &Options,
    ) -> Result<Self, Failed> {
        if tensors.len() > MAX_TENSORS {
            let text = format!("a ticket has at most {MAX_TENSORS} tensors: share them in parts");
            return Err(Failed::new(MAX_TENSORS, Error::new(ErrorKind::Argument, text)));
        }
        let mut message = Self {
            writing,
            outlives,
            segments: Vec::new(),
            tensors: Vec::new(),
            transfers: Vec::new(),
            owners: Vec::new(),
            streams: Vec::new(),
            bytes: 0,
            nbytes: 0,
            about: String::new(),
            is_reused: false,
        };
        let ipc = Ipc::passing();
        let places = message.places(tensors, &ipc, options)?;
        let there = |index: &usize| matches!(places[*index], Place::There(..));
        let there: Vec<usize> = (0..tensors.len()).filter(there).collect();
        let in_place: Vec<_> = there.iter().map(|index| tensors[*index]).collect();
        let converted = transfer_all(&in_place, &ipc, ordering, options)
            .map_err(|Failed { index, error, .. }| Failed::new(there[index], error))?;
        let mut converted = converted.into_iter();
        let mut copying: Option<(Arc<Arena>, Ipc)> = None;
        for (index, ((from, tensor), place)) in tensors.iter().zip(places).enumerate() {
            let failed = |error| Failed::new(index, error);
            let done = match place {
                Place::There(segment, start) => {
                    let (tensor, done) = converted.next().expect("each is converted");
                    message.keep(tensor, segment, start);
                    done
                }
                Place::Copy(device, nbytes) => {
                    let (segment, start, arena) = message.allocate(device, nbytes).map_err(failed)?;
                    // The copies of a message mostly lie in one arena.
                    let known = copying.take().filter(|(known, _)| Arc::ptr_eq(known, &arena));
                    let (_, into) = copying.insert(known.unwrap_or_else(|| (Arc::clone(&arena), Ipc::into(arena))));
                    let (copy, done) = transfer(*from, into, tensor, ordering, options).map_err(failed)?;
                    match device::in_streams(device) {
                        true => message.keep(copy, segment, start),
                        // Nothing of this process writes to the host's when it is shared.
                        false => message.describe(&copy, segment, start),
                    }
                    done
                }
            };
            message.transfers.push(done);
        }
        Ok(message)
    }

    /// Returns the memory that each tensor is shared from, and allocates memory for all copies on a device.
    fn places<F>(
        &mut self,
        tensors: &[(&dyn Adapter<Tensor = F>, &F)],
        ipc: &Ipc,
        options: &Options,
    ) -> Result<Vec<Place>, Failed> {
        let mut places = Vec::with_capacity(tensors.len());
        // The bytes of all copies on a device, and the largest copy with its number.
        let mut totals: Vec<(Device, usize, (usize, usize))> = Vec::new();
        let mut leases = importer::is_leasing().then(Leases::default);
        for (index, (from, tensor)) in tensors.iter().enumerate() {
            let place = self.place(*from, tensor, (ipc, &mut leases), options);
            let place = place.map_err(|error| Failed::new(index, error))?;
            if let Place::Copy(device, nbytes) = place {
                let at = totals.iter().position(|total| total.0 == device).unwrap_or_else(|| {
                    totals.push((device, 0, (nbytes, index)));
                    totals.len() - 1
                });
                let (_, all, largest) = &mut totals[at];
                *all = all.saturating_add(Arena::capacity_for(device, nbytes));
                *largest = (nbytes, index).max(*largest);
            }
            places.push(place);
        }
        for (device, nbytes, (_, index)) in totals.into_iter().filter(|total| total.1 > 0) {
            self.allocate(device, nbytes).map_err(|error| Failed::new(index, error))?;
        }
        Ok(places)
    }

    /// Returns the memory that a tensor is shared from.
    fn place<F>(
        &mut self,
        from: &dyn Adapter<Tensor = F>,
        tensor: &F,
        (ipc, leases): (&Ipc, &mut Option<Leases>),
        options: &Options,
    ) -> Result<Place> {
        let exported = from.export(tensor)?.permuted(options.permute.as_ref())?;
        leases.as_mut().map_or(Ok(()), |leases| leases.check(&exported))?;
        if self.about.is_empty() {
            let (dtype, shape, device) = (exported.dtype(), exported.layout().shape(), exported.device());
            self.about = format!("{} {dtype} {shape:?} on {device}", from.profile().name);
        }
        let in_place = plan(&exported, ipc.profile(), options).is_ok_and(|plan| plan == Plan::ZeroCopy);
        let there = match in_place {
            true => match self.imported(&exported) {
                Some(found) => Some(found),
                None if self.outlives => self.given(&exported)?,
                None => self.shareable(&exported, &exported.layout().extent_at(exported.data(), None)?)?,
            },
            false => None,
        };
        let (device, nbytes) = (options.device.unwrap_or(exported.device()), exported.layout().nbytes());
        let device = if device::in_streams(device) { device } else { Device::CPU };
        Ok(there.map_or(Place::Copy(device, nbytes), |(segment, start)| Place::There(segment, start)))
    }

    /// Returns what was done with each tensor.
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    /// Describes a tensor, and keeps it.
    fn keep(&mut self, tensor: IpcTensor, segment: usize, start: usize) {
        self.describe(&tensor, segment, start);
        self.waits_for(tensor.device(), tensor.stream());
        self.owners.push(Box::new(tensor));
    }

    fn waits_for(&mut self, device: Device, stream: Option<Stream>) {
        let stream = stream.map(|stream| (device, stream)).filter(|stream| !self.streams.contains(stream));
        self.streams.extend(stream);
    }

    /// Returns the segment of device memory that the tensor lies in, at the addresses `extent`, and where it begins, if
    /// it can be shared in place.
    fn shareable(&mut self, exported: &Export, extent: &Range<usize>) -> Result<Option<(usize, usize)>> {
        // The stream of the owner now: what it writes later is waited for when the ticket is opened.
        let stream = exported.buffer().stream().map(Stream::on_any_thread);
        let around = |(at, part): (usize, &Part)| match part {
            Part::Shared(known) if known.range.start <= extent.start && extent.end <= known.range.end => {
                Some((at, known.range.start))
            }
            _ => None,
        };
        if let Some(found) = self.segments.iter().enumerate().find_map(around).filter(|_| !extent.is_empty()) {
            self.waits_for(exported.device(), stream);
            return Ok(Some(found));
        }
        let Some(shared) = device::shared(exported.device(), extent)? else { return Ok(None) };
        self.check_writing()?;
        self.waits_for(exported.device(), stream);
        let start = shared.range.start;
        self.owners.push(Box::new(Arc::clone(&shared.named)));
        self.segments.push(Part::Shared(shared));
        Ok(Some((self.segments.len() - 1, start)))
    }

    /// Returns the segment of another process that the tensor lies in, and where it begins, if it can be taken in
    /// place.
    fn imported(&mut self, exported: &Export) -> Option<(usize, usize)> {
        let (import, number) =
            importer::containing(exported).filter(|(import, _)| import.is_persistent() || !self.outlives)?;
        let open = import.segment(number);
        if !is_passed(open, self.writing) {
            return None;
        }
        let start = open.bytes().start;
        let same =
            |part: &Part| matches!(part, Part::Imported(known, n) if Arc::ptr_eq(known, &import) && *n == number);
        let at = self.segments.iter().position(same).unwrap_or_else(|| {
            self.segments.push(Part::Imported(import, number));
            self.segments.len() - 1
        });
        Some((at, start))
    }

    /// Returns the segment that a store can take over in place and that the tensor lies in, and where it begins.
    fn given(&mut self, exported: &Export) -> Result<Option<(usize, usize)>> {
        let Some(arena) = allocations::given(exported, self.asked_of(exported.device())) else { return Ok(None) };
        let start = arena.bytes().start;
        let same = |part: &Part| matches!(part, Part::Given(known) if Arc::ptr_eq(known, &arena));
        if let Some(at) = self.segments.iter().position(same) {
            return Ok(Some((at, start)));
        }
        if device::in_streams(arena.device()) {
            self.check_writing()?;
        }
        self.is_reused |= allocations::is_reused(&arena);
        self.segments.push(Part::Given(arena));
        Ok(Some((self.segments.len() - 1, start)))
    }

    /// Returns the number of a fresh segment on a device with room for this many bytes, and where it begins.
    fn allocate(&mut self, device: Device, nbytes: usize) -> Result<(usize, usize, Arc<Arena>)> {
        let mut fresh = self.segments.iter().enumerate().filter_map(|(at, part)| match part {
            Part::Fresh(arena) if arena.device() == device => Some((at, arena.bytes().start, arena)),
            Part::Filled(shared, arena) if arena.device() == device => Some((at, shared.range.start, arena)),
            _ => None,
        });
        if let Some((at, start, arena)) = fresh.next_back().filter(|(_, _, arena)| arena.has(nbytes)) {
            return Ok((at, start, Arc::clone(arena)));
        }
        if self.segments.len() == MAX_FILES {
            let text = "the tensors lie in too many pieces of memory for one ticket: make the message with room for all of them";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        let capacity = Arena::capacity_for(device, nbytes);
        let in_streams = device::in_streams(device);
        if in_streams {
            self.check_writing()?;
        }
        let arena = Arc::new(Arena::new(device, capacity, self.outlives)?);
        let (part, start) = match in_streams {
            true => {
                let shared = shared_arena(&arena)?;
                self.owners.push(Box::new(Arc::clone(&shared.named)));
                let start = shared.range.start;
                (Part::Filled(shared, Arc::clone(&arena)), start)
            }
            false => {
                self.bytes = self.bytes.saturating_add(capacity);
                (Part::Fresh(Arc::clone(&arena)), arena.bytes().start)
            }
        };
        self.segments.push(part);
        Ok((self.segments.len() - 1, start, arena))
    }

    /// Refuses private memory of a device.
    fn check_writing(&self) -> Result<()> {
        match self.writing {
            Some(Writing::Private) => {
                let text = "memory of a device cannot be private: share it with writing=\"shared\" or \"never\"";
                Err(Error::new(ErrorKind::Argument, text))
            }
            _ => Ok(()),
        }
    }

    /// Returns who may write to memory of this device.
    fn asked_of(&self, device: Device) -> Writing {
        asked_of(self.writing, device)
    }

    fn describe(&mut self, tensor: &IpcTensor, segment: usize, start: usize) {
        self.nbytes = self.nbytes.saturating_add(tensor.layout().nbytes());
        self.tensors.push(described(tensor, segment, start));
    }

    /// Shares the tensors, for a ticket that expires after `time`. `tree` is text for the process that opens the
    /// ticket, which describes their tree.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] where the limits of `exporter` are reached, [`ErrorKind::Argument`] for a tree of more than
    /// a mebibyte or an infinite time, and errors of the system.
    pub fn share(self, exporter: &Exporter, time: Duration, tree: Option<String>) -> Result<Ticket> {
        if tree.as_ref().is_some_and(|tree| tree.len() > MAX_TREE) {
            let text = format!("the tree takes more than {MAX_TREE} bytes to describe: share it in parts");
            return Err(Error::new(ErrorKind::Argument, text));
        }
        let about = match self.tensors.len() {
            1 => self.about,
            n => format!("{n} tensors, {} bytes", self.nbytes),
        };
        let (mut segments, mut files) = (Vec::new(), Vec::new());
        for part in self.segments {
            let (segment, own) = finished(part, self.writing)?;
            segments.push(segment);
            files.extend(own);
        }
        let content = Content { segments, tensors: self.tensors.into(), points: Vec::new(), tree, persistent: false };
        let (streams, is_finished) = if self.outlives { (Vec::new(), true) } else { (self.streams, false) };
        let (outside, is_reused, owners) = (Arc::default(), self.is_reused, self.owners);
        let kept = Stored { content, files, streams, is_finished, outside, is_reused, owners };
        exporter.share(kept, self.bytes, &about, time)
    }

    /// Waits until the work on the tensors has run. A message for a store is shared after that: a store waits for no
    /// device.
    ///
    /// # Errors
    ///
    /// Those of the program ([`while_waiting`](crate::while_waiting)).
    pub fn wait(&self) -> Result<()> {
        let (running, finished) = mpsc::channel::<Infallible>();
        device::drop_after(&self.streams, Arc::new(running));
        while finished.recv_timeout(SLICE) == Err(RecvTimeoutError::Timeout) {
            goes_on()?;
        }
        Ok(())
    }
}

/// Describes a tensor in a segment that begins at `start`.
pub(crate) fn described(tensor: &IpcTensor, segment: usize, start: usize) -> Described {
    let layout = tensor.layout();
    let offset = if layout.numel() == 0 { 0 } else { tensor.data() - start };
    let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
    Described { segment, offset, dtype: tensor.dtype(), shape, strides }
}

/// Returns how fresh memory of a device leaves the process.
pub(crate) fn shared_arena(arena: &Arena) -> Result<Shared> {
    device::shared(arena.device(), &arena.bytes())?.ok_or_else(|| {
        let text = "the driver cannot share this memory with other processes: share a copy on the host";
        Error::new(ErrorKind::Driver, text)
    })
}

/// Returns a segment as other processes will see it, with its descriptors.
fn finished(part: Part, writing: Option<Writing>) -> Result<(Segment, Vec<Arc<OwnedFd>>)> {
    match part {
        Part::Imported(import, number) => {
            let open = import.segment(number);
            let segment = open.segment.clone();
            let as_asked = writing.unwrap_or(segment.writing());
            Ok((segment.with_writing(as_asked), open.files.clone()))
        }
        Part::Shared(Shared { segment, files, .. }) | Part::Filled(Shared { segment, files, .. }, _) => {
            Ok((segment.with_writing(writing.unwrap_or(Writing::Shared)), files))
        }
        Part::Given(arena) => match arena.another_file()? {
            Some(file) => {
                let segment = Segment::File { nbytes: arena.bytes().len(), writing: Writing::Private };
                Ok((segment, vec![file]))
            }
            None => finished(Part::Shared(shared_arena(&arena)?), writing),
        },
        Part::Fresh(arena) => {
            let (nbytes, writing) = (arena.bytes().len(), writing.unwrap_or_default());
            let arena = Arc::into_inner(arena).ok_or_else(|| {
                Error::new(ErrorKind::Framework, "a copy into shared memory is still in use: please report this")
            })?;
            let file =
                arena.into_file().ok_or_else(|| Error::new(ErrorKind::Framework, "the copy is not on the host"))?;
            let file = memory::seal(file, writing)?;
            Ok((Segment::File { nbytes, writing }, vec![Arc::new(file)]))
        }
    }
}
