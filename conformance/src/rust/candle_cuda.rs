//! candle on a CUDA device under test.

use super::candle::{KINDS, Tensors, create, raised, scalar};
use super::in_one_stream;
use crate::{Capabilities, HostTensors, Observed, Spec, Subject};
use bridge_candle::Candle;
use bridge_core::{Adapter, DType, Device, Error, ErrorKind, Ordering, Result};
use candle_core::{DType as Kind, Device as Place, Tensor};
use cudarc::driver::{CudaSlice, CudaStream};
use std::sync::{Arc, Mutex, PoisonError};

/// candle on one CUDA device, in the one stream that it works in.
pub struct CandleCudaSubject {
    adapter: Candle,
    tensors: Tensors,
    place: Place,
    stream: Arc<CudaStream>,
    /// Memory that is copied to take time.
    ballast: Mutex<(CudaSlice<u8>, CudaSlice<u8>)>,
}

bridge_core::debug_fields!(impl[] CandleCudaSubject: adapter);

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does.
unsafe impl Adapter for CandleCudaSubject {
    type Tensor = Tensor;

    forward_adapter!(Tensor, adapter);
}

/// The dtypes for which candle has no kernel that fills or copies strided tensors on a device.
const WITHOUT_KERNELS: [DType; 3] = [DType::INT16, DType::INT32, DType::FLOAT8_E4M3FN];

/// Bytes that [`Subject::delay`] copies, and how often it does.
const BALLAST: (usize, u32) = (256 << 20, 40);

fn driver(error: cudarc::driver::DriverError) -> Error {
    Error::new(ErrorKind::Driver, format!("{error:?}"))
}

impl CandleCudaSubject {
    /// Makes the subject for a device, with its own stream.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] where there is no such device, and errors of candle.
    pub fn new(ordinal: usize) -> Result<Self> {
        let count = cudarc::driver::CudaContext::device_count().unwrap_or_default();
        if ordinal >= count.max(0) as usize {
            return Err(Error::new(ErrorKind::Missing, format!("there is no cuda:{ordinal}: the driver has {count}")));
        }
        let place = Place::new_cuda_with_stream(ordinal).map_err(raised)?;
        let device = place.as_cuda_device().map_err(raised)?;
        let stream = device.cuda_stream();
        let ballast = || stream.alloc_zeros::<u8>(BALLAST.0).map_err(driver);
        let ballast = Mutex::new((ballast()?, ballast()?));
        // SAFETY: the suite uses a tensor on one thread at a time, in the stream of the device, and its operation in
        // place writes only to elements.
        let adapter = unsafe { Candle::with_cuda(device) };
        Ok(Self { adapter, tensors: Tensors, place, stream, ballast })
    }
}

impl Subject for CandleCudaSubject {
    fn device(&self) -> Device {
        Device::cuda(self.stream.context().ordinal() as i32)
    }

    fn capabilities(&self) -> Capabilities {
        let dtypes = KINDS.iter().map(|(dtype, _)| *dtype).filter(|dtype| !WITHOUT_KERNELS.contains(dtype));
        Capabilities { dtypes: dtypes.collect(), copies: false, ..Capabilities::default() }
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::clone(bridge_cuda::ordering())
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Tensor> {
        let tensor = create(&self.place, spec, bytes)?;
        self.stream.synchronize().map_err(driver)?;
        Ok(tensor)
    }

    forward! { tensors:
        fn observe(tensor: &Tensor) -> Result<Observed>;
        fn read(tensor: &Tensor) -> Result<Vec<u8>>;
        fn write(tensor: &Tensor, bytes: &[u8]) -> Result<()>;
    }

    fn fill(&self, tensor: &mut Tensor, byte: u8) -> Result<()> {
        if tensor.elem_count() == 0 {
            return Ok(());
        }
        tensor.const_set(scalar(tensor.dtype(), byte).map_err(raised)?).map_err(raised)
    }

    fn allocate(&self, nbytes: usize) -> Result<Tensor> {
        // The driver allocates no tensor without bytes.
        let memory = Tensor::zeros(nbytes.max(1), Kind::U8, &self.place);
        memory.and_then(|memory| memory.narrow(0, 0, nbytes)).map_err(raised)
    }

    /// candle copies between tensors of one dtype only: its copy, made now, replaces the one that was allocated.
    fn snapshot(&self, from: &Tensor, into: &mut Tensor) -> Result<()> {
        if from.elem_count() > 0 {
            *into = from.force_contiguous().map_err(raised)?;
        }
        Ok(())
    }

    in_one_stream!(Tensor);

    fn delay(&self) -> Result<()> {
        let mut ballast = self.ballast.lock().unwrap_or_else(PoisonError::into_inner);
        let (from, to) = &mut *ballast;
        (0..BALLAST.1).try_for_each(|_| self.stream.memcpy_dtod(from, to)).map_err(driver)
    }

    fn settle(&self) -> Result<Option<usize>> {
        self.stream.synchronize().map_err(driver)?;
        Ok(None)
    }
}
