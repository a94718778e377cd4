//! Copies that are prepared, and the memory that is kept for them.

use crate::common::Event::{Copied as Launched, Dropped, Ordered, Synchronized};
use crate::common::{Copied, Event, Item, Log, OTHER, OWNER, Office, PLANNED, Paper, READER, Recorder, Side, taken};
use crate::into::papers;
use bridge_core::{
    Access, Device, DeviceKind, ErrorKind, Options, Ordering, Pair, Pending, Prepared, Strides, Views, transfer,
};
use std::sync::{Arc, Mutex};

/// Offices whose exports are in the current stream, which is that of the papers.
fn steady() -> (Office, Office) {
    let (mut from, mut to) = (Office::new(Strides::Any), Office::new(Strides::Compact));
    for (office, current) in [(&mut from, OWNER), (&mut to, READER)] {
        let current = Mutex::new(Some(current));
        office.side =
            Arc::new(Side { current, views: Views::default(), panics: false, elsewhere: false, steady: true });
    }
    (from, to)
}

/// Copies what is held.
fn copied(prepared: &Prepared) {
    // SAFETY: papers are only numbers, and have no memory.
    unsafe { prepared.copy_held() }.unwrap();
}

fn items(count: usize, log: &Log) -> Vec<(Item, Item)> {
    papers(count, log).into_iter().map(|(source, target)| (Item::Own(source), Item::Own(target))).collect()
}

fn pairs<'a>(from: &'a Office, to: &'a Office, items: &'a [(Item, Item)]) -> Vec<Pair<'a, Item, Item>> {
    items.iter().map(|(tensor, out)| Pair::new(from, tensor, to, out)).collect()
}

#[test]
fn what_is_held_is_copied_in_the_streams_of_the_call() {
    let log = Log::default();
    let ordering: Arc<dyn Ordering> =
        Arc::new(Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() });
    let ((from, to), items) = (steady(), items(9, &log));
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    assert_eq!(taken(&log), [], "nothing is ordered before the first call");
    assert!(prepared.held(8).is_some() && prepared.held(9).is_none());
    let launched = |events: &[Event]| events.iter().filter(|event| matches!(event, Launched { .. })).count();
    for current in [OWNER, OTHER] {
        *from.side.current.lock().unwrap() = Some(current);
        copied(&prepared);
        let events = taken(&log);
        assert_eq!((events[0].clone(), launched(&events[1..10])), (Ordered(current, READER), 9), "{events:?}");
        let after: Vec<_> = events[10..].to_vec();
        // The owner may return the memory in the stream of the export, and write in the current one.
        let waits = [Ordered(READER, current), Ordered(READER, OWNER)];
        assert!(waits.iter().all(|wait| after.contains(wait)) && after.len() <= 2, "{after:?}");
    }
    *to.side.current.lock().unwrap() = Some(OWNER);
    copied(&prepared);
    let events = taken(&log);
    assert_eq!(events[0], Ordered(OTHER, OWNER));
    assert!(events[10..].contains(&Ordered(OWNER, READER)), "the owner of the target waits: {events:?}");
    drop(prepared);
    let events = taken(&log);
    assert_eq!(events.iter().filter(|event| **event == Dropped).count(), 9);
}

#[test]
fn what_is_held_is_leaked_where_its_owner_cannot_wait() {
    let log = Log::default();
    let recorder =
        Arc::new(Recorder { copies: Some(Copied::BreaksTheOrdering), log: log.clone(), ..Recorder::default() });
    let ordering: Arc<dyn Ordering> = recorder.clone();
    let ((from, to), items) = (steady(), items(9, &log));
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    copied(&prepared);
    taken(&log);
    drop(prepared);
    assert_eq!(taken(&log), [], "nothing is returned");
}

#[test]
fn what_is_held_may_be_copied_in_a_captured_stream() {
    let log = Log::default();
    let recorder = Arc::new(Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() });
    let ordering: Arc<dyn Ordering> = recorder.clone();
    let ((from, to), items) = (steady(), items(9, &log));
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    for office in [&from, &to] {
        *office.side.current.lock().unwrap() = Some(OTHER);
    }
    *recorder.captured.lock().unwrap() = Some(OTHER);
    copied(&prepared);
    *recorder.captured.lock().unwrap() = None;
    taken(&log);
    drop(prepared);
    assert_eq!(taken(&log).iter().filter(|event| **event == Dropped).count(), 9, "the graph's memory is its maker's");
}

#[test]
fn what_is_held_is_leaked_where_its_owner_is_in_a_capture_of_its_own() {
    let log = Log::default();
    let recorder = Arc::new(Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() });
    let ordering: Arc<dyn Ordering> = recorder.clone();
    let ((from, to), items) = (steady(), items(9, &log));
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    *from.side.current.lock().unwrap() = Some(OTHER);
    // The stream of the export is captured, and that of the copies is not.
    *recorder.captured.lock().unwrap() = Some(OWNER);
    copied(&prepared);
    *recorder.captured.lock().unwrap() = None;
    taken(&log);
    drop(prepared);
    assert_eq!(taken(&log), [], "nothing is returned");
}

/// A target may be a view of imported memory: its owner waits for every write to it, in the stream of the write.
#[test]
fn the_owner_of_a_view_waits_for_what_is_copied_into_it() {
    let log = Log::default();
    let recorder = Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() };
    let ordering: Arc<dyn Ordering> = Arc::new(recorder);
    let ((from, to), mut items) = (steady(), items(1, &Log::default()));
    let (_, target) = papers(1, &Log::default()).remove(0);
    let owned = Item::Own(Paper { stream: Some(OWNER), log: log.clone(), ..target.clone() });
    let view = transfer(&from, &to, &owned, &ordering, &Options::default()).unwrap().0;
    items[0].1 = Item::Own(target);
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    *to.side.current.lock().unwrap() = Some(OTHER);
    copied(&prepared);
    *to.side.current.lock().unwrap() = Some(READER);
    taken(&log);
    drop(view);
    assert!(taken(&log).contains(&Ordered(OTHER, OWNER)));
}

/// Also where views lie over each other.
#[test]
fn the_owner_of_each_view_waits() {
    let log = Log::default();
    let recorder = Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() };
    let ordering: Arc<dyn Ordering> = Arc::new(recorder);
    let ((from, to), items) = (steady(), items(4, &Log::default()));
    let view = |target: usize| {
        let Item::Own(target) = &items[target].1 else { unreachable!() };
        let owned = Item::Own(Paper { stream: Some(OWNER), log: log.clone(), ..target.clone() });
        transfer(&from, &to, &owned, &ordering, &Options::default()).unwrap().0
    };
    // Two views are of the second target, and none is of the third.
    let views = [0, 1, 1, 3].map(view);
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    *to.side.current.lock().unwrap() = Some(OTHER);
    copied(&prepared);
    *to.side.current.lock().unwrap() = Some(READER);
    taken(&log);
    for view in views {
        drop(view);
        assert!(taken(&log).contains(&Ordered(OTHER, OWNER)));
    }
}

/// A tensor that never changes keeps the stream of its export, whatever its framework does later.
#[test]
fn each_owner_of_a_source_is_waited_for() {
    let log = Log::default();
    let recorder = Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() };
    let ordering: Arc<dyn Ordering> = Arc::new(recorder);
    let (from, to) = (Office::new(Strides::Any), steady().1);
    let mut papers = papers(2, &log);
    for ((source, _), stream) in papers.iter_mut().zip([OWNER, OTHER]) {
        (source.access, source.stream) = (Access::Immutable, Some(stream));
    }
    let items: Vec<_> = papers.into_iter().map(|(source, target)| (Item::Own(source), Item::Own(target))).collect();
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    copied(&prepared);
    let events = taken(&log);
    assert_eq!(events[..2], [Ordered(OWNER, READER), Ordered(OTHER, READER)], "{events:?}");
    assert!(events[2..4].iter().all(|event| matches!(event, Launched { .. })), "{events:?}");
}

/// Up in the stream of the target, down in that of the source, each as it is at the call.
#[test]
fn what_is_held_is_moved_in_the_streams_of_the_call() {
    let log = Log::default();
    let recorder = Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() };
    let ordering: Arc<dyn Ordering> = Arc::new(recorder);
    let ((from, to), mut papers) = (steady(), papers(5, &log));
    for (number, (source, target)) in papers.iter_mut().enumerate() {
        let host = if number % 2 == 0 { source } else { target };
        (host.device, host.stream) = (Device::CPU, None);
    }
    let items: Vec<_> = papers.into_iter().map(|(source, target)| (Item::Own(source), Item::Own(target))).collect();
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    assert_eq!(taken(&log), [], "nothing is moved before the first call");
    let (gpu, host) = (Device::cuda(0), Device::CPU);
    let moved = |from, to, stream| Event::Moved { from, to, flips: 0, stream: Some(stream) };
    for (owner, reader) in [(OWNER, READER), (OTHER, READER), (OWNER, OTHER)] {
        *from.side.current.lock().unwrap() = Some(owner);
        *to.side.current.lock().unwrap() = Some(reader);
        copied(&prepared);
        let (up, down) = (moved(host, gpu, reader), moved(gpu, host, owner));
        let mut expected = vec![up.clone(), up.clone(), up];
        // The memory may be returned in the stream of the export.
        expected.extend((reader != READER).then_some(Ordered(reader, READER)));
        expected.extend([down.clone(), down]);
        expected.extend((owner != OWNER).then_some(Ordered(owner, OWNER)));
        assert_eq!(taken(&log), expected);
    }
    drop(prepared);
    assert_eq!(taken(&log).iter().filter(|event| **event == Dropped).count(), 5);
}

/// Each stream waits for the other, and without an order afterwards the memory is never returned.
#[test]
fn what_is_held_is_moved_between_devices() {
    for copies in [Copied::Well, Copied::BreaksTheOrdering] {
        let log = Log::default();
        let recorder = Recorder { copies: Some(copies), log: log.clone(), ..Recorder::default() };
        let ordering: Arc<dyn Ordering> = Arc::new(recorder);
        let ((from, to), mut papers) = (steady(), papers(2, &log));
        papers.iter_mut().for_each(|(_, target)| target.device = Device::cuda(1));
        let items: Vec<_> = papers.into_iter().map(|(source, target)| (Item::Own(source), Item::Own(target))).collect();
        let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
        let ends = ((Device::cuda(1), READER), (Device::cuda(0), OWNER));
        let moved = Event::Moved { from: ends.1.0, to: ends.0.0, flips: 0, stream: Some(OWNER) };
        // SAFETY: papers are only numbers, and have no memory.
        let done = unsafe { prepared.copy_held() };
        let events = taken(&log);
        assert_eq!(events[..3], [Event::OrderedAcross(ends.0, ends.1), moved.clone(), moved]);
        assert_eq!(done.is_ok(), copies == Copied::Well);
        assert_eq!(events[3..].contains(&Event::OrderedAcross(ends.1, ends.0)), done.is_ok());
        drop(prepared);
        let dropped = taken(&log).iter().filter(|event| **event == Dropped).count();
        assert_eq!(dropped, if copies == Copied::Well { 2 } else { 0 });
    }
}

#[test]
fn the_host_waits_for_what_is_held_before_it_copies() {
    let log = Log::default();
    let recorder = Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() };
    let ordering: Arc<dyn Ordering> = Arc::new(recorder);
    let ((from, to), mut papers) = (steady(), papers(2, &log));
    for (source, target) in &mut papers {
        source.device.kind = DeviceKind::CUDA_MANAGED;
        (target.device, target.stream) = (Device::CPU, None);
    }
    let items: Vec<_> = papers.into_iter().map(|(source, target)| (Item::Own(source), Item::Own(target))).collect();
    let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
    copied(&prepared);
    let events = taken(&log);
    assert_eq!(events[0], Synchronized(OWNER), "{events:?}");
    assert!(matches!(events[1..], [Launched { .. }, Launched { .. }]), "{events:?}");
}

#[test]
fn each_group_is_copied_by_its_own_plan() {
    let log = Log::default();
    let recorder = Recorder { copies: Some(Copied::Well), plans: true, log: log.clone(), ..Recorder::default() };
    let ordering: Arc<dyn Ordering> = Arc::new(recorder);
    let (from, to) = (Office::new(Strides::Any), Office::new(Strides::Compact));
    let mut papers = papers(4, &log);
    for (source, target) in &mut papers[2..] {
        (source.device, target.device) = (Device::cuda(1), Device::cuda(1));
    }
    let expected: Vec<_> = papers.iter().map(|(source, target)| (source.address, target.address, PLANNED)).collect();
    let items: Vec<_> = papers.into_iter().map(|(source, target)| (Item::Own(source), Item::Own(target))).collect();
    let pairs = pairs(&from, &to, &items);
    let prepared = Prepared::new(&pairs, &ordering).unwrap();
    taken(&log);
    prepared.copy(&pairs, &ordering).unwrap();
    let launched = |event: Event| match event {
        Launched { from, to, flips, .. } => Some((from, to, flips)),
        _ => None,
    };
    // The group of the first device comes first.
    assert_eq!(taken(&log).into_iter().filter_map(launched).collect::<Vec<_>>(), expected);
}

#[test]
fn nothing_is_held_where_tensors_have_streams_of_their_own() {
    let log = Log::default();
    let ordering: Arc<dyn Ordering> =
        Arc::new(Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() });
    let own = || (Office::new(Strides::Any), Office::new(Strides::Compact));
    let items = items(9, &log);
    for (from, to) in [own(), (steady().0, own().1), (own().0, steady().1)] {
        let pairs = pairs(&from, &to, &items);
        let prepared = Prepared::new(&pairs, &ordering).unwrap();
        assert!(prepared.held(0).is_none());
        assert_eq!(taken(&log), vec![Dropped; 9]);
        prepared.copy(&pairs, &ordering).unwrap();
        assert!(taken(&log).contains(&Ordered(READER, OWNER)));
    }
}

#[test]
fn what_must_be_packed_for_each_copy_is_not_prepared() {
    let log = Log::default();
    let ordering: Arc<dyn Ordering> =
        Arc::new(Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() });
    let ((from, to), mut items) = (steady(), items(3, &log));
    items[2].0 = Item::Own(Paper { address: 0x9000, pending: Some(Pending::Packing), ..Paper::new(&log) });
    let misfit = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap_err();
    assert_eq!((misfit.index, misfit.error.kind()), (2, ErrorKind::CopyNeeded));
}

#[test]
fn a_pair_that_has_changed_is_told() {
    let log = Log::default();
    let ordering: Arc<dyn Ordering> =
        Arc::new(Recorder { copies: Some(Copied::Well), log: log.clone(), ..Recorder::default() });
    for steadily in [true, false] {
        let (from, to) = if steadily { steady() } else { (Office::new(Strides::Any), Office::new(Strides::Compact)) };
        let mut items = items(9, &log);
        let prepared = Prepared::new(&pairs(&from, &to, &items), &ordering).unwrap();
        prepared.check(3, pairs(&from, &to, &items)[3], &ordering).unwrap();
        let target = |paper| Item::Own(Paper { address: 0x8000, stream: Some(READER), ..paper });
        let long = || Paper { shape: vec![2, 4], strides: vec![4, 1], ..Paper::new(&log) };
        let other = || Item::Own(Paper { address: 0x9000, ..Paper::new(&log) });
        let negated = Item::Own(Paper { address: 0x1300, pending: Some(Pending::Negation), ..Paper::new(&log) });
        for (source, out, text) in [
            (None, Some(target(Paper::new(&log))), "the target has another address or layout than before"),
            (Some(Item::Own(long())), Some(target(long())), "the shape of the target was [2, 3] and is now [2, 4]"),
            (Some(Item::Own(long())), None, "changed since the copies were prepared: a tensor of shape [2, 4]"),
            (Some(negated), None, "another device, dtype or deferred operation"),
            (Some(other()), None, "the source has another address or layout than before: prepare the copies again"),
        ] {
            let pair = &items[3];
            let now = (source.as_ref().unwrap_or(&pair.0), out.as_ref().unwrap_or(&pair.1));
            let pair = Pair::new(&from, now.0, &to, now.1);
            let misfit = prepared.check(3, pair, &ordering).unwrap_err();
            assert_eq!((misfit.index, misfit.error.kind()), (3, ErrorKind::Layout));
            assert!(misfit.error.to_string().contains(text), "{}", misfit.error);
        }
        items[3].0 = other();
        taken(&log);
        assert_eq!(prepared.copy(&pairs(&from, &to, &items), &ordering).unwrap_err().index, 3);
        assert!(taken(&log).iter().all(|event| *event == Dropped), "nothing is launched");
    }
}
