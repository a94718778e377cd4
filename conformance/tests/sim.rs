//! Every pair of simulated frameworks has every property.

use bridge_conformance::sim::{HABITS, Habits, SimDevice, SimFramework};
use bridge_conformance::{Config, PROPERTIES, Pair, Sides, Verdict};

/// Cases of a pair: Miri is some thousand times slower.
const CASES: u32 = if cfg!(miri) { 15 } else { 1000 };

#[test]
fn every_simulated_pair_passes() {
    for (from, to) in HABITS.iter().flat_map(|from| HABITS.iter().map(move |to| (*from, *to))) {
        let device = SimDevice::new(7);
        let (from, to) = (SimFramework::new(&device, from), SimFramework::new(&device, to));
        let config = Config { cases: CASES, seed: 1, ..Config::default() };
        let third = SimFramework::new(&device, Habits::Common);
        let pair = Pair::new(&from, &to).with_native_method().with_third(Some(&third));
        let report = config.certify_pair(&pair, &mut ());
        for judged in &report.properties {
            let passed = matches!(judged.verdict, Verdict::Passed | Verdict::NotApplicable);
            assert!(passed, "{} → {}: {judged:#?}", report.from, report.to);
        }
    }
}

#[test]
fn what_is_left_out_where_nothing_writes_and_there_is_one_stream() {
    let left_out = |from, to| {
        let device = SimDevice::new(7);
        let sides = Sides::of(&SimFramework::new(&device, from), &SimFramework::new(&device, to));
        let of = PROPERTIES.iter().filter(|property| (property.left_out)(&sides).is_some());
        of.map(|property| property.name).collect::<Vec<_>>()
    };
    assert_eq!(
        left_out(Habits::Immutable, Habits::Immutable),
        [
            "read_only",
            "aliasing",
            "order",
            "release_order",
            "batch",
            "elements",
            "targets",
            "far",
            "huge",
            "staging",
            "torn",
            "users",
            "raises",
            "devices",
            "graph",
            "moves"
        ]
    );
    assert_eq!(
        left_out(Habits::Immutable, Habits::Generous),
        ["read_only", "far", "huge", "users", "raises", "graph", "moves"]
    );
    assert_eq!(
        left_out(Habits::Generous, Habits::Immutable),
        ["elements", "targets", "torn", "users", "raises", "graph", "moves"]
    );
}
