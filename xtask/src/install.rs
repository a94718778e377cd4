//! The C library under a prefix, for pkg-config and CMake.

use crate::run::{Result, at, cargo, root, run, target};
use std::fs;
use std::path::Path;

const CRATE: &str = "crates/bridge-capi";

/// Builds the library and copies it to `prefix`, with its headers and the files of pkg-config and CMake.
pub fn install(prefix: &Path) -> Result<()> {
    let name = format!("libtruebridge_c.so.{}", abi()?);
    let soname = format!("link-arg=-Wl,-soname,{name}");
    // Alone: in one build with other packages it would get their features.
    let arguments = ["rustc", "--release", "--quiet", "--package", PACKAGE, "--lib", "--crate-type", "cdylib", "--"];
    run(cargo(&arguments).args(["-C", &soname]))?;
    let listed = root().join(CRATE).join("packaging/files.txt");
    let listed = at(&listed, fs::read_to_string(&listed))?;
    let files = listed.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' '));
    for (file, folder) in files {
        copy(&root().join(CRATE).join(file), &prefix.join(folder), file.rsplit('/').next().unwrap_or(file))?;
    }
    let lib = prefix.join("lib");
    copy(&target().join("release/libbridge_capi.so"), &lib, &name)?;
    let link = lib.join("libtruebridge_c.so");
    if link.is_symlink() {
        at(&link, fs::remove_file(&link))?;
    }
    at(&link, std::os::unix::fs::symlink(&name, &link))?;
    println!("{} holds truebridge for C and C++: see docs/c.md", prefix.display());
    Ok(())
}

/// The package of the library.
const PACKAGE: &str = "truebridge-capi";

/// Returns the version of the interface that the header states.
fn abi() -> Result<String> {
    let header = root().join(CRATE).join("include/truebridge.h");
    let header = at(&header, fs::read_to_string(&header))?;
    let abi = header.lines().find_map(|line| line.strip_prefix("#define TB_ABI "));
    abi.map(str::to_owned).ok_or_else(|| "the header states no TB_ABI: run cargo xtask generate header".into())
}

fn copy(file: &Path, folder: &Path, name: &str) -> Result<()> {
    at(folder, fs::create_dir_all(folder))?;
    at(file, fs::copy(file, folder.join(name))).map(drop)
}
