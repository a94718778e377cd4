//! One pair, judged in this process.

use super::options::Options;
use super::protocol::{Message, Sender};
use crate::{Config, Regression, Subject, caps, certify, property, replay};
use bridge_core::Ordering;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Judges the pair, or runs the one case that is asked for, and tells what happens.
pub fn work<A: Subject, B: Subject<Tensor = A::Tensor>>(
    from: &A,
    to: &B,
    ordering: &Arc<dyn Ordering>,
    options: &Options,
    send: &mut dyn FnMut(Message),
) {
    match prepare(options) {
        Err(reason) => send(Message::Refused(reason)),
        Ok(Task::One(one)) => {
            let property = property(&one.property).expect("prepare has looked it up");
            let failure = replay(from, to, ordering, property, &one.case).err();
            send(Message::Replayed(failure.map(|failure| failure.to_string())));
            send(Message::Done);
        }
        Ok(Task::All(config, known)) => {
            send(Message::Hello(caps(from, to)));
            certify(from, to, ordering, &config, &known, &mut Sender(send));
            send(Message::Done);
        }
    }
}

enum Task {
    One(Regression),
    All(Config, Vec<Regression>),
}

fn prepare(options: &Options) -> Result<Task, String> {
    let io = |error: std::io::Error| error.to_string();
    if let Some(file) = &options.replay {
        let one = Regression::read(file).map_err(io)?;
        let known = property(&one.property).is_some();
        return known.then_some(()).ok_or(format!("there is no property {:?}", one.property)).map(|()| Task::One(one));
    }
    let mut known = Vec::new();
    for folder in regressions(options) {
        known.extend(Regression::read_all(&folder).map_err(io)?);
    }
    let config = Config {
        cases: options.cases.unwrap_or(1000),
        seed: options.seed.unwrap_or_default(),
        time_budget: options.time_budget.map(Duration::from_secs),
        properties: (!options.properties.is_empty()).then(|| options.properties.clone()),
        native: true,
    };
    Ok(Task::All(config, known))
}

/// The folders that regressions are read from; new ones are written to the last.
pub fn regressions(options: &Options) -> Vec<PathBuf> {
    let places = [options.fixtures.as_deref(), Some(&options.report)];
    places.into_iter().flatten().map(|place: &Path| place.join("regressions")).collect()
}
