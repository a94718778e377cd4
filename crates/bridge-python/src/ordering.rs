//! The ordering of the process, whose copies release the GIL.

use crate::progress;
use bridge_core::{
    Cast, Copies, Device, DeviceBuffer, DeviceKind, Failed, Keep, Ordering, Piece, Planned, Result, Stream, Strided,
};
use bridge_cuda::Copier;
use pyo3::prelude::*;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// Returns the ordering of the process, whose copies release the GIL where they take long.
pub(crate) fn ordering() -> &'static Arc<dyn Ordering> {
    static ORDERING: LazyLock<Arc<dyn Ordering>> = LazyLock::new(|| bridge_cuda::ordering_with(&Releasing));
    &ORDERING
}

/// The copies of `bridge-cuda`, made without the GIL where the host waits, or copies at least [`LONG`] bytes.
struct Releasing;

/// Copies of fewer bytes take less time than a thread switch of Python.
const LONG: usize = 1 << 20;

/// Makes a copy of `nbytes` bytes from one device to another, without the GIL where it takes long. A move tells how far
/// it is.
///
/// # Safety
///
/// `stream`, if there is one, is alive.
unsafe fn released(
    (from, to): (Device, Device),
    stream: Option<Stream>,
    nbytes: usize,
    copy: impl FnOnce() -> Result<()> + Send,
) -> Result<()> {
    let copy = || match stream {
        Some(stream) if progress::moves(from, to) => {
            let moved = progress::moved(nbytes, copy);
            let device = if from.kind == DeviceKind::CUDA { from } else { to };
            // The caller drops the target, also where its memory is reused on another stream.
            // SAFETY: the caller's promise.
            moved.inspect_err(|_| drop(unsafe { ordering().synchronize(device, stream) }))
        }
        _ => copy(),
    };
    let (reads_host, writes_host) = (from.kind == DeviceKind::CPU, to.kind == DeviceKind::CPU);
    let waits = writes_host && stream.is_some();
    if waits || ((reads_host || writes_host) && nbytes >= LONG) {
        // Conversions hold the GIL, so this only names it.
        Python::attach(|py| py.detach(copy))
    } else {
        copy()
    }
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: every method is that of the copies inside, which have made the promises.
unsafe impl Copies for Releasing {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe {
            released((from.device, to.device), stream, from.layout.nbytes(), || Copier.copy(from, to, flips, stream))
        }
    }

    unsafe fn copy_all(&self, pieces: &[Piece<'_>], stream: Option<Stream>) -> Result<(), Failed> {
        let Some(Piece { from, to, .. }) = pieces.first() else { return Ok(()) };
        // A device casts, so these bytes move.
        let nbytes = |piece: &Piece<'_>| match from.device.kind {
            DeviceKind::CUDA => piece.to.layout.nbytes(),
            _ => piece.from.layout.nbytes(),
        };
        let nbytes = pieces.iter().map(nbytes).fold(0, usize::saturating_add);
        let mut failed = 0;
        let copy = || {
            // SAFETY: the caller's promises.
            unsafe { Copier.copy_all(pieces, stream) }.map_err(|Failed { index, error, .. }| {
                failed = index;
                error
            })
        };
        // SAFETY: as above.
        let copied = unsafe { released((from.device, to.device), stream, nbytes, copy) };
        copied.map_err(|error| Failed::new(failed, error))
    }

    unsafe fn plan(
        &self,
        device: Device,
        pieces: &[Piece<'_>],
        stream: Option<Stream>,
    ) -> Result<Option<Box<dyn Planned>>, Failed> {
        // SAFETY: the caller's promise.
        unsafe { Copier.plan(device, pieces, stream) }
    }

    fn casts(&self, cast: Cast) -> Result<()> {
        Copier.casts(cast)
    }

    fn reaches(&self, device: Device) -> Result<()> {
        Copier.reaches(device)
    }

    unsafe fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        keep: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        // SAFETY: the caller's promise.
        unsafe { Copier.allocate(device, nbytes, stream, keep) }
    }

    fn prepare(&self, fresh: Range<usize>) {
        Copier.prepare(fresh);
    }
}
