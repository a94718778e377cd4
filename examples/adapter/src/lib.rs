//! A library of matrices, and its adapter: all that a third party writes for its own type.

use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout, Memory, Offer,
    Order, Profile, Result, Strides, Views,
};
use std::fmt;
use std::sync::Arc;

/// A row-major matrix of float32: its own elements, or a view of imported memory.
#[derive(Clone)]
pub struct Matrix {
    address: usize,
    rows: i64,
    columns: i64,
    _memory: Arc<dyn Send + Sync>,
}

impl Matrix {
    /// Makes a matrix of these elements.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`] if the shape is not that of a matrix, or has another number of elements.
    pub fn new(shape: &[i64], elements: Vec<f32>) -> Result<Self> {
        let [rows, columns] = two(shape)?;
        if usize::try_from(rows * columns).ok() != Some(elements.len()) {
            let text = format!("{} elements do not fill {rows} × {columns}: pass as many as there are", elements.len());
            return Err(Error::new(ErrorKind::Layout, text));
        }
        let elements = elements.into_boxed_slice();
        Ok(Self { address: elements.as_ptr().expose_provenance(), rows, columns, _memory: Arc::new(elements) })
    }

    /// Returns the address of the first element, rows and columns.
    pub fn parts(&self) -> (usize, i64, i64) {
        (self.address, self.rows, self.columns)
    }
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Matrix({} × {})", self.rows, self.columns)
    }
}

fn two(shape: &[i64]) -> Result<[i64; 2]> {
    let text = || format!("{} dimensions are not those of a matrix: reshape the tensor to two", shape.len());
    <[i64; 2]>::try_from(shape).map_err(|_| Error::new(ErrorKind::Layout, text()))
}

/// The adapter.
#[derive(Debug)]
pub struct Matrices {
    profile: Profile,
    views: Arc<Views>,
}

impl Default for Matrices {
    /// States what a matrix can hold. The suite tries all of it.
    fn default() -> Self {
        let profile = Profile::export_only("matrices")
            .with_dtypes(vec![DType::FLOAT32])
            .with_strides(Strides::Compact)
            .with_rank(2..=2)
            .with_alignment(1)
            .with_devices(vec![DeviceKind::CPU])
            .with_keeps_read_only(false);
        Self { profile, views: Arc::default() }
    }
}

// SAFETY: a matrix keeps its lease, has its memory on the host, and is never written to.
unsafe impl Adapter for Matrices {
    type Tensor = Matrix;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.views.clone() // Host memory has no streams.
    }

    fn export(&self, matrix: &Matrix) -> Result<Export> {
        let layout = Layout::new(DType::FLOAT32, &[matrix.rows, matrix.columns], None, 0)?;
        let allocation = Allocation::host(layout.extent_at(matrix.address, None)?, Access::ReadWrite);
        // SAFETY: the clone keeps the memory and may be dropped on any thread; a matrix never writes to it.
        let memory = unsafe { Memory::new(allocation, matrix.clone()) };
        Export::at(matrix.address, DType::FLOAT32, layout, memory)
    }

    fn import(&self, offer: Offer) -> Result<Matrix> {
        let lease = offer.accept(&self.profile, &self.views)?;
        let [rows, columns] = two(lease.layout().shape())?;
        Ok(Matrix { address: lease.data(), rows, columns, _memory: Arc::new(lease) })
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Matrix> {
        if (device, dtype, order) != (Device::CPU, DType::FLOAT32, Order::RowMajor) {
            let text = "matrices are float32, row-major and on the host: ask for such a copy";
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        let [rows, columns] = two(shape)?;
        let elements = usize::try_from(rows * columns).map_err(|_| Error::new(ErrorKind::Layout, "a negative size"))?;
        Matrix::new(shape, vec![0.0; elements])
    }
}
