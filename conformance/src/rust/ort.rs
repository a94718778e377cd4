//! ONNX Runtime under test.

use crate::{Capabilities, HostSubject, HostTensors, Observed, Spec, model};
use bridge_core::{DType, Device, Error, ErrorKind, Result};
use bridge_ort::Ort;
use ort::memory::Allocator;
use ort::value::{DynTensor, Shape, Tensor, TensorElementType};
use std::ptr;
use std::sync::Arc;

/// ONNX Runtime under test, on the host.
pub type OrtSubject = HostSubject<Ort, Values>;

/// ONNX Runtime, whose tensors are read and written at the address that it states.
#[derive(Debug, Clone, Copy)]
pub struct Values;

macro_rules! elements {
    ($($element:ident: $type:ty = $dtype:ident;)*) => {
        const ELEMENTS: &[(DType, TensorElementType)] = &[$((DType::$dtype, TensorElementType::$element)),*];

        /// Element types that `ort` takes in, but has no type to allocate by.
        const OTHERS: &[(DType, TensorElementType)] = &[
            (DType::FLOAT16, TensorElementType::Float16),
            (DType::BFLOAT16, TensorElementType::Bfloat16),
            (DType::COMPLEX64, TensorElementType::Complex64),
            (DType::COMPLEX128, TensorElementType::Complex128),
            (DType::FLOAT8_E4M3FN, TensorElementType::Float8E4M3FN),
            (DType::FLOAT8_E4M3FNUZ, TensorElementType::Float8E4M3FNUZ),
            (DType::FLOAT8_E5M2, TensorElementType::Float8E5M2),
            (DType::FLOAT8_E5M2FNUZ, TensorElementType::Float8E5M2FNUZ),
        ];

        /// Allocates a tensor by ONNX Runtime.
        fn allocated(dtype: DType, shape: &[i64]) -> Result<DynTensor> {
            let (allocator, shape) = (Allocator::default(), Shape::new(shape.iter().copied()));
            match dtype {
                $(DType::$dtype => Tensor::<$type>::new(&allocator, shape).map(Tensor::upcast).map_err(raised),)*
                _ => Err(Error::new(ErrorKind::Dtype, format!("the suite makes no {dtype} of ort"))),
            }
        }
    };
}

elements! {
    Bool: bool = BOOL;
    Int8: i8 = INT8;
    Int16: i16 = INT16;
    Int32: i32 = INT32;
    Int64: i64 = INT64;
    Uint8: u8 = UINT8;
    Uint16: u16 = UINT16;
    Uint32: u32 = UINT32;
    Uint64: u64 = UINT64;
    Float32: f32 = FLOAT32;
    Float64: f64 = FLOAT64;
}

pub(super) fn raised(error: ort::Error) -> Error {
    Error::new(ErrorKind::Framework, error.to_string())
}

/// Returns the element type of a dtype.
#[cfg(feature = "cudarc")]
pub(super) fn element_of(dtype: DType) -> Result<TensorElementType> {
    let found = ELEMENTS.iter().chain(OTHERS).find(|(known, _)| *known == dtype).map(|(_, element)| *element);
    found.ok_or_else(|| Error::new(ErrorKind::Dtype, format!("the suite makes no {dtype} of ort")))
}

/// Returns what ONNX Runtime reports of a tensor on the host. On a device, all but the device is the same.
pub(super) fn observe(tensor: &DynTensor) -> Result<Observed> {
    let found =
        ELEMENTS.iter().chain(OTHERS).find(|(_, element)| element == tensor.data_type()).map(|(dtype, _)| *dtype);
    Ok(Observed {
        dtype: found.ok_or_else(|| Error::new(ErrorKind::Dtype, "not expected"))?,
        shape: tensor.shape().to_vec(),
        strides: model::row_major(tensor.shape()),
        address: tensor.data_ptr().expose_provenance(),
        read_only: false,
        device: Device::CPU,
    })
}

impl OrtSubject {
    /// Loads ONNX Runtime.
    ///
    /// # Errors
    ///
    /// Those of [`Ort::new`].
    pub fn load() -> Result<Self> {
        // SAFETY: the suite uses a tensor on one thread at a time.
        Ok(Self::new(unsafe { Ort::new()? }, Values).with_ordering(bridge_cuda::ordering().clone()))
    }
}

impl HostTensors for Values {
    type Tensor = Arc<DynTensor>;

    fn capabilities(&self) -> Capabilities {
        Capabilities { dtypes: ELEMENTS.iter().map(|(dtype, _)| *dtype).collect(), ..Capabilities::default() }
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Arc<DynTensor>> {
        let tensor = Arc::new(allocated(spec.dtype, &spec.shape)?);
        self.write(&tensor, &bytes[spec.offset * model::itemsize(spec.dtype)..])?;
        Ok(tensor)
    }

    fn observe(&self, tensor: &Arc<DynTensor>) -> Result<Observed> {
        observe(tensor)
    }

    fn read(&self, tensor: &Arc<DynTensor>) -> Result<Vec<u8>> {
        let observed = self.observe(tensor)?;
        let len = model::numel(&observed.shape) * model::itemsize(observed.dtype);
        let mut bytes = vec![0; len];
        // SAFETY: the tensor keeps its compact elements, and no other thread writes to them.
        unsafe { ptr::copy_nonoverlapping(tensor.data_ptr().cast(), bytes.as_mut_ptr(), len) };
        Ok(bytes)
    }

    fn write(&self, tensor: &Arc<DynTensor>, bytes: &[u8]) -> Result<()> {
        let observed = self.observe(tensor)?;
        let len = model::numel(&observed.shape) * model::itemsize(observed.dtype);
        // SAFETY: the tensor has so many bytes, and no other thread uses them.
        unsafe { ptr::copy_nonoverlapping(bytes[..len].as_ptr(), tensor.data_ptr().cast_mut().cast(), len) };
        Ok(())
    }
}
