//! Runs properties over a pair: cases, shrinking, the column of the native method, reports.

use crate::model::{self, Random};
use crate::properties::{Outcome, PROPERTIES, Pair, Property, SUBJECT, Tested, outstanding};
use crate::{
    Case, Coverage, Failure, Histogram, Native, PairReport, PropertyReport, Regression, Route, Sides, Subject, Verdict,
};
use bridge_core::{Error, ErrorKind};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config as ProptestConfig, RngAlgorithm, TestRng, TestRunner};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How much is run. The default: 1000 cases a pair, all properties, no native column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Cases of a pair: each property has a fixed number of them, [`Property::cases`] where this is
    /// [`WHOLE`](crate::WHOLE), and fewer or more in proportion.
    pub cases: u32,
    /// Seed of every case.
    pub seed: u64,
    /// Time for a pair, which cuts the cases that it does not suffice for; every property runs at least one.
    pub time_budget: Option<Duration>,
    /// The properties to run; `None`: all.
    pub properties: Option<Vec<String>>,
    /// Whether the frameworks' own method runs as well as ours, where there is one.
    pub native: bool,
    /// Cases that failed once: those of a pair run first.
    pub regressions: Vec<Regression>,
    /// Whether a case that fails is made smaller as long as it does.
    pub shrinks: bool,
    /// How long a watched process may be silent: see [`certify_apart`](Self::certify_apart). Where cases are made smaller,
    /// more than the minute that this may take.
    pub patience: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cases: 1000,
            seed: 0,
            time_budget: None,
            properties: None,
            native: false,
            regressions: Vec::new(),
            shrinks: true,
            patience: Duration::from_secs(120),
        }
    }
}

/// Certifies an adapter by its subject: runs every property on random cases between it and a reference that is known to
/// be right. Returns two reports: into the reference, and back from it.
///
/// [`Config::certify`] does the same with other settings, [`Config::certify_pair`] for one of the two directions.
pub fn certify<F, T>(subject: &dyn Subject<Tensor = F>, reference: &dyn Subject<Tensor = T>) -> [PairReport; 2] {
    Config::default().certify(subject, reference)
}

impl Config {
    /// Certifies an adapter as [`certify`] does, with these settings.
    pub fn certify<F, T>(
        &self,
        subject: &dyn Subject<Tensor = F>,
        reference: &dyn Subject<Tensor = T>,
    ) -> [PairReport; 2] {
        let there = self.certify_pair(&Pair::new(subject, reference), &mut ());
        [there, self.certify_pair(&Pair::new(reference, subject), &mut ())]
    }

    /// Certifies one ordered pair, and reports its progress to `observer`.
    ///
    /// Only [with a native method](Pair::with_native_method) can it be put next to the adapters ([`Config::native`])
    /// and run in the same case as ours ([`Route::Beside`]).
    pub fn certify_pair<F, T>(&self, pair: &Pair<'_, F, T>, observer: &mut dyn Observer) -> PairReport {
        let until = self.time_budget.map(|time| Instant::now() + time);
        Run { pair, sides: pair.sides(), config: self, until }.all(observer)
    }

    /// Returns the properties that fail, without shrinking: what planted faults are judged by.
    pub(crate) fn failing<F, T>(&self, pair: &Pair<'_, F, T>) -> Vec<String> {
        let report = Self { shrinks: false, ..self.clone() }.certify_pair(pair, &mut ());
        let failed = report.properties.into_iter().filter(|property| property.verdict == Verdict::Failed);
        failed.map(|property| property.name).collect()
    }
}

/// Follows the progress of a run.
pub trait Observer {
    /// Called when a case begins: should the process die now, this case did it. `index` is the one that [`tree`] takes,
    /// or [`REPLAYED`].
    fn started(&mut self, property: &str, index: u32, case: &Case);
    /// Called when a property is done.
    fn finished(&mut self, report: &PropertyReport);
}

/// Ignores everything.
impl Observer for () {
    fn started(&mut self, _: &str, _: u32, _: &Case) {}
    fn finished(&mut self, _: &PropertyReport) {}
}

/// The index of a case that comes from a regression and not from a seed.
pub const REPLAYED: u32 = u32::MAX;

/// The most cases that are run to shrink one.
const SHRINK_STEPS: u32 = 400;

/// Time after which shrinking stops: a case that waits in vain for memory takes long, and the runner kills a worker
/// that is silent for minutes.
const SHRINK_TIME: Duration = Duration::from_secs(60);

/// The same, where the time for the pair is over.
const SHRINK_LEAST: Duration = Duration::from_secs(2);

/// Leases are counted per process, so only one pair can be judged at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Returns the case with this number, and how it shrinks: the same for the same arguments in any process.
pub fn tree(property: &Property, sides: &Sides, seed: u64, index: u32) -> Box<dyn ValueTree<Value = Case>> {
    let mut random =
        property.name.bytes().fold(Random::new(seed), |mut random, byte| Random::new(random.bits() ^ u64::from(byte)));
    let mut random = Random::new(random.bits() ^ u64::from(index));
    let bytes: Vec<u8> = (0..4).flat_map(|_| random.bits().to_le_bytes()).collect();
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let tree = (property.strategy)(sides).new_tree(&mut TestRunner::new_with_rng(config, rng));
    tree.expect("the strategies reject nothing")
}

/// Returns the smallest case that still fails and that a bounded search finds. The current case of `tree` fails.
pub fn shrink(mut tree: Box<dyn ValueTree<Value = Case>>, fails: &mut dyn FnMut(&Case) -> bool) -> Case {
    let mut best = tree.current();
    let mut failed = true;
    for _ in 0..SHRINK_STEPS {
        if !(if failed { tree.simplify() } else { tree.complicate() }) {
            break;
        }
        let case = tree.current();
        failed = case == best || fails(&case);
        if failed {
            best = case;
        }
    }
    best
}

/// Runs one case of one property.
///
/// # Errors
///
/// Why it failed.
pub fn replay<F, T>(pair: &Pair<'_, F, T>, property: &Property, case: &Case) -> Result<(), Failure> {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    judge(pair, property, case)
}

/// Judges one case. A panic is a failure, and so is a lease that is not released. After a failure, waits until both
/// devices are idle.
fn judge<F, T>(pair: &Pair<'_, F, T>, property: &Property, case: &Case) -> Outcome {
    let before = outstanding();
    let outcome = catch_unwind(AssertUnwindSafe(|| property.check(pair, case)))
        .unwrap_or_else(|panic| Err(Failure::new(format!("panicked: {}", words(&*panic)))))
        .and_then(|()| pair.returned(before));
    if outcome.is_err() {
        pair.recover();
    }
    outcome
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

/// Returns whether no other property is judged after this failure. A subject that is wrong makes every verdict worthless.
fn stops(property: &Property, failure: &Failure) -> bool {
    property.name == SUBJECT || failure.is_last
}

/// What the cases of a property were, and how they ended.
#[derive(Default)]
struct Tally {
    coverage: Coverage,
    histogram: Histogram,
    tested: Tested,
}

impl Tally {
    fn count(&mut self, case: &Case, seen: Coverage) {
        self.coverage.add(seen);
        self.histogram.count(case, seen);
        self.tested.count(case, seen);
    }

    fn into(self, report: PropertyReport) -> PropertyReport {
        PropertyReport { coverage: self.coverage, histogram: self.histogram, ..report }
    }
}

struct Run<'a, F, T> {
    pair: &'a Pair<'a, F, T>,
    sides: Sides,
    config: &'a Config,
    /// When the time for the pair is over.
    until: Option<Instant>,
}

impl<F, T> Run<'_, F, T> {
    fn all(&self, observer: &mut dyn Observer) -> PairReport {
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = |property: &&Property| {
            self.config.properties.as_ref().is_none_or(|names| names.iter().any(|name| name == property.name))
        };
        let applies = |property: &&Property| (property.left_out)(&self.sides).is_none();
        let chosen: Vec<_> = PROPERTIES.iter().filter(chosen).collect();
        let planned = |property: &Property| property.planned(self.config.cases, &self.sides);
        let mut ahead: u32 = chosen.iter().copied().filter(applies).map(planned).sum();
        let mut time = self.config.time_budget;
        let mut stopped = None;
        let mut report = PairReport {
            from: self.sides.from.name.clone(),
            to: self.sides.to.name.clone(),
            device: self.sides.device.to_string(),
            properties: Vec::new(),
        };
        for property in chosen {
            let result = match (property.left_out)(&self.sides).map(String::from).or_else(|| stopped.clone()) {
                Some(reason) => outcome(property, 0, Verdict::NotApplicable, Some(reason), None),
                None => {
                    let cases = planned(property);
                    let slice = time.map(|time| time.mul_f64(f64::from(cases) / f64::from(ahead)));
                    let start = Instant::now();
                    let about = |known: &&Regression| known.is_about(&report, property.name);
                    let known =
                        self.config.regressions.iter().filter(about).filter(|known| self.sides.makes(&known.case));
                    let (mut result, stops) = self.one(property, cases, slice, known, observer);
                    stopped = stops.then(|| format!("not judged, because `{}` failed", property.name));
                    ahead -= cases;
                    let took = start.elapsed();
                    result.millis = took.as_millis() as u64;
                    time = time.map(|time| time.saturating_sub(took));
                    result
                }
            };
            observer.finished(&result);
            report.properties.push(result);
        }
        report
    }

    /// Judges one property. Returns its report, and whether nothing can be judged after it.
    fn one<'r>(
        &self,
        property: &Property,
        cases: u32,
        time: Option<Duration>,
        known: impl Iterator<Item = &'r Regression>,
        observer: &mut dyn Observer,
    ) -> (PropertyReport, bool) {
        let start = Instant::now();
        let mut native = None;
        let mut run = 0;
        let mut tally = Tally::default();
        let judged = |case: &Case, tally: &mut Tally| {
            // What shrinking and the frameworks' own method have converted does not count.
            self.pair.take_seen();
            let outcome = judge(self.pair, property, case);
            tally.count(case, self.pair.take_seen());
            outcome
        };
        for Regression { case, .. } in known {
            observer.started(property.name, REPLAYED, case);
            run += 1;
            if let Err(failure) = judged(case, &mut tally) {
                let reason = Some(format!("a kept case fails again: {failure}"));
                let report = outcome(property, run, Verdict::Failed, reason, native);
                let report = PropertyReport { counterexample: Some(case.clone()), ..report };
                return (tally.into(report), stops(property, &failure));
            }
        }
        let mut cut = None;
        for index in 0.. {
            // A property that was hardly tested so far is tested further, so that no verdict is a matter of luck.
            if index >= cases && !tally.tested.needs_more(property.name, &self.sides) {
                break;
            }
            if index > 0 && time.is_some_and(|time| start.elapsed() > time) {
                cut = Some(format!("the time was over after {index} of {cases} cases")).filter(|_| index < cases);
                break;
            }
            let tree = tree(property, &self.sides, self.config.seed, index);
            let case = tree.current();
            observer.started(property.name, index, &case);
            run += 1;
            if let Err(failure) = judged(&case, &mut tally) {
                let stops = stops(property, &failure);
                return (tally.into(self.failed(property, run, tree, failure, native)), stops);
            }
            self.beside(property, &case, &mut native);
        }
        let few = tally.tested.hardly(property.name, &self.sides);
        let verdict = if few.is_some() { Verdict::Failed } else { Verdict::Passed };
        (tally.into(outcome(property, run, verdict, few.or(cut), native)), false)
    }

    fn failed(
        &self,
        property: &Property,
        run: u32,
        tree: Box<dyn ValueTree<Value = Case>>,
        failure: Failure,
        native: Option<Native>,
    ) -> PropertyReport {
        let shrinks = self.config.shrinks && !failure.is_last;
        let (mut last, started) = (failure, Instant::now());
        let left = self.until.map(|until| until.saturating_duration_since(started).max(SHRINK_LEAST));
        let most = left.map_or(SHRINK_TIME, |left| left.min(SHRINK_TIME));
        let mut fails = |case: &Case| {
            let judged = (started.elapsed() < most).then(|| judge(self.pair, property, case).err()).flatten();
            judged.map(|failure| last = failure).is_some()
        };
        let case = if shrinks { shrink(tree, &mut fails) } else { tree.current() };
        let reason = Some(last.to_string());
        PropertyReport { counterexample: Some(case), ..outcome(property, run, Verdict::Failed, reason, native) }
    }

    /// Runs the case through the frameworks' own method and counts the outcome.
    fn beside(&self, property: &Property, case: &Case, native: &mut Option<Native>) {
        let Some(method) = self.pair.native.as_ref().filter(|_| self.config.native && property.native) else { return };
        // Compared only where it can be right: native methods know no copies and no recorded streams, and some abort on
        // unusual strides.
        let spec = model::compact(&case.spec);
        let case = Case { spec, copy: None, route: Route::Direct, ..case.clone() };
        let missing = Cell::new(false);
        let result = property.check_with(self.pair, &case, &|tensor| {
            method(tensor).unwrap_or_else(|| {
                missing.set(true);
                Err(Error::new(ErrorKind::Missing, "there is no native method"))
            })
        });
        let checked = self.pair.from.check().and(self.pair.to.check());
        if result.is_err() {
            self.pair.recover();
        }
        if missing.get() {
            return;
        }
        let count = native.get_or_insert_default();
        count.cases += 1;
        match result {
            Err(Failure { refused: Some(_), .. }) => count.refused += 1,
            Err(_) => count.wrong += 1,
            Ok(()) if checked.is_err() => count.wrong += 1,
            Ok(()) => (),
        }
    }
}

fn outcome(
    property: &Property,
    cases: u32,
    verdict: Verdict,
    reason: Option<String>,
    native: Option<Native>,
) -> PropertyReport {
    PropertyReport { native, ..PropertyReport::new(property.name, cases, verdict, reason) }
}
