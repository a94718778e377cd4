//! The first mistakes of someone who writes an adapter, over memory that is really freed: the report names each, and the
//! process survives it.
//!
//! One test, because leases are counted per process.

use bridge_conformance::{Capabilities, Config, Observed, Pair, PairReport, Spec, Subject, Verdict};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Export, Memory, Offer, Profile, Result, Stream,
    Strides, Views,
};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mistake {
    Nothing,
    /// The export keeps nothing that owns the memory.
    NoOwner,
    /// The import keeps the address, and drops the lease.
    LeaseDropped,
    /// The import keeps the lease for ever.
    LeaseLeaked,
    /// `fill` does nothing.
    FillForgotten,
    /// `snapshot` returns the tensor itself.
    SnapshotShared,
    /// `create` returns the tensor that it made last.
    CreateShared,
    /// `read` returns the bytes in another order.
    ReadReversed,
}

/// A compact tensor in host memory.
#[derive(Clone)]
struct Tensor {
    address: usize,
    dtype: DType,
    shape: Vec<i64>,
    _memory: Option<Arc<dyn Send + Sync>>,
}

impl Tensor {
    fn nbytes(&self) -> usize {
        self.shape.iter().product::<i64>() as usize * self.dtype.itemsize().unwrap()
    }

    fn new(dtype: DType, shape: &[i64], bytes: Vec<u8>) -> Self {
        let address = bytes.as_ptr().expose_provenance();
        Self { address, dtype, shape: shape.into(), _memory: Some(Arc::new(bytes)) }
    }
}

struct Toy {
    profile: Profile,
    views: Arc<Views>,
    mistake: Mistake,
    last: std::sync::Mutex<Option<Tensor>>,
}

impl Toy {
    fn new(name: &str, mistake: Mistake) -> Self {
        let profile = Profile::export_only(name)
            .with_dtypes(vec![DType::UINT8, DType::INT16])
            .with_strides(Strides::Compact)
            .with_alignment(1)
            .with_devices(vec![DeviceKind::CPU]);
        Self { profile, views: Arc::default(), mistake, last: Default::default() }
    }
}

// SAFETY: the mistakes are what the suite has to find, in memory that it owns.
unsafe impl Adapter for Toy {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.views.clone()
    }

    fn export(&self, tensor: &Tensor) -> Result<Export> {
        let layout = bridge_core::Layout::new(tensor.dtype, &tensor.shape, None, 0)?;
        let allocation = Allocation::host(layout.extent_at(tensor.address, None)?, Access::ReadWrite);
        let owner = (self.mistake != Mistake::NoOwner).then(|| tensor.clone());
        // SAFETY: the owner keeps the memory, which nothing else writes to now. Without one nothing touches the view.
        let memory = unsafe { Memory::new(allocation, owner) };
        Export::at(tensor.address, tensor.dtype, layout, memory)
    }

    fn import(&self, offer: Offer) -> Result<Tensor> {
        let lease = offer.accept(&self.profile, &self.views)?;
        let (address, dtype, shape) = (lease.data(), lease.dtype(), lease.layout().shape().to_vec());
        let memory: Option<Arc<dyn Send + Sync>> = match self.mistake {
            Mistake::LeaseDropped => None,
            Mistake::LeaseLeaked => {
                std::mem::forget(lease);
                None
            }
            _ => Some(Arc::new(lease)),
        };
        Ok(Tensor { address, dtype, shape, _memory: memory })
    }

    fn compact(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(Tensor::new(tensor.dtype, &tensor.shape, bytes(tensor)))
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.nbytes()];
    // SAFETY: the tensor keeps its memory, and no other thread writes to it.
    unsafe { ptr::copy(ptr::with_exposed_provenance(tensor.address), bytes.as_mut_ptr(), bytes.len()) };
    bytes
}

impl Subject for Toy {
    fn device(&self) -> Device {
        Device::CPU
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { dtypes: self.profile.dtypes.clone(), ..Capabilities::default() }
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Tensor> {
        let made = Tensor::new(spec.dtype, &spec.shape, bytes.to_vec());
        let mut last = self.last.lock().unwrap();
        let shared = last.take().filter(|last| last.shape == made.shape && last.dtype == made.dtype);
        if self.mistake == Mistake::CreateShared {
            *last = Some(made.clone());
        }
        Ok(shared.unwrap_or(made))
    }

    fn observe(&self, tensor: &Tensor) -> Result<Observed> {
        let (dtype, shape, address) = (tensor.dtype, tensor.shape.clone(), tensor.address);
        let strides = bridge_conformance::model::row_major(&shape);
        Ok(Observed { dtype, shape, strides, address, read_only: false, device: Device::CPU })
    }

    fn read(&self, tensor: &Tensor) -> Result<Vec<u8>> {
        let mut bytes = bytes(tensor);
        if self.mistake == Mistake::ReadReversed {
            bytes.reverse();
        }
        Ok(bytes)
    }

    fn write(&self, tensor: &Tensor, bytes: &[u8]) -> Result<()> {
        // SAFETY: the tensor keeps its memory, and no other thread uses it.
        unsafe { ptr::copy(bytes.as_ptr(), ptr::with_exposed_provenance_mut(tensor.address), bytes.len()) };
        Ok(())
    }

    fn fill(&self, tensor: &mut Tensor, byte: u8) -> Result<()> {
        match self.mistake {
            Mistake::FillForgotten => Ok(()),
            _ => self.write(tensor, &vec![byte; tensor.nbytes()]),
        }
    }

    fn allocate(&self, nbytes: usize) -> Result<Tensor> {
        Ok(Tensor::new(DType::UINT8, &[nbytes as i64], vec![0; nbytes]))
    }

    fn snapshot(&self, from: &Tensor, into: &mut Tensor) -> Result<()> {
        if self.mistake == Mistake::SnapshotShared {
            *into = from.clone();
        }
        self.write(into, &bytes(from))
    }

    fn share(&self, tensor: &Tensor) -> Tensor {
        tensor.clone()
    }

    fn drop_on_thread(&self, tensor: Tensor) {
        std::thread::scope(|scope| drop(scope.spawn(move || drop(tensor))));
    }

    fn streams(&self) -> Vec<Stream> {
        Vec::new()
    }

    unsafe fn on_stream(&self, _: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        body()
    }

    fn delay(&self) -> Result<()> {
        Ok(())
    }

    fn settle(&self) -> Result<Option<usize>> {
        Ok(None)
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(20)
    }
}

#[test]
fn a_mistake_is_named_and_nothing_else_is_judged() {
    let sound = Toy::new("sound", Mistake::Nothing);
    let quick = Config { cases: 200, seed: 4, ..Config::default() };
    quick.certify(&Toy::new("toy", Mistake::Nothing), &sound).iter().for_each(PairReport::assert_passed);
    let mistakes = BTreeMap::from([
        (Mistake::ReadReversed, ("subject", "toy: what `create` made and `read` returns")),
        (Mistake::CreateShared, ("subject", "toy: `create` returns a tensor in new memory")),
        (Mistake::FillForgotten, ("subject", "toy: what `fill` filled")),
        (Mistake::SnapshotShared, ("subject", "toy: `snapshot` copies to new memory")),
        (Mistake::NoOwner, ("life", "the source reuses the memory of a view that lives")),
        (Mistake::LeaseDropped, ("life", "the import dropped its lease while the view lives")),
        (Mistake::LeaseLeaked, ("life", "1 leases of this case were not released")),
    ]);
    for (mistake, (property, words)) in mistakes {
        let toy = Toy::new("toy", mistake);
        let of_import = matches!(mistake, Mistake::LeaseDropped | Mistake::LeaseLeaked);
        let (from, to) = if of_import { (&sound, &toy) } else { (&toy, &sound) };
        let report = quick.certify_pair(&Pair::new(from, to), &mut ());
        let failed: Vec<_> = report.properties.iter().filter(|one| one.verdict.is_failure()).collect();
        let [first, ..] = failed[..] else { panic!("{mistake:?}: {report}") };
        assert_eq!(first.name, property, "{mistake:?}: {report}");
        assert!(first.reason.as_ref().unwrap().contains(words), "{mistake:?}: {report}");
        let others = report.properties.iter().filter(|one| one.name != property && one.name != "subject");
        others.for_each(|one| assert_eq!(one.verdict, Verdict::NotApplicable, "{mistake:?}: {report}"));
        assert!(report.to_string().contains(&format!("not judged, because `{property}` failed")), "{report}");
    }
}
