//! Many tensors that cross at once, and return their memory together.

use super::order::bytes;
use super::{Failure, Outcome, Pair, on, on_both, outstanding, same_bytes};
use crate::model::{self, Random};
use crate::{Case, Picks};
use bridge_core::DType;

/// The fewest tensors of a batch: from this many on core groups their leases.
const FEWEST: usize = 8;

/// What is alive while the views are dropped.
struct Scene<'a, F, T> {
    pair: &'a Pair<'a, F, T>,
    case: &'a Case,
    random: Random,
    tensors: Vec<F>,
    views: Vec<T>,
    /// The source's later owners of the memory, by the number of their stream.
    garbage: Vec<(usize, F)>,
}

/// The consumer sees each tensor of a batch. In any order of drops and on any thread, memory is reused only after the
/// last reader, and all of it is returned, also while another view of the batch lives.
pub(super) fn batch<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let leased = outstanding();
    let (streams, Picks { allocate, write, read, .. }) = (pair.streams(), case.streams);
    let (allocated, writer, reader) = (streams.from(allocate), streams.from(write), streams.to(read));
    let mut random = Random::new(case.seed);
    let count = FEWEST + random.below(FEWEST);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let (before, first, _) = bytes(case);
    // bool knows only two bytes, and one is that of the garbage.
    let seen = |i: usize| if case.spec.dtype == DType::BOOL { first } else { first.wrapping_add(i as u8) };

    let create = || Ok(pair.from.create(&case.spec, &vec![before; nbytes])?);
    let mut tensors: Vec<F> = on(pair.from, allocated, || (0..count).map(|_| create()).collect())?;
    let room = || Ok(pair.to.allocate(nbytes)?);
    let mut snapshots: Vec<T> = on(pair.to, reader, || (0..count).map(|_| room()).collect())?;
    on(pair.from, writer, || {
        pair.from.delay()?;
        tensors.iter_mut().enumerate().try_for_each(|(i, tensor)| Ok(pair.from.fill(tensor, seen(i))?))
    })?;
    let mut views = on_both(pair, writer, reader, || {
        let views = pair.transfer_all(&tensors, case.copy)?;
        pair.to.delay()?;
        views.iter().zip(&mut snapshots).try_for_each(|(view, into)| pair.to.snapshot(view, into))?;
        Ok(views)
    })?;

    // Memory is returned with the last lease of the batch, or a moment after its drop while another lives.
    let last = (random.below(2) == 0).then(|| views.swap_remove(random.below(count)));
    let mut scene = Scene { pair, case, random, tensors, views, garbage: Vec::new() };
    while !scene.tensors.is_empty() || !scene.views.is_empty() {
        scene.step(nbytes)?;
    }
    for number in [allocate, write] {
        for _ in 0..count {
            scene.reuse(number, nbytes)?;
        }
    }
    for (i, snapshot) in snapshots.iter().enumerate() {
        let got = on(pair.to, reader, || Ok(pair.to.read(snapshot)?))?;
        same_bytes(&format!("the reader's copy of tensor {i} of {count}"), &got, &vec![seen(i); nbytes])?;
    }
    // Wait for the garbage before its blocks are dropped: no work may run on into the next case.
    for (number, block) in scene.garbage {
        on(pair.from, streams.from(number), || Ok(pair.from.read(&block)?))?;
    }
    let alive = u64::from(last.is_some());
    let returned = pair.returned(leased + alive * pair.to.leases());
    drop(last);
    returned.map_err(|failure| Failure::new(format!("while {alive} views of the batch live: {failure}")))
}

impl<F, T> Scene<'_, F, T> {
    /// Drops a tensor or a view, or lets the source's allocator reuse what has been released so far.
    fn step(&mut self, nbytes: usize) -> Outcome {
        let (pair, Picks { allocate, write, drop: dropped, .. }) = (self.pair, self.case.streams);
        let streams = pair.streams();
        let action = self.random.below(8);
        if action == 0 {
            let number = if self.random.below(2) == 0 { allocate } else { write };
            return self.reuse(number, nbytes);
        }
        on_both(pair, streams.from(dropped), streams.to(dropped), || {
            match action {
                1..4 => drop(taken(&mut self.tensors, &mut self.random)),
                4..6 => drop(taken(&mut self.views, &mut self.random)),
                _ => taken(&mut self.views, &mut self.random).into_iter().for_each(|view| pair.to.drop_on_thread(view)),
            }
            Ok(())
        })
    }

    /// Fills memory that the source's allocator hands out with garbage.
    fn reuse(&mut self, number: usize, nbytes: usize) -> Outcome {
        let (_, _, garbage) = bytes(self.case);
        on(self.pair.from, self.pair.streams().from(number), || {
            let mut block = self.pair.from.allocate(nbytes)?;
            self.pair.from.fill(&mut block, garbage)?;
            self.garbage.push((number, block));
            Ok(())
        })
    }
}

/// Removes one at random.
fn taken<X>(from: &mut Vec<X>, random: &mut Random) -> Option<X> {
    (!from.is_empty()).then(|| from.swap_remove(random.below(from.len())))
}
