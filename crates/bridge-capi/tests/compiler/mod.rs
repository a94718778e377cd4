//! Compiles programs in C and C++ against the headers, links them with the library, and runs them.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Names flags for every compilation, such as those of a sanitizer.
const FLAGS: &str = "TENSOR_BRIDGE_CFLAGS";

/// The folder of the crate.
pub fn capi() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Cargo's target folder.
pub fn target() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    capi().join("../..").join(target)
}

/// Where cargo puts the library: beside this test, or one folder up.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("libbridge_capi.so")).find(|library| library.is_file());
    found.expect("cargo has built the library")
}

/// A program, in one file.
pub enum Source {
    C(PathBuf),
    Cxx(PathBuf),
}

impl Source {
    /// Compiles the program, with further arguments, and returns its path.
    pub fn compiled(&self, name: &str, more: &[String]) -> PathBuf {
        let library = library();
        let folder = library.parent().unwrap();
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let (compiler, standard, source) = match self {
            Self::C(source) => ("cc", "-std=gnu11", source),
            Self::Cxx(source) => ("c++", "-std=c++17", source),
        };
        let mut compiler = Command::new(compiler);
        compiler.args([standard, "-g", "-Wall", "-Wextra", "-Werror", "-I"]).arg(capi().join("include"));
        compiler.args(std::env::var(FLAGS).unwrap_or_default().split_whitespace());
        compiler.arg(source).arg(&library).args(more).arg("-o").arg(&program);
        let done = compiler.arg(format!("-Wl,-rpath,{}", folder.display())).output().expect("there is a compiler");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        program
    }
}

/// Runs a program, which must succeed, and returns what it prints.
pub fn runs(program: &mut Command) -> String {
    let done = program.output().unwrap();
    assert!(done.status.success(), "{}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}
