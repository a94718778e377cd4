//! What a run has found, as data.

use crate::Case;
use serde::{Deserialize, Serialize};

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

/// How often the frameworks' own way was wrong in the same cases.
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
    /// The frameworks' own way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native: Option<Native>,
    /// The smallest failing case that was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counterexample: Option<Case>,
}

impl PropertyReport {
    /// A verdict after `cases` cases, without a native column and a counterexample.
    pub(crate) fn new(name: &str, cases: u32, verdict: Verdict, reason: Option<String>) -> Self {
        Self { name: name.into(), cases, verdict, reason, native: None, counterexample: None }
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
}
