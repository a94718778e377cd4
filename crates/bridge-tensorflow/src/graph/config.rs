//! The devices and the memory of a session: a few fields of TensorFlow's `ConfigProto`
//! (`tensorflow/core/protobuf/config.proto`).

use crate::graph::argument;
use crate::runtime::Runtime;
use bridge_core::{Error, ErrorKind, Result};
use prost::Message;
use std::collections::BTreeMap;

/// The devices and the memory of a session. In 1.x the first session of a process sets the GPUs' options for all.
///
/// Without `config`, memory grows and operations without a kernel for a GPU run on the CPU (`allow_soft_placement`). A
/// `config` is used as it is: a message does not contain false and 0, which cannot be distinguished from missing
/// fields. Memory still grows if the `config` has no `gpu_options` at all.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct SessionOptions {
    /// Whether GPU memory is taken as it is needed, and not nearly all at once: other frameworks need some.
    pub memory_growth: Option<bool>,
    /// The share of each GPU's memory that may be taken at most: above 0, at most 1.
    pub memory_fraction: Option<f64>,
    /// The driver's numbers of the GPUs to use. The first is TensorFlow's `GPU:0`. An empty list means the host only.
    pub visible_devices: Option<Vec<u32>>,
    /// A `ConfigProto`, serialised. Its fields take precedence over those above.
    pub config: Option<Vec<u8>>,
}

/// Makes a method of each field, which returns the options with another value of it.
macro_rules! setters {
    ($($name:ident = $field:ident: $type:ty;)*) => {
        impl SessionOptions {
            $(#[doc = concat!("Returns the same options with another [`", stringify!($field), "`](Self::", stringify!($field), ").")]
            #[must_use]
            pub fn $name(self, $field: impl Into<Option<$type>>) -> Self {
                Self { $field: $field.into(), ..self }
            })*
        }
    };
}

setters! {
    with_memory_growth = memory_growth: bool;
    with_memory_fraction = memory_fraction: f64;
    with_visible_devices = visible_devices: Vec<u32>;
    with_config = config: Vec<u8>;
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
    // A string, whose encoding TensorFlow checks.
    #[prost(bytes, tag = "5")]
    visible_device_list: Vec<u8>,
}

impl SessionOptions {
    /// Returns the serialised `ConfigProto`, and the driver's numbers of the visible GPUs if the options name them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`](bridge_core::ErrorKind::Argument) for a `config` that is not a `ConfigProto`, for an
    /// invalid list of devices, and for a fraction that is none.
    pub(crate) fn serialised(&self) -> Result<(Vec<u8>, Option<Vec<u32>>)> {
        let given = self.config.as_deref().map(ConfigProto::decode).transpose().map_err(|error| {
            argument(format!("config is not a serialised ConfigProto ({error}): pass its bytes, or the message itself"))
                .caused_by(error)
        })?;
        let of_gpus = given.as_ref().and_then(|given| given.gpu_options.as_ref());
        let list = of_gpus.map(|of_gpus| &of_gpus.visible_device_list).filter(|list| !list.is_empty());
        let listed = list.map(|list| numbers(&String::from_utf8_lossy(list))).transpose()?;
        let devices = self.visible_devices.iter().flatten().map(u32::to_string).collect::<Vec<_>>().join(",");
        if !devices.is_empty() {
            numbers(&devices)?;
        }
        let gpu_options = GpuOptions {
            per_process_gpu_memory_fraction: self.fraction()?,
            allow_growth: self.memory_growth.unwrap_or(of_gpus.is_none()),
            visible_device_list: devices.into(),
        };
        let none = self.visible_devices.as_ref().is_some_and(Vec::is_empty);
        let device_count = none.then(|| ("GPU".into(), 0)).into_iter().collect();
        let allow_soft_placement = given.is_none();
        let ours = ConfigProto { device_count, gpu_options: Some(gpu_options), allow_soft_placement };
        // Concatenated messages are merged, and later fields take precedence.
        let bytes = [&ours.encode_to_vec(), self.config.as_deref().unwrap_or_default()].concat();
        Ok((bytes, listed.or_else(|| self.visible_devices.clone())))
    }

    /// The fraction as TensorFlow has it, where 0 is none.
    fn fraction(&self) -> Result<f64> {
        match self.memory_fraction {
            Some(fraction) if !(fraction > 0.0 && fraction <= 1.0) => {
                Err(argument(format!("memory_fraction is {fraction}: pass a number above 0, at most 1")))
            }
            fraction => Ok(fraction.unwrap_or_default()),
        }
    }
}

/// Refuses GPUs that do not exist: TensorFlow 1.x aborts the process when it has to use one.
pub(crate) fn check_devices(runtime: &Runtime, visible: &[u32]) -> Result<()> {
    if !runtime.has_cuda() || visible.is_empty() {
        return Ok(());
    }
    let count = bridge_cuda::device_count();
    match visible.iter().find(|number| **number as usize >= count) {
        None => Ok(()),
        Some(number) => {
            let text = format!("there is no GPU {number} to be made visible: this process sees {count} CUDA device(s)");
            Err(Error::new(ErrorKind::Device, text))
        }
    }
}

/// Returns the numbers of a `visible_device_list`.
fn numbers(list: &str) -> Result<Vec<u32>> {
    let numbers = list.split(',').map(|number| number.trim().parse()).collect::<Result<Vec<u32>, _>>();
    let distinct = numbers.ok().filter(|numbers| (1..numbers.len()).all(|i| !numbers[..i].contains(&numbers[i])));
    distinct.ok_or_else(|| {
        let shown: String = list.chars().take(80).collect();
        argument(format!(
            "GPUs are shown by the visible_device_list {shown:?}: it must be distinct numbers, such as \"0,1\""
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(options: &SessionOptions) -> Vec<u8> {
        options.serialised().unwrap().0
    }

    #[test]
    fn the_bytes_are_those_of_the_protocol() {
        assert_eq!(bytes(&SessionOptions::default()), [0x32, 2, 0x20, 1, 0x38, 1]);
        let options = SessionOptions {
            memory_growth: Some(false),
            memory_fraction: Some(0.5),
            visible_devices: Some(vec![1, 0]),
            config: None,
        };
        let expected = [0x32, 14, 9, 0, 0, 0, 0, 0, 0, 0xe0, 0x3f, 0x2a, 3, b'1', b',', b'0', 0x38, 1];
        assert_eq!(bytes(&options), expected);
        let none = SessionOptions { visible_devices: Some(Vec::new()), ..SessionOptions::default() };
        assert_eq!(bytes(&none)[..7], [0x0a, 5, 0x0a, 3, b'G', b'P', b'U']);
    }

    /// Returns what TensorFlow reads: whether memory grows, and whether operations may run on another device.
    fn read(options: &SessionOptions) -> (bool, bool) {
        let read = ConfigProto::decode(&*bytes(options)).unwrap();
        (read.gpu_options.unwrap().allow_growth, read.allow_soft_placement)
    }

    #[test]
    fn a_configuration_takes_precedence_even_if_it_says_false() {
        let with = |config: &[u8]| SessionOptions { config: Some(config.to_vec()), ..SessionOptions::default() };
        let given = |growth| SessionOptions { memory_growth: Some(growth), ..with(&[]) };
        // Without `gpu_options`, with empty ones, with a fraction in them, and with both set.
        assert_eq!(read(&with(&[])), (true, false));
        assert_eq!(read(&with(&[0x32, 0])), (false, false));
        assert_eq!(read(&with(&[0x32, 9, 9, 0, 0, 0, 0, 0, 0, 0xe0, 0x3f])), (false, false));
        assert_eq!(read(&with(&[0x32, 2, 0x20, 1, 0x38, 1])), (true, true));
        assert_eq!((read(&given(true)), read(&given(false))), ((true, false), (false, false)));
        assert_eq!(read(&SessionOptions { memory_growth: Some(true), ..with(&[0x32, 2, 0x20, 0]) }), (false, false));
    }

    #[test]
    fn a_fraction_that_is_none_and_a_device_twice_are_refused() {
        let refused = |options: SessionOptions| options.serialised().unwrap_err().to_string();
        for wrong in [0.0, -0.5, 1.5, f64::NAN, f64::INFINITY] {
            let message = refused(SessionOptions::default().with_memory_fraction(wrong));
            assert!(message.contains("memory_fraction is"), "{message}");
        }
        assert!(SessionOptions::default().with_memory_fraction(1.0).serialised().is_ok());
        let message = refused(SessionOptions::default().with_visible_devices(vec![1, 0, 1]));
        assert!(message.contains("\"1,0,1\": it must be distinct"), "{message}");
    }

    #[test]
    fn the_visible_devices_are_those_of_the_configuration() {
        let listed = |list: &[u8], devices: Option<Vec<u32>>| {
            let gpu_options = GpuOptions { visible_device_list: list.to_vec(), ..GpuOptions::default() };
            let config = ConfigProto { gpu_options: Some(gpu_options), ..ConfigProto::default() }.encode_to_vec();
            let options =
                SessionOptions { config: Some(config), visible_devices: devices, ..SessionOptions::default() };
            options.serialised().map(|(_, devices)| devices)
        };
        assert_eq!(listed(b"1, 0", Some(vec![7])).unwrap(), Some(vec![1, 0]));
        assert_eq!(listed(b"", Some(vec![7])).unwrap(), Some(vec![7]));
        assert_eq!(listed(b"", None).unwrap(), None);
        for wrong in [&b"x"[..], b"-1", b"0,", b"0,0", b"0 1", b"99999999999", b"\xff", &[b'9'; 1000]] {
            let error = listed(wrong, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Argument);
            assert!(error.to_string().len() < 200, "{error}");
        }
        let garbage = SessionOptions { config: Some(b"garbage".to_vec()), ..SessionOptions::default() };
        assert!(garbage.serialised().unwrap_err().to_string().contains("not a serialised ConfigProto"));
    }
}
