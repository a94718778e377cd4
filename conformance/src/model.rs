//! The oracle: expected bytes, layouts and plans, computed without core, so that core is judged as well.

use crate::{Observed, Spec};
use bridge_core::{DType, ErrorKind, Pending, Profile, Strides};
use std::ops::RangeInclusive;

/// A small generator of pseudorandom numbers (SplitMix64), the same on every machine.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }
}

impl Spec {
    /// A compact tensor that fills its base buffer.
    pub fn compact(dtype: DType, shape: &[i64]) -> Self {
        Self {
            dtype,
            shape: shape.into(),
            strides: row_major(shape),
            offset: 0,
            base: numel(shape),
            align: 0,
            read_only: false,
            pending: None,
        }
    }

    /// A compact tensor of one row of `count` elements, with one of these numbers of dimensions
    /// ([`Profile::rank`](bridge_core::Profile::rank)). A scalar, where there is no other, has one element.
    pub fn row(dtype: DType, count: usize, ranks: &RangeInclusive<usize>) -> Self {
        let ndim = (*ranks.start()).max(1).min(*ranks.end());
        let mut shape = vec![1; ndim];
        shape.iter_mut().last().into_iter().for_each(|length| *length = count as i64);
        Self::compact(dtype, &shape)
    }
}

/// Bytes of one element.
///
/// # Panics
///
/// For a dtype whose elements are not whole bytes: no subject makes those.
pub fn itemsize(dtype: DType) -> usize {
    dtype.itemsize().expect("subjects make tensors of whole bytes only")
}

/// Number of elements.
pub fn numel(shape: &[i64]) -> usize {
    shape.iter().product::<i64>() as usize
}

/// Returns the place of each element in row-major order, in elements from the first one.
pub fn places(shape: &[i64], strides: &[i64]) -> Vec<i64> {
    let mut places = vec![0];
    for (&length, &stride) in shape.iter().zip(strides) {
        let mut inner = Vec::with_capacity(places.len() * length as usize);
        // Loops, because a build without optimisation spends its time in the calls of iterators.
        for place in places {
            for i in 0..length {
                inner.push(place + i * stride);
            }
        }
        places = inner;
    }
    places
}

/// Returns the place of each run of elements that lie one after another, in row-major order, and the elements of a run.
pub(crate) fn runs(shape: &[i64], strides: &[i64]) -> (Vec<i64>, usize) {
    let (mut outer, mut len) = (shape.len(), 1);
    while outer > 0 && strides[outer - 1] == len {
        outer -= 1;
        len *= shape[outer];
    }
    let places = if len == 0 { Vec::new() } else { places(&shape[..outer], &strides[..outer]) };
    (places, len as usize)
}

/// Returns the base buffer of `spec`: random bytes, NaN payloads included. Elements of `bool` are only 0 and 1; tensors
/// with a deferred operation have no NaN, because arithmetic need not keep its bits.
pub fn random_bytes(spec: &Spec, seed: u64) -> Vec<u8> {
    random_elements(spec, spec.base, seed)
}

/// Returns random bytes for `count` elements of `spec`, as [`random_bytes`] does.
pub fn random_elements(spec: &Spec, count: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let len = count * itemsize(spec.dtype);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.bits().to_le_bytes());
    }
    bytes.truncate(len);
    if spec.dtype == DType::BOOL {
        bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    if spec.pending.is_some() {
        // Without its highest bit no exponent is that of a NaN.
        top_bytes(spec.dtype, &mut bytes).for_each(|(_, byte)| *byte &= 0xbf);
    }
    bytes
}

/// Returns the byte with the sign of each part of each element, little-endian, and whether the part is imaginary.
fn top_bytes(dtype: DType, bytes: &mut [u8]) -> impl Iterator<Item = (bool, &mut u8)> {
    let part = if dtype.is_complex() { itemsize(dtype) / 2 } else { itemsize(dtype) };
    let parts = bytes.iter_mut().skip(part - 1).step_by(part).enumerate();
    parts.map(move |(i, byte)| (dtype.is_complex() && i % 2 == 1, byte))
}

/// Applies a deferred operation to the bytes of floating-point or complex elements.
pub fn resolve(dtype: DType, pending: Option<Pending>, bytes: &mut [u8]) {
    let Some(pending) = pending else { return };
    for (imaginary, byte) in top_bytes(dtype, bytes) {
        let changes = match pending {
            Pending::NegatedConjugation => !imaginary,
            Pending::Negation => true,
            _ => imaginary,
        };
        if changes {
            *byte ^= 0x80;
        }
    }
}

/// Floating-point dtypes that are cast, with the bits of their exponents and of their fractions.
const FLOATS: [(DType, u32, u32); 6] = [
    (DType::FLOAT16, 5, 10),
    (DType::BFLOAT16, 8, 7),
    (DType::FLOAT32, 8, 23),
    (DType::FLOAT64, 11, 52),
    (DType::FLOAT8_E4M3FN, 4, 3),
    (DType::FLOAT8_E5M2, 5, 2),
];

/// A floating-point format: bits of one element, of its exponent and of its fraction.
#[derive(Clone, Copy)]
struct Format {
    bits: u32,
    exponent: u32,
    fraction: u32,
    /// Without its sign, the element after the largest finite one. It is infinity, or NaN where there is no infinity.
    top: u64,
}

impl Format {
    fn of(dtype: DType) -> Self {
        let known = FLOATS.into_iter().find(|(known, ..)| *known == dtype);
        let (_, exponent, fraction) = known.expect("only floats are cast");
        let all = (1u64 << exponent) - 1;
        // It has no infinity: all exponents are those of numbers, and all bits together are NaN.
        let top = if dtype == DType::FLOAT8_E4M3FN { 0x7f } else { all << fraction };
        Self { bits: 1 + exponent + fraction, exponent, fraction, top }
    }

    fn sign(self) -> u64 {
        1 << (self.bits - 1)
    }

    fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    fn has_infinity(self) -> bool {
        self.top & ((1 << self.fraction) - 1) == 0
    }

    /// Whether an element is NaN.
    fn is_nan(self, element: u64) -> bool {
        let magnitude = element & !self.sign();
        magnitude > self.top || (magnitude == self.top && !self.has_infinity())
    }

    /// The value of an element without its sign; of [`top`](Self::top) what would follow the largest finite one.
    fn value(self, magnitude: u64) -> f64 {
        let raw = (magnitude >> self.fraction) as i32;
        let part = (magnitude & ((1 << self.fraction) - 1)) as f64 / (1u64 << self.fraction) as f64;
        let bias = self.bias();
        if raw == 0 { part * 2f64.powi(1 - bias) } else { (1.0 + part) * 2f64.powi(raw - bias) }
    }
}

fn bits(element: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(element);
    u64::from_le_bytes(bytes)
}

/// Returns whether the element of a floating dtype is NaN. `false` for other dtypes.
pub fn is_nan(dtype: DType, element: &[u8]) -> bool {
    FLOATS.iter().any(|(known, ..)| *known == dtype) && Format::of(dtype).is_nan(bits(element))
}

/// Returns one element, cast to the nearest of another dtype; of two as near, the one whose last bit is 0. What is too
/// large becomes infinite, or NaN where the dtype has no infinity. A float64 is rounded to float32 first, as PyTorch
/// rounds it.
///
/// # Panics
///
/// For a dtype that is not cast.
pub fn cast(from: DType, to: DType, element: &[u8]) -> Vec<u8> {
    if from == DType::FLOAT64 && to != DType::FLOAT32 && to != from {
        return cast(DType::FLOAT32, to, &cast(from, DType::FLOAT32, element));
    }
    if from == to {
        return element.to_vec();
    }
    let (source, target) = (Format::of(from), Format::of(to));
    let element = bits(element);
    let (sign, magnitude) = (element & source.sign(), element & !source.sign());
    let nearest = if source.is_nan(element) {
        target.top | 1
    } else if source.has_infinity() && magnitude == source.top {
        target.top
    } else {
        let exact = source.value(magnitude);
        // Without their sign, elements are ordered as their bits are.
        let (mut below, mut above) = (0, target.top);
        while above - below > 1 {
            let middle = below + (above - below) / 2;
            if target.value(middle) <= exact { below = middle } else { above = middle }
        }
        let (down, up) = (exact - target.value(below), target.value(above) - exact);
        if up < down || (up == down && below & 1 == 1) { above } else { below }
    };
    let signed = nearest | if sign == 0 { 0 } else { target.sign() };
    signed.to_le_bytes()[..itemsize(to)].to_vec()
}

/// Returns `count` elements of a floating dtype that casts treat differently: of every size that a narrower dtype has
/// and beyond, on and next to the middle between two of its elements, subnormal, infinite, NaN and zero.
///
/// # Panics
///
/// For a dtype that is not cast.
pub fn floats(dtype: DType, count: usize, random: &mut Random) -> Vec<u8> {
    let format = Format::of(dtype);
    let all = (1u64 << format.exponent) - 1;
    let mut bytes = Vec::with_capacity(count * itemsize(dtype));
    for _ in 0..count {
        let fraction = random.bits() & ((1 << format.fraction) - 1);
        let magnitude = match random.below(16) {
            0 => 0,
            1 => 1,
            2 => format.top,
            3 => format.top - 1,
            4 => format.top | fraction,
            5 => fraction,
            6 => random.bits() & (format.sign() - 1),
            number => {
                let exponent = (format.bias() + random.below(40) as i32 - 20).clamp(0, all as i32) as u64;
                // Few bits of the fraction: many of these are ties.
                let kept =
                    if number < 12 { random.below(format.fraction as usize + 1) as u32 } else { format.fraction };
                exponent << format.fraction | fraction >> (format.fraction - kept) << (format.fraction - kept)
            }
        };
        let signed = (magnitude & (format.sign() - 1)) | if random.below(2) == 0 { 0 } else { format.sign() };
        bytes.extend_from_slice(&signed.to_le_bytes()[..itemsize(dtype)]);
    }
    bytes
}

/// Returns the elements of the view in row-major order, from its base buffer.
pub fn elements(spec: &Spec, base: &[u8]) -> Vec<u8> {
    let size = itemsize(spec.dtype);
    let mut bytes = Vec::with_capacity(numel(&spec.shape) * size);
    let (places, len) = runs(&spec.shape, &spec.strides);
    for place in places {
        let at = (spec.offset as i64 + place) as usize * size;
        bytes.extend_from_slice(&base[at..at + len * size]);
    }
    resolve(spec.dtype, spec.pending, &mut bytes);
    bytes
}

/// Writes `elements`, in row-major order, through the view into its base buffer.
pub fn scatter(spec: &Spec, base: &mut [u8], elements: &[u8]) {
    let size = itemsize(spec.dtype);
    let (places, len) = runs(&spec.shape, &spec.strides);
    for (i, place) in places.into_iter().enumerate() {
        let at = (spec.offset as i64 + place) as usize * size;
        base[at..at + len * size].copy_from_slice(&elements[i * len * size..][..len * size]);
    }
}

/// Returns a compact tensor of the same shape, which fills its base buffer.
pub fn compact(spec: &Spec) -> Spec {
    Spec::compact(spec.dtype, &spec.shape)
}

/// Returns the strides, in elements, of a compact row-major tensor.
pub fn row_major(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    strides
}

/// The expected outcome of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// It converts in place.
    InPlace,
    /// It converts as a copy.
    Copied,
    /// It is refused.
    Refused(ErrorKind),
}

/// Returns the expected outcome of a transfer between two frameworks, by their profiles.
pub fn expected(
    tensor: &Observed,
    pending: Option<Pending>,
    (source, target): (&Profile, &Profile),
    copy: Option<bool>,
) -> Expected {
    if !target.devices.contains(&tensor.device.kind) {
        return Expected::Refused(ErrorKind::Device);
    }
    if ![source, target].iter().all(|profile| profile.dtypes.contains(&tensor.dtype)) {
        return Expected::Refused(ErrorKind::Dtype);
    }
    if !target.rank.contains(&tensor.shape.len()) {
        return Expected::Refused(ErrorKind::Layout);
    }
    let lost = tensor.read_only && !target.keeps_read_only;
    match (copy, pending.is_none() && !target.owns_memory && fits(tensor, target)) {
        (Some(true), _) | (None, false) => Expected::Copied,
        (Some(false), false) => Expected::Refused(ErrorKind::CopyNeeded),
        (_, true) if lost => Expected::Refused(ErrorKind::ReadOnly),
        (_, true) => Expected::InPlace,
    }
}

/// Returns the alignment that an element has in this framework.
pub fn natural(dtype: DType, framework: &Profile) -> usize {
    let parts = if framework.complex_by_parts && dtype.is_complex() { 2 } else { 1 };
    1 << (itemsize(dtype) / parts).trailing_zeros()
}

fn fits(tensor: &Observed, target: &Profile) -> bool {
    let count = numel(&tensor.shape);
    let mut meant = tensor.shape.iter().zip(&tensor.strides).filter(|(length, _)| **length > 1);
    let strides = match target.strides {
        Strides::Any => true,
        Strides::NonNegative => meant.all(|(_, stride)| *stride >= 0),
        Strides::Compact => places(&tensor.shape, &tensor.strides).into_iter().eq(0..count as i64),
        other => unreachable!("the model lacks {other:?}"),
    };
    let aligned =
        target.alignment == 0 || tensor.address.is_multiple_of(target.alignment.max(natural(tensor.dtype, target)));
    count == 0 || strides && aligned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(dtype: DType, shape: &[i64], strides: &[i64], offset: usize, base: usize) -> Spec {
        Spec { strides: strides.into(), offset, base, ..Spec::compact(dtype, shape) }
    }

    #[test]
    fn a_view_reads_and_writes_the_elements_it_names() {
        let view = spec(DType::UINT16, &[2, 2], &[-3, 1], 3, 5);
        let mut base: Vec<u8> = (0..10).collect();
        assert_eq!(elements(&view, &base), [6, 7, 8, 9, 0, 1, 2, 3]);
        scatter(&view, &mut base, &[60, 70, 80, 90, 0, 10, 20, 30]);
        assert_eq!(base, [0, 10, 20, 30, 4, 5, 60, 70, 80, 90]);
        assert!(elements(&spec(DType::UINT8, &[0, 3], &[3, 1], 0, 0), &[]).is_empty());
        assert!(elements(&spec(DType::UINT8, &[3, 0], &[4, 1], 0, 0), &[]).is_empty());
        assert_eq!(elements(&spec(DType::UINT8, &[], &[], 1, 2), &[4, 5]), [5]);
        assert_eq!(elements(&spec(DType::UINT8, &[2, 2], &[1, 0], 0, 2), &[4, 5]), [4, 4, 5, 5]);
    }

    #[test]
    fn casts_are_to_the_nearest() {
        use DType as D;
        let narrowed = |value: f64| cast(D::FLOAT64, D::FLOAT32, &value.to_le_bytes());
        for value in [0.0, -1.0, 0.1, -3.0e-40, 16_777_217.0, 16_777_219.0, 32.501960784313725] {
            assert_eq!(narrowed(value), (value as f32).to_le_bytes(), "{value}");
            let single = value as f32;
            assert_eq!(cast(D::FLOAT32, D::FLOAT64, &single.to_le_bytes()), f64::from(single).to_le_bytes(), "{value}");
        }
        // From the definitions of the formats.
        assert_eq!(cast(D::FLOAT32, D::FLOAT16, &65_504f32.to_le_bytes()), [0xff, 0x7b]);
        assert_eq!(cast(D::FLOAT32, D::FLOAT16, &(-2f32.powi(-24)).to_le_bytes()), [0x01, 0x80]);
        assert_eq!(cast(D::FLOAT32, D::BFLOAT16, &(257.0f32 / 256.0).to_le_bytes()), [0x80, 0x3f], "even");
        assert_eq!(cast(D::FLOAT32, D::BFLOAT16, &(259.0f32 / 256.0).to_le_bytes()), [0x82, 0x3f], "even");
        assert_eq!(cast(D::FLOAT16, D::FLOAT8_E4M3FN, &[0x00, 0x5f]), [0x7e], "448");
        assert_eq!(cast(D::FLOAT8_E5M2, D::FLOAT8_E4M3FN, &[0x3f]), [0x3e], "1.75");
    }

    #[test]
    fn deferred_operations_flip_signs() {
        let one = 1f32.to_le_bytes();
        let mut bytes = [one, one].concat();
        resolve(DType::COMPLEX64, Some(Pending::Conjugation), &mut bytes);
        assert_eq!(bytes, [one, (-1f32).to_le_bytes()].concat());
        resolve(DType::FLOAT32, Some(Pending::Negation), &mut bytes);
        assert_eq!(bytes, [(-1f32).to_le_bytes(), one].concat());
    }

    #[test]
    fn random_bytes_hold_nan_payloads_and_only_true_bools() {
        let floats = random_bytes(&spec(DType::FLOAT16, &[9000], &[1], 0, 9000), 3);
        assert!(floats.chunks(2).any(|half| half[1] & 0x7c == 0x7c && half[0] != 0));
        let bools = random_bytes(&spec(DType::BOOL, &[99], &[1], 0, 99), 3);
        assert!(bools.iter().all(|byte| *byte < 2) && bools.contains(&0) && bools.contains(&1));
        let negated = Spec { pending: Some(Pending::Negation), ..spec(DType::FLOAT32, &[9000], &[1], 0, 9000) };
        let finite = |four: &[u8]| f32::from_le_bytes([four[0], four[1], four[2], four[3]]).is_finite();
        assert!(random_bytes(&negated, 3).chunks(4).all(finite));
    }
}
