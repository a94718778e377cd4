//! The order of elements in memory, and the strides that it gives.

use smallvec::SmallVec;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Lengths or strides of a few dimensions: a slice that is owned, inline up to four.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Dims(SmallVec<[i64; 4]>);

impl Dims {
    /// Returns `value` for each of `ndim` dimensions.
    pub fn from_elem(value: i64, ndim: usize) -> Self {
        Self(SmallVec::from_elem(value, ndim))
    }
}

impl Deref for Dims {
    type Target = [i64];

    #[inline]
    fn deref(&self) -> &[i64] {
        &self.0
    }
}

impl DerefMut for Dims {
    #[inline]
    fn deref_mut(&mut self) -> &mut [i64] {
        &mut self.0
    }
}

impl From<&[i64]> for Dims {
    #[inline]
    fn from(dims: &[i64]) -> Self {
        Self(dims.into())
    }
}

impl FromIterator<i64> for Dims {
    #[inline]
    fn from_iter<I: IntoIterator<Item = i64>>(dims: I) -> Self {
        Self(dims.into_iter().collect())
    }
}

/// The most dimensions of a view: those of NumPy, which allows more than the other frameworks.
pub const MAX_NDIM: usize = 64;

/// The order in which the elements of a compact tensor lie in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Order {
    /// The last index runs fastest: NumPy's `"C"`.
    #[default]
    RowMajor,
    /// The first index runs fastest: NumPy's `"F"`.
    ColumnMajor,
}

impl Order {
    /// Returns NumPy's letter for it.
    pub fn letter(self) -> &'static str {
        match self {
            Self::RowMajor => "C",
            Self::ColumnMajor => "F",
        }
    }

    /// Returns the strides, in elements, of a compact view of `shape`. Lengths of 0 count as 1, so nothing overflows
    /// for the shape of a [`Layout`](crate::Layout), which refuses others; for those the strides mean nothing.
    pub fn strides(self, shape: &[i64]) -> Dims {
        let mut strides = Dims::from_elem(1, shape.len());
        let mut next = 1_i64;
        let mut set = |d: usize| {
            strides[d] = next;
            next = i64::wrapping_mul(next, shape[d].max(1));
        };
        match self {
            Self::RowMajor => (0..shape.len()).rev().for_each(&mut set),
            Self::ColumnMajor => (0..shape.len()).for_each(&mut set),
        }
        strides
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::RowMajor => "row-major",
            Self::ColumnMajor => "column-major",
        })
    }
}
