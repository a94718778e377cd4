//! A framework of another crate whose tensors are matrices: with the rank that it declares all passes, and without it the
//! suite says what to declare.

use bridge_conformance::rust::NdArraySubject;
use bridge_conformance::{Capabilities, Config, HostSubject, HostTensors, Observed, PairReport, Spec};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout, Memory, Offer,
    Order, Profile, Result, Strides, Views,
};
use std::ops::RangeInclusive;
use std::ptr;
use std::sync::Arc;

/// A row-major matrix of float32.
#[derive(Clone)]
struct Matrix {
    address: usize,
    rows: i64,
    columns: i64,
    _memory: Arc<dyn Send + Sync>,
}

impl Matrix {
    fn new(shape: &[i64], elements: Vec<f32>) -> Result<Self> {
        let [rows, columns] = *shape else {
            return Err(Error::new(ErrorKind::Layout, format!("{} dimensions are not those of a matrix", shape.len())));
        };
        let memory = elements.into_boxed_slice();
        Ok(Self { address: memory.as_ptr().expose_provenance(), rows, columns, _memory: Arc::new(memory) })
    }

    fn elements(&self) -> usize {
        (self.rows * self.columns) as usize
    }
}

struct Matrices {
    profile: Profile,
    views: Arc<Views>,
    /// Whether the import keeps the lease for ever, which is wrong.
    leaks: bool,
}

impl Matrices {
    fn of_rank(rank: RangeInclusive<usize>) -> Self {
        let profile = Profile::export_only("matrices")
            .with_dtypes(vec![DType::FLOAT32])
            .with_strides(Strides::Compact)
            .with_rank(rank)
            .with_alignment(1)
            .with_devices(vec![DeviceKind::CPU])
            .with_keeps_read_only(false);
        Self { profile, views: Arc::default(), leaks: false }
    }
}

// SAFETY: a matrix keeps its lease, has its memory on the host, and is never written to.
unsafe impl Adapter for Matrices {
    type Tensor = Matrix;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.views.clone()
    }

    fn export(&self, matrix: &Matrix) -> Result<Export> {
        let layout = Layout::new(DType::FLOAT32, &[matrix.rows, matrix.columns], None, 0)?;
        let allocation = Allocation::host(layout.extent_at(matrix.address, None)?, Access::ReadWrite);
        // SAFETY: the clone keeps the memory, which nothing else writes to now.
        let memory = unsafe { Memory::new(allocation, matrix.clone()) };
        Export::at(matrix.address, DType::FLOAT32, layout, memory)
    }

    fn import(&self, offer: Offer) -> Result<Matrix> {
        let lease = offer.accept(&self.profile, &self.views)?;
        let [rows, columns] = *lease.layout().shape() else {
            return Err(Error::new(ErrorKind::Layout, "a matrix has two dimensions"));
        };
        let (address, lease) = (lease.data(), Arc::new(lease));
        if self.leaks {
            std::mem::forget(lease.clone());
        }
        Ok(Matrix { address, rows, columns, _memory: lease })
    }

    fn compact(&self, _: &Matrix) -> Result<Matrix> {
        Err(Error::new(ErrorKind::CopyNeeded, "matrices cannot be copied"))
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Matrix> {
        if (device, dtype, order) != (Device::CPU, DType::FLOAT32, Order::RowMajor) {
            return Err(Error::new(ErrorKind::CopyNeeded, "the suite asks only for matrices of float32"));
        }
        Matrix::new(shape, vec![0.0; shape.iter().product::<i64>() as usize])
    }
}

/// What the suite needs of matrices in addition to their adapter.
struct Tensors;

impl HostTensors for Tensors {
    type Tensor = Matrix;

    fn capabilities(&self) -> Capabilities {
        Capabilities { copies: false, ..Capabilities::default() }
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Matrix> {
        let elements = bytes.chunks_exact(4).map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]));
        Matrix::new(&spec.shape, elements.collect())
    }

    fn observe(&self, matrix: &Matrix) -> Result<Observed> {
        let (shape, strides) = (vec![matrix.rows, matrix.columns], vec![matrix.columns.max(1), 1]);
        let address = matrix.address;
        Ok(Observed { dtype: DType::FLOAT32, shape, strides, address, read_only: false, device: Device::CPU })
    }

    fn read(&self, matrix: &Matrix) -> Result<Vec<u8>> {
        let mut bytes = vec![0; matrix.elements() * 4];
        // SAFETY: the matrix keeps its elements, and no other thread writes to them.
        unsafe { ptr::copy(ptr::with_exposed_provenance(matrix.address), bytes.as_mut_ptr(), bytes.len()) };
        Ok(bytes)
    }

    fn write(&self, matrix: &Matrix, bytes: &[u8]) -> Result<()> {
        // SAFETY: the matrix has so many bytes, and no other thread uses them.
        unsafe { ptr::copy(bytes.as_ptr(), ptr::with_exposed_provenance_mut(matrix.address), bytes.len()) };
        Ok(())
    }
}

fn reports(rank: RangeInclusive<usize>) -> [PairReport; 2] {
    let config = Config { cases: 300, seed: 8, ..Config::default() };
    config.certify(&HostSubject::new(Matrices::of_rank(rank), Tensors), &NdArraySubject::default())
}

/// The suite waits once, for seconds, and neither shrinks the case nor judges another property.
#[test]
fn a_leaked_lease_is_waited_for_once() {
    let leaking = HostSubject::new(Matrices { leaks: true, ..Matrices::of_rank(2..=2) }, Tensors);
    let [_, report] = Config { cases: 300, seed: 8, ..Config::default() }.certify(&leaking, &NdArraySubject::default());
    let failed: Vec<_> = report.properties.iter().filter(|property| property.verdict.is_failure()).collect();
    let [failed] = failed[..] else { panic!("{report}") };
    assert_eq!((failed.name.as_str(), failed.cases), ("life", 1), "{report}");
    assert!(failed.reason.as_ref().unwrap().contains("1 leases of this case were not released within 5s"), "{report}");
}

#[test]
fn with_the_rank_that_it_declares_everything_passes() {
    for report in reports(2..=2) {
        report.assert_passed();
        let judged = report.properties.iter().filter(|property| property.cases > 0).count();
        assert!(judged >= 8, "{report}");
    }
}

#[test]
fn without_one_the_suite_says_what_to_declare() {
    for report in reports(0..=64) {
        let failed: Vec<_> = report.properties.iter().filter(|property| property.verdict.is_failure()).collect();
        let [failed] = failed[..] else { panic!("{report}") };
        assert_eq!(failed.name, "subject", "{report}");
        let reason = failed.reason.as_deref().unwrap_or_default();
        assert!(
            reason.contains("the profile lists 0 dimensions") && reason.contains("not those of a matrix"),
            "{reason}"
        );
        assert!(reason.contains("declare Profile::with_rank(2..=2)"), "{reason}");
    }
}

#[test]
fn a_rank_that_is_declared_too_wide_is_found_too() {
    let [report, _] = reports(1..=2);
    assert!(report.to_string().contains("declare Profile::with_rank(2..=2)"), "{report}");
}
