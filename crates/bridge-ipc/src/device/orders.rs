//! The order of the work at the two ends of a connection: the streams of this process, and the points in them.

use super::device_of;
use super::fence::{At, Fences, Tools};
use super::page::Role;
use crate::channel::broken;
use crate::own::Own;
use crate::wire::{Hex, Point};
use bridge_core::{Device, Result, Stream};
use bridge_cuda::{Signal, link, ordering, sharing, words};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Returns the stream of a device for a role. It lives as long as the process.
pub(super) fn lane(device: Device, role: Role) -> Result<At> {
    static LANES: Own<BTreeMap<(i32, Role), At>> = Own::new();
    let mut lanes = LANES.lock();
    if let Some(lane) = lanes.get(&(device.index, role)) {
        return Ok(*lane);
    }
    let lane = At { uuid: Hex(sharing()?.uuid(device)?), device, stream: link()?.new_stream(device)? };
    lanes.insert((device.index, role), lane);
    Ok(lane)
}

/// Returns the stream of a device for a role.
pub(crate) fn stream(device: Device, role: Role) -> Result<Stream> {
    Ok(lane(device, role)?.stream)
}

/// Makes the stream for what is shared wait for the work that is now in another one.
pub(crate) fn export_after(device: Device, stream: Stream) -> Result<()> {
    let lane = lane(device, Role::Exporter)?;
    // SAFETY: the streams of this crate are alive, as the module `device` says.
    unsafe { ordering().order(device, stream, lane.stream) }
}

/// How the two ends of a connection order their work. The exporter chooses it at the first ticket that it opens for
/// memory of a device.
#[derive(Default)]
enum Means {
    #[default]
    Unknown,
    Words(Fences),
    /// The driver of the exporter cannot use words in streams. An event of a process that is killed with pending work
    /// never fires.
    Events,
}

/// The order of the work at the two ends of a connection: the points of one end, and the waits for those of the other.
pub(crate) struct Orders {
    role: Role,
    /// The process at the other end, if this one can see it.
    process: Option<Arc<OwnedFd>>,
    means: Means,
    /// The page that goes with the points.
    page: Option<Arc<OwnedFd>>,
}

impl Orders {
    pub(crate) fn new(role: Role, process: Option<Arc<OwnedFd>>) -> Self {
        Self { role, process, means: Means::Unknown, page: None }
    }

    /// Returns the descriptor that goes with the exporter's points, after those of the segments.
    pub(crate) fn page(&self) -> Option<&Arc<OwnedFd>> {
        self.page.as_ref()
    }

    /// Returns whether the two ends use words of a page.
    pub(crate) fn has_page(&self) -> bool {
        matches!(self.means, Means::Words(_))
    }

    /// Returns points after all work that is now in these streams, one for each device.
    pub(crate) fn points_after(&mut self, streams: &[(Device, Stream)]) -> Result<Vec<Point>> {
        let mut devices: Vec<Device> = streams.iter().map(|(device, _)| *device).collect();
        devices.sort_unstable_by_key(|device| device.index);
        devices.dedup();
        for (device, stream) in streams {
            let lane = lane(*device, self.role)?;
            // SAFETY: the exporter holds the tensors whose streams these are; the lane lives as long as the process.
            unsafe { ordering().order(*device, *stream, lane.stream) }?;
        }
        devices.into_iter().map(|device| self.point(device)).collect()
    }

    /// Returns points for which nothing has to wait, one for each device. They tell an importer its own words. Where
    /// words are not used, they are as those after all work.
    pub(crate) fn points_that_are_reached(&mut self, streams: &[(Device, Stream)]) -> Result<Vec<Point>> {
        let reached = |(device, _): &(Device, Stream)| {
            let lane = lane(*device, self.role)?;
            match self.means(&lane)? {
                Means::Words(fences) => fences.reached(&lane),
                _ => self.point(*device),
            }
        };
        streams.iter().map(reached).collect()
    }

    /// Returns a point after all work that is now in the stream of this end.
    pub(crate) fn point(&mut self, device: Device) -> Result<Point> {
        let lane = lane(device, self.role)?;
        match self.means(&lane)? {
            Means::Words(fences) => fences.point(&lane),
            Means::Events => Ok(Point::Event { device: lane.uuid, event: record(&lane, self.role)? }),
            Means::Unknown => Err(broken("it has shared memory of a device without a point")),
        }
    }

    /// Returns how the two ends order their work, which the exporter chooses now if it was not.
    fn means(&mut self, at: &At) -> Result<&mut Means> {
        if let (Means::Unknown, Role::Exporter) = (&self.means, self.role) {
            self.means = match Fences::make(tools()?, at, self.process.as_ref()) {
                Ok((fences, page)) => {
                    self.page = Some(Arc::new(page));
                    Means::Words(fences)
                }
                Err(_) => Means::Events,
            };
        }
        Ok(&mut self.means)
    }

    /// Makes the stream of this end wait for points of the other one, with the page that came with them.
    pub(crate) fn wait_for(&mut self, points: &[Point], page: Option<&OwnedFd>) -> Result<()> {
        for point in points {
            let (Point::Word { device, .. } | Point::Event { device, .. }) = point;
            let lane = lane(device_of(device)?, self.role)?;
            if let (Means::Unknown, Role::Importer) = (&self.means, self.role) {
                self.means = match page {
                    Some(page) => Means::Words(Fences::open(tools()?, page, &lane, self.process.as_ref())?),
                    None => Means::Events,
                };
            }
            match (&mut self.means, point) {
                (Means::Words(fences), Point::Word { word, value, .. }) => fences.wait(&lane, *word, *value)?,
                (Means::Events, Point::Event { event, .. }) => wait_for_event(event, &lane)?,
                _ => return Err(broken("a point is of another kind than those before it")),
            }
        }
        Ok(())
    }
}

fn tools() -> Result<Tools> {
    Ok(Tools { words: words()?, ordering: Arc::clone(ordering()) })
}

/// The interprocess events of this process, with their handles: one for each of its streams that uses events.
static OWN: Own<BTreeMap<(i32, Role), Event>> = Own::new();

/// An event, and its handle.
type Event = (Arc<Signal>, Hex<64>);

/// Returns the event of a stream, and its handle.
fn event(at: &At, role: Role) -> Result<Event> {
    let mut own = OWN.lock();
    if let Some(known) = own.get(&(at.device.index, role)) {
        return Ok(known.clone());
    }
    let (signal, handle) = sharing()?.event(at.device)?;
    Ok(own.entry((at.device.index, role)).or_insert((Arc::new(signal), Hex(handle))).clone())
}

/// Records the event of a stream after all work now in it. Returns its handle.
fn record(at: &At, role: Role) -> Result<Hex<64>> {
    let (event, handle) = event(at, role)?;
    // SAFETY: the stream of this end lives as long as the process.
    unsafe { sharing()?.record(at.device, &event, at.stream) }?;
    Ok(handle)
}

/// Makes a stream wait for an event of another process, or of this one.
fn wait_for_event(handle: &Hex<64>, at: &At) -> Result<()> {
    /// The events of other processes, by their handles. They are few: two for each process and device.
    static EVENTS: Own<BTreeMap<Hex<64>, Arc<Signal>>> = Own::new();
    let driver = sharing()?;
    // The events of this process need not be opened, and cannot be.
    let own = OWN.lock().values().find(|(_, known)| known == handle).map(|(event, _)| Arc::clone(event));
    let event = match own {
        Some(event) => event,
        None => {
            let mut events = EVENTS.lock();
            match events.get(handle) {
                Some(event) => Arc::clone(event),
                None => {
                    let event = Arc::new(driver.open_event(at.device, &handle.0)?);
                    events.insert(*handle, Arc::clone(&event));
                    event
                }
            }
        }
    };
    // SAFETY: as in `record`.
    unsafe { driver.wait(at.device, at.stream, &event) }
}
