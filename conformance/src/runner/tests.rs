//! The runner over workers that are shell scripts, and a worker over the simulated device.

use super::*;
use crate::sim::{Habits, SimDevice, SimFramework};
use crate::{PROPERTIES, Pair, PropertyReport, Sides, Verdict, property, tree};
use std::fs;

const SEED: u64 = 7;
const DYING: &str = "shape";
const INDEX: u32 = 3;

fn known_sides() -> Sides {
    let device = SimDevice::new(1);
    Sides::of(&SimFramework::new(&device, Habits::Generous), &SimFramework::new(&device, Habits::Generous))
}

fn dying_case() -> crate::Case {
    tree(property(DYING).unwrap(), &known_sides(), SEED, INDEX).current()
}

/// A new folder for a test, deleted when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("bridge-conformance-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// A worker that runs this script.
    fn launch(&self, script: &str) -> Vec<OsString> {
        let path = self.0.join("worker.sh");
        fs::write(&path, script).unwrap();
        vec!["/bin/sh".into(), path.into()]
    }

    fn options(&self, line: &str) -> Options {
        let mut argv: Vec<String> = line.split_whitespace().map(String::from).collect();
        let report = self.0.join("report").to_string_lossy().into_owned();
        argv.extend([format!("--report={report}"), format!("--seed={SEED}")]);
        Options::read(&argv).unwrap()
    }

    /// What the runner makes of a script, for one pair.
    fn judge(&self, script: &str) -> PairReport {
        self.judge_pair("torch:numpy", script)
    }

    fn judge_pair(&self, pair: &str, script: &str) -> PairReport {
        self.judge_for(pair, script, Duration::from_secs(60))
    }

    fn judge_for(&self, pair: &str, script: &str, shrinking: Duration) -> PairReport {
        let (launch, options) = (self.launch(script), self.options(""));
        let job = Job {
            launch: &launch,
            pair: &pair.parse().unwrap(),
            device: Device::CPU,
            cases: 100,
            seed: SEED,
            budget: None,
            patience: Patience { silence: Duration::from_millis(1500), whole: Duration::from_secs(60), shrinking },
            options: &options,
        };
        job.judge(&Progress::new(job.pair, Display::default()))
    }

    /// The exit code and the report of a whole run whose workers run this script.
    fn run(&self, line: &str, script: &str) -> (i32, Option<Report>) {
        let versions = ["torch", "numpy"].map(|name| (name.to_owned(), "1.0".to_owned())).into();
        let host = Host { versions, ..Host::default() };
        let around =
            Surroundings { launch: self.launch(script), fixtures: self.0.join("fixtures"), host, github: None };
        let code = run(self.options(line), &around);
        let text = fs::read_to_string(self.0.join("report/report.json")).ok();
        (code, text.map(|text| serde_json::from_str(&text).unwrap()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn say(message: &Message) -> String {
    format!("printf '%s\\n' '{}'\n", serde_json::to_string(message).unwrap())
}

fn finished(name: &str, verdict: Verdict, counterexample: Option<crate::Case>) -> String {
    let reason = (verdict != Verdict::Passed).then(|| "seen to be wrong".into());
    say(&Message::Finished(PropertyReport { counterexample, ..PropertyReport::new(name, 5, verdict, reason) }))
}

/// A worker in which every requested property passes.
fn passing() -> String {
    let each = PROPERTIES.iter().map(|property| {
        format!("case ,$chosen, in *,{},*) {} ;; esac\n", property.name, finished(property.name, Verdict::Passed, None))
    });
    let chosen = "for word in \"$@\"; do case $word in --properties=*) chosen=${word#--properties=} ;; esac; done\n";
    format!("{chosen}{}{}", each.collect::<String>(), say(&Message::Done))
}

/// A worker that does `deed` in the first case of `DYING`, whenever it gets there.
fn dying(deed: &str) -> String {
    let started = say(&Message::Started { property: DYING.into(), index: INDEX, case: dying_case() });
    format!(
        "case \"$*\" in *--replay*|*{DYING}*) {}{started}{deed}\n;; esac\n{}",
        say(&Message::Hello(Box::new(known_sides()))),
        passing()
    )
}

fn verdict(report: &PairReport, name: &str) -> PropertyReport {
    report.properties.iter().find(|property| property.name == name).unwrap().clone()
}

#[test]
fn a_worker_in_which_all_is_well() {
    let report = Folder::new("well").judge(&passing());
    assert!(report.passed());
    assert_eq!(report.properties.len(), PROPERTIES.len());
}

#[test]
fn only_the_properties_that_are_named_are_judged() {
    let line = "--device cpu --pairs torch:numpy --properties torn,copy";
    let (_, report) = Folder::new("named").run(line, &passing());
    let judged = &report.unwrap().pairs[0].properties;
    assert_eq!(judged.iter().map(|judged| &*judged.name).collect::<Vec<_>>(), ["copy", "torn"]);
    let refused = Options::read(&["--properties".into(), "tron".into()]).unwrap_err().to_string();
    assert!(refused.contains("there is no such property"), "{refused}");
}

#[test]
fn a_flaw_is_found_where_the_property_fails_or_the_process_dies_in_it() {
    let started = say(&Message::Started { property: DYING.into(), index: INDEX, case: dying_case() });
    let script = format!(
        "case \"$*\" in\n*offset_dropped*) {}{} ;;\n*lease_lost*) {started}kill -SEGV $$ ;;\n*) {} ;;\nesac\n",
        finished("values", Verdict::Failed, None),
        say(&Message::Done),
        passing(),
    );
    let folder = Folder::new("flaws");
    let (options, versions) = (folder.options("--across-processes --faults"), [("numpy".to_owned(), "1.0".to_owned())]);
    let launch = folder.launch(&script);
    let on = |versions| planted::run(&launch, &Host { versions, ..Host::default() }, Device::CPU, SEED, &options);
    let found: Vec<_> = on(versions.into()).into_iter().map(|report| (report.fault, report.caught_by)).collect();
    let found_by = |name: &str| found.iter().find(|(fault, _)| fault == name).unwrap().1.clone();
    assert_eq!(
        (found_by("offset_dropped_in_ticket"), found_by("lease_lost")),
        (vec!["values".into()], vec![DYING.into()])
    );
    assert!(found_by("segment_closed").is_empty() && found.iter().all(|(fault, _)| !fault.starts_with("event")));
    assert!(on([].into()).is_empty());
}

#[test]
fn a_variant_is_set_in_the_environment_of_its_worker() {
    let script = format!("test \"$PYTORCH_NO_CUDA_MEMORY_CACHING\" = 1 || exit 3\n{}", passing());
    let folder = Folder::new("variant");
    let report = folder.judge_pair("torch+uncached:cupy", &script);
    assert!(report.passed(), "{report:?}");
    assert_eq!(report.from, "torch+uncached");
    assert!(!folder.judge_pair("torch:cupy", &script).passed());
}

#[test]
fn death_is_a_verdict_with_the_shrunk_case_and_the_others_go_on() {
    let folder = Folder::new("death");
    let report = folder.judge(&dying("echo some framework said so >&2; echo Current thread 0x7 >&2; kill -SEGV $$"));
    let crashed = verdict(&report, DYING);
    assert_eq!((crashed.verdict, crashed.cases), (Verdict::Crashed, INDEX + 1));
    let reason = crashed.reason.unwrap();
    assert!(reason.contains("SIGSEGV") && reason.ends_with("some framework said so"), "{reason}");
    let smallest = crate::shrink(tree(property(DYING).unwrap(), &known_sides(), SEED, INDEX), &mut |_| true);
    assert_ne!(smallest.spec, dying_case().spec);
    assert_eq!(crashed.counterexample.unwrap().spec, smallest.spec);
    let others = report.properties.iter().filter(|property| property.verdict == Verdict::Passed);
    assert_eq!(others.count(), PROPERTIES.len() - 1);
}

#[test]
fn a_case_that_is_harmless_alone_is_kept_as_it_was() {
    let replayed = say(&Message::Replayed(None));
    let harmless = format!("case \"$*\" in *--replay*) {replayed} exit 0 ;; esac\n{}", dying("kill -ABRT $$"));
    let crashed = verdict(&Folder::new("harmless").judge(&harmless), DYING);
    assert_eq!(crashed.counterexample, Some(dying_case()));
    let reason = crashed.reason.unwrap();
    assert!(reason.contains("SIGABRT") && reason.contains("alone"), "{reason}");
}

#[test]
fn shrinking_after_a_death_ends_in_time() {
    let folder = Folder::new("in-time");
    // Each smaller case dies, too, and takes its time.
    let slow = |deed: &str| folder.judge_for("torch:numpy", &dying(deed), Duration::from_secs(3));
    let started = Instant::now();
    let crashed = verdict(&slow("case \"$*\" in *--replay*) sleep 0.4 ;; esac; kill -ABRT $$"), DYING);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert!(crashed.reason.unwrap().contains(" time "));
    let slower = verdict(&slow("case \"$*\" in *--replay*) exec sleep 60 ;; esac; kill -ABRT $$"), DYING);
    assert_eq!(slower.counterexample, Some(dying_case()));
}

#[test]
fn a_worker_that_hangs_is_killed() {
    let report = Folder::new("hang").judge(&dying("exec sleep 600"));
    let crashed = verdict(&report, DYING);
    assert_eq!((crashed.verdict, crashed.counterexample), (Verdict::Crashed, Some(dying_case())));
    assert!(crashed.reason.unwrap().contains("hung"));
    assert_eq!(report.properties.len(), PROPERTIES.len());
}

#[test]
fn a_worker_that_never_begins_fails_the_pair() {
    let refused = Folder::new("refused").judge(&say(&Message::Refused("no such framework".into())));
    assert_eq!(refused.properties[0].reason.as_deref(), Some("no such framework"));
    let gone = Folder::new("gone").judge("echo this is not a message; exit 3");
    assert_eq!(gone.properties[0].verdict, Verdict::Crashed);
    assert!(gone.properties[0].reason.as_ref().unwrap().contains("exit code 3"));
    assert!(!refused.passed() && !gone.passed());
}

#[test]
fn a_run_that_passes_writes_its_report() {
    let (code, report) = Folder::new("pass").run("--device cpu", &passing());
    let report = report.unwrap();
    assert_eq!(code, 0);
    assert_eq!((report.schema, report.seed, report.device.as_str()), (SCHEMA, SEED, "cpu"));
    assert_eq!((report.pairs.len(), report.summary.failed), (6, 0));
    assert_eq!(report.left_out[0].reason, "no CUDA device");
}

#[test]
fn what_is_named_must_run() {
    let folder = Folder::new("named");
    for line in ["--device cpu --adapters torch,cupy", "--device cpu --pairs torch:torch,cupy+remote:torch"] {
        let (code, report) = folder.run(line, &passing());
        assert_eq!((code, report.is_some()), (USAGE, false), "{line}");
    }
}

#[test]
fn a_failure_is_kept_for_the_next_run() {
    let folder = Folder::new("failure");
    let script = finished("values", Verdict::Failed, Some(dying_case())) + &say(&Message::Done);
    let (code, report) = folder.run("--pairs torch:numpy --command suite", &script);
    let report = report.unwrap();
    assert_eq!((code, report.summary.failed), (1, 1));
    let kept = Regression::read_all(&folder.0.join("report/regressions")).unwrap();
    assert_eq!(kept.len(), 1);
    let file = report.pairs[0].properties[0].kept.clone().unwrap();
    assert!(file.is_file());
    let replay = format!("suite --device cpu --replay {}", file.display());
    for name in ["report.md", "report.html", "junit.xml"] {
        let text = fs::read_to_string(folder.0.join("report").join(name)).unwrap();
        assert!(text.contains(&replay), "{name}: {text}");
    }
    assert_eq!((kept[0].property.as_str(), &kept[0].case), ("values", &dying_case()));
}

#[test]
fn commands_in_reports_work_as_they_are_printed() {
    let script = std::env::current_dir().unwrap().join("my bundle/conformance.py");
    let launch = ["/venv/bin/python3".into(), script.clone().into_os_string()];
    assert_eq!(super::command(&launch), format!("/venv/bin/python3 '{}'", script.display()));
    let read = |line: &str| Options::read(&line.split(' ').map(String::from).collect::<Vec<_>>()).unwrap();
    let folder = format!("target/reports-of-a-test-{}", std::process::id());
    let kept = std::env::current_dir().unwrap().join(&folder).join("regressions");
    assert_eq!(prepare(&read(&format!("--report {folder}"))), Ok(kept));
    let as_typed = prepare(&read(&format!("--report {folder} --command suite")));
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(as_typed, Ok(Path::new(&folder).join("regressions")));
}

#[test]
fn what_would_lose_the_results_is_found_before_anything_runs() {
    let folder = Folder::new("unwritable");
    let ran = folder.0.join("ran");
    let script = format!("touch '{}'\n{}", ran.display(), passing());
    fs::write(folder.0.join("report"), "a file").unwrap();
    assert_eq!(folder.run("--pairs torch:numpy", &script).0, USAGE);
    let error = prepare(&folder.options("")).unwrap_err();
    assert!(error.contains("/report (") && error.ends_with("name another folder with --report"), "{error}");

    fs::remove_file(folder.0.join("report")).unwrap();
    fs::create_dir_all(folder.0.join("report/regressions")).unwrap();
    fs::write(folder.0.join("report/regressions/old.json"), "{").unwrap();
    assert_eq!(folder.run("--pairs torch:numpy", &script).0, USAGE);
    assert!(prepare(&folder.options("")).unwrap_err().contains("regressions/old.json: "));
    assert!(!ran.exists());
}

#[test]
fn a_pair_that_is_named_and_cannot_run_says_why() {
    let why = |line: &str| {
        let folder = Folder::new("obstacle");
        let versions = ["torch", "numpy", "pyarrow"].map(|name| (name.to_owned(), "1.0".to_owned())).into();
        let host = Host { versions, ..Host::default() };
        let around = Surroundings { launch: vec!["false".into()], fixtures: folder.0.clone(), host, github: None };
        Suite::new(&folder.options(line), &around).map(|suite| suite.pairs.len())
    };
    assert_eq!(why("--across-processes --pairs torch:numpy"), Ok(2));
    let of = |line: &str| why(line).unwrap_err();
    assert!(of("--across-processes --pairs pyarrow:torch").starts_with("pyarrow:torch cannot run: a library that"));
    assert!(of("--pairs numpy:torch,numpy+remote:torch+remote").contains("not both"));
    assert!(of("--adapters torch --pairs numpy:torch").contains("leave one of them out"));
}

#[test]
fn a_run_with_a_baseline_fails_on_what_got_worse() {
    let folder = Folder::new("baseline");
    let failing = |name| finished(name, Verdict::Failed, None) + &say(&Message::Done);
    let line = "--pairs torch:numpy";
    folder.run(line, &failing("values"));
    let baseline = folder.0.join("baseline.json");
    fs::rename(folder.0.join("report/report.json"), &baseline).unwrap();
    let line = format!("{line} --baseline {}", baseline.display());
    assert_eq!(folder.run(&line, &failing("values")).0, 0);
    let (code, report) = folder.run(&line, &failing("shape"));
    assert_eq!((code, report.unwrap().comparison.unwrap().worse.len()), (1, 1));
    assert_eq!(folder.run(&line, &passing()).0, 0);
    let other = fs::read_to_string(&baseline).unwrap().replacen(r#""device": "cpu""#, r#""device": "cuda:0""#, 1);
    fs::write(&baseline, other).unwrap();
    assert_eq!(folder.run(&line, &passing()).0, USAGE);
    let history = fs::read_to_string(folder.0.join("report/history.json")).unwrap();
    assert_eq!(history.matches("\"seed\"").count(), 4);
}

#[test]
fn a_kept_case_is_removed_when_it_passes_and_nothing_is_written_into_a_checkout() {
    let folder = Folder::new("removed");
    let kept = || Regression::read_all(&folder.0.join("report/regressions")).unwrap().len();
    let checkout = folder.0.join("checkout");
    fs::create_dir_all(&checkout).unwrap();
    let line = format!("--pairs torch:numpy --fixtures {}", checkout.display());
    let failing = finished("values", Verdict::Failed, Some(dying_case())) + &say(&Message::Done);
    folder.run(&line, &failing);
    assert_eq!((kept(), fs::read_dir(&checkout).unwrap().count()), (1, 0));
    let other = finished("values", Verdict::NotApplicable, None) + &say(&Message::Done);
    folder.run(&line, &other);
    assert_eq!(kept(), 1, "what was not judged may still fail");
    folder.run(&line, &passing());
    assert_eq!(kept(), 0);
}

#[test]
fn a_case_of_a_wrong_subject_is_not_kept() {
    let folder = Folder::new("subject");
    let script = finished("subject", Verdict::Failed, Some(dying_case())) + &say(&Message::Done);
    let (code, report) = folder.run("--pairs torch:numpy", &script);
    assert_eq!((code, report.unwrap().summary.failed), (1, 1));
    assert!(!folder.0.join("report/regressions").exists());
}

#[test]
fn an_expected_failure_passes_and_a_stale_expectation_does_not() {
    let folder = Folder::new("expected");
    let expectation = |property: &str, from: &str| {
        format!(r#"{{"from": "{from}", "to": "numpy", "property": "{property}", "reason": "it cannot"}}"#)
    };
    let script = finished("values", Verdict::Failed, Some(dying_case())) + &say(&Message::Done);
    fs::create_dir_all(folder.0.join("fixtures")).unwrap();
    let with = |list: &[String]| {
        fs::write(folder.0.join("fixtures/expectations.json"), format!("[{}]", list.join(","))).unwrap();
        let (code, report) = folder.run("--pairs torch:numpy", &script);
        (code, report.unwrap().summary)
    };
    let (code, summary) = with(&[expectation("values", "torch")]);
    assert_eq!((code, summary.expected, summary.failed), (0, 1, 0));
    let (code, summary) = with(&[expectation("values", "torch"), expectation("colour", "torch")]);
    assert_eq!((code, summary.failed), (1, 1));
    let (code, summary) = with(&[expectation("values", "torch"), expectation("values", "mxnet")]);
    assert_eq!((code, summary.failed), (1, 1));
}

#[test]
fn a_run_that_cannot_begin_is_bad_usage() {
    let folder = Folder::new("usage");
    let mut lines = vec!["--device cuda", "--device cpu --adapters cupy", "--adapters mxnet", "--replay /nowhere.json"];
    lines.push("--adapters torch,numpy --pairs torch:numpy");
    for line in lines {
        assert_eq!(folder.run(line, &passing()), (USAGE, None), "{line}");
    }
}

#[test]
fn the_fixtures_are_in_order() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
    let expectations = read_expectations(&fixtures.join("expectations.json")).unwrap();
    assert_eq!(expect::stale(&expectations, &adapters::names(), &[]), Vec::<String>::new());
    for regression in Regression::read_all(&fixtures.join("regressions")).unwrap() {
        assert!(property(&regression.property).is_some(), "{regression:?}");
    }
}

#[test]
fn a_file_that_is_no_case_is_named() {
    let folder = Folder::new("no-case");
    let binary = folder.0.join("binary.json");
    fs::write(&binary, [0xff, 0xfe, 0]).unwrap();
    for file in [folder.0.join("nofile.json"), folder.0.clone(), binary] {
        let error = Regression::read(&file).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: ", file.display())), "{error}");
    }
}

#[test]
fn one_case_is_replayed() {
    let folder = Folder::new("replay");
    let case = Regression { from: "torch".into(), to: "numpy".into(), property: "values".into(), case: dying_case() };
    let file = case.write(&folder.0).unwrap();
    let line = format!("--device cpu --replay {}", file.display());
    let answers = [
        (say(&Message::Replayed(None)), 0),
        (say(&Message::Replayed(Some("wrong".into()))), 1),
        ("kill -ABRT $$".into(), 1),
        (say(&Message::Refused("no such framework".into())), USAGE),
    ];
    for (script, code) in answers {
        assert_eq!(folder.run(&line, &script).0, code, "{script}");
    }
}

#[test]
fn a_worker_tells_all_it_does() {
    let folder = Folder::new("worker");
    let device = SimDevice::new(3);
    let (from, to) = (SimFramework::new(&device, Habits::Generous), SimFramework::new(&device, Habits::Common));
    let pair = Pair::new(&from, &to).with_native_method();
    let mut messages = Vec::new();
    work(&pair, &folder.options("--cases 40"), &mut |message| messages.push(message));
    assert_eq!(messages.first(), Some(&Message::Hello(Box::new(pair.sides()))));
    assert_eq!(messages.pop(), Some(Message::Done));
    let judged = messages.iter().filter(|message| matches!(message, Message::Finished(_))).count();
    assert_eq!(judged, PROPERTIES.len());
    for message in &messages {
        let line = serde_json::to_string(message).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(&serde_json::from_str::<Message>(&line).unwrap(), message);
    }
    let Some(Message::Started { property, case, .. }) = messages.into_iter().nth(1) else { panic!("no case began") };
    let one = Regression { from: "sim".into(), to: "sim".into(), property, case };
    let line = format!("--replay {}", one.write(&folder.0).unwrap().display());
    let mut messages = Vec::new();
    work(&pair, &folder.options(&line), &mut |message| messages.push(message));
    assert_eq!(messages, [Message::Replayed(None), Message::Done]);
}
