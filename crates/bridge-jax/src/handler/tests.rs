use super::*;
use crate::fed::{Feed, Overwritten};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, Copies, DeviceBuffer, DeviceKind, Export, HostOnly, Layout, Memory, Offer,
    Options, Profile, Result, Reuse, Strided, Views, transfer,
};
use std::ffi::CStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// The stream of the tensor's framework, and that of a run.
const OWNER: Stream = stream_of(7);
const RUN: Stream = stream_of(9);

const fn stream_of(number: u64) -> Stream {
    // SAFETY: the device is a made-up one, on which any number is a stream.
    unsafe { Stream::from_handle(number) }
}

/// A tensor of numbers in host memory, or of a device that is made up.
struct Source {
    device: Device,
    stream: Option<Stream>,
    access: Access,
    shape: Vec<i64>,
    memory: Arc<Vec<f32>>,
}

impl Source {
    fn host(shape: &[i64]) -> Self {
        let memory = Arc::new((0..shape.iter().product()).map(|number: i64| number as f32).collect());
        Self { device: Device::CPU, stream: None, access: Access::ReadWrite, shape: shape.into(), memory }
    }

    fn device(shape: &[i64]) -> Self {
        Self { device: Device::cuda(0), stream: Some(OWNER), ..Self::host(shape) }
    }
}

/// The framework of such tensors, and of their feeds, without Python.
struct Framework(Profile, Mutex<Option<Overwritten>>);

impl Framework {
    fn new(overwritten: Overwritten) -> Self {
        let profile = Profile::export_only("made up").with_dtypes(vec![DType::FLOAT32]);
        Self(profile.with_devices(vec![DeviceKind::CPU, DeviceKind::CUDA]), Mutex::new(Some(overwritten)))
    }
}

// SAFETY: it has no more than the memory of the tests.
unsafe impl Adapter for Framework {
    type Tensor = Source;

    fn profile(&self) -> &Profile {
        &self.0
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        Arc::new(Views::default())
    }

    fn export(&self, source: &Source) -> Result<Export> {
        let start = source.memory.as_ptr().expose_provenance();
        let bytes = start..start + source.memory.len() * 4;
        let (device, access, stream) = (source.device, source.access, source.stream);
        let allocation = Allocation::new(bytes, device, access, stream, Reuse::InStreamOrder);
        // SAFETY: the vector owns the bytes, and nothing else uses them meanwhile.
        let memory = unsafe { Memory::new(allocation, source.memory.clone()) };
        Export::new(DType::FLOAT32, Layout::new(DType::FLOAT32, &source.shape, None, 0)?, memory)
    }

    fn import(&self, _: Offer<'_>) -> Result<Source> {
        unreachable!("the tests feed tensors")
    }
}

/// The feeds of that framework.
struct Feeding<'a>(&'a Framework, Arc<Views>);

// SAFETY: it has no more than the memory of the tests.
unsafe impl Adapter for Feeding<'_> {
    type Tensor = Feed;

    fn profile(&self) -> &Profile {
        &self.0.0
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.1.clone()
    }

    fn export(&self, _: &Feed) -> Result<Export> {
        unreachable!("the tests feed tensors")
    }

    fn import(&self, offer: Offer<'_>) -> Result<Feed> {
        let overwritten = self.0.1.lock().unwrap().take().expect("one tensor is fed");
        Ok(Feed::new(offer.accept(&self.0.0, &self.1)?, overwritten))
    }
}

fn feed_by(source: &Source, ordering: &Arc<dyn Ordering>, overwritten: Overwritten) -> Feed {
    let framework = Framework::new(overwritten);
    let feeding = Feeding(&framework, Arc::default());
    transfer(&framework, &feeding, source, ordering, &Options::in_place()).unwrap().0
}

fn feed(source: &Source) -> Feed {
    feed_by(source, host(), Box::new(|| Ok(())))
}

fn host() -> &'static Arc<dyn Ordering> {
    static HOST: OnceLock<Arc<dyn Ordering>> = OnceLock::new();
    HOST.get_or_init(|| Arc::new(HostOnly))
}

/// What XLA returned for the last call.
static RAISED: Mutex<Option<(c_int, String)>> = Mutex::new(None);

unsafe extern "C" fn error_create(arguments: *mut xla::ErrorCreate) -> *mut c_void {
    // SAFETY: the handler passes valid arguments.
    let (code, text) = unsafe { ((*arguments).code, CStr::from_ptr((*arguments).message)) };
    *RAISED.lock().unwrap() = Some((code, text.to_str().unwrap().into()));
    ptr::dangling_mut::<u8>().cast()
}

unsafe extern "C" fn error_destroy(_: *mut xla::ErrorDestroy) {}

unsafe extern "C" fn stream_get(_: *mut xla::StreamGet) -> *mut c_void {
    unreachable!("on the host nothing asks for a stream")
}

/// One call at a time: what is raised is one text.
static CALLS: Mutex<()> = Mutex::new(());

/// What a call of a handler is made with.
struct Made {
    number: i64,
    name: &'static [u8],
    dtype: c_int,
    shape: Vec<i64>,
    stage: c_int,
    buffers: i64,
}

impl Made {
    fn of(feed: &Feed) -> Self {
        Self { number: feed.number(), name: b"handle", dtype: 11, shape: feed.shape().into(), stage: 3, buffers: 1 }
    }

    /// Calls a handler with memory as the only argument and result. Returns what it raises.
    fn call<D: Direction>(&self, memory: &mut [f32]) -> Option<(c_int, String)> {
        let _one = CALLS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        targets(host());
        *RAISED.lock().unwrap() = None;
        let extension = null_mut();
        let version = || xla::Version { struct_size: 24, extension, major: 0, minor: 3 };
        let api = Api {
            struct_size: 192,
            extension,
            version: version(),
            internal: ptr::null(),
            error_create,
            error_get_message: ptr::null(),
            error_destroy,
            handler_register: ptr::null(),
            stream_get,
        };
        let data = memory.as_mut_ptr().expose_provenance();
        let buffer = xla::Buffer {
            struct_size: 48,
            extension,
            dtype: self.dtype,
            data: ptr::with_exposed_provenance_mut(data),
            rank: self.shape.len() as i64,
            dims: self.shape.as_ptr(),
        };
        let (types, entries): ([c_int; 1], [*const xla::Buffer; 1]) = ([xla::BUFFER], [&raw const buffer]);
        let buffers = || xla::Buffers {
            struct_size: 40,
            extension,
            size: self.buffers,
            types: types.as_ptr(),
            buffers: entries.as_ptr(),
        };
        let name = xla::Bytes { start: self.name.as_ptr(), len: self.name.len() };
        let scalar = xla::Scalar { dtype: xla::S64, value: (&raw const self.number).cast() };
        let (kinds, names, values) = ([xla::SCALAR], [&raw const name], [(&raw const scalar).cast::<c_void>()]);
        let attributes = xla::Attributes {
            struct_size: 48,
            extension,
            size: 1,
            types: kinds.as_ptr(),
            names: names.as_ptr(),
            values: values.as_ptr(),
        };
        let mut frame = CallFrame {
            struct_size: 168,
            extension,
            api: &raw const api,
            context: null_mut(),
            stage: self.stage,
            args: buffers(),
            results: buffers(),
            attributes,
        };
        let error = handler::<D, false>(&raw mut frame);
        let raised = RAISED.lock().unwrap().take();
        assert_eq!(error.is_null(), raised.is_none());
        raised
    }
}

#[test]
fn a_call_reads_or_fills_the_tensor() {
    let source = Source::host(&[2, 3]);
    let fed = feed(&source);
    let mut buffer = [-1.0; 6];
    assert_eq!(Made::of(&fed).call::<Input>(&mut buffer), None);
    assert_eq!(buffer[..], source.memory[..]);
    let doubled = &mut buffer.map(|number| number * 2.0);
    assert_eq!(Made::of(&fed).call::<Output>(doubled), None);
    assert_eq!(doubled[..], source.memory[..]);
}

#[test]
fn other_stages_do_nothing() {
    let fed = feed(&Source::host(&[2]));
    let mut buffer = [-1.0; 2];
    for stage in [0, 1, 2, 4] {
        assert_eq!(Made { stage, ..Made::of(&fed) }.call::<Input>(&mut buffer), None);
    }
    assert!(buffer.iter().all(|number| *number == -1.0));
}

#[test]
fn what_does_not_fit_is_raised_and_nothing_is_touched() {
    let source = Source::host(&[2, 3]);
    let fed = feed(&source);
    let gone = feed(&Source::host(&[2, 3])).number();
    let made = || Made::of(&fed);
    let cases = [
        (Made { number: gone, ..made() }, 5, "no tensor is fed"),
        (Made { number: 0, ..made() }, 5, "no tensor is fed"),
        (Made { name: b"handles", ..made() }, 3, "the call has no handle"),
        (Made { dtype: 4, ..made() }, 3, "the tensor is float32"),
        (Made { dtype: 21, ..made() }, 3, "the buffer has a dtype that tensors lack"),
        (Made { shape: vec![3, 2], ..made() }, 3, "the tensor has shape [2, 3]"),
        (Made { shape: vec![6], ..made() }, 3, "the tensor has shape [2, 3]"),
        (Made { buffers: 0, ..made() }, 3, "the call has another number of buffers"),
        (Made { buffers: 2, ..made() }, 3, "the call has another number of buffers"),
    ];
    for (made, code, start) in cases {
        let mut buffer = [-1.0; 6];
        for raised in [made.call::<Input>(&mut buffer), made.call::<Output>(&mut buffer)] {
            let (raised, text) = raised.expect(start);
            assert_eq!(raised, code, "{text}");
            assert!(text.starts_with(&format!("truebridge: {start}")) && text.contains(": "), "{text}");
        }
        assert!(buffer.iter().all(|number| *number == -1.0) && source.memory[5] == 5.0);
    }
    let elsewhere = feed_by(&Source::device(&[2]), &recorder().1, Box::new(|| Ok(())));
    let raised = Made::of(&elsewhere).call::<Input>(&mut [0.0; 2]).unwrap().1;
    assert!(raised.contains("on cuda:0, but the function runs on cpu"), "{raised}");
}

#[test]
fn a_tensor_that_must_not_change_is_not_filled() {
    for access in [Access::ReadOnly, Access::Immutable] {
        let fed = feed(&Source { access, ..Source::host(&[2]) });
        let made = Made::of(&fed);
        assert_eq!(made.call::<Output>(&mut [9.0; 2]).unwrap().0, Code::FailedPrecondition as c_int);
        let mut read = [9.0; 2];
        assert_eq!((made.call::<Input>(&mut read), read), (None, [0.0, 1.0]));
    }
}

#[test]
fn a_write_is_reported_before_it_is_made_and_a_panic_stays_inside() {
    let source = Source::host(&[1]);
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = calls.clone();
    let report: Overwritten = Box::new(move || match seen.fetch_add(1, SeqCst) {
        0 => Ok(()),
        1 => Err(Error::new(ErrorKind::Framework, "not now: \0later")),
        _ => panic!("planted"),
    });
    let fed = feed_by(&source, host(), report);
    let write = |number| Made::of(&fed).call::<Output>(&mut [number]);
    assert_eq!((write(5.0), source.memory[0]), (None, 5.0));
    let internal = Code::Internal as c_int;
    assert_eq!((write(6.0), source.memory[0]), (Some((internal, "truebridge: not now: later".into())), 5.0));
    assert_eq!((write(7.0).unwrap().0, source.memory[0]), (internal, 5.0));
    assert_eq!(Made::of(&fed).call::<Input>(&mut [0.0]), None, "which reports nothing");
    assert_eq!(calls.load(SeqCst), 3);
}

/// XLA's exceptions start with the code, such as `RESOURCE_EXHAUSTED`.
#[test]
fn the_code_of_an_exception_says_what_failed() {
    for (kind, code) in [
        (ErrorKind::Layout, Code::InvalidArgument),
        (ErrorKind::Device, Code::InvalidArgument),
        (ErrorKind::OutOfMemory, Code::ResourceExhausted),
        (ErrorKind::Driver, Code::Internal),
        (ErrorKind::ReadOnly, Code::FailedPrecondition),
    ] {
        let fed = feed_by(&Source::host(&[1]), host(), Box::new(move || Err(Error::new(kind, "as asked"))));
        let raised = Made::of(&fed).call::<Output>(&mut [5.0]);
        assert_eq!(raised, Some((code as c_int, "truebridge: as asked".into())), "{kind:?}");
    }
}

#[test]
fn the_query_for_metadata_names_the_version_and_no_traits() {
    let version = xla::Version { struct_size: 24, extension: null_mut(), major: -1, minor: -1 };
    let mut metadata = xla::Metadata { struct_size: 36, version, traits: u32::MAX };
    let base = xla::Extension { struct_size: 32, kind: xla::METADATA, next: null_mut() };
    let mut extension = xla::MetadataExtension { base, metadata: &raw mut metadata };
    // SAFETY: null pointers and zeros are a frame; a query has nothing but its extension.
    let mut frame: CallFrame = unsafe { std::mem::zeroed() };
    frame.extension = (&raw mut extension).cast();
    for query in [handler::<Input, false>, handler::<Input, true>, handler::<Output, false>, handler::<Output, true>] {
        assert!(query(&raw mut frame).is_null());
    }
    assert_eq!((metadata.version.major, metadata.version.minor, metadata.traits), (0, 3, 0));
}

/// What the ordering of a device that is made up was asked for.
#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl Recorder {
    fn note(&self, text: String) {
        self.0.lock().unwrap().push(text);
    }

    fn taken(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

// SAFETY: there is no device, and nothing runs.
unsafe impl Ordering for Recorder {
    unsafe fn order(&self, _: Device, earlier: Stream, later: Stream) -> Result<()> {
        self.note(format!("{} after {}", later.handle(), earlier.handle()));
        Ok(())
    }

    unsafe fn release_later(&self, _: Device, stream: Stream, _: Box<dyn DeviceBuffer>) {
        self.note(format!("released in {}", stream.handle()));
    }

    unsafe fn synchronize(&self, _: Device, stream: Stream) -> Result<()> {
        self.note(format!("host after {}", stream.handle()));
        Ok(())
    }

    fn copies(&self) -> Option<&dyn Copies> {
        Some(self)
    }
}

// SAFETY: as above.
unsafe impl Copies for Recorder {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, _: u128, stream: Option<Stream>) -> Result<()> {
        let stream = stream.map(|stream| stream.handle());
        self.note(format!("copy {:#x} to {:#x} in {stream:?}", from.data, to.data));
        Ok(())
    }
}

fn recorder() -> (Arc<Recorder>, Arc<dyn Ordering>) {
    let recorder = Arc::new(Recorder::default());
    (recorder.clone(), recorder)
}

/// A run on a device waits for the tensor's stream, and the tensor's stream for the run; the host waits for neither.
#[test]
fn on_a_device_a_call_is_ordered_before_and_after_the_stream_of_the_tensor() {
    let (recorder, ordering) = recorder();
    let source = Source::device(&[4]);
    let fed = feed_by(&source, &ordering, Box::new(|| Ok(())));
    recorder.taken();
    let tensor = crate::fed::fed(fed.number()).unwrap();
    let address = source.memory.as_ptr() as usize;
    for stream in [RUN, OWNER] {
        // SAFETY: the device is a made-up one, which touches no memory.
        let buffer = unsafe { Buffer::new(DType::FLOAT32, &[4], Device::cuda(0), 0x1000, Some(stream)) };
        let expected = |lines: [String; 3]| match stream {
            OWNER => vec![lines[1].clone()],
            _ => lines.into(),
        };
        tensor.read(&buffer, &ordering).unwrap();
        let copy = format!("copy {address:#x} to 0x1000 in {:?}", Some(stream.handle()));
        assert_eq!(recorder.taken(), expected(["9 after 7".into(), copy, "7 after 9".into()]));
        tensor.write(&buffer, &ordering).unwrap();
        let copy = format!("copy 0x1000 to {address:#x} in Some(7)");
        assert_eq!(recorder.taken(), expected(["7 after 9".into(), copy, "9 after 7".into()]));
    }
    // What a call under way holds is released after the feed, and once.
    let held = Arc::downgrade(&source.memory);
    drop((fed, source));
    assert_eq!(held.strong_count(), 1);
    drop(tensor);
    assert_eq!((held.strong_count(), recorder.taken()), (0, Vec::<String>::new()));
}
