//! Speed of moves between the host and a CUDA device, without any framework: staged moves from and to pageable memory,
//! mapped already or fresh, compared with one copy from and to pinned memory.
//!
//! ```sh
//! cargo run --release -p truebridge-cuda --example moves
//! cargo run --release -p truebridge-cuda --example moves -- trials
//! ```
//!
//! With `trials` it measures what costs time, and compares moves with other pieces and threads. A text after it, such as
//! `16 threads`, picks the cuts whose names contain it. Without a device, it does so on a model of one.

mod model;
mod trials;

use bridge_core::{Copies, DType, Device, Layout, Result, Stream, Strided};
use bridge_cuda::Copier;
use bridge_cuda::Link;
use std::ptr;
use std::time::Instant;

const GPU: Device = Device::cuda(0);
const STREAM: Stream = Stream::LEGACY;

/// Bytes of a move.
const SIZES: [usize; 6] = [64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];

/// Moves of one size. The printed figure is the slowest of the fastest third.
const ROUNDS: usize = 15;

fn main() -> Result<()> {
    let only = std::env::args().nth(2);
    match std::env::args().nth(1).as_deref() {
        None => table(),
        Some("trials") => match bridge_cuda::link() {
            Ok(link) => trials::run(link, true, only.as_deref()),
            Err(_) => trials::run(&model::Model::new(1.0 / 55.0, 2000.0), false, only.as_deref()),
        },
        Some(other) => panic!("{other} is unknown: pass `trials` or nothing"),
    }
}

fn table() -> Result<()> {
    let link = bridge_cuda::link()?;
    println!("| direction | bytes | pinned, GB/s | staged | part | staged, fresh | part | staged, µs |");
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    // SAFETY: the callers' allocations have room, and `moved` waits.
    let usual = |from: Strided<'_>, to: Strided<'_>| unsafe { Copier.copy(from, to, 0, Some(STREAM)) };
    for nbytes in SIZES {
        let (device, pinned) = (allocate(link, nbytes)?, link.allocate_pinned(GPU, nbytes)?);
        let mut host: Vec<u8> = (0..nbytes).map(|at| (at % 251) as u8).collect();
        let kept = host.as_mut_ptr().expose_provenance();
        for down in [false, true] {
            let staged = |host| {
                let (from, to) =
                    if down { ((GPU, device), (Device::CPU, host)) } else { ((Device::CPU, host), (GPU, device)) };
                moved(link, &usual, from, to, nbytes)
            };
            let direct = timed(|| {
                let (from, to) =
                    if down { ((GPU, device), (Device::CPU, pinned)) } else { ((Device::CPU, pinned), (GPU, device)) };
                // SAFETY: both allocations have room, and the wait keeps them until the copy has run.
                unsafe { link.copy(from, to, nbytes, STREAM) }?;
                finish(link)
            })?;
            let there = timed(|| staged(kept))?;
            let speed = |seconds: f64| format!("{:.1} | {:.2}", nbytes as f64 / seconds / 1e9, direct / seconds);
            // A source is never fresh.
            let fresh = match down {
                true => speed(timed(|| staged(Vec::<u8>::with_capacity(nbytes).as_mut_ptr().expose_provenance()))?),
                false => "– | –".into(),
            };
            let (direction, pinned) = (if down { "down" } else { "up" }, nbytes as f64 / direct / 1e9);
            println!("| {direction} | {nbytes} | {pinned:.1} | {} | {fresh} | {:.1} |", speed(there), there * 1e6);
        }
        check(link, &usual, kept, device, nbytes)?;
        // SAFETY: both come from this link, and all work has been waited for.
        unsafe {
            link.free(GPU, device, STREAM)?;
            link.free_pinned(GPU, pinned)?;
        }
    }
    Ok(())
}

/// A move of one tensor into another.
type Move<'a> = &'a dyn Fn(Strided<'_>, Strided<'_>) -> Result<()>;

/// Moves bytes as a tensor, and waits for the stream.
fn moved(link: &dyn Link, copy: Move<'_>, from: (Device, usize), to: (Device, usize), nbytes: usize) -> Result<()> {
    let layout = Layout::new(DType::UINT8, &[nbytes as i64], None, 0)?;
    let side = |(device, data)| Strided { device, data, layout: &layout };
    copy(side(from), side(to))?;
    finish(link)
}

fn allocate(link: &dyn Link, nbytes: usize) -> Result<usize> {
    // SAFETY: the stream is a default stream.
    unsafe { link.allocate(GPU, nbytes, STREAM) }
}

fn finish(link: &dyn Link) -> Result<()> {
    // SAFETY: the stream is a default stream.
    let event = unsafe { link.record(GPU, STREAM) }?;
    let waited = link.wait(GPU, &event);
    link.release(GPU, event);
    waited
}

/// Returns seconds of a call: the end of the fastest third.
fn timed(mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut taken = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        call()?;
        taken.push(started.elapsed().as_secs_f64());
    }
    taken.sort_unstable_by(f64::total_cmp);
    Ok(taken[ROUNDS / 3])
}

/// Moves other bytes up and down again, and compares.
fn check(link: &dyn Link, copy: Move<'_>, host: usize, device: usize, nbytes: usize) -> Result<()> {
    // SAFETY: the caller's vector has as many bytes, and all work on it has been waited for.
    let bytes = unsafe { std::slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut::<u8>(host), nbytes) };
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 241) as u8);
    moved(link, copy, (Device::CPU, host), (GPU, device), nbytes)?;
    bytes.fill(0);
    moved(link, copy, (GPU, device), (Device::CPU, host), nbytes)?;
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == (at % 241) as u8), "{nbytes} bytes arrived wrong");
    Ok(())
}
