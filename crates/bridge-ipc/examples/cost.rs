//! What sharing costs on the host: the copy into memory that can be shared, the first open, and later ones.
//!
//! ```sh
//! cargo run --release -p truebridge-ipc --example cost
//! ```

use bridge_core::{Adapter, HostOnly, Options, Ordering, Result, transfer};
use bridge_ipc::{Exporter, Ipc, Message, Settings, Writing, open};
use bridge_ndarray::{HostArray, NdArray};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

fn main() -> Result<()> {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    let (from, exporter) = (ndarray(), Exporter::new(Settings::default())?);
    println!(
        "| bytes | tensors | share, µs | first open, µs | open, transfer and drop, median, µs |\n|--:|--:|--:|--:|--:|"
    );
    // SAFETY: the program writes to no tensor that it has shared.
    let ipc = unsafe { Ipc::new() };
    for (nbytes, tensors) in [(4 << 10, 1), (64 << 20, 1), (256 << 20, 1), (64 << 20, 300)] {
        let arrays: Vec<_> = (0..tensors).map(|_| HostArray::from(vec![1u8; nbytes / tensors])).collect();
        let start = Instant::now();
        let leaves: Vec<(&dyn Adapter<Tensor = HostArray>, &HostArray)> =
            arrays.iter().map(|array| (&from as _, array)).collect();
        let message = Message::of(&leaves, Some(Writing::Never), &ordering, &Options::default())
            .map_err(|failed| failed.error)?;
        let ticket = message.share(&exporter, Duration::from_secs(60), None)?;
        let shared = start.elapsed().as_micros();
        let mut times = Vec::new();
        for _ in 0..200 {
            let start = Instant::now();
            for tensor in open(&ticket)?.tensors {
                transfer(&ipc, &ndarray(), &tensor, &ordering, &Options::default())?;
            }
            times.push(start.elapsed().as_micros());
        }
        let first = times.remove(0);
        times.sort_unstable();
        println!("| {nbytes} | {tensors} | {shared} | {first} | {} |", times[times.len() / 2]);
        exporter.revoke(&ticket)?;
    }
    Ok(())
}
