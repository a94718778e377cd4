//! Every pair of the adapters for Rust, on the host and on the first CUDA device.
//!
//! `TENSOR_BRIDGE_CASES` sets the cases of a pair, `TENSOR_BRIDGE_SEED` the seed.

use bridge_conformance::rust::{NdArraySubject, TchSubject};
use bridge_conformance::{Config, Pair, Subject, Verdict};
use bridge_core::{Device, ErrorKind};

fn number(variable: &str, otherwise: u32) -> u32 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect("a number"))
}

fn judge<F, T>(from: &dyn Subject<Tensor = F>, to: &dyn Subject<Tensor = T>) {
    let (cases, seed) = (number("TENSOR_BRIDGE_CASES", 1000), number("TENSOR_BRIDGE_SEED", 1));
    let config = Config { cases, seed: seed.into(), ..Config::default() };
    let report = config.certify_pair(&Pair::new(from, to), &mut ());
    for judged in &report.properties {
        println!("{} → {}: {} {:?}, {} cases", report.from, report.to, judged.name, judged.verdict, judged.cases);
    }
    let failed: Vec<_> = report.properties.iter().filter(|judged| judged.verdict == Verdict::Failed).collect();
    assert!(failed.is_empty(), "{} → {}: {failed:#?}", report.from, report.to);
}

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
