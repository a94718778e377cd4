//! The ONNX Runtime of this process, and its dtypes.

use crate::import::empty;
use bridge_core::{DType, Device, DeviceKind, Error, ErrorKind, Order, Profile, Result, Strides};
use libloading::Library;
use ort::sys::{ORT_API_VERSION, OrtApiBase, OrtStatusPtr};
use ort::value::TensorElementType;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The element types of ONNX, and their dtypes. Those of less than a byte and strings have none.
const TYPES: &[(TensorElementType, DType)] = &[
    (TensorElementType::Bool, DType::BOOL),
    (TensorElementType::Int8, DType::INT8),
    (TensorElementType::Int16, DType::INT16),
    (TensorElementType::Int32, DType::INT32),
    (TensorElementType::Int64, DType::INT64),
    (TensorElementType::Uint8, DType::UINT8),
    (TensorElementType::Uint16, DType::UINT16),
    (TensorElementType::Uint32, DType::UINT32),
    (TensorElementType::Uint64, DType::UINT64),
    (TensorElementType::Float16, DType::FLOAT16),
    (TensorElementType::Bfloat16, DType::BFLOAT16),
    (TensorElementType::Float32, DType::FLOAT32),
    (TensorElementType::Float64, DType::FLOAT64),
    (TensorElementType::Complex64, DType::COMPLEX64),
    (TensorElementType::Complex128, DType::COMPLEX128),
    (TensorElementType::Float8E4M3FN, DType::FLOAT8_E4M3FN),
    (TensorElementType::Float8E4M3FNUZ, DType::FLOAT8_E4M3FNUZ),
    (TensorElementType::Float8E5M2, DType::FLOAT8_E5M2),
    (TensorElementType::Float8E5M2FNUZ, DType::FLOAT8_E5M2FNUZ),
];

pub(crate) fn dtype_of(element: TensorElementType) -> Result<DType> {
    TYPES.iter().find(|(known, _)| *known == element).map(|(_, dtype)| *dtype).ok_or_else(|| {
        Error::new(ErrorKind::Dtype, format!("elements of ONNX's type {element} have no counterpart: cast them first"))
    })
}

pub(crate) fn element_of(dtype: DType) -> Result<TensorElementType> {
    TYPES.iter().find(|(_, known)| *known == dtype).map(|(element, _)| *element).ok_or_else(|| {
        Error::new(ErrorKind::Dtype, format!("ONNX has no element type for {dtype}: cast the tensor first"))
    })
}

/// Returns the profile on the host, with the dtypes of which this ONNX Runtime makes tensors.
pub(crate) fn profile() -> Result<&'static Profile> {
    static PROFILE: OnceLock<Profile> = OnceLock::new();
    if let Some(profile) = PROFILE.get() {
        return Ok(profile);
    }
    load_usual()?;
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
pub fn load(path: impl AsRef<Path>) -> Result<()> {
    static LOADED: Mutex<bool> = Mutex::new(false);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if *loaded {
        return Ok(());
    }
    let path = path.as_ref();
    let missing = |why: String| {
        let text = format!(
            "ONNX Runtime is not there ({why}): set ORT_DYLIB_PATH to the path of libonnxruntime 1.22 or later, or call bridge_ort::load"
        );
        Error::new(ErrorKind::Missing, text)
    };
    // `ort` asks the library for an error object to say that there is no library, and waits for itself.
    // SAFETY: a library of this name is ONNX Runtime, whose initialisers may run.
    let library = unsafe { Library::new(path) }.map_err(|error| missing(error.to_string()).caused_by(error))?;
    // SAFETY: every ONNX Runtime has this function, of this type.
    let base = unsafe { library.get::<unsafe extern "system" fn() -> *const OrtApiBase>(b"OrtGetApiBase") };
    let base = base.map_err(|error| missing(error.to_string()).caused_by(error))?;
    // SAFETY: as above; the base is a constant of the library, and both functions are there in every version.
    let serves = unsafe { base().as_ref().is_some_and(|base| !(base.GetApi)(ORT_API_VERSION).is_null()) };
    if !serves {
        return Err(missing(format!("{} is too old", path.display())));
    }
    ort::init_from(path).map(drop).map_err(|error| missing(error.to_string()).caused_by(error))?;
    *loaded = true;
    Ok(())
}

/// Loads the library that `ort` loads at the first need of it.
fn load_usual() -> Result<()> {
    let usual = || format!("{}onnxruntime{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX).into();
    load(std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).unwrap_or_else(usual))
}

/// Checks what a function of ONNX Runtime has returned.
///
/// # Safety
///
/// The status is one that a function of its C API has returned, and is used nowhere else.
pub(crate) unsafe fn checked(status: OrtStatusPtr) -> Result<()> {
    // SAFETY: the caller's obligation.
    unsafe { ort::Error::<()>::result_from_status(status) }
        .map_err(|error| Error::new(ErrorKind::Framework, format!("ONNX Runtime: {error}")).caused_by(error))
}
