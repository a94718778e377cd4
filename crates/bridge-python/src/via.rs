//! `via="host"`: through memory of the host, by name.

use crate::frameworks::{AnyAdapter, Framework};
use crate::{not_a_capsule, trace};
use bridge_core::{Device, DeviceKind, Options, Result};
use bridge_pyo3::PyTensor;

/// Returns where the elements go again from the host; `None` where they are there already, or are to stay there.
pub(crate) fn back(from: Device, options: &Options) -> Option<Device> {
    let to = options.device.unwrap_or(from);
    (from.kind == DeviceKind::CUDA && to.kind == DeviceKind::CUDA).then_some(to)
}

/// Moves a tensor to the host, and from there to where it was, or where the caller wants it. What is on the host
/// crosses as ever.
pub(crate) fn transfer<'py>(
    call: Option<&trace::Call>,
    from: &AnyAdapter<'py>,
    to: &AnyAdapter<'py>,
    x: &PyTensor<'py>,
    options: &Options,
) -> Result<PyTensor<'py>> {
    not_a_capsule(x)?;
    let Some(back) = from.locate(x)?.and_then(|(device, _)| back(device, options)) else {
        return trace::transfer(call, &**from, &**to, x, options);
    };
    // A framework with memory on the host: NumPy lacks small floats.
    let numpy;
    let there = match [to, from].into_iter().find(|adapter| adapter.profile().devices.contains(&DeviceKind::CPU)) {
        Some(adapter) => adapter,
        None => {
            numpy = Framework::NumPy.open(x.py())?;
            &numpy
        }
    };
    let down = options.with_device(Device::CPU);
    let on_host = trace::transfer(call, &**from, &**there, x, &down)?;
    let up = Options::default().with_device(back).with_order(options.order);
    trace::transfer(call, &**there, &**to, &on_host, &up)
}
