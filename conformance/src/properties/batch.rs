//! Many tensors that are converted at once, and return their memory together.

use super::order::bytes;
use super::{Failure, Outcome, Pair, on, on_both, outstanding, same_bytes};
use crate::model::{self, Random};
use crate::{Case, Picks, Subject};
use bridge_core::{DType, Stream};

/// The fewest tensors of a batch: from this many on core groups their leases.
const FEWEST: usize = 8;

/// A framework that makes tensors of a batch.
struct Source<'a, F> {
    subject: &'a dyn Subject<Tensor = F>,
    /// Where its memory is allocated, and where it is written and exported.
    streams: [Option<Stream>; 2],
}

/// What happens to the view that is dropped last.
#[derive(Clone, Copy, PartialEq)]
enum Last {
    /// It is dropped like the others.
    Gone,
    /// It lives until the end.
    Kept,
    /// It is read after the others were dropped: in the stream of its import,
    Read,
    /// in a recorded one,
    Noted,
    /// in the one that is current at its drop.
    AtDrop,
}

const LAST: [Last; 7] = [Last::Gone, Last::Gone, Last::Kept, Last::Read, Last::Read, Last::Noted, Last::AtDrop];

/// What is alive while the views are dropped.
struct Scene<'a, F, T> {
    pair: &'a Pair<'a, F, T>,
    case: &'a Case,
    sources: Vec<Source<'a, F>>,
    random: Random,
    tensors: Vec<F>,
    views: Vec<T>,
    /// The later owners of the memory, by the number of their source and the one of their stream there.
    garbage: Vec<(usize, usize, F)>,
}

/// The consumer sees each tensor of a batch, whichever framework it comes from. In any order of drops and on any thread,
/// memory is reused only after the last reader, and all of it is returned, also while another view of the batch lives.
pub(super) fn batch<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let leased = outstanding();
    let (streams, Picks { read, onward, drop: dropped, .. }) = (pair.streams(), case.streams);
    let (writer, reader) = (streams.from(case.streams.write), streams.to(read));
    let mut random = Random::new(case.seed);
    let count = FEWEST + random.below(FEWEST);
    let nbytes = model::numel(&case.spec.shape) * model::itemsize(case.spec.dtype);
    let (before, first, _) = bytes(case);
    // bool knows only two bytes, and one is that of the garbage.
    let seen = |i: usize| if case.spec.dtype == DType::BOOL { first } else { first.wrapping_add(i as u8) };

    let sources = sources(pair, case)?;
    let of: Vec<usize> = (0..count).map(|_| random.below(sources.len())).collect();
    let mut tensors: Vec<F> = Vec::new();
    for Source { subject, streams } in of.iter().map(|number| &sources[*number]) {
        tensors.push(on(*subject, streams[0], || Ok(subject.create(&case.spec, &vec![before; nbytes])?))?);
    }
    let last = if case.copy == Some(true) { LAST[random.below(5)] } else { LAST[random.below(LAST.len())] };
    let late = streams.to(match last {
        Last::Noted => onward,
        Last::AtDrop => dropped,
        _ => read,
    });
    let allocate = || Ok(pair.to.allocate(nbytes)?);
    let mut snapshots: Vec<T> = on(pair.to, reader, || (0..count).map(|_| allocate()).collect())?;
    let mut late_snapshot = on(pair.to, late, allocate)?;
    for (number, Source { subject, streams }) in sources.iter().enumerate() {
        on(*subject, streams[1], || {
            subject.delay()?;
            let mut own = tensors.iter_mut().enumerate().filter(|(i, _)| of[*i] == number);
            own.try_for_each(|(i, tensor)| Ok(subject.fill(tensor, seen(i))?))
        })?;
    }
    let is_slow = random.below(2) == 0;
    let mut views = on_both(pair, writer, reader, || {
        // Copies that run late are the last work with the originals.
        if is_slow {
            pair.to.delay()?;
        }
        let all: Vec<_> = of.iter().zip(&tensors).map(|(number, tensor)| (sources[*number].subject, tensor)).collect();
        let views = pair.transfer_all(&all, case.copy)?;
        if !is_slow {
            pair.to.delay()?;
        }
        views.iter().zip(&mut snapshots).try_for_each(|(view, into)| pair.to.snapshot(view, into))?;
        Ok(views)
    })?;

    // Memory is returned with the last lease of the batch, or a moment after its drop while another lives.
    let chosen = random.below(count);
    let mut left = (last != Last::Gone).then(|| views.swap_remove(chosen));
    let mut scene = Scene { pair, case, sources, random, tensors, views, garbage: Vec::new() };
    while !scene.tensors.is_empty() || !scene.views.is_empty() {
        scene.step(nbytes)?;
    }
    let reads_late = left.take_if(|_| last != Last::Kept);
    let is_late = reads_late.is_some();
    if let Some(view) = reads_late {
        if last != Last::Read {
            // It has arrived: from then on the user may use it in any stream.
            on(pair.to, reader, || Ok(pair.to.read(&view)?))?;
        }
        on(pair.to, late, || {
            if last == Last::Noted {
                pair.to.note(&view)?;
            }
            pair.to.delay()?;
            Ok(pair.to.snapshot(&view, &mut late_snapshot)?)
        })?;
        on_both(pair, streams.from(dropped), streams.to(dropped), || {
            drop(view);
            Ok(())
        })?;
    }
    scene.reuse_all(count, nbytes)?;
    for (i, snapshot) in snapshots.iter().enumerate() {
        let got = on(pair.to, reader, || Ok(pair.to.read(snapshot)?))?;
        same_bytes(&format!("the reader's copy of tensor {i} of {count}"), &got, &vec![seen(i); nbytes])?;
    }
    if is_late {
        let got = on(pair.to, late, || Ok(pair.to.read(&late_snapshot)?))?;
        same_bytes("what was read after the other views were dropped", &got, &vec![seen(chosen); nbytes])?;
    }
    // Wait for the garbage before its blocks are dropped: no work may run on into the next case.
    for (source, stream, block) in scene.garbage {
        let Source { subject, streams } = &scene.sources[source];
        on(*subject, streams[stream], || Ok(subject.read(&block)?))?;
    }
    let alive = u64::from(left.is_some());
    let returned = pair.returned(leased + alive * pair.to.leases());
    drop(left);
    returned.map_err(|failure| Failure::new(format!("while {alive} views of the batch live: {failure}")))
}

/// Returns the source, and another framework where one makes such tensors: a third one, or the target itself.
fn sources<'a, F, T>(pair: &Pair<'a, F, T>, case: &Case) -> Result<Vec<Source<'a, F>>, Failure> {
    let streams = pair.streams();
    let own = [case.streams.allocate, case.streams.write].map(|number| streams.from(number));
    let mut sources = vec![Source { subject: pair.from, streams: own }];
    let makes = |subject: &&dyn Subject<Tensor = F>| {
        let (can, profile) = (subject.capabilities(), subject.profile());
        can.dtypes.contains(&case.spec.dtype)
            && profile.rank.contains(&case.spec.shape.len())
            && profile.name != pair.from.profile().name
    };
    if let Some(subject) = pair.also.filter(makes) {
        // The stream that is current for it at the export. Adapters of one framework share its current stream.
        let reader = streams.to(case.streams.read);
        let current = on(pair.to, reader, || Ok(subject.consumer().current_stream(subject.device())?))?;
        let stream = reader.filter(|reader| current == Some(*reader));
        sources.push(Source { subject, streams: [stream; 2] });
    }
    Ok(sources)
}

impl<F, T> Scene<'_, F, T> {
    /// Drops a tensor or a view, or lets an allocator reuse what has been released so far.
    fn step(&mut self, nbytes: usize) -> Outcome {
        let (pair, dropped) = (self.pair, self.case.streams.drop);
        let streams = pair.streams();
        let action = self.random.below(8);
        if action == 0 {
            let (source, stream) = (self.random.below(self.sources.len()), self.random.below(2));
            return self.reuse(source, stream, nbytes);
        }
        // A copy is memory of the target, which may free it in the order of the thread that drops it.
        let elsewhere = action > 5 && self.case.copy != Some(true);
        on_both(pair, streams.from(dropped), streams.to(dropped), || {
            match action {
                1..4 => drop(taken(&mut self.tensors, &mut self.random)),
                _ if elsewhere => {
                    taken(&mut self.views, &mut self.random).into_iter().for_each(|view| pair.to.drop_on_thread(view))
                }
                _ => drop(taken(&mut self.views, &mut self.random)),
            }
            Ok(())
        })
    }

    /// Fills as many blocks of each source and stream with garbage as there are tensors.
    fn reuse_all(&mut self, count: usize, nbytes: usize) -> Outcome {
        let mut all = (0..self.sources.len()).flat_map(|source| [(source, 0), (source, 1)]);
        all.try_for_each(|(source, stream)| (0..count).try_for_each(|_| self.reuse(source, stream, nbytes)))
    }

    /// Fills memory that the allocator of a source hands out with garbage.
    fn reuse(&mut self, source: usize, stream: usize, nbytes: usize) -> Outcome {
        let (_, _, garbage) = bytes(self.case);
        let Source { subject, streams } = &self.sources[source];
        on(*subject, streams[stream], || {
            let mut block = subject.allocate(nbytes)?;
            subject.fill(&mut block, garbage)?;
            self.garbage.push((source, stream, block));
            Ok(())
        })
    }
}

/// Removes one at random.
fn taken<X>(from: &mut Vec<X>, random: &mut Random) -> Option<X> {
    (!from.is_empty()).then(|| from.swap_remove(random.below(from.len())))
}
