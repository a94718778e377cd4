//! What an adapter can do wrong ends in a report, whatever it does to the process.

mod tensors;

use bridge_conformance::rust::NdArraySubject;
use bridge_conformance::{Config, HostSubject, Verdict};
use bridge_core::Result;
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, Export, Layout, Memory, Offer, Order, Profile,
};
use matrices::{Matrices, Matrix};
use std::sync::Arc;
use std::time::Duration;
use std::{mem, process, ptr, thread};
use tensors::Tensors;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// What an export keeps is freed twice.
    FreesTwice,
    /// An export keeps nothing.
    KeepsNothing,
    /// The import reads at an address where no memory is.
    Astray,
    /// The import ends the process, and says that all is well.
    Exits,
    /// The import does not return.
    Hangs,
    /// The import panics.
    Panics,
    /// The import keeps every lease.
    Leaks,
}

/// The adapter of matrices, with a fault.
struct Broken(Matrices, Fault);

/// Frees its memory twice.
struct Twice(*mut [u64; 8]);

// SAFETY: it is not; that is the fault.
unsafe impl Send for Twice {}
// SAFETY: as above.
unsafe impl Sync for Twice {}

impl Drop for Twice {
    fn drop(&mut self) {
        for _ in 0..2 {
            // SAFETY: the second time it is not; that is the fault.
            drop(unsafe { Box::from_raw(self.0) });
        }
    }
}

// SAFETY: it keeps no promise; that is the fault.
unsafe impl Adapter for Broken {
    type Tensor = Matrix;

    fn profile(&self) -> &Profile {
        self.0.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.0.consumer()
    }

    fn export(&self, matrix: &Matrix) -> Result<Export> {
        let (address, rows, columns) = matrix.parts();
        let layout = Layout::new(DType::FLOAT32, &[rows, columns], None, 0)?;
        let allocation = Allocation::host(layout.extent_at(address, None)?, Access::ReadWrite);
        match self.1 {
            Fault::FreesTwice => {
                let owner = (matrix.clone(), Twice(Box::into_raw(Box::new([0; 8]))));
                // SAFETY: the matrix keeps the memory. What is freed twice is the fault.
                Export::at(address, DType::FLOAT32, layout, unsafe { Memory::new(allocation, owner) })
            }
            Fault::KeepsNothing => {
                // SAFETY: nothing keeps the memory; that is the fault.
                Export::at(address, DType::FLOAT32, layout, unsafe { Memory::new(allocation, ()) })
            }
            _ => self.0.export(matrix),
        }
    }

    fn import(&self, offer: Offer) -> Result<Matrix> {
        match self.1 {
            // SAFETY: it is not; that is the fault.
            Fault::Astray => drop(unsafe { ptr::with_exposed_provenance::<u64>(8).read_volatile() }),
            Fault::Exits => process::exit(0),
            Fault::Hangs => thread::sleep(Duration::from_secs(3600)),
            Fault::Panics => panic!("not today"),
            _ => (),
        }
        let matrix = self.0.import(offer)?;
        if self.1 == Fault::Leaks {
            mem::forget(matrix.clone());
        }
        Ok(matrix)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Matrix> {
        // SAFETY: the caller's promise.
        unsafe { self.0.empty(device, dtype, shape, order) }
    }
}

/// Runs the suite, as the test `test`. The properties that fail are judged one by one: the first says what `told` is.
fn reported(test: &str, fault: Fault, verdict: Verdict, told: &str) {
    // Only a hang is waited for. Other faults have the time that they take on a busy machine.
    let patience = Duration::from_secs(if fault == Fault::Hangs { 2 } else { 20 });
    let config = Config { cases: 300, patience, shrinks: false, ..Config::default() };
    let config = Config { properties: Some(["life", "values", "shape"].map(String::from).to_vec()), ..config };
    let broken = HostSubject::new(Broken(Matrices::default(), fault), Tensors);
    let [there, back] = config.certify_apart(test, &broken, &NdArraySubject::default());
    let failed = [&there, &back].map(|report| report.properties.iter().find(|property| property.verdict == verdict));
    let failed = failed.into_iter().flatten().next().unwrap_or_else(|| panic!("not found:\n{there}\n{back}"));
    assert!(failed.reason.as_ref().is_some_and(|reason| reason.contains(told)), "{failed}");
    assert!(failed.counterexample.is_some(), "{failed}");
    let judged = [there.properties.len(), back.properties.len()];
    assert_eq!(judged, [3, 3], "the other properties are judged, too:\n{there}\n{back}");
}

macro_rules! faults {
    ($($test:ident: $fault:ident, $verdict:ident, $told:literal;)*) => {
        $(#[test]
        fn $test() {
            reported(stringify!($test), Fault::$fault, Verdict::$verdict, $told);
        })*
    };
}

faults! {
    memory_that_is_freed_twice: FreesTwice, Crashed, "the process died of SIG";
    memory_that_is_not_kept: KeepsNothing, Failed, "reuses the memory of a view that lives";
    a_pointer_that_goes_astray: Astray, Crashed, "the process died of SIGSEGV";
    an_exit: Exits, Crashed, "the process ended with exit code 0";
    a_hang: Hangs, Crashed, "the process hung for 2 s";
    a_panic: Panics, Failed, "panicked: not today";
    a_leak: Leaks, Failed, "lease";
}
