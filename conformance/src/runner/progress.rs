//! Progress of a run: one line a pair. On a terminal a bar stands in its place until the pair is done.

use crate::names::PairName;
use crate::{PairReport, PropertyReport, Verdict};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::cell::Cell;
use std::env;
use std::time::{Duration, Instant};

/// The bar of a pair: cases done and in all, failures, time, and the property that runs.
const BAR: &str = "{prefix}  {wide_bar} {pos:>6}/{len} cases  {msg}  {elapsed:>4}";

/// How a run shows its progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct Display {
    /// Characters that every pair's name fits into.
    pub width: usize,
    /// Whether every property has a line, too.
    pub verbose: bool,
    /// Whether a pair has a bar: where several run at once, only lines are shown.
    pub bars: bool,
}

/// The progress of one pair.
pub struct Progress {
    bar: ProgressBar,
    display: Display,
    pair: String,
    failed: Cell<u32>,
    started: Instant,
}

impl Progress {
    /// Begins a pair. The bar is hidden where the standard output is not a terminal, and in CI.
    pub fn new(pair: &PairName, display: Display) -> Self {
        let target = match env::var_os("CI") {
            None if display.bars => ProgressDrawTarget::stdout(),
            _ => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        bar.set_style(ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar()));
        let pair = format!("{:<1$}", pair.arrow(), display.width);
        bar.set_prefix(pair.clone());
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_secs(1));
        }
        Self { bar, display, pair, failed: Cell::default(), started: Instant::now() }
    }

    /// Says how many cases a worker has to run, next to those that have run.
    pub fn ahead(&self, cases: u32) {
        self.bar.set_length(self.bar.position() + u64::from(cases));
    }

    /// Counts a case of `property`, which begins.
    pub fn case(&self, property: &str) {
        self.bar.set_message(format!("{} failed  {property:<13}", self.failed.get()));
        self.bar.inc(1);
    }

    /// Counts a property, which is done. Prints it where it failed, or details are on.
    pub fn property(&self, report: &PropertyReport) {
        let is_failure = report.verdict.is_failure();
        self.failed.set(self.failed.get() + u32::from(is_failure));
        self.print(&property_line(&self.pair, report), is_failure);
    }

    /// Prints a line: what takes long says so.
    pub fn note(&self, line: &str) {
        self.print(line, true);
    }

    fn print(&self, line: &str, always: bool) {
        if always || self.display.verbose {
            self.bar.suspend(|| println!("{line}"));
        }
    }

    /// Replaces the bar by the verdict.
    pub fn finish(self, report: &PairReport) {
        self.bar.finish_and_clear();
        println!("{}", pair_line(&self.pair, report, self.started.elapsed()));
    }
}

/// The line of a pair that is done.
fn pair_line(pair: &str, report: &PairReport, time: Duration) -> String {
    let count = |verdict| report.properties.iter().filter(|property| property.verdict == verdict).count();
    let (failed, crashed) = (count(Verdict::Failed), count(Verdict::Crashed));
    let verdict = match (failed, crashed) {
        (0, 0) => Verdict::Passed,
        (_, 0) => Verdict::Failed,
        _ => Verdict::Crashed,
    };
    let cases: u32 = report.properties.iter().map(|property| property.cases).sum();
    let (word, failed, seconds) = (word(verdict), failed + crashed, time.as_secs_f64());
    format!("{pair}  {word:<7}  {cases:>6} cases  {failed:>2} failed  {seconds:>7.1} s")
}

/// The line of a property.
fn property_line(pair: &str, report: &PropertyReport) -> String {
    let PropertyReport { name, cases, verdict, reason, .. } = report;
    let line = format!("{pair}  {name:<13}  {cases:>6} cases  {}", word(*verdict));
    reason.iter().fold(line, |line, reason| format!("{line}: {reason}"))
}

/// The verdict in one word.
fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed => "FAILED",
        Verdict::Crashed => "CRASHED",
        Verdict::Expected => "fails as expected",
        Verdict::NotApplicable => "not applicable",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(verdicts: &[Verdict]) -> PairReport {
        let judged = |verdict: &Verdict| PropertyReport::new("values", 120, *verdict, Some("as it is".into()));
        let properties = verdicts.iter().map(judged).collect();
        PairReport { from: "torch".into(), to: "numpy".into(), device: "cpu".into(), properties }
    }

    #[test]
    fn lines_of_pairs_are_aligned_and_plain() {
        use Verdict::{Crashed, Expected, Failed, NotApplicable, Passed};
        let line = |pair, seconds, verdicts: &[Verdict]| {
            pair_line(&format!("{pair:<18}"), &report(verdicts), Duration::from_secs(seconds))
        };
        let lines = [
            line("numpy → tensorflow", 4, &[Passed, Expected, NotApplicable]),
            line("torch → numpy", 1800, &[Passed, Failed]),
            line("cupy → cupy", 0, &[Failed, Crashed]),
        ];
        let expected = [
            "numpy → tensorflow  passed      360 cases   0 failed      4.0 s",
            "torch → numpy       FAILED      240 cases   1 failed   1800.0 s",
            "cupy → cupy         CRASHED     240 cases   2 failed      0.0 s",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn lines_of_properties_say_why() {
        let line = property_line("torch → numpy", &report(&[Verdict::Expected]).properties[0]);
        assert_eq!(line, "torch → numpy  values            120 cases  fails as expected: as it is");
    }

    #[test]
    fn failures_are_counted_as_they_come() {
        let pair: PairName = "torch:numpy".parse().unwrap();
        let progress = Progress::new(&pair, Display { width: 20, ..Display::default() });
        assert_eq!(progress.pair, "torch → numpy       ");
        progress.case("values");
        progress.property(&report(&[Verdict::Failed]).properties[0]);
        progress.property(&report(&[Verdict::Expected]).properties[0]);
        assert_eq!(progress.failed.get(), 1);
    }
}
