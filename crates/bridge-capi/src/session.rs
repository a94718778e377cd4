//! Sessions without Python.

use crate::external::{CExternal, CRuntime};
use crate::pointers::{borrow, into_raw, non_null, slice, text, write};
use crate::status::{Status, answer, refused};
use crate::tensor::CDType;
use bridge_core::{MAX_NDIM, Result};
use bridge_tensorflow::{Input, Session, SessionOptions};
use std::ffi::{c_char, c_void};

/// A tensor of the GraphDef that is replaced by the fed tensor.
#[repr(C)]
pub struct CInput {
    /// such as "x:0"
    pub(crate) name: *const c_char,
    /// ndim lengths, -1 for any
    pub(crate) shape: *const i64,
    pub(crate) ndim: i32,
    pub(crate) dtype: CDType,
    /// such as "/device:GPU:0"; NULL lets TensorFlow choose
    pub(crate) device: *const c_char,
}

/// How a session is opened.
#[repr(C)]
pub struct CSessionOptions {
    /// not 0: TensorFlow allocates nearly the whole GPU at once; 0: as the gpu_options of config say, and without them
    /// as memory is needed
    pub(crate) no_memory_growth: i32,
    /// the largest share of a GPU that it may allocate; 0 for no limit
    pub(crate) memory_fraction: f64,
    /// the GPUs that it uses; NULL for all
    pub(crate) visible_devices: *const u32,
    pub(crate) visible_device_count: usize,
    /// a serialised ConfigProto, which wins; NULL for one with allow_soft_placement
    pub(crate) config: *const c_void,
    pub(crate) config_size: usize,
}

/// A tensor that is fed.
#[repr(C)]
pub struct CNamed {
    pub(crate) name: *const c_char,
    pub(crate) tensor: *const CExternal,
}

/// A session, without Python.
pub struct CSession {
    session: Session,
    runtime: &'static CRuntime,
    /// Results of a run.
    outputs: usize,
}

/// # Safety
///
/// The pointers are null, or point to what the header says.
unsafe fn input(input: &CInput) -> Result<Input> {
    // SAFETY: the caller's obligations, here and below.
    let name = unsafe { text(input.name, "the name of an input") }?;
    let dtype = input.dtype.into();
    let ndim = usize::try_from(input.ndim).ok();
    let declared = match ndim {
        None => Input::of_any_shape(name, dtype)?,
        Some(ndim) if ndim > MAX_NDIM => {
            return Err(refused(format!("the input {name} has {ndim} dimensions: at most {MAX_NDIM} are supported")));
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
unsafe fn options(options: *const CSessionOptions) -> Result<SessionOptions> {
    // SAFETY: the caller's obligations, here and below.
    let Some(options) = (unsafe { options.as_ref() }) else { return Ok(SessionOptions::default()) };
    // SAFETY: see above.
    let (devices, config) = unsafe {
        let devices = slice(options.visible_devices, options.visible_device_count, "visible_devices")?;
        (devices, slice(options.config.cast::<u8>(), options.config_size, "config")?)
    };
    Ok(SessionOptions::default()
        .with_memory_growth((options.no_memory_growth != 0).then_some(false))
        .with_memory_fraction((options.memory_fraction != 0.0).then_some(options.memory_fraction))
        .with_visible_devices((!options.visible_devices.is_null()).then(|| devices.to_vec()))
        .with_config((!options.config.is_null()).then(|| config.to_vec())))
}

/// Opens a session on a serialised GraphDef. with may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_session_open(
    runtime: *const CRuntime,
    graph_def: *const c_void,
    size: usize,
    inputs: *const CInput,
    input_count: usize,
    outputs: *const *const c_char,
    output_count: usize,
    with: *const CSessionOptions,
    out: *mut *mut CSession,
) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the caller's obligations; runtimes live as long as the process.
        unsafe {
            let runtime: &'static CRuntime = borrow(runtime, "runtime")?;
            let graph_def = slice(graph_def.cast::<u8>(), size, "graph_def")?;
            let inputs = slice(inputs, input_count, "inputs")?.iter().map(|declared| input(declared));
            let outputs =
                slice(outputs, output_count, "outputs")?.iter().map(|name| text(*name, "the name of an output"));
            let (inputs, outputs) = (inputs.collect::<Result<Vec<_>>>()?, outputs.collect::<Result<Vec<_>>>()?);
            let session = Session::open(runtime.runtime, graph_def, &inputs, &outputs, &options(with)?)?;
            // An empty graph returns its inputs.
            let count = if graph_def.is_empty() && outputs.is_empty() { inputs.len() } else { outputs.len() };
            write(out, into_raw(CSession { session, runtime, outputs: count }), "out")
        }
    })
}

/// Runs a session. Writes its outputs, in their order, to outputs, which has room for output_count; the caller owns
/// them. Nothing else has their memory. Returns when TensorFlow's run does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_session_run(
    session: *const CSession,
    feeds: *const CNamed,
    feed_count: usize,
    outputs: *mut *mut CExternal,
    output_count: usize,
) -> Status {
    answer(|| {
        // SAFETY: the caller's obligations.
        unsafe {
            let session = borrow(session, "session")?;
            if output_count != session.outputs {
                return Err(refused(format!("a run returns {} results, not {output_count}", session.outputs)));
            }
            if output_count > 0 {
                non_null(outputs, "outputs")?;
            }
            let fed = |fed: &CNamed| {
                Ok((text(fed.name, "the name of a feed")?, borrow(fed.tensor, "the tensor of a feed")?.edge()))
            };
            let feeds = slice(feeds, feed_count, "feeds")?.iter().map(fed).collect::<Result<Vec<_>>>()?;
            for (number, edge) in session.session.run(&feeds)?.into_iter().enumerate() {
                outputs.add(number).write(into_raw(CExternal::new(edge, session.runtime)));
            }
            Ok(())
        }
    })
}

/// Closes and drops a session, also where TensorFlow reports an error. Tensors that were taken stay valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_session_close(session: *mut CSession) -> Status {
    answer(|| {
        non_null(session, "session")?;
        // SAFETY: the caller's obligation.
        unsafe { Box::from_raw(session) }.session.close()
    })
}
