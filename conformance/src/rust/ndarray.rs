//! `ndarray` under test.

use super::padding;
use crate::{Capabilities, HostSubject, HostTensors, Observed, Spec, model};
use bridge_core::{Access, Adapter, DType, Device, Error, ErrorKind, Result};
use bridge_ndarray::{Element, HostArray, NdArray};
use ndarray::{IxDyn, RawArrayView};
use num_complex::Complex;
use std::ptr;

/// `ndarray` under test.
pub type NdArraySubject = HostSubject<NdArray, Arrays>;

/// `ndarray`, whose arrays are read and written through its own raw views.
#[derive(Debug, Clone)]
pub struct Arrays {
    dtypes: Vec<DType>,
}

impl Default for NdArraySubject {
    fn default() -> Self {
        // SAFETY: the suite uses a tensor on one thread at a time.
        let adapter = unsafe { NdArray::new() };
        let tensors = Arrays { dtypes: adapter.profile().dtypes.clone() };
        Self::new(adapter, tensors).with_ordering(bridge_cuda::ordering().clone())
    }
}

/// Returns the addresses of the elements, in row-major order, as `ndarray` finds them. `N` is the size of one.
fn addresses<T: Element, const N: usize>(array: &HostArray) -> Result<Vec<usize>> {
    let bytes: RawArrayView<[u8; N], IxDyn> = array.raw_view::<T>()?.cast();
    // SAFETY: the array keeps its elements, and any bytes are an array of bytes. The references are dropped at the end.
    let view = unsafe { bytes.deref_into_view() };
    Ok(view.iter().map(|element| ptr::from_ref(element).expose_provenance()).collect())
}

macro_rules! by_dtype {
    ($array:expr, $($type:ty: $size:literal),*) => {
        match $array.dtype() {
            $(<$type as Element>::DTYPE => addresses::<$type, $size>($array),)*
            dtype => Err(Error::new(ErrorKind::Dtype, format!("no element type has the dtype {dtype}"))),
        }
    };
}

fn elements(array: &HostArray) -> Result<Vec<usize>> {
    by_dtype!(array, bool: 1, i8: 1, i16: 2, i32: 4, i64: 8, u8: 1, u16: 2, u32: 4, u64: 8, f32: 4, f64: 8,
        Complex<f32>: 8, Complex<f64>: 16)
}

/// Makes the tensor that `spec` describes, whose base buffer `write` writes.
fn made(spec: &Spec, write: impl FnOnce(&mut [u8])) -> Result<HostArray> {
    let itemsize = model::itemsize(spec.dtype);
    let nbytes = spec.base * itemsize;
    let mut memory = vec![0u8; nbytes + Spec::GRAIN];
    let start = padding(memory.as_ptr().addr(), spec.align);
    write(&mut memory[start..start + nbytes]);
    let data = memory.as_mut_ptr().expose_provenance() + start + spec.offset * itemsize;
    let access = if spec.read_only { Access::ReadOnly } else { Access::ReadWrite };
    // SAFETY: every element lies in the vector, which is never touched again, but through the array.
    unsafe { HostArray::from_raw(data, spec.dtype, (&spec.shape, Some(&spec.strides)), access, memory) }
}

impl HostTensors for Arrays {
    type Tensor = HostArray;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            dtypes: self.dtypes.clone(),
            negative_strides: true,
            read_only: true,
            gigabytes: true,
            ..Capabilities::default()
        }
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<HostArray> {
        made(spec, |memory| memory.copy_from_slice(bytes))
    }

    /// Zeros of the system take no memory before they are written.
    fn create_unwritten(&self, spec: &Spec) -> Option<Result<HostArray>> {
        Some(made(spec, |_| ()))
    }

    fn observe(&self, array: &HostArray) -> Result<Observed> {
        Ok(Observed {
            dtype: array.dtype(),
            shape: array.layout().shape().into(),
            strides: array.layout().strides().into(),
            address: array.data(),
            read_only: array.access().forbids_writes(),
            device: Device::CPU,
        })
    }

    fn read(&self, array: &HostArray) -> Result<Vec<u8>> {
        let size = model::itemsize(array.dtype());
        let mut bytes = Vec::with_capacity(array.layout().nbytes());
        for address in elements(array)? {
            // SAFETY: the array keeps the element, and no other thread writes to it.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(address), size) });
        }
        Ok(bytes)
    }

    fn write(&self, array: &HostArray, bytes: &[u8]) -> Result<()> {
        if array.access().forbids_writes() {
            return Err(Error::new(ErrorKind::ReadOnly, "the array is read-only"));
        }
        let size = model::itemsize(array.dtype());
        for (address, element) in elements(array)?.into_iter().zip(bytes.chunks_exact(size)) {
            // SAFETY: the array keeps the element, which may be written to, and no other thread uses it.
            unsafe { ptr::copy_nonoverlapping(element.as_ptr(), ptr::with_exposed_provenance_mut(address), size) };
        }
        Ok(())
    }
}
