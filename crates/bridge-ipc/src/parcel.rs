//! Parcels: the tensors of one ticket.

use crate::exporter::{Exporter, Kept};
use crate::importer::{self, Import};
use crate::memory::{self, Writing};
use crate::tensor::{Arena, Ipc, IpcTensor};
use crate::ticket::Ticket;
use crate::wire::{Content, Described, MAX_FILES, Segment};
use bridge_core::{Adapter, Error, ErrorKind, Lent, Options, Ordering, Result, Transfer, transfer};
use rustix::fd::OwnedFd;
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// The most bytes of the description of a tree.
const MAX_TREE: usize = 1 << 20;

/// The most tensors of a ticket.
const MAX_TENSORS: usize = 1 << 16;

/// Tensors that one ticket will open together.
///
/// A tensor that lies in memory which another process shares with this one already is taken in place, unless this
/// process may have changed it for itself alone. Every other tensor on the host is copied once, into memory that can be
/// shared.
pub struct Parcel {
    writing: Writing,
    segments: Vec<Part>,
    tensors: Vec<Described>,
    /// The tensors that lie in foreign segments, which they keep.
    owners: Vec<Box<dyn Any + Send + Sync>>,
    bytes: usize,
    about: String,
}

/// A segment of a parcel.
enum Part {
    Fresh(Arc<Arena>),
    /// One of another process, by its lease and its number there.
    Foreign(Arc<Import>, usize),
}

impl Parcel {
    /// Makes an empty parcel, with memory for copies of so many bytes: the sum of [`Parcel::room_for`] over the
    /// tensors. A tensor that does not fit takes memory of its own.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`].
    pub fn new(writing: Writing, room: usize) -> Result<Self> {
        let fresh = if room > 0 { vec![Part::Fresh(Arc::new(Arena::new(room)?))] } else { Vec::new() };
        let bytes = room;
        Ok(Self { writing, segments: fresh, tensors: Vec::new(), owners: Vec::new(), bytes, about: String::new() })
    }

    /// Returns the bytes that the copy of a tensor of so many bytes takes.
    pub fn room_for(nbytes: usize) -> usize {
        Arena::room_for(nbytes)
    }

    /// Adds a tensor, and returns what was done with it. `options` are those of [`transfer`].
    ///
    /// # Errors
    ///
    /// Those of [`transfer`], and [`ErrorKind::Argument`] for more tensors than a ticket may have.
    pub fn add<F>(
        &mut self,
        from: &dyn Adapter<Tensor = F>,
        tensor: &F,
        ordering: &Arc<dyn Ordering>,
        options: &Options,
    ) -> Result<Transfer> {
        if self.tensors.len() == MAX_TENSORS {
            let text = format!("a ticket has at most {MAX_TENSORS} tensors: share them in parts");
            return Err(Error::new(ErrorKind::Argument, text));
        }
        let lent = from.export(tensor)?;
        if self.about.is_empty() {
            self.about =
                format!("{} {} {:?} on {}", from.profile().name, lent.dtype(), lent.layout().shape(), lent.device());
        }
        match self.foreign(&lent, options) {
            Some((segment, start)) => {
                drop(lent);
                let (tensor, done) = transfer(from, &Ipc::new(), tensor, ordering, options)?;
                self.describe(&tensor, segment, start);
                self.owners.push(Box::new(tensor));
                Ok(done)
            }
            None => {
                let (segment, arena) = self.room(lent.layout().nbytes())?;
                drop(lent);
                let (tensor, done) = transfer(from, &Ipc::into(Arc::clone(&arena)), tensor, ordering, options)?;
                self.describe(&tensor, segment, arena.bytes().start);
                Ok(done)
            }
        }
    }

    /// Returns the segment of another process that the tensor lies in, and where it begins, if it can be taken in
    /// place.
    fn foreign(&mut self, lent: &Lent, options: &Options) -> Option<(usize, usize)> {
        if options.copy == Some(true) || lent.pending().is_some() {
            return None;
        }
        let (import, number) = importer::containing(lent)?;
        let open = import.segment(number);
        // Of a private mapping only this process sees what it has written.
        let as_is = match open.writing {
            Writing::Never => self.writing != Writing::Shared,
            Writing::Shared => self.writing == Writing::Shared,
            Writing::Private => false,
        };
        if !as_is {
            return None;
        }
        let start = open.bytes().start;
        let same = |part: &Part| matches!(part, Part::Foreign(known, n) if Arc::ptr_eq(known, &import) && *n == number);
        let at = self.segments.iter().position(same).unwrap_or_else(|| {
            self.segments.push(Part::Foreign(import, number));
            self.segments.len() - 1
        });
        Some((at, start))
    }

    /// Returns the number of a fresh segment with room for so many bytes.
    fn room(&mut self, nbytes: usize) -> Result<(usize, Arc<Arena>)> {
        let mut fresh = self.segments.iter().enumerate().filter_map(|(n, part)| match part {
            Part::Fresh(arena) => Some((n, arena)),
            Part::Foreign(..) => None,
        });
        if let Some((n, arena)) = fresh.next_back().filter(|(_, arena)| arena.has(nbytes)) {
            return Ok((n, Arc::clone(arena)));
        }
        if self.segments.len() == MAX_FILES {
            let text = "the tensors lie in too many pieces of memory for one ticket: make the parcel with room for all of them";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        let room = Arena::room_for(nbytes);
        let arena = Arc::new(Arena::new(room)?);
        self.bytes = self.bytes.saturating_add(room);
        self.segments.push(Part::Fresh(Arc::clone(&arena)));
        Ok((self.segments.len() - 1, arena))
    }

    fn describe(&mut self, tensor: &IpcTensor, segment: usize, start: usize) {
        let layout = tensor.layout();
        let offset = if layout.numel() == 0 { 0 } else { tensor.data() - start };
        let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
        self.tensors.push(Described { segment, offset, dtype: tensor.dtype(), shape, strides });
    }

    /// Shares the tensors, for a ticket that expires after `time`. `tree` says how they lie in a tree, in words for
    /// the process that opens the ticket.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] where the limits of `exporter` are reached, [`ErrorKind::Argument`] for a tree of more than
    /// a mebibyte or a time that never ends, and errors of the system.
    pub fn share(self, exporter: &Exporter, time: Duration, tree: Option<String>) -> Result<Ticket> {
        if tree.as_ref().is_some_and(|tree| tree.len() > MAX_TREE) {
            let text = format!("the tree takes more than {MAX_TREE} bytes to describe: share it in parts");
            return Err(Error::new(ErrorKind::Argument, text));
        }
        let about = match self.tensors.len() {
            1 => self.about,
            n => format!("{n} tensors, {} bytes", self.bytes),
        };
        let (mut segments, mut files) = (Vec::new(), Vec::new());
        for part in self.segments {
            let (segment, file) = finished(part, self.writing)?;
            segments.push(segment);
            files.push(file);
        }
        let content = Content { segments, tensors: self.tensors, tree };
        let kept = Kept { content, files, _owners: self.owners };
        exporter.share(kept, self.bytes, &about, time)
    }
}

/// Returns a segment as others will see it.
fn finished(part: Part, writing: Writing) -> Result<(Segment, Arc<OwnedFd>)> {
    match part {
        Part::Foreign(import, number) => {
            let open = import.segment(number);
            Ok((Segment::File { nbytes: open.bytes().len(), writing }, Arc::clone(&open.file)))
        }
        Part::Fresh(arena) => {
            let nbytes = arena.bytes().len();
            let arena = Arc::into_inner(arena).ok_or_else(|| {
                Error::new(ErrorKind::Framework, "a copy into shared memory is still in use: please report this")
            })?;
            let file = arena.into_file();
            memory::seal(&file, writing)?;
            Ok((Segment::File { nbytes, writing }, Arc::new(file)))
        }
    }
}
