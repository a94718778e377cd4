//! A TensorFlow of this process, and tensors at the edges of its graphs.

use crate::pointers::{borrow, drop_raw, into_raw, non_null, text, write};
use crate::status::{Status, answer, refused};
use crate::tensor::{CDType, CDevice, CTensor, Caller};
use bridge_core::{Access, Adapter, DType, Device, Error, ErrorKind, MAX_NDIM, Options, Result, transfer};
use bridge_tensorflow::{External, GraphEdges, Runtime, Series};
use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// `tb_runtime`: a TensorFlow with the operations registered.
pub struct CRuntime {
    pub(crate) runtime: &'static Runtime,
    pub(crate) graph: GraphEdges,
    version: CString,
}

impl CRuntime {
    /// Returns the one for this TensorFlow. There are few, and they live as long as the process.
    fn of(runtime: &'static Runtime) -> Result<&'static Self> {
        static KNOWN: Mutex<Vec<&'static CRuntime>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.iter().find(|known| std::ptr::eq(known.runtime, runtime)) {
            return Ok(found);
        }
        let version = CString::new(runtime.version()).unwrap_or_default();
        known.push(Box::leak(Box::new(Self { runtime, graph: GraphEdges::new(runtime)?, version })));
        Ok(known[known.len() - 1])
    }
}

/// `tb_external`
pub struct CExternal {
    edge: External,
    runtime: &'static CRuntime,
}

impl CExternal {
    pub(crate) fn new(edge: External, runtime: &'static CRuntime) -> Self {
        Self { edge, runtime }
    }

    pub(crate) fn edge(&self) -> &External {
        &self.edge
    }

    pub(crate) fn graph(&self) -> GraphEdges {
        self.runtime.graph
    }
}

/// `tb_info`
#[repr(C)]
pub struct CInfo {
    pub(crate) data: *mut c_void,
    pub(crate) stream: u64,
    pub(crate) dtype: CDType,
    pub(crate) device: CDevice,
    pub(crate) ndim: i32,
    pub(crate) read_only: i32,
    pub(crate) shape: [i64; MAX_NDIM],
}

/// `tb_copy`
fn options(copy: i32) -> Result<Options> {
    let copy = match copy {
        0 => None,
        1 => Some(true),
        2 => Some(false),
        _ => return Err(refused(format!("copy is {copy}: it must be one of tb_copy"))),
    };
    Ok(Options { copy, ..Options::default() })
}

fn info(external: &CExternal) -> Result<CInfo> {
    let lent = external.graph().export(external.edge())?;
    let mut shape = [0; MAX_NDIM];
    let lengths = lent.layout().shape();
    shape[..lengths.len()].copy_from_slice(lengths);
    Ok(CInfo {
        data: lent.data() as *mut c_void,
        stream: lent.buffer().stream().map_or(0, |stream| stream.handle()),
        dtype: DType::into(lent.dtype()),
        device: Device::into(lent.device()),
        ndim: lengths.len() as i32,
        read_only: i32::from(lent.buffer().access() == Access::ReadOnly),
        shape,
    })
}

/// Finds the TensorFlow of a series that the process has loaded.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_runtime_loaded(series: i32, out: *mut *const CRuntime) -> Status {
    answer(|| {
        let series = match series {
            1 => Series::One,
            2 => Series::Two,
            _ => return Err(refused(format!("series is {series}: it must be 1 or 2"))),
        };
        non_null(out, "out")?;
        // SAFETY: the caller's obligation.
        unsafe { write(out, CRuntime::of(Runtime::loaded(series)?)?, "out") }
    })
}

/// Loads the TensorFlow in a folder.
///
/// # Safety
///
/// `folder` is null or a C string; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_runtime_open(folder: *const c_char, out: *mut *const CRuntime) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe {
            let folder = Path::new(text(folder, "folder")?);
            write(out, CRuntime::of(Runtime::open(folder)?)?, "out")
        }
    })
}

/// Returns the version of a runtime; null for null.
///
/// # Safety
///
/// `runtime` is null, or was returned by a function here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_runtime_version(runtime: *const CRuntime) -> *const c_char {
    // SAFETY: the caller's obligation.
    unsafe { runtime.as_ref() }.map_or(std::ptr::null(), |runtime| runtime.version.as_ptr())
}

/// Feeds a tensor.
///
/// # Safety
///
/// `runtime` and `tensor` are null or alive; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_feed(
    runtime: *const CRuntime,
    tensor: *const CTensor,
    copy: i32,
    out: *mut *mut CExternal,
) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the caller's obligations; runtimes live as long as the process.
        unsafe {
            let (runtime, tensor) = (borrow(runtime, "runtime")?, borrow(tensor, "tensor")?);
            let (edge, _) = transfer(&Caller, &runtime.graph, tensor, bridge_copy::ordering(), &options(copy)?)?;
            write(out, into_raw(CExternal::new(edge, runtime)), "out")
        }
    })
}

/// Takes the tensor that a run fetched.
///
/// # Safety
///
/// `runtime` is null or was returned by a function here, `handle` is null or two numbers, `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_take(
    runtime: *const CRuntime,
    handle: *const [i32; 2],
    out: *mut *mut CExternal,
) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the caller's obligations; runtimes live as long as the process.
        unsafe {
            let (runtime, handle) = (borrow(runtime, "runtime")?, *borrow(handle, "handle")?);
            let edge = External::take(handle)?;
            if edge.series() != runtime.runtime.series() {
                edge.put_back();
                let text = "this handle comes from a TensorFlow of the other series: take it with that runtime";
                return Err(Error::new(ErrorKind::Argument, text));
            }
            write(out, into_raw(CExternal::new(edge, runtime)), "out")
        }
    })
}

/// Makes a taken tensor available to be taken again. One that was fed is refused, and stays the caller's.
///
/// # Safety
///
/// `external` is null, or was returned by a function here and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_put_back(external: *mut CExternal) -> Status {
    answer(|| {
        // SAFETY: the caller's obligation.
        if !unsafe { borrow(external, "external") }?.edge.is_fetched() {
            let text =
                "this tensor was fed, not fetched by a run, so it cannot be put back: drop it with tb_external_drop";
            return Err(refused(text));
        }
        // SAFETY: as above; the object is taken over.
        unsafe { Box::from_raw(external) }.edge.put_back();
        Ok(())
    })
}

/// Returns the two numbers that stand for an external in graphs.
///
/// # Safety
///
/// `external` is null or alive; `handle` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_handle(external: *const CExternal, handle: *mut [i32; 2]) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe { write(handle, borrow(external, "external")?.edge.handle(), "handle") }
    })
}

/// Describes an external.
///
/// # Safety
///
/// `external` is null or alive; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_info(external: *const CExternal, out: *mut CInfo) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe { write(out, info(borrow(external, "external")?)?, "out") }
    })
}

/// Drops an external.
///
/// # Safety
///
/// `external` is null, or was returned by a function here and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_drop(external: *mut CExternal) {
    // SAFETY: the caller's obligation.
    unsafe { drop_raw(external) };
}
