//! What costs time in a move: the link in pieces, only the host's part, and moves that are cut differently.

use crate::model::Model;
use crate::{GPU, STREAM, allocate, finish, moved, timed};
use bridge_core::{Device, Result, Stream, Strided};
use bridge_cuda::Link;
use bridge_cuda::{Cut, Cuts, Trial};
use std::time::Instant;

const MIB: usize = 1 << 20;

/// Bytes of the moves that are compared.
const SIZES: [usize; 4] = [16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB];

/// Cuts to compare: the usual one with other figures.
fn cuts() -> Vec<(String, Cuts)> {
    let Cuts { down, up, .. } = Trial::USUAL;
    let mut all = vec![("usual".to_string(), Trial::USUAL)];
    let mut add = |name: String, change: &dyn Fn(Cut) -> Cut| {
        all.push((name, Cuts { down: change(down), up: change(up), ..Trial::USUAL }))
    };
    for share in [1, 2, 8] {
        add(format!("share {share} MiB"), &|cut| Cut { share: share * MIB, ..cut });
    }
    for threads in [5, 6, 8, 10, 12, 14, 16] {
        for each in [1.0, 1.5, 2.0] {
            let buffers = (threads as f64 * each) as usize;
            add(format!("{threads} threads, {buffers} buffers"), &|cut| Cut { threads, buffers, ..cut });
        }
    }
    for shortest in [128, 256, 1024, 2048] {
        add(format!("shortest {shortest} KiB"), &|cut| Cut { shortest: shortest << 10, ..cut });
    }
    for longest in [1, 2, 3, 4, 6, 8] {
        add(format!("longest {longest} MiB"), &|cut| Cut { longest: longest * MIB, ..cut });
    }
    add("usual again".into(), &|cut| cut);
    all
}

/// Prints all tables, or with `only` the cuts whose names contain that text. Without a device, `link` is a model of one.
pub fn run(link: &dyn Link, is_real: bool, only: Option<&str>) -> Result<()> {
    if let Some(only) = only {
        for (name, cuts) in cuts().into_iter().filter(|(name, _)| name.contains(only)) {
            row(link, &name, cuts, &SIZES)?;
        }
        return Ok(());
    }
    if is_real {
        in_pieces(link)?;
    }
    println!("\nOnly the host: a link that takes no time. GB/s; then faults and ms of the drop of fresh memory.\n");
    let instant = Model::new(0.0, 0.0);
    for threads in [1, 2, 4, 8, 12, 16] {
        let change = |cut| Cut { threads, buffers: threads * 2, ..cut };
        let Cuts { down, up, .. } = Trial::USUAL;
        row(
            &instant,
            &format!("{threads} threads"),
            Cuts { down: change(down), up: change(up), ..Trial::USUAL },
            &[256 * MIB],
        )?;
    }
    println!(
        "\nCuts. GB/s up, down, down into fresh memory; then faults and ms of the drop, for MiB of {:?}\n",
        SIZES.map(|size| size / MIB)
    );
    for (name, cuts) in cuts() {
        row(link, &name, cuts, &SIZES)?;
    }
    Ok(())
}

/// Measures a cut.
fn row(link: &dyn Link, name: &str, cuts: Cuts, sizes: &[usize]) -> Result<()> {
    let trial = Trial::new(link, cuts);
    let copy = |from: Strided<'_>, to: Strided<'_>| {
        // SAFETY: the callers' allocations have room, and `moved` waits.
        unsafe { trial.copy(from, to, STREAM) }
    };
    print!("| {name} ");
    for &nbytes in sizes {
        let device = allocate(link, nbytes)?;
        let mut host = vec![1u8; nbytes];
        let kept = host.as_mut_ptr().expose_provenance();
        let speed = |seconds: f64| nbytes as f64 / seconds / 1e9;
        let up = timed(|| moved(link, &copy, (Device::CPU, kept), (GPU, device), nbytes))?;
        let down = timed(|| moved(link, &copy, (GPU, device), (Device::CPU, kept), nbytes))?;
        let (mut dropped, mut rounds, before) = (0.0, 0.0, faults());
        let fresh = timed(|| {
            let mut target = Vec::<u8>::with_capacity(nbytes);
            let address = target.as_mut_ptr().expose_provenance();
            let done = moved(link, &copy, (GPU, device), (Device::CPU, address), nbytes);
            let moved = Instant::now();
            drop(target);
            dropped += moved.elapsed().as_secs_f64();
            rounds += 1.0;
            done
        })?;
        let faults = (faults() - before) / rounds;
        let (up, down, fresh) = (speed(up), speed(down), speed(fresh));
        print!("| {up:.1} {down:.1} {fresh:.1} ({faults:.0}, {:.1} ms) ", dropped / rounds * 1e3);
        // SAFETY: the memory comes from this link, and all work has been waited for.
        unsafe { link.free(GPU, device, STREAM)? };
    }
    println!("|");
    Ok(())
}

/// Copies between pinned memory and the device in pieces, each with its event, on one thread and on two with a stream
/// each.
fn in_pieces(link: &dyn Link) -> Result<()> {
    const NBYTES: usize = 256 * MIB;
    println!("\nThe link in pieces with an event each, of {} MiB. GB/s\n", NBYTES / MIB);
    println!("| piece, KiB | up | down | up, two streams | down, two streams |\n|--:|--:|--:|--:|--:|");
    let (device, pinned) = (allocate(link, NBYTES)?, link.allocate_pinned(GPU, NBYTES)?);
    finish(link)?;
    for piece in [64, 256, 512, 1024, 2048, 4096, 8192, NBYTES >> 10].map(|kib| kib << 10) {
        let part = |bytes: std::ops::Range<usize>, down: bool, stream: Stream| -> Result<()> {
            let mut events = Vec::new();
            for start in bytes.step_by(piece) {
                let ends = [(Device::CPU, pinned + start), (GPU, device + start)];
                let (from, to) = if down { (ends[1], ends[0]) } else { (ends[0], ends[1]) };
                // SAFETY: both allocations have room, and the wait keeps them until the copy has run.
                unsafe { link.copy(from, to, piece, stream) }?;
                // SAFETY: the stream is the link's own, or a default stream.
                events.push(unsafe { link.record(GPU, stream) }?);
            }
            let waited = events.last().map_or(Ok(()), |event| link.wait(GPU, event));
            events.into_iter().for_each(|event| link.release(GPU, event));
            waited
        };
        print!("| {} ", piece >> 10);
        for down in [false, true] {
            print!("| {:.1} ", NBYTES as f64 / timed(|| part(0..NBYTES, down, STREAM))? / 1e9);
        }
        for down in [false, true] {
            let both = || {
                let half = NBYTES / 2;
                std::thread::scope(|scope| {
                    let other = scope.spawn(|| part(0..half, down, Stream::PER_THREAD));
                    let here = part(half..NBYTES, down, Stream::PER_THREAD);
                    here.and(other.join().expect("no panic"))
                })
            };
            match piece <= NBYTES / 2 {
                true => print!("| {:.1} ", NBYTES as f64 / timed(both)? / 1e9),
                false => print!("| – "),
            }
        }
        println!("|");
    }
    // SAFETY: both come from this link, and all work has been waited for.
    unsafe {
        link.free(GPU, device, STREAM)?;
        link.free_pinned(GPU, pinned)
    }
}

/// Page faults of the process until now.
fn faults() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    after.split_whitespace().nth(7).and_then(|field| field.parse().ok()).unwrap_or(f64::NAN)
}
