//! A tensor and the one that it is copied into.

use crate::{Adapter, DType};

/// A tensor and the one that it is copied into, each with its adapter.
#[non_exhaustive]
pub struct Pair<'a, F, T> {
    /// The adapter of the source.
    pub from: &'a dyn Adapter<Tensor = F>,
    /// The source.
    pub tensor: &'a F,
    /// The adapter of the target.
    pub to: &'a dyn Adapter<Tensor = T>,
    /// The target.
    pub out: &'a T,
    /// The dtype to which a source of another one is cast: that of the target. `None` refuses dtypes that differ.
    pub dtype: Option<DType>,
}

crate::debug_fields!(impl['a, F, T] Pair<'a, F, T>);

impl<'a, F, T> Pair<'a, F, T> {
    /// Makes a pair whose dtypes must be the same.
    pub const fn new(
        from: &'a dyn Adapter<Tensor = F>,
        tensor: &'a F,
        to: &'a dyn Adapter<Tensor = T>,
        out: &'a T,
    ) -> Self {
        Self { from, tensor, to, out, dtype: None }
    }

    /// Returns the same pair with another [`dtype`](Self::dtype).
    #[must_use]
    pub const fn with_dtype(self, dtype: Option<DType>) -> Self {
        Self { dtype, ..self }
    }
}

impl<F, T> Clone for Pair<'_, F, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F, T> Copy for Pair<'_, F, T> {}
