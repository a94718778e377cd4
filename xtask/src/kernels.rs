//! Kernels: compiled by NVRTC, and checked in.

use crate::run::{Result, ask, at, program, root, run, target};
use crate::venv;
use std::fs;
use std::path::PathBuf;

const COMPILER: &str = "crates/bridge-cuda/kernels/compile.py";

/// What is compiled: the source, the result, and the architectures. A device runs cubins of its own major version and of
/// the same or a lower minor one, and PTX for its own version or a lower one.
const KERNELS: [(&str, &str, &[&str]); 2] = [
    (
        "crates/bridge-cuda/kernels/copy.cu",
        "crates/bridge-cuda/kernels/compiled.fatbin",
        &["sm_70", "sm_80", "sm_90", "sm_100", "sm_120", "compute_70"],
    ),
    ("conformance/src/rust/cudarc/kernels.cu", "conformance/src/rust/cudarc/kernels.ptx", &["compute_70"]),
];

/// What the result depends on: folders that hold it as well, and the version of the compiler.
const FOLDERS: [&str; 2] = ["crates/bridge-cuda/kernels", "conformance/src/rust/cudarc"];
const VERSION: &str = "xtask/requirements-kernels.txt";

/// The hashes of all of these, as of the last compilation, which takes a minute and a half.
const SUMS: &str = "xtask/fixtures/kernels.sha256";

/// Compiles the kernels. With `check`, compares the result with what is checked in instead of replacing it.
pub fn compile(check: bool) -> Result<()> {
    let python = venv::KERNELS.ready()?;
    for (source, compiled, architectures) in KERNELS {
        let kept = root().join(compiled);
        let out = if check { target().join("kernels").join(compiled) } else { kept.clone() };
        run(program(&python, &[COMPILER, source]).arg(&out).args(architectures))?;
        if at(&out, fs::read(&out))? != at(&kept, fs::read(&kept))? {
            return Err(format!("{compiled} is not what {source} compiles to: run cargo xtask generate kernels"));
        }
    }
    if check { Ok(()) } else { at(SUMS.as_ref(), fs::write(root().join(SUMS), sums()? + "\n")) }
}

fn sums() -> Result<String> {
    let mut files = vec![PathBuf::from(VERSION)];
    for folder in FOLDERS {
        let entries = at(folder.as_ref(), fs::read_dir(root().join(folder)))?.flatten();
        files.extend(entries.map(|entry| PathBuf::from(folder).join(entry.file_name())));
    }
    files.retain(|file| root().join(file).is_file() && file.extension().is_none_or(|end| end != "rs"));
    files.sort();
    ask(program("sha256sum", &[]).args(files)).ok_or_else(|| "sha256sum fails".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_checked_in_was_compiled_from_these_sources() {
        let kept = fs::read_to_string(root().join(SUMS)).unwrap();
        assert_eq!(sums().unwrap(), kept.trim_end(), "run cargo xtask generate kernels");
    }
}
