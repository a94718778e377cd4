//! Arrays of `ndarray` and vectors as tensors, on the host.
//!
//! [`NdArray`] is the adapter, and [`HostArray`] its tensor: elements of one [dtype](Element), in any strides, that an
//! array, a vector or another framework owns. Making one from an array moves the array and copies nothing; a tensor of
//! another framework becomes one in place.
//!
//! ```
//! use bridge_core::{HostOnly, Options, Ordering, transfer};
//! use bridge_ndarray::{HostArray, NdArray};
//! use ndarray::array;
//! use std::sync::Arc;
//!
//! let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
//! let host = HostArray::from(array![[1.0f32, 2.0], [3.0, 4.0]]);
//! // SAFETY: the program uses the memory of a tensor on one thread at a time.
//! let (same, done) = transfer(&unsafe { NdArray::new() }, &unsafe { NdArray::new() }, &host, &ordering, &Options::default())?;
//! assert_eq!(done.bytes_copied, 0);
//! // SAFETY: nothing writes to the array meanwhile.
//! assert_eq!(unsafe { same.view::<f32>()? }, array![[1.0, 2.0], [3.0, 4.0]].into_dyn());
//! assert_eq!(same.to_array::<f32>()?, array![[1.0, 2.0], [3.0, 4.0]].into_dyn());
//! # Ok::<(), bridge_core::Error>(())
//! ```
//!
//! # Why a view is unsafe
//!
//! Memory that two frameworks share can be written by either at any time, which Rust's references exclude. So the
//! caller of [`HostArray::view`] says that no code writes meanwhile. [`HostArray::raw_view`] says nothing, and returns
//! `ndarray`'s raw view. [`HostArray::to_array`] copies.
//!
//! # Without `unsafe`
//!
//! ```
//! #![forbid(unsafe_code)]
//! use bridge_core::{HostOnly, Options, Ordering, transfer};
//! use bridge_ndarray::{HostArray, NdArray};
//! use ndarray::{arr2, ArcArray2};
//! use std::sync::Arc;
//!
//! let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
//! let shared: ArcArray2<f32> = arr2(&[[1.0, 2.0], [3.0, 4.0]]).into_shared();
//! let (from, to) = (NdArray::read_only(), NdArray::read_only());
//! let (same, _) = transfer(&from, &to, &shared.clone().into(), &ordering, &Options::in_place())?;
//! let view = same.immutable_view::<f32>()?;
//! assert_eq!((view.as_ptr(), view), (shared.as_ptr(), shared.view().into_dyn()));
//! # Ok::<(), bridge_core::Error>(())
//! ```

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod array;
mod element;

pub use array::HostArray;
pub use element::Element;
/// The crate `ndarray`, in the version that this adapter takes: a program that names it by this path cannot have another.
#[doc(no_inline)]
pub use ndarray as framework;

use bridge_core::planted::is_planted;
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Memory, Offer, Order,
    Profile, Result, Strides, Views,
};
use std::sync::Arc;

/// `ndarray` on the host, in any strides.
#[derive(Clone)]
pub struct NdArray {
    profile: Arc<Profile>,
    views: Arc<Views>,
}

bridge_core::debug_fields!(impl[] NdArray);

impl NdArray {
    /// Makes the adapter.
    ///
    /// # Safety
    ///
    /// Memory that frameworks share can be read and written through each of them by safe code, and no framework waits
    /// for another on the host. While a tensor of another framework, or of another process, shares the memory of a tensor
    /// of this adapter, no code writes to it through the one (also by [`copy_into`](bridge_core::copy_into)) while another thread
    /// reads or writes it through the other. The clones of a tensor share its memory too.
    pub unsafe fn new() -> Self {
        Self::of(true)
    }

    /// Makes the adapter for memory that never changes. It takes such memory in place and copies any other, exports arrays
    /// for reading, and refuses to write to them. Make arrays of `ArcArray` or `Arc<[T]>`, and read results and copies with
    /// [`HostArray::immutable_view`].
    pub fn read_only() -> Self {
        Self::of(false)
    }

    fn of(takes_mutable: bool) -> Self {
        let profile = Profile::export_only("ndarray")
            .with_dtypes(element::DTYPES.into())
            .with_strides(Strides::Any)
            .with_alignment(1)
            .with_complex_by_parts(true)
            .with_devices(vec![DeviceKind::CPU])
            .with_takes_mutable(takes_mutable);
        Self { profile: Arc::new(profile), views: Arc::default() }
    }
}

// SAFETY: an array keeps its lease, has its memory on the host, and is written to only where it may be.
unsafe impl Adapter for NdArray {
    type Tensor = HostArray;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.views.clone()
    }

    fn export(&self, array: &HostArray) -> Result<Export> {
        let layout = array.layout().clone();
        let access = match array.access() {
            Access::Immutable => Access::Immutable,
            _ if !self.profile.takes_mutable => Access::ReadOnly,
            access => access,
        };
        let allocation = Allocation::host(layout.extent_at(array.data(), None)?, access);
        // SAFETY: the owner keeps the elements in place, and may be dropped on any thread. It was guaranteed where the
        // array was made. A read-only array is exported as such.
        let memory = unsafe { Memory::new(allocation, array.owner()) };
        if is_planted("ndarray_owner_leaked") {
            std::mem::forget(array.owner());
        }
        Export::at(array.data(), array.dtype(), layout, memory)
    }

    fn import(&self, offer: Offer) -> Result<HostArray> {
        let lease = offer.accept(&self.profile, &self.views)?;
        // No other tensor shares a copy.
        let is_own = !self.profile.takes_mutable && lease.is_copy();
        let access = if is_own { Access::Immutable } else { lease.access() };
        Ok(HostArray::of_lease(lease, access))
    }

    fn overwritten(&self, array: &HostArray) -> Result<()> {
        let writes = self.profile.takes_mutable && !array.access().forbids_writes();
        if writes { Ok(()) } else { Err(array::read_only()) }
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<HostArray> {
        if device.kind != DeviceKind::CPU || !self.profile.takes_mutable {
            return Err(Error::new(
                ErrorKind::CopyNeeded,
                format!("ndarray has no memory to be written to on {device}"),
            ));
        }
        HostArray::zeros(dtype, shape, order)
    }
}
