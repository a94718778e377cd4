//! What a tensor is: its elements, dtype, shape and strides.

use super::{Outcome, Pair, as_expected, ensure, same_bytes};
use crate::Case;
use crate::model::{self, Expected};
use bridge_core::Strides;

/// The elements arrive bit for bit, and the source keeps them.
pub(super) fn values<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, bytes) = pair.create(case)?;
    let expected = model::elements(&case.spec, &bytes);
    same_bytes("the source, before the conversion", &pair.from.read(&tensor)?, &expected)?;
    let (view, _) = pair.transfer(&tensor, case.copy)?;
    same_bytes("the view", &pair.to.read(&view)?, &expected)?;
    same_bytes("the source, after the conversion", &pair.from.read(&tensor)?, &expected)
}

/// Every dtype is converted as itself, or is refused just as the target's profile says.
pub(super) fn dtype<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, bytes) = pair.create(case)?;
    let source = pair.from.observe(&tensor)?;
    ensure!(source.dtype == case.spec.dtype, "the source made {} instead of {}", source.dtype, case.spec.dtype);
    let expected = model::expected(&source, None, pair.profiles(), case.copy);
    let Some((view, _)) = as_expected(pair.transfer(&tensor, case.copy), expected)? else { return Ok(()) };
    let view_dtype = pair.to.observe(&view)?.dtype;
    ensure!(view_dtype == source.dtype, "{} became {view_dtype}", source.dtype);
    same_bytes("the view", &pair.to.read(&view)?, &model::elements(&case.spec, &bytes))
}

/// Shape and strides are those of the source, or compact in a copy.
pub(super) fn shape<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, _) = pair.create(case)?;
    let source = pair.from.observe(&tensor)?;
    let expected = model::expected(&source, None, pair.profiles(), case.copy);
    let (view, _) = pair.transfer(&tensor, case.copy)?;
    let view = pair.to.observe(&view)?;
    ensure!(view.shape == case.spec.shape, "shape {:?} became {:?}", case.spec.shape, view.shape);
    if model::numel(&view.shape) == 0 {
        return Ok(());
    }
    let in_place = expected == Expected::InPlace;
    let want = if in_place { source.strides } else { model::row_major(&case.spec.shape) };
    // Frameworks also read the order of dimensions from strides of length 1: those that take any strides keep them.
    let kept = in_place && pair.to.profile().strides != Strides::Compact;
    let differs = |(length, (got, want)): (&i64, (&i64, &i64))| (*length > 1 || kept && *want >= 0) && got != want;
    let wrong = view.shape.iter().zip(view.strides.iter().zip(&want)).any(differs);
    ensure!(!wrong, "{:?} has strides {:?}, but {want:?} were expected", view.shape, view.strides);
    Ok(())
}
