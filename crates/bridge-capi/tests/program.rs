//! The library as C programs see it: compiled against the header, and linked with the library.

#[path = "compiler/mod.rs"]
mod compiler;

use compiler::{Source, capi, runs};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// TensorFlow 1.15, where `cargo xtask setup` puts it or the user has said.
fn tensorflow() -> Option<PathBuf> {
    let named = std::env::var_os("TRUEBRIDGE_TENSORFLOW1").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| compiler::target().join("tensorflow1/tensorflow_core"));
    folder.join("libtensorflow_framework.so.1").is_file().then_some(folder)
}

fn c(source: &str, name: &str) -> PathBuf {
    Source::C(capi().join("tests").join(source)).compiled(name, &[])
}

#[test]
fn a_program_without_tensorflow() {
    assert_eq!(runs(&mut Command::new(c("program.c", "plain"))), "");
}

#[test]
fn a_program_with_tensorflow() {
    let Some(folder) = tensorflow() else {
        println!("left out: there is no TensorFlow 1.15: cargo xtask setup fetches it");
        return;
    };
    let graph = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bridge-tensorflow/tests/data/line.pb");
    let mut program = Command::new(c("program.c", "session"));
    let told = runs(program.arg(folder).arg(graph).env("TF_CPP_MIN_LOG_LEVEL", "3"));
    assert!(told.contains("with TensorFlow 1.15."), "{told}");
}

#[test]
fn tensors_without_a_framework() {
    assert_eq!(runs(&mut Command::new(c("verbs.c", "verbs"))), "");
}

#[test]
fn a_plan_has_the_error_of_its_transfer() {
    assert_eq!(runs(&mut Command::new(c("plans.c", "plans"))), "");
}

/// The words of a text that begin as the names of the interface do, and that a parenthesis follows.
fn declared(header: &str) -> BTreeSet<&str> {
    let names = header.match_indices(" tb_").chain(header.match_indices("*tb_")).map(|(at, _)| &header[at + 1..]);
    names.filter_map(|rest| rest.split_once('(').map(|(name, _)| name)).filter(|name| !name.contains(' ')).collect()
}

#[test]
fn the_library_exports_the_interface_and_nothing_else() {
    let header = std::fs::read_to_string(capi().join("include/truebridge.h")).unwrap();
    let listed =
        runs(Command::new("nm").args(["-D", "--defined-only", "--format=just-symbols"]).arg(compiler::library()));
    let exported: BTreeSet<_> = listed.lines().collect();
    assert_eq!(exported, declared(&header));
    assert!(exported.contains("tb_transfer") && exported.contains("tb_error"), "{exported:?}");
}

/// Under AddressSanitizer and LeakSanitizer, in the library and in the program: see `cargo xtask audit`.
#[test]
fn the_sanitizers_find_planted_faults() {
    if !compiler::flags().contains("-fsanitize=address") {
        println!("left out: the program is compiled without a sanitizer: cargo xtask audit does it with one");
        return;
    }
    let program = c("planted.c", "planted");
    let found = [("leak", "LeakSanitizer"), ("late", "heap-use-after-free"), ("beyond", "heap-buffer-overflow")];
    for (fault, report) in found {
        let done = Command::new(&program).arg(fault).output().unwrap();
        let told = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && told.contains(report), "{fault}: {}: {told}", done.status);
    }
}

#[test]
fn tensors_of_a_device_without_a_framework() {
    let told = runs(&mut Command::new(c("cuda.c", "cuda")));
    match told.strip_prefix("left out: ") {
        Some(_) => print!("{told}"),
        None => assert_eq!(told, "in order on a CUDA device\n"),
    }
}
