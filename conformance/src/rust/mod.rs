//! Frameworks without Python under test.

#[cfg(feature = "candle")]
mod candle;
#[cfg(feature = "candle-cuda")]
mod candle_cuda;
#[cfg(feature = "cudarc")]
mod cudarc;
#[cfg(feature = "ndarray")]
mod ndarray;
#[cfg(feature = "ort")]
mod ort;
#[cfg(all(feature = "cudarc", feature = "ort"))]
mod ort_cuda;
#[cfg(feature = "tch")]
mod tch;
#[cfg(feature = "tensorflow")]
mod tensorflow;

#[cfg(feature = "candle")]
pub use self::candle::CandleSubject;
#[cfg(feature = "candle-cuda")]
pub use self::candle_cuda::CandleCudaSubject;
#[cfg(feature = "cudarc")]
pub use self::cudarc::CudarcSubject;
#[cfg(feature = "ndarray")]
pub use self::ndarray::NdArraySubject;
#[cfg(feature = "ort")]
pub use self::ort::OrtSubject;
#[cfg(all(feature = "cudarc", feature = "ort"))]
pub use self::ort_cuda::OrtCudaSubject;
#[cfg(feature = "tch")]
pub use self::tch::TchSubject;
#[cfg(feature = "tensorflow")]
pub use self::tensorflow::TensorFlowSubject;

/// The methods of `Subject` for tensors that are cloned to be shared, in a framework that computes in one stream.
#[cfg(any(feature = "candle-cuda", all(feature = "cudarc", feature = "ort")))]
macro_rules! in_one_stream {
    ($tensor:ty) => {
        fn share(&self, tensor: &$tensor) -> $tensor {
            tensor.clone()
        }

        fn drop_on_thread(&self, tensor: $tensor) {
            std::thread::scope(|scope| {
                scope.spawn(|| drop(tensor));
            });
        }

        fn streams(&self) -> Vec<bridge_core::Stream> {
            Vec::new()
        }

        unsafe fn on_stream(
            &self,
            _: bridge_core::Stream,
            body: &mut dyn FnMut() -> bridge_core::Result<()>,
        ) -> bridge_core::Result<()> {
            body()
        }
    };
}
#[cfg(any(feature = "candle-cuda", all(feature = "cudarc", feature = "ort")))]
use in_one_stream;

/// Returns how many bytes after `address` the next one lies that is `align` bytes after a multiple of
/// [`GRAIN`](crate::Spec::GRAIN).
#[cfg(any(feature = "candle", feature = "cudarc", feature = "ndarray", feature = "tch"))]
fn padding(address: usize, align: usize) -> usize {
    (align + crate::Spec::GRAIN - address % crate::Spec::GRAIN) % crate::Spec::GRAIN
}
