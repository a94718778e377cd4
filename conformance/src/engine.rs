//! Runs properties over a pair: cases, shrinking, the column of the native way, reports.

use crate::model::{self, Random};
use crate::properties::{Outcome, PROPERTIES, Pair, Property, outstanding};
use crate::{Caps, Case, Failure, Regression, Route, Side, Subject};
use bridge_core::{Error, ErrorKind, Ordering};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config as ProptestConfig, RngAlgorithm, TestRng, TestRunner};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How much is run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Cases of a pair, over all its properties.
    pub cases: u32,
    /// Seed of every case.
    pub seed: u64,
    /// Time for a pair; every property runs at least one case.
    pub time_budget: Option<Duration>,
    /// The properties to run; `None`: all.
    pub properties: Option<Vec<String>>,
    /// Whether the frameworks' own way is run beside ours, where there is one.
    pub native: bool,
}

/// What has become of a property.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every case passed.
    Passed,
    /// A case failed, or an expected failure passed.
    Failed,
    /// The process died in a case, or hung. Only who watches the process can tell.
    Crashed,
    /// A case failed, as the expectations say.
    Expected,
    /// It has no meaning for this pair.
    NotApplicable,
}

impl Verdict {
    /// Whether something is wrong that nobody expected.
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
    /// Cases that were run, the failing one included and those of shrinking not.
    pub cases: u32,
    /// What has become of it.
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

/// One ordered pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairReport {
    /// The source.
    pub from: String,
    /// The target.
    pub to: String,
    /// The device on which the source made its tensors.
    pub device: String,
    /// The properties that were asked for.
    pub properties: Vec<PropertyReport>,
}

impl PairReport {
    /// Whether no property failed unexpectedly.
    pub fn passed(&self) -> bool {
        self.properties.iter().all(|property| !property.verdict.is_failure())
    }
}

/// Is told how far a run has got.
pub trait Observer {
    /// A case begins; should the process die now, it was this one. `index` is the one that [`tree`] takes, or
    /// [`REPLAYED`].
    fn started(&mut self, property: &str, index: u32, case: &Case);
    /// A property is done.
    fn finished(&mut self, report: &PropertyReport);
}

/// Watches nothing.
impl Observer for () {
    fn started(&mut self, _: &str, _: u32, _: &Case) {}
    fn finished(&mut self, _: &PropertyReport) {}
}

/// The index of a case that comes from a regression and not from a seed.
pub const REPLAYED: u32 = u32::MAX;

/// At most so many cases are run to shrink one.
const SHRINK_STEPS: u32 = 400;

/// No further case is run to shrink one after this time: a case that waits for memory in vain takes long, and the runner
/// takes a worker for hung that says nothing for minutes.
const SHRINK_TIME: Duration = Duration::from_secs(60);

/// Leases are counted per process, so only one pair can be judged at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// What the strategies know of a pair.
pub fn caps<F, T>(from: &dyn Subject<Tensor = F>, to: &dyn Subject<Tensor = T>) -> Caps {
    Caps { from: Side::of(from), to: Side::of(to), device: from.device() }
}

/// The case with this number, and how it shrinks: the same for the same arguments in any process.
pub fn tree(property: &Property, caps: &Caps, seed: u64, index: u32) -> Box<dyn ValueTree<Value = Case>> {
    let mut random =
        property.name.bytes().fold(Random::new(seed), |mut random, byte| Random::new(random.bits() ^ u64::from(byte)));
    let mut random = Random::new(random.bits() ^ u64::from(index));
    let bytes: Vec<u8> = (0..4).flat_map(|_| random.bits().to_le_bytes()).collect();
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let tree = (property.strategy)(caps).new_tree(&mut TestRunner::new_with_rng(config, rng));
    tree.expect("the strategies reject nothing")
}

/// The smallest case that still fails, as far as a bounded search finds it. `tree` is at a case that fails.
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

/// Certifies the pair: runs every property on random cases, regressions first.
///
/// Both sides have one type of tensor here, so that the target's own import can be put beside the adapters
/// ([`Config::native`]) and beside ours ([`Route::Beside`]); [`certify_pair`] takes any two.
pub fn certify<A: Subject, B: Subject<Tensor = A::Tensor>>(
    from: &A,
    to: &B,
    ordering: &Arc<dyn Ordering>,
    config: &Config,
    regressions: &[Regression],
    observer: &mut dyn Observer,
) -> PairReport {
    let native = |tensor: &A::Tensor| to.import_natively(tensor);
    certify_pair(Pair { from, to, ordering, native: Some(&native) }, config, regressions, observer)
}

/// Certifies a pair of any two types of tensors.
pub fn certify_pair<F, T>(
    pair: Pair<'_, F, T>,
    config: &Config,
    regressions: &[Regression],
    observer: &mut dyn Observer,
) -> PairReport {
    let caps = caps(pair.from, pair.to);
    Run { pair, caps, config, shrinks: true }.all(regressions, observer)
}

/// Only says which properties fail: what planted faults are judged by.
pub(crate) fn failing<F, T>(pair: Pair<'_, F, T>, config: &Config) -> Vec<String> {
    let caps = caps(pair.from, pair.to);
    let report = Run { pair, caps, config, shrinks: false }.all(&[], &mut ());
    let failed = report.properties.into_iter().filter(|property| property.verdict == Verdict::Failed);
    failed.map(|property| property.name).collect()
}

/// Runs one case of one property.
///
/// # Errors
///
/// Why it failed.
pub fn replay<A: Subject, B: Subject<Tensor = A::Tensor>>(
    from: &A,
    to: &B,
    ordering: &Arc<dyn Ordering>,
    property: &Property,
    case: &Case,
) -> Result<(), Failure> {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let native = |tensor: &A::Tensor| to.import_natively(tensor);
    judge(&Pair { from, to, ordering, native: Some(&native) }, property, case)
}

/// Judges one case; a panic is a failure, and so is a lease that does not come back. After a failure both devices are
/// idle again.
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

struct Run<'a, F, T> {
    pair: Pair<'a, F, T>,
    caps: Caps,
    config: &'a Config,
    shrinks: bool,
}

impl<F, T> Run<'_, F, T> {
    fn all(&self, regressions: &[Regression], observer: &mut dyn Observer) -> PairReport {
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = |property: &&Property| {
            self.config.properties.as_ref().is_none_or(|names| names.iter().any(|name| name == property.name))
        };
        let applies = |property: &&Property| (property.left_out)(&self.caps).is_none();
        let chosen: Vec<_> = PROPERTIES.iter().filter(chosen).collect();
        let mut weights: u32 = chosen.iter().copied().filter(applies).map(|property| property.weight).sum();
        let (mut cases, mut time) = (self.config.cases, self.config.time_budget);
        let mut report = PairReport {
            from: self.caps.from.name.clone(),
            to: self.caps.to.name.clone(),
            device: self.caps.device.to_string(),
            properties: Vec::new(),
        };
        for property in chosen {
            let result = match (property.left_out)(&self.caps) {
                Some(reason) => outcome(property, 0, Verdict::NotApplicable, Some(reason.into()), None),
                None => {
                    // What is left is shared among those that are left, so nothing is lost by rounding or by haste.
                    let share = (u64::from(cases) * u64::from(property.weight)).div_ceil(u64::from(weights)) as u32;
                    let slice = time.map(|time| time * property.weight / weights);
                    let start = Instant::now();
                    let known = regressions.iter().filter(|known| known.is_about(&report, property.name));
                    let result = self.one(property, share.max(1), slice, known, observer);
                    (cases, weights) = (cases - share.min(cases), weights - property.weight);
                    time = time.map(|time| time.saturating_sub(start.elapsed()));
                    result
                }
            };
            observer.finished(&result);
            report.properties.push(result);
        }
        report
    }

    fn one<'r>(
        &self,
        property: &Property,
        cases: u32,
        time: Option<Duration>,
        known: impl Iterator<Item = &'r Regression>,
        observer: &mut dyn Observer,
    ) -> PropertyReport {
        let start = Instant::now();
        let mut native = None;
        let mut run = 0;
        for Regression { case, .. } in known {
            observer.started(property.name, REPLAYED, case);
            run += 1;
            if let Err(failure) = judge(&self.pair, property, case) {
                let reason = format!("a regression is back: {failure}");
                return PropertyReport {
                    counterexample: Some(case.clone()),
                    ..outcome(property, run, Verdict::Failed, Some(reason), native)
                };
            }
        }
        for index in 0..cases {
            if index > 0 && time.is_some_and(|time| start.elapsed() > time) {
                break;
            }
            let tree = tree(property, &self.caps, self.config.seed, index);
            let case = tree.current();
            observer.started(property.name, index, &case);
            run += 1;
            if let Err(failure) = judge(&self.pair, property, &case) {
                return self.failed(property, run, tree, failure, native);
            }
            self.beside(property, &case, &mut native);
        }
        outcome(property, run, Verdict::Passed, None, native)
    }

    fn failed(
        &self,
        property: &Property,
        run: u32,
        tree: Box<dyn ValueTree<Value = Case>>,
        failure: Failure,
        native: Option<Native>,
    ) -> PropertyReport {
        let (mut last, started) = (failure, Instant::now());
        let mut fails = |case: &Case| {
            let judged = (started.elapsed() < SHRINK_TIME).then(|| judge(&self.pair, property, case).err()).flatten();
            judged.map(|failure| last = failure).is_some()
        };
        let case = if self.shrinks { shrink(tree, &mut fails) } else { tree.current() };
        let reason = Some(last.to_string());
        PropertyReport { counterexample: Some(case), ..outcome(property, run, Verdict::Failed, reason, native) }
    }

    /// Runs the case through the frameworks' own way and counts what comes of it.
    fn beside(&self, property: &Property, case: &Case, native: &mut Option<Native>) {
        let Some(way) = self.pair.native.filter(|_| self.config.native && property.native) else { return };
        // It is compared where it can be right: native ways know no copies and no notes, and strange strides kill some.
        let spec = model::compact(&case.spec);
        let case = Case { spec, copy: None, route: Route::Direct, ..case.clone() };
        let missing = Cell::new(false);
        let result = property.check_with(&self.pair, &case, &|tensor| {
            way(tensor).unwrap_or_else(|| {
                missing.set(true);
                Err(Error::new(ErrorKind::Missing, "there is no native way"))
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
    PropertyReport { name: property.name.into(), cases, verdict, reason, native, counterexample: None }
}
