//! Faults in the adapters of the frameworks themselves, compiled in by the feature `planted`. Each is planted into a
//! separate process: see `bridge_core::planted`.

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
    "numpy_owner_of_scalar_lost", "life", "numpy" -> "torch", on_device false;
    "numpy_owner_of_reversed_lost", "life", "numpy" -> "numpy", on_device false;
    "core_permutation_inverted", "options", "numpy" -> "torch", on_device false;
    "core_order_ignored", "options", "numpy" -> "torch", on_device false;
    "core_protection_left", "chain", "numpy" -> "jax", on_device false;
    "core_protection_forgotten", "chain", "numpy" -> "jax", on_device false;
    "core_batch_swapped", "many", "numpy" -> "torch", on_device false;
    "core_batch_planned_by_first", "many", "numpy" -> "torch", on_device false;
    "copy_part_lost", "large", "numpy" -> "torch", on_device false;
    "copy_ragged_part_short", "large", "numpy" -> "torch", on_device false;
    "copy_target_transposed", "elements", "numpy" -> "torch", on_device false;
    "core_broadcast_transposed", "elements", "numpy" -> "torch", on_device false;
    "copy_cast_nan_lost", "elements", "torch" -> "numpy", on_device false;
    "copy_cast_subnormals_lost", "elements", "torch" -> "numpy", on_device false;
    "numpy_base_kept", "users", "numpy" -> "torch", on_device false;
    "numpy_packing_dropped", "users", "numpy" -> "torch", on_device false;
    "torch_storage_kept", "users", "torch" -> "numpy", on_device false;
    "numpy_mask_dropped", "users", "numpy" -> "torch", on_device false;
    "numpy_exception_left", "users", "numpy" -> "torch", on_device false;
    "torch_grad_ignored", "users", "torch" -> "numpy", on_device false;
    "jax_deletion_missed", "users", "jax" -> "numpy", on_device false;
    "numpy_error_mistaken", "raises", "numpy" -> "torch", on_device false;
    "torch_raised_hidden", "raises", "numpy" -> "torch", on_device false;
    "jax_failed_import_kept", "raises", "numpy" -> "jax", on_device false;
    "jax_exception_cleared", "raises", "numpy" -> "jax", on_device false;
    "torch_alignment_overstated", "profile", "numpy" -> "torch", on_device false;
    "numpy_alignment_overstated", "profile", "torch" -> "numpy", on_device false;
    "paddle_object_kept", "users", "paddle" -> "numpy", on_device false;
    "paddle_deleter_enters_paddle", "life", "paddle" -> "paddle", on_device false;
    "paddle_deleters_by_address", "life", "numpy" -> "paddle", on_device false;
    "numpy_memory_leaked", "growth", "torch" -> "numpy", on_device false;
    "torch_object_leaked", "growth", "numpy" -> "torch", on_device false;
    "torch_write_counted_once", "elements", "numpy" -> "torch", on_device false;
    "numpy_constant_missed", "chain", "jax" -> "numpy", on_device false;
    "torch_watch_forgotten", "options", "jax" -> "torch", on_device false;
    "core_source_copied_once", "elements", "numpy" -> "torch", on_device false;
    "core_flips_of_first", "elements", "torch" -> "numpy", on_device false;
    "core_target_repeats", "targets", "numpy" -> "torch", on_device false;
    "core_overlap_by_first", "targets", "numpy" -> "torch", on_device false;
    "core_copy_not_permuted", "options", "torch" -> "numpy", on_device false;
    "core_square_transposed", "options", "numpy" -> "torch", on_device false;
    "dlpack_offset_ignored", "values", "dlpack" -> "numpy", on_device false;
    "dlpack_flags_ignored", "read_only", "dlpack" -> "numpy", on_device false;
    "dlpack_columns_assumed", "values", "dlpack" -> "numpy", on_device false;
    "dlpack_refused_leaked", "growth", "dlpack" -> "numpy", on_device false;
    "core_reader_forgotten_elsewhere", "release_order", "torch" -> "cupy", on_device true;
    "core_part_not_noted", "release_order", "torch" -> "cupy", on_device true;
    "core_group_admits_all", "batch", "torch" -> "cupy", on_device true;
    "core_group_ordered_early", "batch", "torch" -> "cupy", on_device true;
    "core_order_lost_by_failure", "failure", "torch" -> "cupy", on_device true;
    "core_reader_lost_by_failure", "failure", "torch" -> "cupy", on_device true;
    "core_copier_ordered_as_made", "torn", "torch" -> "cupy", on_device true;
    "core_copier_awaited_as_made", "torn", "torch" -> "cupy", on_device true;
    "moves_record_elsewhere", "moves", "torch" -> "cupy", on_device true;
    "moves_reuse_early", "moves", "torch" -> "cupy", on_device true;
    "cuda_blocking_not_ordered", "order", "torch" -> "cupy", on_device true;
    "core_graph_view_returned", "graph", "torch" -> "cupy", on_device true;
    "core_capture_leaks", "graph", "torch" -> "cupy", on_device true;
    "cuda_releases_not_relaxed", "graph", "cupy" -> "torch", on_device true;
    "cuda_wait_skipped_in_a_capture", "graph", "cupy" -> "torch", on_device true;
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
