//! What the two processes say to each other: a request, then its answer. Elements follow a message as plain bytes.

use crate::{Capabilities, Observed, Spec};
use bridge_core::{DType, Device, Error, ErrorKind, Profile, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};

/// The number of a tensor of the other process.
pub(super) type Id = u64;

/// A method of `Subject` or `Adapter`, in the other process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    Hello,
    /// With the bytes of the base buffer.
    Create(Spec),
    Allocate(usize),
    /// `Adapter::empty`, row by row.
    Empty(DType, Vec<i64>),
    /// `Adapter::import` of what this ticket opens.
    Open(String),
    /// `Adapter::export`.
    Share(Id),
    Observe(Id),
    Read(Id),
    /// With the elements.
    Write(Id),
    Fill(Id, u8),
    Note(Id),
    Snapshot {
        from: Id,
        into: Id,
    },
    Drop(Id),
    DropOnThread(Id),
    /// Begins `Subject::on_stream`, whose body ends with `Leave`.
    Enter(u64),
    /// Begins `Subject::on_fresh_stream`, whose body ends with `Leave`.
    EnterFresh {
        external: bool,
    },
    Leave,
    Delay,
    Settle,
    Check,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Hello(Box<Hello>),
    Made(Made),
    Observed(Observed),
    /// With the elements.
    Elements,
    Used(usize),
    Done,
    Failed(ErrorKind, String),
}

/// The subject of the other process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) profile: Profile,
    pub(super) device: Device,
    pub(super) can: Capabilities,
    /// The handles of its streams.
    pub(super) streams: Vec<u64>,
}

/// A tensor of the other process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Made {
    pub(super) id: Id,
    /// `None` for memory of a device that the process which asks has exported itself.
    pub(super) ticket: Option<String>,
    /// Address of the first element in that process.
    pub(super) address: usize,
}

impl From<Error> for Answer {
    fn from(error: Error) -> Self {
        Self::Failed(error.kind(), error.to_string())
    }
}

impl From<Result<()>> for Answer {
    fn from(result: Result<()>) -> Self {
        result.map_or_else(Self::from, |()| Self::Done)
    }
}

/// Sends a message, and what follows it.
pub(super) fn send(to: &mut dyn Write, message: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    for length in [text.len(), bytes.len()] {
        to.write_all(&(length as u64).to_le_bytes())?;
    }
    to.write_all(&text)?;
    to.write_all(bytes)?;
    to.flush()
}

/// Receives a message, and what follows it.
pub(super) fn receive<M: DeserializeOwned>(from: &mut dyn Read) -> io::Result<(M, Vec<u8>)> {
    let mut lengths = [[0; 8]; 2];
    lengths.iter_mut().try_for_each(|length| from.read_exact(length))?;
    let [mut text, mut bytes] = lengths.map(|length| vec![0; u64::from_le_bytes(length) as usize]);
    from.read_exact(&mut text)?;
    from.read_exact(&mut bytes)?;
    Ok((serde_json::from_slice(&text)?, bytes))
}
