//! One pair, judged by workers: when one dies in a property, the next continues with the remaining properties.

use super::crash;
use super::job::{At, Job};
use super::progress::Progress;
use super::worker::now;
use crate::names::WORKER;
use crate::protocol::Message;
use crate::watch::{Ending, Patience, Watch};
use crate::{PROPERTIES, PairReport, PropertyReport, REPLAYED, Sides, Verdict, property};
use std::time::{Duration, Instant};

/// A worker that has begun, and was silent for this time when the time of the run was over, hangs. Others are only late.
const HANGS: Duration = Duration::from_secs(10);

/// How the work of one worker ended.
enum Work {
    Done,
    Refused(String),
    Died(Box<Death>),
}

struct Death {
    ending: Ending,
    last_words: String,
    at: Option<At>,
    sides: Option<Sides>,
    /// The time since the property before it was done.
    took: Duration,
    /// The time since the last message.
    silent: Duration,
}

impl Death {
    /// Returns whether the worker was only killed because the time of the run was over. One that loads its frameworks says
    /// nothing for longer than a case may take.
    fn is_late(&self) -> bool {
        let loads = self.sides.is_none();
        matches!(self.ending, Ending::Overdue(_)) && (loads || self.silent < HANGS)
    }
}

impl Job<'_> {
    /// Judges the pair.
    pub fn judge(&self, progress: &Progress) -> PairReport {
        let started = Instant::now();
        let mut shrinking = self.patience.shrinking;
        let (from, to) = (self.pair.from.clone(), self.pair.to.clone());
        let mut report = PairReport { from, to, device: self.device.to_string(), properties: Vec::new() };
        loop {
            let rest = rest(&report, &self.options.properties);
            let work =
                if rest.is_empty() { Work::Done } else { self.one_worker(&rest, started, &mut report, progress) };
            match work {
                Work::Done => return report,
                Work::Refused(reason) => {
                    let refused = failed(WORKER, 0, Verdict::Failed, reason);
                    progress.property(&refused);
                    report.properties.push(refused);
                    return report;
                }
                Work::Died(death) if self.budget.is_some() && death.is_late() => {
                    let late = |name| failed(name, 0, Verdict::NotApplicable, "the time was over".into());
                    let late: Vec<_> = self::rest(&report, &self.options.properties).into_iter().map(late).collect();
                    report.properties.extend(late);
                    return report;
                }
                Work::Died(death) => {
                    let died = Instant::now();
                    let crashed = self.crashed(&death, shrinking, progress);
                    shrinking = shrinking.saturating_sub(died.elapsed());
                    progress.property(&crashed);
                    report.properties.push(crashed);
                    if death.at.is_none() {
                        return report;
                    }
                    if matches!(death.ending, Ending::Overdue(_)) {
                        let late = |name| failed(name, 0, Verdict::Failed, "not run: no time was left".into());
                        let late: Vec<_> =
                            self::rest(&report, &self.options.properties).into_iter().map(late).collect();
                        report.properties.extend(late);
                        return report;
                    }
                }
            }
        }
    }

    /// Returns the verdict on the property in which a worker died, with the smallest case that `shrinking` suffices for.
    fn crashed(&self, death: &Death, shrinking: Duration, progress: &Progress) -> PropertyReport {
        let Death { ending, last_words, at, sides, took, .. } = death;
        let words = if last_words.is_empty() { String::new() } else { format!("; its last words: {last_words}") };
        let Some(at) = at else {
            return failed(WORKER, 0, Verdict::Crashed, format!("outside any case, {ending}{words}"));
        };
        let (case, note) = crash::shrink(self, *ending, at, sides.as_ref(), shrinking, progress);
        let cases = if at.index == REPLAYED { 1 } else { at.index + 1 };
        let report = failed(&at.property, cases, Verdict::Crashed, format!("{ending}{note}{words}"));
        PropertyReport { counterexample: Some(case), millis: took.as_millis() as u64, ..report }
    }

    /// Lets one worker judge the properties of `rest`, as far as it gets.
    fn one_worker(&self, rest: &[&str], started: Instant, report: &mut PairReport, progress: &Progress) -> Work {
        let mut more = vec![
            format!("--cases={}", self.cases),
            format!("--seed={}", self.seed),
            format!("--properties={}", rest.join(",")),
        ];
        if let Some(budget) = self.budget {
            let left = budget.saturating_sub(started.elapsed());
            more.push(format!("--until={}", now() + left.as_millis() as u64));
        }
        let patience = Patience { whole: self.patience.whole.saturating_sub(started.elapsed()), ..self.patience };
        let mut watch = match Watch::start(&self.worker(more), &self.environment(), patience) {
            Ok(watch) => watch,
            Err(error) => return Work::Refused(format!("the worker does not start: {error}")),
        };
        let (mut sides, mut at, mut done) = (None, None, None);
        let mut last = Instant::now();
        loop {
            let asked = Instant::now();
            match watch.next() {
                Ok(Message::Hello(known)) => {
                    let ahead = rest.iter().filter_map(|name| property(name));
                    let ahead = ahead.filter(|property| (property.left_out)(&known).is_none());
                    progress.ahead(ahead.map(|property| property.planned(self.cases, &known)).sum());
                    sides = Some(*known);
                }
                Ok(Message::Started { property, index, case }) => {
                    progress.case(&property);
                    at = Some(At { property, index, case });
                }
                Ok(Message::Finished(property)) => {
                    (at, last) = (None, Instant::now());
                    progress.property(&property);
                    report.properties.push(property);
                }
                Ok(Message::Refused(reason)) => done = Some(Work::Refused(reason)),
                Ok(Message::Done) => done = Some(Work::Done),
                Ok(Message::Replayed(_)) => (),
                Err(ending) => {
                    let found = self.findings(ending).map(Work::Refused);
                    if let Some(work) = found.or(done.take().filter(|_| ending == Ending::Exit(0))) {
                        return work;
                    }
                    let (silent, took) = (asked.elapsed(), last.elapsed());
                    let last_words = watch.last_words();
                    return Work::Died(Box::new(Death { ending, last_words, at, sides, took, silent }));
                }
            }
        }
    }
}

/// Returns the properties that are chosen, or all, and have not been judged.
fn rest(report: &PairReport, chosen: &[String]) -> Vec<&'static str> {
    let judged = |name: &str| report.properties.iter().any(|property| property.name == name);
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|chosen| chosen == name);
    PROPERTIES.iter().map(|property| property.name).filter(|name| is_chosen(name) && !judged(name)).collect()
}

fn failed(name: &str, cases: u32, verdict: Verdict, reason: String) -> PropertyReport {
    PropertyReport::new(name, cases, verdict, Some(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_loads_when_the_time_is_over_is_late() {
        let silent = 3 * HANGS;
        let death = |ending| Death { ending, last_words: String::new(), at: None, sides: None, took: silent, silent };
        assert!(death(Ending::Overdue(silent)).is_late());
        assert!(!death(Ending::Silent(silent)).is_late() && !death(Ending::Exit(1)).is_late());
    }
}
