//! Views of `cudarc` over memory that it does not own.

use crate::context::restored;
use crate::{DeviceArray, Element};
use bridge_core::Result;
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;

/// A slice that never frees its memory.
struct Unowned<T>(ManuallyDrop<CudaSlice<T>>);

impl<T: Element> Unowned<T> {
    fn over(array: &DeviceArray) -> Result<Self> {
        let stream = array.stream();
        restored(|| {
            stream.context().bind_to_thread()?;
            // SAFETY: the array keeps the elements, which are compact and of this type, longer than the slice lives, and
            // the slice is never dropped.
            let slice = unsafe { stream.upgrade_device_ptr(array.data(), array.layout().numel()) };
            Ok(Self(ManuallyDrop::new(slice)))
        })
    }
}

impl<T> Drop for Unowned<T> {
    fn drop(&mut self) {
        // SAFETY: the slice is taken once.
        let slice = unsafe { ManuallyDrop::take(&mut self.0) };
        // Frees nothing, and makes the array's stream wait for the streams in which the views were used.
        let _ = restored(|| {
            slice.leak();
            Ok(())
        });
    }
}

/// Reads an array through `cudarc`, in place, as long as it lives. See [`DeviceArray::read`].
///
/// No view outlives it:
///
/// ```compile_fail,E0597
/// # fn longer(array: bridge_cudarc::DeviceArray) {
/// let view = {
///     let reading = array.read::<f32>().unwrap();
///     reading.view()
/// };
/// assert_eq!(view.len(), 3);
/// # }
/// ```
///
/// and it does not outlive the array:
///
/// ```compile_fail,E0505
/// # fn longer(array: bridge_cudarc::DeviceArray) {
/// let reading = array.read::<f32>().unwrap();
/// drop(array);
/// assert_eq!(reading.view().len(), 3);
/// # }
/// ```
pub struct Reading<'a, T: Element> {
    slice: Unowned<T>,
    array: PhantomData<&'a DeviceArray>,
}

bridge_core::debug_fields!(impl[T: Element] Reading<'_, T>);

impl<'a, T: Element> Reading<'a, T> {
    pub(crate) fn new(array: &'a DeviceArray) -> Result<Self> {
        Ok(Self { slice: Unowned::over(array)?, array: PhantomData })
    }

    /// Returns the view: for launches, slices of it, and copies to the host.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.0.as_view()
    }
}

/// Writes to an array through `cudarc`, in place, as long as it lives. See [`DeviceArray::write`].
///
/// There is one at a time, and none beside a [`Reading`]:
///
/// ```compile_fail,E0502
/// # fn both(mut array: bridge_cudarc::DeviceArray) {
/// let reading = array.read::<f32>().unwrap();
/// let writing = array.write::<f32>().unwrap();
/// assert_eq!(reading.view().len(), 3);
/// # }
/// ```
pub struct Writing<'a, T: Element> {
    slice: Unowned<T>,
    array: PhantomData<&'a mut DeviceArray>,
}

bridge_core::debug_fields!(impl[T: Element] Writing<'_, T>);

impl<'a, T: Element> Writing<'a, T> {
    pub(crate) fn new(array: &'a mut DeviceArray) -> Result<Self> {
        Ok(Self { slice: Unowned::over(array)?, array: PhantomData })
    }

    /// Returns the view.
    pub fn view(&mut self) -> CudaViewMut<'_, T> {
        self.slice.0.as_view_mut()
    }
}
