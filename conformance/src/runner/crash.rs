//! The smallest case that still kills a process.

use super::pair::{At, Job};
use super::progress::Progress;
use super::protocol::Message;
use super::watch::{Ending, Watch};
use crate::{Case, REPLAYED, Regression, Sides, property, tree};
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

/// The most steps: each starts a process and loads its frameworks.
const STEPS: u32 = 100;
/// The time for all of them.
const TIME: Duration = Duration::from_secs(120);

/// Shrinks the case in which a worker died, by running smaller ones in processes of their own. Returns the smallest,
/// and a note for the reason.
pub fn shrink(
    job: &Job<'_>,
    ending: Ending,
    at: &At,
    sides: Option<&Sides>,
    progress: &Progress,
) -> (Case, &'static str) {
    let as_it_was = |note| (at.case.clone(), note);
    let (Some(sides), Some(property)) = (sides, property(&at.property)) else { return as_it_was("") };
    if matches!(ending, Ending::Silent(_) | Ending::Overdue(_)) || at.index == REPLAYED {
        return as_it_was("");
    }
    progress.detail(&format!("{}: {ending} in {}, shrinking the case", job.pair, at.property));
    if !dies(job, at, &at.case).unwrap_or(false) {
        return as_it_was("; alone in a process the case does no harm");
    }
    let tree = tree(property, sides, job.seed, at.index);
    if tree.current() != at.case {
        return as_it_was("; the case could not be made again here, so it is not shrunk");
    }
    let (mut steps, started) = (0, Instant::now());
    let smallest = crate::shrink(tree, &mut |case| {
        steps += 1;
        steps <= STEPS && started.elapsed() < TIME && dies(job, at, case).unwrap_or(false)
    });
    (smallest, "")
}

/// Returns whether a process that runs this case dies.
fn dies(job: &Job<'_>, at: &At, case: &Case) -> io::Result<bool> {
    let file = job.options.report.join(format!("shrinking-{}-{}.json", job.pair.from, job.pair.to));
    let (from, to) = (job.pair.from.clone(), job.pair.to.clone());
    let one = Regression { from, to, property: at.property.clone(), case: case.clone() };
    fs::create_dir_all(&job.options.report)?;
    fs::write(&file, serde_json::to_string(&one)?)?;
    let ended = replay(job, &file);
    fs::remove_file(&file)?;
    Ok(matches!(ended?, Replay::Died(_)))
}

/// The outcome of one case in a process of its own.
#[derive(Debug, PartialEq, Eq)]
pub enum Replay {
    /// It ran to its end: why it failed, if it did.
    Ran(Option<String>),
    /// It could not be run, and why.
    Refused(String),
    /// The process died, and how.
    Died(String),
}

/// Runs the case in `file` in a process of its own.
///
/// # Errors
///
/// The process does not start.
pub fn replay(job: &Job<'_>, file: &Path) -> io::Result<Replay> {
    let program = job.worker([OsString::from("--replay"), file.into()]);
    let mut watch = Watch::start(&program, &job.environment(), job.patience)?;
    let mut result = None;
    loop {
        match watch.next() {
            Ok(Message::Replayed(failure)) => result = Some(Replay::Ran(failure)),
            Ok(Message::Refused(reason)) => result = Some(Replay::Refused(reason)),
            Ok(_) => (),
            Err(Ending::Exit(0)) if result.is_some() => return Ok(result.unwrap_or(Replay::Ran(None))),
            Err(ending) => return Ok(Replay::Died(format!("{ending} {}", watch.last_words()))),
        }
    }
}
