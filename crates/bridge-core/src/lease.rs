//! A lent tensor on its way into another framework, and the way back.

use crate::{Access, Consumer, DType, Device, DeviceBuffer, Layout, Lent, Ordering, Reuse, Stream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static LEASED: AtomicU64 = AtomicU64::new(0);
static RELEASED: AtomicU64 = AtomicU64::new(0);

/// How many leases this process has made and given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Leases made.
    pub leased: u64,
    /// Leases given back.
    pub released: u64,
}

/// Counts of the whole process: `leased - released` views are alive.
pub fn stats() -> Stats {
    // Released first: a lease given back between the two reads must not make the difference negative.
    let released = RELEASED.load(Relaxed);
    Stats { leased: LEASED.load(Relaxed), released }
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
    /// The owner's stream and the entry in the consumer's views.
    ordered: Option<(Stream, usize)>,
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
        let address = lent.buffer().address();
        let ordered = lent.buffer().stream().zip(stream).map(|(owner, reader)| {
            let bytes = address..address + lent.buffer().len();
            (owner.on_any_thread(), consumer.views().enter(device, bytes, reader.on_any_thread()))
        });
        LEASED.fetch_add(1, Relaxed);
        let (data, dtype, access) = (lent.data(), lent.dtype(), lent.buffer().access());
        Self { lent: Some(lent), data, dtype, device, access, copied, consumer, ordering, ordered }
    }

    fn lent(&self) -> &Lent {
        self.lent.as_ref().expect("only the drop takes it")
    }

    /// Address of the first element. Whether it may be null: only for a view without elements.
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
        let (device, reuse) = (lent.device(), lent.buffer().reuse());
        let buffer: Box<dyn DeviceBuffer> = lent.into_buffer();
        let Some((owner, view)) = self.ordered else { return };
        let mut streams = self.consumer.views().leave(view);
        if let Ok(Some(current)) = self.consumer.current_stream(device) {
            streams.push(current);
        }
        streams.sort_unstable();
        streams.dedup();
        let mut failed = false;
        for stream in streams.into_iter().filter(|stream| *stream != owner) {
            failed |= self.ordering.order(device, stream, owner).is_err();
        }
        if failed || reuse == Reuse::Unknown {
            self.ordering.retire(device, owner, buffer);
        }
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
