//! Every pair of the adapters for Rust, on the host and on the first CUDA device.
//!
//! `TENSOR_BRIDGE_CASES` sets the cases of a pair, `TENSOR_BRIDGE_SEED` the seed.

mod judge;

use bridge_conformance::rust::{NdArraySubject, TchSubject};
use bridge_core::{Device, ErrorKind};
use judge::judge;

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

#[test]
fn tch_to_tch_on_cuda() {
    match TchSubject::new(Device::cuda(0)) {
        Ok(tch) => judge(&tch, &tch),
        Err(error) if error.kind() == ErrorKind::Missing => println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    }
}
