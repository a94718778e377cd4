//! ONNX Runtime on a CUDA device under test.

use super::in_one_stream;
use super::ort::{element_of, observe, raised};
use crate::{Capabilities, Observed, Spec, Subject, model};
use bridge_core::{Adapter, DType, Device, Error, ErrorKind, Ordering, Result, Stream};
use bridge_ort::Ort;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError, result, sys};
use ort::editor::{Graph, Model, Node, ONNX_DOMAIN, Opset};
use ort::ep::{CUDA, ExecutionProvider};
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::Session;
use ort::value::{DynTensor, Outlet, Shape, SymbolicDimensions, TensorElementType, ValueType};
use std::cell::RefCell;
use std::sync::Arc;

/// ONNX Runtime on one CUDA device: memory of a session's allocator, and work in the session's compute stream.
///
/// It cannot copy one of its tensors to another, because nothing allocates outside of sessions: pair it with another
/// framework.
pub struct OrtCudaSubject {
    adapter: Ort,
    stream: Arc<CudaStream>,
    /// Keeps the session. It is not released: tensors may be freed a moment after the subject.
    allocator: &'static Allocator,
    /// Memory that is copied to take time.
    ballast: RefCell<(CudaSlice<u8>, CudaSlice<u8>)>,
}

bridge_core::debug_fields!(impl[] OrtCudaSubject: adapter);

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does.
unsafe impl Adapter for OrtCudaSubject {
    type Tensor = Arc<DynTensor>;

    forward_adapter!(Arc<DynTensor>, adapter);
}

/// Bytes that [`Subject::delay`] copies, and how often it does.
const BALLAST: (usize, u32) = (256 << 20, 40);

fn driver(error: DriverError) -> Error {
    Error::new(ErrorKind::Driver, format!("{error:?}"))
}

fn missing(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Missing, text.into())
}

/// Makes a session that works in `stream`. Its model adds a number to itself.
fn session(ordinal: usize, stream: &CudaStream) -> ort::Result<Session> {
    let number = |name| {
        let ty = TensorElementType::Float32;
        Outlet::new(
            name,
            ValueType::Tensor { ty, shape: Shape::new([]), dimension_symbols: SymbolicDimensions::empty(0) },
        )
    };
    let mut graph = Graph::new()?;
    graph.set_inputs([number("x")])?;
    graph.set_outputs([number("y")])?;
    graph.add_node(Node::new("Add", ONNX_DOMAIN, "add", ["x", "x"], ["y"], [])?)?;
    let mut model = Model::new([Opset::new(ONNX_DOMAIN, 22)?])?;
    model.add_graph(graph)?;
    // SAFETY: the stream is not destroyed.
    let provider =
        unsafe { CUDA::default().with_device_id(ordinal as i32).with_compute_stream(stream.cu_stream().cast()) };
    model.into_session(&Session::builder()?.with_execution_providers([provider.build().error_on_failure()])?)
}

impl OrtCudaSubject {
    /// Makes the subject for a device, with its own compute stream.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] where there is no such device, no ONNX Runtime, or one that is built without the CUDA
    /// provider, and what the driver and ONNX Runtime report.
    pub fn new(ordinal: usize) -> Result<Self> {
        bridge_cudarc::Cudarc::of_device(ordinal).map_err(|error| match error.kind() {
            ErrorKind::Device => missing(error.to_string()),
            _ => error,
        })?;
        let stream = CudaContext::new(ordinal).and_then(|context| context.new_stream()).map_err(driver)?;
        // The sessions and what is freed late use it without a reference.
        std::mem::forget(Arc::clone(&stream));
        // SAFETY: the subject keeps the stream.
        let handle = unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) };
        // SAFETY: the suite uses a tensor on one thread at a time. The stream is one of the device, and is not destroyed.
        // The subject has one session, which works in it.
        let adapter = unsafe { Ort::with_compute_stream(Device::cuda(ordinal as i32), handle)? };
        if !CUDA::default().is_available().map_err(raised)? {
            return Err(missing("this ONNX Runtime is built without the CUDA provider"));
        }
        let allocator = session(ordinal, &stream).and_then(|session| {
            let (place, kind) = (AllocationDevice::CUDA, AllocatorType::Device);
            Allocator::new(&session, MemoryInfo::new(place, ordinal as i32, kind, MemoryType::Default)?)
        });
        let allocator = Box::leak(Box::new(allocator.map_err(raised)?));
        let ballast = || stream.alloc_zeros::<u8>(BALLAST.0).map_err(driver);
        let ballast = RefCell::new((ballast()?, ballast()?));
        Ok(Self { adapter, stream, allocator, ballast })
    }

    fn allocated(&self, dtype: DType, shape: &[i64]) -> Result<Arc<DynTensor>> {
        let shape = Shape::new(shape.iter().copied());
        DynTensor::new(self.allocator, element_of(dtype)?, shape).map(Arc::new).map_err(raised)
    }

    /// Calls `body` with the address and the length in bytes of a tensor that has elements, with the context of the
    /// stream as the current one.
    fn with(
        &self,
        tensor: &DynTensor,
        body: impl FnOnce(sys::CUdeviceptr, usize) -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        let observed = observe(tensor)?;
        let len = model::numel(&observed.shape) * model::itemsize(observed.dtype);
        if len == 0 {
            return Ok(());
        }
        self.stream
            .context()
            .bind_to_thread()
            .and_then(|()| body(observed.address as sys::CUdeviceptr, len))
            .map_err(driver)
    }
}

impl Subject for OrtCudaSubject {
    fn device(&self) -> Device {
        Device::cuda(self.stream.context().ordinal() as i32)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { dtypes: self.adapter.profile().dtypes.clone(), copies: false, ..Capabilities::default() }
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::clone(bridge_cuda::ordering())
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<Arc<DynTensor>> {
        let tensor = self.allocated(spec.dtype, &spec.shape)?;
        self.write(&tensor, &bytes[spec.offset * model::itemsize(spec.dtype)..])?;
        self.stream.synchronize().map_err(driver)?;
        Ok(tensor)
    }

    fn observe(&self, tensor: &Arc<DynTensor>) -> Result<Observed> {
        let info = tensor.memory_info();
        if info.allocation_device() != AllocationDevice::CUDA {
            let text = format!("the tensor is in memory of {}", info.allocation_device().as_str());
            return Err(Error::new(ErrorKind::Device, text));
        }
        Ok(Observed { device: Device::cuda(info.device_id()), ..observe(tensor)? })
    }

    fn read(&self, tensor: &Arc<DynTensor>) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.with(tensor, |address, len| {
            bytes.resize(len, 0);
            // SAFETY: the tensor has so many bytes, and they are copied when the stream has run.
            unsafe { result::memcpy_dtoh_async(&mut bytes, address, self.stream.cu_stream()) }?;
            self.stream.synchronize()
        })?;
        Ok(bytes)
    }

    fn write(&self, tensor: &Arc<DynTensor>, bytes: &[u8]) -> Result<()> {
        // SAFETY: the tensor has so many bytes. The driver has read pageable memory when the call returns.
        self.with(tensor, |address, len| unsafe {
            result::memcpy_htod_async(address, &bytes[..len], self.stream.cu_stream())
        })
    }

    fn fill(&self, tensor: &mut Arc<DynTensor>, byte: u8) -> Result<()> {
        // SAFETY: the tensor has so many bytes.
        self.with(tensor, |address, len| unsafe {
            result::memset_d8_async(address, byte, len, self.stream.cu_stream())
        })
    }

    fn allocate(&self, nbytes: usize) -> Result<Arc<DynTensor>> {
        self.allocated(DType::UINT8, &[nbytes as i64])
    }

    fn snapshot(&self, from: &Arc<DynTensor>, into: &mut Arc<DynTensor>) -> Result<()> {
        let into = observe(into)?.address as sys::CUdeviceptr;
        // SAFETY: both tensors have so many bytes.
        self.with(from, |address, len| unsafe {
            result::memcpy_dtod_async(into, address, len, self.stream.cu_stream())
        })
    }

    in_one_stream!(Arc<DynTensor>);

    fn delay(&self) -> Result<()> {
        let (from, to) = &mut *self.ballast.borrow_mut();
        (0..BALLAST.1).try_for_each(|_| self.stream.memcpy_dtod(from, to)).map_err(driver)
    }

    fn settle(&self) -> Result<Option<usize>> {
        self.stream.synchronize().map_err(driver)?;
        Ok(None)
    }
}
