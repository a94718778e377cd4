//! Every pair of the adapters for Rust, on the host and on the first CUDA device.
//!
//! `TRUEBRIDGE_CASES` sets the cases of a pair, `TRUEBRIDGE_SEED` the seed.

mod judge;

use bridge_conformance::rust::{CudarcSubject, NdArraySubject, TchSubject};
use bridge_core::Device;
use judge::{judge, present};

#[test]
fn tch_to_tch() {
    let tch = TchSubject::new(Device::CPU).unwrap();
    judge(&tch, &tch);
}

#[test]
fn tch_to_ndarray() {
    judge(&TchSubject::new(Device::CPU).unwrap(), &NdArraySubject::default());
}

#[test]
fn ndarray_to_tch() {
    judge(&NdArraySubject::default(), &TchSubject::new(Device::CPU).unwrap());
}

#[test]
fn ndarray_to_ndarray() {
    let ndarray = NdArraySubject::default();
    judge(&ndarray, &ndarray);
}

fn tch_on_cuda() -> Option<TchSubject> {
    present(TchSubject::new(Device::cuda(0)))
}

#[test]
fn tch_to_tch_on_cuda() {
    let Some(tch) = tch_on_cuda() else { return };
    judge(&tch, &tch);
}

#[test]
fn cudarc_to_cudarc() {
    let Some(cudarc) = present(CudarcSubject::new(0)) else { return };
    judge(&cudarc, &cudarc);
}

#[test]
fn tch_to_cudarc() {
    let (Some(tch), Some(cudarc)) = (tch_on_cuda(), present(CudarcSubject::new(0))) else { return };
    judge(&tch, &cudarc);
}

#[test]
fn cudarc_to_tch() {
    let (Some(tch), Some(cudarc)) = (tch_on_cuda(), present(CudarcSubject::new(0))) else { return };
    judge(&cudarc, &tch);
}
