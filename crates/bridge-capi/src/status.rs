//! Results of the C functions: a status, and for each thread the message of its last error.

use bridge_core::{Advice, Error, ErrorKind, Result};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Results of functions. Their numbers never change.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    Ok = 0,
    /// an argument is invalid
    Argument = 1,
    /// the object is not a tensor that can be exported
    NotATensor = 2,
    /// the target has no such dtype
    Dtype = 3,
    /// shape, strides or offset describe no view of the memory
    Layout = 4,
    /// on another device than asked, or on one that the target does not have
    Device = 5,
    /// read-only, and the consumer cannot keep it read-only
    ReadOnly = 6,
    /// a copy is needed, and forbidden or not possible here
    CopyNeeded = 7,
    /// it takes part in automatic differentiation
    RequiresGrad = 8,
    /// consumed or taken before
    Consumed = 9,
    /// it breaks the rules of DLPack
    Protocol = 10,
    /// a version of this interface, of DLPack or of a framework that is not supported
    Version = 11,
    /// a framework or a driver is missing
    Missing = 12,
    /// the CUDA driver reported an error
    Driver = 13,
    /// TensorFlow reported an error
    Framework = 14,
    /// a bug of this library: please report it
    Panic = 15,
    /// the producer refuses to export the tensor
    Refused = 16,
    /// one of two streams is being captured into a CUDA graph and the other is not
    Captured = 17,
    /// TensorFlow or the device has no memory left
    OutOfMemory = 18,
    /// another process is of another user, or the ticket is not the right one
    Denied = 19,
    /// another process has ended or has taken its memory back
    Gone = 20,
    /// another process allows no more, or does not answer in time
    Busy = 21,
}

/// The statuses of the kinds of errors, with their names.
const KINDS: &[(ErrorKind, Status, &CStr)] = &[
    (ErrorKind::Argument, Status::Argument, c"argument"),
    (ErrorKind::NotATensor, Status::NotATensor, c"not_a_tensor"),
    (ErrorKind::Dtype, Status::Dtype, c"dtype"),
    (ErrorKind::Layout, Status::Layout, c"layout"),
    (ErrorKind::Device, Status::Device, c"device"),
    (ErrorKind::ReadOnly, Status::ReadOnly, c"read_only"),
    (ErrorKind::CopyNeeded, Status::CopyNeeded, c"copy_needed"),
    (ErrorKind::RequiresGrad, Status::RequiresGrad, c"requires_grad"),
    (ErrorKind::Consumed, Status::Consumed, c"consumed"),
    (ErrorKind::Protocol, Status::Protocol, c"protocol"),
    (ErrorKind::Version, Status::Version, c"version"),
    (ErrorKind::Missing, Status::Missing, c"missing"),
    (ErrorKind::Driver, Status::Driver, c"driver"),
    (ErrorKind::Framework, Status::Framework, c"framework"),
    (ErrorKind::Refused, Status::Refused, c"refused"),
    (ErrorKind::Captured, Status::Captured, c"captured"),
    (ErrorKind::OutOfMemory, Status::OutOfMemory, c"out_of_memory"),
    (ErrorKind::Denied, Status::Denied, c"denied"),
    (ErrorKind::Gone, Status::Gone, c"gone"),
    (ErrorKind::Busy, Status::Busy, c"busy"),
];

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Returns the number of a kind. A kind that core has added since counts as [`ErrorKind::Framework`].
fn status(kind: ErrorKind) -> Status {
    KINDS.iter().find(|(known, ..)| *known == kind).map_or(Status::Framework, |(_, status, _)| *status)
}

bridge_core::words! {
    /// The words for programs in C.
    fn c {
        AllowCopy => "allow a copy with TB_COPY_IF_NEEDED",
        AllowMove => "allow a move with TB_COPY_IF_NEEDED",
        Copy => "ask for a copy with TB_COPY_ALWAYS",
        CopyFirst => "copy the tensor first, for example with TB_COPY_ALWAYS",
        OtherDevice => "leave the device of tb_options NULL, or name another",
        MoveToHost => "move it, with the host as the device of tb_options",
        MoveToCuda => "move it, with a CUDA device as the device of tb_options",
        AnyOrder => "ask for TB_ELEMENTS_ANY_ORDER",
        Detach => "detach it first",
        DetachFirst => "detach the source first",
        DetachTarget => "pass the detached tensor, which shares its memory",
        Cast => "cast the source first",
        CastFirst => "cast the source first",
        ReverseDimensions => "reverse the dimensions with the axes of tb_options",
        Copies => "copy it with its owner's functions first",
    }
}

/// Whether a Python package calls this library.
static FOR_PYTHON: AtomicBool = AtomicBool::new(false);

/// Words errors for callers in Python from now on.
pub(crate) fn speak_python() {
    FOR_PYTHON.store(true, Relaxed);
}

/// Returns the words of the caller: those of Python where the library works for a Python package.
fn words() -> fn(Advice) -> &'static str {
    if FOR_PYTHON.load(Relaxed) { bridge_core::python::words } else { c }
}

/// Runs the body of a function that C calls: keeps its error for `tb_error`, and catches a panic.
pub(crate) fn answer(body: impl FnOnce() -> Result<()>) -> Status {
    let (status, text) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(error)) => (status(error.kind()), error.worded(words())),
        Err(_) => (Status::Panic, "truebridge panicked: please report this".into()),
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // While the thread ends, no caller can read the message.
    let _ = LAST.try_with(|last| last.replace(text));
    status
}

/// Runs the body of a function that cannot fail: catches a panic.
pub(crate) fn quietly(body: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(body));
}

/// Returns the error for an invalid argument.
#[cold]
pub(crate) fn refused(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Argument, text)
}

/// Returns the message of the last call on this thread that failed; "" before the first. Valid until the next one.
#[unsafe(no_mangle)]
pub extern "C" fn tb_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the name of a status, such as "copy_needed"; NULL for other numbers.
#[unsafe(no_mangle)]
pub extern "C" fn tb_status_name(status: i32) -> *const c_char {
    let kinds = KINDS.iter().map(|(_, status, name)| (*status, *name));
    let mut all = kinds.chain([(Status::Ok, c"ok"), (Status::Panic, c"panic")]);
    all.find(|(known, _)| *known as i32 == status).map_or(std::ptr::null(), |(_, name)| name.as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: a C string of this thread, which nothing changes meanwhile.
        unsafe { CStr::from_ptr(tb_error()) }.to_string_lossy().into_owned()
    }

    fn name(status: i32) -> Option<String> {
        let name = tb_status_name(status);
        // SAFETY: a C string that is never freed.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    #[test]
    fn errors_keep_their_kind_and_their_message() {
        for (kind, number, expected) in KINDS {
            let status = answer(|| Err(Error::new(*kind, "with a \0 inside")));
            assert_eq!((status, last().as_str()), (*number, "with a   inside"));
            assert_eq!(name(status as i32).as_deref(), expected.to_str().ok());
        }
        assert_eq!(answer(|| Ok(())), Status::Ok);
        assert_eq!(last(), "with a   inside", "a success keeps the message of the last error");
        assert_eq!((name(0).as_deref(), name(-1), name(99)), (Some("ok"), None, None));
    }

    #[test]
    fn messages_belong_to_a_thread() {
        assert_ne!(answer(|| Err(refused("mine"))), Status::Ok);
        assert_eq!(std::thread::spawn(last).join().unwrap(), "");
        assert_eq!(last(), "mine");
    }

    #[test]
    fn panics_are_caught() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let status = answer(|| panic!("on purpose"));
        quietly(|| panic!("on purpose"));
        std::panic::set_hook(hook);
        assert_eq!((status, name(status as i32).as_deref()), (Status::Panic, Some("panic")));
        assert!(last().contains("report"));
    }
}
