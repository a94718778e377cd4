//! Every pair of simulated frameworks has every property.

use bridge_conformance::sim::{HABITS, SimDevice, SimFramework};
use bridge_conformance::{Config, Verdict, certify};

#[test]
fn every_simulated_pair_passes() {
    for (from, to) in HABITS.iter().flat_map(|from| HABITS.iter().map(move |to| (*from, *to))) {
        let device = SimDevice::new(7);
        let (from, to) = (SimFramework::new(&device, from), SimFramework::new(&device, to));
        let config = Config { cases: 1000, seed: 1, time_budget: None, properties: None, native: false };
        let report = certify(&from, &to, &device.ordering(), &config, &[], &mut ());
        for judged in &report.properties {
            let passed = matches!(judged.verdict, Verdict::Passed | Verdict::NotApplicable);
            assert!(passed, "{} → {}: {judged:#?}", report.from, report.to);
        }
    }
}
