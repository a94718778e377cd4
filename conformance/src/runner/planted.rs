//! Flaws where tensors cross between processes: each is planted into a pair of its own, and must be found there.

use super::adapters::Known;
use super::options::PairName;
use super::pair::Job;
use super::protocol::Message;
use super::watch::Watch;
use super::{Patience, SILENCE, WHOLE};
use crate::fault::FaultReport;
use crate::names::remote;
use crate::processes::{FLAWS, PlantedFlaw, Way};
use crate::report::Host;
use bridge_core::{Device, DeviceKind};
use std::ffi::OsString;

/// Cases of the property that must find a flaw. It stops at the first that fails.
const CASES: u32 = 400;

/// Returns the flaws that have a meaning on the device, each with the properties that found it. Without a framework
/// that writes to its tensors there, there are none.
pub fn run(launch: &[OsString], host: &Host, device: Device, seed: u64, options: &super::Options) -> Vec<FaultReport> {
    let streams = device.kind != DeviceKind::CPU;
    let framework = if streams { "torch" } else { "numpy" };
    if Known::named(framework).is_none_or(|known| !host.versions.contains_key(known.name)) {
        return Vec::new();
    }
    let judged = |planted: &PlantedFlaw| {
        let (here, there) = (framework.to_owned(), remote(framework));
        let (from, to) = if planted.way == Way::There { (here, there) } else { (there, here) };
        let patience = Patience { silence: SILENCE, whole: WHOLE };
        let pair = PairName { from, to };
        let job = Job { launch, pair: &pair, device, cases: CASES, seed, budget: None, patience, options };
        FaultReport {
            fault: planted.name.into(),
            must_be_caught_by: planted.caught_by.into(),
            caught_by: caught_by(&job, planted),
        }
    };
    FLAWS.iter().filter(|planted| streams || !planted.streams).map(judged).collect()
}

/// Returns the properties that failed, or in which the process died.
fn caught_by(job: &Job<'_>, planted: &PlantedFlaw) -> Vec<String> {
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
