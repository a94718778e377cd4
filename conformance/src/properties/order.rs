//! When a tensor may be touched, and until when: work in streams that runs late.

use super::{Failure, Outcome, Pair, Take, on, on_both, same_bytes};
use crate::{Case, Route, model};
use bridge_core::DType;

/// The byte that is there before, the one that is to be seen, and the garbage of later owners.
fn bytes(case: &Case) -> (u8, u8, u8) {
    let seen = (case.seed & 0xff) as u8;
    // bool knows only two bytes.
    if case.spec.dtype == DType::BOOL { (!seen & 1, seen & 1, !seen & 1) } else { (!seen, seen, seen ^ 0x5a) }
}

/// What the owner's stream holds when a tensor is lent is done before the consumer touches it.
pub(super) fn order<F, T>(pair: &Pair<'_, F, T>, case: &Case, take: Take<'_, F, T>) -> Outcome {
    let streams = pair.streams();
    let (writer, reader) = (streams.from(case.streams.write), streams.to(case.streams.read));
    let (before, seen, _) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let mut tensor = pair.from.create(&case.spec, &vec![before; case.spec.base * model::itemsize(case.spec.dtype)])?;
    let mut snapshot = on(pair.to, reader, || Ok(pair.to.allocate(nbytes)?))?;
    on(pair.from, writer, || {
        pair.from.delay()?;
        Ok(pair.from.fill(&mut tensor, seen)?)
    })?;
    let view = on_both(pair, writer, reader, || {
        let view = take(&tensor)?;
        pair.to.snapshot(&view, &mut snapshot)?;
        Ok(view)
    });
    let got = on(pair.to, reader, || Ok(pair.to.read(&snapshot)?));
    // Nothing may be under way any more when the memory is reused by the next case, even if the handoff went wrong.
    on(pair.from, writer, || Ok(pair.from.read(&tensor)?))?;
    drop(view?);
    same_bytes("what the consumer saw", &got?, &vec![seen; nbytes])
}

/// The memory is not reused before the last reader has read, wherever it was allocated, written and read.
pub(super) fn release_order<F, T>(pair: &Pair<'_, F, T>, case: &Case, take: Take<'_, F, T>) -> Outcome {
    let streams = pair.streams();
    let (allocated, writer) = (streams.from(case.streams.allocate), streams.from(case.streams.write));
    let (reader, onward) = (streams.to(case.streams.read), streams.to(case.streams.onward));
    let (before, seen, garbage) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let mut tensor = on(pair.from, allocated, || Ok(pair.from.create(&case.spec, &vec![before; nbytes])?))?;
    on(pair.from, writer, || Ok(pair.from.fill(&mut tensor, seen)?))?;

    let got = match case.route {
        Route::Direct => {
            let mut snapshot = on(pair.to, reader, || Ok(pair.to.allocate(nbytes)?))?;
            let view = on_both(pair, writer, reader, || {
                let view = take(&tensor)?;
                pair.to.delay()?;
                pair.to.snapshot(&view, &mut snapshot)?;
                Ok(view)
            })?;
            reuse(pair, case, garbage, (tensor, view, None))?;
            on(pair.to, reader, || Ok(pair.to.read(&snapshot)?))?
        }
        Route::Noted => {
            let mut snapshot = on(pair.to, onward, || Ok(pair.to.allocate(nbytes)?))?;
            let view = arrived(pair, case, take, &tensor)?;
            on(pair.to, onward, || {
                let (device, consumer) = (pair.to.device(), pair.to.consumer());
                if let Some(stream) = consumer.current_stream(device)? {
                    let address = pair.to.observe(&view)?.address;
                    consumer.views().used(device, address, stream, || consumer.keep(device, stream));
                }
                pair.to.delay()?;
                Ok(pair.to.snapshot(&view, &mut snapshot)?)
            })?;
            reuse(pair, case, garbage, (tensor, view, None))?;
            on(pair.to, onward, || Ok(pair.to.read(&snapshot)?))?
        }
        Route::Onward => {
            let back = streams.from(case.streams.back);
            let mut snapshot = on(pair.from, back, || Ok(pair.from.allocate(nbytes)?))?;
            let view = arrived(pair, case, take, &tensor)?;
            let second = on_both(pair, back, onward, || {
                let second = pair.back(&view, None)?.0;
                pair.from.delay()?;
                pair.from.snapshot(&second, &mut snapshot)?;
                Ok(second)
            })?;
            reuse(pair, case, garbage, (tensor, view, Some(second)))?;
            on(pair.from, back, || Ok(pair.from.read(&snapshot)?))?
        }
    };
    same_bytes("what the reader read", &got, &vec![seen; nbytes])
}

/// Takes the tensor in, and waits until it is there: from then on the user may use the view in any stream.
fn arrived<F, T>(
    pair: &Pair<'_, F, T>,
    case: &Case,
    take: Take<'_, F, T>,
    tensor: &F,
) -> std::result::Result<T, Failure> {
    let streams = pair.streams();
    on_both(pair, streams.from(case.streams.write), streams.to(case.streams.read), || {
        let view = take(tensor)?;
        pair.to.read(&view)?;
        Ok(view)
    })
}

/// How many blocks are taken from each stream, in the hope that the allocator hands out the one just given back.
const BLOCKS: usize = 2;

/// Drops every reference, and fills with garbage what the source's allocator then hands out.
fn reuse<F, T>(pair: &Pair<'_, F, T>, case: &Case, garbage: u8, held: (F, T, Option<F>)) -> Outcome {
    let streams = pair.streams();
    let (from, to) = (streams.from(case.streams.drop), streams.to(case.streams.drop));
    on_both(pair, from, to, || {
        let (tensor, view, second) = held;
        // Both orders matter: the owner may or may not outlive the view.
        if case.seed & 0x100 == 0 {
            drop((second, view, tensor));
        } else {
            drop((tensor, view, second));
        }
        Ok(())
    })?;
    let nbytes = case.spec.base * model::itemsize(case.spec.dtype);
    let mut blocks = Vec::new();
    for number in [case.streams.allocate, case.streams.write] {
        on(pair.from, streams.from(number), || {
            for _ in 0..BLOCKS {
                let mut block = pair.from.allocate(nbytes)?;
                pair.from.fill(&mut block, garbage)?;
                blocks.push((number, block));
            }
            Ok(())
        })?;
    }
    // The garbage is there before the blocks go: nothing may be under way any more in the next case.
    for (number, block) in blocks {
        on(pair.from, streams.from(number), || Ok(pair.from.read(&block)?))?;
    }
    Ok(())
}
