//! Devices: an open set over DLPack's codes; and their streams.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kind of device, by DLPack's `DLDeviceType` (`dlpack.h`). The set is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceKind(pub i32);

impl DeviceKind {
    /// Host memory.
    pub const CPU: DeviceKind = DeviceKind(1);
    /// The memory of a CUDA device.
    pub const CUDA: DeviceKind = DeviceKind(2);
    /// Pinned host memory (`cudaMallocHost`).
    pub const CUDA_HOST: DeviceKind = DeviceKind(3);
    /// The memory of a ROCm device.
    pub const ROCM: DeviceKind = DeviceKind(10);
    /// Managed memory (`cudaMallocManaged`).
    pub const CUDA_MANAGED: DeviceKind = DeviceKind(13);

    const NAMED: &'static [(DeviceKind, &'static str)] = &[
        (Self::CPU, "cpu"),
        (Self::CUDA, "cuda"),
        (Self::CUDA_HOST, "cuda_host"),
        (Self::ROCM, "rocm"),
        (Self::CUDA_MANAGED, "cuda_managed"),
    ];
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMED.iter().find(|(kind, _)| kind == self) {
            Some((_, name)) => f.pad(name),
            None => write!(f, "dlpack({})", self.0),
        }
    }
}

/// Error for text that is not a device kind, nor a device such as `cpu` or `cuda:0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseDeviceError(String);

impl ParseDeviceError {
    /// The most characters of the text that the message quotes.
    const KEPT: usize = 64;

    fn of(text: &str) -> Self {
        Self(text.chars().take(Self::KEPT).collect())
    }
}

impl fmt::Display for ParseDeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not a device such as \"cpu\" or \"cuda:0\"", self.0)
    }
}

impl std::error::Error for ParseDeviceError {}

impl FromStr for DeviceKind {
    type Err = ParseDeviceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((kind, _)) = Self::NAMED.iter().find(|(_, name)| *name == text) {
            return Ok(*kind);
        }
        let number = text.strip_prefix("dlpack(").and_then(|rest| rest.strip_suffix(')'));
        let kind = number.and_then(|number| number.parse().ok()).map(DeviceKind);
        // One text for each kind: no sign, no zeros before a number, and no number for what has a name.
        kind.filter(|kind| kind.to_string() == text).ok_or_else(|| ParseDeviceError::of(text))
    }
}

/// One device: its kind and its number among the devices of that kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device {
    /// The kind of device.
    pub kind: DeviceKind,
    /// The ordinal in this process; 0 for host memory.
    pub index: i32,
}

impl Device {
    /// Host memory.
    pub const CPU: Device = Device { kind: DeviceKind::CPU, index: 0 };

    /// Returns the CUDA device with this ordinal.
    pub const fn cuda(index: i32) -> Device {
        Device { kind: DeviceKind::CUDA, index }
    }

    /// Returns the device with this ordinal; for host memory [`CPU`](Self::CPU), because there is one host whatever its
    /// number. What reads a device from outside makes it by this.
    ///
    /// ```
    /// use bridge_core::{Device, DeviceKind};
    ///
    /// assert_eq!(Device::numbered(DeviceKind::CPU, 3), Device::CPU);
    /// assert_eq!(Device::numbered(DeviceKind::CUDA, 3), Device::cuda(3));
    /// ```
    pub const fn numbered(kind: DeviceKind, index: i32) -> Device {
        if kind.0 == DeviceKind::CPU.0 { Self::CPU } else { Device { kind, index } }
    }

    /// Returns the same device, as [`numbered`](Self::numbered) makes it.
    pub(crate) const fn of_one_host(self) -> Device {
        Self::numbered(self.kind, self.index)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::CPU => f.pad("cpu"),
            Self { kind, index } => write!(f, "{kind}:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = ParseDeviceError;

    /// Parses `cpu` or `cuda:1`; a kind without an ordinal means ordinal 0, and `cpu:1` is `cpu`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
        match (kind.parse(), index.parse()) {
            (Ok(kind), Ok(index)) if index >= 0 => Ok(Device::numbered(kind, index)),
            _ => Err(ParseDeviceError::of(text)),
        }
    }
}

macro_rules! serialize_as_text {
    ($($type:ty),*) => {$(
        impl Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

serialize_as_text!(DeviceKind, Device);

/// A queue of work on a device, by its driver's handle (for CUDA a `CUstream`).
///
/// The handle 0, CUDA's other name for the legacy default stream, becomes [`Stream::LEGACY`], so that equal streams
/// compare equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(u64);

impl Stream {
    /// CUDA's legacy default stream (`CU_STREAM_LEGACY`).
    pub const LEGACY: Stream = Stream(1);
    /// CUDA's default stream of the calling thread (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: Stream = Stream(2);

    /// Returns the stream with this handle.
    ///
    /// # Safety
    ///
    /// The handle is 0, or that of a stream of the driver's that exists as long as the value or a copy of it can be
    /// passed to an adapter or returned by one: drivers take handles unchecked. On a device that is simulated it is any number.
    pub const unsafe fn from_handle(handle: u64) -> Self {
        if handle == 0 { Self::LEGACY } else { Self(handle) }
    }

    /// Returns the handle, never 0.
    pub const fn handle(self) -> u64 {
        self.0
    }

    /// Returns a stream that can replace this one on every thread: the legacy stream for the per-thread stream, whose
    /// handle names a different stream on each thread. Both are blocking streams, so each waits for the other (CUDA
    /// programming guide, "per-thread default stream").
    #[must_use]
    pub const fn on_any_thread(self) -> Self {
        if self.0 == Self::PER_THREAD.0 { Self::LEGACY } else { self }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::LEGACY => f.pad("legacy default stream"),
            Self::PER_THREAD => f.pad("per-thread default stream"),
            Self(handle) => write!(f, "stream {handle:#x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_read_back() {
        for device in [Device::CPU, Device::cuda(3), Device { kind: DeviceKind(77), index: 1 }] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(Device::cuda(0)));
        assert_eq!("cpu:3".parse(), Ok(Device::CPU), "there is one host");
        assert!("cuda:-1".parse::<Device>().is_err());
        assert!("gpu".parse::<Device>().is_err());
        for odd in ["dlpack(1)", "dlpack(+7)", "dlpack(07)", "dlpack(7", "dlpack(7):1:2"] {
            assert!(odd.parse::<Device>().is_err(), "{odd}");
        }
    }
}
