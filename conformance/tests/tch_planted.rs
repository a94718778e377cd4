//! A fault in an adapter for Rust that needs libtorch or a CUDA device is found by the property that must find it.

mod judge;

use bridge_conformance::rust::{CudarcSubject, NdArraySubject, TchSubject};
use bridge_core::Device;
use judge::{finds, present};

// One test: what is planted is planted into the process.
#[test]
fn faults_in_the_adapters_of_tch_and_cudarc_are_found() {
    finds("tch_pending_dropped", "values", &TchSubject::new(Device::CPU).unwrap(), &NdArraySubject::default());
    if let (Some(cudarc), Some(tch)) = (present(CudarcSubject::new(0)), present(TchSubject::new(Device::cuda(0)))) {
        finds("cudarc_stream_mistaken", "order", &cudarc, &tch);
    }
}
