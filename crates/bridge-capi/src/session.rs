//! Sessions without Python.

use crate::external::{CRuntime, External};
use crate::pointers::{look, put, slice, text, there};
use crate::status::{Status, answer, refused};
use crate::tensor::CDType;
use bridge_core::{MAX_NDIM, Result};
use bridge_tensorflow::{Input, Session, SessionOptions};
use std::ffi::{c_char, c_void};

/// `tb_input`
#[repr(C)]
pub struct CInput {
    pub(crate) name: *const c_char,
    pub(crate) shape: *const i64,
    pub(crate) ndim: i32,
    pub(crate) dtype: CDType,
    pub(crate) device: *const c_char,
}

/// `tb_session_options`
#[repr(C)]
pub struct COptions {
    pub(crate) no_memory_growth: i32,
    pub(crate) memory_fraction: f64,
    pub(crate) visible_devices: *const u32,
    pub(crate) visible_device_count: usize,
    pub(crate) config: *const c_void,
    pub(crate) config_size: usize,
}

/// `tb_named`
#[repr(C)]
pub struct Named {
    pub(crate) name: *const c_char,
    pub(crate) tensor: *const External,
}

/// `tb_session`
pub struct CSession {
    session: Session,
    runtime: &'static CRuntime,
    /// How many results a run gives.
    outputs: usize,
}

/// # Safety
///
/// The pointers are null, or to what the C counterpart says.
unsafe fn input(input: &CInput) -> Result<Input> {
    // SAFETY: the caller's obligations, here and below.
    let name = unsafe { text(input.name, "the name of an input") }?;
    let dtype = input.dtype.into();
    let ndim = usize::try_from(input.ndim).ok();
    let declared = match ndim {
        None => Input::of_any_shape(name, dtype)?,
        Some(ndim) if ndim > MAX_NDIM => {
            return Err(refused(format!("the input {name} has {ndim} dimensions: at most {MAX_NDIM} are there")));
        }
        Some(ndim) => {
            // SAFETY: see above.
            let shape = unsafe { slice(input.shape, ndim, "the shape of an input") }?;
            let shape: Vec<_> = shape.iter().map(|length| (*length >= 0).then_some(*length)).collect();
            Input::new(name, dtype, &shape)?
        }
    };
    match input.device.is_null() {
        true => Ok(declared),
        // SAFETY: see above.
        false => declared.on(unsafe { text(input.device, "the device of an input") }?),
    }
}

/// # Safety
///
/// As for [`input`].
unsafe fn options(options: *const COptions) -> Result<SessionOptions> {
    // SAFETY: the caller's obligations, here and below.
    let Some(options) = (unsafe { options.as_ref() }) else { return Ok(SessionOptions::default()) };
    // SAFETY: see above.
    let (devices, config) = unsafe {
        let devices = slice(options.visible_devices, options.visible_device_count, "visible_devices")?;
        (devices, slice(options.config.cast::<u8>(), options.config_size, "config")?)
    };
    Ok(SessionOptions {
        memory_growth: (options.no_memory_growth != 0).then_some(false),
        memory_fraction: (options.memory_fraction > 0.0).then_some(options.memory_fraction),
        visible_devices: (!options.visible_devices.is_null()).then(|| devices.to_vec()),
        config: (!options.config.is_null()).then(|| config.to_vec()),
    })
}

/// Opens a session on a graph.
///
/// # Safety
///
/// Every pointer is null, or to as many values as its count says, which are what the header says of them. `out` is null
/// or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_session_open(
    runtime: *const CRuntime,
    graph_def: *const c_void,
    size: usize,
    inputs: *const CInput,
    input_count: usize,
    outputs: *const *const c_char,
    output_count: usize,
    with: *const COptions,
    out: *mut *mut CSession,
) -> Status {
    answer(|| {
        there(out, "out")?;
        // SAFETY: the caller's obligations; runtimes live as long as the process.
        unsafe {
            let runtime: &'static CRuntime = look(runtime, "runtime")?;
            let graph_def = slice(graph_def.cast::<u8>(), size, "graph_def")?;
            let inputs = slice(inputs, input_count, "inputs")?.iter().map(|declared| input(declared));
            let outputs =
                slice(outputs, output_count, "outputs")?.iter().map(|name| text(*name, "the name of an output"));
            let (inputs, outputs) = (inputs.collect::<Result<Vec<_>>>()?, outputs.collect::<Result<Vec<_>>>()?);
            let session = Session::open(runtime.runtime, graph_def, &inputs, &outputs, &options(with)?)?;
            // A graph without anything passes its inputs on.
            let count = if graph_def.is_empty() && outputs.is_empty() { inputs.len() } else { outputs.len() };
            put(out, Box::into_raw(Box::new(CSession { session, runtime, outputs: count })), "out")
        }
    })
}

/// Runs a session.
///
/// # Safety
///
/// As for [`tb_session_open`]; `outputs` can be written so many times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_session_run(
    session: *const CSession,
    feeds: *const Named,
    feed_count: usize,
    outputs: *mut *mut External,
    output_count: usize,
) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe {
            let session = look(session, "session")?;
            if output_count != session.outputs {
                return Err(refused(format!("a run gives {} results, not {output_count}", session.outputs)));
            }
            if output_count > 0 {
                there(outputs, "outputs")?;
            }
            let fed = |fed: &Named| {
                Ok((text(fed.name, "the name of a feed")?, look(fed.tensor, "the tensor of a feed")?.edge()))
            };
            let feeds = slice(feeds, feed_count, "feeds")?.iter().map(fed).collect::<Result<Vec<_>>>()?;
            for (number, edge) in session.session.run(&feeds)?.into_iter().enumerate() {
                outputs.add(number).write(External::new(edge, session.runtime).into_raw());
            }
            Ok(())
        }
    })
}

/// Closes a session.
///
/// # Safety
///
/// `session` is null, or what [`tb_session_open`] gave and nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_session_close(session: *mut CSession) -> Status {
    answer(|| {
        there(session, "session")?;
        // SAFETY: the caller's obligation.
        unsafe { Box::from_raw(session) }.session.close()
    })
}
