//! Messages of a worker to the runner: one JSON object a line.

use crate::{Case, Observer, PropertyReport, Sides};
use serde::{Deserialize, Serialize};

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// The frameworks are loaded.
    Hello(Box<Sides>),
    /// The worker cannot judge this pair, and why.
    Refused(String),
    /// A case begins: should the worker die now, this case did it.
    Started {
        /// The property.
        property: String,
        /// The number of the case.
        index: u32,
        /// The case.
        case: Case,
    },
    /// A property is done.
    Finished(PropertyReport),
    /// The requested case has run: why it failed, if it did.
    Replayed(Option<String>),
    /// Everything is done.
    Done,
}

/// Sends what it observes.
pub struct Sender<'a>(pub &'a mut dyn FnMut(Message));

impl Observer for Sender<'_> {
    fn started(&mut self, property: &str, index: u32, case: &Case) {
        (self.0)(Message::Started { property: property.into(), index, case: case.clone() });
    }

    fn finished(&mut self, report: &PropertyReport) {
        (self.0)(Message::Finished(report.clone()));
    }
}
