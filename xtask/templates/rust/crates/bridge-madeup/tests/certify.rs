//! Certifies the adapter against `ndarray`, both ways.

use bridge_conformance::rust::NdArraySubject;
use bridge_conformance::{Capabilities, Config, HostSubject, HostTensors, Observed, PairReport, Spec};
use bridge_core::{DType, Error, ErrorKind, Result};
use bridge_madeup::{MadeUp, Tensor};

/// Returns the error of a method that is to be written. Delete this with the last of them.
fn unwritten(method: &str, does: &str) -> Error {
    let text = format!("write {method} in crates/bridge-madeup/tests/certify.rs: it {does}");
    Error::new(ErrorKind::Framework, text)
}

/// Tensors of MadeUp, by its own public functions and never by the bridge.
struct Tensors;

impl HostTensors for Tensors {
    type Tensor = Tensor;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            dtypes: vec![DType::FLOAT32],
//% if copied
            copies: false,
//% end
//% if immutable
            writes: false,
            immutable: true,
//% end
            ..Capabilities::default()
        }
    }

    fn create(&self, _spec: &Spec, _bytes: &[u8]) -> Result<Tensor> {
        Err(unwritten("create", "makes the tensor that spec describes, over a base buffer with these bytes"))
    }

    fn observe(&self, _tensor: &Tensor) -> Result<Observed> {
        Err(unwritten("observe", "returns what the framework reports of a tensor; strides in elements"))
    }

    fn read(&self, _tensor: &Tensor) -> Result<Vec<u8>> {
        Err(unwritten("read", "returns the elements of a tensor in row-major order"))
    }

    fn write(&self, _tensor: &Tensor, _bytes: &[u8]) -> Result<()> {
        Err(unwritten("write", "overwrites the elements of a tensor"))
    }
}

#[test]
fn madeup_is_certified() {
//% if writes
    // SAFETY: the suite uses a tensor on one thread at a time.
    let madeup = unsafe { MadeUp::new() };
//% end
//% if immutable
    let madeup = MadeUp::new();
//% end
    let (madeup, reference) = (HostSubject::new(madeup, Tensors), NdArraySubject::default());
    let reports = Config::default().certify_apart("madeup_is_certified", &madeup, &reference);
    reports.iter().for_each(PairReport::assert_passed);
}
