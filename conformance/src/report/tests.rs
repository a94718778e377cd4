use super::*;
use crate::Native;
use quick_junit::TestSuite;

/// A case over memory that the page draws.
const CASE: &str = r#"{"spec": {"dtype": "float32", "shape": [2, 3], "strides": [-5, 1], "offset": 5, "base": 11,
    "read_only": false}, "seed": 7, "streams": {"allocate": 0, "write": 1, "read": 2, "onward": 0, "back": 0, "drop": 0}}"#;

fn property(name: &str, verdict: Verdict, reason: Option<&str>) -> PropertyReport {
    let reason = reason.map(String::from);
    PropertyReport::new(name, 10, verdict, reason)
}

fn report() -> Report {
    let mut order = property("order", Verdict::Passed, None);
    order.native = Some(Native { wrong: 7, refused: 1, cases: 10 });
    let good = vec![property("values", Verdict::Passed, None), order];
    let mut shape = property("shape", Verdict::Failed, Some("<wrong>"));
    (shape.kept, shape.millis) = (Some("out dir/cupy-torch-shape-1.json".into()), 1500);
    shape.counterexample = Some(serde_json::from_str(CASE).unwrap());
    shape.coverage = Coverage { in_place: 6, copied: 3, refused: 1, ..Coverage::default() };
    let bad = vec![
        property("values", Verdict::Crashed, Some("the process died of SIGABRT; a | b")),
        shape,
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
        command: "cargo xtask conformance".into(),
        cases: 1000,
        schema: SCHEMA,
        host: Host {
            date: "2026-01-02T03:04:05Z".into(),
            commit: Some("0123abcd".into()),
            gpus: vec!["H200".into()],
            ..Host::default()
        },
        device: "cuda:0".into(),
        seed: 5,
        pairs: vec![pair("torch", "cupy", good), pair("cupy", "torch", bad)],
        faults: vec![fault("leak", &["life", "values"]), fault("double_release", &["values"])],
        left_out: vec![LeftOut { adapter: "numpy".into(), reason: "host memory only".into() }],
        stale: vec!["an old expectation".into()],
        ..Report::default()
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

/// The command that replays the failure of `shape`.
const REPLAY: &str = "cargo xtask conformance --device cuda:0 --replay 'out dir/cupy-torch-shape-1.json'";

#[test]
fn the_markdown_begins_with_what_failed() {
    let text = report().markdown();
    let section = |name: &str| text.find(&format!("\n## {name}\n")).unwrap();
    assert!(section("Failures") < section("Pairs"), "{text}");
    let failure = format!(
        "### cupy → torch: shape\n\n&lt;wrong&gt;\n\nThe case is kept in `out dir/cupy-torch-shape-1.json`.\n\n```sh\n{REPLAY}\n```\n"
    );
    assert!(text.contains(&failure), "{text}");
    let by_seed = "cargo xtask conformance --device cuda:0 --pairs cupy:torch --cases 1000 --seed 5\n";
    assert!(text.contains(by_seed) && text.contains("cargo xtask conformance --faults --seed 5\n"), "{text}");
    assert!(text.contains("### stale expectation: an old expectation\n"), "{text}");
}

#[test]
fn messages_are_text_in_markdown() {
    let mut report = report();
    let message = "<b>bold</b> & `code`, **strong**, __dlpack__, release_order, [a](b), [2, 3] | rest";
    let shown =
        r"&lt;b&gt;bold&lt;/b&gt; &amp; \`code\`, \*\*strong\*\*, \_\_dlpack\_\_, release_order, [a]\(b), [2, 3]";
    report.pairs[1].properties[1].reason = Some(message.into());
    report.left_out[0].reason = message.into();
    let text = report.markdown();
    assert_eq!(text.matches(shown).count(), 3, "a section and two rows: {text}");
    assert_eq!(text.matches(&format!(r"{shown} \| rest |")).count(), 2, "{text}");
    assert!(report.overview().contains(shown) && !text.contains("<b>"), "{text}");
}

#[test]
fn the_markdown_shows_the_matrix_and_every_row_and_folds_what_does_not_apply() {
    let text = report().markdown();
    assert!(text.contains("| from ↓ to → | torch | cupy |\n|---|---|---|\n"), "{text}");
    assert!(text.contains("| **torch** | – | 2 of 2, 20 cases |"), "{text}");
    assert!(text.contains("| **cupy** | ✗ 0 + 1 expected of 3 (1 not applicable), 40 cases | – |"), "{text}");
    assert!(text.contains("| order | torch → cupy | 10 | 0, 0, 0 | passed | wrong 7, refused 1 of 10 |"), "{text}");
    assert!(text.contains("| shape | 10 | 6 | 3 | 1 |"), "{text}");
    assert!(text.contains(r"died of SIGABRT; a \| b |"), "{text}");
    assert!(text.contains("| double_release | life | values | **survived** |"), "{text}");
    let fold = text.find("<details><summary>1 row that does not apply").unwrap();
    assert!(fold < text.find("| order | cupy → torch | 10 |").unwrap() && text.contains("</details>"), "{text}");
}

#[test]
fn a_terminal_shows_the_matrix_in_columns_and_what_needs_a_look() {
    let text = report().text();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "from ↓ to →  torch                                               cupy");
    assert_eq!(lines[1], "torch        –                                                   2 of 2, 20 cases");
    assert_eq!(lines[2], "cupy         ✗ 0 + 1 expected of 3 (1 not applicable), 40 cases  –");
    assert!(text.contains("left out: numpy: host memory only\n"), "{text}");
    assert!(text.contains("does not apply: order: no streams (1 of 2 pairs)\n"), "{text}");
    assert!(text.contains("survived: double_release, not caught by life\n"), "{text}");
}

#[test]
fn junit_counts_failures_errors_and_what_was_skipped() {
    let junit = report().junit();
    let count = |suite: &TestSuite| (suite.tests, suite.failures, suite.errors, suite.skipped);
    let counts: Vec<_> = junit.test_suites.iter().map(count).collect();
    assert_eq!(counts, [(2, 0, 0, 0), (4, 1, 1, 2), (2, 1, 0, 0), (1, 0, 0, 1), (1, 1, 0, 0)]);
    let text = junit.to_string().unwrap();
    assert!(text.contains(r#"<testcase name="shape" classname="cupy → torch" time="1.500">"#), "{text}");
    assert!(text.contains(r#"<property name="seed" value="5"/>"#), "{text}");
    let body = format!("&lt;wrong&gt;\nreplay: {}\ncase: out dir/", REPLAY.replace('\'', "&apos;"));
    assert!(text.contains(&body), "{text}");
    assert!(text.contains("life must find it, and does not; found by values"), "{text}");
}

/// Returns the tags of a page that are not closed in order, of which a sound page has none.
fn unclosed(page: &str) -> Vec<String> {
    let mut open = Vec::new();
    let text = page.split_once("</style>").map_or(page, |(_, text)| text);
    for tag in text.split('<').skip(1).filter_map(|rest| rest.split_once('>')).map(|(tag, _)| tag) {
        let name: String = tag.trim_start_matches('/').chars().take_while(|letter| letter.is_alphanumeric()).collect();
        match (tag.starts_with('/'), tag.ends_with('/')) {
            (true, _) if open.last() == Some(&name) => drop(open.pop()),
            (true, _) => return vec![format!("{open:?} before </{name}>")],
            (false, true) => (),
            (false, false) => open.push(name),
        }
    }
    // What the part before the style opened.
    open
}

#[test]
fn the_page_needs_nothing_else_and_is_well_formed() {
    let report = report();
    let page = html::page(&report, &History::default().with(&report));
    let body = &page[page.find("<body>").unwrap()..page.find("</html>").unwrap()];
    assert_eq!(unclosed(body), Vec::<String>::new());
    assert!(!unclosed(&body.replace("</details>", "")).is_empty(), "the check itself sees mistakes");
    for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn the_page_shows_failures_first_with_their_case_and_command() {
    let report = report();
    let page = html::page(&report, &History::default().with(&report));
    let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text} is not in {page}"));
    assert!(at("id=\"failures\"") < at("id=\"pairs\"") && at("id=\"pairs\"") < at("id=\"coverage\""));
    assert!(page.contains(&escaped(REPLAY)) && page.contains("&lt;wrong&gt;") && !page.contains("<wrong>"));
    assert!(at("class=\"layout\"") < at("id=\"pairs\""));
    // A process that dies outside any case has called nothing.
    let told = &page[at("What was called")..];
    let within = |text: &str| told.find(text).unwrap_or_else(|| panic!("{text} is not in {told}"));
    assert!(within("What came out") < within("What should have"));
    assert!(within("What should have") < within("x = cupy.lib.stride_tricks.as_strided(base[5:], (2, 3), (-20, 4))"));
    assert!(within("y = torch.from_dlpack(x)") < within(&escaped(REPLAY)));
    let title = format!("<title>truebridge {}, commit 0123abcd: conformance on ", env!("CARGO_PKG_VERSION"));
    assert!(page.contains(&title), "{page}");
    assert!(page.contains("<small class=\"bad\">wrong 7, refused 1 of 10</small>"));
    assert!(page.contains("†") && page.contains("class=\"runs\""));
    let passed = Report { pairs: report.pairs[..1].to_vec(), ..Report::default() };
    assert!(html::page(&passed, &History::default()).contains("<p class=\"good\">None.</p>"));
}

#[test]
fn the_page_says_what_properties_state_and_leaves_out_columns_that_apply_to_no_pair() {
    let mut report = report();
    let page = |report: &Report| html::page(report, &History::default());
    let text = page(&report);
    let column = "what the owner's stream had still to write</small></div></th>";
    assert!(
        text.contains("<th scope=\"col\"><div>values<small>the elements arrive bit for bit</small></div></th>"),
        "{text}"
    );
    assert!(
        text.contains("own method in the same cases") && text.contains(column) && !text.contains("Without a column")
    );

    let none = property("order", Verdict::NotApplicable, Some("the device has no <streams>"));
    report.pairs[0].properties[1] = none.clone();
    report.pairs[1].properties[3] = none;
    let text = page(&report);
    assert!(!text.contains("own method in the same cases") && !text.contains(column), "{text}");
    assert!(
        text.contains("because they were judged for no pair: order (the device has no &lt;streams&gt;).</p>"),
        "{text}"
    );
    assert!(text.contains(">shape</th>"), "a property that one pair lacks has its column");
}

#[test]
fn the_page_explains_its_picture_and_its_counts() {
    let mut report = report();
    let page = |report: &Report| html::page(report, &History::default());
    assert!(page(&report).contains("A thick border marks the first") && page(&report).contains(COUNTS));
    let spec = &mut report.pairs[1].properties[1].counterexample.as_mut().unwrap().spec;
    (spec.align, spec.base) = (1, 4096);
    assert!(page(&report).contains("4096 elements in the base buffer; which begins 1 byte after a multiple of 128"));
    assert!(page(&report).contains("in parts of equal length"));
}

#[test]
fn a_history_grows_and_forgets_its_oldest_runs() {
    let report = report();
    let mut history = History::default();
    for seed in 0..60 {
        history = history.with(&Report { seed, ..report.clone() });
    }
    assert_eq!((history.runs.len(), history.runs[0].seed, history.runs[49].seed), (50, 10, 59));
    assert_eq!(history.runs[0].failures[1], "cupy → torch: shape");
}

#[test]
fn github_shows_each_failure_and_the_summary() {
    let mut report = report();
    let lines = report.annotations();
    let shape = format!("::error title=cupy → torch%3A shape::<wrong>%0Areplay: {REPLAY}");
    assert_eq!((lines.len(), lines[1].as_str()), (4, shape.as_str()));
    report.stale = (0..20).map(|number| number.to_string()).collect();
    assert_eq!(report.annotations().len(), 10);
    assert!(report.annotations()[9].ends_with("14 more failures are in the reports"));

    let set = |names: &'static [&str]| move |name: &str| names.contains(&name).then(|| "x".into());
    assert_eq!(GitHub::from_environment(set(&["GITHUB_STEP_SUMMARY"])), None);
    assert_eq!(GitHub::from_environment(set(&["GITHUB_ACTIONS"])), Some(GitHub { summary: None }));
    let file = std::env::temp_dir().join(format!("bridge-conformance-summary-{}", std::process::id()));
    let github = GitHub { summary: Some(file.clone()) };
    fs::write(&file, "before\n").unwrap();
    github.summarise(&report).unwrap();
    let text = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    assert!(text.starts_with("before\n# Conformance on cuda:0\n") && text.contains("\n## Failures\n"), "{text}");
}

/// Returns what got worse and better, and the exit code, of a run after another.
fn compared(before: &Report, after: &Report) -> (Vec<String>, Vec<String>, i32) {
    let mut after = after.clone();
    after.compare(before, Path::new("old.json"));
    let code = after.exit_code();
    let Comparison { worse, better, .. } = after.comparison.unwrap();
    (worse, better, code)
}

#[test]
fn only_what_got_worse_fails_a_run_with_a_baseline() {
    let before = report();
    assert_eq!((before.exit_code(), compared(&before, &before)), (1, (vec![], vec![], 0)));

    let mut after = before.clone();
    after.pairs[0].properties[0] = property("values", Verdict::Failed, Some("wrong"));
    after.pairs[1].properties[0] = property("values", Verdict::Passed, None);
    let worse = "torch → cupy: values: passed in the baseline, failed now (wrong)".to_owned();
    let better = "cupy → torch: values: crashed in the baseline, passed now".to_owned();
    assert_eq!(compared(&before, &after), (vec![worse.clone()], vec![better], 1));
    after.compare(&before, Path::new("old.json"));
    let levels: Vec<_> = after.annotations().iter().map(|line| line.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(levels, ["::error", "::warning", "::warning", "::warning"]);
    assert!(after.markdown().contains(&format!("- **worse**: {worse}\n")));
    assert!(html::page(&after, &History::default()).contains(&worse));
    assert!(after.junit().to_string().unwrap().contains("worse than the baseline"));
}

#[test]
fn new_failures_come_first_and_known_ones_are_marked_everywhere() {
    let before = report();
    let mut after = before.clone();
    // Twelve known failures before the one that is new.
    let many = |pair: &mut PairReport| {
        pair.properties = (0..12).map(|i| property(&format!("old{i}"), Verdict::Failed, Some("as ever"))).collect();
    };
    let mut with_many = before.clone();
    many(&mut with_many.pairs[0]);
    many(&mut after.pairs[0]);
    after.pairs[1].properties.push(property("life", Verdict::Failed, Some("leaked")));
    after.compare(&with_many, Path::new("old.json"));
    let comparison = after.comparison.as_ref().unwrap();
    assert_eq!((comparison.worse.len(), comparison.known), (1, 16));
    assert_eq!(comparison.as_before[0], "torch → cupy: old0");

    let lines = after.annotations();
    assert!(lines[0].starts_with("::error title=cupy → torch%3A life::leaked"), "{lines:?}");
    let shown = "::warning title=torch → cupy%3A old0::as in the baseline: as ever";
    assert!(lines[1].starts_with(shown), "{lines:?}");
    assert_eq!(lines[9], "::warning title=conformance::8 more failures are in the reports");

    for text in [after.markdown(), html::page(&after, &History::default())] {
        let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("{words} is not in {text}"));
        assert!(at("cupy → torch: life") < at("torch → cupy: old0"), "{text}");
    }
    assert!(after.markdown().contains("### torch → cupy: old0 (as in the baseline)\n"));
    assert!(after.markdown().contains("- as before: torch → cupy: old11\n"));
    let page = html::page(&after, &History::default());
    assert!(page.contains("<h3>torch → cupy: old0 <span class=\"soft\">as in the baseline</span></h3>"), "{page}");
    assert!(page.contains("<li class=\"soft\">torch → cupy: old11: as in the baseline</li>"), "{page}");

    let junit = after.junit();
    let failed: Vec<_> = junit.test_suites.iter().map(|suite| (suite.failures + suite.errors, suite.skipped)).collect();
    // The suites of the pairs, of faults, of what was left out, of stale expectations, and of what is worse.
    assert_eq!(failed, [(0, 12), (1, 4), (0, 1), (0, 1), (0, 1), (1, 0)]);
    assert!(junit.to_string().unwrap().contains(r#"<skipped message="as in the baseline: as ever">"#));
}

#[test]
fn errors_have_all_ten_annotations_before_warnings_have_any() {
    let before = report();
    let mut after = before.clone();
    after.stale.extend((0..20).map(|number| number.to_string()));
    after.compare(&before, Path::new("old.json"));
    let lines = after.annotations();
    assert!(lines.len() == 10 && lines.iter().all(|line| line.starts_with("::error ")), "{lines:?}");
    after.stale.truncate(7);
    after.compare(&before, Path::new("old.json"));
    assert_eq!(after.annotations().iter().filter(|line| line.starts_with("::warning ")).count(), 4, "ten fit");
}

#[test]
fn a_pair_that_is_lost_is_one_line() {
    let mut before = report();
    before.pairs[0].properties.push(property("life", Verdict::Passed, None));
    let with = |properties: Vec<PropertyReport>| {
        let mut after = before.clone();
        after.pairs[0].properties = properties;
        compared(&before, &after).0
    };
    let dead = "torch → cupy: worker: is not in the baseline, crashed now (died); not judged any more: 3 properties that \
                passed in the baseline";
    assert_eq!(with(vec![property("worker", Verdict::Crashed, Some("died"))]), [dead]);
    let stopped = |name| property(name, Verdict::NotApplicable, Some("not judged, because `subject` failed"));
    let one = "torch → cupy: 2 properties that passed in the baseline are not judged now (not judged, because `subject` \
               failed): values, life";
    let passes = property("order", Verdict::Passed, None);
    assert_eq!(with(vec![stopped("values"), passes, stopped("life")]), [one]);
}

#[test]
fn what_does_not_run_any_more_is_worse_and_what_was_not_chosen_is_not() {
    let before = report();
    let fewer = Report { pairs: before.pairs[..1].to_vec(), ..before.clone() };
    assert_eq!(compared(&before, &fewer), (vec![], vec![], 0));
    let left_out = vec![LeftOut { adapter: "cupy".into(), reason: "not installed".into() }];
    let lost = Report { pairs: Vec::new(), left_out, ..before.clone() };
    let (worse, _, code) = compared(&before, &lost);
    assert_eq!((worse[0].as_str(), worse.len(), code), ("torch → cupy: it does not run: not installed", 2, 1));
    let mut silent = before.clone();
    silent.pairs[0].properties[1] = property("order", Verdict::NotApplicable, Some("no streams"));
    silent.faults[0].caught_by.clear();
    silent.stale.push("another".into());
    assert_eq!(compared(&before, &silent).0.len(), 3, "a property that is not judged, a fault, an expectation");
    let mut more = before.clone();
    more.pairs[0].properties.push(property("life", Verdict::Failed, Some("leaked")));
    assert_eq!(compared(&before, &more).0, ["torch → cupy: life: is not in the baseline, failed now (leaked)"]);
}

#[test]
fn words_of_a_command_are_quoted_where_a_shell_needs_it() {
    assert_eq!(quoted("target/a-b_1.json"), "target/a-b_1.json");
    assert_eq!(quoted("it's"), r"'it'\''s'");
}

#[test]
fn a_report_of_an_earlier_version_is_read() {
    let old = r#"{"schema": 1, "host": {"date": "", "os": "", "cpu": "", "cores": 1, "python": "", "versions": {},
        "driver": null, "gpus": []}, "device": "cpu", "seed": 1, "pairs": [{"from": "a", "to": "b", "device": "cpu",
        "properties": [{"name": "values", "cases": 3, "verdict": "passed"}]}], "faults": [], "left_out": [], "stale": [],
        "summary": {"passed": 1, "failed": 0, "expected": 0, "cases": 3}}"#;
    assert_eq!(serde_json::from_str::<Report>(old).unwrap().pairs[0].properties[0].coverage, Coverage::default());
}
