//! A fault in an adapter for Rust is found by the property that must find it.

mod judge;

use bridge_conformance::rust::{CandleSubject, NdArraySubject, OrtSubject};
use judge::{finds, present};

// One test: what is planted is planted into the process.
#[test]
fn faults_in_adapters_of_the_host_are_found() {
    let (candle, ndarray) = (CandleSubject::default(), NdArraySubject::default());
    finds("ndarray_owner_leaked", "life", &ndarray, &ndarray);
    finds("candle_strides_dropped", "values", &candle, &ndarray);
    if let Some(ort) = present(OrtSubject::load()) {
        finds("ort_dtype_mistaken", "dtype", &ort, &ndarray);
    }
}
