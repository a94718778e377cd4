//! A lent tensor on its way into another framework, and the way back.

use crate::views::Used;
use crate::{Access, Consumer, DType, Device, DeviceBuffer, ErrorKind, Layout, Lent, Ordering, Reuse, Stream};
use smallvec::SmallVec;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static LEASED: AtomicU64 = AtomicU64::new(0);
static RELEASED: AtomicU64 = AtomicU64::new(0);
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// How many leases this process has made and given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Leases made.
    pub leased: u64,
    /// Leases given back.
    pub released: u64,
    /// Those among them whose memory was not: a reader could not be ordered in front of its reuse, as when a view is
    /// dropped that was used on a stream that is being captured into a graph.
    pub leaked: u64,
}

/// Counts of the whole process: `leased - released` views are alive.
pub fn stats() -> Stats {
    // Released first: a lease given back between the two reads must not make the difference negative.
    let released = RELEASED.load(Relaxed);
    Stats { leased: LEASED.load(Relaxed), released, leaked: LEAKED.load(Relaxed) }
}

/// The consumer's hold on a lent tensor. Dropping it gives the tensor back, in stream order.
///
/// An importing adapter puts it where its framework keeps the owner of foreign memory, so that it is dropped exactly
/// when the last view goes. On the drop, the owner's stream waits for the stream at import, the stream that is current
/// where the drop happens, and every stream noted in [`Views`](crate::Views); then the owner's reference is dropped,
/// at once or, where its allocator's habits are unknown, behind the work.
pub struct Lease {
    /// `None` only while it is being dropped.
    lent: Option<Lent>,
    data: usize,
    dtype: DType,
    device: Device,
    access: Access,
    copied: bool,
    consumer: Arc<dyn Consumer>,
    ordering: Arc<dyn Ordering>,
    /// `None` for memory that is ready at any time.
    ordered: Option<Ordered>,
}

/// What orders the way back.
struct Ordered {
    owner: Stream,
    /// The stream at import; `None` where the host reads.
    reader: Option<Used>,
    /// The bytes that are entered in the consumer's views.
    bytes: Range<usize>,
}

impl Lease {
    pub(crate) fn new(
        lent: Lent,
        stream: Option<Stream>,
        copied: bool,
        consumer: Arc<dyn Consumer>,
        ordering: Arc<dyn Ordering>,
    ) -> Self {
        let device = lent.device();
        let ordered = lent.buffer().stream().map(|owner| {
            let reader =
                stream.map(|stream| Used { stream: stream.on_any_thread(), keep: consumer.keep(device, stream) });
            let start = lent.buffer().address();
            // In range: `Lent::new` checked it.
            let bytes = start..start + lent.buffer().len();
            consumer.views().enter(device, &bytes);
            Ordered { owner: owner.on_any_thread(), reader, bytes }
        });
        LEASED.fetch_add(1, Relaxed);
        let (data, dtype, access) = (lent.data(), lent.dtype(), lent.buffer().access());
        Self { lent: Some(lent), data, dtype, device, access, copied, consumer, ordering, ordered }
    }

    fn lent(&self) -> &Lent {
        self.lent.as_ref().expect("only the drop takes it")
    }

    /// Address of the first element. It may be null for a view without elements.
    pub fn data(&self) -> usize {
        self.data
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape, strides and offset.
    pub fn layout(&self) -> &Layout {
        self.lent().layout()
    }

    /// Where the memory is.
    pub fn device(&self) -> Device {
        self.device
    }

    /// What the view may do.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether the memory is a copy that was made for this lease, and so belongs to the consumer alone.
    pub fn is_copy(&self) -> bool {
        self.copied
    }

    /// The lowest address of the memory and its length in bytes.
    pub fn buffer(&self) -> (usize, usize) {
        (self.lent().buffer().address(), self.lent().buffer().len())
    }

    fn give_back(&mut self) {
        let Some(lent) = self.lent.take() else { return };
        let (device, reuse) = (lent.buffer().device(), lent.buffer().reuse());
        let Some(Ordered { owner, reader, bytes }) = self.ordered.take() else { return };
        // Until every reader is in front of it, the memory must not be given back, whatever goes wrong on the way.
        let buffer = Unordered(ManuallyDrop::new(lent.into_buffer()));
        // Both keep their streams alive until the end of this function.
        let noted = self.consumer.views().leave(self.device, &bytes);
        let Ok(current) = self.consumer.current_stream(self.device) else { return };
        let ordering = &self.ordering;
        let behind = |stream| if stream == owner { Ok(()) } else { ordering.order(device, stream, owner) };
        let mut readers: SmallVec<[Stream; 4]> = noted.iter().chain(&reader).map(|used| used.stream).collect();
        readers.sort_unstable();
        readers.dedup();
        if readers.iter().any(|reader| behind(*reader).is_err()) {
            return;
        }
        let give_back = move |ordering: &dyn Ordering| match reuse {
            Reuse::InStreamOrder => drop(buffer.into_ordered()),
            Reuse::Unknown => ordering.retire(device, owner, buffer.into_ordered()),
        };
        let current = current.map(Stream::on_any_thread).filter(|current| !readers.contains(current));
        match current.map(|current| (current, behind(current))) {
            None | Some((_, Ok(()))) => give_back(&**ordering),
            // The view has no known use in the stream that is being captured here. It can wait for it later.
            Some((current, Err(error))) if error.kind() == ErrorKind::Captured => {
                let keep = self.consumer.keep(self.device, current);
                let (later, mut give_back) = (Arc::clone(ordering), Some(give_back));
                let attempt = move || {
                    let _kept = &keep;
                    match later.order(device, current, owner) {
                        Err(error) if error.kind() == ErrorKind::Captured => return false,
                        Ok(()) => give_back.take().into_iter().for_each(|give_back| give_back(&*later)),
                        Err(_) => give_back = None,
                    }
                    true
                };
                ordering.defer(device, current, Box::new(attempt));
            }
            Some(_) => (),
        }
    }
}

/// Memory that a reader may still use. Dropped on an error path, it is never given back, and counted.
struct Unordered(ManuallyDrop<Box<dyn DeviceBuffer>>);

impl Unordered {
    fn into_ordered(mut self) -> Box<dyn DeviceBuffer> {
        // SAFETY: the box is taken once, because `self` is forgotten right away.
        let buffer = unsafe { ManuallyDrop::take(&mut self.0) };
        std::mem::forget(self);
        buffer
    }
}

impl Drop for Unordered {
    fn drop(&mut self) {
        LEAKED.fetch_add(1, Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Frameworks call this through C: a panic of a foreign implementation must end here.
        let _ = catch_unwind(AssertUnwindSafe(|| self.give_back()));
        RELEASED.fetch_add(1, Relaxed);
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({:?})", self.lent)
    }
}
