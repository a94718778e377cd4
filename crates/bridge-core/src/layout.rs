//! Shape, strides and offset, checked once.

use crate::{DType, Dims, Error, ErrorKind, MAX_NDIM, Order, Pending, Result};
use smallvec::SmallVec;
use std::fmt;
use std::ops::Range;

/// Lengths and strides that a layout holds inline: those of four dimensions.
const INLINE: usize = 8;

/// How the elements of a view lie in a buffer.
///
/// Only [`Layout::new`] makes one, and it checks the arithmetic, so that nothing later can overflow.
///
/// Strides of dimensions of length 1 address nothing, and neither do those of a view without elements. Frameworks still
/// read meaning from them: PyTorch recognises channels-last tensors by them. So they are kept as the producer stated
/// them, except that the strides of a compact view replace negative ones and those that overflow in bytes. Comparison
/// ignores them: two layouts that describe the same view are equal.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The shape, and then the strides.
    dims: SmallVec<[i64; INLINE]>,
    offset: usize,
    itemsize: usize,
    numel: usize,
    /// Bytes below and above the first element that the view reaches.
    byte_extent: (usize, usize),
}

impl Layout {
    /// Makes the layout of a view of `shape`. In dimension `d`, neighbours are `strides[d]` elements (signed) apart;
    /// without `strides` the view is compact and row-major. The first element is `offset` bytes into the buffer.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`] for a negative length, for more or fewer strides than dimensions, for more than
    /// [`MAX_NDIM`] dimensions, and for sizes that overflow; [`ErrorKind::Dtype`] for an element that is not a whole
    /// number of bytes.
    pub fn new(dtype: DType, shape: &[i64], strides: Option<&[i64]>, offset: usize) -> Result<Self> {
        let layout = match strides {
            None => Self::measured(dtype, shape, offset, |_, compact| compact),
            Some(strides) if strides.len() == shape.len() => Self::measured(dtype, shape, offset, |d, _| strides[d]),
            Some(_) => None,
        };
        layout.ok_or_else(|| refusal(dtype, shape, strides))
    }

    /// Checks and measures, in one pass. `stride` returns the stride of a dimension, in elements; it receives the number
    /// of the dimension, and the stride of a compact view. `None` where [`refusal`] has a reason.
    #[inline]
    fn measured(dtype: DType, shape: &[i64], offset: usize, stride: impl Fn(usize, i64) -> i64) -> Option<Self> {
        let (itemsize, ndim) = (dtype.itemsize()?, shape.len());
        let mut dims = match 2 * ndim {
            _ if ndim > MAX_NDIM => return None,
            few @ 0..=INLINE => SmallVec::from_buf_and_len([0; INLINE], few),
            many => SmallVec::from_elem(0, many),
        };
        let (lengths, strides) = dims.split_at_mut(ndim);
        let is_empty = shape.contains(&0);
        // In elements: how many there are, but for lengths of 0, and how far from the first one the view reaches.
        let (mut numel, mut below, mut above) = (1_i64, 0_i64, 0_i64);
        for (d, ((length, kept), &stated)) in lengths.iter_mut().zip(strides).zip(shape).enumerate().rev() {
            let (compact, stride) = (numel, stride(d, numel));
            (*length, *kept) = (stated, stride);
            if stated > 1 {
                numel = numel.checked_mul(stated)?;
            }
            if stated > 1 && !is_empty {
                let span = stride.checked_mul(stated - 1)?;
                match span < 0 {
                    true => below = below.checked_sub(span)?,
                    false => above = above.checked_add(span)?,
                }
            } else if stated < 0 {
                return None;
            } else if stride < 0 || in_bytes(stride, itemsize).is_none() {
                *kept = compact;
            }
        }
        in_bytes(numel, itemsize)?;
        if is_empty {
            return Some(Self { dims, offset, itemsize, numel: 0, byte_extent: (0, 0) });
        }
        // With the first element, so that the whole extent stays below 2^63.
        in_bytes(below.checked_add(above)?.checked_add(1)?, itemsize)?;
        let byte_extent = (below as usize * itemsize, above as usize * itemsize + itemsize);
        Some(Self { dims, offset, itemsize, numel: numel as usize, byte_extent })
    }

    /// As [`new`](Self::new), from strides in bytes, as NumPy and the array interfaces have them.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and [`ErrorKind::Layout`] for a stride that is not a whole number of elements and
    /// addresses something.
    pub fn from_byte_strides(dtype: DType, shape: &[i64], byte_strides: &[i64]) -> Result<Self> {
        Self::of_bytes(dtype, shape, byte_strides).unwrap_or_else(|| {
            let itemsize = dtype.itemsize().unwrap_or(1);
            Err(malformed(format!(
                "strides {byte_strides:?} (bytes) are not a whole number of elements of {itemsize} bytes: make a compact copy first, as numpy.ascontiguousarray and cupy.ascontiguousarray do"
            )))
        })
    }

    /// As [`from_byte_strides`](Self::from_byte_strides), for a producer that can copy a tensor whose strides are not a
    /// whole number of elements ([`Adapter::compact`](crate::Adapter::compact)). Such a tensor has a layout that repeats
    /// its first element, and [`Pending::Packing`].
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn from_any_byte_strides(dtype: DType, shape: &[i64], byte_strides: &[i64]) -> Result<(Self, Option<Pending>)> {
        match Self::of_bytes(dtype, shape, byte_strides) {
            Some(layout) => Ok((layout?, None)),
            None => {
                let repeated = Dims::from_elem(0, byte_strides.len());
                Ok((Self::new(dtype, shape, Some(&repeated), 0)?, Some(Pending::Packing)))
            }
        }
    }

    /// As [`new`](Self::new), from strides in bytes; `None` where one is not a whole number of elements and addresses
    /// something.
    fn of_bytes(dtype: DType, shape: &[i64], byte_strides: &[i64]) -> Option<Result<Self>> {
        let itemsize = dtype.itemsize().map_or(1, |itemsize| itemsize as i64);
        // Division is slow, and nearly every size is a power of two.
        let is_power = itemsize.unsigned_abs().is_power_of_two();
        let is_whole = |bytes: i64| if is_power { bytes & (itemsize - 1) == 0 } else { bytes % itemsize == 0 };
        let are_whole = byte_strides.iter().all(|bytes| is_whole(*bytes));
        let addresses = |d| shape.get(d) != Some(&1) && !shape.contains(&0);
        if !are_whole && byte_strides.iter().enumerate().any(|(d, bytes)| !is_whole(*bytes) && addresses(d)) {
            return None;
        }
        let in_elements = |bytes: i64| match are_whole || is_whole(bytes) {
            true if is_power => bytes >> itemsize.trailing_zeros(),
            true => bytes / itemsize,
            false => 0,
        };
        let layout = match byte_strides.len() == shape.len() {
            true => Self::measured(dtype, shape, 0, |d, _| in_elements(byte_strides[d])),
            false => None,
        };
        Some(layout.ok_or_else(|| {
            let strides: Dims = byte_strides.iter().map(|bytes| in_elements(*bytes)).collect();
            refusal(dtype, shape, Some(&strides))
        }))
    }

    /// Returns the lengths, in elements.
    pub fn shape(&self) -> &[i64] {
        &self.dims[..self.dims.len() / 2]
    }

    /// Returns the strides, in elements, signed. Those that address nothing are as the producer stated them (see the
    /// type).
    pub fn strides(&self) -> &[i64] {
        &self.dims[self.dims.len() / 2..]
    }

    /// Returns the bytes from the start of the buffer to the first element.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Returns the bytes of a compact copy.
    pub fn nbytes(&self) -> usize {
        self.numel * self.itemsize
    }

    /// Returns the bytes of one element.
    pub fn itemsize(&self) -> usize {
        self.itemsize
    }

    /// Returns how many bytes `(below, above)` the start of the first element the view may touch.
    pub fn byte_extent(&self) -> (usize, usize) {
        self.byte_extent
    }

    /// Returns the bytes of the buffer that the view may touch, or `None` if it begins before the buffer.
    pub fn extent(&self) -> Option<Range<usize>> {
        Some(self.offset.checked_sub(self.byte_extent.0)?..self.offset.checked_add(self.byte_extent.1)?)
    }

    /// Returns the addresses that a view with its first element at address `data` may touch: the smallest buffer that
    /// holds it. An adapter exports these bytes where the framework does not say which allocation is the tensor's own.
    /// `allocation`, where the caller knows one, must hold them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`] for a view with elements that has a null address or leaves the address space or
    /// `allocation`.
    pub fn extent_at(&self, data: usize, allocation: Option<&Range<usize>>) -> Result<Range<usize>> {
        if self.numel == 0 {
            return Ok(data..data);
        }
        let (below, above) = self.byte_extent;
        let extent = data.checked_sub(below).zip(data.checked_add(above)).filter(|_| data != 0);
        let (start, end) = extent.ok_or_else(|| {
            malformed(format!("a view with {self} at address {data:#x} leaves the address space: check its strides"))
        })?;
        match allocation {
            Some(memory) if start < memory.start || end > memory.end => Err(malformed(format!(
                "the tensor reaches outside its allocation, which may have become smaller ({self}, at address {data:#x}): check its strides, or make it again"
            ))),
            _ => Ok(start..end),
        }
    }

    /// Returns the same view with its first element `offset` bytes into its buffer.
    pub(crate) fn at(mut self, offset: usize) -> Self {
        self.offset = offset;
        self
    }

    /// Returns the same elements with these dimensions, each of which is named once.
    pub(crate) fn rearranged(&self, dimensions: &[i64]) -> Self {
        let pick = |dims: &'_ [i64]| -> Dims { dimensions.iter().map(|d| dims[*d as usize]).collect() };
        Self { dims: pick(self.shape()).iter().chain(pick(self.strides()).iter()).copied().collect(), ..*self }
    }

    /// Returns whether all strides are those of a compact, row-major view, those that address nothing included.
    pub fn has_compact_strides(&self) -> bool {
        *self.strides() == *Order::RowMajor.strides(self.shape())
    }

    /// Returns whether the elements follow one another in row-major order without a gap.
    pub fn is_compact(&self) -> bool {
        self.follows(Order::RowMajor)
    }

    /// Returns whether the elements follow one another in this order without a gap.
    pub fn follows(&self, order: Order) -> bool {
        let mut expected = 1;
        let mut fits = |(&length, &stride): (&i64, &i64)| {
            let fits = length == 1 || stride == expected;
            expected *= length;
            fits
        };
        let mut dims = self.shape().iter().zip(self.strides());
        self.numel() == 0
            || match order {
                Order::RowMajor => dims.rev().all(fits),
                Order::ColumnMajor => dims.all(&mut fits),
            }
    }

    /// Returns whether any stride is negative.
    pub fn has_negative_strides(&self) -> bool {
        self.strides().iter().any(|stride| *stride < 0)
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        let meant = |layout: &Self| -> Dims {
            let addresses = |length: i64| layout.numel > 0 && length > 1;
            layout
                .shape()
                .iter()
                .zip(layout.strides())
                .map(|(l, stride)| if addresses(*l) { *stride } else { 0 })
                .collect()
        };
        (self.shape(), self.offset, self.itemsize) == (other.shape(), other.offset, other.itemsize)
            && meant(self) == meant(other)
    }
}

impl Eq for Layout {}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shape {:?}, strides {:?}, offset {} bytes", self.shape(), self.strides(), self.offset)
    }
}

/// Returns the bytes of so many elements, if they are fewer than 2^63: more than that no object has, in Rust or in C.
fn in_bytes(elements: i64, itemsize: usize) -> Option<i64> {
    elements.checked_mul(itemsize as i64)
}

/// Returns the error that says why this dtype, shape and strides are refused.
#[cold]
fn refusal(dtype: DType, shape: &[i64], strides: Option<&[i64]>) -> Error {
    let Some(itemsize) = dtype.itemsize() else {
        let text = format!("elements of dtype {dtype} are not whole bytes: unpack it first, or view it as uint8");
        return Error::new(ErrorKind::Dtype, text);
    };
    let mut lengths = shape.iter().filter(|length| **length > 1);
    let numel = lengths.try_fold(1_i64, |numel, length| numel.checked_mul(*length));
    malformed(if shape.len() > MAX_NDIM {
        format!("{} dimensions are more than {MAX_NDIM}", shape.len())
    } else if let Some(length) = shape.iter().find(|length| **length < 0) {
        format!("length {length} in the shape is negative")
    } else if strides.is_some_and(|strides| strides.len() != shape.len()) {
        "the shape and the strides differ in length".into()
    } else if numel.is_none_or(|numel| in_bytes(numel, itemsize).is_none()) {
        format!("shape {shape:?} of {dtype} overflows 2^63 bytes")
    } else {
        let strides = strides.unwrap_or(&[]);
        format!("strides {strides:?} with shape {shape:?} reach further than 2^63 bytes")
    })
}

#[cold]
fn malformed(text: String) -> Error {
    Error::new(ErrorKind::Layout, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout(shape: &[i64], strides: &[i64], offset: usize) -> Result<Layout> {
        Layout::new(DType::FLOAT32, shape, Some(strides), offset)
    }

    #[test]
    fn strides_without_meaning_are_kept_where_a_framework_can_hold_them() {
        let odd = layout(&[1, 3, 1], &[-77, 1, i64::MIN], 0).unwrap();
        assert_eq!(odd, Layout::new(DType::FLOAT32, &[1, 3, 1], None, 0).unwrap());
        assert!(odd.is_compact() && odd.has_compact_strides() && !odd.has_negative_strides());
        let channels_last = layout(&[2, 3, 1, 1], &[3, 1, 3, 3], 0).unwrap();
        assert_eq!(channels_last.strides(), [3, 1, 3, 3]);
        assert!(channels_last.is_compact() && !channels_last.has_compact_strides());
        assert_eq!(channels_last, Layout::new(DType::FLOAT32, &[2, 3, 1, 1], None, 0).unwrap());
        let most = i64::MAX / 4;
        assert_eq!(layout(&[1, 1], &[most, most + 1], 0).unwrap().strides(), [most, 1]);
        let empty = layout(&[4, 0, 2], &[i64::MAX, -1, 9], 0).unwrap();
        assert!(empty.is_compact() && empty.extent() == Some(0..0));
        assert_eq!(empty.strides(), [2, 2, 9]);
        assert_eq!(empty, layout(&[4, 0, 2], &[7, 7, 7], 0).unwrap());
        assert_ne!(layout(&[2, 2], &[2, 1], 0).unwrap(), layout(&[2, 2], &[3, 1], 0).unwrap());
        assert_ne!(layout(&[4], &[1], 0).unwrap(), layout(&[4], &[1], 4).unwrap());
        assert_ne!(layout(&[4], &[1], 0).unwrap(), layout(&[2], &[1], 0).unwrap());
        assert_ne!(layout(&[4], &[1], 0).unwrap(), Layout::new(DType::INT64, &[4], Some(&[1]), 0).unwrap());
    }

    #[test]
    fn the_strides_of_an_order_follow_it() {
        for shape in [&[2, 3, 4][..], &[], &[5], &[0, 3], &[1, 1]] {
            for (order, other) in [(Order::RowMajor, Order::ColumnMajor), (Order::ColumnMajor, Order::RowMajor)] {
                let compact = layout(shape, &order.strides(shape), 0).unwrap();
                assert!(compact.follows(order), "{order} {shape:?}");
                let both = shape.iter().filter(|length| **length > 1).count() < 2 || shape.contains(&0);
                assert_eq!(compact.follows(other), both, "{order} {shape:?}");
                assert!(compact.reversed().follows(other));
            }
        }
        assert_eq!(*Order::RowMajor.strides(&[2, 0, 3]), [3, 3, 1]);
        assert_eq!(*Order::ColumnMajor.strides(&[2, 0, 3]), [1, 2, 2]);
        assert!(!layout(&[2, 3], &[6, 2], 0).unwrap().follows(Order::RowMajor), "gaps");
    }

    #[test]
    fn a_layout_says_what_it_was_made_of() {
        let view = layout(&[2, 3], &[-4, 1], 40).unwrap();
        assert_eq!((view.shape(), view.strides(), view.offset()), (&[2, 3][..], &[-4, 1][..], 40));
        assert_eq!((view.numel(), view.itemsize(), view.nbytes()), (6, 4, 24));
        assert_eq!((view.byte_extent(), view.extent()), ((16, 12), Some(24..52)));
        assert_eq!(view.to_string(), "shape [2, 3], strides [-4, 1], offset 40 bytes");
        let compact = Layout::new(DType::FLOAT32, &[2, 3, 4], None, 0).unwrap();
        assert_eq!((compact.strides(), compact.nbytes()), (&[12, 4, 1][..], 96));
        let broadcast = layout(&[2, 3], &[0, 1], 0).unwrap();
        assert!(view.has_negative_strides() && !broadcast.has_negative_strides());
        assert!(compact.is_compact() && !broadcast.is_compact());
    }

    #[test]
    fn the_whole_extent_is_below_2_to_the_63() {
        let bytes = |strides: &[i64], shape: &[i64]| Layout::new(DType::UINT8, shape, Some(strides), 0);
        let refused = bytes(&[i64::MAX], &[2]).unwrap_err().to_string();
        assert_eq!(refused, format!("strides [{}] with shape [2] reach further than 2^63 bytes", i64::MAX));
        assert_eq!(bytes(&[i64::MAX - 1], &[2]).unwrap().byte_extent(), (0, i64::MAX as usize));
        assert!(bytes(&[-(1 << 62), 1 << 62], &[2, 2]).is_err(), "both sides together");
        assert!(bytes(&[-(1 << 62), (1 << 62) - 2], &[2, 2]).is_ok());
    }

    #[test]
    fn reversed_views_reach_below_their_first_element() {
        let reversed = layout(&[4, 2], &[2, -1], 4).unwrap();
        assert_eq!(reversed.extent(), Some(0..32));
        assert_eq!(layout(&[4, 2], &[2, -1], 0).unwrap().extent(), None);
        assert_eq!(layout(&[4, 2], &[2, -1], 0).unwrap().extent_at(100, None).unwrap(), 96..128);
    }

    #[test]
    fn an_extent_lies_in_the_address_space_and_in_the_allocation() {
        let reversed = layout(&[2, 3], &[3, -1], 0).unwrap();
        let extent = |data, allocation: Option<Range<usize>>| reversed.extent_at(data, allocation.as_ref()).ok();
        assert_eq!(extent(100, Some(92..116)), Some(92..116));
        assert_eq!((extent(100, Some(93..116)), extent(100, Some(92..115))), (None, None));
        assert_eq!((extent(7, None), extent(usize::MAX - 8, None), extent(0, None)), (None, None, None));
        let empty = layout(&[0, 3], &[3, 1], 0).unwrap();
        assert_eq!(empty.extent_at(usize::MAX, Some(&(0..1))).unwrap(), usize::MAX..usize::MAX);
    }

    #[test]
    fn byte_strides_are_whole_elements_where_they_address_something() {
        let of = |shape: &[i64], strides: &[i64]| Layout::from_byte_strides(DType::FLOAT32, shape, strides);
        assert_eq!(of(&[2, 3], &[12, -4]).unwrap().strides(), [3, -1]);
        assert_eq!(of(&[1, 3], &[5, 4]).unwrap().strides(), [0, 1]);
        assert!(of(&[3, 0], &[5, 4]).is_ok() && of(&[3], &[8, 4]).is_err());
        assert_eq!(of(&[2, 3], &[5, 4]).unwrap_err().kind(), ErrorKind::Layout);
        for (lanes, fits, breaks) in [(3, [24, 12], [16, 12]), (1, [8, 4], [6, 4])] {
            let of =
                |strides: [i64; 2]| Layout::from_byte_strides(DType { lanes, ..DType::FLOAT32 }, &[2, 2], &strides);
            assert_eq!(of(fits).unwrap().strides(), [2, 1], "{lanes} lanes");
            assert_eq!(of(breaks).unwrap_err().kind(), ErrorKind::Layout, "{lanes} lanes");
        }
        let packed = Layout::from_byte_strides(DType::FLOAT4_E2M1FN, &[2], &[1]);
        assert_eq!(packed.unwrap_err().kind(), ErrorKind::Dtype);
    }

    /// A view with strides that no layout states touches only its first element, so that nothing reads beyond it.
    #[test]
    fn other_byte_strides_are_packed_by_the_producer() {
        let of = |shape: &[i64], strides: &[i64]| Layout::from_any_byte_strides(DType::FLOAT32, shape, strides);
        let (layout, pending) = of(&[2, 3], &[15, 5]).unwrap();
        assert_eq!((layout.shape(), layout.strides(), pending), (&[2, 3][..], &[0, 0][..], Some(Pending::Packing)));
        assert_eq!((layout.byte_extent(), layout.nbytes()), ((0, 4), 24));
        let whole = of(&[2, 3], &[12, 4]).unwrap();
        assert_eq!((whole.0.strides(), whole.1), (&[3, 1][..], None));
        assert_eq!(of(&[1 << 61, 2], &[5, 4]).unwrap_err().kind(), ErrorKind::Layout);
    }

    #[test]
    fn nonsense_is_refused() {
        for (shape, strides) in [
            (&[-1][..], &[1][..]),
            (&[2, 2], &[1]),
            (&[1 << 32, 1 << 31], &[1, 1]),
            (&[1 << 32, 0, 1 << 32], &[1, 1, 1]),
            (&[3], &[i64::MAX]),
            (&[3], &[i64::MIN]),
            (&[2, 2, 2], &[1 << 60, 1 << 60, 1 << 60]),
            (&[1; 65], &[1; 65]),
        ] {
            assert_eq!(layout(shape, strides, 0).unwrap_err().kind(), ErrorKind::Layout, "{shape:?} {strides:?}");
        }
        let packed = Layout::new(DType::FLOAT4_E2M1FN, &[2], None, 0);
        assert_eq!(packed.unwrap_err().kind(), ErrorKind::Dtype);
        let why = |shape: &[i64], strides: &[i64]| layout(shape, strides, 0).unwrap_err().to_string();
        assert_eq!(why(&[i64::MAX, -1, i64::MAX], &[1]), "length -1 in the shape is negative", "before all else");
        assert_eq!(why(&[i64::MAX], &[]), "the shape and the strides differ in length");
        assert_eq!(why(&[1 << 61, 1], &[0, 0]), format!("shape [{}, 1] of float32 overflows 2^63 bytes", 1_i64 << 61));
        assert_eq!(layout(&[2], &[1], usize::MAX).unwrap().extent(), None);
    }

    proptest! {
        /// The extent is exactly the range of the bytes that the elements occupy.
        #[test]
        fn extent_has_the_bytes_of_the_elements_and_no_others(dims in prop::collection::vec((0i64..4, -5i64..6), 0..4)) {
            let (shape, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
            let layout = layout(&shape, &strides, 10_000).unwrap();
            let mut starts = vec![10_000i64];
            for (&length, &stride) in shape.iter().zip(&strides) {
                starts = starts.iter().flat_map(|at| (0..length).map(move |i| at + i * stride * 4)).collect();
            }
            prop_assert_eq!(layout.numel(), starts.len());
            let extent = match (starts.iter().min(), starts.iter().max()) {
                (Some(&low), Some(&high)) => low as usize..high as usize + 4,
                _ => 10_000..10_000,
            };
            prop_assert_eq!(layout.extent(), Some(extent));
        }

        /// No input makes the arithmetic overflow or panic.
        #[test]
        fn any_numbers_are_judged(dims in prop::collection::vec((any::<i64>(), any::<i64>()), 0..5), offset: usize) {
            let (shape, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
            if let Ok(layout) = layout(&shape, &strides, offset) {
                let _ = (layout.extent(), layout.is_compact(), layout.extent_at(offset, None).is_ok());
            }
        }
    }
}
