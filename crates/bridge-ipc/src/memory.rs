//! Host memory that processes share: sealed files in memory, and their mappings.

use crate::own::Own;
use bridge_core::{Error, ErrorKind, Result};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    AtFlags, FallocateFlags, MemfdFlags, SealFlags, StatxFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    memfd_create, sendfile, statx,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Weak};

/// What a process that opens a share may do with its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Writing {
    /// Each process may write, and sees only its own writes: the kernel copies a page at the first write to it.
    #[default]
    Private,
    /// None may write, the process that shares included. The kernel enforces it.
    Never,
    /// All may write, and see what the others write.
    Shared,
}

/// A part of the address space that is a view of a file in memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    bytes: Range<usize>,
    /// What it is found by among [`SHARED`].
    identity: Option<Identity>,
}

/// What tells one file in memory from others: its device, its number, the time at which it was made, and the length that
/// is mapped. The system uses a number again after very many files, but not at the same time.
type Identity = ((u32, u32), u64, (i64, u32), usize);

/// The mappings of memory that all may write to, one of each file: a copy between two tensors of the memory is
/// recognised by their addresses.
static SHARED: Own<BTreeMap<Identity, Weak<Mapping>>> = Own::new();

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(identity) = self.identity {
            let mut shared = SHARED.lock();
            // Another thread may have mapped the file again meanwhile.
            if shared.get(&identity).is_some_and(|mapping| mapping.strong_count() == 0) {
                shared.remove(&identity);
            }
        }
        let len = self.bytes.len().max(1);
        // SAFETY: this is a whole mapping of `map`, unmapped once. Every user of its addresses kept the mapping.
        let _ = unsafe { munmap(ptr::with_exposed_provenance_mut(self.bytes.start), len) };
    }
}

impl Mapping {
    /// Returns the addresses, whose provenance is exposed.
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.bytes.clone()
    }
}

/// Makes memory that can be shared, mapped for writing only by this process.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`]: all of it is taken now, so that no write fails later.
pub(crate) fn create(nbytes: usize) -> Result<(OwnedFd, Mapping)> {
    // The system does not refuse too much of such memory. It kills processes to get it.
    if available().is_some_and(|free| nbytes as u64 > free) {
        return Err(failed(&format!("cannot allocate {nbytes} bytes of shared memory"))(Errno::NOMEM));
    }
    // A mapping of 0 bytes does not exist.
    let file = taken(nbytes.max(1) as u64)?;
    let mapping = map(&file, nbytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)?;
    Ok((file, mapping))
}

/// Returns a file in memory whose pages are taken.
fn taken(nbytes: u64) -> Result<OwnedFd> {
    let file = memfd_create(c"truebridge", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let file = file.map_err(failed("cannot create a file in memory"))?;
    let taken = fallocate(&file, FallocateFlags::empty(), 0, nbytes);
    taken.map_err(failed(&format!("cannot allocate {nbytes} bytes of shared memory")))?;
    Ok(file)
}

/// Returns how many bytes the system or this process's group can still take, as far as that is known.
fn available() -> Option<u64> {
    let system = std::fs::read_to_string("/proc/meminfo").ok();
    let system = system.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("MemAvailable:")));
    let system = system.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024));
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
    system.into_iter().chain(group).min()
}

/// Fixes the length of memory that is written, and forbids writes unless they are shared. No mapping for writing is
/// left in this process. Returns the memory, which is a copy where a fork has such a mapping.
pub(crate) fn seal(file: OwnedFd, writing: Writing) -> Result<OwnedFd> {
    let mut seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if writing != Writing::Shared {
        seals |= SealFlags::WRITE;
    }
    let sealed = match fcntl_add_seals(&file, seals) {
        // A process that was forked meanwhile has the mapping as well.
        Err(Errno::BUSY) => {
            let file = copied(&file)?;
            fcntl_add_seals(&file, seals).map(|()| file)
        }
        sealed => sealed.map(|()| file),
    };
    sealed.map_err(failed("cannot seal shared memory"))
}

/// Fixes the length of memory, and forbids writes by all but the mappings that it has now: those of this process.
///
/// # Errors
///
/// Those of the system: before Linux 5.1 it has no such seal.
pub(crate) fn seal_for_others(file: &OwnedFd) -> Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    fcntl_add_seals(file, seals).map_err(failed("cannot seal shared memory"))
}

/// Returns a copy that was never mapped.
fn copied(file: &OwnedFd) -> Result<OwnedFd> {
    let nbytes = fstat(file).map_err(failed("cannot read shared memory"))?.st_size as u64;
    let copy = taken(nbytes)?;
    let mut from = 0;
    while from < nbytes {
        let rest = usize::try_from(nbytes - from).unwrap_or(usize::MAX);
        if sendfile(&copy, file, Some(&mut from), rest).map_err(failed("cannot copy shared memory"))? == 0 {
            return Err(failed("cannot copy shared memory")(Errno::IO));
        }
    }
    Ok(copy)
}

/// Maps memory that another process, or this one, has sealed.
///
/// # Errors
///
/// [`ErrorKind::Protocol`] for a file that is shorter than `nbytes` or may become so, because the system kills a
/// process that reads past its end, and for one that may change although its writes are not shared.
pub(crate) fn open(file: &OwnedFd, nbytes: usize, writing: Writing) -> Result<Arc<Mapping>> {
    check(file, nbytes, writing)?;
    match writing {
        Writing::Private => map(file, nbytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).map(Arc::new),
        Writing::Never => map(file, nbytes, ProtFlags::READ, MapFlags::SHARED).map(Arc::new),
        Writing::Shared => shared(file, nbytes),
    }
}

/// Refuses memory as [`open`] does, without mapping it.
pub(crate) fn check(file: &OwnedFd, nbytes: usize, writing: Writing) -> Result<()> {
    let written = match writing {
        Writing::Shared => SealFlags::empty(),
        // The version of a publication, whose process writes to it when no process has it open.
        Writing::Private => SealFlags::WRITE | SealFlags::FUTURE_WRITE,
        Writing::Never => SealFlags::WRITE,
    };
    let sealed = fcntl_get_seals(file)
        .is_ok_and(|seals| seals.contains(SealFlags::SHRINK) && (written.is_empty() || seals.intersects(written)));
    let long = fstat(file).is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(|size| size >= nbytes.max(1) as u64));
    if !sealed || !long {
        let text = "the other process sent memory that is too short or not sealed: it does not speak this protocol";
        return Err(Error::new(ErrorKind::Protocol, text));
    }
    Ok(())
}

/// Refuses memory whose length may grow: it would have more bytes than a store counts.
pub(crate) fn check_length(file: &OwnedFd) -> Result<()> {
    match fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::GROW)) {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Protocol, "a store accepts only memory whose length is sealed")),
    }
}

/// Returns the mapping of memory that all may write to, which is made if there is none.
fn shared(file: &OwnedFd, nbytes: usize) -> Result<Arc<Mapping>> {
    let mut shared = SHARED.lock();
    let identity = identity(file, nbytes);
    if let Some(mapping) = identity.and_then(|identity| shared.get(&identity)?.upgrade()) {
        return Ok(mapping);
    }
    let mut mapping = map(file, nbytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)?;
    mapping.identity = identity;
    let mapping = Arc::new(mapping);
    shared.extend(identity.map(|identity| (identity, Arc::downgrade(&mapping))));
    Ok(mapping)
}

/// `None` where the system does not record when a file was made.
fn identity(file: &OwnedFd, nbytes: usize) -> Option<Identity> {
    let known = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::BTIME).ok()?;
    let (device, made) = ((known.stx_dev_major, known.stx_dev_minor), known.stx_btime);
    let is_known = StatxFlags::from_bits_retain(known.stx_mask).contains(StatxFlags::INO | StatxFlags::BTIME);
    is_known.then_some((device, known.stx_ino, (made.tv_sec, made.tv_nsec), nbytes))
}

fn map(file: &impl AsFd, nbytes: usize, access: ProtFlags, kind: MapFlags) -> Result<Mapping> {
    // SAFETY: the kernel chooses an address that is free.
    let mapped = unsafe { mmap(ptr::null_mut(), nbytes.max(1), access, kind, file, 0) };
    let start = mapped.map_err(failed(&format!("cannot map {nbytes} bytes of shared memory")))?.expose_provenance();
    Ok(Mapping { bytes: start..start + nbytes, identity: None })
}

/// Returns a function that makes an error of this library from one of the system.
pub(crate) fn failed(what: &str) -> impl Fn(Errno) -> Error + '_ {
    move |errno| {
        let (kind, advice) = match errno {
            Errno::NOMEM | Errno::NOSPC | Errno::DQUOT => (ErrorKind::OutOfMemory, "free some first"),
            Errno::MFILE | Errno::NFILE => (ErrorKind::OutOfMemory, "raise the limit of open files (ulimit -n)"),
            Errno::FBIG => (ErrorKind::OutOfMemory, "raise the limit of file sizes (ulimit -f)"),
            Errno::ACCESS | Errno::PERM => (ErrorKind::Denied, "run both processes as one user"),
            _ => (ErrorKind::Framework, ""),
        };
        let colon = if advice.is_empty() { "" } else { ": " };
        Error::new(kind, format!("{what} ({errno}){colon}{advice}")).caused_by(std::io::Error::from(errno))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(writing: Writing) -> OwnedFd {
        let (file, mapping) = create(3).unwrap();
        // SAFETY: the mapping has three bytes, which no other code knows.
        unsafe { ptr::with_exposed_provenance_mut::<[u8; 3]>(mapping.bytes().start).write([1, 2, 3]) };
        drop(mapping);
        seal(file, writing).unwrap()
    }

    fn first(mapping: &Mapping) -> u8 {
        // SAFETY: the mapping has three bytes, and no other thread writes to them.
        unsafe { ptr::with_exposed_provenance::<u8>(mapping.bytes().start).read_volatile() }
    }

    fn write(mapping: &Mapping) {
        // SAFETY: the mapping is writable, and no other thread uses it.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(mapping.bytes().start).write_volatile(9) };
    }

    #[test]
    fn private_writes_are_ones_own_and_shared_ones_are_seen() {
        for (writing, seen) in [(Writing::Private, 1), (Writing::Shared, 9)] {
            let file = made(writing);
            let (one, other) = (open(&file, 3, writing).unwrap(), open(&file, 3, writing).unwrap());
            write(&one);
            assert_eq!((first(&one), first(&other)), (9, seen), "{writing:?}");
        }
    }

    #[test]
    fn memory_that_all_may_write_is_mapped_once_and_forgotten_with_its_last_user() {
        let file = made(Writing::Shared);
        let [one, other] = [(); 2].map(|()| open(&file, 3, Writing::Shared).unwrap());
        assert!(Arc::ptr_eq(&one, &other));
        let identity = identity(&file, 3).unwrap();
        let is_known = || SHARED.lock().contains_key(&identity);
        drop(one);
        assert!(is_known());
        drop(other);
        assert!(!is_known());
    }

    #[test]
    fn sealed_memory_is_never_mapped_for_shared_writes() {
        for writing in [Writing::Private, Writing::Never] {
            let file = made(writing);
            assert_eq!(first(&open(&file, 3, writing).unwrap()), 1);
            assert_eq!(open(&file, 3, Writing::Shared).unwrap_err().kind(), ErrorKind::Denied, "{writing:?}");
        }
    }

    #[test]
    fn memory_that_could_vanish_is_refused() {
        let (unsealed, _mapping) = create(3).unwrap();
        assert_eq!(open(&unsealed, 3, Writing::Never).unwrap_err().kind(), ErrorKind::Protocol);
        let short = made(Writing::Never);
        assert_eq!(open(&short, 1 << 20, Writing::Never).unwrap_err().kind(), ErrorKind::Protocol);
        check_length(&short).unwrap();
        assert_eq!(check_length(&unsealed).unwrap_err().kind(), ErrorKind::Protocol);
        let other = OwnedFd::from(std::fs::File::open("/dev/zero").unwrap());
        assert_eq!(open(&other, 3, Writing::Never).unwrap_err().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn memory_that_its_process_could_change_is_refused() {
        let file = made(Writing::Shared);
        for writing in [Writing::Private, Writing::Never] {
            assert_eq!(open(&file, 3, writing).unwrap_err().kind(), ErrorKind::Protocol, "{writing:?}");
        }
    }

    #[test]
    fn only_the_process_of_a_version_may_change_its_memory() {
        let (file, mapping) = create(3).unwrap();
        seal_for_others(&file).unwrap();
        write(&mapping);
        assert_eq!(first(&open(&file, 3, Writing::Private).unwrap()), 9);
        assert!(map(&file, 3, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED).is_err());
        assert!(rustix::fs::ftruncate(&file, 1).is_err() && rustix::fs::ftruncate(&file, 4).is_err());
        assert!(fcntl_add_seals(&file, SealFlags::WRITE).is_err(), "another process could seal it for its owner, too");
    }

    #[test]
    fn memory_is_unmapped_with_its_last_user() {
        let (file, mapping) = create(3).unwrap();
        let number = rustix::fs::fstat(&file).unwrap().st_ino.to_string();
        let is_this = |line: &str| line.contains("memfd:") && line.split_whitespace().nth(4) == Some(&number);
        let is_mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().any(is_this);
        assert!(is_mapped());
        drop(mapping);
        assert!(!is_mapped());
    }

    #[test]
    fn no_memory_is_an_error() {
        assert_eq!(create(1 << 52).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }

    #[test]
    fn errors_of_the_system_have_their_kinds() {
        let kind = |errno| failed("it failed")(errno).kind();
        for errno in [Errno::NOMEM, Errno::NOSPC, Errno::DQUOT, Errno::MFILE, Errno::NFILE, Errno::FBIG] {
            assert_eq!(kind(errno), ErrorKind::OutOfMemory, "{errno}");
        }
        assert_eq!([Errno::ACCESS, Errno::PERM].map(kind), [ErrorKind::Denied; 2]);
        assert_eq!(kind(Errno::IO), ErrorKind::Framework);
    }

    /// As a process has it that was forked while the memory was written.
    #[test]
    fn memory_is_sealed_although_it_is_mapped_elsewhere() {
        let (file, mapping) = create(3).unwrap();
        write(&mapping);
        let elsewhere = map(&file, 3, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED).unwrap();
        drop(mapping);
        let sealed = seal(file, Writing::Never).unwrap();
        let opened = open(&sealed, 3, Writing::Never).unwrap();
        assert_eq!((first(&opened), first(&elsewhere)), (9, 9));
    }

    #[test]
    fn memory_without_bytes_is_mapped() {
        let (file, mapping) = create(0).unwrap();
        drop(mapping);
        let file = seal(file, Writing::Never).unwrap();
        assert!(open(&file, 0, Writing::Never).unwrap().bytes().is_empty());
    }
}
