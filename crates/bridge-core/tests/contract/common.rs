//! A framework of plain values, and an ordering that records its calls.

use bridge_core::{
    Access, Adapter, Cast, Consumer, Copies, DType, Deferred, Device, DeviceBuffer, DeviceKind, Error, ErrorKind,
    Export, Failed, Flush, Keep, Layout, Lease, Offer, Options, Order, Ordering, Pending, Piece, Planned, Profile,
    Result, Reuse, Stream, Strided, Strides, Views,
};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

// SAFETY: no driver sees this stream.
pub const OWNER: Stream = unsafe { Stream::from_handle(0xa0) };
// SAFETY: no driver sees this stream.
pub const READER: Stream = unsafe { Stream::from_handle(0xb0) };
// SAFETY: no driver sees this stream.
pub const OTHER: Stream = unsafe { Stream::from_handle(0xc0) };
/// The address of memory that the copies allocate.
pub const ALLOCATED: usize = 0x80000;
pub const GPU: Device = Device::cuda(0);

/// A call of the ordering or of its copies, or the drop of a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Ordered(Stream, Stream),
    ReleasedLater(Stream),
    ReleasedAfterAllWork(Stream),
    Synchronized(Stream),
    Deferred(Stream),
    OrderedAcross((Device, Stream), (Device, Stream)),
    Copied { from: usize, to: usize, flips: u128, stream: Option<Stream> },
    Moved { from: Device, to: Device, flips: u128, stream: Option<Stream> },
    Cast { cast: Cast, flips: u128, stream: Option<Stream> },
    Prepared(Range<usize>),
    Dropped,
}

pub type Log = Arc<Mutex<Vec<Event>>>;

pub fn taken(log: &Log) -> Vec<Event> {
    std::mem::take(&mut *log.lock().unwrap())
}

#[derive(Default)]
pub struct Recorder {
    pub log: Log,
    pub fails: Mutex<bool>,
    /// The stream that is being captured.
    pub captured: Mutex<Option<Stream>>,
    /// The attempts that wait for the end of the capture.
    pub deferred: Mutex<Vec<Deferred>>,
    /// Whether the host cannot wait for streams.
    pub never_waits: bool,
    /// The flushes that were to be called later, and never are.
    pub flushes: Mutex<Vec<Flush>>,
    /// The errors of its copies; `None` if it has no copies.
    pub copies: Option<Copied>,
    /// Whether its copies can be planned.
    pub plans: bool,
    /// Whether its copies cast.
    pub casts: bool,
}

/// The flips of a copy that was planned, which has none.
pub const PLANNED: u128 = u128::MAX;

/// Copies that were planned: addresses from and to.
struct Plans(Vec<(usize, usize)>, Log);

// SAFETY: as for the recorder.
unsafe impl Planned for Plans {
    unsafe fn copy(&self, stream: Option<Stream>) -> std::result::Result<(), Failed> {
        let copied = self.0.iter().map(|(from, to)| Event::Copied { from: *from, to: *to, flips: PLANNED, stream });
        self.1.lock().unwrap().extend(copied);
        Ok(())
    }
}

/// What follows a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    Well,
    /// The copy returns this error.
    Fails(ErrorKind),
    /// The copy succeeds, and every call of the ordering after it fails.
    BreaksTheOrdering,
}

/// Copies nothing.
// SAFETY: the tests know what it does not do: their memory is only numbers, or of the host.
unsafe impl Copies for Recorder {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()> {
        assert_eq!(from.layout.shape(), to.layout.shape());
        self.log.lock().unwrap().push(match from.device == to.device {
            true => Event::Copied { from: from.data, to: to.data, flips, stream },
            false => Event::Moved { from: from.device, to: to.device, flips, stream },
        });
        match self.copies {
            Some(Copied::Fails(kind)) => return Err(Error::new(kind, "planned")),
            Some(Copied::BreaksTheOrdering) => *self.fails.lock().unwrap() = true,
            _ => (),
        }
        Ok(())
    }

    unsafe fn copy_all(&self, pieces: &[Piece<'_>], stream: Option<Stream>) -> std::result::Result<(), Failed> {
        for (index, Piece { from, to, flips, cast }) in pieces.iter().copied().enumerate() {
            match cast {
                Some(cast) => self.log.lock().unwrap().push(Event::Cast { cast, flips, stream }),
                // SAFETY: nothing is copied.
                None => unsafe { self.copy(from, to, flips, stream) }.map_err(|error| Failed::new(index, error))?,
            }
        }
        Ok(())
    }

    fn casts(&self, _: Cast) -> Result<()> {
        match self.casts {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::CopyNeeded, "planned")),
        }
    }

    unsafe fn plan(
        &self,
        _: Device,
        pieces: &[Piece<'_>],
        _: Option<Stream>,
    ) -> std::result::Result<Option<Box<dyn Planned>>, Failed> {
        let addresses = pieces.iter().map(|piece| (piece.from.data, piece.to.data)).collect();
        Ok(self.plans.then(|| Box::new(Plans(addresses, self.log.clone())) as Box<dyn Planned>))
    }

    fn prepare(&self, fresh: Range<usize>) {
        self.log.lock().unwrap().push(Event::Prepared(fresh));
    }

    fn reaches(&self, device: Device) -> Result<()> {
        match device.index {
            0..=1 => Ok(()),
            _ => Err(Error::new(ErrorKind::Device, "planned")),
        }
    }

    unsafe fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        _: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        let paper = Paper { device, stream: Some(stream), address: ALLOCATED, ..Paper::new(&self.log) };
        Ok(Box::new(PaperBuffer { paper, below: 0, len: nbytes }))
    }
}

// SAFETY: the tests know what it does not do: their memory is only numbers, or of the host.
unsafe impl Ordering for Recorder {
    unsafe fn order_across(&self, earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        if *self.fails.lock().unwrap() {
            return Err(Error::new(ErrorKind::Driver, "planned"));
        }
        self.log.lock().unwrap().push(Event::OrderedAcross(earlier, later));
        Ok(())
    }

    unsafe fn order(&self, _: Device, earlier: Stream, later: Stream) -> Result<()> {
        if *self.fails.lock().unwrap() {
            return Err(Error::new(ErrorKind::Driver, "planned"));
        }
        if [earlier, later].map(Some).contains(&*self.captured.lock().unwrap()) {
            return Err(Error::new(ErrorKind::Captured, "planned"));
        }
        self.log.lock().unwrap().push(Event::Ordered(earlier, later));
        Ok(())
    }

    unsafe fn synchronize(&self, _: Device, stream: Stream) -> Result<()> {
        if self.never_waits {
            return Err(Error::new(ErrorKind::Driver, "planned"));
        }
        self.log.lock().unwrap().push(Event::Synchronized(stream));
        Ok(())
    }

    unsafe fn defer(&self, _: Device, stream: Stream, mut attempt: Deferred) {
        self.log.lock().unwrap().push(Event::Deferred(stream));
        if *self.captured.lock().unwrap() == Some(stream) {
            self.deferred.lock().unwrap().push(attempt);
        } else {
            attempt();
        }
    }

    unsafe fn release_later(&self, _: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        self.log.lock().unwrap().push(Event::ReleasedLater(stream));
        drop(buffer);
    }

    unsafe fn release_after_all_work(&self, _: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        self.log.lock().unwrap().push(Event::ReleasedAfterAllWork(stream));
        drop(buffer);
    }

    unsafe fn is_captured(&self, _: Device, stream: Stream) -> Option<bool> {
        Some(*self.captured.lock().unwrap() == Some(stream))
    }

    fn flush_later(&self, flush: Flush) {
        self.flushes.lock().unwrap().push(flush);
    }

    fn copies(&self) -> Option<&dyn Copies> {
        self.copies.map(|_| self as &dyn Copies)
    }
}

/// A tensor without memory.
#[derive(Clone)]
pub struct Paper {
    pub dtype: DType,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    pub address: usize,
    pub device: Device,
    pub access: Access,
    pub stream: Option<Stream>,
    pub reuse: Reuse,
    pub pending: Option<Pending>,
    pub panics: bool,
    pub log: Log,
}

impl Paper {
    pub fn new(log: &Log) -> Self {
        Self {
            dtype: DType::FLOAT32,
            shape: vec![2, 3],
            strides: vec![3, 1],
            address: 0x1000,
            device: GPU,
            access: Access::ReadWrite,
            stream: Some(OWNER),
            reuse: Reuse::InStreamOrder,
            pending: None,
            panics: false,
            log: log.clone(),
        }
    }
}

struct PaperBuffer {
    paper: Paper,
    below: usize,
    len: usize,
}

// SAFETY: there is no memory, and no test touches the address.
unsafe impl DeviceBuffer for PaperBuffer {
    fn address(&self) -> usize {
        self.paper.address - self.below
    }
    fn len(&self) -> usize {
        self.len
    }
    fn device(&self) -> Device {
        self.paper.device
    }
    fn access(&self) -> Access {
        self.paper.access
    }
    fn stream(&self) -> Option<Stream> {
        self.paper.stream
    }
    fn reuse(&self) -> Reuse {
        self.paper.reuse
    }
}

impl Drop for PaperBuffer {
    fn drop(&mut self) {
        self.paper.log.lock().unwrap().push(Event::Dropped);
        assert!(!self.paper.panics, "planned");
    }
}

pub struct Side {
    pub current: Mutex<Option<Stream>>,
    pub views: Views,
    /// Whether it panics instead of keeping a stream.
    pub panics: bool,
    /// Whether views may be used in streams that it does not name.
    pub elsewhere: bool,
    /// Whether every export is said to be in the current stream.
    pub steady: bool,
}

impl Side {
    /// Records a use of a view.
    pub fn used(&self, address: usize, stream: Stream, keep: impl FnOnce() -> Option<Keep>) -> usize {
        // SAFETY: no driver sees the streams of the tests.
        unsafe { self.views.used(GPU, address, stream, keep) }
    }
}

// SAFETY: nothing reads the memory of the tests.
unsafe impl Consumer for Side {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(*self.current.lock().unwrap())
    }

    fn keep(&self, _: Device, _: Stream) -> Option<Keep> {
        assert!(!self.panics, "planned");
        None
    }

    fn uses_other_streams(&self) -> bool {
        self.elsewhere
    }

    fn exports_in_current_stream(&self) -> bool {
        self.steady
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

/// Exports papers, and imports leases unchanged.
pub struct Office {
    pub profile: Profile,
    pub side: Arc<Side>,
    pub refuses: bool,
    /// The address of copies; `None` if the office cannot copy.
    pub copies_to: Option<usize>,
    /// Its own memory to be written to; `None` if it has none.
    pub fresh: Option<Paper>,
    /// Whether its tensors must not change.
    pub immutable: bool,
    /// How often it says what its consumer is before it panics.
    pub says: AtomicU32,
}

impl Office {
    pub fn new(strides: Strides) -> Self {
        let profile = Profile::export_only("office")
            .with_dtypes(vec![DType::FLOAT32])
            .with_strides(strides)
            .with_alignment(64)
            .with_devices(vec![DeviceKind::CUDA, DeviceKind::CPU])
            .with_keeps_read_only(false);
        let side = Side {
            current: Mutex::new(Some(READER)),
            views: Views::default(),
            panics: false,
            elsewhere: false,
            steady: false,
        };
        Self {
            profile,
            side: Arc::new(side),
            refuses: false,
            copies_to: Some(0x20000),
            fresh: None,
            immutable: false,
            says: AtomicU32::new(u32::MAX),
        }
    }
}

/// The office's tensor: its own paper, or a lease.
#[allow(clippy::large_enum_variant, reason = "there are few of them; not every test has leases")]
pub enum Item {
    Own(Paper),
    Leased(Lease),
}

// SAFETY: nothing reads the memory of the tests.
unsafe impl Adapter for Office {
    type Tensor = Item;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.says.fetch_update(Relaxed, Relaxed, |says| says.checked_sub(1)).expect("planned");
        self.side.clone()
    }

    fn export(&self, item: &Item) -> Result<Export> {
        let Item::Own(paper) = item else {
            return Err(Error::new(ErrorKind::NotATensor, "planned"));
        };
        let layout = Layout::new(paper.dtype, &paper.shape, Some(&paper.strides), 0)?;
        let (below, above) = layout.byte_extent();
        let buffer = PaperBuffer { paper: paper.clone(), below, len: below + above };
        Ok(Export::at(paper.address, paper.dtype, layout, buffer)?.with_pending(paper.pending))
    }

    fn import(&self, offer: Offer) -> Result<Item> {
        match self.refuses {
            true => Err(Error::new(ErrorKind::Framework, "planned")),
            false => Ok(Item::Leased(offer.accept(&self.profile, &self.side)?)),
        }
    }

    /// Copies leases, too, as a consumer does where the producer cannot copy.
    fn compact(&self, item: &Item) -> Result<Item> {
        let address = self.copies_to.ok_or_else(|| Error::new(ErrorKind::CopyNeeded, "planned"))?;
        let paper = match item {
            Item::Own(paper) => paper.clone(),
            Item::Leased(lease) => {
                Paper { shape: lease.layout().shape().into(), stream: Some(READER), ..Paper::new(&Log::default()) }
            }
        };
        let mut strides = vec![1; paper.shape.len()];
        for d in (1..strides.len()).rev() {
            strides[d - 1] = strides[d] * paper.shape[d];
        }
        let access = Access::ReadWrite;
        Ok(Item::Own(Paper { strides, access, address, pending: None, ..paper }))
    }

    fn overwritten(&self, _: &Item) -> Result<()> {
        if self.immutable { Err(Error::new(ErrorKind::ReadOnly, "planned")) } else { Ok(()) }
    }

    /// Returns the paper that a test has prepared, whatever was requested, as a framework under a mode may.
    unsafe fn empty(&self, _: Device, _: DType, _: &[i64], _: Order) -> Result<Item> {
        let fresh = self.fresh.clone().map(Item::Own);
        fresh.ok_or_else(|| Error::new(ErrorKind::CopyNeeded, "planned"))
    }
}

/// Returns the options with the promise to write nothing.
pub fn writes_nothing(options: Options) -> Options {
    // SAFETY: nothing writes to the memory of the tests.
    unsafe { options.with_read_only(true) }
}
