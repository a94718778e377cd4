//! Moves to another device: in whose memory, in which stream, after what, and what follows an error.

use crate::common::Event::{Dropped, Moved, Ordered, OrderedAcross, ReleasedLater, Synchronized};
use crate::common::{ALLOCATED, Copied, Event, GPU, Item, Log, OWNER, Office, Paper, READER, Recorder, taken};
use bridge_core::{
    CopiedBy, Device, DeviceKind, ErrorKind, HostOnly, Options, Ordering, Pending, Plan, Reason, Result, Reuse, Stream,
    Strides, Transfer, stats, transfer,
};
use std::sync::Arc;

const OTHER: Device = Device::cuda(1);
const FRESH: usize = 0x40000;

/// A tensor, and the device that it is to be moved to. The drops of the source are logged, and those of the target.
struct Scene {
    from: Office,
    to: Office,
    recorder: Recorder,
    paper: Paper,
    options: Options,
}

impl Scene {
    fn new(here: Device, there: Device, copied: Copied) -> Self {
        let log = Log::default();
        let stream = |device: Device, stream| (device != Device::CPU).then_some(stream);
        let paper = Paper { device: here, stream: stream(here, OWNER), ..Paper::new(&log) };
        let target = Paper { device: there, stream: stream(there, READER), address: FRESH, ..Paper::new(&log) };
        let recorder = Recorder { log, copies: Some(copied), ..Recorder::default() };
        let (from, mut to) = (Office::new(Strides::Any), Office::new(Strides::Any));
        *from.side.current.lock().unwrap() = stream(here, OWNER);
        *to.side.current.lock().unwrap() = stream(there, READER);
        to.fresh = Some(target);
        let options = Options::default().with_device(there);
        Self { from, to, recorder, paper, options }
    }

    fn convert(self) -> (Result<(Item, Transfer)>, Vec<Event>) {
        let log = self.recorder.log.clone();
        let ordering: Arc<dyn Ordering> = Arc::new(self.recorder);
        let converted = transfer(&self.from, &self.to, &Item::Own(self.paper), &ordering, &self.options);
        assert!(self.from.side.views.is_empty(), "the source is returned");
        (converted, taken(&log))
    }
}

fn moved(from: Device, to: Device, stream: Stream) -> Event {
    Moved { from, to, flips: 0, stream: Some(stream) }
}

#[test]
fn to_the_host_the_move_is_in_the_stream_of_the_source() {
    let (converted, events) = Scene::new(GPU, Device::CPU, Copied::Well).convert();
    let (result, told) = converted.expect("it converts");
    assert!(matches!(result, Item::Own(Paper { address: FRESH, .. })));
    let expected = Transfer::planned(Plan::Copy(Reason::Moved), 24, Some(CopiedBy::Move));
    assert_eq!(told, expected);
    assert_eq!(events, [moved(GPU, Device::CPU, OWNER), Dropped, Dropped]);
}

#[test]
fn from_the_host_the_move_is_in_the_stream_of_the_target() {
    let (converted, events) = Scene::new(Device::CPU, GPU, Copied::Well).convert();
    assert_eq!(converted.expect("it converts").1.ordered, None);
    assert_eq!(events, [moved(Device::CPU, GPU, READER), Dropped, Dropped]);
}

#[test]
fn the_host_waits_before_it_reads_pinned_memory_that_a_device_writes() {
    let pinned = Device { kind: DeviceKind::CUDA_HOST, index: 0 };
    let (converted, events) = Scene::new(pinned, GPU, Copied::Well).convert();
    converted.expect("it converts");
    assert_eq!(events[..2], [Synchronized(OWNER), moved(pinned, GPU, READER)]);
}

#[test]
fn between_devices_each_stream_waits_for_the_other_in_turn() {
    let (converted, events) = Scene::new(GPU, OTHER, Copied::Well).convert();
    assert_eq!(converted.expect("it converts").1.ordered, Some((OWNER, READER)));
    let ready = OrderedAcross((OTHER, READER), (GPU, OWNER));
    let arrived = OrderedAcross((GPU, OWNER), (OTHER, READER));
    assert_eq!(events, [ready, moved(GPU, OTHER, OWNER), arrived, Dropped, Dropped]);
}

#[test]
fn the_move_does_what_the_producer_has_deferred() {
    let mut scene = Scene::new(GPU, Device::CPU, Copied::Well);
    scene.paper.pending = Some(Pending::Negation);
    let (_, events) = scene.convert();
    assert!(matches!(events[0], Moved { flips: 0x8000_0000, .. }), "{events:?}");
}

#[test]
fn a_source_of_unknown_reuse_is_kept_until_the_move_is_done() {
    let mut scene = Scene::new(GPU, OTHER, Copied::Well);
    scene.paper.reuse = Reuse::Unknown;
    let (_, events) = scene.convert();
    assert_eq!(events[3..], [ReleasedLater(OWNER), Dropped, Dropped]);
}

#[test]
fn a_consumer_without_memory_of_its_own_takes_that_of_the_copies() {
    for (here, there) in [(Device::CPU, GPU), (GPU, OTHER)] {
        let mut scene = Scene::new(here, there, Copied::Well);
        scene.to.fresh = None;
        let (converted, events) = scene.convert();
        let (result, _) = converted.expect("it converts");
        let Item::Leased(lease) = result else { panic!("the memory is not the consumer's own") };
        assert!(lease.is_copy() && lease.data() == ALLOCATED && lease.device() == there);
        assert!(!events.iter().any(|event| matches!(event, Ordered(..))), "it is in the consumer's stream: {events:?}");
    }
    let mut scene = Scene::new(GPU, Device::CPU, Copied::Well);
    scene.to.fresh = None;
    let (result, _) = scene.convert().0.expect("it converts");
    assert!(matches!(result, Item::Leased(lease) if lease.device() == Device::CPU), "core has host memory");
}

#[test]
fn without_elements_nothing_is_launched() {
    for (here, there) in [(GPU, Device::CPU), (Device::CPU, GPU), (GPU, OTHER)] {
        let mut scene = Scene::new(here, there, Copied::Well);
        for paper in [Some(&mut scene.paper), scene.to.fresh.as_mut()].into_iter().flatten() {
            (paper.shape, paper.strides) = (vec![0, 3], vec![3, 1]);
        }
        let (converted, events) = scene.convert();
        assert!(converted.is_ok() && events == [Dropped, Dropped], "{events:?}");
    }
}

#[test]
fn what_cannot_be_moved_is_an_error_before_memory_is_allocated() {
    let mut far = Scene::new(GPU, Device::cuda(2), Copied::Well);
    far.to.fresh = None;
    let (converted, events) = far.convert();
    assert_eq!(converted.err().unwrap().kind(), ErrorKind::Device);
    assert_eq!(events, [Dropped], "of the source alone");

    let scene = Scene::new(GPU, Device::CPU, Copied::Well);
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    let converted = transfer(&scene.from, &scene.to, &Item::Own(scene.paper), &ordering, &scene.options);
    let error = converted.err().expect("nothing moves it");
    assert!(error.kind() == ErrorKind::Device && error.to_string().contains("on cuda:0, not on cpu"), "{error}");
}

#[test]
fn an_error_of_the_copies_returns_both_sides() {
    for (here, there) in [(GPU, Device::CPU), (Device::CPU, GPU), (GPU, OTHER)] {
        for kind in [ErrorKind::Driver, ErrorKind::CopyNeeded, ErrorKind::Captured] {
            let (converted, events) = Scene::new(here, there, Copied::Fails(kind)).convert();
            assert_eq!(converted.err().unwrap().kind(), kind);
            assert_eq!(events.iter().filter(|event| **event == Dropped).count(), 2, "{events:?}");
        }
    }
}

/// Work that cannot be ordered before the consumer's is waited for, so that the target can be dropped.
#[test]
fn where_the_consumer_cannot_be_ordered_the_host_waits() {
    let (converted, events) = Scene::new(GPU, OTHER, Copied::BreaksTheOrdering).convert();
    assert_eq!(converted.err().unwrap().kind(), ErrorKind::Driver);
    assert_eq!(events[2..], [Synchronized(OWNER), Dropped, Dropped]);
}

#[test]
fn a_target_whose_work_has_no_end_is_leaked_and_counted() {
    let before = stats().leaked;
    let mut scene = Scene::new(GPU, OTHER, Copied::BreaksTheOrdering);
    scene.recorder.never_waits = true;
    let (converted, events) = scene.convert();
    assert_eq!(converted.err().unwrap().kind(), ErrorKind::Driver);
    assert_eq!(events.iter().filter(|event| **event == Dropped).count(), 1, "the source, in its own stream");
    assert!(stats().leaked > before);
}

#[test]
fn device_memory_without_a_stream_is_returned_after_the_host_has_waited() {
    let mut scene = Scene::new(GPU, OTHER, Copied::Well);
    scene.paper.stream = None;
    let (converted, events) = scene.convert();
    converted.expect("it converts");
    assert_eq!(events[3..], [Synchronized(Stream::LEGACY), Dropped, Dropped]);
}

#[test]
fn a_device_that_the_target_lacks_is_refused_before_anything() {
    let mut scene = Scene::new(GPU, Device::CPU, Copied::Well);
    scene.to.profile.devices = vec![DeviceKind::CUDA];
    let (converted, events) = scene.convert();
    assert_eq!(converted.err().unwrap().kind(), ErrorKind::Device);
    assert_eq!(events, [Dropped]);
}
