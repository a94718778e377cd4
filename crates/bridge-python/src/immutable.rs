//! The warning for a writable view of memory that its framework never changes: once for each pair of frameworks.
//!
//! Only functions that users call make the warning, through [`Exposed`]. What the package converts itself goes by
//! [`crate::conversions::transfer`] or `_core.convert_inside`, which make none.

use crate::frameworks::Framework;
use bridge_core::{Adapter, Transfer};
use pyo3::intern;
use pyo3::prelude::*;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The pairs that this process was warned of: a bit each. Python does not run while it is locked.
static WARNED: Mutex<u128> = Mutex::new(0);

/// The targets of a source: the frameworks, and [`LOAN`].
const TARGETS: usize = 11;

/// The number of the target that stands for every consumer of a loan.
const LOAN: usize = TARGETS - 1;

const _: () = assert!(Framework::ALL.len() <= LOAN && Framework::ALL.len() * TARGETS <= u128::BITS as usize);

/// The pairs of one call whose results let the user write to immutable memory.
#[derive(Default)]
pub(crate) struct Exposed(Cell<u128>);

impl Exposed {
    /// Notes a transfer of immutable memory to a framework.
    #[cold]
    pub(crate) fn note<F, T>(&self, from: &dyn Adapter<Tensor = F>, to: &dyn Adapter<Tensor = T>) {
        let to = to.profile();
        if let Some(to) = number(&to.name).filter(|_| !to.keeps_read_only) {
            self.enter(&from.profile().name, to);
        }
    }

    /// Notes a transfer to a loan, whose consumers need not see that it is read-only.
    #[inline(always)]
    pub(crate) fn note_loan<F>(&self, from: &dyn Adapter<Tensor = F>, done: &Transfer) {
        if done.shares_immutable {
            self.enter(&from.profile().name, LOAN);
        }
    }

    /// Enters a pair. An object that is known by a protocol is immutable only as a loan, of which [`Self::note_loan`] has
    /// warned when it was made.
    fn enter(&self, from: &str, to: usize) {
        if let Some(from) = number(from) {
            self.0.set(self.0.get() | 1 << (from * TARGETS + to));
        }
    }

    /// Warns of the pairs that this process was not warned of.
    ///
    /// # Errors
    ///
    /// The warning itself where the program makes an error of it. It warns again then.
    #[inline(always)]
    pub(crate) fn warn(&self, py: Python<'_>) -> PyResult<()> {
        match self.0.get() {
            0 => Ok(()),
            pairs => warn(py, pairs),
        }
    }
}

/// Returns the number of the framework with this name.
fn number(name: &str) -> Option<usize> {
    Framework::ALL.iter().position(|known| known.name() == name)
}

fn warned() -> MutexGuard<'static, u128> {
    WARNED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
fn warn(py: Python<'_>, pairs: u128) -> PyResult<()> {
    let new = pairs & !*warned();
    if new == 0 {
        return Ok(());
    }
    let warn = py.import(intern!(py, "truebridge.diagnostics.immutable"))?.getattr(intern!(py, "warn"))?;
    for bit in (0..u128::BITS).filter(|bit| new & 1 << bit != 0) {
        let name = |number: usize| Framework::ALL.get(number).map(|known| known.name());
        let (from, to) = (bit as usize / TARGETS, bit as usize % TARGETS);
        warn.call1((name(from), name(to)))?;
        *warned() |= 1 << bit;
    }
    Ok(())
}
