//! Views that are dropped while a stream is captured into a graph.

use super::order::{bytes, reuse};
use super::{Failure, Outcome, PAUSE, Pair, ensure, on, on_both, outstanding, same_bytes};
use crate::{Case, Replay, model};
use bridge_core::{Result, Stream, stats};

/// How long a capture lasts, and how long its memory may take to be returned: longer than background threads pause.
const LONG: u32 = 10;

/// The bit of a seed that chooses the thread of a drop.
const ELSEWHERE: u64 = 0x800;

/// Lets the threads of an ordering do what is due.
fn rest<F, T>(pair: &Pair<'_, F, T>) {
    if !pair.patience().is_zero() {
        std::thread::sleep(PAUSE * LONG);
    }
}

/// Captures work of the target in this stream.
fn capture<'a, F, T>(
    pair: &Pair<'a, F, T>,
    captured: Option<Stream>,
    mut work: impl FnMut() -> std::result::Result<(), Failure>,
) -> std::result::Result<Replay<'a>, Failure> {
    let mut failed = Ok(());
    let mut body = || -> Result<()> {
        failed = work();
        Ok(())
    };
    let replay = on(pair.to, captured, || Ok(pair.to.captured(&mut body)))?;
    failed?;
    Ok(replay.ok_or_else(|| Failure::new("the target captures no graphs"))??)
}

/// A view that was last used in a capture, and dropped there, keeps its memory: the graph may run at any time.
pub(super) fn dropped_inside<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let streams = pair.streams();
    let (writer, captured) = (streams.from(case.streams.write), streams.to(case.streams.read));
    let (before, seen, garbage) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let allocated = streams.from(case.streams.allocate);
    let mut tensor = on(pair.from, allocated, || Ok(pair.from.create(&case.spec, &vec![before; nbytes])?))?;
    on(pair.from, writer, || {
        pair.from.fill(&mut tensor, seen)?;
        Ok(pair.from.read(&tensor)?)
    })?;
    let mut snapshot = on(pair.to, captured, || Ok(pair.to.allocate(nbytes)?))?;
    let (view, in_place) = on_both(pair, writer, captured, || {
        let exported = pair.from.export(&tensor)?.buffer().stream();
        let (view, done) = pair.transfer(&tensor, None)?;
        // What is loaded at a first use cannot be loaded in a capture.
        pair.to.snapshot(&view, &mut snapshot)?;
        Ok((view, done.bytes_copied == 0 && exported != captured))
    })?;
    pair.memory()?;
    if !in_place {
        // In one stream the owner reuses the memory as if there were no view, and the program keeps the tensor.
        return Ok(());
    }
    let mut view = Some(view);
    let mut replay = capture(pair, captured, || {
        let view = view.take().ok_or_else(|| Failure::new("the work was captured twice"))?;
        pair.to.snapshot(&view, &mut snapshot)?;
        drop(view);
        Ok(())
    })?;
    drop(tensor);
    rest(pair);
    reuse(pair, case, garbage)?;
    let replayed = on(pair.to, captured, || Ok(replay()?));
    drop(replay);
    replayed?;
    let got = on(pair.to, captured, || Ok(pair.to.read(&snapshot)?))?;
    same_bytes("what the graph read of a view that was dropped in its capture", &got, &vec![seen; nbytes])
}

/// Memory of a view that no graph uses is returned after a capture in which it was dropped, on this thread or on
/// another one, and the capture is whole.
pub(super) fn dropped_meanwhile<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let streams = pair.streams();
    let (writer, captured) = (streams.from(case.streams.write), streams.to(case.streams.read));
    let reader = streams.to(case.streams.onward);
    let (before, seen, _) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let kept = on(pair.from, writer, || Ok(pair.from.create(&case.spec, &vec![seen; nbytes])?))?;
    let view = on_both(pair, writer, captured, || Ok(pair.transfer(&kept, None)?.0))?;
    let mut snapshot = on(pair.to, captured, || Ok(pair.to.allocate(nbytes)?))?;
    let mut late = on(pair.to, reader, || Ok(pair.to.allocate(nbytes)?))?;
    on(pair.to, captured, || Ok(pair.to.snapshot(&view, &mut snapshot)?))?;
    on(pair.to, reader, || Ok(pair.to.delay()?))?;
    let (leased, leaked, in_use) = (outstanding(), stats().leaked, pair.memory()?);

    let other = on(pair.from, writer, || Ok(pair.from.create(&case.spec, &vec![before; nbytes])?))?;
    let mut gone = Some(on_both(pair, writer, reader, || {
        let view = pair.transfer(&other, None)?.0;
        pair.to.read(&view)?;
        Ok(view)
    })?);
    drop(other);
    let mut replay = capture(pair, captured, || {
        pair.to.snapshot(&view, &mut snapshot)?;
        let gone = gone.take().ok_or_else(|| Failure::new("the work was captured twice"))?;
        on(pair.to, reader, || {
            pair.to.delay()?;
            Ok(pair.to.snapshot(&gone, &mut late)?)
        })?;
        match case.seed & ELSEWHERE == 0 {
            true => drop(gone),
            false => pair.to.drop_on_thread(gone),
        }
        rest(pair);
        Ok(())
    })?;
    let replayed = on(pair.to, captured, || Ok(replay()?));
    drop(replay);
    replayed?;
    let got = on(pair.to, captured, || Ok(pair.to.read(&snapshot)?))?;
    same_bytes("what the graph read", &got, &vec![seen; nbytes])?;
    let got = on(pair.to, reader, || Ok(pair.to.read(&late)?))?;
    same_bytes("what was read during the capture", &got, &vec![before; nbytes])?;
    pair.returned(leased)?;
    if reader == Some(Stream::PER_THREAD) {
        // The legacy stream stands for it, which any capture of a blocking stream forbids: the memory may be leaked.
        return Ok(());
    }
    pair.is_back(in_use)?;
    let lost = stats().leaked - leaked;
    ensure!(lost == 0, "memory of {lost} views that no graph uses was leaked");
    Ok(())
}
