//! What GitHub Actions shows of a run: annotations, and the summary of a job.

use super::{KNOWN, Report};
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

/// A run in a job of GitHub Actions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GitHub {
    /// The file to which the job's summary is appended.
    pub summary: Option<PathBuf>,
}

/// The most annotations: GitHub shows ten of a step.
const MOST: usize = 10;

impl GitHub {
    /// Returns the job that this process belongs to, by the variables of its environment.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        set("GITHUB_ACTIONS")?;
        Some(Self { summary: set("GITHUB_STEP_SUMMARY").map(PathBuf::from) })
    }

    /// Appends what a summary shows to the job's.
    ///
    /// # Errors
    ///
    /// What the file system reports.
    pub fn summarise(&self, report: &Report) -> io::Result<()> {
        let Some(path) = &self.summary else { return Ok(()) };
        OpenOptions::new().append(true).create(true).open(path)?.write_all((report.overview() + "\n").as_bytes())
    }
}

impl Report {
    /// Returns a line for each failure, which GitHub shows as an error with its reason and the command that replays it.
    /// Where there is a baseline, failures that it has as well are warnings, and come last.
    pub fn annotations(&self) -> Vec<String> {
        let failures = self.failures();
        let line = |failure: &super::Broken<'_>| {
            let level = if failure.is_known { "warning" } else { "error" };
            let replay = failure.replay.iter().map(|replay| format!("\nreplay: {replay}"));
            let known = if failure.is_known { format!("{KNOWN}: ") } else { String::new() };
            let message = [known, failure.reason.clone()].into_iter().chain(replay).collect::<String>();
            format!("::{level} title={}::{}", property(&failure.full_title()), data(&message))
        };
        let is_failure =
            |worse: &&String| failures.iter().any(|failure| worse.starts_with(&format!("{}: ", failure.full_title())));
        let lost = self.comparison.iter().flat_map(|comparison| &comparison.worse).filter(|worse| !is_failure(worse));
        let lost = lost.map(|worse| format!("::error title=worse than the baseline::{}", data(worse)));
        let (known, new): (Vec<_>, Vec<_>) = failures.iter().partition(|failure| failure.is_known);
        let mut lines: Vec<_> = new.into_iter().map(line).chain(lost).collect();
        let errors = lines.len();
        lines.extend(known.into_iter().map(line));
        if lines.len() > MOST {
            let level = if errors >= MOST { "error" } else { "warning" };
            let more = lines.split_off(MOST - 1).len();
            lines.push(format!("::{level} title=conformance::{more} more failures are in the reports"));
        }
        lines
    }
}

/// Escapes a message, as the workflow commands of GitHub want it.
fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

/// Escapes a property of a workflow command.
fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}
