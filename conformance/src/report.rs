//! The reports of a run: JSON, JUnit XML and Markdown.

use crate::fault::FaultReport;
use crate::{Native, PairReport, PropertyReport, Verdict};
use quick_junit::{NonSuccessKind, Report as JUnit, TestCase, TestCaseStatus, TestSuite};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

/// The version of `report.json`: raised when a key changes its meaning.
pub const SCHEMA: u32 = 1;

/// The host of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// When, in UTC (RFC 3339).
    pub date: String,
    /// The operating system.
    pub os: String,
    /// The processor.
    pub cpu: String,
    /// Cores that the run can use.
    pub cores: u32,
    /// Python's version.
    pub python: String,
    /// The versions of the frameworks, by adapter.
    pub versions: BTreeMap<String, String>,
    /// Why installed frameworks cannot be used, by adapter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub refused: BTreeMap<String, String>,
    /// Why frameworks cannot use the CUDA devices, by adapter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub host_only: BTreeMap<String, String>,
    /// The version of the CUDA driver.
    pub driver: Option<String>,
    /// The CUDA devices.
    pub gpus: Vec<String>,
}

/// An adapter that did not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The adapter.
    pub adapter: String,
    /// Why.
    pub reason: String,
}

/// The counts of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Properties that passed, and faults that the named property caught.
    pub passed: u32,
    /// Properties that failed or crashed, faults that the named property missed, and stale expectations.
    pub failed: u32,
    /// Properties that failed as expected.
    pub expected: u32,
    /// Cases that were run.
    pub cases: u64,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The host.
    pub host: Host,
    /// The device.
    pub device: String,
    /// The seed of all cases.
    pub seed: u64,
    /// The pairs that ran.
    pub pairs: Vec<PairReport>,
    /// The planted faults.
    pub faults: Vec<FaultReport>,
    /// The adapters that did not run.
    pub left_out: Vec<LeftOut>,
    /// Expectations that match nothing, one line each.
    pub stale: Vec<String>,
    /// The counts.
    pub summary: Summary,
}

impl Report {
    /// Counts what is in the report.
    pub fn sum_up(&mut self) {
        let mut sum = Summary::default();
        for property in self.pairs.iter().flat_map(|pair| &pair.properties) {
            sum.cases += u64::from(property.cases);
            match property.verdict {
                Verdict::Passed => sum.passed += 1,
                Verdict::Failed | Verdict::Crashed => sum.failed += 1,
                Verdict::Expected => sum.expected += 1,
                Verdict::NotApplicable => (),
            }
        }
        let caught = self.faults.iter().filter(|fault| fault.is_caught()).count();
        sum.passed += caught as u32;
        sum.failed += (self.faults.len() - caught + self.stale.len()) as u32;
        self.summary = sum;
    }

    /// Writes `report.json`, `junit.xml` and `report.md` into `folder`.
    ///
    /// # Errors
    ///
    /// What the file system reports.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join("report.json"), serde_json::to_string_pretty(self)? + "\n")?;
        fs::write(folder.join("junit.xml"), self.junit().to_string().map_err(io::Error::other)?)?;
        fs::write(folder.join("report.md"), self.markdown())
    }

    /// Converts the report to JUnit XML: a suite for each pair, one for the faults, one for what was left out.
    fn junit(&self) -> JUnit {
        let mut report = JUnit::new("truebridge conformance");
        for pair in &self.pairs {
            let mut suite = TestSuite::new(format!("{} → {} on {}", pair.from, pair.to, pair.device));
            for property in &pair.properties {
                suite.add_test_case(TestCase::new(property.name.as_str(), status(property)));
            }
            report.add_test_suite(suite);
        }
        let caught = |fault: &FaultReport| {
            let missed = format!("to be caught by {}, caught by {:?}", fault.must_be_caught_by, fault.caught_by);
            let status = if fault.is_caught() { TestCaseStatus::success() } else { failure(&missed) };
            TestCase::new(fault.fault.as_str(), status)
        };
        let skipped = |left: &LeftOut| {
            let mut status = TestCaseStatus::skipped();
            status.set_message(left.reason.as_str());
            TestCase::new(left.adapter.as_str(), status)
        };
        let stale = |line: &String| TestCase::new(line.as_str(), failure(line));
        let further = [
            ("planted faults", self.faults.iter().map(caught).collect::<Vec<_>>()),
            ("left out", self.left_out.iter().map(skipped).collect()),
            ("stale expectations", self.stale.iter().map(stale).collect()),
        ];
        for (name, cases) in further.into_iter().filter(|(_, cases)| !cases.is_empty()) {
            let mut suite = TestSuite::new(name);
            suite.add_test_cases(cases);
            report.add_test_suite(suite);
        }
        report
    }

    /// Returns a matrix of the pairs, then every property, the faults, and what was left out.
    pub fn markdown(&self) -> String {
        let mut text = self.heading();
        if let Some((heading, rows)) = self.matrix().split_first() {
            let line = "|---".repeat(heading.len());
            let row = |row: &Vec<String>| format!("| **{}** | {} |", row[0], row[1..].join(" | "));
            table(&mut text, &format!("| {} |\n{line}|", heading.join(" | ")), rows.iter().map(row));
        }
        let each = |property: &PropertyReport, pair: &PairReport| {
            let native = property.native.map_or(String::new(), native);
            let reason = cell(property.reason.as_deref().unwrap_or_default());
            let (name, verdict) = (&property.name, verdict(property.verdict));
            format!("| {name} | {} → {} | {} | {verdict} | {native} | {reason} |", pair.from, pair.to, property.cases)
        };
        let rows = self.pairs.iter().flat_map(|pair| pair.properties.iter().map(move |property| each(property, pair)));
        table(
            &mut text,
            "| property | pair | cases | verdict | native way | reason |\n|---|---|--:|---|---|---|",
            rows,
        );
        let fault = |fault: &FaultReport| {
            let word = if fault.is_caught() { "caught" } else { "**survived**" };
            format!("| {} | {} | {} | {word} |", fault.fault, fault.must_be_caught_by, fault.caught_by.join(", "))
        };
        table(&mut text, "| fault | to be caught by | caught by | |\n|---|---|---|---|", self.faults.iter().map(fault));
        let left = |left: &LeftOut| format!("| {} | {} |", left.adapter, cell(&left.reason));
        table(&mut text, "| left out | reason |\n|---|---|", self.left_out.iter().map(left));
        let stale = |line: &String| format!("| {} |", cell(line));
        table(&mut text, "| stale expectations |\n|---|", self.stale.iter().map(stale));
        text
    }

    fn heading(&self) -> String {
        let Host { date, os, cpu, cores, python, versions, driver, gpus, .. } = &self.host;
        let versions: Vec<_> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        let driver = driver.iter().map(|driver| format!("driver {driver}"));
        let host: Vec<_> =
            gpus.iter().cloned().chain(driver).chain([format!("{cpu} ({cores} cores)"), os.clone()]).collect();
        let Summary { passed, failed, expected, cases } = self.summary;
        format!(
            "# Conformance on {}\n\n{}. Python {python}, {}. {date}, seed {}.\n\n\
             {passed} passed, {failed} failed, {expected} failed as expected; {cases} cases.\n",
            self.device,
            host.join(", "),
            versions.join(", "),
            self.seed,
        )
    }

    /// Returns what a terminal shows at the end: the matrix, and what was left out or needs a look. The properties are
    /// in the reports.
    pub fn text(&self) -> String {
        let rows = self.matrix();
        let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len))
            .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default())
            .collect();
        let mut text = String::new();
        for row in &rows {
            let fields = row.iter().zip(&widths).map(|(field, width)| format!("{field:<width$}"));
            text.extend([fields.collect::<Vec<_>>().join("  ").trim_end(), "\n"]);
        }
        let faults = self.faults.iter().filter(|fault| !fault.is_caught());
        let lines = self
            .left_out
            .iter()
            .map(|left| format!("left out: {}: {}\n", left.adapter, left.reason))
            .chain(
                faults.map(|fault| format!("survived: {}, not caught by {}\n", fault.fault, fault.must_be_caught_by)),
            )
            .chain(self.stale.iter().map(|line| format!("stale expectation: {line}\n")));
        text.extend(lines);
        text
    }

    /// Returns the matrix of the pairs: sources down, targets across, names in the first row and column. It is empty
    /// where no pair ran.
    fn matrix(&self) -> Vec<Vec<String>> {
        let mut names: Vec<&str> = Vec::new();
        for name in self.pairs.iter().flat_map(|pair| [&pair.from, &pair.to]) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        if names.is_empty() {
            return Vec::new();
        }
        let field = |from: &str, to: &str| {
            let pair = self.pairs.iter().find(|pair| pair.from == from && pair.to == to);
            pair.map_or("–".into(), score)
        };
        let row = |from: &str| {
            [from.to_owned()].into_iter().chain(names.iter().map(|to| field(from, to))).collect::<Vec<String>>()
        };
        let heading = ["from ↓ to →"].iter().chain(&names).map(|name| (*name).to_owned()).collect();
        [heading].into_iter().chain(names.iter().map(|from| row(from))).collect()
    }
}

/// Appends a table, unless it has no rows.
fn table(text: &mut String, heading: &str, rows: impl Iterator<Item = String>) {
    let mut rows = rows.peekable();
    if rows.peek().is_some() {
        text.extend(["\n", heading, "\n"]);
        rows.for_each(|row| text.extend([&row, "\n"]));
    }
}

/// Returns how many properties of a pair passed.
fn score(pair: &PairReport) -> String {
    let count = |verdict| pair.properties.iter().filter(|property| property.verdict == verdict).count();
    let (passed, expected) = (count(Verdict::Passed), count(Verdict::Expected));
    let judged = pair.properties.len() - count(Verdict::NotApplicable);
    let cases: u32 = pair.properties.iter().map(|property| property.cases).sum();
    let mark = if pair.passed() { "" } else { "✗ " };
    let expected = if expected > 0 { format!(" + {expected} expected") } else { String::new() };
    format!("{mark}{passed}{expected} of {judged}, {cases} cases")
}

fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed => "**failed**",
        Verdict::Crashed => "**crashed**",
        Verdict::Expected => "failed as expected",
        Verdict::NotApplicable => "not applicable",
    }
}

fn native(Native { wrong, refused, cases }: Native) -> String {
    let refused = if refused > 0 { format!(", refused {refused}") } else { String::new() };
    format!("wrong {wrong}{refused} of {cases}")
}

/// Escapes text for one field of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
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

#[cfg(test)]
mod tests;
