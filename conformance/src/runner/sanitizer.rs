//! Workers under NVIDIA's compute-sanitizer.

use crate::names::PairName;
use crate::watch::Patience;
use crate::words;
use clap::ValueEnum;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The program, which is part of the CUDA toolkit.
const PROGRAM: &str = "compute-sanitizer";

/// The exit code of a worker of which the sanitizer reports something.
const FOUND: i32 = 86;

/// What a log ends with where nothing was found: that of racecheck, and that of the others.
const CLEAN: [&str; 2] = ["RACECHECK SUMMARY: 0 hazards", "ERROR SUMMARY: 0 errors"];

/// How many times as long a worker may take.
const SLOWER: u32 = 10;

/// Cases of a pair, where the user names no number.
pub(super) const CASES: u32 = 100;

/// The most findings that a report quotes.
const QUOTED: usize = 3;

/// Memory that was freed is seen by the tools only where it goes back to the driver: frameworks must not cache it.
const UNCACHED: &[(&str, &str)] = &[
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
    ("CONFORMANCE_CUPY_ALLOCATOR", "uncached"),
    ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),
    ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    ("TF_FORCE_GPU_ALLOW_GROWTH", "true"),
];

/// A tool of compute-sanitizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sanitizer {
    /// Accesses outside of memory and to freed memory, and errors of the driver.
    Memcheck,
    /// Races between threads of a kernel over shared memory.
    Racecheck,
    /// Reads of memory that was never written.
    Initcheck,
    /// Invalid barriers.
    Synccheck,
}

impl Sanitizer {
    fn name(self) -> &'static str {
        match self {
            Self::Memcheck => "memcheck",
            Self::Racecheck => "racecheck",
            Self::Initcheck => "initcheck",
            Self::Synccheck => "synccheck",
        }
    }

    /// Returns the file in the folder of reports for what is found in a pair.
    fn log(self, folder: &Path, pair: &PairName) -> PathBuf {
        folder.join(format!("{}-{}-{}.log", self.name(), pair.from, pair.to))
    }

    /// Returns the command line of a worker under the sanitizer.
    pub(super) fn around(self, folder: &Path, pair: &PairName, worker: Vec<OsString>) -> Vec<OsString> {
        let log = self.log(folder, pair);
        // The sanitizer makes no folder. Where there is none, it cannot write, and the pair fails for that.
        let _ = log.parent().map(fs::create_dir_all);
        let mut program: Vec<OsString> = vec![PROGRAM.into(), "--tool".into(), self.name().into()];
        program.extend(["--error-exitcode".into(), FOUND.to_string().into(), "--log-file".into(), log.into()]);
        // For backtraces of the host the tool keeps frames of Python, and with them the tensors of a case.
        program.extend(["--show-backtrace".into(), "device".into()]);
        // The protocol goes through the standard output, and the worker starts no process that concerns it.
        program.extend(["--target-processes".into(), "application-only".into()]);
        // Frameworks try what the device or the driver may not have.
        if self == Self::Memcheck {
            program.extend(["--report-api-errors".into(), "no".into()]);
        }
        // cuBLAS, by which subjects delay work, exchanges data between threads in ways that the tool does not know.
        if self == Self::Racecheck {
            program.extend(["--kernel-regex-exclude".into(), "kernel_substring=gemm".into()]);
        }
        program.extend(worker);
        program
    }

    /// Returns the variables of a worker's environment.
    pub(super) fn environment() -> impl Iterator<Item = (&'static str, &'static str)> {
        UNCACHED.iter().copied()
    }

    /// Returns how long a worker may take, of which an ordinary one may take so long.
    pub(super) fn patience(usual: Patience) -> Patience {
        Patience { silence: usual.silence * SLOWER, whole: usual.whole * SLOWER, ..usual }
    }

    /// Returns what was found in the pair, whose worker has ended with this exit code; `None` if nothing was, as the
    /// log says.
    pub(super) fn findings(self, folder: &Path, pair: &PairName, code: i32) -> Option<String> {
        let log = self.log(folder, pair);
        let text = fs::read_to_string(&log).unwrap_or_default();
        match code {
            FOUND => Some(quoted(&log, &text)),
            0 if !CLEAN.iter().any(|summary| text.contains(summary)) => {
                Some(format!("{PROGRAM} has seen no work: {} has no summary", log.display()))
            }
            _ => None,
        }
    }
}

/// Returns the first findings of a log: each begins with `Error` or `Invalid`, or names a hazard.
fn quoted(log: &Path, text: &str) -> String {
    let lines = text.lines().map(|line| line.trim_start_matches('=').trim());
    let starts =
        ["Error", "Internal", "Invalid", "Uninitialized", "Barrier", "Program hit", "Race reported", "Warning"];
    let findings: Vec<_> = lines.filter(|line| starts.iter().any(|start| line.starts_with(start))).collect();
    let first = findings.iter().take(QUOTED).copied().collect::<Vec<_>>().join(" | ");
    let (found, file) = (words::counted(findings.len(), "error"), log.display());
    format!("the sanitizer found {found}: {first}; all are in {file}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_findings_are_quoted() {
        let text = "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n\
                    =========     at spin+0x50\n========= ERROR SUMMARY: 1 error\n";
        let told = quoted(Path::new("memcheck.log"), text);
        let want = "the sanitizer found 1 error: Invalid __global__ read of size 4 bytes; all are in memcheck.log";
        assert_eq!(told, want);
    }
}
