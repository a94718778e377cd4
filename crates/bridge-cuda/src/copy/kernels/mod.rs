//! Copies on a CUDA device, by the kernels of this crate.

mod casts;
mod choose;
mod many;
#[cfg(test)]
mod on_host;
mod parameters;
mod pieces;
mod table;
#[cfg(test)]
mod tests;

use crate::Kernels;
use crate::copy::plan::Walk;
use bridge_core::{Device, Error, ErrorKind, Layout, Piece, Result, Stream, Strided};
use casts::Walked;
use choose::{Launch, Parameters, choose};
pub(crate) use many::{copy_all, plan};
use parameters::Sides;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use table::Kernel;

// SAFETY: the image is what the compiler of kernels wrote, whole and aligned.
static KERNELS: Kernels = unsafe { Kernels::new(table::IMAGE, table::KERNELS) };

/// Fills `to` with the elements of `from`, in `stream` of the device that both are on.
///
/// # Errors
///
/// [`ErrorKind::CopyNeeded`] where the kernels cannot copy this or cannot be loaded, before anything is launched;
/// [`ErrorKind::Driver`] where a launch fails.
///
/// # Safety
///
/// That of [`bridge_core::Copies::copy`].
pub(crate) unsafe fn copy(from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Stream) -> Result<()> {
    if from.layout.numel() == 0 {
        return Ok(());
    }
    if flips == 0
        && let Some(below) = in_one_run(from.layout, to.layout)
    {
        let start = |side: Strided<'_>| (side.device, side.data - below);
        // SAFETY: the caller's promises.
        return unsafe { crate::link()?.copy(start(from), start(to), from.layout.nbytes(), stream) };
    }
    let Some(launches) = planned(&from, &to, flips) else {
        return Err(askew());
    };
    for (done, launch) in launches.iter().enumerate() {
        let Launch { kernel, blocks, shared, parameters } = launch;
        let launch = crate::Launch::new(*kernel as usize, *blocks, kernel.threads()).with_shared(*shared);
        let at = |sides: Sides| sides.at(from.data, to.data);
        // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
        let launched = unsafe {
            match parameters {
                Parameters::Flat(flat) => {
                    KERNELS.launch(from.device, stream, launch, &parameters::Flat { sides: at(flat.sides), ..**flat })
                }
                Parameters::Box(one) => {
                    KERNELS.launch(from.device, stream, launch, &parameters::Box { sides: at(one.sides), ..**one })
                }
                Parameters::Tile(tile) => {
                    KERNELS.launch(from.device, stream, launch, &parameters::Tile { sides: at(tile.sides), ..**tile })
                }
            }
        };
        launched.map_err(|error| halfway(done, error))?;
    }
    Ok(())
}

/// Returns the bytes below the first element where both sides are one run of memory in the same order.
fn in_one_run(from: &Layout, to: &Layout) -> Option<usize> {
    let (below, above) = from.byte_extent();
    let may_be = from.strides() == to.strides() && below + above == from.nbytes();
    let is_run = || Walk::new(from, to).is_some_and(|walk| walk.widen().dims.is_empty());
    match from.is_compact() && to.is_compact() {
        true => Some(0),
        false => (may_be && is_run()).then_some(below),
    }
}

/// Makes a copy of any kind: see [`copy`].
///
/// # Errors
///
/// Those of [`copy`].
///
/// # Safety
///
/// That of [`bridge_core::Copies::copy_all`].
unsafe fn one(piece: &Piece<'_>, stream: Stream) -> Result<()> {
    let Some(cast) = piece.cast else {
        // SAFETY: the caller's promises.
        return unsafe { copy(piece.from, piece.to, piece.flips, stream) };
    };
    for (done, Walked { cast, dims, blocks }) in casts::walked(piece, cast).into_iter().enumerate() {
        let casts = parameters::Casts::only(cast, &dims);
        // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
        unsafe { launch(piece.from.device, Kernel::Cast, blocks, &casts, stream) }
            .map_err(|error| halfway(done, error))?;
    }
    Ok(())
}

/// Launches a kernel without dynamic shared memory.
///
/// # Safety
///
/// The parameters are those of the kernel, and it touches only memory as [`bridge_core::Copies::copy_all`] says.
unsafe fn launch<P: Copy>(device: Device, kernel: Kernel, blocks: u32, parameters: &P, stream: Stream) -> Result<()> {
    let launch = crate::Launch::new(kernel as usize, blocks, kernel.threads());
    // SAFETY: the caller's promises.
    unsafe { KERNELS.launch(device, stream, launch, parameters) }
}

/// Returns the error of a launch after others.
fn halfway(done: usize, error: Error) -> Error {
    match done {
        0 => error,
        _ => {
            Error::new(error.kind(), format!("{error}: the elements of the target are undefined now")).caused_by(error)
        }
    }
}

/// Returns the error for bits that are to be flipped in elements that are not aligned.
fn askew() -> Error {
    let text = "bits are to be flipped in elements that are not aligned: copy them with their own framework first";
    Error::new(ErrorKind::CopyNeeded, text)
}

/// What a plan depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    shape: SmallVec<[i64; 6]>,
    from: SmallVec<[i64; 6]>,
    to: SmallVec<[i64; 6]>,
    itemsize: usize,
    beyond: (usize, usize),
    flips: u128,
}

/// The most plans that a thread remembers.
const REMEMBERED: usize = 256;

type Planned = Option<Rc<[Launch]>>;

/// Plans the copy, or finds the plan of an equal one.
fn planned(from: &Strided<'_>, to: &Strided<'_>, flips: u128) -> Planned {
    thread_local!(static PLANS: RefCell<HashMap<Key, Planned>> = RefCell::default());
    let strides = |layout: &Layout| layout.strides().iter().copied().collect();
    let key = Key {
        shape: from.layout.shape().iter().copied().collect(),
        from: strides(from.layout),
        to: strides(to.layout),
        itemsize: from.layout.itemsize(),
        beyond: (from.data % 16, to.data % 16),
        flips,
    };
    let beyond = key.beyond;
    let plan = || match Walk::new(from.layout, to.layout) {
        Some(walk) => choose(walk, beyond, flips).map(Rc::from),
        None => Some(Rc::from([])),
    };
    PLANS.with_borrow_mut(|plans| {
        if let Some(known) = plans.get(&key) {
            return known.clone();
        }
        if plans.len() == REMEMBERED {
            plans.clear();
        }
        let planned: Planned = plan();
        plans.insert(key, planned.clone());
        planned
    })
}
