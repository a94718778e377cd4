//! Where a tensor is: in place or copied, read-only or not, and on which side writes are seen.

use super::{Outcome, Pair, as_expected, ensure, same_bytes};
use crate::model::{self, Expected};
use crate::{Case, Observed, words};
use bridge_core::{ErrorKind, Layout, Options, Plan, Result, plan};
use std::ops::Range;

/// Returns the addresses between the lowest and the highest byte of a tensor.
fn extent(tensor: &Observed) -> Result<Range<usize>> {
    let (below, above) = Layout::new(tensor.dtype, &tensor.shape, Some(&tensor.strides), 0)?.byte_extent();
    Ok(tensor.address.saturating_sub(below)..tensor.address.saturating_add(above))
}

/// In place means the same address on the same device, a copy means other memory.
pub(super) fn identity<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, _) = pair.create(case)?;
    let (view, done) = pair.transfer(&tensor, case.copy)?;
    let (source, view) = (pair.from.observe(&tensor)?, pair.to.observe(&view)?);
    ensure!(view.device == source.device, "the view is on {}, not on {}", view.device, source.device);
    if model::numel(&case.spec.shape) == 0 {
        return Ok(());
    }
    if done.plan == Plan::ZeroCopy {
        ensure!(view.address == source.address, "in place, but {:#x} became {:#x}", source.address, view.address);
        let natural = model::natural(view.dtype, pair.to.profile());
        let aligned = pair.to.capabilities().unaligned || view.address.is_multiple_of(natural);
        ensure!(aligned, "in place at {:#x}, which is not a multiple of {natural}", view.address);
    } else {
        let (old, new) = (extent(&source)?, extent(&view)?);
        ensure!(
            old.end <= new.start || new.end <= old.start,
            "a copy, but bytes {new:x?} overlap the source's {old:x?}"
        );
    }
    Ok(())
}

/// `plan` and `Transfer` report what happens, and it is what the target's profile demands.
pub(super) fn honesty<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, _) = pair.create(case)?;
    let source = pair.from.observe(&tensor)?;
    let expected = model::expected(&source, case.spec.pending, pair.profiles(), case.copy);
    let options = Options::default().with_copy(case.copy);
    let planned = pair.from.export(&tensor).and_then(|exported| plan(&exported, pair.to.profile(), &options));
    let planned = as_expected(planned, expected)?;
    let Some((view, done)) = as_expected(pair.transfer(&tensor, case.copy), expected)? else { return Ok(()) };
    let (words, did) = (planned.map_or("an error".into(), words::plan), words::plan(done.plan));
    ensure!(planned == Some(done.plan), "planned: {words}; done: {did}");
    let view = pair.to.observe(&view)?;
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let (copied, bytes) = match expected {
        Expected::Copied => (true, nbytes),
        _ => (false, 0),
    };
    ensure!((done.plan != Plan::ZeroCopy) == copied, "done: {did}; expected: {expected}");
    ensure!(done.bytes_copied == bytes, "reports {} copied bytes, not {bytes}", done.bytes_copied);
    let moved = view.address != source.address;
    ensure!(
        nbytes == 0 || moved == copied,
        "reported: {did}; but the address has {}changed",
        ["not ", ""][moved as usize]
    );
    Ok(())
}

/// Protected memory stays read-only or is refused, memory of tensors that do not change is read-only where the target
/// keeps it so, and a copy is writable. Where nothing writes to the target's tensors, the source says what has become of
/// its memory, when it has got it back.
pub(super) fn read_only<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, bytes) = pair.create(case)?;
    let source = pair.from.observe(&tensor)?;
    ensure!(source.read_only == case.spec.read_only, "the source made a tensor with read_only {}", source.read_only);
    let expected = model::expected(&source, None, pair.profiles(), case.copy);
    let converted = as_expected(pair.transfer(&tensor, case.copy), expected)?;
    if expected == Expected::Refused(ErrorKind::ReadOnly) {
        pair.show();
    }
    let Some((view, _)) = converted else { return Ok(()) };
    let want = expected == Expected::InPlace && (source.read_only || is_kept(pair));
    if want && source.read_only {
        pair.show();
    }
    let old = model::elements(&case.spec, &bytes);
    if !pair.to.capabilities().writes {
        if old.is_empty() {
            return Ok(());
        }
        let seen_there = Observed { read_only: want, ..pair.to.observe(&view)? };
        let expected = model::expected(&seen_there, None, pair.profiles_back(), None);
        let Some((back, _)) = as_expected(pair.back(&view, None), expected)? else { return Ok(()) };
        let is_kept = pair.from.profile().keeps_read_only && pair.from.capabilities().writes;
        let want = expected == Expected::InPlace && (want || is_kept && pair.to.capabilities().immutable);
        let got = pair.from.observe(&back)?.read_only;
        ensure!(got == want, "read_only after the conversion back is {got}, but {want} was expected");
        return same_bytes("the tensor after the conversion back", &pair.from.read(&back)?, &old);
    }
    let got = pair.to.observe(&view)?.read_only;
    ensure!(got == want, "the view's read_only is {got}, but {want} was expected");
    let new = model::random_elements(&case.spec, model::numel(&case.spec.shape), !case.seed);
    let written = pair.to.write(&view, &new);
    if !want {
        written?;
        return same_bytes("the written view", &pair.to.read(&view)?, &new);
    }
    same_bytes("the read-only view after an attempt to write", &pair.to.read(&view)?, &old)?;
    ensure!(written.is_err() || new.is_empty(), "a write through the read-only view was not refused");
    same_bytes("the read-only source", &pair.from.read(&tensor)?, &old)
}

/// Returns whether views of the source's tensors are read-only because those do not change.
fn is_kept<F, T>(pair: &Pair<'_, F, T>) -> bool {
    pair.from.capabilities().immutable && pair.to.profile().keeps_read_only && pair.to.capabilities().writes
}

/// A write on either side that writes is seen on the other if and only if the tensor was converted in place.
pub(super) fn aliasing<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, mut ours) = pair.create(case)?;
    let source = pair.from.observe(&tensor)?;
    let shared = model::expected(&source, None, pair.profiles(), case.copy) == Expected::InPlace;
    let (view, _) = pair.transfer(&tensor, case.copy)?;
    let count = model::numel(&case.spec.shape);
    let mut theirs = model::elements(&case.spec, &ours);

    if pair.from.capabilities().writes {
        let new = model::random_elements(&case.spec, count, case.seed ^ 1);
        model::scatter(&case.spec, &mut ours, &new);
        if shared {
            theirs = new.clone();
        }
        pair.from.write(&tensor, &new)?;
        same_bytes("the source that was written", &pair.from.read(&tensor)?, &new)?;
        same_bytes("the view of the source that was written", &pair.to.read(&view)?, &theirs)?;
        let again = pair.transfer(&tensor, case.copy)?.0;
        same_bytes("a view taken after the write", &pair.to.read(&again)?, &new)?;
    }
    if pair.to.capabilities().writes && !(shared && is_kept(pair)) {
        let new = model::random_elements(&case.spec, count, case.seed ^ 2);
        if shared {
            model::scatter(&case.spec, &mut ours, &new);
        }
        pair.to.write(&view, &new)?;
        same_bytes("the view that was written", &pair.to.read(&view)?, &new)?;
        let seen = pair.from.read(&tensor)?;
        same_bytes("the source of the view that was written", &seen, &model::elements(&case.spec, &ours))?;
    }
    Ok(())
}

/// There, back and there again: the same bits, and the same address as long as every step is in place.
pub(super) fn round_trip<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, bytes) = pair.create(case)?;
    let source = pair.from.observe(&tensor)?;
    let bits = model::elements(&case.spec, &bytes);
    let there = pair.transfer(&tensor, case.copy)?.0;
    let seen_there = pair.to.observe(&there)?;
    let expected = model::expected(&seen_there, None, pair.profiles_back(), None);
    let Some((back, _)) = as_expected(pair.back(&there, None), expected)? else { return Ok(()) };
    drop((tensor, there));
    same_bytes("the tensor after the conversion back", &pair.from.read(&back)?, &bits)?;
    let seen_back = pair.from.observe(&back)?;
    let in_place = model::expected(&source, None, pair.profiles(), case.copy) == Expected::InPlace
        && expected == Expected::InPlace;
    let (start, end) = (source.address, seen_back.address);
    ensure!(!in_place || bits.is_empty() || start == end, "every step was in place, but {start:#x} became {end:#x}");
    if in_place {
        pair.show();
    }
    let again = pair.transfer(&back, None)?.0;
    drop(back);
    same_bytes("the tensor after the second conversion", &pair.to.read(&again)?, &bits)
}
