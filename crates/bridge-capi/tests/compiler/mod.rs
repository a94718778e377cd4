//! Compiles programs in C and C++ against the headers, links them with the library, and runs them.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Names flags for every compilation, such as those of a sanitizer.
const FLAGS: &str = "TRUEBRIDGE_CFLAGS";

/// Returns the flags of every compilation.
pub fn flags() -> String {
    std::env::var(FLAGS).unwrap_or_default()
}

/// The folder of the crate.
pub fn capi() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Cargo's target folder.
pub fn target() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    capi().join("../..").join(target)
}

/// Where cargo puts the library: next to this test, or one folder up.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("libbridge_capi.so")).find(|library| library.is_file());
    found.expect("cargo has built the library")
}

/// A program: its source, or what it was compiled to.
pub enum Source {
    C(PathBuf),
    Cxx(PathBuf),
    Object(PathBuf),
}

impl Source {
    fn compiler(&self) -> Command {
        let (compiler, standard, source): (_, &[&str], _) = match self {
            Self::C(source) => ("cc", &["-std=gnu11"], source),
            Self::Cxx(source) => ("c++", &["-std=c++17"], source),
            Self::Object(object) => ("c++", &[], object),
        };
        let mut compiler = Command::new(compiler);
        compiler.args(standard).args(["-Wall", "-Wextra", "-Werror", "-I"]).arg(capi().join("include"));
        compiler.args(flags().split_whitespace()).arg(source);
        compiler
    }

    /// Compiles the program, with further arguments, to an object that is linked more than once.
    pub fn object(&self, name: &str, more: &[String]) -> Self {
        let object = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        works(self.compiler().args(more).arg("-c").arg("-o").arg(&object));
        Self::Object(object)
    }

    /// Compiles the program and links it with the library and with further arguments. Returns its path.
    pub fn compiled(&self, name: &str, more: &[String]) -> PathBuf {
        let (program, library) = (Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), library());
        let folder = format!("-Wl,-rpath,{}", library.parent().unwrap().display());
        works(self.compiler().arg(&library).args(more).arg(folder).arg("-o").arg(&program));
        program
    }
}

fn works(compiler: &mut Command) {
    let done = compiler.output().expect("there is a compiler");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Runs a program, which must succeed, and returns what it prints.
pub fn runs(program: &mut Command) -> String {
    let done = program.output().unwrap();
    assert!(done.status.success(), "{}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}
