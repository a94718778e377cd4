//! Flaws where tensors are converted between processes, and faults in the adapters of the frameworks: each is planted
//! into a separate process, and must be found there.

use super::adapters::Known;
use super::job::Job;
use crate::fault::{FaultReport, REAL_FAULTS, RealFault};
use crate::names::{PairName, adapter_of, remote};
use crate::processes::{Direction, FLAWS};
use crate::protocol::Message;
use crate::report::Host;
use crate::watch::Watch;
use bridge_core::{Device, DeviceKind};
use std::ffi::OsString;

/// The cases with which a flaw must be found: those of a run on the host. A property stops at the first that fails.
const CASES: u32 = crate::WHOLE;

/// What is planted into a pair on a device.
struct Planted {
    name: &'static str,
    caught_by: &'static str,
    pair: PairName,
    device: Device,
}

/// Returns the flaws between two processes that have a meaning on the device, each with the properties that found it.
/// Without a framework that writes to its tensors there, there are none.
pub fn run(launch: &[OsString], host: &Host, device: Device, seed: u64, options: &super::Options) -> Vec<FaultReport> {
    let streams = device.kind != DeviceKind::CPU;
    let framework = if streams { "torch" } else { "numpy" };
    let planted = FLAWS.iter().filter(|planted| streams || !planted.streams).map(|planted| {
        let (here, there) = (framework.to_owned(), remote(framework));
        let (from, to) = if planted.direction == Direction::There { (here, there) } else { (there, here) };
        Planted { name: planted.name, caught_by: planted.caught_by, pair: PairName { from, to }, device }
    });
    planted.filter_map(|planted| judged(&planted, launch, host, seed, options)).collect()
}

/// Returns the faults in the adapters of the installed frameworks, each with the properties that found it. On a CUDA
/// device those of the host are among them.
pub fn run_real(
    launch: &[OsString],
    host: &Host,
    device: Device,
    seed: u64,
    options: &super::Options,
) -> Vec<FaultReport> {
    let here = |fault: &&RealFault| !fault.on_device || device.kind != DeviceKind::CPU;
    let planted = REAL_FAULTS.iter().filter(here).map(|fault| Planted {
        name: fault.name,
        caught_by: fault.caught_by,
        pair: PairName { from: fault.from.into(), to: fault.to.into() },
        device: if fault.on_device { device } else { Device::CPU },
    });
    planted.filter_map(|planted| judged(&planted, launch, host, seed, options)).collect()
}

/// Returns what found a fault; `None` where a framework of its pair is not installed.
fn judged(
    planted: &Planted,
    launch: &[OsString],
    host: &Host,
    seed: u64,
    options: &super::Options,
) -> Option<FaultReport> {
    let pair = &planted.pair;
    let known = [&pair.from, &pair.to].map(|name| Known::named(adapter_of(name)));
    if known.iter().any(|known| known.is_none_or(|known| !host.versions.contains_key(known.name))) {
        return None;
    }
    let patience = super::USUAL;
    let device = planted.device;
    let job = Job { launch, pair, device, cases: CASES, seed, budget: None, patience, options };
    Some(FaultReport {
        fault: planted.name.into(),
        must_be_caught_by: planted.caught_by.into(),
        caught_by: caught_by(&job, planted),
    })
}

/// Returns the properties that failed, or in which the process died.
fn caught_by(job: &Job<'_>, planted: &Planted) -> Vec<String> {
    let more = [
        format!("--plant={}", planted.name),
        format!("--properties={}", planted.caught_by),
        format!("--cases={}", job.cases),
        format!("--seed={}", job.seed),
    ];
    let Ok(mut watch) = Watch::start(&job.worker(more), &job.environment(), job.patience) else { return Vec::new() };
    let (mut at, mut found) = (None, Vec::new());
    loop {
        match watch.next() {
            Ok(Message::Started { property, .. }) => at = Some(property),
            Ok(Message::Finished(property)) => {
                at = None;
                found.extend(property.verdict.is_failure().then_some(property.name));
            }
            Ok(_) => (),
            Err(_) => {
                // Where it has died between cases, nothing was found.
                found.extend(at);
                return found;
            }
        }
    }
}
