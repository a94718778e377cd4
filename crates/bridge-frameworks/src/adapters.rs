//! The adapter of any framework of the table, and that of an object.

use crate::table::rows;
use crate::unsupported::no_tensor;
use crate::{Framework, Protocol};
use bridge_core::{Adapter, Consumer, DType, Device, Export, Failed, Offer, Order, Profile, Result};
use bridge_pyo3::{Borrowed, Fingerprint, PyAdapter, PyTensor, framework_error, is_interrupt, probe};
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::cell::RefCell;
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

/// Borrows a tensor of any framework, or an object that speaks a protocol, for the length of a call: see [`Borrowed`].
///
/// The borrow of an object that speaks a protocol calls its `__dlpack__`, and costs what that does. Its stream on a CUDA
/// device is the legacy default stream: do not write to its memory, because the producer's own streams do not wait.
///
/// # Errors
///
/// [`NotATensor`](bridge_core::ErrorKind::NotATensor) for any other object, and those of
/// [`PyAdapter::borrow`](bridge_pyo3::PyAdapter::borrow).
pub fn borrow<'a>(object: &'a PyTensor<'_>) -> Result<Borrowed<'a>> {
    match seen(object) {
        Some(framework) => framework.open(object.py())?.borrow(object),
        None => adapter_of(object)?.ok_or_else(|| no_tensor(object))?.borrow(object),
    }
}

/// Returns the adapter of the framework that `object` belongs to, or else [`Protocol`] for an object that speaks a
/// protocol. `None` for any other object, also for a tensor of a framework that the program has not imported.
///
/// # Errors
///
/// Those of an adapter that fails, where the object comes from the modules of its framework; what Python raises.
pub fn adapter_of<'py>(object: &PyTensor<'py>) -> Result<Option<AnyAdapter<'py>>> {
    if let Some(framework) = seen(object) {
        return framework.open(object.py()).map(Some);
    }
    match owner_of(object)? {
        None if Protocol::speaks(object)? => Ok(Some(AnyAdapter::Protocol(Protocol::new(object)))),
        owner => Ok(owner),
    }
}

/// Returns the adapter that exports an object: that of [`adapter_of`], and [`Protocol`] for a scalar of NumPy, whose
/// value a caller wants who passes it by itself.
///
/// # Errors
///
/// [`NotATensor`](bridge_core::ErrorKind::NotATensor) for any other object, with what to pass instead; those of
/// [`adapter_of`].
pub fn source_of<'py>(object: &PyTensor<'py>) -> Result<AnyAdapter<'py>> {
    match adapter_of(object)? {
        Some(adapter) => Ok(adapter),
        None if Protocol::is_value(object)? => Ok(AnyAdapter::Protocol(Protocol::new(object))),
        None => Err(no_tensor(object)),
    }
}

/// Returns the adapter of the framework that `object` belongs to, whose type was not seen before.
fn owner_of<'py>(object: &PyTensor<'py>) -> Result<Option<AnyAdapter<'py>>> {
    let py = object.py();
    let mut broken = None;
    let raised = |error| framework_error(py, "Python", error);
    for &framework in Framework::ALL {
        if !is_loaded(framework, py).map_err(raised)? {
            continue;
        }
        let adapter = match framework.open(py) {
            Ok(adapter) => adapter,
            Err(error) if is_interrupt(py, &error) => return Err(error),
            Err(error) => {
                if names(framework, object).map_err(raised)? {
                    broken.get_or_insert(error);
                }
                continue;
            }
        };
        if adapter.owns(object) {
            let kind = object.get_type().unbind();
            SEEN.with_borrow_mut(|seen| {
                if seen.len() < TYPES_KEPT {
                    seen.push((kind, framework))
                }
            });
            return Ok(Some(adapter));
        }
    }
    // A tensor whose adapter fails must not pass as an object known by a protocol: that adapter's checks would be lost.
    broken.map_or(Ok(None), Err)
}

/// Returns whether the type of the object, or one that it extends, comes from the modules of `framework`.
fn names(framework: Framework, object: &PyTensor<'_>) -> PyResult<bool> {
    let py = object.py();
    let ours = |name: &str| {
        let below = name.strip_prefix(framework.module());
        below.is_some_and(|below| below.is_empty() || below.starts_with('.'))
    };
    for kind in object.get_type().mro() {
        let module = kind.getattr("__module__").and_then(|module| module.extract::<String>());
        if probe(py, module)?.is_some_and(|module| ours(&module)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether the program has imported or opened `framework`: before that no object can belong to it.
fn is_loaded(framework: Framework, py: Python<'_>) -> PyResult<bool> {
    match framework {
        #[cfg(feature = "tensorflow")]
        Framework::TensorFlow1 => Ok(bridge_tensorflow::TensorFlow1::is_open()),
        _ => py.import("sys")?.getattr("modules")?.contains(framework.module()),
    }
}

thread_local! {
    /// Types that were seen before. They are kept alive, so that an address means one type forever.
    static SEEN: RefCell<Vec<(Py<PyType>, Framework)>> = const { RefCell::new(Vec::new()) };
}

/// The most types that are remembered: programs that make types as they run must not fill the memory.
const TYPES_KEPT: usize = 64;

/// Returns the framework of a tensor whose type [`adapter_of`] has met before, at the cost of a few nanoseconds.
pub fn seen(object: &PyTensor<'_>) -> Option<Framework> {
    let kind = object.get_type_ptr().cast();
    SEEN.with_borrow(|seen| seen.iter().find(|(known, _)| known.as_ptr() == kind).map(|(_, framework)| *framework))
}
