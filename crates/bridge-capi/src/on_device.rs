//! Memory that work in streams touches, and the streams of a device.

use bridge_core::{Device, DeviceKind, Error, ErrorKind, Result, Stream};

/// Kinds of memory that work in streams touches.
const IN_STREAMS: [DeviceKind; 2] = [DeviceKind::CUDA, DeviceKind::CUDA_MANAGED];

/// Returns whether work in streams touches memory of this device, and the host does not read it at any time.
pub(crate) fn in_streams(device: Device) -> bool {
    IN_STREAMS.contains(&device.kind)
}

/// Returns the stream of a handle, for work on `device`.
///
/// # Safety
///
/// On a CUDA device the stream is alive.
pub(crate) unsafe fn stream_on(device: Device, handle: u64) -> Result<Stream> {
    // SAFETY: the caller names a stream that exists (`truebridge.h`).
    let stream = unsafe { Stream::from_handle(handle) };
    let default = [Stream::LEGACY, Stream::PER_THREAD].contains(&stream);
    let gpu = Device { kind: DeviceKind::CUDA, ..device };
    // SAFETY: the caller's obligation.
    if default || !in_streams(device) || unsafe { bridge_cuda::has_stream(gpu, stream) }? {
        return Ok(stream);
    }
    let text = format!("{stream} belongs to another device than the tensor: pass a stream of {gpu}");
    Err(Error::new(ErrorKind::Device, text))
}
