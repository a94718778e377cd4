//! The real TensorFlow, loaded without Python.

mod installed;

use bridge_core::ErrorKind;
use bridge_tensorflow::{Runtime, Series};
use std::path::Path;

/// What the folder has is a TensorFlow, or no library of this name.
fn open(folder: &Path) -> bridge_core::Result<&'static Runtime> {
    // SAFETY: as above.
    unsafe { Runtime::open(folder) }
}

/// What the folder has is a TensorFlow, or no library of this name.
fn open_as(series: Series, folder: &Path) -> bridge_core::Result<&'static Runtime> {
    // SAFETY: as above.
    unsafe { Runtime::open_as(series, folder) }
}

fn kind(result: bridge_core::Result<&'static Runtime>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

/// One test: a process has one TensorFlow of each series.
#[test]
fn a_folder_is_opened_once() {
    assert_eq!(kind(Runtime::loaded(Series::Two)), Some(ErrorKind::Missing));
    assert_eq!(kind(open(Path::new("/nowhere"))), Some(ErrorKind::Missing));
    let elsewhere = std::env::temp_dir();
    assert_eq!(kind(open(&elsewhere)), Some(ErrorKind::Missing));
    if let Some(folder) = installed::two() {
        assert_eq!(kind(open_as(Series::One, &folder)), Some(ErrorKind::Version));
        let runtime = open(&folder).unwrap();
        assert!(runtime.version().starts_with("2."), "{}", runtime.version());
        assert!(std::ptr::eq(runtime, Runtime::loaded(Series::Two).unwrap()));
        let error = Runtime::loaded(Series::One).unwrap_err();
        assert!(error.to_string().contains("another series"), "{error}");
    }
    if let Some(folder) = installed::one() {
        assert_eq!(kind(open_as(Series::Two, &folder)), Some(ErrorKind::Version));
        let runtime = open(folder.parent().unwrap()).unwrap();
        assert!(runtime.version().starts_with("1.15."), "{}", runtime.version());
        assert!(std::ptr::eq(runtime, open_as(Series::One, &folder).unwrap()));
        assert_eq!(kind(open(&elsewhere)), Some(ErrorKind::Missing));
    }
}
