//! A conversion that fails in the middle.

use super::failing::{Countdown, FailingAdapter, FailingOrdering, WAIT, WORDS};
use super::order::{bytes, reuse};
use super::{Failure, Outcome, Pair, ensure, on, on_both, outstanding, same_bytes};
use crate::Case;
use crate::model::{self, Random};
use bridge_core::{Adapter, DeviceKind, Options, Ordering, Result, Transfer, stats, transfer_all};
use std::sync::Arc;

/// The most calls before the one that fails. Few conversions make more.
const CALLS: usize = 9;

/// The most tensors that are converted together.
const TENSORS: usize = 3;

/// One call of a conversion fails: of an adapter, of the ordering or of its copies. The error is reported, every lease
/// is released, all memory is back, and the tensors can be converted afterwards: on a device with work in flight. Where the call is the last wait of a
/// copy that was made, the memory of its original is leaked and counted.
pub(super) fn failure<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let before = pair.memory()?;
    let mut random = Random::new(case.seed);
    let (calls, count) = (random.below(CALLS), 1 + random.below(TENSORS));
    let streams = pair.streams();
    let made = || {
        let one = |i| Ok(pair.create(&Case { seed: case.seed.wrapping_add(i as u64), ..case.clone() })?);
        (0..count).map(one).collect::<std::result::Result<Vec<_>, Failure>>()
    };
    let made = on(pair.from, streams.from(case.streams.allocate), made)?;
    let (tensors, bytes): (Vec<F>, Vec<Vec<u8>>) = made.into_iter().unzip();
    // A tensor of another process may itself hold a lease.
    let (leased, leaks) = (outstanding(), stats().leaked);
    let sides = (streams.from(case.streams.write), streams.to(case.streams.read));
    let countdown = Countdown::new(calls);
    let attempt = || {
        let converted = attempt(pair, case, &tensors, &countdown);
        // A wait that fails while memory is returned leaks it, as it must.
        Ok((countdown.stop(), converted.err().map(|error| error.to_string())))
    };
    let (failed, error) = on_both(pair, sides.0, sides.1, attempt)?;
    if failed.is_some() {
        pair.see(Err(()));
    }
    match (failed, error) {
        // A copy was made, and its last wait failed: the memory of the original may not be reused. It is leaked, and
        // counted.
        (Some(_), None) if stats().leaked > leaks => return pair.returned(leased),
        // The next that can makes the copy.
        (Some(call), None) => ensure!(call != WAIT, "{call} failed, and the conversion did not"),
        (Some(call), Some(error)) => {
            ensure!(error.contains(WORDS), "{call} failed, and the error is another: {error}");
        }
        (None, Some(error)) => return Err(Failure::new(format!("no call failed, and the conversion did: {error}"))),
        (None, None) => (),
    }
    pair.returned(leased)?;
    // A host has no late work, and only a target with kernels for the dtype reads it late.
    let is_late = pair.from.device().kind != DeviceKind::CPU
        && [pair.from.capabilities(), pair.to.capabilities()].iter().all(|can| can.dtypes.contains(&case.spec.dtype));
    // A program that is compiled for the late work keeps constants on the device.
    let compiles = pair.from.capabilities().compiles || pair.to.capabilities().compiles;
    let is_late = is_late && (!compiles || case.seed & 0x800 == 0);
    for (i, (tensor, bytes)) in tensors.into_iter().zip(&bytes).enumerate() {
        let elements = model::elements(&case.spec, bytes);
        same_bytes("the source, after the conversion that failed", &pair.from.read(&tensor)?, &elements)?;
        // What the failure has left behind meets the next conversion.
        if is_late && i == 0 {
            converts_late(pair, case, tensor)?;
            continue;
        }
        let (view, _) = pair.transfer(&tensor, case.copy)?;
        same_bytes("a conversion after the one that failed", &pair.to.read(&view)?, &elements)?;
    }
    if is_late && compiles { Ok(()) } else { pair.is_back(before) }
}

/// Converts a tensor after the failure, with work in both streams that runs late, and lets the source reuse its memory.
fn converts_late<F, T>(pair: &Pair<'_, F, T>, case: &Case, mut tensor: F) -> Outcome {
    let streams = pair.streams();
    let (writer, reader) = (streams.from(case.streams.write), streams.to(case.streams.read));
    let (_, seen, garbage) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let mut snapshot = on(pair.to, reader, || Ok(pair.to.allocate(nbytes)?))?;
    on(pair.from, writer, || {
        pair.from.delay()?;
        Ok(pair.from.fill(&mut tensor, seen)?)
    })?;
    let view = on_both(pair, writer, reader, || {
        let (view, _) = pair.transfer(&tensor, case.copy)?;
        pair.to.delay()?;
        pair.to.snapshot(&view, &mut snapshot)?;
        Ok(view)
    })?;
    on_both(pair, streams.from(case.streams.drop), streams.to(case.streams.drop), || {
        drop((view, tensor));
        Ok(())
    })?;
    reuse(pair, case, garbage)?;
    let got = on(pair.to, reader, || Ok(pair.to.read(&snapshot)?))?;
    same_bytes("what was read late after a conversion that failed", &got, &vec![seen; nbytes])
}

/// Converts the tensors, and counts the calls.
fn attempt<F, T>(
    pair: &Pair<'_, F, T>,
    case: &Case,
    tensors: &[F],
    countdown: &Countdown,
) -> Result<Vec<(T, Transfer)>> {
    let ordering = FailingOrdering { ordering: Arc::clone(pair.ordering()), countdown: countdown.clone() };
    let ordering: Arc<dyn Ordering> = Arc::new(ordering);
    // Inside a package no call can be made to fail.
    if let Some(convert) = pair.conversion_there.as_ref().filter(|_| !pair.by_package) {
        return tensors.iter().map(|tensor| convert(tensor, &ordering, case.copy)).collect();
    }
    let from = FailingAdapter { adapter: as_adapter(pair.from), countdown: countdown.clone() };
    let to = FailingAdapter { adapter: as_adapter(pair.to), countdown: countdown.clone() };
    let tensors: Vec<(&dyn Adapter<Tensor = F>, &F)> = tensors.iter().map(|tensor| (&from as _, tensor)).collect();
    transfer_all(&tensors, &to, &ordering, &Options::default().with_copy(case.copy)).map_err(|failed| failed.error)
}

fn as_adapter<X>(subject: &dyn crate::Subject<Tensor = X>) -> &dyn Adapter<Tensor = X> {
    subject
}
