//! Exports arrays of JAX.

use crate::devices::raised;
use crate::driver::{locate, on};
use crate::runtime::Runtime;
use crate::turns::{self, in_turn};
use bridge_core::dlpack::Origin;
use bridge_core::planted::is_planted;
use bridge_core::{Access, DType, Device, DeviceKind, Error, ErrorKind, Export, Result, Reuse, Stream};
use bridge_pyo3::{PyTensor, call, drop_guarded, is_instance, not_a_tensor, take_capsule};
use pyo3::intern;
use pyo3::prelude::*;

pub(crate) fn export(runtime: &Runtime, array: &PyTensor<'_>) -> Result<Export> {
    let py = array.py();
    if !runtime.is_concrete(array) {
        return Err(without_memory(runtime, array));
    }
    let is_single = one_piece(runtime, array)?;
    let on_host = is_on_host(array)?;
    let export = || {
        let stream = match on_host {
            // The export would wait as well, but with the GIL, which callbacks of the computation need.
            true => call(array, intern!(py, "block_until_ready"), &[]).map(|_| None)?,
            false => Some(Stream::LEGACY.handle()),
        };
        runtime.export.bind(py).call1((piece(runtime, array, is_single)?, stream))
    };
    let kind = if on_host { DeviceKind::CPU } else { DeviceKind::CUDA };
    let capsule = on(kind, || if on_host { export() } else { in_turn(array, export) });
    let capsule = capsule.map_err(|error| refused(array, error))?;
    // SAFETY: jaxlib keeps DLPack's promises, and has made the legacy default stream wait for an array on a device; how
    // its allocator reuses memory is not known.
    let exported = unsafe { take_capsule(&capsule, &origin) }?;
    refuse_bits(array, &exported)?;
    let access = runtime.protected.access(exported.data(), Access::Immutable);
    // SAFETY: JAX never writes to an array.
    Ok(unsafe { exported.restricted(access) })
}

/// Returns whether an array is on the host, and not on a CUDA device.
///
/// # Errors
///
/// [`ErrorKind::Device`] for an array of another backend.
fn is_on_host(array: &PyTensor<'_>) -> Result<bool> {
    let py = array.py();
    let look = || {
        let platform = call(array, intern!(py, "platform"), &[])?;
        let is = |name| platform.eq(name);
        if is(intern!(py, "cpu"))? {
            return Ok(Ok(true));
        }
        let is_cuda = is(intern!(py, "gpu"))? || is(intern!(py, "cuda"))?;
        Ok(if is_cuda { Ok(false) } else { Err(of_another_backend(&platform)) })
    };
    look().map_err(|error| raised(py, error))?
}

#[cold]
fn of_another_backend(platform: &PyTensor<'_>) -> Error {
    let text = format!(
        "the array is in memory of {platform}, which no other framework reads: copy it to the host, jax.device_put(x, jax.devices(\"cpu\")[0])"
    );
    Error::new(ErrorKind::Device, text)
}

/// Returns its own array over the same memory, as `jax.dlpack` exports it: jaxlib aborts the process where an array is
/// deleted that was itself exported.
fn piece<'py>(runtime: &Runtime, array: &PyTensor<'py>, is_single: bool) -> PyResult<PyTensor<'py>> {
    let py = array.py();
    match is_single && runtime.has_shard {
        // `addressable_data` ends here too, after five functions of Python, which take longer than the export.
        true => call(array, intern!(py, "_fully_replicated_shard"), &[]),
        false => call(array, intern!(py, "addressable_data"), &[runtime.zero.bind(py)]),
    }
}

/// Returns what a capsule of jaxlib does not say.
fn origin(said: Device, address: usize) -> Result<Origin> {
    if said.kind == DeviceKind::CPU {
        return Ok(Origin::host().released_by(Some(drop_guarded)));
    }
    let located = if address == 0 { None } else { locate(address)? };
    let allocation = located.map(|(_, range)| range);
    Ok(Origin::new(Some(Stream::LEGACY), Reuse::Unknown).within(allocation).released_by(Some(turns::release)))
}

/// Returns the error for an object of JAX that is not an array with memory.
#[cold]
fn without_memory(runtime: &Runtime, object: &PyTensor<'_>) -> Error {
    let py = object.py();
    let text = if is_instance(object, runtime.tracer.bind(py)) {
        "the array is being traced (jit, grad, vmap, pmap, shard_map) and has no memory yet: convert before the transformed function is called, or inside jax.pure_callback; truebridge.jax.external_output copies it into a tensor"
    } else if runtime.is_of_jax(object) {
        "keys of jax.random are not numbers: convert jax.random.key_data(keys), and make keys of the result by jax.random.wrap_key_data"
    } else {
        return not_a_tensor("jax", object);
    };
    Error::new(ErrorKind::NotATensor, text)
}

/// Refuses an array that was deleted, and one on several devices, of which jaxlib would export the first piece. Returns
/// whether its sharding names a single device.
fn one_piece(runtime: &Runtime, array: &PyTensor<'_>) -> Result<bool> {
    let py = array.py();
    let look = || {
        let is_deleted =
            call(array, intern!(py, "is_deleted"), &[])?.is_truthy()? && !is_planted("jax_deletion_missed");
        let sharding = array.getattr(intern!(py, "sharding"))?;
        let is_single = sharding.get_type().is(runtime.single.bind(py));
        let devices = if is_single { 1 } else { sharding.getattr(intern!(py, "device_set"))?.len()? };
        Ok((is_deleted, devices, is_single))
    };
    match look().map_err(|error| raised(py, error))? {
        (false, 1, is_single) => Ok(is_single),
        (true, ..) => {
            let text = "the array was deleted, or donated to a function of jit: pass one that is alive";
            Err(Error::new(ErrorKind::Consumed, text))
        }
        (false, devices, _) => {
            let gather = match is_of_this_process(array).map_err(|error| raised(py, error))? {
                true => "on one by jax.device_put(x, device)",
                false => "in every process by jax.experimental.multihost_utils.process_allgather(x)",
            };
            let text = format!(
                "the array lies on {devices} devices of JAX: convert its pieces, shard.data for each shard of x.addressable_shards, or gather it {gather}"
            );
            Err(Error::new(ErrorKind::NotATensor, text))
        }
    }
}

/// Returns whether this process can address all devices of an array.
fn is_of_this_process(array: &PyTensor<'_>) -> PyResult<bool> {
    array.getattr(intern!(array.py(), "is_fully_addressable"))?.is_truthy()
}

/// Refuses elements of one bit, which jaxlib exports as bool.
fn refuse_bits(array: &PyTensor<'_>, exported: &Export) -> Result<()> {
    let py = array.py();
    let kind = || array.getattr(intern!(py, "dtype"))?.getattr(intern!(py, "kind"))?.eq(intern!(py, "b"));
    match exported.dtype() == DType::BOOL && !kind().map_err(|error| raised(py, error))? {
        true => Err(Error::new(ErrorKind::Dtype, WITHOUT_COUNTERPART)),
        false => Ok(()),
    }
}

const WITHOUT_COUNTERPART: &str =
    "the dtype has no counterpart in other frameworks: cast the array, for example x.astype(jax.numpy.int8)";

/// Returns the error for what jaxlib does not export.
#[cold]
fn refused(array: &PyTensor<'_>, error: PyErr) -> Error {
    let py = array.py();
    let text = error.value(py).to_string();
    if matches!(is_of_this_process(array), Ok(false)) {
        let text =
            "the array is on a device of another process: convert it there, and send a ticket of truebridge.share";
        return Error::new(ErrorKind::Device, text).caused_by(error);
    }
    if text.contains("has no DLPack equivalent") {
        return Error::new(ErrorKind::Dtype, WITHOUT_COUNTERPART).caused_by(error);
    }
    raised(py, error)
}

/// Returns a copy by JAX, in fresh memory.
pub(crate) fn compact<'py>(array: &PyTensor<'py>) -> Result<PyTensor<'py>> {
    let py = array.py();
    let dtype = |array: &PyTensor<'py>| array.getattr(intern!(py, "dtype"));
    let copy = || {
        let copy = call(array, intern!(py, "copy"), &[])?;
        Ok::<_, PyErr>(dtype(&copy)?.eq(dtype(array)?)?.then_some(copy))
    };
    let kind = if is_on_host(array)? { DeviceKind::CPU } else { DeviceKind::CUDA };
    on(kind, copy).map_err(|error| raised(py, error))?.ok_or_else(|| {
        let text = "JAX copies no elements of 64 bits without jax_enable_x64: enable it, or cast the array";
        Error::new(ErrorKind::CopyNeeded, text)
    })
}
