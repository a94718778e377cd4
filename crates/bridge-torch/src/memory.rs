//! Memory of storages on the host, which lives as long as it is exported.
//!
//! PyTorch gives a storage other memory and frees the old one, as `share_memory_` and `resize_` do. To hold the storage
//! does not keep its memory then. So an export puts [`let_go`] where PyTorch has the function that it calls to free
//! the memory, and counts the exports: what PyTorch lets go of is freed after the last of them. Nothing else of the
//! storage changes, and the function stays there after the last export.

use crate::fork;
use crate::library::{MemoryOffsets, function, library_of, word};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError};
use std::{mem, ptr};

/// `c10::DeleterFnPtr`, which frees memory. It takes what the storage keeps for it.
type Deleter = unsafe extern "C" fn(*mut c_void);

/// How many deleters are known. PyTorch has one for its own memory, for memory of other owners, and for pinned memory.
const SLOTS: usize = 4;

/// The deleters that are replaced, each by the function of its slot, and others.
static ORIGINALS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
static OURS: [Deleter; SLOTS] = [let_go::<0>, let_go::<1>, let_go::<2>, let_go::<3>];
static REFUSED: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];

/// The libraries with deleters that are replaced.
const OWNERS: [&str; 3] = ["libc10.so", "libc10_cuda.so", "libtorch_cuda.so"];

/// Those with deleters that are replaced unless processes can share the memory: by these PyTorch knows that they can.
/// Extensions may know their memory by theirs.
const SHARERS: [&str; 2] = ["libtorch_cpu.so", "libtorch_python.so"];

/// Exports of memory.
#[derive(Default)]
struct Exports {
    count: usize,
    /// How often PyTorch has let go of it: several storages may have one value for their deleter.
    let_go: usize,
}

/// Hashes an address.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("words are hashed");
    }

    fn write_usize(&mut self, word: usize) {
        // Fibonacci hashing spreads the bits of addresses, the lowest of which are 0, to the highest.
        self.0 = (word as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
    }
}

type Exported = HashMap<Memory, Exports, BuildHasherDefault<AddressHasher>>;

static EXPORTED: LazyLock<Mutex<Exported>> = LazyLock::new(Mutex::default);

fn exported() -> MutexGuard<'static, Exported> {
    EXPORTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that a storage has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    /// What its deleter takes.
    context: usize,
    slot: usize,
}

impl Memory {
    /// Returns the memory of a storage, if it can be kept whatever PyTorch does with the storage. Elsewhere a hold on the
    /// storage keeps it until PyTorch replaces it. `is_shared` says whether processes can share the memory.
    ///
    /// # Safety
    ///
    /// The storage is alive, has its memory on the host and the offsets that were found, and no other thread changes it
    /// meanwhile.
    pub(crate) unsafe fn of(storage: usize, offsets: MemoryOffsets, is_shared: impl FnOnce() -> bool) -> Option<Self> {
        // SAFETY: the caller's obligation.
        let (context, current) = unsafe { (word(storage, offsets.context), word(storage, offsets.deleter)) };
        // Without a deleter there is nothing to keep; 0 is also the fingerprint of an empty slot.
        if context == 0 || current == 0 {
            return None;
        }
        let ours = |slot: usize| OURS[slot] as *const () as usize;
        if let Some(slot) = (0..SLOTS).find(|slot| ours(*slot) == current) {
            return Some(Self { context, slot });
        }
        let slot = slot_of(current, is_shared)?;
        let place = ptr::with_exposed_provenance_mut(storage + offsets.deleter);
        // SAFETY: the caller's obligation. Our function frees the memory as the one that it replaces. Another export
        // writes the same.
        unsafe { AtomicUsize::from_ptr(place) }.store(ours(slot), Relaxed);
        Some(Self { context, slot })
    }

    /// Keeps it.
    ///
    /// # Safety
    ///
    /// PyTorch has not let go of it since [`of`](Self::of).
    pub(crate) unsafe fn keep(self) -> Kept {
        exported().entry(self).or_default().count += 1;
        Kept(self)
    }
}

impl Hash for Memory {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Few have the same for deleters of several slots.
        state.write_usize(self.context);
    }
}

/// Keeps memory until it is dropped.
pub(crate) struct Kept(Memory);

impl Kept {
    /// Returns whether PyTorch has let go of the memory.
    pub(crate) fn is_let_go(&self) -> bool {
        exported().get(&self.0).is_some_and(|exports| exports.let_go > 0)
    }
}

/// Returns the slot of a deleter of PyTorch's; `None` if it is not to be replaced.
fn slot_of(deleter: usize, is_shared: impl FnOnce() -> bool) -> Option<usize> {
    let place = |known: &[AtomicUsize]| known.iter().position(|known| known.load(Relaxed) == deleter);
    match place(&ORIGINALS) {
        None if place(&REFUSED).is_none() => learn(deleter, is_shared),
        slot => slot,
    }
}

#[cold]
fn learn(deleter: usize, is_shared: impl FnOnce() -> bool) -> Option<usize> {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| fork::watch(|| Box::new(exported())));
    let library = library_of(deleter).unwrap_or_default();
    let is_one_of = |names: &[&str]| names.iter().any(|name| library.ends_with(name));
    let is_replaced = is_one_of(&OWNERS) && Some(deleter) != copy_on_write() || is_one_of(&SHARERS) && !is_shared();
    let known = if is_replaced { &ORIGINALS } else { &REFUSED };
    // One thread at a time takes a slot.
    let _one = exported();
    let slot = known.iter().position(|known| [0, deleter].contains(&known.load(Relaxed)))?;
    known[slot].store(deleter, Relaxed);
    is_replaced.then_some(slot)
}

/// Returns the deleter by which PyTorch knows memory that is copied at the first write.
fn copy_on_write() -> Option<usize> {
    // SAFETY: `void c10::impl::cow::cow_deleter(void*)`
    let deleter = unsafe { function::<Deleter>("libc10.so", "_ZN3c104impl3cow11cow_deleterEPv") };
    deleter.map(|deleter| deleter as *const () as usize)
}

/// Takes the place of a deleter of PyTorch's: frees memory, or leaves it to the last export.
///
/// # Safety
///
/// That of the deleter.
unsafe extern "C" fn let_go<const SLOT: usize>(context: *mut c_void) {
    if let Some(exports) = exported().get_mut(&Memory { context: context.expose_provenance(), slot: SLOT }) {
        exports.let_go += 1;
        return;
    }
    // SAFETY: the caller's obligation; nothing else has the memory.
    unsafe { free(context, SLOT) };
}

/// Calls the deleter of a slot.
///
/// # Safety
///
/// That of the deleter.
unsafe fn free(context: *mut c_void, slot: usize) {
    // SAFETY: the slot has a deleter since memory with it was kept; function pointers are words.
    let original = unsafe { mem::transmute::<usize, Deleter>(ORIGINALS[slot].load(Relaxed)) };
    // SAFETY: the caller's obligation.
    unsafe { original(context) };
}

impl Drop for Kept {
    fn drop(&mut self) {
        let mut exported = exported();
        let Entry::Occupied(mut entry) = exported.entry(self.0) else { return };
        entry.get_mut().count -= 1;
        if entry.get().count > 0 {
            return;
        }
        let let_go = entry.remove().let_go;
        drop(exported);
        for _ in 0..let_go {
            release(LetGo(self.0));
        }
    }
}

/// Memory that PyTorch has let go of.
struct LetGo(Memory);

impl Drop for LetGo {
    fn drop(&mut self) {
        let Memory { context, slot } = self.0;
        // SAFETY: PyTorch has called the deleter once for this, and no export is left.
        unsafe { free(ptr::with_exposed_provenance_mut(context), slot) };
    }
}

/// Frees memory, whose owner may be an object of Python.
#[cfg(feature = "python")]
fn release(memory: LetGo) {
    drop(bridge_pyo3::Guarded::new(memory));
}

#[cfg(not(feature = "python"))]
fn release(memory: LetGo) {
    drop(memory);
}
