//! What a loan orders, with an ordering that records its calls.

use super::*;
use crate::loan::check_strides;
use crate::origin::READER;
use bridge_core::dlpack::{DLPack, Origin, Tensor, describe};
use bridge_core::{Device, DeviceBuffer, Layout, Reuse, Stream, Views, transfer};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

const GPU: Device = Device::cuda(0);
// SAFETY: no driver sees these streams.
const STREAMS: [Stream; 4] = unsafe {
    [Stream::from_handle(0xa0), Stream::from_handle(0xb0), Stream::from_handle(0xc0), Stream::from_handle(0xd0)]
};
const OWNER: Stream = STREAMS[0];
const NAMED: Stream = STREAMS[1];
const OTHER: Stream = STREAMS[2];
const LATER: Stream = STREAMS[3];

#[derive(Debug, PartialEq)]
enum Event {
    Ordered(Stream, Stream),
    ReleasedLater,
    ReleasedAfterAllWork,
}
use Event::{Ordered, ReleasedAfterAllWork, ReleasedLater};

#[derive(Default)]
struct Recorder(Mutex<Vec<Event>>);

impl Recorder {
    fn note(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

// SAFETY: there is no device, and no test touches the memory.
unsafe impl Ordering for Recorder {
    unsafe fn order(&self, _: Device, earlier: Stream, later: Stream) -> Result<()> {
        self.note(Ordered(earlier, later));
        Ok(())
    }

    unsafe fn release_later(&self, _: Device, _: Stream, _: Box<dyn DeviceBuffer>) {
        self.note(ReleasedLater);
    }

    unsafe fn release_after_all_work(&self, _: Device, _: Stream, _: Box<dyn DeviceBuffer>) {
        self.note(ReleasedAfterAllWork);
    }
}

/// A framework whose current stream the tests change.
#[derive(Default)]
struct Framework(Mutex<Option<Stream>>, Views);

// SAFETY: nothing reads the memory of the tests.
unsafe impl Consumer for Framework {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(*self.0.lock().unwrap())
    }

    fn views(&self) -> &Views {
        &self.1
    }
}

/// As [`Lending`], without Python.
struct Lends(Arc<Borrower>, Arc<dyn Ordering>);

// SAFETY: nothing reads the memory of the tests.
unsafe impl Adapter for Lends {
    type Tensor = Loan;

    fn profile(&self) -> &Profile {
        &PROFILE
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.0.clone()
    }

    fn export(&self, _: &Loan) -> Result<Export> {
        unreachable!("it only imports")
    }

    fn import(&self, offer: Offer<'_>) -> Result<Loan> {
        let lease = offer.accept(&PROFILE, &self.0)?;
        let ready = self.0.current_stream(lease.device())?;
        let (borrower, ordering) = (Arc::clone(&self.0), Arc::clone(&self.1));
        Ok(Loan::new(
            lease,
            ready,
            None,
            Some(Terms { borrower, ordering, options: Options::default(), lend: lend_again }),
        ))
    }
}

struct Scene {
    recorder: Arc<Recorder>,
    framework: Arc<Framework>,
    loan: Option<Loan>,
}

impl Scene {
    fn new(device: Device, named: Option<Stream>) -> Self {
        static ADDRESS: AtomicU32 = AtomicU32::new(1);
        // Loans share the views of one reader: each test has its own address.
        let data = (ADDRESS.fetch_add(1, Relaxed) as usize) << 20;
        let (recorder, framework) = (Arc::new(Recorder::default()), Arc::new(Framework::default()));
        let stream = (device == GPU).then_some(OWNER);
        *framework.0.lock().unwrap() = stream;
        let layout = Layout::new(DType::FLOAT32, &[4], None, 0).unwrap();
        // SAFETY: nothing touches the memory.
        let managed = unsafe { describe(DType::FLOAT32, &layout, device, data, false, Arc::new(())) };
        let origin = Origin::new(stream, Reuse::Unknown);
        // SAFETY: as above.
        let tensor = unsafe { Tensor::new(managed, |_, _| Ok(origin)) }.unwrap();
        let ordering: Arc<dyn Ordering> = recorder.clone();
        // SAFETY: no driver sees this stream.
        let named = named.map(|stream| unsafe { Named::new(stream, None) });
        let borrower = Borrower::of_no_driver(framework.clone(), named);
        let to = Lends(Arc::new(borrower), Arc::clone(&ordering));
        // SAFETY: no driver sees the stream.
        let from = unsafe { DLPack::in_stream(GPU, OWNER) };
        let (loan, _) = transfer(&from, &to, &tensor, &ordering, &Options::default()).unwrap();
        Self { recorder, framework, loan: Some(loan) }
    }

    fn loan(&self) -> &Loan {
        self.loan.as_ref().unwrap()
    }

    /// Does what `__dlpack__(stream=)` does before it makes the capsule.
    fn consume(&self, stream: Option<i64>) -> Vec<Event> {
        self.loan().ready_for(stream).unwrap();
        self.events()
    }

    fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.recorder.0.lock().unwrap())
    }

    fn end(&mut self) -> Vec<Event> {
        self.loan = None;
        self.events()
    }
}

#[test]
fn each_consumer_waits_in_the_stream_that_it_names_and_the_memory_for_the_whole_device() {
    let mut scene = Scene::new(GPU, None);
    assert_eq!((scene.events(), scene.loan().stream()), (vec![], Some(OWNER.handle())), "it is ready as it is");
    for (stream, waits) in [
        (Some(0xc0), vec![Ordered(OWNER, OTHER)]),
        (None, vec![Ordered(OWNER, Stream::LEGACY)]),
        (Some(0), vec![Ordered(OWNER, Stream::LEGACY)]),
        (Some(2), vec![Ordered(OWNER, Stream::PER_THREAD)]),
        (Some(-1), vec![]),
        (Some(0xa0), vec![]),
    ] {
        assert_eq!(scene.consume(stream), waits, "{stream:?}");
    }
    assert!(scene.loan().ready_for(Some(-2)).is_err());
    // The streams may have been destroyed since, so the end names none of them.
    assert_eq!(scene.end(), [ReleasedAfterAllWork]);
}

#[test]
fn the_memory_waits_for_the_device_where_no_stream_is_ever_named() {
    // By an array interface, or by `__dlpack__(stream=-1)`.
    let mut scene = Scene::new(GPU, None);
    assert_eq!(scene.consume(Some(-1)), []);
    assert_eq!(scene.end(), [ReleasedAfterAllWork]);
}

#[test]
fn a_stream_that_the_caller_names_is_enough() {
    let mut scene = Scene::new(GPU, Some(NAMED));
    assert_eq!((scene.events(), scene.loan().stream()), (vec![Ordered(OWNER, NAMED)], Some(NAMED.handle())));
    assert_eq!(scene.consume(None), [], "the caller has said where");
    assert_eq!(scene.consume(Some(-1)), []);
    assert_eq!(scene.consume(Some(0xb0)), []);
    assert_eq!(scene.end(), [Ordered(NAMED, OWNER), ReleasedLater]);
}

#[test]
fn a_consumer_that_names_another_stream_than_the_caller_is_waited_for_with_the_device() {
    let mut scene = Scene::new(GPU, Some(NAMED));
    scene.events();
    assert_eq!(scene.consume(Some(0xc0)), [Ordered(NAMED, OTHER)]);
    assert_eq!(scene.end(), [Ordered(NAMED, OWNER), ReleasedAfterAllWork]);
}

#[test]
fn a_recorded_stream_is_waited_for_by_name() {
    let mut scene = Scene::new(GPU, Some(NAMED));
    scene.events();
    let (device, address) = scene.loan().locate().unwrap().unwrap();
    // SAFETY: no driver sees this stream.
    assert_eq!(unsafe { READER.views().used(device, address, OTHER, || None) }, 1);
    assert_eq!(scene.end(), [Ordered(NAMED, OWNER), Ordered(OTHER, OWNER), ReleasedLater]);
}

#[test]
fn at_the_end_of_a_block_the_framework_waits_where_it_works_then() {
    for (named, waits) in [(Some(NAMED), vec![NAMED, OTHER]), (None, vec![OTHER])] {
        let scene = Scene::new(GPU, named);
        scene.consume(Some(0xc0));
        *scene.framework.0.lock().unwrap() = Some(LATER);
        scene.loan().settle().unwrap();
        assert_eq!(scene.events(), waits.iter().map(|stream| Ordered(*stream, LATER)).collect::<Vec<_>>());
    }
}

#[test]
fn on_the_host_there_is_nothing_to_order() {
    let mut scene = Scene::new(Device::CPU, Some(NAMED));
    assert_eq!(scene.loan().stream(), None);
    assert_eq!((scene.consume(None), scene.consume(Some(0xc0))), (vec![], vec![]));
    scene.loan().settle().unwrap();
    assert_eq!(scene.end(), []);
}

#[test]
fn negative_strides_enter_an_array_interface_where_the_caller_insists() {
    for copy in [None, Some(true), Some(false)] {
        assert!(check_strides(&[4, 1], copy).is_ok());
        let reversed = check_strides(&[-4, 1], copy);
        assert_eq!(reversed.is_ok(), copy == Some(false));
        if let Err(error) = reversed {
            assert_eq!(error.kind(), ErrorKind::Layout);
            assert!(error.to_string().contains("pass copy=True to lend"), "{error}");
        }
    }
}
