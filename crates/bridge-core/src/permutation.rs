//! Permutations of dimensions.

use crate::planted::is_planted;
use crate::{Dims, Error, ErrorKind, Layout, MAX_NDIM, Result};

/// A permutation of dimensions: dimension `d` of the result is dimension `axes[d]` of the tensor. An axis below 0
/// counts from the last dimension, as in NumPy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    axes: [i8; MAX_NDIM],
    ndim: u8,
}

impl Permutation {
    /// Makes a permutation. Whether it fits a tensor is checked where it is applied.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for more than [`MAX_NDIM`] axes, and for an axis that no tensor has.
    pub fn new(axes: &[i64]) -> Result<Self> {
        let refused = || {
            let named = &axes[..axes.len().min(MAX_NDIM)];
            let rest = if named.len() < axes.len() { " and more" } else { "" };
            let text = format!(
                "the permutation {named:?}{rest} names dimensions that no tensor has: there are at most {MAX_NDIM}"
            );
            Error::new(ErrorKind::Argument, text)
        };
        let mut kept = [0; MAX_NDIM];
        for (d, axis) in axes.iter().enumerate() {
            let most = MAX_NDIM as i64;
            *kept.get_mut(d).filter(|_| (-most..most).contains(axis)).ok_or_else(refused)? = *axis as i8;
        }
        Ok(Self { axes: kept, ndim: axes.len() as u8 })
    }

    fn axes(&self) -> &[i8] {
        &self.axes[..usize::from(self.ndim)]
    }

    /// Returns the dimensions of a tensor with `ndim` dimensions in the order of the result.
    fn dimensions(&self, ndim: usize) -> Option<Dims> {
        let mut seen = 0u64;
        let axis = |axis: &i8| {
            let axis = i64::from(*axis);
            let dimension = if axis < 0 { axis + ndim as i64 } else { axis };
            let fits = (0..ndim as i64).contains(&dimension) && seen & 1 << dimension == 0;
            fits.then(|| {
                seen |= 1 << dimension;
                dimension
            })
        };
        let dimensions: Option<Dims> =
            if usize::from(self.ndim) == ndim { self.axes().iter().map(axis).collect() } else { None };
        if is_planted("core_permutation_inverted") {
            let at = |dims: &Dims, d: i64| dims.iter().position(|dim| *dim == d).map_or(0, |at| at as i64);
            return dimensions.map(|dims| (0..ndim as i64).map(|d| at(&dims, d)).collect());
        }
        dimensions
    }
}

impl Layout {
    /// Returns the same elements with permuted dimensions.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] unless the permutation names each dimension once.
    pub fn permuted(&self, permutation: &Permutation) -> Result<Self> {
        let ndim = self.shape().len();
        let dimensions = permutation.dimensions(ndim).ok_or_else(|| {
            let text = format!(
                "the permutation {:?} does not name each dimension of a tensor of shape {:?} once: pass {ndim} different axes",
                permutation.axes(),
                self.shape()
            );
            Error::new(ErrorKind::Argument, text)
        })?;
        Ok(self.rearranged(&dimensions))
    }

    /// Returns the same elements with the dimensions in reverse order: row-major becomes column-major.
    pub(crate) fn reversed(&self) -> Self {
        let dimensions: Dims = (0..self.shape().len() as i64).rev().collect();
        self.rearranged(&dimensions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn layout(shape: &[i64], strides: &[i64]) -> Layout {
        Layout::new(DType::FLOAT32, shape, Some(strides), 0).unwrap()
    }

    #[test]
    fn a_permutation_names_each_dimension_once() {
        let nchw = layout(&[2, 3, 4, 5], &[60, 20, 5, 1]);
        for axes in [[0, 2, 3, 1], [0, -2, -1, 1]] {
            let nhwc = nchw.permuted(&Permutation::new(&axes).unwrap()).unwrap();
            assert_eq!(nhwc, layout(&[2, 4, 5, 3], &[60, 5, 1, 20]));
            assert_eq!(nhwc.byte_extent(), nchw.byte_extent());
        }
        for axes in [&[0, 1, 2][..], &[0, 1, 2, 3, 4], &[0, 1, 2, 2], &[0, 1, 2, -2], &[0, 1, 2, 4], &[0, 1, 2, -5]] {
            let refused = nchw.permuted(&Permutation::new(axes).unwrap()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Argument, "{axes:?}");
        }
        for axes in [&[64][..], &[-65], &[i64::MAX], &[0; 65]] {
            assert_eq!(Permutation::new(axes).unwrap_err().kind(), ErrorKind::Argument);
        }
        assert!(layout(&[], &[]).permuted(&Permutation::new(&[]).unwrap()).is_ok());
        let most: Vec<i64> = (0..64).rev().collect();
        assert!(layout(&[1; 64], &[1; 64]).permuted(&Permutation::new(&most).unwrap()).is_ok());
    }
}
