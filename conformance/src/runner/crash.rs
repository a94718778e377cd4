//! The smallest case that still kills a process.

use super::job::{At, Job};
use super::progress::Progress;
use crate::protocol::Message;
use crate::watch::{Ending, Patience, Watch};
use crate::{Case, REPLAYED, Regression, Sides, property, tree};
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

/// The most steps: each starts a process and loads its frameworks.
const STEPS: u32 = 100;

/// What the report says of a crash in a case that a fresh process passes.
const ALONE: &str = "; alone in a process the case passes, so an earlier case may have freed memory that is still used: run \
                     the pair again with the same seed";

/// Shrinks the case in which a worker died, by running smaller ones in their own processes for as long as `left`.
/// Returns the smallest that was found, and a note for the reason.
pub fn shrink(
    job: &Job<'_>,
    ending: Ending,
    at: &At,
    sides: Option<&Sides>,
    left: Duration,
    progress: &Progress,
) -> (Case, String) {
    let as_it_was = |note: &str| (at.case.clone(), note.to_owned());
    let (Some(sides), Some(property)) = (sides, property(&at.property)) else { return as_it_was("") };
    if matches!(ending, Ending::Silent(_) | Ending::Overdue(_)) || at.index == REPLAYED {
        return as_it_was("");
    }
    let out_of_time = "; no time was left to shrink the case";
    if left.is_zero() {
        return as_it_was(out_of_time);
    }
    let seconds = left.as_secs_f64().ceil();
    let pair = job.pair.arrow();
    progress.note(&format!("{pair}: {ending} in {}; shrinking the case, for at most {seconds} s", at.property));
    let started = Instant::now();
    let dies = |case: &Case| match left.saturating_sub(started.elapsed()) {
        Duration::ZERO => None,
        left => dies(job, at, case, left).unwrap_or(Some(false)),
    };
    match dies(&at.case) {
        None => return as_it_was(out_of_time),
        Some(false) => return as_it_was(ALONE),
        Some(true) => (),
    }
    let tree = tree(property, sides, job.seed, at.index);
    if tree.current() != at.case {
        return as_it_was("; the case could not be made again here, so it is not shrunk");
    }
    let (mut steps, mut late) = (0, false);
    let smallest = crate::shrink(tree, &mut |case| {
        steps += 1;
        let died = if steps <= STEPS { dies(case) } else { Some(false) };
        late |= died.is_none();
        died.unwrap_or(false)
    });
    let note = if late { "; a smaller case may fail, too: the time for shrinking was over" } else { "" };
    (smallest, note.into())
}

/// Returns whether a process that runs this case dies; `None` where it does not end in time.
fn dies(job: &Job<'_>, at: &At, case: &Case, left: Duration) -> io::Result<Option<bool>> {
    let file = job.options.report.join(format!("shrinking-{}-{}.json", job.pair.from, job.pair.to));
    let (from, to) = (job.pair.from.clone(), job.pair.to.clone());
    let one = Regression { from, to, property: at.property.clone(), case: case.clone() };
    fs::create_dir_all(&job.options.report)?;
    fs::write(&file, serde_json::to_string(&one)?)?;
    let ended = replay_within(job, &file, Patience { whole: left.min(job.patience.whole), ..job.patience });
    fs::remove_file(&file)?;
    Ok(match ended? {
        Replay::Died(Ending::Overdue(_), _) => None,
        Replay::Died(ending, _) => Some(!matches!(ending, Ending::Silent(_))),
        Replay::Ran(_) | Replay::Refused(_) => Some(false),
    })
}

/// The outcome of one case in its own process.
#[derive(Debug, PartialEq, Eq)]
pub enum Replay {
    /// It ran to its end: why it failed, if it did.
    Ran(Option<String>),
    /// It could not be run, and why.
    Refused(String),
    /// The process died, how, and its last words.
    Died(Ending, String),
}

/// Runs the case in `file` in its own process.
///
/// # Errors
///
/// The process does not start.
pub fn replay(job: &Job<'_>, file: &Path) -> io::Result<Replay> {
    replay_within(job, file, job.patience)
}

fn replay_within(job: &Job<'_>, file: &Path, patience: Patience) -> io::Result<Replay> {
    let program = job.worker([OsString::from("--replay"), file.into()]);
    let mut watch = Watch::start(&program, &job.environment(), patience)?;
    let mut result = None;
    loop {
        match watch.next() {
            Ok(Message::Replayed(failure)) => result = Some(Replay::Ran(failure)),
            Ok(Message::Refused(reason)) => result = Some(Replay::Refused(reason)),
            Ok(_) => (),
            Err(Ending::Exit(0)) if result.is_some() => return Ok(result.unwrap_or(Replay::Ran(None))),
            Err(ending) => return Ok(Replay::Died(ending, watch.last_words())),
        }
    }
}
