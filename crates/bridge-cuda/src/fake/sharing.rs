//! Sharing without a device: handles hold the address that they stand for.

use super::Fake;
use crate::driver::{Event, Failure, Outcome, SharingDriver};
use crate::driver::{HANDLE, Handle, Mapped};
use bridge_core::Stream;
use std::os::fd::OwnedFd;

/// The address of a mapping of imported memory.
const ELSEWHERE: usize = 1 << 40;

/// A pool that was not made to be shared.
pub const PRIVATE_POOL: usize = 0x9001;

fn handle_of(number: usize) -> Handle {
    let mut handle = [0; HANDLE];
    handle[..8].copy_from_slice(&number.to_ne_bytes());
    handle
}

fn number_of(handle: &Handle) -> usize {
    usize::from_ne_bytes(handle[..8].try_into().expect("a handle has more than eight bytes"))
}

impl Fake {
    /// Registers what an address is mapped to.
    pub fn map(&self, mapped: Mapped) {
        self.state().mapped.push(mapped);
    }

    /// Returns the number of live mappings of imported memory.
    pub fn opened(&self) -> usize {
        self.state().opened.len()
    }
}

impl SharingDriver for Fake {
    fn uuid(&self, ordinal: i32) -> Outcome<[u8; 16]> {
        self.state().outcome("cuDeviceGetUuid_v2")?;
        Ok([ordinal as u8 + 1; 16])
    }

    fn mapped(&self, address: usize) -> Outcome<Mapped> {
        let state = self.state();
        state.outcome("cuPointerGetAttribute")?;
        let nothing = Mapped { range: address..address, ..Mapped::default() };
        Ok(state.mapped.iter().find(|mapped| mapped.range.contains(&address)).cloned().unwrap_or(nothing))
    }

    fn memory_handle(&self, address: usize) -> Outcome<Handle> {
        let state = self.state();
        state.outcome("cuIpcGetMemHandle")?;
        state.current().ok_or(Failure { call: "cuIpcGetMemHandle", code: 201 })?;
        Ok(handle_of(address))
    }

    fn open_memory(&self, handle: &Handle) -> Outcome<usize> {
        let mut state = self.state();
        state.outcome("cuIpcOpenMemHandle_v2")?;
        state.current().ok_or(Failure { call: "cuIpcOpenMemHandle_v2", code: 201 })?;
        let address = ELSEWHERE + number_of(handle);
        state.opened.push(address);
        Ok(address)
    }

    unsafe fn close_memory(&self, address: usize) -> Outcome<()> {
        let mut state = self.state();
        let at = state.opened.iter().position(|opened| *opened == address);
        let at = at.ok_or(Failure { call: "cuIpcCloseMemHandle", code: 1 })?;
        state.opened.swap_remove(at);
        Ok(())
    }

    fn file_of(&self, _: usize) -> Outcome<OwnedFd> {
        self.state().outcome("cuMemRetainAllocationHandle")?;
        let file = std::fs::File::open("/dev/null");
        file.map(OwnedFd::from).map_err(|_| Failure { call: "cuMemExportToShareableHandle", code: 1 })
    }

    fn create_mapped(&self, ordinal: i32, nbytes: usize) -> Outcome<(usize, usize)> {
        self.state().outcome("cuMemCreate")?;
        self.map_files(ordinal, &[]).map(|start| (start, nbytes.next_multiple_of(0x1000)))
    }

    fn map_files(&self, _: i32, files: &[(OwnedFd, usize)]) -> Outcome<usize> {
        let mut state = self.state();
        state.outcome("cuMemMap")?;
        let address = ELSEWHERE + files.len();
        state.opened.push(address);
        Ok(address)
    }

    unsafe fn unmap(&self, address: usize, _: &[usize]) -> Outcome<()> {
        // SAFETY: the caller's promises.
        unsafe { self.close_memory(address) }
    }

    fn file_of_pool(&self, pool: usize) -> Outcome<Option<OwnedFd>> {
        self.state().outcome("cuMemPoolExportToShareableHandle")?;
        if pool == PRIVATE_POOL { Ok(None) } else { self.file_of(pool).map(Some) }
    }

    fn pointer_in_pool(&self, address: usize) -> Outcome<Handle> {
        self.state().outcome("cuMemPoolExportPointer")?;
        Ok(handle_of(address))
    }

    fn open_in_pool(&self, _: i32, _: &OwnedFd, pointer: &Handle) -> Outcome<usize> {
        self.open_memory(pointer)
    }

    unsafe fn free_in_order(&self, address: usize, _: Stream) -> Outcome<()> {
        // SAFETY: the caller's promises.
        unsafe { self.close_memory(address) }
    }

    fn interprocess_event(&self) -> Outcome<Event> {
        crate::driver::Driver::create_event(self)
    }

    fn event_handle(&self, event: Event) -> Outcome<Handle> {
        self.state().outcome("cuIpcGetEventHandle")?;
        Ok(handle_of(event.0))
    }

    fn open_event(&self, handle: &Handle) -> Outcome<Event> {
        self.state().outcome("cuIpcOpenEventHandle")?;
        Ok(Event(number_of(handle)))
    }

    fn allocate_plain(&self, nbytes: usize) -> Outcome<usize> {
        self.state().allocate("cuMemAlloc_v2", nbytes)
    }

    unsafe fn free_plain(&self, address: usize) -> Outcome<()> {
        self.state().free("cuMemFree_v2", address)
    }
}
