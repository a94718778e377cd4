//! What leases keep of a TensorFlow, and what is known of its GPUs.

use crate::eager::devices::{Devices, Gpu};
use crate::runtime::library::Series;
use bridge_core::{Consumer, Device, DeviceKind, Error, ErrorKind, Result, Spans, Stream, Views};
use std::ffi::CString;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

/// Asks the eager runtime for its devices; `None` while the interpreter shuts down.
pub(crate) type Ask = fn() -> Option<Result<Arc<Devices>>>;

/// Of one runtime. TensorFlow has one stream per GPU in a process, whoever runs something there: sessions and the eager
/// runtime share it.
pub(crate) struct RuntimeConsumer {
    series: Series,
    views: Views,
    pub(crate) read_only: ReadOnly,
    /// Of the eager context that was seen last.
    devices: RwLock<Option<Arc<Devices>>>,
    /// How to find the devices where an eager context knows them.
    pub(crate) ask: OnceLock<Ask>,
    /// The GPUs of every context and session that was asked, and of every kernel that ran: streams stay what they are.
    learnt: RwLock<Vec<Gpu>>,
}

impl RuntimeConsumer {
    pub(crate) fn new(series: Series) -> Self {
        Self {
            series,
            views: Views::default(),
            read_only: ReadOnly::default(),
            devices: RwLock::default(),
            ask: OnceLock::new(),
            learnt: RwLock::default(),
        }
    }

    pub(crate) fn devices(&self) -> Option<Arc<Devices>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts the devices of another context in the place of those known.
    pub(crate) fn replace(&self, devices: Arc<Devices>) -> Option<Arc<Devices>> {
        self.devices.write().unwrap_or_else(PoisonError::into_inner).replace(devices)
    }

    /// Notes what is known of a GPU. A kernel does not know its name.
    pub(crate) fn learn(&self, gpu: Gpu) {
        let says_more = |known: &Gpu| known.name.is_empty() && !gpu.name.is_empty();
        let same = |known: &Gpu| (known.stream, known.ordinal) == (gpu.stream, gpu.ordinal);
        if self.learnt(|known| same(known) && !says_more(known)).is_some() {
            return;
        }
        let mut learnt = self.learnt.write().unwrap_or_else(PoisonError::into_inner);
        learnt.retain(|other| other.stream != gpu.stream);
        learnt.push(gpu);
    }

    /// Notes that a kernel computes in this stream of a GPU.
    pub(crate) fn learn_stream(&self, stream: Stream, device: Device) {
        self.learn(Gpu { name: CString::default(), ordinal: device.index, stream });
    }

    fn learnt(&self, is: impl Fn(&Gpu) -> bool) -> Option<Gpu> {
        self.learnt.read().unwrap_or_else(PoisonError::into_inner).iter().find(|gpu| is(gpu)).cloned()
    }

    /// The driver's number of the GPU with this stream, if it was learnt.
    pub(crate) fn ordinal_of(&self, stream: Stream) -> Option<i32> {
        self.learnt(|gpu| gpu.stream == stream).map(|gpu| gpu.ordinal)
    }

    /// TensorFlow's name of a GPU, if a session or a context has told it.
    pub(crate) fn name_of(&self, device: Device) -> Option<CString> {
        let named = |gpu: &Gpu| Device::cuda(gpu.ordinal) == device && !gpu.name.is_empty();
        self.learnt(named).map(|gpu| gpu.name)
    }
}

impl Consumer for RuntimeConsumer {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        if device.kind != DeviceKind::CUDA {
            return Ok(None);
        }
        if let Some(devices) = self.devices() {
            return Ok(Some(devices.gpu(device)?.stream));
        }
        if let Some(ask) = self.ask.get() {
            let Some(devices) = ask() else { return Ok(None) };
            return Ok(Some(devices?.gpu(device)?.stream));
        }
        match (self.learnt(|gpu| device == Device::cuda(gpu.ordinal)), self.series) {
            (Some(gpu), _) => Ok(Some(gpu.stream)),
            // The streams of 1.x wait for the legacy stream, and it for them, as the kernels check. Asking for the one
            // that it is would set the GPU up, and that is for the program to do, with the options that it wants.
            (None, Series::One) => Ok(Some(Stream::LEGACY)),
            (None, Series::Two) => {
                let text =
                    format!("tensorflow's stream on {device} is not known yet: open a session that uses it first");
                Err(Error::new(ErrorKind::Device, text))
            }
        }
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

/// Memory that TensorFlow has from elsewhere and that is read-only. TensorFlow writes to none of its tensors, but for raw
/// operations that say so (`InplaceUpdate` and the like); whoever has the memory from TensorFlow may not write either.
#[derive(Default)]
pub(crate) struct ReadOnly {
    /// How many views each range has.
    ranges: Mutex<Spans<(), usize>>,
    /// How many views there are, to be read without the lock.
    count: AtomicUsize,
}

impl ReadOnly {
    fn lock(&self) -> MutexGuard<'_, Spans<(), usize>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a view of the bytes. [`leave`](Self::leave) it once.
    pub(crate) fn enter(&self, bytes: &Range<usize>) {
        if let Some(views) = self.lock().enter((), bytes) {
            *views += 1;
            self.count.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn leave(&self, bytes: &Range<usize>) {
        self.lock().leave((), bytes, |views| {
            *views -= 1;
            self.count.fetch_sub(1, Relaxed);
            *views == 0
        });
    }

    pub(crate) fn contains(&self, address: usize) -> bool {
        let mut found = false;
        if self.count.load(Relaxed) > 0 {
            self.lock().containing((), address, |_| found = true);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_only_memory_stays_so_until_its_last_view_goes() {
        let read_only = ReadOnly::default();
        assert!(!read_only.contains(0x1000));
        read_only.enter(&(0x1000..0x1000));
        assert!(!read_only.contains(0x1000));
        read_only.leave(&(0x1000..0x1000));
        // The same range twice, a part of it, what overlaps it, and what lies beside it.
        let ranges = [0x1000..0x2000, 0x1000..0x2000, 0x1400..0x1800, 0x1800..0x2800, 0x3000..0x4000];
        let orders = [[0, 1, 2, 3, 4], [1, 0, 4, 3, 2], [4, 3, 2, 1, 0], [2, 0, 3, 1, 4]];
        for order in orders {
            ranges.iter().for_each(|range| read_only.enter(range));
            for gone in 0..=order.len() {
                let left = || order[gone..].iter().map(|i| &ranges[*i]);
                for address in (0xfff..0x4002).step_by(0x3ff).chain([0x1000, 0x17ff, 0x1800, 0x1fff, 0x2000, 0x27ff]) {
                    let expected = left().any(|range| range.contains(&address));
                    assert_eq!(read_only.contains(address), expected, "{address:#x} after {gone} of {order:?}");
                }
                if let Some(i) = order.get(gone) {
                    read_only.leave(&ranges[*i]);
                }
            }
        }
    }
}
