//! What a handoff between two adapters for Rust costs: time, and allocations by Rust. On the host, and where there is
//! one on a CUDA device.
//!
//! ```sh
//! LIBTORCH_USE_PYTORCH=1 cargo run --release -p truebridge-torch --no-default-features --features tch --example handoff
//! ```

use bridge_core::{Adapter, HostOnly, Options, Ordering, Result, Stream, transfer};
use bridge_cudarc::Cudarc;
use bridge_ndarray::NdArray;
use bridge_torch::Tch;
use cudarc::driver::CudaStream;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;
use tch::{Device, Kind, Tensor};

struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(1, Relaxed);
        // SAFETY: the caller's obligation.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's obligation.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Transfers of one measurement, and measurements.
const ROUNDS: (usize, usize) = (200, 50);

/// Prints the median time of a transfer and of the drop of its result, in nanoseconds.
fn measure<F, T>(
    name: &str,
    from: &dyn Adapter<Tensor = F>,
    to: &dyn Adapter<Tensor = T>,
    tensor: &F,
    ordering: &Arc<dyn Ordering>,
) -> Result<()> {
    let mut times = Vec::new();
    let mut results = Vec::with_capacity(ROUNDS.0);
    let mut allocated = 0;
    for _ in 0..ROUNDS.1 {
        let (before, start) = (ALLOCATED.load(Relaxed), Instant::now());
        for _ in 0..ROUNDS.0 {
            results.push(transfer(from, to, tensor, ordering, &Options::default())?.0);
        }
        let taken = start.elapsed();
        allocated = (ALLOCATED.load(Relaxed) - before).div_ceil(ROUNDS.0);
        let start = Instant::now();
        results.clear();
        times.push((taken.as_nanos() / ROUNDS.0 as u128, start.elapsed().as_nanos() / ROUNDS.0 as u128));
    }
    times.sort_unstable();
    let (there, back) = times[times.len() / 2];
    println!("{name:36} {there:6} ns, drop {back:6} ns, {allocated} allocations");
    Ok(())
}

fn main() -> Result<()> {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    let (tch, ndarray) = unsafe { (Tch::new()?, NdArray::new()) };
    let host: Arc<dyn Ordering> = Arc::new(HostOnly);
    let tensor = Tensor::zeros([1024, 1024], (Kind::Float, Device::Cpu));
    let (array, _) = transfer(&tch, &ndarray, &tensor, &host, &Options::default())?;
    measure("host: tch to ndarray", &tch, &ndarray, &tensor, &host)?;
    measure("host: ndarray to tch", &ndarray, &tch, &array, &host)?;
    measure("host: ndarray to ndarray", &ndarray, &ndarray, &array, &host)?;
    let other = match Cudarc::of_device(0) {
        Ok(other) => other,
        Err(error) => {
            println!("on a device: skipped: {error}");
            return Ok(());
        }
    };
    let ordering = bridge_cuda::ordering();
    let own = other.stream().context().new_stream().expect("a stream");
    // SAFETY: the streams outlive every tensor.
    let handle = |stream: &CudaStream| unsafe { Stream::from_handle(stream.cu_stream().addr() as u64) };
    // SAFETY: the stream is of this device, and lives as long as the process.
    unsafe { tch.set_current_stream(bridge_core::Device::cuda(0), handle(&own))? };
    std::mem::forget(Arc::clone(&own));
    let same = Cudarc::new(own)?;
    let tensor = Tensor::zeros([1024, 1024], (Kind::Float, Device::Cuda(0)));
    for (name, cudarc) in [("one stream", &same), ("across streams", &other)] {
        let (array, _) = transfer(&tch, cudarc, &tensor, ordering, &Options::default())?;
        measure(&format!("{name}: tch to cudarc"), &tch, cudarc, &tensor, ordering)?;
        measure(&format!("{name}: cudarc to tch"), cudarc, &tch, &array, ordering)?;
        measure(&format!("{name}: cudarc to cudarc"), cudarc, &same, &array, ordering)?;
    }
    Ok(())
}
