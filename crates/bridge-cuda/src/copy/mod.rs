//! Copies of strided tensors at the speed of the memory: on a CUDA device, on the host, and between the two.
//!
//! [`Copier`] is the one entry: it implements [`Copies`] of core, checks both sides, and calls the module for the kind
//! of memory.

mod floats;
mod host;
mod kernels;
mod moves;
mod plan;

#[doc(hidden)]
pub use moves::{Cut, Cuts, Tick, Trial, ticking};

use bridge_core::{
    Cast, Copies, DType, Device, DeviceBuffer, DeviceKind, Error, ErrorKind, Failed, Keep, Piece, Planned, Result,
    Stream, Strided, overlap, repeats,
};
use moves::prefer_huge_pages;
use std::ops::Range;
use std::ptr;

/// Copies with the kernels of this crate.
///
/// What two layouts and two addresses show is checked before anything is read or launched: see the errors of
/// [`Copies::copy`]. The copier does not see the memory itself, so the caller guarantees the rest:
///
/// - the bytes of both views are mapped and accessible on their devices until the work has run;
/// - no other work writes those of the source or uses those of the target meanwhile;
/// - one memory is not passed under two addresses, such as two mappings of the same pages, or as two devices;
/// - the stream belongs to the device, is alive, and is ordered after the last work on both.
#[derive(Debug, Default)]
pub struct Copier;

#[deny(clippy::missing_trait_methods)]
// SAFETY: a copy that returns no error writes every element.
unsafe impl Copies for Copier {
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Option<Stream>) -> Result<()> {
        check(&from, &to, None, stream)?;
        match stream {
            // SAFETY: the caller's promises.
            None => unsafe { host::copy(from, to, flips) },
            // SAFETY: the caller's promises.
            Some(stream) if from.device == to.device => unsafe { kernels::copy(from, to, flips, stream) },
            // SAFETY: the caller's promises.
            Some(stream) => unsafe { moves::copy(from, to, flips, stream) },
        }
    }

    unsafe fn copy_all(&self, pieces: &[Piece<'_>], stream: Option<Stream>) -> Result<(), Failed> {
        for (index, Piece { from, to, cast, .. }) in pieces.iter().enumerate() {
            check(from, to, *cast, stream).map_err(|error| Failed::new(index, error))?;
        }
        match stream {
            // SAFETY: the caller's promises.
            None => unsafe { host::copy_all(pieces, usize::MAX) },
            // SAFETY: the caller's promises.
            Some(stream) if pieces.iter().all(|piece| piece.from.device == piece.to.device) => unsafe {
                kernels::copy_all(pieces, stream)
            },
            // SAFETY: the caller's promises.
            Some(stream) => unsafe { moves::copy_all(pieces, stream) },
        }
    }

    unsafe fn plan(
        &self,
        device: Device,
        pieces: &[Piece<'_>],
        stream: Option<Stream>,
    ) -> Result<Option<Box<dyn Planned>>, Failed> {
        for (index, Piece { from, to, cast, .. }) in pieces.iter().enumerate() {
            check(from, to, *cast, stream).map_err(|error| Failed::new(index, error))?;
        }
        // On the host nothing is kept that is not found again at once.
        stream.map(|stream| kernels::plan(device, pieces, stream)).transpose()
    }

    fn casts(&self, _: Cast) -> Result<()> {
        Ok(())
    }

    fn reaches(&self, device: Device) -> Result<()> {
        moves::reaches(device)
    }

    unsafe fn allocate(
        &self,
        device: Device,
        nbytes: usize,
        stream: Stream,
        keep: Option<Keep>,
    ) -> Result<Box<dyn DeviceBuffer>> {
        moves::allocate(device, nbytes, stream, keep)
    }

    fn prepare(&self, fresh: Range<usize>) {
        prefer_huge_pages(ptr::with_exposed_provenance_mut(fresh.start), fresh.len());
    }
}

/// Memory that the host reads and writes without a stream.
const ON_HOST: [DeviceKind; 3] = [DeviceKind::CPU, DeviceKind::CUDA_HOST, DeviceKind::CUDA_MANAGED];

/// Refuses two sides that do not fit together, and memory that cannot be what the caller says.
///
/// A target is refused that *may* have two elements at one address: see [`repeats`].
fn check(from: &Strided<'_>, to: &Strided<'_>, cast: Option<Cast>, stream: Option<Stream>) -> Result<()> {
    let (source, target) = (from.layout, to.layout);
    let refused = |text: String| Err(Error::new(ErrorKind::Layout, text));
    if source.shape() != target.shape() {
        return refused(format!(
            "the source has shape {:?} and the target {:?}: pass a target of the same shape",
            source.shape(),
            target.shape()
        ));
    }
    let fits = match cast {
        None => source.itemsize() == target.itemsize(),
        Some(cast) => {
            [cast.from(), cast.to()].map(DType::itemsize) == [source, target].map(|side| Some(side.itemsize()))
        }
    };
    if !fits {
        return refused(format!(
            "elements of {} bytes do not fit into elements of {} bytes: cast one side first",
            source.itemsize(),
            target.itemsize()
        ));
    }
    if source.numel() == 0 {
        return Ok(());
    }
    let (read, written) = (source.extent_at(from.data, None)?, target.extent_at(to.data, None)?);
    if !target.is_compact() && repeats(target) {
        return refused(format!(
            "the target may have two elements at one address ({target}): pass one without repeated or overlapping elements"
        ));
    }
    let on_host = ON_HOST.contains(&from.device.kind) && ON_HOST.contains(&to.device.kind);
    let near = (on_host || from.device == to.device) && read.start < written.end && written.start < read.end;
    if near && overlap((from.data, source), (to.data, target)) {
        return refused("the source and the target share memory: copy the source elsewhere first".into());
    }
    let streamless = [from.device, to.device].into_iter().find(|device| !ON_HOST.contains(&device.kind));
    if let (None, Some(device)) = (stream, streamless) {
        let text = format!("a copy on {device} needs a stream: pass one of that device");
        return Err(Error::new(ErrorKind::Device, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::Layout;

    fn layout(dtype: DType, dims: &[(i64, i64)]) -> Layout {
        let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
        Layout::new(dtype, &shape, Some(&strides), 0).unwrap()
    }

    /// Returns how a copy between these views is refused. Nothing is mapped at their addresses: a copy that is not
    /// refused crashes.
    fn refusal(from: (Device, usize, &Layout), to: (Device, usize, &Layout)) -> (ErrorKind, String) {
        let side = |(device, data, layout)| Strided { device, data, layout };
        // SAFETY: not met, which is what the check is to find before anything is accessed.
        let error = unsafe { Copier.copy(side(from), side(to), 0, None) }.unwrap_err();
        (error.kind(), error.to_string())
    }

    #[test]
    fn sides_that_do_not_fit_are_refused() {
        let (row, column) = (layout(DType::UINT8, &[(1, 4), (4, 1)]), layout(DType::UINT8, &[(4, 1), (1, 1)]));
        let (kind, text) = refusal((Device::CPU, 64, &row), (Device::CPU, 128, &column));
        assert_eq!(kind, ErrorKind::Layout);
        assert!(text.contains("same shape"), "{text}");
        let wide = layout(DType::INT16, &[(1, 4), (4, 1)]);
        let (kind, text) = refusal((Device::CPU, 64, &row), (Device::CPU, 128, &wide));
        assert_eq!(kind, ErrorKind::Layout);
        assert!(text.contains("cast"), "{text}");
    }

    #[test]
    fn a_target_with_two_elements_at_one_address_is_refused_and_such_a_source_is_copied() {
        let plain = layout(DType::INT32, &[(3, 3), (3, 1)]);
        for repeated in [&[(3, 3), (3, 0)][..], &[(3, 0), (3, 1)], &[(3, 1), (3, 1)], &[(3, -2), (3, 1)]] {
            let repeated = layout(DType::INT32, repeated);
            let (kind, text) = refusal((Device::CPU, 1 << 12, &plain), (Device::CPU, 1 << 13, &repeated));
            assert_eq!(kind, ErrorKind::Layout);
            assert!(text.contains("two elements at one address"), "{text}");
        }
        let broadcast = layout(DType::INT32, &[(3, 0), (3, 1)]);
        let (row, mut copy) = ([1i32, 2, 3], [0i32; 9]);
        let (data, out) = (row.as_ptr().expose_provenance(), copy.as_mut_ptr().expose_provenance());
        let side = |data, layout| Strided { device: Device::CPU, data, layout };
        // SAFETY: both arrays live, and hold what the layouts reach; no other code uses them.
        unsafe { Copier.copy(side(data, &broadcast), side(out, &plain), 0, None) }.unwrap();
        assert_eq!(copy, [1, 2, 3, 1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn a_target_that_shares_bytes_with_the_source_is_refused_and_one_between_them_is_not() {
        let line = layout(DType::INT32, &[(4, 1)]);
        let backwards = layout(DType::INT32, &[(4, -1)]);
        for (from, to) in [((64, &line), (64, &line)), ((64, &line), (79, &line)), ((64, &line), (76, &backwards))] {
            let (kind, text) = refusal((Device::CPU, from.0, from.1), (Device::CPU, to.0, to.1));
            assert_eq!(kind, ErrorKind::Layout);
            assert!(text.contains("share memory"), "{text}");
        }
        // Odd elements into even ones: the extents overlap, the bytes do not.
        let every_second = layout(DType::INT32, &[(4, 2)]);
        let mut both = [1i32, 0, 2, 0, 3, 0, 4, 0];
        let data = both.as_mut_ptr().expose_provenance();
        let side = |data| Strided { device: Device::CPU, data, layout: &every_second };
        // SAFETY: the array lives and holds what both layouts reach; no other code uses it.
        unsafe { Copier.copy(side(data), side(data + 4), 0, None) }.unwrap();
        assert_eq!(both, [1, 1, 2, 2, 3, 3, 4, 4]);
    }

    #[test]
    fn addresses_that_are_none_are_refused_where_there_are_elements() {
        let line = layout(DType::INT32, &[(4, 1)]);
        let backwards = layout(DType::INT32, &[(4, -1)]);
        for (from, to) in [((0, &line), (64, &line)), ((64, &line), (0, &line)), ((64, &line), (8, &backwards))] {
            let (kind, text) = refusal((Device::CPU, from.0, from.1), (Device::CPU, to.0, to.1));
            assert_eq!(kind, ErrorKind::Layout);
            assert!(text.contains("leaves the address space"), "{text}");
        }
        let empty = layout(DType::INT32, &[(0, 1)]);
        let side = Strided { device: Device::CPU, data: 0, layout: &empty };
        // SAFETY: there are no elements.
        unsafe { Copier.copy(side, side, 0, None) }.unwrap();
    }

    #[test]
    fn a_cast_is_between_elements_of_its_dtypes() {
        let (half, single) = (layout(DType::FLOAT16, &[(2, 1)]), layout(DType::FLOAT32, &[(2, 1)]));
        let cast = Some(Cast::new(DType::FLOAT16, DType::FLOAT32).unwrap());
        let (source, mut copy) = ([0x3c00u16, 0xc000], [0f32; 2]);
        let (data, out) = (source.as_ptr().expose_provenance(), copy.as_mut_ptr().expose_provenance());
        let side = |data, layout| Strided { device: Device::CPU, data, layout };
        let piece = Piece { from: side(data, &half), to: side(out, &single), flips: 0, cast };
        // SAFETY: both arrays live, and hold what the layouts reach; no other code uses them.
        unsafe { Copier.copy_all(&[piece], None) }.unwrap();
        assert_eq!(copy, [1.0, -2.0]);
        for (from, to) in [(&half, &half), (&single, &single), (&single, &half)] {
            let misfit = Piece { from: side(1 << 12, from), to: side(1 << 13, to), flips: 0, cast };
            // SAFETY: not met, which is what the check is to find before anything is accessed.
            let failed = unsafe { Copier.copy_all(&[piece, misfit], None) }.unwrap_err();
            assert_eq!((failed.index, failed.error.kind()), (1, ErrorKind::Layout));
            assert!(failed.error.to_string().contains("cast"), "{}", failed.error);
        }
    }

    #[test]
    fn one_address_is_one_memory_on_one_device_and_on_the_host() {
        let line = layout(DType::INT32, &[(4, 1)]);
        let [host, pinned, cuda, other] =
            [Device::CPU, Device { kind: DeviceKind::CUDA_HOST, index: 0 }, Device::cuda(0), Device::cuda(1)];
        for (from, to) in [(host, pinned), (pinned, host), (cuda, cuda)] {
            let (kind, text) = refusal((from, 64, &line), (to, 64, &line));
            assert!(kind == ErrorKind::Layout && text.contains("share memory"), "{from} to {to}: {text}");
        }
        for (from, to) in [(cuda, host), (host, cuda), (cuda, other)] {
            for distance in [-8, 0, 8] {
                let (kind, text) = refusal((from, 64, &line), (to, 64usize.wrapping_add_signed(distance), &line));
                assert!(kind == ErrorKind::Device, "{from} to {to}, {distance}: {text}");
            }
        }
    }

    #[test]
    fn memory_of_a_device_is_not_copied_without_a_stream() {
        let line = layout(DType::INT32, &[(4, 1)]);
        let cuda = Device::cuda(0);
        for (from, to) in [(cuda, Device::CPU), (Device::CPU, cuda), (cuda, cuda)] {
            let (kind, text) = refusal((from, 64, &line), (to, 1 << 12, &line));
            assert_eq!(kind, ErrorKind::Device);
            assert!(text.contains("pass one of that device"), "{text}");
        }
    }
}
