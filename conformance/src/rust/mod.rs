//! Frameworks of Rust under test.

#[cfg(feature = "candle")]
mod candle;
#[cfg(feature = "ndarray")]
mod ndarray;
#[cfg(feature = "ort")]
mod ort;
#[cfg(feature = "tch")]
mod tch;

#[cfg(feature = "candle")]
pub use self::candle::CandleSubject;
#[cfg(feature = "ndarray")]
pub use self::ndarray::NdArraySubject;
#[cfg(feature = "ort")]
pub use self::ort::OrtSubject;
#[cfg(feature = "tch")]
pub use self::tch::TchSubject;

/// Forwards the methods of `Adapter` to the field `adapter`.
macro_rules! forward_adapter {
    ($subject:ty, $tensor:ty) => {
        impl bridge_core::Adapter for $subject {
            type Tensor = $tensor;

            fn profile(&self) -> &bridge_core::Profile {
                self.adapter.profile()
            }

            fn consumer(&self) -> std::sync::Arc<dyn bridge_core::Consumer> {
                self.adapter.consumer()
            }

            fn export(&self, tensor: &$tensor) -> bridge_core::Result<bridge_core::Lent> {
                self.adapter.export(tensor)
            }

            fn import(&self, lease: bridge_core::Lease) -> bridge_core::Result<$tensor> {
                self.adapter.import(lease)
            }

            fn compact(&self, tensor: &$tensor) -> bridge_core::Result<$tensor> {
                self.adapter.compact(tensor)
            }

            fn overwritten(&self, tensor: &$tensor) -> bridge_core::Result<()> {
                self.adapter.overwritten(tensor)
            }

            fn empty(
                &self,
                device: bridge_core::Device,
                dtype: bridge_core::DType,
                shape: &[i64],
                order: bridge_core::Order,
            ) -> bridge_core::Result<$tensor> {
                self.adapter.empty(device, dtype, shape, order)
            }
        }
    };
}
use forward_adapter;

/// Returns how many bytes behind `address` the next one lies that is `align` bytes behind a multiple of
/// [`GRAIN`](crate::Spec::GRAIN).
fn padding(address: usize, align: usize) -> usize {
    (align + crate::Spec::GRAIN - address % crate::Spec::GRAIN) % crate::Spec::GRAIN
}
