//! The one exporter of a process, for libraries that many parts of a program share.

use crate::exporter::{Exporter, Held};
use crate::own::Own;
use crate::settings::{self, Settings};
use crate::ticket::Ticket;
use bridge_core::{Error, ErrorKind, Result};
use std::mem;
use std::sync::Arc;

pub use crate::settings::users;

/// The exporter of this process. A forked process makes its own: what its parent's exporter keeps belongs to the
/// parent.
static EXPORTER: Own<Option<Arc<Exporter>>> = Own::new();

/// Exporters whose socket was removed: other processes still have what they opened.
static UNREACHABLE: Own<Vec<Arc<Exporter>>> = Own::new();

/// Returns the exporter of this process, which the first call makes. A forked process makes its own. Where the program
/// has closed its descriptors, or removed its folder, there is a new one.
///
/// # Errors
///
/// Those of [`Exporter::new`].
pub fn exporter() -> Result<Arc<Exporter>> {
    let mut exporter = EXPORTER.lock();
    match &*exporter {
        Some(exporter) if exporter.is_reachable() => return Ok(Arc::clone(exporter)),
        Some(former) if former.is_closed() => mem::forget(Arc::clone(former)),
        Some(former) => UNREACHABLE.lock().push(Arc::clone(former)),
        None => (),
    }
    Ok(Arc::clone(exporter.insert(Arc::new(Exporter::new(settings::of_this_process())?))))
}

/// Returns the exporter of this process, if it has made one.
pub fn exporter_if_any() -> Option<Arc<Exporter>> {
    EXPORTER.lock().clone()
}

/// Returns the exporter of this process that has made a ticket, else the one that shares now, if there is one.
pub fn exporter_of(ticket: &Ticket) -> Option<Arc<Exporter>> {
    let former = UNREACHABLE.lock().iter().find(|exporter| exporter.has_made(ticket)).cloned();
    former.or_else(exporter_if_any)
}

/// Returns what other processes hold of this one.
pub fn held() -> Held {
    let former = UNREACHABLE.lock().clone();
    let all = former.into_iter().chain(exporter_if_any()).map(|exporter| exporter.held());
    all.fold(Held::default(), |one, other| Held {
        shares: one.shares + other.shares,
        leases: one.leases + other.leases,
        connections: one.connections + other.connections,
        bytes: one.bytes + other.bytes,
    })
}

/// Sets how the exporter of this process is made, and which users this process accepts.
///
/// # Errors
///
/// [`ErrorKind::Argument`] if there is one already.
pub fn configure(settings: Settings) -> Result<()> {
    if exporter_if_any().is_some() {
        let text = "this process shares already: configure it before the first share";
        return Err(Error::new(ErrorKind::Argument, text));
    }
    settings::set(settings);
    Ok(())
}

/// Ends all shares of this process, and its socket. The next share begins anew.
pub fn close() {
    // Not under the lock: its thread ends first.
    let exporter = EXPORTER.lock().take();
    for exporter in mem::take(&mut *UNREACHABLE.lock()).into_iter().chain(exporter) {
        match exporter.is_closed() {
            true => mem::forget(exporter),
            false => drop(exporter),
        }
    }
}
