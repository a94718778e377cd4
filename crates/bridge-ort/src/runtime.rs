//! The ONNX Runtime of this process, and its dtypes.

use crate::elements::TYPES;
use crate::import::empty;
use bridge_core::{DType, Device, DeviceKind, Error, ErrorKind, Order, Profile, Result, Strides};
use libloading::Library;
use ort::sys::{ORT_API_VERSION, OrtApiBase};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Returns the profile on the host, with the dtypes of which this ONNX Runtime makes tensors.
///
/// # Safety
///
/// What `ORT_DYLIB_PATH` names, or else the linker finds, is ONNX Runtime, unless it is loaded already.
pub(crate) unsafe fn profile() -> Result<&'static Profile> {
    static PROFILE: OnceLock<Profile> = OnceLock::new();
    if let Some(profile) = PROFILE.get() {
        return Ok(profile);
    }
    // SAFETY: the caller's obligation.
    unsafe { load_usual() }?;
    let makes = |dtype: &DType| empty(Device::CPU, *dtype, &[1], Order::RowMajor).is_ok();
    let profile = Profile::export_only("ort")
        .with_dtypes(TYPES.iter().map(|(_, dtype)| *dtype).filter(makes).collect())
        .with_strides(Strides::Compact)
        .with_alignment(1)
        .with_devices(vec![DeviceKind::CPU])
        .with_keeps_read_only(false);
    Ok(PROFILE.get_or_init(|| profile))
}

/// Loads ONNX Runtime from this path, unless it is loaded already. A program that has called `ort::init_from` calls this
/// with the same path.
///
/// # Errors
///
/// [`ErrorKind::Missing`] where there is no such library, or it is older than 1.22.
///
/// # Safety
///
/// The library, if there is one, is ONNX Runtime: its code runs.
pub unsafe fn load(path: impl AsRef<Path>) -> Result<()> {
    static LOADED: Mutex<bool> = Mutex::new(false);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if *loaded {
        return Ok(());
    }
    let path = path.as_ref();
    let missing = |why: String| {
        let text = format!(
            "cannot load ONNX Runtime from {} ({why}): set ORT_DYLIB_PATH to libonnxruntime 1.22 or later, or call bridge_ort::load",
            path.display()
        );
        Error::new(ErrorKind::Missing, text)
    };
    // `ort` asks the library for an error object to say that there is no library, and waits for itself.
    // SAFETY: the caller's obligation: its initialisers run.
    let library = unsafe { Library::new(path) }.map_err(|error| missing(error.to_string()).caused_by(error))?;
    // SAFETY: every ONNX Runtime has this function, of this type.
    let base = unsafe { library.get::<unsafe extern "system" fn() -> *const OrtApiBase>(b"OrtGetApiBase") };
    let base = base.map_err(|error| missing(error.to_string()).caused_by(error))?;
    // SAFETY: as above; the base is a constant of the library, and both functions are there in every version.
    let serves = unsafe { base().as_ref().is_some_and(|base| !(base.GetApi)(ORT_API_VERSION).is_null()) };
    if !serves {
        return Err(missing("it is too old".into()));
    }
    ort::init_from(path).map(drop).map_err(|error| missing(error.to_string()).caused_by(error))?;
    *loaded = true;
    Ok(())
}

/// Loads the library that `ort` loads at the first need of it.
///
/// # Safety
///
/// That of [`load`].
unsafe fn load_usual() -> Result<()> {
    let usual = || format!("{}onnxruntime{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX).into();
    let path = std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).unwrap_or_else(usual);
    // SAFETY: the caller's obligation.
    unsafe { load(path) }
}
