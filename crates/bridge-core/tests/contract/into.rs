//! Copies into tensors that exist: what is refused before anything is launched, and what is ordered.

use crate::common::Event::{
    Copied as Launched, Dropped, Moved, Ordered, ReleasedAfterAllWork, ReleasedLater, Synchronized,
};
use crate::common::{Copied, Event, Item, Log, OTHER, OWNER, Office, Paper, READER, Recorder, Side, taken};
use bridge_core::{
    Access, DType, Device, DeviceKind, ErrorKind, Misfit, Options, Ordering, Pair, Pending, Result, Reuse, Stream,
    Strides, Views, copy_into, transfer,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

const TARGET: usize = 0x40000;

struct Scene {
    from: Office,
    to: Office,
    copies: Option<Copied>,
    source: Paper,
    target: Paper,
    log: Log,
}

impl Scene {
    fn new() -> Self {
        let log = Log::default();
        // The drops of the target are not logged.
        let target = Paper { address: TARGET, stream: Some(READER), ..Paper::new(&Log::default()) };
        let (from, to) = (Office::new(Strides::Any), Office::new(Strides::Compact));
        Self { from, to, copies: Some(Copied::Well), source: Paper::new(&log), target, log }
    }

    fn copy(self) -> (Result<Option<(Stream, Stream)>>, Vec<Event>) {
        let recorder = Recorder { log: self.log.clone(), copies: self.copies, ..Recorder::default() };
        let ordering: Arc<dyn Ordering> = Arc::new(recorder);
        let (source, target) = (Item::Own(self.source), Item::Own(self.target));
        let copied = copy_into(&self.from, &self.to, &source, &target, &ordering);
        assert!(self.from.side.views.is_empty() && self.to.side.views.is_empty());
        (copied, taken(&self.log))
    }
}

#[test]
fn the_copy_runs_in_the_stream_of_the_target_after_the_source_and_before_its_return() {
    let (copied, events) = Scene::new().copy();
    assert_eq!(copied.unwrap(), Some((OWNER, READER)));
    let launched = Launched { from: 0x1000, to: TARGET, flips: 0, stream: Some(READER) };
    assert_eq!(events, [Ordered(OWNER, READER), launched, Ordered(READER, OWNER), Dropped]);
}

#[test]
fn a_consumer_that_panics_returns_no_memory_under_the_copy() {
    let mut scene = Scene::new();
    scene.target = Paper { log: scene.log.clone(), ..scene.target };
    scene.to.side = Arc::new(Side {
        current: Mutex::new(Some(READER)),
        views: Views::default(),
        panics: true,
        elsewhere: false,
        steady: false,
    });
    let (copied, events) = scene.copy();
    assert!(copied.is_ok() && matches!(events.last(), Some(Launched { .. })), "it is leaked: {events:?}");

    let mut launches = 0;
    for says in 0..4 {
        let mut scene = Scene::new();
        scene.target = Paper { log: scene.log.clone(), reuse: Reuse::Unknown, ..scene.target };
        scene.to.says.store(says, Relaxed);
        let log = scene.log.clone();
        let copied = catch_unwind(AssertUnwindSafe(|| scene.copy()));
        let events = copied.map_or_else(|_| taken(&log), |(_, events)| events);
        if events.iter().any(|event| matches!(event, Launched { .. })) {
            launches += 1;
            assert!(events.ends_with(&[ReleasedLater(READER), Dropped]), "{says}: {events:?}");
        }
    }
    assert!(launches > 0);
}

#[test]
fn a_target_of_unknown_reuse_is_kept_until_the_copy_has_run() {
    let mut scene = Scene::new();
    scene.target.reuse = Reuse::Unknown;
    let (_, events) = scene.copy();
    assert_eq!(events.last(), Some(&ReleasedLater(READER)));
}

#[test]
fn deferred_operations_of_both_sides_are_done() {
    const SIGN: u128 = 1 << 31;
    let negated = Some(Pending::Negation);
    for (source, target, expected) in [(negated, None, SIGN), (None, negated, SIGN), (negated, negated, 0)] {
        let mut scene = Scene::new();
        (scene.source.pending, scene.target.pending) = (source, target);
        let (_, events) = scene.copy();
        assert!(events.iter().any(|event| matches!(event, Launched { flips, .. } if *flips == expected)));
    }
}

#[test]
fn a_smaller_source_is_repeated() {
    for (shape, strides) in [
        (vec![3], vec![2]),
        (vec![1, 3], vec![7, 1]),
        (vec![2, 1], vec![5, 1]),
        (vec![], vec![]),
        (vec![1, 2, 3], vec![9, 3, 1]),
        (vec![1, 1, 1, 3], vec![9, 9, 9, 1]),
    ] {
        let mut scene = Scene::new();
        (scene.source.shape, scene.source.strides) = (shape, strides);
        // The fake copies check that both sides have one shape.
        assert!(matches!(scene.copy().1[1], Launched { from: 0x1000, .. }));
    }
    for shape in [vec![2], vec![3, 3], vec![2, 2, 3], vec![1, 2, 2, 3], vec![0, 2, 3], vec![1, 3, 3], vec![0, 3]] {
        let mut scene = Scene::new();
        (scene.source.strides, scene.source.shape) = (vec![1; shape.len()], shape);
        let (copied, events) = scene.copy();
        assert_eq!((copied.unwrap_err().kind(), events), (ErrorKind::Layout, vec![Dropped]));
    }
}

#[test]
fn what_cannot_be_copied_is_refused_before_anything_is_ordered() {
    type Change = fn(&mut Scene);
    let table: [(Change, ErrorKind); 10] = [
        (|scene| scene.target.access = Access::ReadOnly, ErrorKind::ReadOnly),
        (|scene| scene.to.immutable = true, ErrorKind::ReadOnly),
        (|scene| scene.target.dtype = DType::INT32, ErrorKind::Dtype),
        (|scene| scene.target.device = Device::cuda(2), ErrorKind::Device),
        (|scene| scene.target.device.kind = DeviceKind::ROCM, ErrorKind::Device),
        (|scene| scene.target.strides = vec![0, 1], ErrorKind::Layout),
        (|scene| scene.target.strides = vec![2, 1], ErrorKind::Layout),
        (|scene| scene.target.pending = Some(Pending::Packing), ErrorKind::Layout),
        (|scene| scene.target.address = 0x1000 + 20, ErrorKind::Layout),
        (|scene| scene.copies = None, ErrorKind::CopyNeeded),
    ];
    for (i, (change, kind)) in table.into_iter().enumerate() {
        let mut scene = Scene::new();
        change(&mut scene);
        let (copied, events) = scene.copy();
        assert_eq!((copied.unwrap_err().kind(), events), (kind, vec![Dropped]), "{i}");
    }
}

/// A framework whose tensors never change says what to do instead.
#[test]
fn a_target_that_never_changes_is_refused_by_its_framework() {
    for (immutable, access, said) in [
        (true, Access::Immutable, "planned"),
        (true, Access::ReadOnly, "is read-only"),
        (false, Access::Immutable, "is read-only"),
    ] {
        let mut scene = Scene::new();
        (scene.to.immutable, scene.target.access) = (immutable, access);
        let error = scene.copy().0.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnly);
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[test]
fn a_source_that_must_be_packed_is_copied_by_its_framework_first() {
    let mut scene = Scene::new();
    (scene.source.pending, scene.source.strides) = (Some(Pending::Packing), vec![0, 0]);
    let (copied, events) = scene.copy();
    assert_eq!(copied.unwrap(), Some((OWNER, READER)));
    let launched = Launched { from: 0x20000, to: TARGET, flips: 0, stream: Some(READER) };
    assert_eq!(events, [Dropped, Ordered(OWNER, READER), launched, Ordered(READER, OWNER), Dropped]);
    let mut scene = Scene::new();
    (scene.source.pending, scene.from.copies_to) = (Some(Pending::Packing), None);
    let (copied, events) = scene.copy();
    assert_eq!((copied.unwrap_err().kind(), events), (ErrorKind::CopyNeeded, vec![Dropped]));
}

#[test]
fn interleaved_slices_of_one_tensor_are_copied() {
    let mut scene = Scene::new();
    (scene.source.strides, scene.target.strides) = (vec![6, 2], vec![6, 2]);
    scene.target.address = 0x1000 + 4;
    assert!(scene.copy().0.is_ok());
}

#[test]
fn pinned_and_managed_memory_are_copied_as_what_the_target_is() {
    let pinned = Device { kind: DeviceKind::CUDA_HOST, index: 0 };
    let mut scene = Scene::new();
    (scene.source.device, scene.source.stream) = (pinned, None);
    (scene.target.device, scene.target.stream) = (pinned, None);
    assert!(matches!(scene.copy().1[..], [Launched { stream: None, .. }, Dropped]));
    let mut scene = Scene::new();
    scene.source.device = Device { kind: DeviceKind::CUDA_MANAGED, index: 0 };
    assert!(scene.copy().0.is_ok(), "managed memory of the GPU of the target");
}

#[test]
fn a_target_in_another_memory_is_moved_to() {
    let mut scene = Scene::new();
    (scene.target.device, scene.target.stream) = (Device::CPU, None);
    let (copied, events) = scene.copy();
    copied.unwrap();
    let (from, to) = (Device::cuda(0), Device::CPU);
    assert_eq!(events[0], Moved { from, to, flips: 0, stream: Some(OWNER) });
    assert_eq!(events.last(), Some(&Dropped));
    for device in [Device::CPU, Device::cuda(1)] {
        let mut scene = Scene::new();
        (scene.copies, scene.target.device) = (None, device);
        let (copied, events) = scene.copy();
        assert_eq!((copied.unwrap_err().kind(), events), (ErrorKind::Device, vec![Dropped]), "without copies");
    }
}

#[test]
fn an_error_of_the_copy_returns_the_source() {
    let mut scene = Scene::new();
    scene.copies = Some(Copied::Fails(ErrorKind::Driver));
    let (copied, events) = scene.copy();
    assert_eq!(copied.unwrap_err().kind(), ErrorKind::Driver);
    assert_eq!(events[2..], [Ordered(READER, OWNER), Dropped]);
}

/// The target may be a view of imported memory: its owner waits for the write.
#[test]
fn the_owner_of_a_view_waits_for_a_write_to_it() {
    let recorder = Arc::new(Recorder { copies: Some(Copied::Well), ..Recorder::default() });
    let ordering: Arc<dyn Ordering> = recorder.clone();
    let (from, to) = (Office::new(Strides::Any), Office::new(Strides::Any));
    let owned = Paper { address: TARGET, ..Paper::new(&recorder.log) };
    let view = transfer(&from, &to, &Item::Own(owned.clone()), &ordering, &Options::default()).unwrap().0;
    // OTHER is the current stream of `to` when it exports the view as the target.
    let target = Item::Own(Paper { stream: Some(OTHER), log: Log::default(), ..owned });
    *to.side.current.lock().unwrap() = Some(OTHER);
    let source = Item::Own(Paper { log: Log::default(), ..Paper::new(&recorder.log) });
    copy_into(&from, &to, &source, &target, &ordering).unwrap();
    taken(&recorder.log);
    *to.side.current.lock().unwrap() = Some(READER);
    drop(view);
    assert_eq!(taken(&recorder.log), [Ordered(READER, OWNER), Ordered(OTHER, OWNER), Dropped]);
}

/// Copies of several papers, all from one adapter to another, and what happened.
fn copy_all(papers: Vec<(Paper, Paper)>, copies: Option<Copied>, log: &Log) -> (Result<(), Misfit>, Vec<Event>) {
    copy_all_to(Office::new(Strides::Compact), papers, copies, log)
}

fn copy_all_to(
    to: Office,
    papers: Vec<(Paper, Paper)>,
    copies: Option<Copied>,
    log: &Log,
) -> (Result<(), Misfit>, Vec<Event>) {
    let from = Office::new(Strides::Any);
    let ordering: Arc<dyn Ordering> = Arc::new(Recorder { log: log.clone(), copies, ..Recorder::default() });
    let items: Vec<_> = papers.into_iter().map(|(source, target)| (Item::Own(source), Item::Own(target))).collect();
    let mut pairs: Vec<Pair<'_, Item, Item>> = Vec::new();
    for (tensor, out) in &items {
        pairs.push(Pair::new(&from, tensor, &to, out));
    }
    let copied = bridge_core::copy_all(&pairs, &ordering).map(drop);
    assert!(from.side.views.is_empty() && to.side.views.is_empty());
    (copied, taken(log))
}

pub fn papers(count: usize, log: &Log) -> Vec<(Paper, Paper)> {
    let source = |index: usize| Paper { address: 0x1000 + 0x100 * index, ..Paper::new(log) };
    // The drops of the targets are not logged.
    let target =
        |index: usize| Paper { address: TARGET + 0x100 * index, stream: Some(READER), ..Paper::new(&Log::default()) };
    (0..count).map(|index| (source(index), target(index))).collect()
}

#[test]
fn many_copies_are_ordered_once_before_the_first_and_once_after_the_last() {
    let log = Log::default();
    let (copied, events) = copy_all(papers(20, &log), Some(Copied::Well), &log);
    copied.unwrap();
    let launched = |event: &&Event| matches!(event, Launched { .. });
    assert_eq!(events.iter().filter(launched).count(), 20);
    assert_eq!(events[0], Ordered(OWNER, READER));
    assert!(events[1..21].iter().all(|event| matches!(event, Launched { .. })), "{events:?}");
    assert_eq!(events[21], Ordered(READER, OWNER), "{events:?}");
    assert!(events[22..].iter().all(|event| *event == Dropped) && events.len() == 42, "{events:?}");
}

#[test]
fn memory_that_is_reused_in_the_stream_of_the_copy_is_returned_without_a_wait() {
    let log = Log::default();
    let returned = |reuse, elsewhere| {
        let mut papers = papers(9, &log);
        papers.iter_mut().for_each(|(source, _)| (source.stream, source.reuse) = (Some(READER), reuse));
        let mut to = Office::new(Strides::Compact);
        Arc::get_mut(&mut to.side).unwrap().elsewhere = elsewhere;
        let (copied, mut events) = copy_all_to(to, papers, Some(Copied::Well), &log);
        copied.unwrap();
        let returned = events.split_off(9);
        assert!(events.iter().all(|event| matches!(event, Launched { .. })), "{events:?}");
        assert!(!returned.iter().any(|event| matches!(event, Ordered(..))), "{returned:?}");
        let count = |wanted: Event| returned.iter().filter(|event| **event == wanted).count();
        [count(Dropped), count(ReleasedLater(READER)), count(ReleasedAfterAllWork(READER))]
    };
    assert_eq!(returned(Reuse::InStreamOrder, false), [9, 0, 0]);
    // The memory of the targets, whose drops are not logged, is reused in stream order.
    let [dropped, released, _] = returned(Reuse::Unknown, false);
    assert!(dropped == 9 && released > 0, "nothing says when the owner reuses it");
    let [dropped, _, released] = returned(Reuse::InStreamOrder, true);
    assert!(dropped == 9 && released == 18, "the consumer may have used other streams: {released}");
}

#[test]
fn a_target_that_must_not_change_is_named_and_keeps_all_from_being_written() {
    let log = Log::default();
    let (from, one, other) = (Office::new(Strides::Any), Office::new(Strides::Any), Office::new(Strides::Any));
    let fixed = Office { immutable: true, ..Office::new(Strides::Any) };
    let items: Vec<_> = papers(6, &log).into_iter().map(|(from, to)| (Item::Own(from), Item::Own(to))).collect();
    let owners = [&one, &one, &other, &one, &fixed, &fixed];
    let each = items.iter().zip(owners);
    let pairs: Vec<Pair<'_, Item, Item>> = each.map(|((tensor, out), to)| Pair::new(&from, tensor, to, out)).collect();
    let ordering: Arc<dyn Ordering> =
        Arc::new(Recorder { log: log.clone(), copies: Some(Copied::Well), ..Recorder::default() });
    let misfit = bridge_core::copy_all(&pairs, &ordering).map(drop).unwrap_err();
    assert_eq!((misfit.index, misfit.error.kind()), (4, ErrorKind::ReadOnly));
    assert!(taken(&log).iter().all(|event| *event == Dropped));
}

#[test]
fn a_pair_that_does_not_fit_keeps_all_from_being_written() {
    let table = [
        (0, None, "the shape and the strides differ in length"),
        (1, Some(3), "the two targets share memory"),
        (2, Some(3), "the target of one shares memory with the source of the other"),
        (3, None, "the tensor and the target share memory"),
    ];
    for (change, beside, said) in table {
        let log = Log::default();
        let mut papers = papers(9, &log);
        match change {
            0 => papers[5].1.shape = vec![7],
            1 => papers[5].1.address = papers[3].1.address + 4,
            2 => papers[5].1.address = papers[3].0.address,
            _ => papers[5].1.address = papers[5].0.address + 4,
        }
        let (copied, events) = copy_all(papers, Some(Copied::Well), &log);
        let misfit = copied.unwrap_err();
        assert_eq!((misfit.index, misfit.beside, misfit.error.kind()), (5, beside, ErrorKind::Layout), "{change}");
        assert!(misfit.error.to_string().contains(said), "{}", misfit.error);
        assert!(events.iter().all(|event| *event == Dropped), "{change}: {events:?}");
    }
}

#[test]
fn a_pair_that_repeats_another_is_copied_once() {
    let log = Log::default();
    let mut papers = papers(9, &log);
    (papers[7].0.address, papers[7].1.address) = (papers[2].0.address, papers[2].1.address);
    let (copied, events) = copy_all(papers, Some(Copied::Well), &log);
    copied.unwrap();
    assert_eq!(events.iter().filter(|event| matches!(event, Launched { .. })).count(), 8);
}

#[test]
fn the_host_waits_once_for_a_stream_whose_memory_it_copies() {
    let log = Log::default();
    let mut papers = papers(3, &log);
    for (source, target) in &mut papers {
        source.device.kind = DeviceKind::CUDA_MANAGED;
        (target.device, target.stream) = (Device::CPU, None);
    }
    let (copied, events) = copy_all(papers, Some(Copied::Well), &log);
    copied.unwrap();
    let launched = |event: &Event| matches!(event, Launched { stream: None, .. });
    assert_eq!(events[0], Synchronized(OWNER), "{events:?}");
    assert!(events[1..4].iter().all(launched) && !events[4..].contains(&Synchronized(OWNER)), "{events:?}");
}

/// The host waits for what it receives.
#[test]
fn what_is_moved_to_the_host_is_moved_last() {
    let log = Log::default();
    let mut papers = papers(3, &log);
    (papers[0].1.device, papers[0].1.stream) = (Device::CPU, None);
    (papers[1].0.device, papers[1].0.stream) = (Device::CPU, None);
    let (copied, events) = copy_all(papers, Some(Copied::Well), &log);
    copied.unwrap();
    let launched = |event: &Event| match event {
        Launched { .. } => Some(None),
        Moved { to, .. } => Some(Some(*to)),
        _ => None,
    };
    let order: Vec<Option<Device>> = events.iter().filter_map(launched).collect();
    assert_eq!(order, [None, Some(Device::cuda(0)), Some(Device::CPU)], "{events:?}");
}

#[test]
fn the_sources_of_a_failed_launch_are_returned_after_what_was_launched() {
    let log = Log::default();
    let (copied, events) = copy_all(papers(9, &log), Some(Copied::Fails(ErrorKind::Driver)), &log);
    let misfit = copied.unwrap_err();
    assert_eq!((misfit.index, misfit.error.kind()), (0, ErrorKind::Driver));
    let returned = events.iter().position(|event| *event == Dropped);
    let ordered = events.iter().position(|event| *event == Ordered(READER, OWNER));
    assert!(ordered.is_some() && ordered < returned, "{events:?}");
}
