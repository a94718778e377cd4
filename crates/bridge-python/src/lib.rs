//! The Python package `truebridge`: a thin layer over the adapters and core's `transfer`.

mod borrow;
mod containers;
mod conversions;
mod convert;
mod copier;
mod copies;
mod debug;
mod device;
mod errors;
mod frameworks;
mod holders;
mod immutable;
mod jax;
mod lend;
mod names;
mod nvtx;
mod options;
mod ordering;
mod pairs;
mod plan;
mod pool;
mod processes;
mod progress;
mod publications;
mod pytrees;
mod remade;
mod stats;
mod streams;
mod tensorflow;
mod tensorflow1;
mod trace;
mod trees;

use pyo3::prelude::*;

// What relies on the GIL is listed in docs/design/adapters.md.
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    bridge_pyo3::refuse_subinterpreters(module.py())?;
    bridge_pyo3::watch_for_exit(module.py());
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("borrow", borrow::capsule(module.py())?)?;
    module.add("KEYWORDS", include_str!("docs/keywords.txt"))?;
    module.add("FRAMEWORKS", frameworks::every(module.py())?)?;
    module.add("ALIASES", frameworks::aliases(module.py())?)?;
    module.add_class::<plan::Plan>()?;
    convert::enter(module)?;
    plan::enter(module)?;
    module.add_function(wrap_pyfunction!(copies::copy, module)?)?;
    module.add_class::<copier::Copier>()?;
    module.add_function(wrap_pyfunction!(copier::copier, module)?)?;
    module.add_class::<bridge_frameworks::Loan>()?;
    module.add_function(wrap_pyfunction!(lend::lend, module)?)?;
    module.add_function(wrap_pyfunction!(lend::lend_together, module)?)?;
    module.add_function(wrap_pyfunction!(streams::record_stream, module)?)?;
    module.add_function(wrap_pyfunction!(frameworks::profile, module)?)?;
    module.add_class::<tensorflow::Feed>()?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_operations, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_feed, module)?)?;
    module.add_function(wrap_pyfunction!(tensorflow::tensorflow_take, module)?)?;
    jax::enter(module)?;
    module.add_class::<tensorflow1::Session>()?;
    module.add_class::<bridge_tensorflow::PyExternal>()?;
    module.add_function(wrap_pyfunction!(tensorflow1::tensorflow1_open, module)?)?;
    processes::enter(module)?;
    names::enter(module)?;
    publications::enter(module)?;
    trace::enter(module)?;
    debug::enter(module)?;
    module.add_function(wrap_pyfunction!(stats::stats, module)?)
}
