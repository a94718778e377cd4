//! Leases that return their memory together, over a model of streams.

use crate::clocks::{Batch, Model};
use crate::common::{Copied, Event, Item, OTHER, OWNER, Office, Paper, READER, Recorder, taken};
use bridge_core::{Adapter, DType, ErrorKind, Options, Ordering, Reuse, Stream, Strides, transfer_all};
use proptest::prelude::*;
use std::sync::Arc;

/// Another owner's stream.
// SAFETY: no driver sees this stream.
const SECOND: Stream = unsafe { Stream::from_handle(0xa1) };

const IN_ORDER: (Stream, Reuse) = (OWNER, Reuse::InStreamOrder);
const UNKNOWN: (Stream, Reuse) = (OWNER, Reuse::Unknown);

#[test]
fn each_pair_of_streams_is_ordered_once_in_each_direction() {
    let tensors: Vec<_> = (0..300).map(|i| if i % 3 == 0 { (SECOND, Reuse::Unknown) } else { IN_ORDER }).collect();
    let mut batch = Batch::new(&tensors);
    assert_eq!(batch.model.state().orders, [(SECOND, READER), (OWNER, READER)]);
    (0..300).for_each(|number| batch.touch(number, READER));
    (0..300).for_each(|number| batch.drop_on(number, Some(READER)));
    assert_eq!(batch.returns().len(), 2);
    assert_eq!(batch.model.state().deferred_releases, 1);
    assert_eq!(batch.drops(), vec![1; 300]);
    assert_eq!(batch.model.flushes.lock().unwrap().len(), 2, "one call for each pair");
}

#[test]
fn a_single_dropped_view_returns_its_memory() {
    let mut batch = Batch::new(&[IN_ORDER; 8]);
    batch.touch(3, READER);
    batch.drop_on(3, Some(READER));
    assert_eq!((batch.drops()[3], batch.returns().len()), (0, 0));
    batch.model.tick();
    assert_eq!((batch.drops()[3], batch.returns().len()), (1, 1));
    batch.touch(4, READER);
    batch.drop_on(4, Some(READER));
    batch.model.tick();
    assert_eq!((batch.drops()[4], batch.returns().len()), (1, 2), "the next one, too");
}

#[test]
fn few_tensors_return_their_memory_at_once() {
    let mut batch = Batch::new(&[UNKNOWN; 7]);
    batch.drop_on(0, Some(READER));
    assert_eq!((batch.drops()[0], batch.returns().len()), (1, 1));
}

#[test]
fn a_view_used_in_another_stream_returns_its_memory_at_once() {
    for recorded in [true, false] {
        let mut batch = Batch::new(&[IN_ORDER; 8]);
        if recorded {
            batch.touch(0, OTHER);
        }
        batch.drop_on(0, Some(if recorded { READER } else { OTHER }));
        assert_eq!(batch.drops()[0], 1);
        assert!(batch.model.flushes.lock().unwrap().is_empty());
    }
}

#[test]
fn a_capture_at_the_drop_leaks_and_one_at_the_flush_delays() {
    let mut batch = Batch::new(&[IN_ORDER; 8]);
    batch.drop_on(0, Some(READER));
    batch.model.state().captured = vec![READER];
    batch.drop_on(1, Some(READER));
    batch.model.tick();
    assert_eq!(batch.drops()[..2], [0, 0]);
    batch.model.end_capture();
    assert_eq!(batch.drops()[..2], [1, 0], "a graph may use the second for ever");
}

#[test]
fn a_capture_between_the_drop_and_the_flush_delays_the_return() {
    let owners = [IN_ORDER, UNKNOWN, (READER, Reuse::Unknown)];
    for (owner, captured) in owners
        .into_iter()
        .flat_map(|owner| [vec![READER], vec![OWNER], vec![READER, OWNER]].map(|captured| (owner, captured)))
    {
        let mut batch = Batch::new(&[owner; 8]);
        batch.touch(0, READER);
        batch.drop_on(0, Some(READER));
        batch.model.state().captured = captured.clone();
        batch.model.tick();
        let waits = captured.contains(&READER) || captured.contains(&owner.0);
        assert_eq!((batch.drops()[0], batch.returns()), (usize::from(!waits), vec![]), "{owner:?}, {captured:?}");
        batch.model.end_capture();
        assert_eq!(batch.drops()[0], 1, "{owner:?}, {captured:?}");
        assert_eq!(batch.model.state().wrong, Vec::<String>::new());
    }
}

#[test]
fn the_first_tensor_that_fails_is_named_and_nothing_is_left() {
    let log = Default::default();
    let (from, to) = (Office::new(Strides::Any), Office::new(Strides::Any));
    let ordering: Arc<dyn Ordering> = Arc::new(Model::default());
    let bad = Paper { dtype: DType::FLOAT64, address: 0x4000, ..Paper::new(&log) };
    let items = [Item::Own(Paper::new(&log)), Item::Own(bad)];
    let tensors: Vec<(&dyn Adapter<Tensor = Item>, _)> = items.iter().map(|item| (&from as _, item)).collect();
    let failed = transfer_all(&tensors, &to, &ordering, &Options::default()).err().expect("float64 is refused");
    assert_eq!((failed.index, failed.error.kind()), (1, ErrorKind::Dtype));
    assert_eq!(log.lock().unwrap().len(), 2, "both buffers are dropped");
    assert!(to.side.views.is_empty());
}

/// Takes ten tensors across that need a copy, and returns what was called, with the drops.
fn copied(recorder: Recorder, from: &Office) -> Vec<Event> {
    let mut to = Office::new(Strides::Compact);
    to.fresh = Some(Paper { address: 0x40000, stream: Some(READER), ..Paper::new(&Default::default()) });
    let log = recorder.log.clone();
    let items: Vec<Item> = (0..10)
        .map(|i| Item::Own(Paper { strides: vec![1, 2], address: 0x1000 + i * 0x100, ..Paper::new(&log) }))
        .collect();
    let ordering: Arc<dyn Ordering> = Arc::new(recorder);
    let tensors: Vec<(&dyn Adapter<Tensor = Item>, _)> = items.iter().map(|item| (from as _, item)).collect();
    let converted = transfer_all(&tensors, &to, &ordering, &Options::default());
    assert_eq!(converted.map_err(|failed| failed.error.to_string()).expect("they convert").len(), 10);
    taken(&log)
}

#[test]
fn kernels_copy_after_one_wait_and_the_owner_waits_once() {
    let recorder = Recorder { copies: Some(Copied::Well), ..Recorder::default() };
    let events = copied(recorder, &Office::new(Strides::Any));
    let is_copy = |event: &Event| matches!(event, Event::Copied { stream: Some(READER), .. });
    assert_eq!(events[0], Event::Ordered(OWNER, READER));
    assert!(events[1..11].iter().all(is_copy), "{events:?}");
    assert_eq!(events[11], Event::Ordered(READER, OWNER));
    assert_eq!(events[12..], [const { Event::Dropped }; 10]);
}

#[test]
fn a_copy_of_the_producer_is_work_that_the_reader_waits_for() {
    let events = copied(Recorder::default(), &Office::new(Strides::Any));
    let orders = events.iter().filter(|event| **event == Event::Ordered(OWNER, READER));
    assert_eq!(orders.count(), 10, "each copy was made after the wait for the one before");
}

/// A step of a random history.
#[derive(Debug, Clone)]
enum Step {
    Touch(usize, Stream),
    Drop(usize, Option<Stream>),
    Tick,
    Capture(Stream),
    EndCapture,
    Fail(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let stream = || prop::sample::select(vec![READER, READER, READER, OWNER, OTHER]);
    let step = prop_oneof![
        6 => (0..12usize, stream()).prop_map(|(number, stream)| Step::Touch(number, stream)),
        8 => (0..12usize, prop::option::weighted(0.9, stream())).prop_map(|(number, stream)| Step::Drop(number, stream)),
        3 => Just(Step::Tick),
        1 => stream().prop_map(Step::Capture),
        1 => Just(Step::EndCapture),
        1 => any::<bool>().prop_map(Step::Fail),
    ];
    prop::collection::vec(step, 0..60)
}

fn tensors() -> impl Strategy<Value = Vec<(Stream, Reuse)>> {
    let owner = prop::sample::select(vec![OWNER, OWNER, SECOND, READER]);
    let reuse = prop::sample::select(vec![Reuse::InStreamOrder, Reuse::Unknown]);
    prop::collection::vec((owner, reuse), 12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever happens, every buffer is dropped once, and not before its readers are ordered; or it is leaked, which
    /// a failure or a capture excuses.
    #[test]
    fn no_buffer_is_returned_early_or_twice(tensors in tensors(), steps in steps()) {
        let mut batch = Batch::new(&tensors);
        for step in steps {
            match step {
                Step::Touch(number, stream) => batch.touch(number, stream),
                Step::Drop(number, current) => batch.drop_on(number, current),
                Step::Tick => batch.model.tick(),
                Step::Capture(stream) => batch.model.state().captured = vec![stream],
                Step::EndCapture => batch.model.end_capture(),
                Step::Fail(fails) => batch.model.state().fails = fails,
            }
        }
        batch.model.state().fails = false;
        batch.model.end_capture();
        (0..12).for_each(|number| batch.drop_on(number, Some(READER)));
        let state = batch.model.state();
        prop_assert_eq!(&state.wrong, &Vec::<String>::new());
        prop_assert!(state.drops.iter().all(|drops| *drops <= 1));
        prop_assert!(state.excused || state.drops.iter().all(|drops| *drops == 1));
    }

    /// Views that are dropped together cost one wait for each pair of streams.
    #[test]
    fn dropped_together_they_cost_one_wait_for_each_pair(tensors in tensors()) {
        let mut batch = Batch::new(&tensors);
        (0..12).for_each(|number| batch.touch(number, READER));
        (0..12).for_each(|number| batch.drop_on(number, Some(READER)));
        let mut pairs = batch.returns();
        let count = pairs.len();
        pairs.sort_unstable();
        pairs.dedup();
        prop_assert_eq!(count, pairs.len());
        prop_assert_eq!(batch.drops(), vec![1; 12]);
    }
}
