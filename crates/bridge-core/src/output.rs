//! Memory for results that a program computes itself.

use crate::conversion::Conversion;
use crate::fresh::{fresh_beside, is_as_asked};
use crate::plan::fits_rank;
use crate::{
    Adapter, DType, Device, ErrorKind, Export, Layout, Options, Order, Ordering, Profile, Result, Stream, plan,
};
use std::sync::Arc;

/// Memory that a program writes a result to, before it becomes a tensor of a framework. [`output`] makes it.
///
/// Dropping it instead of calling [`finish`](Self::finish) returns the memory, after the work in
/// [`stream`](Self::stream).
#[must_use = "dropping it returns the memory: call finish"]
pub struct Output<'a, T> {
    to: &'a dyn Adapter<Tensor = T>,
    /// What `to` has stated when the memory was made.
    profile: &'a Profile,
    ordering: &'a Arc<dyn Ordering>,
    /// The tensor whose memory it is; `None` where a tensor is made of the memory at the end.
    tensor: Option<T>,
    exported: Export,
}

crate::debug_fields!(impl[T] Output<'_, T>: exported);

/// Returns memory for a tensor of `to` on `device`, compact in row-major order: of the framework's own allocator where
/// that can be written from outside ([`Adapter::empty`]), else memory of the host or of the driver's pool.
///
/// # Errors
///
/// [`ErrorKind::Dtype`], [`ErrorKind::Device`] and [`ErrorKind::Layout`] for what the framework does not take,
/// [`ErrorKind::CopyNeeded`] where neither the framework nor the ordering has memory on the device that the framework
/// takes in place, and those of its allocator and of the driver.
pub fn output<'a, T>(
    to: &'a dyn Adapter<Tensor = T>,
    ordering: &'a Arc<dyn Ordering>,
    device: Device,
    dtype: DType,
    shape: &[i64],
) -> Result<Output<'a, T>> {
    let profile = to.profile();
    fits_rank(shape.len(), profile)?;
    let device = device.of_one_host();
    // SAFETY: the caller of `finish` has written all elements.
    let own = match unsafe { to.empty(device, dtype, shape, Order::RowMajor) } {
        Ok(tensor) => Some((to.export(&tensor)?, tensor)),
        Err(error) if error.kind() == ErrorKind::CopyNeeded => None,
        Err(error) => return Err(error),
    };
    if let Some((exported, tensor)) =
        own.filter(|(exported, _)| is_as_asked(exported, device, (dtype, shape), Order::RowMajor))
    {
        return Ok(Output { to, profile, ordering, tensor: Some(tensor), exported });
    }
    let exported = fresh_beside((profile, &to.consumer()), ordering, device, (dtype, shape), Order::RowMajor)?;
    // No other tensor shares the memory.
    plan(&exported, profile, &Options { copy: Some(false), read_only: true, ..Options::default() })?;
    Ok(Output { to, profile, ordering, tensor: None, exported })
}

impl<T> Output<'_, T> {
    /// Returns a pointer to the first element, on the [`device`](Self::device). It may be null for a result without
    /// elements.
    pub fn as_ptr<E>(&self) -> *mut E {
        self.exported.as_ptr()
    }

    /// Returns the shape and the strides, in elements.
    pub fn layout(&self) -> &Layout {
        self.exported.layout()
    }

    /// Returns the device that the memory is on.
    pub fn device(&self) -> Device {
        self.exported.device()
    }

    /// Returns the stream to write in; `None` for host memory, which is ready. In another stream the caller orders the
    /// work after this one, and this one after the work.
    pub fn stream(&self) -> Option<Stream> {
        self.exported.buffer().stream()
    }

    /// Returns the tensor, once the work that writes it is in [`stream`](Self::stream), or done on the host.
    ///
    /// # Errors
    ///
    /// Those of [`Adapter::import`].
    ///
    /// # Safety
    ///
    /// Every element has been written, on the host, or by work that is in the stream: safe code may read them all. A
    /// `bool` is 0 or 1.
    pub unsafe fn finish(self) -> Result<T> {
        let Self { to, profile, ordering, tensor, exported } = self;
        match tensor {
            Some(tensor) => Ok(tensor),
            None => {
                let options = Options::default();
                Ok(Conversion::new(to, to, profile, ordering, &options).import(exported, true)?.0)
            }
        }
    }
}
