//! DLPack capsules: the name says who owns the tensor (Python specification of DLPack).

use super::gate::{Functions, Object, functions};
use bridge_core::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use bridge_core::dlpack::{Managed, Origin, adopt, export};
use bridge_core::{Device, Error, ErrorKind, Export, Result};
use std::ffi::{CStr, c_void};
use std::panic::catch_unwind;

/// Names of capsules whose tensor is to be taken and of those whose tensor was taken: legacy, versioned.
const NAMES: [(&CStr, &CStr); 2] =
    [(c"dltensor", c"used_dltensor"), (c"dltensor_versioned", c"used_dltensor_versioned")];

/// An owned managed tensor of either ABI. It has no drop: pass it on, or call [`release`](Self::release).
#[derive(Clone, Copy, Debug)]
#[must_use = "it has no drop: pass it on, or call release"]
pub enum AnyManaged {
    /// A `DLManagedTensor`.
    Legacy(*mut DLManagedTensor),
    /// A `DLManagedTensorVersioned`.
    Versioned(*mut DLManagedTensorVersioned),
}

impl AnyManaged {
    /// Names the ABI of a pointer.
    pub fn from_raw(managed: *mut c_void, versioned: bool) -> Self {
        if versioned { Self::Versioned(managed.cast()) } else { Self::Legacy(managed.cast()) }
    }

    /// Returns the pointer.
    pub fn as_raw(self) -> *mut c_void {
        match self {
            Self::Legacy(managed) => managed.cast(),
            Self::Versioned(managed) => managed.cast(),
        }
    }

    /// Exports the tensor, as [`export`] does. On an error its deleter has been called.
    ///
    /// # Errors
    ///
    /// Those of [`adopt`] and [`export`].
    ///
    /// # Safety
    ///
    /// As for [`adopt`] and [`export`].
    pub unsafe fn export(self, origin: impl FnOnce(Device, usize) -> Result<Origin>) -> Result<Export> {
        // SAFETY: the caller's obligations are the same.
        unsafe {
            match self {
                Self::Legacy(managed) => export(adopt(managed)?, origin),
                Self::Versioned(managed) => export(adopt(managed)?, origin),
            }
        }
    }

    /// Calls the deleter.
    ///
    /// # Safety
    ///
    /// The caller owns the managed tensor, which is used no more.
    pub unsafe fn release(self) {
        // SAFETY: the caller's obligation. Where the version is not ours, `from_raw` calls the deleter.
        unsafe {
            match self {
                Self::Legacy(managed) => drop(Managed::from_raw(managed)),
                Self::Versioned(managed) => drop(Managed::from_raw(managed)),
            }
        }
    }
}

fn opened() -> Result<&'static Functions> {
    let closed =
        || Error::new(ErrorKind::Argument, "there is no interpreter here: open it first (tb_python_open in C)");
    functions().ok_or_else(closed)
}

/// Takes the managed tensor out of a DLPack capsule, which is consumed.
///
/// # Errors
///
/// [`ErrorKind::NotATensor`] for anything but a DLPack capsule, [`ErrorKind::Consumed`] for one that was consumed
/// before, [`ErrorKind::Argument`] where no interpreter is open.
///
/// # Safety
///
/// `capsule` is a Python object, this thread holds the GIL, and no other thread uses the capsule meanwhile (where there
/// is no GIL, the caller holds the capsule's lock).
pub unsafe fn take_capsule(capsule: Object) -> Result<AnyManaged> {
    let functions = opened()?;
    // SAFETY: the object is alive and the GIL is held; IsValid takes any object and sets no exception.
    let is = |name: &CStr| unsafe { (functions.capsule_is_valid)(capsule, name.as_ptr()) } == 1;
    for (versioned, (name, used)) in NAMES.into_iter().enumerate() {
        if is(name) {
            // SAFETY: the object is a capsule of this name. Renaming it takes the tensor over from its destructor, by
            // DLPack's rule for Python, and nothing between the two calls can fail.
            let managed = unsafe {
                let managed = (functions.capsule_get_pointer)(capsule, name.as_ptr());
                (functions.capsule_set_name)(capsule, used.as_ptr());
                managed
            };
            return Ok(AnyManaged::from_raw(managed, versioned == 1));
        }
    }
    Err(if NAMES.iter().any(|(_, used)| is(used)) {
        Error::new(ErrorKind::Consumed, "the DLPack capsule was consumed before: ask its producer for a new one")
    } else {
        let text = "this is not a DLPack capsule (named \"dltensor\" or \"dltensor_versioned\")";
        Error::new(ErrorKind::NotATensor, text)
    })
}

/// Puts a managed tensor into a new capsule, whose destructor calls the tensor's deleter unless a consumer has taken
/// the tensor. Returns a new reference, or null with Python's exception set; the deleter has been called then.
///
/// # Errors
///
/// [`ErrorKind::Argument`] where no interpreter is open; the deleter has been called.
///
/// # Safety
///
/// The caller owns the managed tensor, and this thread holds the GIL.
pub unsafe fn new_capsule(managed: AnyManaged) -> Result<Object> {
    let (name, _) = NAMES[usize::from(matches!(managed, AnyManaged::Versioned(_)))];
    // SAFETY: the name is static, and the GIL is held; the tensor is the caller's to pass on.
    unsafe {
        let capsule = opened().map(|functions| (functions.capsule_new)(managed.as_raw(), name.as_ptr(), Some(destroy)));
        if !matches!(capsule, Ok(capsule) if !capsule.is_null()) {
            managed.release();
        }
        capsule
    }
}

/// The destructor of a capsule.
unsafe extern "C" fn destroy(capsule: Object) {
    // Deleters of ours let no panic out. What else panics must not meet C.
    let _ = catch_unwind(|| {
        let Some(functions) = functions() else { return };
        for (versioned, (name, _)) in NAMES.into_iter().enumerate() {
            // SAFETY: Python calls this with the capsule and the GIL. Under this name the capsule owns the tensor.
            unsafe {
                if (functions.capsule_is_valid)(capsule, name.as_ptr()) == 1 {
                    let managed = (functions.capsule_get_pointer)(capsule, name.as_ptr());
                    AnyManaged::from_raw(managed, versioned == 1).release();
                }
            }
        }
    });
}
