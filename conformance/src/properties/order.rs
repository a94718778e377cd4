//! From when and until when a tensor may be accessed: work in streams that runs late.

use super::{Failure, Outcome, Pair, Take, on, on_both, same_bytes};
use crate::{Case, Route, Subject, model};
use bridge_core::{DType, Stream};

/// Returns the initial byte, the one that must be read, and the garbage of later owners.
pub(super) fn bytes(case: &Case) -> (u8, u8, u8) {
    let seen = (case.seed & 0xff) as u8;
    // bool knows only two bytes.
    if case.spec.dtype == DType::BOOL { (!seen & 1, seen & 1, !seen & 1) } else { (!seen, seen, seen ^ 0x5a) }
}

/// Work in the owner's stream at the export is done before the consumer accesses the tensor.
pub(super) fn order<F, T>(pair: &Pair<'_, F, T>, case: &Case, take: Take<'_, F, T>) -> Outcome {
    let streams = pair.streams();
    let (writer, reader) = (streams.from(case.streams.write), streams.to(case.streams.read));
    let (before, seen, _) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let mut tensor = pair.from.create(&case.spec, &vec![before; case.spec.base * model::itemsize(case.spec.dtype)])?;
    let back = streams.from(case.streams.back);
    let mut snapshot = on(pair.to, reader, || Ok(pair.to.allocate(nbytes)?))?;
    let mut snapshot_back = on(pair.from, back, || Ok(pair.from.allocate(nbytes)?))?;
    on(pair.from, writer, || {
        pair.from.delay()?;
        Ok(pair.from.fill(&mut tensor, seen)?)
    })?;
    let copies = match case.route {
        Route::Onward => Some(None),
        Route::CopyOn => Some(Some(true)),
        _ => None,
    };
    let view = on_both(pair, writer, reader, || {
        let view = take(&tensor)?;
        if copies.is_none() {
            pair.to.snapshot(&view, &mut snapshot)?;
        }
        Ok(view)
    });
    // No work has waited for the writer yet when the view is exported.
    let second = match (&view, copies) {
        (Ok(view), Some(copy)) => Some(on_both(pair, back, reader, || {
            let second = pair.back(view, copy)?.0;
            pair.from.snapshot(&second, &mut snapshot_back)?;
            Ok(second)
        })),
        _ => None,
    };
    let got = match copies {
        Some(_) => on(pair.from, back, || Ok(pair.from.read(&snapshot_back)?)),
        None => on(pair.to, reader, || Ok(pair.to.read(&snapshot)?)),
    };
    // All work must be done before the next case reuses the memory, even if this transfer failed.
    on(pair.from, writer, || Ok(pair.from.read(&tensor)?))?;
    drop(second.transpose()?);
    drop(view?);
    same_bytes("the consumer's copy", &got?, &vec![seen; nbytes])
}

/// The memory is not reused before the last reader has read, wherever it was allocated, written and read.
pub(super) fn release_order<F, T>(pair: &Pair<'_, F, T>, case: &Case, take: Take<'_, F, T>) -> Outcome {
    let streams = pair.streams();
    let (allocated, writer) = (streams.from(case.streams.allocate), streams.from(case.streams.write));
    let (before, seen, garbage) = bytes(case);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let base = vec![before; case.spec.base * model::itemsize(case.spec.dtype)];
    let mut tensor = on(pair.from, allocated, || Ok(pair.from.create(&case.spec, &base)?))?;
    on(pair.from, writer, || Ok(pair.from.fill(&mut tensor, seen)?))?;

    let scene = Scene { pair, case, take, tensor, nbytes, garbage };
    let got = match case.route {
        // Those of captures have no meaning here.
        Route::Direct | Route::Forked | Route::Captured | Route::Meanwhile => scene.direct()?,
        Route::Noted => scene.noted(case.streams.onward, true)?,
        Route::Late => scene.noted(case.streams.drop, false)?,
        Route::Twice => scene.twice()?,
        Route::Onward => scene.onward()?,
        Route::CopyOn => scene.copy_on()?,
        Route::Beside => scene.beside()?,
        Route::Fresh => scene.fresh()?,
        Route::Exported => scene.exported()?,
        Route::Passing => scene.passing()?,
    };
    // There may be no native method to compare with.
    got.map_or(Ok(()), |got| same_bytes("the reader's copy", &got, &vec![seen; nbytes]))
}

/// A tensor that is imported, read late, and released before the read has run.
struct Scene<'a, F, T> {
    pair: &'a Pair<'a, F, T>,
    case: &'a Case,
    take: Take<'a, F, T>,
    tensor: F,
    nbytes: usize,
    garbage: u8,
}

/// The bytes that the reader has read; `None` where there is no native method.
type Read = std::result::Result<Option<Vec<u8>>, Failure>;

impl<F, T> Scene<'_, F, T> {
    fn back(&self) -> Option<Stream> {
        self.pair.streams().from(self.case.streams.back)
    }

    fn onward_stream(&self) -> Option<Stream> {
        self.pair.streams().to(self.case.streams.onward)
    }

    /// Returns the number of the stream to use a view in. A copy is memory of the consumer's allocator, which reuses it
    /// after the stream that the copy was made in, and after no other.
    fn used_in(&self, number: usize) -> usize {
        if self.case.copy == Some(true) { self.case.streams.read } else { number }
    }

    /// Makes a copy late: it reads the tensor after a delay in the source's current stream.
    fn delay_copy(&self) -> Outcome {
        if self.case.copy == Some(true) {
            self.pair.from.delay()?;
        }
        Ok(())
    }

    /// Imports the tensor and waits for its data: from then on the user may use the view in any stream.
    fn arrived(&self) -> std::result::Result<T, Failure> {
        let streams = self.pair.streams();
        on_both(self.pair, streams.from(self.case.streams.write), streams.to(self.case.streams.read), || {
            let view = (self.take)(&self.tensor)?;
            self.pair.to.read(&view)?;
            Ok(view)
        })
    }

    /// Records the current stream for a view, in most cases only with its second half: that must keep the whole memory.
    fn note(&self, view: &T) -> Outcome {
        let Pair { to, .. } = *self.pair;
        let rows = to.observe(view)?.shape.first().copied().unwrap_or_default();
        let halved = self.case.seed & PART != 0 && to.capabilities().parts && rows > 1;
        let part = if halved { to.part(view, rows as usize / 2).transpose()? } else { None };
        Ok(to.note(part.as_ref().unwrap_or(view))?)
    }

    fn direct(self) -> Read {
        let (pair, streams) = (self.pair, self.pair.streams());
        let (writer, reader) = (streams.from(self.case.streams.write), streams.to(self.case.streams.read));
        let mut snapshot = on(pair.to, reader, || Ok(pair.to.allocate(self.nbytes)?))?;
        let view = on_both(pair, writer, reader, || {
            self.delay_copy()?;
            let view = (self.take)(&self.tensor)?;
            pair.to.delay()?;
            pair.to.snapshot(&view, &mut snapshot)?;
            Ok(view)
        })?;
        release(pair, self.case, self.garbage, (self.tensor, view, None))?;
        on(pair.to, reader, || Ok(Some(pair.to.read(&snapshot)?)))
    }

    fn noted(self, number: usize, noted: bool) -> Read {
        let (pair, stream) = (self.pair, self.pair.streams().to(self.used_in(number)));
        let mut snapshot = on(pair.to, stream, || Ok(pair.to.allocate(self.nbytes)?))?;
        let view = self.arrived()?;
        on(pair.to, stream, || {
            if noted {
                self.note(&view)?;
            }
            pair.to.delay()?;
            Ok(pair.to.snapshot(&view, &mut snapshot)?)
        })?;
        release(pair, self.case, self.garbage, (self.tensor, view, None))?;
        on(pair.to, stream, || Ok(Some(pair.to.read(&snapshot)?)))
    }

    fn twice(self) -> Read {
        let (pair, onward) = (self.pair, self.pair.streams().to(self.used_in(self.case.streams.onward)));
        let mut snapshot = on(pair.to, onward, || Ok(pair.to.allocate(self.nbytes)?))?;
        let mut views = [self.arrived()?, self.arrived()?];
        if self.case.seed & SWAPPED != 0 {
            views.reverse();
        }
        let [first, view] = views;
        on(pair.to, onward, || {
            self.note(&first)?;
            self.note(&view)
        })?;
        drop(first);
        on(pair.to, onward, || {
            pair.to.delay()?;
            Ok(pair.to.snapshot(&view, &mut snapshot)?)
        })?;
        release(pair, self.case, self.garbage, (self.tensor, view, None))?;
        on(pair.to, onward, || Ok(Some(pair.to.read(&snapshot)?)))
    }

    fn onward(self) -> Read {
        let (pair, back) = (self.pair, self.back());
        let mut snapshot = on(pair.from, back, || Ok(pair.from.allocate(self.nbytes)?))?;
        let view = self.arrived()?;
        let second = on_both(pair, back, self.onward_stream(), || {
            let second = pair.back(&view, None)?.0;
            pair.from.delay()?;
            pair.from.snapshot(&second, &mut snapshot)?;
            Ok(second)
        })?;
        release(pair, self.case, self.garbage, (self.tensor, view, Some(second)))?;
        on(pair.from, back, || Ok(Some(pair.from.read(&snapshot)?)))
    }

    fn copy_on(self) -> Read {
        let (pair, back) = (self.pair, self.back());
        let view = self.arrived()?;
        let copy = on_both(pair, back, self.onward_stream(), || {
            pair.to.delay()?;
            Ok(pair.back(&view, Some(true))?.0)
        })?;
        release(pair, self.case, self.garbage, (self.tensor, view, None))?;
        on(pair.from, back, || Ok(Some(pair.from.read(&copy)?)))
    }

    fn beside(self) -> Read {
        let (pair, case, streams) = (self.pair, self.case, self.pair.streams());
        let ours = self.arrived()?;
        let native = on_both(pair, streams.from(case.streams.write), streams.to(case.streams.read), || {
            let Some(native) = pair.native.as_ref().and_then(|native| native(&self.tensor)) else { return Ok(None) };
            let native = native?;
            pair.to.read(&native)?;
            Ok(Some(native))
        });
        // The suite judges our way: the case ends where the native method refuses the tensor.
        let Ok(Some(native)) = native else { return Ok(None) };
        let back = self.back();
        let mut snapshot = on(pair.from, back, || Ok(pair.from.allocate(self.nbytes)?))?;
        let second = on_both(pair, back, self.onward_stream(), || Ok(pair.back(&native, None)?.0))?;
        on_both(pair, streams.from(case.streams.drop), streams.to(case.streams.drop), || {
            drop(ours);
            Ok(())
        })?;
        // Ours is released: only the native view still keeps the memory.
        pair.memory()?;
        on(pair.from, back, || {
            pair.from.delay()?;
            Ok(pair.from.snapshot(&second, &mut snapshot)?)
        })?;
        release(pair, case, self.garbage, (self.tensor, native, Some(second)))?;
        on(pair.from, back, || Ok(Some(pair.from.read(&snapshot)?)))
    }

    fn fresh(self) -> Read {
        let (pair, case) = (self.pair, self.case);
        let writer = pair.streams().from(case.streams.write);
        let mut snapshot = pair.to.allocate(self.nbytes)?;
        // From here on all earlier work lies in the past of every stream, also of those that are not yet made.
        pair.memory()?;
        // A framework that exports under an external stream may record it for its memory, and one that allocates a copy
        // under it does: that stream must not be destroyed. PyTorch's expandable segments wait for it when they shrink.
        if pair.from.profile().name != pair.to.profile().name && case.copy != Some(true) {
            on(pair.from, writer, || {
                in_passing(pair.to, true, || {
                    pair.to.read(&(self.take)(&self.tensor)?)?;
                    Ok(())
                })
            })?;
        }
        let view = on(pair.from, writer, || {
            in_passing(pair.to, false, || {
                self.delay_copy()?;
                let taken = (self.take)(&self.tensor)?;
                pair.to.delay()?;
                pair.to.snapshot(&taken, &mut snapshot)?;
                Ok(taken)
            })
        })?;
        release(pair, case, self.garbage, (self.tensor, view, None))?;
        pair.memory()?;
        Ok(Some(pair.to.read(&snapshot)?))
    }

    fn exported(mut self) -> Read {
        let (pair, case, (_, seen, _)) = (self.pair, self.case, bytes(self.case));
        let reader = pair.streams().to(case.streams.read);
        let mut snapshot = on(pair.to, reader, || Ok(pair.to.allocate(self.nbytes)?))?;
        // As in `fresh`.
        pair.memory()?;
        let view = on(pair.to, reader, || {
            in_passing(pair.from, false, || {
                pair.from.delay()?;
                pair.from.fill(&mut self.tensor, seen)?;
                let view = (self.take)(&self.tensor)?;
                pair.to.delay()?;
                pair.to.snapshot(&view, &mut snapshot)?;
                Ok(view)
            })
        })?;
        release(pair, case, self.garbage, (self.tensor, view, None))?;
        pair.memory()?;
        Ok(Some(pair.to.read(&snapshot)?))
    }

    fn passing(self) -> Read {
        let (pair, case) = (self.pair, self.case);
        let mut snapshot = pair.to.allocate(self.nbytes)?;
        let view = self.arrived()?;
        // As in `fresh`.
        pair.memory()?;
        in_passing(pair.to, false, || {
            self.note(&view)?;
            pair.to.delay()?;
            Ok(pair.to.snapshot(&view, &mut snapshot)?)
        })?;
        release(pair, case, self.garbage, (self.tensor, view, None))?;
        pair.memory()?;
        Ok(Some(pair.to.read(&snapshot)?))
    }
}

/// Runs `body` with a stream as the current one of `subject` that is dropped then.
fn in_passing<S, R>(
    subject: &dyn Subject<Tensor = S>,
    external: bool,
    body: impl FnOnce() -> Result<R, Failure>,
) -> Result<R, Failure> {
    let (mut body, mut result) = (Some(body), None);
    subject.on_fresh_stream(external, &mut || {
        result = body.take().map(|body| body());
        Ok(())
    })?;
    result.unwrap_or_else(|| Err(Failure::new("on_fresh_stream did not run its body")))
}

/// Blocks allocated on each stream, so that the allocator reuses the one just released.
const BLOCKS: usize = 2;

/// The bits of a seed that choose what no stream and no route says.
const OWNER_FIRST: u64 = 0x100;
const SWAPPED: u64 = 0x200;
const ELSEWHERE: u64 = 0x800;
const PART: u64 = 0x3000;

/// Drops every reference, in half of the cases the views on another thread, and lets the source's allocator reuse the
/// memory.
fn release<F, T>(pair: &Pair<'_, F, T>, case: &Case, garbage: u8, held: (F, T, Option<F>)) -> Outcome {
    let streams = pair.streams();
    let (from, to) = (streams.from(case.streams.drop), streams.to(case.streams.drop));
    on_both(pair, from, to, || {
        let (tensor, view, second) = held;
        // There another stream is current.
        let elsewhere = case.seed & ELSEWHERE != 0 && case.route != Route::Late;
        let drop_views = |view: T, second: Option<F>| match elsewhere {
            true => {
                second.into_iter().for_each(|second| pair.from.drop_on_thread(second));
                pair.to.drop_on_thread(view);
            }
            false => drop((second, view)),
        };
        // Both orders matter: the owner may outlive the view or not.
        match case.seed & OWNER_FIRST == 0 {
            true => {
                drop_views(view, second);
                drop(tensor);
            }
            false => {
                drop(tensor);
                drop_views(view, second);
            }
        }
        Ok(())
    })?;
    reuse(pair, case, garbage)
}

/// Fills the blocks that the source's allocator hands out with garbage.
pub(super) fn reuse<F, T>(pair: &Pair<'_, F, T>, case: &Case, garbage: u8) -> Outcome {
    let streams = pair.streams();
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
    // Wait for the garbage before the blocks are dropped: no work may run on into the next case.
    for (number, block) in blocks {
        on(pair.from, streams.from(number), || Ok(pair.from.read(&block)?))?;
    }
    Ok(())
}
