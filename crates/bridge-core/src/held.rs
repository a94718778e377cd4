//! Copies that are planned, together with the memory of both sides.

use crate::batch::Batch;
use crate::copy_all::{Job, Launch, grouped};
use crate::moved::Route;
use crate::ordering::{self, Alive, alive, leak};
use crate::planted::is_planted;
use crate::{
    Access, Consumer, Device, ErrorKind, Export, Failed, Lease, Misfit, Ordering, Pair, Planned, Result, Stream,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// The exports of pairs, and their copies. Each call asks for the streams that are current then, and makes the owners wait
/// for the copies, so the memory can be returned at the drop.
pub(crate) struct Held {
    jobs: Vec<Job>,
    groups: Vec<Together>,
    moves: Vec<Moved>,
    viewed: Vec<Viewed>,
    /// Whether copies may run that an owner does not wait for.
    is_lost: AtomicBool,
    ordering: Arc<dyn Ordering>,
}

/// Copies in one stream.
struct Together {
    device: Device,
    /// The copies, by their job.
    copies: Vec<usize>,
    plan: Option<Box<dyn Planned>>,
    target: Owner,
    sources: Vec<Owner>,
}

/// Moves from one memory to another, and between the same streams.
struct Moved {
    /// The moves, by their job.
    moves: Vec<usize>,
    source: Owner,
    target: Owner,
}

/// What has exported tensors, and where.
#[derive(Clone)]
struct Owner {
    consumer: Arc<dyn Consumer>,
    device: Device,
    /// The stream at the export; `None` for memory that is ready at any time.
    exported: Option<Stream>,
    never_changes: bool,
}

impl Owner {
    fn of(exported: &Export, consumer: &Arc<dyn Consumer>) -> Self {
        let buffer = exported.buffer();
        Self {
            consumer: Arc::clone(consumer),
            device: buffer.device(),
            exported: buffer.stream().map(Stream::on_any_thread),
            never_changes: buffer.access() == Access::Immutable,
        }
    }

    fn is(&self, other: &Self) -> bool {
        let place = |owner: &Self| (owner.device, owner.exported, owner.never_changes);
        Arc::ptr_eq(&self.consumer, &other.consumer) && place(self) == place(other)
    }

    /// Returns whether a later export would be in the stream that [`now`](Self::now) returns then.
    fn is_steady(&self) -> bool {
        self.exported.is_none() || self.never_changes || self.consumer.exports_in_current_stream()
    }

    /// Returns the stream that an export would be in now.
    fn now(&self) -> Result<Option<Stream>> {
        let Some(exported) = self.exported else { return Ok(None) };
        match self.never_changes || is_planted("core_copier_ordered_as_made") {
            true => Ok(Some(exported)),
            false => Ok(Some(self.consumer.current_stream(self.device)?.map_or(exported, Stream::on_any_thread))),
        }
    }
}

/// Memory of an owner that is itself a view of another framework's.
struct Viewed {
    owner: Owner,
    device: Device,
    address: usize,
}

impl Viewed {
    /// Notes a use now, for which the memory's owner waits. Returns whether there is such a view.
    fn used(&self) -> bool {
        let Self { owner, device, address } = self;
        let Ok(Some(now)) = owner.now() else { return false };
        ordering::used(owner.consumer.views(), *device, *address, now, || owner.consumer.keep(*device, now)) > 0
    }
}

/// Returns whether the streams of later exports are known without them.
pub(crate) fn are_steady<F, T>(jobs: &[Job], pairs: &[Pair<'_, F, T>]) -> bool {
    jobs.iter().zip(pairs).all(|(job, pair)| {
        Owner::of(&job.source, &pair.from.consumer()).is_steady() && Owner::of(&job.target, &job.consumer).is_steady()
    })
}

impl Held {
    /// Plans copies that are checked.
    ///
    /// # Errors
    ///
    /// Those of [`Copies::plan`](crate::Copies::plan).
    pub(crate) fn new<F, T>(
        jobs: Vec<Job>,
        pairs: &[Pair<'_, F, T>],
        repeats: &[bool],
        ordering: &Arc<dyn Ordering>,
    ) -> Result<Self, Misfit> {
        let sides = jobs.iter().zip(pairs).flat_map(|(job, pair)| {
            [Owner::of(&job.source, &pair.from.consumer()), Owner::of(&job.target, &job.consumer)]
                .into_iter()
                .zip([&job.source, &job.target])
        });
        let viewed = sides.map(|(owner, exported)| Viewed {
            owner,
            device: exported.device(),
            address: exported.buffer().address(),
        });
        // One use is noted for all pieces of the same views. The copies keep those views, whose owners wait: a view of the
        // same memory that begins later need not be told.
        let mut known: HashMap<_, Vec<Owner>> = HashMap::new();
        let mut is_new = |Viewed { owner, device, address }: &Viewed| {
            let owners = known.entry((*device, owner.consumer.views().around(*device, *address))).or_default();
            let is_new = !owners.iter().any(|known| known.is(owner));
            owners.extend(is_new.then(|| owner.clone()));
            is_new
        };
        let viewed = viewed.filter(|viewed| viewed.used() && is_new(viewed)).collect();
        let mut groups = Vec::new();
        let (places, routes) = grouped(&jobs, repeats);
        for (device, stream, copies) in places {
            let pieces: Vec<_> = copies.iter().map(|copy| jobs[*copy].piece()).collect();
            let plan =
                ordering.copies().map_or(Ok(None), |known| ordering::plan_copies(known, device, &pieces, stream));
            let plan = plan.map_err(|failed| failed.among(&copies))?;
            let target = &jobs[copies[0]];
            let target = Owner::of(&target.target, &target.consumer);
            let mut sources: Vec<Owner> = Vec::new();
            for copy in &copies {
                let owner = Owner::of(&jobs[*copy].source, &pairs[*copy].from.consumer());
                if !sources.iter().any(|known| known.is(&owner)) {
                    sources.push(owner);
                }
            }
            groups.push(Together { device, copies, plan, target, sources });
        }
        let mut moves: Vec<Moved> = Vec::new();
        for (_, copies) in routes {
            let begun = moves.len();
            for copy in copies {
                let (job, pair) = (&jobs[copy], &pairs[copy]);
                let (source, target) =
                    (Owner::of(&job.source, &pair.from.consumer()), Owner::of(&job.target, &job.consumer));
                let same = |moved: &&mut Moved| moved.source.is(&source) && moved.target.is(&target);
                match moves[begun..].iter_mut().find(same) {
                    Some(moved) => moved.moves.push(copy),
                    None => moves.push(Moved { moves: vec![copy], source, target }),
                }
            }
        }
        Ok(Self { jobs, groups, moves, viewed, is_lost: AtomicBool::new(false), ordering: Arc::clone(ordering) })
    }

    pub(crate) fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    fn alive(&self) -> Alive<'_> {
        alive(&*self.ordering)
    }

    /// Makes the copies.
    ///
    /// # Errors
    ///
    /// Those of [`copy_all`](crate::copy_all) after the checks.
    pub(crate) fn copy(&self) -> Result<(), Misfit> {
        for viewed in &self.viewed {
            viewed.used();
        }
        self.groups.iter().try_for_each(|group| self.copy_together(group))?;
        self.moves.iter().try_for_each(|moved| self.move_together(moved))
    }

    fn move_together(&self, Moved { moves, source, target }: &Moved) -> Result<(), Misfit> {
        let first = |error| Failed { index: moves[0], error };
        let (owner, reader) = (source.now().map_err(first)?, target.now().map_err(first)?);
        let Job { source: from, target: to, .. } = &self.jobs[moves[0]];
        let route = Route::within((from, owner), (to, reader));
        route.begin(&*self.ordering).map_err(first)?;
        let pieces: Vec<_> = moves.iter().map(|index| self.jobs[*index].piece()).collect();
        // SAFETY: as in `copy_together`; `begin` has ordered the streams.
        let moved = unsafe { route.copy(&pieces, &*self.ordering) };
        // Also where a move has failed: others may be launched.
        let arrived = route.end(&*self.ordering);
        if (arrived.is_err() || route.is_unordered(from)) && !route.synchronize(&*self.ordering) {
            self.is_lost.store(true, Relaxed);
        }
        self.wait(source, None, owner);
        self.wait(target, None, reader);
        moved.map_err(|failed| failed.among(moves))?;
        Ok(arrived.map(drop).map_err(first)?)
    }

    fn copy_together(&self, group: &Together) -> Result<(), Misfit> {
        let Together { device, copies, plan, target, sources } = group;
        let first = |error| Failed { index: copies[0], error };
        let stream = target.now().map_err(first)?;
        let mut owners = Vec::with_capacity(sources.len());
        for source in sources {
            let now = source.now().map_err(first)?;
            match (now, stream) {
                (Some(now), Some(stream)) if now != stream => self.alive().order(source.device, now, stream),
                (Some(now), None) => self.alive().synchronize(source.device, now),
                _ => Ok(()),
            }
            .map_err(first)?;
            owners.push((source, now));
        }
        let jobs = || copies.iter().map(|copy| &self.jobs[*copy]);
        // SAFETY: the exports are alive, and by the contract of `DeviceBuffer` so are their bytes; the current streams are
        // those of their frameworks, which keep them during the call. `Export::new` has checked that the views stay
        // inside, and `repeated` that no target shares bytes with another side. The stream waits for the owners of the
        // sources, and below they wait for it.
        let launched = unsafe { Launch { device: *device, stream, plan: plan.as_deref() }.of(jobs, &self.ordering) };
        // Also where a copy has failed: others may be launched.
        owners.push((target, stream));
        for (owner, now) in owners {
            self.wait(owner, now, stream);
        }
        launched.map_err(|failed| failed.among(copies).into())
    }

    /// Makes an owner wait for the copies in `stream`, in the stream that it has now and in the one of its export.
    fn wait(&self, owner: &Owner, now: Option<Stream>, stream: Option<Stream>) {
        let Some(stream) = stream else { return };
        let is_captured = || self.alive().is_captured(owner.device, stream) == Some(true);
        let now = now.filter(|_| !is_planted("core_copier_awaited_as_made"));
        for waiting in [now, owner.exported].into_iter().flatten() {
            let waits = match waiting == stream {
                true => Ok(()),
                false => self.alive().order(owner.device, stream, waiting),
            };
            // A graph may be launched at any time: the program that captures it keeps the tensors, and orders its launches.
            if waits.is_err_and(|error| error.kind() != ErrorKind::Captured || !is_captured()) {
                self.is_lost.store(true, Relaxed);
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let jobs = std::mem::take(&mut self.jobs);
        if *self.is_lost.get_mut() {
            return jobs.into_iter().for_each(|job| [job.source, job.target].into_iter().for_each(leak));
        }
        let batch = Batch::of(jobs.len());
        for Job { source, target, consumer, .. } in jobs {
            for exported in [source, target] {
                let owner = exported.buffer().stream();
                batch.hold(Lease::new(exported, owner, false, Arc::clone(&consumer), Arc::clone(&self.ordering)));
            }
        }
    }
}
