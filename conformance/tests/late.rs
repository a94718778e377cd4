//! A verdict does not depend on when the memory of another case is released.
//!
//! The test has its own process, because leases are counted per process.

use bridge_conformance::model::random_bytes;
use bridge_conformance::sim::{Habits, SimDevice, SimFramework, SimTensor};
use bridge_conformance::{Case, Config, Observer, Pair, PropertyReport, Subject, WHOLE, property, tree};
use bridge_core::{Options, transfer};
use std::thread::{JoinHandle, spawn};

/// Drops a view on another thread while each case runs.
struct Late {
    views: Vec<SimTensor>,
    threads: Vec<JoinHandle<()>>,
}

impl Observer for Late {
    fn started(&mut self, _: &str, _: u32, _: &Case) {
        let view = self.views.pop();
        self.threads.push(spawn(move || drop(view)));
    }

    fn finished(&mut self, _: &PropertyReport) {}
}

#[test]
fn views_of_earlier_cases_that_are_dropped_late_are_no_failure() {
    const CASES: u32 = 200;
    let device = SimDevice::new(3);
    let (from, to) = (SimFramework::new(&device, Habits::Generous), SimFramework::new(&device, Habits::Generous));
    let ordering = device.ordering();
    let pair = Pair::new(&from, &to).with_native_method();
    let spec = tree(property("values").unwrap(), &pair.sides(), 1, 0).current().spec;
    let view = |seed| {
        let tensor = from.create(&spec, &random_bytes(&spec, seed)).unwrap();
        transfer(&from, &to, &tensor, &ordering, &Options::default()).unwrap().0
    };
    let mut late = Late { views: (0..CASES).map(|seed| view(seed.into())).collect(), threads: Vec::new() };
    let properties = Some(vec!["life".into()]);
    // So many that `life` has `CASES`.
    let cases = CASES * WHOLE / property("life").unwrap().cases;
    let config = Config { cases, seed: 2, properties, ..Config::default() };
    let report = config.certify_pair(&pair, &mut late);
    late.threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(report.passed(), "{report:#?}");
    assert_eq!(report.properties[0].cases, CASES);
}
