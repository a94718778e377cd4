//! An adapter that tells whether what it has exported was returned.

use bridge_core::{Adapter, Allocation, Export, Memory, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// A source, whose exports set the flag when their memory is returned.
pub(super) struct Watched<'a, F> {
    pub(super) adapter: &'a dyn Adapter<Tensor = F>,
    pub(super) returned: Arc<AtomicBool>,
}

/// What keeps the memory of an export.
struct Owner {
    _exported: Export,
    returned: Arc<AtomicBool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.returned.store(true, SeqCst);
    }
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: it does what the inner adapter does.
unsafe impl<F> Adapter for Watched<'_, F> {
    type Tensor = F;

    forward_adapter!(F, adapter: profile consumer import compact overwritten empty);

    fn export(&self, tensor: &F) -> Result<Export> {
        let exported = self.adapter.export(tensor)?;
        let (data, dtype, layout, pending) =
            (exported.data(), exported.dtype(), exported.layout().clone(), exported.pending());
        let buffer = exported.buffer();
        let allocation = Allocation::new(
            buffer.address()..buffer.address() + buffer.len(),
            buffer.device(),
            buffer.access(),
            buffer.stream(),
            buffer.reuse(),
        );
        let owner = Owner { _exported: exported, returned: Arc::clone(&self.returned) };
        // SAFETY: these are the properties of the buffer inside, whose producer has made the promises, and the owner
        // drops nothing but that buffer.
        Ok(Export::at(data, dtype, layout, unsafe { Memory::new(allocation, owner) })?.with_pending(pending))
    }
}
