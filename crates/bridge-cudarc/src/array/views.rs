//! Views of `cudarc` over memory that it does not own.

use crate::context::restored;
use crate::{DeviceArray, Element};
use bridge_core::Result;
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// The slices of an array's guards, in which `cudarc` keeps the events of their uses. A guard that is forgotten leaves its
/// slice here, so that the memory is not freed before those uses.
#[derive(Default)]
pub(super) struct Slices(Mutex<Vec<Slice>>);

/// The guards of a clone are its own.
impl Clone for Slices {
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// A slice that never frees its memory, in a box.
struct Slice(NonNull<CudaSlice<u8>>);

// SAFETY: it owns the slice, which may be sent.
unsafe impl Send for Slice {}

impl Drop for Slice {
    fn drop(&mut self) {
        // SAFETY: it is of `Box::into_raw`, and this is the one owner.
        let slice = unsafe { Box::from_raw(self.0.as_ptr()) };
        // Frees nothing, and makes the array's stream wait for the streams in which the views were used.
        let _ = restored(|| {
            slice.leak();
            Ok(())
        });
    }
}

impl Slices {
    /// Returns the slice of a new guard. It lives until [`end`](Self::end), or until the array is dropped.
    fn start(&self, array: &DeviceArray) -> Result<NonNull<CudaSlice<u8>>> {
        let stream = array.stream();
        restored(|| {
            stream.context().bind_to_thread()?;
            // SAFETY: the array keeps the elements, which are compact, longer than its slices, and they free nothing.
            let slice = unsafe { stream.upgrade_device_ptr(array.data(), array.layout().nbytes()) };
            let slice = NonNull::from(Box::leak(Box::new(slice)));
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Slice(slice));
            Ok(slice)
        })
    }

    /// Ends a slice, which nothing uses any more.
    fn end(&self, slice: NonNull<CudaSlice<u8>>) {
        let mut slices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = slices.iter().position(|known| known.0 == slice).map(|index| slices.swap_remove(index));
        drop(slices);
        drop(ended);
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
    slice: NonNull<CudaSlice<u8>>,
    array: &'a DeviceArray,
    elements: PhantomData<T>,
}

bridge_core::debug_fields!(impl[T: Element] Reading<'_, T>);

// SAFETY: it is a shared reference to the slice, which may be shared.
unsafe impl<T: Element> Send for Reading<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Reading<'_, T> {}

impl<'a, T: Element> Reading<'a, T> {
    pub(crate) fn new(array: &'a DeviceArray) -> Result<Self> {
        Ok(Self { slice: array.slices.start(array)?, array, elements: PhantomData })
    }

    /// Returns the view: for launches, slices of it, and copies to the host.
    pub fn view(&self) -> CudaView<'_, T> {
        // SAFETY: the slice lives as long as this guard, and nothing changes it.
        let slice = unsafe { self.slice.as_ref() };
        // SAFETY: the elements are of this type.
        unsafe { slice.transmute(self.array.layout().numel()) }.expect("the slice has all of their bytes")
    }
}

impl<T: Element> Drop for Reading<'_, T> {
    fn drop(&mut self) {
        self.array.slices.end(self.slice);
    }
}

/// Writes to an array through `cudarc`, in place, as long as it lives. See [`DeviceArray::write`].
///
/// There is one at a time, and none next to a [`Reading`]:
///
/// ```compile_fail,E0502
/// # fn both(mut array: bridge_cudarc::DeviceArray) {
/// let reading = array.read::<f32>().unwrap();
/// let writing = array.write::<f32>().unwrap();
/// assert_eq!(reading.view().len(), 3);
/// # }
/// ```
pub struct Writing<'a, T: Element> {
    slice: NonNull<CudaSlice<u8>>,
    array: &'a mut DeviceArray,
    elements: PhantomData<T>,
}

bridge_core::debug_fields!(impl[T: Element] Writing<'_, T>);

// SAFETY: it is the only reference to the slice, which may be sent.
unsafe impl<T: Element> Send for Writing<'_, T> {}
// SAFETY: a shared reference to it does nothing.
unsafe impl<T: Element> Sync for Writing<'_, T> {}

impl<'a, T: Element> Writing<'a, T> {
    pub(crate) fn new(array: &'a mut DeviceArray) -> Result<Self> {
        Ok(Self { slice: array.slices.start(array)?, array, elements: PhantomData })
    }

    /// Returns the view.
    pub fn view(&mut self) -> CudaViewMut<'_, T> {
        // SAFETY: the slice lives as long as this guard, and only the guard uses it.
        let slice = unsafe { self.slice.as_mut() };
        // SAFETY: the elements are of this type.
        unsafe { slice.transmute_mut(self.array.layout().numel()) }.expect("the slice has all of their bytes")
    }
}

impl<T: Element> Drop for Writing<'_, T> {
    fn drop(&mut self) {
        self.array.slices.end(self.slice);
    }
}
