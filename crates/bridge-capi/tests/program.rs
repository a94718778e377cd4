//! The library as C programs see it: `program.c`, compiled against the header and linked with the library.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo puts the library: beside this test, or one folder up.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("libbridge_capi.so")).find(|library| library.is_file());
    found.expect("cargo has built the library")
}

/// TensorFlow 1.15, where `cargo xtask setup` puts it or the user has said.
fn tensorflow() -> Option<PathBuf> {
    let named = std::env::var_os("TENSOR_BRIDGE_TENSORFLOW1").map(PathBuf::from);
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let fetched =
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(target).join("tensorflow1/tensorflow_core");
    let folder = named.unwrap_or_else(fetched);
    folder.join("libtensorflow_framework.so.1").is_file().then_some(folder)
}

fn compiled(name: &str) -> PathBuf {
    let (crate_folder, library) = (Path::new(env!("CARGO_MANIFEST_DIR")), library());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I"]).arg(crate_folder.join("include"));
    compiler.arg(crate_folder.join("tests/program.c")).arg(&library).arg("-o").arg(&program);
    let folder = library.parent().unwrap().display().to_string();
    let done = compiler.arg(format!("-Wl,-rpath,{folder}")).status().expect("there is a C compiler");
    assert!(done.success());
    program
}

fn runs(program: &mut Command) -> String {
    let done = program.output().unwrap();
    assert!(done.status.success(), "{}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

#[test]
fn a_program_without_tensorflow() {
    assert_eq!(runs(&mut Command::new(compiled("plain"))), "");
}

#[test]
fn a_program_with_tensorflow() {
    let Some(folder) = tensorflow() else {
        println!("left out: there is no TensorFlow 1.15: cargo xtask setup fetches it");
        return;
    };
    let graph = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bridge-tensorflow/tests/data/line.pb");
    let told = runs(Command::new(compiled("session")).arg(folder).arg(graph).env("TF_CPP_MIN_LOG_LEVEL", "3"));
    assert!(told.contains("with TensorFlow 1.15."), "{told}");
}
