//! Pieces of host memory, as a framework: what the suite writes itself before a framework sees it.

use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, DeviceKind, Error, ErrorKind, Export, Layout, Memory, Offer, Profile,
    Result, Views,
};
use bridge_ipc::IpcTensor;
use std::sync::Arc;

/// Elements in memory that `owner` keeps.
pub(super) struct Piece {
    /// Address of the first element.
    data: usize,
    dtype: DType,
    layout: Layout,
    access: Access,
    owner: Owner,
}

#[derive(Clone)]
enum Owner {
    Bytes(Arc<Vec<u8>>),
    Shared(Arc<IpcTensor>),
}

impl Piece {
    /// Returns bytes as a compact tensor.
    pub(super) fn of(bytes: Vec<u8>) -> Result<Self> {
        let layout = Layout::new(DType::UINT8, &[bytes.len() as i64], None, 0)?;
        let data = bytes.as_ptr().expose_provenance();
        Ok(Self { data, dtype: DType::UINT8, layout, access: Access::ReadOnly, owner: Owner::Bytes(Arc::new(bytes)) })
    }

    /// Returns a view of shared memory, whose first element lies `at` bytes after its start. `layout` has no offset.
    ///
    /// # Errors
    ///
    /// The view does not lie in the memory.
    pub(super) fn within(block: IpcTensor, at: usize, dtype: DType, layout: Layout) -> Result<Self> {
        let start = block.data();
        layout.extent_at(start + at, Some(&(start..start + block.layout().nbytes())))?;
        let access = block.access();
        Ok(Self { data: start + at, dtype, layout, access, owner: Owner::Shared(Arc::new(block)) })
    }
}

/// The adapter of [`Piece`]. It only exports.
pub(super) struct Pieces {
    profile: Profile,
    consumer: Arc<NoStreams>,
}

#[derive(Default)]
struct NoStreams {
    views: Views,
}

// SAFETY: a piece is read on the host.
unsafe impl Consumer for NoStreams {
    fn current_stream(&self, _: bridge_core::Device) -> Result<Option<bridge_core::Stream>> {
        Ok(None)
    }

    fn views(&self) -> &Views {
        &self.views
    }
}

impl Default for Pieces {
    fn default() -> Self {
        let dtypes = DType::NAMED.iter().map(|(dtype, _)| *dtype).collect();
        let profile =
            Profile::export_only("memory of the suite").with_dtypes(dtypes).with_devices(vec![DeviceKind::CPU]);
        Self { profile, consumer: Arc::default() }
    }
}

// SAFETY: a piece keeps its lease and is read on the host.
unsafe impl Adapter for Pieces {
    type Tensor = Piece;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.consumer.clone()
    }

    fn export(&self, piece: &Piece) -> Result<Export> {
        let Piece { data, dtype, ref layout, access, ref owner } = *piece;
        let allocation = Allocation::host(layout.extent_at(data, None)?, access);
        // SAFETY: `of` and `within` have taken the addresses from the owner, and checked that they lie in its memory,
        // which stays where it is as long as the owner lives. Bytes are only read. Who writes to shared memory, on the
        // other side or here, waits for an answer in between.
        let memory = unsafe {
            match owner {
                Owner::Bytes(bytes) => {
                    return Export::at(data, dtype, layout.clone(), Memory::new(allocation, bytes.clone()));
                }
                Owner::Shared(block) => Memory::new(allocation, block.clone()),
            }
        };
        Export::at(data, dtype, layout.clone(), memory)
    }

    fn import(&self, _: Offer) -> Result<Piece> {
        Err(Error::new(ErrorKind::NotATensor, "the suite takes no tensors into its own memory"))
    }

    fn compact(&self, _: &Piece) -> Result<Piece> {
        Err(Error::new(ErrorKind::CopyNeeded, "copies are left to core"))
    }
}
