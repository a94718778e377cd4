//! The private folder of the sockets.

use crate::memory::failed;
use crate::socket;
use crate::ticket::random;
use bridge_core::{Error, ErrorKind, Result};
use rustix::fs::{FileType, Mode, chmod, lstat, mkdir};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::env;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bits of a folder's mode that let other users do anything in it.
const OTHERS: u32 = 0o077;

/// Bits of a folder's mode that let other users open files whose names they know.
const PASS: u32 = 0o011;

/// Time after which the process of a socket that does not listen yet must have ended.
const MAKING: Duration = Duration::from_secs(60);

/// Returns the folder, and makes it if it is missing. Without `users`, only this user may enter it.
///
/// # Errors
///
/// [`ErrorKind::Denied`] for a folder of another user, a link to one, and one with a mode that does not fit.
pub(super) fn ready(folder: Option<PathBuf>, users: &[u32]) -> Result<PathBuf> {
    let folder = folder.unwrap_or_else(|| usual(users.is_empty()));
    let made = match mkdir(&folder, Mode::RWXU) {
        // Regardless of the process's mask, which may keep all other users out.
        Ok(()) if !users.is_empty() => chmod(&folder, Mode::RWXU | Mode::XGRP | Mode::XOTH),
        Err(Errno::EXIST) => Ok(()),
        made => made,
    };
    made.map_err(failed(&format!("cannot create the folder {}", folder.display())))?;
    // Another user may have put a link there, in a folder where all may write.
    let found = lstat(&folder).map_err(failed(&format!("cannot read the folder {}", folder.display())))?;
    // The superuser enters every folder.
    let enter = users.iter().any(|user| *user != 0);
    let wrong = if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
        "is a link or another file: name the folder itself"
    } else if found.st_uid != geteuid().as_raw() {
        "belongs to another user: name another"
    } else if users.is_empty() && found.st_mode & OTHERS != 0 {
        "lets other users in: set its mode to 700, or name another"
    } else if enter && found.st_mode & PASS == 0 {
        "does not let the other users in: set its mode to 711, or name another"
    } else {
        return Ok(folder);
    };
    let text = format!("the folder {} {wrong} in TRUEBRIDGE_IPC", folder.display());
    Err(Error::new(ErrorKind::Denied, text))
}

/// The default folder. Other users can enter neither a private one nor `XDG_RUNTIME_DIR`.
fn usual(private: bool) -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let runtime = || Some(set("XDG_RUNTIME_DIR").filter(|_| private)?.join("truebridge"));
    let name = format!("truebridge-{}{}", geteuid().as_raw(), if private { "" } else { "-shared" });
    set("TRUEBRIDGE_IPC").or_else(runtime).unwrap_or_else(|| env::temp_dir().join(name))
}

/// Listens at a new socket, and removes the sockets of processes that have ended.
pub(super) fn listen(folder: &Path, private: bool) -> Result<(UnixListener, PathBuf)> {
    sweep(folder);
    let [number @ .., _, _, _, _, _, _, _, _] = random()?;
    let path = std::path::absolute(folder).unwrap_or_else(|_| folder.into());
    let path = path.join(format!("{:016x}.sock", u64::from_ne_bytes(number)));
    Ok((socket::listen(&path, private)?, path))
}

/// Removes the sockets of processes that were killed.
fn sweep(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let file = entry.path();
        let Some(extension) = file.extension() else { continue };
        let old = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if extension == "sock" || (extension == socket::UNREADY && old().is_some_and(|age| age > MAKING)) {
            // If another process removes sockets now, it removes this one.
            socket::remove_abandoned(&file, Instant::now());
        }
    }
}
