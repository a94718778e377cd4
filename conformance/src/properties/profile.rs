//! The target's profile next to its framework's own import, because a profile that asks for too much turns every
//! transfer into a copy, which all other properties accept.

use super::{Outcome, Pair, ensure};
use crate::model::{self, Expected};
use crate::{Case, Observed};

/// What the framework's own import takes in place, the profile takes in place.
pub(super) fn profile<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let Some(own) = pair.native.as_ref() else { return Ok(()) };
    let (tensor, _) = pair.create(case)?;
    // Frameworks ignore that memory is protected, where the profile does not.
    let seen = Observed { read_only: false, ..pair.from.observe(&tensor)? };
    let (target, can) = (pair.to.profile(), pair.to.capabilities());
    let least = can.imports.map_or(1, |imports| imports.max(model::natural(seen.dtype, target)));
    // Where a framework has no negative strides, its import may end the process.
    let strides = can.negative_strides || seen.strides.iter().all(|stride| *stride >= 0);
    let strides = strides && (can.imports_strides || seen.strides == model::row_major(&seen.shape));
    if model::numel(&seen.shape) == 0 || !seen.address.is_multiple_of(least) || !strides {
        return Ok(());
    }
    // What its own import refuses says nothing: the adapter may do more.
    let Some(Ok(taken)) = own(&tensor) else { return Ok(()) };
    let taken = pair.to.observe(&taken)?;
    if (taken.address, taken.dtype, &taken.shape) != (seen.address, seen.dtype, &seen.shape) {
        return Ok(());
    }
    let expected = model::expected(&seen, None, pair.profiles(), None);
    ensure!(
        expected == Expected::InPlace,
        "{}'s own import takes “{seen}” in place, and by the profile it is {expected}: ask for less",
        target.name
    );
    pair.show();
    Ok(())
}
