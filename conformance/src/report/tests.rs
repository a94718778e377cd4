use super::*;

fn property(name: &str, verdict: Verdict, reason: Option<&str>) -> PropertyReport {
    let reason = reason.map(String::from);
    PropertyReport::new(name, 10, verdict, reason)
}

fn report() -> Report {
    let mut order = property("order", Verdict::Passed, None);
    order.native = Some(Native { wrong: 7, refused: 1, cases: 10 });
    let good = vec![property("values", Verdict::Passed, None), order];
    let bad = vec![
        property("values", Verdict::Crashed, Some("the process died of SIGABRT; a | b")),
        property("shape", Verdict::Failed, Some("<wrong>")),
        property("dtype", Verdict::Expected, Some("it has none")),
        property("order", Verdict::NotApplicable, Some("no streams")),
    ];
    let pair = |from: &str, to: &str, properties| PairReport {
        from: from.into(),
        to: to.into(),
        device: "cuda:0".into(),
        properties,
    };
    let fault = |name: &str, caught_by: &[&str]| FaultReport {
        fault: name.into(),
        must_be_caught_by: "life".into(),
        caught_by: caught_by.iter().map(|name| (*name).into()).collect(),
    };
    let mut report = Report {
        schema: SCHEMA,
        host: Host { date: "2026-01-02T03:04:05Z".into(), gpus: vec!["H200".into()], ..Host::default() },
        device: "cuda:0".into(),
        seed: 5,
        pairs: vec![pair("torch", "cupy", good), pair("cupy", "torch", bad)],
        faults: vec![fault("leak", &["life", "values"]), fault("double_release", &["values"])],
        left_out: vec![LeftOut { adapter: "numpy".into(), reason: "host memory only".into() }],
        stale: vec!["an old expectation".into()],
        summary: Summary::default(),
    };
    report.sum_up();
    report
}

#[test]
fn the_summary_counts_everything_once() {
    // 2 properties and 1 fault; 2 properties, 1 fault and 1 expectation.
    assert_eq!(report().summary, Summary { passed: 3, failed: 4, expected: 1, cases: 60 });
}

#[test]
fn the_json_has_the_keys_that_readers_rely_on() {
    let json = serde_json::to_value(report()).unwrap();
    assert_eq!(json["schema"], 1);
    assert_eq!(json["pairs"][0]["properties"][1]["native"]["wrong"], 7);
    assert_eq!(json["pairs"][1]["device"], "cuda:0");
    assert_eq!(json["pairs"][1]["properties"][0]["verdict"], "crashed");
    assert_eq!(json["faults"][1]["must_be_caught_by"], "life");
    assert_eq!(json["left_out"][0]["reason"], "host memory only");
    assert_eq!(json["summary"]["failed"], 4);
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report());
}

#[test]
fn the_markdown_shows_the_matrix_and_every_row() {
    let text = report().markdown();
    assert!(text.contains("| from ↓ to → | torch | cupy |\n|---|---|---|\n"), "{text}");
    assert!(text.contains("| **torch** | – | 2 of 2, 20 cases |"), "{text}");
    assert!(text.contains("| **cupy** | ✗ 0 + 1 expected of 3, 40 cases | – |"), "{text}");
    assert!(text.contains("| order | torch → cupy | 10 | passed | wrong 7, refused 1 of 10 |"), "{text}");
    assert!(text.contains(r"died of SIGABRT; a \| b |"), "{text}");
    assert!(text.contains("| double_release | life | values | **survived** |"), "{text}");
}

#[test]
fn a_terminal_shows_the_matrix_in_columns_and_what_needs_a_look() {
    let text = report().text();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "from ↓ to →  torch                            cupy");
    assert_eq!(lines[1], "torch        –                                2 of 2, 20 cases");
    assert_eq!(lines[2], "cupy         ✗ 0 + 1 expected of 3, 40 cases  –");
    assert!(text.contains("left out: numpy: host memory only\n"), "{text}");
    assert!(text.contains("survived: double_release, not caught by life\n"), "{text}");
}

#[test]
fn junit_counts_failures_errors_and_what_was_skipped() {
    let junit = report().junit();
    let count = |suite: &TestSuite| (suite.tests, suite.failures, suite.errors, suite.skipped);
    let counts: Vec<_> = junit.test_suites.iter().map(count).collect();
    assert_eq!(counts, [(2, 0, 0, 0), (4, 1, 1, 2), (2, 1, 0, 0), (1, 0, 0, 1), (1, 1, 0, 0)]);
    assert!(junit.to_string().unwrap().contains("&lt;wrong&gt;"));
}
