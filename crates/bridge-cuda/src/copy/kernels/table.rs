//! The kernels, as data. Their source is in kernels/.

use std::ffi::CStr;

macro_rules! kernels {
    ($($kernel:ident $name:literal $threads:literal $shared:literal;)*) => {
        /// A kernel of kernels/copy.cu.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Kernel { $($kernel,)* }

        /// Names and the most shared memory, in bytes, that the plan asks for.
        pub(crate) const KERNELS: &[(&CStr, u32)] = &[$(($name, $shared),)*];

        impl Kernel {
            /// Returns the threads of a block.
            pub fn threads(self) -> u32 {
                match self { $(Self::$kernel => $threads,)* }
            }
        }
    };
}

kernels! {
    Flat1 c"flat1" 128 0;
    Flat2 c"flat2" 128 0;
    Flat4 c"flat4" 128 0;
    Flat8 c"flat8" 128 0;
    Flat16 c"flat16" 128 0;
    Gather2 c"gather2" 256 0;
    Gather4 c"gather4" 256 0;
    Rows c"rows" 256 0;
    Tile2 c"tile2" 256 0;
    Tile4 c"tile4" 256 0;
    Tile4Small c"tile4_small" 256 0;
    Tile8 c"tile8" 256 0;
    Tile16 c"tile16" 256 0;
    Words c"words" 256 33280;
    Shifted1 c"shifted1" 256 0;
    Shifted2 c"shifted2" 256 0;
    Vectors1 c"vectors1" 256 16384;
    Vectors1Wide c"vectors1_wide" 512 65536;
    Vectors2 c"vectors2" 256 8192;
    Vectors2Wide c"vectors2_wide" 256 32768;
    Vectors4 c"vectors4" 256 16384;
    Split1 c"split1" 256 33024;
    Split2 c"split2" 256 33024;
    Split4 c"split4" 256 33024;
    Box c"box" 256 40960;
    Pieces1 c"pieces1" 256 0;
    Pieces2 c"pieces2" 256 0;
    Pieces4 c"pieces4" 256 0;
    Pieces16 c"pieces16" 256 0;
    Cast c"cast" 256 0;
}

/// What `cargo xtask generate kernels` compiled them to: a fatbinary.
pub(crate) static IMAGE: &[u8] = &ALIGNED.0;

static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!("../../../kernels/compiled.fatbin"));

/// As the driver reads an image.
#[repr(align(8))]
struct Aligned<T: ?Sized>(T);
