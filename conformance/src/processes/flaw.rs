//! Faults between two processes, planted into a [`Remote`](super::Remote) that is sound.
//!
//! They break promises about real memory on purpose. A process that has one is there to be judged, and to die of it if
//! need be.

use bridge_core::{Allocation, Consumer, Device, Export, Memory, Result, Stream, Views};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// The direction of tensors where a flaw is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Into the other process.
    There,
    /// Out of it.
    Back,
}

/// A flaw, and the property that must find it.
#[derive(Debug, Clone, Copy)]
pub struct PlantedFlaw {
    /// The flaw.
    pub flaw: Flaw,
    /// Its name in reports.
    pub name: &'static str,
    /// The property that must fail, or in which the process must die.
    pub caught_by: &'static str,
    /// The direction.
    pub direction: Direction,
    /// Whether it needs a device with streams.
    pub streams: bool,
}

macro_rules! flaws {
    ($($(#[$doc:meta])* $flaw:ident = $name:literal, $property:literal, $direction:ident, streams $streams:literal;)*) => {
        /// A mistake that can be made where memory leaves a process or enters it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Flaw {
            $($(#[$doc])* $flaw,)*
        }

        /// Every flaw.
        pub const FLAWS: &[PlantedFlaw] = &[$(PlantedFlaw {
            flaw: Flaw::$flaw,
            name: $name,
            caught_by: $property,
            direction: Direction::$direction,
            streams: $streams,
        },)*];
    };
}

flaws! {
    /// The tensor is opened at the start of its memory.
    OffsetDropped = "offset_dropped_in_ticket", "values", Back, streams false;
    /// A lease is never returned.
    LeaseLost = "lease_lost", "life", Back, streams false;
    /// The owner reuses its memory although it is leased.
    LeaseIgnored = "lease_ignored", "life", Back, streams false;
    /// The memory is unmapped although a view uses it.
    SegmentClosed = "segment_closed", "life", Back, streams false;
    /// The other process does not wait for the work before the share.
    EventSkippedThere = "event_skipped_there", "order", There, streams true;
    /// This process does not wait for the work before the share.
    EventSkippedBack = "event_skipped_back", "order", Back, streams true;
    /// The owner does not wait for the readers of the other process.
    ReturnSkipped = "event_skipped_on_return", "release_order", There, streams true;
}

impl Flaw {
    /// Returns the flaw with this name.
    pub fn named(name: &str) -> Option<Self> {
        FLAWS.iter().find(|planted| planted.name == name).map(|planted| planted.flaw)
    }

    /// Exports the same tensor with the flaw. Its first element lies `offset` bytes after the start of its memory.
    pub(super) fn spoil(self, exported: Export, offset: usize) -> Result<Export> {
        let (dtype, layout, buffer) = (exported.dtype(), exported.layout().clone(), exported.buffer());
        let (mut data, mut stream) = (exported.data(), buffer.stream());
        let (device, access, reuse) = (buffer.device(), buffer.access(), buffer.reuse());
        let mut owner: Box<dyn Any + Send> = Box::new(());
        match self {
            // Views that run backwards from their first element would leave the memory.
            Self::OffsetDropped if layout.byte_extent().0 == 0 => data -= offset,
            Self::EventSkippedBack => stream = None,
            _ => (),
        }
        let bytes = layout.extent_at(data, None)?;
        if self != Self::SegmentClosed {
            owner = Box::new(exported);
        }
        let allocation = Allocation::new(bytes, device, access, stream, reuse);
        // SAFETY: none. Promises are broken on purpose, in a process that is there to be judged.
        let memory = unsafe { Memory::new(allocation, Mutex::new(owner)) };
        Export::at(data, dtype, layout, memory)
    }
}

/// A consumer that works in a stream which waits for nothing.
pub(super) struct Astray {
    sound: Arc<dyn Consumer>,
    /// It knows of no use of what it has taken.
    views: Views,
}

impl Astray {
    pub(super) const STREAM: Stream = Stream::PER_THREAD;

    pub(super) fn new(sound: Arc<dyn Consumer>) -> Self {
        Self { sound, views: Views::default() }
    }
}

// SAFETY: the flaw is what the suite has to find, in memory that it owns.
unsafe impl Consumer for Astray {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        Ok(self.sound.current_stream(device)?.map(|_| Self::STREAM))
    }

    fn views(&self) -> &Views {
        &self.views
    }
}
