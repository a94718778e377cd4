//! Copies of many tensors into tensors that exist: checked together, ordered once, and launched together.

use crate::batch::Batch;
use crate::cast::Change;
use crate::clash::{Clash, repeated};
use crate::conversion::{Streams, order_after, used};
use crate::copy_into::{Sides, release, uncopied};
use crate::fill::flips;
use crate::host_copy::copy_by_loop;
use crate::moved::{Moving, Route, unmovable};
use crate::planted::is_planted;
use crate::{
    Consumer, Device, DeviceKind, Error, ErrorKind, Export, Failed, Layout, Lease, Ordering, Pair, Piece, Planned,
    Result, Reuse, Stream, Strided,
};
use std::fmt;
use std::sync::Arc;

/// A pair that could not be copied.
#[derive(Debug)]
#[non_exhaustive]
pub struct Misfit {
    /// Its index.
    pub index: usize,
    /// The index of another pair, with which it shares bytes.
    pub beside: Option<usize>,
    /// The reason.
    pub error: Error,
}

impl From<Failed> for Misfit {
    fn from(Failed { index, error }: Failed) -> Self {
        Self { index, beside: None, error }
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.beside {
            Some(other) => write!(f, "pair {} and pair {other}: {}", self.index, self.error),
            None => write!(f, "pair {}: {}", self.index, self.error),
        }
    }
}

impl std::error::Error for Misfit {}

/// The error names the index, or both.
impl From<Misfit> for Error {
    fn from(Misfit { index, beside, error }: Misfit) -> Self {
        let beside = beside.map(|other| format!(" and pair {other}")).unwrap_or_default();
        error.at(&format!("pair {index}{beside}"))
    }
}

/// Copies every tensor into its target, as [`copy_into`](crate::copy_into) does, and all of them together: each pair of
/// streams is ordered once, and the ordering's [`Copies`](crate::Copies) receive all copies within one memory in one
/// call ([`copy_all`](crate::Copies::copy_all)), and so all moves between the same two and in the same streams, those
/// for which the host waits last. Returns, for each pair, the owner's stream and the one that waits for it, where they
/// differ.
///
/// Where the two dtypes of a pair differ and that of the target is [`Pair::dtype`], the elements are cast,
/// as [`Cast`](crate::Cast) says, by the same call. A pair of one dtype is copied as it is, whatever `Pair::dtype` is.
///
/// A pair of the same source and the same target as an earlier one, view for view, with the same deferred operations
/// and the same cast, is copied once.
///
/// # Errors
///
/// Before anything is written, with the index of the pair: those of [`copy_into`](crate::copy_into);
/// [`ErrorKind::Layout`] where a target shares bytes with a side of another pair; for a cast those of
/// [`Cast::new`](crate::Cast::new) and of [`Copies::casts`](crate::Copies::casts). After that those of
/// [`Copies::copy_all`](crate::Copies::copy_all), whose text says that the targets are undefined.
pub fn copy_all<F, T>(
    pairs: &[Pair<'_, F, T>],
    ordering: &Arc<dyn Ordering>,
) -> Result<Vec<Option<(Stream, Stream)>>, Misfit> {
    let jobs = export(pairs, ordering)?;
    let repeats = repeats(&jobs)?;
    run(pairs, jobs, &repeats, &[], ordering)
}

/// Exports both sides of every pair, and checks each pair.
pub(crate) fn export<F, T>(pairs: &[Pair<'_, F, T>], ordering: &Arc<dyn Ordering>) -> Result<Vec<Job>, Misfit> {
    let mut jobs = Vec::with_capacity(pairs.len());
    for (index, pair) in pairs.iter().enumerate() {
        jobs.push(Job::new(index, pair, ordering).map_err(|error| Failed { index, error })?);
    }
    Ok(jobs)
}

/// Checks all pairs together. Returns which of them repeat an earlier one.
pub(crate) fn repeats(jobs: &[Job]) -> Result<Vec<bool>, Misfit> {
    let mut repeats = repeated(jobs.len(), |index| jobs[index].views()).map_err(misfit)?;
    if is_planted("core_source_copied_once") {
        let source = |index: usize| (jobs[index].source.data(), jobs[index].source.layout());
        (1..jobs.len()).for_each(|index| repeats[index] |= (0..index).any(|other| source(other) == source(index)));
    }
    Ok(repeats)
}

/// Copies within one memory and in one stream, by the index of their jobs.
type Place = (Device, Option<Stream>, Vec<usize>);

/// Moves from one memory to another and between the same streams, by the index of their jobs.
type Moves = (Route, Vec<usize>);

/// Divides copies that are made within one memory by that and by their streams, and moves by their route. Those for
/// which the host waits are last.
pub(crate) fn grouped(jobs: &[Job], repeats: &[bool]) -> (Vec<Place>, Vec<Moves>) {
    let mut groups: Vec<Place> = Vec::new();
    let mut moves: Vec<Moves> = Vec::new();
    for (number, (job, _)) in jobs.iter().zip(repeats).enumerate().filter(|(_, (_, repeats))| !**repeats) {
        let Some(device) = job.device else {
            let route = Route::between(&job.source, &job.target);
            match moves.iter_mut().rfind(|group| group.0 == route) {
                Some(group) => group.1.push(number),
                None => moves.push((route, vec![number])),
            }
            continue;
        };
        let stream = job.target.buffer().stream();
        // Nearly all have one place.
        let group = groups.iter().rposition(|group| (group.0, group.1) == (device, stream)).unwrap_or_else(|| {
            groups.push((device, stream, Vec::new()));
            groups.len() - 1
        });
        groups[group].2.push(number);
    }
    moves.sort_by_key(|(route, _)| route.ends_on_host());
    (groups, moves)
}

/// Makes copies that are checked. `plans` are those of groups of the same pairs, or none.
pub(crate) fn run<F, T>(
    pairs: &[Pair<'_, F, T>],
    jobs: Vec<Job>,
    repeats: &[bool],
    plans: &[Plan],
    ordering: &Arc<dyn Ordering>,
) -> Result<Vec<Streams>, Misfit> {
    for group in jobs.chunk_by(|job, next| Arc::ptr_eq(&job.consumer, &next.consumer)) {
        let indices: Vec<usize> = group.iter().map(|job| job.index).collect();
        let targets: Vec<&T> = indices.iter().map(|index| pairs[*index].out).collect();
        pairs[indices[0]].to.overwritten_all(&targets).map_err(|failed| failed.among(&indices))?;
    }
    for (job, pair) in jobs.iter().zip(pairs) {
        used(&job.source, || pair.from.consumer());
        used(&job.target, || pair.to.consumer());
    }
    let (groups, moves) = grouped(&jobs, repeats);
    let mut jobs: Vec<Option<Job>> = jobs.into_iter().map(Some).collect();
    let mut ordered = vec![None; pairs.len()];
    let batch = Batch::of(pairs.len());
    for (device, stream, copies) in groups {
        let plan = plans.iter().find(|plan| plan.pieces == copies);
        let launch = Launch { device, stream, plan: plan.map(|plan| &*plan.copies) };
        copy_together(&mut jobs, &copies, launch, &mut ordered, &batch, ordering)?;
    }
    for (route, moves) in moves {
        let (mut together, mut consumers) = (Vec::with_capacity(moves.len()), Vec::with_capacity(moves.len()));
        for Job { index, source, target, change, consumer, .. } in moves.iter().filter_map(|copy| jobs[*copy].take()) {
            together.push(Moving { source, target, change, consumer: pairs[index].from.consumer() });
            consumers.push(consumer);
        }
        let moved = route.move_all(together, Some(&batch), ordering);
        let (streams, targets) = moved.map_err(|failed| failed.among(&moves))?;
        moves.iter().for_each(|index| ordered[*index] = streams);
        targets.into_iter().zip(consumers).for_each(|(target, consumer)| release(target, consumer, ordering));
    }
    Ok(ordered)
}

fn misfit(Clash { piece, other, targets }: Clash) -> Misfit {
    let text = match (targets, piece == other) {
        (true, _) => "the two targets share memory: pass targets that do not overlap",
        (false, true) => "the tensor and the target share memory: copy the tensor elsewhere first",
        (false, false) => "the target of one shares memory with the source of the other: copy that elsewhere first",
    };
    Misfit { index: piece, beside: (piece != other).then_some(other), error: Error::new(ErrorKind::Layout, text) }
}

/// A copy that is checked.
pub(crate) struct Job {
    pub(crate) index: usize,
    pub(crate) source: Export,
    pub(crate) target: Export,
    /// The device on which both are seen; `None` where the elements are moved.
    pub(crate) device: Option<Device>,
    /// Whether the source is a compact copy of the tensor, which was made for this.
    pub(crate) is_packed: bool,
    change: Change,
    /// That of the target.
    pub(crate) consumer: Arc<dyn Consumer>,
}

impl Job {
    pub(crate) fn new<F, T>(index: usize, pair: &Pair<'_, F, T>, ordering: &Arc<dyn Ordering>) -> Result<Self> {
        let Sides { source, target, device, is_packed, cast } = Sides::export(pair, ordering)?;
        // Before anything is launched: a panic would return the memory under the copy.
        let consumer = pair.to.consumer();
        let (itemsize, stream) = (source.layout().itemsize(), target.buffer().stream());
        let flips = match (device, flips(&source, &target)) {
            (Some(device), None) => return Err(uncopied(itemsize, device, ordering)),
            (Some(device), _)
                if device.kind != DeviceKind::CPU && (stream.is_none() || ordering.copies().is_none()) =>
            {
                return Err(uncopied(itemsize, device, ordering));
            }
            (None, None) => return Err(unmovable()),
            (_, Some(flips)) => flips,
        };
        Ok(Self { index, source, target, device, is_packed, change: (flips, cast), consumer })
    }

    /// Returns both views, and what happens to each element.
    pub(crate) fn views(&self) -> ((usize, &Layout), (usize, &Layout), Change) {
        ((self.source.data(), self.source.layout()), (self.target.data(), self.target.layout()), self.change)
    }

    pub(crate) fn piece(&self) -> Piece<'_> {
        let side = |exported: &'_ Export| (exported.device(), exported.data());
        let ((from, source), (to, target)) = (side(&self.source), side(&self.target));
        Piece {
            from: Strided { device: from, data: source, layout: self.source.layout() },
            to: Strided { device: to, data: target, layout: self.target.layout() },
            flips: self.change.0,
            cast: self.change.1,
        }
    }
}

/// Makes the copies of a group, by the index of their jobs. The batch returns both sides of each after them.
fn copy_together(
    jobs: &mut [Option<Job>],
    copies: &[usize],
    launch: Launch<'_>,
    ordered: &mut [Streams],
    batch: &Batch,
    ordering: &Arc<dyn Ordering>,
) -> Result<(), Misfit> {
    let stream = launch.stream;
    let group = || copies.iter().filter_map(|copy| jobs[*copy].as_ref());
    // The host waits once for each stream.
    let mut waited = None;
    for Job { index, source, .. } in group() {
        let owner = (source.buffer().device(), source.buffer().stream());
        if stream.is_none() && waited.replace(owner) == Some(owner) {
            continue;
        }
        ordered[*index] =
            order_after(ordering, source, stream, Some(batch)).map_err(|error| Failed { index: *index, error })?;
    }
    // SAFETY: the buffers are alive, and by the contract of `DeviceBuffer` so are their bytes and streams;
    // `Export::new` has checked that the views stay inside, and `repeated` that no target shares bytes with another
    // side.
    // `order_after` has ordered the stream after the owners of the sources; the leases below make them wait for it.
    let copied = unsafe { launch.of(group, ordering) };
    // A lease orders the return of what it held. It is made also where a copy has failed: others may be launched.
    for Job { source, target, consumer, .. } in copies.iter().filter_map(|copy| jobs[*copy].take()) {
        let elsewhere = consumer.uses_other_streams();
        for exported in [source, target] {
            // The owner reuses the memory in the stream of the copy, which orders that by itself.
            let buffer = exported.buffer();
            if !elsewhere && buffer.stream() == stream && buffer.reuse() == Reuse::InStreamOrder {
                continue;
            }
            batch.hold(Lease::new(exported, stream, false, Arc::clone(&consumer), Arc::clone(ordering)));
        }
    }
    copied.map_err(|failed| failed.among(copies).into())
}

/// Where copies within one memory run, and their plan, if there is one.
pub(crate) struct Launch<'a> {
    pub(crate) device: Device,
    pub(crate) stream: Option<Stream>,
    pub(crate) plan: Option<&'a dyn Planned>,
}

impl Launch<'_> {
    /// Launches the copies of jobs. An error has the number of the job.
    ///
    /// # Safety
    ///
    /// That of [`Copies::copy_all`](crate::Copies::copy_all). The plan is that of these jobs.
    pub(crate) unsafe fn of<'a, J: Iterator<Item = &'a Job>>(
        self,
        jobs: impl Fn() -> J,
        ordering: &Arc<dyn Ordering>,
    ) -> Result<(), Failed> {
        let Self { device, stream, plan } = self;
        let copied = match (plan, ordering.copies()) {
            // SAFETY: the caller's promises.
            (Some(plan), _) => unsafe { plan.copy(stream) },
            (None, Some(copies)) => {
                let mut pieces: Vec<Piece<'_>> = jobs().map(Job::piece).collect();
                if is_planted("core_flips_of_first") {
                    let flips = pieces.first().map_or(0, |piece| piece.flips);
                    pieces.iter_mut().for_each(|piece| piece.flips = flips);
                }
                // SAFETY: as above.
                unsafe { copies.copy_all(&pieces, stream) }
            }
            (None, None) => Err(Failed { index: 0, error: uncopied(1, device, ordering) }),
        };
        let on_host = device.kind == DeviceKind::CPU && stream.is_none();
        // The loop copies bytes.
        let casts = || jobs().any(|job| job.change.1.is_some());
        match copied {
            Err(Failed { error, .. }) if error.kind() == ErrorKind::CopyNeeded && on_host && !casts() => {
                jobs().for_each(|job| copy_by_loop(&job.source, &job.target, job.change.0));
                Ok(())
            }
            copied => copied,
        }
    }
}

/// The plan of a group.
pub(crate) struct Plan {
    /// The pairs, by their index.
    pub(crate) pieces: Vec<usize>,
    pub(crate) copies: Box<dyn Planned>,
}
