//! What an export has found for memory of a device, for other views of it in the same batch.

use bridge_core::{Device, Result, Reuse, Stream};
use bridge_pyo3::batch;
use std::cell::RefCell;

/// The number of a batch, a device, and the addresses of a storage and of its memory.
type Key = (u64, Device, usize, usize);

/// The most that a thread remembers.
const REMEMBERED: usize = 4;

thread_local! {
    static SETTLED: RefCell<Vec<(Key, (Stream, Reuse))>> = const { RefCell::new(Vec::new()) };
}

/// Returns the current stream, which is recorded for the memory of a storage, and when that is reused: what `settle` has
/// returned for the storage in this batch, or returns now.
///
/// # Errors
///
/// Those of `settle`.
pub(crate) fn settled(
    device: Device,
    storage: Option<(usize, usize)>,
    settle: impl FnOnce() -> Result<(Stream, Reuse)>,
) -> Result<(Stream, Reuse)> {
    let Some((batch, (storage, memory))) = batch().zip(storage) else { return settle() };
    let key = (batch, device, storage, memory);
    let known = SETTLED.with_borrow(|settled| settled.iter().find(|(known, _)| *known == key).map(|(_, found)| *found));
    if let Some(known) = known {
        return Ok(known);
    }
    let found = settle()?;
    SETTLED.with_borrow_mut(|settled| {
        if settled.len() == REMEMBERED {
            settled.remove(0);
        }
        settled.push((key, found));
    });
    Ok(found)
}
