//! Which kernel copies a plane.

use super::plane::{Kernel, Plane};
use super::{channels, lines, tiles};

/// Returns the kernel for planes like this one.
pub(super) fn kernel(plane: &Plane) -> Kernel {
    let transposed = || tiles::kernel(plane).or_else(|| channels::kernel(plane));
    plane.is_transposed().then(transposed).flatten().unwrap_or_else(|| lines::kernel(plane))
}
