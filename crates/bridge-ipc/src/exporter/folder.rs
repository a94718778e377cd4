//! The private folder of the sockets.

use crate::memory::failed;
use bridge_core::{Error, ErrorKind, Result};
use rustix::fs::{Mode, mkdir, stat};
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};
use std::env;
use std::io::ErrorKind as Io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The most bytes of a socket's path (`sockaddr_un`, with the 0 at its end).
const MAX_PATH: usize = 107;

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

/// Listens at a new socket, and removes those that no process listens at any more.
pub(super) fn listen(folder: &Path) -> Result<(UnixListener, PathBuf)> {
    sweep(folder);
    let mut random = [0; 8];
    getrandom(&mut random, GetRandomFlags::empty()).map_err(failed("no random numbers"))?;
    let path = std::path::absolute(folder).unwrap_or_else(|_| folder.into());
    let path = path.join(format!("{:016x}.sock", u64::from_ne_bytes(random)));
    if path.as_os_str().len() > MAX_PATH {
        let text = format!(
            "the path {} has more than {MAX_PATH} bytes: name a shorter folder in TENSOR_BRIDGE_IPC",
            path.display()
        );
        return Err(Error::new(ErrorKind::Argument, text));
    }
    let listener = UnixListener::bind(&path).and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    let listener = listener.map_err(|error| {
        let kind = if error.kind() == Io::PermissionDenied { ErrorKind::Denied } else { ErrorKind::Framework };
        Error::new(kind, format!("no socket at {}: name another folder in TENSOR_BRIDGE_IPC", path.display()))
            .caused_by(error)
    })?;
    Ok((listener, path))
}

/// Removes the sockets of processes that were killed.
fn sweep(folder: &Path) {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "sock")) {
        if UnixStream::connect(&file).is_err_and(|error| error.kind() == Io::ConnectionRefused) {
            let _ = std::fs::remove_file(&file);
        }
    }
}
