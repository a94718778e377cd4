//! The tensor: elements on the host, and their owner.

use crate::Element;
use bridge_core::{
    Access, Advice, DType, Dims, Error, ErrorKind, HostMemory, Layout, Lease, Order, Owner, Result, repeats,
};
use ndarray::{
    ArcArray, Array, ArrayD, ArrayViewD, ArrayViewMutD, Axis, Dimension, IxDyn, RawArrayView, RawArrayViewMut,
    ShapeBuilder, StrideShape, indices,
};
use std::fmt;
use std::ptr;
use std::sync::Arc;

/// Elements of one dtype on the host, in any strides, and what keeps them.
///
/// A clone is another reference to the same elements.
#[derive(Clone)]
pub struct HostArray {
    /// Address of the first element. It means nothing without elements.
    data: usize,
    dtype: DType,
    layout: Layout,
    access: Access,
    owner: Owner,
}

/// Moves the array, whatever its strides, and copies nothing.
///
/// # Panics
///
/// For more than [`MAX_NDIM`](bridge_core::MAX_NDIM) dimensions, and for an array without elements whose other lengths
/// are those of more than 2^63 bytes, such as `Array2::<f32>::zeros((1 << 62, 0))`.
impl<T: Element, D: Dimension + 'static> From<Array<T, D>> for HostArray {
    fn from(mut array: Array<T, D>) -> Self {
        let view = array.raw_view_mut();
        // SAFETY: the array keeps its elements in place. It is never touched again except by its drop.
        let made = unsafe { Self::from_raw_view_mut(view, array) };
        made.expect("an array of ndarray has a sound layout, and few dimensions")
    }
}

/// Moves the vector, which becomes an array of one dimension, and copies nothing.
impl<T: Element> From<Vec<T>> for HostArray {
    fn from(elements: Vec<T>) -> Self {
        Array::from_vec(elements).into()
    }
}

/// Takes a reference to the array, which copies its elements before a write as long as this one exists. Copies nothing.
///
/// # Panics
///
/// Those of an `Array`.
impl<T: Element, D: Dimension + 'static> From<ArcArray<T, D>> for HostArray {
    fn from(array: ArcArray<T, D>) -> Self {
        let (shape, strides) = (signed(array.shape()), signed(array.strides()));
        let data = array.as_ptr().expose_provenance();
        // SAFETY: the array keeps its elements in place. `ndarray` writes to shared elements only after it has copied them.
        let made = unsafe { Self::from_raw(data, T::DTYPE, (&shape, Some(&strides)), Access::Immutable, array) };
        made.expect("an array of ndarray has a sound layout, and few dimensions")
    }
}

/// Takes a reference to the elements, which become an array of one dimension, and copies nothing.
impl<T: Element> From<Arc<[T]>> for HostArray {
    fn from(elements: Arc<[T]>) -> Self {
        let data = elements.as_ptr().expose_provenance();
        let shape = signed(&[elements.len()]);
        // SAFETY: the elements stay in place. Safe code cannot write to them while this reference exists.
        let made = unsafe { Self::from_raw(data, T::DTYPE, (&shape, None), Access::Immutable, elements) };
        made.expect("a slice has a sound layout")
    }
}

impl HostArray {
    /// Makes a read-only array of the elements of `view`, which `owner` keeps.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::new`], for example for more than [`MAX_NDIM`](bridge_core::MAX_NDIM) dimensions.
    ///
    /// # Safety
    ///
    /// The elements are valid and in place until `owner` is dropped, on any thread, and no code writes to them before.
    pub unsafe fn from_raw_view<T: Element, D: Dimension>(
        view: RawArrayView<T, D>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let data = view.as_ptr().expose_provenance();
        let (shape, strides) = (signed(view.shape()), signed(view.strides()));
        // SAFETY: the caller's obligation.
        unsafe { Self::from_raw(data, T::DTYPE, (&shape, Some(&strides)), Access::ReadOnly, owner) }
    }

    /// Makes an array of the elements of `view`, which `owner` keeps.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::new`], for example for more than [`MAX_NDIM`](bridge_core::MAX_NDIM) dimensions.
    ///
    /// # Safety
    ///
    /// The elements are valid and in place until `owner` is dropped, on any thread. Other frameworks may write to them
    /// before.
    pub unsafe fn from_raw_view_mut<T: Element, D: Dimension>(
        mut view: RawArrayViewMut<T, D>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let data = view.as_mut_ptr().expose_provenance();
        let (shape, strides) = (signed(view.shape()), signed(view.strides()));
        // SAFETY: the caller's obligation.
        unsafe { Self::from_raw(data, T::DTYPE, (&shape, Some(&strides)), Access::ReadWrite, owner) }
    }

    /// Makes an array of elements of any dtype and in any strides, also such that repeat elements. `data` is the address
    /// of the first one, and `strides` count elements (`None`: compact, row-major). `owner` keeps them.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::new`] and [`Layout::extent_at`].
    ///
    /// # Safety
    ///
    /// The elements are valid and in place until `owner` is dropped, on any thread. With [`Access::ReadOnly`] and
    /// [`Access::Immutable`] no code writes to them before; otherwise other frameworks may.
    pub unsafe fn from_raw(
        data: usize,
        dtype: DType,
        (shape, strides): (&[i64], Option<&[i64]>),
        access: Access,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let layout = Layout::new(dtype, shape, strides, 0)?;
        layout.extent_at(data, None)?;
        Ok(Self { data, dtype, layout, access, owner: Owner::new(owner) })
    }

    pub(crate) fn of_lease(lease: Lease, access: Access) -> Self {
        let (data, dtype, layout) = (lease.data(), lease.dtype(), lease.layout().clone());
        Self { data, dtype, layout, access, owner: lease.into() }
    }

    /// Returns an array of zeros of any dtype: its elements may be read before they are written, and must be valid then.
    pub(crate) fn zeros(dtype: DType, shape: &[i64], order: Order) -> Result<Self> {
        let layout = Layout::new(dtype, shape, Some(&order.strides(shape)), 0)?;
        let memory = HostMemory::zeroed(layout.nbytes())?;
        Ok(Self { data: memory.bytes().start, dtype, layout, access: Access::ReadWrite, owner: Owner::new(memory) })
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape and the strides, in elements. The offset is that of the lease or 0, and means nothing here.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the address of the first element.
    pub fn data(&self) -> usize {
        self.data
    }

    /// Returns what a view may do with the elements.
    pub fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner.clone()
    }

    /// Returns a raw view of the elements, which are there as long as this array or a clone of it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Dtype`] where the elements are not of this type, [`ErrorKind::Layout`] where an address is not
    /// aligned for them.
    pub fn raw_view<T: Element>(&self) -> Result<RawArrayView<T, IxDyn>> {
        self.is_of::<T>()?;
        let Parts { shape, lowest, reversed } = self.parts::<T>()?;
        // SAFETY: see `parts`.
        let mut view = unsafe { RawArrayView::from_shape_ptr(shape, lowest) };
        reversed.into_iter().for_each(|axis| view.invert_axis(axis));
        Ok(view)
    }

    /// Returns what `ndarray` makes a view of elements of `B` from, which are as long as those of this array. It takes
    /// the lowest address and strides that are not negative, and reverses axes afterwards.
    ///
    /// `Layout::new` has checked the arithmetic, and the owner keeps what the layout reaches. Without elements the
    /// address is aligned, and not null.
    fn parts<B>(&self) -> Result<Parts<B>> {
        let shape: Vec<usize> = self.layout.shape().iter().map(|length| *length as usize).collect();
        if self.layout.numel() == 0 {
            let lowest = ptr::dangling_mut();
            return Ok(Parts { shape: IxDyn(&shape).into(), lowest, reversed: Vec::new() });
        }
        if !self.data.is_multiple_of(align_of::<B>()) {
            let (address, alignment) = (self.data, align_of::<B>());
            let text = format!("address {address:#x} is not aligned to {alignment} bytes");
            return Err(Error::new(ErrorKind::Layout, text).advise(Advice::Copy));
        }
        let strides: Vec<usize> = self.layout.strides().iter().map(|stride| stride.unsigned_abs() as usize).collect();
        let lowest = ptr::with_exposed_provenance_mut(self.data - self.layout.byte_extent().0);
        let axes = self.layout.strides().iter().enumerate().filter(|(_, stride)| **stride < 0);
        let reversed = axes.map(|(axis, _)| Axis(axis)).collect();
        Ok(Parts { shape: IxDyn(&shape).strides(IxDyn(&strides)), lowest, reversed })
    }

    /// Returns a view of the elements, in place.
    ///
    /// # Errors
    ///
    /// Those of [`raw_view`](Self::raw_view).
    ///
    /// # Safety
    ///
    /// No code writes to the elements while the view lives, through another framework's tensor or elsewhere. Elements
    /// of `bool` are 0 or 1.
    pub unsafe fn view<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        let raw = self.raw_view()?;
        // SAFETY: the owner keeps the elements, aligned, as long as `self`. The caller guarantees the rest.
        Ok(unsafe { raw.deref_into_view() })
    }

    /// Returns a view of elements that no code writes to ([`Access::Immutable`]), in place.
    ///
    /// # Errors
    ///
    /// Those of [`raw_view`](Self::raw_view), [`ErrorKind::Argument`] where others may write to the elements, and
    /// [`ErrorKind::Dtype`] for `bool`, whose bytes may be others than 0 and 1.
    pub fn immutable_view<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        if self.access != Access::Immutable {
            let text = "others may write to the elements: copy them with to_array(), or call view() in unsafe code";
            return Err(Error::new(ErrorKind::Argument, text));
        }
        if self.dtype == DType::BOOL {
            let text = "another owner's bytes may be others than 0 and 1: copy them with to_array(), or call view() in unsafe code";
            return Err(Error::new(ErrorKind::Dtype, text));
        }
        // SAFETY: no code writes to the elements, and any bits are a value of these types.
        unsafe { self.view() }
    }

    /// Returns a view through which the elements can be written, in place.
    ///
    /// # Errors
    ///
    /// Those of [`raw_view`](Self::raw_view), [`ErrorKind::ReadOnly`] where the elements must not be written, and
    /// [`ErrorKind::Layout`] where two of them may have one address.
    ///
    /// # Safety
    ///
    /// No code reads or writes the elements while the view lives, through another framework's tensor, a clone of this
    /// array or elsewhere. Elements of `bool` are 0 or 1.
    pub unsafe fn view_mut<T: Element>(&mut self) -> Result<ArrayViewMutD<'_, T>> {
        self.is_of::<T>()?;
        if self.access.forbids_writes() {
            return Err(read_only());
        }
        if repeats(&self.layout) {
            let text = "several elements may share an address, as those of a broadcast do: call to_array() first";
            return Err(Error::new(ErrorKind::Layout, text));
        }
        let Parts { shape, lowest, reversed } = self.parts::<T>()?;
        // SAFETY: see `parts`. The owner keeps the elements as long as `self`, and lets others write; no two of them
        // share an address. The caller guarantees the rest.
        let mut view = unsafe { RawArrayViewMut::from_shape_ptr(shape, lowest).deref_into_view_mut() };
        reversed.into_iter().for_each(|axis| view.invert_axis(axis));
        Ok(view)
    }

    /// Copies the elements into a compact array. Bytes of `bool` other than 0 are `true`.
    ///
    /// The elements are read through pointers: where another thread writes to them meanwhile, they are undefined.
    ///
    /// # Errors
    ///
    /// Those of [`raw_view`](Self::raw_view), and [`ErrorKind::OutOfMemory`]: a broadcast takes less memory than its copy.
    pub fn to_array<T: Element>(&self) -> Result<ArrayD<T>> {
        self.is_of::<T>()?;
        let Parts { shape, .. } = self.parts::<T::Bits>()?;
        let first: *const T::Bits = ptr::with_exposed_provenance(self.data);
        let strides = self.layout.strides();
        let element = |index: IxDyn| {
            let steps = index.slice().iter().zip(strides).map(|(index, stride)| *index as isize * *stride as isize);
            // SAFETY: the element is one of the layout's, which the owner keeps, with these bits.
            T::of_bits(unsafe { first.offset(steps.sum()).read() })
        };
        let mut elements = Vec::new();
        elements.try_reserve_exact(self.layout.numel()).map_err(|error| {
            let text =
                format!("host: out of memory allocating {} bytes: copy a part of the array", self.layout.nbytes());
            Error::new(ErrorKind::OutOfMemory, text).caused_by(error)
        })?;
        let shape = shape.raw_dim().clone();
        elements.extend(indices(shape.clone()).into_iter().map(element));
        Ok(ArrayD::from_shape_vec(shape, elements).expect("there is an element for each index"))
    }

    fn is_of<T: Element>(&self) -> Result<()> {
        if T::DTYPE == self.dtype {
            return Ok(());
        }
        let text = format!("the elements are {}, not {}: request those", self.dtype, T::DTYPE);
        Err(Error::new(ErrorKind::Dtype, text))
    }
}

/// Returns lengths or strides as core has them. Those of an array are in range.
fn signed<N: Copy + TryInto<i64>>(dims: &[N]) -> Dims {
    dims.iter().map(|dim| (*dim).try_into().unwrap_or(i64::MAX)).collect()
}

/// See [`HostArray::parts`].
struct Parts<B> {
    shape: StrideShape<IxDyn>,
    lowest: *mut B,
    reversed: Vec<Axis>,
}

#[cold]
pub(crate) fn read_only() -> Error {
    Error::new(ErrorKind::ReadOnly, "the array is read-only: copy it with to_array() first")
}

impl fmt::Debug for HostArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostArray({} at {:#x}, {})", self.dtype, self.data, self.layout)
    }
}
