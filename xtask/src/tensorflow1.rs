//! The libraries of TensorFlow 1.15, from a wheel that is unpacked and not installed: their users need no Python 3.7.

use crate::run::{Result, at, program, remove, root, run, target};
use crate::venv::has_cuda;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable that names the folder of the package to the suite and the tests. A value that is set stays.
const VARIABLE: &str = "TRUEBRIDGE_TENSORFLOW1";

/// The wheel for any machine, and that for a machine with a CUDA device.
const REQUIREMENTS: [&str; 2] = ["xtask/requirements-tensorflow1.txt", "xtask/requirements-tensorflow1-cuda.txt"];

/// Arguments that make pip choose for the machine that the wheels of 1.15 are made for.
const MADE_FOR: [&str; 8] = [
    "--implementation=cp",
    "--python-version=3.7",
    "--abi=cp37m",
    "--platform=manylinux2010_x86_64",
    "--only-binary=:all:",
    "--no-deps",
    "--require-hashes",
    "--quiet",
];

/// Returns the folder of the package: the one that the user has named, or that of the wheel, which is fetched the first
/// time.
///
/// # Errors
///
/// The reason why there is none.
pub fn folder(python: &Path) -> Result<PathBuf> {
    match std::env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        Some(named) => Ok(named.into()),
        None => fetched(python),
    }
}

/// Returns the folder as [`folder`] does, or prints the reason why there is none.
pub fn folder_if_any(python: &Path) -> Option<PathBuf> {
    folder(python).inspect_err(|reason| println!("left out: TensorFlow 1.15: {reason}")).ok()
}

/// Returns the command with the folder of the package in its environment, if there is one.
pub fn with_folder(mut command: Command, folder: Option<impl AsRef<OsStr>>) -> Command {
    folder.iter().for_each(|folder| _ = command.env(VARIABLE, folder));
    command
}

fn fetched(python: &Path) -> Result<PathBuf> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("it exists only for Linux on x86-64".into());
    }
    let file = REQUIREMENTS[usize::from(has_cuda())];
    let wanted = at(Path::new(file), fs::read_to_string(root().join(file)))?;
    let place = target().join("tensorflow1");
    let (stamp, package) = (place.join("requirements.stamp"), place.join("tensorflow_core"));
    if fs::read_to_string(&stamp).is_ok_and(|done| done == wanted) {
        return Ok(package);
    }
    println!("fetching what {file} names");
    remove(&place)?;
    let wheels = place.join("wheels");
    let mut download = program(python, &["-m", "pip", "download"]);
    run(download.args(MADE_FOR).args(["-r", file, "--dest"]).arg(&wheels))
        .map_err(|_| format!("pip cannot download what {file} names"))?;
    for wheel in at(&wheels, fs::read_dir(&wheels))? {
        run(program(python, &["-m", "zipfile", "-e"]).arg(at(&wheels, wheel)?.path()).arg(&place))?;
    }
    at(&wheels, fs::remove_dir_all(&wheels))?;
    at(&stamp, fs::write(&stamp, wanted))?;
    Ok(package)
}
