//! One conversion, from the keywords to the result, and the transfers that the rest of the package makes.
//!
//! Every function here takes the [`Call`] that is recorded, if one is. Without it a transfer is core's own, unless this
//! process has memory of another one. Else the adapters are looked at ([`Seen`]): for a trace, for `truebridge.debug`,
//! and to refuse memory of a process that has ended.

mod seen;

use crate::debug::Owned;
use crate::errors::into_python;
use crate::frameworks::{self, AnyAdapter, Framework, not_a_capsule};
use crate::immutable::Exposed;
use crate::options::Keywords;
use crate::ordering::ordering;
use crate::progress::{self, Shown};
use crate::trace::{self, Call, Outcome};
use crate::trees::{self, Leaf, Tree};
use bridge_core::{
    Adapter, Device, DeviceKind, Error, Export, Failed, Misfit, Options, Pair, Prepared, Result, Transfer,
    copied_into_by,
};
use bridge_ipc::{Leases, Message, Writing};
use bridge_pyo3::{PyTensor, together};
use pyo3::prelude::*;
use seen::Seen;
use std::cell::{OnceCell, RefCell};

/// Converts a tensor, or each tensor of a tree, for a user: warns of results that let the user write to memory that its
/// framework never changes.
#[inline(always)]
pub(crate) fn convert<'py>(x: &PyTensor<'py>, to: Framework, keywords: Keywords<'_, 'py>) -> PyResult<PyTensor<'py>> {
    let exposed = OnceCell::<Exposed>::new();
    let converted = run(x, to, keywords, Some(&exposed))?;
    if let Some(exposed) = exposed.get() {
        exposed.warn(x.py())?;
    }
    Ok(converted)
}

/// Converts a tensor, or each tensor of a tree, for the package: without a warning, and without a watch for writes.
pub(crate) fn convert_inside<'py>(
    x: &PyTensor<'py>,
    to: Framework,
    keywords: Keywords<'_, 'py>,
) -> PyResult<PyTensor<'py>> {
    run(x, to, keywords, None)
}

fn run<'py>(
    x: &PyTensor<'py>,
    to: Framework,
    keywords: Keywords<'_, 'py>,
    exposed: Option<&OnceCell<Exposed>>,
) -> PyResult<PyTensor<'py>> {
    let py = x.py();
    let note =
        |from: &dyn Adapter<Tensor = PyTensor<'py>>, to: &dyn Adapter<Tensor = PyTensor<'py>>, done: &Transfer| {
            if let Some(exposed) = exposed.filter(|_| done.shares_immutable) {
                exposed.get_or_init(Exposed::default).note(from, to);
            }
        };
    let convert = |call: Option<&Call>| {
        let (to, options, is_through_host) = (to.open(py)?, keywords.read()?, keywords.through_host()?);
        let options = options.with_watch(exposed.is_some());
        // A class that was met before is that of a tensor.
        let known = frameworks::seen(x).map(|framework| framework.open(py)).transpose()?;
        let tree = if known.is_some() { None } else { Tree::of(x)? };
        match tree {
            None => {
                let from = known.map_or_else(|| trees::source_of(x), Ok)?;
                let x = keywords.detached(x)?;
                let (converted, done) = match is_through_host {
                    true => through_host(call, &from, &to, &x, &options)?,
                    false => transferred(call, &*from, &*to, &x, &options)?,
                };
                note(&*from, &*to, &done);
                Ok(converted)
            }
            Some(tree) => tree.map(x, |leaves| {
                let mut tensors = Vec::with_capacity(leaves.len());
                for (index, (_, tensor)) in leaves.iter().enumerate() {
                    tensors.push(keywords.detached(tensor).map_err(|error| Failed::new(index, error))?);
                }
                if is_through_host {
                    let converted = leaves.iter().zip(&tensors).enumerate().map(|(index, ((from, _), tensor))| {
                        let converted = through_host(call, from, &to, tensor, &options);
                        let (converted, done) = converted.map_err(|error| Failed::new(index, error))?;
                        note(&**from, &*to, &done);
                        Ok(converted)
                    });
                    return converted.collect();
                }
                progress::expect(|| to_move(leaves, options.device));
                let leaves: Vec<(&dyn Adapter<Tensor = PyTensor<'py>>, _)> =
                    leaves.iter().zip(&tensors).map(|((from, _), tensor)| (&**from as _, tensor)).collect();
                let converted = transferred_all(call, &leaves, &*to, &options)?;
                leaves.iter().zip(&converted).for_each(|((from, _), (_, done))| note(*from, &*to, done));
                Ok(converted.into_iter().map(|(tensor, _)| tensor).collect())
            }),
        }
    };
    let shown = keywords.progress.map(|progress| Shown::begin(py, progress)).transpose()?;
    let converted = trace::call("convert", || to.name(), convert).map_err(|error| into_python(py, error));
    match shown {
        None => converted,
        Some(shown) => shown.end(converted),
    }
}

/// Returns the bytes of the tensors that go to another device.
fn to_move<'py>(leaves: &[Leaf<'py>], to: Option<Device>) -> usize {
    let nbytes = |(from, tensor): &Leaf<'py>| {
        let there = from.borrow(tensor).ok().filter(|there| to.is_some_and(|to| progress::moves(there.device(), to)));
        there.map_or(0, |there| there.layout().nbytes())
    };
    leaves.iter().map(nbytes).sum()
}

/// Refuses memory of another process that has ended or has revoked the share. Without such memory in this process
/// nothing is looked at.
pub(crate) fn check(exported: &Export) -> Result<()> {
    if is_leasing() { bridge_ipc::check(exported) } else { Ok(()) }
}

/// Returns whether this process has a lease of another one. Before it has opened a ticket that costs one relaxed load.
#[inline(always)]
fn is_leasing() -> bool {
    trace::has_opened() && bridge_ipc::is_leasing()
}

/// Returns where the elements go again from the host; `None` where they are there already, or are to stay there.
pub(crate) fn back(from: Device, options: &Options) -> Option<Device> {
    let to = options.device.unwrap_or(from);
    (from.kind == DeviceKind::CUDA && to.kind == DeviceKind::CUDA).then_some(to)
}

/// Moves a tensor to the host, and from there to where it was, or where the caller wants it. What is on the host
/// is converted as ever.
fn through_host<'py>(
    call: Option<&Call>,
    from: &AnyAdapter<'py>,
    to: &AnyAdapter<'py>,
    x: &PyTensor<'py>,
    options: &Options,
) -> Result<(PyTensor<'py>, Transfer)> {
    not_a_capsule(x)?;
    let Some(back) = from.locate(x)?.and_then(|(device, _)| back(device, options)) else {
        return transferred(call, &**from, &**to, x, options);
    };
    // A framework with memory on the host: NumPy lacks small floats.
    let numpy;
    let there = match [to, from].into_iter().find(|adapter| adapter.profile().devices.contains(&DeviceKind::CPU)) {
        Some(adapter) => adapter,
        None => {
            numpy = Framework::NumPy.open(x.py())?;
            &numpy
        }
    };
    let down = options.with_device(Device::CPU);
    let on_host = transfer(call, &**from, &**there, x, &down)?;
    let up = Options::default().with_device(back).with_order(options.order);
    transferred(call, &**there, &**to, &on_host, &up)
}

/// As [`bridge_core::transfer`], by the ordering of the process.
#[inline(always)]
pub(crate) fn transfer<F: Owned, T>(
    call: Option<&Call>,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    options: &Options,
) -> Result<T> {
    Ok(transferred(call, from, to, tensor, options)?.0)
}

/// As [`transfer`]. Returns what was done, too.
#[inline(always)]
pub(crate) fn transferred<F: Owned, T>(
    call: Option<&Call>,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    options: &Options,
) -> Result<(T, Transfer)> {
    if F::IS_SHARED {
        trace::opened();
    }
    match call {
        None if !may_be_gone::<F>() => bridge_core::transfer(from, to, tensor, ordering(), options),
        call => transfer_seen(call, from, to, tensor, options),
    }
}

/// Returns whether tensors of a source may lie in memory of another process, which may have ended or revoked it.
#[inline(always)]
fn may_be_gone<F: Owned>() -> bool {
    !F::IS_SHARED && is_leasing()
}

#[cold]
fn transfer_seen<F: Owned, T>(
    call: Option<&Call>,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    options: &Options,
) -> Result<(T, Transfer)> {
    let leases = RefCell::default();
    let seen = Seen::of(call, from, Some(&to.profile().name), &leases);
    let converted = bridge_core::transfer(&seen, to, tensor, ordering(), options);
    seen.remember(to);
    seen.note(Outcome::of(converted.as_ref().map(|(_, done)| done).map_err(Error::kind)));
    converted
}

/// As [`bridge_core::transfer_all`], by the ordering of the process.
pub(crate) fn transfer_all<F: Owned, T>(
    call: Option<&Call>,
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    to: &dyn Adapter<Tensor = T>,
    options: &Options,
) -> Result<Vec<T>, Failed> {
    Ok(transferred_all(call, tensors, to, options)?.into_iter().map(|(tensor, _)| tensor).collect())
}

/// As [`transfer_all`]. Returns what was done, too.
fn transferred_all<F: Owned, T>(
    call: Option<&Call>,
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    to: &dyn Adapter<Tensor = T>,
    options: &Options,
) -> Result<Vec<(T, Transfer)>, Failed> {
    let convert = |tensors: &[_]| bridge_core::transfer_all(tensors, to, ordering(), options);
    if F::IS_SHARED {
        trace::opened();
    }
    if call.is_none() && !may_be_gone::<F>() {
        return convert(tensors);
    }
    let leases = RefCell::default();
    let seen = see(call, tensors, Some(&to.profile().name), &leases);
    let converted = convert(&through(&seen, tensors));
    seen.iter().for_each(|seen| seen.remember(to));
    match converted {
        Ok(converted) => {
            seen.iter().zip(&converted).for_each(|(seen, (_, done))| seen.note(Outcome::of(Ok(done))));
            Ok(converted)
        }
        Err(failed) => {
            seen[failed.index].note(Outcome::Failed(failed.error.kind()));
            Err(failed)
        }
    }
}

/// As [`Message::of`], or as [`Message::outliving`], by the ordering of the process.
pub(crate) fn pack<F: Owned>(
    call: Option<&Call>,
    tensors: &[(&dyn Adapter<Tensor = F>, &F)],
    (writing, outlives): (Option<Writing>, bool),
    options: &Options,
) -> Result<Message, Failed> {
    let packed = if outlives { Message::outliving } else { Message::of };
    let pack = |tensors: &[_]| packed(tensors, writing, ordering(), options);
    if call.is_none() {
        return pack(tensors);
    }
    let leases = RefCell::default();
    let seen = see(call, tensors, None, &leases);
    let packed = pack(&through(&seen, tensors));
    match &packed {
        Ok(message) => {
            seen.iter().zip(message.transfers()).for_each(|(seen, done)| seen.note(Outcome::of(Ok(done))));
        }
        Err(failed) => seen[failed.index].note(Outcome::Failed(failed.error.kind())),
    }
    packed
}

/// As [`bridge_core::copy_into`], by the ordering of the process.
pub(crate) fn copy_into<F: Owned, T: Owned>(
    call: Option<&Call>,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    out: &T,
) -> Result<()> {
    if call.is_none() && !may_be_gone::<F>() && !may_be_gone::<T>() {
        return bridge_core::copy_into(from, to, tensor, out, ordering()).map(drop);
    }
    call.iter().for_each(|call| call.to(&to.profile().name));
    let leases = RefCell::default();
    let (source, target) = (Seen::of(call, from, None, &leases), Seen::of(call, to, None, &leases));
    let done = bridge_core::copy_into(&source, &target, tensor, out, ordering());
    let outcome = match (&done, source.device(), target.device()) {
        (Ok(ordered), Some(from), Some(to)) => {
            Outcome::converted(Some((copied_into_by(from, to), "a tensor that exists".into())), *ordered)
        }
        (Ok(_), ..) => return Ok(()),
        (Err(error), ..) => Outcome::Failed(error.kind()),
    };
    source.note(outcome);
    done.map(drop)
}

/// As [`Prepared::new`], by the ordering of the process. Returns the leases that the tensors lie in, too.
pub(crate) fn prepare<F: Owned, T: Owned>(pairs: &[Pair<'_, F, T>]) -> Result<(Prepared, Leases), Misfit> {
    let leases = RefCell::default();
    let prepared = Prepared::new(&through_pairs(&see_pairs(None, pairs, &leases), pairs), ordering())?;
    Ok((prepared, leases.into_inner()))
}

/// As [`bridge_core::copy_all`], by the ordering of the process. `prepared` is the plan of these pairs, if there is
/// one.
pub(crate) fn copy_all<F: Owned, T: Owned>(
    call: Option<&Call>,
    pairs: &[Pair<'_, F, T>],
    prepared: Option<&Prepared>,
) -> Result<(), Misfit> {
    let copy = |pairs: &[Pair<'_, F, T>]| match prepared {
        Some(prepared) => prepared.copy(pairs, ordering()),
        None => together(|| bridge_core::copy_all(pairs, ordering())),
    };
    if call.is_none() && !may_be_gone::<F>() && !may_be_gone::<T>() {
        return copy(pairs).map(drop);
    }
    call.iter().for_each(|call| call.expect(pairs.len()));
    let leases = RefCell::default();
    let seen = see_pairs(call, pairs, &leases);
    let done = copy(&through_pairs(&seen, pairs));
    let Some(call) = call else { return done.map(drop) };
    match &done {
        Ok(ordered) => {
            for (((source, target), pair), ordered) in seen.iter().zip(pairs).zip(ordered) {
                call.to(&pair.to.profile().name);
                if let (Some(from), Some(to)) = (source.device(), target.device()) {
                    let by = (copied_into_by(from, to), "a tensor that exists".into());
                    source.note(Outcome::converted(Some(by), *ordered));
                }
            }
        }
        Err(misfit) => {
            call.to(&pairs[misfit.index].to.profile().name);
            seen[misfit.index].0.note(Outcome::Failed(misfit.error.kind()));
        }
    }
    done.map(drop)
}

/// The two sides of a pair, as they are looked at.
type SeenPair<'a, F, T> = (Seen<'a, F>, Seen<'a, T>);

/// Returns adapters that see the pairs of the call.
fn see_pairs<'a, F, T>(
    call: Option<&'a Call>,
    pairs: &[Pair<'a, F, T>],
    leases: &'a RefCell<Leases>,
) -> Vec<SeenPair<'a, F, T>> {
    let see = |pair: &Pair<'a, F, T>| (Seen::of(call, pair.from, None, leases), Seen::of(call, pair.to, None, leases));
    pairs.iter().map(see).collect()
}

/// Returns pairs with the adapters that see them.
fn through_pairs<'a, F: Owned, T: Owned>(
    seen: &'a [SeenPair<'a, F, T>],
    pairs: &[Pair<'a, F, T>],
) -> Vec<Pair<'a, F, T>> {
    let through = |((from, to), pair): (&'a SeenPair<'a, F, T>, &Pair<'a, F, T>)| {
        Pair::new(from, pair.tensor, to, pair.out).with_dtype(pair.dtype)
    };
    seen.iter().zip(pairs).map(through).collect()
}

/// Returns adapters that see the tensors of the call.
fn see<'a, F>(
    call: Option<&'a Call>,
    tensors: &[(&'a dyn Adapter<Tensor = F>, &F)],
    to: Option<&'a str>,
    leases: &'a RefCell<Leases>,
) -> Vec<Seen<'a, F>> {
    call.iter().for_each(|call| call.expect(tensors.len()));
    tensors.iter().map(|(from, _)| Seen::of(call, *from, to, leases)).collect()
}

/// Returns tensors with the adapters that see them.
fn through<'a, F: Owned>(
    seen: &'a [Seen<'a, F>],
    tensors: &[(&dyn Adapter<Tensor = F>, &'a F)],
) -> Vec<(&'a dyn Adapter<Tensor = F>, &'a F)> {
    seen.iter().zip(tensors).map(|(seen, (_, tensor))| (seen as _, *tensor)).collect()
}
