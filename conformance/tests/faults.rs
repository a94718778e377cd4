//! Every planted fault is found by the property that must find it.

use bridge_conformance::sim::run_faults;

#[test]
fn every_planted_fault_is_caught() {
    let reports = run_faults(11);
    for report in &reports {
        println!("{}: must {}, caught by {:?}", report.fault, report.must_be_caught_by, report.caught_by);
    }
    let survivors: Vec<_> = reports.iter().filter(|report| !report.is_caught()).collect();
    assert!(survivors.is_empty(), "{survivors:#?}");
}
