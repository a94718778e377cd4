//! Moves of many megabytes between the host and a device, in two streams at once.

use super::order::bytes;
use super::{Outcome, Pair, ensure, on, on_both, same_bytes};
use crate::{Case, Coverage, Spec, Subject, model};
use bridge_core::{Device, Order, Pair as Update, copy_all};

/// Two moves to the device are pending at once, and neither disturbs the other: each target has the elements that its
/// source had at the call. A move to the host waits for the late write of its source.
pub(super) fn moves<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    pair.kernels.set(true);
    let (streams, spec) = (pair.streams(), &case.spec);
    let sides = [
        (streams.from(case.streams.write), streams.to(case.streams.read)),
        (streams.from(case.streams.back), streams.to(case.streams.onward)),
    ];
    let nbytes = model::numel(&spec.shape) * model::itemsize(spec.dtype);
    let mut moved = Vec::new();
    for (i, (writer, reader)) in sides.into_iter().enumerate() {
        let elements = model::random_bytes(spec, case.seed.wrapping_add(i as u64));
        let host = on_host(pair.from, spec)?;
        pair.from.write(&host, &elements)?;
        let target = on(pair.to, reader, || Ok(pair.to.create(spec, &vec![0; nbytes])?))?;
        moved.push((writer, reader, host, target, elements));
    }
    for (writer, reader, host, target, _) in &moved {
        on_both(pair, *writer, *reader, || {
            pair.to.delay()?;
            let update = Update::new(pair.from, host, pair.to, target);
            copy_all(&[update], pair.ordering()).map_err(|misfit| misfit.error)?;
            // The call has read the source.
            Ok(pair.from.write(host, &vec![0; nbytes])?)
        })?;
    }
    for (_, reader, _, target, elements) in &moved {
        let got = on(pair.to, *reader, || Ok(pair.to.read(target)?))?;
        same_bytes("one of two tensors that were moved to the device", &got, elements)?;
    }
    let (_, seen, _) = bytes(case);
    for (writer, reader, host, target, _) in &mut moved {
        on_both(pair, *writer, *reader, || {
            pair.to.delay()?;
            pair.to.fill(target, seen)?;
            let update = Update::new(pair.to, target, pair.from, host);
            Ok(copy_all(&[update], pair.ordering()).map_err(|misfit| misfit.error).map(drop)?)
        })?;
        same_bytes("a tensor that was moved to the host", &pair.from.read(host)?, &vec![seen; nbytes])?;
    }
    pair.add_seen(Coverage { copied: 1, ..Coverage::default() });
    Ok(())
}

/// Makes a tensor in memory of the host, not initialised.
fn on_host<S>(subject: &dyn Subject<Tensor = S>, spec: &Spec) -> Result<S, super::Failure> {
    // SAFETY: it is written before it is read.
    let tensor = unsafe { subject.empty(Device::CPU, spec.dtype, &spec.shape, Order::RowMajor) }?;
    let device = subject.observe(&tensor)?.device;
    ensure!(device == Device::CPU, "a tensor that was asked for on the host is on {device}");
    Ok(tensor)
}
