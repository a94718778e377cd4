//! Where `cargo xtask setup` puts TensorFlow.

#![allow(dead_code, reason = "not every test uses both")]

use std::path::{Path, PathBuf};

fn target() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let workspace = package.ancestors().find(|folder| folder.join("Cargo.lock").is_file());
    workspace.unwrap_or(package).join(target)
}

/// The package of 1.15, if it is there.
pub fn one() -> Option<PathBuf> {
    let named = std::env::var_os("TRUEBRIDGE_TENSORFLOW1").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| target().join("tensorflow1/tensorflow_core"));
    folder.join("libtensorflow_framework.so.1").is_file().then_some(folder)
}

/// The package of 2.x, if it is there: the named one, or that of the environment for Python.
pub fn two() -> Option<PathBuf> {
    let named = std::env::var_os("TRUEBRIDGE_TENSORFLOW2").map(PathBuf::from);
    let pythons = std::fs::read_dir(target().join("venv/lib")).into_iter().flatten().flatten();
    let mut folders = named.into_iter().chain(pythons.map(|python| python.path().join("site-packages/tensorflow")));
    folders.find(|folder| folder.join("libtensorflow_cc.so.2").is_file())
}
