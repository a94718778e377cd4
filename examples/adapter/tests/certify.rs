//! Certifies the adapter against `ndarray`, in both directions, with one call.

mod tensors;

use bridge_conformance::rust::NdArraySubject;
use bridge_conformance::{Config, HostSubject, PairReport};
use matrices::Matrices;
use tensors::Tensors;

#[test]
fn matrices_are_certified() {
    let (matrices, reference) = (HostSubject::new(Matrices::default(), Tensors), NdArraySubject::default());
    // Each pair runs in a separate process: a fault that crashes it ends in a report, too.
    let reports = Config::default().certify_apart("matrices_are_certified", &matrices, &reference);
    reports.iter().for_each(PairReport::assert_passed);
    for report in reports {
        let judged = report.properties.iter().filter(|property| property.cases > 0).count();
        assert!(judged >= 8, "{report}");
    }
}
