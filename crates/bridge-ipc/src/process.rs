//! The one exporter of a process, for libraries that many parts of a program share.

use crate::exporter::{Exporter, Settings};
use bridge_core::{Error, ErrorKind, Result};
use rustix::process::geteuid;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct Process {
    exporter: Option<Arc<Exporter>>,
    settings: Settings,
}

static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

fn process() -> MutexGuard<'static, Option<Process>> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the exporter of this process, which the first call makes. A fork makes one of its own.
///
/// # Errors
///
/// Those of [`Exporter::new`].
pub fn exporter() -> Result<Arc<Exporter>> {
    let mut process = process();
    let process = process.get_or_insert_default();
    if let Some(exporter) = process.exporter.as_ref().filter(|exporter| !exporter.is_elsewhere()) {
        return Ok(Arc::clone(exporter));
    }
    let exporter = Arc::new(Exporter::new(process.settings.clone())?);
    if let Some(parents) = process.exporter.replace(Arc::clone(&exporter)) {
        // What it keeps belongs to the parent, too.
        std::mem::forget(parents);
    }
    Ok(exporter)
}

/// Returns the exporter of this process, if it has made one.
pub fn exporter_if_any() -> Option<Arc<Exporter>> {
    let process = process();
    let exporter = process.as_ref().and_then(|process| process.exporter.as_ref());
    exporter.filter(|exporter| !exporter.is_elsewhere()).map(Arc::clone)
}

/// Returns the users whom this process accepts beside its own, by number: the ones of the [`Settings`] that were
/// configured. They may open what [`exporter`] shares, and this process opens what theirs share.
pub fn users() -> Vec<u32> {
    process().as_ref().map_or_else(Vec::new, |process| process.settings.users.clone())
}

/// Returns whether this process connects to processes of that user.
pub(crate) fn accepts(user: u32) -> bool {
    user == geteuid().as_raw() || users().contains(&user)
}

/// Says how the exporter of this process is to be made, and which users this process accepts.
///
/// # Errors
///
/// [`ErrorKind::Argument`] if there is one already.
pub fn configure(settings: Settings) -> Result<()> {
    if exporter_if_any().is_some() {
        let text = "this process shares already: configure it before the first share";
        return Err(Error::new(ErrorKind::Argument, text));
    }
    process().get_or_insert_default().settings = settings;
    Ok(())
}

/// Ends all shares of this process, and its socket. The next share begins anew.
pub fn close() {
    let exporter = exporter_if_any();
    process().iter_mut().for_each(|process| process.exporter = None);
    drop(exporter);
}
