//! Copies of many tensors that are made again and again: checked and planned once.

use crate::conversion::Streams;
use crate::copy_all::{Group, Job, Plan, export, grouped, repeats, run};
use crate::{Device, Error, ErrorKind, Failed, Layout, Misfit, Ordering, Pair};
use std::sync::Arc;

/// A view, by the address of its first element.
type View = (usize, Layout);

/// The plan of [`copy_all`](crate::copy_all) for some pairs. It keeps neither tensors nor their memory: each
/// [`copy`](Self::copy) is given the pairs again, and refuses one that has changed.
pub struct Prepared {
    /// Both sides of each pair, the bits that are flipped, and the device.
    views: Vec<(View, View, u128, Option<Device>)>,
    repeats: Vec<bool>,
    plans: Vec<Plan>,
}

crate::debug_fields!(impl[] Prepared: repeats);

impl Prepared {
    /// Checks pairs and plans their copies. Nothing is copied.
    ///
    /// # Errors
    ///
    /// Those of [`copy_all`](crate::copy_all) that are known before anything is written, those of
    /// [`Copies::plan`](crate::Copies::plan), and [`ErrorKind::Device`] for elements that change memory.
    pub fn new<F, T>(pairs: &[Pair<'_, F, T>], ordering: &Arc<dyn Ordering>) -> Result<Self, Misfit> {
        let jobs = export(pairs, ordering)?;
        if let Some(Job { index, .. }) = jobs.iter().find(|job| job.device.is_none()) {
            let text = "the tensor and the target are in different memories: copy them with copy()";
            return Err(Failed { index: *index, error: Error::new(ErrorKind::Device, text) }.into());
        }
        let repeats = repeats(&jobs)?;
        let view = |(data, layout): (usize, &Layout)| (data, layout.clone());
        let views = |job: &Job| {
            let (source, target, flips) = job.views();
            (view(source), view(target), flips, job.device)
        };
        let views = jobs.iter().map(views).collect();
        let mut plans = Vec::new();
        for Group { place: (device, stream), jobs } in grouped(jobs, &repeats).0 {
            let pieces: Vec<_> = jobs.iter().map(Job::piece).collect();
            let planned = ordering.copies().map_or(Ok(None), |copies| copies.plan(device, &pieces, stream));
            let at = |Failed { index, error }| Failed { index: jobs.get(index).map_or(0, |job| job.index), error };
            if let Some(copies) = planned.map_err(at)? {
                plans.push(Plan { pieces: jobs.iter().map(|job| job.index).collect(), copies });
            }
        }
        Ok(Self { views, repeats, plans })
    }

    /// Copies the pairs that it was made for, as [`copy_all`](crate::copy_all) does.
    ///
    /// # Errors
    ///
    /// Those of [`copy_all`](crate::copy_all); before anything is written, [`ErrorKind::Layout`] for a tensor that has
    /// another address, shape or strides than at [`new`](Self::new), and for another number of pairs.
    pub fn copy<F, T>(&self, pairs: &[Pair<'_, F, T>], ordering: &Arc<dyn Ordering>) -> Result<Vec<Streams>, Misfit> {
        let jobs = export(pairs, ordering)?;
        let is_same = |job: &Job| {
            let now = (job.views(), job.device);
            self.views
                .get(job.index)
                .is_some_and(|(from, to, flips, device)| (((from.0, &from.1), (to.0, &to.1), *flips), *device) == now)
        };
        let changed = jobs.iter().find(|job| !is_same(job)).map(|job| job.index);
        if let Some(index) = changed.or((jobs.len() != self.views.len()).then_some(0)) {
            let text = "the tensor or the target has another address or layout than before: prepare the copies anew";
            return Err(Failed { index, error: Error::new(ErrorKind::Layout, text) }.into());
        }
        run(pairs, jobs, &self.repeats, &self.plans, ordering)
    }
}
