//! What a run has found, as data.

use crate::{Case, Coverage, Histogram};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// The verdict on a property.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every case passed.
    Passed,
    /// A case failed, or an expected failure passed.
    Failed,
    /// The process died in a case, or hung. Only the runner, which watches the process, can tell.
    Crashed,
    /// A case failed, as the expectations say.
    Expected,
    /// It has no meaning for this pair.
    NotApplicable,
}

impl Verdict {
    /// Returns whether this is a failure that no expectation names.
    pub fn is_failure(self) -> bool {
        matches!(self, Self::Failed | Self::Crashed)
    }
}

/// How often the frameworks' own method was wrong in the same cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Native {
    /// Cases with a wrong result.
    pub wrong: u32,
    /// Cases that it refused.
    pub refused: u32,
    /// Cases in all.
    pub cases: u32,
}

/// One property of one pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PropertyReport {
    /// The property.
    pub name: String,
    /// Cases that were run: the failing one counts, those of shrinking do not.
    pub cases: u32,
    /// The verdict.
    pub verdict: Verdict,
    /// Why it failed, was expected to, or has no meaning.
    #[serde(default)]
    pub reason: Option<String>,
    /// The frameworks' own method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native: Option<Native>,
    /// The smallest failing case that was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counterexample: Option<Case>,
    /// The file in which the runner keeps that case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<PathBuf>,
    /// How the transfers of its cases ended.
    #[serde(default)]
    pub coverage: Coverage,
    /// Which cases they were. The reports of the runner count those of all properties and pairs together.
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub histogram: Histogram,
    /// The time that it took, in milliseconds.
    #[serde(default)]
    pub millis: u64,
}

impl PropertyReport {
    /// A verdict after `cases` cases, without a native column and a counterexample.
    pub(crate) fn new(name: &str, cases: u32, verdict: Verdict, reason: Option<String>) -> Self {
        Self {
            name: name.into(),
            cases,
            verdict,
            reason,
            native: None,
            counterexample: None,
            kept: None,
            coverage: Coverage::default(),
            histogram: Histogram::default(),
            millis: 0,
        }
    }
}

/// One ordered pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairReport {
    /// The source.
    pub from: String,
    /// The target.
    pub to: String,
    /// The device on which the source made its tensors.
    pub device: String,
    /// The requested properties.
    pub properties: Vec<PropertyReport>,
}

impl PairReport {
    /// Returns whether no property failed unexpectedly.
    pub fn passed(&self) -> bool {
        self.properties.iter().all(|property| !property.verdict.is_failure())
    }

    /// Ends a test that certifies a pair: does nothing if it [passed](Self::passed).
    ///
    /// # Panics
    ///
    /// With the whole report, if a property failed.
    #[track_caller]
    pub fn assert_passed(&self) {
        assert!(self.passed(), "{self}");
    }
}

/// A line for the pair, then one for each property: its verdict and cases, and why it failed or was left out. The
/// smallest failing case follows as JSON, for [`Regression`](crate::Regression).
impl fmt::Display for PairReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.passed() { "passed" } else { "failed" };
        write!(f, "{} → {} on {}: {word}", self.from, self.to, self.device)?;
        self.properties.iter().try_for_each(|property| write!(f, "\n  {property}"))
    }
}

impl fmt::Display for PropertyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.verdict {
            Verdict::Passed => "passed",
            Verdict::Failed => "FAILED",
            Verdict::Crashed => "CRASHED",
            Verdict::Expected => "expected",
            Verdict::NotApplicable => "left out",
        };
        write!(f, "{:<13} {word:<8} {:>6} cases", self.name, self.cases)?;
        if let Some(reason) = &self.reason {
            write!(f, ": {reason}")?;
        }
        let case = self.counterexample.as_ref().and_then(|case| serde_json::to_string(case).ok());
        case.map_or(Ok(()), |case| write!(f, "\n    {case}"))
    }
}
