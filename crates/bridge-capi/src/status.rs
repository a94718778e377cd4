//! What functions give back: a status, and the words of the last error of each thread.

use bridge_core::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `tb_status`: 0 for success, otherwise the number of a row of [`KINDS`], counted from 1, or [`PANIC`].
pub(crate) type Status = i32;

const OK: Status = 0;
const PANIC: Status = KINDS.len() as Status + 1;

/// The kinds of errors in the order of `tb_status`, with their names.
const KINDS: &[(ErrorKind, &CStr)] = &[
    (ErrorKind::Argument, c"argument"),
    (ErrorKind::NotATensor, c"not_a_tensor"),
    (ErrorKind::Dtype, c"dtype"),
    (ErrorKind::Layout, c"layout"),
    (ErrorKind::Device, c"device"),
    (ErrorKind::ReadOnly, c"read_only"),
    (ErrorKind::CopyNeeded, c"copy_needed"),
    (ErrorKind::RequiresGrad, c"requires_grad"),
    (ErrorKind::Consumed, c"consumed"),
    (ErrorKind::Protocol, c"protocol"),
    (ErrorKind::Version, c"version"),
    (ErrorKind::Missing, c"missing"),
    (ErrorKind::Driver, c"driver"),
    (ErrorKind::Framework, c"framework"),
];

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The number of a kind; a kind that core has got since counts as [`ErrorKind::Framework`], the last row.
fn status(kind: ErrorKind) -> Status {
    let row = KINDS.iter().position(|(known, _)| *known == kind);
    row.map_or(KINDS.len(), |row| row + 1) as Status
}

/// Runs the body of a function that C calls: its error is kept for `tb_error`, and a panic ends here.
pub(crate) fn answer(body: impl FnOnce() -> Result<()>) -> Status {
    let (status, text) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return OK,
        Ok(Err(error)) => (status(error.kind()), error.to_string()),
        Err(_) => (PANIC, "tensor_bridge panicked: please report this".into()),
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // While the thread ends there is nobody left to ask for the words.
    let _ = LAST.try_with(|last| last.replace(text));
    status
}

/// The same for functions that cannot fail.
pub(crate) fn quietly(body: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(body));
}

/// An argument that means nothing here.
#[cold]
pub(crate) fn refused(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Argument, text)
}

/// What the last call on this thread that failed has reported.
#[unsafe(no_mangle)]
pub extern "C" fn tb_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// A status in one word.
#[unsafe(no_mangle)]
pub extern "C" fn tb_status_name(status: Status) -> *const c_char {
    match usize::try_from(status) {
        Ok(0) => c"ok".as_ptr(),
        Ok(number) if number <= KINDS.len() => KINDS[number - 1].1.as_ptr(),
        _ if status == PANIC => c"panic".as_ptr(),
        _ => std::ptr::null(),
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
    fn errors_keep_their_kind_and_their_words() {
        for (number, (kind, expected)) in KINDS.iter().enumerate() {
            let status = answer(|| Err(Error::new(*kind, "with a \0 inside")));
            assert_eq!((status, last().as_str()), (number as Status + 1, "with a   inside"));
            assert_eq!(name(status).as_deref(), expected.to_str().ok());
        }
        assert_eq!(answer(|| Ok(())), OK);
        assert_eq!(last(), "with a   inside", "a success leaves the words of the last error");
        assert_eq!((name(OK).as_deref(), name(-1), name(99)), (Some("ok"), None, None));
    }

    #[test]
    fn words_belong_to_a_thread() {
        assert_ne!(answer(|| Err(refused("mine"))), OK);
        assert_eq!(std::thread::spawn(last).join().unwrap(), "");
        assert_eq!(last(), "mine");
    }

    #[test]
    fn panics_stop_here() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let status = answer(|| panic!("on purpose"));
        quietly(|| panic!("on purpose"));
        std::panic::set_hook(hook);
        assert_eq!((status, name(status).as_deref()), (PANIC, Some("panic")));
        assert!(last().contains("report"));
    }
}
