//! A TensorFlow of this process, and tensors at the edges of its graphs.

use crate::pointers::{borrow, drop_raw, into_raw, non_null, text, write};
use crate::status::{Status, answer, refused};
use crate::tensor::{CDType, CDevice, CTensor, Caller, TB_MAX_NDIM};
use crate::transfer;
use bridge_core::{Adapter, DType, Device, Error, ErrorKind, MAX_NDIM, Options, Result};
use bridge_tensorflow::{External, GraphEdges, Runtime, Series};
use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// A TensorFlow of this process, with the operations registered. It lives as long as the process.
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

/// A tensor at the edge of a graph: one that is fed, or one that a run fetched.
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

/// Description of a tb_external, which is always compact and row-major.
#[repr(C)]
pub struct CInfo {
    pub(crate) data: *mut c_void,
    /// TensorFlow's stream, in which it was written; 0 for host memory
    pub(crate) stream: u64,
    pub(crate) dtype: CDType,
    pub(crate) device: CDevice,
    pub(crate) ndim: i32,
    pub(crate) read_only: i32,
    pub(crate) shape: [i64; TB_MAX_NDIM],
}

fn info(external: &CExternal) -> Result<CInfo> {
    let exported = external.graph().export(external.edge())?;
    let mut shape = [0; MAX_NDIM];
    let lengths = exported.layout().shape();
    shape[..lengths.len()].copy_from_slice(lengths);
    Ok(CInfo {
        data: exported.as_ptr(),
        stream: exported.buffer().stream().map_or(0, |stream| stream.handle()),
        dtype: DType::into(exported.dtype()),
        device: Device::into(exported.device()),
        ndim: lengths.len() as i32,
        read_only: i32::from(exported.buffer().access().forbids_writes()),
        shape,
    })
}

/// Finds the TensorFlow 1.15 (series 1) or 2.x (series 2) that the process has loaded, for instance by "import
/// tensorflow".
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

/// Loads the TensorFlow in this folder, such as site-packages/tensorflow, without Python.
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

/// Returns the version, such as "1.15.5"; NULL for NULL. The text lives as long as the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_runtime_version(runtime: *const CRuntime) -> *const c_char {
    // SAFETY: the caller's obligation.
    unsafe { runtime.as_ref() }.map_or(std::ptr::null(), |runtime| runtime.version.as_ptr())
}

/// Makes a tensor ready to be fed, in place where TensorFlow can take it: TensorFlow's stream waits, on the device, for
/// the work on it. A copy is made on the device of the tensor. copy is one of tb_copy.
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
            let options = Options::default().with_copy(transfer::copy(copy)?);
            let ordering = bridge_cuda::ordering();
            let caller = Caller::of(tensor, ordering);
            let (edge, _) = bridge_core::transfer(&caller, &runtime.graph, tensor, ordering, &options)?;
            write(out, into_raw(CExternal::new(edge, runtime)), "out")
        }
    })
}

/// Takes the tensor that a run fetched under this handle, two numbers. Each can be taken once (TB_CONSUMED). Nothing else
/// has its memory: it is in place where a kernel has computed it, and otherwise a copy on its device. Put the operation
/// Snapshot before TruebridgeOutput: without it, a reference variable, or a write to what was fed, changes what is
/// recorded until it is taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_take(runtime: *const CRuntime, handle: *const i32, out: *mut *mut CExternal) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the caller's obligations; runtimes live as long as the process.
        unsafe {
            let (runtime, handle) = (borrow(runtime, "runtime")?, *borrow(handle.cast::<[i32; 2]>(), "handle")?);
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

/// Consumes a taken tensor, so that it can be taken again under its handle. TB_ARGUMENT for one that was fed, which
/// stays the caller's.
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

/// Writes the two numbers to feed. They are valid as long as the object lives; a run that has read them keeps the
/// memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_handle(external: *const CExternal, handle: *mut i32) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe { write(handle.cast(), borrow(external, "external")?.edge.handle(), "handle") }
    })
}

/// Describes a tensor at the edge of a graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_info(external: *const CExternal, out: *mut CInfo) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe { write(out, info(borrow(external, "external")?)?, "out") }
    })
}

/// Drops a tensor at the edge of a graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_drop(external: *mut CExternal) {
    // SAFETY: the caller's obligation.
    unsafe { drop_raw(external) };
}
