//! How this process shares, and with which users.

use rustix::process::geteuid;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// How a process shares.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Settings {
    /// The folder of the socket, which only this user may enter, or the [`users`](Self::users) as well. `None`:
    /// `TRUEBRIDGE_IPC` names it, else it is `truebridge` in `XDG_RUNTIME_DIR`, unless there are other users, else
    /// one of this user in `/tmp`.
    pub folder: Option<PathBuf>,
    /// The most that other processes may hold.
    pub limits: Limits,
    /// Users, by number, who may open shares as well as the user of this process. The folder must let them in, too
    /// (mode 711). In [`process::configure`](crate::process::configure) they are also the users whose processes this
    /// one connects to.
    pub users: Vec<u32>,
}

impl Settings {
    /// Returns the same settings with another [`folder`](Self::folder).
    #[must_use]
    pub fn with_folder(self, folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), ..self }
    }

    /// Returns the same settings with other [`limits`](Self::limits).
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Returns the same settings with other [`users`](Self::users).
    #[must_use]
    pub fn with_users(self, users: impl Into<Vec<u32>>) -> Self {
        Self { users: users.into(), ..self }
    }
}

/// How much a process lets other processes hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The most connections. One process has half of them at most, and so has one user other than that of this process.
    pub connections: usize,
    /// The most shares that can be opened or are still leased.
    pub shares: usize,
    /// The most leases of a connection. All connections together may have sixteen times as many.
    pub leases: usize,
    /// The most bytes of all shares together that were copied into memory for this purpose.
    pub bytes: usize,
}

impl Limits {
    /// Returns the same limits with another number of [`connections`](Self::connections).
    #[must_use]
    pub fn with_connections(self, connections: usize) -> Self {
        Self { connections, ..self }
    }

    /// Returns the same limits with another number of [`shares`](Self::shares).
    #[must_use]
    pub fn with_shares(self, shares: usize) -> Self {
        Self { shares, ..self }
    }

    /// Returns the same limits with another number of [`leases`](Self::leases).
    #[must_use]
    pub fn with_leases(self, leases: usize) -> Self {
        Self { leases, ..self }
    }

    /// Returns the same limits with another number of [`bytes`](Self::bytes).
    #[must_use]
    pub fn with_bytes(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 256, shares: 1 << 16, leases: 1 << 16, bytes: usize::MAX }
    }
}

/// The configured settings, which forks inherit. They are replaced and never freed, so that they need no lock.
static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(ptr::null_mut());

/// Returns the configured settings.
pub(crate) fn of_this_process() -> Settings {
    // SAFETY: it is null, or comes from the leaked box of `set`, which is never freed or borrowed mutably.
    unsafe { SETTINGS.load(Ordering::Acquire).as_ref() }.cloned().unwrap_or_default()
}

/// Replaces the configured settings.
pub(crate) fn set(settings: Settings) {
    SETTINGS.store(Box::into_raw(Box::new(settings)), Ordering::Release);
}

/// Returns the users whom this process accepts as well as its own, by number: those of the configured [`Settings`].
/// They may open what [`exporter`](crate::process::exporter) shares, and this process opens what their processes share.
pub fn users() -> Vec<u32> {
    of_this_process().users
}

/// Returns whether this process connects to processes of that user.
pub(crate) fn accepts(user: u32) -> bool {
    user == geteuid().as_raw() || users().contains(&user)
}
