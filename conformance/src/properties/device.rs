//! A current device that is not the tensor's.

use super::order::{bytes, reuse};
use super::{Failure, Outcome, Pair, on, same_bytes};
use crate::{Case, Subject, model};

/// Runs `body` while both frameworks have another current device. Without another device, runs it as it is.
fn elsewhere<S, T, R>(
    from: &dyn Subject<Tensor = S>,
    to: &dyn Subject<Tensor = T>,
    body: impl FnOnce() -> Result<R, Failure>,
) -> Result<R, Failure> {
    let (mut body, mut result) = (Some(body), Err(Failure::new("the body did not run")));
    let mut run = || {
        if let Some(body) = body.take() {
            result = body();
        }
        Ok(())
    };
    let mut inner = || match to.capabilities().devices {
        true => to.elsewhere(&mut run).unwrap_or(Ok(())),
        false => run(),
    };
    match from.capabilities().devices {
        true => from.elsewhere(&mut inner).unwrap_or(Ok(()))?,
        false => inner()?,
    }
    result
}

/// A tensor is converted, and dropped, while another device is the current one: work in the owner's stream is done
/// before the consumer reads, and the memory is reused after it has read.
pub(super) fn devices<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let streams = pair.streams();
    let (writer, reader) = (streams.from(case.streams.write), streams.to(case.streams.read));
    let (before, seen, garbage) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let mut tensor = pair.from.create(&case.spec, &vec![before; nbytes])?;
    let mut snapshot = on(pair.to, reader, || Ok(pair.to.allocate(nbytes)?))?;
    let view = on(pair.from, writer, || {
        pair.from.delay()?;
        pair.from.fill(&mut tensor, seen)?;
        on(pair.to, reader, || {
            let view = elsewhere(pair.from, pair.to, || Ok(pair.transfer(&tensor, case.copy)?.0))?;
            pair.to.delay()?;
            pair.to.snapshot(&view, &mut snapshot)?;
            Ok(view)
        })
    })?;
    elsewhere(pair.from, pair.to, || {
        drop((view, tensor));
        Ok(())
    })?;
    reuse(pair, case, garbage)?;
    same_bytes("the reader's copy", &on(pair.to, reader, || Ok(pair.to.read(&snapshot)?))?, &vec![seen; nbytes])
}
