//! Methods of a wrapper that are those of a field.

/// Writes the methods of `Adapter` with these names, or all of them, each as that of the field.
macro_rules! forward_adapter {
    ($tensor:ty, $field:ident) => {
        forward_adapter!($tensor, $field: profile consumer export import compact overwritten empty);
    };
    ($tensor:ty, $field:ident: $($method:ident)+) => {
        $(forward_adapter!(@$method $tensor, $field);)+
    };
    (@profile $tensor:ty, $field:ident) => {
        fn profile(&self) -> &bridge_core::Profile {
            self.$field.profile()
        }
    };
    (@consumer $tensor:ty, $field:ident) => {
        fn consumer(&self) -> std::sync::Arc<dyn bridge_core::Consumer> {
            self.$field.consumer()
        }
    };
    (@export $tensor:ty, $field:ident) => {
        fn export(&self, tensor: &$tensor) -> bridge_core::Result<bridge_core::Export> {
            self.$field.export(tensor)
        }
    };
    (@import $tensor:ty, $field:ident) => {
        fn import(&self, offer: bridge_core::Offer) -> bridge_core::Result<$tensor> {
            self.$field.import(offer)
        }
    };
    (@compact $tensor:ty, $field:ident) => {
        fn compact(&self, tensor: &$tensor) -> bridge_core::Result<$tensor> {
            self.$field.compact(tensor)
        }
    };
    // Of one tensor, and of several.
    (@overwritten $tensor:ty, $field:ident) => {
        fn overwritten(&self, tensor: &$tensor) -> bridge_core::Result<()> {
            self.$field.overwritten(tensor)
        }

        fn overwritten_all(&self, tensors: &[&$tensor]) -> Result<(), bridge_core::Failed> {
            self.$field.overwritten_all(tensors)
        }
    };
    (@empty $tensor:ty, $field:ident) => {
        unsafe fn empty(
            &self,
            device: bridge_core::Device,
            dtype: bridge_core::DType,
            shape: &[i64],
            order: bridge_core::Order,
        ) -> bridge_core::Result<$tensor> {
            // SAFETY: the caller's obligation.
            unsafe { self.$field.empty(device, dtype, shape, order) }
        }
    };
}

/// Writes these methods, each as that of the field.
macro_rules! forward {
    ($field:tt: $(fn $method:ident($($name:ident: $kind:ty),*) $(-> $result:ty)?;)+) => {
        $(fn $method(&self, $($name: $kind),*) $(-> $result)? {
            self.$field.$method($($name),*)
        })+
    };
    ($field:tt: $(unsafe fn $method:ident($($name:ident: $kind:ty),*) $(-> $result:ty)?;)+) => {
        $(unsafe fn $method(&self, $($name: $kind),*) $(-> $result)? {
            // SAFETY: the caller's promises.
            unsafe { self.$field.$method($($name),*) }
        })+
    };
}
