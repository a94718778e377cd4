//! A TensorFlow that something else has loaded, and that is not a supported one.

use bridge_core::ErrorKind;
use bridge_tensorflow::{Runtime, Series};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// What the folder has is a TensorFlow, or no library of this name.
fn open(folder: &Path) -> bridge_core::Result<&'static Runtime> {
    // SAFETY: as above.
    unsafe { Runtime::open(folder) }
}

/// Removes the folder in the end.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Makes a package whose only library is a copy of one that the process has loaded.
fn package(folder: &Path, library: &Path) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::copy(library, folder.join("libtensorflow_framework.so.1")).unwrap();
    folder.canonicalize().unwrap()
}

/// The path of a small library that the process has loaded.
fn library() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths = maps.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
    paths.find(|path| path.file_name() == Some(OsStr::new("libgcc_s.so.1"))).expect("Rust links it").into()
}

#[test]
fn what_the_process_has_loaded_is_named_and_not_replaced() {
    let folder = Folder(std::env::temp_dir().join(format!("truebridge-loaded-{}", std::process::id())));
    let [used, other] = ["used", "other"].map(|name| package(&folder.0.join(name), &library()));
    // SAFETY: its initialisers have run in this process before.
    let _loaded = unsafe { libloading::Library::new(used.join("libtensorflow_framework.so.1")) }.unwrap();
    let refused = |result: bridge_core::Result<&'static Runtime>| {
        let error = result.unwrap_err();
        (error.kind(), error.to_string())
    };
    let half = "has not loaded python/_pywrap_tensorflow_internal.so: supported is TensorFlow 1.15";
    for result in [open(&used), Runtime::loaded(Series::One)] {
        let (kind, text) = refused(result);
        assert_eq!(kind, ErrorKind::Version, "{text}");
        assert!(text.contains(half) && text.contains(used.to_str().unwrap()), "{text}");
    }
    let (kind, text) = refused(open(&other));
    assert_eq!(kind, ErrorKind::Argument, "{text}");
    assert!(text.contains("has loaded the TensorFlow in") && text.contains(used.to_str().unwrap()), "{text}");
}
