//! Conversions by several threads at once.

use super::{Failure, Outcome, Pair, same_bytes};
use crate::model::{self, Random};
use crate::{Case, Coverage, Subject};
use bridge_core::{Options, Ordering, Plan, transfer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier, Mutex, PoisonError};

/// Threads that convert at once.
const THREADS: usize = 2;

/// Conversions of each, there and back.
const ROUNDS: usize = 4;

/// What the threads share of a pair.
struct Shared<'a, F, T> {
    from: &'a dyn Subject<Tensor = F>,
    to: &'a dyn Subject<Tensor = T>,
    ordering: Arc<dyn Ordering>,
}

// SAFETY: it is used only inside `Threads` of both subjects, whose makers have promised what that takes. Tensors stay
// on the thread that makes them.
unsafe impl<F, T> Sync for Shared<'_, F, T> {}

/// Threads that convert separate tensors at the same time do not disturb each other.
pub(super) fn threads<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (Some(source), Some(target)) = (pair.from.threads(), pair.to.threads()) else { return Ok(()) };
    let shared = &Shared { from: pair.from, to: pair.to, ordering: Arc::clone(pair.ordering()) };
    let (together, done) = (Barrier::new(THREADS), Mutex::new(Vec::new()));
    let one = |thread: u64| {
        let (seed, mut outcome) = (case.seed.wrapping_add(thread), Err(Failure::new("the thread did not run")));
        // Not inside: there a thread may hold what the other one waits for.
        together.wait();
        source.inside(&mut || {
            target.inside(&mut || {
                let run = || shared.rounds(case, seed);
                outcome =
                    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(Failure::new("a thread panicked")));
            });
        });
        done.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
    };
    let all = || {
        std::thread::scope(|scope| {
            (0..THREADS as u64).for_each(|thread| {
                drop(scope.spawn({
                    let one = &one;
                    move || one(thread)
                }))
            });
        });
    };
    source.outside(&mut || target.outside(&mut || all()));
    let outcomes = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    outcomes.into_iter().try_for_each(|outcome| outcome.map(|seen| pair.add_seen(seen)))
}

impl<F, T> Shared<'_, F, T> {
    /// Converts tensors of this thread there and back.
    fn rounds(&self, case: &Case, seed: u64) -> Result<Coverage, Failure> {
        let (mut random, options) = (Random::new(seed), Options::default().with_copy(case.copy));
        let takes = self.from.profile().devices.contains(&self.from.device().kind);
        let mut seen = Coverage::default();
        for _ in 0..ROUNDS {
            let bytes = model::random_bytes(&case.spec, random.bits());
            let elements = model::elements(&case.spec, &bytes);
            let tensor = self.from.create(&case.spec, &bytes)?;
            let (view, there) = transfer(self.from, self.to, &tensor, &self.ordering, &options)?;
            // Some sources take nothing.
            let back = takes.then(|| transfer(self.to, self.from, &view, &self.ordering, &Options::default()));
            same_bytes("a view on one of the threads", &self.to.read(&view)?, &elements)?;
            if random.below(2) == 0 {
                drop(view);
            }
            if let Some((back, _)) = back.transpose()? {
                same_bytes("a tensor that came back on one of the threads", &self.from.read(&back)?, &elements)?;
            }
            // One for each way that was taken, as in every case.
            match there.plan {
                Plan::ZeroCopy => seen.in_place = 1,
                _ => seen.copied = 1,
            }
        }
        Ok(seen)
    }
}
