//! The options of a run.

use super::sanitizer::Sanitizer;
use crate::names::{PairName, in_other_process};
use crate::{PROPERTIES, property};
use bridge_core::{Device, DeviceKind};
use clap::Parser;
use std::path::PathBuf;
use std::str::FromStr;

/// Certifies that frameworks exchange tensors correctly.
#[derive(Debug, Clone, Parser)]
#[command(name = "conformance", version)]
pub struct Options {
    /// Device of the tensors: auto, cpu, cuda or cuda:N (auto: a CUDA device if there is one).
    #[arg(long, default_value = "auto")]
    pub device: Choice,
    /// Adapters to run, in all ordered pairs (default: all that are installed and fit the device).
    #[arg(long, value_delimiter = ',', value_name = "A,B")]
    pub adapters: Vec<String>,
    /// Ordered pairs to run, instead of all. It cannot be combined with --adapters.
    #[arg(long, value_delimiter = ',', value_name = "FROM:TO")]
    pub pairs: Vec<PairName>,
    /// Also run each adapter with every allocator that its framework documents. A single one is named like an adapter,
    /// such as torch+async.
    #[arg(long)]
    pub variants: bool,
    /// Run every pair with one of its frameworks in another process, in both directions, instead of both in one. With
    /// --pairs only these: numpy:torch runs as numpy:torch+remote and numpy+remote:torch. Named like this, each can
    /// also run by itself, without this option.
    #[arg(long)]
    pub across_processes: bool,
    /// Cases of each pair (default: 10000). Each property has a fixed share of them, and pairs with a framework that
    /// compiles programs for them, as JAX does, run a quarter.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub cases: Option<u32>,
    /// Seed of all cases (default: a new one for each run; it is printed).
    #[arg(long)]
    pub seed: Option<u64>,
    /// Pairs that run at once: each is its own process, and all share the device.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: u16,
    /// Run workers under this tool of NVIDIA's compute-sanitizer, with fewer cases (default: 100), and without the
    /// caching of frameworks' allocators. What it finds fails the pair.
    #[arg(long, value_name = "TOOL")]
    pub sanitizer: Option<Sanitizer>,
    /// Time for the whole run, in seconds: fewer cases run where it does not suffice, and pairs are left out.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub time_budget: Option<u64>,
    /// Run the planted faults: on the simulated device and, in a build with the feature `planted`, in the adapters of
    /// the installed frameworks; with --across-processes, between two processes. Pairs run as well where a device,
    /// adapters or pairs are named, and with --across-processes.
    #[arg(long)]
    pub faults: bool,
    /// Run the one case in this file.
    #[arg(long, value_name = "FILE")]
    pub replay: Option<PathBuf>,
    /// Folder of the reports.
    #[arg(long, value_name = "DIR", default_value = "conformance-report")]
    pub report: PathBuf,
    /// Compare with this report.json of an earlier run: only what got worse fails the run.
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,
    /// Print every property as it is judged, not only every pair.
    #[arg(long, short)]
    pub verbose: bool,
    /// Folder of expectations and regressions in a checkout. The runner only reads it.
    #[arg(long, hide = true)]
    pub fixtures: Option<PathBuf>,
    /// The command that the user typed, without options: commands in reports begin with it.
    #[arg(long, hide = true)]
    pub command: Option<String>,
    /// Judge this pair in this process, and write messages to the standard output.
    #[arg(long, hide = true)]
    pub worker: Option<PairName>,
    /// When the time of a worker is over, in milliseconds of the Unix epoch: it has loaded its frameworks by then.
    #[arg(long, hide = true)]
    pub until: Option<u64>,
    /// Plant this flaw where tensors are converted between the processes of the pair.
    #[arg(long, hide = true)]
    pub plant: Option<String>,
    /// Serve this adapter to the worker that judges it, at the standard input and output.
    #[arg(long, hide = true)]
    pub remote: Option<String>,
    /// Properties to judge (default: all).
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',', value_parser = known_property)]
    pub properties: Vec<String>,
}

/// Refuses what is not the name of a property.
fn known_property(name: &str) -> Result<String, String> {
    let names = || PROPERTIES.iter().map(|property| property.name).collect::<Vec<_>>().join(", ");
    property(name)
        .map(|property| property.name.into())
        .ok_or_else(|| format!("there is no such property: there are {}", names()))
}

impl Options {
    /// Parses the options, which no program name precedes.
    ///
    /// # Errors
    ///
    /// What to print, and the exit code: 2 for bad usage, 0 for help.
    pub fn read(argv: &[String]) -> Result<Self, clap::Error> {
        Self::try_parse_from(std::iter::once("conformance").chain(argv.iter().map(String::as_str)))
    }

    /// Returns whether an adapter is named, by itself or in a pair.
    pub fn names(&self, adapter: &str) -> bool {
        let is = |name: &String| in_other_process(name).unwrap_or(name) == adapter;
        let is_in = |pair: &PairName| is(&pair.from) || is(&pair.to);
        self.adapters.iter().any(|name| name == adapter) || self.pairs.iter().any(is_in)
    }

    /// Returns whether a pair runs because `named` is among the pairs that are named: it is that pair or, across
    /// processes, that pair with one of its frameworks in another.
    pub fn chooses(&self, pair: &PairName, named: &PairName) -> bool {
        let here = |name: &String| in_other_process(name).unwrap_or(name).to_owned();
        let across = || PairName { from: here(&pair.from), to: here(&pair.to) };
        pair == named || self.across_processes && across() == *named
    }

    /// Returns whether pairs run: with `--faults` they do where a device, adapters or pairs are named.
    pub fn wants_pairs(&self) -> bool {
        let named = self.device != Choice::Auto || !self.adapters.is_empty() || !self.pairs.is_empty();
        named || self.across_processes || !self.faults
    }
}

/// The requested device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// A CUDA device if there is one.
    Auto,
    /// This one.
    On(Device),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = |device: &Device| [DeviceKind::CPU, DeviceKind::CUDA].contains(&device.kind);
        match text.parse().ok().filter(known) {
            _ if text == "auto" => Ok(Self::Auto),
            Some(device) => Ok(Self::On(device)),
            None => Err("say auto, cpu, cuda or cuda:N".into()),
        }
    }
}

impl Choice {
    /// Returns the device on a host with `gpus` CUDA devices.
    ///
    /// # Errors
    ///
    /// There is no such device.
    pub fn resolve(self, gpus: usize) -> Result<Device, String> {
        match self {
            Self::Auto if gpus > 0 => Ok(Device::cuda(0)),
            Self::Auto => Ok(Device::CPU),
            Self::On(Device::CPU) => Ok(Device::CPU),
            Self::On(device) if (device.index as usize) < gpus => Ok(device),
            Self::On(device) => Err(format!("there is no device {device}: this host has {gpus} CUDA devices")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Options, i32> {
        let argv: Vec<String> = line.split_whitespace().map(String::from).collect();
        Options::read(&argv).map_err(|error| error.exit_code())
    }

    #[test]
    fn bad_usage_is_2_and_help_is_0() {
        for line in ["--device tpu", "--device cuda:x", "--cases 0", "--pairs torch", "--seed", "--unknown"] {
            assert_eq!(read(line).unwrap_err(), 2, "{line}");
        }
        assert_eq!(read("--help").unwrap_err(), 0);
    }

    #[test]
    fn lists_and_pairs_are_read() {
        let options = read("--adapters torch,numpy --pairs torch:numpy,numpy:numpy --device cuda:1").unwrap();
        assert_eq!(options.adapters, ["torch", "numpy"]);
        assert_eq!(options.pairs[1].to_string(), "numpy:numpy");
        assert_eq!(options.device, Choice::On(Device::cuda(1)));
    }

    #[test]
    fn faults_run_alone_unless_pairs_are_named() {
        assert!(read("").unwrap().wants_pairs());
        assert!(!read("--faults --cases 10").unwrap().wants_pairs());
        assert!(read("--faults --device cpu").unwrap().wants_pairs());
    }

    #[test]
    fn details_are_asked_for_by_v() {
        assert!(read("-v").unwrap().verbose && read("--verbose").unwrap().verbose && !read("").unwrap().verbose);
    }

    #[test]
    fn a_device_must_be_there() {
        assert_eq!(Choice::Auto.resolve(0), Ok(Device::CPU));
        assert_eq!(Choice::Auto.resolve(2), Ok(Device::cuda(0)));
        assert_eq!(Choice::On(Device::cuda(1)).resolve(2), Ok(Device::cuda(1)));
        assert!(Choice::On(Device::cuda(2)).resolve(2).unwrap_err().contains("cuda:2"));
    }
}
