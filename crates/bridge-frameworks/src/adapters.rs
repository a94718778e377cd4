//! The adapter of any framework of the table.

use crate::table::rows;
use crate::{Framework, Protocol};
use bridge_core::{Adapter, Consumer, DType, Device, Export, Failed, Offer, Order, Profile, Result};
use bridge_pyo3::{Borrowed, Fingerprint, PyAdapter, PyTensor};
use pyo3::Python;
use std::ops::Deref;
use std::sync::Arc;

macro_rules! adapters {
    ($($variant:ident {
        name: $name:literal,
        aliases: $aliases:expr,
        module: $module:literal,
        source: $source:expr,
        devices: $devices:expr,
        adapter: $package:ident::$adapter:ident if $feature:literal,
    })*) => {
        /// The adapter of one of the frameworks, or the one of objects that are known by a protocol. It has as
        /// many variants as features are enabled, by any crate of the program.
        #[non_exhaustive]
        pub enum AnyAdapter<'py> {
            /// The adapter of any other producer.
            Protocol(Protocol<'py>),
            $(#[doc = concat!("The adapter for `", $name, "`.")]
            #[cfg(feature = $feature)]
            $variant($package::$adapter<'py>),)*
        }

        impl<'py> Deref for AnyAdapter<'py> {
            type Target = dyn PyAdapter<'py> + 'py;

            fn deref(&self) -> &Self::Target {
                match self {
                    Self::Protocol(adapter) => adapter,
                    $(#[cfg(feature = $feature)] Self::$variant(adapter) => adapter,)*
                }
            }
        }

        #[deny(clippy::missing_trait_methods)]
        // SAFETY: it does what the adapter of the framework does.
        unsafe impl<'py> Adapter for AnyAdapter<'py> {
            type Tensor = PyTensor<'py>;

            fn profile(&self) -> &Profile {
                (**self).profile()
            }

            fn consumer(&self) -> Arc<dyn Consumer> {
                (**self).consumer()
            }

            fn export(&self, tensor: &Self::Tensor) -> Result<Export> {
                (**self).export(tensor)
            }

            fn import(&self, offer: Offer) -> Result<Self::Tensor> {
                (**self).import(offer)
            }

            fn compact(&self, tensor: &Self::Tensor) -> Result<Self::Tensor> {
                (**self).compact(tensor)
            }

            fn overwritten(&self, tensor: &Self::Tensor) -> Result<()> {
                (**self).overwritten(tensor)
            }

            fn overwritten_all(&self, tensors: &[&Self::Tensor]) -> Result<(), Failed> {
                (**self).overwritten_all(tensors)
            }

            unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Self::Tensor> {
                // SAFETY: the caller's obligation.
                unsafe { (**self).empty(device, dtype, shape, order) }
            }
        }

        #[deny(clippy::missing_trait_methods)]
        impl<'py> PyAdapter<'py> for AnyAdapter<'py> {
            fn owns(&self, object: &PyTensor<'py>) -> bool {
                (**self).owns(object)
            }

            fn borrow<'a>(&self, tensor: &'a PyTensor<'py>) -> Result<Borrowed<'a>> {
                (**self).borrow(tensor)
            }

            fn locate(&self, tensor: &PyTensor<'py>) -> Result<Option<(Device, usize)>> {
                (**self).locate(tensor)
            }

            fn fingerprint(&self, tensor: &PyTensor<'py>, exported: &Export) -> Fingerprint {
                (**self).fingerprint(tensor, exported)
            }

            fn is_still(&self, tensor: &PyTensor<'py>, exported: &Export, fingerprint: &Fingerprint) -> bool {
                (**self).is_still(tensor, exported, fingerprint)
            }

            fn storage(&self, tensor: &PyTensor<'py>) -> Result<Option<usize>> {
                (**self).storage(tensor)
            }

            fn has_storage(&self, tensor: &PyTensor<'py>, number: usize) -> bool {
                (**self).has_storage(tensor, number)
            }

            fn counted_by(&self, tensor: &PyTensor<'py>) -> Result<Option<PyTensor<'py>>> {
                (**self).counted_by(tensor)
            }
        }

        impl std::fmt::Debug for AnyAdapter<'_> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_tuple("AnyAdapter").field(&self.profile().name).finish()
            }
        }

        impl Framework {
            /// Returns the adapter. Imports the framework at the first use.
            ///
            /// # Errors
            ///
            /// Those of the adapter; [`ErrorKind::Missing`](bridge_core::ErrorKind::Missing) where its feature is
            /// off.
            pub fn open(self, py: Python<'_>) -> Result<AnyAdapter<'_>> {
                match self {
                    $(#[cfg(feature = $feature)]
                    Self::$variant => $package::$adapter::new(py).map(AnyAdapter::$variant),
                    #[cfg(not(feature = $feature))]
                    Self::$variant => Err(bridge_core::Error::new(
                        bridge_core::ErrorKind::Missing,
                        concat!("this build has no adapter for ", $name, ": enable the feature ", $feature),
                    )),)*
                }
            }
        }
    };
}

rows!(adapters);
