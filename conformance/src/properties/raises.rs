//! A framework that raises, inside an adapter and where a tensor is dropped.

use super::users::{CALLS, next};
use super::{Failure, Outcome, Pair, ensure, outstanding, same_bytes};
use crate::{Case, Raised, model, words};
use bridge_core::{ErrorKind, Result, Transfer};

/// Where a function of either framework raises that an adapter calls, before or after it has done its work, the error
/// has the kind of the exception and its words, no lease is kept, and the next conversion is right. What is dropped
/// while an exception is pending leaves that as it is.
pub(super) fn raises<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let before = pair.memory()?;
    each(pair, case, &|number, body| pair.from.raising(number, body))?;
    if !pair.sides().same_framework() {
        each(pair, case, &|number, body| pair.to.raising(number, body))?;
    }
    dropped(pair, case)?;
    pair.is_back(before)
}

/// Runs a body while a function raises: [`Subject::raising`] of either side.
type Raising<'a> = &'a dyn Fn(usize, &mut dyn FnMut()) -> Option<Result<Raised>>;

/// Each function raises in turn, in every way that calls it.
fn each<F, T>(pair: &Pair<'_, F, T>, case: &Case, raising: Raising<'_>) -> Outcome {
    let (tensor, bytes) = pair.create(case)?;
    let elements = model::elements(&case.spec, &bytes);
    let leased = outstanding();
    for (number, (copy, kernels)) in (0..).flat_map(|number| CALLS.map(|call| (number, call))) {
        pair.copies_by(kernels);
        let mut converted = None;
        let Some(raised) = raising(number, &mut || converted = Some(pair.transfer(&tensor, copy))) else { break };
        let raised = raised?;
        let Some(converted) = converted else { return Err(Failure::new("`raising` did not run what it was given")) };
        let judged = ends_well(pair, &raised, converted, copy, &elements).and_then(|()| pair.returned(leased));
        judged.map_err(|failure| failure.about(&raised.name))?;
        if raised.called {
            same_bytes("the source", &pair.from.read(&tensor)?, &elements)?;
            next(pair, case).map_err(|failure| failure.about("the conversion after it").about(&raised.name))?;
        }
    }
    Ok(())
}

/// The conversion during which a function may have raised ends in a typed error, or is right.
fn ends_well<F, T>(
    pair: &Pair<'_, F, T>,
    raised: &Raised,
    converted: Result<(T, Transfer)>,
    copy: Option<bool>,
    elements: &[u8],
) -> Outcome {
    let Raised { kind, called, reaches, .. } = raised;
    match converted {
        Ok((view, _)) => {
            ensure!(!called || !reaches, "the conversion hides that the function raised");
            same_bytes("the view", &pair.to.read(&view)?, elements)
        }
        // What asks for no copy may need one.
        Err(error) if !called && copy == Some(false) && error.kind() == ErrorKind::CopyNeeded => Ok(()),
        Err(error) => {
            ensure!(called, "no function raised, and the conversion failed: {error}");
            let (got, want) = (words::kind(error.kind()), words::kind(*kind));
            ensure!(error.kind() == *kind, "refused with the kind “{got}” instead of “{want}”: {error}");
            let told = error.to_string().contains(Raised::WORDS);
            ensure!(told, "the error does not say what was raised: {error}");
            Ok(())
        }
    }
}

/// The last view of a memory is dropped while an exception is pending, on either side.
fn dropped<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let leased = outstanding();
    let (tensor, _) = pair.create(case)?;
    let (view, _) = pair.transfer(&tensor, None)?;
    let back = pair.back(&view, None);
    drop(tensor);
    pair.to.drop_amid_exception(view)?;
    if let Ok((back, _)) = back {
        pair.from.drop_amid_exception(back)?;
    }
    pair.returned(leased)?;
    next(pair, case)
}
