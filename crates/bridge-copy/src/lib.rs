//! Copies of strided tensors at the speed of the memory: on a CUDA device, on the host, and between the two.
//!
//! [`Copier`] is the one entry: it implements [`Copies`] of core, checks both sides, and calls the module for the kind
//! of memory.

mod host;
mod kernels;
mod moves;
mod ordering;
mod plan;

pub use ordering::{ordering, ordering_with};

use bridge_core::{Copies, Device, DeviceBuffer, Error, ErrorKind, Keep, Result, Stream, Strided};

/// Copies with the kernels of this crate.
#[derive(Debug, Default)]
pub struct Copier;

impl Copies for Copier {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()> {
        check(&from, &to)?;
        match stream {
            // SAFETY: the caller's promises.
            None => unsafe { host::copy(from, to, flips) },
            // SAFETY: the caller's promises.
            Some(stream) if from.device == to.device => unsafe { kernels::copy(from, to, flips, stream) },
            // SAFETY: the caller's promises.
            Some(stream) => unsafe { moves::copy(from, to, flips, stream) },
        }
    }

    fn reaches(&self, device: Device) -> Result<()> {
        moves::reaches(device)
    }

    fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        keep: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        moves::allocate(device, nbytes, stream, keep)
    }
}

/// Refuses two sides that do not fit together.
fn check(from: &Strided<'_>, to: &Strided<'_>) -> Result<()> {
    let (source, target) = (from.layout, to.layout);
    let refused = |text: String| Err(Error::new(ErrorKind::Layout, text));
    if source.shape() != target.shape() {
        return refused(format!(
            "the source has shape {:?} and the target {:?}: pass a target of the same shape",
            source.shape(),
            target.shape()
        ));
    }
    if source.itemsize() != target.itemsize() {
        return refused(format!(
            "elements of {} bytes do not fit into elements of {} bytes: cast one side first",
            source.itemsize(),
            target.itemsize()
        ));
    }
    Ok(())
}
