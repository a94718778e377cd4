//! Tensors as users make them, and what is refused.

use super::{Failure, Outcome, Pair, as_expected, ensure, outstanding, same_bytes};
use crate::model::{self, Expected};
use crate::{Case, Observed, Spec, Usual};
use bridge_core::{ErrorKind, Result};

/// Tensors that are made where the memory of a view must not be.
const TRIES: usize = 4;

/// What can be asked for, and whether kernels make the copies.
pub(super) const CALLS: [(Option<bool>, bool); 5] =
    [(None, true), (None, false), (Some(true), true), (Some(true), false), (Some(false), true)];

/// Each tensor that the framework's users make is converted right, in every way, or is refused with the kind that the
/// framework's subject names. The next conversion is right as well, whatever was refused before it.
pub(super) fn users<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let make = |number, seed| pair.from.usual(number, seed).transpose();
    let made = |number: usize| {
        let made = make(number, case.seed);
        made.map_err(|error| Failure::new(format!("tensor {number} of users is not made: {error}")))
    };
    let mut number = 0;
    while let Some(usual) = made(number)? {
        let (name, leased, first) = (usual.name.clone(), outstanding(), number);
        number += 1;
        let judge = || -> Outcome {
            if let Some(kind) = usual.refused {
                refused(pair, case, &usual.tensor, kind)?;
            } else {
                pair.copies_by(true);
                // Different bytes show whether the result is new memory, where it must not be the original's.
                kept(pair, case, usual, &|| make(first, !case.seed))?;
                for (copy, kernels) in CALLS {
                    pair.copies_by(kernels);
                    made(first)?.map_or(Ok(()), |usual| arrives(pair, &usual, copy).map(drop))?;
                }
            }
            pair.returned(leased)
        };
        judge().map_err(|failure| failure.about(&name))?;
        next(pair, case).map_err(|failure| failure.about("the conversion after it").about(&name))?;
    }
    Ok(())
}

/// The tensor is refused with this kind under all options, by itself and behind another one, whose lease is returned.
fn refused<F, T>(pair: &Pair<'_, F, T>, case: &Case, tensor: &F, kind: ErrorKind) -> Outcome {
    for copy in [None, Some(true), Some(false)] {
        as_expected(pair.transfer(tensor, copy), Expected::Refused(kind))?;
    }
    if pair.conversion_there.is_some() {
        return Ok(());
    }
    let (good, bytes) = pair.create(case)?;
    let both = [(pair.from, &good), (pair.from, tensor)];
    let Err(failure) = pair.transfer_all(&both, None) else {
        return Err(Failure::new("converted behind another tensor, and refused by itself"));
    };
    let is_second = failure.message.starts_with("tensor 1 of 2: ");
    ensure!(is_second && failure.refused == Some(kind), "behind another tensor: {failure}");
    let elements = model::elements(&case.spec, &bytes);
    same_bytes("the tensor before the one that was refused", &pair.from.read(&good)?, &elements)
}

/// The tensor arrives as its framework reads it, in the memory that the profiles demand. Returns the view, whether it
/// shares the memory, and the elements; `None` where the tensor is refused as the profiles say.
fn arrives<F, T>(
    pair: &Pair<'_, F, T>,
    usual: &Usual<'_, F>,
    copy: Option<bool>,
) -> std::result::Result<Option<(T, bool, Vec<u8>)>, Failure> {
    let Usual { tensor, pending, .. } = usual;
    let (source, bytes) = (pair.from.observe(tensor)?, pair.from.read(tensor)?);
    let expected = model::expected(&source, *pending, pair.profiles(), copy);
    let Some((view, _)) = as_expected(pair.transfer(tensor, copy), expected)? else { return Ok(None) };
    let there = pair.to.observe(&view)?;
    ensure!(there.dtype == source.dtype, "{} became {}", source.dtype, there.dtype);
    ensure!(there.shape == source.shape, "shape {:?} became {:?}", source.shape, there.shape);
    same_bytes("the view", &pair.to.read(&view)?, &bytes)?;
    same_bytes("the original", &pair.from.read(tensor)?, &bytes)?;
    let shared = expected == Expected::InPlace && !bytes.is_empty();
    let (old, new) = (source.address, there.address);
    ensure!(bytes.is_empty() || shared == (old == new), "expected: {expected}; but {old:#x} became {new:#x}");
    Ok(Some((view, shared, bytes)))
}

/// A view shows what is written through it, and keeps its memory after the original is dropped. `again` makes another
/// tensor in the same way.
fn kept<'a, F, T>(
    pair: &Pair<'a, F, T>,
    case: &Case,
    usual: Usual<'_, F>,
    again: &dyn Fn() -> Result<Option<Usual<'a, F>>>,
) -> Outcome {
    let Some((view, shared, mut bytes)) = arrives(pair, &usual, None)? else { return Ok(()) };
    let Usual { tensor, afterwards, .. } = usual;
    let source = pair.from.observe(&tensor)?;
    if shared && pair.to.capabilities().writes && !pair.to.observe(&view)?.read_only && is_injective(&source) {
        let plain = Spec::compact(source.dtype, &source.shape);
        bytes = model::random_elements(&plain, model::numel(&source.shape), case.seed);
        pair.to.write(&view, &bytes)?;
        // The write is done when it has been read: the frameworks' streams know nothing of each other.
        same_bytes("the view that was written", &pair.to.read(&view)?, &bytes)?;
        same_bytes("the original of the view that was written", &pair.from.read(&tensor)?, &bytes)?;
    }
    if let Some(afterwards) = afterwards {
        afterwards(&tensor)?;
        same_bytes("the view, after what its user did with the original", &pair.to.read(&view)?, &bytes)?;
    }
    drop(tensor);
    let mut others = Vec::new();
    for _ in 0..if shared { TRIES } else { 0 } {
        others.extend(again()?.map(|usual| usual.tensor));
        others.push(pair.from.allocate(bytes.len())?);
    }
    for other in &others {
        if pair.from.observe(other)?.address.abs_diff(source.address) < model::itemsize(source.dtype) {
            return Err(Failure::last("the source reuses the memory of a view that lives"));
        }
    }
    same_bytes("the view, after the original is gone", &pair.to.read(&view)?, &bytes)
}

/// Returns whether no element lies at the place of another.
pub(super) fn is_injective(tensor: &Observed) -> bool {
    let mut dims = tensor.shape.iter().zip(&tensor.strides);
    model::numel(&tensor.shape) == 0 || dims.all(|(length, stride)| *length < 2 || *stride != 0)
}

/// An ordinary tensor is converted there and back, as if nothing had been refused before.
pub(super) fn next<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let leased = outstanding();
    let (tensor, bytes) = pair.create(case)?;
    let elements = model::elements(&case.spec, &bytes);
    let source = pair.from.observe(&tensor)?;
    let expected = model::expected(&source, None, pair.profiles(), None);
    let (view, _) = pair.transfer(&tensor, None)?;
    let there = pair.to.observe(&view)?;
    let shared = there.address == source.address;
    ensure!(elements.is_empty() || shared == (expected == Expected::InPlace), "expected: {expected}");
    same_bytes("the view", &pair.to.read(&view)?, &elements)?;
    let expected = model::expected(&there, None, pair.profiles_back(), None);
    if let Some((back, _)) = as_expected(pair.back(&view, None), expected)? {
        same_bytes("the tensor after the conversion back", &pair.from.read(&back)?, &elements)?;
    }
    drop((tensor, view));
    pair.returned(leased)
}
