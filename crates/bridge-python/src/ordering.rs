//! The ordering of the process, whose copies release the GIL.

use crate::progress;
use bridge_copy::Copier;
use bridge_core::{
    Cast, Copies, Device, DeviceBuffer, DeviceKind, Failed, Keep, Ordering, Piece, Planned, Result, Stream, Strided,
};
use pyo3::prelude::*;
use std::sync::{Arc, LazyLock};

/// Returns the ordering of the process, whose copies release the GIL where they take long.
pub(crate) fn ordering() -> &'static Arc<dyn Ordering> {
    static ORDERING: LazyLock<Arc<dyn Ordering>> = LazyLock::new(|| bridge_copy::ordering_with(&Releasing));
    &ORDERING
}

/// The copies of `bridge-copy`, made without the GIL where the host waits, or copies at least [`LONG`] bytes.
struct Releasing;

/// Copies of fewer bytes take less time than a thread switch of Python.
const LONG: usize = 1 << 20;

#[deny(clippy::missing_trait_methods)]
// SAFETY: every method is that of the copies inside, which have made the promises.
unsafe impl Copies for Releasing {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()> {
        // SAFETY: the caller's promises.
        let copy = || unsafe { Copier.copy(from, to, flips, stream) };
        let (reads_host, writes_host) = (from.device.kind == DeviceKind::CPU, to.device.kind == DeviceKind::CPU);
        let copy = || match stream {
            Some(stream) if progress::moves(from.device, to.device) => {
                let moved = progress::moved(from.layout.nbytes(), copy);
                let device = if from.device.kind == DeviceKind::CUDA { from.device } else { to.device };
                // The caller drops the target, also where its memory is reused on another stream.
                moved.inspect_err(|_| drop(ordering().synchronize(device, stream)))
            }
            _ => copy(),
        };
        let waits = writes_host && stream.is_some();
        if waits || ((reads_host || writes_host) && from.layout.nbytes() >= LONG) {
            // Conversions hold the GIL, so this only names it.
            Python::attach(|py| py.detach(copy))
        } else {
            copy()
        }
    }

    unsafe fn copy_all(&self, pieces: &[Piece<'_>], stream: Option<Stream>) -> Result<(), Failed> {
        // SAFETY: the caller's promises.
        let copy = || unsafe { Copier.copy_all(pieces, stream) };
        let nbytes = |piece: &Piece<'_>| piece.from.layout.nbytes();
        if stream.is_none() && pieces.iter().map(nbytes).fold(0, usize::saturating_add) >= LONG {
            Python::attach(|py| py.detach(copy))
        } else {
            copy()
        }
    }

    fn plan(
        &self,
        device: Device,
        pieces: &[Piece<'_>],
        stream: Option<Stream>,
    ) -> Result<Option<Box<dyn Planned>>, Failed> {
        Copier.plan(device, pieces, stream)
    }

    fn casts(&self, cast: Cast) -> Result<()> {
        Copier.casts(cast)
    }

    fn reaches(&self, device: Device) -> Result<()> {
        Copier.reaches(device)
    }

    fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        keep: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        Copier.allocate(device, nbytes, stream, keep)
    }
}
