//! Results of the C functions: a status, and for each thread the message of its last error.

use bridge_core::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `tb_status`: [`OK`], the number of a row of [`KINDS`], or [`PANIC`].
pub(crate) type Status = i32;

const OK: Status = 0;
const FRAMEWORK: Status = 14;
const PANIC: Status = 15;

/// The numbers of the kinds of errors, which never change, with their names.
const KINDS: &[(ErrorKind, Status, &CStr)] = &[
    (ErrorKind::Argument, 1, c"argument"),
    (ErrorKind::NotATensor, 2, c"not_a_tensor"),
    (ErrorKind::Dtype, 3, c"dtype"),
    (ErrorKind::Layout, 4, c"layout"),
    (ErrorKind::Device, 5, c"device"),
    (ErrorKind::ReadOnly, 6, c"read_only"),
    (ErrorKind::CopyNeeded, 7, c"copy_needed"),
    (ErrorKind::RequiresGrad, 8, c"requires_grad"),
    (ErrorKind::Consumed, 9, c"consumed"),
    (ErrorKind::Protocol, 10, c"protocol"),
    (ErrorKind::Version, 11, c"version"),
    (ErrorKind::Missing, 12, c"missing"),
    (ErrorKind::Driver, 13, c"driver"),
    (ErrorKind::Framework, FRAMEWORK, c"framework"),
    (ErrorKind::Refused, 16, c"refused"),
    (ErrorKind::Captured, 17, c"captured"),
    (ErrorKind::OutOfMemory, 18, c"out_of_memory"),
];

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Returns the number of a kind. A kind that core has added since counts as [`ErrorKind::Framework`].
fn status(kind: ErrorKind) -> Status {
    KINDS.iter().find(|(known, ..)| *known == kind).map_or(FRAMEWORK, |(_, status, _)| *status)
}

/// Runs the body of a function that C calls: keeps its error for `tb_error`, and catches a panic.
pub(crate) fn answer(body: impl FnOnce() -> Result<()>) -> Status {
    let (status, text) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return OK,
        Ok(Err(error)) => (status(error.kind()), error.to_string()),
        Err(_) => (PANIC, "tensor_bridge panicked: please report this".into()),
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

/// Returns the message of the last call on this thread that failed.
#[unsafe(no_mangle)]
pub extern "C" fn tb_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the name of a status: one word.
#[unsafe(no_mangle)]
pub extern "C" fn tb_status_name(status: Status) -> *const c_char {
    let kind = KINDS.iter().find(|(_, known, _)| *known == status).map(|(.., name)| name.as_ptr());
    match status {
        OK => c"ok".as_ptr(),
        PANIC => c"panic".as_ptr(),
        _ => kind.unwrap_or(std::ptr::null()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: a C string of this thread, which nothing changes meanwhile.
        unsafe { CStr::from_ptr(tb_error()) }.to_string_lossy().into_owned()
    }

    fn name(status: Status) -> Option<String> {
        let name = tb_status_name(status);
        // SAFETY: a C string that is never freed.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    #[test]
    fn errors_keep_their_kind_and_their_message() {
        for (kind, number, expected) in KINDS {
            let status = answer(|| Err(Error::new(*kind, "with a \0 inside")));
            assert_eq!((status, last().as_str()), (*number, "with a   inside"));
            assert_eq!(name(status).as_deref(), expected.to_str().ok());
        }
        assert_eq!(answer(|| Ok(())), OK);
        assert_eq!(last(), "with a   inside", "a success keeps the message of the last error");
        assert_eq!((name(OK).as_deref(), name(-1), name(99)), (Some("ok"), None, None));
    }

    #[test]
    fn messages_belong_to_a_thread() {
        assert_ne!(answer(|| Err(refused("mine"))), OK);
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
        assert_eq!((status, name(status).as_deref()), (PANIC, Some("panic")));
        assert!(last().contains("report"));
    }
}
