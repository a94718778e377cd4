//! The runs into one folder of reports, the latest last.

use super::{Broken, Report, Summary};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::{fs, io};

/// The file next to the reports.
const FILE: &str = "history.json";

/// The most runs that are kept.
const MOST: usize = 50;

/// One run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Run {
    /// When, in UTC (RFC 3339).
    pub date: String,
    /// The device.
    pub device: String,
    /// The seed.
    pub seed: u64,
    /// The pairs that ran.
    pub pairs: usize,
    /// The counts.
    pub summary: Summary,
    /// What failed, such as `torch → numpy: values`.
    pub failures: Vec<String>,
}

/// The runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct History {
    pub runs: Vec<Run>,
}

impl History {
    /// Reads the runs into a folder. One that cannot be read begins again: a history is worth no failed run.
    pub(super) fn read(folder: &Path) -> Self {
        let text = fs::read_to_string(folder.join(FILE)).ok();
        text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    /// Adds a run, and forgets the oldest.
    pub(super) fn with(mut self, report: &Report) -> Self {
        self.runs.push(Run {
            date: report.host.date.clone(),
            device: report.device.clone(),
            seed: report.seed,
            pairs: report.pairs.len(),
            summary: report.summary,
            failures: report.failures().iter().map(Broken::full_title).collect(),
        });
        self.runs.drain(..self.runs.len().saturating_sub(MOST));
        self
    }

    /// Writes the runs into a folder.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        fs::write(folder.join(FILE), serde_json::to_string_pretty(self)? + "\n")
    }
}
