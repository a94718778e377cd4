//! An interpreter for tests: a mutex as the GIL, and capsules as the only objects. Python knows the threads that called
//! [`know`], and any other while it holds the GIL.

use bridge_pyo3::interpreter::Functions;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{dangling_mut, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};

pub const FUNCTIONS: Functions = Functions {
    is_initialized,
    gil_state_ensure: ensure,
    gil_state_release: release,
    gil_state_get_this_thread_state: this_thread_state,
    err_fetch: fetch,
    err_restore: restore,
    err_occurred: occurred,
    err_write_unraisable: write_unraisable,
    capsule_new,
    capsule_is_valid,
    capsule_get_pointer,
    capsule_set_name,
};

static GIL: Mutex<()> = Mutex::new(());
/// Calls of `PyGILState_Ensure` that came without the GIL.
pub static CAME: AtomicUsize = AtomicUsize::new(0);
/// Exceptions that were reported as unraisable.
pub static UNRAISABLE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static HELD: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    static KNOWN: Cell<bool> = const { Cell::new(false) };
    static PENDING: Cell<*mut c_void> = const { Cell::new(null_mut()) };
}

/// Makes this thread one that Python knows.
pub fn know() {
    KNOWN.set(true);
}

pub fn is_known() -> bool {
    KNOWN.get()
}

pub fn hold() {
    HELD.set(Some(GIL.lock().unwrap()));
}

pub fn let_go() {
    HELD.take();
}

pub fn holds() -> bool {
    HELD.with_borrow(Option::is_some)
}

/// Sets the pending exception of this thread: null for none.
pub fn raise(exception: *mut c_void) {
    PENDING.set(exception);
}

pub fn pending() -> *mut c_void {
    PENDING.get()
}

unsafe extern "C" fn is_initialized() -> c_int {
    1
}

/// Results of [`ensure`]: the thread held the GIL, or it did not.
const NESTED: c_int = 6;
const OUTER: c_int = 7;

unsafe extern "C" fn ensure() -> c_int {
    if holds() {
        return NESTED;
    }
    CAME.fetch_add(1, SeqCst);
    hold();
    OUTER
}

unsafe extern "C" fn release(state: c_int) {
    assert!(holds() && [NESTED, OUTER].contains(&state));
    if state == OUTER {
        let_go();
    }
}

unsafe extern "C" fn this_thread_state() -> *mut c_void {
    if is_known() || holds() { dangling_mut() } else { null_mut() }
}

unsafe extern "C" fn fetch(kind: *mut *mut c_void, value: *mut *mut c_void, traceback: *mut *mut c_void) {
    assert!(holds());
    // SAFETY: the caller passes writable places.
    unsafe {
        kind.write(PENDING.replace(null_mut()));
        value.write(null_mut());
        traceback.write(null_mut());
    }
}

unsafe extern "C" fn restore(kind: *mut c_void, _: *mut c_void, _: *mut c_void) {
    assert!(holds());
    PENDING.set(kind);
}

unsafe extern "C" fn occurred() -> *mut c_void {
    assert!(holds());
    PENDING.get()
}

unsafe extern "C" fn write_unraisable(_: *mut c_void) {
    assert!(holds() && !PENDING.replace(null_mut()).is_null());
    UNRAISABLE.fetch_add(1, SeqCst);
}

/// A capsule; every object of this interpreter is one.
pub struct Capsule {
    pub pointer: *mut c_void,
    pub name: *const c_char,
    pub destructor: Option<unsafe extern "C" fn(*mut c_void)>,
}

impl Capsule {
    pub fn named(name: &'static CStr) -> Self {
        Self { pointer: null_mut(), name: name.as_ptr(), destructor: None }
    }

    pub fn name(&self) -> &str {
        // SAFETY: names are static C strings.
        unsafe { CStr::from_ptr(self.name) }.to_str().unwrap()
    }

    pub fn object(&mut self) -> *mut c_void {
        (&raw mut *self).cast()
    }
}

fn capsule(object: *mut c_void) -> *mut Capsule {
    assert!(holds(), "capsules are read with the GIL");
    object.cast()
}

unsafe extern "C" fn capsule_new(
    pointer: *mut c_void,
    name: *const c_char,
    destructor: Option<unsafe extern "C" fn(*mut c_void)>,
) -> *mut c_void {
    assert!(holds());
    Box::into_raw(Box::new(Capsule { pointer, name, destructor })).cast()
}

unsafe extern "C" fn capsule_is_valid(object: *mut c_void, name: *const c_char) -> c_int {
    // SAFETY: the object is a capsule, and both names are C strings.
    unsafe { c_int::from(CStr::from_ptr((*capsule(object)).name) == CStr::from_ptr(name)) }
}

unsafe extern "C" fn capsule_get_pointer(object: *mut c_void, _: *const c_char) -> *mut c_void {
    // SAFETY: the object is a capsule.
    unsafe { (*capsule(object)).pointer }
}

unsafe extern "C" fn capsule_set_name(object: *mut c_void, name: *const c_char) -> c_int {
    // SAFETY: the object is a capsule.
    unsafe { (*capsule(object)).name = name };
    0
}
