//! `tch` under test.

use super::padding;
use crate::{Capabilities, Observed, Spec, Subject, model};
use ::tch::{Cuda, Kind, TchError, Tensor};
use bridge_core::{Adapter, DType, Device, DeviceKind, Error, ErrorKind, Ordering, Pending, Result, Stream};
use bridge_torch::Tch;
use cudarc::driver::{CudaContext, CudaStream};
use std::sync::Arc;

/// `tch` on one device.
pub struct TchSubject {
    adapter: Tch,
    device: Device,
    /// Streams of the driver, which `tch` has none of.
    streams: Vec<Arc<CudaStream>>,
    /// Memory that is copied to take time.
    ballast: Option<(Tensor, Tensor)>,
}

bridge_core::debug_fields!(impl[] TchSubject: device);

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does.
unsafe impl Adapter for TchSubject {
    type Tensor = Tensor;

    forward_adapter!(Tensor, adapter);
}

/// The dtypes that the suite makes, with the name of each in `tch`, and the integer of the same size.
const KINDS: &[(DType, Kind, Kind)] = &[
    (DType::BOOL, Kind::Bool, Kind::Uint8),
    (DType::INT8, Kind::Int8, Kind::Uint8),
    (DType::INT16, Kind::Int16, Kind::Int16),
    (DType::INT32, Kind::Int, Kind::Int),
    (DType::INT64, Kind::Int64, Kind::Int64),
    (DType::UINT8, Kind::Uint8, Kind::Uint8),
    (DType::FLOAT16, Kind::Half, Kind::Int16),
    (DType::FLOAT32, Kind::Float, Kind::Int),
    (DType::FLOAT64, Kind::Double, Kind::Int64),
    (DType::BFLOAT16, Kind::BFloat16, Kind::Int16),
    (DType::COMPLEX64, Kind::ComplexFloat, Kind::Int64),
    (DType::COMPLEX128, Kind::ComplexDouble, Kind::Int64),
    (DType::FLOAT8_E4M3FN, Kind::Float8e4m3fn, Kind::Uint8),
    (DType::FLOAT8_E5M2, Kind::Float8e5m2, Kind::Uint8),
];

/// Bytes of the tensor that [`Subject::delay`] copies, and how often it does.
const BALLAST: (i64, u32) = (256 << 20, 40);

/// How many streams the suite has besides the default one.
const STREAMS: usize = 2;

fn raised(error: TchError) -> Error {
    Error::new(ErrorKind::Framework, error.to_string())
}

fn kind_of(dtype: DType) -> Result<Kind, TchError> {
    let found = KINDS.iter().find(|(known, ..)| *known == dtype).map(|(_, kind, _)| *kind);
    found.ok_or_else(|| TchError::Kind(format!("tch has no kind for {dtype}")))
}

/// Returns the same memory as integers, which no kernel changes; 16 bytes become two integers of 8.
fn bits(tensor: &Tensor) -> Result<Tensor> {
    let kind = tensor.f_kind().map_err(raised)?;
    let integer = KINDS.iter().find(|(_, known, _)| *known == kind).map_or(Kind::Uint8, |(.., integer)| *integer);
    let tensor =
        if kind == Kind::ComplexDouble { tensor.f_view_as_real().map_err(raised)? } else { tensor.shallow_clone() };
    tensor.f_view_dtype(integer).map_err(raised)
}

impl TchSubject {
    /// Makes the subject for a device.
    ///
    /// # Errors
    ///
    /// Those of [`Tch::new`], and [`ErrorKind::Missing`] where there is no such device.
    pub fn new(device: Device) -> Result<Self> {
        // SAFETY: the suite uses a tensor on one thread at a time.
        let adapter = unsafe { Tch::new()? };
        let mut subject = Self { adapter, device, streams: Vec::new(), ballast: None };
        if device.kind == DeviceKind::CUDA {
            if i64::from(device.index) >= Cuda::device_count() {
                return Err(Error::new(ErrorKind::Missing, format!("tch has no {device}")));
            }
            let driver = |error| Error::new(ErrorKind::Driver, format!("{error:?}"));
            let context = CudaContext::new(device.index as usize).map_err(driver)?;
            let made: std::result::Result<_, _> = (0..STREAMS).map(|_| context.new_stream()).collect();
            subject.streams = made.map_err(driver)?;
            let ballast = || Tensor::f_zeros([BALLAST.0], (Kind::Uint8, subject.place())).map_err(raised);
            subject.ballast = Some((ballast()?, ballast()?));
        }
        Ok(subject)
    }

    fn place(&self) -> ::tch::Device {
        match self.device.kind {
            DeviceKind::CUDA => ::tch::Device::Cuda(self.device.index as usize),
            _ => ::tch::Device::Cpu,
        }
    }

    /// Waits for the work in the current stream: a copy to the host does.
    fn wait(&self) -> Result<()> {
        let Some((one, _)) = &self.ballast else { return Ok(()) };
        one.f_narrow(0, 0, 1).and_then(|byte| byte.f_int64_value(&[0])).map(drop).map_err(raised)
    }

    /// Returns the base buffer of `spec`, and the tensor, both not initialised.
    fn unwritten(&self, spec: &Spec) -> Result<(Tensor, Tensor), TchError> {
        let kind = kind_of(spec.dtype)?;
        let nbytes = (spec.base * model::itemsize(spec.dtype)) as i64;
        let memory = Tensor::f_empty([nbytes + Spec::GRAIN as i64], (Kind::Uint8, self.place()))?;
        let memory = memory.f_narrow(0, padding(memory.data_ptr().addr(), spec.align) as i64, nbytes)?;
        let from = memory.f_view_dtype(kind)?.f_slice(0, spec.offset as i64, None, 1)?;
        let tensor = from.f_as_strided(&spec.shape[..], &spec.strides[..], None)?;
        let tensor = match spec.pending {
            Some(Pending::Conjugation) => tensor.f_conj()?,
            Some(Pending::Negation) => tensor.f_internal_neg_view()?,
            Some(Pending::NegatedConjugation) => tensor.f_conj()?.f_internal_neg_view()?,
            // Tensors of libtorch have strides in elements, so the capabilities leave packing out.
            _ => tensor,
        };
        Ok((memory, tensor))
    }
}

impl Subject for TchSubject {
    fn device(&self) -> Device {
        self.device
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            dtypes: KINDS.iter().map(|(dtype, ..)| *dtype).collect(),
            defers: vec![Pending::Conjugation, Pending::Negation, Pending::NegatedConjugation],
            gigabytes: true,
            ..Capabilities::default()
        }
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::clone(bridge_cuda::ordering())
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Tensor> {
        let (mut memory, tensor) = self.unwritten(spec).map_err(raised)?;
        Tensor::f_from_slice(bytes).and_then(|bytes| memory.f_copy_(&bytes)).map_err(raised)?;
        self.wait()?;
        Ok(tensor)
    }

    fn create_unwritten(&self, spec: &Spec) -> Option<Result<Tensor>> {
        Some(self.unwritten(spec).map(|(_, tensor)| tensor).map_err(raised))
    }

    fn observe(&self, tensor: &Tensor) -> Result<Observed> {
        let kind = tensor.f_kind().map_err(raised)?;
        let dtype = KINDS.iter().find(|(_, known, _)| *known == kind).map(|(dtype, ..)| *dtype);
        let device = match tensor.device() {
            ::tch::Device::Cuda(index) => Device::cuda(index as i32),
            _ => Device::CPU,
        };
        Ok(Observed {
            dtype: dtype.ok_or_else(|| Error::new(ErrorKind::Dtype, format!("{kind:?} is not expected")))?,
            shape: tensor.size(),
            strides: tensor.stride(),
            address: tensor.data_ptr().addr(),
            read_only: false,
            device,
        })
    }

    fn read(&self, tensor: &Tensor) -> Result<Vec<u8>> {
        let resolved = tensor.f_resolve_conj().and_then(|tensor| tensor.f_resolve_neg()).map_err(raised)?;
        let flat = bits(&resolved)?.f_contiguous().and_then(|bits| bits.f_reshape([-1])).map_err(raised)?;
        let host = flat.f_to_device(::tch::Device::Cpu).map_err(raised)?;
        let mut bytes = vec![0; host.numel() * host.kind().elt_size_in_bytes()];
        host.f_copy_data_u8(&mut bytes, host.numel()).map_err(raised)?;
        Ok(bytes)
    }

    fn write(&self, tensor: &Tensor, bytes: &[u8]) -> Result<()> {
        let mut bits = bits(tensor)?;
        let elements = Tensor::f_from_slice(bytes).and_then(|bytes| bytes.f_view_dtype(bits.kind()));
        let elements = elements.and_then(|elements| elements.f_view(&bits.size()[..])).map_err(raised)?;
        bits.f_copy_(&elements).map_err(raised)
    }

    fn fill(&self, tensor: &mut Tensor, byte: u8) -> Result<()> {
        let mut bits = bits(tensor)?;
        let value = match bits.kind() {
            Kind::Uint8 => i64::from(byte),
            Kind::Int16 => i16::from_ne_bytes([byte; 2]).into(),
            Kind::Int => i32::from_ne_bytes([byte; 4]).into(),
            _ => i64::from_ne_bytes([byte; 8]),
        };
        bits.f_fill_(value).map(drop).map_err(raised)
    }

    fn allocate(&self, nbytes: usize) -> Result<Tensor> {
        Tensor::f_empty([nbytes as i64], (Kind::Uint8, self.place())).map_err(raised)
    }

    fn snapshot(&self, from: &Tensor, into: &mut Tensor) -> Result<()> {
        let from = bits(from)?;
        let target = into.f_view_dtype(from.kind()).and_then(|into| into.f_view(&from.size()[..]));
        target.and_then(|mut target| target.f_copy_(&from)).map_err(raised)
    }

    fn share(&self, tensor: &Tensor) -> Tensor {
        tensor.shallow_clone()
    }

    fn drop_on_thread(&self, tensor: Tensor) {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(tensor));
        });
    }

    fn streams(&self) -> Vec<Stream> {
        // SAFETY: the subject keeps its streams.
        self.streams.iter().map(|stream| unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) }).collect()
    }

    unsafe fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let before = self.adapter.current_stream(self.device)?.unwrap_or(Stream::LEGACY);
        // SAFETY: the caller's promise. What was current before is so still.
        unsafe { self.adapter.set_current_stream(self.device, stream)? };
        let result = body();
        // SAFETY: as above.
        unsafe { self.adapter.set_current_stream(self.device, before)? };
        result
    }

    fn delay(&self) -> Result<()> {
        let Some((from, to)) = &self.ballast else { return Ok(()) };
        (0..BALLAST.1).try_for_each(|_| to.shallow_clone().f_copy_(from)).map_err(raised)
    }

    fn settle(&self) -> Result<Option<usize>> {
        if self.device.kind == DeviceKind::CUDA {
            Cuda::synchronize(self.device.index.into());
        }
        Ok(None)
    }
}
