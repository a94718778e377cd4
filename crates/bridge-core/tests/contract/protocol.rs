//! The protocol of a transfer and of its release, with an ordering that records its calls.

use crate::common::Event::{self, Dropped, Ordered, ReleasedAfterAllWork, ReleasedLater};
use crate::common::{GPU, Item, OTHER, OWNER, Office, Paper, READER, Recorder, taken, writes_nothing};
use bridge_core::{
    Access, Adapter, Consumer, DType, Device, DeviceBuffer, ErrorKind, Export, Lease, Offer, Options, Ordering, Plan,
    Profile, Reason, Result, Reuse, Stream, Strides, stats, transfer,
};
use std::sync::Arc;

struct Setup {
    recorder: Arc<Recorder>,
    ordering: Arc<dyn Ordering>,
    from: Office,
    to: Office,
}

impl Setup {
    fn new() -> Self {
        let recorder = Arc::new(Recorder::default());
        let ordering: Arc<dyn Ordering> = recorder.clone();
        Self { recorder, ordering, from: Office::new(Strides::Any), to: Office::new(Strides::Compact) }
    }

    fn paper(&self) -> Paper {
        Paper::new(&self.recorder.log)
    }

    fn convert(&self, paper: Paper) -> Lease {
        let converted = transfer(&self.from, &self.to, &Item::Own(paper), &self.ordering, &Options::default());
        match converted.expect("it converts").0 {
            Item::Leased(lease) => lease,
            Item::Own(_) => unreachable!("import returns leases"),
        }
    }

    fn events(&self) -> Vec<Event> {
        taken(&self.recorder.log)
    }
}

#[test]
fn the_reader_waits_for_the_owner_and_the_owner_for_every_reader() {
    let setup = Setup::new();
    let lease = setup.convert(setup.paper());
    assert_eq!(setup.events(), [Ordered(OWNER, READER)]);
    assert_eq!(setup.to.side.used(0x1004, OTHER, || None), 1);
    // SAFETY: no driver sees this stream.
    *setup.to.side.current.lock().unwrap() = Some(unsafe { Stream::from_handle(0xd0) });
    drop(lease);
    // SAFETY: no driver sees this stream.
    let dropped_on = unsafe { Stream::from_handle(0xd0) };
    let expected = [Ordered(READER, OWNER), Ordered(OTHER, OWNER), Ordered(dropped_on, OWNER), Dropped];
    assert_eq!(setup.events(), expected);
    assert!(setup.to.side.views.is_empty());
}

#[test]
fn memory_that_other_streams_may_use_waits_for_all_work_of_the_device() {
    for reuse in [Reuse::InStreamOrder, Reuse::Unknown] {
        let mut setup = Setup::new();
        Arc::get_mut(&mut setup.to.side).expect("it is not shared yet").elsewhere = true;
        let lease = setup.convert(Paper { reuse, ..setup.paper() });
        setup.to.side.used(0x1004, OTHER, || None);
        setup.events();
        drop(lease);
        // What is known is ordered in the streams as well, so that the owner sees what those readers wrote.
        let known = [Ordered(READER, OWNER), Ordered(OTHER, OWNER)];
        assert_eq!(setup.events(), [&known[..], &[ReleasedAfterAllWork(OWNER), Dropped]].concat(), "{reuse:?}");
        // A view that is used only in the owner's stream, as far as is known.
        *setup.to.side.current.lock().unwrap() = Some(OWNER);
        drop(setup.convert(Paper { reuse, ..setup.paper() }));
        assert_eq!(setup.events(), [ReleasedAfterAllWork(OWNER), Dropped], "{reuse:?}");
    }
}

#[test]
fn such_memory_is_leaked_and_counted_by_an_ordering_that_cannot_tell() {
    let before = stats().leaked;
    let mut setup = Setup::new();
    Arc::get_mut(&mut setup.to.side).expect("it is not shared yet").elsewhere = true;
    setup.ordering = Arc::new(Untelling(Arc::clone(&setup.recorder)));
    drop(setup.convert(setup.paper()));
    assert!(stats().leaked > before);
    assert_eq!(setup.events(), [Ordered(OWNER, READER), Ordered(READER, OWNER)]);
}

/// An ordering that cannot tell when a device has done all its work.
struct Untelling(Arc<Recorder>);

// SAFETY: as the recorder.
unsafe impl Ordering for Untelling {
    unsafe fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.0.order(device, earlier, later) }
    }

    unsafe fn release_later(&self, device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        // SAFETY: the caller's promise.
        unsafe { self.0.release_later(device, stream, buffer) };
    }
}

/// Hands on what an office is offered to another one, perhaps guaranteeing it. Returns how that one refuses it.
struct Messenger<'a> {
    from: &'a Office,
    to: &'a Office,
    trusted: bool,
}

// SAFETY: it has no more than the memory of the tests.
unsafe impl Adapter for Messenger<'_> {
    type Tensor = Option<ErrorKind>;

    fn profile(&self) -> &Profile {
        self.from.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.from.consumer()
    }

    fn export(&self, _: &Option<ErrorKind>) -> Result<Export> {
        unreachable!("it only imports")
    }

    fn import(&self, offer: Offer<'_>) -> Result<Option<ErrorKind>> {
        // SAFETY: the other consumer is of the same kind, and is not called here.
        let offer = if self.trusted { unsafe { offer.trusted() } } else { offer };
        Ok(self.to.import(offer).err().map(|error| error.kind()))
    }
}

#[test]
fn an_offer_is_for_the_consumer_that_waits_and_read_only_memory_for_one_that_keeps_it_so() {
    let setup = Setup::new();
    let refused = |from: &Office, to: &Office, access, trusted| {
        let paper = Item::Own(Paper { access, ..setup.paper() });
        let messenger = Messenger { from, to, trusted };
        transfer(&setup.from, &messenger, &paper, &setup.ordering, &Options::default()).expect("it converts").0
    };
    let (own, writable) = (&setup.to, Access::ReadWrite);
    assert_eq!(refused(own, own, writable, false), None);
    setup.events();
    // Another consumer: its stream does not wait, and the owner would not wait for it.
    let unrelated = Office::new(Strides::Compact);
    assert_eq!(refused(own, &unrelated, writable, false), Some(ErrorKind::Argument));
    assert_eq!(setup.events(), [Ordered(OWNER, READER), Ordered(READER, OWNER), Dropped], "it returns the memory");
    assert_eq!(refused(own, &unrelated, writable, true), None);

    let mut keeps = Office::new(Strides::Compact);
    keeps.profile.keeps_read_only = true;
    let forgets = Office { side: Arc::clone(&keeps.side), ..Office::new(Strides::Compact) };
    assert_eq!(refused(&keeps, &keeps, Access::ReadOnly, false), None);
    assert_eq!(refused(&keeps, &forgets, Access::ReadOnly, false), Some(ErrorKind::ReadOnly));
}

#[test]
fn a_promise_to_write_nothing_takes_protected_memory_across() {
    for keeps in [true, false] {
        let mut setup = Setup::new();
        setup.to.profile.keeps_read_only = keeps;
        let access_of = |access, options: Options| {
            let paper = Item::Own(Paper { access, ..setup.paper() });
            let converted = transfer(&setup.from, &setup.to, &paper, &setup.ordering, &options);
            converted
                .map(|(item, _)| match item {
                    Item::Leased(lease) => lease.access(),
                    Item::Own(paper) => paper.access,
                })
                .map_err(|error| error.kind())
        };
        let promised = writes_nothing(Options::in_place());
        let protected = if keeps { Access::ReadOnly } else { Access::Immutable };
        assert_eq!(access_of(Access::ReadOnly, promised), Ok(protected));
        assert_eq!(access_of(Access::ReadWrite, promised), Ok(Access::Immutable));
        assert_eq!(access_of(Access::Immutable, Options::in_place()), Ok(Access::Immutable));
        assert_eq!(access_of(Access::ReadWrite, writes_nothing(Options::copied())), Ok(Access::ReadWrite));
    }
}

#[test]
fn a_transfer_says_that_it_shares_immutable_memory_and_a_watch_is_on_request() {
    let setup = Setup::new();
    let seen = |access, options: Options| {
        let paper = Item::Own(Paper { access, ..setup.paper() });
        let (item, done) = transfer(&setup.from, &setup.to, &paper, &setup.ordering, &options).unwrap();
        let is_watched = matches!(&item, Item::Leased(lease) if lease.watch().is_some());
        (done.shares_immutable, is_watched)
    };
    let (in_place, watched) = (Options::in_place(), Options::in_place().with_watch(true));
    assert_eq!(seen(Access::Immutable, in_place), (true, false));
    assert_eq!(seen(Access::Immutable, watched), (true, true));
    assert_eq!(seen(Access::ReadWrite, watched), (false, false));
    // A promise answers the first question, and can be broken.
    assert_eq!(seen(Access::Immutable, writes_nothing(in_place)), (false, false));
    assert_eq!(seen(Access::ReadOnly, writes_nothing(watched)), (false, true));
    assert_eq!(seen(Access::Immutable, watched.with_copy(true)), (false, false));
}

#[test]
fn a_lease_says_what_it_is_of_and_its_views_end_with_its_bytes() {
    let mut setup = Setup::new();
    setup.to.profile.keeps_read_only = true;
    let lease = setup.convert(Paper { access: Access::ReadOnly, ..setup.paper() });
    assert_eq!((lease.data(), lease.buffer(), lease.is_copy()), (0x1000, (0x1000, 24), false));
    assert_eq!((lease.dtype(), lease.device(), lease.access()), (DType::FLOAT32, GPU, Access::ReadOnly));
    assert_eq!(lease.layout().shape(), [2, 3]);
    assert!(format!("{lease:?}").starts_with("Lease("));
    let used = |address| setup.to.side.used(address, OTHER, || None);
    assert_eq!([0xfff, 0x1000, 0x1017, 0x1018].map(used), [0, 1, 1, 0]);
}

#[test]
fn equal_streams_need_nothing() {
    let setup = Setup::new();
    *setup.to.side.current.lock().unwrap() = Some(OWNER);
    drop(setup.convert(setup.paper()));
    assert_eq!(setup.events(), [Dropped]);
}

#[test]
fn each_reader_is_waited_for_once() {
    let setup = Setup::new();
    let lease = setup.convert(setup.paper());
    for stream in [READER, OTHER, OTHER, OWNER] {
        setup.to.side.used(0x1000, stream, || None);
    }
    setup.events();
    drop(lease);
    assert_eq!(setup.events(), [Ordered(READER, OWNER), Ordered(OTHER, OWNER), Dropped]);
}

#[test]
fn the_per_thread_stream_is_ordered_through_the_legacy_one_at_the_release() {
    let setup = Setup::new();
    *setup.to.side.current.lock().unwrap() = Some(Stream::PER_THREAD);
    let lease = setup.convert(Paper { stream: Some(OWNER), ..setup.paper() });
    assert_eq!(setup.events(), [Ordered(OWNER, Stream::PER_THREAD)]);
    *setup.to.side.current.lock().unwrap() = None;
    drop(lease);
    assert_eq!(setup.events(), [Ordered(Stream::LEGACY, OWNER), Dropped]);
}

#[test]
fn memory_with_unknown_reuse_is_released_after_the_readers() {
    let setup = Setup::new();
    let lease = setup.convert(Paper { reuse: Reuse::Unknown, ..setup.paper() });
    setup.events();
    drop(lease);
    assert_eq!(setup.events(), [Ordered(READER, OWNER), ReleasedLater(OWNER), Dropped]);
}

#[test]
fn memory_whose_readers_cannot_be_ordered_is_lost_and_counted() {
    let setup = Setup::new();
    let lease = setup.convert(setup.paper());
    setup.events();
    *setup.recorder.fails.lock().unwrap() = true;
    let before = stats().leaked;
    drop(lease);
    assert_eq!(setup.events(), []);
    assert!(stats().leaked > before);
}

#[test]
fn host_memory_has_no_streams() {
    let setup = Setup::new();
    drop(setup.convert(Paper { device: Device::CPU, stream: None, ..setup.paper() }));
    assert_eq!(setup.events(), [Dropped]);
}

#[test]
fn an_export_of_a_view_uses_it() {
    let setup = Setup::new();
    let third = Office::new(Strides::Any);
    *third.side.current.lock().unwrap() = Some(OWNER);
    // `to` holds a view of the paper, and exports the same memory while OTHER is its current stream.
    let lease = setup.convert(setup.paper());
    let view = Item::Own(Paper { stream: Some(OTHER), ..setup.paper() });
    let chained = transfer(&setup.to, &third, &view, &setup.ordering, &Options::default()).expect("it converts");
    drop(chained);
    setup.events();
    drop(lease);
    assert_eq!(setup.events(), [Ordered(READER, OWNER), Ordered(OTHER, OWNER), Dropped]);
}

#[test]
fn a_refused_import_gives_back() {
    let mut setup = Setup::new();
    setup.to.refuses = true;
    let item = Item::Own(setup.paper());
    let refused = transfer(&setup.from, &setup.to, &item, &setup.ordering, &Options::default());
    assert_eq!(refused.err().expect("it is refused").kind(), ErrorKind::Framework);
    assert_eq!(setup.events(), [Ordered(OWNER, READER), Ordered(READER, OWNER), Dropped]);
}

#[test]
fn a_failed_hand_over_gives_back() {
    let setup = Setup::new();
    *setup.recorder.fails.lock().unwrap() = true;
    let item = Item::Own(setup.paper());
    let failed = transfer(&setup.from, &setup.to, &item, &setup.ordering, &Options::default());
    assert_eq!(failed.err().expect("it fails").kind(), ErrorKind::Driver);
    assert_eq!(setup.events(), [Dropped]);
}

#[test]
fn a_panic_of_the_owner_stops_at_the_lease() {
    let setup = Setup::new();
    let before = stats().released;
    drop(setup.convert(Paper { panics: true, device: Device::CPU, stream: None, ..setup.paper() }));
    assert_eq!(setup.events(), [Dropped]);
    assert!(stats().released > before);
}

#[test]
fn a_copy_is_made_by_the_producer_and_told() {
    let setup = Setup::new();
    let item = Item::Own(Paper { strides: vec![-3, 1], ..setup.paper() });
    let (copy, told) =
        transfer(&setup.from, &setup.to, &item, &setup.ordering, &Options::default()).expect("it converts");
    assert_eq!((told.plan, told.bytes_copied), (Plan::Copy(Reason::NegativeStrides), 24));
    assert_eq!(told.ordered, Some((OWNER, READER)));
    let Item::Leased(lease) = copy else { unreachable!("import returns leases") };
    assert_eq!((lease.data(), lease.is_copy(), lease.layout().is_compact()), (0x20000, true, true));
    // The original has been returned already.
    assert_eq!(setup.events(), [Dropped, Ordered(OWNER, READER)]);
}

#[test]
fn the_streams_of_a_view_are_kept_alive_until_it_is_gone() {
    let setup = Setup::new();
    let lease = setup.convert(setup.paper());
    let kept: Arc<()> = Arc::default();
    let keep = kept.clone();
    assert_eq!(setup.to.side.used(0x1000, OTHER, || Some(keep.clone())), 1);
    drop(keep);
    assert_eq!(Arc::strong_count(&kept), 2);
    drop(lease);
    assert_eq!(Arc::strong_count(&kept), 1);
    assert_eq!(setup.to.side.used(0x1000, OTHER, || unreachable!("there is no view")), 0);
}
