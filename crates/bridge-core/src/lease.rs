//! The consumer's hold on an exported tensor, as it is offered and as it is accepted, and the ordered return of its memory.

use crate::group::Group;
use crate::ordering::alive;
use crate::ordering::{Unordered, leased, released};
use crate::planted::{is_left_behind, is_planted};
use crate::views::Used;
use crate::{
    Access, Consumer, DType, Device, Error, ErrorKind, Export, Layout, Options, Ordering, Profile, Result, Reuse,
    Stream, plan,
};
use smallvec::SmallVec;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::thread;

/// The consumer's hold on an exported tensor. Dropping it returns the memory to the owner, in stream order.
///
/// An importing adapter stores it where its framework keeps the owner of imported memory, so that the last view drops
/// it. The drop makes the owner's stream wait for the stream at import, the stream current at the drop, and every
/// stream recorded in [`Views`](crate::Views). Then the buffer is dropped: at once with [`Reuse::InStreamOrder`], after
/// that work with [`Reuse::Unknown`]. Where the consumer may use streams that it does not name
/// ([`Consumer::uses_other_streams`]), it is dropped after all work that the device has at the drop.
///
/// The leases of one [`transfer_all`](crate::transfer_all) that are dropped together share those waits, and a lease
/// that is dropped while others live returns its memory within about a millisecond ([`Ordering::flush_later`]).
#[must_use = "dropping a lease returns the memory: keep it as long as the view"]
pub struct Lease {
    /// `None` only while it is being dropped.
    exported: Option<Export>,
    copied: bool,
    consumer: Arc<dyn Consumer>,
    ordering: Arc<dyn Ordering>,
    /// `None` for memory that is ready at any time.
    ordered: Option<Ordered>,
    group: Option<Arc<Group>>,
}

/// What the drop orders.
struct Ordered {
    owner: Stream,
    /// The stream at import; `None` where the host reads.
    reader: Option<Used>,
    /// Whether that is the per-thread stream, for which the legacy stream stands.
    per_thread: bool,
    /// Whether the consumer has panicked. What it reads is not known then, so the memory is leaked.
    unknown: bool,
}

/// Returns the addresses that a lease enters in the views of its consumer.
fn bytes(exported: &Export) -> Range<usize> {
    let start = exported.buffer().address();
    // In range: `Export::new` checked it.
    start..start + exported.buffer().len()
}

impl Lease {
    /// Enters the memory in the views of the consumer. Its caller may have launched work that uses the memory: a panic of
    /// the consumer must not drop that here.
    pub(crate) fn new(
        exported: Export,
        stream: Option<Stream>,
        copied: bool,
        consumer: Arc<dyn Consumer>,
        ordering: Arc<dyn Ordering>,
    ) -> Self {
        let device = exported.device();
        let ordered = exported.buffer().stream().map(|owner| {
            let stream = stream.filter(|_| !is_left_behind("core_reader_lost_by_failure"));
            let enter = || {
                let used =
                    |stream: Stream| Used { stream: stream.on_any_thread(), keep: consumer.keep(device, stream) };
                let reader = stream.map(used);
                consumer.views().enter(device, &bytes(&exported));
                reader
            };
            let reader = catch_unwind(AssertUnwindSafe(enter));
            let per_thread = stream == Some(Stream::PER_THREAD);
            let (owner, unknown) = (owner.on_any_thread(), reader.is_err());
            Ordered { owner, reader: reader.unwrap_or_default(), per_thread, unknown }
        });
        leased();
        Self { exported: Some(exported), copied, consumer, ordering, ordered, group: None }
    }

    /// Makes the lease return its memory together with those of a group between the same streams.
    pub(crate) fn in_group(mut self, group: Arc<Group>) -> Self {
        group.enter();
        self.group = Some(group);
        self
    }

    /// Returns the device of the memory, the owner's stream and the reader's; `None` where there is nothing to order.
    pub(crate) fn streams(&self) -> Option<(Device, Stream, Stream)> {
        let Ordered { owner, reader, .. } = self.ordered.as_ref()?;
        Some((self.exported().buffer().device(), *owner, reader.as_ref()?.stream))
    }

    /// Makes a group of leases between the same streams; `None` where there is nothing to order.
    pub(crate) fn new_group(&self) -> Option<Arc<Group>> {
        let Ordered { owner, reader, .. } = self.ordered.as_ref()?;
        let (device, reader) = (self.exported().buffer().device(), reader.clone()?);
        Some(Arc::new(Group::new(device, *owner, reader, Arc::clone(&self.ordering))))
    }

    pub(crate) fn exported(&self) -> &Export {
        self.exported.as_ref().expect("only the drop takes it")
    }

    /// Returns the address of the first element. It may be null for a view without elements.
    pub fn data(&self) -> usize {
        self.exported().data()
    }

    /// Returns [`data`](Self::data) as a pointer, which the host can follow where the [`device`](Self::device) is the
    /// host. It is valid as long as the lease.
    pub fn as_ptr<T>(&self) -> *mut T {
        self.exported().as_ptr()
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.exported().dtype()
    }

    /// Returns the shape, the strides and the offset.
    pub fn layout(&self) -> &Layout {
        self.exported().layout()
    }

    /// Returns the device that the memory is on, as the consumer sees it.
    pub fn device(&self) -> Device {
        self.exported().device()
    }

    /// Returns what the view may do with the memory.
    pub fn access(&self) -> Access {
        self.exported().buffer().access()
    }

    /// Returns the stream on which the owner writes; `None` for memory that is ready at any time.
    pub fn stream(&self) -> Option<Stream> {
        self.exported().buffer().stream()
    }

    /// Returns whether the memory is a copy that was made for this lease, and so belongs only to the consumer.
    pub fn is_copy(&self) -> bool {
        self.copied
    }

    /// Returns the lowest address of the memory and its length in bytes.
    pub fn buffer(&self) -> (usize, usize) {
        (self.exported().buffer().address(), self.exported().buffer().len())
    }

    /// Returns the addresses of a compact tensor's elements.
    pub fn compact_bytes(&self) -> Range<usize> {
        self.data()..self.data() + self.layout().nbytes()
    }

    /// Returns a number of the lease, which no other lease has at the time, if the consumer should watch its view for
    /// writes ([`Options::watch`](crate::Options::watch)).
    pub fn watch(&self) -> Option<usize> {
        self.exported().watch()
    }

    fn give_back(&mut self) -> Returned {
        let Some(exported) = self.exported.take() else { return Returned::Now };
        let Some(Ordered { owner, reader, per_thread, unknown }) = self.ordered.take() else { return Returned::Now };
        let (device, reuse) = (exported.buffer().device(), exported.buffer().reuse());
        let (seen_on, bytes) = (exported.device(), bytes(&exported));
        // Until every reader is ordered before its reuse, the memory must not be returned, whatever fails below.
        let buffer = Unordered::new(exported.into_buffer());
        if unknown {
            return Returned::Now;
        }
        // Both keep their streams alive until the end of this function, or of the attempts below.
        let recorded = self.consumer.views().leave(seen_on, &bytes);
        let Ok(current) = self.consumer.current_stream(seen_on) else { return Returned::Now };
        let current = current.map(Stream::on_any_thread);
        let ordering = &self.ordering;
        // Only threads that the suite starts have no name.
        let forgotten = is_planted("core_reader_forgotten_elsewhere") && thread::current().name().is_none();
        let known_reader = reader.iter().filter(|_| !forgotten);
        let mut after: SmallVec<[Stream; 4]> = recorded.iter().chain(known_reader).map(|used| used.stream).collect();
        after.sort_unstable();
        after.dedup();
        // Where no stream is current, the interpreter shuts down, and there may be no later.
        let known = current.is_some_and(|current| after.contains(&current));
        let elsewhere = self.consumer.uses_other_streams();
        let grouped = |group: &&Arc<Group>| known && !elsewhere && group.admits(&after, reuse);
        if let Some(group) = self.group.as_ref().filter(grouped) {
            return Returned::WithItsGroup { first: group.put(buffer, reuse) };
        }
        after.extend(current.filter(|_| !known));
        let give_back = move |ordering: &dyn Ordering| match reuse {
            _ if elsewhere => alive(ordering).release_after_all_work(device, owner, buffer.into_ordered()),
            // Leaked: the graph that the per-thread stream is captured into may use it.
            _ if per_thread && alive(ordering).is_captured(device, Stream::LEGACY) == Some(true) => drop(buffer),
            Reuse::InStreamOrder => drop(buffer.into_ordered()),
            Reuse::Unknown => alive(ordering).release_later(device, owner, buffer.into_ordered()),
        };
        match order_all(&**ordering, device, &mut after, owner) {
            Ok(()) => give_back(&**ordering),
            Err(error) if error.kind() == ErrorKind::Captured => {
                let Some(current) = current else { return Returned::Now };
                let is_captured = |stream: &Stream| alive(&**ordering).is_captured(device, *stream) == Some(true);
                // A graph that uses the view may be launched at any time. The legacy stream itself is never captured: a
                // capture of another stream forbids its use, and it may stand for the captured per-thread stream.
                let in_a_graph = |stream: &Stream| {
                    let is_reader = known || *stream != current;
                    is_reader && (*stream != Stream::LEGACY || per_thread) && is_captured(stream)
                };
                let leaks = match () {
                    _ if is_planted("core_graph_view_returned") => false,
                    _ if is_planted("core_capture_leaks") => true,
                    _ => after.iter().any(in_a_graph),
                };
                if leaks {
                    return Returned::Now;
                }
                // The view has no known use in a stream that is being captured, so the wait can follow the capture.
                let until = after.iter().chain([&owner]).find(|stream| is_captured(stream)).copied();
                let keep = (recorded, reader, self.consumer.keep(seen_on, current));
                let (later, mut give_back) = (Arc::clone(ordering), Some(give_back));
                let attempt = move || {
                    let _kept = &keep;
                    match order_all(&*later, device, &mut after, owner) {
                        Err(error) if error.kind() == ErrorKind::Captured => return false,
                        Ok(()) => give_back.take().into_iter().for_each(|give_back| give_back(&*later)),
                        Err(_) => give_back = None,
                    }
                    true
                };
                alive(&**ordering).defer(device, until.unwrap_or(current), Box::new(attempt));
            }
            Err(_) => (),
        }
        Returned::Now
    }
}

/// Makes the owner's stream wait for each of these. After an error the list has those that it does not wait for.
fn order_all(
    ordering: &dyn Ordering,
    device: Device,
    earlier: &mut SmallVec<[Stream; 4]>,
    owner: Stream,
) -> Result<()> {
    for done in 0..earlier.len() {
        let stream = earlier[done];
        if stream != owner
            && let Err(error) = alive(ordering).order(device, stream, owner)
        {
            earlier.drain(..done);
            return Err(error);
        }
    }
    Ok(())
}

/// When the drop of a lease has returned its memory, or leaked it.
enum Returned {
    Now,
    /// The group will. The first on its list sees to that.
    WithItsGroup {
        first: bool,
    },
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Frameworks call this through C, and a panic of an implementation must not unwind through it.
        let returned = catch_unwind(AssertUnwindSafe(|| self.give_back())).unwrap_or(Returned::Now);
        let first = match returned {
            Returned::Now => {
                released(1);
                false
            }
            Returned::WithItsGroup { first } => first,
        };
        if let Some(group) = self.group.take() {
            let _ = catch_unwind(AssertUnwindSafe(|| group.leave(first)));
        }
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({:?})", self.exported)
    }
}

/// An exported tensor that a framework may take: what [`Adapter::import`](crate::Adapter::import) receives.
///
/// It becomes a [`Lease`], which names the memory, only by [`accept`](Self::accept). Safe code can pass an offer to the
/// import of an adapter that it was not made for; `accept` refuses it there. Dropping an offer returns the memory, as
/// dropping a lease does.
#[derive(Debug)]
#[must_use = "dropping an offer returns the memory: accept it"]
pub struct Offer<'a> {
    lease: Lease,
    /// The profile that the tensor fits.
    planned_for: &'a Profile,
    trusted: bool,
}

impl<'a> Offer<'a> {
    /// The tensor was planned for this profile, which it fits in place.
    pub(crate) fn new(lease: Lease, planned_for: &'a Profile) -> Self {
        Self { lease, planned_for, trusted: false }
    }

    /// Returns the lease, if the tensor fits `profile` in place, and the lease returns its memory after the work of
    /// `consumer`. An import calls it first, with the profile and the consumer of its adapter.
    ///
    /// # Errors
    ///
    /// Those of [`plan`](plan()) without a copy, and [`ErrorKind::Argument`] for an offer to another consumer. The memory
    /// is then returned.
    pub fn accept<C: Consumer + ?Sized>(self, profile: &Profile, consumer: &Arc<C>) -> Result<Lease> {
        let Self { lease, planned_for, trusted } = self;
        if trusted {
            return Ok(lease);
        }
        // It is borrowed, so the same address is the same profile.
        if !ptr::eq(planned_for, profile) {
            plan(lease.exported(), profile, &Options::in_place())?;
        }
        // A lease on memory that is ready at any time orders nothing.
        if lease.ordered.is_none() || ptr::addr_eq(Arc::as_ptr(&lease.consumer), Arc::as_ptr(consumer)) {
            return Ok(lease);
        }
        let text = format!("the tensor was offered to another consumer than that of {}: call transfer", profile.name);
        Err(Error::new(ErrorKind::Argument, text))
    }

    /// Returns the same offer, which [`accept`](Self::accept) does not check. For an adapter that wraps another one and
    /// states another profile or consumer in its name.
    ///
    /// # Safety
    ///
    /// The adapter that accepts the offer takes such a tensor in place, and the consumer that the offer was made to names
    /// the streams and has the views of the consumer of that adapter.
    pub unsafe fn trusted(self) -> Self {
        Self { trusted: true, ..self }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.lease.dtype()
    }

    /// Returns the shape, the strides and the offset.
    pub fn layout(&self) -> &Layout {
        self.lease.layout()
    }

    /// Returns the device that the memory is on, as the consumer sees it.
    pub fn device(&self) -> Device {
        self.lease.device()
    }
}
