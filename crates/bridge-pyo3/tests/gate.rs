//! Where owners are dropped, what becomes of exceptions, and who owns the tensor of a capsule.

mod fake;

use bridge_core::dlpack::{Origin, describe};
use bridge_core::{DType, Device, ErrorKind, Layout};
use bridge_pyo3::interpreter::{
    AnyManaged, Guarded, close, drop_deferred, drop_guarded, drop_inside, enter, new_capsule, open, take_capsule,
    with_gil,
};
use fake::{Capsule, FUNCTIONS, UNRAISABLE, hold, holds, is_known, know, let_go, pending, raise};
use std::ffi::c_void;
use std::ptr::{dangling_mut, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

/// Owners dropped on the test's thread, and on others.
static DROPPED: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// An owner whose deleter may raise or panic.
#[derive(Default)]
struct Owner {
    raises: bool,
    panics: bool,
}

impl Drop for Owner {
    fn drop(&mut self) {
        DROPPED[usize::from(!is_known())].fetch_add(1, SeqCst);
        if self.raises {
            raise(dangling_mut());
        }
        assert!(!self.panics, "on purpose");
    }
}

fn dropped() -> [usize; 2] {
    DROPPED.each_ref().map(|count| count.load(SeqCst))
}

fn comes_to(expected: [usize; 2]) {
    let begun = Instant::now();
    while dropped() != expected && begun.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(dropped(), expected);
}

fn elsewhere(body: impl FnOnce() + Send) {
    thread::scope(|scope| scope.spawn(body).join().unwrap());
}

fn managed(owner: Owner) -> AnyManaged {
    static NUMBERS: [f32; 4] = [0.0; 4];
    let layout = Layout::new(DType::FLOAT32, &[4], None, 0).unwrap();
    let data = NUMBERS.as_ptr().addr();
    // SAFETY: the memory is static and read-only.
    let managed = unsafe { describe(DType::FLOAT32, &layout, Device::CPU, data, true, Arc::new(owner)) };
    AnyManaged::Versioned(managed.into_raw())
}

fn origin(_: Device, _: usize) -> bridge_core::Result<Origin> {
    Ok(Origin::host())
}

/// One test, because an interpreter is opened and closed once.
#[test]
fn owners_capsules_and_exceptions() {
    know();

    // Without an interpreter.
    drop_guarded(Box::new(Owner::default()));
    drop(Guarded::new(Owner::default()));
    assert_eq!(dropped(), [2, 0]);
    assert_eq!(with_gil(|| ()), None);
    let mut other = Capsule::named(c"other");
    // SAFETY: no interpreter reads the object.
    assert_eq!(unsafe { take_capsule(other.object()) }.unwrap_err().kind(), ErrorKind::Argument);

    // SAFETY: the functions do what their names say.
    unsafe { open(FUNCTIONS) };

    // A pending exception.
    let exception: *mut c_void = dangling_mut();
    raise(exception);
    assert_eq!(with_gil(|| (holds(), pending())), Some((true, null_mut())));
    assert_eq!(enter(|| (holds(), pending())), Some((true, exception)));
    drop_guarded(Box::new(Owner { raises: true, panics: false }));
    assert_eq!((pending(), UNRAISABLE.load(SeqCst)), (exception, 1));
    raise(null_mut());
    assert!(!holds());

    // With the GIL, and without it on a thread that Python knows: at once.
    hold();
    drop(Guarded::new(Owner::default()));
    let_go();
    drop(Guarded::new(Owner::default()));
    assert_eq!(dropped(), [5, 0]);

    // On a thread that Python does not know: by the next `drop_deferred`, or by the thread of the library, inside of
    // what the program says.
    static AROUND: AtomicUsize = AtomicUsize::new(0);
    drop_inside(|all| {
        all();
        AROUND.fetch_add(1, SeqCst);
    });
    hold();
    let drop_two = || {
        drop(Guarded::new(Owner::default()));
        drop_guarded(Box::new(Owner::default()));
        drop_deferred();
    };
    elsewhere(drop_two);
    assert_eq!(dropped(), [5, 0]);
    drop_deferred();
    assert_eq!(dropped(), [7, 0]);
    assert_ne!(AROUND.load(SeqCst), 0);
    elsewhere(drop_two);
    let_go();
    comes_to([7, 2]);

    // A panic in an owner does not end that thread.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    elsewhere(|| drop_guarded(Box::new(Owner { raises: false, panics: true })));
    comes_to([7, 3]);
    std::panic::set_hook(hook);
    elsewhere(drop_two);
    comes_to([7, 5]);

    // A capsule owns its tensor until a consumer has taken it.
    hold();
    // SAFETY: the GIL is held; every capsule is destroyed once, as Python does it.
    unsafe {
        let destroy = |object: *mut c_void| {
            let destructor = (*object.cast::<Capsule>()).destructor.unwrap();
            destructor(object);
            *Box::from_raw(object.cast::<Capsule>())
        };
        let object = new_capsule(managed(Owner::default())).unwrap();
        assert_eq!(destroy(object).name(), "dltensor_versioned");
        assert_eq!(dropped(), [8, 5]);

        let object = new_capsule(managed(Owner::default())).unwrap();
        let exported = take_capsule(object).unwrap().export(origin).unwrap();
        assert_eq!(take_capsule(object).unwrap_err().kind(), ErrorKind::Consumed);
        assert_eq!(destroy(object).name(), "used_dltensor_versioned");
        assert_eq!(dropped(), [8, 5]);
        drop(exported);
        assert_eq!(dropped(), [9, 5]);
        assert_eq!(take_capsule(other.object()).unwrap_err().kind(), ErrorKind::NotATensor);
    }

    // Closing drops what is deferred, unless the thread of the library has just done it.
    elsewhere(drop_two);
    assert_eq!(dropped(), [9, 5]);
    let_go();
    close();
    let [here, there] = dropped();
    assert_eq!(here + there, 16);

    // After it, `drop_guarded` drops on threads that Python knows. Everything else is leaked.
    assert_eq!(with_gil(|| ()), None);
    hold();
    drop(Guarded::new(Owner::default()));
    drop_guarded(Box::new(Owner::default()));
    assert_eq!(dropped(), [here + 1, there]);
    elsewhere(drop_two);
    let_go();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(dropped(), [here + 1, there]);
}
