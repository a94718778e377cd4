//! The reports of a run: JSON, HTML, JUnit XML and Markdown, and what GitHub shows.

mod baseline;
mod github;
mod history;
mod html;
mod junit;
mod markdown;
mod picture;
mod program;
mod timeline;

pub use baseline::Comparison;
pub use github::GitHub;

use crate::fault::FaultReport;
use crate::{Case, Coverage, Histogram, PairReport, PropertyReport, Verdict, words};
use history::History;
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
    /// The commit of the checkout that ran, if it was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The host.
    pub host: Host,
    /// The device.
    pub device: String,
    /// The seed of all cases.
    pub seed: u64,
    /// The cases of each pair.
    #[serde(default)]
    pub cases: u32,
    /// How the suite was called, without options: the commands in reports begin with it.
    #[serde(default)]
    pub command: String,
    /// The pairs that ran.
    pub pairs: Vec<PairReport>,
    /// Which cases were run, over all properties and pairs.
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub histogram: Histogram,
    /// The planted faults.
    pub faults: Vec<FaultReport>,
    /// The adapters that did not run.
    pub left_out: Vec<LeftOut>,
    /// Expectations that match nothing, one line each.
    pub stale: Vec<String>,
    /// The counts.
    pub summary: Summary,
    /// What has changed since an earlier run, if one was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comparison: Option<Comparison>,
}

/// One thing that failed, as every report shows it.
struct Broken<'a> {
    /// The pair, such as `torch → numpy`, or the kind of thing.
    title: String,
    /// The property, the fault or the expectation.
    name: &'a str,
    /// Why it failed.
    reason: String,
    /// The smallest case that fails, with its device and the adapters of source and target.
    case: Option<(&'a Case, &'a str, [&'a str; 2])>,
    /// The file in which the case is kept.
    kept: Option<&'a Path>,
    /// The command that runs it again.
    replay: Option<String>,
    /// Whether the baseline has this failure as well.
    is_known: bool,
}

impl Broken<'_> {
    /// Returns its title and name, as lines of a comparison begin.
    fn full_title(&self) -> String {
        format!("{}: {}", self.title, self.name)
    }
}

/// What the coverage counts.
const COUNTS: &str = "Coverage counts, for each property, the cases in which at least one conversion was in place, was a \
                      copy or was refused. A case may make several conversions, so the three may add up to more than the \
                      cases; a case without a conversion is in none of them.";

/// What is said of a failure that the baseline has as well.
const KNOWN: &str = "as in the baseline";

impl Report {
    /// Counts what is in the report. The histograms of the properties become one of the run.
    pub fn sum_up(&mut self) {
        for pair in &mut self.pairs {
            let mut all = Histogram::default();
            for property in &mut pair.properties {
                all.add_property(&std::mem::take(&mut property.histogram));
            }
            self.histogram.add_pair(&all);
        }
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

    /// Returns the exit code of the run: 1 if something failed or, where there is an earlier run to compare with, if
    /// something got worse.
    pub fn exit_code(&self) -> i32 {
        let failed =
            self.comparison.as_ref().map_or(self.summary.failed > 0, |comparison| !comparison.worse.is_empty());
        i32::from(failed)
    }

    /// Writes `report.json`, `report.html`, `junit.xml` and `report.md` into `folder`, and adds the run to
    /// `history.json` there.
    ///
    /// # Errors
    ///
    /// What the file system reports.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let history = History::read(folder).with(self);
        history.write(folder)?;
        fs::write(folder.join("report.json"), serde_json::to_string_pretty(self)? + "\n")?;
        fs::write(folder.join("report.html"), html::page(self, &history))?;
        fs::write(folder.join("junit.xml"), self.junit().to_string().map_err(io::Error::other)?)?;
        fs::write(folder.join("report.md"), self.markdown())
    }

    /// Returns everything that failed: first what the baseline, if there is one, has not.
    fn failures(&self) -> Vec<Broken<'_>> {
        let each = |pair: &PairReport| pair.properties.iter().filter(|property| property.verdict.is_failure()).count();
        let mut all = Vec::with_capacity(self.pairs.iter().map(each).sum());
        for pair in &self.pairs {
            for property in pair.properties.iter().filter(|property| property.verdict.is_failure()) {
                all.push(Broken {
                    title: format!("{} → {}", pair.from, pair.to),
                    name: &property.name,
                    reason: property.reason.clone().unwrap_or_else(|| "without a reason".into()),
                    case: property
                        .counterexample
                        .as_ref()
                        .map(|case| (case, pair.device.as_str(), [pair.from.as_str(), pair.to.as_str()])),
                    kept: property.kept.as_deref(),
                    replay: Some(self.replay(pair, property)),
                    is_known: false,
                });
            }
        }
        for fault in self.faults.iter().filter(|fault| !fault.is_caught()) {
            all.push(Broken {
                title: "planted fault".into(),
                name: &fault.fault,
                reason: fault.missed(),
                case: None,
                kept: None,
                replay: Some(format!("{} --faults --seed {}", self.command, self.seed)),
                is_known: false,
            });
        }
        all.extend(self.stale.iter().map(|line| Broken {
            title: "stale expectation".into(),
            name: line,
            reason: "remove it from expectations.json, or correct it".into(),
            case: None,
            kept: None,
            replay: None,
            is_known: false,
        }));
        all.iter_mut().for_each(|broken| broken.is_known = self.is_known(&broken.full_title()));
        all.sort_by_key(|broken| broken.is_known);
        all
    }

    /// Returns the command that runs the failing case of a property again, or where none is kept the whole pair.
    fn replay(&self, pair: &PairReport, property: &PropertyReport) -> String {
        let Self { command, seed, cases, .. } = self;
        let device = &pair.device;
        match &property.kept {
            Some(kept) => format!("{command} --device {device} --replay {}", quoted(&kept.to_string_lossy())),
            None => {
                format!("{command} --device {device} --pairs {}:{} --cases {cases} --seed {seed}", pair.from, pair.to)
            }
        }
    }

    /// Returns how the transfers of each property ended, over all pairs: name, cases, coverage.
    fn coverage(&self) -> Vec<(&str, u32, Coverage)> {
        let mut all: Vec<(&str, u32, Coverage)> = Vec::new();
        for property in self.pairs.iter().flat_map(|pair| &pair.properties).filter(|property| property.cases > 0) {
            let known = all.iter().position(|(name, ..)| *name == property.name);
            let at = known.unwrap_or_else(|| {
                all.push((&property.name, 0, Coverage::default()));
                all.len() - 1
            });
            all[at].1 += property.cases;
            all[at].2.add(property.coverage);
        }
        all
    }

    /// Returns how much a time budget has cut, in one line.
    fn cut(&self) -> Option<String> {
        let is_cut = |property: &&PropertyReport| property.verdict == Verdict::Passed && property.reason.is_some();
        let count = self.pairs.iter().flat_map(|pair| &pair.properties).filter(is_cut).count();
        (count > 0).then(|| {
            format!(
                "cut: {} passed with fewer cases, because the time was over\n",
                words::counted_as(count, "property", "properties")
            )
        })
    }

    /// Returns which properties did not apply, one line for each reason: those properties, the reason, and to how many
    /// pairs.
    fn idle(&self) -> Vec<String> {
        let mut reasons: BTreeMap<&str, (Vec<&str>, usize)> = BTreeMap::new();
        for pair in &self.pairs {
            let idle = pair.properties.iter().filter(|property| property.verdict == Verdict::NotApplicable);
            let mut here: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            idle.for_each(|idle| here.entry(idle.reason.as_deref().unwrap_or_default()).or_default().push(&idle.name));
            for (reason, names) in here {
                let (all, pairs) = reasons.entry(reason).or_default();
                all.extend(names.into_iter().filter(|name| !all.contains(name)).collect::<Vec<_>>());
                *pairs += 1;
            }
        }
        let of = words::counted(self.pairs.len(), "pair");
        let line = |(reason, (names, pairs)): (&&str, &(Vec<&str>, usize))| {
            format!("{}: {reason} ({pairs} of {of})", names.join(", "))
        };
        reasons.iter().map(line).collect()
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
            .chain(self.cut())
            .chain(self.idle().into_iter().map(|line| format!("does not apply: {line}\n")))
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

/// Returns how many properties of a pair passed.
fn score(pair: &PairReport) -> String {
    let count = |verdict| pair.properties.iter().filter(|property| property.verdict == verdict).count();
    let (passed, expected) = (count(Verdict::Passed), count(Verdict::Expected));
    let idle = count(Verdict::NotApplicable);
    let judged = pair.properties.len() - idle;
    let cases: u32 = pair.properties.iter().map(|property| property.cases).sum();
    let mark = if pair.passed() { "" } else { "✗ " };
    let expected = if expected > 0 { format!(" + {expected} expected") } else { String::new() };
    let idle = if idle > 0 { format!(" ({idle} not applicable)") } else { String::new() };
    format!("{mark}{passed}{expected} of {judged}{idle}, {cases} cases")
}

/// Returns text as HTML has it.
fn escaped(text: &str) -> String {
    // HTML does not have the other control characters.
    let text = text.replace(|letter: char| letter.is_control() && letter != '\n' && letter != '\t', "\u{fffd}");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Returns what a property's cell says of the frameworks' own method.
fn native(crate::Native { wrong, refused, cases }: crate::Native) -> String {
    let refused = if refused > 0 { format!(", refused {refused}") } else { String::new() };
    format!("wrong {wrong}{refused} of {cases}")
}

/// Quotes a word for a shell, where it needs that.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "-_./+:=@,".contains(letter);
    match word.chars().all(plain) && !word.is_empty() {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests;
