//! Names for tickets, for programs that run for a long time.

mod client;
mod registry;
mod shares;
mod store;
mod wire;

pub use client::{Client, Watch};
pub use wire::{About, Listed};

use crate::server::{Serving, Waker};
use crate::settings::Settings;
use crate::socket;
use bridge_core::{Error, ErrorKind, Result};
use registry::Registry;
use rustix::process::{Resource, getrlimit};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use store::{Store, Storing};
use wire::is_name;

/// How long the tickets under a name can be opened: their shares end before.
pub const LISTED: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A socket at which processes put tickets under names, and find them. The drop ends it.
///
/// Only names pass through this process, not memory: a process that has found a ticket opens it at the process that
/// made it. What a process has put is removed when it ends, unless this is a [store](Self::persistent).
#[must_use = "the drop ends the names: keep it"]
pub struct Names {
    serving: Serving,
    path: PathBuf,
}

bridge_core::debug_fields!(impl[] Names: path);

impl Names {
    /// Serves names at `path`. The folder in `settings` is not used.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] where another process serves at this path, [`ErrorKind::Denied`] and [`ErrorKind::Argument`]
    /// for a path where this process cannot make a socket.
    pub fn serve(path: &Path, settings: Settings) -> Result<Self> {
        Self::start(path, settings, |_, _| Ok(None))
    }

    /// Serves names at `path`, and keeps what is put there until its name is removed or a newer version has displaced
    /// it, also after the end of the process that has put it. It persistent memory by descriptors and opens none, so
    /// this process needs no driver. When it ends, the connections to it hand what they have put or opened to the next
    /// store at this path.
    ///
    /// The bytes in the limits of `settings` are the most that it keeps, of the host and of devices together; the
    /// folder is that of its [`Exporter`](crate::Exporter).
    ///
    /// # Errors
    ///
    /// Those of [`serve`](Self::serve) and of [`Exporter::new`](crate::Exporter::new).
    pub fn persistent(path: &Path, settings: Settings) -> Result<Self> {
        Self::start(path, settings, |settings, waker| Ok(Some(Box::new(Store::new(settings, waker)?))))
    }

    fn start(
        path: &Path,
        settings: Settings,
        store: impl FnOnce(Settings, Arc<Waker>) -> Result<Option<Box<dyn Storing>>>,
    ) -> Result<Self> {
        let listener = socket::listen(path, settings.users.is_empty())?;
        let (waker, mut limits, users) = (Waker::new()?, settings.limits, settings.users.clone());
        // A connection takes two descriptors. Where few are left, the silent ones must end before all are taken.
        let files = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |most| most as usize);
        limits.connections = limits.connections.min((files / 4).max(4));
        let registry = Registry::new(limits, store(settings, Arc::clone(&waker))?);
        let serving = Serving::start(listener, registry, users, limits.connections, waker)?;
        Ok(Self { serving, path: std::path::absolute(path).unwrap_or_else(|_| path.into()) })
    }

    /// Returns the path to connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        if !self.serving.is_elsewhere() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Refuses what is not a name.
///
/// # Errors
///
/// [`ErrorKind::Argument`] for one that is empty, has control characters or more than 128 bytes.
pub fn check_name(name: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    let brief: String = name.chars().take(40).collect();
    let text = format!("{brief:?} is not a name: one has 1 to 128 bytes in UTF-8, and no control characters");
    Err(Error::new(ErrorKind::Argument, text))
}

pub(crate) fn checked(name: &str) -> Result<String> {
    check_name(name).map(|()| name.into())
}
