//! A copy in parts, on several threads.
//!
//! Threads live for one copy. A thread costs some ten microseconds, which a part is worth. Nothing remains that a fork
//! could break: the child of a process with a pool of threads has the pool and no threads.

use super::{Part, fill};
use crate::copy::plan::{Dim, Walk};
use bridge_core::planted::is_planted;
use std::env;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Builder};

/// Bytes of a copy that are worth a thread.
const SHARE: usize = 1 << 20;

/// Parts per thread: more than one, so that a thread that is delayed does not delay the copy.
const PARTS: usize = 4;

/// Parts begin at multiples of so many units, where they are long: at whole cache lines and tiles.
const GRAIN: usize = 128;

/// Returns how many threads a copy of `nbytes` is worth: one for a small copy, and [`at_most`] so many.
pub(super) fn count(nbytes: usize) -> usize {
    let worth = nbytes / SHARE;
    if worth < 2 {
        return 1;
    }
    worth.min(at_most())
}

/// Returns how many threads a copy may take: as many as run at a time, and no more than `OMP_NUM_THREADS`, by which
/// users limit PyTorch and TensorFlow.
pub(crate) fn at_most() -> usize {
    static ASKED: OnceLock<usize> = OnceLock::new();
    let asked = ASKED.get_or_init(|| {
        let number = env::var("OMP_NUM_THREADS").ok().and_then(|text| text.trim().parse().ok());
        number.filter(|number| *number > 0).unwrap_or(usize::MAX)
    });
    // Read anew each time: it is less in a process that was confined to fewer processors.
    let available = thread::available_parallelism().map_or(1, |number| number.get());
    available.min(*asked)
}

/// Copies all units of the walks on this number of threads, this one included.
///
/// # Safety
///
/// As for [`fill`], and no two units of the targets share a byte.
pub(super) unsafe fn run(whole: &[Part], threads: usize) {
    // SAFETY: the caller's promises.
    let fill = |part: &Part| unsafe { fill(part.clone()) };
    if threads < 2 {
        return whole.iter().for_each(fill);
    }
    let mut parts = cut(whole, threads * PARTS);
    if is_planted("copy_part_lost") && parts.len() > 1 {
        parts.pop();
    }
    let next = AtomicUsize::new(0);
    // Each part is copied once, and parts share no byte of the target.
    let work = || {
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            fill(part);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(parts.len()) {
            // A thread that the system refuses leaves its parts to the others.
            if Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
}

/// Divides walks so that all together are about so many parts of one size. Short ones stay whole.
fn cut(whole: &[Part], parts: usize) -> Vec<Part> {
    let nbytes = |walk: &Walk| walk.dims.iter().map(|dim| dim.length).product::<usize>() * walk.unit;
    let share = whole.iter().map(|part| nbytes(&part.walk)).sum::<usize>().div_ceil(parts).max(1);
    let mut all = Vec::with_capacity(whole.len() + parts);
    for part in whole {
        let count = nbytes(&part.walk).div_ceil(share);
        if count < 2 {
            all.push(part.clone());
            continue;
        }
        let pieces = split(part.walk.clone(), count).into_iter();
        all.extend(pieces.map(|walk| Part { walk, ..*part }));
    }
    all
}

/// Divides a walk into about so many parts, along the dimension that is slowest in the target where it is long enough,
/// and along the longest one otherwise.
fn split(walk: Walk, parts: usize) -> Vec<Walk> {
    let long = walk.dims.iter().position(|dim| dim.length >= parts);
    let longest = || (0..walk.dims.len()).rev().max_by_key(|d| walk.dims[*d].length);
    let Some(d) = long.or_else(longest) else { return vec![walk] };
    let dim = walk.dims[d];
    let step = dim.length.div_ceil(parts);
    let step = if step < GRAIN / 2 { step } else { step.next_multiple_of(GRAIN) };
    let starts = (0..dim.length).step_by(step);
    starts
        .map(|start| {
            let length = step.min(dim.length - start);
            let ragged = length < step && length > 1 && is_planted("copy_ragged_part_short");
            let length = length - usize::from(ragged);
            let mut part = walk.clone();
            part.from += start as i64 * dim.from;
            part.to += start as i64 * dim.to;
            match length {
                1 => drop(part.dims.remove(d)),
                _ => part.dims[d] = Dim { length, ..dim },
            }
            part
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Offsets of all units on both sides, in order.
    fn visited(walk: &Walk) -> Vec<(i64, i64)> {
        let mut at = vec![(walk.from, walk.to)];
        for dim in &walk.dims {
            let steps =
                |&(from, to): &(i64, i64)| (0..dim.length as i64).map(move |i| (from + i * dim.from, to + i * dim.to));
            at = at.iter().flat_map(steps).collect();
        }
        at.sort_unstable();
        at
    }

    proptest! {
        /// The parts are the walk, each unit once.
        #[test]
        fn parts_visit_every_unit_once(
            dims in prop::collection::vec((2usize..6, -9i64..10, 0i64..10), 0..4),
            long in 2usize..700,
            parts in 1usize..20,
        ) {
            let mut walk = Walk { unit: 4, from: 5, to: 7, dims: Default::default() };
            walk.dims.extend(dims.into_iter().map(|(length, from, to)| Dim { length, from, to }));
            walk.dims.push(Dim { length: long, from: 3, to: 11 });
            let whole = visited(&walk);
            let split = split(walk, parts);
            prop_assert!(split.len() <= parts);
            prop_assert!(split.iter().flat_map(|part| &part.dims).all(|dim| dim.length > 1));
            let mut together: Vec<_> = split.iter().flat_map(visited).collect();
            together.sort_unstable();
            prop_assert_eq!(together, whole);
        }
    }

    #[test]
    fn a_small_copy_takes_one_thread() {
        assert_eq!(count(2 * SHARE - 1), 1);
        assert!((1..=3).contains(&count(3 * SHARE)));
    }
}
