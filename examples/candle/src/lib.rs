//! A Python extension module in Rust: a model of candle that every framework calls with its own tensors on the host.
//!
//! `perceptron.Perceptron([(weight, bias), …])` takes the layers as `torch.nn.Linear` has them, from any framework. A call
//! takes a batch of vectors of PyTorch, NumPy, TensorFlow or JAX, and returns a tensor of the same framework. The batch
//! comes in by one copy, because candle's storages own their memory. The result goes out in place, and keeps candle's
//! memory alive.

use candle_core::{DType, Tensor as Matrix};
use pyo3::prelude::*;
use truebridge::prelude::*;
use truebridge::python::{PyTensor, Tensor, exception};
use truebridge::{Result, Transfer};

#[pymodule]
fn perceptron(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Perceptron>()
}

/// Linear layers, with ``relu`` between them.
///
/// ``layers`` is a list of pairs: a float32 weight of shape ``(outputs, inputs)``, and a bias of shape ``(outputs,)``. Both
/// are copied.
#[pyclass(frozen, module = "perceptron")]
struct Perceptron {
    candle: Candle,
    layers: Vec<Layer>,
}

struct Layer {
    /// Of shape `(inputs, outputs)`.
    weight: Matrix,
    bias: Matrix,
}

#[pymethods]
impl Perceptron {
    #[new]
    fn new<'py>(py: Python<'py>, layers: Vec<(Tensor<'py>, Tensor<'py>)>) -> PyResult<Self> {
        // SAFETY: there are no custom operations here. candle writes to no tensor that has been converted: batches are
        // copies, and the model drops its results when it returns them.
        let mut model = Self { candle: unsafe { Candle::new() }, layers: Vec::new() };
        let mut add = |(weight, bias)| model.add(&weight, &bias);
        layers.into_iter().try_for_each(&mut add).map_err(|error| exception(py, error))?;
        Ok(model)
    }

    /// Return the outputs for a float32 batch of shape ``(batch, inputs)``: a tensor of the framework that ``x`` is of.
    fn __call__<'py>(&self, py: Python<'py>, x: Tensor<'py>) -> PyResult<PyTensor<'py>> {
        self.run(py, &x).map(|(y, _)| y).map_err(|error| exception(py, error))
    }

    /// Call the model, and return how the batch came in and how the result went out.
    fn plans<'py>(&self, py: Python<'py>, x: Tensor<'py>) -> PyResult<[String; 2]> {
        let (_, conversions) = self.run(py, &x).map_err(|error| exception(py, error))?;
        Ok(conversions.map(|conversion| match conversion.plan.reason() {
            None => "zero copy".into(),
            Some(reason) => format!("copy of {} bytes because of {reason}", conversion.bytes_copied),
        }))
    }
}

impl Perceptron {
    fn add(&mut self, weight: &Tensor<'_>, bias: &Tensor<'_>) -> Result<()> {
        let ((weight, _), (bias, _)) = (self.take(weight)?, self.take(bias)?);
        let inputs = self.layers.last().map(|layer| layer.bias.dims()[0]);
        match (weight.dims(), bias.dims()) {
            (&[outputs, own], &[biases]) if outputs == biases && inputs.is_none_or(|inputs| inputs == own) => {
                let weight = weight.t().and_then(|weight| weight.contiguous()).map_err(failed)?;
                self.layers.push(Layer { weight, bias });
                Ok(())
            }
            (weight, bias) => {
                let behind = inputs.map_or(String::new(), |inputs| format!(" behind {inputs} outputs"));
                let text = format!(
                    "pass a weight (outputs, inputs) and a bias (outputs,){behind}, not the shapes {weight:?} and {bias:?}"
                );
                Err(Error::new(ErrorKind::Argument, text))
            }
        }
    }

    /// Takes a tensor into candle: one copy.
    fn take(&self, tensor: &Tensor<'_>) -> Result<(Matrix, Transfer)> {
        let (matrix, done) =
            transfer(&**tensor.adapter(), &self.candle, tensor.object(), ordering(), &Options::default())?;
        match matrix.dtype() {
            DType::F32 => Ok((matrix, done)),
            dtype => Err(Error::new(ErrorKind::Dtype, format!("pass float32, not candle's {}", dtype.as_str()))),
        }
    }

    fn run<'py>(&self, py: Python<'py>, x: &Tensor<'py>) -> Result<(PyTensor<'py>, [Transfer; 2])> {
        let (batch, came_in) = self.take(x)?;
        let inputs = self.layers.first().map(|layer| layer.weight.dims()[0]);
        if batch.dims().len() != 2 || inputs.is_some_and(|inputs| inputs != batch.dims()[1]) {
            let inputs = inputs.map_or("inputs".into(), |inputs| inputs.to_string());
            let text = format!("pass a batch of shape (batch, {inputs}), not {:?}", batch.dims());
            return Err(Error::new(ErrorKind::Argument, text));
        }
        // Other threads of Python run meanwhile.
        let outputs = py.detach(|| self.forward(batch)).map_err(failed)?;
        let (y, went_out) = transfer(&self.candle, &**x.adapter(), &outputs, ordering(), &Options::default())?;
        Ok((y, [came_in, went_out]))
    }

    fn forward(&self, mut x: Matrix) -> candle_core::Result<Matrix> {
        for (index, layer) in self.layers.iter().enumerate() {
            x = if index == 0 { x } else { x.relu()? };
            x = x.matmul(&layer.weight)?.broadcast_add(&layer.bias)?;
        }
        Ok(x)
    }
}

fn failed(error: candle_core::Error) -> Error {
    Error::new(ErrorKind::Framework, format!("candle: {error}"))
}
