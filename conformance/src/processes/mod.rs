//! A framework in another process, as a subject: its tensors are converted by tickets of `bridge-ipc`.
//!
//! [`Remote`] is the subject in the process that judges, [`serve`] the other process: it has the framework's own
//! [`Subject`](crate::Subject) and answers requests. Every tensor of the other process is shared by its adapter
//! and opened here once, so both know the same memory, each at its address. What is reported of a tensor there
//! is translated to the addresses of this process. So every property keeps its meaning.
//!
//! On the host, memory of a framework leaves its process by a copy: a tensor that goes there is copied into its ticket,
//! as users share it. The other process makes its own tensors in shared memory, so they return in place.
//! On a CUDA device frameworks make tensors in their own memory, and all are converted in place.

mod flaw;
mod piece;
mod remote;
mod serve;
mod wire;

pub use flaw::{Direction, FLAWS, Flaw, PlantedFlaw};
pub use remote::{Remote, RemoteTensor};
pub use serve::serve;

use bridge_core::{Adapter, Layout, Options, Ordering, Result, Transfer};
use bridge_ipc::{IpcTensor, Message, Ticket, Writing, process};
use std::sync::Arc;
use std::time::Duration;

/// How long a ticket of the suite can be opened. It ends when the tensor is dropped.
const TIME: Duration = Duration::from_secs(3600);

/// What surrounds a process that waits for another.
#[derive(Debug, Clone, Copy)]
pub struct Around {
    /// Runs `body` while other threads of this process may have what this one holds, such as an interpreter's lock.
    pub detached: fn(body: &mut (dyn FnMut() + Send)),
    /// Called with the reason when the other process has ended. It may end this one, which makes the case at hand a
    /// crash.
    pub ended: fn(reason: &str),
}

/// For processes without an interpreter.
impl Default for Around {
    fn default() -> Self {
        Self { detached: |body| body(), ended: |_| () }
    }
}

impl Around {
    fn detached<R: Send>(self, body: impl FnOnce() -> R + Send) -> R {
        let (mut body, mut result) = (Some(body), None);
        (self.detached)(&mut || result = body.take().map(|body| body()));
        result.expect("detached runs its body")
    }

    /// Opens a ticket for one tensor.
    fn open(self, ticket: &Ticket) -> Result<IpcTensor> {
        let mut opened = self.detached(|| bridge_ipc::open(ticket))?;
        Ok(opened.tensors.remove(0))
    }

    /// Shares a tensor. Returns what was done for it.
    fn share<F>(
        self,
        from: &dyn Adapter<Tensor = F>,
        tensor: &F,
        ordering: &Arc<dyn Ordering>,
        (writing, copy): (Writing, Option<bool>),
    ) -> Result<(Ticket, Transfer)> {
        let message = Message::of(&[(from, tensor)], Some(writing), ordering, &Options::default().with_copy(copy));
        let message = message.map_err(|failed| failed.error)?;
        let done = message.transfers()[0];
        let ticket = self.detached(|| message.share(&*process::exporter()?, TIME, None))?;
        Ok((ticket, done))
    }

    /// Ends the share of a ticket of this process. What has it open keeps its memory.
    fn end(self, ticket: &Ticket) {
        let Some(exporter) = process::exporter_if_any() else { return };
        // It fails for tickets of other processes only.
        let _ = self.detached(|| exporter.end(ticket));
    }
}

/// Returns the bytes that this process shares, with one more for every share and for every lease.
fn held() -> usize {
    let held = process::exporter_if_any().map(|exporter| exporter.held()).unwrap_or_default();
    held.bytes + held.shares + held.leases
}

/// Returns the number of the shares of this process.
fn shares() -> usize {
    process::exporter_if_any().map_or(0, |exporter| exporter.held().shares)
}

/// Returns the value of `copy` for a tensor that is to be converted in place. One without elements lies nowhere.
fn in_place(layout: &Layout) -> Option<bool> {
    (layout.numel() > 0).then_some(false)
}
