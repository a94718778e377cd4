//! An installation: the example of docs/c.md, compiled as pkg-config and CMake say.

#[path = "compiler/mod.rs"]
mod compiler;

use compiler::{capi, library, runs};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lays the files out under a fresh prefix, next to a link to the library of this build. Returns the prefix and the
/// example.
fn installed(name: &str) -> (PathBuf, PathBuf) {
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&prefix);
    let files = fs::read_to_string(capi().join("packaging/files.txt")).unwrap();
    for line in files.lines().filter(|line| !line.starts_with('#')) {
        let (file, folder) = line.split_once(' ').unwrap();
        let folder = prefix.join(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::copy(capi().join(file), folder.join(Path::new(file).file_name().unwrap())).unwrap();
    }
    std::os::unix::fs::symlink(library(), prefix.join("lib/libtruebridge_c.so")).unwrap();
    let page = fs::read_to_string(capi().join("../../docs/c.md")).unwrap();
    let example = page.split_once("```c\n").and_then(|(_, rest)| rest.split_once("```")).unwrap().0;
    let program = prefix.join("example.c");
    fs::write(&program, example).unwrap();
    (prefix, program)
}

fn is_there(program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok();
    if !there {
        println!("left out: {program} is not installed");
    }
    there
}

const PRINTED: &str = "strides that are not compact: 24 bytes by host\n";

#[test]
fn the_example_builds_with_pkg_config() {
    if !is_there("pkg-config") {
        return;
    }
    let (prefix, source) = installed("pkg-config");
    let mut asked = Command::new("pkg-config");
    asked.args(["--cflags", "--libs", "truebridge"]).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    let flags = runs(&mut asked);
    let program = prefix.join("example");
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Wextra", "-Werror"]).arg(source).args(flags.split_whitespace()).arg("-o").arg(&program);
    runs(&mut compiler);
    assert_eq!(runs(Command::new(program).env("LD_LIBRARY_PATH", prefix.join("lib"))), PRINTED);
}

#[test]
fn the_example_builds_with_cmake() {
    if !is_there("cmake") {
        return;
    }
    let (prefix, _) = installed("cmake");
    let lists = "cmake_minimum_required(VERSION 3.15)\nproject(example C)\nfind_package(Truebridge 0.1 REQUIRED)\n\
                 add_executable(example example.c)\ntarget_link_libraries(example Truebridge::truebridge)\n";
    fs::write(prefix.join("CMakeLists.txt"), lists).unwrap();
    let build = prefix.join("build");
    let mut configured = Command::new("cmake");
    configured.arg("-S").arg(&prefix).arg("-B").arg(&build);
    runs(configured.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())));
    runs(Command::new("cmake").arg("--build").arg(&build));
    assert_eq!(runs(&mut Command::new(build.join("example"))), PRINTED);
}

#[test]
fn versions_are_those_of_the_crate_and_of_the_interface() {
    let version = env!("CARGO_PKG_VERSION");
    let read = |file: &str| fs::read_to_string(capi().join(file)).unwrap();
    assert!(read("packaging/truebridge.pc").contains(&format!("\nVersion: {version}\n")));
    let cmake = read("packaging/TruebridgeConfigVersion.cmake");
    assert!(cmake.contains(&format!("(PACKAGE_VERSION \"{version}\")")));
    let header = read("include/truebridge.h");
    let abi = header.lines().find_map(|line| line.strip_prefix("#define TB_ABI ")).unwrap();
    assert!(read("../../docs/c.md").contains(&format!("`libtruebridge_c.so.{abi}`")));
}
