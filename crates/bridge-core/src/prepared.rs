//! Copies of many tensors that are made again and again: checked and planned once.

use crate::cast::Change;
use crate::conversion::Streams;
use crate::copy_all::{Job, Plan, export, grouped, repeats, run};
use crate::held::{Held, are_steady};
use crate::ordering;
use crate::{Device, Error, ErrorKind, Export, Failed, Layout, Misfit, Ordering, Pair};
use std::sync::Arc;

/// A view, by the address of its first element.
type View = (usize, Layout);

/// The plan of [`copy_all`](crate::copy_all) for some pairs.
///
/// Where the streams of later exports are known without them ([`Consumer::exports_in_current_stream`]), it keeps the
/// memory of both sides, and [`copy_held`](Self::copy_held) copies without a look at the tensors. Elsewhere it keeps no
/// memory, and each [`copy`](Self::copy) exports the tensors again.
///
/// [`Consumer::exports_in_current_stream`]: crate::Consumer::exports_in_current_stream
#[must_use = "nothing is copied before copy or copy_held is called"]
pub struct Prepared {
    repeats: Vec<bool>,
    copies: Copies,
}

enum Copies {
    Held(Held),
    /// Both sides of each pair, what happens to each element, and the device.
    Again {
        views: Vec<(View, View, Change, Option<Device>)>,
        plans: Vec<Plan>,
    },
}

crate::debug_fields!(impl[] Prepared: repeats);

impl Prepared {
    /// Checks pairs and plans their copies. Nothing is copied.
    ///
    /// # Errors
    ///
    /// Those of [`copy_all`](crate::copy_all) that are known before anything is written, those of
    /// [`Copies::plan`](crate::Copies::plan), and [`ErrorKind::CopyNeeded`] for a tensor that its framework copies first
    /// ([`Pending::Packing`](crate::Pending::Packing), and a deferred negation of integers).
    pub fn new<F, T>(pairs: &[Pair<'_, F, T>], ordering: &Arc<dyn Ordering>) -> Result<Self, Misfit> {
        let jobs = export(pairs, ordering)?;
        if let Some(Job { index, .. }) = jobs.iter().find(|job| job.is_packed) {
            let text = "the framework of the source makes a copy of it first, for strides that are not a whole number of elements or a deferred negation of integers: copy it with copy(), which asks for that each time";
            return Err(Failed { index: *index, error: Error::new(ErrorKind::CopyNeeded, text) }.into());
        }
        let repeats = repeats(&jobs)?;
        let copies = match are_steady(&jobs, pairs) {
            true => Copies::Held(Held::new(jobs, pairs, &repeats, ordering)?),
            false => Copies::again(&jobs, &repeats, ordering)?,
        };
        Ok(Self { repeats, copies })
    }

    /// Copies the pairs that it was made for, as [`copy_all`](crate::copy_all) does.
    ///
    /// # Errors
    ///
    /// Those of [`copy_all`](crate::copy_all); before anything is written, [`ErrorKind::Layout`] for a tensor that has
    /// another address, shape or strides than at [`new`](Self::new), and for another number of pairs.
    pub fn copy<F, T>(&self, pairs: &[Pair<'_, F, T>], ordering: &Arc<dyn Ordering>) -> Result<Vec<Streams>, Misfit> {
        let jobs = export(pairs, ordering).map_err(since)?;
        if jobs.len() != self.repeats.len() {
            let text = format!("{} pairs were prepared, not {}: pass the same pairs", self.repeats.len(), jobs.len());
            return Err(Failed { index: 0, error: Error::new(ErrorKind::Layout, text) }.into());
        }
        jobs.iter().try_for_each(|job| self.copies.are_of(job))?;
        let plans = match &self.copies {
            Copies::Held(_) => &[][..],
            Copies::Again { plans, .. } => plans,
        };
        run(pairs, jobs, &self.repeats, plans, ordering)
    }

    /// Returns what was exported of both sides of a pair, by its index; `None` where nothing is kept.
    pub fn held(&self, index: usize) -> Option<(&Export, &Export)> {
        match &self.copies {
            Copies::Held(held) => held.jobs().get(index).map(|job| (&job.source, &job.target)),
            Copies::Again { .. } => None,
        }
    }

    /// Checks one of the pairs that it was made for: exports it again.
    ///
    /// # Errors
    ///
    /// Those of [`copy`](Self::copy) before anything is written.
    pub fn check<F, T>(&self, index: usize, pair: Pair<'_, F, T>, ordering: &Arc<dyn Ordering>) -> Result<(), Misfit> {
        let job = Job::new(index, &pair, ordering).map_err(|error| since(Failed { index, error }.into()))?;
        self.copies.are_of(&job)
    }

    /// Copies what is [`held`](Self::held): from and into the memory that the tensors had at [`new`](Self::new). It makes
    /// the current streams wait for one another, at a cost that does not grow with the number of pairs.
    ///
    /// Before, the caller tells the adapters of the targets of the write
    /// ([`Adapter::overwritten`](crate::Adapter::overwritten)).
    ///
    /// # Errors
    ///
    /// Those of [`copy_all`](crate::copy_all) after the checks.
    ///
    /// # Panics
    ///
    /// Where nothing is held.
    ///
    /// # Safety
    ///
    /// No owner has freed or replaced memory that is kept, as `storage.resize_()` of PyTorch does: [`check`](Self::check)
    /// tells. During the call no other thread writes to the memory of either side.
    pub unsafe fn copy_held(&self) -> Result<(), Misfit> {
        match &self.copies {
            Copies::Held(held) => held.copy(),
            Copies::Again { .. } => panic!("the streams of these tensors are known only by their exports"),
        }
    }
}

impl Copies {
    fn again(jobs: &[Job], repeats: &[bool], ordering: &Arc<dyn Ordering>) -> Result<Self, Misfit> {
        let view = |(data, layout): (usize, &Layout)| (data, layout.clone());
        let views = |job: &Job| {
            let (source, target, change) = job.views();
            (view(source), view(target), change, job.device)
        };
        let mut plans = Vec::new();
        for (device, stream, pieces) in grouped(jobs, repeats).0 {
            let views: Vec<_> = pieces.iter().map(|job| jobs[*job].piece()).collect();
            let planned =
                ordering.copies().map_or(Ok(None), |copies| ordering::plan_copies(copies, device, &views, stream));
            if let Some(copies) = planned.map_err(|failed| failed.among(&pieces))? {
                plans.push(Plan { pieces, copies });
            }
        }
        Ok(Self::Again { views: jobs.iter().map(views).collect(), plans })
    }

    /// Checks that a pair is as it was.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`], with the side that has changed.
    fn are_of(&self, job: &Job) -> Result<(), Misfit> {
        let then = match self {
            Self::Held(held) => held.jobs().get(job.index).map(|then| (then.views(), then.device)),
            Self::Again { views, .. } => views
                .get(job.index)
                .map(|(from, to, change, device)| (((from.0, &from.1), (to.0, &to.1), *change), *device)),
        };
        let now = (job.views(), job.device);
        let changed = match (then, now) {
            (Some(then), now) if then == now => return Ok(()),
            // A source is broadcast to the shape of its target, which is thus looked at first.
            (Some(((_, to, _), _)), ((_, now, _), _)) if to.1.shape() != now.1.shape() => {
                format!("the shape of the target was {:?} and is now {:?}", to.1.shape(), now.1.shape())
            }
            (Some(((_, to, _), _)), ((_, now, _), _)) if to != now => {
                "the target has another address or layout than before".into()
            }
            (Some(((from, ..), _)), ((now, ..), _)) if from != now => {
                "the source has another address or layout than before".into()
            }
            _ => "the source or the target has another device, dtype or deferred operation than before".into(),
        };
        let error = Error::new(ErrorKind::Layout, format!("{changed}: prepare the copies again"));
        Err(Failed { index: job.index, error }.into())
    }
}

/// Returns the error of an export after the preparation: shapes that fitted together have changed since.
fn since(misfit: Misfit) -> Misfit {
    let error = match misfit.error.kind() {
        ErrorKind::Layout => misfit.error.at("changed since the copies were prepared"),
        _ => misfit.error,
    };
    Misfit { error, ..misfit }
}
