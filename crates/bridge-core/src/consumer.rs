//! The part of a framework that outlives its adapter.

use crate::{Device, Keep, Result, Stream, Views};

/// The part of an importing framework that a lease needs at its end. It outlives every view.
///
/// # Safety
///
/// Core gives the streams that a consumer names to the driver, and the owner of memory gets it back once they have done
/// the work that they hold then. So this is true: the stream that [`current_stream`](Self::current_stream) returns is alive
/// until the operation of core that asked for it has ended; the framework uses views in no other stream than [`current_stream`](Self::current_stream) names and
/// those that are recorded in [`views`](Self::views), or [`uses_other_streams`](Self::uses_other_streams) says so; a
/// stream that [`keep`](Self::keep) has been asked for lives as long as its value, or as the process; and
/// [`exports_in_current_stream`](Self::exports_in_current_stream) is not true of a tensor with its own stream.
pub unsafe trait Consumer: Send + Sync {
    /// Returns the stream into which the framework would put work for `device` now, on this thread. `None` for memory
    /// that the framework reads on the host, and while the interpreter shuts down, when the stream is unknown.
    ///
    /// # Errors
    ///
    /// Errors of the framework.
    fn current_stream(&self, device: Device) -> Result<Option<Stream>>;

    /// Returns a value that keeps `stream` from being destroyed: one that [`current_stream`](Self::current_stream)
    /// returned, or that a tensor of the framework was exported in, which is alive during the call. A view may outlive the
    /// stream it was made under, and waiting for a destroyed stream crashes the driver. `None` for streams that live as
    /// long as the process.
    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        let _ = (device, stream);
        None
    }

    /// Returns whether every tensor of the framework is exported in the stream that is current for its device then. Then
    /// copies that are made again and again ([`Prepared`](crate::Prepared)) ask for that stream instead of an export. The
    /// default is `false`: a tensor may have its own stream.
    fn exports_in_current_stream(&self) -> bool {
        false
    }

    /// Returns whether views may be used in streams that neither [`current_stream`](Self::current_stream) nor a record in
    /// [`views`](Self::views) names, as by a library that is known only by a protocol. The memory of a view then also
    /// waits for all work that the device has when the view is dropped.
    fn uses_other_streams(&self) -> bool {
        false
    }

    /// The framework's live views of imported memory.
    fn views(&self) -> &Views;
}

/// Consumer without streams: for export-only sources, and for frameworks whose tensors are in host memory.
// SAFETY: memory of the host has no streams. An adapter with streams has another consumer.
unsafe impl Consumer for Views {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(None)
    }

    fn views(&self) -> &Views {
        self
    }
}
