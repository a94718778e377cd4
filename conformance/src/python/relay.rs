//! A transfer between two adapters in Rust, over the ordering of the process: only the cost of the contract.

use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Layout, Lease, Memory,
    Offer, Options, Profile, Result, Reuse, Stream, Strides, Views, transfer,
};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Instant;

/// A framework whose tensors are leases, and whose memory is never reused.
struct Relay {
    profile: Profile,
    consumer: Arc<Current>,
    device: Device,
}

/// The one stream of a [`Relay`].
struct Current {
    stream: Option<Stream>,
    views: Views,
}

// SAFETY: a relay is used in the current stream of the suite.
unsafe impl Consumer for Current {
    fn current_stream(&self, _: Device) -> Result<Option<Stream>> {
        Ok(self.stream)
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

/// A tensor: an address, or a view.
enum Tensor {
    At(usize),
    View(Lease),
}

impl Relay {
    fn new(device: Device, stream: Option<Stream>) -> Self {
        let profile = Profile::export_only("relay")
            .with_dtypes(vec![DType::FLOAT32])
            .with_strides(Strides::Any)
            .with_alignment(1)
            .with_devices(vec![DeviceKind::CPU, DeviceKind::CUDA]);
        Self { profile, consumer: Arc::new(Current { stream, views: Views::default() }), device }
    }
}

/// Float32 elements of a tensor, in two dimensions.
const SHAPE: [i64; 2] = [256, 256];

// SAFETY: a capsule keeps its lease, and who takes it orders its own work.
unsafe impl Adapter for Relay {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, tensor: &Tensor) -> Result<Export> {
        let Tensor::At(data) = *tensor else {
            return Err(Error::new(ErrorKind::NotATensor, "a relay exports its own memory only"));
        };
        let layout = Layout::new(DType::FLOAT32, &SHAPE, None, 0)?;
        let bytes = layout.extent_at(data, None)?;
        let (stream, reuse) = (self.consumer.stream, Reuse::InStreamOrder);
        let allocation = Allocation::new(bytes, self.device, Access::ReadWrite, stream, reuse);
        // SAFETY: the caller of `relay` keeps the memory, and does not reuse it.
        let memory = unsafe { Memory::new(allocation, ()) };
        Export::at(data, DType::FLOAT32, layout, memory)
    }

    fn import(&self, offer: Offer) -> Result<Tensor> {
        Ok(Tensor::View(offer.accept(&self.profile, &self.consumer)?))
    }

    fn compact(&self, _: &Tensor) -> Result<Tensor> {
        Err(Error::new(ErrorKind::CopyNeeded, "a relay makes no copies"))
    }
}

/// Returns the nanoseconds of a transfer between two adapters in Rust, with the drop of its view, over 256 × 256
/// float32 at `address`. `streams` are those of the owner and of the consumer; `None` for host memory.
#[pyfunction]
pub(crate) fn relay(address: usize, device: i32, streams: Option<(u64, u64)>, calls: u32) -> PyResult<f64> {
    let device = if device < 0 { Device::CPU } else { Device::cuda(device) };
    // SAFETY: the subjects keep their streams.
    let of = |handle| Relay::new(device, Some(unsafe { Stream::from_handle(handle) }));
    let [from, to] = match streams {
        Some((owner, reader)) => [of(owner), of(reader)],
        None => [(); 2].map(|()| Relay::new(device, None)),
    };
    let (tensor, options, ordering) = (Tensor::At(address), Options::default(), bridge_cuda::ordering());
    let started = Instant::now();
    for _ in 0..calls {
        let (view, _) = transfer(&from, &to, &tensor, ordering, &options).map_err(super::refused)?;
        if let Tensor::View(lease) = view {
            drop(std::hint::black_box(lease));
        }
    }
    Ok(started.elapsed().as_nanos() as f64 / f64::from(calls))
}
