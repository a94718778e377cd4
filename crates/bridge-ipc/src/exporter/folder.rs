//! The private folder of the sockets.

use crate::memory::failed;
use crate::socket;
use bridge_core::{Error, ErrorKind, Result};
use rustix::fs::{Mode, mkdir, stat};
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};
use std::env;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Bits of a folder's mode that let other users in.
const OTHERS: u32 = 0o077;

/// Returns the folder, and makes it where it is missing. With `private`, only this user may enter it.
pub(super) fn ready(folder: Option<PathBuf>, private: bool) -> Result<PathBuf> {
    let folder = folder.unwrap_or_else(usual);
    match mkdir(&folder, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => (),
        Err(errno) => return Err(failed(&format!("the folder {} is not made", folder.display()))(errno)),
    }
    let found = stat(&folder).map_err(failed(&format!("the folder {} cannot be read", folder.display())))?;
    let own = found.st_uid == geteuid().as_raw();
    if !own || (private && found.st_mode & OTHERS != 0) {
        let text = format!(
            "the folder {} belongs to another user or lets others in: set its mode to 700, or name another in TENSOR_BRIDGE_IPC",
            folder.display()
        );
        return Err(Error::new(ErrorKind::Denied, text));
    }
    Ok(folder)
}

/// The folder that is taken where none is named.
fn usual() -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("TENSOR_BRIDGE_IPC")
        .or_else(|| Some(set("XDG_RUNTIME_DIR")?.join("tensor-bridge")))
        .unwrap_or_else(|| env::temp_dir().join(format!("tensor-bridge-{}", geteuid().as_raw())))
}

/// Listens at a new socket, and removes the sockets of processes that have ended.
pub(super) fn listen(folder: &Path, private: bool) -> Result<(UnixListener, PathBuf)> {
    sweep(folder);
    let mut random = [0; 8];
    getrandom(&mut random, GetRandomFlags::empty()).map_err(failed("no random numbers"))?;
    let path = std::path::absolute(folder).unwrap_or_else(|_| folder.into());
    let path = path.join(format!("{:016x}.sock", u64::from_ne_bytes(random)));
    Ok((socket::listen(&path, private)?, path))
}

/// Removes the sockets of processes that were killed.
fn sweep(folder: &Path) {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "sock")) {
        if socket::is_abandoned(&file) {
            let _ = std::fs::remove_file(&file);
        }
    }
}
