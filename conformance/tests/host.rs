//! Every pair of candle, ONNX Runtime and `ndarray`, on the host. Pairs with ONNX Runtime need its library.
//!
//! `TRUEBRIDGE_CASES` sets the cases of a pair, `TRUEBRIDGE_SEED` the seed.

mod judge;

use bridge_conformance::rust::{CandleSubject, NdArraySubject, OrtSubject};
use judge::{judge, present};

fn ort() -> Option<OrtSubject> {
    present(OrtSubject::load())
}

#[test]
fn candle_to_candle() {
    let candle = CandleSubject::default();
    judge(&candle, &candle);
}

#[test]
fn candle_to_ndarray() {
    judge(&CandleSubject::default(), &NdArraySubject::default());
}

#[test]
fn ndarray_to_candle() {
    judge(&NdArraySubject::default(), &CandleSubject::default());
}

#[test]
fn ort_to_ort() {
    let Some(ort) = ort() else { return };
    judge(&ort, &ort);
}

#[test]
fn ort_to_ndarray() {
    let Some(ort) = ort() else { return };
    judge(&ort, &NdArraySubject::default());
}

#[test]
fn ndarray_to_ort() {
    let Some(ort) = ort() else { return };
    judge(&NdArraySubject::default(), &ort);
}

#[test]
fn ort_to_candle() {
    let Some(ort) = ort() else { return };
    judge(&ort, &CandleSubject::default());
}

#[test]
fn candle_to_ort() {
    let Some(ort) = ort() else { return };
    judge(&CandleSubject::default(), &ort);
}
