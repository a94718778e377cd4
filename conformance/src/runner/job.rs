//! What is to be judged, and the program that judges it.

use super::options::Options;
use super::sanitizer::Sanitizer;
use super::variants::environment;
use crate::Case;
use crate::names::PairName;
use crate::watch::{Ending, Patience};
use bridge_core::Device;
use std::ffi::OsString;
use std::time::Duration;

/// What is to be judged, and by which program.
pub struct Job<'a> {
    /// The program of a worker, and its first arguments.
    pub launch: &'a [OsString],
    /// The pair.
    pub pair: &'a PairName,
    /// Where.
    pub device: Device,
    /// Cases in all.
    pub cases: u32,
    /// The seed of all cases.
    pub seed: u64,
    /// Time for the pair, if it is limited.
    pub budget: Option<Duration>,
    /// How long a worker may take.
    pub patience: Patience,
    /// The options of the run: folders of regressions and reports.
    pub options: &'a Options,
}

/// The case that a worker runs.
pub struct At {
    /// The property.
    pub property: String,
    /// The number of the case.
    pub index: u32,
    /// The case.
    pub case: Case,
}

/// The variable with the share of a device's memory that JAX takes when it begins, and that share in percent where no
/// other pair runs.
const MEMORY: &str = "XLA_PYTHON_CLIENT_MEM_FRACTION";
const SHARE: u8 = 75;

impl Job<'_> {
    /// Returns the command line of a worker with these further arguments.
    pub fn worker<W: Into<OsString>>(&self, more: impl IntoIterator<Item = W>) -> Vec<OsString> {
        let mut program = self.launch.to_vec();
        program.extend(["--worker".into(), self.pair.to_string().into()]);
        program.extend(["--device".into(), self.device.to_string().into()]);
        program.extend(["--report".into(), self.options.report.clone().into()]);
        if let Some(fixtures) = &self.options.fixtures {
            program.extend(["--fixtures".into(), fixtures.into()]);
        }
        program.extend(more.into_iter().map(Into::into));
        match self.options.sanitizer {
            Some(sanitizer) => sanitizer.around(&self.options.report, self.pair, program),
            None => program,
        }
    }

    /// Returns the variables of a worker's environment: the allocators of the pair's variants, or those of a sanitizer,
    /// and the share of a device that JAX takes at once, where several workers use it.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let variants = environment([self.pair.from.as_str(), self.pair.to.as_str()]);
        let known = self.options.sanitizer.iter().flat_map(|_| Sanitizer::environment()).chain(variants);
        let share = f64::from(SHARE) / 100.0 / f64::from(self.options.jobs);
        let shared = self.options.jobs > 1 && std::env::var_os(MEMORY).is_none();
        let share = shared.then(|| (MEMORY, format!("{share:.3}")));
        known.map(|(name, value)| (name, value.to_owned())).chain(share).collect()
    }

    /// Returns what a sanitizer has found, if a worker ended for that.
    pub fn findings(&self, ending: Ending) -> Option<String> {
        let Ending::Exit(code) = ending else { return None };
        self.options.sanitizer.and_then(|sanitizer| sanitizer.findings(&self.options.report, self.pair, code))
    }
}
