//! `tch` tensors in and out on the host.

use bridge_core::{
    Access, Adapter, Allocation, Consumer, CopiedBy, DType, Device, Error, ErrorKind, Export, HostOnly, Layout, Memory,
    Offer, Options, Ordering, Plan, Profile, Reason, Result, Strides, Views, copy_into, transfer,
};
use bridge_ndarray::NdArray;
use bridge_torch::Tch;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use tch::{Kind, Tensor};

/// Returns the adapter.
fn tch_of_process() -> bridge_core::Result<Tch> {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { Tch::new() }
}

const CPU: tch::Device = tch::Device::Cpu;

fn host() -> Arc<dyn Ordering> {
    Arc::new(HostOnly)
}

fn across(tensor: &Tensor) -> (Tensor, Plan) {
    let tch = tch_of_process().unwrap();
    let (view, done) = transfer(&tch, &tch, tensor, &host(), &Options::default()).unwrap();
    (view, done.plan)
}

const KINDS: [Kind; 15] = [
    Kind::Bool,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::ComplexHalf,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Float8e4m3fn,
    Kind::Float8e5m2,
];

type View = fn(&Tensor) -> Tensor;

/// Views of a tensor of 4 × 6 elements, each in its own layout.
const VIEWS: [(&str, View); 9] = [
    ("compact", |t| t.shallow_clone()),
    ("transposed", |t| t.transpose(0, 1)),
    ("offset", |t| t.narrow(0, 1, 2).narrow(1, 3, 2)),
    ("step", |t| t.slice(1, 0, 6, 2)),
    ("broadcast", |t| t.narrow(0, 0, 1).expand([5, 6], false)),
    ("no dimensions", |t| t.select(0, 2).select(0, 3)),
    ("empty", |t| t.narrow(0, 2, 0)),
    ("overlapping", |t| t.as_strided([3, 4], [1, 2], 3)),
    ("many dimensions", |t| t.view([1, 2, 2, 1, 3, 2]).permute([5, 3, 1, 0, 4, 2])),
];

#[test]
fn every_kind_converts_in_every_layout_in_place() {
    for kind in KINDS {
        let bytes = Tensor::from_slice(&(0..24 * 16).map(|i| (i % 2) as u8).collect::<Vec<u8>>());
        let size = kind.elt_size_in_bytes() as i64;
        let base = bytes.narrow(0, 0, 24 * size).view_dtype(kind).view([4, 6]);
        for (name, view_of) in VIEWS {
            let tensor = view_of(&base);
            let (view, plan) = across(&tensor);
            assert_eq!(plan, Plan::ZeroCopy, "{kind:?} {name}");
            assert_eq!((view.size(), view.stride(), view.kind()), (tensor.size(), tensor.stride(), kind), "{name}");
            if tensor.numel() > 0 {
                assert_eq!(view.data_ptr(), tensor.data_ptr(), "{kind:?} {name}");
                let bits = |t: &Tensor| Vec::<u8>::try_from(t.contiguous().view([-1]).view_dtype(Kind::Uint8)).unwrap();
                assert_eq!(bits(&view), bits(&tensor), "{kind:?} {name}");
            }
        }
    }
}

#[test]
fn the_view_keeps_the_memory_although_set_data_replaces_it() {
    let mut tensor = Tensor::from_slice(&[1.0f32, 2.0]);
    let (view, _) = across(&tensor);
    tensor.set_data(&Tensor::from_slice(&[7.0f32]));
    drop(tensor);
    let mut reused: Vec<_> = (0..64).map(|_| Tensor::from_slice(&[9.0f32, 9.0])).collect();
    reused.truncate(1);
    assert_eq!(Vec::<f32>::try_from(&view).unwrap(), [1.0, 2.0]);
}

#[test]
fn a_view_keeps_memory_that_resize_replaces() {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    let ndarray = unsafe { NdArray::new() };
    let mut tensor = Tensor::from_slice(&[1.0f32, 2.0, 3.0]);
    let mut part = tensor.narrow(0, 1, 2);
    let (view, _) = across(&tensor);
    let options = Options::default();
    let (array, _) = transfer(&tch_of_process().unwrap(), &ndarray, &part, &host(), &options).unwrap();
    let _ = tensor.resize_([1 << 20]);
    let _ = part.resize_([1 << 21]);
    drop(tensor);
    drop(part);
    let reused: Vec<_> = (0..64).map(|_| Tensor::from_slice(&[9.0f32, 9.0, 9.0])).collect();
    assert_eq!(Vec::<f32>::try_from(&view).unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(array.to_array::<f32>().unwrap().into_raw_vec_and_offset().0, [2.0, 3.0]);
    drop(reused);
}

/// A child has the locks of its parent, and none of the threads that would unlock them. This runs in its own process:
/// another test's thread may be in the middle of what libtorch does once, which a child would wait for.
#[test]
fn a_forked_child_exports_while_threads_of_its_parent_do() {
    const ALONE: &str = "TRUEBRIDGE_TEST_FORKS";
    if std::env::var_os(ALONE).is_none() {
        let name = "a_forked_child_exports_while_threads_of_its_parent_do";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        assert!(alone.args(["--exact", name]).env(ALONE, "1").status().unwrap().success());
        return;
    }
    let is_done = AtomicUsize::new(0);
    drop(across(&Tensor::from_slice(&[0.0f32])));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while is_done.load(SeqCst) == 0 {
                    drop(across(&Tensor::from_slice(&[1.0f32])));
                }
            });
        }
        let mut wrong = 0;
        for _ in 0..50 {
            // SAFETY: the child calls what a child with one thread may, and ends at once.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: it ends a child that does not end by itself.
                unsafe { libc::alarm(20) };
                let (view, _) = across(&Tensor::from_slice(&[2.0f32]));
                // SAFETY: the process ends without its parent's threads and handlers.
                unsafe { libc::_exit(i32::from(view.double_value(&[0]) != 2.0)) };
            }
            let mut status = 0;
            // SAFETY: the child is ours, and the status is writable.
            let ended = unsafe { libc::waitpid(child, &mut status, 0) };
            wrong += usize::from((ended, status) != (child, 0));
        }
        is_done.store(1, SeqCst);
        assert_eq!(wrong, 0);
    });
}

#[test]
fn conjugated_and_negated_views_convert_as_copies() {
    let pairs = Tensor::from_slice(&[1.0f32, 2.0, 3.0, -4.0]).view([2, 2]);
    let complex = pairs.view_as_complex();
    let real = |t: &Tensor| Vec::<f32>::try_from(t.view_as_real().view([-1])).unwrap();
    let (conjugated, plan) = across(&complex.conj());
    assert_eq!(plan, Plan::Copy(Reason::PendingConjugation));
    assert_eq!(real(&conjugated), [1.0, -2.0, 3.0, 4.0]);
    // The imaginary part of a conjugated view has the neg bit, and steps over the real parts.
    let (negated, plan) = across(&complex.conj().imag());
    assert_eq!(plan, Plan::Copy(Reason::PendingNegation));
    assert_eq!(Vec::<f32>::try_from(&negated).unwrap(), [-2.0, 4.0]);
    let refused = tch_of_process().and_then(|tch| {
        let options = Options::in_place();
        transfer(&tch, &tch, &complex.conj(), &host(), &options)
    });
    assert_eq!(refused.map(drop).unwrap_err().kind(), ErrorKind::CopyNeeded);
}

#[test]
fn a_copy_by_libtorch_is_compact_and_apart() {
    let tch = tch_of_process().unwrap();
    let tensor = Tensor::arange(12, (Kind::Int64, CPU)).view([3, 4]).tr();
    let options = Options::copied();
    let (copy, done) = transfer(&tch, &tch, &tensor, &host(), &options).unwrap();
    assert_eq!((done.plan, done.copied_by), (Plan::Copy(Reason::Asked), Some(CopiedBy::Producer)));
    assert!(copy.is_contiguous() && copy.data_ptr() != tensor.data_ptr() && copy.equal(&tensor));
}

#[test]
fn what_has_no_memory_of_its_own_is_refused_with_advice() {
    let tch = tch_of_process().unwrap();
    let float = || Tensor::ones([2, 2], (Kind::Float, CPU));
    for (tensor, kind, advice) in [
        (float().set_requires_grad(true), ErrorKind::RequiresGrad, "call .detach() first"),
        (&float().set_requires_grad(true) * 2, ErrorKind::RequiresGrad, "call .detach() first"),
        (float().to_sparse_sparse_dim(2), ErrorKind::NotATensor, "call .to_dense(None, None) first"),
        (
            float().quantize_per_tensor(0.1, 10, Kind::QUInt8),
            ErrorKind::Dtype,
            "call .dequantize() or .int_repr() first",
        ),
        (Tensor::new(), ErrorKind::NotATensor, "make a real one first"),
    ] {
        let refused = tch.export(&tensor).unwrap_err();
        assert_eq!(refused.kind(), kind, "{refused}");
        assert!(refused.to_string().ends_with(advice), "{refused}");
    }
    assert!(tch.export(&float().set_requires_grad(true).detach()).is_ok());
}

#[test]
fn a_write_from_outside_is_counted_for_autograd() {
    let tch = tch_of_process().unwrap();
    let (source, target) = (Tensor::from_slice(&[1i64, 2, 3]), Tensor::zeros([3], (Kind::Int64, CPU)));
    let before = target.internal_version();
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    match copy_into(&tch, &tch, &source, &target, &ordering) {
        // Without copies of the ordering nothing is written.
        Err(error) => assert_eq!(error.kind(), ErrorKind::CopyNeeded, "{error}"),
        Ok(_) => assert!(target.equal(&source)),
    }
    tch.overwritten(&target).unwrap();
    assert!(target.internal_version() > before);
    tch.overwritten(&Tensor::zeros([], (Kind::Float, CPU))).unwrap();
}

/// A framework of one float32 vector, which counts how often its memory is returned.
struct Counted {
    profile: Profile,
    views: Arc<Views>,
    returned: Arc<AtomicUsize>,
    fails: bool,
}

struct Returns(Vec<f32>, Arc<AtomicUsize>);

impl Drop for Returns {
    fn drop(&mut self) {
        self.0.fill(f32::NAN);
        self.1.fetch_add(1, SeqCst);
    }
}

impl Counted {
    fn new(fails: bool) -> Self {
        let profile = Profile::export_only("counted").with_strides(Strides::Compact);
        Self { profile, views: Arc::default(), returned: Arc::default(), fails }
    }
}

// SAFETY: it does what the inner adapter does.
unsafe impl Adapter for Counted {
    type Tensor = Vec<f32>;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.views.clone()
    }

    fn export(&self, numbers: &Vec<f32>) -> Result<Export> {
        let owner = Returns(numbers.clone(), self.returned.clone());
        let data = if numbers.is_empty() { 0 } else { owner.0.as_ptr().expose_provenance() };
        let layout = Layout::new(DType::FLOAT32, &[numbers.len() as i64], None, 0)?;
        let allocation = Allocation::host(layout.extent_at(data, None)?, Access::ReadWrite);
        // SAFETY: the owner keeps the numbers in place, and may be dropped on any thread.
        let memory = unsafe { Memory::new(allocation, owner) };
        if self.fails {
            return Err(Error::new(ErrorKind::Refused, "as asked"));
        }
        Export::at(data, DType::FLOAT32, layout, memory)
    }

    fn import(&self, _: Offer) -> Result<Vec<f32>> {
        Err(Error::new(ErrorKind::Framework, "export only"))
    }

    fn compact(&self, _: &Vec<f32>) -> Result<Vec<f32>> {
        Err(Error::new(ErrorKind::CopyNeeded, "core copies host memory"))
    }
}

#[test]
fn the_last_tensor_returns_the_memory_once_on_any_thread() {
    let (counted, tch) = (Counted::new(false), tch_of_process().unwrap());
    let (tensor, done) = transfer(&counted, &tch, &vec![1.0, 2.0, 3.0], &host(), &Options::default()).unwrap();
    assert_eq!(done.plan, Plan::ZeroCopy);
    let part = tensor.narrow(0, 1, 2);
    drop(tensor);
    assert_eq!(counted.returned.load(SeqCst), 0, "a view is alive");
    thread::spawn(move || drop(part)).join().unwrap();
    assert_eq!(counted.returned.load(SeqCst), 1);
    assert!(counted.views.is_empty() && tch.consumer().views().is_empty());
}

/// libtorch calls no deleter for a null address, which a tensor without elements may have.
#[test]
fn a_tensor_without_elements_keeps_nothing() {
    let (counted, tch) = (Counted::new(false), tch_of_process().unwrap());
    let (tensor, done) = transfer(&counted, &tch, &vec![], &host(), &Options::default()).unwrap();
    assert_eq!((done.plan, tensor.size(), tensor.kind()), (Plan::ZeroCopy, vec![0], Kind::Float));
    assert_eq!(counted.returned.load(SeqCst), 1);
}

#[test]
fn a_failing_producer_keeps_nothing() {
    let (counted, tch) = (Counted::new(true), tch_of_process().unwrap());
    let refused = transfer(&counted, &tch, &vec![1.0], &host(), &Options::default());
    assert_eq!(refused.map(drop).unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(counted.returned.load(SeqCst), 1);
}

#[test]
fn a_tensor_on_a_device_that_libtorch_lacks_is_refused() {
    let tch = tch_of_process().unwrap();
    let nowhere = Device::cuda(4096);
    assert_eq!(tch.current_stream(nowhere).unwrap_err().kind(), ErrorKind::Framework);
    assert_eq!(tch.current_stream(Device::CPU).unwrap(), None);
    // SAFETY: the call makes no tensor.
    let refused =
        unsafe { tch.empty(nowhere, DType::FLOAT32, &[2], bridge_core::Order::RowMajor) }.map(drop).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::CopyNeeded | ErrorKind::Framework), "{refused}");
}
