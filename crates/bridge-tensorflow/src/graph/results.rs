//! What a run returns, in memory that nothing else has.
//!
//! TensorFlow shares memory where it can: what a graph computes may be the memory of a variable, of a constant, of a
//! queue, of another result, or of the framework that has fed it. So a result is copied unless its reference is the
//! only one. It is in place where a kernel has computed it, which is the common case.

use crate::graph::external::{self, External, Held, Origin, Value};
use crate::graph::session::Session;
use crate::runtime::dtypes;
use crate::runtime::library::Series;
use crate::runtime::tensor::RuntimeTensor;
use bridge_core::{DType, Device, DeviceKind, Dims, Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, PoisonError};

impl External {
    /// Takes the tensor that a run has fetched, by the handle that the run returned. In place if nothing else has its
    /// memory, and otherwise as a copy on its device: of what the memory holds now, in TensorFlow's stream. So the
    /// tensor does not change later, and may be written to. A tensor of eager execution, which the program holds, is
    /// not copied.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Consumed`] if it was taken before, or its session is closed. [`ErrorKind::OutOfMemory`] and others
    /// if it cannot be copied; then it can be taken again.
    pub fn take(handle: [i32; 2]) -> Result<Self> {
        let value = external::recorded(handle)?;
        match exclusive(value) {
            Ok(value) => Ok(Self::under(handle, value)),
            Err((value, error)) => {
                Self::under(handle, value).put_back();
                Err(error)
            }
        }
    }
}

impl Session {
    /// Runs the graph once. Every input has to be fed, by its name or its key in a signature; the outputs are returned
    /// in the order of their declaration, in memory that nothing else has: in place if a kernel has computed them, and
    /// otherwise as copies of their values at the end of the run.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for an input that is not fed, fed twice or not declared, or is of another dtype or
    /// shape, and in a child of the process that opened the session; [`ErrorKind::Framework`] for an output in a branch
    /// that the run does not take, and what TensorFlow reports; the error names the input, the output or the operation.
    pub fn run(&self, feeds: &[(&str, &External)]) -> Result<Vec<External>> {
        let results = self.fetch(feeds)?.into_iter();
        results
            .map(|(handle, value)| Ok(External::under(handle, exclusive(value).map_err(|(_, error)| error)?)))
            .collect()
    }
}

/// Returns a tensor that a run has fetched if nothing else has its memory, and otherwise a copy. An error returns the
/// tensor as well.
fn exclusive(value: Arc<Value>) -> Result<Arc<Value>, (Arc<Value>, Error)> {
    if value.origin != Origin::Run {
        return Ok(value);
    }
    let shared = match Arc::try_unwrap(value) {
        Ok(Value { held: Held::Tensor(tensor), runtime, dtype, device, shape, bytes, stream, origin, instance }) => {
            let (tensor, is_exclusive) = match tensor.exclusive() {
                Ok(tensor) => (tensor, true),
                Err(tensor) => (tensor, false),
            };
            let held = Held::Tensor(tensor);
            let value = Arc::new(Value { runtime, dtype, device, shape, bytes, stream, held, origin, instance });
            if is_exclusive {
                return Ok(value);
            }
            value
        }
        // A copy of one that was put back.
        Ok(copy) => return Ok(Arc::new(copy)),
        // It was put back, and a view of it is alive.
        Err(viewed) => viewed,
    };
    match copied(&shared) {
        Ok(copy) => Ok(Arc::new(copy)),
        Err(error) => Err((shared, error)),
    }
}

/// Returns a copy in memory of TensorFlow's, on the same device.
pub(crate) fn copied(value: &Arc<Value>) -> Result<Value> {
    match value.device.kind {
        DeviceKind::CUDA => copied_on_device(value),
        _ => copied_on_host(value),
    }
}

fn copied_on_host(value: &Value) -> Result<Value> {
    let (code, bytes) = (dtypes::required(value.dtype)?, value.bytes.start as *const u8);
    // SAFETY: the value is compact host memory of that many bytes, and ready.
    let tensor = unsafe { RuntimeTensor::copied(&value.runtime.core, code, &value.shape, bytes, value.bytes.len()) }?;
    let start = tensor.address();
    let bytes = start..start + value.bytes.len();
    Ok(Value { bytes, shape: value.shape.clone(), held: Held::Tensor(tensor), instance: 0, ..*value })
}

/// Copies bytes, because few operations support every dtype.
fn copied_on_device(value: &Arc<Value>) -> Result<Value> {
    type Copies = Vec<((Series, Device), Arc<Session>)>;
    static COPIES: Mutex<Copies> = Mutex::new(Vec::new());
    let as_bytes = |value: &Arc<Value>, dtype: DType, shape: Dims, origin: Origin| Value {
        dtype,
        shape,
        bytes: value.bytes.clone(),
        held: Held::Owner { _owner: Box::new(value.clone()) },
        origin,
        instance: 0,
        ..**value
    };
    let shape = [value.bytes.len() as i64].into_iter().collect();
    let bytes = External::new(as_bytes(value, DType::UINT8, shape, Origin::Fed));
    let session = {
        let mut copies = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (value.runtime.series(), value.device);
        match copies.iter().find(|(known, _)| *known == key) {
            Some((_, session)) => session.clone(),
            None => {
                // The session of the tensor has set the GPU up.
                let session = Arc::new(Session::for_copies(value.runtime, value.device)?);
                copies.push((key, session.clone()));
                session
            }
        }
    };
    let (_, copied) = session.fetch(&[("x", &bytes)])?.pop().expect("one output was declared");
    if !value.bytes.is_empty() && copied.bytes.start == value.bytes.start {
        return Err(Error::new(ErrorKind::Framework, "tensorflow did not copy: please report this"));
    }
    Ok(as_bytes(&copied, value.dtype, value.shape.clone(), value.origin))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::config::SessionOptions;
    use crate::graph::input::Input;
    use crate::installed;
    use crate::runtime::Runtime;

    /// y = 2 x + 1.
    const LINE: &[u8] = include_bytes!("../../tests/data/line.pb");

    /// Runs the graph on 16 numbers of TensorFlow's. Returns them, and what the run records for some outputs.
    fn recorded(runtime: &'static Runtime, outputs: &[&str]) -> (External, Vec<Arc<Value>>) {
        let x = Input::new("x:0", DType::FLOAT32, &[None]).unwrap();
        let session = Session::open(runtime, LINE, &[x], outputs, &SessionOptions::default()).unwrap();
        let tensor =
            RuntimeTensor::of(&runtime.core, dtypes::required(DType::FLOAT32).unwrap(), &[1.0f32; 16]).unwrap();
        let start = tensor.address();
        let fed = External::new(Value {
            runtime,
            dtype: DType::FLOAT32,
            device: Device::CPU,
            shape: tensor.shape(),
            bytes: start..start + tensor.nbytes(),
            stream: None,
            held: Held::Tensor(tensor),
            origin: Origin::Fed,
            instance: 0,
        });
        let values = session.fetch(&[("x", &fed)]).unwrap().into_iter().map(|(_, value)| value).collect();
        (fed, values)
    }

    fn result(value: Arc<Value>) -> Arc<Value> {
        exclusive(value).map_err(|(_, error)| error).unwrap()
    }

    #[test]
    fn what_a_kernel_has_computed_stays_in_place_and_what_others_have_is_copied() {
        for folder in [installed::one(), installed::two()].into_iter().flatten() {
            // SAFETY: it is the folder of a TensorFlow.
            let runtime = unsafe { Runtime::open(&folder) }.unwrap();
            for _ in 0..20 {
                // Two results in the same memory: the last one is then the only reference.
                let (fed, values) = recorded(runtime, &["y:0", "x:0", "y:0"]);
                let starts: Vec<usize> = values.iter().map(|value| value.bytes.start).collect();
                let results: Vec<_> = values.into_iter().map(result).collect();
                let in_place: Vec<bool> =
                    results.iter().zip(&starts).map(|(new, old)| new.bytes.start == *old).collect();
                assert_eq!((starts[0] == starts[2], in_place), (true, vec![false, false, true]));
                let numbers = |value: &Value| {
                    // SAFETY: the value is 16 float32 in host memory.
                    unsafe { std::slice::from_raw_parts(value.bytes.start as *const f32, 16) }.to_vec()
                };
                let expected = [3.0f32, 1.0, 3.0].map(|number| vec![number; 16]);
                assert!(results.iter().map(|value| numbers(value)).eq(expected));
                drop(fed);
                let [value] = <[_; 1]>::try_from(recorded(runtime, &["y:0"]).1).ok().unwrap();
                let start = value.bytes.start;
                let value = result(value);
                assert_eq!(value.bytes.start, start);
                // With a view of it, it is not exclusive.
                let view = value.clone();
                assert_ne!(result(value).bytes.start, view.bytes.start);
            }
        }
    }
}
