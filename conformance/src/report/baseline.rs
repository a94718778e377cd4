//! What has changed since an earlier run.

use super::Report;
use crate::names::WORKER;
use crate::{PairReport, PropertyReport, Verdict, words};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The difference between an earlier run, the baseline, and this one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// The file of the earlier run.
    pub baseline: PathBuf,
    /// When it was, in UTC (RFC 3339).
    pub date: String,
    /// What got worse, one line each: `torch → numpy: values: passed in the baseline, and failed now`.
    pub worse: Vec<String>,
    /// What got better.
    pub better: Vec<String>,
    /// Failures that the baseline has as well, also where their reason is another: they do not fail this run.
    pub known: u32,
    /// Those failures, such as `torch → numpy: values`.
    #[serde(default)]
    pub as_before: Vec<String>,
}

impl Comparison {
    /// Returns one line that says what the comparison found.
    pub fn heading(&self) -> String {
        let Self { baseline, date, worse, better, known, .. } = self;
        let (worse, better, file) = (worse.len(), better.len(), baseline.display());
        let known = words::counted(*known as usize, "failure");
        format!("{worse} worse, {better} better, {known} as before, compared with {file} of {date}.")
    }

    /// Returns whether what has this title, such as `torch → numpy: values`, got worse.
    pub(super) fn is_worse(&self, title: &str) -> bool {
        self.worse.iter().any(|line| line.strip_prefix(title).is_some_and(|rest| rest.starts_with(": ")))
    }
}

/// Verdicts from good to bad. What is not tested any more is worse than what passes, and better than what fails.
const ORDER: [Verdict; 5] =
    [Verdict::Passed, Verdict::NotApplicable, Verdict::Expected, Verdict::Failed, Verdict::Crashed];

fn rank(verdict: Verdict) -> usize {
    ORDER.iter().position(|known| *known == verdict).unwrap_or(ORDER.len())
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed => "failed",
        Verdict::Crashed => "crashed",
        Verdict::Expected => "failed as expected",
        Verdict::NotApplicable => "was not judged",
    }
}

impl Report {
    /// Reads the report of an earlier run.
    ///
    /// # Errors
    ///
    /// What the file system reports, and [`io::ErrorKind::InvalidData`] for another content.
    pub fn read(path: &Path) -> io::Result<Self> {
        let wrong = |error| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()));
        let text = fs::read_to_string(path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        serde_json::from_str(&text).map_err(wrong)
    }

    /// Compares this run with an earlier one, which `path` names. Only pairs that both have are compared, and those that
    /// cannot run any more: a run may choose fewer pairs, and a framework that is missing is a loss.
    pub fn compare(&mut self, earlier: &Self, path: &Path) {
        let (baseline, date) = (path.to_owned(), earlier.host.date.clone());
        let mut found = Comparison { baseline, date, ..Comparison::default() };
        for before in &earlier.pairs {
            let now = self.pairs.iter().find(|now| (&now.from, &now.to) == (&before.from, &before.to));
            match now {
                Some(now) => found.pair(before, now),
                None => {
                    let left = self.left_out.iter().find(|left| [&before.from, &before.to].contains(&&left.adapter));
                    let line = |reason: &String| format!("{} → {}: it does not run: {reason}", before.from, before.to);
                    found.worse.extend(left.map(|left| line(&left.reason)));
                }
            }
        }
        let new = self
            .pairs
            .iter()
            .filter(|now| !earlier.pairs.iter().any(|before| (&now.from, &now.to) == (&before.from, &before.to)));
        for pair in new {
            let fails = pair.properties.iter().filter(|property| property.verdict.is_failure());
            let line = |property: &PropertyReport| {
                format!("{}: {}, and the baseline lacks the pair", title(pair, property), word(property.verdict))
            };
            found.worse.extend(fails.map(line));
        }
        for fault in self.faults.iter().filter(|fault| !fault.is_caught()) {
            let before = earlier.faults.iter().find(|before| before.fault == fault.fault);
            match before.is_some_and(|before| !before.is_caught()) {
                true => found.as_before.push(format!("planted fault: {}", fault.fault)),
                false => found.worse.push(format!("planted fault: {}: {}", fault.fault, fault.missed())),
            }
        }
        for line in &self.stale {
            match earlier.stale.contains(line) {
                true => found.as_before.push(format!("stale expectation: {line}")),
                false => found.worse.push(format!("stale expectation: {line}: the baseline lacks it")),
            }
        }
        found.known = found.as_before.len() as u32;
        self.comparison = Some(found);
    }

    /// Returns whether the baseline has a failure with this title as well.
    pub(super) fn is_known(&self, title: &str) -> bool {
        self.comparison.as_ref().is_some_and(|comparison| !comparison.is_worse(title))
    }
}

fn title(pair: &PairReport, property: &PropertyReport) -> String {
    format!("{} → {}: {}", pair.from, pair.to, property.name)
}

impl Comparison {
    fn pair(&mut self, before: &PairReport, now: &PairReport) {
        for property in &now.properties {
            let earlier = before.properties.iter().find(|earlier| earlier.name == property.name);
            // A property that is new passes or fails without an earlier verdict.
            let was = earlier.map_or(Verdict::Passed, |earlier| earlier.verdict);
            let line = || {
                let reason = property.reason.as_ref().filter(|_| property.verdict != Verdict::Passed);
                let reason = reason.map_or(String::new(), |reason| format!(" ({reason})"));
                let was = earlier.map_or("is not", |earlier| word(earlier.verdict));
                format!("{}: {was} in the baseline, {} now{reason}", title(now, property), word(property.verdict))
            };
            let (was, is) = (rank(was), rank(property.verdict));
            // What is not judged any more is collected below. A new property that has no meaning loses nothing.
            if property.verdict == Verdict::NotApplicable {
                continue;
            } else if is > was {
                self.worse.push(line());
            } else if is < was {
                self.better.push(line());
            } else if property.verdict.is_failure() {
                self.as_before.push(title(now, property));
            }
        }
        self.lost(before, now);
    }

    /// Adds what passed and is not judged any more: one line for each reason, since a whole pair may be lost.
    fn lost(&mut self, before: &PairReport, now: &PairReport) {
        let mut lost: Vec<(Option<&str>, Vec<&str>)> = Vec::new();
        for earlier in before.properties.iter().filter(|earlier| earlier.verdict == Verdict::Passed) {
            let reason = match now.properties.iter().find(|property| property.name == earlier.name) {
                None => None,
                Some(property) if property.verdict == Verdict::NotApplicable => property.reason.as_deref(),
                Some(_) => continue,
            };
            match lost.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, names)) => names.push(&earlier.name),
                None => lost.push((reason, vec![&earlier.name])),
            }
        }
        let pair = format!("{} → {}", now.from, now.to);
        let dead = format!("{pair}: {WORKER}: ");
        for (reason, names) in lost {
            let passed =
                format!("{} that passed in the baseline", words::counted_as(names.len(), "property", "properties"));
            let without_worker = self.worse.iter_mut().find(|line| reason.is_none() && line.starts_with(&dead));
            if let Some(line) = without_worker {
                *line += &format!("; not judged any more: {passed}");
                continue;
            }
            let reason = reason.map_or(String::new(), |reason| format!(" ({reason})"));
            self.worse.push(match &names[..] {
                [name] => format!("{pair}: {name}: passed in the baseline, not judged now{reason}"),
                names => format!("{pair}: {passed} are not judged now{reason}: {}", names.join(", ")),
            });
        }
    }
}
