//! Stands in for `device` without the feature `cuda`: no memory of a device is shared or opened.

use crate::wire::{Point, Segment};
use bridge_core::{Device, Error, ErrorKind, Result, Stream};
use rustix::fd::OwnedFd;
use std::any::Any;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Exporter,
    Importer,
}

fn missing<T>() -> Result<T> {
    let text = "sharing device memory needs the feature cuda of truebridge-ipc: build with it";
    Err(Error::new(ErrorKind::Missing, text))
}

pub(crate) fn stream(_: Device, _: Role) -> Result<Stream> {
    missing()
}

pub(crate) fn in_streams(_: Device) -> bool {
    false
}

pub(crate) struct Orders;

impl Orders {
    pub(crate) fn new(_: Role, _: Option<Arc<OwnedFd>>) -> Self {
        Self
    }

    pub(crate) fn page(&self) -> Option<&Arc<OwnedFd>> {
        None
    }

    pub(crate) fn points_after(&mut self, streams: &[(Device, Stream)]) -> Result<Vec<Point>> {
        if streams.is_empty() { Ok(Vec::new()) } else { missing() }
    }

    pub(crate) fn has_page(&self) -> bool {
        false
    }

    pub(crate) fn points_that_are_reached(&mut self, streams: &[(Device, Stream)]) -> Result<Vec<Point>> {
        self.points_after(streams)
    }

    pub(crate) fn point(&mut self, _: Device) -> Result<Point> {
        missing()
    }

    pub(crate) fn wait_for(&mut self, points: &[Point], _: Option<&OwnedFd>) -> Result<()> {
        if points.is_empty() { Ok(()) } else { missing() }
    }
}

pub(crate) fn export_after(_: Device, _: Stream) -> Result<()> {
    missing()
}

pub(crate) fn defer(what: impl FnOnce() + Send + 'static) {
    what();
}

pub(crate) fn drop_after(_: &[(Device, Stream)], what: Arc<dyn Any + Send + Sync>) {
    drop(what);
}

pub(crate) struct Shared {
    pub(crate) segment: Segment,
    pub(crate) files: Vec<Arc<OwnedFd>>,
    pub(crate) range: Range<usize>,
    pub(crate) named: Arc<()>,
}

pub(crate) fn shared(_: Device, _: &Range<usize>) -> Result<Option<Shared>> {
    Ok(None)
}

#[derive(Debug)]
pub(crate) struct DeviceMapping(Infallible);

impl DeviceMapping {
    pub(crate) fn device(&self) -> Device {
        match self.0 {}
    }

    pub(crate) fn bytes(&self) -> Range<usize> {
        match self.0 {}
    }

    pub(crate) fn is_own(&self) -> bool {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Expected(Infallible);

impl Expected {
    pub(crate) fn new(mapping: &DeviceMapping) -> Option<Self> {
        match mapping.0 {}
    }

    pub(crate) fn is(&self, _: &Self) -> bool {
        match self.0 {}
    }
}

pub(crate) fn open(_: &Segment, _: &[Arc<OwnedFd>], _: bool) -> Result<DeviceMapping> {
    missing()
}

pub(crate) struct DeviceMemory(Infallible);

impl DeviceMemory {
    pub(crate) fn new(_: Device, _: usize, _: bool) -> Result<Self> {
        missing()
    }

    pub(crate) fn address(&self) -> usize {
        match self.0 {}
    }

    pub(crate) fn device(&self) -> Device {
        match self.0 {}
    }
}
