//! Cases, shrinking, reports, expectations and regressions.

use bridge_conformance::expect::{apply, stale};
use bridge_conformance::model::{itemsize, random_bytes};
use bridge_conformance::sim::{Habits, SimDevice, SimFramework, SimTensor};
use bridge_conformance::{
    Case, Config, Coverage, Expectation, Histogram, Observer, PROPERTIES, Pair, PairReport, PropertyReport, REPLAYED,
    Regression, Sides, Spec, Subject, Verdict, certify, property, replay, shrink, tree,
};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

struct Bench {
    from: SimFramework,
    to: SimFramework,
}

impl Bench {
    fn new(from: Habits, to: Habits) -> Self {
        let device = SimDevice::new(3);
        Self { from: SimFramework::new(&device, from), to: SimFramework::new(&device, to) }
    }

    fn pair(&self) -> Pair<'_, SimTensor, SimTensor> {
        Pair::new(&self.from, &self.to).with_native_method()
    }

    fn sides(&self) -> Sides {
        self.pair().sides()
    }

    fn certify(&self, config: &Config, observer: &mut dyn Observer) -> PairReport {
        config.certify_pair(&self.pair(), observer)
    }
}

fn config(cases: u32) -> Config {
    Config { cases, seed: 2, ..Config::default() }
}

#[test]
fn a_case_is_the_same_wherever_it_is_made() {
    let sides = Bench::new(Habits::Generous, Habits::Common).sides();
    let elsewhere: Sides = serde_json::from_str(&serde_json::to_string(&sides).unwrap()).unwrap();
    for property in PROPERTIES {
        let mut different = 0;
        for index in 0..20 {
            let case = tree(property, &sides, 9, index).current();
            assert_eq!(tree(property, &elsewhere, 9, index).current(), case);
            let written: Case = serde_json::from_str(&serde_json::to_string(&case).unwrap()).unwrap();
            assert_eq!(written, case);
            different += usize::from(tree(property, &sides, 10, index).current() != case);
        }
        assert!(different > 10, "{}: the seed changes {different} of 20 cases", property.name);
    }
}

#[test]
fn cases_are_aligned_as_the_source_can_make_them() {
    let mut unaligned = 0;
    for from in [Habits::Generous, Habits::Common, Habits::Strict] {
        let sides = Bench::new(from, Habits::Common).sides();
        for property in PROPERTIES {
            for index in 0..100 {
                let spec = tree(property, &sides, 9, index).current().spec;
                let own = spec.align.is_multiple_of(itemsize(spec.dtype));
                assert!(own || from == Habits::Generous, "{spec:?}");
                assert!(spec.align == 0 || from != Habits::Strict, "{spec:?}");
                unaligned += usize::from(!own);
            }
        }
    }
    assert!(unaligned > 30, "{unaligned}");
}

#[test]
fn a_case_lies_at_the_address_that_it_names() {
    let bench = Bench::new(Habits::Generous, Habits::Common);
    let mut seen = BTreeSet::new();
    for index in 0..100 {
        let spec = tree(property("values").unwrap(), &bench.sides(), 9, index).current().spec;
        let tensor = bench.from.create(&spec, &random_bytes(&spec, 1)).unwrap();
        let start = bench.from.observe(&tensor).unwrap().address - spec.offset * itemsize(spec.dtype);
        assert_eq!(start % Spec::GRAIN, spec.align % Spec::GRAIN, "{spec:?}");
        seen.insert(spec.align);
    }
    assert!(seen.len() > 4, "{seen:?}");
}

#[test]
fn a_failing_case_shrinks_to_what_matters() {
    let sides = Bench::new(Habits::Generous, Habits::Generous).sides();
    let life = property("life").unwrap();
    let fails = |case: &Case| case.spec.shape.iter().product::<i64>() >= 4 && case.ops.len() >= 2;
    let tree = (0..).map(|index| tree(life, &sides, 4, index)).find(|tree| fails(&tree.current())).unwrap();
    let mut steps = 0;
    let case = shrink(tree, &mut |case| {
        steps += 1;
        fails(case)
    });
    assert!(fails(&case) && steps <= 400);
    assert_eq!((case.ops.len(), case.seed), (2, 0), "{case:?}");
    assert!(case.spec.shape.iter().product::<i64>() <= 6, "{case:?}");
}

#[test]
fn the_orders_get_their_share() {
    let report = Bench::new(Habits::Strict, Habits::Common).certify(&config(200), &mut ());
    for name in ["order", "release_order"] {
        let judged = report.properties.iter().find(|judged| judged.name == name).unwrap();
        assert!(judged.cases >= 20, "{judged:?}");
    }
    assert!(report.passed(), "{report:#?}");
    assert_eq!(report.properties.len(), PROPERTIES.len());
}

#[test]
fn without_time_every_property_still_runs_once() {
    let config = Config { time_budget: Some(Duration::ZERO), ..config(1000) };
    let report = Bench::new(Habits::Generous, Habits::Common).certify(&config, &mut ());
    let (without, judged): (Vec<_>, Vec<_>) =
        report.properties.iter().partition(|judged| judged.verdict == Verdict::NotApplicable);
    assert!(judged.iter().all(|judged| judged.cases == 1 && judged.verdict == Verdict::Passed), "{report:?}");
    // The simulated frameworks have no users, no exceptions and no host to move to.
    assert_eq!(without.iter().map(|property| &*property.name).collect::<Vec<_>>(), ["users", "raises", "moves"]);
}

#[test]
fn the_native_method_is_found_wrong() {
    let config = Config { properties: Some(vec!["order".into(), "release_order".into()]), native: true, ..config(800) };
    let report = Bench::new(Habits::Generous, Habits::Common).certify(&config, &mut ());
    for judged in report.properties {
        let native = judged.native.unwrap();
        assert_eq!((judged.verdict, native.cases, native.refused), (Verdict::Passed, judged.cases, 0));
        assert!(native.wrong * 4 > native.cases, "{}: {native:?}", judged.name);
    }
}

#[derive(Default)]
struct Log(Vec<(String, u32)>);

impl Observer for Log {
    fn started(&mut self, property: &str, index: u32, _: &Case) {
        self.0.push((property.into(), index));
    }

    fn finished(&mut self, _: &PropertyReport) {}
}

#[test]
fn regressions_are_run_first_and_say_so_when_they_are_back() {
    let bench = Bench::new(Habits::Generous, Habits::Common);
    let values = property("values").unwrap();
    let good = tree(values, &bench.sides(), 1, 0).current();
    let known = |to: &str, case: &Case| Regression {
        from: "sim-generous".into(),
        to: to.into(),
        property: "values".into(),
        case: case.clone(),
    };
    let only = |regressions| Config { properties: Some(vec!["values".into()]), regressions, ..config(18) };
    let mut log = Log::default();
    let report = bench.certify(&only(vec![known("sim-common", &good), known("elsewhere", &good)]), &mut log);
    assert!(report.passed());
    assert_eq!(log.0.iter().map(|(_, index)| *index).collect::<Vec<_>>(), [REPLAYED, 0, 1, 2]);

    // A case that cannot pass: the view is larger than its base.
    let mut bad = good;
    (bad.spec.shape, bad.spec.strides) = (vec![100], vec![1 << 20]);
    assert!(replay(&bench.pair(), values, &bad).is_err());
    let report = bench.certify(&only(vec![known("sim-common", &bad)]), &mut ());
    let judged = &report.properties[0];
    assert_eq!((judged.verdict, judged.cases, judged.counterexample.as_ref()), (Verdict::Failed, 1, Some(&bad)));
    assert!(judged.reason.as_ref().unwrap().contains("a kept case fails again"));
}

#[test]
fn a_regression_is_replayed_under_the_name_that_reports_file_it_under() {
    let device = SimDevice::new(3);
    // Two adapters of one framework have one profile.
    let from = SimFramework::new(&device, Habits::Generous).named("another-way");
    let to = SimFramework::new(&device, Habits::Common);
    let (from_name, to_name) = ("another-way".into(), "sim-common".into());
    let case = tree(property("values").unwrap(), &Sides::of(&from, &to), 1, 0).current();
    let regressions = vec![Regression { from: from_name, to: to_name, property: "values".into(), case }];
    let only = Config { properties: Some(vec!["values".into()]), regressions, ..config(1) };
    let mut log = Log::default();
    let report = only.certify_pair(&Pair::new(&from, &to), &mut log);
    assert_eq!((report.from.as_str(), report.to.as_str()), ("another-way", "sim-common"));
    assert_eq!(log.0.iter().map(|(_, index)| *index).collect::<Vec<_>>(), [REPLAYED, 0]);
}

#[test]
fn an_adapter_is_certified_in_both_directions() {
    let bench = Bench::new(Habits::Strict, Habits::Generous);
    let both = certify(&bench.from, &bench.to);
    let names = both.each_ref().map(|report| (report.from.as_str(), report.to.as_str()));
    assert_eq!(names, [("sim-strict", "sim-generous"), ("sim-generous", "sim-strict")]);
    both.iter().for_each(PairReport::assert_passed);
}

fn judged(name: &str, verdict: Verdict) -> PropertyReport {
    let (name, reason, native, counterexample, kept) = (name.into(), None, None, None, None);
    PropertyReport {
        name,
        cases: 1,
        verdict,
        reason,
        native,
        counterexample,
        kept,
        coverage: Coverage::default(),
        histogram: Histogram::default(),
        millis: 0,
    }
}

fn expectation(from: &str, property: &str, device: Option<&str>) -> Expectation {
    let (from, to, property) = (from.into(), "b".into(), property.into());
    Expectation { from, to, property, device: device.map(String::from), reason: "it cannot".into() }
}

#[test]
fn an_expected_failure_that_passes_fails() {
    let verdicts = |expected: Expectation| {
        let properties = vec![judged("values", Verdict::Failed), judged("shape", Verdict::Passed)];
        let mut report = PairReport { from: "a".into(), to: "b".into(), device: "cuda:1".into(), properties };
        apply(&[expected], &mut report);
        report.properties.iter().map(|judged| judged.verdict).collect::<Vec<_>>()
    };
    let as_it_was = [Verdict::Failed, Verdict::Passed];
    assert_eq!(verdicts(expectation("a", "values", None)), [Verdict::Expected, Verdict::Passed]);
    assert_eq!(verdicts(expectation("a", "values", Some("cuda"))), [Verdict::Expected, Verdict::Passed]);
    assert_eq!(verdicts(expectation("a", "shape", Some("cuda:1"))), [Verdict::Failed, Verdict::Failed]);
    assert_eq!(verdicts(expectation("a", "values", Some("cpu"))), as_it_was);
    assert_eq!(verdicts(expectation("c", "values", None)), as_it_was);
}

#[test]
fn expectations_that_match_nothing_are_stale() {
    let properties = vec![judged("values", Verdict::Failed), judged("order", Verdict::NotApplicable)];
    let ran = [PairReport { from: "a".into(), to: "b".into(), device: "cpu".into(), properties }];
    let lines = |expected: Expectation| stale(&[expected], &["a".into(), "b".into()], &ran).len();
    assert_eq!(lines(expectation("a", "values", None)), 0);
    assert_eq!(lines(expectation("b", "values", None)), 0, "this pair did not run");
    assert_eq!(lines(expectation("a", "vlaues", None)), 1);
    assert_eq!(lines(expectation("c", "values", None)), 1);
    assert_eq!(lines(expectation("a", "order", None)), 1);
    assert_eq!(lines(Expectation { reason: " ".into(), ..expectation("a", "values", None) }), 1);
}

#[test]
fn a_regression_reads_back() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("regressions");
    let sides = Bench::new(Habits::Generous, Habits::Common).sides();
    let life = property("life").unwrap();
    let case = tree(life, &sides, 1, 0).current();
    let regression = Regression { from: "a".into(), to: "b".into(), property: life.name.into(), case };
    let path = regression.write(&folder).unwrap();
    assert_eq!(regression.write(&folder).unwrap(), path);
    assert_eq!(Regression::read_all(&folder).unwrap(), [regression]);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(Regression::read_all(&folder).unwrap(), []);
}
