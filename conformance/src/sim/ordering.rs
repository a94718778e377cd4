//! The order among streams of the simulated device, and the faults that it can have.

use super::copies::SimCopies;
use super::device::{LEGACY, SimDevice};
use crate::fault::Fault;
use bridge_core::{Copies, Deferred, Device, DeviceBuffer, Error, ErrorKind, Flush, Ordering, Result, Stream};
use std::sync::Arc;

/// Orders streams of a simulated device, and copies on it.
pub struct SimOrdering {
    device: SimDevice,
    copies: SimCopies,
    fault: Option<Fault>,
}

bridge_core::debug_fields!(impl[] SimOrdering: fault);

impl SimDevice {
    /// Returns what orders streams of this device, with copies.
    pub fn ordering(&self) -> Arc<dyn Ordering> {
        self.ordering_with(None)
    }

    /// As [`ordering`](Self::ordering), with a fault in it or in its copies.
    pub(crate) fn ordering_with(&self, fault: Option<Fault>) -> Arc<dyn Ordering> {
        Arc::new(SimOrdering { device: self.clone(), copies: SimCopies::new(self.clone(), fault), fault })
    }
}

// SAFETY: the simulated device checks each use of its memory itself.
unsafe impl Ordering for SimOrdering {
    unsafe fn order(&self, device: Device, earlier: Stream, later: Stream) -> Result<()> {
        if device != SimDevice::DEVICE {
            return Err(Error::new(ErrorKind::Driver, format!("there is no simulated device {device}")));
        }
        if self.fault == Some(Fault::UpdateNotAwaited) && self.copies.tables.launched_in(earlier) {
            return Ok(());
        }
        let mut state = self.device.lock();
        let (earlier, later) = (state.index(earlier)?, state.index(later)?);
        let forbids = [earlier, later].contains(&LEGACY) && state.is_captured(LEGACY);
        if forbids || state.is_captured(earlier) != state.is_captured(later) {
            let text = "one of the streams is being captured, and the other is not";
            let ignored = self.fault == Some(Fault::CaptureIgnored);
            return if ignored { Ok(()) } else { Err(Error::new(ErrorKind::Captured, text)) };
        }
        if self.fault == Some(Fault::FlushNotOrdered) && state.flushing {
            return Ok(());
        }
        if self.fault == Some(Fault::BlockingNotOrdered) && later != LEGACY && state.queues[later].blocking {
            return Ok(());
        }
        match state.captured(earlier) {
            Some(_) if self.fault == Some(Fault::WaitSkippedInCapture) => (),
            Some((capture, _)) => capture.wait(earlier, later),
            None => state.wait(earlier, later),
        }
        Ok(())
    }

    unsafe fn release_later(&self, _: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
        match self.device.record(stream) {
            Ok(event) => self.device.lock().releases.push((event, buffer)),
            Err(error) if error.kind() == ErrorKind::Captured && stream == Stream::LEGACY => {
                let (device, mut held) = (self.device.clone(), Some(buffer));
                let attempt = move || {
                    let event = device.record(stream);
                    event.is_ok_and(|event| {
                        device.lock().releases.extend(held.take().map(|buffer| (event, buffer)));
                        true
                    })
                };
                self.device.lock().deferred.push(Box::new(attempt));
            }
            // The stream is unknown, or captured: the memory is leaked rather than reused too early.
            Err(_) => std::mem::forget(buffer),
        }
    }

    unsafe fn is_captured(&self, _: Device, stream: Stream) -> Option<bool> {
        let mut state = self.device.lock();
        // A destroyed stream is reported.
        state.index(stream).ok().map(|index| state.is_captured(index))
    }

    unsafe fn defer(&self, _: Device, stream: Stream, mut attempt: Deferred) {
        // SAFETY: the caller's promise.
        if !attempt() && unsafe { self.is_captured(SimDevice::DEVICE, stream) } == Some(true) {
            self.device.lock().deferred.push(attempt);
        }
    }

    fn flush_later(&self, flush: Flush) {
        if self.fault != Some(Fault::FlushForgotten) {
            self.device.lock().flushes.push(flush);
        }
    }

    unsafe fn release_all_later(&self, device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>) {
        if self.fault == Some(Fault::GroupReleasedEarly) {
            return drop(buffers);
        }
        // SAFETY: the caller's promise.
        buffers.into_iter().for_each(|buffer| unsafe { self.release_later(device, stream, buffer) });
    }

    fn copies(&self) -> Option<&dyn Copies> {
        Some(&self.copies)
    }
}
