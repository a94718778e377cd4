//! The libraries of PyTorch in this process: their functions, and the objects that these return.

use bridge_core::DType;
use libloading::os::unix::{Library, RTLD_NOW};
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Mutex;

/// `at::Tensor`: a pointer to its implementation, which PyTorch's C functions take as an `AtenTensorHandle`.
pub(crate) type AtTensor = *mut *mut c_void;

/// Finds a library only if it is loaded (`dlfcn.h` of Linux).
const RTLD_NOLOAD: i32 = 4;

/// The libraries that were found: to look for one takes as long as ten look-ups in it. They are never unloaded.
static FOUND: Mutex<Vec<(&str, &'static Library)>> = Mutex::new(Vec::new());

fn library(name: &'static str) -> Option<&'static Library> {
    // Not a wait: in a child that was forked meanwhile the lock may stay locked.
    let mut found = FOUND.try_lock();
    let known = found.as_ref().ok().and_then(|found| found.iter().find(|(known, _)| *known == name));
    if let Some((_, known)) = known {
        return Some(known);
    }
    // SAFETY: the library is loaded already or not at all, so no code runs.
    let library: &_ = Box::leak(Box::new(unsafe { Library::open(Some(name), RTLD_NOW | RTLD_NOLOAD) }.ok()?));
    found.iter_mut().for_each(|found| found.push((name, library)));
    Some(library)
}

/// Looks a function up in a library of PyTorch, if the process has loaded it.
///
/// # Safety
///
/// `F` is the type of the function with this name.
pub(crate) unsafe fn function<F: Copy>(library: &'static str, name: &str) -> Option<F> {
    // SAFETY: the signature is the caller's obligation. The library stays loaded.
    unsafe { self::library(library)?.get::<F>(name.as_bytes()).ok().map(|f| *f) }
}

/// Returns whether the process has loaded a library.
#[cfg(feature = "python")]
pub(crate) fn is_loaded(library: &'static str) -> bool {
    self::library(library).is_some()
}

/// Returns the dtypes that this version of libtorch names by functions, with the numbers that these return.
pub(crate) fn dtypes(find: impl Fn(&str) -> Option<unsafe extern "C" fn() -> i32>) -> Vec<(DType, i32)> {
    let number = |(dtype, name): &(DType, &str)| {
        // Names of the newer of the two interfaces have no prefix.
        let function =
            [format!("aoti_torch_dtype_{name}"), format!("torch_dtype_{name}")].iter().find_map(|name| find(name))?;
        // SAFETY: it takes nothing.
        Some((*dtype, unsafe { function() }))
    };
    DType::NAMED.iter().filter_map(number).collect()
}

/// The bytes at the start of a `TensorImpl` and of a `StorageImpl` that are searched; both are longer in all versions.
pub(crate) const SEARCHED: usize = 64;
pub(crate) const WORD: usize = size_of::<usize>();

/// Returns the word `offset` bytes after `start`.
///
/// # Safety
///
/// The object at `start` is alive and longer than `offset + WORD` bytes.
pub(crate) unsafe fn word(start: usize, offset: usize) -> usize {
    // SAFETY: the caller's obligation; objects and words are aligned.
    unsafe { ptr::with_exposed_provenance::<usize>(start + offset).read() }
}

/// Returns the offsets, after the header of an object, of the first `length` bytes at `start` that hold `value`.
///
/// # Safety
///
/// As for [`word`].
pub(crate) unsafe fn search(start: usize, length: usize, value: usize) -> Option<usize> {
    // SAFETY: the caller's obligation.
    (WORD..length).step_by(WORD).find(|offset| unsafe { word(start, *offset) } == value)
}

/// Where a `StorageImpl` says what its memory is and how it is freed, in bytes after its start.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryOffsets {
    pub(crate) address: usize,
    /// What the deleter takes.
    pub(crate) context: usize,
    pub(crate) deleter: usize,
}

impl MemoryOffsets {
    /// Returns the offsets in a storage with PyTorch's own memory at the address `memory`.
    ///
    /// # Safety
    ///
    /// The storage is alive.
    pub(crate) unsafe fn find(storage: usize, memory: usize) -> Option<Self> {
        // SAFETY: a storage is longer than what is searched, and the words after the address are inside it.
        unsafe {
            let address = search(storage, SEARCHED - 2 * WORD, memory)?;
            // The deleter of PyTorch's memory takes the address. The order of the two is that of the C++ library.
            let [first, second] = [address + WORD, address + 2 * WORD];
            match [first, second].map(|offset| word(storage, offset) == memory) {
                [true, false] => Some(Self { address, context: first, deleter: second }),
                [false, true] => Some(Self { address, context: second, deleter: first }),
                _ => None,
            }
        }
    }
}

/// Returns the path of the library that contains the function at `address`, as the dynamic linker has it.
pub(crate) fn library_of(address: usize) -> Option<String> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: the linker looks the address up and touches nothing there. It fills the result in where it returns
    // nonzero, with a string that lives as long as the library, which stays loaded.
    unsafe {
        if libc::dladdr(ptr::with_exposed_provenance(address), found.as_mut_ptr()) == 0 {
            return None;
        }
        let path = found.assume_init().dli_fname;
        (!path.is_null()).then(|| std::ffi::CStr::from_ptr(path).to_string_lossy().into_owned())
    }
}

/// A tensor of libtorch that is ours. It may be dropped on any thread.
pub(crate) struct Held {
    pub(crate) tensor: NonNull<*mut c_void>,
    /// `aoti_torch_delete_tensor_object`
    pub(crate) delete: unsafe extern "C" fn(AtTensor) -> c_int,
}

// SAFETY: PyTorch counts references atomically; the tensor is only deleted here.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the tensor is ours, and deleted once.
        unsafe { (self.delete)(self.tensor.as_ptr()) };
    }
}
