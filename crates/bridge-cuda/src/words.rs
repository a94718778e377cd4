//! Words of host memory that streams wait for and write.

use crate::context::Devices;
use crate::driver::{Driver, WordsDriver};
use bridge_core::{Device, Result, Stream};
use std::ops::Range;

/// Makes streams wait for words of host memory, and write them. Several processes may map the memory, and each may
/// write any of the words itself, also in place of a process that has ended: an event of that process would never fire.
///
/// Implemented by the driver; the tests of `bridge-ipc` have another implementation. Words are aligned, and are named by
/// their addresses here. Every method may be called on any thread and leaves that thread's current context unchanged.
/// None waits for the device, but perhaps for [`unregister`](Self::unregister).
///
/// # Errors
///
/// [`ErrorKind::Device`](bridge_core::ErrorKind::Device) for a device that is not CUDA's, and
/// [`ErrorKind::Driver`](bridge_core::ErrorKind::Driver) with the driver's message, also where the driver or the device
/// has no such operations: drivers have them since CUDA 11.7.
pub trait Words: Send + Sync {
    /// Registers host memory with the driver, for every device.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until [`unregister`](Self::unregister).
    unsafe fn register(&self, device: Device, bytes: &Range<usize>) -> Result<()>;

    /// Ends the registration of the memory at this address. The driver may wait for all work of the device.
    ///
    /// # Safety
    ///
    /// [`register`](Self::register) has registered it for this device, and no work uses it any more.
    unsafe fn unregister(&self, device: Device, start: usize);

    /// Writes a value to a word after all work now in the stream. A reader of the value sees what that work wrote.
    ///
    /// # Safety
    ///
    /// The word is registered until the work has run, and all that use it on the host do so atomically. `stream` is alive.
    unsafe fn write(&self, device: Device, stream: Stream, word: usize, value: u64) -> Result<()>;

    /// Makes all work submitted to the stream from now on wait until a word has reached a value, or is past it by less
    /// than 2^63.
    ///
    /// # Safety
    ///
    /// The word is registered until the wait has ended, and all that use it on the host do so atomically. `stream` is
    /// alive.
    unsafe fn wait(&self, device: Device, stream: Stream, word: usize, value: u64) -> Result<()>;
}

impl<D: Driver + WordsDriver> Words for Devices<D> {
    unsafe fn register(&self, device: Device, bytes: &Range<usize>) -> Result<()> {
        let _entered = self.enter(device)?;
        // SAFETY: the caller's promise.
        self.relaxed(|| unsafe { self.driver().register(bytes.start, bytes.len()) })
    }

    unsafe fn unregister(&self, device: Device, start: usize) {
        // Without the context the driver has forgotten it already.
        let Ok(_entered) = self.enter(device) else { return };
        // SAFETY: the caller's promises.
        let _ = self.relaxed(|| unsafe { self.driver().unregister(start) });
    }

    unsafe fn write(&self, device: Device, stream: Stream, word: usize, value: u64) -> Result<()> {
        let _entered = self.enter(device)?;
        // SAFETY: the caller's promises.
        self.relaxed(|| unsafe { self.driver().write_word(stream, word, value) })
    }

    unsafe fn wait(&self, device: Device, stream: Stream, word: usize, value: u64) -> Result<()> {
        let _entered = self.enter(device)?;
        // SAFETY: the caller's promises.
        self.relaxed(|| unsafe { self.driver().wait_word(stream, word, value) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Call, Fake};
    use bridge_core::ErrorKind;

    const GPU: Device = Device::cuda(1);
    // SAFETY: no driver sees this stream.
    const A: Stream = unsafe { Stream::from_handle(0xa0) };

    #[test]
    fn words_are_used_in_registered_memory_alone() {
        let devices = Devices::new(Fake::default(), 2);
        let (write, wait) = (
            // SAFETY: the driver is a fake, which touches no memory.
            |word, value| unsafe { devices.write(GPU, A, word, value) },
            // SAFETY: as above.
            |word, value| unsafe { devices.wait(GPU, A, word, value) },
        );
        assert_eq!(write(0x1008, 1).unwrap_err().kind(), ErrorKind::Driver);
        // SAFETY: as above.
        unsafe { devices.register(GPU, &(0x1000..0x2000)) }.unwrap();
        devices.driver().take_calls();
        write(0x1008, 1).unwrap();
        wait(0x1ff8, 2).unwrap();
        let calls = devices.driver().take_calls();
        assert!(calls.contains(&Call::Write(A, 0x1008, 1)) && calls.contains(&Call::Await(A, 0x1ff8, 2)), "{calls:?}");
        assert_eq!(calls.last(), Some(&Call::Pop), "the context is as before");
        assert_eq!(wait(0x2000, 1).unwrap_err().kind(), ErrorKind::Driver);
        // SAFETY: as above.
        unsafe { devices.unregister(GPU, 0x1000) };
        assert_eq!(wait(0x1008, 1).unwrap_err().kind(), ErrorKind::Driver);
    }

    #[test]
    fn a_driver_without_them_says_so() {
        let devices = Devices::new(Fake::default(), 2);
        devices.driver().fail("cuMemHostRegister_v2", 801);
        // SAFETY: the driver is a fake, which touches no memory.
        let refused = unsafe { devices.register(GPU, &(0x1000..0x2000)) }.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Driver, "{refused}");
        // SAFETY: as above.
        let elsewhere = unsafe { devices.register(Device::CPU, &(0x1000..0x2000)) }.unwrap_err();
        assert_eq!(elsewhere.kind(), ErrorKind::Device);
    }
}
