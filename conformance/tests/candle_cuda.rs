//! Pairs of candle with `cudarc` and `tch`, on the first CUDA device.
//!
//! `TRUEBRIDGE_CASES` sets the cases of a pair, `TRUEBRIDGE_SEED` the seed.

mod judge;

use bridge_conformance::rust::{CandleCudaSubject, CudarcSubject, TchSubject};
use bridge_core::Device;
use judge::{judge, present};

fn candle() -> Option<CandleCudaSubject> {
    present(CandleCudaSubject::new(0))
}

#[test]
fn candle_to_candle() {
    let Some(candle) = candle() else { return };
    judge(&candle, &candle);
}

#[test]
fn candle_to_cudarc() {
    let Some(candle) = candle() else { return };
    judge(&candle, &CudarcSubject::new(0).unwrap());
}

#[test]
fn cudarc_to_candle() {
    let Some(candle) = candle() else { return };
    judge(&CudarcSubject::new(0).unwrap(), &candle);
}

#[test]
fn candle_to_tch() {
    let Some(candle) = candle() else { return };
    judge(&candle, &TchSubject::new(Device::cuda(0)).unwrap());
}

#[test]
fn tch_to_candle() {
    let Some(candle) = candle() else { return };
    judge(&TchSubject::new(Device::cuda(0)).unwrap(), &candle);
}
