//! Conversions while a stream is captured into a graph.

use super::captured::{dropped_inside, dropped_meanwhile};
use super::order::bytes;
use super::{Failure, Outcome, Pair, ensure, on, same_bytes};
use crate::{Case, Route, model, words};
use bridge_core::{ErrorKind, Stream};

/// By its route, judges a conversion inside of a capture.
pub(super) fn graph<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    match case.route {
        Route::Forked => forked(pair, case),
        Route::Captured => dropped_inside(pair, case),
        Route::Meanwhile => dropped_meanwhile(pair, case),
        _ => inside(pair, case),
    }
}

/// A conversion from one captured stream to another of the same capture makes the one wait for the other, at each replay.
fn forked<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let streams = pair.streams();
    let (Some(captured), Some(other)) = (streams.to(case.streams.read), streams.to(case.streams.onward)) else {
        return Err(Failure::new("a capture has no default stream"));
    };
    let (before, seen, _) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let mut tensor = on(pair.from, Some(other), || Ok(pair.from.create(&case.spec, &vec![before; nbytes])?))?;
    let mut snapshot = on(pair.to, Some(captured), || Ok(pair.to.allocate(nbytes)?))?;
    // What frameworks and drivers load at a first use cannot be loaded in a capture.
    on(pair.from, Some(other), || Ok(pair.from.fill(&mut tensor, before)?))?;
    converted(pair, (Some(other), Some(captured)), &tensor, &mut snapshot, before)?;
    pair.memory()?;
    // As in `inside`: the export of a library that is known by its protocol is in no stream of the capture.
    if on(pair.from, Some(other), || Ok(pair.from.export(&tensor)?.buffer().stream()))? != Some(other) {
        return inside(pair, case);
    }
    let mut view = None;
    let mut work = || {
        // SAFETY: both are streams of the target.
        unsafe { pair.to.join(captured, other) }?;
        pair.from.delay()?;
        pair.from.fill(&mut tensor, seen)?;
        let (taken, _) = pair.transfer(&tensor, None)?;
        pair.to.snapshot(&taken, &mut snapshot)?;
        view = Some(taken);
        // SAFETY: as above.
        unsafe { pair.to.join(other, captured) }
    };
    let replay = on(pair.from, Some(other), || on(pair.to, Some(captured), || Ok(pair.to.captured(&mut work))))?;
    let Some(replay) = replay else { return Ok(()) };
    let mut replay = replay?;
    on(pair.from, Some(other), || {
        pair.from.fill(&mut tensor, before)?;
        Ok(pair.from.read(&tensor)?)
    })?;
    let replayed = on(pair.to, Some(captured), || Ok(replay()?));
    drop(replay);
    replayed?;
    let got = on(pair.to, Some(captured), || Ok(pair.to.read(&snapshot)?))?;
    drop(view);
    same_bytes("what the graph read in one of its streams", &got, &vec![seen; nbytes])?;
    pair.memory()?;
    converted(pair, (Some(other), Some(captured)), &tensor, &mut snapshot, seen)
}

/// A conversion in a captured stream is part of the graph, which reads what is in the memory at each replay. From
/// another stream, whose work the graph cannot wait for, it is refused. The same conversion succeeds afterwards.
fn inside<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let streams = pair.streams();
    let captured = streams.to(case.streams.read);
    let is_shared = case.streams.write == case.streams.read && pair.from.capabilities().external_streams;
    let writer = if is_shared { captured } else { streams.from(case.streams.write) };
    let (before, seen, _) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let mut tensor = on(pair.from, writer, || Ok(pair.from.create(&case.spec, &vec![before; nbytes])?))?;
    let mut snapshot = on(pair.to, captured, || Ok(pair.to.allocate(nbytes)?))?;
    // What frameworks and drivers load at a first use cannot be loaded in a capture.
    converted(pair, (writer, captured), &tensor, &mut snapshot, before)?;
    pair.memory()?;
    // A library that is known by its protocol exports in a stream of the protocol, whatever its own is.
    let exported = on(pair.from, writer, || Ok(pair.from.export(&tensor)?.buffer().stream()))?;
    let inside = exported == captured;
    let mut view = None;
    let mut work = || {
        let (taken, _) = pair.transfer(&tensor, None)?;
        pair.to.snapshot(&taken, &mut snapshot)?;
        view = Some(taken);
        Ok(())
    };
    let replay = on(pair.from, writer, || on(pair.to, captured, || Ok(pair.to.captured(&mut work))))?;
    match replay {
        None => return Ok(()),
        Some(Err(error)) if inside => return Err(error.into()),
        Some(Err(error)) => {
            let kind = error.kind();
            ensure!(kind == ErrorKind::Captured, "refused with the kind “{}”: {error}", words::kind(kind));
        }
        Some(Ok(_)) if !inside => {
            return Err(Failure::new("a capture accepted a tensor of a stream that is not captured"));
        }
        Some(Ok(mut replay)) => {
            on(pair.from, writer, || {
                pair.from.fill(&mut tensor, seen)?;
                Ok(pair.from.read(&tensor)?)
            })?;
            let replayed = on(pair.to, captured, || Ok(replay()?));
            drop(replay);
            replayed?;
            let got = on(pair.to, captured, || Ok(pair.to.read(&snapshot)?))?;
            same_bytes("what the graph read", &got, &vec![seen; nbytes])?;
        }
    }
    drop(view);
    let now = pair.from.read(&tensor)?[0];
    converted(pair, (writer, captured), &tensor, &mut snapshot, now)
}

/// Converts the tensor and reads it.
fn converted<F, T>(
    pair: &Pair<'_, F, T>,
    (writer, reader): (Option<Stream>, Option<Stream>),
    tensor: &F,
    snapshot: &mut T,
    byte: u8,
) -> Outcome {
    let got = on(pair.from, writer, || {
        on(pair.to, reader, || {
            let (view, _) = pair.transfer(tensor, None)?;
            pair.to.snapshot(&view, snapshot)?;
            Ok(pair.to.read(snapshot)?)
        })
    })?;
    same_bytes("a conversion outside of the graph", &got, &vec![byte; got.len()])
}
