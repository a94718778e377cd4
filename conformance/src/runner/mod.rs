//! The runner of the suite: every pair in its own process, then the reports.
//!
//! It starts workers, which are this same program with `--worker`, and reads their messages. It loads no framework, so
//! that it survives when one aborts its process.

mod adapters;
mod crash;
mod job;
mod options;
mod pair;
mod peers;
mod planted;
mod progress;
mod sanitizer;
mod variants;
mod worker;

pub use crate::names::PairName;
pub use crate::protocol::Message;
pub use adapters::{Known, Library, NUMPY_INTERFACE, TORCH_CAPSULES, known};
pub use options::{Choice, Options};
pub use peers::{PEERS, Peer};
pub use sanitizer::Sanitizer;
pub use variants::{VARIANTS, Variant};
pub use worker::work;

use crate::expect::{self, read_expectations};
use crate::properties::SUBJECT;
use crate::report::{GitHub, Host, LeftOut, Report, SCHEMA, Summary, quoted};
use crate::sim::run_faults;
use crate::watch::Patience;
use crate::{Expectation, PairReport, Regression, Verdict, words};
use bridge_core::Device;
use crash::Replay;
use job::Job;
use progress::{Display, Progress};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

/// The exit code for bad usage, and for a run that could not begin.
const USAGE: i32 = 2;

/// A worker that is silent for this time hangs: loading a framework from a cold disk takes the longest.
const SILENCE: Duration = Duration::from_secs(180);
/// The most time for a pair, whatever its budget.
const WHOLE: Duration = Duration::from_secs(1800);
/// How much longer than its time budget a run may take, where a tenth of it is less.
const OVERTIME: Duration = Duration::from_secs(20);
/// What of that is for ending the workers and writing the reports.
const SPARE: Duration = Duration::from_secs(5);
/// How long a worker may take, without a sanitizer.
const USUAL: Patience = Patience { silence: SILENCE, whole: WHOLE, shrinking: Duration::from_secs(60) };

/// The surroundings of the runner.
pub struct Surroundings {
    /// The program of a worker, and its first arguments.
    pub launch: Vec<OsString>,
    /// The folder of expectations and regressions, unless `--fixtures` names another.
    pub fixtures: PathBuf,
    /// The host.
    pub host: Host,
    /// The job of GitHub Actions that the run belongs to, if it does.
    pub github: Option<GitHub>,
}

bridge_core::debug_fields!(impl[] Surroundings: launch, fixtures, github);

/// Runs what the options request, prints and writes the reports. Returns the exit code: 0 if everything that ran
/// passed.
pub fn run(mut options: Options, around: &Surroundings) -> i32 {
    options.fixtures.get_or_insert_with(|| around.fixtures.clone());
    let begun = match &options.replay {
        Some(file) => replay(&options, around, &file.clone()),
        None => Suite::new(&options, around).and_then(|suite| suite.run(&prepare(&options)?)),
    };
    begun.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        USAGE
    })
}

struct Suite<'a> {
    options: &'a Options,
    around: &'a Surroundings,
    expectations: Vec<Expectation>,
    pairs: Vec<PairName>,
    /// The report of an earlier run, and its file.
    baseline: Option<(Report, &'a Path)>,
    report: Report,
    started: Instant,
}

impl<'a> Suite<'a> {
    /// # Errors
    ///
    /// Why the run cannot begin.
    fn new(options: &'a Options, around: &'a Surroundings) -> Result<Self, String> {
        let device = options.device.resolve(around.host.gpus.len())?;
        if !options.adapters.is_empty() && !options.pairs.is_empty() {
            return Err("--pairs says which pairs run, and --adapters another choice: leave one of them out".into());
        }
        let (pairs, left_out) = match options.wants_pairs() {
            true => adapters::select(options, device, &around.host)?,
            false => Default::default(),
        };
        // Left out, it would be missing from a run that passes.
        if let Some(LeftOut { adapter, reason }) = left_out.iter().find(|left| options.names(&left.adapter)) {
            return Err(format!("{adapter} is named and cannot run: {reason}"));
        }
        if let Some(pair) = options.pairs.iter().find(|named| !pairs.iter().any(|pair| options.chooses(pair, named))) {
            return Err(format!("{pair} cannot run: {}", adapters::obstacle(pair)));
        }
        if pairs.is_empty() && !options.faults {
            let reasons: Vec<_> = left_out.iter().map(|left| format!("; {}: {}", left.adapter, left.reason)).collect();
            return Err(format!("there is nothing to run{}", reasons.concat()));
        }
        let expectations = expectations(options.fixtures.as_deref().unwrap_or(&around.fixtures))?;
        let report = Report {
            schema: SCHEMA,
            host: around.host.clone(),
            device: device.to_string(),
            seed: options.seed.unwrap_or_else(random_seed),
            cases: options.cases.unwrap_or(match options.sanitizer {
                Some(_) => sanitizer::CASES,
                None => crate::WHOLE,
            }),
            command: options.command.clone().unwrap_or_else(|| command(&around.launch)),
            left_out,
            ..Report::default()
        };
        let read = |path: &'a PathBuf| Ok::<_, String>((baseline(path, &report.device)?, path.as_path()));
        let baseline = options.baseline.as_ref().map(read).transpose()?;
        Ok(Self { options, around, expectations, pairs, baseline, report, started: Instant::now() })
    }

    /// Keeps cases that fail in `kept`, and removes those that pass now.
    fn run(mut self, kept: &Path) -> Result<i32, String> {
        println!("device {}, seed {}", self.report.device, self.report.seed);
        if self.options.faults {
            self.faults();
        }
        let (pairs, late) = self.judged(kept)?;
        self.report.pairs = pairs;
        if !late.is_empty() {
            let adapter = words::counted(late.len(), "pair");
            let reason = format!("the time was over: {}", late.join(", "));
            self.report.left_out.push(LeftOut { adapter, reason });
        }
        if self.options.wants_pairs() {
            self.report.stale = expect::stale(&self.expectations, &adapters::names(), &self.report.pairs);
        }
        self.report.sum_up();
        if let Some((earlier, path)) = &self.baseline {
            self.report.compare(earlier, path);
        }
        let written = self.report.write(&self.options.report);
        let text = if self.options.verbose { self.report.markdown() } else { self.report.text() };
        println!("\n{text}");
        written.map_err(|error| unwritable(&self.options.report, &error))?;
        println!("reports are in {}", self.options.report.display());
        if let Some(github) = &self.around.github {
            self.report.annotations().iter().for_each(|line| println!("{line}"));
            github.summarise(&self.report).map_err(|error| error.to_string())?;
        }
        if let Some(comparison) = &self.report.comparison {
            comparison.worse.iter().for_each(|line| println!("worse: {line}"));
            comparison.as_before.iter().for_each(|line| println!("as before: {line}"));
            println!("{}", comparison.heading());
        }
        let Summary { passed, failed, .. } = self.report.summary;
        println!("{passed} passed, {failed} failed");
        Ok(self.report.exit_code())
    }

    /// Judges the pairs, as many at once as the options say. Returns their reports in the order of the pairs, and those
    /// that no time was left for.
    ///
    /// # Errors
    ///
    /// A case cannot be kept.
    fn judged(&self, kept: &Path) -> Result<(Vec<PairReport>, Vec<String>), String> {
        let next = AtomicUsize::new(0);
        let started = self.started;
        let jobs = usize::from(self.options.jobs).min(self.pairs.len());
        let one = |index: usize, pair: &PairName| {
            let left = self.options.time_budget.map(|whole| {
                let left = Duration::from_secs(whole).saturating_sub(started.elapsed());
                // Those that run at once share no time.
                left / (self.pairs.len() - index).div_ceil(jobs) as u32
            });
            if left.is_some_and(|left| left.is_zero()) {
                return Ok((index, None));
            }
            let mut judged = self.pair(pair, left)?;
            keep(&mut judged, kept).map_err(|error| error.to_string())?;
            Ok((index, Some(judged)))
        };
        let take = || {
            let index = next.fetch_add(1, Relaxed);
            self.pairs.get(index).map(|pair| one(index, pair))
        };
        let done: Result<Vec<_>, String> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..jobs).map(|_| scope.spawn(|| std::iter::from_fn(take).collect::<Vec<_>>())).collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("a thread of the runner does not panic"))
                .collect()
        });
        let mut done = done?;
        done.sort_by_key(|(index, _)| *index);
        let late = done.iter().filter(|(_, judged)| judged.is_none()).map(|(index, _)| self.pairs[*index].arrow());
        let late = late.collect();
        Ok((done.into_iter().filter_map(|(_, judged)| judged).collect(), late))
    }

    fn faults(&mut self) {
        let started = Instant::now();
        // The device was made a text in `new`.
        let device = self.report.device.parse().unwrap_or(Device::CPU);
        let (launch, host, seed) = (&self.around.launch, &self.around.host, self.report.seed);
        self.report.faults = match self.options.across_processes {
            true => planted::run(launch, host, device, seed, self.options),
            false => {
                // A fault may cause a panic, which is one of the paths in which it is caught.
                let hook = std::panic::take_hook();
                std::panic::set_hook(Box::new(|_| ()));
                let faults = run_faults(self.report.seed);
                std::panic::set_hook(hook);
                let real =
                    cfg!(feature = "planted").then(|| planted::run_real(launch, host, device, seed, self.options));
                faults.into_iter().chain(real.into_iter().flatten()).collect()
            }
        };
        let faults = &self.report.faults;
        let caught = faults.iter().filter(|fault| fault.is_caught()).count();
        println!("{caught} of {} planted faults caught in {:.1} s", faults.len(), started.elapsed().as_secs_f64());
    }

    fn display(&self) -> Display {
        let width = self.pairs.iter().map(|pair| pair.arrow().chars().count()).max();
        let bars = self.options.jobs == 1;
        Display { width: width.unwrap_or_default(), verbose: self.options.verbose, bars }
    }

    /// Returns how long a worker may take. The run ends soon after its time.
    fn patience(&self) -> Patience {
        let Patience { silence, whole, shrinking } = patience(self.options);
        let left = self.options.time_budget.map_or(whole, |seconds| {
            let seconds = Duration::from_secs(seconds);
            (seconds + (seconds / 10).max(OVERTIME) - SPARE).saturating_sub(self.started.elapsed())
        });
        Patience { silence, whole: whole.min(left), shrinking: shrinking.min(left) }
    }

    /// # Errors
    ///
    /// The device does not read back, which would be a mistake in this file.
    fn pair(&self, pair: &PairName, budget: Option<Duration>) -> Result<PairReport, String> {
        let device: Device = self.report.device.parse().map_err(|error| format!("{error}"))?;
        let job = Job {
            launch: &self.around.launch,
            pair,
            device,
            cases: self.report.cases,
            seed: self.report.seed,
            budget,
            patience: self.patience(),
            options: self.options,
        };
        let progress = Progress::new(pair, self.display());
        let mut judged = job.judge(&progress);
        expect::apply(&self.expectations, &mut judged);
        progress.finish(&judged);
        Ok(judged)
    }
}

/// Returns how long a worker may take.
fn patience(options: &Options) -> Patience {
    if options.sanitizer.is_some() { Sanitizer::patience(USUAL) } else { USUAL }
}

/// Makes the folder of the reports, and tries what would lose the results after the run. Returns the folder of the kept
/// cases.
///
/// # Errors
///
/// Reports cannot be written there, or a kept case cannot be read.
fn prepare(options: &Options) -> Result<PathBuf, String> {
    let folder = &options.report;
    let probe = folder.join(format!(".writable-{}", std::process::id()));
    let tried = fs::create_dir_all(folder).and_then(|()| fs::write(&probe, "")).and_then(|()| fs::remove_file(&probe));
    tried.map_err(|error| unwritable(folder, &error))?;
    let kept = folder.join("regressions");
    Regression::read_all(&kept)
        .map_err(|error| format!("a kept case cannot be read, correct or remove it: {error}"))?;
    // A user who gave no command may run the one in a report from any folder.
    if options.command.is_none() { std::path::absolute(&kept).map_err(|error| error.to_string()) } else { Ok(kept) }
}

fn unwritable(folder: &Path, error: &io::Error) -> String {
    format!("reports cannot be written to {} ({error}): name another folder with --report", folder.display())
}

/// Writes the cases that failed to the folder, and removes those from it that pass now.
fn keep(judged: &mut PairReport, kept: &Path) -> io::Result<()> {
    for case in failing_cases(judged) {
        let written = case.write(kept)?;
        println!("the case is kept: {}", written.display());
        let failed = judged.properties.iter_mut().find(|property| property.name == case.property);
        failed.into_iter().for_each(|property| property.kept = Some(written.clone()));
    }
    let before = Regression::read_all(kept)?;
    for removed in before.iter().filter(|case| passes(judged, case)).filter_map(|case| case.remove(kept)) {
        println!("the case passes now, and is removed: {}", removed.display());
    }
    Ok(())
}

/// Runs the one case of a file in its own process.
fn replay(options: &Options, around: &Surroundings, file: &Path) -> Result<i32, String> {
    let one = Regression::read(file).map_err(|error| format!("the case cannot be read: {error}"))?;
    let job = Job {
        launch: &around.launch,
        pair: &PairName { from: one.from, to: one.to },
        device: options.device.resolve(around.host.gpus.len())?,
        cases: 1,
        seed: 0,
        budget: None,
        patience: patience(options),
        options,
    };
    let failure = match crash::replay(&job, file).map_err(|error| error.to_string())? {
        Replay::Refused(reason) => return Err(reason),
        Replay::Ran(failure) => failure,
        Replay::Died(ending, last_words) => Some(format!("{ending} {last_words}")),
    };
    match &failure {
        None => println!("{}, {}: passed", job.pair, one.property),
        Some(failure) => println!("{}, {}: FAILED: {failure}", job.pair, one.property),
    }
    let failed = i32::from(failure.is_some());
    println!("{} passed, {failed} failed", 1 - failed);
    Ok(failed)
}

/// Returns the cases that later runs replay first. One of a subject that does not do what the suite relies on says
/// nothing about an adapter.
fn failing_cases(report: &PairReport) -> Vec<Regression> {
    let failing = report.properties.iter().filter(|property| property.verdict.is_failure() && property.name != SUBJECT);
    let kept = |property: &crate::PropertyReport| {
        let (from, to) = (report.from.clone(), report.to.clone());
        Some(Regression { from, to, property: property.name.clone(), case: property.counterexample.clone()? })
    };
    failing.filter_map(kept).collect()
}

/// Returns whether the property of a kept case has passed, of which its case was the first.
fn passes(report: &PairReport, case: &Regression) -> bool {
    let passed = |property: &&crate::PropertyReport| property.verdict == Verdict::Passed;
    report.properties.iter().filter(passed).any(|property| case.is_about(report, &property.name))
}

/// Returns how a worker's program is called, for the commands in reports: the interpreter and the script by their whole
/// paths, so that the command works in any folder and with the frameworks that were judged.
fn command(launch: &[OsString]) -> String {
    launch.iter().map(|word| quoted(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

/// # Errors
///
/// The file cannot be read, or is of another device.
fn baseline(path: &Path, device: &str) -> Result<Report, String> {
    let earlier = Report::read(path).map_err(|error| error.to_string())?;
    let text = || format!("{} is a report of {}, and this run is on {device}", path.display(), earlier.device);
    (earlier.device == device).then_some(()).ok_or_else(text)?;
    Ok(earlier)
}

fn expectations(fixtures: &Path) -> Result<Vec<Expectation>, String> {
    match read_expectations(&fixtures.join("expectations.json")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.map_err(|error| error.to_string()),
    }
}

/// Returns a seed that differs each time and is short enough to type.
fn random_seed() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as u64 % 1_000_000_000
}

#[cfg(test)]
mod tests;
