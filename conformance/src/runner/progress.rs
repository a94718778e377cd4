//! How far a run has got: a bar on a terminal, a line for each property elsewhere.

use super::options::PairName;
use crate::{PropertyReport, Verdict};
use indicatif::{ProgressBar, ProgressStyle};

/// Shows how far a pair has got.
pub struct Progress {
    bar: ProgressBar,
    pair: String,
}

impl Progress {
    /// Begins with a pair that has so many cases.
    pub fn new(pair: &PairName, cases: u32) -> Self {
        let bar = ProgressBar::new(u64::from(cases));
        let style = ProgressStyle::with_template("{prefix:20} {wide_bar} {pos}/{len} {msg:14} {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let pair = format!("{} → {}", pair.from, pair.to);
        bar.set_prefix(pair.clone());
        Self { bar, pair }
    }

    /// A case begins.
    pub fn case(&self, property: &str) {
        if self.bar.message() != property {
            self.bar.set_message(property.to_owned());
        }
        self.bar.inc(1);
    }

    /// A property is done.
    pub fn property(&self, report: &PropertyReport) {
        let line = format!("{:<18} {:<14} {:>6} cases  {}", self.pair, report.name, report.cases, word(report.verdict));
        self.say(&match &report.reason {
            Some(reason) => format!("{line}: {reason}"),
            None => line,
        });
    }

    /// Something to tell.
    pub fn say(&self, line: &str) {
        self.bar.suspend(|| println!("{line}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The verdict in one word.
pub fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed => "FAILED",
        Verdict::Crashed => "CRASHED",
        Verdict::Expected => "fails as expected",
        Verdict::NotApplicable => "not applicable",
    }
}
