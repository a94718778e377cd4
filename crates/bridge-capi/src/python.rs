//! The interpreter, as far as it is needed: the GIL for owners that are Python objects, and DLPack capsules.
//!
//! Nothing of Python is linked. Whoever is inside Python hands the functions over.

use crate::external::External;
use crate::pointers::{self, look, put};
use crate::release::dropping;
use crate::status::{Status, answer, quietly, refused};
use crate::tensor::Tensor;
use crate::view;
use bridge_core::{Error, ErrorKind, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// A `PyObject` of whatever Python this is.
type Object = *mut c_void;

/// `tb_python`: functions of the interpreter, as their names in Python's C API say.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Functions {
    pub(crate) gil_state_ensure: unsafe extern "C" fn() -> c_int,
    pub(crate) gil_state_release: unsafe extern "C" fn(c_int),
    pub(crate) gil_state_check: unsafe extern "C" fn() -> c_int,
    pub(crate) capsule_new: unsafe extern "C" fn(*mut c_void, *const c_char, unsafe extern "C" fn(Object)) -> Object,
    pub(crate) capsule_is_valid: unsafe extern "C" fn(Object, *const c_char) -> c_int,
    pub(crate) capsule_get_pointer: unsafe extern "C" fn(Object, *const c_char) -> *mut c_void,
    pub(crate) capsule_set_name: unsafe extern "C" fn(Object, *const c_char) -> c_int,
}

/// The interpreter of this process.
pub(crate) struct Python {
    functions: Functions,
    /// Set when the interpreter begins to shut down.
    closed: AtomicBool,
    /// Calls of [`with_gil`](Self::with_gil) that may be waiting for the GIL.
    entered: AtomicUsize,
}

static PYTHON: OnceLock<Python> = OnceLock::new();

/// How often, a millisecond apart, the shutdown looks for those who wait for the GIL before it goes on regardless.
const LOOKS: u32 = 1000;

/// Names of capsules, good and used up (Python specification of DLPack).
const NAMES: [(&CStr, &CStr); 2] =
    [(c"dltensor", c"used_dltensor"), (c"dltensor_versioned", c"used_dltensor_versioned")];

/// The interpreter, if this process has said that there is one.
pub(crate) fn get() -> Option<&'static Python> {
    PYTHON.get()
}

impl Python {
    /// Whether this thread holds the GIL; never once the interpreter shuts down.
    pub(crate) fn has_gil(&self) -> bool {
        // SAFETY: the function may be called on any thread, and there is an interpreter.
        !self.is_closed() && unsafe { (self.functions.gil_state_check)() } == 1
    }

    fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// Runs `body` with the GIL, unless the interpreter shuts down, when nobody may enter it any more.
    ///
    /// A thread that waits for the GIL when the interpreter ends is ended by it, in the middle of Rust frames; so the
    /// shutdown waits here for those who have entered before.
    pub(crate) fn with_gil(&self, body: impl FnOnce()) {
        self.entered.fetch_add(1, SeqCst);
        if !self.is_closed() {
            // SAFETY: the interpreter is there, and waits in `close` for those who came here before it was closed.
            let state = unsafe { (self.functions.gil_state_ensure)() };
            body();
            // SAFETY: the state is that of the call above, on this thread.
            unsafe { (self.functions.gil_state_release)(state) };
        }
        // A child that was forked in here counts from 0.
        let _ = self.entered.fetch_update(SeqCst, SeqCst, |entered| entered.checked_sub(1));
    }

    /// Lets nobody in any more, and those in who wait already.
    fn close(&self) {
        self.closed.store(true, SeqCst);
        let mut looks = 0;
        while self.entered.load(SeqCst) > 0 && looks < LOOKS {
            std::thread::sleep(Duration::from_millis(1));
            looks += 1;
        }
    }

    /// Takes over the tensor in a DLPack capsule.
    ///
    /// # Safety
    ///
    /// `capsule` is a Python object, and this thread holds the GIL. A capsule of DLPack's names holds what they say.
    unsafe fn take(&self, capsule: Object) -> Result<Tensor> {
        let functions = &self.functions;
        // SAFETY: the object is alive and the GIL held; the question may be asked of any object.
        let is = |name: &CStr| unsafe { (functions.capsule_is_valid)(capsule, name.as_ptr()) } == 1;
        if NAMES.iter().any(|(_, used)| is(used)) {
            let text = "the DLPack capsule was used up before: ask its producer for a new one";
            return Err(Error::new(ErrorKind::Consumed, text));
        }
        let versioned = NAMES.iter().position(|(name, _)| is(name)).ok_or_else(|| {
            let text = "this is no DLPack capsule (named \"dltensor\" or \"dltensor_versioned\")";
            Error::new(ErrorKind::NotATensor, text)
        })?;
        let (name, used) = NAMES[versioned];
        // SAFETY: the object is a capsule of this name. Renaming it takes the tensor over from its destructor, by
        // DLPack's rule for Python, and nothing between the two calls can fail. The name says what the pointer is.
        unsafe {
            let managed = (functions.capsule_get_pointer)(capsule, name.as_ptr());
            (functions.capsule_set_name)(capsule, used.as_ptr());
            Tensor::managed(managed, versioned == 1)
        }
    }

    /// A capsule that holds the managed tensor, and gives it back if nobody takes it; null with Python's own error.
    ///
    /// # Safety
    ///
    /// The managed tensor is one of this library's, of the kind that `versioned` says, and taken over. This thread
    /// holds the GIL.
    unsafe fn capsule(&self, managed: *mut c_void, versioned: bool) -> Object {
        // SAFETY: the name lives for ever; the rest are the caller's obligations.
        unsafe {
            let (name, _) = NAMES[usize::from(versioned)];
            let capsule = (self.functions.capsule_new)(managed, name.as_ptr(), delete);
            if capsule.is_null() {
                view::delete(managed, versioned);
            }
            capsule
        }
    }
}

/// The destructor of a capsule: gives the tensor back if nobody has taken it.
unsafe extern "C" fn delete(capsule: Object) {
    let body = || {
        let Some(functions) = get().map(|python| &python.functions) else { return };
        for (versioned, (name, _)) in NAMES.iter().enumerate() {
            // SAFETY: Python calls this with the capsule and the GIL. While it has its name, the tensor is its own.
            unsafe {
                if (functions.capsule_is_valid)(capsule, name.as_ptr()) == 1 {
                    view::delete((functions.capsule_get_pointer)(capsule, name.as_ptr()), versioned == 1);
                }
            }
        }
    };
    quietly(|| dropping(body));
}

fn opened() -> Result<&'static Python> {
    get().ok_or_else(|| refused("there is no interpreter here: call tb_python_open first"))
}

/// Says that there is an interpreter. The first call counts.
///
/// # Safety
///
/// `python` is null or holds the functions of the interpreter that runs in this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_python_open(python: *const Functions) -> Status {
    answer(|| {
        // SAFETY: the caller's obligation.
        let functions = *unsafe { look(python, "python") }?;
        PYTHON.get_or_init(|| {
            // SAFETY: the function stores to an atomic alone, which any thread of a forked child may do. Where it cannot be
            // registered, a child waits a little at its end.
            let _ = unsafe { pthread_atfork(None, None, Some(forget_threads)) };
            Python { functions, closed: AtomicBool::new(false), entered: AtomicUsize::new(0) }
        });
        Ok(())
    })
}

unsafe extern "C" {
    /// `pthread.h`
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

/// Makes a forked child forget the threads that only its parent has.
unsafe extern "C" fn forget_threads() {
    if let Some(python) = get() {
        python.entered.store(0, SeqCst);
    }
}

/// Says that the interpreter will shut down.
#[unsafe(no_mangle)]
pub extern "C" fn tb_python_close() -> Status {
    answer(|| {
        if let Some(python) = get() {
            python.close();
        }
        Ok(())
    })
}

/// The tensor in a DLPack capsule, which is used up.
///
/// # Safety
///
/// `capsule` is a Python object, and the caller holds the GIL. `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_python_tensor(capsule: Object, out: *mut *mut Tensor) -> Status {
    answer(|| {
        let python = opened()?;
        pointers::there(capsule, "capsule")?;
        pointers::there(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe {
            let tensor = dropping(|| python.take(capsule))?;
            put(out, Box::into_raw(Box::new(tensor)), "out")
        }
    })
}

/// A DLPack capsule over what a run has given, or over what is fed.
///
/// # Safety
///
/// `external` is null or alive, the caller holds the GIL, and `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_python_capsule(
    external: *const External,
    stream: u64,
    versioned: i32,
    out: *mut Object,
) -> Status {
    answer(|| {
        let python = opened()?;
        pointers::there(out, "out")?;
        // SAFETY: the caller's obligation.
        let external = unsafe { look(external, "external") }?;
        let managed = view::managed(external, stream, versioned != 0)?;
        // SAFETY: the tensor is fresh; the GIL is the caller's obligation, and so is `out`.
        unsafe { put(out, python.capsule(managed, versioned != 0), "out") }
    })
}
