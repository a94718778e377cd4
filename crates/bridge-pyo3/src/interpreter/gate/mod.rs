//! The GIL for deleters, which frameworks call on any thread at any time.

mod functions;
mod release;

pub use functions::{Functions, Object, open};
pub use release::{Guarded, drop_deferred, drop_guarded, drop_inside, drop_with_gil};

pub(crate) use functions::functions;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Set when the interpreter begins to shut down.
static CLOSED: AtomicBool = AtomicBool::new(false);
/// Calls of [`enter`] that hold the GIL or may be waiting for it.
static ENTERED: AtomicUsize = AtomicUsize::new(0);
/// How often [`close`] polls for them, a millisecond apart, before it proceeds regardless.
const POLLS: u32 = 1000;

/// What the interpreter is to the calling thread.
pub(crate) enum Thread {
    /// No interpreter was opened.
    Free,
    /// Python created the thread, or it has entered Python and not left it. Any thread counts as such once the
    /// interpreter was finalised without [`close`]; [`enter`] rejects it then.
    Known,
    /// Any other thread.
    Unknown,
}

impl Thread {
    pub(crate) fn current() -> Self {
        let Some(functions) = functions() else { return Self::Free };
        // SAFETY: both functions may be called on any thread at any time.
        unsafe {
            let has_state = !(functions.gil_state_get_this_thread_state)().is_null();
            if has_state || !CLOSED.load(SeqCst) && (functions.is_initialized)() == 0 {
                Self::Known
            } else {
                Self::Unknown
            }
        }
    }
}

/// One call of [`enter`]: the state that `PyGILState_Ensure` returned, once it has.
struct Entered(Option<(&'static Functions, c_int)>);

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some((functions, state)) = self.0 {
            // SAFETY: the state is that of the matching Ensure, on this thread.
            unsafe { (functions.gil_state_release)(state) };
        }
        // In a child that was forked inside `enter` the count began at 0.
        let _ = ENTERED.fetch_update(SeqCst, SeqCst, |entered| entered.checked_sub(1));
    }
}

/// Runs `body` with the GIL, a pending exception in place, whether this thread holds the GIL or not. Returns `None`
/// once the interpreter shuts down, and where there is none.
///
/// At finalisation CPython kills threads that block on the GIL, inside Rust frames; so [`close`] admits threads that
/// already wait, and rejects later ones.
pub fn enter<R>(body: impl FnOnce() -> R) -> Option<R> {
    let functions = functions()?;
    ENTERED.fetch_add(1, SeqCst);
    let mut entered = Entered(None);
    // SAFETY: the call is allowed at any time.
    if CLOSED.load(SeqCst) || unsafe { (functions.is_initialized)() } == 0 {
        return None;
    }
    // SAFETY: the interpreter is initialised, and `close` waits for threads that came here before it.
    entered.0 = Some((functions, unsafe { (functions.gil_state_ensure)() }));
    Some(body())
}

/// Runs `body` with the GIL, as [`enter`] does. A pending exception, as is often there when something is dropped, is
/// saved before `body` and restored after it.
pub fn with_gil<R>(body: impl FnOnce() -> R) -> Option<R> {
    let functions = functions()?;
    enter(|| {
        // SAFETY: this thread holds the GIL until `enter` returns.
        let _pending = unsafe { Pending::save(functions) };
        body()
    })
}

/// The pending exception of this thread, which the drop restores.
struct Pending(&'static Functions, [Object; 3]);

impl Pending {
    /// # Safety
    ///
    /// This thread holds the GIL, now and when the value is dropped.
    unsafe fn save(functions: &'static Functions) -> Self {
        let [mut kind, mut value, mut traceback] = [ptr::null_mut(); 3];
        // SAFETY: the GIL is held; the outputs are writable.
        unsafe { (functions.err_fetch)(&mut kind, &mut value, &mut traceback) };
        Self(functions, [kind, value, traceback])
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let Self(functions, [kind, value, traceback]) = *self;
        // SAFETY: these are the references that Fetch returned, and the GIL is held.
        unsafe { (functions.err_restore)(kind, value, traceback) };
    }
}

/// Reports an exception that the deleter of a producer has left set to `sys.unraisablehook`, so that no caller of ours
/// takes it for its own.
///
/// # Safety
///
/// This thread holds the GIL.
pub unsafe fn report_unraisable() {
    let Some(functions) = functions() else { return };
    // SAFETY: the GIL is held; WriteUnraisable needs an exception to be set, and takes null for no object.
    unsafe {
        if !(functions.err_occurred)().is_null() {
            (functions.err_write_unraisable)(ptr::null_mut());
        }
    }
}

/// Closes the way in before the interpreter shuts down: drops deferred owners, rejects later calls of [`enter`], and
/// waits up to a second for those under way. The caller does not hold the GIL.
pub fn close() {
    release::drop_deferred();
    CLOSED.store(true, SeqCst);
    let mut polls = 0;
    while ENTERED.load(SeqCst) > 0 && polls < POLLS {
        std::thread::sleep(Duration::from_millis(1));
        polls += 1;
    }
}

unsafe extern "C" {
    /// `pthread.h`
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

/// Makes forked children forget the threads of their parent.
pub(crate) fn watch_for_forks() {
    // SAFETY: the functions lock and unlock a mutex and store to atomics, which the one thread of a forked child may
    // do. Where they cannot be registered, a child waits a little at its end.
    let _ = unsafe { pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

unsafe extern "C" fn before_fork() {
    release::before_fork();
}

unsafe extern "C" fn in_parent() {
    release::after_fork();
}

unsafe extern "C" fn in_child() {
    release::after_fork();
    release::forget_thread();
    ENTERED.store(0, SeqCst);
}
