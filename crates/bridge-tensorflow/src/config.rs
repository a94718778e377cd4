//! How a session uses the machine: TensorFlow's `ConfigProto`, of which the fields here are a few
//! (`tensorflow/core/protobuf/config.proto`).

use prost::Message;
use std::collections::BTreeMap;

/// How a session uses the machine. In 1.x the first session of a process settles what concerns GPUs, for all.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionOptions {
    /// Whether GPU memory is taken as it is needed, and not nearly all of it at once. `true` unless said otherwise,
    /// because other frameworks need some.
    pub memory_growth: bool,
    /// The most of each GPU's memory that may be taken, of 1.
    pub memory_fraction: Option<f64>,
    /// Which of the GPUs that the driver shows are used, and in which order: the first is TensorFlow's `GPU:0`. None of
    /// them where the list is empty.
    pub visible_devices: Option<Vec<u32>>,
    /// More of a `ConfigProto`, serialised. It wins over the fields above.
    pub config: Vec<u8>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self { memory_growth: true, memory_fraction: None, visible_devices: None, config: Vec::new() }
    }
}

#[derive(Clone, PartialEq, Message)]
struct ConfigProto {
    #[prost(btree_map = "string, int32", tag = "1")]
    device_count: BTreeMap<String, i32>,
    #[prost(message, optional, tag = "6")]
    gpu_options: Option<GpuOptions>,
    #[prost(bool, tag = "7")]
    allow_soft_placement: bool,
}

#[derive(Clone, PartialEq, Message)]
struct GpuOptions {
    #[prost(double, tag = "1")]
    per_process_gpu_memory_fraction: f64,
    #[prost(bool, tag = "4")]
    allow_growth: bool,
    #[prost(string, tag = "5")]
    visible_device_list: String,
}

impl SessionOptions {
    /// As TensorFlow takes it. Messages in a row are one: what comes later wins.
    pub(crate) fn serialised(&self) -> Vec<u8> {
        let devices = self.visible_devices.iter().flatten().map(u32::to_string).collect::<Vec<_>>();
        let gpu_options = GpuOptions {
            per_process_gpu_memory_fraction: self.memory_fraction.unwrap_or_default(),
            allow_growth: self.memory_growth,
            visible_device_list: devices.join(","),
        };
        // Operations that have no kernel for a GPU run on the CPU.
        let allow_soft_placement = true;
        let none = self.visible_devices.as_ref().is_some_and(Vec::is_empty);
        let device_count = none.then(|| ("GPU".into(), 0)).into_iter().collect();
        let config = ConfigProto { device_count, gpu_options: Some(gpu_options), allow_soft_placement };
        [config.encode_to_vec(), self.config.clone()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_of_the_protocol() {
        assert_eq!(SessionOptions::default().serialised(), [0x32, 2, 0x20, 1, 0x38, 1]);
        let options = SessionOptions {
            memory_growth: false,
            memory_fraction: Some(0.5),
            visible_devices: Some(vec![1, 0]),
            config: vec![0x38, 0],
        };
        let expected = [0x32, 14, 9, 0, 0, 0, 0, 0, 0, 0xe0, 0x3f, 0x2a, 3, b'1', b',', b'0', 0x38, 1, 0x38, 0];
        assert_eq!(options.serialised(), expected);
        let none = SessionOptions { visible_devices: Some(Vec::new()), ..SessionOptions::default() };
        assert_eq!(none.serialised()[..7], [0x0a, 5, 0x0a, 3, b'G', b'P', b'U']);
    }
}
