//! Pairs of ONNX Runtime with `cudarc`, on the first CUDA device.
//!
//! `TRUEBRIDGE_CASES` sets the cases of a pair, `TRUEBRIDGE_SEED` the seed.

mod judge;

use bridge_conformance::rust::{CudarcSubject, OrtCudaSubject};
use judge::{judge, present};

#[test]
fn ort_to_cudarc() {
    let Some(ort) = present(OrtCudaSubject::new(0)) else { return };
    judge(&ort, &CudarcSubject::new(0).unwrap());
}

#[test]
fn cudarc_to_ort() {
    let Some(ort) = present(OrtCudaSubject::new(0)) else { return };
    judge(&CudarcSubject::new(0).unwrap(), &ort);
}
