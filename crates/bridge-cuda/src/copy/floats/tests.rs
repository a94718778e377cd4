//! The arithmetic against exact values.

use super::*;

/// The nearest number of another dtype by exact arithmetic: the values of all numbers are listed, and compared.
pub(crate) mod exact {
    use bridge_core::DType;
    use std::sync::{LazyLock, OnceLock};

    /// A small dtype by its definition. Every value is exact in float64, and so is every sum of two neighbours.
    struct Small {
        mantissa: i32,
        /// The exponent of the least normal number.
        least: i32,
        /// What is not a number, by its bits without the sign.
        is_nan: fn(u16) -> bool,
        /// The numbers without sign, the first of infinity or NaN last: as if it were the next number.
        values: Vec<f64>,
    }

    impl Small {
        fn new(mantissa: i32, least: i32, numbers: u16, is_nan: fn(u16) -> bool) -> Self {
            let mut small = Self { mantissa, least, is_nan, values: Vec::new() };
            small.values = (0..=numbers).map(|bits| small.value(bits)).collect();
            small
        }

        fn value(&self, bits: u16) -> f64 {
            let (whole, rest) = (i32::from(bits) >> self.mantissa, i32::from(bits) & ((1 << self.mantissa) - 1));
            let unit = f64::powi(2.0, self.least - self.mantissa);
            match whole {
                0 => f64::from(rest) * unit,
                _ => f64::from(rest + (1 << self.mantissa)) * unit * f64::powi(2.0, whole - 1),
            }
        }

        fn read(&self, bits: u16) -> Option<f64> {
            let last = self.values.len() - 1;
            match usize::from(bits) {
                _ if (self.is_nan)(bits) => None,
                number if number < last => Some(self.values[number]),
                _ => Some(f64::INFINITY),
            }
        }

        fn nearest(&self, value: f64) -> Option<u16> {
            let last = self.values.len() - 1;
            let above = self.values.partition_point(|known| *known <= value);
            let bits = match above {
                _ if above > last => last,
                _ => {
                    let (low, high) = (above - 1, above);
                    let both = self.values[low] + self.values[high];
                    match 2.0 * value {
                        twice if twice < both => low,
                        twice if twice > both => high,
                        _ => {
                            if low.is_multiple_of(2) {
                                low
                            } else {
                                high
                            }
                        }
                    }
                }
            };
            (!(self.is_nan)(bits as u16)).then_some(bits as u16)
        }
    }

    fn small(dtype: DType) -> (u32, &'static Small) {
        static SMALL: LazyLock<[(DType, u32, Small); 4]> = LazyLock::new(|| {
            [
                (DType::FLOAT16, 15, Small::new(10, -14, 0x7c00, |bits| bits > 0x7c00)),
                (DType::BFLOAT16, 15, Small::new(7, -126, 0x7f80, |bits| bits > 0x7f80)),
                (DType::FLOAT8_E4M3FN, 7, Small::new(3, -6, 0x7f, |bits| bits == 0x7f)),
                (DType::FLOAT8_E5M2, 7, Small::new(2, -14, 0x7c, |bits| bits > 0x7c)),
            ]
        });
        let (_, sign, small) = SMALL.iter().find(|(known, ..)| *known == dtype).unwrap();
        (*sign, small)
    }

    /// Returns the bits of the nearest number, and `None` where it is NaN.
    pub(crate) fn cast(from: DType, to: DType, bits: u64) -> Option<u64> {
        let value = match from {
            DType::FLOAT64 => f64::from(f64::from_bits(bits) as f32),
            DType::FLOAT32 => f64::from(f32::from_bits(bits as u32)),
            _ => {
                let (sign, small) = small(from);
                let value = small.read((bits & ((1 << sign) - 1)) as u16)?;
                if bits >> sign == 1 { -value } else { value }
            }
        };
        if value.is_nan() {
            return None;
        }
        match to {
            DType::FLOAT64 => Some(value.to_bits()),
            DType::FLOAT32 => Some(u64::from((value as f32).to_bits())),
            _ => {
                let (sign, small) = small(to);
                Some(u64::from(small.nearest(value.abs())?) | u64::from(value.is_sign_negative()) << sign)
            }
        }
    }

    /// Returns whether the bits are a NaN.
    pub(crate) fn is_nan(dtype: DType, bits: u64) -> bool {
        match dtype {
            DType::FLOAT64 => f64::from_bits(bits).is_nan(),
            DType::FLOAT32 => f32::from_bits(bits as u32).is_nan(),
            _ => {
                let (sign, small) = small(dtype);
                (small.is_nan)((bits & ((1 << sign) - 1)) as u16)
            }
        }
    }

    /// Values between which another number becomes the nearest: all numbers of the small dtypes, the middles between
    /// two, and the values of float32 next to both.
    fn borders() -> Vec<f32> {
        let mut all = Vec::new();
        for dtype in [DType::FLOAT16, DType::BFLOAT16, DType::FLOAT8_E4M3FN, DType::FLOAT8_E5M2] {
            let values = &small(dtype).1.values;
            let middles = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
            for value in values.iter().copied().chain(middles).map(|value| value as f32) {
                all.extend([value, value.next_down(), value.next_up()]);
            }
        }
        all
    }

    /// Returns bits of a dtype to try: all of a small one; of the others the borders with both signs, NaN, infinity,
    /// the smallest and the largest numbers, and some thousand that look random.
    pub(crate) fn tried(dtype: DType) -> &'static [u64] {
        static TRIED: [OnceLock<Vec<u64>>; 6] = [const { OnceLock::new() }; 6];
        TRIED[super::number(dtype)].get_or_init(|| listed(dtype))
    }

    fn listed(dtype: DType) -> Vec<u64> {
        if dtype.bits <= 16 {
            return (0..1 << dtype.bits).collect();
        }
        let random = (1u64..5000).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (n << 7));
        if dtype == DType::FLOAT32 {
            let special = [f32::INFINITY, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::NAN];
            let signs = borders().into_iter().chain(special).flat_map(|value| [value, -value]);
            let special = [0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0xffff_ffff];
            return signs.map(|value| value.to_bits().into()).chain(special).chain(random.map(|n| n >> 32)).collect();
        }
        let special = [f64::INFINITY, f64::MAX, f64::MIN_POSITIVE, f64::from_bits(1), f64::NAN];
        let borders = borders()
            .into_iter()
            .step_by(13)
            .map(f64::from)
            .flat_map(|value| [value, value.next_down(), value.next_up()]);
        let signs = borders.chain(special).flat_map(|value| [value, -value]);
        let near_one = random.clone().map(|n| n >> 12 | 0x3f0_u64.wrapping_add(n % 0x20) << 52);
        signs.map(f64::to_bits).chain([0x7ff0_0000_0000_0001, u64::MAX]).chain(random).chain(near_one).collect()
    }
}

/// Returns the bits of `dtype` for those of another dtype, by the arithmetic of this module.
fn cast(from: DType, to: DType, bits: u64) -> u64 {
    macro_rules! each {
        ($dtype:expr, $value:ident => $does:expr) => {
            match $dtype {
                DType::FLOAT16 => {
                    type $value = Float16;
                    $does
                }
                DType::BFLOAT16 => {
                    type $value = BFloat16;
                    $does
                }
                DType::FLOAT32 => {
                    type $value = Float32;
                    $does
                }
                DType::FLOAT64 => {
                    type $value = Float64;
                    $does
                }
                DType::FLOAT8_E4M3FN => {
                    type $value = Float8E4M3FN;
                    $does
                }
                _ => {
                    type $value = Float8E5M2;
                    $does
                }
            }
        };
    }
    let value = each!(from, F => F::widen(bits as <F as Float>::Bits));
    #[allow(clippy::useless_conversion, reason = "one of the dtypes has 64 bits")]
    let bits = each!(to, T => u64::from(T::narrow(value)));
    bits
}

/// Every cast, and bits to try.
fn casts() -> impl Iterator<Item = (DType, DType, &'static [u64])> {
    Cast::DTYPES.into_iter().flat_map(|from| {
        let bits = exact::tried(from);
        Cast::DTYPES.into_iter().filter(move |to| *to != from).map(move |to| (from, to, bits))
    })
}

fn check(from: DType, to: DType, bits: u64, found: u64) {
    match exact::cast(from, to, bits) {
        Some(expected) => assert_eq!(found, expected, "{from} {bits:#x} to {to}: {found:#x}, not {expected:#x}"),
        None => assert!(exact::is_nan(to, found), "{from} {bits:#x} to {to}: {found:#x}, not NaN"),
    }
}

#[test]
fn the_nearest_number_is_found() {
    for (from, to, tried) in casts() {
        for &bits in tried {
            check(from, to, bits, cast(from, to, bits));
        }
    }
}

#[test]
fn known_casts() {
    let table = [
        (DType::FLOAT8_E4M3FN, 448.0, 0x7e),
        (DType::FLOAT8_E4M3FN, 464.0, 0x7e),
        (DType::FLOAT8_E4M3FN, 464.5, 0x7f),
        (DType::FLOAT8_E4M3FN, f32::NEG_INFINITY, 0xff),
        (DType::FLOAT8_E5M2, 57344.0, 0x7b),
        (DType::FLOAT8_E5M2, 61440.0, 0x7c),
        (DType::FLOAT8_E5M2, 1e-8, 0),
        (DType::FLOAT16, 65519.0, 0x7bff),
        (DType::FLOAT16, 65520.0, 0x7c00),
        (DType::FLOAT16, -0.0, 0x8000),
        (DType::BFLOAT16, 1.0 + 1.0 / 256.0, 0x3f80),
        (DType::BFLOAT16, f32::MAX, 0x7f80),
    ];
    for (to, value, expected) in table {
        assert_eq!(cast(DType::FLOAT32, to, u64::from(value.to_bits())), expected, "{value} to {to}");
    }
    // A tie of float16 after the float64 became a float32: once rounded it would be the number above.
    assert_eq!(
        cast(DType::FLOAT64, DType::FLOAT16, (1.0 + f64::powi(2.0, -11) + f64::powi(2.0, -40)).to_bits()),
        0x3c00
    );
}
