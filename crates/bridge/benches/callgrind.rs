//! The functions by which the paths that `cargo xtask counts` runs tell callgrind what to count, in Rust and in Python.
//!
//! Requests need no symbols, which valgrind does not find in a library of every linker.

use std::ffi::{c_int, c_void};

/// Requests of `callgrind.h`: the tool's letters and a number.
const TOOL: u64 = u64::from_be_bytes([0, 0, 0, 0, b'C', b'T', 0, 0]);
const DUMP: u64 = TOOL;
const ZERO: u64 = TOOL + 1;
const TOGGLE: u64 = TOOL + 2;
const INSTRUMENT: u64 = TOOL + 4;

/// Calls `call` and makes callgrind count what the calling thread does meanwhile, and write the count to a file.
#[unsafe(no_mangle)]
pub extern "C" fn truebridge_counted(call: extern "C" fn(usize), argument: usize) {
    request(ZERO);
    request(TOGGLE);
    call(argument);
    request(TOGGLE);
    request(DUMP);
}

/// Makes callgrind instrument what follows. What runs before, such as the import of a framework, is several times
/// faster.
#[unsafe(no_mangle)]
pub extern "C" fn truebridge_instrument() {
    request(INSTRUMENT);
}

/// `tb_borrow_api` of `truebridge_borrow.h`.
#[derive(Debug)]
#[repr(C)]
pub struct Borrows {
    abi: u32,
    borrow: unsafe extern "C" fn(*mut c_void, *mut Borrowed) -> c_int,
    end: unsafe extern "C" fn(*mut Borrowed),
}

/// Memory for a `tb_borrowed`.
#[repr(C)]
struct Borrowed([u64; 256]);

/// Borrows a tensor so often, as C code does, and returns how often that failed.
///
/// # Safety
///
/// The functions are those of the package, the object is alive, and the caller holds the GIL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn truebridge_borrowed(functions: &Borrows, object: *mut c_void, often: usize) -> usize {
    let mut borrowed = Borrowed([0; 256]);
    let borrow = |_: &usize| {
        // SAFETY: the caller's obligations; the borrowed is writable, and what was borrowed ends once.
        unsafe {
            let failed = (functions.borrow)(object, &mut borrowed) != 0;
            if !failed {
                (functions.end)(&mut borrowed);
            }
            failed
        }
    };
    (0..often).filter(borrow).count()
}

/// Sends valgrind a request. Does nothing without valgrind.
#[cfg(target_arch = "x86_64")]
fn request(number: u64) {
    let request = [number, 0, 0, 0, 0, 0];
    // SAFETY: the rotations add up to whole turns, and the exchange is of a register with itself, so that nothing
    // changes without valgrind. With it, the request is read and an answer is written to rdx (`valgrind.h`).
    unsafe {
        std::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            in("rax") request.as_ptr(),
            inout("rdx") 0_u64 => _,
            inout("rdi") 0_u64 => _,
        );
    }
}

/// Sends nothing: no sequence is known here.
#[cfg(not(target_arch = "x86_64"))]
fn request(_: u64) {}
