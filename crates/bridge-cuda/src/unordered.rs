//! Streams that work is not ordered after, as far as the driver can tell.

use crate::context::{Devices, Entered};
use crate::driver::Driver;
use bridge_core::{Device, Result, Stream};
use std::thread;
use std::time::{Duration, Instant};

/// How long the work of a stream may take to run out, before it counts as busy: short kernels and the wait for an event
/// that has fired.
const PATIENCE: Duration = Duration::from_millis(2);

/// How long a stream has to stay busy: the driver may learn of the end of its last work later than of what waited for
/// it.
const SETTLED: Duration = Duration::from_micros(50);

impl<D: Driver> Devices<D> {
    /// Returns those of `others` that have work pending which new work in `stream` does not wait for.
    ///
    /// A stream whose work has all run waits for nothing. Of one that is still busy the driver does not say what it
    /// waits for: then nothing is returned. The host waits for at most [`PATIENCE`], and only if one of the others is
    /// busy. Streams that are being captured are left out.
    pub fn unordered(&self, device: Device, stream: Stream, others: &[Stream]) -> Result<Vec<Stream>> {
        let entered = self.enter(device)?;
        let Some(blocking) = entered.waits_for_legacy(stream) else { return Ok(Vec::new()) };
        // The legacy default stream and blocking streams wait for each other.
        let is_after = |other: Stream| match (stream, other) {
            (Stream::LEGACY, other) => entered.waits_for_legacy(other).unwrap_or(true),
            (_, Stream::LEGACY) => blocking,
            _ => false,
        };
        let mut busy: Vec<Stream> = others.iter().copied().filter(|other| *other != stream).collect();
        busy.retain(|other| !is_after(*other));
        let deadline = Instant::now() + PATIENCE;
        loop {
            // In this order: the stream did not wait for what is still busy after it was done.
            let done = entered.is_done(stream) && (!blocking || entered.is_done(Stream::LEGACY));
            busy.retain(|other| entered.is_busy(*other));
            if done && !busy.is_empty() {
                thread::sleep(SETTLED);
                busy.retain(|other| entered.is_busy(*other));
            }
            if done || busy.is_empty() {
                return Ok(busy);
            }
            if Instant::now() > deadline {
                return Ok(Vec::new());
            }
            thread::yield_now();
        }
    }
}

impl<D: Driver> Entered<'_, D> {
    /// Returns whether the stream waits for work of the legacy default stream; `None` for one that is being captured.
    fn waits_for_legacy(&self, stream: Stream) -> Option<bool> {
        let driver = self.driver();
        match driver.is_capturing(stream) {
            Ok(false) => Some(stream != Stream::LEGACY && driver.is_blocking(stream).unwrap_or(true)),
            _ => None,
        }
    }

    fn is_done(&self, stream: Stream) -> bool {
        self.driver().is_capturing(stream) == Ok(false) && self.driver().is_done(stream) == Ok(true)
    }

    fn is_busy(&self, stream: Stream) -> bool {
        self.driver().is_capturing(stream) == Ok(false) && self.driver().is_done(stream) == Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;

    const GPU: Device = Device::cuda(0);
    // SAFETY: no driver sees this stream.
    const A: Stream = unsafe { Stream::from_handle(0xa0) };
    // SAFETY: no driver sees this stream.
    const B: Stream = unsafe { Stream::from_handle(0xb0) };
    // SAFETY: no driver sees this stream.
    const C: Stream = unsafe { Stream::from_handle(0xc0) };

    /// Returns what is not ordered before `stream`, where these streams are idle and these are blocking ones.
    fn found(stream: Stream, idle: &[Stream], blocking: &[Stream], others: &[Stream]) -> Vec<Stream> {
        let devices = Devices::new(Fake::default(), 1);
        idle.iter().for_each(|stream| devices.driver().idle(*stream));
        blocking.iter().for_each(|stream| devices.driver().blocking(*stream));
        devices.unordered(GPU, stream, others).unwrap()
    }

    #[test]
    fn a_busy_stream_is_found_where_the_own_is_idle() {
        assert_eq!(found(A, &[A], &[], &[A, B, C]), [B, C]);
        assert_eq!(found(A, &[A, B], &[], &[A, B, C]), [C]);
        assert_eq!(found(A, &[A, B, C], &[], &[A, B, C]), []);
        assert_eq!(found(A, &[A], &[], &[Stream::LEGACY]), [Stream::LEGACY]);
    }

    #[test]
    fn what_a_busy_stream_waits_for_is_unknown() {
        assert_eq!(found(A, &[], &[], &[B]), []);
    }

    #[test]
    fn the_legacy_default_stream_orders_blocking_streams() {
        assert_eq!(found(Stream::LEGACY, &[Stream::LEGACY], &[B], &[B, C]), [C]);
        assert_eq!(found(A, &[A], &[A], &[Stream::LEGACY]), []);
        assert_eq!(found(A, &[A, Stream::LEGACY], &[A, B], &[B]), [B], "two blocking streams run side by side");
        assert_eq!(found(A, &[A], &[A, B], &[B]), [], "it may wait for the legacy stream, and that for the other");
    }

    #[test]
    fn captured_streams_are_never_queried() {
        for captured in [A, B] {
            let devices = Devices::new(Fake::default(), 1);
            devices.driver().idle(A);
            devices.driver().capture(captured);
            let expected: &[Stream] = if captured == A { &[] } else { &[C] };
            assert_eq!(devices.unordered(GPU, A, &[B, C]).unwrap(), expected);
        }
    }

    #[test]
    fn a_driver_that_fails_finds_nothing() {
        for call in ["cuStreamQuery", "cuStreamIsCapturing", "cuStreamGetFlags"] {
            let devices = Devices::new(Fake::default(), 1);
            devices.driver().idle(A);
            devices.driver().fail(call, 719);
            let found = devices.unordered(GPU, A, &[B]).unwrap();
            // Without its flags a stream counts as a blocking one, after the legacy stream, which is busy.
            assert_eq!(found, [], "{call}");
        }
    }
}
