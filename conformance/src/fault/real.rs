//! Faults in the adapters of the frameworks themselves, compiled in by the feature `planted`. Each is planted into a
//! process of its own: see `bridge_core::planted`.

/// A fault, the pair that has it, and the property that must find it.
#[derive(Debug, Clone, Copy)]
pub struct RealFault {
    /// Its name in the adapter and in reports.
    pub name: &'static str,
    /// The property that must fail.
    pub caught_by: &'static str,
    /// The adapter of the source.
    pub from: &'static str,
    /// The adapter of the target.
    pub to: &'static str,
    /// Whether it needs a CUDA device.
    pub on_device: bool,
}

macro_rules! real_faults {
    ($($name:literal, $property:literal, $from:literal -> $to:literal, on_device $on_device:literal;)*) => {
        /// Every fault in an adapter for Python.
        pub const REAL_FAULTS: &[RealFault] = &[$(RealFault {
            name: $name,
            caught_by: $property,
            from: $from,
            to: $to,
            on_device: $on_device,
        },)*];
    };
}

real_faults! {
    "torch_pending_dropped", "values", "torch" -> "numpy", on_device false;
    "torch_stream_mistaken", "order", "torch" -> "cupy", on_device true;
    "numpy_read_only_lost", "read_only", "numpy" -> "torch", on_device false;
    "cupy_lease_leaked", "life", "torch" -> "cupy", on_device true;
    "cupy_stream_mistaken", "order", "cupy" -> "torch", on_device true;
    "tensorflow_shape_reversed", "shape", "torch" -> "tensorflow", on_device false;
    "jax_lease_leaked", "life", "numpy" -> "jax", on_device false;
}

impl RealFault {
    /// Returns the fault with this name.
    pub fn named(name: &str) -> Option<Self> {
        REAL_FAULTS.iter().find(|fault| fault.name == name).copied()
    }

    /// Plants the fault into this process.
    ///
    /// # Errors
    ///
    /// The suite was built without the feature `planted`.
    pub fn plant(self) -> Result<(), String> {
        #[cfg(feature = "planted")]
        bridge_core::planted::plant(self.name);
        #[cfg(feature = "planted")]
        return Ok(());
        #[cfg(not(feature = "planted"))]
        Err(format!("{} is not in this build: build the suite with the feature `planted`", self.name))
    }
}
