//! `cudarc` under test.

use super::padding;
use crate::{Capabilities, Observed, Spec, Subject, model};
use ::cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, LaunchConfig, PushKernelArg,
    result, sys,
};
use ::cudarc::nvrtc::Ptx;
use bridge_core::{
    Access, Adapter, Consumer, DType, Device, Error, ErrorKind, Export, Offer, Order, Ordering, Profile, Result, Stream,
};
use bridge_cudarc::{Cudarc, DeviceArray};
use std::cell::RefCell;
use std::sync::Arc;

/// `cudarc` on one device: kernels of the suite, launched in the current of several streams.
pub struct CudarcSubject {
    context: Arc<CudaContext>,
    /// The adapter for the default stream.
    adapter: Cudarc,
    current: RefCell<Cudarc>,
    /// The streams besides the default one.
    streams: Vec<Arc<CudaStream>>,
    gather: CudaFunction,
    scatter: CudaFunction,
    fill: CudaFunction,
    spin: CudaFunction,
}

bridge_core::debug_fields!(impl[] CudarcSubject: adapter);

/// What `kernels.cu` is compiled to.
const KERNELS: &str = include_str!("kernels.ptx");

/// The parameter of the kernels (`kernels.cu`).
#[derive(Clone, Copy)]
#[repr(C)]
struct Walk {
    strided: sys::CUdeviceptr,
    compact: sys::CUdeviceptr,
    count: i64,
    /// In elements.
    lengths: [i64; MAX_DIMS],
    /// In bytes.
    strides: [i64; MAX_DIMS],
    ndim: i32,
    itemsize: i32,
    byte: i32,
}

/// The kernels' own size of it, in bytes.
const _: () = assert!(size_of::<Walk>() == 1064);

// SAFETY: it is the struct of the kernels, and plain data.
unsafe impl DeviceRepr for Walk {}

const MAX_DIMS: usize = 64;

/// Cycles of a delay: about three milliseconds.
const CYCLES: i64 = 6_000_000;

/// How many streams the suite has besides the default one.
const STREAMS: usize = 2;

/// The dtypes that the suite makes.
const DTYPES: &[DType] = &[
    DType::BOOL,
    DType::INT8,
    DType::INT16,
    DType::INT32,
    DType::INT64,
    DType::UINT8,
    DType::UINT16,
    DType::UINT32,
    DType::UINT64,
    DType::FLOAT16,
    DType::FLOAT32,
    DType::FLOAT64,
    DType::BFLOAT16,
    DType::COMPLEX64,
    DType::COMPLEX128,
    DType::FLOAT8_E4M3FN,
    DType::FLOAT8_E5M2,
];

fn raised(error: DriverError) -> Error {
    Error::new(ErrorKind::Driver, format!("{error:?}"))
}

// SAFETY: it does what the inner adapter does.
unsafe impl Adapter for CudarcSubject {
    type Tensor = DeviceArray;

    fn profile(&self) -> &Profile {
        self.adapter.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.current.borrow().consumer()
    }

    fn export(&self, array: &DeviceArray) -> Result<Export> {
        self.current.borrow().export(array)
    }

    fn import(&self, offer: Offer) -> Result<DeviceArray> {
        self.current.borrow().import(offer)
    }

    fn compact(&self, array: &DeviceArray) -> Result<DeviceArray> {
        self.current.borrow().compact(array)
    }

    fn overwritten(&self, array: &DeviceArray) -> Result<()> {
        self.current.borrow().overwritten(array)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<DeviceArray> {
        // SAFETY: the caller's obligation.
        unsafe { self.current.borrow().empty(device, dtype, shape, order) }
    }
}

impl CudarcSubject {
    /// Makes the subject for a device.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] where there is no such device, and what the driver reports.
    pub fn new(ordinal: usize) -> Result<Self> {
        let adapter = Cudarc::of_device(ordinal).map_err(|error| match error.kind() {
            ErrorKind::Device => Error::new(ErrorKind::Missing, error.to_string()),
            _ => error,
        })?;
        let context = Arc::clone(adapter.stream().context());
        let made = || -> std::result::Result<Self, DriverError> {
            let module = context.load_module(Ptx::from_src(KERNELS.trim_end_matches('\0')))?;
            let streams = (0..STREAMS).map(|_| context.new_stream()).collect::<std::result::Result<_, _>>()?;
            Ok(Self {
                current: RefCell::new(adapter.clone()),
                streams,
                gather: module.load_function("gather")?,
                scatter: module.load_function("scatter")?,
                fill: module.load_function("fill")?,
                spin: module.load_function("spin")?,
                context: Arc::clone(&context),
                adapter,
            })
        };
        made().map_err(raised)
    }

    fn stream(&self) -> Arc<CudaStream> {
        Arc::clone(self.current.borrow().stream())
    }

    /// Launches a kernel over the elements of an array, in the current stream. An array records its last work in a
    /// separate stream: the current one waits for that, and that waits for the current one.
    fn launch(&self, kernel: &CudaFunction, array: &DeviceArray, compact: sys::CUdeviceptr, byte: u8) -> Result<()> {
        const THREADS: u32 = 256;
        const MOST_BLOCKS: usize = 1 << 16;
        let (layout, itemsize) = (array.layout(), model::itemsize(array.dtype()));
        let count = layout.numel();
        if count == 0 {
            return Ok(());
        }
        let mut walk = Walk {
            strided: array.data(),
            compact,
            count: count as i64,
            lengths: [0; MAX_DIMS],
            strides: [0; MAX_DIMS],
            ndim: layout.shape().len() as i32,
            itemsize: itemsize as i32,
            byte: byte.into(),
        };
        walk.lengths[..layout.shape().len()].copy_from_slice(layout.shape());
        for (to, stride) in walk.strides.iter_mut().zip(layout.strides()) {
            *to = stride * itemsize as i64;
        }
        let blocks = count.div_ceil(THREADS as usize).min(MOST_BLOCKS) as u32;
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let stream = self.stream();
        let launch = || {
            stream.join(array.stream())?;
            // SAFETY: the parameter is the kernel's. It touches the elements of the array, and as many compact ones.
            unsafe { stream.launch_builder(kernel).arg(&walk).launch(config) }?;
            array.stream().join(&stream)
        };
        launch().map_err(raised)
    }

    /// Allocates bytes in the current stream, and returns the address of the first one that the alignment allows.
    fn allocated(&self, spec: &Spec) -> Result<(CudaSlice<u8>, sys::CUdeviceptr)> {
        let (stream, nbytes) = (self.stream(), spec.base * model::itemsize(spec.dtype));
        // SAFETY: any byte is a value of `u8`.
        let memory = unsafe { stream.alloc::<u8>(nbytes + Spec::GRAIN) }.map_err(raised)?;
        let start = memory.device_ptr(&stream).0;
        Ok((memory, start + padding(start as usize, spec.align) as sys::CUdeviceptr))
    }

    /// Returns the view of the bytes from `start` on: of a slice where `cudarc` has such elements, which is freed in
    /// the order of its stream, and of an address with an owner otherwise.
    fn view(&self, spec: &Spec, (memory, start): (CudaSlice<u8>, sys::CUdeviceptr)) -> Result<DeviceArray> {
        let (stream, itemsize) = (self.stream(), model::itemsize(spec.dtype));
        let skipped = (start - memory.device_ptr(&stream).0) as usize / itemsize;
        let (shape, strides, offset) = (&*spec.shape, Some(&*spec.strides), skipped + spec.offset);
        macro_rules! slice_or_address {
            ($($dtype:ident: $element:ty),*) => {
                match spec.dtype {
                    $(DType::$dtype if !spec.read_only => {
                        let len = memory.len() / itemsize;
                        // SAFETY: the memory is the slice's, which gives it up, and any bytes are such an element.
                        let slice = unsafe { stream.upgrade_device_ptr::<$element>(memory.leak(), len) };
                        DeviceArray::from_slice(slice, shape, strides, offset)
                    })*
                    dtype => {
                        let data = start + (spec.offset * itemsize) as sys::CUdeviceptr;
                        let access = if spec.read_only { Access::ReadOnly } else { Access::ReadWrite };
                        // SAFETY: every element lies in the slice, which has no other user, and is freed in the order
                        // of the stream.
                        unsafe { DeviceArray::from_raw(data, dtype, (shape, strides), access, &stream, memory) }
                    }
                }
            };
        }
        slice_or_address!(INT16: i16, INT32: i32, INT64: i64, UINT8: u8, UINT32: u32, FLOAT32: f32, FLOAT64: f64)
    }
}

impl Subject for CudarcSubject {
    fn device(&self) -> Device {
        Device::cuda(self.context.ordinal() as i32)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            dtypes: DTYPES.into(),
            negative_strides: true,
            read_only: true,
            gigabytes: true,
            copies: false,
            ..Capabilities::default()
        }
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::clone(bridge_cuda::ordering())
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<DeviceArray> {
        let (memory, start) = self.allocated(spec)?;
        let write = || {
            let stream = self.stream();
            if !bytes.is_empty() {
                self.context.bind_to_thread()?;
                // SAFETY: the slice has room for as many bytes, and no other user; the wait below keeps them.
                unsafe { result::memcpy_htod_async(start, bytes, stream.cu_stream()) }?;
            }
            stream.synchronize()
        };
        write().map_err(raised)?;
        self.view(spec, (memory, start))
    }

    fn create_unwritten(&self, spec: &Spec) -> Option<Result<DeviceArray>> {
        Some(self.allocated(spec).and_then(|memory| self.view(spec, memory)))
    }

    fn observe(&self, array: &DeviceArray) -> Result<Observed> {
        Ok(Observed {
            dtype: array.dtype(),
            shape: array.layout().shape().into(),
            strides: array.layout().strides().into(),
            address: array.data() as usize,
            read_only: array.access().forbids_writes(),
            device: array.device(),
        })
    }

    fn read(&self, array: &DeviceArray) -> Result<Vec<u8>> {
        let (stream, nbytes) = (self.stream(), array.layout().nbytes());
        if nbytes == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: any byte is a value of `u8`.
        let compact = unsafe { stream.alloc::<u8>(nbytes) }.map_err(raised)?;
        self.launch(&self.gather, array, compact.device_ptr(&stream).0, 0)?;
        let bytes = stream.clone_dtoh(&compact).map_err(raised)?;
        stream.synchronize().map_err(raised)?;
        Ok(bytes)
    }

    fn write(&self, array: &DeviceArray, bytes: &[u8]) -> Result<()> {
        if array.access().forbids_writes() {
            return Err(Error::new(ErrorKind::ReadOnly, "the array is read-only"));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let stream = self.stream();
        let compact = stream.clone_htod(bytes).map_err(raised)?;
        self.launch(&self.scatter, array, compact.device_ptr(&stream).0, 0)
    }

    fn fill(&self, array: &mut DeviceArray, byte: u8) -> Result<()> {
        self.launch(&self.fill, array, 0, byte)
    }

    fn allocate(&self, nbytes: usize) -> Result<DeviceArray> {
        // SAFETY: any byte is a value of `u8`.
        let memory = unsafe { self.stream().alloc::<u8>(nbytes.max(1)) }.map_err(raised)?;
        DeviceArray::from_slice(memory, &[nbytes as i64], None, 0)
    }

    fn snapshot(&self, from: &DeviceArray, into: &mut DeviceArray) -> Result<()> {
        let stream = self.stream();
        stream.join(into.stream()).map_err(raised)?;
        self.launch(&self.gather, from, into.data(), 0)?;
        into.stream().join(&stream).map_err(raised)
    }

    fn share(&self, array: &DeviceArray) -> DeviceArray {
        array.clone()
    }

    fn drop_on_thread(&self, array: DeviceArray) {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(array));
        });
    }

    fn streams(&self) -> Vec<Stream> {
        self.streams.iter().map(|stream| handle_of(stream)).collect()
    }

    unsafe fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let mut known = self.streams.iter().chain([self.adapter.stream()]);
        let found = known.find(|known| handle_of(known) == stream);
        let found =
            found.ok_or_else(|| Error::new(ErrorKind::Argument, format!("{stream:?} is not a stream of cudarc")));
        self.within(Arc::clone(found?), body)
    }

    /// `cudarc` knows no stream only by its handle: an array keeps its stream.
    fn on_fresh_stream(&self, _: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.within(self.context.new_stream().map_err(raised)?, body)
    }

    fn delay(&self) -> Result<()> {
        let (stream, config) = (self.stream(), LaunchConfig::for_num_elems(1));
        // SAFETY: the kernel takes one number, and touches no memory.
        unsafe { stream.launch_builder(&self.spin).arg(&CYCLES).launch(config) }.map(drop).map_err(raised)
    }

    fn settle(&self) -> Result<Option<usize>> {
        self.context.synchronize().map_err(raised)?;
        Ok(None)
    }
}

impl CudarcSubject {
    /// Runs `body` with a stream as the current one.
    fn within(&self, stream: Arc<CudaStream>, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let before = self.current.replace(Cudarc::new(stream)?);
        let result = body();
        self.current.replace(before);
        result
    }
}

/// Returns the handle of a stream.
fn handle_of(stream: &CudaStream) -> Stream {
    // SAFETY: the subject keeps the stream.
    unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) }
}
