//! Sessions of the real TensorFlow, 1.15 and 2.x, in one process without Python.

mod installed;

use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, ErrorKind, Export, HostOnly, Layout, Lease, Memory, Offer,
    Options, Ordering, Profile, Result, Strides, Views, transfer,
};
use bridge_tensorflow::{External, GraphEdges, Input, Runtime, Series, Session, SessionOptions};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// What the folder has is a TensorFlow, or no library of this name.
fn open(folder: &Path) -> bridge_core::Result<&'static Runtime> {
    // SAFETY: as above.
    unsafe { Runtime::open(folder) }
}

/// y = 2 x + 1, as TensorFlow 2.21 saves it.
const LINE: &[u8] = include_bytes!("data/line.pb");

/// A variable `v`, and a read of it.
const VARIABLE: &[u8] = include_bytes!("data/variable.pb");

/// A placeholder `x`; `after`, which waits for it; a `branch` that is never taken; a string `text`.
const EDGES: &[u8] = include_bytes!("data/edges.pb");

/// Numbers at an address that 64 divides.
#[repr(align(64))]
struct Numbers([f32; 16]);

/// An owner of numbers that counts its drops.
struct Counted(#[expect(dead_code, reason = "it keeps the memory")] Box<Numbers>, Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, SeqCst);
    }
}

/// Exports the first of some numbers; imports addresses.
struct Plain {
    profile: Profile,
    views: Arc<Views>,
    drops: Arc<AtomicUsize>,
    dtype: DType,
}

impl Plain {
    fn new(dtype: DType) -> Self {
        let profile = Profile::export_only("plain")
            .with_dtypes(vec![DType::FLOAT32, DType::INT32])
            .with_strides(Strides::Any)
            .with_alignment(1)
            .with_devices(vec![bridge_core::DeviceKind::CPU]);
        Self { profile, views: Arc::default(), drops: Arc::default(), dtype }
    }
}

/// An array that owns its numbers, or a view of imported ones.
enum View {
    Own(usize),
    Of(Box<Lease>),
}

impl View {
    fn numbers(&self) -> (usize, Vec<f32>) {
        let Self::Of(lease) = self else { panic!("it was imported") };
        let count = lease.layout().numel();
        // SAFETY: the lease is of compact host memory with as many float32.
        (lease.data(), unsafe { std::slice::from_raw_parts(lease.data() as *const f32, count) }.to_vec())
    }
}

// SAFETY: it only exports host memory.
unsafe impl Adapter for Plain {
    type Tensor = View;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.views.clone()
    }

    fn export(&self, view: &View) -> Result<Export> {
        let View::Own(count) = view else { panic!("no view is exported") };
        let numbers = Box::new(Numbers(std::array::from_fn(|i| i as f32)));
        let start = (&raw const numbers.0).addr();
        let bytes = start..start + count * 4;
        let owner = Counted(numbers, self.drops.clone());
        // SAFETY: the box keeps the memory, which has no other user.
        let memory = unsafe { Memory::new(Allocation::host(bytes, Access::ReadWrite), owner) };
        Export::new(self.dtype, Layout::new(self.dtype, &[*count as i64], None, 0)?, memory)
    }

    fn import(&self, offer: Offer) -> Result<View> {
        Ok(View::Of(Box::new(offer.accept(&self.profile, &self.views)?)))
    }

    fn compact(&self, _: &View) -> Result<View> {
        panic!("nothing here needs a copy")
    }
}

fn feed(plain: &Plain, graph: &GraphEdges, count: usize) -> External {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    transfer(plain, graph, &View::Own(count), &ordering, &Options::default()).unwrap().0
}

fn take(plain: &Plain, graph: &GraphEdges, external: &External) -> View {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    transfer(graph, plain, external, &ordering, &Options::default()).unwrap().0
}

/// Waits for the drops: what ends on a thread of TensorFlow's may be dropped on another one.
fn released(plain: &Plain, count: usize) {
    let patience = Instant::now() + Duration::from_secs(10);
    while plain.drops.load(SeqCst) < count && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(plain.drops.load(SeqCst), count, "the memory was released, once each");
}

fn refused<T>(result: Result<T>, expected: &str) {
    let Err(error) = result else { panic!("{expected}: it was not refused") };
    assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

/// Everything that a session does, in a runtime.
fn check(runtime: &'static Runtime) {
    let (graph, plain, options) =
        (GraphEdges::new(runtime).unwrap(), Plain::new(DType::FLOAT32), SessionOptions::default());
    let x = Input::new("x:0", DType::FLOAT32, &[None]).unwrap();
    let session = Session::open(runtime, LINE, std::slice::from_ref(&x), &["y:0", "x"], &options).unwrap();
    let before = (External::unclaimed(), External::reclaimed());
    for count in [5, 16, 0] {
        let fed = feed(&plain, &graph, count);
        for _ in 0..2 {
            let results = session.run(&[("x", &fed)]).unwrap();
            let [y, same] = results.try_into().unwrap_or_else(|_| panic!("two outputs were declared"));
            assert_eq!((y.dtype(), y.shape(), y.device()), (DType::FLOAT32, &[count as i64][..], Device::CPU));
            assert!(count == 0 || same.address() != fed.address(), "what is passed on is a copy");
            assert_eq!(same.access(), Access::ReadWrite);
            let view = take(&plain, &graph, &y);
            let (address, numbers) = view.numbers();
            assert_eq!(numbers, (0..count).map(|i| 2.0 * i as f32 + 1.0).collect::<Vec<_>>());
            assert_eq!(address, y.address());
        }
    }
    released(&plain, 3);
    feed(&plain, &graph, 4).put_back();
    assert_eq!(External::unclaimed(), before.0, "what was fed cannot be taken");
    released(&plain, 4);

    let fed = feed(&plain, &graph, 4);
    refused(session.run(&[]), "the input x:0 is not fed");
    refused(session.run(&[("x:0", &fed), ("x", &fed)]), "the input x is fed twice");
    refused(session.run(&[("z:0", &fed)]), "no input z:0: it has x:0");
    refused(session.run(&[("x:1", &fed)]), "no input x:1");
    let whole = feed(&Plain::new(DType::INT32), &graph, 4);
    refused(session.run(&[("x:0", &whole)]), "is float32, but what was fed is int32");
    let three = Input::new("x:0", DType::FLOAT32, &[Some(3)]).unwrap();
    let narrow = Session::open(runtime, LINE, &[three], &["y:0"], &options).unwrap();
    refused(narrow.run(&[("x:0", &fed)]), "has the shape [3], but what was fed has [4]");
    let open = |inputs: &[Input], outputs: &[&str]| Session::open(runtime, LINE, inputs, outputs, &options);
    refused(open(std::slice::from_ref(&x), &["nothing:0"]), "no tensor nothing:0");
    refused(open(std::slice::from_ref(&x), &["y:1"]), "no tensor y:1");
    refused(open(&[x.clone(), x.clone()], &["y:0"]), "named twice");
    refused(open(&[Input::new("a:0", DType::FLOAT32, &[None]).unwrap()], &["y:0"]), "no input a:0");
    let integers = Input::new("x:0", DType::INT32, &[None]).unwrap();
    assert_eq!(open(&[integers], &["y:0"]).unwrap_err().kind(), ErrorKind::Framework);
    refused(Session::open(runtime, b"no graph", &[], &["y:0"], &options), "not a serialised GraphDef");
    refused(open(std::slice::from_ref(&x), &[]), "at least one output");

    let edges = |outputs: &[&str]| Session::open(runtime, EDGES, std::slice::from_ref(&x), outputs, &options);
    let after = edges(&["after:0"]).unwrap().run(&[("x:0", &fed)]).unwrap().swap_remove(0);
    assert_eq!(take(&plain, &graph, &after).numbers().1, [1.0, 2.0], "what waits for the placeholder runs");
    refused(Session::open(runtime, VARIABLE, &[], &["v/read:0"], &options), "the variable v: freeze it");
    let branch = edges(&["branch:0"]).unwrap().run(&[("x:0", &fed)]).unwrap_err();
    assert!(branch.to_string().contains("the output branch:0 was not computed"), "{branch}");
    let text = edges(&["text:0"]).unwrap_err();
    assert_eq!(text.kind(), ErrorKind::Dtype);
    assert!(text.to_string().contains("the output text:0"), "{text}");

    // Results outlive their session.
    let y = session.run(&[("x:0", &fed)]).unwrap().swap_remove(0);
    session.close().unwrap();
    assert_eq!(take(&plain, &graph, &y).numbers().1, [1.0, 3.0, 5.0, 7.0]);
    assert_eq!((External::unclaimed(), External::reclaimed()), before, "everything was taken");
    drop(fed);
    released(&plain, 5);
}

/// One test: a process has one TensorFlow of each series.
#[test]
fn sessions_of_both_series_in_one_process() {
    let mut versions = Vec::new();
    for (series, folder) in [(Series::One, installed::one()), (Series::Two, installed::two())] {
        let Some(folder) = folder else {
            eprintln!("left out: no TensorFlow of series {series:?} (cargo xtask setup fetches it)");
            continue;
        };
        let runtime = open(&folder).unwrap();
        assert_eq!(runtime.series(), series);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.lines().any(|line| line.contains("rwx") && line.contains("[stack]")), "the stack is not code");
        assert!(std::ptr::eq(runtime, Runtime::loaded(series).unwrap()));
        versions.push(runtime);
    }
    for runtime in &versions {
        check(runtime);
    }
    let [one, two] = versions[..] else { return };
    let (graph, plain) = (GraphEdges::new(one).unwrap(), Plain::new(DType::FLOAT32));
    let fed = feed(&plain, &graph, 4);
    let x = Input::new("x:0", DType::FLOAT32, &[None]).unwrap();
    let session = Session::open(two, LINE, &[x], &["y:0"], &SessionOptions::default()).unwrap();
    let Err(error) = session.run(&[("x:0", &fed)]) else { panic!("the tensor of the other one was accepted") };
    assert!(error.to_string().contains("was fed to another TensorFlow, 1.15"), "{error}");
    let other = GraphEdges::new(two).unwrap();
    for exported in [other.export(&fed).map(drop), other.compact(&fed).map(drop)] {
        let error = exported.unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().contains("is one of TensorFlow 1.15")),
            (ErrorKind::Argument, true)
        );
    }
}
