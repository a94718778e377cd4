//! Kernels: compiled by NVRTC, and checked in.

use crate::run::{Result, at, program, root, run, target};
use crate::venv;
use std::fs;

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
    Ok(())
}
