//! The keyword `progress` of calls that move tensors. `truebridge._progress` makes words of what is measured here.

use bridge_core::{Device, DeviceKind, Result};
use bridge_pyo3::{PyTensor, framework_error};
use pyo3::intern;
use pyo3::prelude::*;
use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long a move lasts before it is shown by default.
const PATIENCE: Duration = Duration::from_secs(1);

/// The time between two looks at a move. Each takes the GIL.
const PERIOD: Duration = Duration::from_millis(100);

/// Bytes of the shortest move that may last so long.
const LONG: usize = 64 << 20;

thread_local! {
    /// The moves of the call that this thread is in, if its caller has asked.
    static MOVES: RefCell<Option<Rc<Moves>>> = const { RefCell::new(None) };
}

/// The moves of one call.
struct Moves {
    /// `truebridge._progress.metered`, called for them, and its meter. By default there is none before [`PATIENCE`].
    shown: OnceCell<(Py<PyAny>, Py<PyAny>)>,
    /// What the caller's function raised.
    raised: Cell<Option<PyErr>>,
    /// When they began, and when they were last looked at.
    begun: Instant,
    told: Cell<Instant>,
    /// Bytes.
    done: Cell<usize>,
    total: Cell<usize>,
}

impl Moves {
    /// `total` bytes, as far as is known before they begin.
    fn new(total: usize) -> Self {
        let (shown, raised, begun) = (OnceCell::new(), Cell::new(None), Instant::now());
        Self { shown, raised, begun, told: Cell::new(begun), done: Cell::new(0), total: Cell::new(total) }
    }

    fn show(&self, py: Python<'_>, progress: Option<&PyTensor<'_>>) -> PyResult<()> {
        let ago = self.begun.elapsed().as_secs_f64();
        let module = py.import(intern!(py, "truebridge._progress"))?;
        let metered = module.call_method1(intern!(py, "of_moves"), (progress, ago))?;
        let meter = metered.call_method0(intern!(py, "__enter__"))?;
        let _ = self.shown.set((metered.unbind(), meter.unbind()));
        Ok(())
    }

    /// Tells how far they are, unless that was just done. `is_last` is for the end of a move.
    fn tell(&self, done: usize, is_last: bool) -> Result<()> {
        let is_hidden = self.shown.get().is_none() && (is_last || self.begun.elapsed() < PATIENCE);
        let is_early = self.told.get().elapsed() < PERIOD && done < self.total.get();
        if is_hidden || is_early {
            return Ok(());
        }
        self.told.set(Instant::now());
        // Moves that the caller's function makes are not of this call.
        let _around = Around::enter(None);
        Python::attach(|py| {
            let tell = || -> PyResult<()> {
                if self.shown.get().is_none() {
                    self.show(py, None)?;
                }
                let (_, meter) = self.shown.get().expect("it is shown");
                meter.call_method1(py, intern!(py, "tell"), (done, self.total.get())).map(drop)
            };
            tell().map_err(|raised| {
                self.raised.set(Some(raised.clone_ref(py)));
                framework_error(py, "progress", raised)
            })
        })
    }
}

/// The moves that this thread was in before.
struct Around(Option<Rc<Moves>>);

impl Around {
    fn enter(moves: Option<Rc<Moves>>) -> Self {
        Self(MOVES.replace(moves))
    }
}

impl Drop for Around {
    fn drop(&mut self) {
        MOVES.replace(self.0.take());
    }
}

impl Drop for Moves {
    fn drop(&mut self) {
        let Some((metered, _)) = self.shown.take() else { return };
        Python::attach(|py| {
            let none = py.None();
            // What shows them does not fail.
            let _ = metered.call_method1(py, intern!(py, "__exit__"), (&none, &none, &none));
        });
    }
}

/// Makes a move of `nbytes` bytes by `copy`, and tells how far it is.
///
/// # Errors
///
/// That of the copy, or of the caller's function, which ends it.
pub(crate) fn moved(nbytes: usize, copy: impl FnOnce() -> Result<()>) -> Result<()> {
    let moves = match MOVES.with_borrow(Option::clone) {
        Some(moves) => moves,
        None if nbytes >= LONG => Rc::new(Moves::new(nbytes)),
        None => return copy(),
    };
    let before = moves.done.get();
    moves.total.set(moves.total.get().max(before + nbytes));
    let told = Rc::clone(&moves);
    bridge_copy::ticking(Rc::new(move |done| told.tell(before + done.min(nbytes - 1), false)), copy)?;
    moves.done.set(before + nbytes);
    moves.tell(before + nbytes, true)
}

/// Returns whether elements move where they go from one of these devices to the other. There is one host.
pub(crate) fn moves(from: Device, to: Device) -> bool {
    let on_device = [from, to].iter().any(|side| side.kind == DeviceKind::CUDA);
    on_device && from != to
}

/// Says how many bytes this call is going to move. Where nobody asks, they are not counted.
pub(crate) fn expect(nbytes: impl FnOnce() -> usize) {
    if let Some(moves) = MOVES.with_borrow(Option::clone) {
        moves.total.set(nbytes());
    }
}

/// Calls `body`, whose moves are shown as the keyword says.
///
/// # Errors
///
/// Those of `body`; a value that the keyword cannot have; what the caller's function raised.
pub(crate) fn shown<R>(
    py: Python<'_>,
    progress: Option<&PyTensor<'_>>,
    body: impl FnOnce() -> PyResult<R>,
) -> PyResult<R> {
    let Some(progress) = progress else { return body() };
    let moves = Rc::new(Moves::new(0));
    moves.show(py, Some(progress))?;
    let around = Around::enter(Some(Rc::clone(&moves)));
    let done = body();
    drop(around);
    moves.raised.take().map_or(done, Err)
}
