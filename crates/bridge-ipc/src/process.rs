//! The one exporter of a process, for libraries that many parts of a program share.

use crate::exporter::{Exporter, Settings};
use crate::own::Own;
use bridge_core::{Error, ErrorKind, Result};
use rustix::process::geteuid;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The exporter of this process. A fork makes one of its own: what its parent's keeps belongs to the parent, too.
static EXPORTER: Own<Option<Arc<Exporter>>> = Own::new();

/// What was configured, which forks have as well. It is replaced and never freed, so that it needs no lock.
static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(ptr::null_mut());

fn settings() -> Settings {
    // SAFETY: it is null, or comes from the leaked box of `configure`, which is never freed or borrowed mutably.
    unsafe { SETTINGS.load(Ordering::Acquire).as_ref() }.cloned().unwrap_or_default()
}

/// Returns the exporter of this process, which the first call makes. A fork makes one of its own.
///
/// # Errors
///
/// Those of [`Exporter::new`].
pub fn exporter() -> Result<Arc<Exporter>> {
    let mut exporter = EXPORTER.lock();
    if let Some(exporter) = &*exporter {
        return Ok(Arc::clone(exporter));
    }
    Ok(Arc::clone(exporter.insert(Arc::new(Exporter::new(settings())?))))
}

/// Returns the exporter of this process, if it has made one.
pub fn exporter_if_any() -> Option<Arc<Exporter>> {
    EXPORTER.lock().clone()
}

/// Returns the users whom this process accepts beside its own, by number: the ones of the [`Settings`] that were
/// configured. They may open what [`exporter`] shares, and this process opens what theirs share.
pub fn users() -> Vec<u32> {
    settings().users
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
    SETTINGS.store(Box::into_raw(Box::new(settings)), Ordering::Release);
    Ok(())
}

/// Ends all shares of this process, and its socket. The next share begins anew.
pub fn close() {
    // Without the lock: its thread ends first.
    let exporter = EXPORTER.lock().take();
    drop(exporter);
}
