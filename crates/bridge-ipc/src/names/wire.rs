//! Messages about names. Their frames are those of tickets.

use crate::channel::Reply;
use crate::ticket::Ticket;
use crate::wire::{Why, is_not};
use serde::{Deserialize, Serialize};

/// The most bytes of a name.
const MAX_NAME: usize = 128;

/// Returns whether this is a valid name.
pub(super) fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && !name.contains(char::is_control)
}

/// Requests to a process that serves names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Puts a ticket under a name, which keeps its `keep` newest tickets; into a store that was started again, as the
    /// version that it was before.
    Put {
        name: String,
        ticket: Ticket,
        keep: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        version: Option<u64>,
    },
    /// Asks for the newest ticket of a name, or for one version.
    Get { name: String, version: Option<u64> },
    /// Asks for the newest ticket of a name as soon as there is one after this version.
    Wait { name: String, after: u64 },
    /// Removes a name.
    Remove { name: String },
    /// Asks for all names.
    List,
    /// Asks whether this is a store, and for its bytes.
    About,
}

/// Its answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Answer {
    /// The version; a store has taken the memory over, if it is `kept`.
    Stored {
        version: u64,
        #[serde(default, skip_serializing_if = "is_not")]
        persistent: bool,
    },
    /// A ticket; one of a store's own, if it is `kept`.
    Found {
        version: u64,
        ticket: Ticket,
        #[serde(default, skip_serializing_if = "is_not")]
        persistent: bool,
    },
    /// There is no such name, or no such version.
    Missing,
    Removed,
    Listed {
        names: Vec<Listed>,
    },
    About(About),
    Refused {
        why: Why,
    },
    /// A notice: no name stands any more for a ticket that this connection has put.
    Displaced {
        ticket: Ticket,
    },
}

/// What a process that serves names says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct About {
    /// Whether it is a store: what is put there belongs to it.
    pub persistent: bool,
    /// The bytes that it keeps.
    pub nbytes: usize,
    /// The most bytes that it keeps.
    pub limit: usize,
}

/// A name, and its newest ticket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Listed {
    /// The name.
    pub name: String,
    /// The newest version.
    pub version: u64,
    /// The description in its ticket.
    pub about: String,
}

impl Reply for Answer {
    fn refusal(&self) -> Option<Why> {
        match self {
            Self::Refused { why } => Some(*why),
            _ => None,
        }
    }

    fn is_notice(&self) -> bool {
        matches!(self, Self::Displaced { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One message a line, as another program would send it.
    #[test]
    fn messages_are_golden_ones() {
        let ticket: Ticket = include_str!("../../../../fixtures/ipc/ticket.json").parse().unwrap();
        let requests = [
            Request::Put { name: "weights".into(), ticket: ticket.clone(), keep: 2, version: None },
            Request::Put { name: "weights".into(), ticket: ticket.clone(), keep: 2, version: Some(4) },
            Request::Get { name: "weights".into(), version: None },
            Request::Get { name: "weights".into(), version: Some(3) },
            Request::Wait { name: "weights".into(), after: 3 },
            Request::Remove { name: "weights".into() },
            Request::List,
            Request::About,
        ];
        let answers = [
            Answer::Stored { version: 4, persistent: false },
            Answer::Stored { version: 4, persistent: true },
            Answer::Found { version: 4, ticket: ticket.clone(), persistent: false },
            Answer::Found { version: 4, ticket: ticket.clone(), persistent: true },
            Answer::Missing,
            Answer::Removed,
            Answer::Listed { names: vec![Listed { name: "weights".into(), version: 4, about: "1 tensor".into() }] },
            Answer::About(About { persistent: true, nbytes: 128, limit: 1 << 30 }),
            Answer::Refused { why: Why::Busy },
            Answer::Displaced { ticket },
        ];
        let lines = |lines: Vec<String>| lines.join("\n") + "\n";
        let requests = lines(requests.iter().map(|message| serde_json::to_string(message).unwrap()).collect());
        let answers = lines(answers.iter().map(|message| serde_json::to_string(message).unwrap()).collect());
        assert_eq!(requests + &answers, include_str!("../../../../fixtures/ipc/name_messages.jsonl"));
    }
}
