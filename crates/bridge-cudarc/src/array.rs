//! The tensor: elements on a device, their owner, and the stream that holds the last work on them.

mod views;

use views::Slices;
pub use views::{Reading, Writing};

use crate::Element;
use crate::context::{device_of, handle_of, restored};
use bridge_core::planted::is_planted;
use bridge_core::{
    Access, Advice, Allocation, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout, Lease, Memory, Order,
    Owner, Result, Reuse, Stream, repeats,
};
use bridge_cuda::Located;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, sys};
use std::fmt;
use std::sync::Arc;

/// Elements of one dtype on a CUDA device, in any strides, and what keeps them.
///
/// A clone is another reference to the same elements: the borrow checker sees one array, not two.
#[derive(Clone)]
pub struct DeviceArray {
    /// Address of the first element. It means nothing without elements.
    data: usize,
    dtype: DType,
    layout: Layout,
    access: Access,
    /// Before the owner, which may free the memory: it makes the stream wait for what guards have used.
    slices: Slices,
    /// Before the stream: its drop may need that.
    owner: Owner,
    stream: Arc<CudaStream>,
    /// Whether the owner frees the memory in the order of the stream.
    reuse: Reuse,
}

/// A slice, which is dropped on any thread.
struct Freed<T: Send + Sync + 'static>(Option<CudaSlice<T>>);

impl<T: Send + Sync + 'static> Drop for Freed<T> {
    fn drop(&mut self) {
        let slice = self.0.take();
        let _ = restored(|| {
            // Without a current context the driver does not free memory in a default stream.
            slice.as_ref().map_or(Ok(()), |slice| slice.context().bind_to_thread())?;
            drop(slice);
            Ok(())
        });
    }
}

/// A view with these lengths and strides into `len` elements, from element `offset` on.
pub(crate) fn layout_in(
    len: usize,
    dtype: DType,
    shape: &[i64],
    strides: Option<&[i64]>,
    offset: usize,
) -> Result<Layout> {
    let itemsize = dtype.itemsize().unwrap_or(1);
    let reaches = |layout: &Layout| layout.extent().is_some_and(|extent| extent.end <= len * itemsize);
    let start = offset.checked_mul(itemsize).filter(|start| *start <= len * itemsize);
    let layout = start.map(|start| Layout::new(dtype, shape, strides, start)).transpose()?;
    layout.filter(reaches).ok_or_else(|| {
        let text = format!(
            "a view of shape {shape:?}, strides {strides:?} (elements) from element {offset} on reaches outside the {len} elements of the slice: pass a smaller view, or a longer slice"
        );
        Error::new(ErrorKind::Layout, text)
    })
}

impl DeviceArray {
    /// Makes an array of a slice, which it takes: `shape`, `strides` in elements (`None`: compact, row-major), and the
    /// index of the first element. The stream of the slice, in which it was allocated, is that of the array; it waits
    /// for the streams in which `cudarc` has recorded uses of the slice.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Layout`] for a slice that is shorter than the view, and those of [`Layout::new`].
    pub fn from_slice<T: Element>(
        mut slice: CudaSlice<T>,
        shape: &[i64],
        strides: Option<&[i64]>,
        offset: usize,
    ) -> Result<Self> {
        let layout = layout_in(slice.len(), T::DTYPE, shape, strides, offset)?;
        let stream = Arc::clone(slice.stream());
        let data = restored(|| Ok(slice.device_ptr_mut(&stream).0))? as usize + layout.offset();
        // Without a pool, `cudarc` waits for the stream before it frees.
        let reuse = if stream.context().has_async_alloc() { Reuse::InStreamOrder } else { Reuse::Unknown };
        let owner = Owner::new(Freed(Some(slice)));
        Ok(Self {
            data,
            dtype: T::DTYPE,
            layout,
            access: Access::ReadWrite,
            slices: Slices::default(),
            stream,
            reuse,
            owner,
        })
    }

    /// Makes a read-only array of a view, which `owner` keeps: a `CudaView`, a `CudaViewMut` or a borrowed `CudaSlice`.
    /// `stream`, which waits for the writes that `cudarc` has recorded, is that of the array.
    ///
    /// # Errors
    ///
    /// Those of [`from_slice`](Self::from_slice).
    ///
    /// # Safety
    ///
    /// The memory is valid, and no work writes to it, until `owner` is dropped, on any thread. It is not reused before
    /// the work that `stream` holds then, or the drop of `owner` waits for that.
    pub unsafe fn from_view<T: Element>(
        view: &impl DevicePtr<T>,
        (shape, strides, offset): (&[i64], Option<&[i64]>, usize),
        stream: &Arc<CudaStream>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let layout = layout_in(view.len(), T::DTYPE, shape, strides, offset)?;
        let data = restored(|| Ok(view.device_ptr(stream).0))? as usize + layout.offset();
        let (stream, owner) = (Arc::clone(stream), Owner::new(owner));
        Ok(Self {
            data,
            dtype: T::DTYPE,
            layout,
            access: Access::ReadOnly,
            slices: Slices::default(),
            stream,
            reuse: Reuse::Unknown,
            owner,
        })
    }

    /// Makes an array of memory at an address, which `owner` keeps, with its last work in `stream`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`] where the driver knows the address as memory of another device than the stream's, or not at
    /// all; [`ErrorKind::Layout`] where the view leaves the allocation that the driver knows; and those of
    /// [`Layout::new`] and [`bridge_cuda::locate`].
    ///
    /// # Safety
    ///
    /// The memory is valid until `owner` is dropped, on any thread, and other frameworks may write to it where `access`
    /// says so. It is not reused before the work that `stream` holds at that drop, which the driver may not have run.
    pub unsafe fn from_raw(
        data: sys::CUdeviceptr,
        dtype: DType,
        (shape, strides): (&[i64], Option<&[i64]>),
        access: Access,
        stream: &Arc<CudaStream>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let layout = Layout::new(dtype, shape, strides, 0)?;
        let data = data as usize;
        if layout.numel() > 0 {
            let device = device_of(stream);
            let belongs = |located: &Located| {
                located.device.index == device.index && located.device.kind != DeviceKind::CUDA_HOST
            };
            let located = bridge_cuda::locate(data)?.filter(belongs).ok_or_else(|| {
                let text = format!(
                    "address {data:#x} is not memory of {device}: pass a stream of the device that has the memory"
                );
                Error::new(ErrorKind::Device, text)
            })?;
            layout.extent_at(data, Some(&located.range))?;
        }
        let (stream, owner) = (Arc::clone(stream), Owner::new(owner));
        Ok(Self { data, dtype, layout, access, slices: Slices::default(), stream, reuse: Reuse::Unknown, owner })
    }

    pub(crate) fn of_lease(lease: Lease, stream: Arc<CudaStream>) -> Self {
        let (data, dtype, layout, access) = (lease.data(), lease.dtype(), lease.layout().clone(), lease.access());
        // Another framework, to which the owner's allocator is unknown, may have views of the same memory.
        Self {
            data,
            dtype,
            layout,
            access,
            slices: Slices::default(),
            stream,
            reuse: Reuse::Unknown,
            owner: lease.into(),
        }
    }

    pub(crate) fn fresh(stream: &Arc<CudaStream>, dtype: DType, shape: &[i64], order: Order) -> Result<Self> {
        let layout = Layout::new(dtype, shape, Some(&order.strides(shape)), 0)?;
        // SAFETY: any byte is a value of `u8`.
        let bytes = restored(|| Ok(unsafe { stream.alloc::<u8>(layout.nbytes().max(1)) }?))?;
        let array = Self::from_slice(bytes, &[layout.nbytes() as i64], None, 0)?;
        Ok(Self { dtype, layout, ..array })
    }

    pub(crate) fn export(&self) -> Result<Export> {
        let layout = self.layout.clone();
        let allocation = Allocation::new(
            layout.extent_at(self.data, None)?,
            self.device(),
            self.access,
            Some(if is_planted("cudarc_stream_mistaken") { Stream::LEGACY } else { handle_of(&self.stream) }),
            self.reuse,
        );
        // SAFETY: the owner keeps the memory and the array the stream. Who made the array has guaranteed both, or core
        // for the lease. A slice is freed in the order of its stream.
        let memory = unsafe { Memory::new(allocation, (self.owner.clone(), Arc::clone(&self.stream))) };
        Export::at(self.data, self.dtype, layout, memory)
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape and the strides, in elements. Its offset means nothing here.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the address of the first element, as a launch argument for kernels that take strides. Launch them in
    /// [`stream`](Self::stream).
    pub fn data(&self) -> sys::CUdeviceptr {
        self.data as sys::CUdeviceptr
    }

    /// Returns what work may do with the elements.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the stream that holds the last work on the elements.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns the device.
    pub fn device(&self) -> Device {
        device_of(&self.stream)
    }

    /// Returns the elements as one of `cudarc`'s views, in place, for as long as the guard lives.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Dtype`] where the elements are not of this type, [`ErrorKind::Layout`] where they have gaps or
    /// another order than row-major: such an array is a launch argument only ([`data`](Self::data)).
    pub fn read<T: Element>(&self) -> Result<Reading<'_, T>> {
        self.linear::<T>()?;
        Reading::new(self)
    }

    /// As [`read`](Self::read), for writing.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read), and [`ErrorKind::ReadOnly`].
    pub fn write<T: Element>(&mut self) -> Result<Writing<'_, T>> {
        self.linear::<T>()?;
        if self.access.forbids_writes() {
            return Err(read_only());
        }
        Writing::new(self)
    }

    fn linear<T: Element>(&self) -> Result<()> {
        if T::DTYPE != self.dtype {
            let text = format!("the elements are {}, not {}: request those", self.dtype, T::DTYPE);
            return Err(Error::new(ErrorKind::Dtype, text));
        }
        if self.layout.is_compact() && !repeats(&self.layout) {
            return Ok(());
        }
        let text =
            format!("a CudaView has no strides, and this tensor has {}: launch with data() and layout()", self.layout);
        Err(Error::new(ErrorKind::Layout, text).or_advise(Advice::Copy))
    }
}

#[cold]
pub(crate) fn read_only() -> Error {
    Error::new(ErrorKind::ReadOnly, "the tensor is read-only").advise(Advice::Copy)
}

impl fmt::Debug for DeviceArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceArray({} at {:#x} on {}, {})", self.dtype, self.data, self.device(), self.layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_shorter_than_its_layout_is_refused() {
        let fits = |len, shape: &[i64], strides: Option<&[i64]>, offset| {
            layout_in(len, DType::FLOAT32, shape, strides, offset).map(|layout| layout.offset())
        };
        assert_eq!(fits(12, &[3, 4], None, 0).unwrap(), 0);
        assert_eq!(fits(13, &[3, 4], None, 1).unwrap(), 4);
        assert_eq!(fits(12, &[3, 4], Some(&[-4, 1]), 8).unwrap(), 32);
        assert_eq!(fits(0, &[0, 4], None, 0).unwrap(), 0);
        for (len, shape, strides, offset) in [
            (11, &[3, 4][..], None, 0),
            (12, &[3, 4], None, 1),
            (12, &[3, 4], Some(&[5, 1][..]), 0),
            (12, &[3, 4], Some(&[-4, 1]), 7),
            (12, &[1], None, usize::MAX),
            (12, &[1], None, 12),
        ] {
            let refused = fits(len, shape, strides, offset).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Layout, "{refused}");
            assert!(refused.to_string().ends_with("pass a smaller view, or a longer slice"), "{refused}");
        }
        assert_eq!(fits(12, &[-3], None, 0).unwrap_err().kind(), ErrorKind::Layout);
    }
}
