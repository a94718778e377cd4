//! Views of views, over three frameworks where there are three.

use super::{Failure, Outcome, Pair, as_expected, ensure, same_bytes};
use crate::model::{self, Expected, Random};
use crate::{Case, Observed, Spec, Subject};
use bridge_core::{ErrorKind, Options, transfer};

/// A view, and what is known of it.
struct Link<X> {
    view: X,
    /// Whether its memory is protected: a framework that would write to it does not get it.
    protected: bool,
    /// Whether its memory is that of a tensor which never changes.
    constant: bool,
    /// The address of the first tensor, as long as every step was in place.
    address: Option<usize>,
}

/// From the source to the target, a part of the view to a third framework, and back to the source: the bits, the address
/// and the protection stay, whatever of the chain is dropped. Then a tensor that is not protected takes the same way, most likely at the same
/// address: nothing is left of the one before.
pub(super) fn chain<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    if model::numel(&case.spec.shape) == 0 {
        // There is no memory to protect.
        return Ok(());
    }
    let mut random = Random::new(case.seed);
    for protected in [case.spec.read_only, false] {
        let spec = Spec { read_only: protected, ..case.spec.clone() };
        let (tensor, bytes) = pair.create(&Case { spec, seed: random.bits(), ..case.clone() })?;
        once(pair, case, tensor, &model::elements(&case.spec, &bytes), &mut random)
            .map_err(|failure| Failure { message: format!("protected: {protected}: {failure}"), ..failure })?;
    }
    Ok(())
}

fn once<F, T>(pair: &Pair<'_, F, T>, case: &Case, tensor: F, bits: &[u8], random: &mut Random) -> Outcome {
    let seen = pair.from.observe(&tensor)?;
    // SAFETY: the case only reads the views.
    let options =
        unsafe { Options::default().with_copy(case.copy).with_read_only(seen.read_only && random.below(2) == 0) };
    let first = Link { view: tensor, protected: seen.read_only, constant: false, address: Some(seen.address) };
    let Some(there) = step(pair, pair.from, pair.to, &first, &options)? else { return Ok(()) };
    // Another view of the same memory, which is dropped at once.
    drop(step(pair, pair.from, pair.to, &first, &options)?);
    let (there, bits) = part(pair, there, bits, random)?;
    let bits = &bits[..];
    let onward = match pair.third {
        Some(third) => step(pair, pair.to, third, &there, &Options::default())?.map(|onward| (third, onward)),
        None => None,
    };
    let (last_of, last) = onward.as_ref().map_or((pair.to, &there), |(third, onward)| (*third, onward));
    let Some(back) = step(pair, last_of, pair.from, last, &Options::default())? else { return Ok(()) };
    // The chain is dropped from either end or from the middle. What is left keeps the memory.
    let (mut first, mut there, mut onward) = (Some(first), Some(there), onward);
    for end in [random.below(3), random.below(3), 0, 1, 2] {
        match end {
            0 => drop(first.take()),
            1 => drop(there.take()),
            _ => drop(onward.take()),
        }
        let mut garbage = pair.from.allocate(bits.len().max(1))?;
        pair.from.fill(&mut garbage, 0x5a)?;
        if let Some(there) = &there {
            step(pair, pair.to, pair.from, there, &Options::default())?;
        }
        if let Some((third, onward)) = &onward {
            same_bytes("the view of the third framework", &third.read(&onward.view)?, bits)?;
        }
    }
    same_bytes("what came back", &pair.from.read(&back.view)?, bits)
}

/// Returns a part of the view in every second case, where its framework makes such views, and the bits of the part.
fn part<F, T>(
    pair: &Pair<'_, F, T>,
    whole: Link<T>,
    bits: &[u8],
    random: &mut Random,
) -> Result<(Link<T>, Vec<u8>), Failure> {
    let rows = pair.to.observe(&whole.view)?.shape.first().map_or(0, |rows| *rows as usize);
    let start = random.below(2) * random.below(rows.max(1));
    let made = if start > 0 { pair.to.part(&whole.view, start).transpose()? } else { None };
    let Some(view) = made else { return Ok((whole, bits.to_vec())) };
    let address = whole.address.map(|_| pair.to.observe(&view)).transpose()?.map(|seen| seen.address);
    Ok((Link { view, address, ..whole }, bits[bits.len() / rows * start..].to_vec()))
}

/// Takes a view one step further, and judges the result. Returns `None` where it must be, and was, refused.
fn step<F, T, A, B>(
    pair: &Pair<'_, F, T>,
    from: &dyn Subject<Tensor = A>,
    to: &dyn Subject<Tensor = B>,
    link: &Link<A>,
    options: &Options,
) -> Result<Option<Link<B>>, Failure> {
    let names = format!("{} → {}", from.name(), to.name());
    let tensor = Observed { read_only: link.protected, ..from.observe(&link.view)? };
    let expected = match model::expected(&tensor, None, (from.profile(), to.profile()), options.copy) {
        Expected::Refused(ErrorKind::ReadOnly) if options.is_read_only() => Expected::InPlace,
        expected => expected,
    };
    let converted = transfer(from, to, &link.view, pair.ordering(), options);
    pair.see(converted.as_ref().map(|(_, done)| done.plan).map_err(drop));
    let converted = as_expected(converted, expected).map_err(|failure| {
        let message = format!("{names}: {failure}");
        Failure { message, ..failure }
    })?;
    let Some((view, _)) = converted else { return Ok(None) };
    let seen = to.observe(&view)?;
    let in_place = expected == Expected::InPlace;
    // A framework that writes to it knows it as memory like any other.
    let can = from.capabilities();
    let keeps = in_place && to.profile().keeps_read_only;
    let constant = keeps && (link.constant || can.immutable && !can.writes);
    // What does not say that it may be written to is protected, once a framework keeps it read-only.
    let unstated = keeps && can.immutable && can.writes;
    // What the caller promises not to write to is a constant from there on.
    let promised = options.is_read_only() && !to.profile().keeps_read_only;
    let protected = in_place && link.protected && !promised || unstated;
    let address = link.address.filter(|_| in_place);
    let moved = address.is_some_and(|address| address != seen.address);
    ensure!(!moved, "{names}: in place, but {:#x} became {:#x}", tensor.address, seen.address);
    if to.capabilities().writes {
        let (told, want) = (seen.read_only, (protected || constant) && to.profile().keeps_read_only);
        ensure!(told == want, "{names}: the view's read_only is {told}, but {want} was expected");
    }
    Ok(Some(Link { view, protected, constant, address: address.map(|_| seen.address) }))
}
