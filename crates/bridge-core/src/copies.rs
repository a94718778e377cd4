//! Copies of strided tensors, as a trait. `bridge-cuda` implements it.

use crate::{Cast, Device, DeviceBuffer, Error, ErrorKind, Failed, Keep, Layout, Result, Stream};
use std::ops::Range;

/// One side of a copy: the elements of a view, by the address of the first. No field is ever added, because each
/// implementation of [`Copies`] must regard all of them.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// The device that the memory is on.
    pub device: Device,
    /// Address of the first element. The offset of the layout is already part of it.
    pub data: usize,
    /// Shape, strides and itemsize.
    pub layout: &'a Layout,
}

/// One of many copies that are made together. No field is ever added, as for [`Strided`].
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// What is copied.
    pub from: Strided<'a>,
    /// Where it is copied to.
    pub to: Strided<'a>,
    /// The bits to flip in each element of the source.
    pub flips: u128,
    /// How each element is cast after that. `None` copies the bytes. An implementation meets only casts to which
    /// [`Copies::casts`] has agreed.
    pub cast: Option<Cast>,
}

/// Copies strided tensors into strided tensors, on a device, on the host and between the two.
///
/// # Safety
///
/// Memory that was filled is read by safe code: where [`copy`](Self::copy) returns no error, every element of `to` is
/// written, and nothing else. What [`allocate`](Self::allocate) returns is ready in the stream.
pub unsafe trait Copies: Send + Sync {
    /// Fills `to` with the elements of `from`, and flips the bits of `flips` in each (an element as a little-endian
    /// number; 0 flips none: see [`Pending::flips`](crate::Pending::flips)). Both have the same shape and itemsize, any
    /// strides, and do not overlap; `to` has no two elements at one address.
    ///
    /// | from | to | `stream` | when it returns |
    /// |---|---|---|---|
    /// | host | host | `None` | the elements are in `to` |
    /// | device | the same device | of that device | the work is in `stream` |
    /// | host | device | of the device | `from` has been read; the rest of the work is in `stream` |
    /// | device | host | of the device | the elements are in `to`: the host has waited |
    /// | device | another device | of the device of `from` | the work is in `stream` |
    ///
    /// # Errors
    ///
    /// Before anything is written: [`ErrorKind::CopyNeeded`](crate::ErrorKind::CopyNeeded) for what this implementation
    /// cannot copy, [`ErrorKind::Layout`](crate::ErrorKind::Layout) where the two sides differ in shape or itemsize or
    /// share bytes, where `to` may have two elements at one address, and for addresses outside the address space,
    /// [`ErrorKind::Device`](crate::ErrorKind::Device) for memory that the driver cannot reach. After that:
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver), and the text says that the elements of `to` are undefined.
    ///
    /// # Safety
    ///
    /// The bytes of both views stay mapped until the work has run, those of `from` are not written and those of `to`
    /// not read by other work meanwhile, and `stream`, if there is one, is alive and already ordered after the last
    /// work on both.
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()>;

    /// Makes many copies from the same device to the same device, as [`copy`](Self::copy) makes one. The default makes
    /// one after another, and refuses to cast.
    ///
    /// # Errors
    ///
    /// Those of [`copy`](Self::copy) and of [`casts`](Self::casts), with the index of the piece. After any error the
    /// elements of all targets are undefined.
    ///
    /// # Safety
    ///
    /// Those of [`copy`](Self::copy), for each piece. No target shares bytes with a side of another piece.
    unsafe fn copy_all(&self, pieces: &[Piece<'_>], stream: Option<Stream>) -> Result<(), Failed> {
        for (index, Piece { cast, .. }) in pieces.iter().enumerate() {
            cast.map_or(Ok(()), no_cast).map_err(|error| Failed { index, error })?;
        }
        for (index, piece) in pieces.iter().enumerate() {
            // SAFETY: the caller's promises.
            unsafe { self.copy(piece.from, piece.to, piece.flips, stream) }.map_err(|error| Failed { index, error })?;
        }
        Ok(())
    }

    /// Plans many copies within one memory, which are made again and again. Nothing is copied. `stream` is one of those
    /// in which they will be made. Returns `None` where a plan gains nothing, which is the default.
    ///
    /// # Errors
    ///
    /// Those of [`copy_all`](Self::copy_all) before anything is launched.
    ///
    /// # Safety
    ///
    /// `stream`, if there is one, is alive.
    unsafe fn plan(
        &self,
        device: Device,
        pieces: &[Piece<'_>],
        stream: Option<Stream>,
    ) -> Result<Option<Box<dyn Planned>>, Failed> {
        let _ = (device, pieces, stream);
        Ok(None)
    }

    /// Checks that [`copy_all`](Self::copy_all) and [`plan`](Self::plan) make this cast, before anything is copied.
    /// Both sides of a piece then have the itemsizes of its dtypes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::CopyNeeded`](crate::ErrorKind::CopyNeeded) where they do not, which is the default.
    fn casts(&self, cast: Cast) -> Result<()> {
        no_cast(cast)
    }

    /// Checks that tensors can be moved to `device` and from it, before memory is allocated for a move.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`](crate::ErrorKind::Device) for a device that this process does not have, and those of the
    /// driver. The default returns none.
    fn reaches(&self, device: Device) -> Result<()> {
        let _ = device;
        Ok(())
    }

    /// Allocates `nbytes` bytes of a device's memory for a target whose own memory cannot be written from outside.
    /// Work on it must be after `stream`, and the memory is reused after it ([`Reuse::InStreamOrder`]). The buffer
    /// holds `keep`, which keeps the stream alive.
    ///
    /// # Errors
    ///
    /// Those of the driver. [`ErrorKind::CopyNeeded`](crate::ErrorKind::CopyNeeded) where this implementation has no
    /// memory, which is the default.
    ///
    /// # Safety
    ///
    /// `stream` is alive until the buffer has been dropped. `keep` may see to that.
    ///
    /// [`Reuse::InStreamOrder`]: crate::Reuse::InStreamOrder
    unsafe fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        keep: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        let _ = (stream, keep);
        let text = format!("cannot allocate {nbytes} bytes on {device}: copy the tensor there with its own framework");
        Err(Error::new(ErrorKind::CopyNeeded, text))
    }

    /// Prepares host memory at these addresses for its first write. It was allocated for a copy on the host, which
    /// fills all of it next; memory of the caller's is never passed. A hint, which changes no byte. The default does
    /// nothing.
    fn prepare(&self, fresh: Range<usize>) {
        let _ = fresh;
    }
}

/// Refuses a cast that nothing makes.
pub(crate) fn no_cast(cast: Cast) -> Result<()> {
    let text =
        format!("cannot cast {} to {} here: cast the source first, with its own framework", cast.from(), cast.to());
    Err(Error::new(ErrorKind::CopyNeeded, text))
}

/// Copies that are planned. Dropping it while they run is allowed.
///
/// # Safety
///
/// As [`Copies`].
pub unsafe trait Planned: Send + Sync {
    /// Makes the copies, as [`Copies::copy_all`] does.
    ///
    /// # Errors
    ///
    /// Those of [`Copies::copy_all`].
    ///
    /// # Safety
    ///
    /// Those of [`Copies::copy_all`], for the pieces that were planned.
    unsafe fn copy(&self, stream: Option<Stream>) -> Result<(), Failed>;
}
