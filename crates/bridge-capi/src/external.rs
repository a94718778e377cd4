//! A TensorFlow of this process, and tensors at the edges of its graphs.

use crate::pointers::{look, put, text, there};
use crate::release::dropping;
use crate::status::{Status, answer, quietly, refused};
use crate::tensor::{CDType, CDevice, Others, Tensor};
use bridge_core::{Access, Adapter, DType, Device, Error, ErrorKind, MAX_NDIM, Options, Result, transfer};
use bridge_tensorflow::{External as Edge, GraphEdges, Runtime, Series};
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
    /// The one for this TensorFlow. There are few, and they live as long as the process.
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
pub struct External {
    edge: Edge,
    runtime: &'static CRuntime,
}

impl External {
    pub(crate) fn new(edge: Edge, runtime: &'static CRuntime) -> Self {
        Self { edge, runtime }
    }

    pub(crate) fn edge(&self) -> &Edge {
        &self.edge
    }

    pub(crate) fn graph(&self) -> GraphEdges {
        self.runtime.graph
    }

    pub(crate) fn into_raw(self) -> *mut Self {
        Box::into_raw(Box::new(self))
    }
}

/// `tb_info`
#[repr(C)]
pub struct Info {
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
    Ok(Options { copy, device: None })
}

fn info(external: &External) -> Result<Info> {
    let lent = external.graph().export(external.edge())?;
    let mut shape = [0; MAX_NDIM];
    let lengths = lent.layout().shape();
    shape[..lengths.len()].copy_from_slice(lengths);
    Ok(Info {
        data: lent.data() as *mut c_void,
        stream: lent.buffer().stream().map_or(0, |stream| stream.handle()),
        dtype: DType::into(lent.dtype()),
        device: Device::into(lent.device()),
        ndim: lengths.len() as i32,
        read_only: i32::from(lent.buffer().access() == Access::ReadOnly),
        shape,
    })
}

/// The TensorFlow of a series that the process has loaded.
///
/// # Safety
///
/// `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_runtime_loaded(series: i32, out: *mut *const CRuntime) -> Status {
    answer(|| {
        let series = match series {
            1 => Series::One,
            2 => Series::Two,
            _ => return Err(refused(format!("there is no series {series} of TensorFlow: it must be 1 or 2"))),
        };
        there(out, "out")?;
        // SAFETY: the caller's obligation.
        unsafe { put(out, CRuntime::of(Runtime::loaded(series)?)?, "out") }
    })
}

/// The TensorFlow in a folder.
///
/// # Safety
///
/// `folder` is null or a C string; `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_runtime_open(folder: *const c_char, out: *mut *const CRuntime) -> Status {
    answer(|| {
        there(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe {
            let folder = Path::new(text(folder, "folder")?);
            put(out, CRuntime::of(Runtime::open(folder)?)?, "out")
        }
    })
}

/// The version of a runtime; null for null.
///
/// # Safety
///
/// `runtime` is null, or what a function here gave.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_runtime_version(runtime: *const CRuntime) -> *const c_char {
    // SAFETY: the caller's obligation.
    unsafe { runtime.as_ref() }.map_or(std::ptr::null(), |runtime| runtime.version.as_ptr())
}

/// Feeds a tensor.
///
/// # Safety
///
/// `runtime` and `tensor` are null or alive; `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_feed(
    runtime: *const CRuntime,
    tensor: *const Tensor,
    copy: i32,
    out: *mut *mut External,
) -> Status {
    answer(|| {
        there(out, "out")?;
        // SAFETY: the caller's obligations; runtimes live as long as the process.
        unsafe {
            let (runtime, tensor) = (look(runtime, "runtime")?, look(tensor, "tensor")?);
            let (edge, _) = transfer(&Others, &runtime.graph, tensor, bridge_cuda::ordering(), &options(copy)?)?;
            put(out, External::new(edge, runtime).into_raw(), "out")
        }
    })
}

/// Takes what a run has given.
///
/// # Safety
///
/// `runtime` is null or what a function here gave, `handle` is null or two numbers, `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_take(runtime: *const CRuntime, handle: *const [i32; 2], out: *mut *mut External) -> Status {
    answer(|| {
        there(out, "out")?;
        // SAFETY: the caller's obligations; runtimes live as long as the process.
        unsafe {
            let (runtime, handle) = (look(runtime, "runtime")?, *look(handle, "handle")?);
            let edge = Edge::take(handle)?;
            if edge.series() != runtime.runtime.series() {
                edge.put_back();
                let text = "this handle comes from a TensorFlow of the other series: take it with that runtime";
                return Err(Error::new(ErrorKind::Argument, text));
            }
            put(out, External::new(edge, runtime).into_raw(), "out")
        }
    })
}

/// Lets what was taken be taken again. What was fed is refused, and stays the caller's.
///
/// # Safety
///
/// `external` is null, or what a function here gave and nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_put_back(external: *mut External) -> Status {
    answer(|| {
        // SAFETY: the caller's obligation.
        if !unsafe { look(external, "external") }?.edge.is_fetched() {
            let text = "this was fed, and no run has given it, so it cannot be put back: drop it with tb_external_drop";
            return Err(refused(text));
        }
        // SAFETY: as above; the object is taken over.
        unsafe { Box::from_raw(external) }.edge.put_back();
        Ok(())
    })
}

/// The two numbers that stand for an external in graphs.
///
/// # Safety
///
/// `external` is null or alive; `handle` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_handle(external: *const External, handle: *mut [i32; 2]) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe { put(handle, look(external, "external")?.edge.handle(), "handle") }
    })
}

/// What is known of an external.
///
/// # Safety
///
/// `external` is null or alive; `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_info(external: *const External, out: *mut Info) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe { put(out, info(look(external, "external")?)?, "out") }
    })
}

/// Drops an external.
///
/// # Safety
///
/// `external` is null, or what a function here gave and nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_drop(external: *mut External) {
    if !external.is_null() {
        // SAFETY: the caller's obligation.
        quietly(|| dropping(|| drop(unsafe { Box::from_raw(external) })));
    }
}
