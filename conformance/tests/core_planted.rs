//! A fault in core is found on the simulated device by the property that must find it.

use bridge_conformance::sim::{Habits, SimDevice, SimFramework};
use bridge_conformance::{Config, Pair, Verdict, WHOLE};
use bridge_core::planted::plant;

/// Each fault, the property that must find it, and the pair.
const FAULTS: &[(&str, &str, Habits, Habits)] = &[
    ("core_reader_forgotten_elsewhere", "release_order", Habits::Generous, Habits::Common),
    ("core_part_not_noted", "release_order", Habits::Generous, Habits::Common),
    ("core_noted_stream_not_kept", "release_order", Habits::Generous, Habits::Common),
    ("core_group_admits_all", "batch", Habits::Generous, Habits::Common),
    ("core_group_ordered_early", "batch", Habits::Generous, Habits::Common),
    ("core_batch_owner_mistaken", "batch", Habits::Generous, Habits::Common),
    ("core_graph_view_returned", "graph", Habits::Generous, Habits::Common),
    ("core_capture_leaks", "graph", Habits::Generous, Habits::Common),
    ("core_order_lost_by_failure", "failure", Habits::Generous, Habits::Common),
    ("core_reader_lost_by_failure", "failure", Habits::Generous, Habits::Common),
    ("core_copier_ordered_as_made", "torn", Habits::Generous, Habits::Common),
    ("core_copier_awaited_as_made", "torn", Habits::Generous, Habits::Common),
    ("sim_records_per_thread", "release_order", Habits::Generous, Habits::Common),
];

/// Returns what the property says in its share of the cases that a pair has by default.
fn judged(property: &str, seed: u64, from: Habits, to: Habits) -> (Verdict, Option<String>) {
    let device = SimDevice::new(seed);
    let [from, to] = [from, to].map(|habits| SimFramework::new(&device, habits));
    let third = SimFramework::new(&device, Habits::Common);
    let pair = Pair::new(&from, &to).with_native_method().with_third(Some(&third));
    let properties = Some(vec![property.into()]);
    let report =
        Config { cases: WHOLE, seed, properties, shrinks: false, ..Config::default() }.certify_pair(&pair, &mut ());
    let judged = report.properties.into_iter().next().expect("the property exists");
    (judged.verdict, judged.reason)
}

/// For longer: `TRUEBRIDGE_SEEDS=10`.
// One test: what is planted is planted into the process.
#[test]
fn faults_in_core_are_found() {
    let seeds = std::env::var("TRUEBRIDGE_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(1);
    for (fault, property, from, to) in FAULTS {
        assert_eq!(judged(property, 0, *from, *to), (Verdict::Passed, None), "{property} without a fault");
        for seed in 0..seeds {
            plant(fault);
            let (verdict, reason) = judged(property, seed, *from, *to);
            plant("");
            assert_eq!(verdict, Verdict::Failed, "{property} must find {fault}, seed {seed}");
            println!("{fault}, seed {seed}: {}", reason.unwrap_or_default());
        }
    }
}
