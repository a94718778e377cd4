//! Giving memory back when TensorFlow needs it no more.

#[cfg(feature = "python")]
use bridge_pyo3::drop_guarded as drop_owner;
use std::ffi::c_void;
#[cfg(not(feature = "python"))]
use std::mem::drop as drop_owner;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

/// What TensorFlow keeps until then.
pub(crate) type Owner = Box<dyn Send + Sync>;

/// The owner as TensorFlow's functions take it along; [`release`] gets it back.
pub(crate) fn into_raw(owner: Owner) -> *mut c_void {
    Box::into_raw(Box::new(owner)).cast()
}

/// Called by TensorFlow once, on any thread, with or without the GIL.
pub(crate) unsafe extern "C" fn release(_: *mut c_void, _: usize, owner: *mut c_void) {
    // SAFETY: this is what `into_raw` gave, and it comes back once.
    let owner = *unsafe { Box::from_raw(owner.cast::<Owner>()) };
    // A lease lets no panic out of its drop, and the other owners have none.
    if is_own_thread() { drop_elsewhere(owner) } else { drop(owner) }
}

/// Whether this is a thread of TensorFlow's, which Python does not know.
fn is_own_thread() -> bool {
    #[cfg(feature = "python")]
    // SAFETY: the function may be called on any thread at any time.
    return unsafe { pyo3::ffi::PyGILState_GetThisThreadState() }.is_null();
    #[cfg(not(feature = "python"))]
    false
}

/// Drops the owner on a thread of ours: it may have to wait for the GIL, and whoever holds that may be waiting for
/// TensorFlow's thread, as when the mode of execution is changed.
fn drop_elsewhere(owner: Owner) {
    static THREAD: OnceLock<Option<Sender<Owner>>> = OnceLock::new();
    let start = || {
        let (sender, owners) = channel::<Owner>();
        let thread = thread::Builder::new().name("tensor-bridge-release".into());
        thread.spawn(move || owners.into_iter().for_each(drop_owner)).ok().map(|_| sender)
    };
    match THREAD.get_or_init(start) {
        // The thread never ends, so it takes everything.
        Some(sender) => drop(sender.send(owner)),
        None => drop_owner(owner),
    }
}
