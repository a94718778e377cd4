//! The kernels of bridge-copy: compiled by NVRTC, and checked in.

use crate::run::{Result, at, program, root, run, target};
use crate::venv;
use std::fs;

const FOLDER: &str = "crates/bridge-copy/kernels";

/// Compiles the kernels. With `check`, compares the result with what is checked in instead of replacing it.
pub fn compile(check: bool) -> Result<()> {
    let python = venv::KERNELS.ready()?;
    let kept = root().join(FOLDER).join("compiled");
    let out = if check { target().join("kernels") } else { kept.clone() };
    run(program(python, &[&format!("{FOLDER}/compile.py")]).arg(&out))?;
    for entry in at(&out, fs::read_dir(&out))?.flatten() {
        let name = entry.file_name();
        let same = fs::read(entry.path()).ok() == fs::read(kept.join(&name)).ok();
        if !same {
            let text = format!("{} is not what the source compiles to: run cargo xtask kernels", name.display());
            return Err(text);
        }
    }
    Ok(())
}
