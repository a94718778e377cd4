//! The kernels, as data. Their source is in kernels/.

use bridge_cuda::Image;
use std::ffi::CStr;

macro_rules! kernels {
    ($($kernel:ident $name:literal $shared:literal;)*) => {
        /// A kernel of kernels/copy.cu.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Kernel { $($kernel,)* }

        /// Names and the most shared memory, in bytes, that the plan asks for.
        pub(crate) const KERNELS: &[(&CStr, u32)] = &[$(($name, $shared),)*];
    };
}

kernels! {
    Flat1 c"flat1" 0;
    Flat2 c"flat2" 0;
    Flat4 c"flat4" 0;
    Flat8 c"flat8" 0;
    Flat16 c"flat16" 0;
    Pack1 c"pack1" 0;
    Pack2 c"pack2" 0;
    Pack4 c"pack4" 0;
    Pack8 c"pack8" 0;
    Rows1 c"rows1" 0;
    Rows2 c"rows2" 0;
    Rows4 c"rows4" 0;
    Rows8 c"rows8" 0;
    Turn1 c"turn1" 0;
    Turn2 c"turn2" 0;
    Turn4 c"turn4" 0;
    Turn8 c"turn8" 0;
    Tile1 c"tile1" 0;
    Tile2 c"tile2" 0;
    Tile4 c"tile4" 0;
    Tile8 c"tile8" 0;
    Tile16 c"tile16" 0;
    Words1 c"words1" 16896;
    Words2 c"words2" 33280;
    Vectors1 c"vectors1" 16384;
    Vectors1Wide c"vectors1_wide" 65536;
    Vectors2 c"vectors2" 8192;
    Vectors2Wide c"vectors2_wide" 32768;
    Vectors4 c"vectors4" 16384;
    Split1 c"split1" 32784;
    Split2 c"split2" 32784;
    Split4 c"split4" 32784;
    Split8 c"split8" 32784;
    Join1 c"join1" 32784;
    Join2 c"join2" 32784;
    Join4 c"join4" 32784;
    Join8 c"join8" 32784;
}

/// What `cargo xtask kernels` compiled them to.
pub(crate) const IMAGES: &[Image] = &[
    Image { capability: (7, 0), bytes: include_bytes!("../../kernels/compiled/sm_70.cubin") },
    Image { capability: (8, 0), bytes: include_bytes!("../../kernels/compiled/sm_80.cubin") },
    Image { capability: (9, 0), bytes: include_bytes!("../../kernels/compiled/sm_90.cubin") },
    Image { capability: (10, 0), bytes: include_bytes!("../../kernels/compiled/sm_100.cubin") },
    Image { capability: (12, 0), bytes: include_bytes!("../../kernels/compiled/sm_120.cubin") },
];

/// For devices that have no image: the driver compiles it. It ends with a zero, as the driver wants.
pub(crate) const PTX: &[u8] = include_bytes!("../../kernels/compiled/compute_70.ptx");
