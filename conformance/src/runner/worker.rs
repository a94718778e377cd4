//! One pair, judged in this process.

use super::options::Options;
use crate::protocol::{Message, Sender};
use crate::{Config, Pair, Regression, property, replay};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Judges the pair, or runs the one case of `--replay`, and sends messages about it.
pub fn work<F, T>(pair: &Pair<'_, F, T>, options: &Options, send: &mut dyn FnMut(Message)) {
    match prepare(options) {
        Err(reason) => send(Message::Refused(reason)),
        Ok(Task::One(one)) => {
            let property = property(&one.property).expect("prepare has looked it up");
            let failure = replay(pair, property, &one.case).err();
            send(Message::Replayed(failure.map(|failure| failure.to_string())));
            send(Message::Done);
        }
        Ok(Task::All(config)) => {
            send(Message::Hello(Box::new(pair.sides())));
            config.certify_pair(pair, &mut Sender(send));
            send(Message::Done);
        }
    }
}

enum Task {
    One(Regression),
    All(Config),
}

fn prepare(options: &Options) -> Result<Task, String> {
    let io = |error: std::io::Error| error.to_string();
    if let Some(file) = &options.replay {
        let one = Regression::read(file).map_err(io)?;
        let known = property(&one.property).is_some();
        return known.then_some(()).ok_or(format!("there is no property {:?}", one.property)).map(|()| Task::One(one));
    }
    let mut known = Vec::new();
    for folder in folders(options) {
        known.extend(Regression::read_all(&folder).map_err(io)?);
    }
    let config = Config {
        cases: options.cases.unwrap_or(1000),
        seed: options.seed.unwrap_or_default(),
        time_budget: options.until.map(|until| Duration::from_millis(until.saturating_sub(now()))),
        properties: (!options.properties.is_empty()).then(|| options.properties.clone()),
        // The frameworks' own method may use freed memory, which says nothing about the adapters.
        native: options.sanitizer.is_none(),
        regressions: known,
        shrinks: options.plant.is_none(),
        ..Config::default()
    };
    Ok(Task::All(config))
}

/// Returns the milliseconds of the Unix epoch.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Returns the folders of regressions.
fn folders(options: &Options) -> Vec<PathBuf> {
    let places = [options.fixtures.as_deref(), Some(&options.report)];
    places.into_iter().flatten().map(|place: &Path| place.join("regressions")).collect()
}
