//! Copies by the ordering's own kernels: in whose memory, in which stream, after what, and what follows an error.

use crate::common::Event::{Copied as Launched, Dropped, Ordered, Prepared, ReleasedLater, Synchronized};
use crate::common::{ALLOCATED, Copied, Event, Item, Log, OWNER, Office, Paper, READER, Recorder, taken};
use bridge_core::{
    Access, Adapter, CopiedBy, DType, Device, DeviceKind, ErrorKind, Options, Order, Ordering, Pending, Permutation,
    Plan, Reason, Result, Reuse, Strides, Transfer, copied_by, stats, transfer,
};
use std::sync::Arc;

const FRESH: usize = 0x40000;

/// Two offices, an ordering with copies, and a tensor that the consumer cannot take in place.
struct Scene {
    from: Office,
    to: Office,
    recorder: Recorder,
    paper: Paper,
    options: Options,
}

impl Scene {
    fn new(copied: Copied) -> Self {
        let log = Log::default();
        let copies = Some(copied);
        let paper = Paper { strides: vec![1, 2], ..Paper::new(&log) };
        let recorder = Recorder { log, copies, ..Recorder::default() };
        let mut to = Office::new(Strides::Compact);
        to.fresh = Some(fresh());
        Self { from: Office::new(Strides::Any), to, recorder, paper, options: Options::default() }
    }

    /// Takes the tensor across, and returns what was called for it.
    fn convert(self) -> (Result<(Item, Transfer)>, Vec<Event>) {
        let log = self.recorder.log.clone();
        let ordering: Arc<dyn Ordering> = Arc::new(self.recorder);
        let converted = transfer(&self.from, &self.to, &Item::Own(self.paper), &ordering, &self.options);
        assert!(self.from.side.views.is_empty(), "the source is returned");
        (converted, taken(&log))
    }
}

/// Memory of the consumer, in its current stream. Its drops are not logged.
fn fresh() -> Paper {
    Paper { address: FRESH, stream: Some(READER), ..Paper::new(&Log::default()) }
}

fn launched(to: usize, stream: Option<bridge_core::Stream>) -> Event {
    Launched { from: 0x1000, to, flips: 0, stream }
}

#[test]
fn a_kernel_fills_memory_of_the_consumer_in_its_stream() {
    let (converted, events) = Scene::new(Copied::Well).convert();
    let (copy, told) = converted.expect("it converts");
    assert!(matches!(copy, Item::Own(Paper { address: FRESH, .. })), "the consumer's own tensor, without a lease");
    assert_eq!((told.copied_by, told.bytes_copied), (Some(CopiedBy::Kernels), 24));
    assert_eq!(told.ordered, Some((OWNER, READER)));
    let filled = launched(FRESH, Some(READER));
    assert_eq!(events, [Ordered(OWNER, READER), filled, Ordered(READER, OWNER), Dropped]);
}

#[test]
fn the_memory_has_the_order_that_was_asked_for() {
    for (order, strides, filled) in [
        (Order::ColumnMajor, vec![1, 2], true),
        (Order::ColumnMajor, vec![3, 1], false),
        (Order::RowMajor, vec![3, 1], true),
        (Order::RowMajor, vec![1, 2], false),
    ] {
        let mut scene = Scene::new(Copied::Well);
        scene.paper.strides = vec![6, 2];
        scene.to = Office::new(Strides::Any);
        scene.to.fresh = Some(Paper { strides, ..fresh() });
        scene.options.order = Some(order);
        let (converted, events) = scene.convert();
        assert_eq!(events.contains(&launched(FRESH, Some(READER))), filled, "{order}");
        // The producer's own copy is row-major, and the consumer's would be: a column-major one has its own memory.
        let by = converted.expect("it converts").1.copied_by;
        assert!(by == Some(CopiedBy::Kernels) || (order, filled) == (Order::RowMajor, false), "{order}");
    }
}

#[test]
fn a_kernel_fills_memory_of_its_own_where_neither_side_has_any() {
    let mut scene = Scene::new(Copied::Well);
    (scene.from.copies_to, scene.to.fresh) = (None, None);
    let (converted, events) = scene.convert();
    let (copy, told) = converted.expect("it converts");
    assert_eq!((told.copied_by, told.ordered), (Some(CopiedBy::Kernels), Some((OWNER, READER))));
    let Item::Leased(lease) = &copy else { panic!("a view of memory of the ordering") };
    assert!(lease.is_copy() && lease.data() == ALLOCATED && lease.stream() == Some(READER));
    let filled = launched(ALLOCATED, Some(READER));
    assert_eq!(events, [Ordered(OWNER, READER), filled, Ordered(READER, OWNER), Dropped]);

    let mut scene = Scene::new(Copied::Fails(ErrorKind::CopyNeeded));
    (scene.from.copies_to, scene.to.fresh) = (None, None);
    assert_eq!(scene.convert().0.err().map(|error| error.kind()), Some(ErrorKind::CopyNeeded));
}

#[test]
fn a_permuted_tensor_is_one_copy() {
    let mut scene = Scene::new(Copied::Well);
    scene.paper.strides = vec![3, 1];
    scene.to.fresh = Some(Paper { shape: vec![3, 2], strides: vec![2, 1], ..fresh() });
    scene.options.permute = Some(Permutation::new(&[1, 0]).unwrap());
    let (converted, events) = scene.convert();
    assert_eq!(converted.expect("it converts").1.plan, Plan::Copy(Reason::Strides));
    assert_eq!(events.iter().filter(|event| matches!(event, Launched { .. })).count(), 1);
}

#[test]
fn who_would_copy_is_known_before() {
    let known = |change: fn(&mut Scene)| {
        let mut scene = Scene::new(Copied::Well);
        change(&mut scene);
        let log = scene.recorder.log.clone();
        let ordering: Arc<dyn Ordering> = Arc::new(scene.recorder);
        let exported = scene.from.export(&Item::Own(scene.paper)).unwrap();
        let by = copied_by(&scene.from, &scene.to, &exported, &ordering, &scene.options);
        drop(exported);
        assert_eq!(taken(&log), [Dropped], "nothing is copied");
        by
    };
    assert_eq!(known(|_| ()), CopiedBy::Kernels);
    assert_eq!(known(|scene| scene.paper.device = Device::CPU), CopiedBy::Host);
    assert_eq!(known(|scene| std::mem::swap(&mut scene.to.fresh, &mut scene.from.fresh)), CopiedBy::Kernels);
    assert_eq!(known(|scene| scene.options.device = Some(Device::CPU)), CopiedBy::Move);
    assert_eq!(known(|scene| scene.to.fresh = None), CopiedBy::Producer);
    assert_eq!(known(|scene| scene.recorder.copies = None), CopiedBy::Producer);
}

#[test]
fn in_one_stream_a_copy_orders_nothing() {
    let mut scene = Scene::new(Copied::Well);
    *scene.to.side.current.lock().unwrap() = Some(OWNER);
    scene.to.fresh = Some(Paper { stream: Some(OWNER), ..fresh() });
    let (converted, events) = scene.convert();
    assert_eq!(converted.expect("it converts").1.ordered, None);
    assert_eq!(events, [launched(FRESH, Some(OWNER)), Dropped]);
}

#[test]
fn a_source_of_unknown_reuse_is_kept_until_the_kernel_has_run() {
    let mut scene = Scene::new(Copied::Well);
    scene.paper.reuse = Reuse::Unknown;
    let (_, events) = scene.convert();
    let filled = launched(FRESH, Some(READER));
    assert_eq!(events, [Ordered(OWNER, READER), filled, Ordered(READER, OWNER), ReleasedLater(OWNER), Dropped]);
}

#[test]
fn the_kernel_does_what_the_producer_has_deferred() {
    let mut scene = Scene::new(Copied::Well);
    scene.paper.pending = Some(Pending::Negation);
    let (converted, events) = scene.convert();
    assert_eq!(converted.expect("it converts").1.copied_by, Some(CopiedBy::Kernels));
    assert!(events.contains(&Launched { from: 0x1000, to: FRESH, flips: 1 << 31, stream: Some(READER) }));
}

#[test]
fn where_the_consumer_allocates_nothing_the_producer_does() {
    let mut scene = Scene::new(Copied::Well);
    scene.to.fresh = None;
    scene.from.fresh = Some(Paper { stream: Some(OWNER), ..fresh() });
    *scene.from.side.current.lock().unwrap() = Some(OWNER);
    let (converted, events) = scene.convert();
    let (copy, told) = converted.expect("it converts");
    let Item::Leased(lease) = copy else { panic!("the memory is the producer's") };
    assert!(lease.is_copy() && lease.data() == FRESH);
    assert_eq!((told.copied_by, told.ordered), (Some(CopiedBy::Kernels), Some((OWNER, READER))));
    assert_eq!(events, [launched(FRESH, Some(OWNER)), Dropped, Ordered(OWNER, READER)]);
}

#[test]
fn what_the_kernels_do_not_copy_the_frameworks_copy() {
    let (converted, events) = Scene::new(Copied::Fails(ErrorKind::CopyNeeded)).convert();
    let (copy, told) = converted.expect("it converts");
    assert!(matches!(copy, Item::Leased(ref lease) if lease.data() == 0x20000));
    assert_eq!(told.copied_by, Some(CopiedBy::Producer));
    assert!(!events.contains(&Ordered(READER, OWNER)), "the original has had no reader");
    assert_eq!(events.iter().filter(|event| **event == Dropped).count(), 1, "of the original");
}

/// Memory that is not as asked for is not written to.
#[test]
fn memory_that_is_not_fresh_is_not_written_to() {
    let others: [fn(&mut Paper); 8] = [
        |paper| paper.access = Access::ReadOnly,
        |paper| paper.access = Access::Unstated,
        |paper| paper.device = Device::cuda(1),
        |paper| paper.shape = vec![3, 2],
        |paper| paper.strides = vec![1, 2],
        |paper| paper.dtype = DType::INT32,
        |paper| paper.address = 0x1000,
        |paper| paper.pending = Some(Pending::Negation),
    ];
    for (i, other) in others.into_iter().enumerate() {
        let mut scene = Scene::new(Copied::Well);
        scene.to.fresh.iter_mut().for_each(other);
        let (converted, events) = scene.convert();
        assert_eq!(converted.expect("it converts").1.copied_by, Some(CopiedBy::Producer), "{i}");
        assert!(!events.iter().any(|event| matches!(event, Launched { .. })), "{i}");
    }
}

#[test]
fn an_error_at_any_step_returns_the_source() {
    for kind in [ErrorKind::Driver, ErrorKind::Layout, ErrorKind::Device, ErrorKind::OutOfMemory] {
        let (converted, events) = Scene::new(Copied::Fails(kind)).convert();
        assert_eq!(converted.err().expect("the copy fails").kind(), kind);
        // Part of it may be launched, so the source is returned after it.
        let filled = launched(FRESH, Some(READER));
        assert_eq!(events, [Ordered(OWNER, READER), filled, Ordered(READER, OWNER), Dropped]);
    }
    let scene = Scene::new(Copied::Well);
    *scene.recorder.fails.lock().unwrap() = true;
    let (converted, events) = scene.convert();
    assert_eq!(converted.err().expect("the ordering fails").kind(), ErrorKind::Driver);
    assert_eq!(events, [Dropped], "nothing was launched");
}

#[test]
fn a_source_whose_reader_cannot_be_ordered_is_leaked_and_counted() {
    let leaked = stats().leaked;
    let (converted, events) = Scene::new(Copied::BreaksTheOrdering).convert();
    converted.expect("the copy itself is made");
    assert!(stats().leaked > leaked && !events.contains(&Dropped));
}

#[test]
fn without_elements_nothing_is_launched() {
    let mut scene = Scene::new(Copied::Well);
    (scene.paper.shape, scene.paper.strides) = (vec![0, 3], vec![3, 1]);
    scene.paper.access = Access::ReadOnly;
    scene.to.fresh = Some(Paper { shape: vec![0, 3], ..fresh() });
    scene.options.copy = Some(true);
    let (converted, events) = scene.convert();
    assert!(matches!(converted.expect("it converts").0, Item::Own(Paper { address: FRESH, .. })));
    assert_eq!(events, [Dropped]);
}

#[test]
fn on_the_host_the_copy_has_no_stream() {
    let mut scene = Scene::new(Copied::Well);
    (scene.paper.device, scene.paper.stream) = (Device::CPU, None);
    scene.to.fresh = Some(Paper { device: Device::CPU, stream: None, ..fresh() });
    let (converted, events) = scene.convert();
    assert_eq!(converted.expect("it converts").1.copied_by, Some(CopiedBy::Host));
    assert_eq!(events, [Prepared(FRESH..FRESH + 24), launched(FRESH, None), Dropped]);
}

#[test]
fn the_host_waits_before_it_copies_managed_memory() {
    let mut scene = Scene::new(Copied::Well);
    scene.paper.device = Device { kind: DeviceKind::CUDA_MANAGED, index: 0 };
    scene.to.profile.devices = vec![DeviceKind::CPU];
    *scene.to.side.current.lock().unwrap() = None;
    scene.to.fresh = Some(Paper { device: Device::CPU, stream: None, ..fresh() });
    let (converted, events) = scene.convert();
    assert_eq!(converted.expect("it converts").1.copied_by, Some(CopiedBy::Host));
    assert_eq!(events, [Prepared(FRESH..FRESH + 24), Synchronized(OWNER), launched(FRESH, None), Dropped]);
}

#[test]
fn core_allocates_host_memory_where_no_framework_does() {
    let mut scene = Scene::new(Copied::Well);
    (scene.paper.device, scene.paper.stream) = (Device::CPU, None);
    (scene.to.fresh, scene.from.copies_to) = (None, None);
    let (converted, events) = scene.convert();
    let (copy, told) = converted.expect("it converts");
    let Item::Leased(lease) = copy else { panic!("the memory is core's") };
    assert_eq!(told.copied_by, Some(CopiedBy::Host));
    assert_eq!(events, [Prepared(lease.data()..lease.data() + 24), launched(lease.data(), None), Dropped]);
}

#[test]
fn memory_of_a_device_without_a_stream_is_not_written_to() {
    let mut scene = Scene::new(Copied::Well);
    scene.to.fresh = Some(Paper { stream: None, ..fresh() });
    let (converted, _) = scene.convert();
    assert_eq!(converted.expect("it converts").1.copied_by, Some(CopiedBy::Producer));
}
