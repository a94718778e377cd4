//! Matrices as the suite makes, reads and writes them, without their adapter.

use bridge_conformance::{Capabilities, HostTensors, Observed, Spec};
use bridge_core::{DType, Device, Result};
use matrices::Matrix;
use std::ptr;

/// What the suite needs of matrices in addition to their adapter.
#[derive(Debug)]
pub struct Tensors;

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
        let (address, rows, columns) = matrix.parts();
        let (shape, strides) = (vec![rows, columns], vec![columns.max(1), 1]);
        Ok(Observed { dtype: DType::FLOAT32, shape, strides, address, read_only: false, device: Device::CPU })
    }

    fn read(&self, matrix: &Matrix) -> Result<Vec<u8>> {
        let (address, rows, columns) = matrix.parts();
        let mut bytes = vec![0; usize::try_from(rows * columns).unwrap() * 4];
        // SAFETY: the matrix keeps its elements, and no other thread writes to them.
        unsafe { ptr::copy(ptr::with_exposed_provenance(address), bytes.as_mut_ptr(), bytes.len()) };
        Ok(bytes)
    }

    fn write(&self, matrix: &Matrix, bytes: &[u8]) -> Result<()> {
        // SAFETY: the matrix has so many bytes, and no other thread uses them.
        unsafe { ptr::copy(bytes.as_ptr(), ptr::with_exposed_provenance_mut(matrix.parts().0), bytes.len()) };
        Ok(())
    }
}
