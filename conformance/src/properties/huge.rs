//! Tensors of more elements than 31 bits can count.

use super::{Outcome, Pair, ensure, same_bytes};
use crate::{Case, model};
use bridge_core::Plan;

/// The last elements of the tensor are the ones that are written and read.
const LAST: usize = 61;

/// A tensor of more than 2^31 elements is converted in place, there and back, with all of them.
pub(super) fn huge<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let Some(tensor) = pair.from.create_unwritten(&case.spec) else { return Ok(()) };
    let tensor = tensor?;
    let start = model::numel(&case.spec.shape) - LAST;
    let Some(last) = pair.from.part(&tensor, start) else { return Ok(()) };
    let elements = model::random_elements(&case.spec, LAST, case.seed);
    pair.from.write(&last?, &elements)?;
    let (view, done) = pair.transfer(&tensor, None)?;
    ensure!(done.plan == Plan::ZeroCopy, "a compact tensor was copied");
    let shape = pair.to.observe(&view)?.shape;
    ensure!(shape == case.spec.shape, "the view has the shape {shape:?}, not {:?}", case.spec.shape);
    if let Some(last) = pair.to.part(&view, start) {
        same_bytes("the last elements of the view", &pair.to.read(&last?)?, &elements)?;
    }
    let (back, _) = pair.back(&view, None)?;
    let shape = pair.from.observe(&back)?.shape;
    ensure!(shape == case.spec.shape, "it came back with the shape {shape:?}, not {:?}", case.spec.shape);
    let last = pair.from.part(&back, start).transpose()?;
    last.map_or(Ok(()), |last| {
        same_bytes("the last elements of the tensor that came back", &pair.from.read(&last)?, &elements)
    })
}
