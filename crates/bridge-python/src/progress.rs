//! The keyword `progress` of calls that move tensors. The module `truebridge.diagnostics.progress` formats what is
//! measured here.

use bridge_core::{Device, DeviceKind, Result};
use bridge_pyo3::{PyTensor, framework_error};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBool;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long a move lasts before it is shown by default.
const PATIENCE: Duration = Duration::from_secs(1);

/// The time between two looks at a move. Each takes the GIL.
const PERIOD: Duration = Duration::from_millis(100);

/// Bytes of the shortest move that may last so long.
const LONG: usize = 64 << 20;

thread_local! {
    /// The moves of the call with `progress=` that this thread is in.
    static MOVES: RefCell<Option<Rc<Moves>>> = const { RefCell::new(None) };
}

/// The moves of one call.
struct Moves {
    /// Whether nothing is to be shown.
    is_silent: bool,
    /// `metered` of that module, called for them, and its meter. By default there is none before [`PATIENCE`].
    shown: RefCell<Option<(Py<PyAny>, Py<PyAny>)>>,
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
    fn new(is_silent: bool) -> Self {
        let begun = Instant::now();
        Self {
            is_silent,
            shown: RefCell::new(None),
            raised: Cell::new(None),
            begun,
            told: Cell::new(begun),
            done: Cell::new(0),
            total: Cell::new(0),
        }
    }

    /// Begins to show them. Returns the meter.
    fn show(&self, py: Python<'_>, progress: Option<&PyTensor<'_>>) -> PyResult<Py<PyAny>> {
        let ago = self.begun.elapsed().as_secs_f64();
        let module = py.import(intern!(py, "truebridge.diagnostics.progress"))?;
        let metered = module.call_method1(intern!(py, "of_moves"), (progress, ago))?;
        let meter = metered.call_method0(intern!(py, "__enter__"))?.unbind();
        self.shown.replace(Some((metered.unbind(), meter.clone_ref(py))));
        Ok(meter)
    }

    /// Ends what shows them. Python's code may be interrupted there as anywhere.
    fn close(&self) -> PyResult<()> {
        let Some((metered, _)) = self.shown.take() else { return Ok(()) };
        Python::attach(|py| {
            let none = py.None();
            metered.call_method1(py, intern!(py, "__exit__"), (&none, &none, &none)).map(drop)
        })
    }

    /// Tells how far they are, unless that was just done. `is_last` is for the end of a move.
    fn tell(&self, done: usize, is_last: bool) -> Result<()> {
        let is_hidden = self.shown.borrow().is_none() && (is_last || self.begun.elapsed() < PATIENCE);
        let is_early = self.told.get().elapsed() < PERIOD && done < self.total.get();
        if self.is_silent || is_hidden || is_early {
            return Ok(());
        }
        self.told.set(Instant::now());
        // Moves that the caller's function makes are not of this call.
        let _around = Around::enter(None);
        Python::attach(|py| {
            let tell = || -> PyResult<()> {
                let meter = self.shown.borrow().as_ref().map(|(_, meter)| meter.clone_ref(py));
                let meter = meter.map_or_else(|| self.show(py, None), Ok)?;
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

/// Makes a move of `nbytes` bytes by `copy`, and tells how far it is.
///
/// # Errors
///
/// That of the copy, or what Python raised meanwhile, such as the caller's function. The move is then ended.
pub(crate) fn moved(nbytes: usize, copy: impl FnOnce() -> Result<()>) -> Result<()> {
    if let Some(moves) = MOVES.with_borrow(Option::clone) {
        return moved_among(&moves, nbytes, copy);
    }
    if nbytes < LONG {
        return copy();
    }
    let moves = Rc::new(Moves::new(false));
    let moved = moved_among(&moves, nbytes, copy);
    let closed = moves.close().map_err(|raised| Python::attach(|py| framework_error(py, "progress", raised)));
    closed.and(moved)
}

fn moved_among(moves: &Rc<Moves>, nbytes: usize, copy: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = moves.done.get();
    moves.total.set(moves.total.get().max(before + nbytes));
    let told = Rc::clone(moves);
    bridge_cuda::ticking(Rc::new(move |done| told.tell(before + done.min(nbytes - 1), false)), copy)?;
    moves.done.set(before + nbytes);
    moves.tell(before + nbytes, true)
}

/// Returns whether elements move where they go from one of these devices to the other. There is one host.
pub(crate) fn moves(from: Device, to: Device) -> bool {
    let on_device = [from, to].iter().any(|side| side.kind == DeviceKind::CUDA);
    on_device && from != to
}

/// Sets how many bytes this call is going to move. Counts them only in a call with `progress=`.
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
    let shown = Shown::begin(py, progress)?;
    shown.end(body())
}

/// The progress of one call, from its begin to its end.
pub(crate) struct Shown {
    moves: Rc<Moves>,
    around: Around,
}

impl Shown {
    /// Shows the moves of this thread from now on, as the keyword asks.
    ///
    /// # Errors
    ///
    /// What the caller's function raises.
    pub(crate) fn begin(py: Python<'_>, progress: &PyTensor<'_>) -> PyResult<Self> {
        let is_silent = progress.cast::<PyBool>().is_ok_and(|shown| !shown.is_true());
        let moves = Rc::new(Moves::new(is_silent));
        if !is_silent {
            moves.show(py, Some(progress))?;
        }
        Ok(Self { around: Around::enter(Some(Rc::clone(&moves))), moves })
    }

    /// Returns what the call has done, or what the caller's function has raised.
    pub(crate) fn end<R>(self, done: PyResult<R>) -> PyResult<R> {
        let Self { moves, around } = self;
        drop(around);
        let closed = moves.close();
        moves.raised.take().map_or(closed, Err).and(done)
    }
}
