//! Which side makes a copy, and what the copy waits for.

use crate::common::Event::{Deferred, Dropped, Ordered, ReleasedLater, Synchronized};
use crate::common::{GPU, Item, OTHER, OWNER, Office, Paper, READER, Recorder, taken};
use bridge_core::{
    Access, Device, DeviceKind, ErrorKind, Lease, Options, Ordering, Pending, Result, Reuse, Stream, Strides, Transfer,
    stats, transfer,
};
use std::sync::Arc;

const COPY: Options = Options::copied();

fn convert(
    recorder: &Arc<Recorder>,
    from: &Office,
    to: &Office,
    item: &Item,
    how: &Options,
) -> Result<(Item, Transfer)> {
    let ordering: Arc<dyn Ordering> = recorder.clone();
    transfer(from, to, item, &ordering, how)
}

fn leased(converted: Result<(Item, Transfer)>) -> Lease {
    match converted.expect("it converts").0 {
        Item::Leased(lease) => lease,
        Item::Own(_) => panic!("the consumer has copied"),
    }
}

#[test]
fn the_owner_of_a_view_waits_for_a_copy_of_the_view() {
    let recorder = Arc::new(Recorder::default());
    let (from, to, third) = (Office::new(Strides::Any), Office::new(Strides::Any), Office::new(Strides::Any));
    let paper = Paper::new(&recorder.log);
    let view = leased(convert(&recorder, &from, &to, &Item::Own(paper.clone()), &Options::default()));
    // `to` copies its view while OTHER is its current stream.
    let item = Item::Own(Paper { stream: Some(OTHER), ..paper });
    drop(convert(&recorder, &to, &third, &item, &COPY).expect("it converts"));
    taken(&recorder.log);
    drop(view);
    assert_eq!(taken(&recorder.log), [Ordered(READER, OWNER), Ordered(OTHER, OWNER), Dropped]);
}

/// The copy may still read it in a stream of which the allocator does not know.
#[test]
fn what_the_producer_has_copied_is_given_back_after_the_copy() {
    let given_back = |reuse, pending| {
        let recorder = Arc::new(Recorder::default());
        let (mut from, to) = (Office::new(Strides::Any), Office::new(Strides::Any));
        from.copies_to = Some(0x2000);
        let paper = Paper { reuse, pending, ..Paper::new(&recorder.log) };
        let copy = leased(convert(&recorder, &from, &to, &Item::Own(paper), &COPY));
        let events = taken(&recorder.log);
        drop(copy);
        events
    };
    assert_eq!(given_back(Reuse::Unknown, None), [ReleasedLater(OWNER), Dropped, Ordered(OWNER, READER)]);
    assert_eq!(given_back(Reuse::InStreamOrder, None), [Dropped, Ordered(OWNER, READER)]);
    let pending = Some(Pending::Conjugation);
    assert_eq!(given_back(Reuse::Unknown, pending), [ReleasedLater(OWNER), Dropped, Ordered(OWNER, READER)]);
}

#[test]
fn a_copy_that_is_none_or_does_not_fit_is_made_by_core_on_the_host() {
    let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
    // Every second element of each row of six, the rows reversed.
    let (shape, strides, first) = (vec![2, 3], vec![-6, 2], 6);
    let expected = [6., 8., 10., 0., 2., 4.];
    let address = values.as_ptr().expose_provenance() + first * size_of::<f32>();
    for copies_to in [None, Some(address), Some(0x20001)] {
        for copy in [None, Some(true)] {
            let recorder = Arc::new(Recorder::default());
            let mut from = Office::new(Strides::Any);
            from.copies_to = copies_to;
            let (device, stream) = (Device::CPU, None);
            let (shape, strides) = (shape.clone(), strides.clone());
            let paper = Paper { device, stream, shape, strides, address, ..Paper::new(&recorder.log) };
            let options = Options::default().with_copy(copy);
            let to = Office::new(Strides::Compact);
            let lease = leased(convert(&recorder, &from, &to, &Item::Own(paper), &options));
            assert!(lease.is_copy() && lease.layout().is_compact() && lease.data().is_multiple_of(64));
            assert_eq!(lease.access(), Access::ReadWrite);
            // SAFETY: the lease is on six floats, which nothing writes to.
            let copied = unsafe { std::slice::from_raw_parts(lease.data() as *const f32, 6) };
            assert_eq!(copied, expected, "{copies_to:x?}");
        }
    }
}

#[test]
fn on_a_device_the_consumer_copies_what_it_can_take_in_place() {
    let recorder = Arc::new(Recorder::default());
    let (mut from, to) = (Office::new(Strides::Any), Office::new(Strides::Compact));
    from.copies_to = None;
    let paper = Paper::new(&recorder.log);
    let (copy, told) = convert(&recorder, &from, &to, &Item::Own(paper), &COPY).expect("it converts");
    assert!(matches!(copy, Item::Own(Paper { address: 0x20000, access: Access::ReadWrite, .. })));
    assert_eq!((told.bytes_copied, told.ordered), (24, Some((OWNER, READER))));
    // The copied view is returned after the consumer's stream.
    assert_eq!(taken(&recorder.log), [Ordered(OWNER, READER), Ordered(READER, OWNER), Dropped]);

    let paper = || Paper::new(&recorder.log);
    let columns = (Paper { strides: vec![1, 2], ..paper() }, "strides that are not compact");
    // The consumer could be written to through the view that it copies.
    let read_only = (Paper { access: Access::ReadOnly, ..paper() }, "memory that is read-only");
    for (paper, why) in [columns, read_only] {
        let refused = convert(&recorder, &from, &to, &Item::Own(paper), &COPY).err().expect("neither can copy it");
        assert_eq!(refused.kind(), ErrorKind::CopyNeeded);
        assert!(refused.to_string().contains(why), "{refused}");
    }
}

#[test]
fn a_copy_in_the_memory_of_its_original_is_none() {
    let recorder = Arc::new(Recorder::default());
    let (mut from, to) = (Office::new(Strides::Any), Office::new(Strides::Any));
    let paper = Paper::new(&recorder.log);
    from.copies_to = Some(paper.address);
    let (copy, told) = convert(&recorder, &from, &to, &Item::Own(paper), &COPY).expect("the consumer copies it");
    assert!(matches!(copy, Item::Own(Paper { address: 0x20000, .. })));
    assert_eq!(told.copied_by.expect("it is copied").to_string(), "consumer");
}

#[test]
fn a_copy_has_to_be_on_the_device_that_was_asked_for() {
    let recorder = Arc::new(Recorder::default());
    let (from, to) = (Office::new(Strides::Any), Office::new(Strides::Compact));
    let paper = || Item::Own(Paper { device: Device::cuda(1), ..Paper::new(&recorder.log) });
    let options = Options::copied().with_device(Device::cuda(1));
    assert_eq!(leased(convert(&recorder, &from, &to, &paper(), &options)).device(), Device::cuda(1));
    let elsewhere = Options::copied().with_device(GPU);
    let refused = convert(&recorder, &from, &to, &paper(), &elsewhere).err().expect("it is on another device");
    assert_eq!(refused.kind(), ErrorKind::Device);
}

#[test]
fn managed_memory_is_memory_of_its_gpu_and_of_the_host() {
    let managed = Device { kind: DeviceKind::CUDA_MANAGED, index: 1 };
    let recorder = Arc::new(Recorder::default());
    let from = Office::new(Strides::Any);
    let paper = || Item::Own(Paper { device: managed, ..Paper::new(&recorder.log) });
    let lease = leased(convert(&recorder, &from, &Office::new(Strides::Any), &paper(), &Options::default()));
    assert_eq!((lease.device(), taken(&recorder.log)), (Device::cuda(1), vec![Ordered(OWNER, READER)]));
    drop(lease);

    let mut host = Office::new(Strides::Any);
    host.profile.devices = vec![DeviceKind::CPU];
    *host.side.current.lock().unwrap() = None;
    taken(&recorder.log);
    let lease = leased(convert(&recorder, &from, &host, &paper(), &Options::default()));
    assert_eq!((lease.device(), taken(&recorder.log)), (Device::CPU, vec![Synchronized(OWNER)]));
    drop(lease);
    assert_eq!(taken(&recorder.log), [Dropped]);
    let asked = Options::default().with_device(GPU);
    let refused = convert(&recorder, &from, &Office::new(Strides::Any), &paper(), &asked);
    assert_eq!(refused.err().expect("it is another GPU").kind(), ErrorKind::Device);
}

/// Drops a view that was read on READER, while `current` is the consumer's stream and `captured` is captured.
fn dropped_in_a_capture(captured: Stream, current: Stream) -> (Arc<Recorder>, u64) {
    dropped_on(current, OWNER, |recorder| *recorder.captured.lock().unwrap() = Some(captured))
}

/// Drops a view that was read on READER, while `current` is the consumer's stream and after something else.
fn dropped_on(current: Stream, owner: Stream, before: impl FnOnce(&Recorder)) -> (Arc<Recorder>, u64) {
    let recorder = Arc::new(Recorder::default());
    let to = Office::new(Strides::Any);
    let item = Item::Own(Paper { stream: Some(owner), ..Paper::new(&recorder.log) });
    let lease = leased(convert(&recorder, &Office::new(Strides::Any), &to, &item, &Options::default()));
    taken(&recorder.log);
    *to.side.current.lock().unwrap() = Some(current);
    before(&recorder);
    let leaked = stats().leaked;
    drop(lease);
    (recorder, leaked)
}

#[test]
fn a_failure_is_not_taken_for_a_capture() {
    // Only the stream that is current at the drop needs the ordering.
    let (recorder, leaked) = dropped_on(OTHER, READER, |recorder| *recorder.fails.lock().unwrap() = true);
    assert_eq!(taken(&recorder.log), []);
    assert!(stats().leaked > leaked);
}

#[test]
fn a_failure_after_a_capture_leaks_and_ends_the_wait() {
    let (recorder, leaked) = dropped_in_a_capture(OTHER, OTHER);
    taken(&recorder.log);
    let mut attempt = recorder.deferred.lock().unwrap().pop().expect("it waits");
    *recorder.captured.lock().unwrap() = None;
    *recorder.fails.lock().unwrap() = true;
    assert!(attempt(), "no later attempt would do better");
    drop(attempt);
    assert_eq!(taken(&recorder.log), []);
    assert!(stats().leaked > leaked);
}

#[test]
fn a_view_dropped_in_a_capture_that_it_took_no_part_in_is_given_back_after_it() {
    let (recorder, _) = dropped_in_a_capture(OTHER, OTHER);
    assert_eq!(taken(&recorder.log), [Ordered(READER, OWNER), Deferred(OTHER)]);
    let mut attempt = recorder.deferred.lock().unwrap().pop().expect("it waits");
    assert!(!attempt(), "the capture goes on");
    *recorder.captured.lock().unwrap() = None;
    assert!(attempt());
    assert_eq!(taken(&recorder.log), [Ordered(OTHER, OWNER), Dropped]);
    drop(attempt);
    assert_eq!(taken(&recorder.log), []);
}

#[test]
fn a_view_dropped_while_its_owner_is_captured_is_given_back_after_it() {
    let (recorder, _) = dropped_in_a_capture(OWNER, OTHER);
    assert_eq!(taken(&recorder.log), [Deferred(OWNER)]);
    let mut attempt = recorder.deferred.lock().unwrap().pop().expect("it waits");
    *recorder.captured.lock().unwrap() = None;
    assert!(attempt());
    assert_eq!(taken(&recorder.log), [Ordered(READER, OWNER), Ordered(OTHER, OWNER), Dropped]);
}

#[test]
fn a_view_that_took_part_in_a_capture_is_lost_and_counted() {
    let (recorder, leaked) = dropped_in_a_capture(READER, READER);
    assert!(stats().leaked > leaked);
    assert!(!taken(&recorder.log).contains(&Dropped));
}
