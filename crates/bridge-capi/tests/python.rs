//! Where owners are released in a process with an interpreter.

#[path = "../../bridge-pyo3/tests/fake/mod.rs"]
#[allow(dead_code, reason = "the tests of bridge-pyo3 use the rest")]
mod fake;

use bridge_capi as _;
use bridge_pyo3::interpreter::Functions;
use fake::{CAME, Capsule, FUNCTIONS, hold, holds, is_known, know, let_go};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

#[repr(C)]
struct Memory {
    size: usize,
    data: *const f32,
    shape: *const i64,
    strides: *const i64,
    ndim: i32,
    read_only: i32,
    dtype: [u8; 4],
    device: [i32; 2],
    stream: u64,
    release: unsafe extern "C" fn(*mut c_void),
    owner: *mut c_void,
}

unsafe extern "C" {
    fn tb_python_open(python: *const Functions) -> i32;
    fn tb_python_close() -> i32;
    fn tb_python_tensor(capsule: *mut c_void, out: *mut *mut c_void) -> i32;
    fn tb_tensor_memory(memory: *const Memory, out: *mut *mut c_void) -> i32;
    fn tb_tensor_drop(tensor: *mut c_void);
    fn tb_status_name(status: i32) -> *const c_char;

    fn fork() -> c_int;
    fn waitpid(child: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
}

/// How often owners were released, on the test's thread and on others.
static RELEASED: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

unsafe extern "C" fn count(_: *mut c_void) {
    assert!(holds(), "owners are released with the GIL");
    RELEASED[usize::from(!is_known())].fetch_add(1, SeqCst);
}

fn released() -> [usize; 2] {
    RELEASED.each_ref().map(|count| count.load(SeqCst))
}

fn comes_to(expected: [usize; 2]) {
    let begun = Instant::now();
    while released() != expected && begun.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(released(), expected);
}

fn tensor() -> *mut c_void {
    static NUMBERS: [f32; 4] = [0.0; 4];
    let (shape, mut out) = (4, null_mut());
    let memory = Memory {
        size: size_of::<Memory>(),
        data: NUMBERS.as_ptr(),
        shape: &shape,
        strides: null(),
        ndim: 1,
        read_only: 1,
        dtype: [2, 32, 1, 0],
        device: [1, 0],
        stream: 0,
        release: count,
        owner: null_mut(),
    };
    // SAFETY: the memory is static, and described as the header says.
    assert_eq!(unsafe { tb_tensor_memory(&memory, &mut out) }, 0);
    out
}

fn word(status: i32) -> &'static str {
    // SAFETY: the library returns static C strings for its statuses.
    unsafe { CStr::from_ptr(tb_status_name(status)) }.to_str().unwrap()
}

/// One test, because an interpreter is opened and closed once.
#[test]
fn owners_are_released_with_the_gil_or_not_at_all() {
    know();
    // SAFETY: the functions do what their names say; tensors are dropped once.
    unsafe {
        for missing in 0..size_of::<Functions>() / size_of::<usize>() {
            let mut functions = MaybeUninit::new(FUNCTIONS);
            functions.as_mut_ptr().cast::<usize>().add(missing).write(0);
            assert_eq!(word(tb_python_open(functions.as_ptr())), "argument");
        }
        assert_eq!(tb_python_open(&FUNCTIONS), 0);
        assert_eq!(tb_python_open(&FUNCTIONS), 0, "the second time means nothing");

        // With the GIL, at once and here.
        hold();
        tb_tensor_drop(tensor());
        assert_eq!(released(), [1, 0]);

        // On a thread that Python does not know: elsewhere, and not before the GIL is free.
        let waiting = [tensor(), tensor()].map(|tensor| tensor.addr());
        thread::scope(|scope| {
            let drop = || waiting.map(|tensor| tb_tensor_drop(tensor as *mut c_void));
            scope.spawn(drop).join().unwrap();
        });
        assert_eq!(released(), [1, 0]);
        let_go();
        comes_to([1, 2]);

        // Capsules without a tensor, consumed ones, and one of another name.
        hold();
        let mut out = null_mut();
        for (name, kind) in [
            (c"dltensor", "protocol"),
            (c"used_dltensor", "consumed"),
            (c"dltensor_versioned", "protocol"),
            (c"used_dltensor_versioned", "consumed"),
            (c"other", "not_a_tensor"),
        ] {
            let mut capsule = Capsule::named(name);
            assert_eq!(word(tb_python_tensor(capsule.object(), &mut out)), kind);
            let used = capsule.name().starts_with("used_");
            assert_eq!(used, kind != "not_a_tensor", "{name:?}");
        }
        assert_eq!(word(tb_python_tensor(null_mut(), &mut out)), "argument");

        // A child that is forked while another thread waits for the GIL does not wait for that thread.
        let came = CAME.load(SeqCst);
        let waiting = tensor().addr();
        thread::spawn(move || tb_tensor_drop(waiting as *mut c_void)).join().unwrap();
        while CAME.load(SeqCst) == came {
            thread::sleep(Duration::from_millis(1));
        }
        let child = fork();
        if child == 0 {
            let begun = Instant::now();
            tb_python_close();
            _exit(c_int::from(begun.elapsed() > Duration::from_millis(500)));
        }
        let mut status = -1;
        assert_eq!(waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0, "the child has waited for a thread of its parent");
        let_go();
        comes_to([1, 3]);
        hold();

        // Once the interpreter is closed, not at all.
        let last = tensor();
        let_go();
        assert_eq!(tb_python_close(), 0);
        hold();
        tb_tensor_drop(last);
        let_go();
        tb_tensor_drop(tensor());
        thread::sleep(Duration::from_millis(50));
        assert_eq!(released(), [1, 3]);
    }
}
