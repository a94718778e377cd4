//! candle under test.

use super::padding;
use crate::{Capabilities, HostSubject, HostTensors, Observed, Spec, model};
use bridge_candle::Candle;
use bridge_core::{DType, Device, Error, ErrorKind, Result};
use candle_core::{CpuStorage, DType as Kind, Device as Place, InplaceOp1, Layout, Storage, Tensor};
#[cfg(feature = "candle-cuda")]
use {
    candle_core::{CudaStorage, backend::BackendStorage, cuda::CudaStorageSlice, scalar::Scalar},
    cudarc::driver::DevicePtr,
};

/// candle under test, on the host.
pub type CandleSubject = HostSubject<Candle, Tensors>;

/// candle, whose views are made by its own operations, and whose elements are written by one in place.
#[derive(Debug, Clone, Copy)]
pub struct Tensors;

impl Default for CandleSubject {
    fn default() -> Self {
        // SAFETY: the suite uses a tensor on one thread at a time, and its operation in place writes only to elements.
        Self::new(unsafe { Candle::new() }, Tensors).with_ordering(bridge_cuda::ordering().clone())
    }
}

pub(super) fn raised(error: candle_core::Error) -> Error {
    Error::new(ErrorKind::Framework, error.to_string())
}

macro_rules! kinds {
    ($($variant:ident = $dtype:ident;)*) => {
        pub(super) const KINDS: &[(DType, Kind)] = &[$((DType::$dtype, Kind::$variant)),*];

        /// Returns the address of the elements, and their length in bytes.
        fn start(storage: &mut CpuStorage) -> Option<(*mut u8, usize)> {
            match storage {
                $(CpuStorage::$variant(elements) => Some((elements.as_mut_ptr().cast(), size_of_val(&elements[..]))),)*
                _ => None,
            }
        }

        fn address(storage: &CpuStorage) -> usize {
            match storage {
                $(CpuStorage::$variant(elements) => elements.as_ptr().expose_provenance(),)*
                _ => 0,
            }
        }

        #[cfg(feature = "candle-cuda")]
        fn address_on_device(storage: &CudaStorage) -> usize {
            let stream = storage.device.cuda_stream();
            match &storage.slice {
                $(CudaStorageSlice::$variant(elements) => elements.device_ptr(&stream).0 as usize,)*
                _ => 0,
            }
        }

        /// Overwrites the storage on the device.
        #[cfg(feature = "candle-cuda")]
        fn upload(from: &CpuStorage, to: &mut CudaStorage) -> candle_core::Result<()> {
            match (from, &mut to.slice) {
                $((CpuStorage::$variant(from), CudaStorageSlice::$variant(slice)) => to.device.memcpy_htod(from, slice),)*
                _ => candle_core::bail!("no such dtype"),
            }
        }

        /// Returns the number with these bytes.
        #[cfg(feature = "candle-cuda")]
        pub(super) fn scalar(kind: Kind, byte: u8) -> candle_core::Result<Scalar> {
            let one = Tensor::zeros(1, kind, &Place::Cpu)?;
            one.inplace_op1(&Write(&vec![byte; kind.size_in_bytes()]))?;
            match &*one.storage_and_layout().0 {
                $(Storage::Cpu(CpuStorage::$variant(elements)) => Ok(Scalar::$variant(elements[0])),)*
                _ => candle_core::bail!("no such dtype"),
            }
        }
    };
}

kinds! {
    U8 = UINT8;
    U32 = UINT32;
    I16 = INT16;
    I32 = INT32;
    I64 = INT64;
    BF16 = BFLOAT16;
    F16 = FLOAT16;
    F32 = FLOAT32;
    F64 = FLOAT64;
    F8E4M3 = FLOAT8_E4M3FN;
}

fn kind_of(dtype: DType) -> Result<Kind> {
    let found = KINDS.iter().find(|(known, _)| *known == dtype).map(|(_, kind)| *kind);
    found.ok_or_else(|| Error::new(ErrorKind::Dtype, format!("candle has no {dtype}")))
}

/// Writes bytes to the elements, in row-major order.
struct Write<'a>(&'a [u8]);

impl InplaceOp1 for Write<'_> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((memory, len)) = start(storage) else { candle_core::bail!("no such dtype") };
        let size = self.0.len() / layout.shape().elem_count().max(1);
        for (i, element) in self.0.chunks_exact(size.max(1)).enumerate() {
            let (mut rest, mut at) = (i, layout.start_offset());
            for (length, stride) in layout.dims().iter().zip(layout.stride()).rev() {
                at += rest % length * stride;
                rest /= length;
            }
            assert!((at + 1) * size <= len, "the view is inside its storage");
            // SAFETY: the element lies in the storage, which nothing else borrows, and any bytes are a number.
            unsafe { memory.add(at * size).copy_from_nonoverlapping(element.as_ptr(), size) };
        }
        Ok(())
    }

    /// Changes the whole storage on the host.
    #[cfg(feature = "candle-cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let mut host = storage.to_cpu_storage()?;
        self.cpu_fwd(&mut host, layout)?;
        upload(&host, storage)
    }
}

/// Makes the view of `base` that `spec` describes, dimension by dimension.
fn view(base: &Tensor, spec: &Spec) -> candle_core::Result<Tensor> {
    let dims: Vec<_> = spec.shape.iter().map(|length| *length as usize).collect();
    if dims.contains(&0) {
        return base.narrow(0, 0, 0)?.reshape(dims);
    }
    let reach = |from: usize| -> usize {
        let steps = dims.iter().zip(&spec.strides).skip(from).map(|(length, stride)| (length - 1) * *stride as usize);
        steps.sum::<usize>() + 1
    };
    let mut view = base.narrow(0, spec.offset, reach(0))?;
    for (d, (length, stride)) in dims.iter().zip(&spec.strides).enumerate() {
        view = match *stride as usize {
            0 => {
                let shape = [view.dims(), &[*length]].concat();
                let last = view.dims().len();
                view.unsqueeze(last)?.broadcast_as(shape)?.transpose(last - 1, last)?
            }
            step => view.unfold(d, reach(d + 1), step)?,
        };
    }
    view.squeeze(dims.len())
}

pub(super) fn create(place: &Place, spec: &Spec, bytes: &[u8]) -> Result<Tensor> {
    let size = model::itemsize(spec.dtype);
    let whole = Tensor::zeros(spec.base + Spec::GRAIN / size, kind_of(spec.dtype)?, place).map_err(raised)?;
    let skipped = padding(Tensors.observe(&whole)?.address, spec.align) / size;
    let base = whole.narrow(0, skipped, spec.base).map_err(raised)?;
    base.inplace_op1(&Write(bytes)).map_err(raised)?;
    view(&base, spec).map_err(raised)
}

impl HostTensors for Tensors {
    type Tensor = Tensor;

    fn capabilities(&self) -> Capabilities {
        Capabilities { dtypes: KINDS.iter().map(|(dtype, _)| *dtype).collect(), ..Capabilities::default() }
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Tensor> {
        create(&Place::Cpu, spec, bytes)
    }

    fn observe(&self, tensor: &Tensor) -> Result<Observed> {
        let (storage, layout) = tensor.storage_and_layout();
        let (address, device) = match &*storage {
            Storage::Cpu(storage) => (address(storage), Device::CPU),
            #[cfg(feature = "candle-cuda")]
            Storage::Cuda(storage) => {
                let ordinal = storage.device.cuda_stream().context().ordinal();
                (address_on_device(storage), Device::cuda(ordinal as i32))
            }
            _ => return Err(Error::new(ErrorKind::Device, "not expected")),
        };
        let dtype = KINDS.iter().find(|(_, kind)| *kind == tensor.dtype()).map(|(dtype, _)| *dtype);
        let dtype = dtype.ok_or_else(|| Error::new(ErrorKind::Dtype, "not expected"))?;
        let signed = |dims: &[usize]| dims.iter().map(|dim| *dim as i64).collect();
        Ok(Observed {
            dtype,
            shape: signed(layout.dims()),
            strides: signed(layout.stride()),
            address: address + layout.start_offset() * model::itemsize(dtype),
            read_only: false,
            device,
        })
    }

    /// candle's own kernel makes the elements compact, on the host: for a device it lacks some.
    fn read(&self, tensor: &Tensor) -> Result<Vec<u8>> {
        if tensor.elem_count() == 0 {
            return Ok(Vec::new());
        }
        let compact = tensor.to_device(&Place::Cpu).and_then(|host| host.contiguous()).map_err(raised)?;
        let observed = self.observe(&compact)?;
        let len = compact.elem_count() * model::itemsize(observed.dtype);
        // SAFETY: the tensor keeps its compact elements, and no other thread writes to them.
        Ok(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(observed.address), len) }.to_vec())
    }

    fn write(&self, tensor: &Tensor, bytes: &[u8]) -> Result<()> {
        // candle writes to no view that repeats elements: of those, the last write counts.
        let (mut view, mut bytes) = (tensor.clone(), bytes.to_vec());
        for d in (0..tensor.dims().len()).rev().filter(|d| tensor.stride()[*d] == 0) {
            let line = bytes.len() / view.elem_count().max(1) * view.dims()[d + 1..].iter().product::<usize>();
            let lines = bytes.chunks_exact((line * view.dims()[d]).max(1));
            bytes = lines.flat_map(|lines| lines[lines.len() - line..].to_vec()).collect();
            view = view.narrow(d, 0, view.dims()[d].min(1)).and_then(|view| view.squeeze(d)).map_err(raised)?;
        }
        view.inplace_op1(&Write(&bytes)).map_err(raised)
    }
}
