//! A test that certifies an adapter in its own processes, so that a fault which ends a process ends in a report.

use crate::protocol::{Message, Sender};
use crate::watch::{Ending, Patience, Watch};
use crate::{
    Case, Config, PROPERTIES, Pair, PairReport, PropertyReport, REPLAYED, Regression, Sides, Subject, Verdict,
};
use crate::{property, replay, shrink, tree};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};
use std::{env, process};

/// The variable with the work of a process, as JSON.
const VARIABLE: &str = "TRUEBRIDGE_CONFORMANCE_APART";

/// How long the processes of one direction may take together.
const WHOLE: Duration = Duration::from_secs(3600);

/// How long a case in which a process dies is made smaller.
const SHRINKING: Duration = Duration::from_secs(60);

/// The most processes that shrink one case.
const STEPS: u32 = 100;

/// What a process does.
#[derive(Debug, Serialize, Deserialize)]
struct Work {
    test: String,
    /// Whether the reference is the source.
    back: bool,
    task: Task,
}

#[derive(Debug, Serialize, Deserialize)]
enum Task {
    /// Judges these properties.
    Properties(Vec<String>),
    /// Judges one case.
    Case(Box<Regression>),
}

impl Config {
    /// Certifies an adapter as [`Config::certify`] does, in a test, and each direction in its own process: a fault
    /// that ends the process, or hangs for longer than [`patience`](Self::patience), is reported like any other ([`Verdict::Crashed`]), with the
    /// smallest case that does so, and the properties after it are judged in a new process.
    ///
    /// `test` is the test that calls this, by its whole name, as in `cargo test -- --exact NAME`: the processes run it
    /// again. Call this first in the test. Settings of the [`Config`] must be the same in each run.
    ///
    /// # Panics
    ///
    /// The test program cannot be started again.
    pub fn certify_apart<F, T>(
        &self,
        test: &str,
        subject: &dyn Subject<Tensor = F>,
        reference: &dyn Subject<Tensor = T>,
    ) -> [PairReport; 2] {
        let (there, back) = (Pair::new(subject, reference), Pair::new(reference, subject));
        let work = env::var(VARIABLE).ok().and_then(|work| serde_json::from_str::<Work>(&work).ok());
        match work.filter(|work| work.test == test) {
            Some(work) if work.back => self.work(&back, work.task),
            Some(work) => self.work(&there, work.task),
            None => [(there.sides(), false), (back.sides(), true)]
                .map(|(sides, back)| Parent { config: self, test, sides, back }.all()),
        }
    }

    /// Does what the parent asks for, and ends the process.
    fn work<F, T>(&self, pair: &Pair<'_, F, T>, task: Task) -> ! {
        let mut send = |message: Message| {
            let line = serde_json::to_string(&message).unwrap_or_default();
            // The test harness does not end its own line.
            let written = writeln!(io::stdout(), "\n{line}").and_then(|()| io::stdout().flush());
            if written.is_err() {
                process::exit(1);
            }
        };
        match task {
            Task::Properties(names) => {
                let config = Self { properties: Some(names), ..self.clone() };
                config.certify_pair(pair, &mut Sender(&mut send));
            }
            Task::Case(one) => {
                let failure = property(&one.property).and_then(|property| replay(pair, property, &one.case).err());
                send(Message::Replayed(failure.map(|failure| failure.to_string())));
            }
        }
        send(Message::Done);
        process::exit(0)
    }
}

/// The process of the test, for one direction.
struct Parent<'a> {
    config: &'a Config,
    test: &'a str,
    sides: Sides,
    back: bool,
}

/// The case in which a process died.
struct At {
    property: String,
    index: u32,
    case: Case,
}

impl Parent<'_> {
    fn all(&self) -> PairReport {
        let (from, to) = (self.sides.from.name.clone(), self.sides.to.name.clone());
        let mut report = PairReport { from, to, device: self.sides.device.to_string(), properties: Vec::new() };
        let started = Instant::now();
        loop {
            let rest = self.rest(&report);
            if rest.is_empty() {
                return report;
            }
            let mut watch = self.start(Task::Properties(rest), started);
            let (mut at, mut done) = (None, false);
            let ending = loop {
                match watch.next() {
                    Ok(Message::Started { property, index, case }) => at = Some(At { property, index, case }),
                    Ok(Message::Finished(property)) => {
                        at = None;
                        report.properties.push(property);
                    }
                    Ok(Message::Done) => done = true,
                    Ok(_) => (),
                    Err(ending) => break ending,
                }
            };
            if done {
                return report;
            }
            let words = match watch.last_words() {
                words if words.is_empty() => words,
                words => format!("; its last words: {words}"),
            };
            let Some(at) = at else {
                let reason = format!(
                    "outside any case, {ending}; if no test ran, pass its whole name, not {:?}{words}",
                    self.test
                );
                report.properties.push(PropertyReport::new("worker", 0, Verdict::Crashed, Some(reason)));
                return report;
            };
            let cases = if at.index == REPLAYED { 1 } else { at.index + 1 };
            let crashed = PropertyReport::new(&at.property, cases, Verdict::Crashed, Some(format!("{ending}{words}")));
            let counterexample =
                Some(if matches!(ending, Ending::Signal(_) | Ending::Exit(_)) { self.smallest(&at) } else { at.case });
            report.properties.push(PropertyReport { counterexample, ..crashed });
        }
    }

    /// Returns the properties that are chosen and have no verdict.
    fn rest(&self, report: &PairReport) -> Vec<String> {
        let is_chosen =
            |name: &&str| self.config.properties.as_ref().is_none_or(|names| names.iter().any(|n| n == name));
        let is_open = |name: &&str| report.properties.iter().all(|judged| judged.name != *name);
        let names = PROPERTIES.iter().map(|property| property.name);
        names.filter(is_chosen).filter(is_open).map(String::from).collect()
    }

    fn patience(&self) -> Patience {
        Patience { silence: self.config.patience, whole: WHOLE, shrinking: SHRINKING }
    }

    fn start(&self, task: Task, started: Instant) -> Watch {
        let program = env::current_exe().expect("the test program has a path");
        let program: [OsString; 5] =
            [program.into(), self.test.into(), "--exact".into(), "--nocapture".into(), "--include-ignored".into()];
        let work = Work { test: self.test.into(), back: self.back, task };
        let work = serde_json::to_string(&work).expect("the work is made of texts and numbers");
        let patience = self.patience();
        let patience = Patience { whole: patience.whole.saturating_sub(started.elapsed()), ..patience };
        Watch::start(&program, &[(VARIABLE, work)], patience).expect("the test program starts again")
    }

    /// Returns the smallest case that still ends the process, of those that a bounded search finds.
    fn smallest(&self, at: &At) -> Case {
        let started = Instant::now();
        let Some(property) = property(&at.property).filter(|_| at.index != REPLAYED) else { return at.case.clone() };
        let tree = tree(property, &self.sides, self.config.seed, at.index);
        let mut steps = 0;
        let mut dies = |case: &Case| {
            steps += 1;
            steps <= STEPS && started.elapsed() < self.patience().shrinking && self.dies(&at.property, case)
        };
        if tree.current() == at.case && dies(&at.case) { shrink(tree, &mut dies) } else { at.case.clone() }
    }

    /// Returns whether the case ends its own process.
    fn dies(&self, property: &str, case: &Case) -> bool {
        let (from, to) = (self.sides.from.name.clone(), self.sides.to.name.clone());
        let one = Regression { from, to, property: property.into(), case: case.clone() };
        let mut watch = self.start(Task::Case(Box::new(one)), Instant::now());
        let mut done = false;
        loop {
            match watch.next() {
                Ok(message) => done |= message == Message::Done,
                Err(ending) => return !done && matches!(ending, Ending::Signal(_) | Ending::Exit(_)),
            }
        }
    }
}
