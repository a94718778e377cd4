//! The real TensorFlow, loaded without Python.

use bridge_core::ErrorKind;
use bridge_tensorflow::Runtime;
use std::path::{Path, PathBuf};

/// The folder of the package in the environment that `cargo xtask setup` makes, if it is there.
fn installed() -> Option<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(target).join("venv/lib");
    let pythons = std::fs::read_dir(lib).ok()?.flatten();
    let mut folders = pythons.map(|python| python.path().join("site-packages/tensorflow"));
    folders.find(|folder| folder.join("libtensorflow_cc.so.2").is_file())
}

fn kind(result: bridge_core::Result<&'static Runtime>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

/// One test: a process has one TensorFlow.
#[test]
fn a_folder_is_opened_once() {
    assert_eq!(kind(Runtime::loaded()), Some(ErrorKind::Missing));
    assert_eq!(kind(Runtime::open(Path::new("/nowhere"))), Some(ErrorKind::Missing));
    let elsewhere = std::env::temp_dir();
    assert_eq!(kind(Runtime::open(&elsewhere)), Some(ErrorKind::Missing));
    let Some(folder) = installed() else {
        eprintln!("left out: no TensorFlow in target/venv");
        return;
    };
    let runtime = Runtime::open(&folder).unwrap();
    assert!(runtime.version().starts_with("2."), "{}", runtime.version());
    assert_eq!(runtime.capabilities().lends_without_waiting, cfg!(target_arch = "x86_64"));
    assert!(std::ptr::eq(runtime, Runtime::loaded().unwrap()));
    assert_eq!(kind(Runtime::open(&elsewhere)), Some(ErrorKind::Argument));
}
