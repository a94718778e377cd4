//! JUnit XML, which CI systems show.

use super::{FaultReport, KNOWN, LeftOut, Report};
use crate::{PropertyReport, Verdict};
use quick_junit::{NonSuccessKind, Report as JUnit, TestCase, TestCaseStatus, TestSuite};
use std::time::Duration;

impl Report {
    /// Converts the report to JUnit XML: a suite for each pair, one for the faults, one for what was left out. Failures
    /// that the baseline has as well are skipped.
    pub(super) fn junit(&self) -> JUnit {
        let mut report = JUnit::new("truebridge conformance");
        for pair in &self.pairs {
            let mut suite = TestSuite::new(format!("{} → {} on {}", pair.from, pair.to, pair.device));
            suite.add_property(("seed", self.seed.to_string().as_str()));
            for property in &pair.properties {
                let title = format!("{} → {}: {}", pair.from, pair.to, property.name);
                let mut status = self.unless_known(&title, status(property));
                if property.verdict.is_failure() {
                    status.set_description(body(property, &self.replay(pair, property)));
                }
                let mut case = TestCase::new(property.name.as_str(), status);
                case.set_classname(format!("{} → {}", pair.from, pair.to)).set_time(took(property));
                suite.add_test_case(case);
            }
            suite.set_time(pair.properties.iter().map(took).sum());
            report.add_test_suite(suite);
        }
        let caught = |fault: &FaultReport| {
            let missed = || self.unless_known(&format!("planted fault: {}", fault.fault), failure(&fault.missed()));
            let status = if fault.is_caught() { TestCaseStatus::success() } else { missed() };
            TestCase::new(fault.fault.as_str(), status)
        };
        let skipped = |left: &LeftOut| {
            let mut status = TestCaseStatus::skipped();
            status.set_message(left.reason.as_str());
            TestCase::new(left.adapter.as_str(), status)
        };
        let worst = |line: &String| TestCase::new(line.as_str(), failure(line));
        let stale = |line: &String| {
            TestCase::new(line.as_str(), self.unless_known(&format!("stale expectation: {line}"), failure(line)))
        };
        let worse = self.comparison.iter().flat_map(|comparison| &comparison.worse);
        let further = [
            ("planted faults", self.faults.iter().map(caught).collect::<Vec<_>>()),
            ("left out", self.left_out.iter().map(skipped).collect()),
            ("stale expectations", self.stale.iter().map(stale).collect()),
            ("worse than the baseline", worse.map(worst).collect()),
        ];
        for (name, mut cases) in further.into_iter().filter(|(_, cases)| !cases.is_empty()) {
            let mut suite = TestSuite::new(name);
            for case in &mut cases {
                case.set_classname(name);
            }
            suite.add_test_cases(cases);
            report.add_test_suite(suite);
        }
        report
    }

    /// Returns the status of what has this title. A failure that the baseline has as well is skipped, with its reason.
    fn unless_known(&self, title: &str, status: TestCaseStatus) -> TestCaseStatus {
        match &status {
            TestCaseStatus::NonSuccess { message, .. } if self.is_known(title) => {
                let mut known = TestCaseStatus::skipped();
                let reason = message.as_ref().map(|message| format!(": {}", message.as_str()));
                known.set_message(format!("{KNOWN}{}", reason.unwrap_or_default()));
                known
            }
            _ => status,
        }
    }
}

fn took(property: &PropertyReport) -> Duration {
    Duration::from_millis(property.millis)
}

/// Returns what a failure says: why, the command that runs it again, the file of its case and the case itself.
fn body(property: &PropertyReport, replay: &str) -> String {
    let mut lines = vec![property.reason.clone().unwrap_or_default(), format!("replay: {replay}")];
    lines.extend(property.kept.iter().map(|kept| format!("case: {}", kept.display())));
    lines.extend(property.counterexample.as_ref().and_then(|case| serde_json::to_string(case).ok()));
    lines.join("\n")
}

fn failure(message: &str) -> TestCaseStatus {
    let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
    status.set_message(message);
    status
}

fn status(property: &PropertyReport) -> TestCaseStatus {
    let reason = property.reason.as_deref().unwrap_or("without a reason");
    match property.verdict {
        Verdict::Passed => TestCaseStatus::success(),
        Verdict::Failed => failure(reason),
        Verdict::Crashed => {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
            status.set_message(reason);
            status
        }
        Verdict::Expected | Verdict::NotApplicable => {
            let mut status = TestCaseStatus::skipped();
            status.set_message(reason);
            status
        }
    }
}
