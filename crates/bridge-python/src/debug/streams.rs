//! The streams that were seen, so that the driver can be asked what they do.

use bridge_core::{Consumer, Device, DeviceKind, Keep, Stream};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most streams that are remembered. Each is kept alive as long.
const MOST: usize = 256;

/// A stream of a framework, which is alive as long as this.
struct Seen {
    framework: String,
    device: i32,
    stream: Stream,
    _keep: Option<Keep>,
}

static SEEN: Mutex<VecDeque<Seen>> = Mutex::new(VecDeque::new());

fn lock() -> MutexGuard<'static, VecDeque<Seen>> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remembers a stream of a framework, unless it could be destroyed meanwhile: a query of a destroyed stream crashes the
/// driver.
pub(super) fn saw(framework: &str, consumer: &dyn Consumer, device: Device, stream: Stream) {
    if device.kind != DeviceKind::CUDA || stream == Stream::PER_THREAD {
        return;
    }
    let is_known = |seen: &Seen| (&*seen.framework, seen.device, seen.stream) == (framework, device.index, stream);
    if lock().iter().any(is_known) {
        return;
    }
    let keep = consumer.keep(device, stream);
    if keep.is_none() && !lives_for_ever(framework, device, stream) {
        return;
    }
    remember(framework, device, stream, keep);
}

/// Remembers a stream that `keep` keeps alive.
pub(super) fn remember(framework: &str, device: Device, stream: Stream, keep: Option<Keep>) {
    let seen = Seen { framework: framework.into(), device: device.index, stream, _keep: keep };
    let pushed_out = {
        let mut all = lock();
        all.push_back(seen);
        if all.len() > MOST { all.pop_front() } else { None }
    };
    // Not under the lock: it may run code of Python.
    drop(pushed_out);
}

/// Returns the streams of a device that were seen, and its legacy default stream: of one framework, or of all.
pub(super) fn on(device: Device, framework: Option<&str>) -> Vec<Stream> {
    let all = lock();
    let here = all.iter().filter(|seen| seen.device == device.index);
    let own = here.filter(|seen| framework.is_none_or(|framework| seen.framework == framework));
    let mut streams: Vec<Stream> = own.map(|seen| seen.stream).collect();
    if framework.is_none() {
        streams.push(Stream::LEGACY);
    }
    streams.sort_unstable();
    streams.dedup();
    streams
}

/// Forgets all streams.
pub(super) fn forget() {
    let all = std::mem::take(&mut *lock());
    drop(all);
}

/// Returns whether a stream that its framework does not keep lives as long as the process. PyTorch and TensorFlow never
/// destroy their own; PyTorch's may also be one that another library has made.
fn lives_for_ever(framework: &str, device: Device, stream: Stream) -> bool {
    match (framework, stream) {
        (_, Stream::LEGACY) | ("tensorflow", _) => true,
        ("torch", stream) => Python::attach(|py| is_own_of_torch(py, device, stream)).unwrap_or(false),
        _ => false,
    }
}

/// Returns whether PyTorch's current stream is this one, and is one of its pool. The lowest bit of its number says that
/// (c10/cuda/CUDAStream.cpp).
fn is_own_of_torch(py: Python<'_>, device: Device, stream: Stream) -> PyResult<bool> {
    let current = py.import("torch")?.getattr("cuda")?.call_method1("current_stream", (device.index,))?;
    let (handle, number): (u64, i64) =
        (current.getattr("cuda_stream")?.extract()?, current.getattr("stream_id")?.extract()?);
    // SAFETY: the driver has just named it, and it is only compared.
    Ok(unsafe { Stream::from_handle(handle) } == stream && number & 1 == 1)
}
