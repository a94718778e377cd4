//! The libraries that are known only by a protocol, DLPack or an array interface: their tensors are sources.

use bridge_core::DeviceKind;

/// A library that no adapter knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its name, which is that of the module of its subject.
    pub name: &'static str,
    /// The Python module that shows whether it is installed.
    pub module: &'static str,
    /// The distributions that contain it. The first is the one to install.
    pub distributions: &'static [&'static str],
    /// Where its tensors are.
    pub devices: &'static [DeviceKind],
}

/// A producer of the suite's own, of which nothing but DLPack says anything. Its memory is NumPy's.
pub const DLPACK: &str = "dlpack";

const HOST: &[DeviceKind] = &[DeviceKind::CPU];
const CUDA: &[DeviceKind] = &[DeviceKind::CUDA];
const BOTH: &[DeviceKind] = &[DeviceKind::CPU, DeviceKind::CUDA];

macro_rules! peers {
    ($($name:expr, $module:literal, $distributions:expr, $devices:expr;)*) => {
        /// Every one of them.
        pub const PEERS: &[Peer] = &[$(Peer {
            name: $name,
            module: $module,
            distributions: &$distributions,
            devices: $devices,
        },)*];
    };
}

peers! {
    "warp", "warp", ["warp-lang"], BOTH;
    "numba", "numba_cuda", ["numba-cuda"], CUDA;
    "tvm_ffi", "tvm_ffi", ["apache-tvm-ffi"], BOTH;
    "cuda_core", "cuda.core", ["cuda-core"], CUDA;
    "pyarrow", "pyarrow", ["pyarrow"], HOST;
    DLPACK, "numpy", ["numpy"], HOST;
}
